"""`examples/llmcompressor`: checkpoints that training can start from, transforms that keep the function."""

import json
import sys
from string import ascii_lowercase

import pytest
import torch
from conftest import make_model, make_tokenizer
from lines import write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.source import quantized_source
from qarl_trl.quant.start import load_master_weights


pytest.importorskip("llmcompressor")


@pytest.fixture(scope="module")
def scripts():
    """Makes the scripts importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("examples/llmcompressor")
        yield
        for name in ("ptq", "precondition"):
            sys.modules.pop(name, None)


@pytest.fixture
def ptq(scripts):
    import ptq

    return ptq


@pytest.fixture
def precondition(scripts):
    import precondition

    return precondition


@torch.no_grad()
def add_outliers(model, factor=50.0):
    """The same function, with one large channel behind each norm, and norms that are not all ones."""
    for layer in model.model.layers:
        attention = layer.self_attn
        move_into_norm(layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj), factor)
        move_into_norm(layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj), factor)


def move_into_norm(norm, readers, factor):
    """Make a channel of a norm larger, and what reads it smaller."""
    # Norms start at ones, which hide a transform that folds them in wrongly.
    norm.weight.uniform_(0.5, 2.0)
    norm.weight[5] *= factor
    for reader in readers:
        reader.weight[:, 5] /= factor


@pytest.fixture
def folder(tmp_path, request):
    """A folder with `model` and `texts.jsonl`; a parameter changes the model's config."""
    torch.manual_seed(0)
    changes = getattr(request, "param", {})
    model = make_model(initializer_range=0.05, **changes)
    add_outliers(model)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")

    rows = []
    for _ in range(12):
        letters = torch.randint(0, 26, (24,)).tolist()
        rows.append({"text": "".join(ascii_lowercase[letter] for letter in letters)})
    write_rows(tmp_path / "texts.jsonl", rows)
    return tmp_path


def options(folder, method, output="out"):
    """The command line of either script."""
    words = ["--model", folder / "model", "--output", folder / output, "--dataset", folder / "texts.jsonl"]
    words += ["--method", method, "--num_samples", 8, "--max_length", 20]
    return list(map(str, words))


# Quantization -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_every_method_makes_a_checkpoint_that_training_can_start_from(ptq, folder):
    packed = {}
    for method in ("rtn", "gptq", "awq"):
        ptq.main(options(folder, method, output=method))

        source = quantized_source(str(folder / method))
        # Seven in each of two blocks; the output layer is not quantized.
        assert len(source.layers) == 14
        model = load_master_weights(source.name)
        assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()
        stored = load_file(folder / method / "model.safetensors")
        packed[method] = stored["model.layers.0.mlp.down_proj.weight_packed"]

    # Control: the methods do not all round alike.
    assert not torch.equal(packed["rtn"], packed["gptq"])
    assert not torch.equal(packed["rtn"], packed["awq"])


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_rounding_to_nearest_is_our_own_export(ptq, folder):
    ptq.main(options(folder, "rtn"))

    model = apply_quantization(AutoModelForCausalLM.from_pretrained(folder / "model"), "W4A16")
    save_low_bit(model, None, folder / "ours")

    theirs = (folder / "out" / "model.safetensors").read_bytes()
    assert (folder / "ours" / "model.safetensors").read_bytes() == theirs


def test_a_model_that_is_only_to_be_read_stays(ptq, precondition, folder, capsys):
    before = (folder / "model" / "model.safetensors").read_bytes()

    for script, method in ((ptq, "rtn"), (precondition, "rotation")):
        with pytest.raises(ValueError, match="output"):
            script.main(options(folder, method, output="model"))
    (folder / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit):
        ptq.main(options(folder, "rtn"))

    assert "got " + str(folder / "model") + ", a LoRA adapter" in capsys.readouterr().err
    assert (folder / "model" / "model.safetensors").read_bytes() == before


def test_a_model_without_linear_layers_is_not_called_quantized(ptq, folder):
    # GPT-2's layers are `Conv1D`, which the target "Linear" does not name: llm-compressor saves the model as it was.
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "model")

    with pytest.raises(SystemExit, match="must hold low-bit layers, got none"):
        ptq.main(options(folder, "rtn"))


# Transforms ---------------------------------------------------------------------------------------------------------


# Three times a power of two, as that of Qwen2.5-1.5B; no multiple of W4A16's group of 128.
ODD = {"hidden_size": 192}


@pytest.mark.parametrize(
    ("method", "folder"),
    [("smoothquant", {}), ("awq", ODD), ("rotation", {}), ("rotation", ODD)],
    indirect=["folder"],
)
def test_the_function_stays_and_the_weights_do_not(precondition, folder, method, capsys):
    precondition.main([*options(folder, method), "--group_size", "64"])

    before = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32)
    texts = [[3, 4, 5, 6, 7, 8, 9], [9, 3, 8, 4]]
    difference = precondition.log_probs(before, texts) - precondition.log_probs(after, texts)
    # The saved weights are rounded to bfloat16; the script itself compared float32 ones.
    assert difference.abs().max() < 0.1

    assert set(after.state_dict()) == set(before.state_dict())
    assert not hasattr(after.config, "quantization_config")
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(after.state_dict()[q_proj], before.state_dict()[q_proj], rtol=0.1)
    assert "W4A16 costs" in capsys.readouterr().out
    # The calibration's length is not in the tokenizer.
    assert json.loads((folder / "out" / "tokenizer.json").read_text())["truncation"] is None


def test_a_transform_that_changes_the_function_saves_nothing(precondition, folder, monkeypatch):
    """Control: centered embeddings, which an RMS norm does not take back."""
    from compressed_tensors.utils import match_named_modules
    from llmcompressor.modeling import center_embeddings

    def center(self, model):
        for _, embedding in match_named_modules(model, [self.mappings.embedding]):
            center_embeddings(embedding)

    monkeypatch.setattr(precondition.SpinQuantModifier, "_center_embeddings", center)

    with pytest.raises(SystemExit, match="Nothing was saved"):
        precondition.main(options(folder, "rotation"))
    assert not (folder / "out").exists()
