"""Start a run from a compressed-tensors checkpoint: from its master weights, or from its low-bit tensors unchanged
(paper Sec. 3.1).

transformers' own loader of such a checkpoint leaves scales and replaced forwards in the model, multiplies in float32
where the master weights are float32, and loads broken checkpoints without an error (dev/log.md).
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.distributed.utils import is_local_dist_rank_0

from .convert import apply_quantization
from .gemms.gemm import GemmChoice, plain_gemm
from .layers.layer import quantized_modules
from .names import architecture_of
from .scheme import MASTER_CAST_DTYPE
from .source import CheckpointSource, quantized_source


def load_master_weights(
    name: str, *, dtype: torch.dtype | str = "float32", architecture: Any = None, **kwargs: Any
) -> PreTrainedModel:
    """
    Load a compressed-tensors checkpoint as an unquantized model: its layers get the weights that the stored low-bit
    tensors decompress to.

    Args:
        name: Its folder or Hub id.
        dtype: Dtype of the master weights; `"auto"`: the checkpoint's.
        architecture: The model class; default: that in `config.json`.
        kwargs: Arguments of `from_pretrained` (`revision`, `subfolder`, `token`, ...) and fields of the model's
            config.

    Returns:
        The model on the CPU; with FSDP's RAM-efficient loading without values in all processes but the first.

    Raises:
        ValueError: if it is not quantized, or lacks a tensor.
    """
    source = quantized_source(name, **kwargs)
    if source is None:
        raise ValueError(f"{name} is not quantized. Use from_pretrained.")

    config, architecture, settings = _what_to_load(name, architecture, kwargs)
    model = _from_tensors(architecture, source, config, dtype, frozen=(), **settings)
    return _named_after(model, source)


def load_frozen_base(
    name: str, plan: QuantizationConfig, *, gemm: GemmChoice = plain_gemm, architecture: Any = None, **kwargs: Any
) -> PreTrainedModel:
    """
    Load a model whose layers in `plan` are [`~qarl_trl.quant.layers.frozen.FrozenLinear`]s: they have low-bit tensors
    and no master weights. All else is bfloat16.

    Args:
        name: Folder or Hub id of a checkpoint. Of a quantized one the layers get the stored tensors, byte for byte. An
            unquantized one is quantized layer by layer.
        plan: Which layers, and how.
        gemm: See [`~qarl_trl.quant.apply_quantization`].
        architecture: The model class; default: that in `config.json`.
        kwargs: As for [`load_master_weights`].

    Returns:
        The model, where that of [`load_master_weights`] is.

    Raises:
        ValueError: if the checkpoint lacks a tensor, or stores other tensors than `plan` needs.
    """
    # TRL's loader gives one, but all that is not frozen is bfloat16.
    kwargs.pop("dtype", None)
    source = quantized_source(name, plan, **kwargs)
    assert source is not None  # with a plan any checkpoint is a source

    config, architecture, settings = _what_to_load(name, architecture, kwargs)
    model = _load_frozen(architecture, source, config, plan, gemm, **settings)
    return _named_after(model, source)


def _what_to_load(
    name: str, architecture: Any, kwargs: dict[str, Any]
) -> tuple[PretrainedConfig, Any, dict[str, Any]]:
    """The config of a checkpoint, the class of its model, and the arguments for the class's `from_pretrained`."""
    config, settings = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **kwargs)
    # With it `from_pretrained` would use transformers' loader of quantized checkpoints, and a file of master weights
    # would say that they are quantized.
    vars(config).pop("quantization_config", None)
    if architecture is None:
        architecture = architecture_of(config) or AutoModelForCausalLM
    # `AutoConfig` keeps this argument for itself.
    settings["trust_remote_code"] = kwargs.get("trust_remote_code", False)
    return config, architecture, settings


def _named_after(model: PreTrainedModel, source: CheckpointSource) -> PreTrainedModel:
    """The model, with the name and the generation config of the checkpoint from whose tensors it was made."""
    # It does not know where it comes from; the engine, resuming and cards ask it.
    model.config._name_or_path = source.name
    model.name_or_path = source.name
    if model.can_generate():
        with suppress(OSError):  # no such file: the defaults stay
            model.generation_config = GenerationConfig.from_pretrained(source.folder)
    return model


def _load_frozen(
    architecture: Any,
    source: CheckpointSource,
    config: PretrainedConfig,
    plan: QuantizationConfig,
    gemm: GemmChoice,
    **settings: Any,
) -> PreTrainedModel:
    """Load a model whose layers in `plan` never have a high-precision weight."""

    # `from_pretrained` calls the constructor, and then loads weights into the parameters that it finds: layers must
    # lose theirs in between. The end of the constructor lies there, and needs no quantizer registered in transformers.
    class Frozen(architecture):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            apply_quantization(self, plan, gemm=gemm, frozen=True)

    # transformers derives the loss from the name of the class.
    Frozen.__name__ = architecture.__name__

    # Without memory for weights this says which layers `plan` matches, and what each must have stored. So a checkpoint
    # that does not fit is refused before its tensors are read.
    with torch.device("meta"):
        without_memory = Frozen(config)
    frozen: dict[str, Any] = dict(quantized_modules(without_memory))
    for layer_name, layer in frozen.items():
        source.check_stored(layer_name, layer.frozen_weight)

    model = _from_tensors(Frozen, source, config, MASTER_CAST_DTYPE, frozen, **settings)
    # The subclass has done its work. `save_pretrained` writes a model's class into `config.json`, and pickle looks it
    # up by name, so it must be the one that transformers knows.
    model.__class__ = architecture

    loaded: Any = quantized_modules(model)
    for layer_name, layer in loaded:
        layer.frozen_weight = source.low_bit_weight(layer_name, layer.frozen_weight)
    return model


def _from_tensors(
    architecture: Any,
    source: CheckpointSource,
    config: PretrainedConfig,
    dtype: torch.dtype | str,
    frozen: Collection[str],
    **settings: Any,
) -> PreTrainedModel:
    """
    A model with the dense tensors of a checkpoint, but without the weights of the layers in `frozen`.

    With FSDP's RAM-efficient loading the first process sends all others their shards. transformers (5.17) makes the
    weights of the others zero, but only after it has loaded them.
    """
    if is_fsdp_enabled() and not is_local_dist_rank_0():
        tensors = source.dense_without_values(without=frozen)
        # Where transformers puts what it loads, before it makes the zeros on the CPU. A script may load its model
        # itself, where `_compat.construction` does not see to it.
        settings["device_map"] = {"": "meta"}
    else:
        tensors = source.dense(without=frozen)

    model, report = architecture.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtype,
        output_loading_info=True,
        **settings,
    )

    missing = sorted(map(str, report["missing_keys"]))
    if missing:  # transformers would leave them at random values
        raise source.broken(f"{missing[:3]} are missing")
    return model
