"""`LowBitConfig` beside a config of TRL: which settings are refused, and what they mean."""

import copy
import pickle
import re
from dataclasses import dataclass, fields

import pytest
from transformers import MistralConfig, Qwen3Config
from trl import GRPOConfig

from qarl_trl import LowBitDistillationConfig, LowBitRLOOConfig, LowBitSFTConfig
from qarl_trl.trainers import LowBitConfig
from qarl_trl.trainers.setting_checks import CHOICES_OF_TRL, UNFIT


VLLM = {"use_vllm": True}


@dataclass
class LowBitGRPOConfig(LowBitConfig, GRPOConfig):
    """Of TRL's own loss, which `QaRLConfig` is not needed for."""


@pytest.fixture
def config(tmp_path):
    """Makes a config for this machine."""

    def make(**settings):
        machine = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
        return LowBitGRPOConfig(**machine | settings)

    return make


def test_half_a_config_is_refused():
    with pytest.raises(TypeError, match=r"class MyConfig\(LowBitConfig, SFTConfig\)"):
        LowBitConfig()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_scheme": "W3A16"}, "quant_scheme"),
        ({"quant_group_size": 48}, "quant_group_size"),
        ({"lora_base": "int4"}, "lora_base"),
        ({"lora_base": "frozen", "quantize_learner": False}, "lora_base"),
        ({"quant_kernel": "marlin"}, "quant_kernel"),
        ({"learner_ops": "vllm"}, "learner_ops"),
        (VLLM | {"vllm_engine_kwargs": {"quantization": "awq"}}, "vllm_engine_kwargs"),
        (VLLM | {"vllm_engine_kwargs": {"model_impl": "transformers"}}, "vllm_engine_kwargs sets .'model_impl'."),
        (VLLM | {"vllm_engine_kwargs": {"hf_token": "hf_x"}}, "vllm_engine_kwargs sets .'hf_token'., which would be"),
        (VLLM | {"vllm_engine_kwargs": {"kv_offloading_size": 8.0}}, "kv_offloading_size'.: keys and values would"),
        (
            VLLM | {"vllm_engine_kwargs": {"override_generation_config": {"presence_penalty": 1.5}}},
            "override_generation",
        ),
        (VLLM | {"vllm_engine_kwargs": {"generation_config": "auto"}}, "generation_config must be 'vllm', got 'auto'"),
        (VLLM | {"vllm_engine_kwargs": {"worker_extension_cls": "mine.Worker"}}, "worker_extension_cls"),
        (
            VLLM | {"vllm_mode": "colocate", "vllm_engine_kwargs": {"pipeline_parallel_size": 2}},
            "pipeline_parallel_size must be 1",
        ),
        (
            VLLM | {"vllm_engine_kwargs": {"speculative_config": {"method": "eagle3", "model": "org/draft"}}},
            "speculative_config must be one of ngram, ngram_gpu, suffix, got 'eagle3'",
        ),
        ({"model_init_kwargs": {"token": "hf_x"}}, "model_init_kwargs sets .'token'., which would be"),
        (VLLM | {"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}}, "vllm_engine_kwargs sets .'kv_cache_dtype'."),
        (VLLM | {"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' must be one of 'auto', 'fp8'"),
        *(({name: True}, name) for name in UNFIT),
        ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "hub_strategy"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
            "metric_for_best_model",
        ),
        ({"save_strategy": "best", "eval_strategy": "steps"}, "save_strategy must be 'steps', 'epoch' or 'no'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "lr_scheduler_type must be"),
        *(({"verify_sync": value}, "verify_sync") for value in ("always", 0, "-1", True, 1.5)),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_does_not_work_in_low_bits_is_refused_by_name(config, settings, name):
    with pytest.raises(ValueError, match=name):
        config(**settings)


@pytest.mark.parametrize("name", CHOICES_OF_TRL)
def test_the_choices_are_those_of_trl(config, name):
    """By its help, which names other fields, too. An update of TRL may have more of them."""
    of_grpo = {field.name: field for field in fields(GRPOConfig)}
    in_quotes = set(re.findall(r"[`']([a-z_]+)[`']", of_grpo[name].metadata["help"]))

    assert in_quotes - of_grpo.keys() == set(CHOICES_OF_TRL[name])
    with pytest.raises(ValueError, match=f"{name}='colocated' must be one of '"):
        config(**{name: "colocated"})
    # Control: each of them alone.
    for value in CHOICES_OF_TRL[name]:
        config(**{name: value})


def test_a_users_class_may_give_a_field_of_trl_more_choices(tmp_path):
    @dataclass
    class MyConfig(LowBitGRPOConfig):
        importance_sampling_level: str = "paragraph"

    machine = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}

    assert MyConfig(**machine).importance_sampling_level == "paragraph"
    # Control: other fields are checked all the same.
    with pytest.raises(ValueError, match="vllm_mode='colocated' must be one of"):
        MyConfig(**machine, vllm_mode="colocated")


@pytest.mark.parametrize(
    ("config_class", "settings", "name"),
    [
        (LowBitRLOOConfig, {"steps_per_generation": 0}, "steps_per_generation"),
        (LowBitRLOOConfig, {"num_iterations": 0}, "num_iterations"),
        (LowBitRLOOConfig, {"num_generations": 0}, "num_generations"),
        (LowBitRLOOConfig, {"vllm_tensor_parallel_size": 0}, "vllm_tensor_parallel_size"),
        (LowBitRLOOConfig, {"top_p": 2.0}, "top_p"),
        (LowBitRLOOConfig, {"reward_weights": [0.0]}, "reward_weights"),
        # It would make -1 of every reward.
        (LowBitRLOOConfig, {"reward_clip_range": (1, -1)}, "reward_clip_range"),
        (LowBitRLOOConfig, {"vllm_mode": "colocated"}, "vllm_mode"),
        (LowBitDistillationConfig, {"top_p": 0.0}, "top_p"),
        (LowBitRLOOConfig, {"repetition_penalty": None}, "repetition_penalty must be a number"),
        (LowBitDistillationConfig, {"temperature": 0.0}, "temperature"),
        (LowBitDistillationConfig, {"vllm_model_impl": "transfomers"}, "vllm_model_impl"),
        (LowBitSFTConfig, {"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        (LowBitSFTConfig, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        (LowBitSFTConfig, {"max_steps": 0}, "max_steps"),
    ],
)
def test_the_config_of_every_trainer_refuses_what_trains_nothing(tmp_path, config_class, settings, name):
    machine = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}

    with pytest.raises(ValueError, match=name):
        config_class(**machine, **settings)
    config_class(**machine)  # control


@pytest.mark.parametrize(
    "settings",
    [{"quant_scheme": "none"}, {"quant_scheme": "fp8_dynamic"}, VLLM | {"vllm_mode": "server", "sync_folder": "f"}],
    ids=str,
)
def test_other_schemes_and_engines_are_accepted(config, settings):
    config(**settings)


@pytest.mark.parametrize(
    ("written", "kept"), [("first", "first"), ("off", "off"), (False, "off"), ("3", "3"), (1, "1")]
)
def test_verify_sync_takes_what_yaml_and_command_lines_make_of_it(config, written, kept):
    assert config(verify_sync=written).verify_sync == kept


def test_vllm_must_be_installed_before_a_model_loads(config, monkeypatch):
    monkeypatch.setattr("qarl_trl.trainers.setting_checks.is_vllm_available", lambda: False)

    with pytest.raises(ImportError, match=r"pip install 'qarl_trl\[vllm\]'.*use_vllm=False"):
        config(**VLLM)
    # Control: who samples with transformers needs none.
    config()


# Which layers are quantized, and how --------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "value"), [("quant_scheme", "FP8_DYNAMIC"), ("quant_scheme", "none"), ("quant_ignore", [])]
)
def test_a_scheme_field_beside_a_recipe_is_refused(config, recipe, name, value):
    with pytest.raises(ValueError, match=f"quant_recipe decides which.*{name}"):
        config(quant_recipe=recipe, **{name: value})


def test_the_scheme_of_the_checkpoint_is_left_open(config):
    args = config(quant_scheme="checkpoint")

    assert args.quantized
    assert args.quant_plan() is None
    plan_of_the_checkpoint = config().quant_plan()
    assert args.quant_plan(plan_of_the_checkpoint) is plan_of_the_checkpoint


def test_a_group_size_beside_the_scheme_of_the_checkpoint_is_refused(config):
    with pytest.raises(ValueError, match=r"quant_scheme decides which.*\['quant_group_size'\]"):
        config(quant_scheme="checkpoint", quant_group_size=32)


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
        ({"kv_cache_dtype": "fp8"}, "engine", True),
        ({"kv_cache_dtype": "fp8", "quant_scheme": "none"}, "auto", True),  # its keys and values are in low bits
        ({"kv_cache_dtype": "fp8", "quantize_learner_kv": False}, "engine", False),
        ({"kv_cache_dtype": "fp8", "quant_scheme": "none", "quantize_learner": False}, "auto", False),
        ({"vllm_model_impl": "transformers"}, "engine", False),
    ],
    ids=str,
)
def test_beside_a_cpu_engine_a_low_bit_learner_takes_its_kernel_and_operations(config, settings, kernel, operations):
    # bfloat16, because the engine computes in it, and float32 alone is a reason against its operations.
    args = config(**{"bf16": True} | VLLM | settings)

    assert args.learner_kernel == kernel
    assert args.engine_ops_for(Qwen3Config()) == operations
    # Of another architecture, and when the user does not want them.
    assert not args.engine_ops_for(MistralConfig())
    args.learner_ops = "stock"
    assert not args.engine_ops_for(Qwen3Config())


