"""`qarl-trl eval` without an engine: what is refused, in one line, before one starts; the way from completions to results."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from qarl_trl import cli
from qarl_trl.export import save_low_bit
from qarl_trl.export.files import name_base
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from qarl_trl.tools.evaluate import sample
from qarl_trl.tools.evaluate.checkpoint import check_complete


SECRET = "hf_thisIsASecret"


@pytest.fixture(autouse=True)
def no_engine(tmp_path, monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(sample, "start_engine", start)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A plain checkpoint of 256 positions, and a W4A16 one made of it."""
    folder = tmp_path_factory.mktemp("models")
    make_model(num_hidden_layers=1).save_pretrained(folder / "plain")
    make_tokenizer().save_pretrained(folder / "plain")
    cli.main(["export", str(folder / "plain"), str(folder / "w4a16")])
    shutil.copytree(folder / "w4a16", folder / "cut")
    index = {"weight_map": dict.fromkeys([*load_file(folder / "cut" / "model.safetensors"), "b"], "model.safetensors")}
    (folder / "cut" / "model.safetensors.index.json").write_text(json.dumps(index))
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
    ("argv", "field"),
    [
        (["--k", "4", "--temperature", "0"], "greedy"),  # vLLM's words
        (["--pass_at", "1", "8"], "--pass_at"),
        (["--engine_kwargs", "[1]"], "--engine_kwargs"),
    ],
)
def test_wrong_options_are_one_line(capsys, argv, field):
    assert field in stopped(capsys, "no/such/model", "--suite", "math500", *argv)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_tokenizer", "it has no tokenizer*"),
        ("cut", "lacks 1 tensors of model.safetensors.index.json (b)"),
    ],
)
def test_a_model_that_cannot_be_evaluated_is_refused_before_the_engine(capsys, models, sums, model, message):
    assert message in stopped(capsys, str(models / model), "--suite", sums)


def test_an_adapter_is_evaluated_beside_its_frozen_base_alone(capsys, models, sums, tmp_path, answering):
    """Beside another model it is another policy, which nobody trained."""
    adapter, tensors = (
        tmp_path / "run",
        {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 8)},
    )
    shutil.copytree(models / "plain", adapter, ignore=lambda _, names: [n for n in names if "tokenizer" not in n])
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(models / "w4a16")}))
    assert "got another adapter" in stopped(capsys, str(adapter), "--suite", sums)
    name_base(adapter, str(models / "w4a16"), None, models / "plain")
    assert "w4a16 has other weights than the base" in stopped(capsys, str(adapter), "--suite", sums)
    name_base(adapter, str(models / "w4a16"), None, models / "w4a16")
    argv = ["eval", str(adapter), "--suite", sums, "--max_new_tokens", "16", "--output_dir", "out"]
    cli.main(argv)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["precision"] == "W4A16 (weights int4 per group 128), with an adapter beside it"
    assert answering.started == (models / "w4a16", adapter)
    (adapter / "config.json").write_text("{}")  # of a later run with all weights
    assert "got another adapter" in stopped(capsys, *argv[1:])


@pytest.mark.parametrize(
    ("kind", "scheme", "ignore"),
    [
        ("qwen3", "W4A16_ASYM", ()),
        ("qwen3", "FP8_BLOCK", ()),
        ("qwen3", "NVFP4A16", ()),
        ("qwen3_moe", "W4A16_ASYM", ()),
        ("qwen3_moe", "W8A8", ("re:.*experts.*",)),
    ],
)
def test_a_tensor_that_the_config_implies_must_be_there_in_its_shape(tmp_path, kind, scheme, ignore):
    """In one file without an index, of which vLLM would leave a part of a merged layer as it found the memory."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 4}
    model = apply_quantization(make_model(kind, **sizes), scheme, ignore=(*DEFAULT_IGNORE, *ignore))
    save_low_bit(model, make_tokenizer(), tmp_path)
    config, file = AutoConfig.from_pretrained(tmp_path), tmp_path / "model.safetensors"
    check_complete(tmp_path)
    whole = load_file(file)
    scales = [name for name in whole if name.endswith("q_proj.weight_scale")]
    for name in ("model.norm.weight", *scales, *(name for name in whole if ".1.up_proj." in name)):
        save_file({other: tensor for other, tensor in whole.items() if other != name}, file)
        with pytest.raises(ValueError, match=f"{name} of shape .*, got None"):
            check_complete(tmp_path)
        save_file(whole | {name: whole[name].repeat(2, *[1] * (whole[name].ndim - 1))}, file)
        with pytest.raises(ValueError, match=f"{name} of shape .*, got"):
            check_complete(tmp_path)


class Asked(list):
    started = ()


@pytest.fixture
def answering(monkeypatch):
    """In place of the engine, half of whose answers are right, half cut off; what it was started and asked with."""
    asked = Asked()

    def generate(prompts, params, use_tqdm):
        asked.append(params)
        cut = SimpleNamespace(text="hm", token_ids=range(30), finish_reason="length")
        right = (
            SimpleNamespace(text=f"\\boxed{{{2 * i}}}", token_ids=range(10), finish_reason="stop") for i in range(9)
        )
        return [SimpleNamespace(outputs=[r] * 2 + [cut] * 2) for r, _ in zip(right, prompts, strict=False)]

    def start(*args, **settings):
        asked.started = args
        asked.append(settings)
        return SimpleNamespace(generate=generate)

    monkeypatch.setattr(sample, "start_engine", start)
    return asked


def test_results_hold_scores_settings_and_versions_but_no_secret(capsys, models, sums, answering, tmp_path):
    argv = ["eval", str(models / "w4a16"), "--suite", sums, "--max_new_tokens", "16", "--output_dir", "out"]
    engine = json.dumps({"hf_token": SECRET, "max_num_seqs": 2})
    cli.main([*argv, "--limit", "3", "--pass_at", "1", "4", "--engine_kwargs", engine])
    started, params = answering
    assert started["hf_token"] == SECRET and started["max_num_seqs"] == 2  # the engine gets it
    assert len({param.seed for param in params}) == 3 and params[0].n == 4
    text = (tmp_path / "out" / "results.json").read_text()
    results, out = json.loads(text), capsys.readouterr().out
    assert SECRET not in text + out + (tmp_path / "out" / "completions.jsonl").read_text()
    assert results["precision"] == "W4A16 (weights int4 per group 128)"
    assert results["settings"]["temperature"] == 0.6 and results["settings"]["engine_kwargs"]["max_num_seqs"] == 2
    assert None not in results["versions"].values()
    suite = results["suites"]["sums"]
    assert suite["avg@4"] == suite["pass@1"] == {"value": 0.5, "stderr": 0.0}
    assert suite["pass@4"]["value"] == 1.0
    assert (suite["problems"], suite["mean_tokens"], suite["cut_off"]) == (3, 20.0, 0.5)
    assert "sums   3         50.0 ± 0.0" in out
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["rewards"]) for row in rows] == [(f"{i}+{i}=", [1.0, 1.0, 0.0, 0.0]) for i in range(3)]
    assert "new or empty" in stopped(capsys, *argv[1:])


def test_an_answer_that_vllm_aborted_is_not_scored():
    with pytest.raises(RuntimeError, match="'abort'"):
        sample._completion(SimpleNamespace(finish_reason="abort"))
