"""`qarl_trl.quant.layers.experts`: against transformers' forward, a loop of layers and a reference by token."""

import fnmatch

import pytest
import references
import torch
from compressed_tensors.quantization import QuantizationConfig
from conftest import make_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, GptOssForCausalLM

from qarl_trl.quant import (
    apply_quantization,
    iter_low_bit_weights,
    low_bit_store,
    quantize_weight,
    resolve_scheme,
)
from qarl_trl.quant.gemms.activations import quantize_tokens_int8
from qarl_trl.quant.gemms.gemm import Fp8Gemm, Int4Fp8Gemm, Int8Gemm
from qarl_trl.quant.gemms.grouped import ExpertsGemm
from qarl_trl.quant.layers.experts import PROJECTIONS, QuantExperts, expert_modules, layer_names
from qarl_trl.quant.quantize import LowBitWeight, dequantize
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from quant.schemes import NAMES, names_in, same_tensors
from quant.toy_layers import names_of, record_quantizations


TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 3]])
EXPERTS = "model.layers.0.mlp.experts"
# Two key heads: 128 rows, which the blocks of FP8_BLOCK divide.
SIZES = {"num_key_value_heads": 2}


def quantized_model(kind="qwen3_moe", scheme="W4A16", **changes):
    return apply_quantization(make_model(kind, **changes), scheme, ignore=DEFAULT_IGNORE)


def experts_of(model):
    """The first layer of experts."""
    return next(module for _, module in expert_modules(model))


def make_inputs(tokens, experts, top_k=2, dtype=torch.float32):
    """Inputs of a layer of experts: hidden states, chosen experts and routing weights."""
    generator = torch.Generator().manual_seed(0)
    number, _, hidden = experts.gate_up_proj.shape
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    # Random routing: the experts get unequal numbers of tokens.
    scores = torch.randn(tokens, number, generator=generator)
    weights, chosen = scores.softmax(-1).topk(top_k)
    return x.requires_grad_(), chosen, weights.to(dtype).requires_grad_()


