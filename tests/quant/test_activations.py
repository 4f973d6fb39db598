"""`qarl_trl.quant.activations`: the quantized values of the definition, and of vLLM's own operations."""

import threading
import weakref

import pytest
import references
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from qarl_trl.quant import apply_quantization, linear
from qarl_trl.quant import gemm as gemm_module
from qarl_trl.quant.activations import (
    memoize_last,
    quantize_groups_fp8,
    quantize_tokens_fp8,
    quantize_tokens_int8,
    quantize_tokens_int8_asymmetric,
)
from quant.schemes import NAMES, WEIGHT_ONLY, normal, relative_error


SIZES = [1e-30, 1e-3, 1.0, 1e4]
DTYPES = [torch.bfloat16, torch.float32]


def tokens(scale=1.0, dtype=torch.float32, seed=0, shape=(40, 256)):
    """Activations with a token of zeros, one of negative zeros, an outlier, one sign each, and ties."""
    x = scale * normal(*shape, seed=seed)
    x[3] = 0.0
    x[4] = -0.0
    x[5, 7] = 100 * scale
    x[6], x[7] = x[6].abs(), -x[7].abs()
    x[8] = scale * (torch.arange(shape[1]) % 255 - 127.0) / 2
    return x.to(dtype)


def as_bytes(tensor):
    return tensor.view(torch.uint8)


# Float8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [*SIZES, 1e-13])
@pytest.mark.parametrize(
    ("quantize", "reference"),
    [
        (quantize_tokens_fp8, references.quantize_tokens_float8),
        (quantize_groups_fp8, references.quantize_groups_float8),
    ],
)
def test_float8_of_a_token_or_group_is_that_of_the_definition(dtype, scale, quantize, reference):
    x = tokens(scale, dtype)
    quantized, scales = quantize(x)
    expected_quantized, expected_scales = reference(x)
    assert scales.dtype == torch.float32
    assert torch.equal(scales, expected_scales)
    assert torch.equal(as_bytes(quantized), expected_quantized)


def test_dividing_by_the_scale_gives_other_quantized():
    """The control of the tests around: vLLM multiplies by the reciprocal, which tells near ties between quantized values apart."""
    x = torch.tensor([[float.fromhex(v) for v in ("0x1.c4aa3p+0", "0x1.332a56p-1")]])
    quantized, scales = quantize_tokens_fp8(x)
    assert quantized[0, 1].item() == 144.0
    assert (x / scales).to(torch.float8_e4m3fn)[0, 1].item() == 160.0


def test_multiplying_a_group_by_the_reciprocal_gives_other_quantized():
    """The control: groups are divided by their scale where tokens are multiplied by its reciprocal."""
    x = normal(4000, 128)
    quantized, scales = quantize_groups_fp8(x)
    other = (x * scales.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert 0 < (as_bytes(other) != as_bytes(quantized)).float().mean() < 1e-4


def test_the_outlier_of_a_group_leaves_the_other_groups_alone():
    x = normal(3, 256)
    before = quantize_groups_fp8(x)
    x[1, 200] = 1e6
    quantized, scales = quantize_groups_fp8(x)
    assert torch.equal(as_bytes(quantized[:, :128]), as_bytes(before[0][:, :128]))
    assert (scales != before[1]).nonzero().tolist() == [[1, 1]]


# Int8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [*SIZES, 1e-38, 1e-40])
def test_int8_of_a_token_is_that_of_the_definition(dtype, scale):
    """Down to scales whose reciprocal is infinite, where every number but zero saturates."""
    x = tokens(scale, dtype)
    quantized, scales = quantize_tokens_int8(x)
    expected_quantized, expected_scales = references.quantize_tokens_int8(x)
    assert (quantized.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, expected_quantized)
    assert not quantized[3:5].any()
    assert not scales[3:5].any()


def test_dividing_or_one_rounding_of_the_reciprocal_gives_other_int8_quantized():
    """The controls: on a CPU vLLM multiplies by the reciprocal of the rounded scale."""
    x = tokens(dtype=torch.bfloat16, shape=(4000, 256))  # the engine's dtype has many near ties
    quantized, scales = quantize_tokens_int8(x)
    x = x.float()
    divided = (x / scales).round().nan_to_num(0.0).to(torch.int8)
    memoize_last = (x * (127.0 / x.abs().amax(-1, keepdim=True))).round().nan_to_num(0.0).to(torch.int8)
    assert 0 < (divided != quantized).float().mean() < 1e-3
    assert 0 < (memoize_last != quantized).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SIZES)
def test_asymmetric_int8_of_a_token_is_that_of_the_definition(dtype, scale):
    x = tokens(scale, dtype)
    quantized, scales = quantize_tokens_int8_asymmetric(x)
    expected_quantized, expected_scales = references.quantize_tokens_int8_asymmetric(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, torch.tensor(expected_quantized, dtype=torch.int16))
    assert not quantized[3:5].any()
    assert (scales[3:5] == 1).all()


