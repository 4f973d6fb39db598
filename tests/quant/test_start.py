"""`qarl_trl.quant.start`: checkpoints of llm-compressor and of our own as master weights, frozen scales, broken files."""

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
from qarl_trl.quant.experts import QuantExperts
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.scheme import resolve_config, resolve_scheme, single_group
from qarl_trl.quant.start import load_master_weights, quantized_source
from qarl_trl.validate.source import find_source
from quant.schemes import same_bytes


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
WEIGHTS = "model.safetensors"
LINEAR = "_proj.weight"
PRESETS = {"asym": "W4A16_ASYM", "w8a16": "W8A16", "w8a8": "W8A8", "w4a8": "W4A8", "block": "FP8_BLOCK"}
METHODS = ("ours", "rtn", "fp8", "gptq", "gptq_fp8", "gptq_asym", "awq", "recipe", *PRESETS)

QUANTIZED_ACTIVATIONS = ("fp8", "gptq_fp8", "recipe", "w8a8", "w4a8", "block")
# Their scale is the largest weight over the largest code, so quantizing the decompressed weights finds it again.
IDEMPOTENT = ("fp8", "gptq_fp8", "block")


def changed_quantized(found, stored):
    """Bytes that differ; a float8 zero of either sign is zero."""
    assert (found.dtype, found.shape) == (stored.dtype, stored.shape)
    if stored.dtype == torch.float8_e4m3fn:
        return (found.float() != stored.float()).sum().item()
    return (found.contiguous().view(torch.uint8) != stored.contiguous().view(torch.uint8)).sum().item()


def calibration_rows():
    torch.manual_seed(0)
    rows = torch.randint(2, 40, (16, 32))
    return Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})


def unpinned():
    """llm-compressor 0.14 pins the activations that AWQ keeps, which torch refuses without an accelerator."""
    from llmcompressor.pipelines.cache import IntermediatesCache

    return patch.object(IntermediatesCache, "pin_memory", lambda *_: None)


def modifiers(method):
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import AWQModifier

    where = {"targets": ["Linear"], "ignore": ["lm_head"]}
    if method in PRESETS:
        # Blocks of 128 do not fit the key and value projections of a model this small.
        ignore = ["lm_head", "re:.*(k|v)_proj$"] if method == "block" else ["lm_head"]
        return [QuantizationModifier(scheme=PRESETS[method], targets=["Linear"], ignore=ignore)]
    return {
        "rtn": [QuantizationModifier(scheme="W4A16", **where)],
        "fp8": [QuantizationModifier(scheme="FP8_DYNAMIC", **where)],
        "gptq": [GPTQModifier(scheme="W4A16", **where)],
        "gptq_fp8": [GPTQModifier(scheme="FP8_DYNAMIC", **where)],
        "gptq_asym": [GPTQModifier(scheme="W4A16_ASYM", **where)],
        "awq": [AWQModifier(), QuantizationModifier(scheme="W4A16", **where)],
        "recipe": [
            QuantizationModifier(
                scheme={"W4A16": ["re:.*mlp.*"], "FP8_DYNAMIC": ["re:.*self_attn.*"]}, ignore=["re:.*down_proj$"]
            )
        ],
    }[method]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder for each way to make a low-bit checkpoint, made when first asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_model(dtype=torch.bfloat16).save_pretrained(folder / "model")

    def get(method):
        if (folder / method).exists():
            return folder / method
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        if method == "ours":
            save_low_bit(apply_quantization(model, "W4A16"), None, folder / method)
        else:
            oneshot = pytest.importorskip("llmcompressor").oneshot
            needs_rows = method.startswith(("gptq", "awq"))
            data = {"dataset": calibration_rows(), "max_seq_length": 32, "num_calibration_samples": 16}
            with unpinned():
                data = data if needs_rows else {}
                oneshot(model=model, recipe=modifiers(method), output_dir=str(folder / method), **data)
        return folder / method

    return get


@pytest.fixture
def broken(checkpoints, tmp_path):
    """A copy of a checkpoint with its tensors changed by a function."""

    def make(change, method="ours"):
        shutil.copytree(checkpoints(method), tmp_path / "broken")
        tensors = load_file(tmp_path / "broken" / WEIGHTS)
        change(tensors)
        save_file(tensors, tmp_path / "broken" / WEIGHTS, metadata={"format": "pt"})
        return str(tmp_path / "broken")

    return make


