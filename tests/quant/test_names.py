"""`qarl_trl.quant.names`: what the config of a model says, and what the model has."""

import accelerate.utils
import pytest
import torch
from conftest import make_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from qarl_trl.quant.names import config_wrongly_ties_head, is_peft_model, untie


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_of_several_parts_has_the_head_that_its_whole_config_says(is_tied):
    """The config of its text model does not say."""
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = Qwen2_5_VLConfig(text_config=text, vision_config={"depth": 1}, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)

    assert not hasattr(model.config.get_text_config(), "tie_word_embeddings")
    assert not config_wrongly_ties_head(model)

    # Control: a matrix of its own is seen, if the config says that there is none.
    model.lm_head.weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    assert config_wrongly_ties_head(model) == is_tied
    untie(model.config)
    assert not config_wrongly_ties_head(model)


def test_a_model_with_adapters_is_known_as_accelerate_knows_it():
    """In a wrapper, as of several devices, too."""
    plain = make_model()
    with_adapter = get_peft_model(make_model(), LoraConfig())
    models = {"plain": plain, "with adapter": with_adapter}
    for name, model in list(models.items()):
        models[f"{name}, wrapped"] = nn.DataParallel(model)

    for name, model in models.items():
        assert is_peft_model(model) == accelerate.utils.is_peft_model(model), name
        assert is_peft_model(model) == name.startswith("with adapter")
