"""The Triton kernels by the real compiler, for a Hopper GPU that is not there; what they compute is tested in the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


# In a process of its own: once another test has run kernels in the interpreter, they cannot be compiled here.
COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction
from qarl_trl.quant import fast, reference, resolve_scheme
from qarl_trl.quant.fast import cuda

POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.int16: "*i16", torch.uint8: "*u8", torch.float32: "*fp32"}

def launch(kernel, *args, grid, warmup, **constants):
    bound = dict(zip(kernel.arg_names, args)) | constants
    constexprs = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr}
    kinds = {name: POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32" for name, value in bound.items()}
    source = ASTSource(kernel, signature=kinds | dict.fromkeys(constexprs, "constexpr"), constexprs=constexprs)
    text = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "div.full.f32" not in text and "div.approx" not in text and ".ftz" not in text, kernel
    print(kernel.__name__, "divides" if "div.rn.f32" in text else "")

JITFunction.run = launch
for name in {schemes}:
    scheme = resolve_scheme(name)
    weight = torch.randn(128, 256).bfloat16()
    _, qparams = reference.quantize(weight, scheme, *{factors}.get(name, ()))
    for dtype in (torch.bfloat16, torch.float32):
        cuda.extremes(weight.to(dtype), scheme)
        quantized = cuda.encode(weight.to(dtype), qparams, scheme, *{factors}.get(name, ()))
        cuda.decode(quantized values, qparams, scheme, 256, dtype, *{factors}.get(name, ()))
for width, *rule in list(fast.RULES.values())[:3]:
    for x in (weight, weight.float()):
        quantized values, scale = cuda.quantize_activations(None, x, width or 256, *rule)
        cuda.dequantize_activations(quantized values, scale, x.dtype)
"""
SCHEMES = ["W4A16_ASYM", "W8A8", "FP8_BLOCK", "NVFP4A16"]


@pytest.mark.slow
def test_every_kernel_compiles_for_a_hopper_gpu_and_divides_exactly():
    pytest.importorskip("triton.backends.nvidia.compiler")
    script = COMPILE.replace("{schemes}", repr(SCHEMES)).replace(
        "{factors}", "{'NVFP4A16': (torch.tensor([2688.0]),)}"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300
    )
    assert result.returncode == 0, result.stderr
    kernels = result.stdout.splitlines()
    assert len(kernels) == 2 * (3 * len(SCHEMES) + 6)
    assert kernels.count("_encode divides") == 2 * len(SCHEMES)  # control: the search finds divisions
