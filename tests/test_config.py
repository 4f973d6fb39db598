"""`QaRLConfig`: defaults of the paper, and which settings are refused."""

import pytest
from transformers import MistralConfig, Qwen3Config
from trl import GRPOConfig

from qarl_trl import QaRLConfig
from qarl_trl.config import POSITIVE, STOCK_LOSSES, logger
from qarl_trl.loss import TrustBand
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from qarl_trl.trainers.settings import UNFIT


VLLM = {"use_vllm": True}


@pytest.fixture
def config(tmp_path):
    """Makes a config for this machine."""

    def make(**settings):
        return QaRLConfig(
            **({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"} | settings)
        )

    return make


def test_defaults_are_those_of_the_paper_and_sample_from_the_distribution_that_the_learner_scores(config):
    args = config()
    assert (args.quant_scheme, args.quantize_learner, args.loss_type) == ("W4A16", True, "tbpo")
    assert args.trust_band == TrustBand(epsilon_high=4e-4, delta_low=3e-4, delta_high=7e-4, mismatch_cap=2.0)
    assert args.quant_plan().ignore == list(DEFAULT_IGNORE)
    assert args.export_low_bit
    assert (args.top_p, args.min_p, args.repetition_penalty, args.temperature) == (1.0, None, 1.0, 1.0)
    assert args.top_k in (0, -1, None)
    assert args.vllm_importance_sampling_correction


# Refusals: the name of the field that each must show. ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_scheme": "W3A16"}, "quant_scheme"),
        ({"quant_group_size": 48}, "quant_group_size"),
        ({"lora_base": "int4"}, "lora_base"),
        ({"lora_base": "frozen", "quantize_learner": False}, "lora_base"),
        ({"quant_kernel": "marlin"}, "quant_kernel"),
        ({"learner_ops": "vllm"}, "learner_ops"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"advantage_filter": "negative"}, "advantage_filter"),
        ({"tbpo_epsilon_high": 0.0}, "tbpo_epsilon_high"),
        ({"tbpo_delta_low": 0.0, "loss_type": "grpo"}, "tbpo_delta_low"),  # measured in every run
        ({"tbpo_mismatch_cap": 1.0}, "tbpo_mismatch_cap"),
        ({"epsilon": 0.1}, "epsilon"),
        ({"delta": 2.0}, "delta"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "vllm_importance_sampling_mode"),
        (VLLM | {"top_p": 0.9}, "top_p"),
        (VLLM | {"top_k": 50}, "top_k"),
        (VLLM | {"generation_kwargs": {"temperature": 0.7}}, "temperature"),
        (VLLM | {"generation_kwargs": {"a_parameter_of_tomorrow": 1}}, "a_parameter_of_tomorrow"),
        (VLLM | {"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex"),
        (VLLM | {"vllm_engine_kwargs": {"quantization": "awq"}}, "vllm_engine_kwargs"),
        *(({name: True}, name) for name in UNFIT),
        ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "hub_strategy"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            "metric_for_best_model",
        ),
        ({"mismatch_abort_threshold": 0.1}, "mismatch_abort_threshold"),
        (VLLM | {"mismatch_abort_threshold": 0.0}, "mismatch_abort_threshold"),
        ({"max_tokens_per_pass": 511, "max_completion_length": 512}, "max_tokens_per_pass"),
        (VLLM | {"max_tokens_per_pass": 512, "vllm_max_model_length": 1024}, "vllm_max_model_length"),
        *(({"verify_sync": value}, "verify_sync") for value in ("always", 0, "-1", True, 1.5)),
        # Nothing would be trained.
        ({"max_steps": 0}, "max_steps"),
        ({"num_train_epochs": 0.0}, "num_train_epochs"),
        *(({name: 0}, name) for name in POSITIVE),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        *(({"num_iterations": value}, "num_iterations") for value in ("two", 1.5)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_would_bias_the_method_or_train_nothing_is_refused_by_name(config, settings, name):
    with pytest.raises(ValueError, match=name):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        VLLM | {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        VLLM | {"generation_kwargs": {"stop": ["\n"], "logit_bias": None, "ignore_eos": True}},
        VLLM | {"top_p": 0.9, "vllm_importance_sampling_correction": False},  # no weight, no bias
        {"top_p": 0.9},  # sampled by the learner itself
        VLLM | {"top_p": 0.9, "quant_scheme": "none", "loss_type": "grpo"},  # plain TRL stays plain TRL
        VLLM | {"vllm_mode": "server", "sync_folder": "f"},
        {"quant_scheme": "none"},
        {"quant_scheme": "fp8_dynamic"},
        {"tbpo_delta_high": 1e-4},  # below epsilon_high
        # Bounds of the loss that is used.
        {"loss_type": "grpo", "epsilon": 0.1, "delta": 2.0, "tbpo_delta_high": 1e-4},
        VLLM | {"mismatch_abort_threshold": 0.1},
        *({"loss_type": name} for name in STOCK_LOSSES),
    ],
    ids=lambda value: ",".join(value),
)
def test_what_biases_nothing_is_accepted(config, settings):
    config(**settings)


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"gradient_accumulation_steps": 4}, "= 1 update"),
        ({"steps_per_generation": 8}, None),
        ({"num_iterations": 2}, None),
        ({"loss_type": "grpo"}, None),
    ],
)
def test_a_band_that_can_never_bind_is_named_with_the_arithmetic(config, caplog, settings, updates):
    logger.warning_once.cache_clear()
    config(**settings)
    assert ("no trust band" in caplog.text) == (updates is not None)
    assert updates is None or updates in caplog.text


