"""`qarl_trl.quant.layers.lora`: the merged weight and its three readers, gradients to A and B, and what is refused."""

import copy
import fnmatch

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
    quantize_weight,
    remove_quantization,
)
from qarl_trl.quant.gemms.gemm import plain_gemm
from qarl_trl.quant.layers import matmul
from qarl_trl.quant.layers.lora import merged_weight
from qarl_trl.quant.quantize import dequantize
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from quant.schemes import copies, names_in, relative_error, same_tensors
from quant.toy_layers import (
    make_gradient,
    make_input,
    names_with_gradient,
    quantized_input,
    record_quantizations,
    trained_parameters,
)


SCHEMES = ["W4A16", "FP8_DYNAMIC"]
# Of attention and MLP, and not all of them: those without an adapter must stay as they are.
ADAPTED = ["q_proj", "v_proj", "down_proj"]
TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


def with_adapters(model, seed=3, **changes):
    """`model` with adapters whose B is as large as a trained one: with zeros the base alone would pass the tests."""
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ADAPTED, "lora_dropout": 0.0} | changes
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    randomize_factor_b(model)
    return model


def randomize_factor_b(model, adapter="default"):
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name and f".{adapter}." in name:
                param.normal_(std=0.05)


def make_layer(scheme="W4A16", bias=False):
    """One adapted low-bit layer, 128 to 24, with scaling 4, and its model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 24, bias=bias))
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["0"]))
    randomize_factor_b(model)
    apply_quantization(model, scheme)
    return model.base_model.model[0]


def sources_of(layer):
    """W, A and B of a layer."""
    return layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight


def stream_of(model):
    return dict(iter_low_bit_weights(model))


def copy_of_stream(model):
    return copies(iter_low_bit_weights(model))


def layer_kinds(names):
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight_packed`, for each name."""
    return {name.split(".")[-2] for name in names}


def differing_names(one, other):
    """The names of the tensors of `one` that are others in `other`."""
    return [name for name in one if not torch.equal(one[name], other[name])]


# The merged weight --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}]
)
def test_quantized_values_are_those_of_pefts_own_merge(tiny_model, changes):
    """The oracle: `merge_and_unload` of the same model with bfloat16 values, quantized as a plain model."""
    model = with_adapters(tiny_model(), **changes)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for param in rounded.parameters():
            # The values that are merged: peft merges whatever the parameters hold.
            param.copy_(param.bfloat16())

    expected = stream_of(apply_quantization(rounded.merge_and_unload(), "W4A16"))
    stream = stream_of(apply_quantization(model, "W4A16"))

    assert stream.keys() == expected.keys()
    assert not differing_names(expected, stream)

    # Control: the base alone has other quantized values in every adapted layer, and in no other.
    base = stream_of(apply_quantization(tiny_model(), "W4A16"))
    differing = differing_names(base, stream)
    assert layer_kinds(differing) == set(ADAPTED)
    assert len(fnmatch.filter(differing, "*packed")) == 6


def test_autocast_leaves_the_merged_weight_alone():
    weight = torch.randn(24, 128)
    lora_A = torch.randn(4, 128)
    lora_B = torch.randn(24, 4)
    merged = merged_weight(weight, lora_A, lora_B, 0.75)
    assert merged.dtype == torch.float32

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged_weight(weight, lora_A, lora_B, 0.75), merged)

        # Control: what autocast does to the product.
        by_autocast = weight.bfloat16() + (lora_B.bfloat16() @ lora_A.bfloat16()) * 0.75
        assert not torch.equal(by_autocast.float(), merged)


