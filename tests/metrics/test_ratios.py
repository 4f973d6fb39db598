"""`qarl_trl.metrics.ratios` against Python floats, and through the real `_compute_loss`."""

import copy
import math
from types import SimpleNamespace

import pytest
import references
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from trl import GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.loss import TrustBand
from qarl_trl.metrics.columns import merge_micro_batches
from qarl_trl.metrics.ratios import completion_columns, measure_ratios, ratio_metrics


PAPER = TrustBand(4e-4, 3e-4, 7e-4, 2.0)
OTHER = TrustBand(5e-4, 1e-3, 1e-4, 2.0)


def random_batch(seed, size=16, length=9, spread=1e-3):
    """Ratios on both sides of all bounds, advantages of both signs and none, holes and empty completions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    old = -normal(size, length).abs() - 0.1
    # A part is the same for a whole completion: means of independent tokens alone would be near 0.
    logps = old + (spread * normal(size, 1) + spread * normal(size, length))

    mask = (uniform(size, length) < 0.8).long()
    mask[0] = 0

    advantages = normal(size)
    advantages[uniform(size) < 0.2] = 0.0

    # Every second completion has errors.
    error_share = torch.tensor([0.0, 0.3]).repeat(size // 2)[:, None]
    errors = uniform(size, length) < error_share
    return SimpleNamespace(logps=logps, old=old, mask=mask, advantages=advantages, errors=errors)


def rows_of(batch, rows):
    """Some rows of a batch."""
    return SimpleNamespace(**{name: tensor[rows] for name, tensor in vars(batch).items()})


def measured(batch, band=PAPER, prefix=""):
    columns = completion_columns(batch.logps, batch.old, batch.mask, batch.advantages, batch.errors)
    # As a trainer gathers them: in one tensor, and so in one dtype.
    return ratio_metrics({name: column.float() for name, column in columns.items()}, band, prefix)


def by_reference(batch, band=PAPER, prefix=""):
    rows = zip(
        batch.logps.tolist(),
        batch.old.tolist(),
        batch.mask.tolist(),
        batch.advantages.tolist(),
        batch.errors.tolist(),
        strict=True,
    )
    bounds = (1 + band.epsilon_high, 1 - band.delta_low, 1 + band.delta_high)
    return references.ratio_metrics(list(rows), bounds, prefix)


def nearly(expected):
    """float32: ratios near 1 to 2e-7; k3 is of the order of 1e-6, its term of a difference that is rounded by 6e-8."""
    return pytest.approx(expected, rel=2e-3, abs=3e-7)


def starting_with(prefixes, metrics):
    """The metrics whose names begin with one of the prefixes."""
    return {name: value for name, value in metrics.items() if name.startswith(prefixes)}


@pytest.mark.parametrize("band", [PAPER, OTHER])
def test_metrics_are_those_of_python_floats(band):
    differ = set()
    for seed in range(40):
        batch = random_batch(seed)
        metrics = measured(batch, band)
        expected = by_reference(batch, band)

        assert metrics == nearly(expected)
        for name, value in expected.items():
            if name.endswith("_frac"):
                # Both count the same completions, so the shares are exact.
                assert metrics[name] == pytest.approx(value, abs=1e-9), name

        # Control: with the other signs nearly every metric is another.
        batch.advantages = -batch.advantages
        for name, value in measured(batch, band).items():
            if value != metrics.get(name):
                differ.add(name)

    # What does not depend on the sign of an advantage.
    alike = {"ratio/min", "ratio/max", "ratio/kl_k3", "error_tokens/frac"}
    assert alike < set(expected)
    assert differ >= set(expected) - alike


def test_what_has_no_value_is_left_out_and_what_is_no_number_is_not():
    batch = random_batch(1)
    batch.advantages = batch.advantages.abs() + 1
    assert starting_with("ratio/pos_q", measured(batch))
    assert not starting_with("ratio/neg_q", measured(batch))

    batch.logps[3] = math.nan
    batch.mask[3] = 1
    assert math.isnan(measured(batch)["ratio/max"])

    batch.mask = torch.zeros_like(batch.mask)
    metrics = measured(batch)
    assert set(metrics) == {"ratio/pos_high_frac", "ratio/neg_low_frac", "ratio/neg_high_frac"}


def test_the_clipped_share_is_one_where_nothing_is_learned():
    """Three of four answers have no bound, or are not in the loss: the shares of all cannot show it."""
    batch = random_batch(2)
    batch.mask[:] = 1
    batch.mask[2::4] = 0
    batch.advantages[:] = torch.tensor([1.0, 0.0, -1.0, 0.0]).repeat(len(batch.advantages) // 4)
    batch.logps = batch.old + 0.1

    metrics = measured(batch)

    assert metrics["ratio/clipped_frac"] == 1
    assert metrics["ratio/pos_high_frac"] == 0.25
    # Control: within the bounds.
    batch.logps = batch.old.clone()
    assert measured(batch)["ratio/clipped_frac"] == 0


def test_shares_of_micro_batches_are_those_of_the_whole():
    """Most errors and most tokens are in one of them, and so are most answers without an advantage."""
    batch = random_batch(3, length=40)
    batch.mask[4:, 6:] = 0
    batch.errors[:4] = True
    batch.advantages[8:12] = 0
    micro_batches = [measured(rows_of(batch, slice(start, start + 4))) for start in range(0, 16, 4)]

    logged = {}
    for metrics in micro_batches:
        for name, value in metrics.items():
            logged.setdefault(name, []).append(value)
    plain_mean = sum(logged["error_tokens/frac"]) / 4
    # A callback may have taken a copy.
    logged = copy.deepcopy(logged)
    merge_micro_batches(logged)

    whole = measured(batch)
    for name in ("error_tokens/frac", "ratio/clipped_frac", "ratio/kl_k3", "ratio/min", "ratio/max"):
        assert logged[name] == [pytest.approx(whole[name], rel=1e-9)], name
    # Control: TRL's mean counts each of them once.
    assert plain_mean < 0.5 < whole["error_tokens/frac"]


# In the trainer -----------------------------------------------------------------------------------------------------


def make_trainer(folder, loss_type):
    """A trainer that never trains."""
    args = QaRLConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=16,
        num_generations=2,
        max_completion_length=9,
        quant_scheme="none",
        loss_type=loss_type,
        max_tokens_per_pass=None,
    )
    return QaRLTrainer(
        make_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16),
        lambda completions, **_: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 16}),
        processing_class=make_tokenizer(),
    )


def logged_by_loss(trainer, batch, mode, monkeypatch):
    """What the trainer logs when it computes the loss of a batch, with the batch's log-probs."""
    trainer.model.train(mode == "train")
    trainer.current_gradient_accumulation_steps = 1
    # In place of the model's: those of the batch lie on both sides of every bound.
    forward = (batch.logps, torch.zeros_like(batch.logps), None)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: forward)

    tokens = torch.ones_like(batch.mask)
    inputs = {
        "prompt_ids": tokens[:, :2],
        "prompt_mask": tokens[:, :2],
        "completion_ids": tokens,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "num_items_in_batch": batch.mask.sum(),
    }
    trainer._compute_loss(trainer.model, inputs)
    return {name: values[-1] for name, values in trainer._metrics[mode].items()}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("loss_type", ["tbpo", "grpo", "sapo"])
