"""`QuantExperts`: mixture-of-experts weights whose forward multiplies by low-bit matrices, expert by expert.

transformers keeps the experts of a layer as two 3-D parameters. Checkpoints, llm-compressor and vLLM know them as one
linear layer per expert and projection, whose rows are quantized independently: a parameter is quantized in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_targets
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PretrainedConfig

from .linear import LowBitLayer, QParams
from .names import checkpoint_modules
from .products import Product
from .quantize import LowBitWeight
from .scheme import MASTER_CAST_DTYPE


# The projections that the rows of each parameter hold, by the names llm-compressor writes for every architecture. vLLM
# reads them, also where the original checkpoint has others (Mixtral's w1, w3, w2).
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

# Name, module and scheme of a layer to quantize.
Matched = tuple[str, nn.Module, QuantizationScheme]
# One expert's low-bit weights of a parameter: (gate, up) or (down,).
ExpertWeights = tuple[LowBitWeight, ...]


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer, 0 for a dense model; every family has a name of its own for it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    text = config.get_text_config()
    return max(getattr(text, name, None) or 0 for name in names)


class Routing(NamedTuple):
    """
    The (token, expert) pairs of a batch, sorted by expert.

    Attributes:
        tokens (`Tensor`): Token of each pair `(pairs,)`.
        choices (`Tensor`): Which of the token's choices the pair is `(pairs,)`.
        counts (`list[int]`): Pairs of each expert, `num_experts` numbers.
    """

    tokens: Tensor
    choices: Tensor
    counts: list[int]

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> Routing:
        """From the router's choices `(tokens, top_k)`, within an expert in the order of transformers' eager forward."""
        by_choice = top_k_index.t().reshape(-1)
        order = by_choice.argsort(stable=True)
        counts = torch.bincount(by_choice, minlength=num_experts).tolist()
        return cls(order % len(top_k_index), order // len(top_k_index), counts)


class LowBitExpertsMatmul(torch.autograd.Function):
    """
    `y[rows of e] = x[rows of e] @ Q(W[e])^T` for every expert `e`, with the straight-through estimator.

    Args: x `(pairs, in)` sorted by expert, master `(experts, out, in)`, rows per expert, low-bit weights per expert,
    product. Only the inputs are kept for the backward: each expert's matrix is dequantized again when its turn comes.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, master: Tensor, counts: Sequence[int], weights: Sequence[ExpertWeights], product: Product
    ) -> Tensor:
        outputs, saved = [], []
        for rows, parts in zip(x.split(list(counts)), weights, strict=True):
            if len(rows):
                results = [product.forward(rows, weight) for weight in parts]
                outputs.append(torch.cat([y for y, _ in results], dim=-1))
                saved.append(results[0][1])  # the parts share their input
        ctx.counts, ctx.weights, ctx.product = counts, weights, product
        ctx.master_shape, ctx.master_dtype = master.shape, master.dtype
        ctx.saved_per_expert = len(saved[0]) if saved else 0
        ctx.save_for_backward(*(tensor for tensors in saved for tensor in tensors))
        return torch.cat(outputs) if outputs else x.new_zeros((0, master.shape[1]))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.new_empty((len(grad), ctx.master_shape[2]))
        if ctx.needs_input_grad[1]:
            # An expert without tokens has a gradient of zero, as in the unquantized model.
            grad_master = torch.zeros(ctx.master_shape, dtype=ctx.master_dtype, device=grad.device)
        saved, start = iter(ctx.saved_tensors), 0
        for expert, count in enumerate(ctx.counts):
            if count == 0:
                continue
            rows, inputs = grad[start : start + count], tuple(next(saved) for _ in range(ctx.saved_per_expert))
            if grad_x is not None:
                matrix = torch.cat([ctx.product.matrix_from(weight, grad.dtype) for weight in ctx.weights[expert]])
                torch.mm(rows, matrix, out=grad_x[start : start + count])
            if grad_master is not None:
                grad_master[expert] = rows.t() @ ctx.product.input_from(inputs, grad.dtype)
            start += count
        return grad_x, grad_master, None, None, None


class QuantExperts(LowBitLayer, nn.Module):
    """
    A module of experts of transformers after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    Its parameters, names and `state_dict` are those it had, and its forward never holds more than one expert in high
    precision besides them. `frozen_qparams` are those of all experts of a parameter, one above the other.
    """

    def low_bit(self, name: str, weight: Tensor | None = None) -> list[ExpertWeights]:
        """
        The low-bit weights of one parameter.

        Args:
            name (`str`): `"gate_up_proj"` or `"down_proj"`.
            weight (`Tensor`, *optional*): The full master `(experts, out, in)` where the parameter is a shard of it.

        Returns:
            `list`: per expert the low-bit weights of `PROJECTIONS[name]`.
        """
        count = len(PROJECTIONS[name])

        def quantize(whole: Tensor) -> list[ExpertWeights]:
            parts = self._quantize(whole.detach().flatten(0, 1), name).split(whole.shape[1] // count)
            return [tuple(parts[i : i + count]) for i in range(0, len(parts), count)]

        gathered = None if weight is None else (weight,)
        return self._code_cache.get(name, (getattr(self, name),), gathered, quantize)

    def sources(self) -> tuple[str, ...]:
        """None that belong together: each parameter is quantized by itself."""
        return ()

    def last_low_bits(self) -> Iterator[tuple[str, LowBitWeight]]:
        """What `low_bit` returned last, with names below this module, without looking at the masters."""
        for name, experts in self._code_cache.last().items():
            for expert, parts in enumerate(experts):
                for projection, weight in zip(PROJECTIONS[name], parts, strict=True):
                    yield f"{expert}.{projection}", weight

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """
        The eager forward of transformers with low-bit matrix products, in the same order of operations.

        Args:
            hidden_states (`Tensor`): `(tokens, hidden)`.
            top_k_index (`Tensor`): Chosen experts `(tokens, top_k)`, int64.
            top_k_weights (`Tensor`): Their routing weights `(tokens, top_k)`.
        """
        if not self.quantized_forward:
            return self.high_precision_class.forward(self, hidden_states, top_k_index, top_k_weights)
        routing = Routing.of(top_k_index, len(self.gate_up_proj))
        gate_up = self._matmul(hidden_states[routing.tokens], "gate_up_proj", routing.counts)
        down = self._matmul(self._apply_gate(gate_up), "down_proj", routing.counts)
        weighted = down * top_k_weights[routing.tokens, routing.choices, None]
        output = torch.zeros_like(hidden_states)
        # Expert by expert: no token occurs twice in one call, so the order of the sums is fixed on a GPU too.
        rows = weighted.to(output.dtype).split(routing.counts)
        for tokens, expert_rows in zip(routing.tokens.split(routing.counts), rows, strict=True):
            if len(tokens):
                output.index_add_(0, tokens, expert_rows)
        return output

    def _matmul(self, x: Tensor, name: str, counts: list[int]) -> Tensor:
        x, product = self._compute_input(x), self._get_product(x.device)
        with torch.autocast(x.device.type, enabled=False):
            return LowBitExpertsMatmul.apply(x, getattr(self, name), counts, self.low_bit(name), product)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self.high_precision_class._apply_gate(self, gate_up)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in PROJECTIONS)
        return f"{shapes}, {super().extra_repr()}"


