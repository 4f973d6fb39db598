"""`qarl-trl serve`: the command of vLLM that it becomes. The server itself is in tests/slow/test_server.py."""

import json
import os
import shlex
from unittest.mock import patch

import pytest
import yaml

from qarl_trl.tools.serve import main, options
from qarl_trl.train import parse


@pytest.fixture
def recipe(tmp_path, tiny_model, tiny_tokenizer):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
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


def command(capsys, recipe, *changes):
    assert main(["--config", str(recipe), "--dry_run", *changes]) is None
    words = shlex.split(capsys.readouterr().out.strip().splitlines()[-1])
    found = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            found[word] = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else None
    return found


def test_a_recipe_becomes_a_command_of_vllm(capsys, recipe):
    found = command(capsys, recipe)
    groups = json.loads(found["--hf-overrides"])["quantization_config"]["config_groups"]
    assert groups["group_0"]["weights"]["num_bits"] == 4
    assert "--weight-transfer-config" not in found and found["--host"] == "127.0.0.1"
    assert json.loads(found["--additional-config"]) == {"sync_folder": str(recipe.parent / "shared")}
    wanted = {"--load-format": "dummy", "--dtype": "bfloat16", "--logprobs-mode": "processed_logprobs"}
    wanted |= {"--enforce-eager": None, "--max-model-len": "64", "--block-size": "32", "--port": "8000"}
    assert found.items() >= wanted.items()
    adapted = command(capsys, recipe, "--use_peft", "true", "--lora_dropout", "0", "--optim_muon", "false")
    assert adapted == found  # the engine gets merged weights
    plain = command(capsys, recipe, "--quant_scheme", "none", "--vllm_server_port", "8001")
    assert "quantization_config" not in plain.get("--hf-overrides", "") and plain["--port"] == "8001"
    assert command(capsys, recipe, "--vllm_server_base_url", "http://10.0.0.7:8123/")["--port"] == "8123"


def test_what_only_the_trainer_reads_may_be_missing_where_the_engine_is(capsys, recipe, monkeypatch):
    monkeypatch.setattr("qarl_trl.checkpoints.resume.resume_path", lambda *_: pytest.fail("looked for a checkpoint"))
    wanted = command(capsys, recipe)
    elsewhere = "--dataset_name_or_path", "gone.jsonl", "--reward_funcs", "gone.reward"
    assert command(capsys, recipe, *elsewhere, "--resume_from_checkpoint", "true") == wanted
    with pytest.raises((ValueError, OSError), match="gone"):  # control
        parse(["--config", str(recipe), "--use_vllm", "true", "--vllm_mode", "server", *elsewhere])


def test_values_as_the_command_line_has_them():
    given = {"a_b": 1, "c": True, "d": False, "e": None, "f": {"g": [1]}, "h": "i", "j": {}}
    assert list(options(given)) == ["--a-b", "1", "--c", "--no-d", "--f", '{"g": [1]}', "--h", "i"]


def test_a_server_always_has_a_key(capsys, recipe):
    with patch.dict(os.environ):
        os.environ.pop("VLLM_API_KEY", None)
        start = main(["--config", str(recipe), "--host", "0.0.0.0"])
        key = os.environ["VLLM_API_KEY"]
        assert len(key) == 32 and f"export VLLM_API_KEY={key}" in capsys.readouterr().out
        assert start.func is os.execv and main(["--config", str(recipe)]) and os.environ["VLLM_API_KEY"] == key
