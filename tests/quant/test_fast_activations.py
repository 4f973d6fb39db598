"""Activations by `qarl_trl.quant.fast`: kernels give the bytes of the plain operations, or are not used."""

import re
import warnings

import pytest
import torch

from qarl_trl.quant import fast
from qarl_trl.quant.activations import (
    dequantize_activations,
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
    quantize_tokens_int8_asymmetric,
)
from qarl_trl.quant.gemm import CpuInt4Int8Gemm, Fp8BlockGemm, Fp8Gemm, Int8Gemm, restored
from quant.schemes import normal, same_bytes
from quant.test_activations import tokens
from quant.test_fast import interpreted


cpu = pytest.importorskip("qarl_trl.quant.fast.cpu")  # numba comes with vLLM
kernels = pytest.importorskip("qarl_trl.quant.fast.cpu_kernels")

pytestmark = pytest.mark.usefixtures("forgotten")
DTYPES = [torch.bfloat16, torch.float32]
GEMMS = {
    quantize_tokens_fp8: Fp8Gemm,
    quantize_groups_fp8: Fp8BlockGemm,
    quantize_tokens_int8: Int8Gemm,
    quantize_tokens_int8_asymmetric: CpuInt4Int8Gemm,
}
every_function = pytest.mark.parametrize("plain", GEMMS, ids=lambda function: function.__name__)


def same(found, expected):
    return all(a.shape == b.shape and same_bytes(a, b) for a, b in zip(found, expected, strict=True))


# On the CPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@every_function
def test_quantized_and_scales_have_the_bytes_of_the_plain_operations(plain, dtype):
    """Every bfloat16 number below 1e37, rows of all sizes down to those without a reciprocal, ties, and -0.0."""
    found = GEMMS[plain].quantize
    for x in [fast.sample(dtype), *(tokens(10.0**size, dtype, shape=(40, 384)) for size in range(-44, 36, 3))]:
        assert fast.quantizer_of(plain, x) is not plain
        assert same(found(x), plain(x))
    assert not same(found(-x.roll(1, -1)), plain(x))  # control