# Master weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("method", METHODS)
def test_master_weights_are_what_transformers_decompresses_and_nothing_else(checkpoints, method):
    path = str(checkpoints(method))
    master_weights = load_master_weights(path, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits  # decompresses
        if method not in QUANTIZED_ACTIVATIONS:
            assert torch.equal(master_weights(TOKENS).logits, expected)
    values = theirs.state_dict()
    for name, value in master_weights.state_dict().items():
        assert torch.equal(value, values[name]), name
    unquantized = make_model(dtype=torch.bfloat16)
    assert master_weights.state_dict().keys() == unquantized.state_dict().keys()
    layer = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(master_weights.get_parameter(layer), unquantized.get_parameter(layer))  # control
    assert not hasattr(master_weights.config, "quantization_config")
    assert not getattr(master_weights, "is_quantized", False)
    assert master_weights.name_or_path == path
    assert not any("forward" in module.__dict__ for module in master_weights.modules())


def test_master_weights_of_quantized_below_a_global_scale(tmp_path):
    model = apply_quantization(make_model(dtype=torch.bfloat16), "NVFP4A16")
    save_low_bit(model, None, tmp_path)
    master_weights = load_master_weights(str(tmp_path), dtype=torch.bfloat16).state_dict()
    layers = list(quantized_modules(model))
    assert all(torch.equal(master_weights[f"{name}.weight"], dequantize(module.low_bit())) for name, module in layers)
    assert not torch.equal(master_weights[f"{layers[0][0]}.weight"], layers[0][1].weight)  # control


def test_an_unquantized_model_has_no_source(checkpoints):
    folder = checkpoints("ours").parent / "model"
    assert quantized_source(str(folder)) is None
    with pytest.raises(ValueError, match="is not quantized"):
        load_master_weights(str(folder))


# Where the checkpoint is ----------------------------------------------------------------------------------------------


def test_a_sub_folder_of_a_local_folder(checkpoints, tmp_path):
    shutil.copytree(checkpoints("ours"), tmp_path / "low" / "inner")
    low = str(tmp_path / "low")
    one, two = load_master_weights(low, subfolder="inner"), load_master_weights(f"{low}/inner")
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert one.generation_config.to_dict() == two.generation_config.to_dict()
    args = config(tmp_path / "run", model_init_kwargs={"subfolder": "inner"}, quant_scheme="W4A16")
    assert find_source(low, args).folder == tmp_path / "low" / "inner"


# Stored tensors, as they are ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_model_gives_the_file_back_byte_for_byte(checkpoints, method, tmp_path):
    """What GPTQ, AWQ and rounding to nearest found, read, streamed to an engine and saved again."""
    path = checkpoints(method)
    source = quantized_source(str(path))
    model = load_master_weights(str(path), freeze=resolve_config(source.plan()))
    save_low_bit(model, None, tmp_path / "again")
    stored, again = load_file(path / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert again.keys() == stored.keys() == dict(iter_low_bit_weights(model)).keys()
    assert all(same_bytes(again[name], tensor) for name, tensor in stored.items())
    if method not in QUANTIZED_ACTIVATIONS:
        expected = load_master_weights(str(path), dtype=torch.bfloat16)(TOKENS).logits
        assert torch.equal(model(TOKENS).logits, expected)


def test_a_frozen_model_of_an_unquantized_checkpoint_is_its_export(checkpoints):
    folder = checkpoints("ours").parent
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])
    model = load_master_weights(str(folder / "model"), freeze=plan)
    stored, found = load_file(folder / "ours" / WEIGHTS), dict(iter_low_bit_weights(model))
    assert found.keys() == stored.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_master_weights_of_experts_are_their_dequantized_ones(tiny_model, tmp_path, scheme):
    model = apply_quantization(tiny_model("olmoe", num_hidden_layers=1), scheme)
    save_low_bit(model, None, tmp_path)
    found = dict(quantized_modules(apply_quantization(load_master_weights(str(tmp_path)), scheme)))
    for name, module in quantized_modules(model):
        if isinstance(module, QuantExperts):
            for parameter in module.packed_parameters:
                expected = dequantize(module.low_bit(parameter)).float()
                assert torch.equal(getattr(found[name], parameter).flatten(0, -2), expected)


# Broken checkpoints -------------------------------------------------------------------------------------------------


def remove(name):
    return lambda tensors: tensors.pop(name)


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove(f"{LAYER}.weight_scale"), r"down_proj\.weight_scale is missing"),
        (remove(f"{LAYER}.weight_packed"), r"down_proj\.weight_packed is missing"),
        (remove("model.norm.weight"), r"\['model\.norm\.weight'\] are missing"),
    ],
)
def test_a_broken_checkpoint_is_an_error(broken, change, message):
    with pytest.raises(ValueError, match=message):
        load_master_weights(broken(change))


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
        tensors[name] = tensors[name][:rows, :columns].clone()

    with pytest.raises(ValueError, match=re.escape(f"{name} must have shape {needed}, got {(rows, columns)}")):
        load_master_weights(broken(cut, method))


def test_a_cut_file_is_named(checkpoints, tmp_path):
    shutil.copytree(checkpoints("ours"), tmp_path / "cut")
    content = (tmp_path / "cut" / WEIGHTS).read_bytes()
    (tmp_path / "cut" / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        load_master_weights(str(tmp_path / "cut"))


@pytest.mark.parametrize("change", [{"quant_method": "gptq"}, {"transform_config": {"config_groups": {"u": {}}}}])
def test_a_checkpoint_of_another_kind_is_refused(checkpoints, tmp_path, change):
    shutil.copytree(checkpoints("ours"), tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must be quantized by compressed-tensors"):
        quantized_source(str(tmp_path / "other"))


def test_a_second_file_of_weights_beside_the_checkpoint_is_not_read(checkpoints, tmp_path):
    """A backup whose name sorts after the weights would have replaced them."""
    shutil.copytree(checkpoints("ours"), tmp_path / "kept")
    expected = load_master_weights(str(tmp_path / "kept")).state_dict()
    tensors = load_file(tmp_path / "kept" / WEIGHTS)
    other = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(other, tmp_path / "kept" / "model_old.safetensors")

    weights = load_master_weights(str(tmp_path / "kept")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_one_file_of_weights_beside_an_index_of_others_is_refused(checkpoints, tmp_path):
    shutil.copytree(checkpoints("ours"), tmp_path / "both")
    (tmp_path / "both" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ValueError, match="beside an index of several files"):
        load_master_weights(str(tmp_path / "both"))
