"""`qarl_trl.quant.start` and `source`: checkpoints of llm-compressor and our own, as master weights or frozen."""

import fnmatch
import json
import re
import shutil
from unittest.mock import patch

import pytest
import torch
from configs import config
from conftest import make_model
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantized_modules
from qarl_trl.quant.layers.experts import QuantExperts
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.scheme import resolve_config, resolve_scheme, single_group
from qarl_trl.quant.source import quantized_source
from qarl_trl.quant.start import load_frozen_base, load_master_weights
from qarl_trl.validate.source import find_source
from quant.schemes import same_tensors
from quant.toy_layers import names_of


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
WEIGHTS = "model.safetensors"
LAYER = "model.layers.1.mlp.down_proj"
# Ways to make a checkpoint. "ours" is `save_low_bit`, the others are llm-compressor's.
PRESETS = {"asym": "W4A16_ASYM", "w8a16": "W8A16", "w8a8": "W8A8", "w4a8": "W4A8", "block": "FP8_BLOCK"}
METHODS = ("ours", "rtn", "fp8", "gptq", "gptq_fp8", "gptq_asym", "awq", "recipe", *PRESETS)
QUANTIZED_ACTIVATIONS = ("fp8", "gptq_fp8", "recipe", "w8a8", "w4a8", "block")


def calibration_rows():
    torch.manual_seed(0)
    # The model is random, so random tokens calibrate it as well as any text.
    rows = torch.randint(2, 40, (16, 32))
    return Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})


def unpinned():
    """llm-compressor 0.14 pins the activations that AWQ keeps, which torch refuses without an accelerator."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    return patch.object(IntermediatesCache, "pin_memory", lambda *_: None)


def modifiers(method):
    """llm-compressor's recipe for a way to make a checkpoint."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    where = {"targets": ["Linear"], "ignore": ["lm_head"]}
    two_schemes = {"W4A16": ["re:.*mlp.*"], "FP8_DYNAMIC": ["re:.*self_attn.*"]}
    makers = {
        "rtn": lambda: [QuantizationModifier(scheme="W4A16", **where)],
        "fp8": lambda: [QuantizationModifier(scheme="FP8_DYNAMIC", **where)],
        "gptq": lambda: [GPTQModifier(scheme="W4A16", **where)],
        "gptq_fp8": lambda: [GPTQModifier(scheme="FP8_DYNAMIC", **where)],
        "gptq_asym": lambda: [GPTQModifier(scheme="W4A16_ASYM", **where)],
        "awq": lambda: [AWQModifier(), QuantizationModifier(scheme="W4A16", **where)],
        "recipe": lambda: [QuantizationModifier(scheme=two_schemes, ignore=["re:.*down_proj$"])],
    }
    if method in makers:
        return makers[method]()

    ignore = ["lm_head"]
    if method == "block":  # blocks of 128 do not fit the key and value projections of a model this small
        ignore.append("re:.*(k|v)_proj$")
    return [QuantizationModifier(scheme=PRESETS[method], targets=["Linear"], ignore=ignore)]


def run_llmcompressor(model, method, folder):
    """Quantize and save; GPTQ and AWQ need calibration data."""
    oneshot = pytest.importorskip("llmcompressor").oneshot
    data = {}
    if method.startswith(("gptq", "awq")):
        data = {"dataset": calibration_rows(), "max_seq_length": 32, "num_calibration_samples": 16}

    with unpinned():
        oneshot(model=model, recipe=modifiers(method), output_dir=str(folder), **data)


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory):
    """The folder of the model that all checkpoints are made of."""
    folder = tmp_path_factory.mktemp("unquantized")
    make_model(dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(unquantized, tmp_path_factory):
    """A folder for each way to make a low-bit checkpoint, made when first asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(method):
        if (folder / method).exists():
            return folder / method

        model = AutoModelForCausalLM.from_pretrained(unquantized)
        if method == "ours":
            save_low_bit(apply_quantization(model, "W4A16"), None, folder / method)
        else:
            run_llmcompressor(model, method, folder / method)
        return folder / method

    return get


@pytest.fixture
def copied(checkpoints, tmp_path):
    """Makes a folder of a test's own of a checkpoint."""

    def make(method="ours"):
        return shutil.copytree(checkpoints(method), tmp_path / "copied")

    return make


@pytest.fixture
def broken(copied):
    """Makes a folder with a checkpoint whose tensors were changed by a function."""

    def make(change, method="ours"):
        folder = copied(method)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return str(folder)

    return make


# Master weights -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("method", METHODS)
def test_master_weights_are_what_transformers_decompresses_and_nothing_else(checkpoints, method):
    path = str(checkpoints(method))
    model = load_master_weights(path, dtype=torch.bfloat16)

    # transformers' own way: low-bit layers, which decompress in their first forward.
    decompressed = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = decompressed(TOKENS).logits  # the first forward decompresses
        # With quantized inputs its forward computes something else than a plain model of the same weights.
        if method not in QUANTIZED_ACTIVATIONS:
            assert torch.equal(model(TOKENS).logits, expected)
    values = decompressed.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name

    # Nothing else: neither names, nor attributes.
    unquantized = make_model(dtype=torch.bfloat16)
    assert model.state_dict().keys() == unquantized.state_dict().keys()
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False)
    assert model.name_or_path == path
    # compressed-tensors puts a forward of its own on each low-bit module.
    assert not any("forward" in module.__dict__ for module in model.modules())

    # Control: the weights before they were quantized.
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.get_parameter(layer), unquantized.get_parameter(layer))