# Forward ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", [*SCHEMES, "W4A8", "W4AFP8"])
def test_forward_multiplies_by_the_quantized_merged_weight(scheme, bias):
    layer = make_layer(scheme, bias=bias)
    x = make_input(2, 5)
    weight, lora_A, lora_B = sources_of(layer)

    y = layer(x)

    gemm = plain_gemm(layer.scheme, x.device)
    merged = quantize_weight(merged_weight(weight, lora_A, lora_B, 4.0), layer.scheme)
    expected, _ = gemm.forward(x, merged, layer.base_layer.bias)
    assert torch.equal(y, expected)

    # Control: the low-bit base and the adapter beside it, which is what quantizing `base_layer` alone would compute.
    # Measured 0.008 with eight bits, more with four.
    base, _ = gemm.forward(x, quantize_weight(weight, layer.scheme))
    beside = base + x @ lora_A.t() @ lora_B.t() * 4
    assert relative_error(beside, y) > 1e-3


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_are_the_straight_through_ones(scheme):
    layer = make_layer(scheme, bias=True)
    weight, lora_A, lora_B = sources_of(layer)
    x = make_input(7).requires_grad_()
    grad = make_gradient(7, 24)

    (layer(x) * grad).sum().backward()

    multiplied_x = quantized_input(scheme, x.detach())
    low_bit_weight = dequantize(layer.low_bit(), torch.float32)
    expected_x, grad_merged = references.straight_through(multiplied_x, low_bit_weight, grad)
    # The chain rule through W + 4 B A at the values that were merged.
    merged_A = lora_A.detach().bfloat16().double()
    merged_B = lora_B.detach().bfloat16().double()
    expected_A = 4.0 * merged_B.t() @ grad_merged
    expected_B = 4.0 * grad_merged @ merged_A.t()

    # Measured 2e-7: float32 sums, through the rank, against float64 ones through the full matrix.
    assert relative_error(x.grad, expected_x) < 1e-6
    assert relative_error(lora_A.grad, expected_A) < 1e-6
    assert relative_error(lora_B.grad, expected_B) < 1e-6
    assert weight.grad is None
    assert layer.base_layer.bias.grad is None

    # Control: a gradient at the base weight's quantized values, or without the scaling.
    base = dequantize(quantize_weight(weight, layer.scheme), torch.float32)
    through_base, _ = references.straight_through(multiplied_x, base, grad)
    assert relative_error(through_base, expected_x) > 0.01
    assert relative_error(lora_B.grad, expected_B / 4) > 0.5


def test_a_step_moves_quantized_values_and_leaves_the_base_bit_for_bit(tiny_model):
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    base = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            base[name] = param.detach().clone()
    before = copy_of_stream(model)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)

    # Several steps, because merging and unmerging adds a rounding each time.
    for _ in range(3):
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = stream_of(model)

    assert base
    for name, value in base.items():
        assert torch.equal(model.get_parameter(name), value), name
    assert layer_kinds(differing_names(before, after)) == set(ADAPTED)


def test_pefts_merge_and_unmerge_leave_another_base(tiny_model):
    """Control of the test above: TRL's own sync merges and unmerges."""
    model = with_adapters(tiny_model())
    weight = model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    before = weight.detach().clone()

    model.merge_adapter()
    model.unmerge_adapter()

    assert not torch.equal(weight, before)


# Adapters on, off and exchanged -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_disabled_adapter_leaves_the_low_bit_base(tiny_model, scheme):
    model = apply_quantization(with_adapters(tiny_model()), scheme)
    enabled = model(TOKENS).logits

    with model.disable_adapter():
        disabled = model(TOKENS).logits

    base = apply_quantization(tiny_model(), scheme)(TOKENS).logits
    assert torch.equal(disabled, base)
    assert torch.equal(model(TOKENS).logits, enabled)
    assert not torch.equal(enabled, base)  # control
    assert not torch.equal(base, tiny_model()(TOKENS).logits)  # control: low-bit, not high precision


def test_a_sync_with_adapters_disabled_is_an_error(tiny_model):
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")

    with model.disable_adapter(), pytest.raises(RuntimeError, match="instead of the policy"):
        stream_of(model)


def test_another_adapter_has_its_own_quantized_values(tiny_model):
    """As TRL keeps a frozen copy of a given adapter, "ref", for reference log-probs."""
    model = with_adapters(tiny_model())
    model.add_adapter("ref", model.peft_config["default"])
    # Another B than the policy's, so that the two can be told apart.
    randomize_factor_b(model, adapter="ref")
    apply_quantization(model, "W4A16")
    policy_logits = model(TOKENS).logits
    policy_stream = copy_of_stream(model)

    model.set_adapter("ref")
    reference_logits = model(TOKENS).logits

    # A model whose only adapter has the factors of "ref".
    only_reference = with_adapters(tiny_model())
    with torch.no_grad():
        for name, param in only_reference.named_parameters():
            if ".default." in name:
                param.copy_(model.get_parameter(name.replace(".default.", ".ref.")))
    apply_quantization(only_reference, "W4A16")
    assert torch.equal(reference_logits, only_reference(TOKENS).logits)
    assert not torch.equal(policy_logits, reference_logits)  # control

    model.set_adapter("default")
    assert torch.equal(model(TOKENS).logits, policy_logits)
    assert not differing_names(stream_of(model), policy_stream)


def test_several_active_adapters_stop_the_forward(tiny_model):
    model = with_adapters(tiny_model())
    model.add_adapter("other", model.peft_config["default"])
    apply_quantization(model, "W4A16")
    model.base_model.set_adapter(["default", "other"])

    with pytest.raises(ValueError, match=r"Several adapters are active.*set_adapter\('default'\)"):
        model(TOKENS)

    # The advice works.
    model.set_adapter("default")
    model(TOKENS)


def test_an_adapter_that_peft_merged_stops_the_forward(tiny_model):
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    model.merge_adapter()

    with pytest.raises(RuntimeError, match=r"would count twice.*unmerge_adapter"):
        model(TOKENS)

    # The advice works.
    model.unmerge_adapter()
    model(TOKENS)