def test_the_trainer_logs_what_lies_beyond_the_papers_bounds(tmp_path, monkeypatch, mode, loss_type):
    """Of a stock loss under names of their own; under those of TBPO it has TRL's, whose bounds are its own."""
    trainer = make_trainer(tmp_path, loss_type)
    # 64 completions, so that some lie beyond each bound. None is empty, and in nine tokens a trainer finds no errors.
    batch = random_batch(0, size=64)
    batch.mask[0] = 1
    batch.errors[:] = False

    logged = logged_by_loss(trainer, batch, mode, monkeypatch)

    metrics = starting_with(("ratio/", "error_tokens/"), logged)
    prefix = "" if loss_type == "tbpo" else "paper_"
    assert metrics == nearly(by_reference(batch, prefix=prefix))
    if loss_type == "tbpo":  # TRL's own, where it has them
        assert metrics["ratio/pos_high_frac"] == pytest.approx(logged["clip_ratio/high_mean"], abs=1e-6) != 0
        assert metrics["ratio/neg_low_frac"] == pytest.approx(logged["clip_ratio/low_mean"], abs=1e-6) != 0


def test_processes_are_measured_in_one_collective_as_if_they_were_one():
    """Means of the processes' shares and quantiles, the control, are others."""
    batch = random_batch(5, size=32)
    first = rows_of(batch, slice(0, 16))
    second = rows_of(batch, slice(16, 32))
    calls = []

    def gather_alone(rows):
        calls.append(rows)
        return rows

    def gather_both(rows):
        calls.append(rows)
        return torch.cat([rows, calls[0]])

    def measure(half, gather):
        inputs = {
            "completion_mask": half.mask,
            "advantages": half.advantages,
            "old_per_token_logps": half.old,
        }
        return measure_ratios(half.logps, inputs, half.errors, PAPER, "", gather, fresh=False)

    # The second one first: then what it gathers is there when the first one asks.
    second_alone = measure(second, gather_alone)
    logged = measure(first, gather_both)

    # One collective of each process.
    assert len(calls) == 2
    assert logged == measured(batch)
    mean_of_both = (measured(first)["ratio/neg_q99"] + second_alone["ratio/neg_q99"]) / 2
    assert mean_of_both != pytest.approx(logged["ratio/neg_q99"], rel=1e-6)
