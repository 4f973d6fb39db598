"""`qarl_trl.quant.gemms.gemm`: matrix products and what they do to activations, against libraries and definitions."""

import pytest
import references
import torch
import torch.nn.functional as F

from qarl_trl.quant import quantize_weight, resolve_scheme
from qarl_trl.quant.gemms.activations import (
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
    quantize_tokens_int8_asymmetric,
)
from qarl_trl.quant.gemms.gemm import (
    CpuInt4Int8Gemm,
    Fp8BlockGemm,
    Fp8Gemm,
    Int4Fp8Gemm,
    Int8Gemm,
    dequantize,
    plain_gemm,
)
from quant.schemes import NAMES, WEIGHT_ONLY, low_bit_of, normal, relative_error, same_bytes


CPU = torch.device("cpu")


# Matrix products ----------------------------------------------------------------------------------------------------


QUANTIZERS = {
    "FP8_DYNAMIC": (Fp8Gemm, quantize_tokens_fp8),
    "FP8_BLOCK": (Fp8BlockGemm, quantize_groups_fp8),
    "W8A8": (Int8Gemm, quantize_tokens_int8),
    "W4A8": (CpuInt4Int8Gemm, quantize_tokens_int8_asymmetric),
    "W4AFP8": (Int4Fp8Gemm, quantize_tokens_fp8),
}


def int4_rows(low_bit):
    """Quantized values of a packed 4-bit weight, as rows."""
    width = int(low_bit.tensors["weight_shape"][1])
    return references.unpack_int4(low_bit.quantized, width)


def as_kernel_input(x, scheme):
    """Rows of an input `(..., 256)`, in the dtype that the kernel of a scheme quantizes."""
    rows = x.reshape(-1, 256)
    return rows.bfloat16() if scheme == "W4A8" else rows


