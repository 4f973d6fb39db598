"""`qarl_trl.rollout.vllm.linear_layer`: vLLM's own layers, loaded with the learner's low-bit weights.

Products on the CPU are compared with other forms of them in `../test_engine_gemm.py`. Here is what needs no
kernel: that a layer gets every tensor, and, on a pretended Hopper GPU, what arrives at the last operation.
"""

import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from quant.schemes import NVFP4, copies, low_bit_of, normal, relative_error, same_bytes, same_tensors

from qarl_trl.quant.gemms.activations import quantize_tokens_int8
from qarl_trl.quant.gemms.gemm import Fp8BlockGemm, Fp8Gemm, Int4Fp8Gemm, Int8Gemm
from qarl_trl.quant.quantize import dequantize
from qarl_trl.rollout.engine_gemm import EngineGemm
from qarl_trl.rollout.vllm import linear_layer, start


# vLLM takes seconds to import.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("several_threads")]
BF16 = torch.bfloat16


def kernel_of(low_bit):
    """The name of the kernel that vLLM chose for a weight."""
    return type(low_bit.prepared["engine"].scheme.kernel).__name__


# The layer ------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_layer_is_made_once_for_quantized_and_does_not_touch_them(monkeypatch):
    # A config is kept for the process, and another test may have made it.
    monkeypatch.setattr(linear_layer._configs, "schemes", {})
    low_bit = low_bit_of("W4A16")
    low_bit.scheme.targets = ["re:.*down_proj"]  # a recipe's, which is read for any layer
    before = copies(low_bit.tensors.items())
    x = normal(3, 256, dtype=BF16)

    y = linear_layer.engine_product(x, low_bit)
    layer = low_bit.prepared["engine"]

    assert same_bytes(y, linear_layer.engine_product(x, low_bit_of("W4A16")))
    assert same_bytes(y, linear_layer.engine_product(x, low_bit))
    assert low_bit.prepared["engine"] is layer
    assert same_tensors(low_bit.tensors, before)
    assert low_bit.scheme.targets == ["re:.*down_proj"]


def test_other_tensors_than_the_layers_and_a_size_that_no_kernel_takes_are_errors():
    low_bit = low_bit_of("W4A16")
    del low_bit.tensors["weight_scale"]
    with pytest.raises(RuntimeError, match=r"vLLM's layer holds.*weight_scale.*low-bit weight has.*'auto'"):
        linear_layer.engine_layer(low_bit)

    with pytest.raises(ValueError, match=r"(?s)no kernel for .*(40, 256).*'auto'"):
        linear_layer.engine_layer(low_bit_of("W4A16", shape=(40, 256)))

    # What was set for the layer is put back after an error.
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture
def no_garbage_collector():
    # What goes without it has no cycle.
    gc.disable()
    yield
    gc.enable()


@pytest.mark.engine
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_a_layer_goes_with_its_quantized(no_garbage_collector, scheme):
    """Not when the garbage collector runs: until then every optimizer step would add a copy of the model."""
    low_bit = low_bit_of(scheme)
    linear_layer.engine_product(normal(3, 256, dtype=BF16), low_bit)
    layer = weakref.ref(low_bit.prepared["engine"])
    assert layer() is not None

    del low_bit

    assert layer() is None


