"""`qarl-trl eval` without an engine: what is refused, in one line, before one starts; the way from completions to results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file, save_file

from qarl_trl import cli
from qarl_trl.export.low_bit import digest
from qarl_trl.tools.evaluate import sample
from qarl_trl.tools.evaluate.store import Completion


@pytest.fixture(autouse=True)
def no_engine(tmp_path, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(sample, "start_engine", start)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A plain checkpoint of 256 positions, and W4A16 and W8A16 ones made of it."""
    folder = tmp_path_factory.mktemp("models")
    make_model(num_hidden_layers=1).save_pretrained(folder / "plain")
    make_tokenizer().save_pretrained(folder / "plain")
    cli.main(["export", str(folder / "plain"), str(folder / "w4a16")])
    cli.main(["export", str(folder / "plain"), str(folder / "w8a16"), "--scheme", "W8A16"])
    shutil.copytree(folder / "w4a16", folder / "cut")
    tensors = load_file(folder / "cut" / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".q_proj." not in n}, folder / "cut" / "model.safetensors")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    shutil.copytree(folder / "plain", folder / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(folder / "plain", folder / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(4)))
    return str(path)


def stopped(capsys, *argv):
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", *argv])
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qarl-trl eval: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--k", "0"], "--k must be 1 or more, got 0"),
        (["--temperature", "0"], "greedy"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--top_p", "0"], "--top_p must be above 0"),
        (["--k", "4", "--pass_at", "1", "8"], "--pass_at must be between 1 and --k 4, got [1, 8]"),
        (["--max_new_tokens", "0"], "--max_new_tokens must be 1 or more"),
        (["--limit", "0"], "--limit must be 1 or more"),
        (["--engine_kwargs", "[1]"], "--engine_kwargs must be a JSON object"),
        ([], "nothing to evaluate on"),
        (["--suite", "maths"], "'maths' must be math, or of math500"),
    ],
)
def test_wrong_options_are_one_line(capsys, argv, message):
    assert message in stopped(capsys, "no/such/model", *argv)


def test_a_model_that_vllm_cannot_load_is_refused_before_the_engine(capsys, models, sums):
    own = ["--data", sums, "--max_new_tokens", "16"]
    assert "no model folder ./none" in stopped(capsys, "./none", *own)
    assert "no folder" in (line := stopped(capsys, "some-lab/some-model", *own)) and "the Hub does not give it" in line
    assert "is an adapter" in stopped(capsys, str(models / "adapter"), *own)
    assert "it has no config.json" in stopped(capsys, ".", *own)
    assert "it has no *.safetensors" in stopped(capsys, str(models / "no_weights"), *own)
    assert "it has no tokenizer*" in stopped(capsys, str(models / "no_tokenizer"), *own)
    assert "hold nothing for model.layers.0.self_attn.q_proj" in stopped(capsys, str(models / "cut"), *own)
    assert "cannot run W8A16 on device 'cpu'" in stopped(capsys, str(models / "w8a16"), *own)


def test_problems_that_cannot_be_evaluated_are_refused_before_the_engine(capsys, models, sums, tmp_path):
    model = str(models / "w4a16")
    assert "--max_new_tokens must be 252 or less, got 253" in stopped(
        capsys, model, "--data", sums, "--max_new_tokens", "253"
    )
    (tmp_path / "empty.jsonl").touch()
    assert "empty file" in stopped(capsys, model, "--data", "empty.jsonl")
    (tmp_path / "open.jsonl").write_text('{"problem": "1+1=", "answer": null}\n')
    assert "an answer in 'answer'" in stopped(capsys, model, "--data", "open.jsonl")
    assert "--data aime25=FILE" in stopped(capsys, model, "--suite", "aime25")


