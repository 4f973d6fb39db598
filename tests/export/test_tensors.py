"""`check_tensors`: a checkpoint that lacks a tensor, or has one of another shape or dtype, is refused."""

import fnmatch
import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from conftest import make_model, make_neox_model
from quant.schemes import ALL_SCHEMES
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXForCausalLM

from qarl_trl.export import save_low_bit
from qarl_trl.export import tensors as checks
from qarl_trl.export.expected import UnknownTensorsError
from qarl_trl.export.tensors import Checked, TensorCheck, check_tensors
from qarl_trl.quant import apply_quantization
from qarl_trl.quant.layers.experts import EXPERTS_LAYOUT
from qarl_trl.quant.scheme import DEFAULT_IGNORE


# Two heads of keys and values make blocks of 128 of every layer.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 2}
LAYER = "model.layers.0.self_attn.q_proj"
PLAIN_EXPERTS = ("re:.*experts.*",)


def save(folder, kind="qwen3", scheme="W4A16", group_size=None, ignore=(), **changes):
    """A toy, quantized and written by us."""
    model = make_model(kind, **SIZES | changes)
    apply_quantization(model, scheme, ignore=(*DEFAULT_IGNORE, *ignore), group_size=group_size)
    return save_low_bit(model, None, folder)


def save_foreign(folder, scheme, dtype):
    """A toy, quantized by compressed-tensors in any of its schemes; one format for all, as in older configs."""
    # With biases, which stay as they are beside the low-bit tensors.
    model = make_model("qwen2", **SIZES).to(dtype)
    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(scheme, ["Linear"])}, ignore=["lm_head"]
    )
    apply_quantization_config(model, config)
    # A scale of 0, as it is made, would give NaN.
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            for name, param in module.named_parameters(recurse=False):
                if name.endswith("scale"):
                    torch.nn.init.ones_(param)
            compress_module(module)

    # What llm-compressor writes beside what compressed-tensors dumps.
    written = config.model_dump(mode="json")
    written["quant_method"] = "compressed-tensors"
    written["format"] = model.model.layers[0].mlp.up_proj.quantization_scheme.format.value
    written["config_groups"]["group_0"]["format"] = None
    model.config.quantization_config = written
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")


def change_config(folder, **changes):
    """Replace fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Damaged:
    """The tensors of a folder, each to be damaged in turn."""

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "model.safetensors"
        self.healthy = load_file(self.file)

    def without(self, *names):
        tensors = dict(self.healthy)
        for name in names:
            del tensors[name]
        save_file(tensors, self.file)

    def with_tensors(self, tensors):
        save_file(self.healthy | tensors, self.file)

    def message(self):
        """The one line with which it is refused."""
        with pytest.raises(ValueError) as refused:
            check_tensors(self.folder)
        # One line, whatever is wrong.
        (line,) = str(refused.value).splitlines()
        return line


@pytest.fixture(params=[True, False], ids=["model", "layers"])
def model_is_known(request, monkeypatch):
    """Once with transformers' model of the checkpoint, once with the layers of the files alone."""

    def unknown(config, layouts):
        # As of an architecture that transformers lacks: layers are then checked by the tensors that are there.
        raise UnknownTensorsError("nobody knows it")

    if not request.param:
        monkeypatch.setattr(checks, "model_tensors", unknown)
    return request.param


# Healthy checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_our_export_passes_in_every_scheme(tmp_path, scheme, group_size, model_is_known):
    save(tmp_path, scheme=scheme, group_size=group_size)

    expected = TensorCheck(Checked.ALL)
    if not model_is_known:
        expected = TensorCheck(Checked.STORED_LAYERS, "nobody knows it")
    assert check_tensors(tmp_path) == expected


