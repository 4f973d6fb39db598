"""`qarl_trl.export`: the bytes of llm-compressor, loadable by transformers, complete or absent."""

import hashlib
import json

import pytest
import torch
import yaml
from compressed_tensors.quantization import preset_name_to_scheme
from conftest import make_model
from quant.schemes import NAMES, NVFP4, SCHEMES, same_bytes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from qarl_trl.export import check_target, quantization_config, save_low_bit
from qarl_trl.export import low_bit as export
from qarl_trl.quant import apply_quantization, quantized_modules
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.modifier import read_modifier


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
WEIGHTS = "model.safetensors"


def read(folder):
    """The config as a dict."""
    return json.loads((folder / "config.json").read_text())


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def model(tiny_model):
    return apply_quantization(tiny_model(), "W4A16")


# Against llm-compressor ---------------------------------------------------------------------------------------------


def recipe(scheme, group_size=None):
    """llm-compressor's arguments for a scheme."""
    if group_size is None:
        return {"targets": "Linear", "scheme": scheme}
    config = preset_name_to_scheme(scheme, targets=["Linear"])
    config.weights.strategy = "channel" if group_size == -1 else "group"
    config.weights.group_size = None if group_size == -1 else group_size
    return {"config_groups": {"group_0": config}}


# Two heads of keys and values make blocks of 128 of every layer.
SIZES = {"num_key_value_heads": 2}
CASES = {
    # name: (changes of the model, scheme, group size, ignore)
    **{f"{name} {size}": (SIZES, name, size, ["lm_head"]) for name, size in SCHEMES if size},
    **{name: (SIZES, name, None, ["lm_head"]) for name in (*NAMES, NVFP4)},
    "tied": ({"tie_word_embeddings": True}, "W4A16", None, ["lm_head"]),
    "tied, asymmetric": ({"tie_word_embeddings": True}, "W4A16_ASYM", None, ["lm_head"]),
    "biases": ({"kind": "qwen2"}, "FP8_DYNAMIC", None, ["lm_head"]),
    "biases, int8": ({"kind": "qwen2"}, "W8A8", None, ["lm_head"]),
    "with the head": ({}, "W4A16", None, []),
    "without some": ({}, "W4A16", None, ["lm_head", "re:.*down_proj$"]),
    **{f"MoE {name}": (SIZES | {"kind": "qwen3_moe"}, name, None, ["lm_head"]) for name in NAMES},
    "MoE, group 32": ({"kind": "qwen3_moe"}, "W4A16", 32, ["lm_head"]),
    "MoE, experts ignored": ({"kind": "qwen3_moe"}, "W4A16", None, ["lm_head", "re:.*experts.*"]),
    "MoE, a layer's experts ignored": ({"kind": "mixtral"}, "W4A16", None, ["lm_head", "re:.*0.mlp.experts.*"]),
    "Mixtral": ({"kind": "mixtral"}, "W4A16", None, ["lm_head"]),
    "Mixtral, FP8": ({"kind": "mixtral"}, "FP8_DYNAMIC", None, ["lm_head"]),
    "OLMoE": ({"kind": "olmoe"}, "W4A16", None, ["lm_head"]),
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("case", list(CASES))
def test_an_untouched_model_is_saved_byte_for_byte_as_by_llm_compressor(case, tmp_path):
    oneshot = pytest.importorskip("llmcompressor").oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    changes, scheme, group_size, ignore = CASES[case]
    make_model(dtype=torch.bfloat16, **changes).save_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    modifier = QuantizationModifier(ignore=ignore, **recipe(scheme, group_size))
    if scheme == "W4AFP8":  # it would store a byte a code, which vLLM's kernel for Hopper does not load
        oneshot(model=theirs, recipe=modifier)
        theirs.save_pretrained(tmp_path / "theirs", quantization_format="pack-quantized")
    else:
        oneshot(model=theirs, recipe=modifier, output_dir=str(tmp_path / "theirs"))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    apply_quantization(ours, scheme, ignore=ignore, group_size=group_size)
    save_low_bit(ours, None, tmp_path / "ours")

    expected, found = load_file(tmp_path / "theirs" / WEIGHTS), load_file(tmp_path / "ours" / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in expected.items())
    assert sha256(tmp_path / "ours" / WEIGHTS) == sha256(tmp_path / "theirs" / WEIGHTS)
    assert read(tmp_path / "ours") == read(tmp_path / "theirs")
    assert read(tmp_path / "ours")["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] in (4, 8)

    # Control: one flipped code is noticed.
    with torch.no_grad():
        layer = ours.model.layers[1].self_attn.o_proj
        layer.weight[0, 0] = -2 * layer.weight.abs().max()
    save_low_bit(ours, None, tmp_path / "ours")
    assert sha256(tmp_path / "ours" / WEIGHTS) != sha256(tmp_path / "theirs" / WEIGHTS)


FP8_GROUP = {
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
}
INT4_GROUP = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
RECIPES = {
    "preset": {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]},
    "narrow targets": {"targets": ["re:.*mlp.*proj$"], "scheme": "FP8_DYNAMIC"},
    "two formats": {
        "config_groups": {
            "mlp": {"targets": ["re:.*mlp.*"], **INT4_GROUP},
            "attention": {"targets": ["re:.*self_attn.(q|k|v|o)_proj$"], **FP8_GROUP},
        },
        "ignore": ["lm_head"],
    },
    "without a layer": {
        "config_groups": {"rest": {"targets": ["Linear"], **INT4_GROUP}},
        "ignore": ["lm_head", "re:.*layers.0.*"],
    },
    "named layers first": {
        "scheme": {"W4A16": ["Linear"], "FP8_DYNAMIC": ["model.layers.1.mlp.down_proj", "lm_head"]},
    },
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("case", list(RECIPES))
def test_a_recipe_is_saved_byte_for_byte_as_by_llm_compressor(case, tmp_path):
    oneshot = pytest.importorskip("llmcompressor").oneshot
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"q_stage": {"q_modifiers": {"QuantizationModifier": RECIPES[case]}}}))
    make_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    oneshot(model=theirs, recipe=str(recipe), output_dir=str(tmp_path / "theirs"))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    apply_quantization(ours, read_modifier(recipe))
    save_low_bit(ours, None, tmp_path / "ours")

    assert sha256(tmp_path / "ours" / WEIGHTS) == sha256(tmp_path / "theirs" / WEIGHTS)
    assert read(tmp_path / "ours") == read(tmp_path / "theirs")
    groups = read(tmp_path / "ours")["quantization_config"]["config_groups"]
    assert len(groups) == (2 if case in ("two formats", "named layers first") else 1)

    # Control: the scheme fields alone make another checkpoint of a recipe with several groups.
    if len(groups) > 1:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        save_low_bit(apply_quantization(plain, "W4A16"), None, tmp_path / "plain")
        assert sha256(tmp_path / "plain" / WEIGHTS) != sha256(tmp_path / "theirs" / WEIGHTS)
        assert read(tmp_path / "plain") != read(tmp_path / "theirs")


