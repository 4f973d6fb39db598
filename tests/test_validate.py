"""`qarl_trl.validate`: what is refused, with words that say what to do."""

from types import SimpleNamespace

import pytest
import torch
from configs import config
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import GRPOConfig

from qarl_trl import QaRLTrainer
from qarl_trl.validate import check_arguments, check_prompts, check_together, default_output_dir


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
        ("2", "NVFP4A16", ["global scale", "FSDP and ZeRO-3 cut them", "DDP"]),
        ("zero3", "NVFP4A16", ["global scale", "FSDP and ZeRO-3 cut them", "DDP"]),
        ("zero3", "W4A16", []),
        ("2", "W4A16", []),
        ("1", "none", []),
    ],
)
def test_shards_that_cannot_be_quantized_are_refused(tmp_path, monkeypatch, version, scheme, words):
    args = config(tmp_path, quant_scheme=scheme)
    check_arguments("org/model", args, {})
    if version == "zero3":
        args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    else:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", version)
    if not words:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError) as error:
        check_arguments("org/model", args, {})
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_scheme": "W4A16"}, []),
        ({"quant_scheme": "W8A16", "quant_kernel": "engine"}, ["'engine'", "W8A16", "'cpu'", "'auto'"]),
        ({"quant_scheme": "FP8_DYNAMIC", "quant_kernel": "dequant"}, ["'dequant'", "FP8_DYNAMIC", "'auto'"]),
        # A learner in bfloat16 calls no kernel.
        ({"quant_scheme": "W8A16", "quant_kernel": "engine", "quantize_learner": False}, []),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_before_a_model_loads(tmp_path, changes, words):
    args = config(tmp_path, **changes)
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


def test_an_unquantized_model_in_the_low_bit_folder_is_found_before_the_run(tmp_path, tiny_model):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "low_bit")
    with pytest.raises(ValueError, match="low_bit holds a training checkpoint or an unquantized model"):
        check_arguments("org/model", config(tmp_path), {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])})
    check_arguments("org/model", config(tmp_path), {})


def test_an_output_folder_with_an_unquantized_model_is_refused_before_the_run(tmp_path, tiny_model):
    """Found at the end of the run, `save_model` would have nowhere to go."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unquantized model.*Use another folder"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path))
    check_arguments("no/such-model", config(tmp_path, quant_scheme="none"), {})


@pytest.mark.parametrize(
    "changes", [{"vllm_mode": "server"}, {"vllm_enable_sleep_mode": True}, {"vllm_tensor_parallel_size": 2}]
)
@pytest.mark.parametrize("given", [{"tools": [len]}, {"environment_factory": dict}])
def test_tools_of_several_processes_need_an_engine_each(changes, given):
    args = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    args["sync_folder"] = "f"
    with pytest.raises(ValueError, match="Tools with several processes must have an engine for each"):
        check_together(given, SimpleNamespace(world_size=2, **args | changes))
    check_together(given, SimpleNamespace(world_size=1, **args | changes))  # controls
    check_together(given, SimpleNamespace(world_size=2, **args))
    check_together({"tools": []}, SimpleNamespace(world_size=2, **args | changes))


def test_a_threshold_that_nothing_would_be_compared_with_is_refused(tmp_path):
    given = {"rollout_func": lambda prompts, trainer: {}}
    settings = {"use_vllm": True, "vllm_mode": "colocate", "mismatch_abort_threshold": 0.1}
    plain = config(tmp_path, **settings, vllm_importance_sampling_correction=False)
    with pytest.raises(ValueError, match="mismatch_abort_threshold=0.1 would never be looked at"):
        check_together(given, plain)
    check_together({}, plain)  # controls
    check_together(given, config(tmp_path, **settings, vllm_importance_sampling_correction=True))
    check_together(given, config(tmp_path, use_vllm=True, vllm_importance_sampling_correction=False))


def test_a_server_takes_no_images():
    data = Dataset.from_dict({"prompt": ["a"], "image": ["b"]})
    args = {"use_vllm": True, "world_size": 1, "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    args["sync_folder"] = "f"
    for given, name in (
        ({"train_dataset": data}, "train_dataset"),
        ({"eval_dataset": {"x": data}}, "eval_dataset.'x'."),
    ):
        with pytest.raises(ValueError, match=f"takes text only, got .'image'. in {name}"):
            check_together(given, SimpleNamespace(vllm_mode="server", **args))
        check_together(given, SimpleNamespace(vllm_mode="colocate", **args))


def test_a_server_without_a_folder_needs_a_gpu_where_the_trainer_runs():
    args = {"use_vllm": True, "world_size": 1, "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    args |= {"vllm_mode": "server", "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=r"vllm_mode='server' on device 'cpu' needs sync_folder.*from GPU to GPU"):
        check_together({}, SimpleNamespace(sync_folder=None, **args))
    check_together({}, SimpleNamespace(sync_folder="f", **args))  # controls
    check_together({}, SimpleNamespace(sync_folder=None, **args | {"device": torch.device("cuda")}))


def test_a_row_without_a_prompt_is_found_among_several_data_sets():
    data = Dataset.from_dict({"prompt": ["a", None]})
    with pytest.raises(ValueError, match=r"1 of 2 rows of eval_dataset\['x'\] must have a prompt"):
        check_prompts({"eval_dataset": {"x": data}})
