"""`QaRLConfig`: defaults of the paper, and which settings of the method are refused."""

import copy
import pickle

import pytest
from configs import config
from trl import GRPOConfig

from qarl_trl.config import STOCK_LOSSES, QaRLConfig, logger
from qarl_trl.loss import TrustBand
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from qarl_trl.trainers.setting_checks import POSITIVE, UNFIT


VLLM = {"use_vllm": True}
UNWEIGHTED = {"vllm_importance_sampling_correction": False}


def settings_id(value):
    """Names a row of a table by its settings."""
    return ",".join(value) if isinstance(value, dict) else ""


def test_defaults_are_those_of_the_paper(tmp_path):
    args = config(tmp_path)

    assert args.quant_scheme == "W4A16"
    assert args.quantize_learner
    assert args.quant_plan().ignore == list(DEFAULT_IGNORE)
    assert args.loss_type == "tbpo"
    assert args.trust_band == TrustBand(epsilon_high=4e-4, delta_low=3e-4, delta_high=7e-4, mismatch_cap=2.0)
    assert args.export_low_bit


def test_defaults_sample_from_the_distribution_that_the_learner_scores(tmp_path):
    args = config(tmp_path)

    assert args.temperature == 1.0
    assert args.top_p == 1.0
    # Three ways to say "all tokens".
    assert args.top_k in (0, -1, None)
    assert args.min_p is None
    assert args.repetition_penalty == 1.0
    assert args.vllm_importance_sampling_correction


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"eval_on_start": True, "per_device_eval_batch_size": 6, "num_generations": 4}, "multiple of the 4 answers"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"advantage_filter": "negative"}, "advantage_filter"),
        ({"tbpo_epsilon_high": 0.0}, "tbpo_epsilon_high"),
        # The share beyond the band is measured in every run, whatever its loss.
        ({"tbpo_delta_low": 0.0, "loss_type": "grpo"}, "tbpo_delta_low"),
        ({"tbpo_mismatch_cap": 1.0}, "tbpo_mismatch_cap"),
        ({"torch_compile": True}, "torch_compile must be False with loss_type='tbpo'"),
        (
            {"torch_compile": True, "loss_type": "grpo", "gradient_checkpointing": False},
            "needs gradient_checkpointing: true",
        ),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"neftune_noise_alpha": 5.0, "loss_type": "grpo"}, "neftune_noise_alpha"),
        ({"epsilon": 0.1}, "epsilon"),
        ({"delta": 2.0}, "delta"),
        # Of other losses of TRL.
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos"),
        ({"vespo_k_neg": 2.0}, "vespo_k_neg"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "vllm_importance_sampling_mode"),
        (VLLM | {"top_p": 0.9}, "top_p"),
        # TRL's mask of off-policy answers reads the engine's log-probs, too.
        (VLLM | {"top_p": 0.9, **UNWEIGHTED, "off_policy_mask_threshold": 0.1}, "top_p.*mask of off-policy answers"),
        (VLLM | {"top_k": 50}, "top_k"),
        (VLLM | {"generation_kwargs": {"temperature": 0.7}}, "temperature"),
        (VLLM | {"generation_kwargs": {"a_parameter_of_tomorrow": 1}}, "a_parameter_of_tomorrow"),
        (VLLM | {"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex"),
        (VLLM | {"vllm_engine_kwargs": {"logits_processors": ["mine:Budget"]}}, "logits_processors"),
        (VLLM | {"generation_kwargs": {"logits_processors": ["mine:Budget"]}}, "logits_processors"),
        (VLLM | {"vllm_engine_kwargs": {"watermark_config": {"algorithm": "gumbel"}}}, "watermark_config"),
        *(
            (VLLM | {"vllm_engine_kwargs": {"kv_cache_memory_bytes": size}}, "kv_cache_memory_bytes must be a number")
            for size in ("8GiB", 0, 0.5)
        ),
        (VLLM | {"generation_kwargs": {"frequency_penalty": 0.1}}, "frequency_penalty"),
        (VLLM | {"generation_kwargs": {"n": 2}}, "n=2"),
        # Without an engine there is no mismatch, and it would never stop a run.
        ({"mismatch_abort_threshold": 0.1}, "mismatch_abort_threshold"),
        (VLLM | {"mismatch_abort_threshold": 0.0}, "mismatch_abort_threshold"),
        ({"max_tokens_per_pass": 511, "max_completion_length": 512}, "max_tokens_per_pass"),
        # TBPO's loss does not run with them either.
        *(({name: True, "quant_scheme": "none"}, name) for name in UNFIT),
        # Nothing would be trained.
        ({"max_steps": 0}, "max_steps"),
        ({"num_train_epochs": 0.0}, "num_train_epochs"),
        *(({name: 0}, name) for name in POSITIVE),
        ({"temperature": 0.0}, "temperature"),
        # vLLM would sample at 0.01.
        (VLLM | {"temperature": 0.005}, "temperature must be at least 0.01"),
        ({"top_p": 2.0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        # vLLM's "all tokens". Here transformers samples, which refuses it in the middle of a run.
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"scale_rewards": "x"}, "scale_rewards"),
        ({"reward_weights": [0.0]}, "reward_weights"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        *(({"num_iterations": value}, "num_iterations") for value in ("two", 1.5)),
    ],
    ids=settings_id,
)
def test_a_setting_that_would_bias_the_method_or_train_nothing_is_refused_by_name(tmp_path, settings, name):
    with pytest.raises(ValueError, match=name):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        VLLM | {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        VLLM | {"generation_kwargs": {"stop": ["\n"], "logit_bias": None, "ignore_eos": True}},
        # vLLM's own defaults, and what a text without stop strings is made of.
        VLLM | {"generation_kwargs": {"frequency_penalty": 0.0, "presence_penalty": 0.0, "min_tokens": 0, "n": 1}},
        VLLM | {"generation_kwargs": {"stop": ["\n"], "skip_special_tokens": False}},
        VLLM | {"generation_kwargs": {"detokenize": False, "spaces_between_special_tokens": False}},
        VLLM | {"temperature": 0.7, "generation_kwargs": {"temperature": 0.7}},
        # No weight, no bias.
        VLLM | {"top_p": 0.9, "vllm_importance_sampling_correction": False},
        VLLM | {"vllm_engine_kwargs": {"logits_processors": ["a:B"]}, "vllm_importance_sampling_correction": False},
        VLLM | {"vllm_engine_kwargs": {"logits_processors": [], "enforce_eager": True}},
        *(VLLM | {"vllm_engine_kwargs": {"kv_cache_memory_bytes": size}} for size in (2**33, 8e9, None)),
        VLLM | {"vllm_engine_kwargs": {"logits_processors": ["a:B"]}, "quant_scheme": "none", "loss_type": "grpo"},
        # Sampled by the learner itself.
        {"top_p": 0.9},
        {"top_p": 0.9, "off_policy_mask_threshold": 0.1},
        # Plain TRL stays plain TRL.
        VLLM | {"top_p": 0.9, "quant_scheme": "none", "loss_type": "grpo"},
        # Below epsilon_high.
        {"tbpo_delta_high": 1e-4},
        {"eval_on_start": True, "per_device_eval_batch_size": 6, "num_generations": 4, "num_generations_eval": 3},
        # Whose bounds are 0.2 wide. Compiled code moves a ratio by 0.04 at most.
        {"torch_compile": True, "loss_type": "grpo"},
        {"torch_compile": True, "loss_type": "grpo", "gradient_checkpointing": False, "quant_scheme": "none"},
        {"torch_compile": True, "loss_type": "grpo", "gradient_checkpointing": False, "quantize_learner": False},
        # Bounds of the loss that is used.
        {"loss_type": "grpo", "epsilon": 0.1, "delta": 2.0, "tbpo_delta_high": 1e-4},
        VLLM | {"mismatch_abort_threshold": 0.1},
        # The engine's context may be larger than the longest row, which the passes check.
        VLLM | {"max_tokens_per_pass": 512, "max_completion_length": 512, "vllm_max_model_length": 32768},
        *({"loss_type": name} for name in STOCK_LOSSES),
    ],
    ids=settings_id,
)
def test_what_biases_nothing_is_accepted(tmp_path, settings):
    config(tmp_path, **settings)