def test_one_sign_uses_the_whole_range_of_asymmetric_quantized():
    quantized, scales = quantize_tokens_int8_asymmetric(tokens())
    assert quantized[6].max() > 250
    assert quantized[6].min() >= 0
    assert quantized[7].min() < -250
    assert quantized.abs().max() <= 255
    assert (
        relative_error(quantized[6:8] * scales[6:8], tokens()[6:8]) < 0.004
    )  # measured 0.0032; symmetric quantized values 0.0064
    symmetric, scale = quantize_tokens_int8(tokens())
    assert relative_error(symmetric[6:8] * scale[6:8], tokens()[6:8]) > 0.005


def test_halves_are_rounded_away_from_zero_in_asymmetric_quantized():
    """The control: to even, as everywhere else, some tokens get other quantized values."""
    x = torch.tensor([[0.5, 1.5, 2.5, 3.5, 255.0], [-0.5, -1.5, -2.5, -3.5, -255.0]])  # one step is 1
    quantized, scales = quantize_tokens_int8_asymmetric(x)
    assert scales.unique().tolist() == [1.0]
    assert quantized.tolist() == [[1, 2, 3, 4, 255], [-1, -2, -3, -4, -255]]
    assert not torch.equal(quantized.float(), x.round())


def test_the_zero_point_comes_from_the_side_that_the_engine_takes():
    """From the minimum or the maximum it is the same number but for rounding, which counts where it is halfway."""
    rng = torch.Generator().manual_seed(0)
    low = torch.randint(1, 254, (2000,), generator=rng) + 0.5
    x = torch.stack((-low, 255 - low, low / 3), dim=-1) * (0.5 + torch.rand(2000, 1, generator=rng))
    quantized, scales = quantize_tokens_int8_asymmetric(x)
    expected_quantized, expected_scales = references.quantize_tokens_int8_asymmetric(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized, torch.tensor(expected_quantized, dtype=torch.int16))
    # Control: the rows tell the two sides apart.
    steps = torch.full((2000,), 255.0) / (x[:, 1] - x[:, 0])
    assert ((-128 - x[:, 0] * steps).round() != (127 - x[:, 1] * steps).round()).sum() > 100


# Once for each input -------------------------------------------------------------------------------------------------


class Counted:
    """A function of a tensor that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, factor=2.0):
        self.calls += 1
        return x * factor


def test_the_same_tensor_gives_the_same_object_and_another_one_does_not():
    function, x = Counted(), normal(3, 4)
    found = memoize_last(function, x)
    assert memoize_last(function, x) is found
    assert function.calls == 1
    assert memoize_last(function, x.clone()) is not found  # equal numbers, another tensor
    assert function.calls == 2
    assert torch.equal(memoize_last(function, x, 3.0), 3 * x)
    assert torch.equal(memoize_last(Counted(), x), 2 * x)


def changed_in_place(x):
    x.add_(1)


def changed_in_part(x):
    x[1, 2] = 9


def changed_through_a_view(x):
    x.view(-1)[3:5].zero_()


def changed_storage(x):
    x.data = x + 1


@pytest.mark.parametrize("change", [changed_in_place, changed_in_part, changed_through_a_view, changed_storage])
def test_a_changed_tensor_is_computed_again(change):
    function, x = Counted(), normal(3, 4)
    before = memoize_last(function, x)
    change(x)
    assert torch.equal(memoize_last(function, x), 2 * x)
    assert not torch.equal(before, 2 * x)  # control
    assert function.calls == 2


def test_nothing_is_held_longer_than_the_input():
    function, x = Counted(), normal(3, 4)
    result, source = weakref.ref(memoize_last(function, x)), weakref.ref(x)
    assert result() is not None
    y = memoize_last(Counted(), result())  # as the quantized values of a cast
    chained = weakref.ref(y)
    del y
    assert chained() is not None
    del x
    assert (source(), result(), chained()) == (None, None, None)


def test_a_function_that_returns_its_input_holds_nothing():
    x = normal(3, 4)
    assert memoize_last(torch.Tensor.to, x, torch.float32) is x
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_every_thread_computes_for_itself():
    function, x, found = Counted(), normal(3, 4), []
    memoize_last(function, x)
    thread = threading.Thread(target=lambda: found.append(memoize_last(function, x)))
    thread.start()
    thread.join()
    assert function.calls == 2
    assert memoize_last(function, x) is not found[0]


def test_tensors_of_inference_mode_are_computed_each_time():
    function = Counted()
    with torch.inference_mode():
        x = normal(3, 4)
        memoize_last(function, x)
        x.add_(1)  # which counts no version
        assert torch.equal(memoize_last(function, x), 2 * x)


def counted(monkeypatch, scheme):
    """Counts the calls of the quantizer of a scheme's activations."""
    gemm = gemm_module._GEMMS[scheme]
    owner = next(cls for cls in gemm.__mro__ if "quantize" in vars(cls))
    original, calls = gemm.quantize, []
    monkeypatch.setattr(owner, "quantize", staticmethod(lambda x: calls.append(1) or original(x)))
    return calls


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**size, **heads, tie_word_embeddings=False)).state_dict(), size | heads


