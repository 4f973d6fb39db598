"""`qarl_trl.quant.convert`: which layers change, that nothing else does, and what is refused."""

import copy
import pickle

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from peft import LoraConfig, get_peft_model
from torch import nn

from qarl_trl.quant import apply_quantization, quantized_modules, remove_quantization
from qarl_trl.quant.linear import QuantLinear


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
LINEARS = [f"model.layers.{i}.{name}" for i in (0, 1) for name in LAYER]


def names_of(model):
    return [name for name, _ in quantized_modules(model)]


def snapshot(model):
    """Everything that must survive: modules, parameters, buffers, `state_dict`."""
    parameters = [(n, tuple(p.shape), p.dtype, p.requires_grad, id(p)) for n, p in model.named_parameters()]
    names = [[n for n, _ in found] for found in (model.named_modules(), model.named_buffers())]
    return parameters, names, list(model.state_dict())


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_names_parameters_and_state_dict_stay_as_they_were(tiny_model, kind, scheme):
    model = tiny_model(kind)
    before, values = snapshot(model), {n: t.clone() for n, t in model.state_dict().items()}
    logits = model(TOKENS).logits
    assert apply_quantization(model, scheme) is model
    assert names_of(model) == LINEARS
    assert snapshot(model) == before
    assert not torch.equal(model(TOKENS).logits, logits)  # control: the forward did change
    model(TOKENS, labels=TOKENS).loss.backward()
    assert snapshot(model) == before
    assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())
    assert all(p.grad is not None for p in model.parameters())
    assert not hasattr(model.config, "quantization_config")


# Which layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "ignore", "expected"),
    [
        (["Linear"], [], [*LINEARS, "lm_head"]),
        (["Linear"], ["lm_head", r"re:.*down_proj$"], [n for n in LINEARS if "down_proj" not in n]),
        ([r"re:.*mlp\.(gate|up)_proj$"], ["lm_head"], [n for n in LINEARS if "gate_proj" in n or "up_proj" in n]),
        (["model.layers.1.self_attn.q_proj"], [], ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_targets_and_ignore_choose_the_layers(tiny_model, targets, ignore, expected):
    assert names_of(apply_quantization(tiny_model(), "W4A16", targets, ignore)) == expected


def test_by_default_the_head_and_routers_stay_in_high_precision():
    def model():
        mlp = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("gate", "shared_expert_gate", "up_proj")})
        layer = nn.ModuleDict({"mlp": mlp, "router": nn.Linear(128, 128)})
        return nn.ModuleDict({"layer": layer, "lm_head": nn.Linear(128, 128)})

    assert names_of(apply_quantization(model(), "W4A16")) == ["layer.mlp.up_proj"]
    assert len(names_of(apply_quantization(model(), "W4A16", ignore=["lm_head"]))) == 4  # control: a list of one's own


# Refusals -----------------------------------------------------------------------------------------------------------


class LinearWithAdapter(nn.Linear):
    """A layer of another library."""


def test_a_layer_that_cannot_be_quantized_is_an_error_and_changes_nothing(tiny_model):
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.__class__ = LinearWithAdapter
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.up_proj'.*LinearWithAdapter"):
        apply_quantization(model, "W4A16")
    assert names_of(model) == []


@pytest.mark.parametrize(
    ("sizes", "scheme", "group_size", "divides"),
    [
        ((8, 256), "W4A16", 128, True),
        ((8, 192), "W4A16", 128, False),
        ((8, 100), "W4A16", -1, True),
        ((128, 256), "FP8_BLOCK", None, True),
        ((64, 256), "FP8_BLOCK", None, False),
    ],
)
def test_groups_and_blocks_divide_a_layer_or_it_is_refused(sizes, scheme, group_size, divides):
    out_features, in_features = sizes
    model = nn.ModuleDict({"up_proj": nn.Linear(in_features, out_features)})
    if divides:
        assert names_of(apply_quantization(model, scheme, group_size=group_size)) == ["up_proj"]
    else:
        with pytest.raises(ValueError, match=f"'up_proj'.*out_features={out_features}.*in_features={in_features}"):
            apply_quantization(model, scheme, group_size=group_size)


def test_a_tied_head_cannot_be_quantized(tiny_model):
    model = tiny_model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="'lm_head'.*tied"):
        apply_quantization(model, "W4A16", ignore=[])
    assert names_of(apply_quantization(model, "W4A16")) == LINEARS


def test_a_group_that_matches_nothing_is_an_error(tiny_model):
    groups = {"W4A16": ["Linear"], "FP8_DYNAMIC": ["re:.*experts.*"]}
    for scheme, fields in (
        ("W4A16", {"targets": ["Liner"]}),
        (QuantizationConfig(config_groups=groups), {}),
        (QuantizationConfig(config_groups={}), {}),
    ):
        with pytest.raises(ValueError, match="targets=.*must match a layer"):
            apply_quantization(tiny_model(), scheme, **fields)


def test_a_model_that_is_quantized_already_is_refused(tiny_model):
    model = apply_quantization(tiny_model(num_hidden_layers=1), "W4A16")
    with pytest.raises(ValueError, match=r"quantized already.*remove_quantization"):
        apply_quantization(model, "FP8_DYNAMIC")
    apply_quantization(remove_quantization(model), "FP8_DYNAMIC")
    remove_quantization(model).config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="quantized already.*gptq"):
        apply_quantization(model, "W4A16")


def test_adapters_without_a_peft_model_around_them_are_refused(tiny_model):
    model, adapter = tiny_model(num_hidden_layers=1), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model.add_adapter(adapter)
    with pytest.raises(ValueError, match="without a PeftModel"):
        apply_quantization(model, "W4A16")
    apply_quantization(get_peft_model(tiny_model(num_hidden_layers=1), adapter), "W4A16")


# And back -----------------------------------------------------------------------------------------------------------


def test_removing_restores_the_model(tiny_model):
    model, plain = tiny_model(), tiny_model()
    apply_quantization(model, "W4A16")
    quantized_logits = model(TOKENS).logits
    assert remove_quantization(model) is model
    assert names_of(model) == []
    for (name, module), (_, original) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert type(module) is type(original), name
        assert module.__dict__.keys() == original.__dict__.keys(), name
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert not torch.equal(quantized_logits, plain(TOKENS).logits)  # control


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_quantized_model_is_quantized_and_independent(tiny_model, clone):
    model = apply_quantization(tiny_model(), "W4A16")
    logits = model(TOKENS).logits
    twin = clone(model)
    assert names_of(twin) == LINEARS
    assert all(isinstance(m, QuantLinear) and m.gemm is None for _, m in quantized_modules(twin))
    assert torch.equal(twin(TOKENS).logits, logits)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    assert torch.equal(model(TOKENS).logits, logits)
    assert not torch.equal(twin(TOKENS).logits, logits)
