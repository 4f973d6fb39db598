"""`QuantExperts`: mixture-of-experts weights whose forward multiplies by low-bit matrices, all experts at once.

transformers keeps the experts of a layer as two 3-D parameters. Checkpoints, llm-compressor and vLLM know them as one
linear layer per expert and projection, whose rows are quantized independently: a parameter is one low-bit weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PretrainedConfig

from .gathers import whole_weights
from .grouped import ExpertsGemm
from .linear import LowBitLayer
from .names import checkpoint_modules
from .quantize import LowBitWeight
from .scheme import MASTER_CAST_DTYPE
from .shards import shape_of, whole


# The projections that the rows of each parameter hold, by the names llm-compressor writes for every architecture. vLLM
# reads them, also where the original checkpoint has others (Mixtral's w1, w3, w2).
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def num_experts(config: PretrainedConfig) -> int:
    """Experts of a layer, 0 for a dense model; every family has a name of its own for it."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    text = config.get_text_config()
    return max(getattr(text, name, None) or 0 for name in names)


def route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    The (token, choice) pairs of a batch, sorted by expert, from the router's choices `(tokens, top_k)`.

    Returns each pair's number `token * top_k + choice`, int64 `(pairs,)`, those of one expert in rising order; where in it each
    number is, int64 `(pairs,)`; and for each expert the place behind its last pair, int32 `(experts,)`. No host sync.
    """
    chosen, pairs = top_k_index.reshape(-1).sort(stable=True)
    experts = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    offsets = torch.searchsorted(chosen, experts, right=True, out_int32=True)
    # The gemms would leave the rows of an expert that is not there as they found the memory.
    torch._assert_async(
        (offsets[-1] == len(chosen)) & (chosen[:1] >= 0).all(),
        f"The router chose an expert that is none of the {num_experts} there are.",
    )
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    return pairs, places, offsets


class QuantExperts(LowBitLayer, nn.Module):
    """
    A module of experts of transformers after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    Its parameters, names and `state_dict` are those it had. While a parameter multiplies, all its experts are dequantized, and nothing
    is kept.
    """

    gate_up_proj: Tensor
    packed_parameters = tuple(PROJECTIONS)

    low_bit = LowBitLayer.low_bit_of  # `(experts * out, in)`, by the parameter's name

    def low_bit_layers(self, name: str, weight: Tensor | None = None) -> list[LowBitWeight]:
        """`low_bit` as a checkpoint has it, views of the same storage: per expert those of `PROJECTIONS[name]`."""
        low_bit = self.low_bit(name, weight)
        return low_bit.split(low_bit.shape[0] // (len(getattr(self, name)) * len(PROJECTIONS[name])))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """
        transformers' `grouped_mm` forward with low-bit gemms, in the same order of operations.

        Of `(tokens, hidden)`, chosen experts int64 `(tokens, top_k)` and their weights. A token's choices are summed in the
        router's order, by a reduction: no atomics, so a GPU gives the same sum again.
        """
        if not self.quantized_forward:
            with whole_weights(self):
                return self.high_precision_class.forward(self, hidden_states, top_k_index, top_k_weights)
        pairs, places, offsets = route(top_k_index, len(self.gate_up_proj))
        gate_up = self._matmul(hidden_states[pairs // top_k_index.shape[1]], "gate_up_proj", offsets)
        down = self._matmul(self._apply_gate(gate_up), "down_proj", offsets)
        weighted = down * top_k_weights.reshape(-1)[pairs].unsqueeze(-1)
        return weighted[places].view(*top_k_index.shape, hidden_states.shape[1]).sum(dim=1).to(hidden_states.dtype)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self.high_precision_class._apply_gate(self, gate_up)  # which its own forward calls on `self`, too

    def _matmul(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        gemm = ExpertsGemm(self._get_gemm(x.device), offsets)
        return self._multiply(x, partial(self.low_bit, name), gemm, getattr(self, name))


# Finding and naming experts -----------------------------------------------------------------------------------------


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` that hold experts as 3-D parameters, quantized or not."""
    for name, module in checkpoint_modules(model):
        own = module.parameters(recurse=False)
        if not isinstance(module, _ConvNd) and any(len(shape_of(p)) == 3 and p.is_floating_point() for p in own):
            yield name, module


def layer_names(name: str, module: nn.Module, parameter: str) -> list[str]:
    """Names of the layers of a parameter in a checkpoint, in the order of the rows: `name.0.gate_proj`, ..."""
    experts = range(shape_of(getattr(module, parameter))[0])
    return [f"{name}.{expert}.{projection}" for expert in experts for projection in PROJECTIONS[parameter]]


def checkpoint_tensors(
    name: str, module: nn.Module, parameter: str, rename: Callable[[str], str], weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a `weight` `(experts, out, in)` by checkpoint names: low-bit, or bfloat16 of plain experts."""
    layers = layer_names(name, module, parameter)
    if isinstance(module, QuantExperts):
        for layer, low_bit in zip(layers, module.low_bit_layers(parameter, weight), strict=True):
            yield from ((rename(f"{layer}.{local}"), tensor) for local, tensor in low_bit.tensors.items())
    else:
        matrices = whole(weight.detach()).flatten(0, 1).chunk(len(layers))
        for layer, matrix in zip(layers, matrices, strict=True):
            yield rename(f"{layer}.weight"), matrix.to(MASTER_CAST_DTYPE, copy=True)
