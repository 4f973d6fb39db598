"""What `qarl_trl.quant` needs: nothing above it, and no compiled quantizer."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qarl_trl
from qarl_trl.quant import fast, quantize_weight, reference, resolve_scheme
from qarl_trl.quant.gemm import ActivationGemm, dequantize, plain_gemm
from qarl_trl.quant.quantize import _quantizer
from qarl_trl.quant.table import SUPPORTED
from quant.schemes import normal


PACKAGE = Path(qarl_trl.__file__).parent

ARROWS = """
import sys
import qarl_trl
above = ("trl", "vllm", "qarl_trl.config", "qarl_trl.trainer", "qarl_trl.rollout", "qarl_trl.tools.llmcompressor")

def loaded():
    return sorted({name for name in sys.modules if name in above or name.startswith(tuple(f"{a}." for a in above))})

import qarl_trl.quant, qarl_trl.quant.lora
print(loaded())
import qarl_trl.rollout.gemm
print(loaded())
"""

# Every scheme, then a training step of a low-bit layer.
WORKS = """
import hashlib, sys, warnings
warnings.simplefilter("error", UserWarning)
for name in {hidden}:
    sys.modules[name] = None  # an import of it fails
import qarl_trl, torch
from qarl_trl.quant import apply_quantization, quantize_weight, reference, resolve_scheme
from qarl_trl.quant.gemm import ActivationGemm, dequantize, plain_gemm
from qarl_trl.quant.quantize import _quantizer
from qarl_trl.quant.table import SUPPORTED
weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
for name in SUPPORTED:
    scheme = resolve_scheme(name)
    low_bit = quantize_weight(weight, scheme)
    digest = hashlib.sha256()
    product = plain_gemm(scheme, weight.device)
    activations = product.quantize(weight) if isinstance(product, ActivationGemm) else ()
    for tensor in (*low_bit.tensors.values(), dequantize(low_bit), *activations):
        digest.update(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    print(name, digest.hexdigest(), _quantizer(weight, scheme)[0] is reference)
layer = apply_quantization(torch.nn.Sequential(torch.nn.Linear(128, 8)), "W4A16")[0]
before = layer.low_bit().quantized.clone()
layer(torch.randn(2, 128)).sum().backward()
torch.optim.SGD(layer.parameters(), lr=1.0).step()
assert not torch.equal(layer.low_bit().quantized, before)
"""


def run(script, package=PACKAGE.parent):
    result = subprocess.run(
        [sys.executable, "-c", f"{script}\nassert qarl_trl.__file__.startswith({str(package)!r})"],
        cwd=package,
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def digests():
    """Scheme and digest of the bytes, here, where kernels are compiled."""
    for name in SUPPORTED:
        digest = hashlib.sha256()
        weight, scheme = normal(256, 256), resolve_scheme(name)
        low_bit, gemm = quantize_weight(weight, scheme), plain_gemm(scheme, weight.device)
        activations = gemm.quantize(weight) if isinstance(gemm, ActivationGemm) else ()
        for tensor in (*low_bit.tensors.values(), dequantize(low_bit), *activations):
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        yield name, digest.hexdigest()


def test_the_package_loads_nothing_that_is_above_it():
    quant, rollout = run(ARROWS)
    assert quant == "[]"
    assert "'qarl_trl.rollout.gemm'" in rollout and "'trl'" in rollout  # control


@pytest.mark.slow
def test_without_numba_and_triton_it_works_with_the_same_bytes():
    lines = run(WORKS.format(hidden=["numba", "llvmlite", "triton"]))
    assert [tuple(line.split()) for line in lines] == [(*pair, "True") for pair in digests()]


@pytest.mark.slow
def test_without_the_folder_of_the_compiled_quantizer_it_works_with_the_same_bytes(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "qarl_trl", ignore=shutil.ignore_patterns("fast", "__pycache__"))
    assert not (tmp_path / "qarl_trl" / "quant" / "fast").exists()
    lines = run(WORKS.format(hidden=[]), tmp_path)
    assert [tuple(line.split()) for line in lines] == [(*pair, "True") for pair in digests()]


@pytest.mark.parametrize("scheme", list(SUPPORTED))
def test_with_it_the_compiled_quantizer_does_the_work(scheme):
    """The control of the two tests above."""
    pytest.importorskip("numba")
    weight, scheme = normal(256, 256), resolve_scheme(scheme)
    assert _quantizer(weight, scheme)[0] is not reference
    assert fast.decoder_for(weight.shape, torch.bfloat16, weight.device, scheme) is not reference
