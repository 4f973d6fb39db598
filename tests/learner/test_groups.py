"""`qarl_trl.learner.groups`: micro-batches that share a pass train as each one alone does."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from slow.toys import distinct_characters, prompts, save_model
from torch import Tensor
from toy_runs import train as train_losses
from toy_runs import without_engine
from transformers import TrainerCallback

from learner.test_features import LARGE, assert_equal_runs, make, plain_losses, train
from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.learner.groups import MicroBatchGroups, count_tokens
from qarl_trl.learner.logps import PackedPasses


# Groups -------------------------------------------------------------------------------------------------------------


def micro_batches(lengths):
    """Micro-batches of two rows, whose completions have these lengths, and whose prompts one token each."""
    batches = []
    for length in lengths:
        completion_mask = torch.zeros(2, 6, dtype=torch.long)
        completion_mask[0, :length] = 1
        batches.append({"prompt_mask": torch.ones(2, 1, dtype=torch.long), "completion_mask": completion_mask})
    return batches


def groups_of(sizes):
    return MicroBatchGroups(lambda tokens, updates: list(sizes))


def test_all_real_tokens_are_counted():
    assert count_tokens(micro_batches([0, 1, 6])).tolist() == [2, 3, 8]


def test_a_group_comes_out_with_its_last_micro_batch():
    batch = micro_batches([1, 2, 3])
    groups = groups_of([2, 1])
    groups.choose(batch, [0, 0, 0])

    taken = []
    for place, micro_batch in enumerate(batch):
        taken.append(groups.take(micro_batch, place, ends_update=False))

    assert taken == [[], batch[:2], batch[2:]]


def test_a_group_ends_where_the_optimizer_steps():
    """As in an epoch whose last update is shorter than the others."""
    batch = micro_batches([1, 2, 3])
    groups = groups_of([3])
    groups.choose(batch, [0, 0, 0])

    assert groups.take(batch[0], 0, ends_update=False) == []
    assert groups.take(batch[1], 1, ends_update=True) == batch[:2]
    assert groups.take(batch[2], 2, ends_update=False) == batch[2:]


def test_a_rollout_batch_is_grouped_once_and_the_next_one_starts_empty():
    asked = []

    def merge(tokens, updates):
        asked.append((tokens.tolist(), updates))
        return [2]

    first = micro_batches([1, 2])
    second = micro_batches([3, 4])
    groups = MicroBatchGroups(merge)
    groups.choose(first, [0, 0])
    # Asked again of the same rollout batch, which is grouped already.
    groups.choose(first, [1, 1])
    # A run that stops here is followed by another one.
    assert groups.take(first[0], 0, ends_update=False) == []
    groups.choose(second, [5, 5])

    assert asked == [([3, 4], [0, 0]), ([5, 6], [5, 5])]
    assert groups.take(second[0], 0, ends_update=False) == []
    assert groups.take(second[1], 1, ends_update=False) == second


# Trained ------------------------------------------------------------------------------------------------------------


def alone(self: PackedPasses, tokens: Tensor, updates: list[int]) -> list[int]:
    """In place of `merge`."""
    return [1] * len(tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


SETTINGS = {"steps_per_generation": 4, "gradient_accumulation_steps": 4}
FEATURES = {
    "tbpo": {},
    # Its sum is divided by the tokens of the micro-batch.
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo"},
    # TRL reads where an update ends.
    "adaptive entropy": {
        "loss_type": "grpo",
        "use_adaptive_entropy": True,
        "entropy_coef": 0.5,
        "entropy_target": 9.0,
        "max_steps": 3,
    },
    # A quantile of the tokens of the micro-batch.
    "entropy quantile": {"loss_type": "dapo", "top_entropy_quantile": 0.3},
    "rollout batches of three": {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("scheme", ["W4A16", None])
@pytest.mark.parametrize("feature", FEATURES)
def test_micro_batches_that_share_a_pass_train_as_each_one_alone(model, tmp_path, monkeypatch, feature, scheme):
    """Also the metrics: those of every micro-batch are logged."""
    changes = SETTINGS | plain_losses(scheme) | FEATURES[feature]
    together = train(make(model, tmp_path / "together", max_tokens_per_pass=LARGE, **changes))
    monkeypatch.setattr(PackedPasses, "merge", alone)
    one_by_one = train(make(model, tmp_path / "alone", max_tokens_per_pass=LARGE, **changes))

    assert_equal_runs(together, one_by_one)
    # Control: they did share passes.
    assert len(together["passes"]) < len(one_by_one["passes"])


def test_a_loss_of_the_whole_group_would_be_noticed(model, tmp_path):
    """Control: with one loss for all rows "bnpo" divides by the tokens of the group."""
    changes = SETTINGS | plain_losses(None) | FEATURES["bnpo"]
    apart = train(make(model, tmp_path / "apart", max_tokens_per_pass=LARGE, **changes))
    larger = {"per_device_train_batch_size": 16, "steps_per_generation": 1, "gradient_accumulation_steps": 1}
    whole = train(make(model, tmp_path / "whole", max_tokens_per_pass=LARGE, **changes | larger))

    # Seen: -0.356 and -0.409.
    assert abs(apart["losses"][:4].sum() - whole["losses"][0]) > 1e-2


@pytest.mark.parametrize("method", ["compute_loss", "training_step"])
def test_a_class_that_looks_at_each_loss_gets_that_of_each_micro_batch(model, tmp_path, method, caplog):
    """It may weigh it by what is in the micro-batch: zeros and a sum would be weighed by the last one."""
    seen = []

    class Looks(QaRLTrainer):
        pass

    def look(self, *args, **kwargs):
        loss = getattr(super(Looks, self), method)(*args, **kwargs)
        seen.append(loss)
        return loss

    setattr(Looks, method, look)
    args = QaRLConfig(**without_engine(tmp_path, **SETTINGS, loss_type="grpo", max_steps=1))
    trainer = Looks(model, distinct_characters, args, train_dataset=prompts())
    trainer.train()

    assert len(seen) == 4
    assert trainer._groups is None
    slower = f"Looks has a {method} of its own (an override of _compute_loss alone would let them share passes), so"
    assert slower in caplog.text
    if method == "compute_loss":
        # The zero of a shared pass has none.
        assert all(loss.grad_fn is not None for loss in seen)

    # Control: without such a method they share passes, also with another loss of each micro-batch.
    class Weighs(QaRLTrainer):
        def _compute_loss(self, *args):
            return 2 * super()._compute_loss(*args)

    caplog.clear()
    assert QaRLTrainer(model, distinct_characters, args, train_dataset=prompts())._groups is not None
    assert Weighs(model, distinct_characters, args, train_dataset=prompts())._groups is not None
    assert "slower" not in caplog.text


class MeasuresGradients(TrainerCallback):
    """As a gradient noise scale is measured."""

    def __init__(self):
        self.norms = []

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms.append(sum(gradient.norm().item() for gradient in gradients))


def test_a_callback_between_micro_batches_sees_their_gradients(model, tmp_path, caplog):
    """In a pass that they share they are computed at its end."""
    measures = MeasuresGradients()
    args = QaRLConfig(**without_engine(tmp_path, **SETTINGS, loss_type="grpo", max_steps=1))
    trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), callbacks=[measures])

    trainer.train()

    assert len(measures.norms) == 3
    assert min(measures.norms) > 0
    assert "MeasuresGradients has an on_substep_end, so each micro-batch runs in a pass of its own" in caplog.text


def test_micro_batches_of_different_widths_run_each_in_a_pass_of_its_own(model, tmp_path):
    """TRL takes those that a class has trimmed."""

    class Trims(QaRLTrainer):
        def _prepare_inputs(self, *args):
            inputs = dict(super()._prepare_inputs(*args))
            longest = int(inputs["completion_mask"].sum(dim=1).max())
            for name, value in inputs.items():
                if isinstance(value, torch.Tensor) and value.shape == inputs["completion_mask"].shape:
                    inputs[name] = value[:, :longest]
            return inputs

    args = QaRLConfig(**without_engine(tmp_path, **SETTINGS, loss_type="grpo", max_steps=1))
    trainer = Trims(model, distinct_characters, args, train_dataset=prompts())
    trainer.train()
    assert trainer._groups is None


@pytest.mark.parametrize("method", ["compute_loss", "training_step"])
def test_a_method_that_a_script_puts_in_place_sees_the_loss_of_each_micro_batch(model, tmp_path, monkeypatch, method):
    """In a notebook: on a trainer that is made already, or on the class."""

    def trainer(folder: str) -> QaRLTrainer:
        args = QaRLConfig(**without_engine(tmp_path / folder, **SETTINGS, loss_type="grpo", max_steps=1))
        return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts())

    def noted(original, seen):
        def look(*args, **kwargs):
            loss = original(*args, **kwargs)
            seen.append(loss.item())
            return loss

        return look

    on_trainer: list[float] = []
    patched = trainer("trainer")
    setattr(patched, method, noted(getattr(patched, method), on_trainer))
    patched.train()

    on_class: list[float] = []
    monkeypatch.setattr(QaRLTrainer, method, noted(getattr(QaRLTrainer, method), on_class))
    trainer("class").train()

    # Of a shared pass it would be three zeros and a sum.
    assert len(on_trainer) == len(on_class) == 4
    assert 0.0 not in on_trainer
    assert on_trainer == on_class


def rows_of(inputs):
    """The arguments with which TRL's loss scores a micro-batch."""
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), dim=1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), dim=1)
    return ids, mask, inputs["completion_ids"].shape[1]


