"""`qarl_trl.quant.stream`: the one stream that sync and export read."""

import fnmatch
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, low_bit_store, quantized_modules
from qarl_trl.quant.layers import matmul
from quant.schemes import NAMES, copies, names_in
from quant.toy_layers import low_bit_parameters_of


PACKED = ["weight_packed", "weight_scale", "weight_shape"]
# The tensors of a low-bit layer, in the order of the stream.
# Written out, because a wrong name is one that vLLM does not load.
TENSORS_OF_LAYER = {
    "W4A16": PACKED,
    "W4A16_ASYM": [*PACKED, "weight_zero_point"],
    "W8A16": PACKED,
    "FP8_DYNAMIC": ["weight", "weight_scale"],
    "FP8_BLOCK": ["weight", "weight_scale"],
    "W8A8": ["weight", "weight_scale"],
    "W4A8": ["weight", "weight_scale"],
    "W4AFP8": PACKED,
}
INTEGERS = {"weight_packed": torch.int32, "weight_zero_point": torch.int32, "weight_shape": torch.int64}
# Two heads of keys and values make blocks of 128 of every layer.
SIZES = {"num_key_value_heads": 2}
TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def expected_names(model, scheme):
    """Module order, each low-bit layer's tensors where its weight was."""
    low_bit_weights = low_bit_parameters_of(model)

    names = []
    for name, _ in model.named_parameters():
        if name not in low_bit_weights:
            names.append(name)
            continue
        for tensor in TENSORS_OF_LAYER[scheme]:
            names.append(name.removesuffix("weight") + tensor)
    return names


def expected_dtype(name, scheme):
    """The dtype of a tensor of a checkpoint."""
    if name.endswith("_proj.weight"):  # the quantized values of a layer that does not pack them
        return torch.float8_e4m3fn if scheme.startswith("FP8") else torch.int8
    return INTEGERS.get(name.rpartition(".")[2], torch.bfloat16)


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_names_and_dtypes_are_those_of_the_checkpoint(tiny_model, kind, scheme):
    model = apply_quantization(tiny_model(kind, **SIZES), scheme)

    stream = list(iter_low_bit_weights(model))

    assert names_in(stream) == expected_names(model, scheme)
    for name, tensor in stream:
        assert tensor.dtype == expected_dtype(name, scheme), name
        assert not tensor.requires_grad


def train_one_step(model, optimizer):
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def record_multiplied_tensors(model, monkeypatch):
    """A dict that gets the low-bit tensors that forwards multiply by from now on, by their names in a checkpoint."""
    names = {id(layer.weight): name for name, layer in quantized_modules(model)}
    multiplied = {}
    apply = matmul.LowBitMatmul.apply

    def recorded(x, bias, low_bit, *rest):
        master_weight = rest[-1]
        for tensor_name, tensor in low_bit.tensors.items():
            # The last argument of the product is the master weight, which gets the gradient: by it the layer is known.
            multiplied[f"{names[id(master_weight)]}.{tensor_name}"] = tensor
        return apply(x, bias, low_bit, *rest)

    monkeypatch.setattr(matmul.LowBitMatmul, "apply", recorded)
    return multiplied


