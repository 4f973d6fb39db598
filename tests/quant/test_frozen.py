"""`qarl_trl.quant.frozen`: `Q(W) x + s B (A x)`, its gradients, what of the base is alive, and the kernels it follows."""

import copy
import gc

import pytest
import torch
from conftest import NO_ENGINE, make_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from qarl_trl.export import quantization_config, save_low_bit
from qarl_trl.quant import apply_quantization, gemm, iter_low_bit_weights, quantize, quantized_modules, start
from qarl_trl.quant.frozen import AdapterMatmul, adapter_tensors, align_adapters
from qarl_trl.quant.gemm import dequantize
from qarl_trl.quant.scheme import resolve_config, resolve_scheme, single_group
from qarl_trl.quant.start import load_master_weights, quantized_source
from quant.schemes import relative_error, same_bytes


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


def frozen(folder, scheme=None, **changes):
    """A frozen model with adapters of a trained one's size on three kinds of layers."""
    source = quantized_source(str(folder))
    plan = source.plan() if source else single_group(resolve_scheme(scheme), ["Linear"], ["lm_head"])
    return adapted(load_master_weights(str(folder), freeze=resolve_config(plan)), **changes)


def adapted(model, **changes):
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj", "down_proj"]} | changes
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    align_adapters(model)
    return model


def layer_of(model, name=LAYER):
    return model.get_base_model().get_submodule(name)


def random_input(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Forward ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", [LAYER, "model.layers.1.self_attn.q_proj"])
def test_the_forward_is_the_low_bit_product_and_the_adapter_beside_it(checkpoint, scheme, name):
    model = frozen(checkpoint(scheme))
    layer, x = layer_of(model, name), random_input(2, 5, 128)
    base = layer.base_layer
    y, _ = base.gemm_for(base.scheme, x.device).forward(x, base.low_bit(), base.bias)
    a, b = (getattr(layer, factor)["default"].weight.bfloat16() for factor in ("lora_A", "lora_B"))
    exact = y.float() + (x.float() @ a.float().t()) @ (b.float() * 4.0).t()
    found = layer(x)
    assert found.dtype == torch.bfloat16
    # Four roundings to bfloat16, of 2^-9 each; measured 0.002.
    assert relative_error(found, exact) < 2**-8
    assert relative_error(y, exact) > 0.1  # control: the base alone
    with model.disable_adapter():
        assert torch.equal(layer(x), y)


def test_a_learner_in_float32_computes_the_same(checkpoint):
    """Without autocast the input is float32, and the adapter rounds as the engine all the same."""
    layer, x = layer_of(frozen(checkpoint())), random_input(7, 128)
    assert relative_error(layer(x.float()), layer(x)) < 2**-7


@pytest.mark.skipif(NO_ENGINE is not None, reason=str(NO_ENGINE))
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (896, 128), (1536, 576)])
def test_the_adapter_has_the_bits_of_the_cpu_engines_operations(inputs, outputs, rank):
    """They depend neither on the number of tokens nor on the zeros that an engine pads the rank with."""
    operations = pytest.importorskip("vllm.lora.ops.torch_ops")
    x, lora_a, lora_b = random_input(97, inputs), random_input(rank, inputs), random_input(outputs, rank)
    padded_a, padded_b = torch.zeros(1, 64, inputs).bfloat16(), torch.zeros(1, outputs, 64).bfloat16()
    padded_a[0, :rank], padded_b[0, :, :rank] = lora_a, lora_b

    def engine(rows):
        inner, y, first = torch.empty(len(rows), 64), rows.new_zeros(len(rows), outputs), torch.zeros(len(rows)).long()
        operations.bgmv_shrink(rows, padded_a, inner, first, 1.0)
        operations.bgmv_expand(inner, padded_b, y, first, add_inputs=True)
        return y

    found = AdapterMatmul.apply(x, lora_a, lora_b, 1.0)
    assert torch.equal(found, engine(x))
    assert torch.equal(found[:8], torch.cat([engine(row) for row in x[:8].split(1)]))
    # Control: `A x` that is not rounded before B.
    assert not torch.equal(found, ((x.float() @ lora_a.float().t()) @ lora_b.float().t()).bfloat16()) or rank == 1


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
def test_gradients_are_those_of_the_sum(checkpoint, scheme):
    layer = layer_of(frozen(checkpoint(scheme)))
    x = random_input(7, 128).float().requires_grad_()
    grad = torch.randn(7, layer.out_features, generator=torch.Generator().manual_seed(2))
    (layer(x) * grad).sum().backward()
    weight = dequantize(layer.base_layer.low_bit(), torch.float32).double()
    a, b = (getattr(layer, factor)["default"].weight for factor in ("lora_A", "lora_B"))
    used_a, used_b, rows, grad = (
        (t.detach().bfloat16().double() for t in (a, b)),
        None,
        x.detach().double(),
        grad.double(),
    )
    used_a, used_b = used_a
    expected_x = grad @ weight + 4 * (grad @ used_b) @ used_a
    assert relative_error(x.grad, expected_x) < 1e-6
    assert relative_error(a.grad, 4 * (grad @ used_b).t() @ rows) < 1e-6
    assert relative_error(b.grad, 4 * grad.t() @ (rows @ used_a.t())) < 1e-6
    # Control: without the adapter's part.
    assert relative_error(x.grad, grad @ weight) > 0.05
    assert [n for n, p in layer.named_parameters() if p.grad is not None] == [
        "lora_A.default.weight",
        "lora_B.default.weight",
    ]


