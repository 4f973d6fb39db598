"""`qarl-trl doctor` without an engine: what it finds, what it says where it cannot look, and its exit codes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import make_model, make_tokenizer

from qarl_trl import _compat, cli
from qarl_trl.rewards import last_boxed, math_reward
from qarl_trl.tools.doctor import FAIL, OK, WARN, machine, measure, rewards


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


def doctor(capsys, *argv):
    """Exit code, and what was found as `{name: status}` beside the text."""
    code = 0
    try:
        cli.main(["doctor", *argv])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr()
    found = {m[2].strip(): m[1] for m in re.finditer(r"^  (ok|warn|FAIL|-) +(.{20})", said.out, re.MULTILINE)}
    return code, found, said


def test_every_section_of_a_run_reports_in_lines_of_one_finding(recipe, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    code, found, said = doctor(capsys, "--config", recipe)
    assert code == 0 and "hf_secret" not in said.out
    names = ("versions", "math_reward", "settings")
    assert {found[name] for name in names} <= {OK, WARN}
    assert "right answers 1.00, wrong ones 0.00; told apart in 9 of 9 rows" in said.out
    assert found["mismatch"] == "-" and "use_vllm: false" in said.out


def test_a_section_that_cannot_be_run_says_why_and_does_not_fail_the_rest(recipe, capsys):
    _, found, said = doctor(capsys, "--config", recipe, "--model_name_or_path", "no/such-model", "--use_vllm")
    assert (found["model"], found["mismatch"]) == ("-", "-")
    assert "9 of 9 rows" in said.out


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--steps_per_generation", "16"], 1, "at least 16 prompts, got 9"),  # 8 rows x 16, 8 completions a prompt
        (["--num_iterations", "0"], 2, "num_iterations"),
        (["--quant_scheme", "W8A16", "--use_vllm", "--probe_prompts", "0"], 1, "W8A16"),  # no kernel here
        (["--no_such_key", "1"], 2, "no_such_key"),
    ],
)
def test_what_would_fail_or_train_nothing_is_found(recipe, capsys, options, code, word):
    found, _, said = doctor(capsys, "--config", recipe, *options)
    assert found == code and word in said.out + said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    ("gpu", "options", "code", "words"),
    [
        ("l4", [], 0, ["W4A16 runs on Ampere or Ada or Hopper or Blackwell, this is Ada", "It fits: 15."]),
        (
            "a100",
            ["--quant_scheme", "FP8_DYNAMIC"],
            1,
            ["FP8_DYNAMIC runs on Ada or Hopper or Blackwell, this is Ampere"],
        ),
        ("h100", ["--quant_scheme", "FP8_DYNAMIC"], 0, ["this is Hopper"]),  # control
        ("4090", ["--model_name_or_path", "Qwen/Qwen3-8B"], 1, ["It does not fit: rollout"]),
        ("h100", ["--steps_per_generation", "16"], 1, ["at least 16 prompts, got 9"]),
    ],
)
def test_a_run_is_checked_for_a_gpu_that_is_not_here(recipe, capsys, gpu, options, code, words):
    engine = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.5"]
    found, _, said = doctor(capsys, "--config", recipe, "--gpu", gpu, *engine, *options)
    assert found == code and all(word in said.out for word in words) and "mismatch" not in said.out.lower()


def test_a_version_outside_of_its_window_fails(monkeypatch):
    (fine,) = machine.versions()
    assert fine.status == OK and "trl" in fine.text and "pytest" not in fine.text
    real = _compat.installed_version
    monkeypatch.setattr(_compat, "installed_version", lambda name: {"trl": "1.15.0"}.get(name) or real(name))
    _, other = machine.versions()
    assert (other.status, other.name) == (FAIL, "trl") and "1.15.0" in other.text


def test_a_cpu_without_avx512_is_said_to_have_no_4_bit_engine(monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 0)
    for flags, status, words in (("", WARN, "no AVX-512"), ("avx512f", WARN, "VNNI"), ("avx512_vnni", OK, "cores")):
        monkeypatch.setattr(machine, "cpu_flags", lambda flags=flags: frozenset(flags.split()))
        monkeypatch.setattr(machine, "why_no_engine", lambda flags, _, four_bits: None if flags else "no AVX-512")
        found = list(machine.devices())[-1]
        assert found.status == status and words in found.text


ROWS = [{"prompt": "p", "answer": answer} for answer in ("1", "2", "2", "3")]  # the second is not asked about


def backwards(completions, answer, **_):
    return [float(last_boxed(text) != a) for text, a in zip(completions, answer, strict=True)]


async def later(completions, answer, **_):
    return [1 - reward for reward in backwards(completions, answer)]


def boxed(completions, **_):
    return [1.0] * len(completions)


def half(completions, answer, **_):
    return [1 - r if a == "2" else None for r, a in zip(backwards(completions, answer), answer, strict=True)]


@pytest.mark.parametrize(
    ("reward", "status", "words"),
    [
        (math_reward, OK, "right answers 1.00, wrong ones 0.00; told apart in 3 of 3 rows"),
        (later, OK, "3 of 3 rows"),
        (boxed, WARN, "right answers 1.00, wrong ones 1.00; told apart in 0 of 3"),
        (half, WARN, "right answers 1.00, wrong ones 0.00; told apart in 1 of 3"),
        (backwards, FAIL, "wrong answer pays more"),
        (lambda **_: 1 / 0, FAIL, "ZeroDivisionError"),
    ],
)
def test_a_reward_is_judged_by_right_and_wrong_answers(reward, status, words):
    found = rewards.check_reward(reward, ROWS)
    assert found.status == status and words in found.text
    assert rewards.check_reward(reward, ROWS[1:3]).status == "-"  # no wrong answers to ask about


def test_conversational_rows_get_messages():
    rows = [row | {"prompt": [{"role": "user", "content": "?"}]} for row in ROWS]
    assert rewards.check_reward(math_reward, rows).status == OK


MEASURED = measure.Mismatch(0.006, 0.012, 0.0)


@pytest.mark.parametrize(
    ("changes", "settings", "status", "words"),
    [
        ({}, {}, OK, "agree as far as kernels let them"),
        ({"learner": 0.03, "rollout_only": 0.031}, {}, FAIL, "does not compute what the engine does"),
        ({"learner": 0.03, "weight_only": False, "rollout_only": 0.031}, {}, WARN, "5.0 times the floor"),
        ({"learner": 0.012}, {"quantize_learner": False}, WARN, "2.0 times the floor"),
    ],
)
def test_the_verdict_follows_the_numbers(changes, settings, status, words):
    args = SimpleNamespace(**{"quantize_learner": True} | settings)
    found = measure.verdict(MEASURED._replace(**changes), args)
    assert found.status == status and words in found.text


def test_the_rule_is_that_of_the_docs():
    """One table: the docs show the thresholds and the advice that the doctor reads."""
    rows = json.loads(Path(measure.__file__).with_name("rule.json").read_text())
    page = (Path(__file__).parents[2] / "docs" / "do_i_need_qarl.md").read_text()
    table = page.split("<!-- thresholds: begin -->")[1].split("<!-- thresholds: end -->")[0]
    shown = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.strip().splitlines()[2:]]
    assert [[f"{row['from']:g}", row["advice"]] for row in rows] == [[f, a.replace("`", "")] for f, a in shown]
    assert rows[0]["from"] == 0 and [row["from"] for row in rows] == sorted(row["from"] for row in rows)
    for mean, row in ((0.0, 0), (0.0029, 0), (0.003, 1), (0.27, 2)):
        found = measure.rule(mean)
        assert found.status == OK and rows[row]["advice"] in found.text and "docs/do_i_need_qarl.md" in found.text
