"""Learner: forward and backward of low-bit layers against plain `nn.Linear` under bf16 autocast.

Claim: at hidden 1024 and 4k tokens the W4A16 learner costs at most 1.10x the time of a bf16 learner with float32
master weights, and at most 0.6 byte per weight of extra memory.

"cached" is one forward and backward whose quantized values exist already, as in every micro-batch after the first.
"step, n" is what an optimizer step pays: quantize once, then n forwards and backwards, the first of which also makes
what a kernel keeps beside the quantized values. Extra memory is what stays alive between steps (quantized values,
scales, a kernel's own layout); what autograd keeps for one backward is given beside that of the plain layer, which
keeps a bf16 copy of each weight under autocast.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from typing import Any

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qarl_trl.quant import apply_quantization, low_bit_store, quantized_modules
from qarl_trl.rollout.engine_gemm import GEMMS


BASE = "bf16"
# Of each arm: its scheme and quant_kernel.
ARMS = {
    BASE: None,
    "W4A16 dequant": ("W4A16", "dequant"),
    "W4A16 engine": ("W4A16", "engine"),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", "auto"),
}
# The goals are for these.
AIMED = ("W4A16 dequant", "W4A16 engine")
GOAL_TIME = 1.10
GOAL_BYTES = 0.6


# Models -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A Qwen-like decoder layer: grouped-query attention and a gated MLP, with norms and a float32 residual."""

    def __init__(self, hidden: int, inner: int, head: int = 64) -> None:
        super().__init__()
        self.heads = hidden // head
        self.kv_heads = hidden // head // 2
        self.head = head

        self.q = nn.Linear(hidden, hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, self.kv_heads * head, bias=False)
        self.v = nn.Linear(hidden, self.kv_heads * head, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])

    def forward(self, x: Tensor) -> Tensor:
        """`x` and what comes of it are `(batch, tokens, hidden)`."""
        normed = self.norms[0](x)
        q = self._in_heads(self.q(normed))
        k = self._in_heads(self.k(normed))
        v = self._in_heads(self.v(normed))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))

        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _in_heads(self, x: Tensor) -> Tensor:
        """`(batch, tokens, heads * head)` as `(batch, heads, tokens, head)`."""
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class Arm:
    """
    One copy of the model in one scheme.

    Args:
        model: Copied.
        x: Its input, `(batch, tokens, hidden)`.
        grad: The gradient of its output, `(batch, tokens, hidden)`.
        name: One of `ARMS`.
    """

    def __init__(self, model: nn.Module, x: Tensor, grad: Tensor, name: str) -> None:
        self.model = copy.deepcopy(model)
        self.x = x
        self.grad = grad
        settings = ARMS[name]
        if settings is not None:
            scheme, kernel = settings
            apply_quantization(self.model, scheme, ignore=(), gemm=GEMMS[kernel])
            # By `forget_quantized`.
            low_bit_store(self.model).will_be_told()
        self.layers = [module for _, module in quantized_modules(self.model)]

    # What is done ----------------------------------------------------------------------------------------------------

    def forget_quantized(self) -> None:
        """Do as an optimizer step does: the next use of each layer quantizes it."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0)
                parameter.grad = None
        if self.layers:
            low_bit_store(self.model).weights_changed()

    def quantize(self) -> None:
        """Quantize every layer whose quantized values are not there."""
        for layer in self.layers:
            layer.low_bit()

    def pass_once(self) -> None:
        """Run one forward and backward."""
        x = self.x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.model(x)
        y.backward(self.grad.to(y.dtype))

    # What is timed ---------------------------------------------------------------------------------------------------

    def cached(self) -> None:
        """Run a forward and backward whose quantized values exist already."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self.pass_once()

    def first(self) -> float:
        """Seconds of the first forward and backward after an optimizer step, quantization included."""
        self.forget_quantized()
        start = time.perf_counter()
        self.pass_once()
        return time.perf_counter() - start

    def requantize(self) -> float:
        """Seconds of quantizing every layer."""
        self.forget_quantized()
        start = time.perf_counter()
        self.quantize()
        return time.perf_counter() - start

    # What is kept ----------------------------------------------------------------------------------------------------

    def alive(self) -> dict[str, float]:
        """Bytes per weight of a quantized arm that its values, and a kernel's layout of them, take between steps."""
        weights = sum(layer.weight.numel() for layer in self.layers)
        quantized = 0
        prepared = 0
        for weight in low_bit_store(self.model).kept().values():
            quantized += sum(tensor.nbytes for tensor in weight.tensors.values())
            prepared += _bytes_within(weight.prepared)
        return {"quantized": quantized / weights, "prepared": prepared / weights}

    def saved_for_backward(self) -> int:
        """Bytes that autograd keeps for one backward, without the parameters themselves."""
        known = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        known.add(self.x.untyped_storage().data_ptr())
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            return tensor

        x = self.x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), torch.autocast("cpu", torch.bfloat16):
            y = self.model(x)
            # While `y` keeps every tensor alive, so that no address is used twice.
            size = sum(kept.values())
        del y
        return size


