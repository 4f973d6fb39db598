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

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qarl_trl.quant import apply_quantization, low_bit_store, quantized_modules
from qarl_trl.rollout.engine_gemm import GEMMS


BASE = "bf16"
ARMS = {  # name: (scheme, quant_kernel)
    BASE: None,
    "W4A16 dequant": ("W4A16", "dequant"),
    "W4A16 engine": ("W4A16", "engine"),
    "FP8_DYNAMIC": ("FP8_DYNAMIC", "auto"),
}
GOAL_TIME, GOAL_BYTES = 1.10, 0.6


class Block(nn.Module):
    """A Qwen-like decoder layer: grouped-query attention and a gated MLP, with norms and a float32 residual."""

    def __init__(self, hidden: int, inner: int, head: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = hidden // head, hidden // head // 2, head
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, self.kv_heads * head, bias=False)
        self.v = nn.Linear(hidden, self.kv_heads * head, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )  # (batch, heads, tokens, head)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Arm:
    """One copy of the model in one scheme."""

    def __init__(self, model: nn.Module, x: Tensor, grad: Tensor, name: str) -> None:
        self.model, self.x, self.grad = copy.deepcopy(model), x, grad
        if ARMS[name] is not None:
            scheme, kernel = ARMS[name]
            apply_quantization(self.model, scheme, ignore=(), gemm=GEMMS[kernel])
            low_bit_store(self.model).will_be_told()  # by `forget_quantized`
        self.layers = [module for _, module in quantized_modules(self.model)]

    def forget_quantized(self) -> None:
        """As an optimizer step does: the next use of each layer quantizes it."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(0)
                p.grad = None
        if self.layers:
            low_bit_store(self.model).weights_changed()

    def quantize(self) -> None:
        for layer in self.layers:
            layer.low_bit()

    def pass_once(self) -> None:
        x = self.x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.model(x)
        y.backward(self.grad.to(y.dtype))

    def cached(self) -> None:
        for p in self.model.parameters():
            p.grad = None
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

    def alive(self) -> dict[str, float]:
        """Bytes per weight that the quantized values, and a kernel's layout of them, take between steps."""
        weights = sum(layer.weight.numel() for layer in self.layers)
        quantized = sum(
            sum(t.nbytes for t in weight.tensors.values()) for weight in low_bit_store(self.model).kept().values()
        )
        prepared = sum(_bytes_within(weight.prepared) for weight in low_bit_store(self.model).kept().values())
        return (
            {"quantized": quantized / weights, "prepared": prepared / weights}
            if weights
            else {"quantized": 0, "prepared": 0}
        )

    def saved_for_backward(self) -> int:
        """Bytes that autograd keeps for one backward, without the parameters themselves."""
        known = {p.untyped_storage().data_ptr() for p in self.model.parameters()} | {
            self.x.untyped_storage().data_ptr()
        }
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        x = self.x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            y = self.model(x)
            size = sum(kept.values())  # while `y` keeps every tensor alive, so that no address is used twice
        del y
        return size


def _bytes_within(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes_within(v) for v in value.values())
    return _bytes_within(vars(value)) if hasattr(value, "__dict__") else 0


def measure(label: str, model: nn.Module, x: Tensor, rounds: int) -> tuple[list[dict], dict]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        grad = torch.randn(model(x).shape)
    arms = {name: Arm(model, x, grad, name) for name in ARMS}
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))

    times = common.interleave(
        {f"{name}, cached": arm.cached for name, arm in arms.items()}
        | {f"{name}, first": (lambda arm=arm: arm.first()) for name, arm in arms.items()},
        rounds,
    )
    cached = {name: times[f"{name}, cached"] for name in ARMS}
    first = {name: times[f"{name}, first"] for name in ARMS}
    # The micro-batches after the first find the quantized values made: n of them are one first and n - 1 cached ones.
    step = {n: {a: [f + (n - 1) * c for f, c in zip(first[a], cached[a], strict=True)] for a in ARMS} for n in (1, 4)}
    quantize = common.interleave({name: arm.requantize for name, arm in arms.items()}, rounds)

    base_saved = arms[BASE].saved_for_backward()
    rows = []
    for name in list(ARMS)[1:]:
        against = common.ratio(cached, name, BASE)
        saved = arms[name].saved_for_backward()
        alive = arms[name].alive()  # after a forward, so with the layout that the kernel made
        rows.append(
            {
                "model": label,
                "arm": name,
                "cached": against["ratio"],
                "step, 1": common.ratio(step[1], name, BASE)["ratio"],
                "step, 4": common.ratio(step[4], name, BASE)["ratio"],
                "quantize/pass": statistics.median(q / b for q, b in zip(quantize[name], cached[BASE], strict=True)),
                "byte/weight": alive["quantized"] + alive["prepared"],
                "of it quantized values": alive["quantized"],
                "saved for backward": saved / base_saved,
                "saved, byte/weight": (saved - base_saved) / weights,
                "seconds": against["seconds"],
                "bf16 seconds": against["base_seconds"],
            }
        )
    return rows, {"cached": cached, "first": first, "quantize": quantize}


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
    rows, times = [], {}
    for label, model in {
        "linear": nn.Linear(args.hidden, args.hidden, bias=False),
        "block": Block(args.hidden, args.inner),
    }.items():
        rounds = args.rounds if label == "linear" else max(args.rounds // 3, 2)
        # A layer in a model gets bf16 activations from its neighbours, the block a float32 residual.
        more, times[label] = measure(label, model, x.bfloat16() if label == "linear" else x, rounds)
        rows += more
    headlines = []
    for row in rows:
        goals = row["arm"] in ("W4A16 dequant", "W4A16 engine")
        headlines.append(
            f"{row['model']}, {row['arm']} / bf16: cached {row['cached']:.2f}x, with quantization "
            f"{row['step, 1']:.2f}x (1 forward a step), {row['step, 4']:.2f}x (4) "
            f"{common.verdict(row['cached'], GOAL_TIME) if goals else ''}; {row['byte/weight']:.2f} byte/weight "
            f"{common.verdict(row['byte/weight'], GOAL_BYTES) if goals else ''}"
        )
    common.report("bench_learner", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
