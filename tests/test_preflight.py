"""`qarl_trl.preflight`: what is refused, with words that say what to do."""

from types import SimpleNamespace

import pytest
from configs import config
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig
from trl import GRPOConfig

from qarl_trl import QaRLTrainer
from qarl_trl.preflight import check_arguments, check_experts, check_lora, default_output_dir


@pytest.mark.parametrize(
    ("model", "expected"),
    [("Qwen/Qwen3-8B-Base", "Qwen3-8B-Base-QaRL"), ("./models/mine/", "mine-QaRL"), ("/a/b", "b-QaRL")],
)
def test_default_output_dir_is_named_after_the_model(model, expected):
    assert default_output_dir(model) == expected


def test_default_output_dir_of_a_loaded_model_is_named_after_its_source(tiny_model):
    model = tiny_model(num_hidden_layers=1)
    model.config._name_or_path = "org/base"
    assert default_output_dir(model) == "base-QaRL"


def test_a_grpo_config_is_refused_before_a_model_loads(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="needs a QaRLConfig, got GRPOConfig"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, ["bitsandbytes", "remove it"]),
        ({"peft_config": object()}, ["only LoRA adapters", "quant_scheme='none'"]),
    ],
)
def test_foreign_quantization_and_adapters_are_refused_before_a_model_loads(tmp_path, kwargs, words):
    with pytest.raises(ValueError) as error:
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), **kwargs)
    assert all(word in str(error.value) for word in words)
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), kwargs)  # control: TRL's own business then


def test_a_model_without_a_folder_cannot_be_served_by_vllm(tmp_path, tiny_model):
    model = tiny_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="save_pretrained"):
        check_arguments(model, config(tmp_path, use_vllm=True), {})
    check_arguments(model, config(tmp_path), {})
    check_arguments("org/model", config(tmp_path, use_vllm=True), {})


@pytest.mark.parametrize(
    ("version", "scheme", "words"),
    [
        ("1", "W4A16", ["FSDP1 flattens", "fsdp_version: 2", "DDP"]),
        ("2", "NVFP4A16", ["global scale", "FSDP cuts them", "DDP"]),
        ("2", "W4A16", []),
        ("1", "none", []),
    ],
)
def test_shards_that_cannot_be_quantized_are_refused(tmp_path, monkeypatch, version, scheme, words):
    args = config(tmp_path, quant_scheme=scheme)
    check_arguments("org/model", args, {})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    if not words:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError) as error:
        check_arguments("org/model", args, {})
    assert all(word in str(error.value) for word in words)


def test_shards_on_the_cpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_arguments("org/model", config(tmp_path), {})
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ValueError, match=r"offloaded parameters.*fsdp_offload_params: false"):
        check_arguments("org/model", config(tmp_path), {})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_arguments("org/model", config(tmp_path), {})


@pytest.mark.parametrize(
    ("kind", "stage", "refused"), [("qwen3_moe", 3, True), ("qwen3_moe", 2, False), ("qwen3", 3, False)]
)
def test_experts_in_flat_pieces_are_refused(tmp_path, tiny_model, kind, stage, refused):
    model, args = tiny_model(kind, num_hidden_layers=1), config(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
    if not refused:
        return check_experts(model, args, None)
    with pytest.raises(ValueError, match=r"ZeRO-3.*FSDP2"):
        check_experts(model, args, None)


def lora(**changes):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"q_proj": 3},
            "init_lora_weights": "gaussian",
        },
        {"target_modules": "all-linear", "exclude_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
        {"layers_to_transform": [0]},
    ],
)
def test_plain_lora_is_accepted_also_from_a_file(tmp_path, changes):
    check_lora(lora(**changes), config(tmp_path))
    lora(**changes).save_pretrained(tmp_path)
    check_lora(LoraConfig.from_pretrained(tmp_path), config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, ["use_dora=True", "DoRA rescales"]),
        ({"lora_dropout": 0.05}, ["lora_dropout=0.05", "engine does not drop", "ModelConfig has 0.05"]),
        ({"bias": "all"}, ["bias='all'", "never changed"]),
        ({"lora_bias": True}, ["lora_bias=True", "not part of the merged weight"]),
        ({"target_parameters": ["experts.down_proj"]}, ["target_parameters", "fused experts"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out=True", "torch.nn.Linear"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices=[1]", "trained token vectors"]),
        ({"layer_replication": [(0, 2), (1, 2)]}, ["layer_replication", "share one base weight"]),
        ({"alora_invocation_tokens": [1, 2]}, ["alora_invocation_tokens", "inside a sequence"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights='pissa'", "reference would no longer be the base model"]),
        ({"use_dora": True, "lora_dropout": 0.1}, ["use_dora=True", "lora_dropout=0.1", "Leave them"]),
    ],
)
def test_adapters_that_cannot_be_aligned_are_refused_before_a_model_loads(tmp_path, changes, words):
    with pytest.raises(ValueError) as error:
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path), peft_config=lora(**changes))
    assert [word for word in words if word not in str(error.value)] == []
    # control: without quantization it is TRL's own business
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), {"peft_config": lora(**changes)})


def test_other_kinds_of_adapters_are_refused(tmp_path):
    for other in (IA3Config(), AdaLoraConfig(total_step=10)):
        with pytest.raises(ValueError, match=f"{type(other).__name__}, and only LoRA"):
            check_lora(other, config(tmp_path))


def test_muon_and_lora_are_refused_together(tmp_path):
    with pytest.raises(ValueError, match=r"optim_muon=True with LoRA.*AdamW"):
        check_lora(lora(), config(tmp_path, optim_muon=True))


def test_lora_under_zero3_is_refused(tmp_path):
    args = config(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match=r"ZeRO-3.*DDP or FSDP2"):
        check_lora(lora(), args)
    args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    check_lora(lora(), args)


def test_the_adapters_of_a_peft_model_are_checked_too(tmp_path, tiny_model):
    model = get_peft_model(tiny_model(num_hidden_layers=1), lora(lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"lora_dropout=0\.1"):
        check_arguments(model, config(tmp_path), {})
    check_arguments(get_peft_model(tiny_model(num_hidden_layers=1), lora()), config(tmp_path), {})


def test_the_folder_of_an_adapter_is_not_a_model(tmp_path):
    lora().save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="is an adapter, not a model.*AutoPeftModelForCausalLM"):
        check_arguments(str(tmp_path / "adapter"), config(tmp_path), {})


def test_an_unquantized_model_in_the_low_bit_folder_is_found_before_the_run(tmp_path, tiny_model):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "low_bit")
    with pytest.raises(ValueError, match="low_bit holds a training checkpoint or an unquantized model"):
        check_arguments("org/model", config(tmp_path), {"peft_config": lora()})
    check_arguments("org/model", config(tmp_path), {})


def test_an_output_folder_with_an_unquantized_model_is_refused_before_the_run(tmp_path, tiny_model):
    """Found at the end of the run, `save_model` would have nowhere to go."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unquantized model.*Use another folder"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path))
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), {})
