"""Quantizer: `quantize_weight` against compressed-tensors' observer and compressor, and against a copy of the same traffic.

Claim: the same bytes, at least 5 times faster than compressed-tensors, and at most 3 times a plain copy that reads and
writes as many bytes. Back, with the same bytes too, at most 1.2 times a copy of the bfloat16 matrix. The tensors are compared
before any ratio is printed.

Both start from a bfloat16 weight and end with the tensors of the checkpoint. "float32" is ours from a float32 master, "plain"
ours without compiled kernels, as it is where numba is missing. The copy moves half of the bytes that the quantizer reads and
writes (the weight, and every stored tensor) from one buffer to another that exists already. Back, every side writes to memory
of its own, as a layer does. Bytes moved back per weight are those of the tensors that each operation reads and writes; the
kernel reads quantized values and scales and writes the matrix once. Last, activations, there and back, in bfloat16: each kernel against
the plain operations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


FASTER = 5.0
COPY = 3.0
COPY_BACK = 1.2


def theirs(weight: Tensor, scheme: Any) -> dict[str, Tensor]:
    """compressed-tensors: minimum and maximum as llm-compressor observes them, scales, compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = scheme.weights
    if args.block_structure is not None:
        height, width = args.block_structure
        blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(-2)
    else:
        blocks = weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))
    low, high = blocks.amin(-1), blocks.amax(-1)
    tensors = {"weight": weight}
    if args.strategy == "tensor_group":
        tensors["weight_global_scale"] = generate_gparam(low.amin().reshape(1), high.amax().reshape(1))
    scale, zero_point = calculate_qparams(low, high, args, tensors.get("weight_global_scale"))
    tensors |= {"weight_scale": scale, "weight_zero_point": zero_point}
    return BaseCompressor.get_value_from_registry(scheme.format.value).compress(tensors, scheme)


def plain(function: Callable[..., Any], *args: Any) -> Any:
    """Ours with torch's operations alone."""
    from qarl_trl.quant import fast

    chosen, fast._compiled = fast._compiled, lambda device_type: None
    try:
        return function(*args)
    finally:
        fast._compiled = chosen


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def as_bytes(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(as_bytes(a[name]), as_bytes(b[name])) for name in a)


class Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that operations read and write; views move none."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        reads = not func.is_view and func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.empty_strided)
        if reads:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in tensors)
        return result


