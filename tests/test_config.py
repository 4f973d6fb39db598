"""`QaRLConfig`: defaults of the paper, what is refused and in which words, and the command line."""

from dataclasses import MISSING, fields

import pytest
import yaml
from transformers import MistralConfig, Qwen3Config
from trl import GRPOConfig, TrlParser

from qarl_trl import QaRLConfig, _compat
from qarl_trl.config import STOCK_LOSSES, logger
from qarl_trl.loss import TrustBand
from qarl_trl.quant.scheme import DEFAULT_IGNORE


OWN = sorted({f.name for f in fields(QaRLConfig)} - {f.name for f in fields(GRPOConfig)})
VLLM = {"use_vllm": True}


@pytest.fixture
def config(tmp_path):
    """Makes a config for this machine."""

    def make(**settings):
        return QaRLConfig(
            **({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"} | settings)
        )

    return make


def test_defaults_are_those_of_the_paper(config):
    args = config()
    assert (args.quant_scheme, args.quant_group_size, args.quantize_learner, args.quant_kernel) == (
        "W4A16",
        None,
        True,
        "auto",
    )
    assert (args.loss_type, args.optim_muon) == ("tbpo", False)
    assert args.trust_band == TrustBand(epsilon_high=4e-4, delta_low=3e-4, delta_high=7e-4, mismatch_cap=2.0)
    assert (args.quant_targets, args.quant_ignore) == (["Linear"], list(DEFAULT_IGNORE))
    assert args.mismatch_abort_threshold is None
    assert args.export_low_bit


def test_defaults_sample_from_the_distribution_that_the_learner_scores(config):
    args = config()
    assert (args.top_p, args.min_p, args.repetition_penalty, args.temperature) == (1.0, None, 1.0, 1.0)
    assert args.top_k in (0, -1, None)
    assert args.vllm_importance_sampling_correction
    assert config(**VLLM).quantized


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # What came, and what to do.
        ({"quant_scheme": "W3A16"}, ["quant_scheme='W3A16'", "W4A16", "FP8_DYNAMIC", "'none'"]),
        ({"quant_scheme": "bitsandbytes"}, ["quant_scheme='bitsandbytes'", "'none'"]),
        ({"quant_group_size": 48}, ["quant_group_size=48", "(32, 64, 128, -1)"]),
        ({"quant_scheme": "FP8_DYNAMIC", "quant_group_size": 128}, ["quant_group_size=128", "leave it unset"]),
        ({"quant_targets": []}, ["quant_targets is empty", "['Linear']"]),
        ({"quant_kernel": "marlin"}, ["quant_kernel='marlin'", "'dequant'"]),
        ({"learner_ops": "vllm"}, ["learner_ops='vllm'", "'auto', 'stock', 'engine'"]),
        ({"learner_ops": "engine"}, ["learner_ops='engine'", "use_vllm=False", "'auto' or 'stock'"]),
        ({"eval_temperature": 0.0}, ["eval_temperature=0.0", "must be > 0", "greedy"]),
        (
            {"eval_temperature": 0.6, "generation_kwargs": {"temperature": 1.0}},
            ["eval_temperature=0.6", "generation_kwargs"],
        ),
        ({"log_token_stats": -1}, ["log_token_stats=-1", ">= 0"]),
        ({"loss_type": "tpbo"}, ["loss_type='tpbo'", "'tbpo'", "dr_grpo"]),
        ({"tbpo_epsilon_high": 0.0}, ["tbpo_epsilon_high=0.0", "must be > 0"]),
        ({"tbpo_delta_low": -3e-4}, ["tbpo_delta_low=-0.0003", "must be > 0"]),
        ({"tbpo_delta_low": 0.0, "loss_type": "grpo"}, ["tbpo_delta_low=0.0", "must be > 0"]),  # measured in every run
        ({"tbpo_delta_low": 1.5}, ["tbpo_delta_low=1.5", "must be < 1"]),
        ({"tbpo_delta_high": float("nan")}, ["tbpo_delta_high=nan", "must be > 0"]),
        ({"tbpo_mismatch_cap": 1.0}, ["tbpo_mismatch_cap=1.0", "> 1"]),
        ({"tbpo_delta_high": 1e-4}, ["tbpo_delta_high=0.0001", "at least tbpo_epsilon_high=0.0004", "two-sided clip"]),
        ({"advantage_filter": "negative"}, ["advantage_filter='negative'", "'none', 'positive'"]),
        (
            {"advantage_filter": "positive", "tbpo_delta_low": 1e-3},
            ["{'tbpo_delta_low': 0.001}", "no negative advantage"],
        ),
        (
            {"advantage_filter": "positive", "loss_type": "grpo", "delta": 2.0, "off_policy_mask_threshold": 0.1},
            ["'delta': 2.0", "'off_policy_mask_threshold': 0.1", "Remove one"],
        ),
        ({"tbpo_epsilon_high": float("inf")}, ["at least tbpo_epsilon_high=inf"]),
        ({"epsilon": 0.1}, ["{'epsilon': 0.1}", "tbpo_epsilon_high", "stock loss_type"]),
        ({"delta": 2.0}, ["{'delta': 2.0}", "tbpo_delta_high"]),
        ({"vllm_importance_sampling_mode": "token_mask"}, ["token_mask", "tbpo_mismatch_cap"]),
        (VLLM | {"top_p": 0.9}, ["{'top_p': 0.9}", "top_p=1.0", "vllm_importance_sampling_correction=False"]),
        (VLLM | {"top_k": 50}, ["{'top_k': 50}", "top_k=0"]),
        (VLLM | {"min_p": 0.1}, ["{'min_p': 0.1}", "min_p=0.0"]),
        (VLLM | {"repetition_penalty": 1.1}, ["{'repetition_penalty': 1.1}", "no penalties"]),
        (VLLM | {"generation_kwargs": {"top_p": 0.5}}, ["{'top_p': 0.5}"]),
        (VLLM | {"generation_kwargs": {"presence_penalty": 1.0}}, ["presence_penalty"]),
        (VLLM | {"generation_kwargs": {"min_tokens": 4}}, ["{'min_tokens': 4}", "only seed, stop"]),
        (VLLM | {"generation_kwargs": {"logit_bias": {3: 5.0}}}, ["logit_bias"]),
        (VLLM | {"generation_kwargs": {"bad_words": ["no"]}}, ["bad_words"]),
        (VLLM | {"generation_kwargs": {"a_parameter_of_tomorrow": 1}}, ["a_parameter_of_tomorrow"]),
        (VLLM | {"vllm_structured_outputs_regex": "[0-9]+"}, ["vllm_structured_outputs_regex"]),
        (VLLM | {"generation_kwargs": {"temperature": 0.7}}, ["Set `temperature` itself"]),
        (VLLM | {"sync_folder": "f"}, ["sync_folder='f'", "vllm_mode='server'", "Remove it"]),
        (
            VLLM | {"vllm_mode": "server", "sync_folder": "f", "vllm_max_model_length": 256},
            ["max_completion_length=512 must be below vllm_max_model_length=256"],
        ),
        ({"sync_folder": "f"}, ["sync_folder='f'", "use_vllm=False"]),
        (VLLM | {"vllm_engine_kwargs": {"quantization": "awq"}}, ["['quantization']", "quant_scheme"]),
        (VLLM | {"vllm_engine_kwargs": {"dtype": "float16"}}, ["['dtype']", "Remove them"]),
        ({"use_liger_kernel": True}, ["use_liger_kernel=True", "use_liger_kernel=False"]),
        ({"use_transformers_continuous_batching": True}, ["continuous_batching", "use_vllm=True"]),
        ({"model_init_kwargs": {"load_in_4bit": True}}, ["['load_in_4bit']", "quant_scheme='none'"]),
        ({"model_init_kwargs": {"quantization_config": {"a": 1}}}, ["['quantization_config']", "Remove it"]),
        ({"model_init_kwargs": {"device_map": "balanced"}}, ["device_map='balanced'", "one device a process"]),
        ({"model_init_kwargs": {"device_map": {"a": 0, "b": 1}}}, ["device_map={'a': 0, 'b': 1}", "FSDP2"]),
        ({"fp16": True}, ["fp16=True", "bf16=True"]),
        ({"bf16_full_eval": True}, ["bf16_full_eval=True", "Set bf16_full_eval=False"]),
        ({"fp16_full_eval": True}, ["fp16_full_eval=True", "Set fp16_full_eval=False"]),
        (
            {"push_to_hub": True, "hub_strategy": "all_checkpoints"},
            ["hub_strategy='all_checkpoints'", "hub_master_weights"],
        ),
        ({"hub_master_weights": "master_weights"}, ["hub_master_weights='master_weights'", "push_to_hub=False"]),
        (
            {"push_to_hub": True, "hub_master_weights": "master_weights", "hub_strategy": "end"},
            ["hub_master_weights", "'end'"],
        ),
        ({"push_to_hub": True, "hub_master_weights": "main"}, ["hub_master_weights='main'", "a branch of its own"]),
        (
            {"push_to_hub": True, "hub_master_weights": "m", "quant_scheme": "none"},
            ["hub_master_weights='m'", "quant_scheme='none'"],
        ),
        ({"push_to_hub": True, "export_low_bit": False}, ["export_low_bit=False", "export_low_bit=True"]),
        ({"mismatch_abort_threshold": 0.1}, ["mismatch_abort_threshold", "use_vllm=True"]),
        (VLLM | {"mismatch_abort_threshold": 0.0}, ["mismatch_abort_threshold=0.0", "unset it"]),
        (VLLM | {"mismatch_abort_threshold": float("nan")}, ["mismatch_abort_threshold=nan", "> 0"]),
        ({"muon_momentum": 1.0}, ["muon_momentum=1.0", "[0, 1)"]),
        ({"muon_ns_steps": 0}, ["muon_ns_steps=0", ">= 1"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_would_bias_the_method_is_refused(config, settings, words):
    with pytest.raises(ValueError) as error:
        config(**settings)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        VLLM | {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        VLLM | {"top_k": -1, "generation_kwargs": {"top_p": 1.0, "seed": 3}},
        VLLM | {"generation_kwargs": {"stop": ["\n"], "min_tokens": 0, "logit_bias": None, "ignore_eos": True}},
        VLLM | {"generation_kwargs": {"min_tokens": 4}, "vllm_importance_sampling_correction": False},
        VLLM | {"top_p": 0.9, "vllm_importance_sampling_correction": False},  # no weight, no bias
        {"top_p": 0.9},  # sampled by the learner itself
        VLLM | {"top_p": 0.9, "quant_scheme": "none", "loss_type": "grpo"},  # plain TRL stays plain TRL
        VLLM | {"vllm_mode": "server", "sync_folder": "f"},
        VLLM | {"vllm_mode": "server", "sync_folder": "f", "quant_scheme": "none"},
        {"quant_scheme": None, "use_liger_kernel": False, "model_init_kwargs": {"load_in_4bit": True}},
        {"quant_scheme": " None "},
        {"quant_scheme": "fp8_dynamic"},
        {"quant_group_size": -1},
        {"tbpo_delta_high": 4e-4},  # as epsilon_high
        {
            "loss_type": "grpo",
            "epsilon": 0.1,
            "delta": 2.0,
            "tbpo_delta_high": 1e-4,
        },  # bounds of the loss that is used
        {"model_init_kwargs": {"device_map": {"": 0}}},
        {"model_init_kwargs": {"device_map": None, "dtype": "float32"}},
        VLLM | {"mismatch_abort_threshold": 0.1},
        {"push_to_hub": True, "hub_strategy": "every_save"},
        {"push_to_hub": True, "hub_strategy": "checkpoint", "hub_master_weights": "master_weights"},
        VLLM | {"vllm_engine_kwargs": {"enforce_eager": True}},
    ],
    ids=lambda value: ",".join(value),
)
def test_what_biases_nothing_is_accepted(config, settings):
    config(**settings)


@pytest.mark.parametrize(
    ("settings", "updates"),
    [
        (VLLM, "steps_per_generation=1 x num_iterations=1 / gradient_accumulation_steps=1 = 1 update"),
        (
            {"gradient_accumulation_steps": 4},
            "steps_per_generation=4 x num_iterations=1 / gradient_accumulation_steps=4 = 1",
        ),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "= 0.5 update"),
        ({"steps_per_generation": 8}, None),
        ({"num_iterations": 2}, None),
        ({"loss_type": "grpo"}, None),
    ],
)
def test_a_band_that_can_never_bind_is_named_with_the_arithmetic(config, caplog, settings, updates):
    logger.warning_once.cache_clear()
    config(**settings)
    if updates is None:
        assert "no trust band can bind" not in caplog.text
        return
    assert updates in caplog.text and "no trust band can bind" in caplog.text
    caplog.clear()
    config(**settings)
    assert not caplog.text  # said once


def test_vllm_must_be_installed_before_a_model_loads(config, monkeypatch):
    monkeypatch.setattr(_compat, "is_vllm_available", lambda: False)
    with pytest.raises(ImportError, match=r"pip install 'qarl_trl\[vllm\]'.*use_vllm=False"):
        config(**VLLM)
    config()


def test_muon_refuses_deepspeed(config, monkeypatch):
    monkeypatch.setattr(GRPOConfig, "__post_init__", lambda self: None)  # it would load DeepSpeed
    config(loss_type="grpo", optim_muon=False, deepspeed="zero3.json")
    with pytest.raises(ValueError, match=r"optim_muon=True with DeepSpeed.*FSDP2"):
        config(loss_type="grpo", optim_muon=True, deepspeed="zero3.json")


@pytest.mark.parametrize("loss_type", ["tbpo", *STOCK_LOSSES])
def test_every_loss_of_trl_is_accepted(config, loss_type):
    assert config(loss_type=loss_type).loss_type == loss_type


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (VLLM, "engine"),
        ({}, "auto"),  # no engine to agree with
        (VLLM | {"quant_scheme": "FP8_DYNAMIC"}, "engine"),
        (VLLM | {"quant_scheme": "none"}, "auto"),
        (VLLM | {"quant_kernel": "dequant"}, "dequant"),
    ],
)
def test_beside_a_cpu_engine_the_learner_takes_its_kernel(config, settings, expected):
    assert config(**settings).learner_kernel == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (VLLM, True),
        (VLLM | {"quant_scheme": "FP8_DYNAMIC"}, True),
        ({}, False),  # no engine to follow
        (VLLM | {"learner_ops": "stock"}, False),
        (VLLM | {"quant_scheme": "none"}, False),  # the baselines are TRL's learner
        (VLLM | {"quantize_learner": False}, False),
        (VLLM | {"quant_scheme": "none", "learner_ops": "engine"}, True),
        (VLLM | {"bf16": False}, False),
    ],
)
def test_beside_a_cpu_engine_a_low_bit_learner_takes_its_operations(config, settings, expected):
    args = config(**{"bf16": True} | settings)
    assert args.engine_ops_for(Qwen3Config()) == expected
    if args.learner_ops == "auto":
        assert not args.engine_ops_for(MistralConfig())


