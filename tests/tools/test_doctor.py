"""`qarl-trl doctor` without an engine: what it finds, what it says where it cannot look, and its exit codes."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, make_tokenizer
from trl import ModelConfig

from qarl_trl import QaRLConfig, cli
from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.rewards import boxed_format_reward, math_reward
from qarl_trl.tools.doctor import budget, machine, memory, rewards
from qarl_trl.tools.doctor.findings import FAIL, OK, SKIPPED, WARN, WIDTH, Finding, render
from qarl_trl.tools.plan import rank
from qarl_trl.tools.plan.model import run_of
from qarl_trl.tools.plan.rank import GIB


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_model(num_hidden_layers=1).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(9)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name_or_path": str(folder / "sums.jsonl"),
        "output_dir": str(folder / "out"),
        "max_completion_length": 8,
        "report_to": "none",
    }
    (folder / "recipe.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    return str(folder / "recipe.yaml")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_every_section_of_a_run_reports_and_fits_the_page(recipe, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    cli.main(["doctor", "--config", recipe])
    said = capsys.readouterr().out
    for title in ("Versions", "Devices", "Settings", "Memory", "Data and rewards", "Log-prob mismatch"):
        assert f"\n{title}" in said
    assert "ok   math_reward  right answers 1.00, wrong ones 0.00; told apart in 9 of 9 rows" in said
    assert "use_vllm: false, so the learner samples itself: not measured" in said
    assert "\n0 failed" in said and "hf_secret" not in said
    assert max(map(len, said.splitlines())) <= WIDTH


def test_a_section_that_cannot_be_run_says_why_and_does_not_fail_the_rest(recipe, capsys):
    cli.main(["doctor", "--config", recipe, "--model_name_or_path", "no/such-model", "--use_vllm"])
    said = capsys.readouterr().out
    assert "not on this machine: its layers were not looked at" in said
    assert "no local model: not measured" in said
    assert "9 of 9 rows" in said


def test_a_failed_check_is_exit_code_1_and_bad_use_2(recipe, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text('{"problem": "1 + 1", "answer": ""}\n')
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--config", recipe, "--dataset_name_or_path", str(tmp_path / "empty.jsonl")])
    assert stopped.value.code == 1 and "1 failed" in capsys.readouterr().out
    for wrong in (["--quant_scheme", "W2A2"], ["--no_such_key", "1"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["doctor", "--config", recipe, *wrong])
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and wrong[1 if "scheme" in wrong[0] else 0] in said and "Traceback" not in said


def test_a_scheme_without_a_kernel_here_fails(recipe, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--config", recipe, "--quant_scheme", "W8A16", "--use_vllm", "--probe_prompts", "0"])
    assert stopped.value.code == 1
    assert "FAIL settings" in capsys.readouterr().out


def test_every_version_is_in_its_window_and_another_is_not(monkeypatch):
    rows = {row.name: row for row in machine.versions()}
    assert rows["trl"].status == OK and rows["transformers"].status == OK
    assert "pytest" not in rows
    monkeypatch.setattr(machine, "installed_version", lambda name: {"trl": "1.15.0", "peft": None}.get(name, "0.0"))
    rows = {row.name: row for row in machine.versions()}
    assert rows["trl"].status == FAIL and "1.15.0" in rows["trl"].text
    assert rows["peft"].status == SKIPPED


def test_amx_is_said_to_be_off_and_a_cpu_without_avx512_is_said_to_have_no_engine(monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(machine, "why_no_engine", lambda *_: None)
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"amx_tile", "avx512_vnni"}))
    rows = {row.name: row for row in machine.devices()}
    assert "AMX kernels are switched off" in rows["engine on the CPU"].text and "VNNI" not in rows
    monkeypatch.setattr(machine, "why_no_engine", lambda *_: "no AVX-512")
    assert {row.name: row for row in machine.devices()}["engine on the CPU"].status == WARN


ROWS = [{"prompt": "p", "answer": answer} for answer in ("1", "2", "2", "3")]


def test_wrong_answers_are_those_of_other_rows():
    assert rewards.rotated(["1", "2", "2", "3"]) == ["2", "3", "3", "1"]
    assert rewards.rotated(["1", "1"]) == ["1", "1"]


def backwards(completions, answer, **_):
    return [float(text != a) for text, a in zip(completions, answer, strict=True)]


def bare(completions, answer, **_):
    return [1 - reward for reward in backwards(completions, answer)]


def half(completions, answer, **_):
    return [reward if a == "2" else None for reward, a in zip(bare(completions, answer), answer, strict=True)]


@pytest.mark.parametrize(
    ("reward", "status", "words"),
    [
        (math_reward, OK, "right answers 1.00, wrong ones 0.00; told apart in 4 of 4 rows (boxed)"),
        (bare, OK, "4 of 4 rows (bare)"),
        (boxed_format_reward, WARN, "right answers 1.00, wrong ones 1.00; told apart in 0 of 4"),
        (half, WARN, "told apart in 2 of 4"),
        (backwards, FAIL, "wrong answer pays more"),
        (lambda **_: 1 / 0, FAIL, "ZeroDivisionError"),
    ],
)
def test_a_reward_is_judged_by_right_and_wrong_answers(reward, status, words):
    found = rewards.check_reward("r", reward, ROWS)
    assert found.status == status and words in found.text


def test_conversational_rows_get_messages():
    row = [{"prompt": [{"role": "user", "content": "?"}], "answer": a} for a in "12"]
    assert rewards.check_reward("math_reward", math_reward, row).status == OK


def arguments(**changes):
    given = {
        "world_size": 1, "fsdp_plugin_args": None, "parallelism_config": None, "optim_muon": False, "vllm_max_model_length": 100,
        "per_device_train_batch_size": 2, "max_tokens_per_pass": 150, "gradient_checkpointing": True,
        "use_vllm": True, "vllm_mode": "colocate", "device": torch.device("cuda"),
        "vllm_gpu_memory_utilization": 0.25, "export_low_bit": True, "quantized": True, "quantize_learner": True,
        "quant_name": "W4A16", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of a small model as a plan counts it, which tests/memory compares with real tensors."""
    args = QaRLConfig(
        str(tmp_path_factory.mktemp("run")), use_vllm=False, bf16=False, use_cpu=True, max_completion_length=8
    )
    config = make_model(num_hidden_layers=1).config
    return run_of(args, ModelConfig(), config, ranks=1, sharded=False, memory=100 * GIB, tokens=520)


