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
# One batch for each of 4 steps.
TOKENS = torch.randint(0, 48, (4, 3, 7), generator=torch.Generator().manual_seed(1))


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
    assert len(left) == len(right)
    return all(map(torch.equal, left, right))


def names_of(parameters, model):
    """The names that a model has for some of its parameters."""
    names = {param: name for name, param in model.named_parameters()}
    return [names[param] for param in parameters]


# The step -----------------------------------------------------------------------------------------------------------


def stepped_side_by_side(adamw_owns=lambda name: "proj" not in name):
    """Four steps of two torch optimizers that know nothing of each other, split by hand."""
    model = make_model()
    args = make_args()

    matrices = []
    decayed = []
    undecayed = []
    for name, param in model.named_parameters():
        if not adamw_owns(name):
            matrices.append(param)
        elif param.ndim == 2:
            decayed.append(param)
        else:
            # Norms. AdamW would otherwise pull them to 0.
            undecayed.append(param)

    muon = torch.optim.Muon(
        matrices,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": undecayed, "weight_decay": 0.0},
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
    # As a checkpoint is read: with `weights_only`, which takes no class of ours.
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
    for group in optimizer.param_groups:
        assert group["initial_lr"] == 1e-2

    def moved():
        """Whether each of the three groups moved in one step."""
        before = [copies(group["params"]) for group in optimizer.param_groups]
        train(model, slice(1), optimizer)

        moved = []
        for old, group in zip(before, optimizer.param_groups, strict=True):
            moved.append(not all_equal(old, group["params"]))
        return moved

    # The schedule starts at 0, as a warm-up does. An optimizer that kept its own rate would move.
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

    # Torch calls it for every optimizer, so also for the two parts of ours.
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
    # A wrapper has no get_output_embeddings, by which the output layer is known otherwise.
    [(True, lambda model: model), (False, nn.DataParallel)],
)
def test_each_trainable_parameter_is_in_exactly_one_part(tie, wrap):
    model = wrap(make_model(tie))
    trainable = []
    of_two_dimensions = set()
    for name, param in model.named_parameters():
        if name.endswith("layers.0.mlp.up_proj.weight"):
            param.requires_grad_(False)
            continue
        trainable.append(name)
        if param.ndim == 2:
            of_two_dimensions.add(name)

    matrices, _, others = split_parameters(model)

    assert sorted(matrices + others) == sorted(trainable)
    for name in matrices:
        assert ".layers." in name
        assert "proj" in name
    # Seven in each of two layers, without the frozen one.
    assert len(matrices) == 2 * 7 - 1
    # A tied output layer is the embedding, and no parameter of its own.
    outside = [name for name in others if "embed_tokens" in name or "lm_head" in name]
    assert len(outside) == (1 if tie else 2)

    grouped = []
    for group in build_muon(model, make_args()).param_groups:
        grouped += group["params"]
    assert sorted(names_of(grouped, model)) == sorted(trainable)
    # Control: the plain rule "two dimensions" would take the embeddings as well.
    assert of_two_dimensions > set(matrices)


def test_adamw_decays_what_the_trainer_decays():
    model = make_model(tie=False)

    muon, decayed, undecayed = build_muon(model, make_args()).param_groups

    # The method does not read its `self`.
    trainers = set(Trainer.get_decay_parameter_names(None, model))
    names = {name for name, _ in model.named_parameters()}
    assert set(names_of(muon["params"] + decayed["params"], model)) == trainers
    assert set(names_of(undecayed["params"], model)) == names - trainers
    assert (muon["weight_decay"], decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.1, 0.0)


def test_muon_takes_routed_experts_and_leaves_routers(caplog):
    model = make_moe()

    with caplog.at_level(logging.WARNING, logger="qarl_trl.optim"):
        groups = build_muon(model, make_args()).param_groups

    split = split_parameters(model)
    assert {name.split(".")[-2] for name in split.matrices} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    # In each of two layers the experts are two parameters, the first of which holds gate and up.
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        assert split.experts[f"{experts}.gate_up_proj"] == 2
        assert split.experts[f"{experts}.down_proj"] == 1
        assert f"model.layers.{layer}.mlp.gate.weight" in split.others
    assert len(split.experts) == 2 * 2

    parts = [(group["part"], group.get("projections")) for group in groups]
    # By projections, because a group has one number of them.
    assert parts == [("muon", None), ("experts", 1), ("experts", 2), ("adamw", None), ("adamw", None)]
    assert not caplog.records


def test_quantized_layers_are_split_as_plain_ones(tiny_model):
    # By names, which quantization leaves as they are: it adds no parameter.
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
    # Two parameters in each of two layers, in one line.
    (warning,) = caplog.records
    assert warning.getMessage().count("experts.") == 4


def test_a_model_without_hidden_matrices_is_refused():
    model = make_model()
    for name, param in model.named_parameters():
        param.requires_grad_("proj" not in name)

    with pytest.raises(ValueError, match="found no hidden 2-D matrix"):
        build_muon(model, make_args())
