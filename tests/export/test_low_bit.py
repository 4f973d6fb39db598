"""`qarl_trl.export`: the bytes of llm-compressor, loadable by transformers, complete or absent."""

import hashlib
import json
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from compressed_tensors.quantization import preset_name_to_scheme
from conftest import make_model, make_vision_model
from quant.schemes import NAMES, NVFP4, SCHEMES, copies, same_tensors
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    dynamic_module_utils,
)

from qarl_trl.export import check_target, quantization_config, save_low_bit
from qarl_trl.export import low_bit as export
from qarl_trl.export.low_bit import holds_low_bit
from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantized_modules
from qarl_trl.quant.modifier import read_modifier
from qarl_trl.quant.quantize import dequantize


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
WEIGHTS = "model.safetensors"


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def weight_files(folder):
    """The names of the files of weights in a folder."""
    return {file.name for file in folder.glob("model*.safetensors")}


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def model(tiny_model):
    return apply_quantization(tiny_model(), "W4A16")


# Against llm-compressor ---------------------------------------------------------------------------------------------


def modifier_arguments(scheme, group_size=None):
    """llm-compressor's arguments for a scheme."""
    if group_size is None:
        return {"targets": "Linear", "scheme": scheme}

    config = preset_name_to_scheme(scheme, targets=["Linear"])
    if group_size == -1:
        # llm-compressor's presets have one group size. Another one is a scheme that is written out.
        config.weights.strategy = "channel"
        config.weights.group_size = None
    else:
        config.weights.strategy = "group"
        config.weights.group_size = group_size
    return {"config_groups": {"group_0": config}}


@pytest.fixture
def start(tmp_path):
    """Saves the bfloat16 model that both export, and returns a function that loads it."""

    def save(**changes):
        folder = tmp_path / "start"
        make_model(dtype=torch.bfloat16, **changes).save_pretrained(folder)

        def load(dtype="auto"):
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

        return load

    return save


def check_same_folders(ours, theirs):
    expected = load_file(theirs / WEIGHTS)
    assert same_tensors(load_file(ours / WEIGHTS), expected)
    # The whole file, with its header: the order of the tensors as well.
    assert sha256(ours / WEIGHTS) == sha256(theirs / WEIGHTS)
    assert read_config(ours) == read_config(theirs)