def activations(args: Any, times: dict[str, common.Times]) -> list[str]:
    """Each quantizer of activations with and without its kernel, and back: lines to print, and their times."""
    from qarl_trl.quant.gemm import CpuInt4Int8Gemm, Fp8BlockGemm, Fp8Gemm, Int8Gemm, restored

    lines = []

    def compare(name: str, function: Callable[..., Any], *given: Any) -> None:
        arms = {"kernel": lambda: function(*given), "plain": lambda: plain(function, *given)}
        times[name] = common.interleave(arms, args.rounds)
        found = common.ratio(times[name], "kernel", "plain")
        lines.append(
            f"{name}: {found['ratio']:.3f}x the time of the plain operations, {1e3 * found['seconds']:.2f} ms"
        )

    for gemm in (Fp8Gemm, Fp8BlockGemm, Int8Gemm, CpuInt4Int8Gemm):
        for shape in ((2 * args.outputs, args.inputs // 4), (args.outputs, args.inputs)):
            x, name = torch.randn(*shape).bfloat16(), f"{gemm.quantize.__name__} {shape[0]} x {shape[1]}"
            both = [dict(enumerate(function(gemm.quantize, x))) for function in (lambda f, x: f(x), plain)]
            if not same_bytes(*both):
                raise SystemExit(f"{name}: the quantized values differ, so their times mean nothing.")
            compare(name, gemm.quantize, x)
            quantized, scale = both[0].values()
            numbers = [{"": f(restored, quantized, scale, x.dtype)} for f in (lambda f, *given: f(*given), plain)]
            if not same_bytes(*numbers):
                raise SystemExit(f"{name}: the numbers differ, so their times mean nothing.")
            compare(f"{name}, back", restored, quantized, scale, x.dtype)
    return lines


def main() -> None:
    args = common.arguments(
        __doc__,
        outputs=(2048, 256, "rows of the weight"),
        inputs=(4096, 512, "columns of the weight"),
        rounds=(11, 3, "calls of each side and scheme"),
    )
    load = os.getloadavg()[0]
    from qarl_trl.quant import quantize_weight, resolve_scheme
    from qarl_trl.quant.quantize import dequantize
    from qarl_trl.quant.table import SUPPORTED

    torch.manual_seed(0)
    master = 0.02 * torch.randn(args.outputs, args.inputs)
    weight = master.bfloat16()
    rows, headlines, all_times = [], [], {}
    for name in SUPPORTED:
        scheme = resolve_scheme(name)
        ours = quantize_weight(weight, scheme)
        if not same_bytes(ours.tensors, theirs(weight, scheme)):
            raise SystemExit(f"{name}: the tensors differ, so their times mean nothing.")
        traffic = weight.numel() * weight.element_size() + ours.num_bytes()
        source = torch.zeros(traffic // 2, dtype=torch.uint8)
        target = torch.zeros_like(source)
        arms = {
            "ours": lambda scheme=scheme: quantize_weight(weight, scheme),
            "float32": lambda scheme=scheme: quantize_weight(master, scheme),
            "plain": lambda scheme=scheme: plain(quantize_weight, weight, scheme),
            "theirs": lambda scheme=scheme: theirs(weight, scheme),
            "copy": lambda source=source, target=target: target.copy_(source),
        }
        times = all_times[name] = common.interleave(arms, args.rounds)
        matrix = dequantize(ours)
        if not same_bytes({"": matrix}, {"": plain(dequantize, ours)}):
            raise SystemExit(f"{name}: the dequantized matrices differ, so their times mean nothing.")
        arms = {
            "back": lambda ours=ours: dequantize(ours),
            "plain back": lambda ours=ours: plain(dequantize, ours),
            "copy back": matrix.clone,
        }
        times |= common.interleave(arms, args.rounds)
        with Traffic() as traffic_back:
            plain(dequantize, ours)
        back = common.ratio(times, "back", "copy back")
        faster, copies = common.ratio(times, "theirs", "ours"), common.ratio(times, "ours", "copy")
        rows.append(
            {
                "scheme": name,
                "speed-up": faster["ratio"],
                "quartiles": f"{faster['quartile_low']:.1f}-{faster['quartile_high']:.1f}",
                "copies": copies["ratio"],
                "quartiles of copies": f"{copies['quartile_low']:.1f}-{copies['quartile_high']:.1f}",
                "from float32": common.ratio(times, "float32", "ours")["ratio"],
                "plain": common.ratio(times, "plain", "ours")["ratio"],
                "back: copies": back["ratio"],
                "plain back": common.ratio(times, "plain back", "back")["ratio"],
                "back bytes": (ours.num_bytes() + matrix.nbytes) / weight.numel(),
                "plain back bytes": traffic_back.moved / weight.numel(),
                "back ns": 1e9 * back["seconds"] / weight.numel(),
                "ours ms": 1e3 * faster["base_seconds"],
                "theirs ms": 1e3 * faster["seconds"],
                "copy ms": 1e3 * copies["base_seconds"],
                "GB/s": traffic / faster["base_seconds"] / 1e9,
            }
        )
        headlines.append(
            f"{name}: {faster['ratio']:.1f}x faster than compressed-tensors, byte-identical "
            f"{common.verdict(faster['ratio'], FASTER, at_most=False)}; {copies['ratio']:.1f}x a copy "
            f"{common.verdict(copies['ratio'], COPY)}; back {back['ratio']:.2f}x a copy {common.verdict(back['ratio'], COPY_BACK)}"
        )
    headlines += activations(args, all_times)
    common.report("bench_quantize", args, headlines, rows, load, times=all_times, weights=weight.numel())


if __name__ == "__main__":
    main()