def test_engine_operations_that_cannot_be_had_are_an_error(config):
    args = config(bf16=True, learner_ops="engine", **VLLM)
    with pytest.raises(ValueError, match="'mistral' is none of .*learner_ops='auto' or 'stock'"):
        args.engine_ops_for(MistralConfig())
    for settings, reason in (
        ({"bf16": False}, "bf16 is off"),
        ({"quant_kernel": "dequant"}, "quant_kernel='dequant'"),
        ({"quantize_learner": False}, "quantize_learner=False"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({"vllm_engine_kwargs": {"enforce_eager": False}}, "vllm_engine_kwargs sets enforce_eager"),
        ({"vllm_engine_kwargs": {"kv_cache_dtype": "fp8"}}, "vllm_engine_kwargs sets kv_cache_dtype"),
        ({"vllm_model_impl": "transformers"}, "vllm_model_impl"),
    ):
        args = config(**{"bf16": True, "learner_ops": "engine"} | VLLM | settings)
        with pytest.raises(ValueError, match=reason):
            args.engine_ops_for(Qwen3Config())
        args.learner_ops = "auto"
        assert not args.engine_ops_for(Qwen3Config())


# Command line -------------------------------------------------------------------------------------------------------


CHANGED = {
    "eval_temperature": 0.6,
    "log_token_stats": 8,
    "quant_scheme": "FP8_DYNAMIC",
    "quant_targets": ["Linear", "re:.*proj$"],
    "quant_ignore": ["lm_head", r"re:.*mlp\.gate$"],
    "quantize_learner": False,
    "quant_kernel": "auto",
    "learner_ops": "stock",
    "quant_group_size": None,
    "quant_recipe": None,  # excludes the scheme fields; it has a test of its own
    "quant_freeze_scales": True,
    "tbpo_epsilon_high": 0.03,
    "tbpo_delta_low": 0.04,
    "tbpo_delta_high": 0.07,
    "tbpo_mismatch_cap": 1.5,
    "advantage_filter": "none",  # the other excludes the bounds of negative advantages
    "mismatch_abort_threshold": 0.05,
    "max_tokens_per_pass": 4096,
    "optim_muon": True,
    "muon_adamw_learning_rate": 2e-6,
    "muon_momentum": 0.9,
    "muon_ns_steps": 4,
    "muon_adjust_lr": "original",
    "vllm_engine_kwargs": {"enforce_eager": True},
    "sync_folder": None,  # needs vllm_mode: server
    "verify_sync": 4,
    "export_low_bit": False,
    "hub_master_weights": None,  # needs pushes, which exclude export_low_bit: False
}
ALWAYS = {"use_cpu": True, "bf16": False, "use_vllm": True, "report_to": "none"}


def flags(settings):
    for name, value in settings.items():
        if value is not None:
            yield f"--{name}"
            yield from (str(v) for v in value) if isinstance(value, list) else [_text(value)]


def _text(value):
    return yaml.safe_dump(value, default_flow_style=True).strip() if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("source", ["flags", "file"])
def test_every_own_field_survives_command_line_and_recipe(tmp_path, source):
    assert sorted(CHANGED) == OWN  # a field without an entry above would not be tested
    settings = {"output_dir": str(tmp_path)} | ALWAYS | CHANGED
    if source == "flags":
        given = settings | {"vllm_engine_kwargs": None}
        arguments = [*flags(given), "--vllm_engine_kwargs", '{"enforce_eager": true}']
    else:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
        arguments = ["--config", str(tmp_path / "recipe.yaml")]
    (args,) = TrlParser(QaRLConfig).parse_args_and_config(arguments)
    assert {name: getattr(args, name) for name in CHANGED} == CHANGED


@pytest.mark.parametrize(("given", "kept"), [("first", "first"), ("off", "off"), (False, "off"), ("3", 3), (1, 1)])
def test_sync_verify_takes_what_yaml_and_command_lines_make_of_it(config, given, kept):
    assert config(verify_sync=given).verify_sync == kept


@pytest.mark.parametrize("given", ["always", 0, -1, "0", True, 1.5, None])
def test_another_sync_verify_is_refused(config, given):
    with pytest.raises(ValueError, match="verify_sync=.* must be 'off', 'first' or a number"):
        config(verify_sync=given)


@pytest.fixture
def recipe(tmp_path):
    """An llm-compressor recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text("q_stage: {q_modifiers: {QuantizationModifier: {scheme: W4A16, ignore: [lm_head]}}}\n")
    return str(path)


def test_a_recipe_replaces_the_scheme_fields(config, recipe, tmp_path):
    args = config(quant_recipe=recipe)
    assert args.quantized
    assert args.quant_plan().ignore == ["lm_head"]
    command = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false", "--quant_recipe", recipe]
    (args,) = TrlParser(QaRLConfig).parse_args_and_config(command)
    assert args.quant_recipe == recipe


@pytest.mark.parametrize(
    "given",
    [{"quant_scheme": "FP8_DYNAMIC"}, {"quant_scheme": "none"}, {"quant_group_size": 32}, {"quant_ignore": []}],
)
def test_a_recipe_beside_scheme_fields_is_refused(config, recipe, given):
    with pytest.raises(ValueError, match=f"quant_recipe says which.*{next(iter(given))}.*Leave one out"):
        config(quant_recipe=recipe, **given)


def test_an_unusable_recipe_is_refused_before_anything_loads(config, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        config(quant_recipe=str(tmp_path / "nowhere.yaml"))
    (tmp_path / "r.yaml").write_text("q_stage: {q_modifiers: {GPTQModifier: {scheme: W4A16}}}\n")
    with pytest.raises(ValueError, match="GPTQModifier"):
        config(quant_recipe=str(tmp_path / "r.yaml"))


def test_the_scheme_of_the_checkpoint_is_left_open(config):
    args = config(quant_scheme="checkpoint")
    assert args.quantized
    assert args.quant_plan() is None
    source = config().quant_plan()
    assert args.quant_plan(source) is source
    with pytest.raises(ValueError, match=r"checkpoint says which.*\['quant_group_size'\]"):
        config(quant_scheme="checkpoint", quant_group_size=32)


@pytest.mark.parametrize(
    ("given", "message"), [({"quant_scheme": "none"}, "quantization off"), ({"quant_recipe": True}, "keeps what the")]
)
def test_frozen_scales_need_a_checkpoint_that_decides(config, recipe, given, message):
    given = {name: recipe if value is True else value for name, value in given.items()}
    with pytest.raises(ValueError, match=f"quant_freeze_scales=True.*{message}"):
        config(quant_freeze_scales=True, **given)


@pytest.mark.parametrize("written", ["none", "null"])
def test_a_recipe_turns_quantization_off_by_none_and_by_null(tmp_path, written):
    (tmp_path / "recipe.yaml").write_text(
        f"quant_scheme: {written}\noutput_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n"
    )
    (args,) = TrlParser(QaRLConfig).parse_args_and_config(["--config", str(tmp_path / "recipe.yaml")])
    assert not args.quantized


def test_the_help_of_the_command_line_renders(capsys):
    with pytest.raises(SystemExit) as exit_code:
        TrlParser(QaRLConfig).parse_args(["--help"])
    assert exit_code.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in OWN)


@pytest.mark.parametrize("name", [*OWN, "loss_type"])
def test_every_own_field_has_a_help_text(name):
    field = next(f for f in fields(QaRLConfig) if f.name == name)
    text = field.metadata["help"]
    assert len(text) > 20
    assert "%" not in text.replace("%%", "")  # argparse formats it
    assert text.endswith(".")
    assert field.default is not MISSING or field.default_factory is not MISSING
