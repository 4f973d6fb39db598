"""`apply_quantization`: make the layers of a model that a plan matches low-bit layers, in place, and back.

Invariant: every layer that matches the targets is quantized, or the call fails. Parameter names, `state_dict` and the
module tree do not change, because only `module.__class__` changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn

from .biases import warn_of_biases
from .gemms.gemm import GemmChoice, plain_gemm
from .kv_cache import attend_without_cache
from .layers.experts import QuantExperts
from .layers.layer import LowBitLayer, quantized_modules
from .layers.linear import QuantLinear
from .match import check_layers, check_model, match_layers
from .rest import leave_rest
from .scheme import DEFAULT_IGNORE, has_global_scale, resolve_config, resolve_scheme, single_group
from .store import LowBitStore


# Layers that vLLM loads into one matrix, by their names in the module that holds them all.
MERGED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("c_fc_0", "c_fc_1"),
    # Linear attention: Qwen3.5, OLMo-Hybrid and Bailing. Groups of four come after the group in them, which they
    # replace.
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("q_proj", "k_proj", "v_proj", "b_proj"),
)


def apply_quantization(
    model: nn.Module,
    scheme: str | QuantizationScheme | QuantizationConfig,
    targets: Sequence[str] = ("Linear",),
    ignore: Sequence[str] = DEFAULT_IGNORE,
    *,
    group_size: int | None = None,
    gemm: GemmChoice = plain_gemm,
    quantize_forward: bool = True,
    frozen: bool = False,
) -> nn.Module:
    """
    Give the matching linear layers of `model` a low-bit forward with straight-through gradients; returns `model`.

    In a `PeftModel` a layer with a LoRA adapter quantizes its merged weight. Experts count as one linear layer per
    expert and projection, with the names of the checkpoint. The low-bit weights belong to `low_bit_store(model)`: in a
    training loop of your own call its `follow(optimizer)`, so that it keeps them between steps.

    Args:
        model: Modified in place. Master weights keep their dtype. All names are those of the base model of a
            `PeftModel`.
        scheme: Preset name (`"W4A16"`, `"FP8_DYNAMIC"`), a scheme, or a configuration of several groups
            ([`~qarl_trl.quant.modifier.read_modifier`]), which has its own targets, ignore list and group sizes.
        targets: Class names, module names, or `re:` patterns, as in compressed-tensors.
        ignore: Modules that are not quantized, same syntax. Defaults to `lm_head` and routers, as in `LowBitConfig`.
        group_size: Weights per scale for a preset with groups; `-1` is per channel.
        gemm: Function from scheme and device to a gemm; `qarl_trl.rollout.engine_gemm` has the engine's.
        quantize_forward: `False` keeps the forward in high precision.
        frozen: Make the layers [`~qarl_trl.quant.layers.frozen.FrozenLinear`]s, which drop their weights and get
            low-bit tensors later.

    Raises:
        ValueError: if a model, a layer, experts or an adapter cannot be quantized, or if nothing matches.
    """
    is_plan = isinstance(scheme, QuantizationConfig)
    if is_plan:
        plan = resolve_config(scheme)
    else:
        plan = single_group(resolve_scheme(scheme, group_size), targets, ignore)

    # Every check comes before the first change, so that a refused model is as it was.
    check_model(model)
    layers = match_layers(model, plan)
    check_layers(model, layers, frozen)
    warn_of_biases(model)

    store = LowBitStore(model)
    for layer in layers:
        low_bit_class = _low_bit_class(layer.module, frozen)
        low_bit_class.convert(layer.module, layer.scheme, gemm, quantize_forward, store)

    # The layers share this one object, so an export has these targets. It names each layer that is not quantized, and
    # by that says the same as the caller's targets and ignore list.
    if not is_plan:
        plan.config_groups["group_0"].targets = ["Linear"]
    _tie_global_scales(model)
    return model


def remove_quantization(model: nn.Module) -> nn.Module:
    """
    Give every low-bit layer of `model` its former class, and take its attention off an engine's FP8 cache, its norms
    and embeddings off rounded weights, and all of it off a CPU engine's operations. Master weights do not change.

    Args:
        model: Modified in place.

    Raises:
        ValueError: if it has a frozen base, whose layers have no master weights.
    """
    layers = list(quantized_modules(model))
    frozen = [name for name, layer in layers if layer.frozen_weight is not None]
    if frozen:
        raise ValueError(
            f"{len(frozen)} layers are a frozen base without master weights (first: {frozen[0]!r}), so nothing would "
            "be left to multiply by. Load the model again with from_pretrained or load_master_weights."
        )

    for _, layer in layers:
        layer.restore()
    attend_without_cache(model)
    leave_rest(model)
    return model


def _low_bit_class(module: nn.Module, frozen: bool) -> type[LowBitLayer]:
    """The class that a matched module gets."""
    # First: a frozen layer is made while the model loads, before it can have an adapter.
    if frozen:
        from .layers.frozen import FrozenLinear  # imports peft

        return FrozenLinear

    if hasattr(module, "base_layer"):
        from .layers.lora import LoraQuantLinear  # imports peft, which is optional

        return LoraQuantLinear

    if isinstance(module, nn.Linear):
        return QuantLinear
    return QuantExperts


def _tie_global_scales(model: nn.Module) -> None:
    """Tell layers that an engine merges into one matrix, and that have a global scale, of each other."""
    # A merged matrix has one global scale. With a scale for each layer the engine would compute with another weight
    # than the learner.
    for parent in model.modules():
        for names in MERGED_BY_ENGINES:
            if not all(hasattr(parent, name) for name in names):
                continue
            # Where `v_proj` is None (Gemma-4), an engine merges q, k and once more k.
            projections: list[Any] = [getattr(parent, name) for name in names]
            members = [member for member in projections if member is not None]
            for member in members:
                if isinstance(member, LowBitLayer) and has_global_scale(member.scheme):
                    member.merged_with = tuple(other for other in members if other is not member)