def make_gradient(shape, dtype=torch.float32):
    """The gradient of an output."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def multiplied_values(low_bit):
    """What a kernel multiplies by: for FP8 code times scale unrounded, where `dequantize` rounds to bfloat16."""
    if low_bit.quantized.dtype == torch.float8_e4m3fn:
        return low_bit.quantized.float() * low_bit.scale.float()
    return dequantize(low_bit, torch.float32)


def multiplied_matrices(experts, name):
    """The low-bit matrices of a fused parameter, `(experts, out, in)` for each projection."""
    stacked = multiplied_values(experts.low_bit(name)).unflatten(0, (len(experts.down_proj), -1))
    return list(stacked.chunk(len(PROJECTIONS[name]), dim=1))


# Against transformers ------------------------------------------------------------------------------------------------


def put_on_grid(model):
    """Give linear layers and experts weights that W4A16_ASYM stores exactly: (code - 8) / 32, with codes 0 and 15."""
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        is_linear = "_proj" in name and param.ndim == 2
        is_expert = param.ndim == 3
        if is_linear or is_expert:
            codes = torch.randint(0, 16, param.shape, generator=generator)
            # In each group of 128, so that its range is that of the codes, and the scale is exact.
            codes[..., 0::128] = 0
            codes[..., 1::128] = 15
            param.data = ((codes - 8) / 32).to(param.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_where_quantization_changes_nothing_it_is_the_grouped_mm_model_bit_for_bit(kind, dtype):
    """Outputs and all gradients."""
    plain = make_model(kind, dtype=dtype)
    low_bit = make_model(kind, dtype=dtype)
    for model in (plain, low_bit):
        put_on_grid(model)
    plain.set_experts_implementation("grouped_mm")
    apply_quantization(low_bit, "W4A16_ASYM", ignore=DEFAULT_IGNORE)
    experts = experts_of(low_bit)
    (matrices,) = multiplied_matrices(experts, "down_proj")
    assert torch.equal(matrices, experts.down_proj.float())  # the premise

    logits = []
    for model in (plain, low_bit):
        logits.append(model(TOKENS).logits)
        logits[-1].float().square().sum().backward()

    assert torch.equal(*logits)
    for name, param in low_bit.named_parameters():
        assert torch.equal(param.grad, plain.get_parameter(name).grad), name

    # Control: off the grid it is another model.
    for model in (plain, low_bit):
        with torch.no_grad():
            # Every column by another factor: no scale of a group can undo that.
            experts_of(model).down_proj.mul_(torch.linspace(0.5, 1.5, 128).to(dtype))
    assert not torch.equal(plain(TOKENS).logits, low_bit(TOKENS).logits)


def test_with_the_learner_in_high_precision_the_forward_is_transformers_own():
    plain = make_model("qwen3_moe")
    model = make_model("qwen3_moe")
    apply_quantization(model, "W4A16", ignore=DEFAULT_IGNORE, quantize_forward=False)

    assert torch.equal(plain(TOKENS).logits, model(TOKENS).logits)
    assert isinstance(experts_of(model), QuantExperts)
    assert f"{EXPERTS}.0.gate_proj.weight_packed" in dict(iter_low_bit_weights(model))
    assert not low_bit_store(model).bypassed_layers()


# Against linear layers ----------------------------------------------------------------------------------------------


def linear_layers_of(experts, scheme, group_size=None):
    """A `QuantLinear` for each expert and parameter, with its master weight."""
    layers = nn.ModuleDict()
    for name in PROJECTIONS:
        for expert, weight in enumerate(getattr(experts, name).detach()):
            out_features, in_features = weight.shape
            layer = nn.Linear(in_features, out_features, bias=False)
            layer.weight = nn.Parameter(weight.clone())
            layers[f"{expert}_{name}"] = layer
    return apply_quantization(layers, scheme, group_size=group_size)


def run_one_by_one(layers, x, chosen, routing):
    """The experts one after the other, as llm-compressor's linearized experts; a token's choices are summed last."""
    by_choice = [None] * chosen.numel()
    for expert in range(len(layers) // 2):
        token, choice = torch.where(chosen == expert)
        gate, up = layers[f"{expert}_gate_up_proj"](x[token]).chunk(2, dim=-1)
        down = layers[f"{expert}_down_proj"](nn.functional.silu(gate) * up)
        weighted = down * routing[token, choice, None]

        # The order of a sum decides its last bits: by choice, and not by expert.
        places = token * chosen.shape[1] + choice
        for row, place in zip(weighted, places.tolist(), strict=True):
            by_choice[place] = row
    return torch.stack(by_choice).view(*chosen.shape, -1).sum(1).to(x.dtype)


def output_and_gradients(forward, experts, autocast=False):
    """Output, and gradients by input and routing weights, for 33 tokens."""
    x, chosen, routing = make_inputs(33, experts, dtype=experts.down_proj.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = forward(x, chosen, routing)
    y.backward(make_gradient(y.shape, y.dtype))
    return y, x.grad, routing.grad


def check_against_linear_layers(experts, scheme, group_size=None, autocast=False):
    """Output and gradients are those of `QuantLinear`s, bit for bit."""
    layers = linear_layers_of(experts, scheme, group_size)

    def one_by_one(x, chosen, routing):
        return run_one_by_one(layers, x, chosen, routing)

    results = output_and_gradients(experts, experts, autocast)
    expected = output_and_gradients(one_by_one, experts, autocast)
    for tensor, expected_tensor in zip(results, expected, strict=True):
        assert torch.equal(tensor, expected_tensor)
    for name in PROJECTIONS:
        gradients = []
        for expert in range(len(experts.down_proj)):
            gradients.append(layers[f"{expert}_{name}"].weight.grad)
        assert torch.equal(getattr(experts, name).grad, torch.stack(gradients))

    # Control: another weight of one expert.
    with torch.no_grad():
        layers["0_down_proj"].weight.mul_(1.1)
    layers.zero_grad()
    other_output, *_ = output_and_gradients(one_by_one, experts, autocast)
    assert not torch.equal(other_output, results[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", NAMES)
def test_the_experts_at_once_are_low_bit_linear_layers_one_after_the_other(scheme, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    model = quantized_model(scheme=scheme, dtype=dtype, **SIZES)

    check_against_linear_layers(experts_of(model), scheme, autocast=autocast)


@pytest.mark.parametrize(
    ("scheme", "group_size", "hidden", "inner"),
    [("W4A16", -1, 8, 32), ("W8A8", None, 12, 20), ("FP8_DYNAMIC", None, 12, 20)],
)
def test_experts_need_no_rows_of_whole_16_bytes(scheme, group_size, hidden, inner):
    """Which torch's one gemm for all of them wants; 8 and 32 are the sizes of the models that TRL tests with."""
    model = make_model("qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner, dtype=torch.bfloat16)
    apply_quantization(model, scheme, group_size=group_size, ignore=DEFAULT_IGNORE)

    check_against_linear_layers(experts_of(model), scheme, group_size)
    assert model(TOKENS, labels=TOKENS).loss.isfinite()


# Against the reference -----------------------------------------------------------------------------------------------


def quantize_row_to_float8(row):
    codes, scale = references.quantize_tokens_float8(row[None].float())
    values = [references.float8_value(code) for code in codes[0].tolist()]
    return torch.tensor(values).double() * scale[0].double()


def keep_row(row):
    return row


def largest_differences(tensors, expected):
    """For each tensor the largest difference, by the largest entry of the expected one."""
    differences = []
    for tensor, expected_tensor in zip(tensors, expected, strict=True):
        difference = (tensor.double() - expected_tensor).abs().max() / expected_tensor.abs().max()
        differences.append(difference.item())
    return differences


# Largest difference measured: 4.3e-7 for W4A16, float32 sums; 2.3e-3 for FP8, in the gradients by x, gate and up,
# which the backward takes from weights dequantized in bfloat16 (the rest: 2.2e-7).
@pytest.mark.parametrize(
    ("scheme", "quantize_input", "tolerance"),
    [("W4A16", keep_row, 4e-6), ("FP8_DYNAMIC", quantize_row_to_float8, 5e-3)],
)
def test_output_and_gradients_are_those_of_the_reference(scheme, quantize_input, tolerance):
    experts = experts_of(quantized_model(scheme=scheme))
    x, chosen, routing = make_inputs(9, experts)
    grad = make_gradient(x.shape)

    y = experts(x, chosen, routing)
    y.backward(grad)

    gate_grad, up_grad = experts.gate_up_proj.grad.chunk(2, dim=1)
    results = [y.detach(), x.grad, gate_grad, up_grad, experts.down_proj.grad, routing.grad]

    def reference(gate, up, down):
        return references.experts(
            x.detach(), gate, up, down, chosen, routing.detach(), grad, quantize_input=quantize_input
        )

    low_bit = reference(*multiplied_matrices(experts, "gate_up_proj"), *multiplied_matrices(experts, "down_proj"))
    assert max(largest_differences(results, low_bit)) < tolerance

    # Control: W in the place of Q(W).
    high_precision = reference(*experts.gate_up_proj.detach().chunk(2, dim=1), experts.down_proj.detach())
    assert min(largest_differences(results, high_precision)) > 4 * tolerance


# Few tokens ---------------------------------------------------------------------------------------------------------


def test_an_expert_without_tokens_has_a_gradient_of_zero(monkeypatch):
    """Also where the kernel leaves what was in memory that it does not write (pytorch issue 172439)."""
    grouped_mm = nn.functional.grouped_mm

    def with_garbage(a, b, *, offs):
        y = grouped_mm(a, b, offs=offs)
        sizes = offs.diff(prepend=offs.new_zeros(1))
        if b.ndim == 3:  # the output of a layer
            # Rows that belong to no expert.
            y[offs[-1] :] = torch.nan
        else:  # the gradient of its weights, which is a matrix for each expert
            # Control: there is an expert without tokens.
            assert (sizes == 0).any()
            y[sizes == 0] = torch.nan
        return y

    monkeypatch.setattr(nn.functional, "grouped_mm", with_garbage)
    experts = experts_of(quantized_model())
    x, _, _ = make_inputs(3, experts)

    # Experts 1 and 3 get none.
    y = experts(x, torch.tensor([[0, 2]] * 3), torch.full((3, 2), 0.5))
    y.sum().backward()

    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    for param in (experts.gate_up_proj, experts.down_proj):
        assert param.grad.flatten(1).any(1).tolist() == [True, False, True, False]


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_a_single_one(scheme, tokens):
    experts = experts_of(quantized_model(scheme=scheme, num_hidden_layers=1, **SIZES))

    # With one choice a token there is nothing to sum.
    for top_k in (1, 2):
        x, chosen, routing = make_inputs(tokens, experts, top_k)
        y = experts(x, chosen, routing)
        y.sum().backward()

        assert y.shape == x.grad.shape == (tokens, 128)
        assert bool(y.any()) == bool(tokens)
        assert bool(experts.down_proj.grad.any()) == bool(tokens)


def test_an_expert_that_is_not_there_stops_the_run():
    """As expert parallelism of transformers marks the tokens of other ranks; the product would skip those rows."""
    experts = experts_of(quantized_model())
    x, chosen, routing = make_inputs(3, experts)
    # Of four experts the last one becomes number 7.
    outside = chosen + 1 + 3 * (chosen == chosen.max())

    with pytest.raises(RuntimeError, match="outside the 4"):
        experts(x, outside, routing)


# Memory and calls ---------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """
    Records operations, and the memory of the tensors that they make.

    Attributes:
        calls: The names of the operations.
        peak: The most bytes that new tensors in high precision of at least `least` bytes held at once.
    """

    def __init__(self, least=1):
        super().__init__()
        self.least = least
        self.calls = []
        self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        addresses = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        result = func(*args, **(kwargs or {}))

        results = result if isinstance(result, (tuple, list)) else (result,)
        for tensor in results:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.itemsize == 1:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() >= self.least and storage.data_ptr() not in addresses:
                self._alive[StorageWeakRef(storage)] = storage.nbytes()

        # A weak reference to a storage expires with its last tensor.
        for reference in list(self._alive):
            if reference.expired():
                del self._alive[reference]
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("trained", [False, True])
def test_one_parameter_at_a_time_is_dequantized_and_not_kept(scheme, trained):
    # Many experts and few tokens, so that weights outweigh activations.
    model = quantized_model(scheme=scheme, num_experts=32, num_hidden_layers=1)
    experts = experts_of(model)
    experts.requires_grad_(trained)
    x, chosen, routing = make_inputs(8, experts)
    # The first forward makes the quantized values, which are kept and not counted.
    experts(x, chosen, routing)
    gate_up_bytes = experts.gate_up_proj.numel() * 4  # float32
    down_bytes = experts.down_proj.numel() * 4
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor):
        return tensor

    # Half of the smaller parameter: no activation of eight tokens is as large.
    with Recorder(down_bytes // 2) as forward, torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = experts(x, chosen, routing).sum()
    with Recorder(down_bytes // 2) as backward:
        loss.backward()

    # A matrix in float32 and, while it is cast, in bfloat16. FP8 is multiplied as it is, expert by expert.
    assert forward.peak <= 1.5 * gate_up_bytes
    if scheme != "FP8_DYNAMIC":
        assert forward.peak >= gate_up_bytes  # control
    assert sum(kept.values()) < down_bytes / 4

    # Of the backward the gradients of both parameters are left.
    gradient_bytes = down_bytes if trained else 0
    assert backward.peak <= gradient_bytes + 1.5 * gate_up_bytes


def test_the_rows_of_all_experts_are_quantized_once_and_multiplied_as_those_of_one():
    low_bit = quantize_weight(torch.randn(3 * 128, 128), resolve_scheme("W8A8"))
    x = torch.randn(9, 128)
    quantized = []

    def quantize(rows):
        quantized.append(len(rows))
        return quantize_tokens_int8(rows)

    gemm = Int8Gemm()
    gemm.quantize = quantize

    # The second expert has no rows.
    y, _ = ExpertsGemm(gemm, torch.tensor([4, 4, 9], dtype=torch.int32)).forward(x, low_bit)

    assert quantized == [9]
    first, _, third = low_bit.split(128)
    expected = [Int8Gemm().forward(x[:4].clone(), first)[0], Int8Gemm().forward(x[4:].clone(), third)[0]]
    assert torch.equal(y, torch.cat(expected))
    # Control: another expert's matrix gives other numbers.
    assert not torch.equal(y[:4], Int8Gemm().forward(x[:4].clone(), third)[0])


@pytest.mark.parametrize(("scheme", "gemm"), [("FP8_DYNAMIC", Fp8Gemm), ("W4AFP8", Int4Fp8Gemm)])
def test_the_grouped_gemm_of_float8_is_called_as_torch_demands(monkeypatch, scheme, gemm):
    """Shapes, strides and dtypes, by the operation's own checks; its numbers need a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    low_bit = quantize_weight(torch.randn(8 * 256, 128), resolve_scheme(scheme))
    # The meta device has the operation's checks, and none of its numbers.
    on_meta = {name: tensor.to("meta") for name, tensor in low_bit.data.items()}
    weight = LowBitWeight(on_meta, low_bit.scheme)
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    x = torch.empty(33, 128, dtype=torch.bfloat16, device="meta")

    with Recorder() as recorder:
        y, _ = ExpertsGemm(gemm(), offsets).forward(x, weight)

    assert y.shape == (33, 256)
    assert y.dtype == torch.bfloat16
    assert "aten._scaled_grouped_mm.default" in recorder.calls

    # Control: an Ada GPU has no such product, so it goes expert by expert, for which it reads the offsets.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(RuntimeError, match="meta"):
        ExpertsGemm(gemm(), offsets).forward(x, weight)


# Quantized values ---------------------------------------------------------------------------------------------------


def test_quantized_values_are_made_once_a_step_and_shared_by_forward_and_stream():
    model = quantized_model()
    experts = experts_of(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    low_bit_store(model).follow(optimizer)
    model(TOKENS, labels=TOKENS).loss.backward()
    before = experts.low_bit("down_proj")
    model(TOKENS)
    assert experts.low_bit("down_proj") is before

    # What is sent are views of what multiplies.
    stream = dict(iter_low_bit_weights(model))
    for parameter in PROJECTIONS:
        first_layer = layer_names(EXPERTS, experts, parameter)[0]
        # Not the shape, which is made anew for each layer.
        for name in ("weight_packed", "weight_scale"):
            multiplied = experts.low_bit(parameter).tensors[name]
            assert stream[f"{first_layer}.{name}"].data_ptr() == multiplied.data_ptr()

    optimizer.step()
    after = experts.low_bit("down_proj")
    first_expert = quantize_weight(experts.down_proj[0], experts.scheme)
    assert not torch.equal(after.quantized, before.quantized)
    assert torch.equal(after.quantized[:128], first_expert.quantized)


def split_into_layers(experts, name):
    """The low-bit weight of a parameter, split into the layers of a checkpoint."""
    low_bit = experts.low_bit(name)
    return low_bit.split(low_bit.shape[0] // len(layer_names(EXPERTS, experts, name)))


@pytest.mark.parametrize("scheme", NAMES)
def test_all_experts_in_one_call_have_the_bytes_of_one_call_for_each(monkeypatch, scheme):
    model = quantized_model(scheme=scheme, num_hidden_layers=1, **SIZES)
    experts = experts_of(model)
    with torch.no_grad():
        # So that a scale of another expert would be seen.
        for parameter in (experts.gate_up_proj, experts.down_proj):
            parameter.mul_(torch.logspace(-2, 2, len(parameter)).view(-1, 1, 1))
    low_bit_store(model).will_be_told()
    quantizations = record_quantizations(monkeypatch)

    for name, projections in PROJECTIONS.items():
        number = len(experts.down_proj) * len(projections)
        master_weights = getattr(experts, name).detach().flatten(0, 1).chunk(number)
        for master_weight, layer in zip(master_weights, split_into_layers(experts, name), strict=True):
            expected = quantize_weight(master_weight, experts.scheme)
            assert same_tensors(layer.tensors, expected.tensors)
    # Once for each of the two parameters.
    assert len(quantizations) == 2

    # Control: two experts have different bytes.
    first, second, *_ = split_into_layers(experts, "down_proj")
    assert not same_tensors(first.tensors, second.tensors)


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("qwen3_moe", "model.layers.0.mlp"),
        ("mixtral", "model.layers.0.block_sparse_moe"),
        ("olmoe", "model.layers.0.mlp"),
    ],
)
def test_the_stream_has_the_names_of_the_checkpoint(kind, prefix):
    stream = dict(iter_low_bit_weights(quantized_model(kind)))

    expected = [f"{prefix}.gate.weight"]
    for projection in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(4):
            for tensor in ("weight_packed", "weight_scale", "weight_shape"):
                expected.append(f"{prefix}.experts.{expert}.{projection}.{tensor}")
    assert sorted(fnmatch.filter(stream, f"{prefix}*")) == sorted(expected)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_the_stream_of_a_plain_model_has_its_own_names(kind):
    """As TRL sends them."""
    plain = make_model(kind)

    assert names_in(iter_low_bit_weights(plain)) == names_in(plain.named_parameters())


def test_a_stream_quantizes_the_master_weights_as_they_are():
    """Also after a write that leaves no trace in the parameter."""
    model = quantized_model(num_hidden_layers=1)
    low_bit_store(model).will_be_told()
    experts = experts_of(model)
    before = experts.low_bit("down_proj")
    experts.down_proj.data.normal_()
    assert experts.low_bit("down_proj") is before  # control

    stream = dict(iter_low_bit_weights(model))

    expected = quantize_weight(experts.down_proj[1], experts.scheme)
    assert torch.equal(stream[f"{EXPERTS}.1.down_proj.weight_packed"], expected.quantized)


# What is quantized --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [r"re:.*layers\.0\.mlp\.experts\..*", EXPERTS])
def test_all_experts_of_a_layer_can_be_ignored_by_their_names_or_by_that_of_the_module(pattern):
    model = apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=["lm_head", pattern])

    low_bit_names = names_of(model)
    assert EXPERTS not in low_bit_names
    assert "model.layers.1.mlp.experts" in low_bit_names

    stream = dict(iter_low_bit_weights(model))
    _, up = experts_of(model).gate_up_proj[1].chunk(2)
    assert torch.equal(stream[f"{EXPERTS}.1.up_proj.weight"], up.bfloat16())


