"""Which tensors a compressed-tensors checkpoint must hold, by its `config.json` and transformers' model of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import match_targets
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..quant.layers.experts import PROJECTIONS, expert_modules, has_known_layout, layer_names
from ..quant.names import architecture_name, architecture_of, checkpoint_renaming
from ..quant.quantize import meta_tensors
from ..quant.scheme import MASTER_CAST_DTYPE, scheme_for


# Formats of older versions of compressed-tensors, which store only the weights that are not 0.
SPARSE_FORMATS = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24")


class UnknownTensorsError(Exception):
    """Which tensors a checkpoint must hold is not known; the message is the reason."""


class Layouts:
    """
    What a checkpoint stores for linear layers.

    Args:
        raw: The `quantization_config` of a `config.json`, as a dict.

    Raises:
        UnknownTensorsError: for a checkpoint of sparse weights.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        _check_dense(raw)
        self.config = QuantizationConfig.model_validate(raw)
        # Experts are thousands of layers of a few sizes, and it takes a millisecond to compress an empty layer.
        self._known: dict[tuple[int, int, int], dict[str, Tensor]] = {}

        for scheme in self.config.config_groups.values():
            # Older versions wrote the format once for all schemes.
            if scheme.format is None and self.config.format in BaseCompressor.registered_names():
                scheme.format = CompressionFormat(self.config.format)

    def scheme(self, layer: str, module: nn.Module) -> QuantizationScheme | None:
        """
        The scheme of a layer's weight, or `None` if it is not quantized.

        Args:
            layer: The layer's name in the checkpoint.
            module: A module of its class, because targets may be names of classes.
        """
        scheme = scheme_for(layer, module, self.config)
        if scheme is None or scheme.weights is None:
            return None
        return scheme

    def tensors(self, scheme: QuantizationScheme, rows: int, columns: int) -> dict[str, Tensor]:
        """
        The tensors that a checkpoint stores for a quantized weight.

        Args:
            scheme: The weight's scheme, from [`scheme`].
            rows: `out` of the weight.
            columns: `in` of the weight.

        Returns:
            Empty tensors by local name (`weight_scale`).
        """
        # By identity: the config owns its schemes, and a scheme has no hash.
        key = (id(scheme), rows, columns)
        if key not in self._known:
            self._known[key] = meta_tensors(scheme, rows, columns)
        return self._known[key]


def model_tensors(config: PretrainedConfig, layouts: Layouts) -> dict[str, Tensor]:
    """
    Every tensor that a checkpoint of the model must hold.

    Args:
        config: The model's config, with or without its `quantization_config`.
        layouts: What is stored for its quantized layers.

    Returns:
        Empty tensors, by their names in the checkpoint.

    Raises:
        UnknownTensorsError: if transformers does not have the model, or its experts have an unknown layout.
    """
    model = _model_without_weights(config)
    rename = checkpoint_renaming(model)
    experts = dict(expert_modules(model))

    tensors: dict[str, Tensor] = {}
    for name, tensor in _saved_tensors(model):
        owner, _, local = name.rpartition(".")
        module = model.get_submodule(owner)

        ignore = layouts.config.ignore or []
        # transformers stacks all experts of a layer; a checkpoint has a linear layer for each expert and projection.
        if owner in experts:
            # As in `quant/match.py`: a pattern for the module or its class means all of its experts.
            ignored = match_targets(rename(owner), module, ignore)
            for layer, matrix in _expert_layers(owner, module, local, tensor):
                # The module itself is no linear layer, and targets may be names of classes.
                linear = None if ignored else nn.Linear(1, 1, device="meta")
                tensors |= _weight_tensors(rename(f"{layer}.weight"), matrix, linear, layouts)
        else:
            # A layer may have another name in the model than in its files (the head of GPT-NeoX). `_weight_tensors`
            # asks for that of the files.
            ignored = match_targets(owner, module, ignore)
            tensors |= _weight_tensors(rename(name), tensor, None if ignored else module, layouts)
    return tensors


def _model_without_weights(config: PretrainedConfig) -> nn.Module:
    """The unquantized model of a config, on the meta device, in the dtype that checkpoints have."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    # The class that wrote the file; a config alone may belong to a model with or without its vision tower.
    architecture = architecture_of(config)

    with torch.device("meta"):
        if architecture is not None:
            return architecture(config).to(MASTER_CAST_DTYPE)
        if type(config) in AutoModelForCausalLM._model_mapping:
            return AutoModelForCausalLM.from_config(config, dtype=MASTER_CAST_DTYPE)
    raise UnknownTensorsError(f"transformers has no model {architecture_name(config)!r}")


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model, tied ones once, and the buffers that it saves."""
    yield from model.named_parameters()

    # Rotary frequencies, for example, are computed again, and not saved.
    saved_names = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved_names:
            yield name, buffer


def _expert_layers(name: str, module: nn.Module, parameter: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the linear layers that a checkpoint has for a parameter of experts `(experts, out, in)`."""
    if parameter not in PROJECTIONS or not has_known_layout(module):
        raise UnknownTensorsError(f"how the experts {name} ({type(module).__name__}) are stored is not known")

    layers = layer_names(name, module, parameter)
    matrices = weight.flatten(0, 1).chunk(len(layers))
    yield from zip(layers, matrices, strict=True)


def _weight_tensors(name: str, weight: Tensor, module: nn.Module | None, layouts: Layouts) -> dict[str, Tensor]:
    """What a checkpoint stores for a parameter of `module`; without a module, for one that is not quantized."""
    layer, _, local = name.rpartition(".")
    # A wide pattern matches norms too, whose weights are vectors and stay as they are.
    if module is None or local != "weight" or weight.ndim != 2:
        return {name: weight}

    scheme = layouts.scheme(layer, module)
    if scheme is None:
        return {name: weight}

    rows, columns = weight.shape
    stored = layouts.tensors(scheme, rows, columns)
    return {f"{layer}.{local}": tensor for local, tensor in stored.items()}


def _check_dense(raw: dict[str, Any]) -> None:
    """Give up on a checkpoint that stores sparse weights."""
    sparsity = raw.get("sparsity_config") or {}
    formats = [raw.get("format"), sparsity.get("format")]
    formats += [scheme.get("format") for scheme in (raw.get("config_groups") or {}).values()]
    for name in formats:
        if name in SPARSE_FORMATS:
            raise UnknownTensorsError(f"what the format {name} stores is not known")
