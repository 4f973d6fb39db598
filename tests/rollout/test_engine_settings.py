"""`qarl_trl.rollout.engine_settings`: what the engine is told because its config file does not say it."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2Config,
)

from qarl_trl.rollout.engine_settings import changed_config, check_engine_arguments


@pytest.fixture
def model(dense_model):
    return AutoModelForCausalLM.from_pretrained(dense_model)


def test_a_model_as_its_file_says_changes_nothing(model):
    # TRL sets it. It is a setting of the forward, which an engine does not read.
    model.config.use_cache = False

    assert changed_config(model.config, False) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # What a script may change after loading, and what an engine would otherwise read from the file.
        ("max_position_embeddings", 4096),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
        ("rms_norm_eps", 1e-3),
        ("sliding_window", 16),
    ],
)
def test_a_value_that_was_changed_in_memory_is_told(model, name, value):
    setattr(model.config, name, value)

    assert changed_config(model.config, False) == {name: value}


def test_a_resized_embedding_is_told(model):
    # transformers writes the new size into the config in memory alone.
    model.resize_token_embeddings(80)

    assert changed_config(model.config, False) == {"vocab_size": 80}


def test_a_changed_part_with_a_config_of_its_own_is_refused(tmp_path):
    # A config with parts, text and vision. No weights are needed to compare it.
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert changed_config(config, False) == {}  # control

    config.text_config.vocab_size += 8
    with pytest.raises(ValueError, match=r"The model's text_config differs from .*config\.json"):
        changed_config(config, False)


def test_a_loaded_model_with_parts_is_as_its_file_says(tmp_path):
    """Loading writes its dtype into the config of each part."""
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    sight = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    heads = {"num_attention_heads": 1}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sight, **heads),
        text_config=Qwen2Config(**text, **heads, num_key_value_heads=1),
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)

    # In another dtype than the file says.
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)

    assert loaded.config.vision_config.dtype != config.vision_config.dtype  # control
    assert changed_config(loaded.config, False) == {}
    loaded.config.vision_config.hidden_act = "relu"
    with pytest.raises(ValueError, match="The model's vision_config differs"):
        changed_config(loaded.config, False)


def test_arguments_that_vllm_does_not_have_are_refused():
    with pytest.raises(
        ValueError, match=r"vllm_engine_kwargs sets \['enable_prefix_cachin', 'kwargs'\], which vllm.LLM"
    ):
        check_engine_arguments({"enable_prefix_cachin": True, "seed": 1, "kwargs": {}}, "vllm_engine_kwargs")

    # Control: of `LLM` itself, and of its `EngineArgs` alone.
    check_engine_arguments({"enforce_eager": True, "enable_prefix_caching": True}, "vllm_engine_kwargs")
