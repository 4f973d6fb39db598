"""Training checkpoints of `QaRLTrainer`: master weights, the low-bit model beside them, and an exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from safetensors.torch import load_file, save_file
from slow.toys import forge, stored_tensors
from toy_runs import adapter, changed, make, master_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_trl import QaRLTrainer
from qarl_trl.quant import iter_low_bit_weights
from qarl_trl.quant.frozen import adapter_tensors


# Every step is a rollout batch and an update, and the last ones do not depend on how many there are.
STEPWISE = {"steps_per_generation": 1, "lr_scheduler_type": "constant"}


def make_straight(model: str, folder: Path, peft_config: LoraConfig | None = None, **changes) -> QaRLTrainer:
    """A trainer for four steps, with a checkpoint after the second."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    return make(model, folder, peft_config, **saving, **STEPWISE, **changes)


def resume(
    checkpoint: Path, model: str, folder: Path, peft_config: LoraConfig | None = None, **changes
) -> QaRLTrainer:
    """A run that continues from a checkpoint."""
    trainer = make(model, folder, peft_config, **STEPWISE, **changes)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dense_model", {"quant_scheme": "FP8_DYNAMIC"}),
        # transformers' own way to resume leaves the experts of a mixture as they were before training.
        ("mixture_model", {}),
        ("mixture_model", {"optim_muon": True}),
    ],
)
def test_resuming_after_two_of_four_steps_gives_the_same_master_weights_bit_for_bit(request, tmp_path, kind, changes):
    model = request.getfixturevalue(kind)
    straight = make_straight(model, tmp_path / "a", **changes)
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, model, tmp_path / "b", **changes)

    assert not changed(master_weights(straight), master_weights(resumed))
    # Control: what the checkpoint holds is not yet what four steps give.
    halfway = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert changed(master_weights(straight), dict(halfway.named_parameters()))


def test_a_quantized_start_with_free_scales_resumes_bit_for_bit(gptq_model, tmp_path):
    straight = make_straight(gptq_model, tmp_path / "a", quant_scheme="checkpoint")
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, gptq_model, tmp_path / "b", quant_scheme="checkpoint")

    assert {parameter.dtype for parameter in straight.model.parameters()} == {torch.float32}
    assert not changed(master_weights(straight), master_weights(resumed))
    assert stored_tensors(checkpoint / "low_bit").keys() == stored_tensors(gptq_model).keys()


def test_lora_trains_the_adapter_and_resumes_bit_for_bit(dense_model, tmp_path):
    straight = make_straight(dense_model, tmp_path / "a", adapter())
    start = master_weights(straight)
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, dense_model, tmp_path / "b", adapter())

    trained = master_weights(straight)
    assert not changed(trained, master_weights(resumed))
    low_bit = dict(iter_low_bit_weights(straight.model))
    assert not changed(low_bit, dict(iter_low_bit_weights(resumed.model)))

    moved = changed(start, trained)
    assert len(moved) == 4
    assert all("lora_" in name for name in moved)

    # Control: what the checkpoint holds is not yet what four steps give.
    halfway = dict(AutoPeftModelForCausalLM.from_pretrained(checkpoint).named_parameters())
    assert not all(torch.equal(halfway[name], trained[name]) for name in moved)


def test_a_frozen_base_resumes_bit_for_bit(gptq_model, tmp_path):
    settings = {"quant_scheme": "checkpoint", "lora_base": "frozen"}
    straight = make_straight(gptq_model, tmp_path / "a", adapter(), **settings)
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, gptq_model, tmp_path / "b", adapter(), **settings)

    assert not changed(dict(adapter_tensors(straight.model)), dict(adapter_tensors(resumed.model)))
    assert not (checkpoint / "low_bit").exists()
    with pytest.raises(ValueError, match="another run: lora_base was 'frozen'"):
        resume(checkpoint, gptq_model, tmp_path / "c", adapter(), quant_scheme="checkpoint")


@pytest.mark.parametrize("kind", ["dense_model", "mixture_model"])
def test_a_checkpoint_that_lacks_a_weight_is_not_resumed(request, tmp_path, kind):
    model = request.getfixturevalue(kind)
    make(model, tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    forge(checkpoint)

    trainer = make(model, tmp_path / "resumed")
    with pytest.raises(RuntimeError, match=r"lacks.*model\.layers\.0\.self_attn\.q_proj"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_training_checkpoint_holds_master_weights_and_beside_them_the_low_bit_model(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-4"

    restored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    assert not changed(master_weights(trainer), dict(restored.named_parameters()))
    assert "quantization_config" not in (checkpoint / "config.json").read_text()
    assert '"pack-quantized"' in (checkpoint / "low_bit" / "config.json").read_text()
    AutoTokenizer.from_pretrained(checkpoint / "low_bit")
