"""The rollout engine's gemms for the learner, and the choices of `quant_kernel`."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from trl.import_utils import is_vllm_available

from ..quant.activations import memoize_last
from ..quant.gemm import ActivationGemm, Gemm, GemmChoice, Saved, dequant_gemm, plain_gemm
from ..quant.quantize import LowBitWeight
from ..quant.scheme import support_of
from ._vllm_cpu import is_cpu_engine
from .cpu import check_engine_cpu


class EngineGemm(Gemm):
    """
    The gemm of the engine's own layer, on the synced tensors; the backward is that of `plain`, torch's gemm.

    The engine chooses the kernel: on GPUs Marlin, Machete or CUTLASS, on a CPU `cpu_gemm_wna16` or oneDNN.
    """

    prepares = True

    def __init__(self, plain: Gemm) -> None:
        self.plain = plain
        self.input_from, self.matrix_from = plain.input_from, plain.matrix_from  # type: ignore[method-assign]  # of this object

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> tuple[Tensor, Saved]:
        from ._vllm_layer import multiply  # vLLM is optional

        quantizes = isinstance(self.plain, ActivationGemm)
        # Marlin and Machete add a bias to the rounded output, and Marlin needs it permuted; the others add it to the sums.
        inside = quantizes or x.device.type == "cpu"
        cast = memoize_last(Tensor.to, x, torch.bfloat16)
        own_bias = bias.to(torch.bfloat16) if inside and bias is not None else None
        y = multiply(cast.reshape(-1, x.shape[-1]), weight, own_bias).to(x.dtype).reshape(*x.shape[:-1], -1)
        # The engine does not return the quantized values of its input, so compute them again.
        saved = memoize_last(self.plain.quantize, cast) if isinstance(self.plain, ActivationGemm) else (x,)
        return y if inside or bias is None else y + bias, saved


def engine_gemm(scheme: QuantizationScheme, device: torch.device) -> Gemm:
    """The engine's gemm for `scheme` on `device`; `ValueError` if the engine has none there, or is not installed."""
    support, plain = support_of(scheme), plain_gemm(scheme, device)
    if not {"cpu": support.cpu_engine, "cuda": bool(support.gpus)}.get(device.type, False):
        raise ValueError(f"quant_kernel='engine' has no kernel for {support.name} on {device.type!r}. Use 'auto'.")
    if device.type == "cpu" and support.name in ("W4A8", "FP8_DYNAMIC"):
        return plain  # the engine itself calls torch
    check_engine_cpu(device.type, four_bits=support.format == "pack-quantized")
    if not is_vllm_available() or is_cpu_engine() != (device.type == "cpu"):
        raise ValueError(
            f"quant_kernel='engine' on device {device.type!r} needs a vLLM for it, whose kernels it calls: pip install "
            "'qarl_trl[vllm]' (GPU) or make install (CPU). Or use quant_kernel='auto'."
        )
    return EngineGemm(plain)


# Keys: the values of `quant_kernel`.
GEMMS: dict[str, GemmChoice] = {"auto": plain_gemm, "dequant": dequant_gemm, "engine": engine_gemm}