def _bytes_within(value: object) -> int:
    """Bytes of all tensors in a kernel's layout: a tensor, or a dictionary or an object that has some."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes_within(item) for item in value.values())
    if hasattr(value, "__dict__"):
        return _bytes_within(vars(value))
    return 0


# Measurements -------------------------------------------------------------------------------------------------------


def measure_times(arms: dict[str, Arm], rounds: int) -> dict[str, common.Times]:
    """Seconds of each arm in each round: `cached` and `first` passes, and `quantize`."""
    passes: dict[str, Any] = {}
    for name, arm in arms.items():
        passes[f"{name}, cached"] = arm.cached
    for name, arm in arms.items():
        passes[f"{name}, first"] = arm.first
    times = common.interleave(passes, rounds)

    return {
        "cached": {name: times[f"{name}, cached"] for name in arms},
        "first": {name: times[f"{name}, first"] for name in arms},
        "quantize": common.interleave({name: arm.requantize for name, arm in arms.items()}, rounds),
    }


def step_times(times: dict[str, common.Times], passes: int) -> common.Times:
    """
    Seconds of the passes of an optimizer step, of each arm in each round.

    Args:
        times: What `measure_times` returned.
        passes: Number of micro-batches. Those after the first find the quantized values made.
    """
    steps: common.Times = {}
    for name, first in times["first"].items():
        cached = times["cached"][name]
        steps[name] = [once + (passes - 1) * later for once, later in zip(first, cached, strict=True)]
    return steps


def ratios_of(name: str, times: dict[str, common.Times]) -> dict[str, float]:
    """The columns of a quantized arm that are ratios of times to those of the base, which has the same rounds."""
    cached = times["cached"]
    quantize = zip(times["quantize"][name], cached[BASE], strict=True)
    return {
        "cached": common.ratio(cached, name, BASE)["ratio"],
        "step, 1": common.ratio(step_times(times, 1), name, BASE)["ratio"],
        "step, 4": common.ratio(step_times(times, 4), name, BASE)["ratio"],
        "quantize/pass": statistics.median(seconds / of_pass for seconds, of_pass in quantize),
    }


def memory_of(arm: Arm, base_saved: int) -> dict[str, float]:
    """
    The columns of a quantized arm about memory.

    Args:
        arm: The arm.
        base_saved: Bytes that autograd keeps for a backward of the base.
    """
    weights = sum(module.weight.numel() for module in arm.layers)
    saved = arm.saved_for_backward()
    # After a forward, so with the layout that the kernel made.
    alive = arm.alive()
    return {
        "byte/weight": alive["quantized"] + alive["prepared"],
        "of it quantized values": alive["quantized"],
        "saved for backward": saved / base_saved,
        "saved, byte/weight": (saved - base_saved) / weights,
    }


def measure(
    label: str, model: nn.Module, x: Tensor, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, common.Times]]:
    """
    Measure all arms of one model.

    Args:
        label: Its name in the table.
        model: The unquantized model.
        x: Its input, `(batch, tokens, hidden)`.
        rounds: Repetitions.

    Returns:
        The lines of the quantized arms, and what `measure_times` returned.
    """
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        grad = torch.randn(model(x).shape)
    arms = {name: Arm(model, x, grad, name) for name in ARMS}
    times = measure_times(arms, rounds)

    base_saved = arms[BASE].saved_for_backward()
    rows = []
    for name in list(ARMS)[1:]:
        against = common.ratio(times["cached"], name, BASE)
        rows.append(
            {
                "model": label,
                "arm": name,
                **ratios_of(name, times),
                **memory_of(arms[name], base_saved),
                "seconds": against["seconds"],
                "bf16 seconds": against["base_seconds"],
            }
        )
    return rows, times


def headline_of(row: dict[str, Any]) -> str:
    """What one arm of one model costs."""
    time_verdict = ""
    bytes_verdict = ""
    if row["arm"] in AIMED:
        time_verdict = common.verdict(row["cached"], GOAL_TIME)
        bytes_verdict = common.verdict(row["byte/weight"], GOAL_BYTES)

    return (
        f"{row['model']}, {row['arm']} / bf16: cached {row['cached']:.2f}x, with quantization "
        f"{row['step, 1']:.2f}x (1 forward a step), {row['step, 4']:.2f}x (4) "
        f"{time_verdict}; {row['byte/weight']:.2f} byte/weight {bytes_verdict}"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(1024, 1024, "model width"),
        inner=(2816, 1024, "width of the MLP"),
        tokens=(4096, 256, "tokens of a forward"),
        sequence=(512, 128, "tokens of a sequence"),
        rounds=(15, 3, "repetitions for the linear layer; a third of it for the block"),
    )
    load = os.getloadavg()[0]

    torch.manual_seed(0)
    x = torch.randn(args.tokens // args.sequence, args.sequence, args.hidden)
    linear = nn.Linear(args.hidden, args.hidden, bias=False)
    block = Block(args.hidden, args.inner)

    # A layer in a model gets bf16 activations from its neighbours, the block a float32 residual.
    rows, linear_times = measure("linear", linear, x.bfloat16(), args.rounds)
    block_rows, block_times = measure("block", block, x, max(args.rounds // 3, 2))
    rows += block_rows

    headlines = [headline_of(row) for row in rows]
    times = {"linear": linear_times, "block": block_times}
    common.report("bench_learner", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
