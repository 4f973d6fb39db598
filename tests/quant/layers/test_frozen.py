"""`qarl_trl.quant.layers.frozen`: `Q(W) x + s B (A x)`, its gradients, what of the base is alive, its kernels."""

import copy
import fnmatch
import gc
from contextlib import contextmanager
from functools import wraps

import pytest
import torch
from conftest import NO_ENGINE, make_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qarl_trl.export import quantization_config, save_low_bit
from qarl_trl.quant import (
    apply_quantization,
    iter_low_bit_weights,
    quantize,
    quantized_modules,
    remove_quantization,
)
from qarl_trl.quant.gemms import gemm
from qarl_trl.quant.layers.frozen import AdapterMatmul, adapter_tensors, align_adapters
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.scheme import resolve_config, resolve_scheme, single_group
from qarl_trl.quant.source import quantized_source
from qarl_trl.quant.start import load_frozen_base
from quant.schemes import copies, names_in, relative_error, same_bytes, same_tensors
from quant.toy_layers import make_gradient, names_with_gradient, trained_parameters


TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
SCHEMES = ["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "W8A8", "W4A8"]
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a Qwen2, which has biases, in a scheme; "none": as it is."""
    folder = tmp_path_factory.mktemp("frozen")

    def get(scheme="W4A16"):
        if not (folder / scheme).exists():
            model = make_model("qwen2", dtype=torch.bfloat16)
            if scheme == "none":
                model.save_pretrained(folder / scheme)
            else:
                save_low_bit(apply_quantization(model, scheme), None, folder / scheme)
        return folder / scheme

    return get


def frozen_model(folder, scheme=None, **changes):
    """A frozen base with adapters; `scheme` is for a folder that is not quantized."""
    source = quantized_source(str(folder))
    if source is None:
        plan = single_group(resolve_scheme(scheme), ["Linear"], ["lm_head"])
    else:
        plan = source.plan()
    return with_adapters(load_frozen_base(str(folder), resolve_config(plan)), **changes)


def with_adapters(model, **changes):
    """Adapters of a trained one's size, with scaling 4, on three kinds of layers."""
    # Of attention and MLP, with and without a bias, wider and narrower than their input.
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj", "down_proj"]} | changes
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                # peft begins with zeros, which would make the base alone pass the tests.
                param.normal_(std=0.05)

    align_adapters(model)
    return model


def layer_of(model, name=LAYER):
    return model.get_base_model().get_submodule(name)


def factors_of(layer):
    """A and B of a layer."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def stream_of(model):
    return dict(iter_low_bit_weights(model))


def bfloat16_input(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Forward ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", [LAYER, "model.layers.1.self_attn.q_proj"])
def test_the_forward_is_the_low_bit_product_and_the_adapter_beside_it(checkpoint, scheme, name):
    model = frozen_model(checkpoint(scheme))
    layer = layer_of(model, name)
    x = bfloat16_input(2, 5, 128)

    y = layer(x)

    base = layer.base_layer
    low_bit_product, _ = base.gemm_for(base.scheme, x.device).forward(x, base.low_bit(), base.bias)
    lora_A, lora_B = factors_of(layer)
    used_A = lora_A.bfloat16().float()
    used_B = lora_B.bfloat16().float()
    exact = low_bit_product.float() + (x.float() @ used_A.t()) @ (used_B * 4.0).t()
    assert y.dtype == torch.bfloat16
    # Four roundings to bfloat16, of 2^-9 each; measured 0.002.
    assert relative_error(y, exact) < 2**-8
    assert relative_error(low_bit_product, exact) > 0.1  # control: the base alone

    with model.disable_adapter():
        assert torch.equal(layer(x), low_bit_product)


def test_a_learner_in_float32_computes_the_same(checkpoint):
    """Without autocast the input is float32, and the adapter rounds as the engine all the same."""
    layer = layer_of(frozen_model(checkpoint()))
    x = bfloat16_input(7, 128)

    assert relative_error(layer(x.float()), layer(x)) < 2**-7


# The rank to which an engine pads adapters with zeros.
ENGINE_RANK = 64


def adapter_product_of_engine(x, lora_A, lora_B):
    """`B (A x)` by the operations of vLLM's CPU engine."""
    operations = pytest.importorskip("vllm.lora.ops.torch_ops")
    rank, inputs = lora_A.shape
    outputs = len(lora_B)
    padded_A = torch.zeros(1, ENGINE_RANK, inputs).bfloat16()
    padded_B = torch.zeros(1, outputs, ENGINE_RANK).bfloat16()
    padded_A[0, :rank] = lora_A
    padded_B[0, :, :rank] = lora_B

    inner = torch.empty(len(x), ENGINE_RANK)
    y = x.new_zeros(len(x), outputs)
    adapter_of_row = torch.zeros(len(x)).long()
    operations.bgmv_shrink(x, padded_A, inner, adapter_of_row, 1.0)
    operations.bgmv_expand(inner, padded_B, y, adapter_of_row, add_inputs=True)
    return y


# Without AVX-512 an operation of torch adds up in another order: 1 of 49,664 results was one rounding apart.
@pytest.mark.avx512
@pytest.mark.skipif(NO_ENGINE is not None, reason=str(NO_ENGINE))
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (896, 128), (1536, 576)])
def test_the_adapter_has_the_bits_of_the_cpu_engines_operations(inputs, outputs, rank):
    """They depend neither on the number of tokens nor on the zeros that an engine pads the rank with."""
    x = bfloat16_input(97, inputs)
    lora_A = bfloat16_input(rank, inputs)
    lora_B = bfloat16_input(outputs, rank)

    y = AdapterMatmul.apply(x, lora_A, lora_B, 1.0)

    assert torch.equal(y, adapter_product_of_engine(x, lora_A, lora_B))
    row_by_row = [adapter_product_of_engine(row, lora_A, lora_B) for row in x[:8].split(1)]
    assert torch.equal(y[:8], torch.cat(row_by_row))

    # Control: `A x` that is not rounded before B. With rank 1 it happens to be the same.
    if rank > 1:
        unrounded = (x.float() @ lora_A.float().t()) @ lora_B.float().t()
        assert not torch.equal(y, unrounded.bfloat16())


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_gradients_are_those_of_the_sum(checkpoint, scheme):
    layer = layer_of(frozen_model(checkpoint(scheme)))
    x = bfloat16_input(7, 128).float().requires_grad_()
    grad = make_gradient(7, layer.out_features)

    (layer(x) * grad).sum().backward()

    # In float64, by the factors as the forward rounds them.
    weight = dequantize(layer.base_layer.low_bit(), torch.float32).double()
    lora_A, lora_B = factors_of(layer)
    used_A = lora_A.detach().bfloat16().double()
    used_B = lora_B.detach().bfloat16().double()
    rows = x.detach().double()
    grad = grad.double()
    assert relative_error(x.grad, grad @ weight + 4 * (grad @ used_B) @ used_A) < 1e-6
    assert relative_error(lora_A.grad, 4 * (grad @ used_B).t() @ rows) < 1e-6
    assert relative_error(lora_B.grad, 4 * grad.t() @ (rows @ used_A.t())) < 1e-6

    # Control: without the adapter's part.
    assert relative_error(x.grad, grad @ weight) > 0.05
    assert names_with_gradient(layer) == ["lora_A.default.weight", "lora_B.default.weight"]