# Two heads of keys and values make blocks of 128 of every layer.
SIZES = {"num_key_value_heads": 2}
CASES = {
    # name: (changes of the model, scheme, group size, ignore)
    **{f"{name} {size}": (SIZES, name, size, ["lm_head"]) for name, size in SCHEMES if size},
    **{name: (SIZES, name, None, ["lm_head"]) for name in (*NAMES, NVFP4)},
    # A tied head is stored once, biases stay in bfloat16, and what is ignored is listed in the config.
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
def test_an_untouched_model_is_saved_byte_for_byte_as_by_llm_compressor(case, start, tmp_path):
    oneshot = pytest.importorskip("llmcompressor").oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    changes, scheme, group_size, ignore = CASES[case]
    load = start(**changes)
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"

    modifier = QuantizationModifier(ignore=ignore, **modifier_arguments(scheme, group_size))
    # By itself llm-compressor would store a byte a value here, which vLLM's kernel for Hopper does not load.
    if scheme == "W4AFP8":
        their_model = load()
        oneshot(model=their_model, recipe=modifier)
        their_model.save_pretrained(theirs, quantization_format="pack-quantized")
    else:
        oneshot(model=load(), recipe=modifier, output_dir=str(theirs))
    # From float32 master weights: the cast to bfloat16 gives the numbers that `oneshot` starts from.
    our_model = apply_quantization(load(torch.float32), scheme, ignore=ignore, group_size=group_size)
    save_low_bit(our_model, None, ours)

    check_same_folders(ours, theirs)
    group = read_config(ours)["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] in (4, 8)

    # Control: one flipped code is noticed.
    with torch.no_grad():
        weight = our_model.model.layers[1].self_attn.o_proj.weight
        # It becomes the extreme of its group, and so changes its scale.
        weight[0, 0] = -2 * weight.abs().max()
    save_low_bit(our_model, None, ours)
    assert sha256(ours / WEIGHTS) != sha256(theirs / WEIGHTS)


FP8_GROUP = {
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
}
# Groups of 32, which no preset of W4A16 has.
INT4_GROUP = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
RECIPES = {
    "preset": {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]},
    # Without `ignore`: the targets alone leave the head out.
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
    # Layers that match both schemes: a name goes before a class.
    "named layers first": {
        "scheme": {"W4A16": ["Linear"], "FP8_DYNAMIC": ["model.layers.1.mlp.down_proj", "lm_head"]},
    },
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("case", list(RECIPES))
def test_a_recipe_is_saved_byte_for_byte_as_by_llm_compressor(case, start, tmp_path):
    oneshot = pytest.importorskip("llmcompressor").oneshot
    load = start()
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"q_stage": {"q_modifiers": {"QuantizationModifier": RECIPES[case]}}}))

    oneshot(model=load(), recipe=str(recipe), output_dir=str(theirs))
    save_low_bit(apply_quantization(load(torch.float32), read_modifier(recipe)), None, ours)

    check_same_folders(ours, theirs)
    groups = read_config(ours)["quantization_config"]["config_groups"]
    assert len(groups) == (2 if case in ("two formats", "named layers first") else 1)

    # Control: the scheme fields alone make another checkpoint of a recipe with several groups.
    if len(groups) > 1:
        plain = tmp_path / "plain"
        save_low_bit(apply_quantization(load(), "W4A16"), None, plain)
        assert sha256(plain / WEIGHTS) != sha256(theirs / WEIGHTS)
        assert read_config(plain) != read_config(theirs)


# What is in the folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "group_size"), [("W4A16", 32), ("W4A16", -1), ("W4A16_ASYM", 32), *((name, None) for name in NAMES)]
)
def test_transformers_loads_it_as_the_dequantized_model(tiny_model, tmp_path, scheme, group_size):
    model = apply_quantization(tiny_model("qwen2", **SIZES), scheme, group_size=group_size)
    master_weights = copies(model.named_parameters())

    save_low_bit(model, None, tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.quantization_config.quant_method == "compressed-tensors"
    with torch.no_grad():
        loaded(TOKENS)  # decompresses
    for name, layer in quantized_modules(model):
        weight = loaded.get_parameter(f"{name}.weight")
        assert torch.equal(weight, dequantize(layer.low_bit())), name
        # Control: it is not the master weight.
        assert not torch.equal(weight, layer.weight.bfloat16())
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())

    # The master weights are as they were, and unaware of any of this.
    for name, param in model.named_parameters():
        assert torch.equal(param, master_weights[name]), name
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("own_head", [True, False])
def test_the_config_says_whether_the_output_layer_has_a_matrix_of_its_own(tiny_model, tmp_path, own_head):
    """A checkpoint may have two matrices and say that they are one: transformers loads two, vLLM would read one."""
    model = tiny_model("qwen2", tie_word_embeddings=True, **SIZES)
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    apply_quantization(model, "W4A16")

    save_low_bit(model, None, tmp_path)

    assert read_config(tmp_path)["tie_word_embeddings"] is not own_head
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) is own_head
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert model.config.tie_word_embeddings  # as it was