# Finding and naming experts -----------------------------------------------------------------------------------------


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` that hold experts as 3-D parameters, quantized or not."""
    for name, module in checkpoint_modules(model):
        own = module.parameters(recurse=False)
        if not isinstance(module, _ConvNd) and any(p.ndim == 3 and p.is_floating_point() for p in own):
            yield name, module


def checkpoint_layers(model: nn.Module, ignore: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """
    The modules of `model` with experts as a checkpoint has them: one `Linear` per expert and projection.

    Targets and ignore lists are matched against these, as in llm-compressor. In addition, an ignore pattern that names
    the module of experts (`model.layers.0.mlp.experts`) or its class means all of it.
    """
    experts = dict(expert_modules(model))
    for name, module in checkpoint_modules(model):
        if name not in experts:
            yield name, getattr(module, "base_layer", module)  # what decides about an adapted layer
        elif not match_targets(name, module, list(ignore)):
            for parameter, projections in PROJECTIONS.items():
                _, rows, in_features = getattr(module, parameter).shape
                layer = nn.Linear(in_features, rows // len(projections), bias=False, device="meta")
                yield from ((layer_name, layer) for layer_name in layer_names(name, module, parameter))


def layer_names(name: str, module: nn.Module, *parameters: str) -> list[str]:
    """Names of the layers of `parameters` in a checkpoint, in the order of the rows: `name.0.gate_proj`, ..."""
    return [
        f"{name}.{expert}.{projection}"
        for parameter in parameters
        for expert in range(len(getattr(module, parameter)))
        for projection in PROJECTIONS[parameter]
    ]


def whole_experts(model: nn.Module, matched: list[Matched]) -> tuple[list[Matched], list[Matched]]:
    """Split what matched among `checkpoint_layers` into modules of experts, each in one scheme, and other layers."""
    schemes = {name: scheme for name, _, scheme in matched}
    experts: list[Matched] = []
    for name, module in expert_modules(model):
        layers = layer_names(name, module, *PROJECTIONS)
        found = [schemes.pop(layer, None) for layer in layers]
        left = [layer for layer, scheme in zip(layers, found, strict=True) if scheme is None]
        if len(left) == len(layers):
            continue
        if left:
            raise ValueError(
                f"{len(layers) - len(left)} of the {len(layers)} expert layers of {name!r} match quant_targets and not "
                f"quant_ignore, {len(left)} (first: {left[0]!r}) do not. An engine runs all experts of a layer in one "
                "kernel: quantize all of them, or ignore all with 're:.*experts.*'."
            )
        if any(scheme is not found[0] for scheme in found):
            raise ValueError(
                f"The expert layers of {name!r} are in several groups of the recipe, and an engine runs all experts of a "
                "layer in one kernel. Give them one scheme."
            )
        experts.append((name, module, found[0]))
    return experts, [entry for entry in matched if entry[0] in schemes]


def stacked_qparams(name: str, module: nn.Module, qparams: Mapping[str, QParams]) -> dict[str, QParams]:
    """Frozen scales and zero points of the experts `name`, given by layer, as one pair for each parameter."""
    stacked = {}
    for parameter in PROJECTIONS:
        scales, zero_points = zip(*(qparams[layer] for layer in layer_names(name, module, parameter)), strict=True)
        stacked[parameter] = torch.cat(scales), None if zero_points[0] is None else torch.cat(zero_points)
    return stacked


def checkpoint_tensors(
    name: str, module: nn.Module, parameter: str, rename: Callable[[str], str], weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a whole `weight` `(experts, out, in)` by checkpoint names: low-bit, or bfloat16 of plain experts."""
    layers = layer_names(name, module, parameter)
    if isinstance(module, QuantExperts):
        parts = (part for parts in module.low_bit(parameter, weight) for part in parts)
        for layer, low_bit in zip(layers, parts, strict=True):
            yield from ((rename(f"{layer}.{local}"), tensor) for local, tensor in low_bit.tensors.items())
    else:
        matrices = weight.detach().flatten(0, 1).chunk(len(layers))
        for layer, matrix in zip(layers, matrices, strict=True):
            yield rename(f"{layer}.weight"), matrix.to(MASTER_CAST_DTYPE, copy=True)
