"""`qarl_trl.loss` against Python floats and TRL's own clip, and through the trainer; stock losses against TRL's."""

import math

import pytest
import references
import torch
from configs import field_names
from conftest import make_model, make_tokenizer
from datasets import Dataset
from loss_batches import CAP, PAPER, WIDE, random_batch, reference, reference_weights, with_tie, without_empty, worst
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.config import STOCK_LOSSES
from qarl_trl.loss import TrustBand, filter_advantages, mismatch_weight, sequence_log_ratio, tbpo_loss


SEEDS = range(72)

# Largest difference of float32 from Python's float64 over these batches: 1.4e-7 in the loss, 6e-8 in a gradient.
TOLERANCE = 1e-6


# The functions ------------------------------------------------------------------------------------------------------


def test_the_mismatch_weight_is_detached_and_sees_nothing_that_is_masked_out():
    batch = random_batch(2)
    old = batch.old.clone().requires_grad_()

    expected = mismatch_weight(old, batch.sampling, batch.mask, CAP)
    assert not expected.requires_grad

    # One NaN that is read spreads to the whole sum. A mask may have any dtype.
    hidden = torch.where(batch.mask == 0, math.nan, batch.old)
    for mask in (batch.mask.bool(), batch.mask.float(), batch.mask.bfloat16()):
        assert torch.equal(mismatch_weight(hidden, batch.sampling, mask, CAP), expected)


def test_bfloat16_log_probs_are_computed_with_in_float32():
    """A token that gained 4e-4: float32 sees it, and the control, the same formula in bfloat16, does not."""
    old = torch.tensor([[-1.0, -1.0]])
    mask = torch.ones(1, 2)
    logps = old + torch.tensor([[8e-4, 0.0]])

    assert sequence_log_ratio(logps, old, mask).exp().item() == pytest.approx(1.0004, abs=1e-7)

    in_bfloat16 = ((logps.bfloat16() - old.bfloat16()) * mask.bfloat16()).sum(-1) / mask.bfloat16().sum(-1)
    # Near -1 the numbers of bfloat16 are 0.004 apart.
    assert in_bfloat16.exp().item() == 1.0


def test_an_empty_completion_has_ratio_and_weight_one():
    mask = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    old = torch.tensor([[math.nan, -1.0], [-1.0, -1.0]])

    # A mean over no tokens is 0 / 0.
    assert sequence_log_ratio(old + 1e-4, old, mask)[0].item() == 0.0
    assert mismatch_weight(old, torch.full((2, 2), -3.0), mask, CAP).tolist() == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize(
    ("logp_diff", "expected"),
    [(0.0, 1.0), (0.5, math.exp(0.5)), (9.0, 2.0), (-9.0, 0.5), (math.inf, 2.0), (math.nan, 1.0)],
)
def test_mismatch_weight_is_between_one_over_c_and_c(logp_diff, expected):
    """`logp_diff` is learner minus engine on every token; a token without a log-prob of the engine is matched."""
    # Three tokens, so that a sum in place of the mean is another number.
    old = torch.full((1, 3), -1.0)

    weight = mismatch_weight(old, old - logp_diff, torch.ones(1, 3), CAP)

    assert weight.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("epsilon_high", 0.0), ("delta_low", 1.0), ("mismatch_cap", math.inf)])
def test_a_band_that_leaves_nothing_to_train_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        TrustBand(**PAPER | {name: value})


def test_the_positive_filter_is_that_of_python_floats():
    for seed in SEEDS:
        advantages = random_batch(seed).advantages
        expected = references.positive_advantages(advantages.tolist())

        assert filter_advantages(advantages, "positive").tolist() == expected
        assert filter_advantages(advantages, "none") is advantages


# The trainer --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Builds real trainers that never train; `_compute_loss` then runs on chosen log-probs."""
    folder = str(tmp_path_factory.mktemp("trainers"))
    built = {}

    def make(trainer_class, config_class, **settings):
        args = config_class(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=6,
            num_generations=2,
            max_completion_length=9,
            **settings,
        )
        return trainer_class(
            make_model(hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16),
            lambda completions, **_: [0.0] * len(completions),
            args,
            train_dataset=Dataset.from_dict({"prompt": ["1+1="] * 6}),
            processing_class=make_tokenizer(),
        )

    def build(trainer_class, config_class, **settings):
        # Once for each: 72 batches go through it.
        key = (trainer_class, tuple(sorted(settings.items())))
        if key not in built:
            built[key] = make(trainer_class, config_class, **settings)
        return built[key]

    return build


def stock_trainer(trainers):
    """TRL's, with the loss that TBPO is with these bounds."""
    return trainers(GRPOTrainer, GRPOConfig, loss_type="grpo", importance_sampling_level="sequence")


def qarl_trainer(trainers, **settings):
    return trainers(QaRLTrainer, QaRLConfig, quant_scheme="none", **settings)


