"""Quantizer: `quantize_weight` against compressed-tensors' observer and compressor, and against a copy of the same
traffic.

Claim: the same bytes, faster than compressed-tensors, in both directions. The tensors are compared before any ratio is
printed. What it means for a training step: `bench_real_step.py`.

Both start from a bfloat16 weight and end with the tensors of the checkpoint. The copy moves half of the bytes that the
quantizer reads and writes (the weight, and every stored tensor) from one buffer to another that exists already. Back,
both sides write to memory of their own.
"""

from __future__ import annotations

import os
from typing import Any

import common
import torch
from torch import Tensor


FASTER = 1.0


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


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def as_bytes(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(as_bytes(a[name]), as_bytes(b[name])) for name in a)


def theirs_back(tensors: dict[str, Tensor], scheme: Any) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(scheme.format.value).decompress(dict(tensors), scheme)["weight"]


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
    from qarl_trl.quant.supported import SUPPORTED

    torch.manual_seed(0)
    weight = (0.02 * torch.randn(args.outputs, args.inputs)).bfloat16()
    rows, headlines, all_times = [], [], {}
    for name in SUPPORTED:
        scheme = resolve_scheme(name)
        ours = quantize_weight(weight, scheme)
        matrix = dequantize(ours)
        same = same_bytes(ours.tensors, theirs(weight, scheme))
        if not same or not same_bytes({"": matrix}, {"": theirs_back(ours.tensors, scheme)}):
            raise SystemExit(f"{name}: the tensors differ, so their times mean nothing.")
        traffic = weight.numel() * weight.element_size() + sum(t.nbytes for t in ours.tensors.values())
        source = torch.zeros(traffic // 2, dtype=torch.uint8)
        target = torch.zeros_like(source)
        arms = {
            "ours": lambda scheme=scheme: quantize_weight(weight, scheme),
            "theirs": lambda scheme=scheme: theirs(weight, scheme),
            "copy": lambda source=source, target=target: target.copy_(source),
            "back": lambda ours=ours: dequantize(ours),
            "theirs back": lambda ours=ours, scheme=scheme: theirs_back(ours.tensors, scheme),
            "copy back": matrix.clone,
        }
        times = all_times[name] = common.interleave(arms, args.rounds)
        there, back = common.ratio(times, "theirs", "ours"), common.ratio(times, "theirs back", "back")
        rows.append(
            {
                "scheme": name,
                "speed-up": there["ratio"],
                "copies": common.ratio(times, "ours", "copy")["ratio"],
                "back: speed-up": back["ratio"],
                "back: copies": common.ratio(times, "back", "copy back")["ratio"],
                "ns a weight": 1e9 * there["base_seconds"] / weight.numel(),
                "back ns": 1e9 * back["base_seconds"] / weight.numel(),
            }
        )
        headlines.append(
            f"{name}: {there['ratio']:.1f}x faster than compressed-tensors, byte-identical "
            f"{common.verdict(there['ratio'], FASTER, at_most=False)}; back {back['ratio']:.1f}x faster"
        )
    common.report("bench_quantize", args, headlines, rows, load, times=all_times, weights=weight.numel())


if __name__ == "__main__":
    main()