def two_groups(**targets):
    """A plan with a scheme and one pattern for each group."""
    groups = {scheme: [pattern] for scheme, pattern in targets.items()}
    return QuantizationConfig(config_groups=groups, ignore=["lm_head"])


def test_experts_and_attention_can_have_schemes_of_their_own():
    plan = two_groups(FP8_DYNAMIC=r"re:.*self_attn.*", W4A16=r"re:.*mlp.experts.*")

    model = apply_quantization(make_model("qwen3_moe"), plan)

    assert experts_of(model).scheme.weights.num_bits == 4
    assert model.model.layers[0].self_attn.q_proj.scheme.weights.num_bits == 8


def test_the_projections_of_experts_cannot_have_schemes_of_their_own():
    plan = two_groups(FP8_DYNAMIC=r"re:.*down_proj", W4A16=r"re:.*(gate|up)_proj")

    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.experts' must have one scheme"):
        apply_quantization(make_model("qwen3_moe"), plan)


def test_a_part_of_the_experts_cannot_be_ignored():
    with pytest.raises(ValueError, match=r"All 12 expert layers of 'model\.layers\.0\.mlp\.experts' must have"):
        apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=["lm_head", f"{EXPERTS}.3.up_proj"])


@pytest.mark.parametrize("ignored", [[], ["re:.*experts.*"]])
def test_experts_of_another_form_are_refused(ignored):
    """gpt-oss: transposed, interleaved, with biases. Ignored ones too: a sync would have no names for them."""
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = GptOssForCausalLM(config)

    with pytest.raises(ValueError, match=r"GptOssExperts.*'is_transposed': True.*quant_scheme='none'.*quant_ignore"):
        apply_quantization(model, "W4A16", ignore=["lm_head", *ignored])
