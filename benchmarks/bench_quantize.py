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
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import Tensor


FASTER = 1.0


# The other side -----------------------------------------------------------------------------------------------------


def in_groups(weight: Tensor, args: Any) -> Tensor:
    """
    The values of a weight that share a scale.

    Args:
        weight: `(rows, columns)`.
        args: compressed-tensors' description of its values.

    Returns:
        `(row of scales, column of scales, values)`.
    """
    if args.block_structure is None:
        return weight.unflatten(-1, (-1, args.group_size or weight.shape[1]))

    height, width = args.block_structure
    in_rows = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return in_rows.transpose(1, 2).flatten(-2)


def compressor(scheme: Any) -> Any:
    """compressed-tensors' compressor of a scheme."""
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(scheme.format.value)


def theirs(weight: Tensor, scheme: Any) -> dict[str, Tensor]:
    """compressed-tensors: minimum and maximum as llm-compressor observes them, scales, compressor."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = scheme.weights
    groups = in_groups(weight, args)
    low = groups.amin(-1)
    high = groups.amax(-1)

    tensors = {"weight": weight}
    global_scale = None
    if args.strategy == "tensor_group":
        global_scale = generate_gparam(low.amin().reshape(1), high.amax().reshape(1))
        tensors["weight_global_scale"] = global_scale
    scale, zero_point = calculate_qparams(low, high, args, global_scale)
    tensors["weight_scale"] = scale
    tensors["weight_zero_point"] = zero_point
    return compressor(scheme).compress(tensors, scheme)


def theirs_back(tensors: dict[str, Tensor], scheme: Any) -> Tensor:
    """compressed-tensors: the dequantized weight of a checkpoint's tensors."""
    return compressor(scheme).decompress(dict(tensors), scheme)["weight"]


# One scheme ---------------------------------------------------------------------------------------------------------


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors have the same names and bytes."""
    if a.keys() != b.keys():
        return False
    return all(torch.equal(as_bytes(tensor), as_bytes(b[name])) for name, tensor in a.items())


def arms_of(name: str, weight: Tensor) -> dict[str, Callable[[], Any]]:
    """
    The functions that are timed for a scheme.

    Args:
        name: Of the scheme.
        weight: What is quantized, `(rows, columns)`, bfloat16.

    Raises:
        SystemExit: if both sides do not make the same tensors, and the same weight from them.
    """
    from qarl_trl.quant import quantize_weight, resolve_scheme
    from qarl_trl.quant.quantize import dequantize

    scheme = resolve_scheme(name)
    ours = quantize_weight(weight, scheme)
    matrix = dequantize(ours)
    same = same_bytes(ours.tensors, theirs(weight, scheme))
    if not same or not same_bytes({"": matrix}, {"": theirs_back(ours.tensors, scheme)}):
        raise SystemExit(f"{name}: the tensors differ, so their times mean nothing.")

    # Half of it is read, half is written.
    traffic = weight.nbytes + sum(tensor.nbytes for tensor in ours.tensors.values())
    source = torch.zeros(traffic // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return {
        "ours": lambda: quantize_weight(weight, scheme),
        "theirs": lambda: theirs(weight, scheme),
        "copy": lambda: target.copy_(source),
        "back": lambda: dequantize(ours),
        "theirs back": lambda: theirs_back(ours.tensors, scheme),
        "copy back": matrix.clone,
    }


def row_of(name: str, times: common.Times, weights: int) -> dict[str, Any]:
    """
    The line of one scheme.

    Args:
        name: Of the scheme.
        times: Seconds of each of `arms_of`.
        weights: Number of weights that were quantized.
    """
    there = common.ratio(times, "theirs", "ours")
    back = common.ratio(times, "theirs back", "back")
    return {
        "scheme": name,
        "speed-up": there["ratio"],
        "copies": common.ratio(times, "ours", "copy")["ratio"],
        "back: speed-up": back["ratio"],
        "back: copies": common.ratio(times, "back", "copy back")["ratio"],
        "ns a weight": 1e9 * there["base_seconds"] / weights,
        "back ns": 1e9 * back["base_seconds"] / weights,
    }


def headline_of(row: dict[str, Any]) -> str:
    """The claim for one scheme."""
    return (
        f"{row['scheme']}: {row['speed-up']:.1f}x faster than compressed-tensors, byte-identical "
        f"{common.verdict(row['speed-up'], FASTER, at_most=False)}; back {row['back: speed-up']:.1f}x faster"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        outputs=(2048, 256, "rows of the weight"),
        inputs=(4096, 512, "columns of the weight"),
        rounds=(11, 3, "calls of each side and scheme"),
    )
    load = os.getloadavg()[0]

    from qarl_trl.quant.supported import SUPPORTED

    torch.manual_seed(0)
    weight = (0.02 * torch.randn(args.outputs, args.inputs)).bfloat16()
    weights = weight.numel()

    rows = []
    all_times: dict[str, common.Times] = {}
    for name in SUPPORTED:
        times = common.interleave(arms_of(name, weight), args.rounds)
        all_times[name] = times
        rows.append(row_of(name, times, weights))

    headlines = [headline_of(row) for row in rows]
    common.report("bench_quantize", args, headlines, rows, load, times=all_times, weights=weights)


if __name__ == "__main__":
    main()
