"""`qarl_trl.quant.stream`: the one stream that sync and export read."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from qarl_trl.quant import apply_quantization, iter_low_bit_weights, low_bit_store, matmul, quantized_modules
from quant.schemes import NAMES


PACKED = ["weight_packed", "weight_scale", "weight_shape"]
LOCAL = {
    "W4A16": PACKED,
    "W4A16_ASYM": [*PACKED, "weight_zero_point"],
    "W8A16": PACKED,
    "FP8_DYNAMIC": ["weight", "weight_scale"],
    "FP8_BLOCK": ["weight", "weight_scale"],
    "W8A8": ["weight", "weight_scale"],
    "W4A8": ["weight", "weight_scale"],
    "W4AFP8": PACKED,
}
# Two heads of keys and values make blocks of 128 of every layer.
SIZES = {"num_key_value_heads": 2}
TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def expected_names(model, scheme):
    """Module order, each low-bit layer's tensors where its weight was."""
    low_bit = {f"{name}.weight" for name, _ in quantized_modules(model)}
    for name, _ in model.named_parameters():
        yield from (name.removesuffix("weight") + local for local in LOCAL[scheme]) if name in low_bit else [name]


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_names_and_dtypes_are_those_of_the_checkpoint(tiny_model, kind, scheme):
    model = apply_quantization(tiny_model(kind, **SIZES), scheme)
    stream = list(iter_low_bit_weights(model))
    assert [name for name, _ in stream] == list(expected_names(model, scheme))
    dtypes = {"packed": torch.int32, "zero_point": torch.int32, "shape": torch.int64}
    quantized = torch.float8_e4m3fn if scheme.startswith("FP8") else torch.int8
    for name, tensor in stream:
        expected = dtypes.get(name.rpartition("weight_")[2], torch.bfloat16)
        assert tensor.dtype == (quantized if name.endswith("_proj.weight") else expected), name
        assert not tensor.requires_grad


@pytest.mark.parametrize("scheme", NAMES)
def test_the_stream_is_what_the_forward_multiplies_with(tiny_model, scheme, monkeypatch):
    """After optimizer steps; the control streams before one more step."""
    model = apply_quantization(tiny_model(**SIZES), scheme)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    low_bit_store(model).follow(optimizer)

    def step():
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    stale = dict(iter_low_bit_weights(model))
    step()
    names, used = {id(m.weight): name for name, m in quantized_modules(model)}, {}
    original = matmul.LowBitMatmul.apply

    def spy(*args):
        weight, master = args[2], args[-1]
        used.update({f"{names[id(master)]}.{local}": tensor for local, tensor in weight.tensors.items()})
        return original(*args)

    monkeypatch.setattr(matmul.LowBitMatmul, "apply", spy)
    stream = dict(iter_low_bit_weights(model))
    model(TOKENS)
    assert len(used) == 14 * len(LOCAL[scheme])
    assert all(stream[name] is tensor for name, tensor in used.items())
    quantized = [name for name in used if name.endswith(LOCAL[scheme][0])]
    assert not any(torch.equal(stale[n].view(torch.uint8), stream[n].view(torch.uint8)) for n in quantized)


def test_what_is_not_quantized_is_a_bfloat16_copy(tiny_model):
    """A copy also of a bfloat16 master: the engine keeps references while the learner may go on."""
    for dtype in (torch.float32, torch.bfloat16):
        model = apply_quantization(tiny_model("qwen2", dtype=dtype), "W4A16")
        parameters = dict(model.named_parameters())
        plain = {name: tensor for name, tensor in iter_low_bit_weights(model) if name in parameters}
        assert {"lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= plain.keys()
        for name, tensor in plain.items():
            assert torch.equal(tensor, parameters[name].detach().bfloat16())
            assert tensor.untyped_storage().data_ptr() != parameters[name].untyped_storage().data_ptr()


def test_a_tied_head_is_sent_once(tiny_model):
    model = tiny_model(tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(iter_low_bit_weights(model))
    stream = dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))
    assert "model.embed_tokens.weight" in stream and "lm_head.weight" not in stream


def test_persistent_buffers_follow_in_their_own_dtype():
    model = nn.Sequential(nn.Linear(128, 8), nn.BatchNorm1d(8))
    model.register_buffer("cache", torch.ones(3), persistent=False)
    stream = dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))
    assert stream["1.running_mean"].dtype == torch.float32
    assert stream["1.num_batches_tracked"].dtype == torch.int64
    assert stream["1.running_mean"].data_ptr() != model[1].running_mean.data_ptr()
    assert "cache" not in stream


# Sharded master weights ----------------------------------------------------------------------------------------------------


def test_parameters_are_read_where_they_are_whole():
    """As under ZeRO-3, where a parameter is empty outside of the context."""
    model = apply_quantization(nn.Sequential(nn.Linear(128, 8)), "W4A16")
    whole = [param.detach().clone() for param in model.parameters()]
    expected = dict(iter_low_bit_weights(model))
    gathered = []

    @contextmanager
    def gather(params):
        gathered.append(len(params))
        for param in params:
            param.data = next(tensor for tensor in whole if tensor.shape == shapes[param])
        yield
        for param in params:
            param.data = torch.empty(0)

    shapes = {param: param.shape for param in model.parameters()}
    for param in model.parameters():
        param.data = torch.empty(0)
    stream = {name: tensor.clone() for name, tensor in iter_low_bit_weights(model, gather)}

    assert gathered == [1, 1]
    assert all(torch.equal(stream[name], tensor) for name, tensor in expected.items())
    assert stream.keys() == expected.keys()


def test_the_wrapper_of_activation_checkpointing_is_not_in_the_names():
    inner = nn.Sequential(nn.Linear(128, 8))
    wrapped = nn.ModuleDict({"_checkpoint_wrapped_module": inner})
    model = apply_quantization(nn.ModuleDict({"layer": wrapped}), "W4A16")
    names = [name for name, _ in iter_low_bit_weights(model)]
    assert names == [f"layer.0.{name}" for name in ("weight_packed", "weight_scale", "weight_shape", "bias")]
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper").checkpoint_wrapper
    inner.register_buffer("kept", torch.ones(1))  # torch's own wrapper is in the names of buffers, not in state_dict
    stream = dict(iter_low_bit_weights(nn.ModuleDict({"layer": wrapper(inner)})))
    assert "layer.kept" in stream
