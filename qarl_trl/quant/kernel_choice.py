"""Which kernel runs a scheme in the learner on a device.

Invariant: the choice is made once and never replaced later; a device without the kernel asked for is an error, not another
kernel (paper Sec. 3.1, step 2).
"""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationScheme
from trl.import_utils import is_vllm_available

from ..rollout import products as engine
from ..rollout._vllm_cpu import is_cpu_engine
from . import products as plain
from .products import Kernel
from .scheme import gpu_generation, support_of


KERNELS = ("auto", "dequant", "engine")

# In torch, on any device; torch's product for W4A8 exists on CPUs only.
_PLAIN: dict[str, type[Kernel]] = {
    "W4A16": plain.DequantGemm,
    "W4A16_ASYM": plain.DequantGemm,
    "W8A16": plain.DequantGemm,
    "NVFP4A16": plain.DequantGemm,
    "FP8_DYNAMIC": plain.Fp8Gemm,
    "FP8_BLOCK": plain.Fp8BlockGemm,
    "W8A8": plain.Int8Gemm,
    "W4A8": engine.CpuInt4Int8Gemm,
    "W4AFP8": plain.Int4Fp8Gemm,
}
# By the rollout engine; a scheme that is missing has no kernel in the engine of that device.
_ENGINE: dict[str, dict[str, type[Kernel]]] = {
    "cpu": {
        "W4A16": engine.EngineGemm,
        "W4A16_ASYM": engine.EngineGemm,
        "W8A8": engine.EngineInt8Gemm,
        # The engine's own operations are torch's.
        "W4A8": engine.CpuInt4Int8Gemm,
        "FP8_DYNAMIC": plain.Fp8Gemm,
    },
    "cuda": {
        "W4A16": engine.EngineGemm,
        "W4A16_ASYM": engine.EngineGemm,
        "W8A16": engine.EngineGemm,
        "NVFP4A16": engine.EngineGemm,
        "FP8_DYNAMIC": engine.EngineFp8Gemm,
        "FP8_BLOCK": engine.EngineFp8BlockGemm,
        "W8A8": engine.EngineInt8Gemm,
        "W4AFP8": engine.EngineInt4Fp8Gemm,
    },
}


def select_kernel(scheme: QuantizationScheme, device: torch.device, choice: str = "auto") -> Kernel:
    """
    The kernel that runs `scheme` in the learner on `device`.

    Args:
        scheme (`QuantizationScheme`): A supported scheme.
        device (`torch.device`): Where the layer lives.
        choice (`str`, *optional*, defaults to `"auto"`): `"auto"` (the scheme's form in torch), `"dequant"` (that form, of a
            scheme that leaves activations alone) or `"engine"` (the rollout engine's own product).

    Raises:
        ValueError: when this device has no such kernel.
    """
    support = support_of(scheme)
    if choice not in KERNELS:
        raise ValueError(f"quant_kernel={choice!r} came, one of {KERNELS} was needed.")
    if support.activations != "none" and choice == "dequant":
        raise ValueError(
            f"quant_kernel='dequant' would leave out the activation quantization of {support.name}, which the engine does. "
            "Use quant_kernel='auto'."
        )
    if device.type == "cuda" and not support.gpus:
        raise ValueError(
            f"{support.name} has no kernel on GPUs, neither in vLLM nor here. Use one of the schemes that `qarl-trl schemes` "
            "lists for a GPU."
        )
    if device.type == "cuda" and support.activations != "none":
        capability = torch.cuda.get_device_capability(device)
        if gpu_generation(capability) not in support.gpus:
            raise ValueError(
                f"{support.name} needs a GPU of one of the generations {', '.join(support.gpus)}, got compute capability "
                f"{capability}. Use quant_scheme='W4A16' on this device."
            )
    if choice == "engine":
        return _engine_kernel(support.name, device)
    if support.name == "W4A8" and device.type != "cpu":
        raise ValueError(f"{support.name} has no product on device {device.type!r}. Use a CPU, or another scheme.")
    return _PLAIN[support.name]()


def _engine_kernel(name: str, device: torch.device) -> Kernel:
    kernel = _ENGINE.get(device.type, {}).get(name)
    if kernel is None:
        raise ValueError(
            f"quant_kernel='engine' came with {name} on device {device.type!r}, where the engine has no kernel for it. Use "
            "quant_kernel='auto'."
        )
    if issubclass(kernel, engine.EngineGemm | engine.EngineActivationGemm) and not is_vllm_available():
        raise ValueError(
            "quant_kernel='engine' came without vLLM, whose kernels it calls. On a GPU: pip install 'qarl_trl[vllm]'. On CPU: "
            "make install. Or use quant_kernel='auto'."
        )
    if issubclass(kernel, engine.EngineGemm | engine.EngineActivationGemm) and is_cpu_engine() != (
        device.type == "cpu"
    ):
        raise ValueError(
            f"quant_kernel='engine' on device {device.type!r} needs a vLLM for it, and the installed one is for another. Use "
            "quant_kernel='auto'."
        )
    return kernel()