# What is in the folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 32), *((name, None) for name in NAMES)]
)
def test_transformers_loads_it_as_the_dequantized_model(tiny_model, tmp_path, scheme, group_size):
    model = apply_quantization(tiny_model("qwen2", **SIZES), scheme, group_size=group_size)
    master_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_low_bit(model, None, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.quantization_config.quant_method == "compressed-tensors"
    with torch.no_grad():
        loaded(TOKENS)  # decompresses
    values = dict(loaded.named_parameters())
    for name, module in quantized_modules(model):
        assert torch.equal(values[f"{name}.weight"], dequantize(module.low_bit())), name
        assert not torch.equal(values[f"{name}.weight"], module.weight.bfloat16())  # control: not the master
    assert torch.equal(values["model.embed_tokens.weight"], model.model.embed_tokens.weight.bfloat16())
    # The master weights are as they were, and unaware of any of this.
    assert all(torch.equal(p, master_weights[name]) for name, p in model.named_parameters())
    assert not hasattr(model.config, "quantization_config")


def test_tokenizer_and_generation_config_are_beside_the_weights(model, tiny_tokenizer, tmp_path):
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=1)
    save_low_bit(model, tiny_tokenizer, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("12+3=").input_ids == tiny_tokenizer("12+3=").input_ids
    assert GenerationConfig.from_pretrained(tmp_path).temperature == 0.7
    assert not list(tmp_path.glob(".*"))  # nothing of the writing is left


def test_without_a_quantized_layer_there_is_nothing_to_save(tiny_model, tmp_path):
    assert quantization_config(tiny_model()) is None
    with pytest.raises(ValueError, match=r"no quantized layer.*apply_quantization"):
        save_low_bit(tiny_model(), None, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# Atomic -------------------------------------------------------------------------------------------------------------


def crash(*_, **__):
    raise OSError("disk full")


def test_a_crash_between_the_moves_leaves_a_folder_that_does_not_load(model, tiny_tokenizer, tmp_path, monkeypatch):
    save_low_bit(model, tiny_tokenizer, tmp_path)
    old = sha256(tmp_path / WEIGHTS)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    replace, moved = export.os.replace, []

    def replace_until_the_weights(source, target):
        if WEIGHTS in moved:
            crash()
        replace(source, target)
        moved.append(target.name)

    monkeypatch.setattr(export.os, "replace", replace_until_the_weights)
    with pytest.raises(OSError, match="disk full"):
        save_low_bit(model, tiny_tokenizer, tmp_path)
    assert sha256(tmp_path / WEIGHTS) != old  # the new weights were there already
    assert not (tmp_path / "config.json").exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.undo()
    save_low_bit(model, tiny_tokenizer, tmp_path)  # and the way out is to save again
    assert AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(("first", "second"), [("20KB", "5GB"), ("20KB", "100KB")])
def test_no_shard_of_an_earlier_save_stays(model, tmp_path, monkeypatch, first, second):
    write = export.save_torch_state_dict
    for size in (first, second):
        sized = lambda *args, size=size, **kwargs: write(*args, **(kwargs | {"max_shard_size": size}))  # noqa: E731
        monkeypatch.setattr(export, "save_torch_state_dict", sized)
        save_low_bit(model, None, tmp_path)
    files = {file.name for file in tmp_path.glob("model*.safetensors")}
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (second != "5GB")
    assert files == (set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {WEIGHTS})
    assert (len(files) > 1) == index.exists()
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        loaded(TOKENS)
    layer = model.model.layers[1].mlp.down_proj
    assert torch.equal(loaded.model.layers[1].mlp.down_proj.weight, dequantize(layer.low_bit()))


# Master weights are never overwritten --------------------------------------------------------------------------------------


def test_what_low_bits_would_replace_is_refused(tiny_model, model, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "optimizer.pt").touch()
    with pytest.raises(ValueError, match="training checkpoint.*optimizer.pt"):
        save_low_bit(model, None, tmp_path / "checkpoint")
    assert [file.name for file in (tmp_path / "checkpoint").iterdir()] == ["optimizer.pt"]
    tiny_model().save_pretrained(tmp_path)
    before = sha256(tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="unquantized model"):
        save_low_bit(model, None, tmp_path)
    assert sha256(tmp_path / WEIGHTS) == before
    save_low_bit(model, None, tmp_path / "low_bit")  # a sub-folder is fine
    check_target(tmp_path / "low_bit")


def test_what_a_killed_save_left_goes_with_the_next(model, tmp_path):
    (tmp_path / ".incoming-killed").mkdir()
    (tmp_path / ".incoming-killed" / "model.safetensors").write_text("half")
    save_low_bit(model, None, tmp_path)
    assert not list(tmp_path.glob(".incoming-*"))


def test_files_of_the_user_stay(model, tmp_path):
    """Their names begin like those of the weights."""
    kept = ["model-backup.safetensors", "model_before_rl.safetensors.bak", "model2.safetensors"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("a shard of an earlier model")

    save_low_bit(model, None, tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in kept)
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()  # control
