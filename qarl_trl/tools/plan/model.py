"""A model without weights, prepared as the trainer prepares the real one, and the [`Parameter`]s that are counted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ...quant import apply_quantization
from ...quant.layers.experts import PROJECTIONS, QuantExperts, stacks_of
from ...quant.layers.layer import LowBitLayer, quantized_modules
from ...quant.quantize import meta_tensors
from ...quant.scheme import support_of
from ...quant.sharding.gathers import can_gather_quantized
from .run import FLOAT32, Parameter


# The relevant fields of config.json for each model that README, recipes and TRL's docs name; its variants share them.
BUNDLED = json.loads(Path(__file__).with_name("models.json").read_text())
VARIANT = re.compile(r"-(Base|Instruct|Math|2507)(?=-|$)")

_models: dict[str, nn.Module] = {}


def read_config(name: str, field: str = "model_name_or_path") -> PretrainedConfig:
    """
    The unquantized config of a model. Downloads nothing.

    Args:
        name: A model folder, a model in the Hub's cache, or a model whose sizes are bundled.
        field: The field of the recipe that names it, for the error.

    Raises:
        ValueError: if it is none of these.
    """
    config = _stored_config(name, field)
    # transformers would build the checkpoint's own quantized layers. What is low-bit here is the trainer's choice.
    vars(config).pop("quantization_config", None)
    return config


def is_quantized(name: str) -> bool:
    """
    Whether a model is stored in low bits. Downloads nothing.

    Args:
        name: As [`read_config`] takes it, and refuses it.
    """
    return getattr(_stored_config(name, "model_name_or_path"), "quantization_config", None) is not None


def _stored_config(name: str, field: str) -> PretrainedConfig:
    """The config of a model as it is stored; the arguments and the error are those of [`read_config`]."""
    # A user's own folder of that name comes first.
    sizes = BUNDLED.get(VARIANT.sub("", name))
    if sizes and not Path(name).exists():
        # The checkpoints of all of them are in it.
        return AutoConfig.for_model(**sizes, dtype="bfloat16")

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{field}={name!r} is not a folder with a config.json that transformers reads, and its "
            f"sizes are not bundled ({', '.join(BUNDLED)}). Download its config.json and give that folder. "
            f"({reason})"
        ) from error


def model_without_weights(
    config: PretrainedConfig, dtype: torch.dtype | str, adapter: Any = None, quantization: Any = None
) -> nn.Module:
    """
    A model without weights, with an adapter and low-bit layers. It is cached: do not change it.

    Not `validate.skeleton`, which takes no dtype, on which bytes depend, and builds the class that the config names:
    with it, vision models would be estimated by formulas that do not know their layers.

    Args:
        config: The model's config.
        dtype: Of the master weights, as transformers takes it.
        adapter: The adapter's `peft.PeftConfig`, if any.
        quantization: What to quantize and how, as `apply_quantization` takes it, or `None`.

    Returns:
        The model on the meta device.
    """
    # The search for levers asks for the same model dozens of times, and a large one takes seconds.
    key = repr((config.to_dict(), dtype, adapter, quantization))
    if key in _models:
        return _models[key]

    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForCausalLM._model_mapping and not has_code:
        raise ValueError(f"plan knows what AutoModelForCausalLM builds, and {config.model_type} is no such model.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapter is not None:
        from peft import get_peft_model

        # PEFT would fill the adapter's weights with random numbers before it throws them away: those of 30B's experts
        # take a minute of processor.
        with torch.device("meta"):
            model = get_peft_model(model, adapter)
    if quantization is not None:
        model = apply_quantization(model, quantization)

    _models[key] = model
    return model


def parameters(
    model: nn.Module, optim: str, ranks: int = 1, frozen: bool = False, in_float32: bool = False
) -> tuple[Parameter, ...]:
    """
    The parameters of a model, tied ones once.

    Args:
        model: The model, also without weights.
        optim: TRL's `optim`, or `"muon"`.
        ranks: Number of processes if FSDP2 gathers quantized values, else 1.
        frozen: Whether low-bit weights have no master weights.
        in_float32: Whether all that is trained is float32, whatever dtype the model loads in.
    """
    optimizers: dict[str, str] = {}
    other_optimizer = optim
    if optim == "muon":
        optimizers = _trained_by_muon(model)
        other_optimizer = "adamw_torch"

    low_bits = _low_bits(model, ranks)
    stacks = _stacks_of_experts(model)
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]

    counted = []
    for name, param in model.named_parameters():
        low_bit = low_bits.get(id(param), {})

        size = param.element_size()
        if frozen and low_bit:
            size = 0
        if in_float32 and param.requires_grad:
            size = FLOAT32

        optimizer = ""
        if param.requires_grad:
            optimizer = optimizers.get(name, other_optimizer)

        layer = _layer_of(name, layers)
        holds_experts = id(param) in stacks
        counted.append(
            Parameter(name, tuple(param.shape), size, layer, optimizer, holds_experts=holds_experts, **low_bit)
        )
    return tuple(counted)


def _trained_by_muon(model: nn.Module) -> dict[str, str]:
    """The names of the parameters that Muon trains, each with its kind of Muon."""
    from ...optim import split_parameters  # loads the Trainer

    matrices, experts, _ = split_parameters(model)
    return dict.fromkeys(matrices, "muon") | dict.fromkeys(experts, "experts")


def _stacks_of_experts(model: nn.Module) -> set[int]:
    """The `id`s of the parameters that hold all experts of a layer, as no kernel of a convolution does."""
    stacks: set[int] = set()
    # All modules: an adapter keeps the experts in one of its own.
    for module in model.modules():
        stacks.update(map(id, stacks_of(module)))
    return stacks


def _layer_of(name: str, layers: Sequence[str]) -> str:
    """The prefix of the decoder layer that a parameter is in; `""` if it is in none."""
    for layer in layers:
        if name.startswith(layer):
            return layer
    return ""


def _low_bits(model: nn.Module, ranks: int) -> dict[int, dict[str, Any]]:
    """What a `Parameter` says of its low-bit tensors, by the `id` of the weight."""
    sizes = _TensorSizes()
    low_bits = {}

    for _, module in quantized_modules(model):
        names = ["weight"]
        if isinstance(module, QuantExperts):
            names = list(PROJECTIONS)

        owner = getattr(module, "base_layer", module)  # below peft's layer
        for name in names:
            weight = getattr(owner, name)
            low_bits[id(weight)] = _low_bit(module, name, weight, ranks, sizes)
    return low_bits


def _low_bit(module: LowBitLayer, name: str, weight: Tensor, ranks: int, sizes: _TensorSizes) -> dict[str, Any]:
    """What a `Parameter` says of the low-bit tensors of one weight, `(out, in)` or `(experts, out, in)`."""
    *all_but_last, columns = weight.shape
    rows = math.prod(all_but_last)

    # `make_master_shards` replaces only float32 master weights, and only if each process has whole rows of its own.
    can_gather = name in module.gatherable and weight.dtype == torch.float32
    gathered = can_gather and can_gather_quantized(weight.shape, ranks, module.scheme)
    local_rows = rows
    if gathered:  # each process keeps the quantized values of its own rows only
        local_rows = rows // ranks

    # A checkpoint stores each projection of each expert as a matrix of its own, with its own padding.
    matrices = 1
    if isinstance(module, QuantExperts):
        matrices = weight.shape[0] * len(PROJECTIONS[name])

    return {
        "quantized": sizes.nbytes(module.scheme, local_rows, columns),
        "gathered": gathered,
        "stored": matrices * sizes.nbytes(module.scheme, rows // matrices, columns),
        "rounds_inputs": support_of(module.scheme).activations != "none",
    }


class _TensorSizes:
    """Bytes of low-bit weights. Each size is computed once, which takes a while: most layers of a model are alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], int] = {}

    def nbytes(self, scheme: QuantizationScheme, rows: int, columns: int) -> int:
        """Bytes of the tensors that a checkpoint stores for a weight `(rows, columns)`."""
        # Schemes have no hash. The model keeps them, so that no other can get the same `id`.
        key = (id(scheme), rows, columns)
        if key not in self._known:
            tensors = meta_tensors(scheme, rows, columns)
            self._known[key] = sum(tensor.nbytes for tensor in tensors.values())
        return self._known[key]
