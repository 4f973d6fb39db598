"""
`qarl_trl.quant.cuda_kernels`: the kernel gives the numbers of plain operations, or is not used.

Its rounding is compared on a GPU (`tests/gpu/test_layers.py`): Triton's interpreter, which runs it here, cuts bfloat16
numbers off instead of rounding them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qarl_trl.quant import cuda_kernels, quantize_weight, resolve_scheme
from qarl_trl.quant.quantize import dequantize
from quant.schemes import normal


pytest.importorskip("triton")
CASES = [("W4A16", 32), ("W4A16", 128), ("W4A16", -1), ("W4A16_ASYM", 128)]

# Triton's interpreter runs the kernel on a CPU; it is chosen when Triton is imported.
INTERPRETED = """
import torch
from qarl_trl.quant import reference, quantize_weight, resolve_scheme
from qarl_trl.quant.cuda_kernels import launch_decode_int4
from quant.schemes import normal

for name, group_size in {cases}:
    # More words than one block of the kernel has, which is 512, and fewer.
    for rows, columns in ((24, 256), (8, 384)):
        weight = quantize_weight(normal(rows, columns), resolve_scheme(name, group_size))
        zero_point = None
        if "weight_zero_point" in weight.data:
            zero_point = reference.unpack_zero_points(weight.data["weight_zero_point"], rows)
        # Powers of two: no product is rounded, because the interpreter cuts off where a GPU rounds.
        scale = torch.exp2(torch.randint(-4, 4, weight.scale.shape)).bfloat16()
        for dtype in (torch.bfloat16, torch.float32):
            matrix = launch_decode_int4(weight.quantized, scale, zero_point, dtype)
            plain = reference.decode(weight.quantized, scale, zero_point, weight.scheme, dtype)
            assert matrix.dtype == plain.dtype
            assert torch.equal(matrix, plain), (name, group_size, rows, columns, dtype)

            # Control: the scales of the neighbouring rows.
            moved = launch_decode_int4(weight.quantized, scale.roll(1, 0), zero_point, dtype)
            assert not torch.equal(moved, plain)
print("compared")
"""


def test_the_kernel_unpacks_and_scales_as_plain_operations_do():
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent), str(tests)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}

    command = [sys.executable, "-c", INTERPRETED.format(cases=CASES)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert result.stdout.strip() == "compared", result.stderr


@pytest.mark.parametrize("has_zero_point", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_the_kernel_is_assembled_for_each_gpu(capability, dtype, has_zero_point):
    """Triton's interpreter takes what its compiler refuses."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from qarl_trl.quant._decode_int4 import decode_int4_kernel

    sizes = ("number", "words_of_row", "words_of_group", "groups_of_row")
    # As it is launched: without zero points their pointer is a constant, and the code that reads them is dropped.
    signature = {"words": "*i32", "scale": "*bf16", "zero_point": "*i8", "matrix": f"*{dtype}"}
    signature |= dict.fromkeys(sizes, "i32")
    constants = {"has_zero_point": has_zero_point, "block": 512}
    if not has_zero_point:
        constants["zero_point"] = None
        signature["zero_point"] = "constexpr"
    signature |= dict.fromkeys(("has_zero_point", "block"), "constexpr")

    source = ASTSource(decode_int4_kernel, signature, constants)
    kernel = compile(source, target=GPUTarget("cuda", capability, 32))

    assert kernel.asm["cubin"]
    # Rounded to nearest, not cut off.
    assert "cvt.rn.bf16" in kernel.asm["ptx"]


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Pretend that a kernel can run on tensors of the CPU."""
    monkeypatch.setattr(cuda_kernels, "_can_run", lambda tensor: True)
    # A choice is made once a process, and an earlier test may have made it.
    monkeypatch.setattr(cuda_kernels, "_CHOSEN", {})


def test_a_kernel_that_gives_other_numbers_is_not_used(as_on_cuda, monkeypatch):
    weight = quantize_weight(normal(8, 128), resolve_scheme("W4A16"))
    expected = dequantize_in_plain_operations(weight)
    calls = []

    def wrong(words, scale, zero_point, dtype):
        calls.append(dtype)
        # The right dtype and shape, so that the comparison alone can notice it.
        return 2 * expected

    monkeypatch.setattr(cuda_kernels, "launch_decode_int4", wrong)

    with pytest.warns(UserWarning, match="gives other numbers"):
        first = dequantize(weight)
    second = dequantize(weight)

    # Both times by plain operations, also the first, whose kernel had run.
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    # It is not tried again.
    assert len(calls) == 1


def test_a_kernel_that_does_not_run_is_not_used(as_on_cuda, monkeypatch):
    weight = quantize_weight(normal(8, 128), resolve_scheme("W4A16"))
    expected = dequantize_in_plain_operations(weight)

    def fails(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_kernels, "launch_decode_int4", fails)

    with pytest.warns(UserWarning, match="does not run .RuntimeError: no compiler"):
        assert torch.equal(dequantize(weight), expected)


def test_a_kernel_that_gives_the_bytes_is_used(as_on_cuda, monkeypatch):
    weight = quantize_weight(normal(8, 128), resolve_scheme("W4A16"))
    expected = dequantize_in_plain_operations(weight)
    calls = []

    def right(*_):
        calls.append(1)
        return expected.clone()

    monkeypatch.setattr(cuda_kernels, "launch_decode_int4", right)
    for _ in range(3):
        assert torch.equal(dequantize(weight), expected)

    # Three, and one before them for the comparison.
    assert len(calls) == 4


def dequantize_in_plain_operations(weight):
    from qarl_trl.quant import reference

    return reference.decode(weight.quantized, weight.scale, None, weight.scheme, torch.bfloat16)