def test_help_loads_no_library():
    code = (
        "import sys; from qarl_trl import cli\n"
        "try: cli.main(['eval', '--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'transformers', 'numpy', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--pass_at" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_prompts_are_shown_and_nothing_is_written(capsys, models, sums, tmp_path):
    cli.main(
        ["eval", str(models / "w4a16"), "--data", sums, "--show_prompts", "2", "--prompt_template", "# {problem}"]
    )
    assert capsys.readouterr().out.splitlines() == [
        "--- sums, 6 tokens, answer 0", "# 0+0=", "--- sums, 6 tokens, answer 2", "# 1+1="
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def answering(monkeypatch):
    """In place of the engine: the right answer, boxed, in the first `n // 2` completions; what was asked."""
    asked = []

    def answer(engine, problems, seed, n, **settings):
        for problem in problems:
            asked.append(problem.prompt)
            right = Completion(rf"\boxed{{{problem.answer}}}", 10, False)
            yield problem, [right] * (n // 2) + [Completion("hm", 30, True)] * (n - n // 2)

    monkeypatch.setattr(sample, "start_engine", lambda *args, **kwargs: None)
    monkeypatch.setattr(sample, "sample", answer)
    return asked


def test_results_are_graded_summed_up_and_resumed(capsys, models, sums, answering):
    argv = ["eval", str(models / "w4a16"), "--data", sums, "--max_new_tokens", "16", "--output_dir", "out"]
    cli.main([*argv, "--limit", "2", "--pass_at", "1", "4"])
    assert answering == ["0+0=", "1+1="]
    cli.main([*argv, "--pass_at", "1", "4"])
    assert answering == ["0+0=", "1+1=", "2+2=", "3+3="]  # the first two were not asked again
    with open("out/results.json") as file:
        results = json.load(file)
    assert results["precision"] == "W4A16 (weights int4 per group 128)"
    suite = results["suites"]["sums"]
    assert suite["avg@4"] == suite["pass@1"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert suite["pass@4"]["value"] == 1.0
    assert (suite["problems"], suite["mean_tokens"], suite["cut_off"]) == (4, 20.0, 0.5)
    assert "sums   4         50.0 [50.0, 50.0]" in capsys.readouterr().out
    cli.main([*argv, "--limit", "2", "--prompt_template", "Add {problem}"])
    assert json.loads(Path("out/results.json").read_text()) == results  # other prompts have a file of their own
    assert json.loads(Path("out/results-2.json").read_text())["settings"]["prompt_template"] == "Add {problem}"
    del answering[4:]
    assert "other temperature" in stopped(capsys, *argv[1:], "--temperature", "1.0")
    assert "other model_sha256" in stopped(capsys, str(models / "plain"), *argv[2:])
    assert len(answering) == 4


def test_an_engine_that_did_not_start_leaves_the_folder_to_the_next_call(capsys, models, sums, answering, monkeypatch):
    argv = [str(models / "plain"), "--data", sums, "--max_new_tokens", "16", "--output_dir", "out"]
    with monkeypatch.context() as patch:
        patch.setattr(sample, "start_engine", lambda *args, bad, **kwargs: None)
        assert "TypeError" in stopped(capsys, *argv)
    cli.main(["eval", *argv, "--engine_kwargs", '{"enforce_eager": true}'])
    assert len(answering) == 4
    assert "other engine_kwargs" in stopped(capsys, *argv)  # control: once there are completions


def test_without_a_folder_named_settings_have_folders_of_their_own(models, sums, answering, tmp_path):
    for temperature in ("0.6", "1.0", "0.6"):
        argv = ["--data", sums, "--max_new_tokens", "16", "--temperature", temperature]
        cli.main(["eval", str(models / "plain"), *argv])
    folders = list((tmp_path / "runs" / "eval").iterdir())
    assert len(folders) == 2 and all(folder.name.startswith("plain-") for folder in folders)
    assert len(answering) == 8


def test_the_digest_sees_every_byte(models, tmp_path):
    shutil.copytree(models / "w4a16", tmp_path / "copy")
    before = digest(tmp_path / "copy")
    assert before == digest(models / "w4a16")  # the folder's name and times do not count
    weights = tmp_path / "copy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert digest(tmp_path / "copy") != before
