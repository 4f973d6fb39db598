"""`qarl_trl.validate.layers`: layers and kernels that are refused without weights."""

import pytest
from configs import config
from peft import LoraConfig

from qarl_trl.trainers.low_bit import quantize_policy
from qarl_trl.validate import check_arguments, config_of
from qarl_trl.validate.layers import check_layers


def check_layers_of(path, args):
    """The check of a model's folder, with an adapter for its queries."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    check_layers(config_of(str(path), args), args.quant_plan(), args, adapter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_scheme": "W8A16", "quant_kernel": "engine"}, "W8A16"),
        ({"quant_scheme": "FP8_DYNAMIC", "quant_kernel": "dequant"}, "FP8_DYNAMIC"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_before_a_model_loads(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        check_arguments("org/model", config(tmp_path, **changes), {})

    # Control: a learner in bfloat16 calls no kernel.
    check_arguments("org/model", config(tmp_path, quantize_learner=False, **changes), {})


@pytest.mark.parametrize("base", ["merged", "frozen"])
def test_an_output_layer_in_low_bits_is_refused_without_weights(tmp_path, tiny_model, base):
    """TRL's fused head would read its master weight, and the engine its quantized values."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")

    with pytest.raises(ValueError, match="Add lm_head to quant_ignore") as error:
        check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base=base, quant_ignore=[]))
    assert "\n" not in str(error.value)

    check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base=base, quant_ignore=["lm_head"]))  # control


def test_a_loaded_model_with_an_output_layer_in_low_bits_is_refused(tmp_path, tiny_model):
    args = config(tmp_path, quant_ignore=[])
    with pytest.raises(ValueError, match="Add lm_head to quant_ignore"):
        quantize_policy(tiny_model(num_hidden_layers=1), args, args.quant_plan())

    args = config(tmp_path)
    quantize_policy(tiny_model(num_hidden_layers=1), args, args.quant_plan())  # control


def test_experts_are_no_frozen_base(tmp_path, tiny_model):
    tiny_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path / "model")

    with pytest.raises(ValueError, match="needs linear layers, got the experts"):
        check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base="frozen"))

    # Control: experts in high precision.
    ignore = ["lm_head", "re:.*experts.*", r"re:.*mlp\.gate$"]
    check_layers_of(tmp_path / "model", config(tmp_path / "run", lora_base="frozen", quant_ignore=ignore))