@pytest.mark.parametrize("scheme", NAMES)
def test_the_stream_is_what_the_forward_multiplies_with(tiny_model, scheme, monkeypatch):
    """After optimizer steps; the control streams before one more step."""
    model = apply_quantization(tiny_model(**SIZES), scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    low_bit_store(model).follow(optimizer)
    # Two steps, so that something is kept that could be stale.
    for _ in range(2):
        train_one_step(model, optimizer)
    stale = dict(iter_low_bit_weights(model))
    train_one_step(model, optimizer)

    multiplied = record_multiplied_tensors(model, monkeypatch)
    stream = dict(iter_low_bit_weights(model))
    model(TOKENS)

    assert len(multiplied) == 14 * len(TENSORS_OF_LAYER[scheme])
    for name, tensor in multiplied.items():
        # The same object, and not only equal bytes.
        assert stream[name] is tensor, name

    # Control: the quantized values before the last step.
    values = fnmatch.filter(multiplied, f"*.{TENSORS_OF_LAYER[scheme][0]}")
    assert len(values) == 14
    for name in values:
        assert not torch.equal(stale[name].view(torch.uint8), stream[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_quantized_is_a_bfloat16_copy(tiny_model, dtype):
    """A copy also of a bfloat16 master: the engine keeps references while the learner may go on."""
    model = apply_quantization(tiny_model("qwen2", dtype=dtype), "W4A16")
    parameters = dict(model.named_parameters())

    plain = {}
    for name, tensor in iter_low_bit_weights(model):
        if name in parameters:
            plain[name] = tensor

    # Control: the head, a norm and a bias are among them.
    assert {"lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, parameters[name].detach().bfloat16())
        assert tensor.untyped_storage().data_ptr() != parameters[name].untyped_storage().data_ptr()


def test_a_tied_head_is_sent_once(tiny_model):
    model = tiny_model(tie_word_embeddings=True)
    plain = dict(iter_low_bit_weights(model))
    low_bit = dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))

    for stream in (plain, low_bit):
        assert "model.embed_tokens.weight" in stream
        assert "lm_head.weight" not in stream


def test_persistent_buffers_follow_in_their_own_dtype():
    model = nn.Sequential(nn.Linear(128, 8), nn.BatchNorm1d(8))
    # No checkpoint has it.
    model.register_buffer("cache", torch.ones(3), persistent=False)

    stream = dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))

    assert stream["1.running_mean"].dtype == torch.float32
    assert stream["1.num_batches_tracked"].dtype == torch.int64
    # A copy: an engine keeps references, and a forward in training writes to it.
    assert stream["1.running_mean"].data_ptr() != model[1].running_mean.data_ptr()
    assert "cache" not in stream


# Sharded master weights ---------------------------------------------------------------------------------------------


class EmptyOutsideOfGather:
    """
    Empties the parameters of a model, which are whole only inside the context: as under ZeRO-3.

    Attributes:
        gathered: Number of parameters of each context.
    """

    def __init__(self, model):
        self.gathered = []
        self.whole = {}
        for param in model.parameters():
            self.whole[param] = param.detach().clone()
            param.data = torch.empty(0)

    @contextmanager
    def __call__(self, parameters):
        self.gathered.append(len(parameters))
        for param in parameters:
            param.data = self.whole[param]
        yield
        for param in parameters:
            param.data = torch.empty(0)


def test_parameters_are_read_where_they_are_whole():
    model = apply_quantization(nn.Sequential(nn.Linear(128, 8)), "W4A16")
    expected = dict(iter_low_bit_weights(model))
    gather = EmptyOutsideOfGather(model)

    stream = copies(iter_low_bit_weights(model, gather))

    # The weight and the bias, one after the other: ZeRO-3 never holds more than one whole.
    assert gather.gathered == [1, 1]
    assert stream.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stream[name], tensor)


# Wrappers -----------------------------------------------------------------------------------------------------------


def test_the_wrapper_of_activation_checkpointing_is_not_in_the_names():
    wrapped = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Sequential(nn.Linear(128, 8))})
    model = apply_quantization(nn.ModuleDict({"layer": wrapped}), "W4A16")

    names = names_in(iter_low_bit_weights(model))

    assert names == ["layer.0.weight_packed", "layer.0.weight_scale", "layer.0.weight_shape", "layer.0.bias"]


def test_a_buffer_under_activation_checkpointing_is_sent():
    """torch's own wrapper is in the names of buffers, and not in those of the state dict."""
    inner = apply_quantization(nn.Sequential(nn.Linear(128, 8)), "W4A16")
    inner.register_buffer("kept", torch.ones(1))
    model = nn.ModuleDict({"layer": checkpoint_wrapper(inner)})
    assert "layer._checkpoint_wrapped_module.kept" in dict(model.named_buffers())  # the premise

    assert "layer.kept" in dict(iter_low_bit_weights(model))


def test_a_layer_that_is_the_whole_model_has_the_names_of_its_parameters():
    layer = apply_quantization(nn.Sequential(nn.Linear(128, 8)), "W4A16")[0]

    assert names_in(iter_low_bit_weights(layer)) == [*PACKED, "bias"]