# Key-value cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "of_engine", "of_learner"),
    [
        ({}, None, None),
        ({"kv_cache_dtype": "fp8"}, "fp8", "fp8"),
        ({"kv_cache_dtype": "fp8_e5m2", "quant_scheme": "none"}, "fp8_e5m2", "fp8_e5m2"),
        ({"kv_cache_dtype": "fp8", "quantize_learner_kv": False}, "fp8", None),
        ({"kv_cache_dtype": "fp8", "quantize_learner": False}, "fp8", None),
    ],
    ids=str,
)
def test_engine_and_learner_have_the_same_cache_unless_the_user_says_otherwise(
    config, settings, of_engine, of_learner
):
    args = config(**VLLM | {"vllm_engine_kwargs": {"block_size": 64}} | settings)

    assert args.engine_kwargs == {"block_size": 64} | ({"kv_cache_dtype": of_engine} if of_engine else {})
    assert args.aligned_cache == of_learner
    # What the user wrote is what a checkpoint keeps.
    assert args.vllm_engine_kwargs == {"block_size": 64}


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy])
def test_a_copied_config_has_its_tokens(config, copy_of):
    """A sweep changes copies of one config. Only a file must not have what gives access."""
    args = config(hub_token="hf_secret", vllm_engine_kwargs={"enforce_eager": True})
    args.eos_token = "<end>"

    copied = copy_of(args)

    assert type(copied) is type(args)
    for field in fields(args):
        assert getattr(copied, field.name) == getattr(args, field.name), field.name
    assert copied.eos_token == "<end>"
    shares = copied.vllm_engine_kwargs is args.vllm_engine_kwargs
    assert shares is (copy_of is copy.copy)

    # Control: as transformers writes it beside a checkpoint.
    stored = pickle.loads(pickle.dumps(args))
    assert (stored.hub_token, stored.eos_token) == (None, "<end>")


def test_arguments_that_only_sound_like_a_token_are_accepted(config):
    kwargs = {"tokenizer": "/a/folder", "tokenizer_mode": "slow"}

    assert config(use_vllm=True, vllm_engine_kwargs=kwargs).engine_kwargs == kwargs


@pytest.mark.parametrize(("launcher", "bf16"), [("bf16", True), ("no", False)])
def test_the_precision_of_the_launcher_is_that_of_the_fields(config, monkeypatch, launcher, bf16):
    """Where a recipe says no, accelerate computes in the launcher's. Checks and a resume go by the fields."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)

    assert config(bf16=False).bf16 is bf16
    # Control: the field wins.
    assert config(bf16=True).bf16


@pytest.mark.parametrize(
    ("launcher", "words"), [("fp16", "fp16 must be False"), ("fp8", "got 'fp8' from the launcher")]
)
def test_other_precisions_of_the_launcher_are_refused_in_low_bits(config, monkeypatch, launcher, words):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)

    with pytest.raises(ValueError, match=words):
        config()
    config(quant_scheme="none")  # control