# What is alive ------------------------------------------------------------------------------------------------------


# Of gate, up and down: no other tensor has so many entries.
SIZE_OF_MLP = 256 * 128


def matrices_alive():
    """Addresses and shapes of the tensors in bfloat16 or float32 that have the size of an MLP's weight."""
    alive = {}
    for thing in gc.get_objects():
        # Not subclasses, whose attributes may compute something.
        if type(thing) not in (torch.Tensor, torch.nn.Parameter) or thing.is_meta:
            continue
        if thing.is_floating_point() and thing.itemsize > 1 and thing.numel() == SIZE_OF_MLP:
            alive[thing.untyped_storage().data_ptr()] = tuple(thing.shape)
    return alive


@contextmanager
def only_new_objects():
    """Inside, `gc.get_objects` has only what was made there."""
    gc.collect()
    # Models of other tests are alive, too.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("scheme", "source"), [("W4A16", "none"), ("W4A16", "W4A16"), ("FP8_DYNAMIC", "FP8_DYNAMIC")])
def test_no_second_matrix_of_the_base_is_ever_alive(checkpoint, scheme, source, monkeypatch):
    """While a checkpoint loads (one in bfloat16, too), after each gemm of forward and backward, and after a step."""
    folder = checkpoint(source)
    counts = []

    def counting(function):
        @wraps(function)
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            counts.append(len(matrices_alive()))
            return result

        return call

    # Every place where a high-precision matrix is made or read.
    dequantize_counting = counting(quantize.dequantize)
    monkeypatch.setattr(gemm, "dequantize", dequantize_counting)
    monkeypatch.setattr(quantize, "dequantize", dequantize_counting)
    monkeypatch.setattr("qarl_trl.quant.source.quantize_weight", counting(quantize.quantize_weight))

    with only_new_objects():
        model = frozen_model(folder, scheme)
        optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)
        before = copies(iter_low_bit_weights(model))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, labels=TOKENS).loss
        assert not matrices_alive()
        loss.backward()
        assert not matrices_alive()
        optimizer.step()
        assert not matrices_alive()

        assert max(counts) == 1  # control: those in between are seen
        assert same_tensors(stream_of(model), before)

        # Control: with master weights all of them are there.
        merged = apply_quantization(make_model("qwen2"), scheme)
        matrices = fnmatch.filter(names_in(merged.named_parameters()), "*mlp.*weight")
        assert len(matrices_alive()) == len(matrices) == 6


def move_to_float32(model):
    return model.to(torch.float32)


def move_to_cpu(model):
    return model.to("cpu")