def test_memory_is_what_a_plan_counts_at_the_largest_moment(small, monkeypatch):
    on_gpu = replace(small, utilization=0.5)
    name, parts = memory.largest_moment(on_gpu, on_gpu=True)
    assert sum(parts.values()) == max(rank.peaks(on_gpu).values()) == rank.peaks(on_gpu)[name]
    name, parts = memory.largest_moment(small, on_gpu=False)
    expected = dict(rank.moments(small)["backward"])
    del expected["reserve (assumed)"]  # of a GPU's driver and kernels
    assert (name, parts) == ("backward", expected)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    _, told = memory.largest_moment(on_gpu, on_gpu=False)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    _, share = memory.largest_moment(on_gpu, on_gpu=False)
    assert told["engine"] == small.synced + 2 * GIB and share["engine"] == 50 * GIB


def test_processes_share_the_memory_of_a_cpu_and_too_many_fail(recipe, capsys, monkeypatch):
    cli.main(["doctor", "--config", recipe])
    needed = float(re.search(r"sum +([\d.]+) GiB", capsys.readouterr().out)[1])
    monkeypatch.setattr("qarl_trl.tools.doctor.run.available_memory", lambda: 2.5 * needed * GIB)
    for gpus, code in ((1, 0), (4, 1)):
        found = code_of(["doctor", "--config", recipe, "--gpus", str(gpus), "--sharding", "ddp"])
        said = capsys.readouterr().out
        assert found == code and ("FAIL sum" in said) == bool(code)
        assert ("4 processes" in said) == (gpus == 4)
    for sharding, words in (("ddp", "GiB"), ("fsdp2", "FSDP and ZeRO-3 cut them")):
        code_of(["doctor", "--config", recipe, "--gpus", "2", "--sharding", sharding, "--quant_scheme", "NVFP4A16"])
        said = capsys.readouterr().out
        assert ("FAIL memory" in said) == (sharding == "fsdp2") and words in said


def code_of(argv):
    try:
        cli.main(argv)
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_a_checkpoint_has_the_size_of_its_files(tmp_path):
    args = QaRLConfig(str(tmp_path), use_vllm=False, bf16=False, use_cpu=True, quant_group_size=32)
    model = make_model(num_hidden_layers=1)
    run = run_of(args, ModelConfig(), model.config, ranks=4, sharded=True, memory=GIB, tokens=8)
    model.save_pretrained(tmp_path / "master_weights")
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    save_low_bit(apply_quantization(model, "W4A16", group_size=32), None, tmp_path / "low_bit")
    files = [*tmp_path.glob("*/model.safetensors"), tmp_path / "optimizer.pt"]
    assert len(files) == 3
    assert rank.checkpoint_bytes(run) == pytest.approx(sum(f.stat().st_size for f in files), rel=0.05)  # headers


def test_what_sampling_leaves_out_is_minus_log_of_the_mass_kept():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for changes, mass in (({"top_k": 2}, 0.8), ({"top_p": 0.75}, 0.8), ({"min_p": 0.2}, 0.95)):
        filters = budget.sampling_filters(arguments(**changes))
        assert budget.left_out(logits, filters).item() == pytest.approx(-math.log(mass), rel=1e-5)  # float32
    assert budget.sampling_filters(arguments()) == []


MEASURED = budget.Budget(100, 0.006, 0.01, 0.0, 0.0, 0.012, 0.0)


@pytest.mark.parametrize(
    ("changes", "settings", "status", "words"),
    [
        ({}, {}, OK, "agree as far as kernels let them. mismatch_abort_threshold: 3e-06"),
        ({"aligned": 0.03, "rollout_only": 0.031}, {}, FAIL, "does not compute what the engine does"),
        ({"aligned": 0.03, "activations": 0.02, "rollout_only": 0.031}, {}, WARN, "5.0 times the floor"),
        ({}, {"quantize_learner": False}, WARN, "2.0 times the floor"),
        ({}, {"quantized": False}, OK, "no scheme"),
    ],
)
def test_the_verdict_follows_the_numbers(changes, settings, status, words):
    found = budget.verdict(replace(MEASURED, **changes), arguments(**settings))
    assert found.status == status and words in found.text


def test_what_sampling_costs_is_a_warning_beside_the_verdict():
    assert budget.sampling_warning(MEASURED) == []
    (found,) = budget.sampling_warning(replace(MEASURED, sampling=0.1))
    assert found.status == WARN and "top_p, top_k or min_p cost" in found.text


def test_a_long_word_is_cut_at_the_page():
    assert max(map(len, render("T", [Finding(OK, "n", "x" * 300)]))) <= WIDTH
