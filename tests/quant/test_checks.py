"""`qarl_trl.quant.checks`: models in the hands of another library. Layers: `test_model.py`, `test_experts.py`, `test_lora.py`."""

import pytest
from peft import LoraConfig, get_peft_model

from qarl_trl.quant import apply_quantization, quantized_modules


def test_a_model_that_is_quantized_by_another_library_is_refused(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match=r"gptq.*Start from the unquantized checkpoint"):
        apply_quantization(model, "W4A16")
    assert not list(quantized_modules(model))
    del model.config.quantization_config
    apply_quantization(model, "W4A16")


def test_adapters_without_a_peft_model_around_them_are_refused(tiny_model):
    model, adapter = tiny_model(num_hidden_layers=1), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model.add_adapter(adapter)
    with pytest.raises(ValueError, match=r"LoRA layers without a PeftModel.*Wrap it with peft: peft\.PeftModel"):
        apply_quantization(model, "W4A16")
    del model.peft_config  # only the layers are left
    with pytest.raises(ValueError, match="LoRA layers without a PeftModel"):
        apply_quantization(model, "W4A16")
    apply_quantization(get_peft_model(tiny_model(num_hidden_layers=1), adapter), "W4A16")


def test_experts_in_kernels_of_the_hub_are_refused(tiny_model):
    for kind in ("qwen3_moe", "qwen3"):
        model = tiny_model(kind, num_hidden_layers=1)
        model._use_kernels = True  # what the property reads; its setter would fetch kernels
        assert model.use_kernels
        if kind == "qwen3":
            apply_quantization(model, "W4A16")  # control: no experts
        else:
            with pytest.raises(ValueError, match=r"use_kernels=True.*low-bit experts"):
                apply_quantization(model, "W4A16")
