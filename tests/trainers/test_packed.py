"""Packed passes in `QaRLTrainer`: those of `old` are those of the loss, so that the first ratio is exactly 1."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from slow.toys import distinct_characters, logged, prompts
from toy_runs import adapter, make, without_engine

from qarl_trl import QaRLConfig, QaRLTrainer


# One rollout batch, whose weights stay as they are.
ONE_BATCH = {"bf16": True, "learning_rate": 0.0, "steps_per_generation": 4, "max_completion_length": 24}


@dataclass
class Passes:
    """Token ids of the passes that computed `old`, and of those of the loss."""

    old: list[torch.Tensor] = field(default_factory=list)
    loss: list[torch.Tensor] = field(default_factory=list)


def passes_of_a_run(trainer: QaRLTrainer) -> Passes:
    """Train, with a model whose numbers depend on the shape of a pass."""
    passes = Passes()

    # Only passes that score: generation runs the same model without `fused_lm_head`.
    def spy(module, args, kwargs):
        if "fused_lm_head" in kwargs:
            kind = passes.loss if torch.is_grad_enabled() else passes.old
            kind.append(kwargs["input_ids"])

    def round_by_shape(module, args, kwargs, output):
        """As kernels of GPUs do; those of this CPU give a row the same numbers in every shape."""
        if "fused_lm_head" in kwargs:
            tokens = kwargs["input_ids"].shape[1]
            output.log_probs = output.log_probs * (1 + 1e-5 * tokens)
        return output

    # Asked first: to answer, `packs` runs passes of its own.
    assert trainer._passes.packs(trainer.model)
    trainer.model.register_forward_pre_hook(spy, with_kwargs=True)
    trainer.model.register_forward_hook(round_by_shape, with_kwargs=True)
    trainer.train()
    return passes


def tokens_of(passes):
    """The shape of each pass: a row of all its tokens."""
    return [ids.shape for ids in passes]


@pytest.mark.parametrize(("budget", "cuts_micro_batches"), [(22528, False), (64, True)])
def test_old_is_computed_in_the_passes_of_the_loss_and_the_ratio_is_exactly_one(
    dense_model, tmp_path, budget, cuts_micro_batches
):
    trainer = make(dense_model, tmp_path, **ONE_BATCH, max_tokens_per_pass=budget)

    passes = passes_of_a_run(trainer)

    # Four micro-batches, each an update of its own.
    if cuts_micro_batches:
        assert len(passes.old) > 4
    else:
        assert len(passes.old) == 4
    assert len(passes.old) == len(passes.loss)
    assert all(map(torch.equal, passes.old, passes.loss))
    # Exactly, not nearly: in another shape each log-prob would be 1e-5 a token off.
    assert logged(trainer, "ratio/min") == [1.0] * 4
    assert logged(trainer, "ratio/max") == [1.0] * 4


@pytest.mark.parametrize(
    ("budget", "passes_of_old"),
    [
        # Two updates of three micro-batches.
        (22528, 2),
        # Two micro-batches fit together, never three.
        (300, 4),
        (64, None),
    ],
)
def test_micro_batches_that_share_a_pass_share_it_for_old_and_loss(dense_model, tmp_path, budget, passes_of_old):
    changes = ONE_BATCH | {"steps_per_generation": 6, "gradient_accumulation_steps": 3, "max_steps": 2}
    trainer = make(dense_model, tmp_path, **changes, max_tokens_per_pass=budget)

    passes = passes_of_a_run(trainer)

    if passes_of_old is None:
        assert len(passes.old) > 6
    else:
        assert len(passes.old) == passes_of_old
    assert len(passes.old) == len(passes.loss)
    assert all(map(torch.equal, passes.old, passes.loss))
    assert logged(trainer, "ratio/min") == [1.0] * 2
    assert logged(trainer, "ratio/max") == [1.0] * 2


def test_trls_own_shuffle_cuts_other_micro_batches_and_the_ratio_is_off(dense_model, tmp_path, monkeypatch):
    """Control of the test above."""
    monkeypatch.setattr("qarl_trl.trainers.packed.shuffled_in", lambda order_of: contextlib.nullcontext())
    trainer = make(dense_model, tmp_path, **ONE_BATCH)

    passes = passes_of_a_run(trainer)

    assert tokens_of(passes.old) != tokens_of(passes.loss)
    # Exactly 1 above, so this is far off.
    ratios = torch.tensor(logged(trainer, "ratio/min") + logged(trainer, "ratio/max"))
    assert (ratios - 1).abs().max() > 1e-6


class HalfLogProbs(QaRLTrainer):
    """A user's class that changes what the learner scores."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logps, entropies, balance_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps * 0.5, entropies, balance_loss


