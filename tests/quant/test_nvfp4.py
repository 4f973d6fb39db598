"""NVFP4A16: 4-bit floats, float8 scales of 16, and one float32 scale for all layers that an engine merges.

`tests/export/test_low_bit.py` compares a whole model with llm-compressor.
"""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, low_bit_store, quantize_weight, resolve_scheme
from qarl_trl.quant.quantize import dequantize, largest_magnitude
from quant.schemes import NVFP4, normal, same_tensors


SCHEME = resolve_scheme(NVFP4)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        # As grouped-query attention has them: q wider than k and v. An engine merges the three.
        self.q_proj = nn.Linear(64, 32)
        self.k_proj = nn.Linear(64, 16)
        self.v_proj = nn.Linear(64, 16)
        self.o_proj = nn.Linear(32, 64)


def global_scales(model):
    """By the last name of the layer."""
    scales = {}
    for name, tensor in iter_low_bit_weights(model):
        if name.endswith("global_scale"):
            layer = name.split(".")[-2]
            scales[layer] = tensor.item()
    return scales


def by_compressed_tensors(weight, largest):
    """The tensors of a checkpoint; `largest` sets the global scale."""
    weight = weight.bfloat16()
    # 16 weights share a float8 scale.
    groups = weight.unflatten(-1, (-1, 16))
    global_scale = generate_gparam(-largest.reshape(1), largest.reshape(1))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights, global_scale)

    compressor = BaseCompressor.get_value_from_registry(SCHEME.format.value)
    tensors = {
        "weight": weight,
        "weight_scale": scale,
        "weight_global_scale": global_scale,
        "weight_zero_point": zero_point,
    }
    return compressor.compress(tensors, SCHEME)


@pytest.mark.parametrize("scale", [1e-6, 0.02, 30.0])
def test_a_million_weights_have_the_bytes_of_compressed_tensors(scale):
    weight = normal(1024, 1024, scale=scale)
    # A row of zeros, a group of negative zeros, and an outlier that sets the global scale.
    weight[0] = 0.0
    weight[1, :16] = -0.0
    weight[2, 3] = 50 * scale

    low_bit = quantize_weight(weight, SCHEME)
    largest = largest_magnitude(weight, SCHEME)

    assert largest == weight.bfloat16().abs().max()
    assert same_tensors(low_bit.tensors, by_compressed_tensors(weight, largest))
    # Control: another global scale gives other quantized values.
    other = by_compressed_tensors(weight, 1.3 * largest)
    assert not torch.equal(low_bit.quantized, other["weight_packed"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_layer_that_is_merged_with_this_one_is_refused(value):
    largest = torch.tensor(value, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match=r"\(8, 64\) must be finite"):
        quantize_weight(normal(8, 64), SCHEME, largest=largest)


def test_layers_that_an_engine_merges_share_the_largest_weight():
    torch.manual_seed(0)
    model = Attention()
    # Far above all others, which `nn.Linear` draws below 1 / 8.
    model.k_proj.weight.data[0, 0] = 7.0
    apply_quantization(model, NVFP4)

    scales = global_scales(model)

    # 448 is the largest float8, 6 the largest 4-bit float.
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] == 448 * 6 / 7.0
    # Control: a layer of its own.
    assert scales["o_proj"] > scales["q_proj"]


def test_layers_share_it_where_keys_are_the_values():
    """As in Gemma-4's full attention, of which vLLM merges q, k and once more k."""
    torch.manual_seed(0)
    model = Attention()
    model.v_proj = None
    model.k_proj.weight.data[0, 0] = 7.0
    apply_quantization(model, NVFP4)

    scales = global_scales(model)

    assert scales["q_proj"] == scales["k_proj"] == 448 * 6 / 7.0
    assert scales["o_proj"] > scales["q_proj"]


def test_linear_attention_shares_it_too():
    """vLLM merges these pairs of Qwen3.5, and of each takes one of the two scales for both."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3_5TextConfig(vocab_size=64, num_hidden_layers=1, layer_types=["linear_attention"], **sizes)
    model = apply_quantization(Qwen3_5ForCausalLM(config), NVFP4)

    scales = global_scales(model)

    assert scales["in_proj_qkv"] == scales["in_proj_z"]
    assert scales["in_proj_b"] == scales["in_proj_a"]
    # Control: each has its own largest weight.
    assert scales["in_proj_qkv"] != scales["in_proj_b"]


def test_quantized_values_follow_the_largest_weight_of_another_layer():
    model = apply_quantization(Attention(), NVFP4)
    low_bit_store(model).will_be_told()
    before = model.q_proj.low_bit()
    # The premise: it is kept while nothing changes.
    assert model.q_proj.low_bit() is before

    with torch.no_grad():
        # A write to v alone. The bytes of q change with it.
        model.v_proj.weight[0, 0] = 14.0

    assert model.q_proj.low_bit().tensors["weight_global_scale"].item() == 448 * 6 / 14.0


def test_forward_and_gradient_go_through_the_quantized_weight():
    model = apply_quantization(Attention(), NVFP4)
    x = normal(3, 64).requires_grad_()
    weight = dequantize(model.q_proj.low_bit(), torch.float32)

    y = model.q_proj(x)
    y.sum().backward()

    assert torch.equal(y, x @ weight.t() + model.q_proj.bias)
    # Sums of 32 float32 numbers.
    assert torch.allclose(x.grad, weight.sum(0).expand(3, -1), atol=1e-5)
    assert torch.allclose(model.q_proj.weight.grad, x.detach().sum(0).expand(32, -1), atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diverged_weight_is_refused(value):
    weight = torch.randn(8, 64)
    weight[2, 20] = value

    with pytest.raises(ValueError, match=r"\(8, 64\) must be finite"):
        quantize_weight(weight, SCHEME)


def test_low_bit_experts_are_refused():
    from conftest import make_model

    with pytest.raises(ValueError, match=r"NVFP4A16.*experts"):
        apply_quantization(make_model(kind="qwen3_moe"), NVFP4)
