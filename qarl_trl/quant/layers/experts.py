"""`QuantExperts`: mixture-of-experts weights whose forward multiplies by low-bit matrices, all experts at once.

transformers keeps the experts of a layer as two 3-D parameters. Checkpoints, llm-compressor and vLLM have one linear
layer per expert and projection instead. Its rows are quantized independently, so each parameter can be one low-bit
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PretrainedConfig

from ..gemms.grouped import ExpertsGemm
from ..names import checkpoint_modules
from ..sharding.gathers import whole_weights
from ..sharding.shards import shape_of
from .layer import LowBitLayer


# The projections in the rows of each parameter, with the names that llm-compressor writes for every architecture. vLLM
# reads these names, also for Mixtral, whose original checkpoint has others (w1, w3, w2), but not for those below.
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Experts whose tensors vLLM (0.31, `ckpt_names` of `lfm2_moe.py`, `minimax_m2.py` and `phimoe.py`) reads as w1, w2 and
# w3 alone. It drops others without a word, and the experts would stay as memory was.
UNREADABLE = ("Lfm2MoeExperts", "MiniMaxM2Experts", "PhimoeExperts")
# Attributes by transformers' `use_experts_implementation` of the layout that `QuantExperts.forward` computes. In other
# layouts the rows of gate and up alternate, rows and columns are exchanged, or there are biases.
EXPERTS_LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
# Stands for the number of an expert in the names of stacks.
EVERY_EXPERT = "*"
# The names under which model families keep the number of experts in a layer.
_NUMBER_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def num_experts(config: PretrainedConfig) -> int:
    """Number of experts in a layer, 0 for a dense model."""
    text = config.get_text_config()
    numbers = [getattr(text, name, None) or 0 for name in _NUMBER_OF_EXPERTS]
    return max(numbers)


def route(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Sort the (token, choice) pairs of a batch by expert, without waiting for the device.

    Args:
        top_k_index: The router's choices, `(tokens, top_k)`.
        num_experts: Number of experts in the layer.

    Returns:
        pairs: The number of each pair, `token * top_k + choice`, int64 `(pairs,)`, ascending for each expert.
        places: The position of each number in `pairs`, int64 `(pairs,)`.
        offsets: The end of each expert's pairs, int32 `(experts,)`.
    """
    # Stable, so that the rows of an expert stay in the order of tokens, on every device.
    chosen, pairs = top_k_index.reshape(-1).sort(stable=True)
    experts = torch.arange(num_experts, dtype=chosen.dtype, device=chosen.device)
    offsets = torch.searchsorted(chosen, experts, right=True, out_int32=True)

    # The gemms would not write the rows of an expert that does not exist.
    torch._assert_async(
        (offsets[-1] == len(chosen)) & (chosen[:1] >= 0).all(),
        f"The router chose an expert outside the {num_experts} that exist.",
    )

    numbers = torch.arange(len(pairs), device=pairs.device)
    places = torch.empty_like(pairs).scatter_(0, pairs, numbers)
    return pairs, places, offsets


