"""TBPO, which a run differentiates, against Python floats and TRL's own clip; its weight; stock losses against TRL's."""

import math
from dataclasses import fields
from types import SimpleNamespace

import pytest
import references
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.config import STOCK_LOSSES
from qarl_trl.loss import TrustBand, filter_advantages, mismatch_weight, sequence_log_ratio, tbpo_loss


PAPER = {"epsilon_high": 4e-4, "delta_low": 3e-4, "delta_high": 7e-4, "mismatch_cap": 2.0}
BANDS = [
    PAPER,
    {"epsilon_high": 0.03, "delta_low": 0.04, "delta_high": 0.07, "mismatch_cap": 1.2},
]
SEEDS = range(72)
# Largest difference of float32 from Python's float64 over these batches: 1.4e-7 in the loss, 6e-8 in a gradient.
TOLERANCE = 1e-6


def random_batch(seed, band=PAPER):
    """Completions in, beyond and exactly on their bounds; holes, NaNs, zero advantages, a completion without tokens."""
    rng = torch.Generator().manual_seed(seed)
    size, length = 6, 9

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    def chance(share, *shape):
        return torch.rand(*shape, generator=rng) < share

    lengths = torch.randint(1, length + 1, (size, 1), generator=rng)
    lengths[5] = 0
    completion_mask = (torch.arange(length) < lengths).long()
    tool_mask = (~chance(0.2, size, length)).long()
    old = -normal(size, length).abs() - 0.1
    # The bounds are of the order of the ratio's spread, so every case is common.
    logps = old + (band["delta_low"] + band["delta_high"]) * normal(size, length) * math.sqrt(length / 2)
    sampling = old + 0.3 * normal(size, 1) + 0.05 * normal(size, length)
    sampling[chance(0.15, size, length)] = math.nan
    advantages = normal(size)
    advantages[chance(0.2, size)] = 0.0
    return SimpleNamespace(
        logps=logps,
        old=old,
        sampling=sampling,
        advantages=advantages,
        completion_mask=completion_mask,
        tool_mask=tool_mask,
        mask=completion_mask * tool_mask,
    )


def without_empty(batch):
    """TRL sums tokens, so a completion without any has no policy term there; here it is a constant."""
    batch.advantages = batch.advantages * (batch.mask.sum(-1) > 0)
    return batch


def with_tie(batch, band):
    """`band` moved so that the first completion with a gradient sits exactly on one of its bounds."""
    ratio = sequence_log_ratio(batch.logps, batch.old, batch.mask).exp().double()
    for r, advantage in zip(ratio.tolist(), batch.advantages.tolist(), strict=True):
        if r > 1 and advantage > 0:
            return band | {"epsilon_high": r - 1}
        if r > 1 and advantage < 0:
            return band | {"delta_high": r - 1}
        if r < 1 and advantage < 0:
            return band | {"delta_low": 1 - r}
    return band


def reference(batch, band):
    settings = {k: v for k, v in band.items() if k != "mismatch_cap"} | {"cap": band["mismatch_cap"]}
    arguments = (batch.logps, batch.old, batch.sampling, batch.advantages, batch.mask)
    loss, gradient = references.tbpo(*(a.tolist() for a in arguments), **settings)
    return loss, torch.tensor(gradient)


def worst(pairs):
    """Largest difference between (loss, gradient) pairs."""
    differences = [max(abs(a[0] - b[0]), (a[1] - b[1]).abs().max().item()) for a, b in pairs]
    assert not any(math.isnan(d) for d in differences)
    return max(differences)


def test_the_mismatch_weight_is_detached_and_sees_nothing_that_is_masked_out():
    batch = random_batch(2)
    old, sampling = batch.old.clone().requires_grad_(), batch.sampling.clone()
    expected = mismatch_weight(old, sampling, batch.mask, 2.0)
    assert not expected.requires_grad
    for mask in (batch.mask.bool(), batch.mask.float(), batch.mask.bfloat16()):
        hidden = torch.where(batch.mask == 0, math.nan, batch.old)
        assert torch.equal(mismatch_weight(hidden, sampling, mask, 2.0), expected)


def test_bfloat16_log_probs_are_computed_with_in_float32():
    """A token that gained 4e-4: float32 sees it, and the control, the same formula in bfloat16, does not."""
    old, mask = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2)
    logps = old + torch.tensor([[8e-4, 0.0]])
    assert sequence_log_ratio(logps, old, mask).exp().item() == pytest.approx(1.0004, abs=1e-7)
    in_bfloat16 = ((logps.bfloat16() - old.bfloat16()) * mask.bfloat16()).sum(-1) / mask.bfloat16().sum(-1)
    assert in_bfloat16.exp().item() == 1.0


