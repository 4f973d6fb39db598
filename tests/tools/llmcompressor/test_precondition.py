"""`qarl-trl precondition`: the function stays, nothing of the transform is left, and a broken one saves nothing."""

import json

import pytest
import torch
import yaml
from conftest import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_trl.cli import run as main
from qarl_trl.quant.scheme import resolve_scheme, single_group
from qarl_trl.tools.llmcompressor import calibration, command, precondition
from qarl_trl.tools.llmcompressor.precondition import log_probs, quantization_error, transforms_of_recipe


pytest.importorskip("llmcompressor")
PLAN = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])


@torch.no_grad()
def with_outliers(model, factor=50.0):
    """The same function, with one large channel behind each norm, and norms that are not all ones."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.uniform_(0.5, 2.0)
            norm.weight[5] *= factor
            for reader in readers:
                reader.weight[:, 5] /= factor
    return model


@pytest.fixture(params=["qwen3", "qwen2"])
def folder(request, tmp_path):
    torch.manual_seed(0)
    with_outliers(make_model(request.param, initializer_range=0.05)).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": "".join(chr(97 + int(i)) for i in torch.randint(0, 26, (24,)))} for _ in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def run(folder, *options):
    options_of_all = [
        "precondition",
        "--model",
        folder / "model",
        "--output",
        folder / "out",
        "--dataset",
        folder / "texts.jsonl",
    ]
    main([*map(str, options_of_all), "--num-samples", "8", "--num-probes", "4", "--max-length", "20", *options])


def texts(folder, number=4):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text().splitlines()]
    return [torch.tensor([tokenizer(row).input_ids]) for row in rows[:number]]


@pytest.mark.parametrize("method", ["smoothquant", "awq", "rotation"])
def test_the_function_stays_and_the_weights_do_not(folder, method, capsys):
    run(folder, "--method", method)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("model", "out")
    )
    change = max((log_probs(before, ids) - log_probs(after, ids)).abs().max().item() for ids in texts(folder))
    assert change < 1e-4  # float32 rounding; measured 2e-5 and less
    assert set(after.state_dict()) == set(before.state_dict())
    assert not hasattr(after.config, "quantization_config")
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(after.state_dict()[q], before.state_dict()[q], rtol=0.1)
    assert "logp_diff" in capsys.readouterr().out
    saved = json.loads((folder / "out" / "tokenizer.json").read_text())
    assert saved["truncation"] is None  # the calibration's --max-length is not in it


def test_a_transform_that_changes_the_function_saves_nothing(folder, monkeypatch):
    """Control: the centered embeddings of llm-compressor's SpinQuant, which an RMS norm does not take back."""
    import contextlib

    monkeypatch.setattr(calibration, "calibration", contextlib.nullcontext)
    with pytest.raises(ValueError, match=r"changed the model: a log-prob moved by .* nats.*Nothing was saved"):
        run(folder, "--method", "rotation")
    assert not (folder / "out").exists()


def test_a_transform_that_runs_in_the_forward_is_refused(folder):
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"t_stage": {"t_modifiers": {"SpinQuantModifier": {"rotations": ["R4"]}}}}))
    with pytest.raises(ValueError, match="has to apply while it runs.*R1 and R2"):
        run(folder, "--recipe", str(recipe))
    assert not (folder / "out").exists()


def test_a_recipe_of_transforms_is_run(folder):
    recipe = folder / "recipe.yaml"
    modifiers = {"SmoothQuantModifier": {"smoothing_strength": 0.8}}
    recipe.write_text(yaml.safe_dump({"t_stage": {"t_modifiers": modifiers}}))
    assert [m.smoothing_strength for m in transforms_of_recipe(recipe)] == [0.8]
    run(folder, "--recipe", str(recipe))
    assert (folder / "out" / "config.json").exists()
    recipe.write_text(yaml.safe_dump({"t_stage": {"t_modifiers": {"GPTQModifier": {"scheme": "W4A16"}}}}))
    with pytest.raises(ValueError, match="has .'GPTQModifier'.*GPTQ and the like change the model"):
        transforms_of_recipe(recipe)


def test_the_error_of_a_scheme_is_measured_without_touching_the_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = quantization_error(model, PLAN, texts(folder))
    assert 0.05 < found.weight_error < 0.2  # 4 bits: a step of 2 amax / 15 and an error of step / sqrt(12)
    assert found.logp_diff_max > found.logp_diff > 1e-4
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert quantization_error(model, PLAN, texts(folder)) == found
    eight = single_group(resolve_scheme("W8A16"), ["Linear"], ["lm_head"])
    assert quantization_error(model, eight, texts(folder)).weight_error < found.weight_error / 10  # control


# Refused before a model loads ---------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))


def test_bad_input_costs_no_work(folder, no_model, monkeypatch):
    with pytest.raises(ValueError, match="quant_scheme='W3A3'"):
        run(folder, "--scheme", "W3A3")
    (folder / "texts.jsonl").write_text('{"image": 1}\n')
    with pytest.raises(ValueError, match=r"must have rows with text or messages.*columns \['image'\]"):
        run(folder)
    with pytest.raises(FileNotFoundError, match="--recipe nowhere"):
        run(folder, "--recipe", "nowhere.yaml")
    (folder / "out").mkdir()
    (folder / "out" / "mine").touch()
    with pytest.raises(ValueError, match="is not empty"):
        run(folder)
    monkeypatch.setattr(calibration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'qarl_trl\[llmcompressor\]'"):
        run(folder)


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit):
        command.precondition(["--model", "m", "--output", "o", "--dataset", "d", "--method", "gptq"])
    assert "invalid choice: 'gptq' (choose from" in capsys.readouterr().err


def test_a_quantized_model_is_refused(folder, no_model, monkeypatch):
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "x"}}))
    monkeypatch.setattr(precondition, "run_oneshot", lambda *_: pytest.fail("ran"))
    with pytest.raises(ValueError, match="quantized already"):
        run(folder)


def test_a_mixture_of_experts_is_refused(tmp_path):
    from qarl_trl.tools.llmcompressor.precondition import check_dense

    check_dense(make_model())
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM has fused experts \('model.layers.0.mlp.experts'\)"):
        check_dense(make_model("qwen3_moe"))
