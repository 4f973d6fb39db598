"""`qarl-trl serve`: the command of vLLM that it becomes. The server itself is in tests/slow/test_server.py."""

import json
import os
import shlex
import socket
from unittest.mock import patch

import pytest
import yaml

from qarl_trl.methods import keys_of
from qarl_trl.rollout.server.key import HOSTS
from qarl_trl.tools import serve
from qarl_trl.tools.serve import _takes_vllm_share, main, vllm_options
from qarl_trl.train import parse


@pytest.fixture
def recipe(tmp_path, tiny_model, tiny_tokenizer):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')

    # As a user trains by it: nothing in it is about a server but `sync_folder`.
    fields = {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name_or_path": str(tmp_path / "data.jsonl"),
        "reward_funcs": ["math_reward"],
        "output_dir": str(tmp_path / "run"),
        "sync_folder": str(tmp_path / "shared"),
        "use_cpu": True,
        "report_to": "none",
        "vllm_max_model_length": 64,
        "max_completion_length": 24,
        "vllm_engine_kwargs": {"block_size": 32},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def server_options(capsys, recipe, *changes):
    """The options of the command that a dry run prints, by name: their value, or `None` for an option without one."""
    assert main(["--config", str(recipe), "--dry_run", *changes]) is None
    # As a shell reads what a user copies.
    last_line = capsys.readouterr().out.strip().splitlines()[-1]
    words = shlex.split(last_line)

    options = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            options[word] = None if following.startswith("--") else following
    return options


# The command ---------------------------------------------------------------------------------------------------------


def test_a_recipe_becomes_a_command_of_vllm(capsys, recipe):
    options = server_options(capsys, recipe)

    expected = {
        "--load-format": "dummy",
        "--dtype": "bfloat16",
        "--logprobs-mode": "processed_logprobs",
        "--enforce-eager": None,
        "--max-model-len": "64",
        "--block-size": "32",
        "--host": "127.0.0.1",
        "--port": "8000",
    }
    assert options.items() >= expected.items()
    # Weights come through the sync folder, not by vLLM's own transfer.
    assert "--weight-transfer-config" not in options

    groups = json.loads(options["--hf-overrides"])["quantization_config"]["config_groups"]
    assert groups["group_0"]["weights"]["num_bits"] == 4
    assert json.loads(options["--additional-config"]) == {"sync_folder": str(recipe.parent / "shared")}


def test_a_recipe_of_another_trainer_has_the_same_engine(capsys, recipe):
    # A key that only distillation has.
    distilling = recipe.read_text().replace("reward_funcs:\n- math_reward", "distill_on: rollouts")
    recipe.write_text(distilling)
    sizes = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "3"]

    options = server_options(capsys, recipe, *sizes)

    # One update's answers. QaRL asks for those of a whole rollout batch.
    assert options["--max-num-seqs"] == "6"
    groups = json.loads(options["--hf-overrides"])["quantization_config"]["config_groups"]
    assert groups["group_0"]["weights"]["num_bits"] == 4


def test_a_trainer_without_rollouts_needs_no_server(recipe):
    with pytest.raises(ValueError, match="qarl-trl sft samples nothing, so it needs no server"):
        main(["--config", str(recipe), "--dry_run", "--trainer", "sft"])


def test_the_engine_of_an_adapter_gets_merged_weights(capsys, recipe):
    adapter = ["--use_peft", "true", "--lora_dropout", "0", "--optim_muon", "false"]

    # So its command does not show that there is an adapter.
    assert server_options(capsys, recipe, *adapter) == server_options(capsys, recipe)


