"""`QuantExperts`: fused mixture-of-experts weights whose forward multiplies by low-bit matrices, expert by expert.

transformers keeps the experts of a layer as two 3-D parameters. Checkpoints, llm-compressor and vLLM know them as one
linear layer per expert and projection, and each of those is quantized here by itself with the one quantizer. Invariant:
the module has exactly the parameters, names and `state_dict` it had, and at no time is there a second high-precision
copy of more than one expert (paper Sec. 3.1, applied to Qwen3-30B-A3B in Table 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_targets
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .linear import LowBitLayer
from .names import checkpoint_modules
from .products import Kernel
from .quantize import LowBitWeight, quantize_weight
from .scheme import MASTER_CAST_DTYPE, check_divisible


# Parameter of the fused module: the projections that its rows hold, by the names llm-compressor writes for every
# architecture. vLLM reads them, also where the original checkpoint has others (Mixtral's w1, w3, w2).
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# What transformers' `use_experts_implementation` says of a layout that the forward below computes.
LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}

# Name, module and scheme of a layer to quantize.
Matched = tuple[str, nn.Module, QuantizationScheme]
# One expert's low-bit weights of a fused parameter: (gate, up) or (down,).
ExpertWeights = tuple[LowBitWeight, ...]


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
    kernel. Only the inputs are kept for the backward: each expert's matrix is dequantized again when its turn comes.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, master: Tensor, counts: Sequence[int], weights: Sequence[ExpertWeights], kernel: Kernel
    ) -> Tensor:
        outputs, saved = [], []
        for rows, parts in zip(x.split(list(counts)), weights, strict=True):
            if len(rows) == 0:
                continue
            results = [kernel.forward(rows, weight) for weight in parts]
            outputs.append(torch.cat([y for y, _ in results], dim=-1) if len(results) > 1 else results[0][0])
            saved.append(results[0][1])  # the parts share their input
        ctx.counts, ctx.weights, ctx.kernel = counts, weights, kernel
        ctx.master_shape, ctx.master_dtype = master.shape, master.dtype
        ctx.saved_per_expert = [len(tensors) for tensors in saved]
        ctx.save_for_backward(*(tensor for tensors in saved for tensor in tensors))
        return torch.cat(outputs) if outputs else x.new_zeros((0, master.shape[1]))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_x = grad_master = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.new_empty((len(grad), ctx.master_shape[2]))
        if ctx.needs_input_grad[1]:
            # An expert without tokens has a gradient of zero, as in the unquantized model.
            grad_master = torch.zeros(ctx.master_shape, dtype=ctx.master_dtype, device=grad.device)
        saved, sizes, start = iter(ctx.saved_tensors), iter(ctx.saved_per_expert), 0
        for expert, count in enumerate(ctx.counts):
            if count == 0:
                continue
            inputs = tuple(next(saved) for _ in range(next(sizes)))
            rows = grad[start : start + count]
            if grad_x is not None:
                matrix = torch.cat([ctx.kernel.matrix_from(weight, grad.dtype) for weight in ctx.weights[expert]])
                torch.mm(rows, matrix, out=grad_x[start : start + count])
            if grad_master is not None:
                grad_master[expert] = rows.t() @ ctx.kernel.input_from(inputs, grad.dtype)
            start += count
        return grad_x, grad_master, None, None, None


class QuantExperts(LowBitLayer, nn.Module):
    """
    A fused experts module of transformers after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    Attributes:
        scheme (`QuantizationScheme`): The scheme of every expert's weights.
        frozen_qparams (`dict` or `None`): Scale and zero point to keep, by expert and projection (`"3.gate_proj"`).
        kernel_choice (`str`): Which kernel multiplies, see [`~qarl_trl.quant.kernel_choice.select_kernel`].
        quantized_forward (`bool`): `False` leaves the forward to transformers, in high precision.
        high_precision_class (`type`): The class that the module had, e.g. `Qwen3MoeExperts`.
    """

    frozen_qparams: dict[str, tuple[Tensor, Tensor | None]] | None
    high_precision_class: type[nn.Module]

    def low_bit(self, name: str, weight: Tensor | None = None) -> list[ExpertWeights]:
        """
        The low-bit weights behind one fused parameter, quantized when the master has changed since the last call.

        Args:
            name (`str`): `"gate_up_proj"` or `"down_proj"`.
            weight (`Tensor`, *optional*): The full master `(experts, out, in)` where the parameter is a shard of it.

        Returns:
            `list`: per expert the low-bit weights of `PROJECTIONS[name]`.
        """
        master = getattr(self, name)

        def quantize(whole: Tensor) -> list[ExpertWeights]:
            return [self._quantize_expert(index, expert, name) for index, expert in enumerate(whole.detach())]

        return self._cached_low_bit((master,), None if weight is None else (weight,), quantize, slot=name)

    def _quantize_expert(self, expert: int, weight: Tensor, name: str) -> ExpertWeights:
        """One expert's matrices, each by itself: `weight` is `(out, in)`, or gate above up."""
        low_bit = []
        for projection, part in zip(PROJECTIONS[name], weight.chunk(len(PROJECTIONS[name])), strict=True):
            qparams = None if self.frozen_qparams is None else self.frozen_qparams[f"{expert}.{projection}"]
            if qparams is not None:
                qparams = tuple(t if t is None else t.to(weight.device) for t in qparams)
            low_bit.append(quantize_weight(part, self.scheme, qparams))
        return tuple(low_bit)

    def sources(self) -> tuple[str, ...]:
        """None that belong together: each fused parameter is quantized by itself."""
        return ()

    def last_low_bits(self) -> Iterator[tuple[str, LowBitWeight]]:
        """What `low_bit` returned last, with names below this module, without looking at the masters."""
        for name, (_, experts) in self._cached_slots.items():
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
        x, kernel = self._compute_input(x), self._get_kernel(x.device)
        with torch.autocast(x.device.type, enabled=False):
            return LowBitExpertsMatmul.apply(x, getattr(self, name), counts, self.low_bit(name), kernel)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self.high_precision_class._apply_gate(self, gate_up)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in PROJECTIONS)
        return f"{shapes}, {super().extra_repr()}"