@pytest.mark.engine
def test_marlin_has_locks_of_its_own(monkeypatch):
    """The engine's are closed once it has captured graphs."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    low_bit = low_bit_of("W4A16")
    x = normal(3, 256, dtype=BF16)
    linear_layer.engine_product(x, low_bit)
    locks = []

    def apply(*args):
        locks.append(marlin_utils.get_marlin_workspace(x.device))

    monkeypatch.setattr(marlin_utils, "get_marlin_workspace", lambda device: "the engine's", raising=False)
    monkeypatch.setattr(marlin_utils, "marlin_make_workspace_new", lambda device, blocks: ("new", blocks))
    monkeypatch.setattr(marlin_utils, "MARLIN_MAX_BLOCKS_PER_SM", 4, raising=False)
    monkeypatch.setattr(low_bit.prepared["engine"].quant_method, "apply", apply)
    linear_layer.engine_product(x, low_bit)

    assert locks == [("new", 4)]
    assert marlin_utils.get_marlin_workspace(x.device) == "the engine's"


@pytest.fixture
def settings_of_layers(monkeypatch):
    """The settings that vLLM made its W4A16 layers with, one after the other. No engine is in this process."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    create_weights = schemes.CompressedTensorsWNA16.create_weights
    settings = []

    def create_and_note(*args, **kwargs):
        settings.append(get_current_vllm_config())
        return create_weights(*args, **kwargs)

    monkeypatch.setattr(schemes.CompressedTensorsWNA16, "create_weights", create_and_note)
    monkeypatch.setattr(linear_layer._configs, "engine", None)
    return settings


def test_a_layer_needs_no_ranks_and_leaves_block_scales_as_the_engine_does(settings_of_layers, monkeypatch):
    from vllm.distributed import parallel_state

    # Control: vLLM's own call, which its layers make, needs a group of ranks.
    with pytest.raises(AssertionError):
        parallel_state.get_tensor_model_parallel_rank()
    monkeypatch.delenv(start.BLOCK_SCALES, raising=False)

    linear_layer.engine_layer(low_bit_of("W4A16"))

    # As `LowBitVLLMGeneration` leaves them.
    assert os.environ[start.BLOCK_SCALES] == "0"


def test_a_layer_follows_the_settings_of_an_engine(settings_of_layers):
    from vllm.config import CompilationMode, VllmConfig

    engine_settings = VllmConfig()
    engine_settings.compilation_config.mode = CompilationMode.VLLM_COMPILE
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=engine_settings))

    linear_layer.engine_layer(low_bit_of("W4A16"))
    linear_layer.use_settings_of(llm)
    linear_layer.engine_layer(low_bit_of("W4A16"))

    default, followed = settings_of_layers
    assert default.cache_config is not engine_settings.cache_config
    assert followed.cache_config is engine_settings.cache_config
    assert followed.compilation_config.custom_ops == engine_settings.compilation_config.custom_ops

    # Nothing is compiled for a learner, and the engine's own settings stay.
    assert default.compilation_config.mode == CompilationMode.NONE
    assert followed.compilation_config.mode == CompilationMode.NONE
    assert engine_settings.compilation_config.mode == CompilationMode.VLLM_COMPILE


# A pretended Hopper GPU: vLLM chooses and lays out for it; the operations without a CPU form are replaced -------


