"""`qarl_trl.quant.experts`: fused experts against transformers' own forward, a loop of layers and a token-by-token reference."""

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
    quantized_modules,
    resolve_scheme,
    store,
)
from qarl_trl.quant.experts import PROJECTIONS, QuantExperts, expert_modules, layer_names
from qarl_trl.quant.gemm import Fp8Gemm, Int4Fp8Gemm, dequantize
from qarl_trl.quant.grouped import ExpertsGemm
from qarl_trl.quant.quantize import LowBitWeight
from qarl_trl.quant.scheme import DEFAULT_IGNORE
from quant.schemes import NAMES, same_tensors


TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 3]])
EXPERTS = "model.layers.0.mlp.experts"


def quantized(kind="qwen3_moe", scheme="W4A16", **changes):
    return apply_quantization(make_model(kind, **changes), scheme, ignore=DEFAULT_IGNORE)


def experts_of(model):
    return next(module for _, module in expert_modules(model))


def routed(tokens, module, top_k=2, seed=0, dtype=torch.float32):
    """Inputs of a layer of experts: hidden states, chosen experts and routing weights."""
    generator = torch.Generator().manual_seed(seed)
    experts, _, hidden = module.gate_up_proj.shape
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    scores = torch.randn(tokens, experts, generator=generator)
    weights, chosen = scores.softmax(-1).topk(top_k)
    return x.requires_grad_(), chosen, weights.to(dtype).requires_grad_()


def dequantized(module, name):
    """The low-bit matrices of a fused parameter, `(experts, out, in)` for each projection."""
    matrices = exact(module.low_bit(name)).unflatten(0, (len(module.down_proj), -1))
    return list(matrices.chunk(len(PROJECTIONS[name]), dim=1))


def exact(weight):
    """What a kernel multiplies with: for FP8 code times scale unrounded, where `dequantize` rounds to bfloat16."""
    if weight.quantized.dtype == torch.float8_e4m3fn:
        return weight.quantized.float() * weight.scale.float()
    return dequantize(weight, torch.float32)


# Against transformers ------------------------------------------------------------------------------------------------


