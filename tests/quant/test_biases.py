"""`qarl_trl.quant.biases`: what vLLM's models have no place for. With an engine: tests/slow/test_engine_syncs.py."""

import warnings

import pytest
import torch
from conftest import make_model
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LagunaConfig, Qwen3Config

from qarl_trl.quant import apply_quantization
from qarl_trl.quant.biases import biases_without_place


@pytest.mark.parametrize("with_adapter", [False, True])
def test_biases_that_vllm_skips_are_named(with_adapter):
    model = make_model("qwen3", attention_bias=True)
    if with_adapter:
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj"]))

    with pytest.warns(UserWarning, match=r"no place for \d biases of this model, first .*layers.0.self_attn.o_proj"):
        apply_quantization(model, "FP8_DYNAMIC")


def test_the_tower_of_another_family_is_not_looked_at():
    model = make_model("qwen3", attention_bias=True)
    with_tower = nn.ModuleDict({"vision_tower": model})
    with_tower.config = model.config

    assert biases_without_place(with_tower) == []
    assert biases_without_place(model)  # control


@pytest.mark.parametrize(("family", "changes"), [("qwen3", {}), ("qwen2", {}), ("llama", {"attention_bias": True})])
def test_biases_that_vllm_has_are_not(family, changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        apply_quantization(make_model(family, **changes), "FP8_DYNAMIC")


def test_the_router_of_laguna_is_one_of_them():
    """It is a buffer, whose name vLLM expects to be another."""
    router = nn.Module()
    router.register_buffer("e_score_correction_bias", torch.zeros(4))
    model = nn.ModuleDict({"experts": router})
    model.config = LagunaConfig()

    assert biases_without_place(model) == ["experts.e_score_correction_bias"]

    # Control: vLLM has that of other families.
    model.config = Qwen3Config()
    assert biases_without_place(model) == []