@pytest.mark.parametrize("dtype", DTYPES)
@every_function
def test_any_shape_has_the_bytes_of_the_plain_operations(monkeypatch, plain, dtype):
    """Also in parts of the rows for several threads."""
    monkeypatch.setattr(cpu, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    widths = (128, 640) if plain is quantize_groups_fp8 else (2, 6, 34, 130, 1000)
    for shape in [(*rows, width) for rows in ((), (1,), (3, 7)) for width in widths]:
        x = normal(*shape, dtype=dtype)
        assert fast.quantizer_of(plain, x) is not plain
        assert same(GEMMS[plain].quantize(x), plain(x)), shape


@pytest.mark.parametrize("dtype", DTYPES)
@every_function
def test_a_token_that_is_not_finite_has_the_bytes_of_the_plain_operations(plain, dtype):
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = normal(30, 256, dtype=dtype)
        x[4, 7] = x[9] = x[29, 255] = bad
        found = GEMMS[plain].quantize(x)
        assert same(found, plain(x))
        assert found[1].isfinite().flatten(1).all(1).sum() == 27


def quantized_and_scales(dtype, shape=(40, 384), groups=1):
    """Every kind of code, NaN of float8 among them, with scales from subnormal numbers to infinity."""
    generator = torch.Generator().manual_seed(sum(shape))
    quantized = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    exponents = torch.randint(-149, 129, (*shape[:-1], groups), generator=generator)
    return quantized, torch.ldexp(torch.rand(exponents.shape, generator=generator) + 1, exponents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
def test_numbers_have_the_bytes_of_the_plain_operations(monkeypatch, code, dtype):
    """Of any shape, also in parts of the rows for several threads; NaN where those have it."""
    monkeypatch.setattr(cpu, "_WEIGHTS_PER_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    shapes = [(40, 384), (3, 7, 130), (2,), (1, 6), (256, 1000)]
    for shape, groups in [*((shape, 1) for shape in shapes), ((40, 384), 3), ((2, 5, 256), 2)]:
        quantized, scale = quantized_and_scales(code, shape, groups)
        kernel = fast.activation_decoder(quantized, scale, dtype)
        assert kernel is not dequantize_activations
        found, expected = kernel(quantized, scale, dtype), dequantize_activations(quantized, scale, dtype)
        assert torch.equal(found.isnan(), expected.isnan())
        assert same_bytes(
            found.nan_to_num(0.0, torch.inf, -torch.inf), expected.nan_to_num(0.0, torch.inf, -torch.inf)
        )
    assert not same_bytes(kernel(quantized, scale.roll(1, 0), dtype), found)  # control
    assert same_bytes(restored(quantized, scale, dtype), found)


def test_numbers_that_no_kernel_takes_go_to_the_plain_operations():
    quantized, scale = quantized_and_scales(torch.int8)
    taken = fast.activation_decoder(quantized, scale, torch.float32)
    assert taken is not dequantize_activations  # control
    odd, wide = (quantized[:, :131].contiguous(), scale), (quantized.short(), scale)
    for other in (
        odd,
        wide,
        (quantized.t(), scale[:1].repeat(384, 1)),
        (quantized[:0], scale[:0]),
        (quantized.to("meta"), scale),
    ):
        assert fast.activation_decoder(*other, torch.float32) is dequantize_activations
    assert fast.activation_decoder(quantized, scale, torch.half) is dequantize_activations


def scale_of_a_weight(quantized, scale, dtype):
    return dequantize_activations(quantized, scale.bfloat16().float(), dtype)


def rounded_like_a_weight(quantized, scale, dtype):
    return dequantize_activations(quantized, scale, torch.bfloat16).to(dtype)


def nan_as_a_number(quantized, scale, dtype):
    return dequantize_activations(quantized, scale, dtype).nan_to_num(480.0, torch.inf, -torch.inf)


@pytest.mark.parametrize("broken", [scale_of_a_weight, rounded_like_a_weight, nan_as_a_number])
def test_a_kernel_with_other_numbers_is_reported_and_not_used(monkeypatch, broken):
    monkeypatch.setattr(cpu, "dequantize_activations", broken)
    quantized, scale = quantized_and_scales(torch.float8_e4m3fn)
    with pytest.warns(UserWarning, match="gives other bytes on cpu"):
        assert fast.activation_decoder(quantized, scale, torch.float32) is dequantize_activations


@every_function
def test_what_no_kernel_takes_goes_to_the_plain_operations(monkeypatch, plain):
    x = normal(256, 256, dtype=torch.bfloat16)
    for other in (x.t(), x[:, ::2], x[:0], x.half(), x.to("meta"), x[:, :131].contiguous(), torch.nn.Parameter(x)):
        assert fast.quantizer_of(plain, other) is plain
    assert GEMMS[plain].quantize(x[:0])[0].shape == (0, 256)
    assert same(GEMMS[plain].quantize(x.t()), plain(x.t()))
    assert fast.quantizer_of(plain, x) is not plain  # control
    monkeypatch.setattr(fast, "_compiled", lambda device_type: None)  # no numba
    assert fast.quantizer_of(plain, x) is plain


# A kernel that gives other bytes is not used ------------------------------------------------------------------------


def one_code_off(plain):
    def broken(x):
        quantized, scale = plain(x)
        quantized.view(torch.uint8)[-1, -1] ^= 1
        return quantized, scale

    return broken


def one_scale_off(plain):
    def broken(x):
        quantized, scale = plain(x)
        scale[-1] *= 1 + 2.0**-23
        return quantized, scale

    return broken


def without_the_sign_of_zero(plain):
    return lambda x: plain(x + 0.0)


def deaf_to_nan(plain):
    return lambda x: plain(x.nan_to_num(0.0, torch.inf, -torch.inf))


def the_other_quotient(plain):
    """Divided where the definition multiplies by the reciprocal, and the other way round."""

    def broken(x):
        width, largest = (128 if plain is quantize_groups_fp8 else x.shape[-1]), 448.0
        groups, scale = x.float().unflatten(-1, (-1, width)), plain(x)[1].unsqueeze(-1)
        if plain is quantize_tokens_int8:
            return (groups / scale).flatten(1).clamp(-128, 127).round().nan_to_num(0.0).to(torch.int8), scale[..., 0]
        quotient = groups * scale.reciprocal() if plain is quantize_groups_fp8 else groups / scale
        return quotient.clamp(-largest, largest).to(torch.float8_e4m3fn).flatten(1), scale[..., 0]

    return broken


@pytest.mark.parametrize("broken", [one_code_off, one_scale_off, deaf_to_nan])
@every_function
def test_a_kernel_with_other_bytes_is_reported_and_not_used(monkeypatch, plain, broken):
    monkeypatch.setattr(cpu, "quantize_activations", lambda plain, x, *rule: broken(plain)(x))
    x = normal(1000, 256, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="gives other bytes on cpu"):
        assert fast.quantizer_of(plain, x) is plain
    assert same(GEMMS[plain].quantize(x), plain(x))  # and told only once


@pytest.mark.parametrize(
    ("plain", "broken"),
    [
        (quantize_tokens_fp8, the_other_quotient),
        (quantize_groups_fp8, the_other_quotient),
        (quantize_tokens_int8, the_other_quotient),
        (quantize_tokens_fp8, without_the_sign_of_zero),
        (quantize_groups_fp8, without_the_sign_of_zero),
    ],
)
def test_the_likeliest_mistakes_would_be_seen(monkeypatch, plain, broken):
    monkeypatch.setattr(cpu, "quantize_activations", lambda plain, x, *rule: broken(plain)(x))
    with pytest.warns(UserWarning, match="gives other bytes on cpu"):
        assert fast.quantizer_of(plain, normal(4, 256, dtype=torch.bfloat16)) is plain


@every_function
def test_a_kernel_that_does_not_compile_is_not_used(monkeypatch, plain):
    def failing(*args):
        raise RuntimeError("no compiler")

    for name in ("activations", "asymmetric_activations"):
        monkeypatch.setattr(kernels, name, failing)
    x = normal(4, 256)
    with pytest.warns(UserWarning, match="does not run on cpu.*no compiler"):
        assert same(GEMMS[plain].quantize(x), plain(x))
    assert fast.quantizer_of(plain, x) is plain  # and warned once


# For the GPU --------------------------------------------------------------------------------------------------------

INTERPRETED = """
import torch, triton
from qarl_trl.quant import activations, fast
from qarl_trl.quant.fast import cuda

def kernel_of(plain):
    width, *rule = fast.RULES[plain]
    return lambda x: cuda.quantize_activations(plain, x, width or x.shape[-1], *rule)

def rounded_once(x):  # int8 on a GPU
    amax = x.float().abs().amax(-1, keepdim=True)
    quantized = (x.float() * (torch.full_like(amax, 127.0) / amax)).clamp(-128, 127).round().nan_to_num(0.0).to(torch.int8)
    return quantized values, amax / 127.0

def kernel_that_rounds_once(x):
    words, quantized values, scale = x.view(torch.int32 if x.element_size() == 2 else torch.int64), x.to(torch.int8), x[:, :1].float()
    tile, limits = cuda._tile(words.shape[1]), dict(LARGEST=127.0, LEAST=0.0, FLOOR=0.0)
    args = words, scale.contiguous(), quantized.view(torch.int16), *words.shape, *tile
    grid = (triton.cdiv(len(x), tile[0]),)
    cuda._activation_quantized[grid](*args, **limits, DIVIDED=False, FLOAT8=False, ONCE=True)
    return quantized values, args[1]

cuda._WORDS_PER_PROGRAM = 2**18  # the interpreter's time is that of its programs
functions = [plain for plain in fast.RULES if plain is not activations.quantize_tokens_int8_asymmetric]
for dtype in (torch.bfloat16, torch.float32):
    pairs = [(kernel_of(plain), plain) for plain in functions] + [(kernel_that_rounds_once, rounded_once)]
    for kernel, plain in pairs:
        assert fast._same_activations(kernel, plain, "triton", torch.device("cpu"), dtype), (plain, dtype)
        print(plain.__name__, "agrees")
    assert not torch.equal(*(plain(fast.sample(dtype))[0] for plain in (rounded_once, functions[-1])))  # control
    for code in (torch.int8, torch.float8_e4m3fn):
        args = cuda.dequantize_activations, activations.dequantize_activations, torch.device("cpu"), code, dtype
        assert fast._same_numbers(*args), (code, dtype)
        print(code, "agrees")
# Sizes that fill no tile, and rows of several.
cuda._WORDS_PER_PROGRAM = 256
for plain, width in zip(functions, (1050, 384, 1050)):
    x = torch.randn(2, 5, width).bfloat16()
    for a, b in zip(kernel_of(plain)(x), plain(x)):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), plain
    back = [f(*plain(x), torch.bfloat16) for f in (cuda.dequantize_activations, activations.dequantize_activations)]
    assert torch.equal(*back), plain
    print(plain.__name__, "takes any size")
"""


def test_triton_kernels_have_the_bytes_of_the_plain_operations():
    """In Triton's interpreter, on a CPU."""
    pytest.importorskip("triton")
    result = interpreted(INTERPRETED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("agrees") == 12
    assert result.stdout.count("takes any size") == 3


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("word", ["*i32", "*i64"])
def test_triton_compiles_what_was_written(word, capability):
    """For a GPU that is not there, by the bundled assembler: exact divisions, nothing fused, no subnormals flushed."""
    triton = pytest.importorskip("triton")
    warnings.simplefilter("ignore")  # that it fuses by default, which is what is looked for here
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qarl_trl.quant.fast import cuda

    for float8, divided, memoize_last in (
        (True, False, False),
        (True, True, False),
        (False, False, False),
        (False, False, True),
    ):
        constants = {"ROWS": 32, "COLUMNS": 64, "LARGEST": 448.0, "LEAST": 1e-10, "FLOOR": 1e-6}
        constants |= {"FLOAT8": float8, "DIVIDED": divided, "ONCE": memoize_last}
        pointers = {"words": word, "scales": "*fp32", "out": "*i16", "rows": "i32", "columns": "i32"}
        source = ASTSource(
            cuda._activation_quantized,
            signature=pointers | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
        )
        text = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        floats = set(re.findall(r"(?:abs|add|div|fma|mul|neg|rcp|sub)(?:\.[a-z]+)*\.f32", text))
        exact = {"div.rn.f32"} | ({"mul.f32"} if not divided else set())
        assert exact <= floats <= exact | {"abs.f32", "add.f32"}, floats