# What is alive ------------------------------------------------------------------------------------------------------


def alive(size):
    """Floating tensors of 2 bytes and more an element that have the size of a layer's weight."""
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_meta]
    wide = [t for t in tensors if t.is_floating_point() and t.itemsize > 1 and t.numel() == size]
    return {t.untyped_storage().data_ptr(): tuple(t.shape) for t in wide}


@pytest.mark.parametrize(("scheme", "source"), [("W4A16", "none"), ("W4A16", "W4A16"), ("FP8_DYNAMIC", "FP8_DYNAMIC")])
def test_no_second_matrix_of_the_base_is_ever_alive(checkpoint, scheme, source, monkeypatch):
    """While a checkpoint loads (one in bfloat16, too), after each gemm of forward and backward, and after a step."""
    folder, size, census = checkpoint(source), 256 * 128, []  # of gate, up and down: no other tensor has that many

    def counted(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            census.append(alive(size))
            return result

        return call

    for module in (gemm, quantize):
        monkeypatch.setattr(module, "dequantize", counted(quantize.dequantize))
    monkeypatch.setattr(start, "quantize_weight", counted(start.quantize_weight))
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        model = frozen(folder, scheme)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        before = {name: tensor.clone() for name, tensor in iter_low_bit_weights(model)}
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, labels=TOKENS).loss
        assert not alive(size)
        loss.backward()
        assert not alive(size)
        optimizer.step()
        assert not alive(size)
        assert max(map(len, census)) == 1  # control: those in between are seen
        after = dict(iter_low_bit_weights(model))
        assert after.keys() == before.keys() and all(same_bytes(after[name], t) for name, t in before.items())
        merged = apply_quantization(make_model("qwen2"), scheme)
        assert (
            len(alive(size)) == len([n for n, _ in merged.named_modules() if "mlp." in n]) - 2
        )  # control: all are there
    finally:
        gc.unfreeze()


def test_the_model_moves_and_keeps_its_dtypes(checkpoint):
    model = frozen(checkpoint("FP8_DYNAMIC"))
    before = {name: tensor for name, tensor in iter_low_bit_weights(model) if "_proj.weight" in name}
    for move in (lambda m: m.to(torch.float32), lambda m: m.to("cpu"), copy.deepcopy):
        model = move(model)
        after = dict(iter_low_bit_weights(model))
        assert before and all(same_bytes(after[name], tensor) for name, tensor in before.items())
    assert not any("weight" in name for name in layer_of(model).base_layer.state_dict())


# Streams ------------------------------------------------------------------------------------------------------------


def test_base_and_adapter_are_two_streams(checkpoint):
    model = frozen(checkpoint())
    base, adapter = dict(iter_low_bit_weights(model)), dict(adapter_tensors(model))
    stored = load_file(checkpoint() / "model.safetensors")
    assert base.keys() == stored.keys() and all(same_bytes(base[name], t) for name, t in stored.items())
    assert quantization_config(model)["ignore"] == ["lm_head"]
    layers = dict(quantized_modules(model))
    assert len(layers) == 14 and len(adapter) == 12
    name = f"base_model.model.{LAYER}.lora_B.weight"
    weight = model.get_parameter(f"base_model.model.{LAYER}.lora_B.default.weight")
    assert torch.equal(adapter[name], weight.bfloat16() * 4)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(dict(adapter_tensors(model))[name], weight.bfloat16() * 4)
    with model.disable_adapter(), pytest.raises(RuntimeError, match="adapter is disabled"):
        list(adapter_tensors(model))


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({f"{LAYER}.weight_g_idx": torch.zeros(128, dtype=torch.int32)}), "actorder: group"),
        (
            lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].float()}),
            "stored as .*bfloat16.* got .*float32",
        ),
        (lambda t: t.pop(f"{LAYER}.weight_scale"), "weight_scale is missing"),
        (  # it must not be quantized in silence
            lambda t: (
                [t.pop(name) for name in list(t) if name.startswith(f"{LAYER}.weight")]
                and t.update({f"{LAYER}.weight": torch.ones(256, 128)})
            ),
            "weight_scale is missing",
        ),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight.*are missing"),
    ],
)
def test_a_checkpoint_that_is_stored_otherwise_is_refused(checkpoint, tmp_path, change, words):
    tensors = load_file(checkpoint() / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((checkpoint() / "config.json").read_text())
    with pytest.raises(ValueError, match=words):
        frozen(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "kind", "words"),
    [("NVFP4A16", "qwen2", "does not go with LoRA"), ("W4A16", "qwen3_moe", "got the experts 'model.layers.0.mlp.ex")],
)
def test_a_base_that_cannot_be_frozen_is_refused(tmp_path, scheme, kind, words):
    make_model(kind, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        frozen(tmp_path, scheme)


def test_an_adapter_on_a_layer_in_high_precision_is_refused(checkpoint):
    with pytest.raises(ValueError, match="'lm_head'.*carries an adapter, but it is not quantized"):
        frozen(checkpoint(), target_modules=["lm_head", "q_proj"])