@pytest.mark.parametrize("loss_type", ["tbpo", "dapo"])
@pytest.mark.parametrize("max_tokens_per_pass", [None, 22528])
def test_log_probs_of_a_users_class_are_those_of_old_and_of_the_loss(
    dense_model, tmp_path, loss_type, max_tokens_per_pass
):
    changes = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": loss_type}
    args = QaRLConfig(**without_engine(tmp_path, max_tokens_per_pass=max_tokens_per_pass, max_steps=2, **changes))
    trainer = HalfLogProbs(dense_model, distinct_characters, args, train_dataset=prompts())

    trainer.train()

    # In a shared pass they would be halved with the others, and once more in the loss of each micro-batch.
    assert trainer._groups is None
    # No update came before the first. Halved twice in one of the two, the ratio would be below a half.
    for name in ("ratio/min", "ratio/max"):
        first, second = logged(trainer, name)
        assert first == pytest.approx(1, abs=1e-6)
        assert second != 1  # control: they move


class ComparingLoss(QaRLTrainer):
    """Scores another policy, with gradients and before its own, and notes how far apart the two are."""

    def other_policy(self):
        """A context in which the model is the other policy."""
        raise NotImplementedError

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        arguments = (model, ids, mask, inputs["completion_ids"].shape[1])

        with self.other_policy():
            other, _, _ = self._get_per_token_logps_and_entropies(*arguments)
        loss = super()._compute_loss(model, inputs)
        with torch.no_grad():
            policy, _, _ = self._get_per_token_logps_and_entropies(*arguments)

        self.distances.append(((other - policy).abs() * inputs["completion_mask"]).sum().item())
        return loss


class BaseInLoss(ComparingLoss):
    """Compares with the base, without its adapter."""

    def other_policy(self):
        return self.model.disable_adapter()


class NoiseInLoss(ComparingLoss):
    """Compares with other weights, as an adversarial loss does."""

    @contextlib.contextmanager
    def other_policy(self):
        matrix = self.model.model.layers[0].mlp.down_proj.weight
        before = matrix.data.clone()
        # Through `.data`: no version of a parameter tells of it.
        matrix.data.mul_(-1)
        yield
        matrix.data.copy_(before)


def distances_in_shared_passes(kind, model, folder, peft_config=None, **changes):
    """The distances of two updates of two micro-batches each, which share a pass."""
    updates = {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 2}
    args = QaRLConfig(**without_engine(folder, gradient_checkpointing=False, **updates, **changes))
    trainer = kind(model, distinct_characters, args, train_dataset=prompts(), peft_config=peft_config)
    trainer.distances = []

    trainer.train()

    assert trainer._groups is not None  # control
    return trainer.distances


def test_a_shared_pass_is_not_that_of_the_base_without_its_adapter(dense_model, tmp_path):
    """It would be the policy's own, and each distance from it 0."""
    distances = distances_in_shared_passes(BaseInLoss, dense_model, tmp_path, adapter(), learning_rate=1e-2)

    # A new adapter adds nothing.
    assert distances[:2] == [0, 0]
    assert min(distances[2:]) > 0.1


def test_a_shared_pass_is_not_that_of_weights_which_are_in_place_for_a_while(dense_model, tmp_path):
    assert min(distances_in_shared_passes(NoiseInLoss, dense_model, tmp_path)) > 0.1