def test_an_empty_completion_has_ratio_and_weight_one():
    mask = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    old = torch.tensor([[math.nan, -1.0], [-1.0, -1.0]])
    assert sequence_log_ratio(old + 1e-4, old, mask)[0].item() == 0.0
    assert mismatch_weight(old, torch.full((2, 2), -3.0), mask, 2.0).tolist() == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(
    ("logp_diff", "expected"),
    [(0.0, 1.0), (0.5, math.exp(0.5)), (9.0, 2.0), (-9.0, 0.5), (math.inf, 2.0), (math.nan, 1.0)],
)
def test_mismatch_weight_is_between_one_over_c_and_c(logp_diff, expected):
    """`logp_diff` is learner minus engine on every token; a token that the engine could not score counts as matched."""
    old = torch.full((1, 3), -1.0)
    assert mismatch_weight(old, old - logp_diff, torch.ones(1, 3), 2.0).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("epsilon_high", 0.0), ("delta_low", 1.0), ("mismatch_cap", math.inf)])
def test_a_band_that_leaves_nothing_to_train_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TrustBand(**PAPER | {name: value})


# The trainer --------------------------------------------------------------------------------------------------------


def test_the_positive_filter_is_that_of_python_floats():
    for seed in SEEDS:
        advantages = random_batch(seed).advantages
        assert filter_advantages(advantages, "positive").tolist() == references.positive_advantages(
            advantages.tolist()
        )
        assert filter_advantages(advantages, "none") is advantages


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Builds real trainers that never train; `_compute_loss` then runs on chosen log-probs."""
    folder = str(tmp_path_factory.mktemp("trainers"))
    built = {}

    def build(trainer_class, config_class, **settings):
        key = (trainer_class, tuple(sorted(settings.items())))
        if key not in built:
            args = config_class(
                output_dir=folder, use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=6,
                num_generations=2, max_completion_length=9, **settings,
            )  # fmt: skip
            model = make_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
            data = Dataset.from_dict({"prompt": ["1+1="] * 6})
            built[key] = trainer_class(
                model, lambda completions, **_: [0.0] * len(completions), args, train_dataset=data,
                processing_class=make_tokenizer(),
            )  # fmt: skip
        return built[key]

    return build


@pytest.fixture
def compute(monkeypatch):
    """`_compute_loss` of a trainer on a batch: (loss, gradient by the log-probs)."""

    def run(trainer, batch, accumulation=1, weights=True):
        logps = batch.logps.clone().requires_grad_()
        forward = (logps, torch.zeros_like(logps), None)
        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: forward)
        monkeypatch.setattr(trainer, "_passes", None, raising=False)  # which would split what TRL's method gets
        # As in a run with a vLLM engine, whose weight TRL multiplies with.
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = weights, True
        trainer.current_gradient_accumulation_steps = accumulation
        tokens = torch.ones_like(batch.mask)
        inputs = {
            "prompt_ids": tokens[:, :2],
            "prompt_mask": tokens[:, :2],
            "completion_ids": tokens,
            "completion_mask": batch.completion_mask,
            "tool_mask": batch.tool_mask,
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old,
            "num_items_in_batch": batch.completion_mask.sum(),
        }
        if weights:
            rows = zip(batch.old.tolist(), batch.sampling.tolist(), batch.mask.tolist(), strict=True)
            inputs["importance_sampling_ratio"] = torch.tensor([references.mismatch_weight(*r, 2.0) for r in rows])[
                :, None
            ]
            inputs["sampling_per_token_logps"] = batch.sampling
        before = dict(inputs)
        loss = trainer._compute_loss(trainer.model, inputs)
        assert all(inputs[k] is v for k, v in before.items())  # the batch is used again in later iterations
        loss.backward()
        return loss.item(), logps.grad

    return run


def set_band(trainer, band):
    """Give a QaRL trainer these bounds, or stock TRL the clip that is TBPO with them (`delta_high >= epsilon_high`)."""
    if isinstance(trainer, QaRLTrainer):
        for name, value in band.items():
            setattr(trainer.args, f"tbpo_{name}", value)
        return
    trainer.loss_type, trainer.importance_sampling_level = "grpo", "sequence"
    trainer.epsilon_low, trainer.epsilon_high = band["delta_low"], band["epsilon_high"]
    trainer.args.delta = 1 + band["delta_high"]


@pytest.mark.parametrize("band", BANDS)
def test_the_function_is_trls_two_sided_clip_bit_for_bit(trainers, compute, band):
    """Of the same weight: TRL's expression and `tbpo_loss` give one loss and one gradient."""
    trainer = trainers(GRPOTrainer, GRPOConfig, loss_type="grpo", importance_sampling_level="sequence")
    differ = 0
    for seed in SEEDS:
        batch = random_batch(seed, band)
        tied = with_tie(batch, band)
        if tied["delta_high"] < tied["epsilon_high"]:
            tied = band
        set_band(trainer, tied)
        loss, gradient = compute(trainer, batch)
        rows = zip(batch.old.tolist(), batch.sampling.tolist(), batch.mask.tolist(), strict=True)
        weight = torch.tensor([references.mismatch_weight(*row, 2.0) for row in rows])

        logps = batch.logps.clone().requires_grad_()
        ours = tbpo_loss(logps, batch.old, batch.advantages, batch.mask, TrustBand(**tied), weight)
        ours.backward()
        assert ours.item() == loss
        assert torch.equal(logps.grad, gradient)

        wider = TrustBand(**tied | {"delta_low": 2 * tied["delta_low"]})
        differ += tbpo_loss(batch.logps, batch.old, batch.advantages, batch.mask, wider, weight).item() != loss
    assert differ > 10  # control


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("ours", [True, False], ids=["trainer", "trl"])
def test_loss_and_gradient_are_those_of_tbpo_in_python_floats(trainers, compute, band, ours):
    """Of the trainer, and of stock TRL with the same bounds."""
    band = band | {"mismatch_cap": 2.0}
    if ours:
        trainer = trainers(QaRLTrainer, QaRLConfig, quant_scheme="none")
    else:
        trainer = trainers(GRPOTrainer, GRPOConfig, loss_type="grpo", importance_sampling_level="sequence")
    pairs, exchanged, by_token = [], [], []
    for seed in SEEDS:
        batch = without_empty(random_batch(seed, band))
        tied = with_tie(batch, band)
        if tied["delta_high"] < tied["epsilon_high"]:
            tied = band
        set_band(trainer, tied)
        expected, found = reference(batch, tied), compute(trainer, batch)
        pairs.append((found, expected))
        swapped = tied | {"epsilon_high": tied["delta_high"], "delta_low": tied["delta_high"]}
        exchanged.append((found, reference(batch, swapped)))
        if not ours:
            trainer.importance_sampling_level = "token"
            by_token.append((compute(trainer, batch), expected))
    set_band(trainer, PAPER)
    assert worst(pairs) < TOLERANCE
    # Controls: one bound for both signs, and TRL's default level, are other losses.
    assert worst(exchanged) > 100 * TOLERANCE
    assert ours or worst(by_token) > 100 * TOLERANCE


