"""`QuantExperts`: mixture-of-experts weights whose forward multiplies by low-bit matrices, all experts at once.

transformers keeps the experts of a layer as two 3-D parameters. Checkpoints, llm-compressor and vLLM have one linear layer per
expert and projection instead. Its rows are quantized independently, so each parameter can be one low-bit weight.
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


# The projections in the rows of each parameter, with the names that llm-compressor writes for every architecture. vLLM reads
# these names, even if the original checkpoint has others (Mixtral's w1, w3, w2).
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def num_experts(config: PretrainedConfig) -> int:
    """Number of experts in a layer, 0 for a dense model; each model family names it differently."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    text = config.get_text_config()
    return max(getattr(text, name, None) or 0 for name in names)


def route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Sort the (token, choice) pairs of a batch by expert, from the router's choices `(tokens, top_k)`.

    Returns each pair's number `token * top_k + choice`, int64 `(pairs,)`, ascending for each expert; the position of each number in
    it, int64 `(pairs,)`; and the end of each expert's pairs, int32 `(experts,)`. It does not wait for the device.
    """
    chosen, pairs = top_k_index.reshape(-1).sort(stable=True)
    experts = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    offsets = torch.searchsorted(chosen, experts, right=True, out_int32=True)
    # The gemms would not write the rows of an expert that does not exist.
    torch._assert_async(
        (offsets[-1] == len(chosen)) & (chosen[:1] >= 0).all(),
        f"The router chose an expert outside the {num_experts} that exist.",
    )
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    return pairs, places, offsets


class QuantExperts(LowBitLayer, nn.Module):
    """
    A transformers module of experts after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    It keeps its parameters, names and `state_dict`. A multiplication dequantizes all experts of a parameter, and keeps
    nothing.
    """

    gate_up_proj: Tensor
    packed_parameters = tuple(PROJECTIONS)

    low_bit = LowBitLayer.low_bit_of  # `(experts * out, in)`, by the parameter's name

    def low_bit_layers(self, name: str, weight: Tensor | None = None) -> list[LowBitWeight]:
        """`low_bit` split as in a checkpoint, into views: for each expert the projections `PROJECTIONS[name]`."""
        low_bit = self.low_bit(name, weight)
        return low_bit.split(low_bit.shape[0] // (len(getattr(self, name)) * len(PROJECTIONS[name])))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """
        transformers' `grouped_mm` forward with low-bit gemms, in the same order of operations.

        Takes `(tokens, hidden)`, chosen experts int64 `(tokens, top_k)` and their weights. It sums a token's choices in the router's
        order, by a reduction without atomics, so that a GPU always gives the same sum.
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
        return self.high_precision_class._apply_gate(self, gate_up)  # that class's forward also calls it on `self`

    def _matmul(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        gemm = ExpertsGemm(self._get_gemm(x.device), offsets)
        return self._multiply(x, partial(self.low_bit, name), gemm, getattr(self, name))


# Finding and naming experts -----------------------------------------------------------------------------------------


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` with experts as 3-D parameters, quantized or not."""
    for name, module in checkpoint_modules(model):
        own = module.parameters(recurse=False)
        if not isinstance(module, _ConvNd) and any(len(shape_of(p)) == 3 and p.is_floating_point() for p in own):
            yield name, module


def layer_names(name: str, module: nn.Module, parameter: str) -> list[str]:
    """Checkpoint names of the layers in a parameter, in the order of its rows: `name.0.gate_proj`, ..."""
    experts = range(shape_of(getattr(module, parameter))[0])
    return [f"{name}.{expert}.{projection}" for expert in experts for projection in PROJECTIONS[parameter]]


def checkpoint_tensors(
    name: str, module: nn.Module, parameter: str, rename: Callable[[str], str], weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and tensors of a `weight` `(experts, out, in)`: low-bit, or bfloat16 for plain experts."""
    layers = layer_names(name, module, parameter)
    if isinstance(module, QuantExperts):
        for layer, low_bit in zip(layers, module.low_bit_layers(parameter, weight), strict=True):
            yield from ((rename(f"{layer}.{local}"), tensor) for local, tensor in low_bit.tensors.items())
    else:
        matrices = whole(weight.detach()).flatten(0, 1).chunk(len(layers))
        for layer, matrix in zip(layers, matrices, strict=True):
            yield rename(f"{layer}.weight"), matrix.to(MASTER_CAST_DTYPE, copy=True)