def test_the_model_moves_and_keeps_its_dtypes(checkpoint):
    model = frozen_model(checkpoint("FP8_DYNAMIC"))
    before = {}
    for name, tensor in iter_low_bit_weights(model):
        if "_proj.weight" in name:
            before[name] = tensor
    assert before

    # What a trainer and accelerate do to a model. A scale that became float32 would be another checkpoint.
    for move in (move_to_float32, move_to_cpu, copy.deepcopy):
        model = move(model)
        after = stream_of(model)
        for name, tensor in before.items():
            assert same_bytes(after[name], tensor), (move, name)

    assert not fnmatch.filter(layer_of(model).base_layer.state_dict(), "*weight*")


# Streams ------------------------------------------------------------------------------------------------------------


def test_the_stream_of_a_frozen_model_is_its_checkpoint(checkpoint):
    model = frozen_model(checkpoint())

    assert same_tensors(stream_of(model), load_file(checkpoint() / "model.safetensors"))
    assert quantization_config(model)["ignore"] == ["lm_head"]
    assert len(dict(quantized_modules(model))) == 14


def test_the_stream_of_the_adapter_has_scaled_factors(checkpoint):
    model = frozen_model(checkpoint())
    weight = model.get_parameter(f"base_model.model.{LAYER}.lora_B.default.weight")
    name = f"base_model.model.{LAYER}.lora_B.weight"

    # Two factors for three kinds of layers in two blocks.
    adapter = dict(adapter_tensors(model))
    assert len(adapter) == 12
    assert torch.equal(adapter[name], weight.bfloat16() * 4)

    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(dict(adapter_tensors(model))[name], weight.bfloat16() * 4)


def test_a_disabled_adapter_is_not_sent(checkpoint):
    model = frozen_model(checkpoint())

    with model.disable_adapter(), pytest.raises(RuntimeError, match="adapter is disabled"):
        list(adapter_tensors(model))


def test_a_layer_that_gets_an_adapter_later_is_not_left_out(checkpoint):
    """The forward would add it, and the engine would not have it."""
    model = frozen_model(checkpoint())
    model.add_adapter("late", LoraConfig(target_modules=["k_proj"]))

    with pytest.raises(RuntimeError, match="k_proj' got an adapter after the trainer was made"):
        list(adapter_tensors(model))


# What is refused ----------------------------------------------------------------------------------------------------


def order_activations(tensors):
    tensors[f"{LAYER}.weight_g_idx"] = torch.zeros(128, dtype=torch.int32)


def store_scales_as_float32(tensors):
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"].float()


def lose_scales(tensors):
    del tensors[f"{LAYER}.weight_scale"]


def store_in_high_precision(tensors):
    """It must not be quantized in silence."""
    for name in list(tensors):
        if name.startswith(f"{LAYER}.weight"):
            del tensors[name]
    # The shape is right.
    tensors[f"{LAYER}.weight"] = torch.ones(256, 128)


def lose_a_norm(tensors):
    del tensors["model.norm.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (order_activations, "actorder: group"),
        (store_scales_as_float32, "stored as .*bfloat16.* got .*float32"),
        (lose_scales, "weight_scale is missing"),
        (store_in_high_precision, "weight_scale is missing"),
        (lose_a_norm, "model.norm.weight.*are missing"),
    ],
)
def test_a_checkpoint_that_is_stored_otherwise_is_refused(checkpoint, tmp_path, change, words):
    tensors = load_file(checkpoint() / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # The config says what must be stored, and the file has something else.
    (tmp_path / "config.json").write_text((checkpoint() / "config.json").read_text())

    with pytest.raises(ValueError, match=words):
        frozen_model(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "kind", "words"),
    [("NVFP4A16", "qwen2", "does not go with LoRA"), ("W4A16", "qwen3_moe", "got the experts 'model.layers.0.mlp.ex")],
)
def test_a_base_that_cannot_be_frozen_is_refused(tmp_path, scheme, kind, words):
    make_model(kind, dtype=torch.bfloat16).save_pretrained(tmp_path)

    with pytest.raises(ValueError, match=words):
        frozen_model(tmp_path, scheme)


def test_an_adapter_on_a_layer_in_high_precision_is_refused(checkpoint):
    with pytest.raises(ValueError, match="'lm_head'.*carries an adapter, but it is not quantized"):
        frozen_model(checkpoint(), target_modules=["lm_head", "q_proj"])


def test_a_frozen_model_has_the_loss_of_its_architecture(tmp_path):
    """transformers finds the loss by the name of the class that loads."""
    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    plan = single_group(resolve_scheme("W4A16"), ["Linear"], ["lm_head"])

    frozen = load_frozen_base(str(tmp_path), plan)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.loss_type == frozen.loss_type == "ForCausalLM"


def test_a_frozen_base_keeps_its_quantization(checkpoint):
    """Its layers became `nn.Linear`s without a weight, whose forward raised a TypeError."""
    model = frozen_model(checkpoint())
    with torch.no_grad():
        before = model(TOKENS).logits

    with pytest.raises(
        ValueError, match=r"frozen base without master weights \(first: '.*q_proj.*'\).*Load the model"
    ):
        remove_quantization(model)

    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, before)
    # Control: layers with master weights get their class back.
    dense = make_model("qwen2", dtype=torch.bfloat16)
    assert not dict(quantized_modules(remove_quantization(apply_quantization(dense, "W4A16"))))
