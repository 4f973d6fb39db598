"""`qarl_trl.optim`: which parameter goes to which optimizer, and that both together are torch's own, bit for bit."""

import io
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
)

from qarl_trl.optim import build_muon, split_parameters
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import DEFAULT_IGNORE


TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TOKENS = torch.randint(0, 48, (4, 3, 7), generator=torch.Generator().manual_seed(1))  # one batch for each of 4 steps


def make_args(**changes):
    """The fields of `QaRLConfig` that the optimizer reads; rates large enough for a few steps to show."""
    fields = {
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-6,
        "deepspeed_plugin": None,
    }
    return SimpleNamespace(**(fields | changes))


def make_model(tie=True):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=tie))


def make_moe(experts=4, **changes):
    torch.manual_seed(0)
    sizes = {
        "moe_intermediate_size": 24,
        "num_experts": experts,
        "num_experts_per_tok": min(2, experts),
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY | sizes | changes))


def train(model, steps, *optimizers):
    """Take a slice of the steps; return the parameters."""
    for tokens in TOKENS[steps]:
        model(input_ids=tokens, labels=tokens).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return list(model.parameters())


def copies(parameters):
    return [param.detach().clone() for param in parameters]


def all_equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# The step -----------------------------------------------------------------------------------------------------------


def stepped_side_by_side(adamw_owns=lambda name: "proj" not in name):
    """Four steps of two torch optimizers that know nothing of each other, split by hand."""
    model = make_model()
    args = make_args()
    named = list(model.named_parameters())
    matrices = [param for name, param in named if not adamw_owns(name)]
    others = [param for name, param in named if adamw_owns(name)]

    muon = torch.optim.Muon(
        matrices,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [param for param in others if param.ndim == 2], "weight_decay": 0.1},
            {"params": [param for param in others if param.ndim == 1], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    return train(model, slice(4), muon, adamw)


def test_four_steps_equal_torch_muon_and_torch_adamw_side_by_side():
    model = make_model()

    weights = train(model, slice(4), build_muon(model, make_args()))

    assert all_equal(weights, stepped_side_by_side())
    # Control: one hidden matrix in the wrong optimizer is noticed.
    misplaced = stepped_side_by_side(lambda name: "proj" not in name or name.endswith("layers.1.mlp.up_proj.weight"))
    assert not all_equal(weights, misplaced)


@pytest.mark.parametrize("make", [make_model, make_moe])
def test_resume_after_two_of_four_steps_is_exact(make):
    straight = make()
    expected = train(straight, slice(4), build_muon(straight, make_args()))

    model = make()
    optimizer = build_muon(model, make_args())
    train(model, slice(2), optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)

    def resumed(with_optimizer_state):
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        model = make()
        model.load_state_dict(weights)
        optimizer = build_muon(model, make_args())
        if with_optimizer_state:
            optimizer.load_state_dict(state)
        return train(model, slice(2, 4), optimizer)

    assert all_equal(resumed(with_optimizer_state=True), expected)
    # Control: momentum matters.
    assert not all_equal(resumed(with_optimizer_state=False), expected)


def test_lr_scheduler_drives_both_parts():
    model = make_model()
    optimizer = build_muon(model, make_args())
    # As accelerate does. It replaces the group dicts.
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = LambdaLR(optimizer, lambda step: (0.0, 0.5)[min(step, 1)])
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1e-2, 1e-2, 1e-2]

    def moved():
        """Whether each of the three groups moved in one step."""
        before = [copies(group["params"]) for group in optimizer.param_groups]
        train(model, slice(1), optimizer)
        after = [group["params"] for group in optimizer.param_groups]
        return [not all_equal(old, new) for old, new in zip(before, after, strict=True)]

    assert moved() == [False, False, False]

    scheduler.step()
    assert scheduler.get_last_lr() == [5e-3, 5e-3, 5e-3]
    # Control: it is the rate that held them.
    assert moved() == [True, True, True]


