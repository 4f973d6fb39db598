"""`qarl_trl.validate.arguments`: what is refused before a model loads, by the name of what is wrong."""

import pytest
from configs import config
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from qarl_trl import LowBitDistillationConfig, QaRLTrainer
from qarl_trl.validate import arguments, check_arguments


@pytest.mark.parametrize(
    ("changes", "kwargs", "words"),
    [
        ({}, {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "quantization_config leaves"),
        ({"model_init_kwargs": {"load_in_4bit": True}}, {}, "load_in_4bit leaves"),
        ({}, {"peft_config": object()}, "only LoRA adapters"),
    ],
)
def test_what_would_take_the_master_weights_away_is_refused_before_a_model_loads(tmp_path, changes, kwargs, words):
    args = config(tmp_path, **changes)

    with pytest.raises(ValueError, match=words):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args, **kwargs)

    # Control: without quantization it is TRL's own business.
    without_quantization = config(tmp_path, quant_scheme="none", **changes)
    check_arguments("no/such-model", without_quantization, kwargs)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"adam_beta1": 2.0}, "adam_beta1"),
        ({"adam_beta2": 1.0}, "adam_beta2"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps"),
    ],
)
def test_numbers_that_the_optimizer_or_the_trainer_refuse_late_are_refused(tmp_path, changes, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        check_arguments("org/model", config(tmp_path, **changes), {})

    check_arguments("org/model", config(tmp_path), {})  # control


def test_another_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="for QaRLTrainer a QaRLConfig.*got dict"):
        check_arguments("no/such-model", {}, {})


def test_an_optimizer_of_bitsandbytes_needs_it(tmp_path, monkeypatch):
    args = config(tmp_path, optim="paged_adamw_8bit")

    monkeypatch.setattr(arguments, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(ImportError, match="optim=paged_adamw_8bit needs bitsandbytes: pip install bitsandbytes"):
        check_arguments("no/such-model", args, {})
    check_arguments("no/such-model", config(tmp_path), {})  # control

    monkeypatch.setattr(arguments, "is_bitsandbytes_available", lambda: True)
    check_arguments("no/such-model", args, {})


def test_a_folder_with_an_unquantized_model_is_refused_before_the_run(tmp_path, tiny_model):
    """At the end of the run `save_model` would have nowhere to write."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "low_bit")
    lora = LoraConfig(r=4, target_modules=["q_proj"])

    with pytest.raises(ValueError, match="unquantized model"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), peft_config=lora)
    with pytest.raises(ValueError, match="unquantized model"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path / "low_bit"))

    # Controls: without an adapter nothing is written into the sub-folder, and without quantization no low-bit model.
    check_arguments("org/model", config(tmp_path), {})
    check_arguments("no/such-model", config(tmp_path / "low_bit", quant_scheme="none"), {})


def test_a_reference_in_high_precision_beside_a_low_bit_policy_is_said(tmp_path, caplog):
    def warned(kwargs=None, **changes):
        caplog.clear()
        check_arguments("org/model", config(tmp_path, **changes), kwargs or {})
        return "the reference model is in high precision" in caplog.text

    assert warned(beta=0.1)

    # Controls: no reference, the same precision on both sides, and the reference of an adapter.
    assert not warned()
    assert not warned(beta=0.1, quantize_learner=False)
    assert not warned(beta=0.1, quant_scheme="none")
    assert not warned({"peft_config": LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")}, beta=0.1)

    # In a distillation it chooses the divergence, 1.0 by default.
    caplog.clear()
    of_distillation = LowBitDistillationConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert of_distillation.beta == 1.0
    check_arguments("org/model", of_distillation, {})
    assert "reference model" not in caplog.text