def test_transformers_quantizes_no_layer_that_has_another_name_in_the_files(tmp_path):
    """It looks for ignored layers by their names in the model, and would make up scales for the others."""
    make_vision_model(tie_word_embeddings=False).save_pretrained(tmp_path / "start")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "start")
    apply_quantization(model, "FP8_DYNAMIC", ignore=["lm_head", "re:.*visual.*"])

    save_low_bit(model, None, tmp_path / "low")

    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "low")
    quantized = [name for name, module in loaded.named_modules() if hasattr(module, "quantization_scheme")]
    assert quantized == [name for name, _ in quantized_modules(model)]
    # vLLM, as llm-compressor, has the names of the files.
    ignored = read_config(tmp_path / "low")["quantization_config"]["ignore"]
    assert ignored[0] == "visual.blocks.0.attn.qkv"
    # Control: with these alone transformers takes more layers.
    config = read_config(tmp_path / "low")
    config["quantization_config"]["ignore"] = [name for name in ignored if not name.startswith("model.")]
    (tmp_path / "low" / "config.json").write_text(json.dumps(config))
    other = AutoModelForImageTextToText.from_pretrained(tmp_path / "low")
    assert hasattr(other.model.visual.merger.mlp[0], "quantization_scheme")


def test_tokenizer_and_generation_config_are_beside_the_weights(model, tiny_tokenizer, tmp_path):
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=1)

    save_low_bit(model, tiny_tokenizer, tmp_path)

    assert AutoTokenizer.from_pretrained(tmp_path)("12+3=").input_ids == tiny_tokenizer("12+3=").input_ids
    assert GenerationConfig.from_pretrained(tmp_path).temperature == 0.7
    assert not list(tmp_path.glob(".*"))  # nothing of the writing is left