def test_an_adapter_that_comes_after_the_quantization_is_refused(tiny_model):
    """The forward would add it, and neither sync nor file would have it."""
    model = apply_quantization(tiny_model(), "W4A16")
    late = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match=r"q_proj' got an adapter after the model was quantized"):
        list(iter_low_bit_weights(late))

    # On a layer that had none, beside those that had one.
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    list(iter_low_bit_weights(model))
    model.add_adapter("late", LoraConfig(target_modules=["k_proj"]))
    with pytest.raises(RuntimeError, match=r"k_proj' got an adapter after the model was quantized"):
        list(iter_low_bit_weights(model))


@pytest.mark.parametrize("of_layers", [False, True])
@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.5}])
def test_settings_of_an_adapter_that_comes_later_are_those_that_the_forward_has(tiny_model, settings, of_layers):
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    layers = model.peft_config["default"].target_modules
    model.add_adapter("late", LoraConfig(target_modules=layers, **settings))
    list(iter_low_bit_weights(model))  # nobody uses it
    # The latter leaves `model.active_adapter` as it is.
    activated = model.base_model if of_layers else model
    activated.set_adapter("late")

    with pytest.raises(ValueError, match=next(iter(settings))):
        list(iter_low_bit_weights(model))


@pytest.mark.parametrize("method", ["unload", "merge_and_unload"])
def test_peft_does_not_leave_a_mixture_of_precisions(tiny_model, method):
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    with pytest.raises(RuntimeError, match=r"in high precision, beside low-bit ones.*remove_quantization"):
        getattr(model, method)()

    # The advice works.
    remove_quantization(model)
    getattr(model, method)()(TOKENS)


# When quantized values are made -------------------------------------------------------------------------------------


def test_quantized_values_are_made_once_per_step_and_those_of_frozen_layers_once(tiny_model, monkeypatch):
    quantizations = record_quantizations(monkeypatch)
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)
    low_bit_store(model).follow(optimizer)

    # All layers first, then only those with an adapter: the others do not change.
    for expected in (14, 6, 6):
        quantizations.clear()
        for _ in range(2):
            model(TOKENS, labels=TOKENS).loss.backward()
        assert len(quantizations) == expected

        stream_of(model)
        assert len(quantizations) == expected + 14  # a sync takes all weights as they are
        optimizer.step()


def test_the_base_is_quantized_once_for_a_reference_model(tiny_model, monkeypatch):
    quantizations = record_quantizations(monkeypatch)
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)
    low_bit_store(model).follow(optimizer)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()

    # Three micro-batches of reference log-probs.
    quantizations.clear()
    for _ in range(3):
        with torch.no_grad(), model.disable_adapter():
            model(TOKENS)
    assert len(quantizations) == 6  # the base of the adapted layers, kept beside the policy's quantized values
    model(TOKENS)
    assert len(quantizations) == 12

    optimizer.step()
    quantizations.clear()
    with torch.no_grad(), model.disable_adapter():
        model(TOKENS)
    # The base is the same after a step.
    assert not quantizations


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
def test_quantized_values_follow_every_source(change):
    layer = make_layer()
    # A store that nobody tells makes trained weights each time, which would hide a change that it misses.
    layer.store.will_be_told()
    before = layer.low_bit()
    assert layer.low_bit() is before

    with torch.no_grad():
        change(layer)

    expected = quantize_weight(merged_weight(*sources_of(layer), layer.scaling["default"]), layer.scheme)
    assert same_tensors(layer.low_bit().tensors, expected.tensors)
    assert not same_tensors(layer.low_bit().tensors, before.tensors)


# The model around ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "tensors_of_layer"), [("W4A16", 3), ("FP8_DYNAMIC", 2)])
def test_the_stream_is_what_the_forward_multiplies_with(tiny_model, scheme, tensors_of_layer, monkeypatch):
    model = apply_quantization(with_adapters(tiny_model("qwen2")), scheme)
    multiplied = []
    apply = matmul.LowBitMatmul.apply

    def recorded(x, bias, low_bit, *rest):
        multiplied.extend(low_bit.tensors.values())
        return apply(x, bias, low_bit, *rest)

    monkeypatch.setattr(matmul.LowBitMatmul, "apply", recorded)
    low_bit_store(model).will_be_told()

    stream = stream_of(model)
    model(TOKENS)

    assert len(multiplied) == 14 * tensors_of_layer
    sent = set(map(id, stream.values()))
    for tensor in multiplied:
        assert id(tensor) in sent

    plain = stream_of(apply_quantization(tiny_model("qwen2"), scheme))
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert stream.keys() == plain.keys()
    assert torch.equal(stream[bias], plain[bias])