def test_the_engine_of_a_frozen_base_takes_an_adapter(capsys, recipe):
    layers = ["--lora_target_modules", "q_proj", "down_proj"]
    adapter = ["--use_peft", "true", "--lora_r", "12", "--lora_dropout", "0", "--optim_muon", "false", *layers]

    assert main(["--config", str(recipe), "--dry_run", "--lora_base", "frozen", *adapter]) is None
    words = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])

    assert "--enable-lora" in words
    # The smallest size of vLLM that holds 12.
    assert words[words.index("--max-lora-rank") + 1] == "16"
    first = words.index("--lora-target-modules") + 1
    assert words[first : first + 3] == ["down_proj", "q_proj", words[first + 2]]
    assert words[first + 2].startswith("--")
    # What the trainer's engine would have is compared at its start.
    additional = json.loads(words[words.index("--additional-config") + 1])
    assert additional["adapter"]["max_lora_rank"] == 16


@pytest.mark.avx512
def test_an_fp8_cache_is_the_servers(capsys, recipe):
    assert server_options(capsys, recipe, "--kv_cache_dtype", "fp8")["--kv-cache-dtype"] == "fp8"
    # Control: without it vLLM has its default.
    assert "--kv-cache-dtype" not in server_options(capsys, recipe)


@pytest.mark.parametrize(
    ("device", "keys", "expected"),
    [
        ("cuda", ["--vllm_tensor_parallel_size", "1"], True),
        ("cuda", ["--vllm_gpu_memory_utilization", "0.5"], False),
        # TRL's default, but the user's word.
        ("cuda", ["--vllm-gpu-memory-utilization=0.3"], False),
        ("cpu", [], False),
    ],
)
def test_a_server_has_vllms_share_of_its_gpus_unless_the_user_gives_one(recipe, device, keys, expected):
    """It had TRL's 0.3, which is for an engine beside a learner."""
    assert _takes_vllm_share(device, keys_of(["--config", str(recipe), *keys])) is expected

    # Of the recipe, too.
    recipe.write_text(recipe.read_text() + "vllm_gpu_memory_utilization: 0.5\n")
    assert _takes_vllm_share(device, keys_of(["--config", str(recipe), *keys])) is False


def test_the_share_of_vllm_is_that_of_a_command_without_one(capsys, recipe, monkeypatch):
    # A server on a CPU shares the memory with its trainer.
    assert server_options(capsys, recipe)["--gpu-memory-utilization"] == "0.3"

    monkeypatch.setattr(serve, "_takes_vllm_share", lambda *_: True)
    assert "--gpu-memory-utilization" not in server_options(capsys, recipe)


def test_a_server_for_a_frozen_base_needs_the_adapter(recipe):
    with pytest.raises(ValueError, match="lora_base='frozen' needs an adapter"):
        main(["--config", str(recipe), "--dry_run", "--lora_base", "frozen"])


def test_without_a_scheme_the_engine_is_not_quantized(capsys, recipe):
    options = server_options(capsys, recipe, "--quant_scheme", "none")

    assert "quantization_config" not in options.get("--hf-overrides", "")


@pytest.mark.parametrize(
    ("key", "value", "port"),
    [
        ("--vllm_server_port", "8001", "8001"),
        ("--vllm_server_base_url", "http://10.0.0.7:8123/", "8123"),
    ],
)
def test_the_server_listens_on_the_port_that_the_trainer_asks(capsys, recipe, key, value, port):
    assert server_options(capsys, recipe, key, value)["--port"] == port


@pytest.mark.parametrize(
    ("url", "words"),
    [
        # A trainer would ask port 80.
        ("http://127.0.0.1", "vllm_server_base_url must have a port for a server, got http://127.0.0.1"),
        ("localhost:8117", "vllm_server_base_url must be http://HOST:PORT"),
        ("http://127.0.0.1:port", "vllm_server_base_url must be http://HOST:PORT"),
    ],
)
def test_an_address_that_the_trainer_reads_otherwise_is_refused(capsys, recipe, url, words):
    with pytest.raises(ValueError, match=words):
        server_options(capsys, recipe, "--vllm_server_base_url", url)


