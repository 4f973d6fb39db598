"""Check that the GPUs of one engine can share a model whose weights have scales in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from torch import nn

from ..quant.layers.experts import QuantExperts, layer_names
from ..quant.layers.layer import quantized_modules
from ..quant.scheme import effective_group_size, support_of
from ..quant.sharding.shards import shape_of


# What vLLM's models split along the input (`RowParallelLinear`), by transformers' names. They split other layers along
# the output, which cuts no group of inputs. Blocks of FP8_BLOCK it may cut, and vLLM says so itself.
ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")


@dataclass(frozen=True)
class _Layer:
    """A low-bit layer that vLLM splits along the input, whose weights have a scale for each `group` of inputs."""

    name: str
    inputs: int
    group: int
    scheme: QuantizationScheme

    def fits(self, ranks: int, group: int) -> bool:
        return self.inputs % (ranks * group) == 0


def check_parallel(model: nn.Module, args: Any) -> None:
    """
    Refuse GPUs of one engine that would share a group of weights with one scale.

    vLLM (0.31) refuses most of them, but only when it builds its model (`verify_group_size_divides_partition` and the
    like). For NVFP4A16 it has no such check, and loads scales of other groups.

    Args:
        model: A quantized model, with weights or without.
        args: Settings of the run.

    Raises:
        ValueError: with a layer, and settings that fit.
    """
    if not args.has_engine or args.vllm_tensor_parallel_size == 1:
        return

    ranks = args.vllm_tensor_parallel_size
    # Otherwise each GPU has whole experts.
    splits_experts = not args.engine_kwargs.get("enable_expert_parallel")
    layers = list(_row_parallel(model, splits_experts))
    for layer in layers:
        if not layer.fits(ranks, layer.group):
            raise ValueError(
                f"vllm_tensor_parallel_size={ranks} must give each GPU whole groups of {layer.group} inputs, got "
                f"{layer.inputs / ranks:g} of the {layer.inputs} inputs of {layer.name}. "
                f"Set {_sizes_that_fit(layers, layer.scheme, args)}."
            )


def _row_parallel(model: nn.Module, splits_experts: bool) -> Iterator[_Layer]:
    """The layers whose groups several GPUs could cut."""
    for name, module in quantized_modules(model):
        group = _group_along_input(module.scheme)
        if group is None:
            continue

        layer: Any = module
        if isinstance(layer, QuantExperts):
            if splits_experts:
                # All experts have this size.
                first = layer_names(name, layer, "down_proj")[0]
                yield _Layer(first, shape_of(layer.down_proj)[-1], group, layer.scheme)
        elif name.rpartition(".")[2] in ROW_PARALLEL:
            yield _Layer(name, layer.in_features, group, layer.scheme)


def _group_along_input(scheme: QuantizationScheme) -> int | None:
    """Weights along the input that have one scale; `None` if all of an output channel have it."""
    if scheme.weights.strategy == QuantizationStrategy.BLOCK:
        return scheme.weights.block_structure[1]
    return effective_group_size(scheme)


def _sizes_that_fit(layers: Sequence[_Layer], scheme: QuantizationScheme, args: Any) -> str:
    """The settings with which all layers fit."""
    ranks = args.vllm_tensor_parallel_size
    # Divisors, so that the engines still share the GPUs of the run.
    fewer = [number for number in range(1, ranks) if ranks % number == 0]
    fitting = [number for number in fewer if all(layer.fits(number, layer.group) for layer in layers)]
    advice = f"vllm_tensor_parallel_size: {max(fitting, default=1)}"

    # The groups of a checkpoint and of a recipe are written elsewhere.
    if args.from_checkpoint or args.quant_recipe is not None:
        return advice
    sizes = [size for size in support_of(scheme).group_sizes if size > 0]
    sizes = [size for size in sizes if all(layer.fits(ranks, size) for layer in layers)]
    if not sizes:
        return advice
    return f"quant_group_size: {max(sizes)} or {advice}"
