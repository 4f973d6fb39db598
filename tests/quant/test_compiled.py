"""`qarl_trl.quant.compiled`: a compiled quantizer gives the bytes of the eager one, or is not used.

Inductor compiles for the CPU here, where it is otherwise not used; what it writes for CUDA is shown by
`tests/gpu/first_run.py`.
"""

import shutil
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from qarl_trl.quant import activations, compiled, quantize_weight, resolve_scheme
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.scheme import SUPPORTED
from quant.schemes import NVFP4, normal, same_bytes, same_tensors
from quant.test_reference import many_weights, parts


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED if name != "W4A16_ASYM"]
DTYPES = [torch.bfloat16, torch.float32]
QUANTIZERS = [
    activations.quantize_tokens_fp8,
    activations.quantize_groups_fp8,
    activations.quantize_tokens_int8,
]


@pytest.fixture
def on_cpu(monkeypatch):
    """Functions are compiled on a CPU too, and compared again; a difference is an error unless the test expects it."""
    monkeypatch.setattr(compiled, "DEVICES", ("cpu",))
    monkeypatch.setattr(compiled, "_CHOSEN", {})
    # `isolated` sets it to 1 for good.
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
    torch._dynamo.reset()


def all_compiled():
    """Whether no function fell back to its eager form."""
    return all(chosen is not plain for (plain, *_), chosen in compiled._CHOSEN.items())


def all_dequantized(low_bits):
    return [dequantize(low_bit, dtype) for low_bit in low_bits for dtype in DTYPES]


@pytest.mark.parametrize("scheme", ["W4A16_ASYM", *SLOW])
def test_a_compiled_quantizer_gives_the_bytes_of_the_eager_one(scheme, request):
    resolved = resolve_scheme(scheme)
    weights = [*parts(many_weights(0), resolved), normal(384, 896), normal(256, 640)]
    if scheme == NVFP4:
        weights = weights[:2]
    eager = [quantize_weight(weight, resolved) for weight in weights]
    eager_matrices = all_dequantized(eager)

    request.getfixturevalue("on_cpu")
    low_bits = [quantize_weight(weight, resolve_scheme(scheme)) for weight in weights]
    matrices = all_dequantized(low_bits)

    for low_bit, expected in zip(low_bits, eager, strict=True):
        assert same_tensors(low_bit.tensors, expected.tensors)
    assert all(map(same_bytes, matrices, eager_matrices))
    # Extremes, encode, decode to either dtype; compressed-tensors encodes 4-bit floats.
    assert len(compiled._CHOSEN) == (3 if scheme == NVFP4 else 4)
    assert all_compiled()
    assert not counters["graph_break"]
    # One graph for all sizes and all layers' schemes; where blocks are read another one for sizes seen once.
    assert counters["stats"]["unique_graphs"] <= 8, counters["stats"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_compiled_quantizers_of_activations_give_the_bytes_of_the_eager_ones(quantize, dtype, on_cpu):
    eager_quantize = quantize.__wrapped__
    eager_dequantize = activations.dequantize_activations.__wrapped__.__wrapped__
    x = torch.cat([normal(70, 384, seed=i, scale=10.0**i) for i in range(-30, 30, 4)]).to(dtype)

    quantized = quantize(x)
    restored = activations.dequantize_activations(*quantized, dtype)

    expected = eager_quantize(x)
    assert all(map(same_bytes, quantized, expected))
    assert same_bytes(restored, eager_dequantize(*expected, dtype))
    assert all_compiled()
    assert len(compiled._CHOSEN) == 2


def test_other_bytes_are_found_before_use(on_cpu, monkeypatch):
    """Without the roundings to bfloat16 that eager operations make between their kernels."""
    monkeypatch.setattr(compiled, "OPTIONS", {"emulate_precision_casts": False})
    weight = normal(512, 1024).bfloat16()
    scheme = resolve_scheme("W4A16_ASYM")

    with pytest.warns(UserWarning, match="encode gives other bytes than eager"):
        low_bit = quantize_weight(weight, scheme)
    # It warns once: another warning would be an error.
    quantize_weight(weight, scheme)

    is_eager = {plain.__name__: chosen is plain for (plain, *_), chosen in compiled._CHOSEN.items()}
    assert is_eager == {"extremes": False, "encode": True}
    monkeypatch.setattr(compiled, "DEVICES", ())
    assert same_tensors(low_bit.tensors, quantize_weight(weight, scheme).tensors)


def test_a_compiler_that_fails_leaves_the_eager_operations(on_cpu, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda plain, **options: fails)
    x = normal(4, 256)

    with pytest.warns(UserWarning, match=r"quantize_tokens_fp8 does not run \(RuntimeError: no compiler here\)"):
        quantized = activations.quantize_tokens_fp8(x)

    assert all(map(same_bytes, quantized, activations.quantize_tokens_fp8.__wrapped__(x)))


def test_on_a_cpu_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(compiled, "_choose", lambda *args: pytest.fail("compiled"))

    quantize_weight(normal(8, 256), resolve_scheme("W4A16"))
    activations.quantize_tokens_fp8(normal(8, 256))