@pytest.fixture
def compute(monkeypatch):
    """`_compute_loss` of a trainer on a batch: (loss, gradient by the log-probs)."""

    def run(trainer, batch):
        logps = batch.logps.clone().requires_grad_()
        forward = (logps, torch.zeros_like(logps), None)
        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *_, **__: forward)
        # Packed passes would split what TRL's method gets.
        monkeypatch.setattr(trainer, "_passes", None, raising=False)
        # As in a run with a vLLM engine, whose weight TRL multiplies with.
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        trainer.current_gradient_accumulation_steps = 1

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
            "importance_sampling_ratio": reference_weights(batch)[:, None],
            "sampling_per_token_logps": batch.sampling,
        }
        before = dict(inputs)
        loss = trainer._compute_loss(trainer.model, inputs)
        # The batch is used again in later iterations, in which a changed one would be another problem.
        for name, value in before.items():
            assert inputs[name] is value

        loss.backward()
        return loss.item(), logps.grad

    return run


def set_band(trainer, band):
    """Give a QaRL trainer these bounds, or stock TRL the clip that is TBPO with them."""
    if isinstance(trainer, QaRLTrainer):
        for name, value in band.items():
            setattr(trainer.args, f"tbpo_{name}", value)
        return

    trainer.loss_type = "grpo"
    trainer.importance_sampling_level = "sequence"
    trainer.epsilon_low = band["delta_low"]
    trainer.epsilon_high = band["epsilon_high"]
    trainer.args.delta = 1 + band["delta_high"]


@pytest.mark.parametrize("band", [PAPER, WIDE])
def test_the_function_is_trls_two_sided_clip_bit_for_bit(trainers, compute, band):
    """Of the same weight: TRL's expression and `tbpo_loss` give one loss and one gradient."""
    trainer = stock_trainer(trainers)
    differ = 0
    for seed in SEEDS:
        batch = random_batch(seed, band)
        tied = with_tie(batch, band)
        set_band(trainer, tied)
        loss, gradient = compute(trainer, batch)

        weight = reference_weights(batch)
        logps = batch.logps.clone().requires_grad_()
        ours = tbpo_loss(logps, batch.old, batch.advantages, batch.mask, TrustBand(**tied), weight)
        ours.backward()

        assert ours.item() == loss
        assert torch.equal(logps.grad, gradient)

        # Control: one bound of three is another.
        wider = TrustBand(**tied | {"delta_low": 2 * tied["delta_low"]})
        control = tbpo_loss(batch.logps, batch.old, batch.advantages, batch.mask, wider, weight)
        differ += control.item() != loss
    # Only some batches have an answer beyond this bound.
    assert differ > 10


@pytest.mark.parametrize("band", [PAPER, WIDE])
@pytest.mark.parametrize("kind", ["trainer", "trl"])
def test_loss_and_gradient_are_those_of_tbpo_in_python_floats(trainers, compute, band, kind):
    """Of the trainer, and of stock TRL with the same bounds."""
    band = band | {"mismatch_cap": CAP}
    trainer = qarl_trainer(trainers) if kind == "trainer" else stock_trainer(trainers)
    pairs = []
    exchanged = []
    by_token = []

    for seed in SEEDS:
        batch = without_empty(random_batch(seed, band))
        tied = with_tie(batch, band)
        set_band(trainer, tied)
        result = compute(trainer, batch)
        expected = reference(batch, tied)
        pairs.append((result, expected))

        # Controls: one bound for both signs, and TRL's default level, are other losses.
        one_bound = tied | {"epsilon_high": tied["delta_high"], "delta_low": tied["delta_high"]}
        exchanged.append((result, reference(batch, one_bound)))
        if kind == "trl":
            trainer.importance_sampling_level = "token"
            by_token.append((compute(trainer, batch), expected))
    # The trainer is shared with other tests.
    set_band(trainer, PAPER)

    assert worst(pairs) < TOLERANCE
    assert worst(exchanged) > 100 * TOLERANCE
    if kind == "trl":
        assert worst(by_token) > 100 * TOLERANCE


def test_the_trainer_takes_the_bounds_of_its_config(trainers, compute):
    trainer = qarl_trainer(trainers, tbpo_delta_high=9e-4)
    changed = PAPER | {"delta_high": 9e-4}

    for seed in range(20):
        batch = without_empty(random_batch(seed))
        loss, _ = compute(trainer, batch)
        assert loss == pytest.approx(reference(batch, changed)[0], abs=TOLERANCE)

    # As from a file. TRL computes the batch size from other fields, and refuses to be given all of them.
    values = {}
    for name in field_names(QaRLConfig) - {"generation_batch_size"}:
        values[name] = getattr(trainer.args, name)
    again = QaRLConfig(**values)
    assert again.trust_band == trainer.args.trust_band


@pytest.mark.parametrize("loss_type", STOCK_LOSSES)
def test_a_stock_loss_without_quantization_is_trls_bit_for_bit(trainers, compute, loss_type):
    # VESPO refuses TRL's default, a weight of the sequence.
    mode = {"vllm_importance_sampling_mode": "token_truncate"} if loss_type == "vespo" else {}
    batch = without_empty(random_batch(9, WIDE))

    stock = trainers(GRPOTrainer, GRPOConfig, loss_type=loss_type, **mode)
    expected_loss, expected_gradient = compute(stock, batch)
    loss, gradient = compute(qarl_trainer(trainers, loss_type=loss_type, **mode), batch)

    assert loss == expected_loss
    assert torch.equal(gradient, expected_gradient)

    tbpo = qarl_trainer(trainers)
    set_band(tbpo, PAPER)
    # Control: TBPO is another loss.
    assert compute(tbpo, batch)[0] != expected_loss