def test_the_trainer_takes_the_bounds_of_its_config(trainers, compute):
    batch = without_empty(random_batch(5))
    for seed in range(20):
        batch = without_empty(random_batch(seed))
        changed = PAPER | {"delta_high": 9e-4}
        trainer = trainers(QaRLTrainer, QaRLConfig, quant_scheme="none", tbpo_delta_high=9e-4)
        loss, _ = compute(trainer, batch)
        assert loss == pytest.approx(reference(batch, changed)[0], abs=TOLERANCE)
    names = {f.name for f in fields(QaRLConfig)} - {"generation_batch_size"}
    again = QaRLConfig(**{name: getattr(trainer.args, name) for name in names})  # as from a file
    assert again.trust_band == trainer.args.trust_band


@pytest.mark.parametrize("loss_type", STOCK_LOSSES)
def test_a_stock_loss_without_quantization_is_trls_bit_for_bit(trainers, compute, loss_type):
    mode = {"vllm_importance_sampling_mode": "token_truncate"} if loss_type == "vespo" else {}
    batch = without_empty(random_batch(9, BANDS[1]))
    expected = compute(trainers(GRPOTrainer, GRPOConfig, loss_type=loss_type, **mode), batch)
    found = compute(trainers(QaRLTrainer, QaRLConfig, loss_type=loss_type, quant_scheme="none", **mode), batch)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])
    tbpo = trainers(QaRLTrainer, QaRLConfig, quant_scheme="none")
    set_band(tbpo, PAPER)
    assert compute(tbpo, batch)[0] != expected[0]  # control
