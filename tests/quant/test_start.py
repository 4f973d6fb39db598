"""`qarl_trl.quant.start`: checkpoints of llm-compressor and of our own as master weights, frozen scales, broken files."""

import json
import shutil
from unittest.mock import patch

import pytest
import torch
from accelerate import PartialState
from configs import config
from conftest import make_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl_trl.export import save_low_bit
from qarl_trl.quant import apply_quantization, iter_low_bit_weights, quantized_modules
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.start import check_first_quantized, load_master_weights, quantized_source
from qarl_trl.validate import find_source


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
WEIGHTS = "model.safetensors"
LINEAR = "_proj.weight"
PRESETS = {"asym": "W4A16_ASYM", "w8a16": "W8A16", "w8a8": "W8A8", "w4a8": "W4A8", "block": "FP8_BLOCK"}
METHODS = ("ours", "rtn", "fp8", "gptq", "gptq_fp8", "gptq_asym", "awq", "recipe", *PRESETS)

# Their scale is the largest weight over the largest code, so quantizing the decompressed weights finds it again.
IDEMPOTENT = ("fp8", "gptq_fp8", "block")


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


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
                oneshot(
                    model=model,
                    recipe=modifiers(method),
                    output_dir=str(folder / method),
                    **(data if needs_rows else {}),
                )
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
        if method in (
            "ours",
            "rtn",
            "gptq",
            "gptq_asym",
            "awq",
            "asym",
            "w8a16",
        ):  # the others quantize activations in this forward
            assert torch.equal(master_weights(TOKENS).logits, expected)
    values = theirs.state_dict()
    for name, value in master_weights.state_dict().items():
        assert torch.equal(value, values[name]), name
    unquantized = make_model(dtype=torch.bfloat16)
    assert master_weights.state_dict().keys() == unquantized.state_dict().keys()
    assert not all(
        torch.equal(p, q) for p, q in zip(master_weights.parameters(), unquantized.parameters(), strict=True)
    )
    assert not hasattr(master_weights.config, "quantization_config")
    assert not getattr(master_weights, "is_quantized", False)
    assert master_weights.name_or_path == path
    assert not any("forward" in module.__dict__ for module in master_weights.modules())


def test_float32_master_weights_round_to_the_bfloat16_ones(checkpoints):
    high, low = (load_master_weights(str(checkpoints("ours")), dtype=d) for d in (torch.float32, torch.bfloat16))
    assert {p.dtype for p in high.parameters()} == {torch.float32}
    assert all(torch.equal(p.bfloat16(), q) for p, q in zip(high.parameters(), low.parameters(), strict=True))


def test_master_weights_of_quantized_below_a_global_scale(tmp_path):
    model = apply_quantization(make_model(dtype=torch.bfloat16), "NVFP4A16")
    save_low_bit(model, None, tmp_path)
    master_weights = load_master_weights(str(tmp_path), dtype=torch.bfloat16).state_dict()
    layers = list(quantized_modules(model))
    assert all(torch.equal(master_weights[f"{name}.weight"], dequantize(module.low_bit())) for name, module in layers)
    assert not torch.equal(master_weights[f"{layers[0][0]}.weight"], layers[0][1].weight)  # control
    with pytest.raises(ValueError, match=r"must be bfloat16.*float8_e4m3fn.*quant_freeze_scales=False"):
        quantized_source(str(tmp_path)).qparams()


def test_an_unquantized_model_has_no_source(checkpoints):
    folder = checkpoints("ours").parent / "model"
    assert quantized_source(str(folder)) is None
    with pytest.raises(ValueError, match="is not quantized"):
        load_master_weights(str(folder))


# Where the checkpoint is ----------------------------------------------------------------------------------------------


def test_a_sub_folder_of_a_local_folder(checkpoints, tmp_path):
    shutil.copytree(checkpoints("ours"), tmp_path / "low" / "inner")
    shutil.copytree(checkpoints("ours").parent / "model", tmp_path / "high" / "inner")
    low, high = str(tmp_path / "low"), str(tmp_path / "high")
    assert quantized_source(low, subfolder="inner").qparams().keys() == quantized_source(f"{low}/inner").layers.keys()
    assert quantized_source(high, subfolder="inner") is None
    one, two = load_master_weights(low, subfolder="inner"), load_master_weights(f"{low}/inner")
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert one.generation_config.to_dict() == two.generation_config.to_dict()
    with pytest.raises(ValueError, match="Unrecognized model in"):  # control
        quantized_source(low)

    args = config(tmp_path / "run", model_init_kwargs={"subfolder": "inner"}, quant_scheme="W4A16")
    assert find_source(low, args).folder == tmp_path / "low" / "inner"
    assert find_source(high, args) is None