def test_vllm_must_be_installed_before_a_model_loads(config, monkeypatch):
    monkeypatch.setattr("qarl_trl.trainers.settings.is_vllm_available", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'qarl_trl\[vllm\]'.*use_vllm=False"):
        config(**VLLM)
    config()


def test_muon_refuses_deepspeed(config, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "__post_init__", lambda self: None)  # it would load DeepSpeed
    config(loss_type="grpo", optim_muon=False, deepspeed="zero3.json")
    with pytest.raises(ValueError, match="optim_muon must be False with DeepSpeed"):
        config(loss_type="grpo", optim_muon=True, deepspeed="zero3.json")


# Kernel and operations of the learner -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kernel", "operations"),
    [
        ({}, "engine", True),
        ({"quant_scheme": "FP8_DYNAMIC"}, "engine", True),
        ({"use_vllm": False}, "auto", False),  # no engine to agree with
        ({"quant_scheme": "none"}, "auto", False),  # the baselines are TRL's learner
        ({"quantize_learner": False}, "engine", False),
        ({"quant_kernel": "dequant"}, "dequant", False),
        ({"bf16": False}, "engine", False),
        ({"cast_lm_head_to_fp32": True}, "engine", False),
        ({"vllm_engine_kwargs": {"enforce_eager": False}}, "engine", False),
        ({"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}}, "engine", False),
        ({"vllm_model_impl": "transformers"}, "engine", False),
    ],
    ids=str,
)
def test_beside_a_cpu_engine_a_low_bit_learner_takes_its_kernel_and_operations(config, settings, kernel, operations):
    args = config(**{"bf16": True} | VLLM | settings)
    assert (args.learner_kernel, args.engine_ops_for(Qwen3Config())) == (kernel, operations)
    assert not args.engine_ops_for(MistralConfig())
    args.learner_ops = "stock"
    assert not args.engine_ops_for(Qwen3Config())


# Recipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "kept"), [("first", "first"), ("off", "off"), (False, "off"), ("3", "3"), (1, "1")])
def test_sync_verify_takes_what_yaml_and_command_lines_make_of_it(config, given, kept):
    assert config(verify_sync=given).verify_sync == kept


@pytest.fixture
def recipe(tmp_path):
    """An llm-compressor recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text("q_stage: {q_modifiers: {QuantizationModifier: {scheme: W4A16, ignore: [lm_head]}}}\n")
    return str(path)


def test_a_recipe_replaces_the_scheme_fields(config, recipe):
    args = config(quant_recipe=recipe)
    assert args.quantized
    assert args.quant_plan().ignore == ["lm_head"]
    for given in ({"quant_scheme": "FP8_DYNAMIC"}, {"quant_scheme": "none"}, {"quant_ignore": []}):
        with pytest.raises(ValueError, match=f"quant_recipe decides which.*{next(iter(given))}"):
            config(quant_recipe=recipe, **given)


def test_the_scheme_of_the_checkpoint_is_left_open(config):
    args = config(quant_scheme="checkpoint")
    assert args.quantized
    assert args.quant_plan() is None
    source = config().quant_plan()
    assert args.quant_plan(source) is source
    with pytest.raises(ValueError, match=r"quant_scheme decides which.*\['quant_group_size'\]"):
        config(quant_scheme="checkpoint", quant_group_size=32)
