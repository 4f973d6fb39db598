"""`qarl_trl.quant.rest`: norms and embeddings compute with the bfloat16 values that engine and file have."""

import copy
import pickle
from functools import partial

import pytest
import torch
from conftest import TINY
from torch.utils.checkpoint import checkpoint
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from qarl_trl.quant import apply_quantization
from qarl_trl.quant.convert import remove_quantization
from qarl_trl.quant.rest import leave_rest, round_rest


IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def model():
    """A small model in float32, whose weights have no bfloat16 values."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY))


def logits(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(IDS, use_cache=False).logits


def rest_of(model):
    """Norms and the embedding."""
    return {name: weight for name, weight in model.named_parameters() if "norm" in name or "embed" in name}


def put_in_bfloat16(model):
    """As a sync sends them."""
    with torch.no_grad():
        for weight in rest_of(model).values():
            weight.copy_(weight.bfloat16())


def move(model):
    """A change of norms that bfloat16 does not show: half of its step at 1 is 0.002."""
    with torch.no_grad():
        for name, weight in rest_of(model).items():
            if "norm" in name:
                weight += 1e-3


def test_the_forward_is_that_of_the_weights_that_a_sync_sends(model):
    move(model)
    plain = logits(model)

    round_rest(model)
    used = logits(model)

    leave_rest(model)
    assert torch.equal(logits(model), plain)
    put_in_bfloat16(model)
    assert torch.equal(logits(model), used)
    # Control: the master weights give another one.
    assert not torch.equal(used, plain)


def test_an_embedding_that_scales_its_rows_gives_those_of_a_bfloat16_model():
    torch.manual_seed(0)
    # The root of 40, by which Gemma multiplies, has no bfloat16 value.
    sizes = {"hidden_size": 40, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=64, num_hidden_layers=1, head_dim=16, **sizes))
    embedding = model.model.embed_tokens
    tokens = torch.arange(64)
    plain = embedding(tokens)

    round_rest(model)
    rows = embedding(tokens)
    leave_rest(model)

    assert torch.equal(embedding(tokens), plain)
    assert torch.equal(rows, embedding.to(torch.bfloat16)(tokens).float())
    # Control: the rounded product of the master weights is another one.
    assert not torch.equal(rows, plain.bfloat16().float())


def test_an_update_that_bfloat16_does_not_show_changes_nothing(model):
    round_rest(model)
    before = logits(model)
    move(model)
    assert torch.equal(logits(model), before)

    # Control.
    leave_rest(model)
    assert not torch.equal(logits(model), before)


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_gradients_reach_the_master_weights_and_parameters_stay(model, checkpointing):
    put_in_bfloat16(model)
    logits(model).logsumexp(-1).sum().backward()
    expected = {name: weight.grad for name, weight in rest_of(model).items()}
    parameters = dict(model.named_parameters())
    model.zero_grad()

    round_rest(model)
    round_rest(model)
    if checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable(checkpointing)
        model.enable_input_require_grads()
    logits(model).logsumexp(-1).sum().backward()

    # Of the same values, so the gradients are the same, and nothing is left in place of a parameter.
    for name, weight in rest_of(model).items():
        assert torch.equal(weight.grad, expected[name]), name
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameter for name, parameter in parameters.items())


def test_a_copy_rounds_too_and_is_taken_back_alone(model):
    move(model)
    plain = logits(model)
    round_rest(model)
    rounded = logits(model)

    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), rounded)
        leave_rest(copied)
        assert torch.equal(logits(copied), plain)
    assert torch.equal(logits(model), rounded)


class Scaled(GradientCheckpointingLayer):
    """A layer with a vector of its own, which transformers' checkpointing computes again in a backward."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.001]))
        self.used = []

    def forward(self, states):
        self.used.append(self.scale.item())
        return states * self.scale


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_is_computed_again_is_rounded_again(use_reentrant):
    layer = Scaled().train()
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
    round_rest(layer)

    layer(torch.ones(1, requires_grad=True)).sum().backward()

    # The step of bfloat16 at 1 is 0.008.
    assert layer.used == [1.0, 1.0]


def test_what_ends_a_forward_early_leaves_the_master_weights_in_place(model):
    """Ctrl-C in a notebook: a rounded tensor would not be trained by the next call of `train()`."""
    round_rest(model)
    norm = model.model.norm
    master = norm.weight

    def interrupt(*_):
        assert norm.weight is not master  # control: it runs on another one
        raise KeyboardInterrupt

    hook = norm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    hook.remove()
    assert norm.weight is master


def test_quantization_that_is_removed_takes_it_along(model):
    move(model)
    plain = logits(model)
    round_rest(apply_quantization(model, "FP8_DYNAMIC"))
    assert not torch.equal(logits(model), plain)

    remove_quantization(model)
    assert torch.equal(logits(model), plain)