@pytest.fixture
def hopper(monkeypatch):
    """vLLM's choices are those for compute capability 9.0; the tensors stay on the CPU, and nothing is compiled."""
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(linear_layer._configs, "engine", None)
    # What is imported by it would look for the libraries of a GPU, so it must be imported before the GPU is pretended.
    linear_layer.engine_layer(low_bit_of("W4A16"))

    kind = type(current_platform)
    monkeypatch.setattr(kind, "_enum", PlatformEnum.CUDA)
    monkeypatch.setattr(kind, "is_cuda", lambda self: True)
    monkeypatch.setattr(kind, "is_cpu", lambda self: False)
    monkeypatch.setattr(kind, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)))
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def quantized_inputs(monkeypatch):
    """vLLM quantizes inputs to float8 by its plain form, and to int8 by ours."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    def quantize_int8(x, *args, **kwargs):
        quantized, scale = quantize_tokens_int8(x)
        return quantized, scale, None

    monkeypatch.setattr(QuantFP8, "forward_cuda", QuantFP8.forward_native)
    monkeypatch.setattr(ops, "scaled_int8_quant", quantize_int8)


def compare(plain, scheme, shape=(128, 256), with_bias=True):
    """
    The engine's product of a weight is nearly the plain one, with the same inputs saved.

    Returns the weight, the engine's product, what it saved, and the bias.
    """
    low_bit = low_bit_of(scheme, shape=shape)
    x = normal(2, 5, 256, seed=1, dtype=BF16)
    bias = normal(shape[0], seed=2, dtype=BF16) if with_bias else None

    y, saved = EngineGemm(plain).forward(x, low_bit, bias)
    expected, expected_saved = plain.forward(x, low_bit, bias)

    # The same float32 numbers, added up in another order.
    assert relative_error(y, expected) < 2**-8
    assert len(saved) == len(expected_saved)
    for tensor, expected_tensor in zip(saved, expected_saved, strict=True):
        assert same_bytes(tensor, expected_tensor)

    # Control: another weight.
    other = low_bit_of(scheme, shape=shape, seed=5)
    other_y, _ = EngineGemm(plain).forward(x, other, bias)
    assert relative_error(other_y, expected) > 0.5
    return low_bit, y, saved, bias


def unpacked(words, in_features):
    """
    Quantized values plus 8, `(in, out)`, of 4-bit weights in words of 32 bits, `(in / 8, out)`.

    Each word has eight input channels, the first in the lowest bits.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1)
    words = words.reshape(in_features // 8, 1, -1)
    return (words >> shifts & 15).flatten(0, 1)


def spread(scales, in_features):
    """Scales `(groups, out)` of each input channel, `(in, out)`."""
    return scales.repeat_interleave(in_features // scales.shape[0], 0)


# Machete --------------------------------------------------------------------------------------------------------


@pytest.fixture
def machete(hopper, monkeypatch):
    """Machete's product in plain operations, and the type and group size of each call."""
    from vllm import _custom_ops as ops

    calls = []

    def mm(a, b_q, b_type, b_group_zeros, b_group_scales, b_group_size):
        calls.append((str(b_type), b_group_size))
        in_features = a.shape[1]
        packed = unpacked(b_q, in_features)
        scales = spread(b_group_scales, in_features)

        if b_group_zeros is None:
            weight = (packed - 8).to(BF16) * scales
        else:
            # They are negative, and have the scale in them.
            weight = packed.to(BF16) * scales + spread(b_group_zeros, in_features)
        return F.linear(a, weight.t())

    monkeypatch.setattr(ops, "machete_prepack_B", lambda b_q_weight, *_, **__: b_q_weight)
    monkeypatch.setattr(ops, "machete_mm", mm)
    return calls


@pytest.mark.parametrize("group_size", [128, -1])
def test_machete_gets_the_synced_quantized_and_scales(machete, group_size):
    low_bit = low_bit_of("W4A16", group_size)
    x = normal(5, 256, seed=1, dtype=BF16)
    bias = normal(128, dtype=BF16)

    y = linear_layer.engine_product(x, low_bit)

    assert kernel_of(low_bit) == "MacheteLinearKernel"
    assert machete == [("uint4b8", group_size)]
    assert same_bytes(y, F.linear(x, dequantize(low_bit)))
    # A bias comes after the rounding, as `EngineGemm` does it.
    assert same_bytes(linear_layer.engine_product(x, low_bit, bias), y + bias)

    # Control: another weight.
    other = low_bit_of("W4A16", group_size, seed=5)
    assert not same_bytes(y, F.linear(x, dequantize(other)))


def test_machete_multiplies_zero_points_and_scales_beforehand(machete):
    """So its weight is `q s - z s`, each product rounded, where the checkpoint decompresses to `(q - z) s`."""
    low_bit = low_bit_of("W4A16_ASYM")
    x = normal(5, 256, seed=1, dtype=BF16)

    y = linear_layer.engine_product(x, low_bit)

    assert [kind for kind, _ in machete] == ["uint4"]
    expected = F.linear(x.double(), dequantize(low_bit).double())
    assert 2e-3 < relative_error(y, expected) < 2e-2

    # Control: the result's rounding alone.
    assert relative_error(F.linear(x, dequantize(low_bit)), expected) < 2e-3


# Marlin ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def marlin(hopper, monkeypatch):
    """Marlin's product in plain operations, and the shape of the packed weight in each call."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    calls = []

    def repack(b_q_weight, size_k, size_n, num_bits, **_):
        return b_q_weight.reshape(size_k // 16, size_n * num_bits // 2)

    def in_order(scales, size_n):
        """Scales without Marlin's permutation."""
        grouped, single = marlin_utils.get_scale_perms()
        permutation = grouped if scales.shape[0] > 1 else single
        order = torch.tensor(permutation).argsort()
        return scales.reshape(-1, len(order))[:, order].reshape(-1, size_n)

    def signed(b_q, bits, size_k, size_n):
        """Quantized values, `(in, out)`, of weights of 4 or 8 bits."""
        words = b_q.reshape(size_k * bits // 32, 1, size_n)
        shifts = torch.arange(0, 32, bits, dtype=torch.int32).view(1, -1, 1)
        return (words >> shifts & (2**bits - 1)).flatten(0, 1) - 2 ** (bits - 1)

    def gemm(a, b_q, bias, scales, *_, size_n, size_k, **__):
        calls.append(tuple(b_q.shape))
        assert bias is None

        bits = 32 * b_q.numel() // (size_n * size_k)
        quantized = signed(b_q, bits, size_k, size_n)
        weight = quantized.to(BF16) * spread(in_order(scales, size_n), size_k)
        return F.linear(a, weight.t())

    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(torch.ops.vllm, "marlin_gemm", gemm, raising=False)
    # On a Hopper vLLM takes Machete wherever it can.
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "MacheteLinearKernel")
    return calls


@pytest.mark.parametrize(("scheme", "group_size"), [("W4A16", 128), ("W4A16", -1), ("W8A16", 128)])
def test_marlin_gets_the_synced_quantized_and_scales(marlin, scheme, group_size):
    low_bit = low_bit_of(scheme, group_size)
    x = normal(5, 256, seed=1, dtype=BF16)

    y = linear_layer.engine_product(x, low_bit)

    assert kernel_of(low_bit) == "MarlinLinearKernel"
    assert marlin
    assert same_bytes(y, F.linear(x, dequantize(low_bit)))

    # Control: another weight.
    other = low_bit_of(scheme, group_size, seed=5)
    assert not same_bytes(y, F.linear(x, dequantize(other)))


def test_nvfp4_is_loaded_with_the_synced_tensors(hopper, monkeypatch):
    from vllm.model_executor.kernels.linear.nvfp4 import marlin

    def gemm(input, weight, weight_scale, weight_global_scale, **_):
        # The eight magnitudes of a 4-bit float. The highest bit is the sign.
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        packed = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1).int()
        values = magnitudes[packed & 7] * torch.where(packed > 7, -1, 1)
        scale = weight_scale.float() * weight_global_scale
        matrix = (values.unflatten(1, (-1, 16)) * scale.unsqueeze(-1)).flatten(1)
        return F.linear(input.float(), matrix)

    monkeypatch.setattr(marlin.MarlinNvFp4LinearKernel, "is_supported", classmethod(lambda cls, *_: (True, None)))
    monkeypatch.setattr(marlin, "prepare_fp4_layer_for_marlin", lambda layer: setattr(layer, "workspace", None))
    monkeypatch.setattr(marlin, "apply_fp4_marlin_linear", gemm)
    low_bit = low_bit_of(NVFP4)
    x = normal(5, 256, seed=1, dtype=BF16)
    assert low_bit.shape == (128, 256)

    y = linear_layer.engine_product(x, low_bit)

    # Each weight is rounded to bfloat16 in the dequantized matrix only.
    expected = F.linear(x.float(), dequantize(low_bit, torch.float32))
    assert relative_error(y, expected) < 2**-8

    # Control: another weight.
    other = dequantize(low_bit_of(NVFP4, seed=5), torch.float32)
    assert relative_error(y, F.linear(x.float(), other)) > 1


# CUTLASS --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cutlass_w4a8(hopper, quantized_inputs, monkeypatch):
    """The product of W4AFP8 in plain operations."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.mixed_precision import cutlass

    def mm(a, b_q, b_group_scales, b_group_size, a_token_scales, b_channel_scales):
        in_features = a.shape[1]
        packed = unpacked(b_q, in_features)
        quantized = torch.where(packed > 7, packed - 16, packed)  # signed now
        table = (quantized * spread(b_group_scales.float(), in_features)).to(a.dtype)
        return ((a.float() @ table.float()) * a_token_scales * b_channel_scales.t()).to(BF16)

    def as_on_a_gpu(function):
        def call(*args):
            with monkeypatch.context() as context:
                context.setattr(torch.Tensor, "is_cuda", True)
                return function(*args)

        return call

    for name in ("convert_bf16_scales_to_fp8", "convert_packed_uint4b8_to_signed_int4_inplace"):
        monkeypatch.setattr(cutlass, name, as_on_a_gpu(getattr(cutlass, name)))
    for name in ("cutlass_encode_and_reorder_int4b", "cutlass_pack_scale_fp8"):
        monkeypatch.setattr(ops, name, lambda tensor: tensor)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(ops, "cutlass_w4a8_mm", mm)


def test_w4afp8_gets_the_table_of_the_plain_form(cutlass_w4a8):
    low_bit, y, saved, bias = compare(Int4Fp8Gemm(), "W4AFP8")

    assert kernel_of(low_bit) == "CutlassW4A8LinearKernel"
    # Control: by the matrix that the checkpoint decompresses to, measured 0.026.
    quantized = Int4Fp8Gemm().input_from(saved, torch.float32)
    decompressed = F.linear(quantized, dequantize(low_bit, torch.float32), bias.float())
    assert relative_error(y, decompressed) > 0.01


@pytest.mark.parametrize(("scheme", "plain"), [("FP8_DYNAMIC", Fp8Gemm), ("W8A8", Int8Gemm)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_cutlass_gets_the_synced_quantized_and_scales(hopper, quantized_inputs, monkeypatch, scheme, plain, with_bias):
    from vllm import _custom_ops as ops

    calls = []

    def mm(a, b, scale_a, scale_b, out_dtype, bias=None):
        calls.append((a.dtype, b.dtype))
        y = (a.float() @ b.float()) * scale_a * scale_b.reshape(1, -1)
        if bias is not None:
            y = y + bias.float()
        return y.to(out_dtype)

    monkeypatch.setattr(ops, "cutlass_scaled_mm_supports_fp8", lambda capability: capability >= 89)
    monkeypatch.setattr(ops, "cutlass_scaled_mm", mm)

    low_bit, _, saved, _ = compare(plain(), scheme, with_bias=with_bias)

    assert set(calls) == {(saved[0].dtype, low_bit.quantized.dtype)}


def test_blocks_reach_cutlass_with_the_synced_scales(hopper, quantized_inputs, monkeypatch):
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels.linear.scaled_mm import cutlass

    def mm(a, b, scale_a, scale_b, out_dtype, bias=None):
        scales = scale_b.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        y = F.linear(a.float() * scale_a.repeat_interleave(128, 1), b.t().float() * scales)
        if bias is not None:
            y = y + bias.float()
        return y.to(out_dtype)

    monkeypatch.setattr(ops, "cutlass_scaled_mm_supports_block_fp8", lambda capability: True)
    monkeypatch.setattr(cutlass, "CUTLASS_BLOCK_FP8_SUPPORTED", True)
    monkeypatch.setattr(ops, "cutlass_scaled_mm", mm)

    low_bit, *_ = compare(Fp8BlockGemm(), "FP8_BLOCK", shape=(384, 256))

    kernel = low_bit.prepared["engine"].scheme.fp8_linear
    assert type(kernel).__name__ == "CutlassFp8BlockScaledMMKernel"