# Frozen scales ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_frozen_scales_give_the_file_back_byte_for_byte(checkpoints, method, dtype, tmp_path):
    path = checkpoints(method)
    source = quantized_source(str(path))
    model = apply_quantization(load_master_weights(str(path), dtype=dtype), source.plan(), qparams=source.qparams())
    save_low_bit(model, None, tmp_path / "again")
    stored, again = load_file(path / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert again.keys() == stored.keys()
    differing = {name: changed_quantized(again[name], tensor) for name, tensor in stored.items()}
    if method in ("w8a16", "w8a8"):
        # Code times scale needs 15 digits and bfloat16 has 8: 0.04 % of the quantized values here, each by one step.
        share = sum(differing.values()) / sum(t.view(torch.uint8).numel() for n, t in stored.items() if LINEAR in n)
        assert 0 < share < 1e-3
        assert not any(n for name, n in differing.items() if not name.endswith(("weight", "weight_packed")))
    else:
        assert set(differing.values()) == {0}

    # Control: min-max scales of the decompressed weights are others.
    free = apply_quantization(load_master_weights(str(path), dtype=dtype), source.plan())
    quantized = dict(quantized_modules(free))["model.layers.0.mlp.gate_proj"].low_bit()
    assert not same(quantized.scale, stored["model.layers.0.mlp.gate_proj.weight_scale"]) or method in IDEMPOTENT


def test_scales_stay_when_the_weights_move(checkpoints):
    source = quantized_source(str(checkpoints("ours")))
    model = apply_quantization(
        load_master_weights(source.name, dtype=torch.float32), source.plan(), qparams=source.qparams()
    )
    before = {name: module.low_bit() for name, module in quantized_modules(model)}
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    for name, module in quantized_modules(model):
        after = module.low_bit()
        assert same(after.scale, before[name].scale)
        free = apply_quantization(
            torch.nn.Sequential(torch.nn.Linear(*module.weight.shape[::-1], bias=False)), module.scheme
        )
        free[0].weight.data.copy_(module.weight.data)
        assert not same(free[0].low_bit().scale, after.scale)  # control: min-max scales have moved
    assert any(not same(m.low_bit().quantized, before[n].quantized) for n, m in quantized_modules(model))
    assert list(model.state_dict()) == keys
    assert not any("qparams" in name or "scale" in name for name in keys)


def test_scales_of_other_layers_are_refused(checkpoints):
    source = quantized_source(str(checkpoints("ours")))
    with pytest.raises(ValueError, match=r"7 layers are quantized without frozen scales.*model\.layers\.0"):
        apply_quantization(
            load_master_weights(source.name), "W4A16", ignore=["lm_head", "re:.*layers.0.*"], qparams=source.qparams()
        )


def test_scales_that_cannot_be_kept_are_refused(broken):
    def reorder(tensors):
        tensors["model.layers.1.mlp.up_proj.weight_g_idx"] = torch.arange(128, dtype=torch.int32)

    with pytest.raises(ValueError, match=r"up_proj.*actorder='group'.*cannot be frozen"):
        quantized_source(broken(reorder)).qparams()


def test_scales_of_another_dtype_are_refused(broken):
    def half(tensors):
        name = "model.layers.0.mlp.up_proj.weight_scale"
        tensors[name] = tensors[name].half()

    source = quantized_source(broken(half))
    with pytest.raises(ValueError, match=r"up_proj.*float16.*quant_freeze_scales=False"):
        source.qparams()
    load_master_weights(source.name)  # the master weights are made all the same


# First quantized values from a quantized checkpoint ------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "exact"), [("W4A16", True), ("FP8_DYNAMIC", True), ("W8A16", False)])
def test_master_weights_that_do_not_give_the_checkpoint_back_stop_the_run(tiny_model, tmp_path, caplog, scheme, exact):
    PartialState()  # for accelerate's logger
    save_low_bit(apply_quantization(tiny_model(), scheme), None, tmp_path)
    source = quantized_source(str(tmp_path))
    model = apply_quantization(load_master_weights(source.name), source.plan(), qparams=source.qparams())
    with caplog.at_level("WARNING"):
        check_first_quantized(model, source)
    assert ("one step beside" in caplog.text) == (not exact)
    if exact:  # control
        with torch.no_grad():
            weight = model.model.layers[1].mlp.up_proj.weight
            weight[0, 0] = -weight[0, 0] if weight[0, 0] else weight.abs().max()
        with pytest.raises(RuntimeError, match=r"1 quantized values of layer 'model.layers.1.mlp.up_proj' differ"):
            check_first_quantized(model, source)


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC"])
def test_first_quantized_of_experts_are_compared(tiny_model, tmp_path, kind, scheme):
    before = apply_quantization(tiny_model(kind, num_hidden_layers=1), scheme)
    save_low_bit(before, None, tmp_path)
    source = quantized_source(str(tmp_path))
    model = apply_quantization(load_master_weights(source.name), source.plan(), qparams=source.qparams())
    check_first_quantized(model, source)
    stream = dict(iter_low_bit_weights(model))
    for name, tensor in iter_low_bit_weights(before):  # by value: float8 has two zeros
        assert torch.equal(stream[name].float(), tensor.float())

    with torch.no_grad():  # control: expert 2's part of the fused parameter
        weight = model.model.layers[0].mlp.experts.down_proj
        weight[2, 0, 0] = -weight[2, 0, 0] if weight[2, 0, 0] else weight.abs().max()
    with pytest.raises(
        RuntimeError, match=r"1 quantized values of layer 'model.layers.0.mlp.experts.2.down_proj' differ"
    ):
        check_first_quantized(model, source)


def test_first_quantized_below_an_adapter_are_compared_without_it(tiny_model, tmp_path):
    save_low_bit(apply_quantization(tiny_model(), "W4A16"), None, tmp_path)
    source = quantized_source(str(tmp_path))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(load_master_weights(source.name), adapter)
    apply_quantization(model, source.plan(), qparams=source.qparams())
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    check_first_quantized(model, source)
    assert not layer.last_low_bits()  # the quantized values of the base are not kept beside those of the policy
    assert not torch.equal(layer.low_bit().quantized, source.quantized("model.layers.1.mlp.up_proj"))

    with torch.no_grad():  # control
        weight = layer.base_layer.weight
        weight[0, 0] = -weight[0, 0] if weight[0, 0] else weight.abs().max()
    with pytest.raises(RuntimeError, match=r"1 quantized values of layer 'model.layers.1.mlp.up_proj' differ"):
        check_first_quantized(model, source)


# Broken checkpoints -------------------------------------------------------------------------------------------------


def remove(name):
    return lambda tensors: tensors.pop(name)


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()})


