"""LoRA in `QaRLTrainer`, merged before quantization: its files, and the reference of its KL penalty."""

from __future__ import annotations

import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from slow.toys import distinct_characters, logged, prompts, randomize_adapter, stored_tensors
from toy_runs import adapter, changed, copies_of, make, master_weights, without_engine
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.cpu_exact.ops import has_engine_ops, use_engine_ops
from qarl_trl.learner.attention import attend_from_cache
from qarl_trl.quant import apply_quantization, iter_low_bit_weights


def low_bit_form(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model that is quantized to W4A16 here."""
    return dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))


def test_lora_saves_the_adapter_and_beside_it_the_merged_low_bit_model(dense_model, tmp_path):
    run = tmp_path / "run"
    trainer = make(dense_model, run, adapter(), save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model()

    synced = dict(iter_low_bit_weights(trainer.model))
    trained = master_weights(trainer)
    for folder in (run, run / "checkpoint-4"):
        # Of a model. With it the folder would be both.
        assert not (folder / "config.json").exists()
        assert not changed(synced, stored_tensors(folder / "low_bit"))

        restored = AutoPeftModelForCausalLM.from_pretrained(folder)
        assert not changed(trained, dict(restored.named_parameters()))
        # The adapter and its base model give the low-bit model back.
        assert not changed(synced, low_bit_form(restored))

    # Control: the base model's quantized values are others.
    base = low_bit_form(AutoModelForCausalLM.from_pretrained(dense_model))
    assert "model.layers.0.mlp.down_proj.weight_packed" in changed(synced, base)


def test_a_norm_that_a_script_makes_trainable_beside_the_adapter_is_refused(dense_model, tmp_path):
    """No file of the adapter has it: a resumed run would begin with the base's. The trainer made the adapter."""
    trainer = make(dense_model, tmp_path, adapter())
    trainer.model.get_parameter("base_model.model.model.norm.weight").requires_grad = True

    with pytest.raises(ValueError, match=r"trains 1 parameters beside its adapter, first '.*norm\.weight'"):
        trainer.train()


def test_the_low_bit_model_of_lora_loads_as_a_plain_model(dense_model, tmp_path):
    make(dense_model, tmp_path, adapter()).save_model()

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "low_bit")

    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    AutoTokenizer.from_pretrained(tmp_path / "low_bit")


def test_the_reference_of_lora_is_the_low_bit_base(dense_model, tmp_path):
    """The policy it starts from: the KL of the first update is exactly 0."""
    trainer = make(dense_model, tmp_path, adapter(), beta=0.1)
    # peft's state of the adapter at each forward: the reference is the model without it.
    enabled = set()
    forward = trainer._get_per_token_logps_and_entropies

    def spy(*args, **kwargs):
        result = forward(*args, **kwargs)
        enabled.add(trainer.model.get_model_status().enabled)
        return result

    trainer._get_per_token_logps_and_entropies = spy
    trainer.train()

    assert logged(trainer, "kl")[0] == 0.0
    assert enabled == {True, False}
    # Control: the adapter has moved since, and the reference has not.
    assert logged(trainer, "kl")[-1] > 0


def test_the_reference_of_all_weights_is_the_unquantized_model(dense_model, tmp_path):
    """TRL keeps it, and the KL starts at what quantization costs."""
    trainer = make(dense_model, tmp_path, beta=0.1)

    trainer.train()

    assert logged(trainer, "kl")[0] > 0


def test_a_reference_that_is_not_the_start_is_said(dense_model, tmp_path, caplog):
    """A script changes the model in memory, and TRL loads the reference from its files."""

    def make_from_memory(folder, scale, part=1):
        caplog.clear()
        model = AutoModelForCausalLM.from_pretrained(dense_model)
        model.model.layers[0].mlp.up_proj.weight.data *= scale
        # Its rope is another one with another number of positions. A reference drops nothing.
        model.config.max_position_embeddings //= part
        model.config.attention_dropout = 0.1
        make(model, tmp_path / folder, beta=0.1)
        return re.findall("The reference model is not the start of the run: they differ in (.*?) TRL", caplog.text)

    assert make_from_memory("same", 1.0) == []  # control
    assert make_from_memory("changed", 1.5) == ["model.layers.0.mlp.up_proj.weight."]
    assert make_from_memory("shorter", 1.0, part=2) == ["max_position_embeddings of their configs."]