def step(decoder, scheme, recomputed=False, autocast=True):
    """Loss and gradients of a small Qwen3 in a scheme."""
    state, config = decoder
    model = Qwen3ForCausalLM(Qwen3Config(**config, tie_word_embeddings=False))
    model.load_state_dict(state)
    apply_quantization(model.train(), scheme)
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tokens = torch.arange(32).view(2, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", [name for name in NAMES if name not in WEIGHT_ONLY])
def test_a_decoder_layer_quantizes_four_inputs_for_seven_layers(monkeypatch, decoder, scheme, autocast, recomputed):
    """Those of q, k, v; o; gate, up; and down; again where the forward is computed again, with the same results."""
    calls = counted(monkeypatch, scheme)
    found = step(decoder, scheme, recomputed, autocast)
    passes = 2 * (2 if recomputed else 1)  # of two layers
    assert len(calls) == 4 * passes
    # Control: each layer by itself.
    for module in (gemm_module, linear):
        monkeypatch.setattr(module, "memoize_last", lambda function, x, *args: function(x, *args))
    calls.clear()
    expected = step(decoder, scheme, recomputed, autocast)
    assert len(calls) == 7 * passes
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("scheme", "size"), [("FP8_DYNAMIC", 128 + 4), ("W8A8", 128 + 4), ("W4A16", 2 * 128)])
def test_layers_with_one_input_keep_one_copy_for_the_backward(monkeypatch, scheme, size):
    """Bytes a token: quantized values and their scale, or the bfloat16 cast of autocast."""
    model = apply_quantization(nn.ModuleList([nn.Linear(128, 128) for _ in range(3)]), scheme)
    x = normal(10, 128).requires_grad_()

    def kept():
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            outputs = [layer(x.clone() if clones else shared) for shared in [x * 1] for layer in model]
        assert len(outputs) == 3
        return sum(storage.nbytes() for storage in storages.values())

    clones = False
    assert kept() == 10 * size
    clones = True
    assert kept() == 3 * 10 * size  # control: equal inputs in three tensors


def test_an_input_changed_between_two_layers_reaches_the_second():
    model = apply_quantization(nn.ModuleList([nn.Linear(128, 128) for _ in range(2)]), "FP8_DYNAMIC")
    x = normal(10, 128)
    with torch.no_grad():
        model[0](x)
        x.mul_(-3)
        found = model[1](x)
        assert torch.equal(found, model[1](x.clone()))


def test_checkpointed_layers_get_the_gradients_of_the_others():
    """The recomputation is given the very tensor of the forward."""
    model = apply_quantization(nn.ModuleList([nn.Linear(128, 128) for _ in range(2)]), "W8A8")
    gradients = []
    for reentrant in (None, False, True):
        x = normal(10, 128).requires_grad_()
        model.zero_grad()
        calls = [layer if reentrant is None else checkpointed(layer, reentrant) for layer in model]
        sum(call(x).square().sum() for call in calls).backward()
        gradients.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert all(map(torch.equal, gradients[0], gradients[2]))


def checkpointed(layer, reentrant):
    return lambda x: checkpoint(layer, x, use_reentrant=reentrant)


# Against vLLM -------------------------------------------------------------------------------------------------------


def engine_fp8(group_shape):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    with set_current_vllm_config(VllmConfig()):
        return QuantFP8(static=False, group_shape=group_shape)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_of_a_token_is_that_of_vllm(dtype):
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = torch.cat([tokens(scale, dtype, i, (500, 256)) for i, scale in enumerate(SIZES)])
    quantized, scales = engine_fp8(GroupShape.PER_TOKEN).forward_native(x)
    found_quantized, found_scales = quantize_tokens_fp8(x)
    assert torch.equal(found_scales, scales)
    assert torch.equal(as_bytes(found_quantized), as_bytes(quantized))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_float8_of_a_group_is_that_of_vllm(dtype):
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = torch.cat([tokens(scale, dtype, i, (500, 256)) for i, scale in enumerate((1e-1, 1.0, 1e4))])
    quantized, scales = engine_fp8(GroupShape(1, 128)).forward_native(x)
    found_quantized, found_scales = quantize_groups_fp8(x)
    # vLLM's plain form keeps the scale above 1 / (448 * 512), its GPU kernels keep the magnitude above 1e-10, as we do.
    floor = scales == torch.tensor(1 / (448 * 512))
    assert 0 < floor.float().mean() < 0.01  # the tokens of zeros
    assert torch.equal(found_scales[~floor], scales[~floor])
    assert torch.equal(as_bytes(found_quantized), as_bytes(quantized))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_a_token_is_that_of_vllm(dtype):
    from vllm import _custom_ops as ops

    sizes = (1e-42, 1e-40, 1e-38, *SIZES, 1e36)
    x = torch.cat([tokens(scale, dtype, i, (500, 256)) for i, scale in enumerate(sizes)])
    quantized, scales, _ = ops.onednn_scaled_int8_quant(x, None, None, True)
    found_quantized, found_scales = quantize_tokens_int8(x)
    assert torch.equal(found_scales, scales)
    assert torch.equal(found_quantized, quantized)