def test_state_dict_and_parameters_are_those_of_the_peft_model(tiny_model):
    plain = with_adapters(tiny_model())
    model = apply_quantization(with_adapters(tiny_model()), "W4A16")

    assert names_in(model.named_parameters()) == names_in(plain.named_parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.requires_grad == plain_param.requires_grad

    restored = remove_quantization(copy.deepcopy(model))
    assert torch.equal(restored(TOKENS).logits, plain(TOKENS).logits)
    for module, plain_module in zip(restored.modules(), plain.modules(), strict=True):
        assert type(module) is type(plain_module)


def test_adapters_on_attention_go_with_low_bit_experts(tiny_model):
    model = with_adapters(tiny_model("qwen3_moe"), target_modules=["q_proj", "o_proj"])
    apply_quantization(model, "W4A16", ignore=DEFAULT_IGNORE)

    model(TOKENS, labels=TOKENS).loss.backward()

    with_gradient = names_with_gradient(model)
    assert {name.split(".")[-3] for name in with_gradient} == {"lora_A", "lora_B"}

    stream = stream_of(model)
    base = stream_of(apply_quantization(tiny_model("qwen3_moe"), "W4A16", ignore=DEFAULT_IGNORE))
    assert stream.keys() == base.keys()
    assert fnmatch.filter(stream, "*experts*weight_packed")
    assert layer_kinds(differing_names(stream, base)) == {"q_proj", "o_proj"}


def test_modules_to_save_are_synced_as_trained(tiny_model):
    model = apply_quantization(with_adapters(tiny_model(), modules_to_save=["lm_head"]), "W4A16")
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(3.0)

    stream = stream_of(model)

    assert torch.equal(stream["lm_head.weight"], (tiny_model().lm_head.weight * 3.0).bfloat16())
    assert stream.keys() == stream_of(apply_quantization(tiny_model(), "W4A16")).keys()


# Sharded master weights ---------------------------------------------------------------------------------------------


def sharded_model():
    """A toy with adapters under FSDP2: bfloat16 in the forward, float32 in the shards."""
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = apply_quantization(with_adapters(make_model()), "W4A16")
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def kept_tensors(store):
    """The tensors that forwards multiplied by, by the names of a stream."""
    tensors = {}
    for name, low_bit in store.kept().items():
        layer = name.rpartition(".")[0].removeprefix("base_model.model.")
        for local, tensor in low_bit.tensors.items():
            tensors[f"{layer}.{local}"] = tensor
    return tensors


def check_stream(stream, multiplied):
    for name, tensor in multiplied.items():
        assert torch.equal(stream[name], tensor), name


def train_sharded(folder):
    """In one of two processes: compare what is synced with what was multiplied by. Rank 0 writes what it has."""
    torch.distributed.init_process_group("gloo")
    model = sharded_model()
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-2)
    store = low_bit_store(model)
    store.follow(optimizer)

    # The first step has no sync before its forward.
    model(TOKENS, labels=TOKENS).loss.backward()
    assert len(store.kept()) == len(list(store.layers()))
    multiplied = kept_tensors(store)
    check_stream(stream_of(model), multiplied)
    optimizer.step()
    optimizer.zero_grad()

    # From the second step on a sync comes before the forward, and both must have the same.
    stream_before = stream_of(model)
    model(TOKENS, labels=TOKENS).loss.backward()
    assert len(store.kept()) == len(list(store.layers()))
    multiplied = kept_tensors(store)
    check_stream(stream_before, multiplied)
    stream_after = stream_of(model)
    check_stream(stream_after, multiplied)

    if torch.distributed.get_rank() == 0:
        torch.save((stream_after, names_with_gradient(model)), f"{folder}/rank_0.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_under_fsdp2_forward_and_sync_share_the_quantized_values_of_one_process(tiny_model, tmp_path):
    isolated_group(train_sharded, 2, str(tmp_path))

    stream, with_gradient = torch.load(tmp_path / "rank_0.pt")
    # Two factors for three kinds of layers in two blocks.
    assert len(with_gradient) == 12
    for name in with_gradient:
        assert "lora_" in name

    untrained = stream_of(apply_quantization(with_adapters(tiny_model()), "W4A16"))
    assert stream.keys() == untrained.keys()
    without_adapter = 0
    for name in fnmatch.filter(untrained, "*weight_packed"):
        if name.split(".")[-2] not in ADAPTED:
            without_adapter += 1
            assert torch.equal(stream[name], untrained[name]), name
    assert without_adapter

    # Control: the steps changed a layer with an adapter.
    trained = "model.layers.0.mlp.down_proj.weight_packed"
    assert not torch.equal(stream[trained], untrained[trained])


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
        apply_quantization(with_adapters(tiny_model(), **changes), "W4A16")