def test_a_launcher_that_compiles_is_refused_as_torch_compile_is(tmp_path, monkeypatch):
    """`accelerate launch --dynamo_backend` sets no field."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    with pytest.raises(ValueError, match="torch_compile must be False.*--dynamo_backend"):
        config(tmp_path)

    # Controls: bounds that are wide, and what the launcher writes without the option.
    config(tmp_path, loss_type="grpo")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        ({"gradient_accumulation_steps": 4}, "= 1 update"),
        ({"steps_per_generation": 8}, None),
        ({"num_iterations": 2}, None),
        ({"loss_type": "grpo"}, None),
    ],
)
def test_a_band_that_can_never_bind_is_named_with_the_arithmetic(tmp_path, caplog, settings, updates):
    # Of other tests, in whose process it was said already.
    logger.warning_once.cache_clear()

    config(tmp_path, **settings)

    if updates is None:
        assert "no trust band" not in caplog.text
    else:
        assert "no trust band" in caplog.text
        assert updates in caplog.text


def test_a_float32_output_layer_beside_an_engine_is_said(tmp_path, caplog):
    def said(**settings):
        caplog.clear()
        config(tmp_path, cast_lm_head_to_fp32=True, **settings)
        return "multiplies with the float32 output layer" in caplog.text

    assert said(use_vllm=True)
    # Controls: nothing to differ from, and learners that differ more.
    assert not said(use_vllm=False)
    assert not said(use_vllm=True, quantize_learner=False)
    assert not said(use_vllm=True, quant_scheme="none")


def test_a_bound_of_tbpo_beside_another_loss_is_said(tmp_path, caplog):
    config(tmp_path, loss_type="grpo", tbpo_epsilon_high=0.2)
    assert "loss_type='grpo' does not read tbpo_epsilon_high" in caplog.text

    # Controls: the loss that reads it, and its default.
    caplog.clear()
    config(tmp_path, tbpo_epsilon_high=0.2)
    config(tmp_path, loss_type="grpo", tbpo_epsilon_high=4e-4)
    assert "does not read" not in caplog.text


def test_muon_refuses_deepspeed(tmp_path, monkeypatch):
    # It would load DeepSpeed.
    monkeypatch.setattr(GRPOConfig, "__post_init__", lambda self: None)
    settings = {"loss_type": "grpo", "deepspeed": "zero3.json"}

    config(tmp_path, optim_muon=False, **settings)
    with pytest.raises(ValueError, match="optim_muon must be False with DeepSpeed"):
        config(tmp_path, optim_muon=True, **settings)


def test_muon_refuses_another_optimizer_whose_place_it_would_take(tmp_path):
    for name, value in {"optim": "adafactor", "optim_args": "beta1=0.8"}.items():
        with pytest.raises(ValueError, match=f"optim_muon=True .* ignores {name}"):
            config(tmp_path, optim_muon=True, **{name: value})
        # Control: alone it counts.
        config(tmp_path, **{name: value})

    # It trains what Muon does not.
    config(tmp_path, optim_muon=True, optim="adamw_torch")


def test_a_config_with_fields_of_its_own_can_be_pickled_by_value():
    """As cloudpickle sends a class that a script defines."""
    text = QaRLConfig.__dataclass_fields__["quant_scheme"].metadata["help"]

    for copied in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert copied == text
        assert copied.group == text.group
