"""`qarl_trl.metrics.ratios` against Python floats, against TRL's own clip shares, and through the real `_compute_loss`."""

import math
from types import SimpleNamespace

import pytest
import references
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from trl import GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.config import STOCK_LOSSES
from qarl_trl.loss import TrustBand
from qarl_trl.metrics.bounds import Bounds, clip_bounds
from qarl_trl.metrics.ratios import RatioMeter, completion_columns, ratio_metrics


PAPER = (1 + 4e-4, 1 - 3e-4, 1 + 7e-4)
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
NO_BOUNDS = (None, None, None)
EDGES = ("ratio/pos_high_frac", "ratio/neg_low_frac", "ratio/neg_high_frac")


def random_batch(seed, size=16, length=9, spread=1e-3):
    """Ratios on both sides of all bounds, advantages of both signs and none, holes and empty completions."""
    rng = torch.Generator().manual_seed(seed)
    old = -torch.randn(size, length, generator=rng).abs() - 0.1
    shift = spread * torch.randn(size, 1, generator=rng) + spread * torch.randn(size, length, generator=rng)
    mask = (torch.rand(size, length, generator=rng) < 0.8).long()
    mask[0] = 0
    advantages = torch.randn(size, generator=rng)
    advantages[torch.rand(size, generator=rng) < 0.2] = 0.0
    errors = torch.rand(size, length, generator=rng) < torch.tensor([0.0, 0.3]).repeat(size // 2)[:, None]
    return SimpleNamespace(logps=old + shift, old=old, mask=mask, advantages=advantages, errors=errors)


def bounds(edges):
    return Bounds(
        **{name: edge for name, edge in zip(("pos_high", "neg_low", "neg_high"), edges, strict=True) if edge}
    )


def measured(batch, own, by_sequence, paper=PAPER):
    columns = completion_columns(
        batch.logps, batch.old, batch.mask, batch.advantages, batch.errors, bounds(own), by_sequence
    )
    columns = {name: column.float() for name, column in columns.items()}
    return ratio_metrics(columns, bounds(own), bounds(paper), by_sequence)


def by_reference(batch, own, by_sequence, paper=PAPER):
    parts = (batch.logps, batch.old, batch.mask, batch.advantages, batch.errors)
    rows = list(zip(*(part.tolist() for part in parts), strict=True))
    return references.ratio_metrics(rows, own, paper, by_sequence)


@pytest.mark.parametrize("by_sequence", [True, False])
@pytest.mark.parametrize("own", [PAPER, (1 + 4e-4, 1 - 3e-4, None), NO_BOUNDS, (1.0005, 0.999, 1.001)])
def test_metrics_are_those_of_python_floats(own, by_sequence):
    differ = set()
    for seed in range(40):
        batch = random_batch(seed)
        found, expected = measured(batch, own, by_sequence), by_reference(batch, own, by_sequence)
        # float32: ratios near 1 to 2e-7; k3 is of the order of 1e-6 and its term of a difference that is rounded by 6e-8.
        assert found == {name: pytest.approx(value, rel=2e-3, abs=3e-7) for name, value in expected.items()}
        shares = {name: value for name, value in expected.items() if name.endswith("_frac")}
        assert {name: found[name] for name in shares} == pytest.approx(shares, abs=1e-9)  # counted alike
        batch.advantages = -batch.advantages  # control
        differ |= {name for name, value in measured(batch, own, by_sequence).items() if value != found.get(name)}
    assert differ >= {name for name in expected if not name.endswith(("/min", "/max", "kl_k3", "tokens/frac"))}


def test_what_has_no_value_is_left_out():
    batch = random_batch(1)
    batch.advantages = batch.advantages.abs() + 1
    found = measured(batch, PAPER, True)
    assert not any("/neg_q" in name or name.endswith("/neg_frac") for name in found)
    batch.mask = torch.zeros_like(batch.mask)
    found = measured(batch, PAPER, False)
    assert found["ratio/min"] == found["ratio/max"] == 1
    assert not {"ratio/kl_k3", "ratio/pos_high_frac", "error_tokens/frac"} & set(found)


def test_a_ratio_that_is_no_number_is_not_left_out():
    batch = random_batch(2)
    batch.logps[3] = math.nan
    batch.mask[3] = 1
    assert math.isnan(measured(batch, PAPER, True)["ratio/max"])


# Not vespo: its weight of a sequence is soft, and so small far out that it is 0 in float32.
@pytest.mark.parametrize("loss_type", [name for name in STOCK_LOSSES if name != "vespo"])
@pytest.mark.parametrize("delta", [None, 1.1, 1.4])
def test_beyond_the_bounds_and_only_there_trls_loss_has_no_gradient(trainer, compute, loss_type, delta):
    """The second oracle: where TRL's own loss stops following a ratio, token by token."""
    batch = random_batch(3, size=64, spread=0.3)
    batch.mask[:] = 1
    trainer = trainer(loss_type=loss_type, epsilon=0.2, epsilon_high=0.3, delta=delta)
    _, gradient = compute(trainer, batch)
    own = clip_bounds(loss_type, 0.2, 0.3, delta)
    ratio = (batch.logps - batch.old).exp()
    beyond = torch.stack(list(own.beyond(ratio, batch.advantages[:, None]).values())).any(0)
    active = batch.advantages != 0
    assert torch.equal((gradient == 0)[active], beyond[active])
    assert beyond.any() == (loss_type in CLIPPED)


@pytest.fixture
def trainer(tmp_path):
    def build(**settings):
        if settings.get("loss_type") == "vespo":
            settings["vllm_importance_sampling_mode"] = "token_truncate"
        args = QaRLConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=16,
            num_generations=2, max_completion_length=9, quant_scheme="none", **settings,
        )  # fmt: skip
        model = make_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
        return QaRLTrainer(
            model, lambda completions, **_: [0.0] * len(completions), args,
            train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 16}), processing_class=make_tokenizer(),
        )  # fmt: skip

    return build