def spoil(tensors):
    tensors["model.layers.0.mlp.up_proj.weight_scale"][3] = float("nan")


LAYER, BLOCK = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("ours", remove(f"{LAYER}.weight_scale"), r"down_proj' lacks \['weight_scale'\]"),
        ("ours", remove(f"{LAYER}.weight_packed"), r"down_proj' lacks \['weight_packed'\]"),
        ("ours", remove(f"{LAYER}.weight_shape"), r"down_proj' lacks \['weight_shape'\]"),
        ("ours", cut(f"{LAYER}.weight_packed"), r"weight_packed must have shape \(128, 32\), got \(128, 31\)"),
        ("ours", cut(f"{LAYER}.weight_scale"), r"weight_scale must have shape \(128, 2\), got \(128, 1\)"),
        ("ours", remove("model.norm.weight"), r"missing keys \['model\.norm\.weight'\]"),
        ("ours", spoil, "up_proj' decompresses to NaN"),
        ("fp8", remove(f"{LAYER}.weight_scale"), r"down_proj' lacks \['weight_scale'\]"),
        ("fp8", cut(f"{LAYER}.weight"), "mismatched keys"),
        ("block", cut(f"{BLOCK}.weight_scale"), r"weight_scale must have shape \(2, 1\), got \(2, 0\)"),
    ],
)
def test_a_broken_checkpoint_is_one_clear_error(broken, method, change, message):
    path = broken(change, method)
    with pytest.raises(ValueError, match=rf"{path} is incomplete or corrupt: .*{message}"):
        load_master_weights(path)


def test_a_cut_file_is_named(checkpoints, tmp_path):
    shutil.copytree(checkpoints("ours"), tmp_path / "cut")
    content = (tmp_path / "cut" / WEIGHTS).read_bytes()
    (tmp_path / "cut" / WEIGHTS).write_bytes(content[:-100])
    with pytest.raises(ValueError, match="incomplete or corrupt: model.safetensors cannot be read"):
        load_master_weights(str(tmp_path / "cut"))
    (tmp_path / "cut" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="the files .* are missing"):
        load_master_weights(str(tmp_path / "cut"))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "cut" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors"):
        load_master_weights(str(tmp_path / "cut"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quantized by 'gptq'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"actorder": "group"}}}}, "actorder"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(checkpoints, tmp_path, change, message):
    shutil.copytree(checkpoints("ours"), tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    content = json.loads(file.read_text())
    content["quantization_config"] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        quantized_source(str(tmp_path / "other"))