class QuantExperts(LowBitLayer, nn.Module):
    """
    A transformers module of experts after [`qarl_trl.quant.apply_quantization`]; never constructed directly.

    It keeps its parameters, names and `state_dict`. The low-bit weight of a parameter is `(experts * out, in)`.
    What a multiplication dequantizes and keeps is the gemm's choice ([`ExpertsGemm`]).
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gatherable = tuple(PROJECTIONS)

    def weight_names(self) -> tuple[str, ...]:
        return tuple(PROJECTIONS)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """
        transformers' `grouped_mm` forward with low-bit gemms, in the same order of operations.

        Args:
            hidden_states: `(tokens, hidden)`.
            top_k_index: Chosen experts, int64 `(tokens, top_k)`.
            top_k_weights: Their weights, `(tokens, top_k)`.

        Returns:
            `(tokens, hidden)`. It sums a token's choices in the router's order, by a reduction without atomics, so
            that a GPU always gives the same sum.
        """
        if not self.quantized_forward:
            with whole_weights(self):
                return self.high_precision_class.forward(self, hidden_states, top_k_index, top_k_weights)

        pairs, places, offsets = route(top_k_index, len(self.gate_up_proj))
        # Pair `token * top_k + choice` belongs to this token.
        tokens = pairs // top_k_index.shape[1]

        gate_up = self._matmul(hidden_states[tokens], "gate_up_proj", offsets)
        down = self._matmul(self._apply_gate(gate_up), "down_proj", offsets)

        weighted = down * top_k_weights.reshape(-1)[pairs].unsqueeze(-1)
        # From the order of experts back to `(tokens, top_k, hidden)`.
        by_token = weighted[places].view(*top_k_index.shape, hidden_states.shape[1])
        return by_token.sum(dim=1).to(hidden_states.dtype)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return self.high_precision_class._apply_gate(self, gate_up)  # that class's forward also calls it on `self`

    def _matmul(self, x: Tensor, name: str, offsets: Tensor) -> Tensor:
        """Rows of `x` `(pairs, in)`, sorted by expert, times the matrices of one parameter."""
        gemm = ExpertsGemm(self.choose_gemm(x.device), offsets)
        return self.multiply(x, name, gemm, getattr(self, name))


# Finding and naming experts -----------------------------------------------------------------------------------------


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of `model` with experts as 3-D parameters, quantized or not, by their checkpoint names."""
    for name, module in checkpoint_modules(model):
        if stacks_of(module):
            yield name, module


def stacks_of(module: nn.Module) -> list[nn.Parameter]:
    """
    The parameters of a module itself, not of those in it, that hold the matrices of experts.

    Args:
        module: Any module.
    """
    if isinstance(module, _ConvNd):  # its kernels have three dimensions, too
        return []
    return [param for local, param in module.named_parameters(recurse=False) if _is_stack(local, param)]


def _is_stack(local: str, param: nn.Parameter) -> bool:
    """Whether a parameter of a module holds the matrices of experts."""
    shape = shape_of(param)
    if len(shape) != 3 or not param.is_floating_point():
        return False
    # One matrix under another name: positions and the probe of a vision tower (InternVL, SigLIP).
    return shape[0] > 1 or local in PROJECTIONS


def layout_of(module: nn.Module) -> dict[str, Any]:
    """What a module of experts says of its layout, for comparison with `EXPERTS_LAYOUT`."""
    return {attribute: getattr(module, attribute, None) for attribute in EXPERTS_LAYOUT}


def has_known_layout(module: nn.Module) -> bool:
    """Whether the rows of the parameters of experts are those of [`layer_names`], one projection after the other."""
    return layout_of(module) == EXPERTS_LAYOUT


def layer_names(name: str, module: nn.Module, parameter: str) -> list[str]:
    """Checkpoint names of the layers in a parameter, in the order of its rows: `name.0.gate_proj`, ..."""
    number = shape_of(getattr(module, parameter))[0]
    return [f"{name}.{expert}.{projection}" for expert in range(number) for projection in PROJECTIONS[parameter]]


# Stacks --------------------------------------------------------------------------------------------------------------


def stack_name(name: str) -> str:
    """
    The name of a stack: a tensor of every expert, `(experts, ...)`.

    Args:
        name: What a checkpoint calls that tensor of the first expert, `experts.0.gate_proj.weight_packed`.

    Returns:
        `experts.*.gate_proj.weight_packed`.
    """
    experts, _, projection, tensor = name.rsplit(".", 3)
    return f"{experts}.{EVERY_EXPERT}.{projection}.{tensor}"


def parts_of_stack(name: str) -> tuple[str, str, str] | None:
    """
    The parts of the name of a stack, `None` for that of another tensor.

    Args:
        name: The name of a tensor in a stream.

    Returns:
        The module of experts, the projection, and the local name of the tensor.
    """
    experts, separator, rest = name.partition(f".{EVERY_EXPERT}.")
    if not separator:
        return None
    projection, _, tensor = rest.partition(".")
    return experts, projection, tensor


def unstacked(name: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stack one by one, by their names in a checkpoint; views."""
    for expert, tensor in enumerate(stack.unbind()):
        yield name.replace(EVERY_EXPERT, str(expert)), tensor