def spread(scale, size):
    """Scales of groups, for each element of the last dimension."""
    return scale.repeat_interleave(size // scale.shape[-1], dim=-1)


def exact_gemm(low_bit, quantized, scale):
    """The product in float64 of both sides' quantized values times their scales; `quantized` is `(tokens, in)`."""
    if low_bit.scheme.format == "pack-quantized":
        # Hopper's kernel for W4AFP8 multiplies by a table of float8 numbers, with one scale a channel.
        table, channel_scale = references.int4_float8_table(int4_rows(low_bit), low_bit.scale.tolist())
        return (quantized.double() * scale.double()) @ (table.double() * channel_scale.double()).t()

    weight_scale = low_bit.scale.double()
    if low_bit.scheme.weights.block_structure is not None:
        weight_scale = weight_scale.repeat_interleave(128, dim=0)
    weight = low_bit.quantized.double() * spread(weight_scale, low_bit.quantized.shape[1])
    return (quantized.double() * spread(scale.double(), quantized.shape[1])) @ weight.t()


# Relative to the exact product of the quantized values. Measured in bfloat16 1.6e-3 to 1.7e-3, the result's own
# rounding, and 3.3e-3 where W4A8 with one scale a channel cuts it off; in float32 3e-8 to 5e-8, sums of 256 products,
# but for W4A8, whose kernel takes and gives bfloat16.
TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float32: 1e-6}
TOLERANCE_CUT_OFF = 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("scheme", "group_size"),
    [
        ("FP8_DYNAMIC", None),
        ("FP8_BLOCK", None),
        ("W8A8", None),
        ("W4A8", 32),
        ("W4A8", -1),
        ("W4AFP8", None),
    ],
)
def test_activation_gemms_multiply_the_quantized_values_of_both_sides(scheme, group_size, dtype):
    kernel, quantize = QUANTIZERS[scheme]
    low_bit = low_bit_of(scheme, group_size)
    x = normal(2, 7, 256, seed=1, dtype=dtype)

    y, saved = kernel().forward(x, low_bit)

    assert y.shape == (2, 7, 128)
    assert y.dtype == dtype
    quantized, scale = quantize(as_kernel_input(x, scheme))
    exact = exact_gemm(low_bit, quantized, scale)
    tolerance = TOLERANCE[torch.bfloat16 if scheme == "W4A8" else dtype]
    if (scheme, group_size) == ("W4A8", -1):
        tolerance = TOLERANCE_CUT_OFF
    assert relative_error(y.reshape(-1, 128), exact) < tolerance
    # Controls: neither the exact activations nor the exact weight are multiplied.
    assert relative_error(y, F.linear(x.double(), dequantize(low_bit).double())) > 0.005
    assert relative_error(y, F.linear(x.float(), normal(128, 256))) > 0.009
    # What is kept for the backward has at most two bytes for each input: no float32 copy.
    assert all(tensor.element_size() * tensor.numel() <= 2 * x.numel() for tensor in saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", list(QUANTIZERS))
def test_the_backward_sees_the_quantized_input(scheme, dtype):
    kernel, quantize = QUANTIZERS[scheme]
    x = normal(2, 7, 256, seed=1, dtype=dtype)
    _, saved = kernel().forward(x, low_bit_of(scheme))

    restored = kernel().input_from(saved, torch.float32)

    quantized, scale = quantize(as_kernel_input(x, scheme))
    assert torch.equal(restored.reshape(-1, 256), quantized.float() * spread(scale, 256))
    # Float8: three bits of mantissa, at most 1/16 off, 2.6 % on average. Int8: 0.64 to 0.70 %.
    low, high = (0.01, 0.03) if "FP8" in scheme else (0.005, 0.01)
    assert low < relative_error(restored, x) < high


# Also sizes that no kernel's tile divides.
@pytest.mark.parametrize("shape", [(48, 64), (7, 20), (16, 33)])
def test_int8_sums_are_exact(shape):
    low_bit = low_bit_of("W8A8", shape=shape)
    x = normal(5, shape[1], seed=1)

    y, _ = Int8Gemm().forward(x, low_bit)

    quantized, scale = quantize_tokens_int8(x)
    # Below 2^24, so float32 holds them.
    sums = (quantized.long() @ low_bit.quantized.long().t()).float()
    assert torch.equal(y, sums * low_bit.scale.float().t() * scale)


def test_an_odd_block_of_the_weight_only_touches_its_outputs():
    """Which scale belongs to which block of rows and columns."""
    master = normal(256, 384)
    # Block (2, 3) alone: a scale that is exchanged with a neighbour's is off by a thousand.
    master[128:, 256:] *= 1000
    low_bit = quantize_weight(master, resolve_scheme("FP8_BLOCK"))
    x = normal(3, 384, seed=1)

    y, _ = Fp8BlockGemm().forward(x, low_bit)

    assert relative_error(y[:, :128], F.linear(x, master[:128])) < 0.05
    assert relative_error(y[:, 128:], F.linear(x, master[128:])) < 0.05


@pytest.mark.parametrize("group_size", [32, 128, 256, -1])
def test_w4a8_is_the_arithmetic_of_its_definition(group_size):
    """Bit for bit, where every sum, product and rounding is written out (torch's scalar kernel on x86)."""
    scheme = resolve_scheme("W4A8", -1 if group_size == 256 else group_size)
    if group_size == 256:  # one group, as the engine's channel
        scheme.weights.strategy = "group"
        scheme.weights.group_size = 256
    low_bit = quantize_weight(normal(24, 256), scheme)
    x = normal(6, 256, seed=1, dtype=torch.bfloat16)
    # A token of zeros, whose scale is 1, and one of one sign, whose zero point is at the end of the range.
    x[2] = 0.0
    x[3] = x[3].abs()

    y, _ = CpuInt4Int8Gemm().forward(x, low_bit)

    quantized = low_bit.quantized.tolist()
    scales = low_bit.scale.tolist()
    assert same_bytes(y, references.int4_int8_gemm(x, quantized, scales))
    # Control: the same sums rounded the other way.
    has_groups = len(scales[0]) > 1
    assert not same_bytes(y, references.int4_int8_gemm(x, quantized, scales, truncate=has_groups))


@pytest.mark.parametrize("scheme", NAMES)
def test_where_the_bias_is_added(scheme):
    """To the float32 sums, or to the rounded output, as vLLM's kernel of the scheme does."""
    low_bit = low_bit_of(scheme)
    kernel = plain_gemm(resolve_scheme(scheme), CPU)
    x = normal(64, 256, seed=1, dtype=torch.bfloat16)
    bias = normal(128, seed=2, dtype=torch.bfloat16)

    y, _ = kernel.forward(x, low_bit, bias)

    without, _ = kernel.forward(x, low_bit)
    to_rounded = without + bias
    # Two roundings to bfloat16 against one.
    assert relative_error(y, to_rounded) < 4e-3
    assert same_bytes(y, to_rounded) == (scheme in WEIGHT_ONLY or scheme in ("FP8_BLOCK", "W4AFP8"))
    if scheme in ("FP8_DYNAMIC", "W8A8"):
        sums, _ = kernel.forward(x.float(), low_bit)
        assert same_bytes(y, (sums + bias.float()).bfloat16())


@pytest.mark.parametrize("scale", [0.02, 1e-4, 30.0])
def test_w4afp8_multiplies_by_the_table_of_its_definition(scale):
    """Scales of a thousandth lie below the least channel scale, where float8 has fewer digits."""
    # Groups of different sizes in a row.
    weight = normal(24, 512) * scale * normal(24, 512, seed=1).exp()
    low_bit = quantize_weight(weight, resolve_scheme("W4AFP8"))

    table, channel_scale = Int4Fp8Gemm().operand(low_bit)
    matrix = Int4Fp8Gemm().matrix_from(low_bit, torch.float32)

    expected, expected_scale = references.int4_float8_table(int4_rows(low_bit), low_bit.scale.tolist())
    assert torch.equal(table.float(), expected)
    assert torch.equal(channel_scale, expected_scale)
    # The backward multiplies by the same.
    assert torch.equal(matrix, expected * expected_scale)
    # Control: what the checkpoint decompresses to is another matrix. Measured 0.026 to 0.030, float8's rounding.
    assert 0.015 < relative_error(matrix, dequantize(low_bit, torch.float32)) < 0.04


@pytest.mark.slow
def test_w4afp8_scales_are_those_of_the_engine(monkeypatch):
    """vLLM's own conversion, with its check for a GPU answered."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, convert_bf16_scales_to_fp8

    weight = normal(24, 512) * normal(24, 512, seed=1).exp()
    low_bit = quantize_weight(weight, resolve_scheme("W4AFP8"))
    with set_current_vllm_config(VllmConfig()):
        quantize = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native
    # vLLM's function asks its tensors. It runs on a CPU all the same.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    scales, engine_channel_scale = convert_bf16_scales_to_fp8(quantize, low_bit.scale.clone())
    monkeypatch.undo()

    table, channel_scale = Int4Fp8Gemm().operand(low_bit)

    assert torch.equal(channel_scale, engine_channel_scale)
    quantized = torch.tensor(int4_rows(low_bit)).float().unflatten(-1, (4, -1))
    # The table of the engine: code times float8 scale, rounded to float8.
    entries = (quantized * scales.float().unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(-2)
    assert torch.equal(table.float(), entries.float())
    without_the_eighth = low_bit.scale.float().amax(-1, keepdim=True) / 448
    # Control: the kernel's scales leave room for 8 times the largest.
    assert not torch.equal(channel_scale, without_the_eighth)


def test_a_changed_bias_reaches_a_packed_weight_that_is_kept():
    """One scale a channel: torch's 4-bit kernel has the bias inside its packed weight."""
    low_bit = low_bit_of("W4A8", -1)
    x = normal(5, 256, seed=1, dtype=torch.bfloat16)
    bias = normal(128, seed=2, dtype=torch.bfloat16)
    before, _ = CpuInt4Int8Gemm().forward(x, low_bit, bias)

    # In place, as an optimizer does.
    bias.mul_(-1)
    after, _ = CpuInt4Int8Gemm().forward(x, low_bit, bias)

    packed_again, _ = CpuInt4Int8Gemm().forward(x, low_bit_of("W4A8", -1), bias)
    assert same_bytes(after, packed_again)
    assert not same_bytes(after, before)


# Kept matrices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", NAMES)
def test_a_kept_matrix_changes_no_bit_and_is_made_once(scheme, monkeypatch):
    gemm = plain_gemm(resolve_scheme(scheme), CPU)
    keeping = plain_gemm(resolve_scheme(scheme), CPU)
    keeping.keep_matrices()
    low_bit = low_bit_of(scheme)
    x = normal(5, 256, seed=1)
    grad = normal(5, 128, seed=2)
    y, _ = gemm.forward(x, low_bit)
    grad_input = gemm.grad_input(grad, low_bit)
    made = []
    new_matrix_from = type(keeping).new_matrix_from

    def counted(self, weight, dtype):
        made.append(dtype)
        return new_matrix_from(self, weight, dtype)

    monkeypatch.setattr(type(keeping), "new_matrix_from", counted)

    for _ in range(3):
        assert torch.equal(keeping.forward(x, low_bit)[0], y)
        assert torch.equal(keeping.grad_input(grad, low_bit), grad_input)
    # Once, for three forwards and three backwards.
    assert made == [torch.float32]

    # Control: other quantized values have another matrix.
    other = low_bit_of(scheme, seed=1)
    assert not torch.equal(keeping.grad_input(grad, other), grad_input)