def keep_code_in(folder, monkeypatch):
    """Let transformers keep the code of models in a folder, and forget that of other tests in this process."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    for name in list(sys.modules):
        if name.startswith("transformers_modules"):
            monkeypatch.delitem(sys.modules, name)
    # transformers appends its folder, and Python would take the code from an earlier one.
    others = [entry for entry in sys.path if not Path(entry, "transformers_modules").is_dir()]
    monkeypatch.setattr(sys, "path", others)


def save_with_code(model, folder):
    """Save a model as one of `trust_remote_code`, whose code lies in its folder."""
    model.save_pretrained(folder)
    name = type(model).__name__
    (folder / "modeling_mine.py").write_text(
        f"import transformers\n\nfrom .parts import NAME\n\n\nclass Mine(transformers.{name}):\n    name = NAME\n"
    )
    (folder / "parts.py").write_text('NAME = "mine"\n')
    config = read_config(folder) | {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_code_of_a_model_comes_with_its_weights(tiny_model, tmp_path, monkeypatch):
    keep_code_in(tmp_path / "modules", monkeypatch)
    save_with_code(tiny_model(), tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", trust_remote_code=True)
    assert type(model).__name__ == "Mine"

    folder = save_low_bit(apply_quantization(model, "W4A16"), None, tmp_path / "low")

    # Nothing but the folder itself is looked at.
    shutil.rmtree(tmp_path / "start")
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert (type(loaded).__name__, loaded.name) == ("Mine", "mine")
    # Control: what loads without the code is another class.
    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ != "Mine"


def test_a_config_names_no_code_that_is_not_there(tiny_model, tmp_path, monkeypatch):
    """TRL takes transformers' class for a family that it knows, such as Phi-3's, whose folders have code as well."""
    keep_code_in(tmp_path / "modules", monkeypatch)
    save_with_code(tiny_model(), tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    # Control: the config has it. Code in a repository is there.
    assert model.config.auto_map == {"AutoModelForCausalLM": "modeling_mine.Mine"}
    elsewhere = {"AutoModel": "me/start--modeling_mine.Mine", "AutoTokenizer": ["me/start--tokens.Mine", None]}
    model.config.auto_map |= elsewhere

    folder = save_low_bit(apply_quantization(model, "W4A16"), None, tmp_path / "low")

    assert read_config(folder)["auto_map"] == elsewhere
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded) is type(model)


def test_a_broken_map_of_code_is_left_out(tiny_model, tmp_path):
    model = tiny_model()
    model.config.auto_map = "modeling_mine.Mine"

    folder = save_low_bit(apply_quantization(model, "W4A16"), None, tmp_path / "low")

    assert "auto_map" not in read_config(folder)


def test_without_a_quantized_layer_there_is_nothing_to_save(tiny_model, tmp_path):
    assert quantization_config(tiny_model()) is None

    with pytest.raises(ValueError, match=r"no quantized layer.*apply_quantization"):
        save_low_bit(tiny_model(), None, tmp_path / "saved")

    assert not (tmp_path / "saved").exists()


# Atomic -------------------------------------------------------------------------------------------------------------


def fail_after_the_weights(monkeypatch):
    """Moving the file after the weights into place fails."""
    replace = export.os.replace
    moved = []

    def failing(source, target):
        # The files are moved one after the other, weights before the config.
        if WEIGHTS in moved:
            raise OSError("disk full")
        replace(source, target)
        moved.append(target.name)

    monkeypatch.setattr(export.os, "replace", failing)


def test_a_crash_between_the_moves_leaves_a_folder_that_does_not_load(model, tiny_tokenizer, tmp_path, monkeypatch):
    save_low_bit(model, tiny_tokenizer, tmp_path)
    old = sha256(tmp_path / WEIGHTS)
    with torch.no_grad():
        # Other bytes, so that the two saves can be told apart.
        model.lm_head.weight.mul_(2)

    fail_after_the_weights(monkeypatch)
    with pytest.raises(OSError, match="disk full"):
        save_low_bit(model, tiny_tokenizer, tmp_path)

    assert sha256(tmp_path / WEIGHTS) != old  # the new weights were there already
    assert not (tmp_path / "config.json").exists()
    # Without a config nothing loads it, so nobody gets new weights with an old config.
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)

    # The way out is to save again.
    monkeypatch.undo()
    save_low_bit(model, tiny_tokenizer, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path)


def save_in_shards(model, folder, monkeypatch, size):
    """Save with files of at most `size`."""
    write = export.save_torch_state_dict

    def sized(*args, **kwargs):
        # The usual size of a file is gigabytes, for which no test has a model.
        return write(*args, **(kwargs | {"max_shard_size": size}))

    with monkeypatch.context() as patches:
        patches.setattr(export, "save_torch_state_dict", sized)
        save_low_bit(model, None, folder)


def check_that_it_loads(model, folder):
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        loaded(TOKENS)  # decompresses
    layer = model.model.layers[1].mlp.down_proj
    assert torch.equal(loaded.model.layers[1].mlp.down_proj.weight, dequantize(layer.low_bit()))


def test_no_shard_of_an_earlier_save_stays_beside_one_file(model, tmp_path, monkeypatch):
    save_in_shards(model, tmp_path, monkeypatch, "20KB")
    assert len(weight_files(tmp_path)) > 1  # control

    # More than the model has: one file.
    save_in_shards(model, tmp_path, monkeypatch, "5GB")

    assert weight_files(tmp_path) == {WEIGHTS}
    assert not (tmp_path / "model.safetensors.index.json").exists()
    check_that_it_loads(model, tmp_path)


def test_no_shard_of_an_earlier_save_stays_beside_larger_ones(model, tmp_path, monkeypatch):
    save_in_shards(model, tmp_path, monkeypatch, "20KB")
    earlier = weight_files(tmp_path)

    # Fewer files than before, with other names: an old one beside them would be loaded, too.
    save_in_shards(model, tmp_path, monkeypatch, "100KB")

    files = weight_files(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert files == set(index["weight_map"].values())
    assert 1 < len(files) < len(earlier)
    check_that_it_loads(model, tmp_path)


# What is never overwritten ------------------------------------------------------------------------------------------


def test_a_training_checkpoint_is_not_overwritten(model, tmp_path):
    # The file alone says what the folder is.
    (tmp_path / "optimizer.pt").touch()

    with pytest.raises(ValueError, match="training checkpoint.*optimizer.pt"):
        save_low_bit(model, None, tmp_path)

    assert [file.name for file in tmp_path.iterdir()] == ["optimizer.pt"]


def test_master_weights_are_not_overwritten(tiny_model, model, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    before = sha256(tmp_path / WEIGHTS)

    with pytest.raises(ValueError, match="unquantized model"):
        save_low_bit(model, None, tmp_path)

    assert sha256(tmp_path / WEIGHTS) == before

    # Control: a sub-folder is fine.
    save_low_bit(model, None, tmp_path / "low_bit")
    check_target(tmp_path / "low_bit")


def test_weights_without_a_config_are_overwritten_only_if_they_are_low_bit_ones(tiny_model, model, tmp_path):
    """A loop of one's own saves the weights alone (`accelerator.save_model`)."""
    precious = tmp_path / "precious"
    tiny_model().save_pretrained(precious)
    (precious / "config.json").unlink()
    with pytest.raises(ValueError, match="unquantized model.*model.safetensors"):
        check_target(precious)

    # Control: a save that a kill interrupted.
    folder = save_low_bit(model, None, tmp_path / "low_bit")
    (folder / "config.json").unlink()
    check_target(folder)


