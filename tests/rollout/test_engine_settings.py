"""`qarl_trl.rollout.engine_settings`: what the engine is told because its config file does not say it."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5_VLConfig

from qarl_trl.rollout.engine_settings import changed_config


@pytest.fixture
def model(dense_model):
    return AutoModelForCausalLM.from_pretrained(dense_model)


def test_a_model_as_its_file_says_changes_nothing(model):
    model.config.use_cache = False  # TRL sets it

    assert changed_config(model.config, False) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
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
    model.resize_token_embeddings(80)

    assert changed_config(model.config, False) == {"vocab_size": 80}


def test_a_changed_part_with_a_config_of_its_own_is_refused(tmp_path):
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert changed_config(config, False) == {}  # control

    config.text_config.vocab_size += 8
    with pytest.raises(ValueError, match=r"The model's text_config differs from .*config\.json"):
        changed_config(config, False)
