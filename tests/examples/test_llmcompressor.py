"""`examples/llmcompressor`: checkpoints that training can start from, transforms that keep the function."""

import hashlib
import json
import sys

import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.start import load_master_weights, quantized_source


pytest.importorskip("llmcompressor")


@pytest.fixture(scope="module")
def scripts():
    """Both scripts, imported once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("examples/llmcompressor")
        import precondition
        import ptq

        yield ptq, precondition
        for name in ("ptq", "precondition"):
            sys.modules.pop(name)


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


@pytest.fixture
def folder(tmp_path, request):
    torch.manual_seed(0)
    with_outliers(make_model(initializer_range=0.05, **getattr(request, "param", {}))).to(
        torch.bfloat16
    ).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": "".join(chr(97 + int(i)) for i in torch.randint(0, 26, (24,)))} for _ in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def options(folder, method, output="out"):
    paths = ["--model", folder / "model", "--output", folder / output, "--dataset", folder / "texts.jsonl"]
    return [*map(str, paths), "--method", method, "--num_samples", "8", "--max_length", "20"]


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_every_method_makes_a_checkpoint_that_training_can_start_from(scripts, folder):
    ptq, _ = scripts
    packed = {}
    for method in ("rtn", "gptq", "awq"):
        ptq.main(options(folder, method, method))
        source = quantized_source(str(folder / method))
        assert len(source.layers) == 14
        assert torch.isfinite(load_master_weights(source.name)(torch.tensor([[3, 4, 5]])).logits).all()
        stored = load_file(folder / method / "model.safetensors")
        packed[method] = stored["model.layers.0.mlp.down_proj.weight_packed"]
    # Control: the methods do not all round alike.
    assert not torch.equal(packed["rtn"], packed["gptq"])
    assert not torch.equal(packed["rtn"], packed["awq"])
    # Rounding to nearest is our own export.
    save_low_bit(
        apply_quantization(AutoModelForCausalLM.from_pretrained(folder / "model"), "W4A16"), None, folder / "e"
    )
    files = [folder / name / "model.safetensors" for name in ("rtn", "e")]
    assert len({hashlib.sha256(file.read_bytes()).digest() for file in files}) == 1
    assert load_file(files[0]).keys() == load_file(files[1]).keys()


def test_a_model_without_linear_layers_is_not_called_quantized(scripts, folder):
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "model")
    with pytest.raises(SystemExit, match="must hold low-bit layers, got none"):
        scripts[0].main(options(folder, "rtn"))


ODD = {"hidden_size": 192}  # three times a power of two, as that of Qwen2.5-1.5B; no multiple of W4A16's group of 128


@pytest.mark.parametrize(
    "method, folder", [("smoothquant", {}), ("awq", ODD), ("rotation", {}), ("rotation", ODD)], indirect=["folder"]
)
def test_the_function_stays_and_the_weights_do_not(scripts, folder, method, capsys):
    _, precondition = scripts
    precondition.main([*options(folder, method), "--group_size", "64"])
    models = [AutoModelForCausalLM.from_pretrained(folder / n, dtype=torch.float32) for n in ("model", "out")]
    before, after = models
    texts = [[3, 4, 5, 6, 7, 8, 9], [9, 3, 8, 4]]
    # The saved weights are rounded to bfloat16; the script itself compared float32 ones.
    assert (precondition.log_probs(before, texts) - precondition.log_probs(after, texts)).abs().max() < 0.1
    assert set(after.state_dict()) == set(before.state_dict())
    assert not hasattr(after.config, "quantization_config")
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(after.state_dict()[q], before.state_dict()[q], rtol=0.1)
    assert "W4A16 costs" in capsys.readouterr().out
    # The calibration's length is not in the tokenizer.
    assert json.loads((folder / "out" / "tokenizer.json").read_text())["truncation"] is None


def test_a_transform_that_changes_the_function_saves_nothing(scripts, folder, monkeypatch):
    """Control: centered embeddings, which an RMS norm does not take back."""
    from compressed_tensors.utils import match_named_modules
    from llmcompressor.modeling import center_embeddings

    _, precondition = scripts

    def center(self, model):
        for _, embedding in match_named_modules(model, [self.mappings.embedding]):
            center_embeddings(embedding)

    monkeypatch.setattr(precondition.SpinQuantModifier, "_center_embeddings", center)
    with pytest.raises(SystemExit, match="Nothing was saved"):
        precondition.main(options(folder, "rotation"))
    assert not (folder / "out").exists()