@pytest.fixture
def compute(monkeypatch):
    """The real `_compute_loss` on chosen log-probs: what it logged, and the gradient by the log-probs."""

    def run(trainer, batch):
        logps = batch.logps.clone().requires_grad_()
        forward = (logps, torch.zeros_like(logps), None)
        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: forward)
        monkeypatch.setattr(trainer, "_passes", None)  # which would split what TRL's method gets
        trainer.current_gradient_accumulation_steps = 1
        tokens = torch.ones_like(batch.mask)
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": tokens[:, :2],
                "prompt_mask": tokens[:, :2],
                "completion_ids": tokens,
                "completion_mask": batch.mask,
                "advantages": batch.advantages,
                "old_per_token_logps": batch.old,
                "num_items_in_batch": batch.mask.sum(),
            },
        )
        if loss.requires_grad:
            loss.backward()
        logged = {name: values[-1] for name, values in trainer._metrics[trainer._mode].items()}
        return logged, logps.grad

    return run


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("delta", [None, 1.001])
def test_a_stock_loss_logs_what_lies_beyond_its_bounds_and_the_papers(trainer, compute, mode, level, delta):
    """GSPO at the level of sequences: the negatives above the paper's bound, which it does not clip, are seen."""
    clip = {"epsilon": 5e-4, "epsilon_high": 6e-4, "delta": delta, "importance_sampling_level": level}
    gspo = trainer(loss_type="grpo", **clip)
    gspo.model.train(mode == "train")
    unclipped = []
    for seed in range(8):
        batch = random_batch(seed)
        batch.mask[0] = 1
        batch.errors[:] = False
        logged, _ = compute(gspo, batch)
        expected = by_reference(batch, (1 + 6e-4, 1 - 5e-4, delta), level == "sequence")
        found = {name: value for name, value in logged.items() if name.startswith(("ratio/", "error_tokens/"))}
        assert found == {name: pytest.approx(value, rel=2e-3, abs=3e-7) for name, value in expected.items()}
        # TRL's own, where it has them.
        assert found["ratio/pos_high_frac"] == pytest.approx(logged["clip_ratio/high_mean"], abs=1e-6)
        assert found["ratio/neg_low_frac"] == pytest.approx(logged["clip_ratio/low_mean"], abs=1e-6)
        assert ("ratio/neg_high_frac" in found) == (delta is not None)
        unclipped.append(found["ratio/paper_neg_high_frac"] - found.get("ratio/neg_high_frac", 0.0))
    assert level == "token" or max(unclipped) > 0
    other = by_reference(batch, (1 + 6e-4, 1 - 5e-4, delta), level != "sequence")
    assert other["ratio/pos_high_frac"] != pytest.approx(found["ratio/pos_high_frac"], abs=1e-6)  # control


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_a_loss_without_edges_logs_the_papers_alone(trainer, compute, loss_type):
    logged, _ = compute(trainer(loss_type=loss_type), random_batch(0))
    assert not set(EDGES) & set(logged)
    assert {name.replace("ratio/", "ratio/paper_") for name in EDGES} <= set(logged)


def test_the_bounds_of_tbpo_are_the_papers(trainer, compute):
    logged, _ = compute(trainer(), random_batch(0, size=64))
    assert [logged[name] for name in EDGES] == [logged[name.replace("/", "/paper_")] for name in EDGES]
    assert all(logged[name] > 0 for name in EDGES)
    band = TrustBand(4e-4, 3e-4, 7e-4, 2.0)
    assert clip_bounds("grpo", 3e-4, 4e-4, 1 + 7e-4) == Bounds.of_band(band) == bounds(PAPER)


def test_processes_are_measured_in_one_collective_as_if_they_were_one():
    """Means of the processes' shares and quantiles, the control, are others."""
    whole, calls = random_batch(5, size=32), []
    halves = [{name: part[i : i + 16] for name, part in vars(whole).items()} for i in (0, 16)]

    def as_trls(half):
        mask = half["mask"]
        return {"completion_mask": mask, "advantages": half["advantages"], "old_per_token_logps": half["old"]}

    def gather(rows):
        calls.append(rows)
        return torch.cat([rows, other]) if len(calls) > 1 else rows

    def meter():
        return RatioMeter(bounds(PAPER), bounds(PAPER), True, gather)

    def measure(half):
        return meter().measure(half["logps"], as_trls(half), half["errors"], fresh=False)

    alone = measure(halves[1])
    other = calls[0]
    logged = measure(halves[0])
    assert len(calls) == 2
    assert logged == measured(whole, PAPER, True)
    first = measured(SimpleNamespace(**halves[0]), PAPER, True)
    assert (first["ratio/neg_q99"] + alone["ratio/neg_q99"]) / 2 != pytest.approx(logged["ratio/neg_q99"], rel=1e-6)