def test_a_loss_may_score_what_it_compares_with_first(model, tmp_path):
    """Another model, as of a teacher, and the policy without its adapter: none is the forward that is shared."""
    args = QaRLConfig(**without_engine(tmp_path / "teacher", max_steps=1))
    teacher = QaRLTrainer(
        save_model(tmp_path / "other", layers=1, seed=1), distinct_characters, args, train_dataset=prompts()
    ).model
    off = []
    kl = []

    class Compares(QaRLTrainer):
        def _compute_loss(self, model, inputs):
            rows = rows_of(inputs)
            kept = inputs["completion_mask"].bool()
            with torch.no_grad():
                of_teacher, _, _ = self._get_per_token_logps_and_entropies(teacher, *rows)
                with self.model.disable_adapter():
                    of_base, _, _ = self._get_per_token_logps_and_entropies(model, *rows)
                logits = teacher(input_ids=rows[0], attention_mask=rows[1]).logits[:, -rows[2] - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, rows[0][:, -rows[2] :, None]).squeeze(-1)
                off.append((of_teacher - expected)[kept].abs().max().item())
            loss = super()._compute_loss(model, inputs)
            kl.append((of_base - inputs["old_per_token_logps"])[kept].abs().max().item())
            return loss

    settings = without_engine(
        tmp_path / "run", **SETTINGS | {"steps_per_generation": 8}, loss_type="grpo", max_steps=1
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    trainer = Compares(
        model, distinct_characters, QaRLConfig(**settings), train_dataset=prompts(), peft_config=adapter
    )
    trainer.train()

    # They did share a pass.
    assert trainer._groups is not None
    assert len(off) == 4
    assert max(off) < 1e-5
    # The adapter is random from the start. Of the shared forward this would be 0.
    assert min(kl) > 1e-2


class CutsAnswers(QaRLTrainer):
    """Learns only the first tokens of an answer."""

    def _compute_loss(self, model, inputs):
        cut = dict(inputs)
        for name in ("completion_ids", "completion_mask", "old_per_token_logps"):
            if name in cut:
                cut[name] = cut[name][:, :4]
        return super()._compute_loss(model, cut)


def test_a_loss_may_score_other_rows(model, tmp_path, monkeypatch, caplog):
    def losses(folder: str) -> list[float]:
        settings = without_engine(tmp_path / folder, **SETTINGS, loss_type="grpo", max_steps=2)
        return train_losses(CutsAnswers(model, distinct_characters, QaRLConfig(**settings), train_dataset=prompts()))

    together = losses("together")
    assert "scores other rows than those of its micro-batch" in caplog.text
    monkeypatch.setattr(PackedPasses, "merge", alone)

    assert together == pytest.approx(losses("alone"), abs=1e-5)


def test_a_class_may_score_a_part_of_a_rollout_batch_by_micro_batches(model, tmp_path):
    """Fewer micro-batches than updates share."""
    off = []

    class Scores(QaRLTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            ids, mask, keep = rows_of(output)
            with torch.no_grad():
                some, _, _ = self._get_per_token_logps_and_entropies(self.model, ids[:4], mask[:4], keep, batch_size=2)
                whole, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, keep)
            off.append((some - whole[:4]).abs().max().item())
            return output

    settings = without_engine(tmp_path, **SETTINGS, loss_type="grpo", max_steps=1)
    Scores(model, distinct_characters, QaRLConfig(**settings), train_dataset=prompts()).train()

    assert len(off) == 1
    assert off[0] < 1e-5


def test_a_balancing_loss_keeps_micro_batches_apart(tmp_path):
    """That of a pass is not the mean of those of its micro-batches."""
    mixture = save_model(tmp_path / "model", layers=1, experts=4)
    changes = SETTINGS | plain_losses(None) | {"max_tokens_per_pass": LARGE, "max_steps": 1}

    balanced = train(make(mixture, tmp_path / "balanced", **changes, router_aux_loss_coef=0.3))
    free = train(make(mixture, tmp_path / "free", **changes, router_aux_loss_coef=0.0))

    # And two passes of the evaluation.
    assert len(balanced["passes"]) == 4 + 2
    assert len(free["passes"]) == 1 + 2


def test_a_rollout_batch_is_grouped_again_where_its_updates_are_cut_otherwise():
    """Three micro-batches, used twice, in updates of two. A resumed run sees the second use alone."""
    batch = micro_batches([1, 2, 3])

    def taken(groups, updates):
        groups.choose(batch, updates)
        return [len(groups.take(one, place, ends_update=False)) for place, one in enumerate(batch)]

    def merge(tokens, updates):
        return [updates.count(update) for update in sorted(set(updates))]

    straight = MicroBatchGroups(merge)
    assert taken(straight, [0, 0, 1]) == [0, 2, 1]
    second = taken(straight, [-1, 0, 0])

    assert second == [1, 0, 2]
    assert second == taken(MicroBatchGroups(merge), [-1, 0, 0])