def put_on_grid(model, seed=0):
    """Give the linear layers and experts weights that W4A16_ASYM stores exactly: (code - 8) / 32, 0 and 15 in each group."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        if param.ndim == 3 or ("_proj" in name and param.ndim == 2):
            packed = torch.randint(0, 16, param.shape, generator=generator)
            packed[..., 0::128], packed[..., 1::128] = 0, 15
            param.data = ((packed - 8) / 32).to(param.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_where_quantization_changes_nothing_it_is_the_grouped_mm_model_bit_for_bit(kind, dtype):
    """Outputs and all gradients."""
    plain, ours = make_model(kind, dtype=dtype), make_model(kind, dtype=dtype)
    for model in (plain, ours):
        put_on_grid(model)
    plain.set_experts_implementation("grouped_mm")
    apply_quantization(ours, "W4A16_ASYM", ignore=DEFAULT_IGNORE)
    module = experts_of(ours)
    assert torch.equal(dequantized(module, "down_proj")[0], module.down_proj.float())  # the premise

    losses = []
    for model in (plain, ours):
        logits = model(TOKENS).logits
        logits.float().square().sum().backward()
        losses.append(logits)
    assert torch.equal(*losses)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert all(torch.equal(p.grad, expected[name]) for name, p in ours.named_parameters())

    # Control: off the grid it is another model.
    for model in (plain, ours):
        with torch.no_grad():
            experts_of(model).down_proj.mul_(torch.linspace(0.5, 1.5, 128).to(dtype))
    assert not torch.equal(plain(TOKENS).logits, ours(TOKENS).logits)


def test_with_the_learner_in_high_precision_the_forward_is_transformers_own():
    plain, ours = make_model("qwen3_moe"), make_model("qwen3_moe")
    apply_quantization(ours, "W4A16", ignore=DEFAULT_IGNORE, quantize_forward=False)
    assert torch.equal(plain(TOKENS).logits, ours(TOKENS).logits)
    assert isinstance(experts_of(ours), QuantExperts)
    assert f"{EXPERTS}.0.gate_proj.weight_packed" in dict(iter_low_bit_weights(ours))
    assert not low_bit_store(ours).bypassed_layers()


def layers_of(module, scheme, group_size=None):
    """A `QuantLinear` for each expert and parameter, with its master weight."""
    layers = nn.ModuleDict()
    for name in PROJECTIONS:
        for expert, weight in enumerate(getattr(module, name).detach()):
            layer = layers[f"{expert}_{name}"] = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.clone())
    return apply_quantization(layers, scheme, group_size=group_size)


def looped(layers, x, chosen, routing):
    """The experts one after the other, as llm-compressor's linearized experts run; a token's choices are summed last."""
    by_choice = [None] * chosen.numel()
    for expert in range(len(layers) // 2):
        token, choice = torch.where(chosen == expert)
        gate, up = layers[f"{expert}_gate_up_proj"](x[token]).chunk(2, dim=-1)
        out = layers[f"{expert}_down_proj"](nn.functional.silu(gate) * up) * routing[token, choice, None]
        for row, place in zip(out, (token * chosen.shape[1] + choice).tolist(), strict=True):
            by_choice[place] = row
    return torch.stack(by_choice).view(*chosen.shape, -1).sum(1).to(x.dtype)


def forward_and_backward(forward, module, autocast=False):
    """Output and gradients by input and routing weights."""
    x, chosen, routing = routed(33, module, dtype=module.down_proj.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = forward(x, chosen, routing)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    return y, x.grad, routing.grad


def check_layer_by_layer(module, scheme, group_size=None, autocast=False):
    """Output and gradients are those of `QuantLinear`s, bit for bit."""
    layers = layers_of(module, scheme, group_size)
    ours = forward_and_backward(module, module, autocast)
    expected = forward_and_backward(lambda *args: looped(layers, *args), module, autocast)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    for name in PROJECTIONS:
        grads = [layers[f"{expert}_{name}"].weight.grad for expert in range(len(module.down_proj))]
        assert torch.equal(getattr(module, name).grad, torch.stack(grads))
    with torch.no_grad():
        layers["0_down_proj"].weight.mul_(1.1)
    layers.zero_grad()
    assert not torch.equal(forward_and_backward(lambda *args: looped(layers, *args), module, autocast)[0], ours[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheme", NAMES)
def test_the_experts_at_once_are_low_bit_linear_layers_one_after_the_other(scheme, autocast):
    # Two key heads: 128 rows, which the blocks of FP8_BLOCK divide.
    model = quantized(scheme=scheme, num_key_value_heads=2, dtype=torch.float32 if autocast else torch.bfloat16)
    check_layer_by_layer(experts_of(model), scheme, autocast=autocast)


@pytest.mark.parametrize(("scheme", "hidden", "inner"), [("W4A16", 8, 32), ("W8A8", 12, 20), ("FP8_DYNAMIC", 12, 20)])
def test_experts_need_no_rows_of_whole_16_bytes(scheme, hidden, inner):
    """Which torch's one gemm for all of them wants; 8 and 32 are the sizes of the models that TRL tests with."""
    model = make_model("qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner, dtype=torch.bfloat16)
    apply_quantization(model, scheme, group_size=None if "8" in scheme else -1, ignore=DEFAULT_IGNORE)
    check_layer_by_layer(experts_of(model), scheme, None if "8" in scheme else -1)
    assert model(TOKENS, labels=TOKENS).loss.isfinite()


# Against the reference -----------------------------------------------------------------------------------------------


def fp8_row(row):
    packed, scale = references.quantize_tokens_float8(row[None].float())
    return torch.tensor([references.float8_value(code) for code in packed[0].tolist()]).double() * scale[0].double()


# Largest difference found, by the largest entry of the reference: 4.3e-7 for W4A16, float32 sums; 2.3e-3 for FP8, in the
# gradients by x, gate and up, which the backward takes from weights dequantized in bfloat16 (the rest: 2.2e-7).
@pytest.mark.parametrize(("scheme", "tolerance"), [("W4A16", 4e-6), ("FP8_DYNAMIC", 5e-3)])
def test_output_and_gradients_are_those_of_the_reference(scheme, tolerance):
    model = quantized(scheme=scheme)
    module = experts_of(model)
    x, chosen, routing = routed(9, module)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    y = module(x, chosen, routing)
    y.backward(grad)
    gate_up, down = module.gate_up_proj.grad, module.down_proj.grad
    found = [y.detach(), x.grad, *gate_up.chunk(2, dim=1), down, routing.grad]

    def reference(matrices):
        quantize_input = fp8_row if scheme == "FP8_DYNAMIC" else lambda row: row
        return references.experts(x.detach(), *matrices, chosen, routing.detach(), grad, quantize_input=quantize_input)

    def differences(expected):
        return [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]

    low_bit = [*dequantized(module, "gate_up_proj"), *dequantized(module, "down_proj")]
    assert max(differences(reference(low_bit))) < tolerance
    master_weights = [*module.gate_up_proj.detach().chunk(2, dim=1), module.down_proj.detach()]
    assert min(differences(reference(master_weights))) > 4 * tolerance  # control: W in the place of Q(W)


def test_an_expert_without_tokens_has_a_gradient_of_zero(monkeypatch):
    """Also where the kernel leaves what it found in memory it does not write (pytorch issue 172439)."""
    original = nn.functional.grouped_mm

    def poisoned(a, b, *, offs):
        y, sizes = original(a, b, offs=offs), offs.diff(prepend=offs.new_zeros(1))
        if b.ndim == 3:
            y[offs[-1] :] = torch.nan
        else:
            assert (sizes == 0).any()  # control
            y[sizes == 0] = torch.nan
        return y

    monkeypatch.setattr(nn.functional, "grouped_mm", poisoned)
    module = experts_of(quantized())
    x, _, _ = routed(3, module)
    y = module(x, torch.tensor([[0, 2]] * 3), torch.full((3, 2), 0.5))
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    for param in (module.gate_up_proj, module.down_proj):
        assert [bool(grad.any()) for grad in param.grad] == [True, False, True, False]


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_a_single_one(scheme, tokens):
    model = quantized(scheme=scheme, num_key_value_heads=2, num_hidden_layers=1)
    module = experts_of(model)
    for top_k in (1, 2):
        x, chosen, routing = routed(tokens, module, top_k)
        y = module(x, chosen, routing)
        y.sum().backward()
        assert y.shape == x.grad.shape == (tokens, 128)
        assert bool(y.any()) == bool(module.down_proj.grad.any()) == bool(tokens)


def test_an_expert_that_is_not_there_stops_the_run():
    """As expert parallelism of transformers marks the tokens of other ranks; the product would skip those rows."""
    module = experts_of(quantized())
    x, chosen, routing = routed(3, module)
    with pytest.raises(RuntimeError, match="outside the 4"):
        module(x, chosen + 1 + 3 * (chosen == chosen.max()), routing)


# Memory and calls ---------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The operations called, and the most bytes that new tensors in high precision of at least `least` bytes held at once."""

    def __init__(self, least=1):
        super().__init__()
        self.least, self.calls, self.peak, self._alive = least, [], 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.itemsize > 1:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.least and storage.data_ptr() not in given:
                    self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC"])
@pytest.mark.parametrize("trained", [False, True])
def test_one_parameter_at_a_time_is_dequantized_and_not_kept(scheme, trained):
    model = make_model("qwen3_moe", num_experts=32, num_hidden_layers=1)
    module = experts_of(apply_quantization(model, scheme, ignore=DEFAULT_IGNORE))
    module.requires_grad_(trained)
    gate_up, down = (getattr(module, name).numel() * 4 for name in PROJECTIONS)  # bytes in float32
    x, chosen, routing = routed(8, module)
    module(x, chosen, routing)  # quantized values are made
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Recorder(down // 2) as there, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = module(x, chosen, routing).sum()
    with Recorder(down // 2) as back:
        loss.backward()
    # A matrix in float32 and, while it is cast, in bfloat16; of the backward the gradients of both parameters are left.
    assert there.peak <= 1.5 * gate_up
    assert there.peak >= gate_up or scheme == "FP8_DYNAMIC"  # which is multiplied as it is, expert by expert
    assert sum(kept.values()) < down / 4
    assert back.peak <= (down if trained else 0) + 1.5 * gate_up


@pytest.mark.parametrize(("scheme", "gemm"), [("FP8_DYNAMIC", Fp8Gemm), ("W4AFP8", Int4Fp8Gemm)])
def test_the_grouped_gemm_of_float8_is_called_as_torch_demands(monkeypatch, scheme, gemm):
    """Shapes, strides and dtypes, by the operation's own checks; its numbers need a GPU."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    weight = quantize_weight(torch.randn(8 * 256, 128), resolve_scheme(scheme))
    data = {name: t.to("meta") for name, t in weight.data.items()}
    offsets = torch.empty(8, dtype=torch.int32, device="meta")
    x = torch.empty(33, 128, dtype=torch.bfloat16, device="meta")
    with Recorder() as recorder:
        y, _ = ExpertsGemm(gemm(), offsets).forward(x, LowBitWeight(data, weight.scheme))
    assert (y.shape, y.dtype) == ((33, 256), torch.bfloat16)
    assert "aten._scaled_grouped_mm.default" in recorder.calls
    capability[0] = (8, 9)  # an Ada GPU has no such product: expert by expert
    with pytest.raises(RuntimeError, match="meta"):
        ExpertsGemm(gemm(), offsets).forward(x, LowBitWeight(data, weight.scheme))


# Quantized values --------------------------------------------------------------------------------------------------------------


def test_quantized_are_made_once_a_step_and_shared_by_forward_and_stream():
    model = quantized()
    module = experts_of(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    low_bit_store(model).follow(optimizer)
    model(TOKENS, labels=TOKENS).loss.backward()
    packed = module.low_bit("down_proj")
    model(TOKENS)
    assert module.low_bit("down_proj") is packed
    stream = dict(iter_low_bit_weights(model))
    for parameter in PROJECTIONS:
        first = layer_names(EXPERTS, module, parameter)[0]
        for local in ("weight_packed", "weight_scale"):  # views of what multiplies
            assert stream[f"{first}.{local}"].data_ptr() == module.low_bit(parameter).tensors[local].data_ptr()
    optimizer.step()
    fresh = module.low_bit("down_proj")
    assert not torch.equal(fresh.quantized, packed.quantized)
    assert torch.equal(fresh.quantized[:128], quantize_weight(module.down_proj[0], module.scheme).quantized)


def layers_of_checkpoint(module, name):
    """The low-bit weight of a parameter, split into the layers of a checkpoint."""
    low_bit = module.low_bit(name)
    return low_bit.split(low_bit.shape[0] // len(layer_names(EXPERTS, module, name)))


@pytest.mark.parametrize("scheme", NAMES)
def test_all_experts_in_one_call_have_the_bytes_of_one_call_for_each(monkeypatch, scheme):
    # Two key heads: 128 rows, which the blocks of FP8_BLOCK divide.
    model = quantized(scheme=scheme, num_key_value_heads=2, num_hidden_layers=1)
    module, calls = experts_of(model), []
    with torch.no_grad():
        for parameter in (module.gate_up_proj, module.down_proj):  # so that a scale of another expert would be seen
            parameter.mul_(torch.logspace(-2, 2, len(parameter)).view(-1, 1, 1))
    low_bit_store(model).will_be_told()
    monkeypatch.setattr(store, "quantize_weight", lambda *args: calls.append(1) or quantize_weight(*args))
    for name, projections in PROJECTIONS.items():
        master_weights = getattr(module, name).detach().flatten(0, 1).chunk(len(module.down_proj) * len(projections))
        for master, part in zip(master_weights, layers_of_checkpoint(module, name), strict=True):
            expected = quantize_weight(master, module.scheme)
            assert same_tensors(part.tensors, expected.tensors)
    assert len(calls) == 2
    first, second = layers_of_checkpoint(module, "down_proj")[:2]
    assert not same_tensors(first.tensors, second.tensors)  # control


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("qwen3_moe", "model.layers.0.mlp"),
        ("mixtral", "model.layers.0.block_sparse_moe"),
        ("olmoe", "model.layers.0.mlp"),
    ],
)
def test_the_stream_has_the_names_of_the_checkpoint(kind, prefix):
    names = [name for name, _ in iter_low_bit_weights(quantized(kind)) if name.startswith(prefix)]
    expected = [
        f"{prefix}.experts.{e}.{projection}.{local}"
        for projections in PROJECTIONS.values()
        for e in range(4)
        for projection in projections
        for local in ("weight_packed", "weight_scale", "weight_shape")
    ]
    assert sorted(names) == sorted([f"{prefix}.gate.weight", *expected])
    # With nothing quantized TRL's own names go out.
    plain = make_model(kind)
    assert [n for n, _ in iter_low_bit_weights(plain)] == [n for n, _ in plain.named_parameters()]


def test_a_stream_quantizes_the_master_weights_as_they_are():
    """Also after a write that leaves no trace in the parameter."""
    model = quantized(num_hidden_layers=1)
    low_bit_store(model).will_be_told()
    module = experts_of(model)
    before = module.low_bit("down_proj")
    module.down_proj.data.normal_()
    assert module.low_bit("down_proj") is before  # control

    stream = dict(iter_low_bit_weights(model))
    expected = quantize_weight(module.down_proj[1], module.scheme)
    assert torch.equal(stream[f"{EXPERTS}.1.down_proj.weight_packed"], expected.quantized)


# What is quantized --------------------------------------------------------------------------------------------------


def test_all_experts_of_a_layer_can_be_ignored_by_their_names_or_by_that_of_the_module():
    for pattern in (r"re:.*layers\.0\.mlp\.experts\..*", EXPERTS):
        model = apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=["lm_head", pattern])
        found = {name for name, _ in quantized_modules(model)}
        assert EXPERTS not in found
        assert "model.layers.1.mlp.experts" in found
        stream = dict(iter_low_bit_weights(model))
        up = experts_of(model).gate_up_proj[1].chunk(2)[1]
        assert torch.equal(stream[f"{EXPERTS}.1.up_proj.weight"], up.bfloat16())


def test_experts_and_attention_can_have_schemes_of_their_own():
    groups = {"FP8_DYNAMIC": [r"re:.*self_attn.*"], "W4A16": [r"re:.*mlp.experts.*"]}
    model = apply_quantization(make_model("qwen3_moe"), QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    assert experts_of(model).scheme.weights.num_bits == 4
    assert model.model.layers[0].self_attn.q_proj.scheme.weights.num_bits == 8
    groups = {"FP8_DYNAMIC": [r"re:.*down_proj"], "W4A16": [r"re:.*(gate|up)_proj"]}
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp\.experts' must have one scheme"):
        apply_quantization(make_model("qwen3_moe"), QuantizationConfig(config_groups=groups, ignore=["lm_head"]))


def test_a_part_of_the_experts_cannot_be_ignored():
    with pytest.raises(ValueError, match=r"All 12 expert layers of 'model\.layers\.0\.mlp\.experts' must have"):
        apply_quantization(make_model("qwen3_moe"), "W4A16", ignore=["lm_head", f"{EXPERTS}.3.up_proj"])


def test_experts_of_another_form_are_refused():
    """gpt-oss: transposed, interleaved, with biases."""
    config = GptOssConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    with pytest.raises(ValueError, match=r"GptOssExperts.*'is_transposed': True.*quant_scheme='none'"):
        apply_quantization(model, "W4A16", ignore=["lm_head"])
