"""`qarl-trl ptq`: llm-compressor's own checkpoint, chosen from the command line."""

import hashlib
import json

import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qarl_trl.cli import run as main
from qarl_trl.quant.start import load_master_weights, quantized_source


pytest.importorskip("llmcompressor")


@pytest.fixture
def folder(tmp_path):
    make_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    rows = [{"text": "".join(chr(97 + int(i)) for i in torch.randint(0, 26, (24,)))} for _ in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def ptq(folder, output, *options):
    main(["ptq", "--model", str(folder / "model"), "--output", str(folder / output), *options])
    return folder / output


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_every_method_makes_a_checkpoint_that_training_can_start_from(folder):
    data = ["--dataset", str(folder / "texts.jsonl"), "--num-samples", "8"]
    made = {method: ptq(folder, method, "--method", method, *data) for method in ("rtn", "gptq", "awq")}
    quantized = "model.layers.0.mlp.down_proj.weight_packed"
    for path in made.values():
        source = quantized_source(str(path))
        assert len(source.qparams()) == 14
        assert torch.isfinite(load_master_weights(str(path))(torch.tensor([[3, 4, 5]])).logits).all()
    # Control: the methods do not all round alike.
    assert not torch.equal(weights(made["rtn"])[quantized], weights(made["gptq"])[quantized])
    assert not torch.equal(weights(made["rtn"])[quantized], weights(made["awq"])[quantized])


def test_round_to_nearest_is_our_own_export(folder):
    rtn = ptq(folder, "rtn", "--method", "rtn")
    main(["export", str(folder / "model"), str(folder / "export")])
    one, two = (hashlib.sha256((f / "model.safetensors").read_bytes()).hexdigest() for f in (rtn, folder / "export"))
    assert one == two


def test_bad_input_costs_no_work(folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match="--method gptq needs texts"):
        ptq(folder, "out", "--method", "gptq")
    with pytest.raises(ValueError, match="W3A3"):
        ptq(folder, "out", "--method", "rtn", "--scheme", "W3A3")
    with pytest.raises(ValueError, match="is not empty"):
        ptq(folder, "model", "--method", "rtn")
    with pytest.raises(SystemExit):
        ptq(folder, "out", "--method", "spinquant")
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "x"}}))
    with pytest.raises(ValueError, match="quantized already"):
        ptq(folder, "out", "--method", "rtn")