# Finding and naming experts -----------------------------------------------------------------------------------------


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` that hold experts as 3-D parameters, quantized or not."""
    for name, module in checkpoint_modules(model):
        own = module.parameters(recurse=False)
        if not isinstance(module, _ConvNd) and any(p.ndim == 3 and p.is_floating_point() for p in own):
            yield name, module


def projection_names(name: str, parameter: str, num_experts: int) -> Iterator[str]:
    """Layer names of a fused parameter in a checkpoint, in the order of its rows: `name.0.gate_proj`, ..."""
    for expert in range(num_experts):
        yield from (f"{name}.{expert}.{projection}" for projection in PROJECTIONS[parameter])


def checkpoint_layers(model: nn.Module, ignore: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """
    The modules of `model` with fused experts as a checkpoint has them: one `Linear` per expert and projection.

    Targets and ignore lists are matched against these, as in llm-compressor. In addition, an ignore pattern that names
    the fused module (`model.layers.0.mlp.experts`) or its class means all of it.
    """
    fused = dict(fused_experts(model))
    for name, module in checkpoint_modules(model):
        if name not in fused:
            yield name, getattr(module, "base_layer", module)  # what decides about an adapted layer
        elif not match_targets(name, module, list(ignore)):
            for parameter, projections in PROJECTIONS.items():
                experts, rows, in_features = getattr(module, parameter).shape
                layer = nn.Linear(in_features, rows // len(projections), bias=False, device="meta")
                yield from ((layer_name, layer) for layer_name in projection_names(name, parameter, experts))


def whole_experts(model: nn.Module, matched: list[Matched]) -> tuple[list[Matched], list[Matched]]:
    """
    Split what matched among `checkpoint_layers` into fused experts modules and other layers.

    Raises:
        ValueError: when only some of a module's experts or projections are meant, or in different schemes: an engine runs
            them in one kernel.
    """
    schemes = {name: scheme for name, _, scheme in matched}
    experts: list[Matched] = []
    for name, module in fused_experts(model):
        layers = [n for p in PROJECTIONS for n in projection_names(name, p, len(getattr(module, p)))]
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


def check_experts(name: str, module: nn.Module) -> None:
    """
    Refuse fused weights in a form that `QuantExperts.forward` does not compute.

    Raises:
        ValueError: saying what was found.
    """
    found = {key: getattr(module, key, None) for key in LAYOUT}
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)}
    if found != LAYOUT or list(shapes) != list(PROJECTIONS) or not _fit(shapes):
        raise ValueError(
            f"The fused experts {name!r} ({type(module).__name__}) are of a form that has no low-bit forward: {found}, "
            f"parameters {shapes}. Needed: {LAYOUT}, gate_up_proj (experts, 2 * intermediate, hidden) and down_proj "
            "(experts, hidden, intermediate). Left as they are, most of the model would stay in high precision: such a "
            "model needs quant_scheme='none'."
        )
    for key, param in module.named_parameters(recurse=False):
        if not param.is_floating_point():
            raise ValueError(f"{name}.{key} holds {param.dtype} weights. Load the model in high precision.")


def check_quantizable(name: str, module: nn.Module, scheme: QuantizationScheme, kernel: str) -> None:
    """
    Refuse experts that cannot run in `scheme`.

    Raises:
        ValueError: when groups do not divide a size, the forward was replaced, or the kernel has no experts.
    """
    for parameter, projections in PROJECTIONS.items():
        _, rows, in_features = getattr(module, parameter).shape
        check_divisible(f"{name}.*.{projections[0]}", in_features, scheme, rows // len(projections))
    if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
        raise ValueError(
            f"The experts {name!r} have a replaced forward (device_map offloading, or a patch), so their quantized "
            "forward would never run. Load the model on one device: model_init_kwargs={'device_map': None}."
        )
    if kernel == "engine":
        raise ValueError(
            "quant_kernel='engine' came with a mixture-of-experts model, whose experts an engine multiplies by fused kernels that "
            "the learner does not call. Use quant_kernel='auto'."
        )


def quantize_experts(
    name: str,
    module: nn.Module,
    scheme: QuantizationScheme,
    kernel: str,
    quantize_forward: bool,
    qparams: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
) -> None:
    """Give the fused experts module `name` its low-bit forward, in place; `qparams` are by the names of its layers."""
    module.frozen_qparams = None
    if qparams is not None:
        module.frozen_qparams = {n.removeprefix(f"{name}."): q for n, q in qparams.items() if n.startswith(f"{name}.")}
    module.high_precision_class = type(module)
    module.__class__ = QuantExperts
    module.scheme = scheme
    module.kernel_choice = kernel
    module.quantized_forward = quantize_forward


def checkpoint_tensors(name: str, module: nn.Module, parameter: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """
    The checkpoint's tensors of one fused parameter.

    Args:
        name (`str`): Name of `module`.
        module (`nn.Module`): Fused experts, quantized or not.
        parameter (`str`): `"gate_up_proj"` or `"down_proj"`.
        weight (`Tensor`): The whole parameter `(experts, out, in)`.

    Yields:
        `tuple[str, Tensor]`: `<name>.<expert>.<projection>.<tensor>`; a bfloat16 `weight` where nothing is quantized.
    """
    layer_names = projection_names(name, parameter, len(weight))
    if isinstance(module, QuantExperts):
        parts = (part for parts in module.low_bit(parameter, weight) for part in parts)
        for layer_name, low_bit in zip(layer_names, parts, strict=True):
            yield from ((f"{layer_name}.{local}", tensor) for local, tensor in low_bit.tensors.items())
    else:
        matrices = (part for expert in weight.detach() for part in expert.chunk(len(PROJECTIONS[parameter])))
        for layer_name, matrix in zip(layer_names, matrices, strict=True):
            yield f"{layer_name}.weight", matrix.to(MASTER_CAST_DTYPE, copy=True)


def _fit(shapes: dict[str, tuple[int, ...]]) -> bool:
    (experts, rows, hidden), (experts_down, hidden_down, intermediate) = shapes["gate_up_proj"], shapes["down_proj"]
    return (experts, rows, hidden) == (experts_down, 2 * intermediate, hidden_down)