def test_global_step_post_hook_fires_last_with_all_weights_new():
    """The cache of quantized weights hangs on this hook."""
    model = make_model()
    optimizer = build_muon(model, make_args())
    fired = []
    weights = []

    def record(part, *_):
        fired.append(type(part).__name__)
        weights.append(copies(model.parameters()))

    handle = register_optimizer_step_post_hook(record)
    try:
        after = train(model, slice(1), optimizer)
    finally:
        handle.remove()

    assert fired == ["Muon", "AdamW", "MuonWithAdamW"]
    assert all_equal(weights[-1], after)
    # Control: after Muon alone the embeddings are still old.
    assert not all_equal(weights[0], after)

    train(model, slice(1), optimizer)
    # Control: the removed hook is silent.
    assert len(fired) == 3


# Who trains what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tie", "wrap"),
    [(True, lambda model: model), (False, nn.DataParallel)],  # a wrapper has no get_output_embeddings
)
def test_each_trainable_parameter_is_in_exactly_one_part(tie, wrap):
    model = wrap(make_model(tie))
    frozen = next(name for name, _ in model.named_parameters() if name.endswith("layers.0.mlp.up_proj.weight"))
    model.get_parameter(frozen).requires_grad_(False)

    matrices, _, others = split_parameters(model)

    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    assert sorted(matrices + others) == sorted(trainable)
    assert all(".layers." in name and "proj" in name for name in matrices)
    assert len(matrices) == 2 * 7 - 1
    assert sum("embed_tokens" in name or "lm_head" in name for name in others) == (1 if tie else 2)

    grouped = [param for group in build_muon(model, make_args()).param_groups for param in group["params"]]
    assert {id(param) for param in grouped} == {id(model.get_parameter(name)) for name in trainable}
    assert len(grouped) == len(trainable)
    # Control: the plain rule "two dimensions" would take the embeddings as well.
    assert {name for name in trainable if model.get_parameter(name).ndim == 2} > set(matrices)


def test_adamw_decays_what_the_trainer_decays():
    model = make_model(tie=False)

    muon, decayed, undecayed = build_muon(model, make_args()).param_groups

    names = {param: name for name, param in model.named_parameters()}
    trainers = set(Trainer.get_decay_parameter_names(None, model))
    assert {names[param] for param in muon["params"] + decayed["params"]} == trainers
    assert {names[param] for param in undecayed["params"]} == set(names.values()) - trainers
    assert (muon["weight_decay"], decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.1, 0.0)


def test_muon_takes_routed_experts_and_leaves_routers(caplog):
    model = make_moe()

    with caplog.at_level(logging.WARNING, logger="qarl_trl.optim"):
        groups = build_muon(model, make_args()).param_groups

    split = split_parameters(model)
    assert {name.split(".")[-2] for name in split.matrices} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    projections = {name.rpartition("experts.")[2]: count for name, count in split.experts.items()}
    assert projections == {"gate_up_proj": 2, "down_proj": 1}
    assert len(split.experts) == 2 * 2
    assert sum(name.endswith("mlp.gate.weight") for name in split.others) == 2

    parts = [(group["part"], group.get("projections")) for group in groups]
    assert parts == [("muon", None), ("experts", 1), ("experts", 2), ("adamw", None), ("adamw", None)]
    assert not caplog.records


def test_quantized_layers_are_split_as_plain_ones(tiny_model):
    plain = split_parameters(tiny_model("qwen3_moe"))
    quantized = split_parameters(apply_quantization(tiny_model("qwen3_moe"), "W4A16", ignore=DEFAULT_IGNORE))

    assert len(plain.experts) == 4
    assert quantized == plain


def test_experts_of_another_layout_go_to_adamw_with_one_warning(caplog):
    """gpt-oss: transposed, gate and up row by row; its biases have two dimensions."""
    model = GptOssForCausalLM(GptOssConfig(**TINY, num_local_experts=4))

    with caplog.at_level(logging.WARNING, logger="qarl_trl.optim"):
        build_muon(model, make_args())

    assert split_parameters(model).experts == {}
    assert [record.getMessage().count("experts.") for record in caplog.records] == [4]


def test_a_model_without_hidden_matrices_is_refused():
    model = make_model()
    for name, param in model.named_parameters():
        param.requires_grad_("proj" not in name)

    with pytest.raises(ValueError, match="found no hidden 2-D matrix"):
        build_muon(model, make_args())