@pytest.mark.parametrize("ignore", [(), PLAIN_EXPERTS], ids=["experts", "plain experts"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_pass_under_the_names_of_the_checkpoint(tmp_path, kind, ignore):
    save(tmp_path, kind, ignore=ignore)

    assert check_tensors(tmp_path) == TensorCheck(Checked.ALL)


def test_a_head_with_another_name_in_the_files_is_ignored_by_that_in_the_model(tmp_path):
    """llm-compressor ignores GPT-NeoX's `embed_out` as `lm_head` alone, and vLLM asks for `embed_out`."""
    make_neox_model().save_pretrained(tmp_path / "start")
    model = GPTNeoXForCausalLM.from_pretrained(tmp_path / "start")
    save_low_bit(apply_quantization(model, "FP8_DYNAMIC"), None, tmp_path / "low")

    config = tmp_path / "low" / "config.json"
    content = json.loads(config.read_text())
    ignored = content["quantization_config"]["ignore"]
    assert ignored == ["embed_out", "lm_head"]
    # The second is llm-compressor's.
    for names in (ignored, ["lm_head"]):
        content["quantization_config"]["ignore"] = names
        config.write_text(json.dumps(content))
        assert check_tensors(tmp_path / "low") == TensorCheck(Checked.ALL)

    # Control: the head is among what is checked.
    file = tmp_path / "low" / "model.safetensors"
    tensors = load_file(file)
    del tensors["embed_out.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"must hold embed_out\.weight of shape"):
        check_tensors(tmp_path / "low")


def test_a_tied_embedding_is_stored_once(tmp_path):
    save(tmp_path, tie_word_embeddings=True)

    assert check_tensors(tmp_path) == TensorCheck(Checked.ALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", ["FP8", "NVFP4", "MXFP4", "MXFP8A16", "W3A16", "W8A8", "W4A16_ASYM"])
def test_a_scheme_that_the_learner_cannot_run_is_checked_as_well(tmp_path, scheme, dtype):
    """With the scales of static activations, where it has them, and in each dtype of the unquantized model."""
    save_foreign(tmp_path, scheme, dtype)
    damaged = Damaged(tmp_path)
    assert check_tensors(tmp_path) == TensorCheck(Checked.ALL)

    name, *_ = fnmatch.filter(damaged.healthy, "*up_proj.weight_scale")
    damaged.without(name)

    assert f"must hold {name} of shape" in damaged.message()


def test_a_scale_of_a_whole_layer_may_be_a_scalar(tmp_path):
    save_foreign(tmp_path, "FP8", torch.bfloat16)
    damaged = Damaged(tmp_path)

    damaged.with_tensors({f"{LAYER}.weight_scale": torch.ones((), dtype=torch.bfloat16)})

    assert check_tensors(tmp_path) == TensorCheck(Checked.ALL)


# Another method, by its name or without one.
@pytest.mark.parametrize("method", [None, "fp8"])
def test_a_checkpoint_of_another_method_is_not_checked(tmp_path, method):
    save(tmp_path)
    Damaged(tmp_path).without(f"{LAYER}.weight_scale")
    assert "must hold" in Damaged(tmp_path).message()  # control

    change_config(tmp_path, quantization_config={"quant_method": method})

    assert check_tensors(tmp_path) == TensorCheck(Checked.OTHER_METHOD)


# Damaged ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_every_tensor_of_a_layer_must_be_there(tmp_path, scheme, group_size, model_is_known):
    save(tmp_path, scheme=scheme, group_size=group_size)
    damaged = Damaged(tmp_path)
    names = fnmatch.filter(damaged.healthy, f"{LAYER}*")
    assert len(names) > 1

    for name in names:
        damaged.without(name)
        line = damaged.message()
        assert f"{tmp_path} must hold {name}" in line
        assert line.endswith("got None. Download it again.")


@pytest.mark.parametrize(("scheme", "group_size"), ALL_SCHEMES)
def test_every_tensor_of_a_layer_must_have_its_shape(tmp_path, scheme, group_size):
    save(tmp_path, scheme=scheme, group_size=group_size)
    damaged = Damaged(tmp_path)

    for name, tensor in damaged.healthy.items():
        if name.startswith(LAYER):
            # Twice as many rows.
            damaged.with_tensors({name: tensor.repeat(2, *[1] * (tensor.ndim - 1))})
            shape = tuple(tensor.shape)
            assert f"must hold {name} of shape {shape}, got ({2 * shape[0]}" in damaged.message()


@pytest.mark.parametrize("local", ["weight_packed", "weight_scale", "weight_zero_point"])
def test_a_cut_tensor_is_refused_beside_the_others_of_its_layer(tmp_path, local, model_is_known):
    save(tmp_path, scheme="W4A16_ASYM", group_size=32)
    damaged = Damaged(tmp_path)
    name = f"{LAYER}.{local}"
    tensor = damaged.healthy[name]

    # One row less.
    damaged.with_tensors({name: tensor[:-1].clone()})

    assert f"must hold {name} of shape {tuple(tensor.shape)}, got {tuple(tensor[:-1].shape)}" in damaged.message()


@pytest.mark.parametrize(
    ("scheme", "local", "dtype", "needed"),
    [
        # Each would be read as something else, or cast in silence.
        ("W4A16", "weight_packed", torch.int64, "torch.int32"),
        ("W8A8", "weight", torch.uint8, "torch.int8"),
        ("FP8_DYNAMIC", "weight", torch.bfloat16, "torch.float8_e4m3fn"),
        ("FP8_DYNAMIC", "weight_scale", torch.float8_e4m3fn, "torch.bfloat16"),
        ("NVFP4A16", "weight_scale", torch.bfloat16, "torch.float8_e4m3fn"),
    ],
)
def test_every_tensor_of_a_layer_must_have_its_dtype(tmp_path, scheme, local, dtype, needed, model_is_known):
    save(tmp_path, scheme=scheme)
    damaged = Damaged(tmp_path)
    name = f"{LAYER}.{local}"

    damaged.with_tensors({name: damaged.healthy[name].to(dtype)})

    assert f"must hold {name} in {needed}, got {dtype}" in damaged.message()


def test_a_scale_in_another_precision_is_not_refused(tmp_path, model_is_known):
    save(tmp_path)
    damaged = Damaged(tmp_path)
    name = f"{LAYER}.weight_scale"

    damaged.with_tensors({name: damaged.healthy[name].float()})

    # An engine casts scales to its own dtype.
    check_tensors(tmp_path)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.experts.1.up_proj.weight_packed"])
def test_a_tensor_that_only_the_model_implies_must_be_there(tmp_path, name):
    save(tmp_path, "qwen3_moe")
    damaged = Damaged(tmp_path)

    damaged.without(name)

    assert f"must hold {name} of shape" in damaged.message()


def test_a_layer_must_not_lack_all_of_its_tensors(tmp_path):
    save(tmp_path)
    damaged = Damaged(tmp_path)
    names = fnmatch.filter(damaged.healthy, f"{LAYER}*")

    damaged.without(*names)

    assert f"must hold {LAYER}.weight_" in damaged.message()


def test_a_layer_that_the_config_says_is_quantized_must_not_be_stored_plain(tmp_path):
    save(tmp_path)
    damaged = Damaged(tmp_path)
    tensors = dict(damaged.healthy)
    for name in fnmatch.filter(tensors, f"{LAYER}*"):
        del tensors[name]
    tensors[f"{LAYER}.weight"] = torch.ones(128, 128, dtype=torch.bfloat16)

    save_file(tensors, damaged.file)

    assert f"must hold {LAYER}.weight_" in damaged.message()


def test_a_layer_that_the_config_says_is_plain_must_not_be_in_low_bits(tmp_path):
    save(tmp_path, scheme="FP8_DYNAMIC")
    damaged = Damaged(tmp_path)
    head = damaged.healthy["lm_head.weight"]

    damaged.with_tensors({"lm_head.weight": head.to(torch.float8_e4m3fn)})

    assert "must hold lm_head.weight in torch.bfloat16, got torch.float8_e4m3fn" in damaged.message()


def test_a_layer_that_transformers_model_lacks_is_checked_by_itself(tmp_path):
    """Such as the layers that predict several tokens, which only engines have."""
    save(tmp_path)
    damaged = Damaged(tmp_path)
    # The second layer of a model that has one.
    extra = {}
    for name, tensor in damaged.healthy.items():
        if name.startswith(LAYER):
            extra[name.replace("layers.0", "layers.1")] = tensor.clone()
    damaged.with_tensors(extra)
    assert check_tensors(tmp_path) == TensorCheck(Checked.ALL)

    del extra[f"{LAYER}.weight_scale".replace("layers.0", "layers.1")]
    damaged.with_tensors(extra)

    assert "must hold model.layers.1.self_attn.q_proj.weight_scale" in damaged.message()


def test_a_cut_off_file_is_refused(tmp_path):
    save(tmp_path)
    file = tmp_path / "model.safetensors"
    # By one byte: the header is whole, and names more bytes than there are.
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        check_tensors(tmp_path)


# What is not known --------------------------------------------------------------------------------------------------


def test_an_architecture_that_transformers_lacks_is_checked_by_layers(tmp_path):
    save(tmp_path)
    shutil.copytree(tmp_path, tmp_path / "known")
    # A known config class, so that the config itself still loads.
    config = {"architectures": ["OfTheFutureForCausalLM"], "model_type": "qwen3_vl_text"}
    change_config(tmp_path, **config)
    reason = "transformers has no model 'OfTheFutureForCausalLM'"
    assert check_tensors(tmp_path) == TensorCheck(Checked.STORED_LAYERS, reason)

    Damaged(tmp_path).without(f"{LAYER}.weight_scale")
    assert f"must hold {LAYER}.weight_scale, got None" in Damaged(tmp_path).message()

    assert check_tensors(tmp_path / "known") == TensorCheck(Checked.ALL)  # control


def test_a_checkpoint_with_other_names_is_checked_by_layers(tmp_path):
    save(tmp_path)
    damaged = Damaged(tmp_path)
    renamed = {name.replace("model.layers", "model.text.layers"): tensor for name, tensor in damaged.healthy.items()}
    save_file(renamed, damaged.file)

    reason = "transformers has other names for layers like model.text.layers.0.mlp.down_proj"
    assert check_tensors(tmp_path) == TensorCheck(Checked.STORED_LAYERS, reason)


def test_experts_whose_storage_is_not_known_are_checked_by_layers(tmp_path, monkeypatch):
    save(tmp_path, "qwen3_moe")
    # As if the package knew experts with biases alone.
    monkeypatch.setitem(EXPERTS_LAYOUT, "has_bias", True)

    reason = "how the experts model.layers.0.mlp.experts (Qwen3MoeExperts) are stored is not known"
    assert check_tensors(tmp_path) == TensorCheck(Checked.STORED_LAYERS, reason)


def test_sparse_weights_are_not_checked(tmp_path):
    save(tmp_path)
    quantized = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    change_config(tmp_path, quantization_config=quantized | {"sparsity_config": {"format": "sparse-24-bitmask"}})

    reason = "what the format sparse-24-bitmask stores is not known"
    assert check_tensors(tmp_path) == TensorCheck(Checked.NOTHING, reason)
