"""`qarl_trl.quant.lora`: the merged weight, its quantized values for three readers, gradients to A and B, and what is refused."""

import copy

import pytest
import references
import torch
from conftest import make_model
from peft import LoraConfig, get_peft_model
from slow.isolated import isolated_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qarl_trl.quant import (
    apply_quantization,
    iter_low_bit_weights,
    low_bit_store,
    matmul,
    quantize_weight,
    remove_quantization,
)
from qarl_trl.quant.activations import quantize_tokens_fp8
from qarl_trl.quant.gemm import dequantize, plain_gemm
from qarl_trl.quant.lora import merged_weight
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from quant.schemes import relative_error, same_tensors


SCHEMES = ["W4A16", "FP8_DYNAMIC"]
TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def adapted(model, seed=3, **changes):
    """`model` with adapters whose B is not zero: of the size of a trained one, or the base alone would pass the tests."""
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.0}
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings | changes))
    randomize(model)
    return model


def randomize(model, scale=0.05, adapter="default"):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name and f".{adapter}." in name:
                p.normal_(std=scale)


def make_layer(scheme="W4A16", bias=False, dtype=torch.float32, seed=0, quantize_forward=True, **changes):
    """One adapted low-bit layer, 128 to 24."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 24, bias=bias).to(dtype))
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["0"]} | changes
    model = get_peft_model(model, LoraConfig(**settings))
    randomize(model)
    apply_quantization(model, scheme, quantize_forward=quantize_forward)
    return model.base_model.model[0]


def make_input(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)


def factors(layer, adapter="default"):
    return layer.base_layer.weight, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


# The merged weight --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}]
)
def test_quantized_are_those_of_pefts_own_merge(tiny_model, changes):
    """The oracle: `merge_and_unload` of the same model with bfloat16 values, quantized as a plain model."""
    model = adapted(tiny_model(), **changes)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for p in rounded.parameters():
            p.copy_(p.bfloat16())
    expected = dict(iter_low_bit_weights(apply_quantization(rounded.merge_and_unload(), "W4A16")))
    found = dict(iter_low_bit_weights(apply_quantization(model, "W4A16")))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    # Control: the base alone has other quantized values in every adapted layer, and in no other.
    base = dict(iter_low_bit_weights(apply_quantization(tiny_model(), "W4A16")))
    differing = {name for name in base if not torch.equal(found[name], base[name])}
    assert {n.split(".")[-2] for n in differing} == {"q_proj", "v_proj", "down_proj"}
    assert len([n for n in differing if n.endswith("packed")]) == 6


def test_autocast_leaves_the_merged_weight_alone():
    w, a, b = torch.randn(24, 128), torch.randn(4, 128), torch.randn(24, 4)
    merged = merged_weight(w, a, b, 0.75)
    assert merged.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged_weight(w, a, b, 0.75), merged)
        # Control: what autocast does to the product.
        assert not torch.equal((w.bfloat16() + (b.bfloat16() @ a.bfloat16()) * 0.75).float(), merged)


# Forward ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", [*SCHEMES, "W4A8", "W4AFP8"])
def test_forward_multiplies_by_the_quantized_merged_weight(scheme, bias):
    layer, x = make_layer(scheme, bias=bias), make_input(2, 5)
    w, a, b = factors(layer)
    weight = quantize_weight(merged_weight(w, a, b, 4.0), layer.scheme)
    kernel = plain_gemm(layer.scheme, x.device)
    assert torch.equal(layer(x), kernel.forward(x, weight, layer.base_layer.bias)[0])
    # Control: the low-bit base and the adapter beside it, which is what quantizing `base_layer` alone would compute.
    # Measured 0.008 with eight bits, more with four.
    beside = kernel.forward(x, quantize_weight(w, layer.scheme))[0] + x @ a.t() @ b.t() * 4
    assert relative_error(beside, layer(x)) > 1e-3


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_the_straight_through_ones(scheme):
    layer, x = make_layer(scheme, bias=True), make_input(7).requires_grad_()
    grad = torch.randn(7, 24, generator=torch.Generator().manual_seed(2))
    (layer(x) * grad).sum().backward()
    w, a, b = factors(layer)
    used, low_bit_weight = x.detach(), dequantize(layer.low_bit(), torch.float32)
    if scheme == "FP8_DYNAMIC":
        quantized, scale = quantize_tokens_fp8(x.detach())
        used = quantized.float() * scale
    grad_x, grad_merged = references.straight_through(used, low_bit_weight, grad)
    # The chain rule through W + 4 B A at the values that were merged.
    expected_a = 4.0 * b.detach().bfloat16().double().t() @ grad_merged
    expected_b = 4.0 * grad_merged @ a.detach().bfloat16().double().t()
    # Measured 2e-7: float32 sums, through the rank, against float64 ones through the full matrix.
    assert relative_error(x.grad, grad_x) < 1e-6
    assert relative_error(a.grad, expected_a) < 1e-6
    assert relative_error(b.grad, expected_b) < 1e-6
    assert w.grad is None and layer.base_layer.bias.grad is None

    # Control: a gradient at the base weight's quantized values, or without the scaling.
    base = dequantize(quantize_weight(w, layer.scheme), torch.float32)
    assert relative_error(references.straight_through(used, base, grad)[0], grad_x) > 0.01
    assert relative_error(b.grad, expected_b / 4) > 0.5


def test_a_step_moves_quantized_and_leaves_the_base_bit_for_bit(tiny_model):
    model = apply_quantization(adapted(tiny_model()), "W4A16")
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: t.clone() for n, t in iter_low_bit_weights(model)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = dict(iter_low_bit_weights(model))
    parameters = dict(model.named_parameters())
    assert base and all(torch.equal(parameters[n], value) for n, value in base.items())
    changed = {n.split(".")[-2] for n in before if not torch.equal(before[n], after[n])}
    assert changed == {"q_proj", "v_proj", "down_proj"}

    # Control: peft's merge and unmerge, which TRL's own sync does, leaves another base.
    plain = adapted(tiny_model())
    weight = plain.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    kept = weight.detach().clone()
    plain.merge_adapter()
    plain.unmerge_adapter()
    assert not torch.equal(weight, kept)


# Adapters on, off and exchanged -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_disabled_adapter_leaves_the_low_bit_base(tiny_model, scheme):
    model = apply_quantization(adapted(tiny_model()), scheme)
    base = apply_quantization(tiny_model(), scheme)
    enabled = model(TOKENS).logits
    with model.disable_adapter():
        assert torch.equal(model(TOKENS).logits, base(TOKENS).logits)
    assert torch.equal(model(TOKENS).logits, enabled)
    assert not torch.equal(enabled, base(TOKENS).logits)  # control
    high = tiny_model()(TOKENS).logits
    assert not torch.equal(base(TOKENS).logits, high)  # control: low-bit, not high precision


def test_a_sync_with_adapters_disabled_is_an_error(tiny_model):
    model = apply_quantization(adapted(tiny_model()), "W4A16")
    with model.disable_adapter(), pytest.raises(RuntimeError, match="instead of the policy"):
        list(iter_low_bit_weights(model))


def test_another_adapter_has_its_own_quantized(tiny_model):
    """As TRL keeps a frozen copy of a given adapter, "ref", for reference log-probs."""
    model = adapted(tiny_model())
    model.add_adapter("ref", model.peft_config["default"])
    randomize(model, adapter="ref")
    apply_quantization(model, "W4A16")
    first = model(TOKENS).logits
    quantized = {name: t.clone() for name, t in iter_low_bit_weights(model)}
    model.set_adapter("ref")
    second = model(TOKENS).logits
    only = adapted(tiny_model())
    with torch.no_grad():
        for name, p in only.named_parameters():
            if ".default." in name:
                p.copy_(model.get_parameter(name.replace(".default.", ".ref.")))
    assert torch.equal(apply_quantization(only, "W4A16")(TOKENS).logits, second)
    assert not torch.equal(first, second)
    model.set_adapter("default")
    assert torch.equal(model(TOKENS).logits, first)
    assert all(torch.equal(t, quantized[name]) for name, t in iter_low_bit_weights(model))


def test_adapters_that_are_not_one_beside_the_base_stop_the_forward(tiny_model):
    model = adapted(tiny_model())
    model.add_adapter("other", model.peft_config["default"])
    apply_quantization(model, "W4A16")
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"Several adapters are active.*set_adapter\('default'\)"):
        model(TOKENS)
    model.set_adapter("default")
    model.merge_adapter()
    with pytest.raises(RuntimeError, match=r"would count twice.*unmerge_adapter"):
        model(TOKENS)


# When quantized values are made anew -------------------------------------------------------------------------------------------


def count_quantizations(monkeypatch):
    calls = []

    def counted(weight, scheme, *args):
        calls.append(tuple(weight.shape))
        return quantize_weight(weight, scheme, *args)

    monkeypatch.setattr("qarl_trl.quant.store.quantize_weight", counted)
    return calls


def test_quantized_are_made_once_per_step_and_those_of_frozen_layers_once(tiny_model, monkeypatch):
    calls = count_quantizations(monkeypatch)
    model = apply_quantization(adapted(tiny_model()), "W4A16")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    low_bit_store(model).follow(optimizer)
    for expected in (14, 6, 6):  # all layers, then those with an adapter
        calls.clear()
        for _ in range(2):
            model(TOKENS, labels=TOKENS).loss.backward()
        assert len(calls) == expected
        list(iter_low_bit_weights(model))
        assert len(calls) == expected + 14  # a sync takes all weights as they are
        optimizer.step()
    calls.clear()
    for _ in range(3):
        with torch.no_grad(), model.disable_adapter():
            model(TOKENS)
    assert len(calls) == 6  # the base of the adapted layers, kept beside the policy's quantized values
    model(TOKENS)
    assert len(calls) == 12
    optimizer.step()
    calls.clear()
    with torch.no_grad(), model.disable_adapter():
        model(TOKENS)
    assert not calls


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.lora_A["default"].weight.copy_(torch.ones(4, 128)),
        lambda layer: layer.lora_B["default"].weight.mul_(2.0),
        lambda layer: layer.base_layer.weight.mul_(2.0),
        lambda layer: layer.scale_layer(3.0),
    ],
    ids=["A", "B", "base", "scaling"],
)
def test_quantized_follow_every_source(change):
    layer = make_layer()
    layer.store.will_be_told()
    before = layer.low_bit()
    assert layer.low_bit() is before
    with torch.no_grad():
        change(layer)
    expected = quantize_weight(merged_weight(*factors(layer), layer.scaling["default"]), layer.scheme)
    assert same_tensors(layer.low_bit().tensors, expected.tensors)
    assert not same_tensors(layer.low_bit().tensors, before.tensors)


# The model around ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_stream_is_what_the_forward_multiplies_with(tiny_model, scheme, monkeypatch):
    model = apply_quantization(adapted(tiny_model("qwen2")), scheme)
    used, apply = [], matmul.LowBitMatmul.apply
    spy = lambda *args: used.extend(args[2].tensors.values()) or apply(*args)  # noqa: E731
    monkeypatch.setattr(matmul.LowBitMatmul, "apply", spy)
    low_bit_store(model).will_be_told()
    stream = dict(iter_low_bit_weights(model))
    model(TOKENS)
    assert len(used) == 14 * (3 if scheme == "W4A16" else 2)
    assert {id(t) for t in used} <= {id(t) for t in stream.values()}
    plain = dict(iter_low_bit_weights(apply_quantization(tiny_model("qwen2"), scheme)))
    assert stream.keys() == plain.keys()
    assert torch.equal(stream["model.layers.0.self_attn.q_proj.bias"], plain["model.layers.0.self_attn.q_proj.bias"])


def test_state_dict_and_parameters_are_those_of_the_peft_model(tiny_model):
    plain, model = adapted(tiny_model()), adapted(tiny_model())
    apply_quantization(model, "W4A16")
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    restored = remove_quantization(copy.deepcopy(model))
    assert torch.equal(restored(TOKENS).logits, plain(TOKENS).logits)
    assert [type(m) for m in restored.modules()] == [type(m) for m in plain.modules()]


def test_adapters_on_attention_go_with_low_bit_experts(tiny_model):
    model = adapted(tiny_model("qwen3_moe"), target_modules=["q_proj", "o_proj"])
    apply_quantization(model, "W4A16", ignore=DEFAULT_IGNORE)
    model(TOKENS, labels=TOKENS).loss.backward()
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.grad is not None} == {"lora_A", "lora_B"}
    stream = dict(iter_low_bit_weights(model))
    base = dict(iter_low_bit_weights(apply_quantization(tiny_model("qwen3_moe"), "W4A16", ignore=DEFAULT_IGNORE)))
    assert stream.keys() == base.keys()
    assert any("experts" in name and name.endswith("weight_packed") for name in stream)
    changed = {name.split(".")[-2] for name in stream if not torch.equal(stream[name], base[name])}
    assert changed == {"q_proj", "o_proj"}


def test_modules_to_save_are_synced_as_trained(tiny_model):
    model = apply_quantization(adapted(tiny_model(), modules_to_save=["lm_head"]), "W4A16")
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(3.0)
    stream = dict(iter_low_bit_weights(model))
    assert torch.equal(stream["lm_head.weight"], (tiny_model().lm_head.weight * 3.0).bfloat16())
    assert stream.keys() == dict(iter_low_bit_weights(apply_quantization(tiny_model(), "W4A16"))).keys()


# Sharded master weights ----------------------------------------------------------------------------------------------------


def sharded_run(folder):
    """FSDP2 over two processes, bfloat16 in the forward, float32 in the shards; rank 0 writes what was computed with."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = adapted(make_model())
    apply_quantization(model, "W4A16")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    store = low_bit_store(model)
    store.follow(optimizer)
    used = {}
    for step in range(2):
        # The first step has no sync before it.
        streams = [dict(iter_low_bit_weights(model))] if step else []
        model(TOKENS, labels=TOKENS).loss.backward()
        assert len(store.kept()) == len(list(store.layers()))
        for name, used_one in store.kept().items():
            layer = name.rpartition(".")[0]
            used |= {f"{layer}.{local}": t for local, t in used_one.tensors.items()}
        streams.append(dict(iter_low_bit_weights(model)))
        for stream in streams:
            assert all(torch.equal(stream[n.removeprefix("base_model.model.")], t) for n, t in used.items())
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with_grad = [name for name, p in model.named_parameters() if p.grad is not None]
    if torch.distributed.get_rank() == 0:
        torch.save((streams[-1], with_grad), f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_under_fsdp2_forward_and_sync_share_the_quantized_of_one_process(tiny_model, tmp_path):
    isolated_group(sharded_run, 2, str(tmp_path))
    stream, with_grad = torch.load(tmp_path / "found.pt")
    assert len(with_grad) == 12 and all("lora_" in name for name in with_grad)
    model = apply_quantization(adapted(tiny_model()), "W4A16")
    before = dict(iter_low_bit_weights(model))
    frozen = [
        n for n in before if n.endswith("weight_packed") and n.split(".")[-2] not in ("q_proj", "v_proj", "down_proj")
    ]
    assert frozen and all(torch.equal(stream[n], before[n]) for n in frozen)
    assert stream.keys() == before.keys()
    assert not torch.equal(
        stream["model.layers.0.mlp.down_proj.weight_packed"], before["model.layers.0.mlp.down_proj.weight_packed"]
    )


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout=0.1.*engine's weight"),
        ({"target_modules": ["embed_tokens"]}, r"'model\.embed_tokens'.*not quantized"),
        ({"modules_to_save": ["up_proj"]}, r"modules_to_save trains a copy of 'model\.layers\.0\.mlp\.up_proj'"),
    ],
)
def test_adapters_that_cannot_be_aligned_are_refused(tiny_model, changes, words):
    with pytest.raises(ValueError, match=words):
        apply_quantization(adapted(tiny_model(), **changes), "W4A16")