def test_master_weights_of_quantized_values_below_a_global_scale(tmp_path):
    model = apply_quantization(make_model(dtype=torch.bfloat16), "NVFP4A16")
    save_low_bit(model, None, tmp_path)

    master_weights = load_master_weights(str(tmp_path), dtype=torch.bfloat16).state_dict()

    for name, layer in quantized_modules(model):
        assert torch.equal(master_weights[f"{name}.weight"], dequantize(layer.low_bit())), name
    name, layer = next(iter(quantized_modules(model)))
    assert not torch.equal(master_weights[f"{name}.weight"], layer.weight)  # control


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_master_weights_of_experts_are_their_dequantized_ones(tiny_model, tmp_path, scheme):
    model = apply_quantization(tiny_model("olmoe", num_hidden_layers=1), scheme)
    save_low_bit(model, None, tmp_path)

    loaded = load_master_weights(str(tmp_path))

    (name,) = fnmatch.filter(names_of(model), "*.experts")
    experts = model.get_submodule(name)
    assert isinstance(experts, QuantExperts)
    for parameter in experts.gatherable:
        master_weight = loaded.get_submodule(name).get_parameter(parameter)
        expected = dequantize(experts.low_bit(parameter)).float()
        assert torch.equal(master_weight.flatten(0, -2), expected)


def test_an_unquantized_model_has_no_source(unquantized):
    assert quantized_source(str(unquantized)) is None
    with pytest.raises(ValueError, match="is not quantized"):
        load_master_weights(str(unquantized))


# Without values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_a_process_without_weights_loads_has_the_names_and_shapes_of_the_weights(checkpoints, method):
    source = quantized_source(str(checkpoints(method)))

    for without in ((), (LAYER,)):
        without_values = dict(source.dense_without_values(without))
        assert all(tensor.is_meta for tensor in without_values.values())
        shapes = {name: tensor.shape for name, tensor in source.dense(without)}
        assert {name: tensor.shape for name, tensor in without_values.items()} == shapes
        assert (f"{LAYER}.weight" in shapes) == (not without)  # control


def test_a_process_without_weights_refuses_what_the_others_refuse(broken):
    def cut(tensors):
        tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:, :1].contiguous()

    source = quantized_source(broken(cut))
    for read in (source.dense, source.dense_without_values):
        with pytest.raises(ValueError, match="weight_scale must have shape"):
            dict(read())


# Where the checkpoint is --------------------------------------------------------------------------------------------


def test_a_sub_folder_of_a_local_folder(checkpoints, tmp_path):
    shutil.copytree(checkpoints("ours"), tmp_path / "low" / "inner")
    folder = str(tmp_path / "low")

    by_subfolder = load_master_weights(folder, subfolder="inner")
    by_path = load_master_weights(f"{folder}/inner")

    for param, expected in zip(by_subfolder.parameters(), by_path.parameters(), strict=True):
        assert torch.equal(param, expected)
    # It is read from the sub-folder, too.
    assert by_subfolder.generation_config.to_dict() == by_path.generation_config.to_dict()

    args = config(tmp_path / "run", model_init_kwargs={"subfolder": "inner"}, quant_scheme="W4A16")
    assert find_source(folder, args).folder == tmp_path / "low" / "inner"