@pytest.mark.parametrize(
    ("key", "value"),
    [("--vllm_server_host", "Engine.cluster"), ("--vllm_server_base_url", "http://Engine.cluster:8000")],
)
def test_the_server_knows_the_name_by_which_the_trainer_asks(capsys, recipe, key, value):
    with patch.dict(os.environ):
        server_options(capsys, recipe, key, value, "--host", "0.0.0.0")

        assert set(os.environ[HOSTS].split(",")) == {"0.0.0.0", "engine.cluster"}


@pytest.mark.parametrize(
    ("host", "port"), [("::1", "8000"), ("http://10.0.0.2", "8000"), ("node7/", "8000"), ("node7", "70000")]
)
def test_a_host_or_a_port_that_is_none_is_refused_by_its_name(capsys, recipe, host, port):
    with pytest.raises(ValueError, match="vllm_server_host must be a name or an address.*vllm_server_port"):
        server_options(capsys, recipe, "--vllm_server_host", host, "--vllm_server_port", port)

    # Control: an address with colons, in brackets.
    assert server_options(capsys, recipe, "--vllm_server_host", "[::1]")["--port"] == "8000"


def test_addresses_of_a_server_are_not_read_without_one(recipe):
    colocated = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_server_base_url", "localhost:8000"]

    assert parse(["--config", str(recipe), *colocated])[1].vllm_server_base_url == "localhost:8000"


def test_a_port_in_use_is_said_in_one_line(recipe):
    with patch.dict(os.environ), socket.create_server(("127.0.0.1", 0)) as other:
        port = ["--vllm_server_port", str(other.getsockname()[1])]

        with pytest.raises(ValueError, match=r"The server cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            main(["--config", str(recipe), *port])

        with pytest.raises(ValueError, match="The server cannot listen on nowhere.invalid:"):
            main(["--config", str(recipe), "--host", "nowhere.invalid"])
        # Controls: a dry run may be on another machine, and another address is free.
        assert main(["--config", str(recipe), "--dry_run", *port]) is None
        assert main(["--config", str(recipe), "--host", "127.0.0.2", *port])


def test_what_only_the_trainer_reads_may_be_missing_where_the_engine_is(capsys, recipe, monkeypatch):
    monkeypatch.setattr("qarl_trl.checkpoints.resume.resume_path", lambda *_: pytest.fail("looked for a checkpoint"))
    expected = server_options(capsys, recipe)
    # They lie on the trainer's machine.
    elsewhere = ["--dataset_name_or_path", "gone.jsonl", "--reward_funcs", "gone.reward"]

    assert server_options(capsys, recipe, *elsewhere, "--resume_from_checkpoint", "true") == expected

    # Control: the trainer itself misses them.
    with pytest.raises((ValueError, OSError), match="gone"):
        parse(["--config", str(recipe), "--use_vllm", "true", "--vllm_mode", "server", *elsewhere])


def test_values_as_the_command_line_has_them():
    settings = {"a_b": 1, "c": True, "d": False, "e": None, "f": {"g": [1]}, "h": "i", "j": {}, "k": ["l", "m"]}

    expected = ["--a-b", "1", "--c", "--no-d", "--f", '{"g": [1]}', "--h", "i", "--k", "l", "m"]
    assert list(vllm_options(settings)) == expected


# The key -------------------------------------------------------------------------------------------------------------


def test_a_server_always_has_a_key(capsys, recipe):
    with patch.dict(os.environ):
        os.environ.pop("VLLM_API_KEY", None)

        # Whoever reaches the address could replace the weights of a server without one.
        start = main(["--config", str(recipe), "--host", "0.0.0.0"])

        key = os.environ["VLLM_API_KEY"]
        assert len(key) == 32
        assert f"export VLLM_API_KEY={key}" in capsys.readouterr().out
        assert start.func is os.execv

        # A key that is there stays.
        assert main(["--config", str(recipe)])
        assert os.environ["VLLM_API_KEY"] == key
