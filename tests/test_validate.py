"""`qarl_trl.validate`: what is refused before a model loads, by the name of what is wrong."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from configs import config
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from qarl_trl import QaRLTrainer, validate
from qarl_trl.validate import check_arguments, check_data, check_processes


@pytest.mark.parametrize(
    ("changes", "kwargs", "words"),
    [
        ({}, {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "quantization_config leaves"),
        ({"model_init_kwargs": {"load_in_4bit": True}}, {}, "load_in_4bit leaves"),
        ({}, {"peft_config": object()}, "only LoRA adapters"),
    ],
)
def test_what_would_take_the_master_weights_away_is_refused_before_a_model_loads(tmp_path, changes, kwargs, words):
    with pytest.raises(ValueError, match=words):
        QaRLTrainer("no/such-model", reward_funcs=[], args=config(tmp_path, **changes), **kwargs)
    off = config(tmp_path, quant_scheme="none", **changes)  # control: TRL's own business then
    check_arguments("no/such-model", off, kwargs)


def test_one_process_with_several_gpus_is_refused_before_a_model_loads(tmp_path, monkeypatch):
    """TRL's device_map="auto" would spread the model over them."""
    args = config(tmp_path)
    monkeypatch.setattr(type(args), "n_gpu", 4)
    with pytest.raises(ValueError, match="one GPU, got 4.*accelerate launch"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args)
    monkeypatch.setattr(type(args), "n_gpu", 1)
    check_arguments("no/such-model", args, {})  # control


@pytest.mark.parametrize(
    ("version", "scheme", "words"),
    [
        ("1", "W4A16", "FSDP1"),
        ("2", "NVFP4A16", "global scale"),
        ("zero3", "NVFP4A16", "global scale"),
        ("zero3", "W4A16", None),
        ("2", "W4A16", None),
        ("1", "none", None),
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
    if words is None:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError, match=words):
        check_arguments("org/model", args, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_scheme": "W8A16", "quant_kernel": "engine"}, "W8A16"),
        ({"quant_scheme": "FP8_DYNAMIC", "quant_kernel": "dequant"}, "FP8_DYNAMIC"),
        # A learner in bfloat16 calls no kernel.
        ({"quant_scheme": "W8A16", "quant_kernel": "engine", "quantize_learner": False}, None),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_before_a_model_loads(tmp_path, changes, words):
    args = config(tmp_path, **changes)
    if words is None:
        return check_arguments("org/model", args, {})
    with pytest.raises(ValueError, match=words):
        check_arguments("org/model", args, {})


def test_shards_on_the_cpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(ValueError, match=r"fsdp_offload_params must be false"):
        check_arguments("org/model", config(tmp_path), {})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_arguments("org/model", config(tmp_path), {})  # control


def test_a_folder_with_an_unquantized_model_is_refused_before_the_run(tmp_path, tiny_model):
    """Found at the end of the run, `save_model` would have nowhere to go."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "low_bit")
    check_arguments("org/model", config(tmp_path), {})
    for folder, given in (
        (tmp_path, {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}),
        (tmp_path / "low_bit", {}),
    ):
        with pytest.raises(ValueError, match="unquantized model"):
            QaRLTrainer("no/such-model", reward_funcs=[], args=config(folder), **given)
    check_arguments("no/such-model", config(tmp_path / "low_bit", quant_scheme="none"), {})


@pytest.mark.parametrize(
    "changes", [{"vllm_mode": "server"}, {"vllm_enable_sleep_mode": True}, {"vllm_tensor_parallel_size": 2}]
)
@pytest.mark.parametrize("given", [{"tools": [len]}, {"environment_factory": dict}])
def test_tools_of_several_processes_need_an_engine_each(changes, given):
    args = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    args["sync_folder"] = "f"
    with pytest.raises(ValueError, match="Tools with several processes need an engine for each"):
        check_processes(SimpleNamespace(world_size=2, **args | changes), given)
    check_processes(SimpleNamespace(world_size=1, **args | changes), given)  # controls
    check_processes(SimpleNamespace(world_size=2, **args), given)
    check_processes(SimpleNamespace(world_size=2, **args | changes), {"tools": []})


def test_a_server_takes_no_images_and_needs_a_folder():
    args = {"use_vllm": True, "world_size": 1, "vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}
    args |= {"vllm_mode": "server", "device": torch.device("cpu"), "sync_folder": "f"}
    data = Dataset.from_dict({"prompt": ["a"], "image": ["b"]})
    with pytest.raises(ValueError, match="takes text only, got .'image'. in eval_dataset"):
        check_processes(SimpleNamespace(**args), {"eval_dataset": {"x": data}})
    with pytest.raises(ValueError, match=r"vllm_mode='server' needs sync_folder"):
        check_processes(SimpleNamespace(**args | {"sync_folder": None}), {})
    check_processes(SimpleNamespace(**args), {})  # controls
    check_processes(SimpleNamespace(**args | {"vllm_mode": "colocate"}), {"eval_dataset": {"x": data}})


def test_fewer_prompts_than_a_rollout_batch_are_refused_with_the_arithmetic_before_a_model_loads(tmp_path):
    """TRL trains nothing then, and says that all is well."""
    args = config(tmp_path, per_device_train_batch_size=8, steps_per_generation=4, num_generations=4)
    data = Dataset.from_dict({"prompt": ["a"] * 8})
    with pytest.raises(ValueError, match=r"at least 8 prompts, got 7.*8 x 1 processes x .*=4 = 32 completions"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args, train_dataset=data.select(range(7)))
    check_data({"train_dataset": data}, args)  # controls
    check_data({"train_dataset": data.select(range(7)).to_iterable_dataset()}, args)


def test_a_model_that_the_host_cannot_hold_is_refused_before_it_loads(tmp_path, monkeypatch, tiny_model):
    """Eight processes with a copy each; the kernel would kill one of them without a word."""
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path / "model")
    args, half = config(tmp_path), config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    found = validate.config_of(str(tmp_path / "model"), args)
    needed = 4 * sum(p.numel() for p in validate.skeleton(found, args).parameters())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(validate, "available_memory", lambda: 8 * needed - 1)
    with pytest.raises(ValueError, match="8 processes of this machine hold the model in float32.*fsdp2.yaml"):
        QaRLTrainer(str(tmp_path / "model"), reward_funcs=[], args=args)
    validate.check_run(str(tmp_path / "model"), args, {})  # controls: a server holds no master weights
    monkeypatch.setattr(validate, "available_memory", lambda: 4 * needed)
    validate.check_host_memory(found, half)
    monkeypatch.setattr(validate, "is_fsdp_enabled", lambda: True)  # one process reads them for all
    validate.check_host_memory(found, args)


def test_free_memory_is_that_of_the_machine_or_its_control_group(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(validate, "Path", lambda _: limit)
    free = validate.available_memory()
    assert 2**26 < free <= psutil.virtual_memory().total
    for text, most in (("max", 2**62), ("4096", 4096)):
        limit.write_text(f"{text}\n")
        assert (validate.available_memory() == most) == (text != "max")