def test_the_config_beside_older_weights_is_not_overwritten(tiny_model, model, tmp_path):
    """transformers reads these files, too, but not with the config of another model."""
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")

    with pytest.raises(ValueError, match=r"unquantized model.*pytorch_model\.bin"):
        save_low_bit(model, None, tmp_path)

    # Control: without them the config belongs to nothing.
    (tmp_path / "pytorch_model.bin").unlink()
    save_low_bit(model, None, tmp_path)


def test_what_a_killed_save_left_goes_with_the_next(model, tmp_path):
    (tmp_path / ".incoming-killed").mkdir()
    (tmp_path / ".incoming-killed" / "model.safetensors").write_text("half")

    save_low_bit(model, None, tmp_path)

    assert not list(tmp_path.glob(".incoming-*"))


def test_weights_of_the_user_that_an_engine_would_read_are_named(model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="qarl_trl.export.low_bit"):
        save_low_bit(model, None, tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        save_low_bit(model, None, tmp_path)
    assert not caplog.records

    (tmp_path / "old.safetensors").write_bytes((tmp_path / WEIGHTS).read_bytes())
    with caplog.at_level(logging.WARNING, logger="qarl_trl.export.low_bit"):
        save_low_bit(model, None, tmp_path)
    assert "also holds old.safetensors" in caplog.text


def test_files_of_the_user_stay(model, tmp_path):
    """Their names begin like those of the weights."""
    of_the_user = ["model-backup.safetensors", "model_before_rl.safetensors.bak", "model2.safetensors"]
    for name in of_the_user:
        (tmp_path / name).write_text("mine")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("a shard of an earlier model")

    save_low_bit(model, None, tmp_path)

    for name in of_the_user:
        assert (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()  # control


def test_a_base_that_another_version_of_compressed_tensors_wrote_need_not_be_written_again(tmp_path):
    model = apply_quantization(make_model(num_hidden_layers=1), "W4A16")
    folder = save_low_bit(model, None, tmp_path / "base")
    file = folder / "config.json"

    def holds(**changes):
        config = json.loads(file.read_text())
        config["quantization_config"] |= changes
        file.write_text(json.dumps(config))
        return holds_low_bit(model, folder, iter_low_bit_weights(model))

    assert holds()
    assert holds(version="0.1.0")
    # Control: what says how the tensors are read.
    assert not holds(format="dense")


def test_a_folder_with_a_damaged_config_is_refused_by_the_name_of_the_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"quantization_config":')

    with pytest.raises(ValueError, match=rf"{file} is damaged: .*Delete it, or use another folder"):
        check_target(tmp_path)
    # Control: a whole one, of a low-bit model.
    file.write_text('{"quantization_config": {}}')
    check_target(tmp_path)