# Stored tensors, as they are ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_model_gives_the_file_back_byte_for_byte(checkpoints, method, tmp_path):
    """What GPTQ, AWQ and rounding to nearest made, read, streamed to an engine and saved again."""
    path = checkpoints(method)
    source = quantized_source(str(path))
    model = load_frozen_base(str(path), resolve_config(source.plan()))

    save_low_bit(model, None, tmp_path / "again")

    # What GPTQ and AWQ found is in the bytes. Rounding the dequantized weights again would lose it.
    stored = load_file(path / WEIGHTS)
    assert same_tensors(load_file(tmp_path / "again" / WEIGHTS), stored)
    assert dict(iter_low_bit_weights(model)).keys() == stored.keys()
    if method not in QUANTIZED_ACTIVATIONS:
        # Weight-only schemes multiply by the dequantized weight, so both models compute the same.
        expected = load_master_weights(str(path), dtype=torch.bfloat16)(TOKENS).logits
        assert torch.equal(model(TOKENS).logits, expected)


def test_a_frozen_model_of_an_unquantized_checkpoint_is_its_export(unquantized, checkpoints):
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])

    model = load_frozen_base(str(unquantized), plan)

    assert same_tensors(dict(iter_low_bit_weights(model)), load_file(checkpoints("ours") / WEIGHTS))


# Broken checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAYER}.weight_scale", r"down_proj\.weight_scale is missing"),
        (f"{LAYER}.weight_packed", r"down_proj\.weight_packed is missing"),
        ("model.norm.weight", r"\['model\.norm\.weight'\] are missing"),
    ],
)
def test_a_missing_tensor_is_named(broken, name, message):
    folder = broken(lambda tensors: tensors.pop(name))

    with pytest.raises(ValueError, match=message):
        load_master_weights(folder)


@pytest.mark.parametrize(
    ("method", "local", "rows", "columns", "needed"),
    [
        ("ours", "weight_scale", 128, 1, (128, 2)),  # one scale a row would be taken for both groups
        ("ours", "weight_packed", 127, 32, (128, 32)),
        ("ours", "weight_packed", 128, 16, (128, 32)),
        ("asym", "weight_zero_point", 16, 1, (16, 2)),
        ("fp8", "weight_scale", 1, 1, (128, 1)),
    ],
)
def test_a_tensor_of_a_wrong_shape_is_named(broken, method, local, rows, columns, needed):
    name = f"{LAYER}.{local}"

    def cut(tensors):
        # A clone, because safetensors stores no view.
        tensors[name] = tensors[name][:rows, :columns].clone()

    folder = broken(cut, method)
    with pytest.raises(ValueError, match=re.escape(f"{name} must have shape {needed}, got {(rows, columns)}")):
        load_master_weights(folder)


def test_a_cut_file_is_named(copied):
    folder = copied()
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])

    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        load_master_weights(str(folder))


@pytest.mark.parametrize("beside", ["pytorch_model.bin", None])
def test_a_base_without_safetensors_is_told_what_it_needs(unquantized, tmp_path, beside):
    """The files that it has are whole: to download them again would not help."""
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])
    load_frozen_base(str(unquantized), plan)  # control
    folder = shutil.copytree(unquantized, tmp_path / "bin")
    if beside is not None:
        torch.save(load_file(folder / WEIGHTS), folder / beside)
    (folder / WEIGHTS).unlink()

    needed = rf"must have model\.safetensors or .*, got {beside or 'neither'}\..*save_pretrained"
    with pytest.raises(ValueError, match=needed):
        load_frozen_base(str(folder), plan)


@pytest.mark.parametrize("change", [{"quant_method": "gptq"}, {"transform_config": {"config_groups": {"u": {}}}}])
def test_a_checkpoint_of_another_kind_is_refused(copied, change):
    folder = copied()
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(content))

    with pytest.raises(ValueError, match="must be quantized by compressed-tensors"):
        quantized_source(str(folder))


def test_a_second_file_of_weights_beside_the_checkpoint_is_not_read(copied):
    """A backup whose name sorts after the weights would have replaced them."""
    folder = copied()
    expected = load_master_weights(str(folder)).state_dict()
    # Of the same names and shapes, so that nothing but the values could give it away.
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(zeros, folder / "model_old.safetensors")

    weights = load_master_weights(str(folder)).state_dict()

    assert same_tensors(weights, expected)


def test_one_file_of_weights_beside_an_index_of_others_is_refused(copied):
    folder = copied()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))

    with pytest.raises(ValueError, match="beside an index of several files"):
        load_master_weights(str(folder))