def test_the_reference_does_not_attend_as_an_earlier_trainer_of_the_script_did(dense_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
    use_engine_ops(model)
    attend_from_cache(model, "fp8")
    assert model.config._attn_implementation.endswith("_fp8")  # control

    trainer = make(model, tmp_path, beta=0.1)

    for of_run in (trainer.model, trainer.ref_model):
        assert trainer.accelerator.unwrap_model(of_run).config._attn_implementation == "sdpa"
    assert not has_engine_ops(trainer.model)


def test_a_peft_model_is_trained_with_its_own_adapter_as_the_reference(dense_model, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(dense_model), adapter())
    randomize_adapter(model, scale=0.05)
    start = copies_of(model)

    trainer = make(model, tmp_path, beta=0.1)
    trainer.train()

    assert logged(trainer, "kl")[0] == 0.0
    # TRL copies the adapter under the name "ref". It is where the user's was, and the user's has moved.
    now = master_weights(trainer)
    for name, parameter in start.items():
        assert torch.equal(now[name.replace("default", "ref")], parameter), name
    assert changed(start, {name: now[name] for name in start})

    trainer.save_model(tmp_path / "final")
    for name in stored_tensors(tmp_path / "final" / "low_bit"):
        assert "ref" not in name
        assert "lora" not in name


@pytest.mark.parametrize("as_peft_model", [True, False])
def test_an_adapter_resumes_only_on_the_base_that_a_script_loaded_for_it(dense_model, tmp_path, as_peft_model):
    """A checkpoint has no base, and a script may have merged another adapter into it."""

    def trainer_in(folder, changed_base):
        model = AutoModelForCausalLM.from_pretrained(dense_model)
        if changed_base:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
        if as_peft_model:
            model = get_peft_model(model, adapter())
        config = None if as_peft_model else adapter()
        return make(model, folder, config, max_steps=2, save_strategy="steps", save_steps=1)

    trainer_in(tmp_path / "first", changed_base=True).train()
    checkpoint = str(tmp_path / "first" / "checkpoint-1")

    with pytest.raises(ValueError, match="loaded_base was '[0-9a-f]{16}'"):
        trainer_in(tmp_path / "other", changed_base=False).train(resume_from_checkpoint=checkpoint)

    # Control: the same base, and another start of the adapter, which is in the checkpoint.
    assert trainer_in(tmp_path / "same", changed_base=True).train(resume_from_checkpoint=checkpoint).global_step == 2


@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_of_a_name_and_one_that_a_script_loaded_are_compared(dense_model, tmp_path, by_name):
    """Their weights below the adapter, and what they compute by: neither is in a checkpoint."""

    def trainer_in(folder, by_name, scale=1.0, **config):
        model = str(dense_model)
        if not by_name:
            model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32, **config)
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(scale)
        return make(model, folder, adapter(), max_steps=2, save_strategy="steps", save_steps=1)

    # Whichever of the two began, the other one goes on.
    trainer_in(tmp_path / "first", by_name).train()
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    trainer_in(tmp_path / "same", not by_name).train(resume_from_checkpoint=checkpoint)

    trainer_in(tmp_path / "merged", by_name=False, scale=1.01).train()
    with pytest.raises(ValueError, match="loaded_base was"):
        trainer_in(tmp_path / "other", by_name=True).train(
            resume_from_checkpoint=str(tmp_path / "merged" / "checkpoint-1")
        )
    if by_name:
        with pytest.raises(ValueError, match="loaded_base was"):
            trainer_in(tmp_path / "base", False, scale=1.01).train(resume_from_checkpoint=checkpoint)
        with pytest.raises(ValueError, match="rms_norm_eps in the config of the loaded model was"):
            trainer_in(tmp_path / "config", False, rms_norm_eps=1e-2).train(resume_from_checkpoint=checkpoint)


def test_a_peft_model_with_a_reference_resumes_with_the_adapter_of_the_checkpoint(dense_model, tmp_path):
    """The reference is an adapter, too, and the Trainer would load that one alone."""

    def trainer_in(folder):
        # A starts at random, B at 0.
        torch.manual_seed(0)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(dense_model), adapter())
        randomize_adapter(model, scale=0.05)
        return make(model, folder, beta=0.1, max_steps=3, save_strategy="steps", save_steps=1)

    straight = trainer_in(tmp_path / "straight")
    straight.train()
    resumed = trainer_in(tmp_path / "resumed")
    start = master_weights(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))

    assert not changed(master_weights(straight), master_weights(resumed))
    # Control: the last step moved what is trained, and that is no part of the reference.
    moved = changed(start, master_weights(resumed))
    assert moved
    for name, parameter in resumed.model.named_parameters():
        assert parameter.requires_grad == (name in moved)
        assert parameter.requires_grad == (".default." in name)


@pytest.mark.parametrize(("beta", "has_optimizer"), [(0.0, False), (0.1, False), (0.0, True)])
def test_an_adapter_resumes_with_its_dtype_and_its_frozen_part(dense_model, tmp_path, beta, has_optimizer):
    """
    peft loads it in float32, and a reference is an adapter, beside which peft trains all of the other. An optimizer of
    a script holds the parameters that were there before the checkpoint was loaded.
    """

    def trainer_in(folder):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.bfloat16)
        model = get_peft_model(base, adapter(), autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.requires_grad_(False)
        optimizers = (None, None)
        if has_optimizer:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizers = (torch.optim.AdamW(trained, lr=1e-2), None)
        changes = {"beta": beta, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
        args = QaRLConfig(**without_engine(folder, **changes))
        return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), optimizers=optimizers)

    straight = trainer_in(tmp_path / "straight")
    straight.train()
    resumed = trainer_in(tmp_path / "resumed")
    start = master_weights(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))

    now = master_weights(resumed)
    assert not changed(master_weights(straight), now)
    # Controls: it trains, in bfloat16, and not the frozen part.
    trained = changed(start, now)
    assert trained
    for name in trained:
        assert "down_proj" in name
        assert now[name].dtype == torch.bfloat16
