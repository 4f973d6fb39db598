"""`apply_quantization`: find the linear layers and experts of a model and make them low-bit layers, in place, and
back.

Invariant: every layer that matches the targets is quantized, or the call fails. Parameter names, `state_dict` and the
module tree do not change, because only `module.__class__` changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.utils import is_peft_model
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import match_targets
from torch import nn

from .experts import (
    EXPERTS_LAYOUT,
    PROJECTIONS,
    QuantExperts,
    expert_modules,
    has_known_layout,
    layer_names,
    layout_of,
)
from .gemm import GemmChoice, plain_gemm
from .layer import LowBitLayer
from .linear import QuantLinear
from .names import base_model, checkpoint_modules
from .scheme import (
    DEFAULT_IGNORE,
    effective_group_size,
    has_global_scale,
    resolve_config,
    resolve_scheme,
    scheme_for,
    single_group,
    support_of,
)
from .shards import shape_of
from .store import LowBitStore


# Layers that vLLM loads into one matrix, by their names in the module that holds them all.
MERGED_BY_ENGINES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


@dataclass(frozen=True)
class Matched:
    """
    A module to quantize.

    Attributes:
        name: Its name in a checkpoint.
        module: A linear layer, peft's layer around one, or a module of experts.
        base: Owns the parameters: the layer under the adapter, if there is one.
        scheme: How its weights are quantized.
        weights: For each parameter the names of its linear layers in a checkpoint.
    """

    name: str
    module: nn.Module
    base: nn.Module
    scheme: QuantizationScheme
    weights: dict[str, list[str]]

    @property
    def has_experts(self) -> bool:
        """Whether the module is one of experts: only these have several weights."""
        return len(self.weights) > 1


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
        frozen: Make the layers [`~qarl_trl.quant.frozen.FrozenLinear`]s, which drop their weights and get low-bit
            tensors later.

    Raises:
        ValueError: if a model, a layer, experts or an adapter cannot be quantized, or if nothing matches.
    """
    is_plan = isinstance(scheme, QuantizationConfig)
    if is_plan:
        plan = resolve_config(scheme)
    else:
        plan = single_group(resolve_scheme(scheme, group_size), targets, ignore)

    # Every check comes before the first change, so that a refused model is as it was.
    _check_model(model)
    layers = _match_layers(model, plan)
    _check_layers(model, layers, frozen)

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
    """Give every low-bit layer of `model` its former class. Master weights do not change."""
    for _, module in list(quantized_modules(model)):
        module.restore()
    return model


def quantized_modules(model: nn.Module) -> Iterable[tuple[str, LowBitLayer]]:
    """The low-bit layers of `model` with their names, in module order."""
    for name, module in model.named_modules():
        if isinstance(module, LowBitLayer):
            yield name, module


def _low_bit_class(module: nn.Module, frozen: bool) -> type[LowBitLayer]:
    """The class that a matched module gets."""
    if frozen:
        from .frozen import FrozenLinear  # imports peft

        return FrozenLinear

    if hasattr(module, "base_layer"):
        from .lora import LoraQuantLinear  # imports peft, which is optional

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
            members: list[Any] = [getattr(parent, name, None) for name in names]
            if None in members:
                continue
            for member in members:
                if isinstance(member, LowBitLayer) and has_global_scale(member.scheme):
                    member.merged_with = tuple(other for other in members if other is not member)


# Which layers -------------------------------------------------------------------------------------------------------


def _match_layers(model: nn.Module, plan: QuantizationConfig) -> list[Matched]:
    """
    The modules that `plan` quantizes, in module order; every group must match one.

    Ignores containers, norms and activations that a wide pattern matches.
    """
    experts = dict(expert_modules(model))
    matched = []
    for name, module in checkpoint_modules(model):
        base = getattr(module, "base_layer", module)
        # Shapes by `shape_of`, because a parameter that ZeRO-3 holds is an empty vector.
        if not any(len(shape_of(param)) >= 2 for param in base.parameters(recurse=False)):
            continue

        if name in experts:
            weights = _expert_layers(name, module)
            scheme = _scheme_of_experts(name, module, weights, plan)
        else:
            weights = {"weight": [name]}
            scheme = scheme_for(name, base, plan)
        if scheme is not None:
            matched.append(Matched(name, module, base, scheme, weights))

    groups = list(plan.config_groups.values())
    used = [layer.scheme for layer in matched]
    empty = [group.targets for group in groups if not any(group is scheme for scheme in used)]
    if empty or not groups:
        raise ValueError(
            f"targets={empty} must match a layer that is not in ignore={plan.ignore}, got none. "
            f"The model has matrices in {_classes_with_matrices(model)}; only Linear can be quantized."
        )
    return matched


def _classes_with_matrices(model: nn.Module) -> str:
    """The classes of modules with matrices, such as "48 x Conv1D" (GPT-2) or "28 x Linear", and how many there are."""
    classes: Counter[str] = Counter()
    for module in model.modules():
        if any(len(shape_of(param)) >= 2 for param in module.parameters(recurse=False)):
            classes[type(module).__name__] += 1
    return ", ".join(f"{number} x {name}" for name, number in classes.most_common())


def _expert_layers(name: str, module: nn.Module) -> dict[str, list[str]]:
    """
    For each parameter of a module of experts the names of its linear layers in a checkpoint; `ValueError` for another
    layout.
    """
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    if not has_known_layout(module) or parameters != [*PROJECTIONS]:
        raise ValueError(
            f"The experts {name!r} ({type(module).__name__}) must have "
            f"the parameters {[*PROJECTIONS]} and {EXPERTS_LAYOUT}, "
            f"got {parameters} and {layout_of(module)}. Such a model needs quant_scheme='none'; quant_ignore does not "
            "help, because an engine could not be told how its experts are stored."
        )
    return {parameter: layer_names(name, module, parameter) for parameter in PROJECTIONS}


def _scheme_of_experts(
    name: str, module: nn.Module, weights: dict[str, list[str]], plan: QuantizationConfig
) -> QuantizationScheme | None:
    """
    The scheme of a module of experts. Patterns match the linear layers that a checkpoint has instead of it.

    llm-compressor matches them too; in addition, an ignore pattern for the module or its class means all of it.
    """
    if match_targets(name, module, plan.ignore or []):
        return None

    # A checkpoint has these layers, the model does not. This one stands for them where a target names a class.
    linear = nn.Linear(1, 1, device="meta")
    schemes = {}
    for layers in weights.values():
        for layer in layers:
            schemes[layer] = scheme_for(layer, linear, plan)

    scheme = schemes[weights["down_proj"][0]]
    others = [layer for layer, other in schemes.items() if other is not scheme]
    if others:
        raise ValueError(
            f"All {len(schemes)} expert layers of {name!r} must have one scheme, "
            f"because an engine runs them in one kernel, but {others[0]!r} has another. "
            "Quantize them all alike, or ignore all of them with 're:.*experts.*'."
        )
    return scheme


# What is refused ----------------------------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    """Refuse (`ValueError`) a model that is quantized already, or whose LoRA layers have no PeftModel."""
    if any(quantized_modules(model)):
        raise ValueError("The model is quantized already. Call `remove_quantization(model)` first.")

    foreign = getattr(getattr(model, "config", None), "quantization_config", None)
    if foreign is not None:
        raise ValueError(
            f"The model is quantized already (quantization_config={foreign}), so it has no master weights. "
            "Start from the unquantized checkpoint, "
            "or load a compressed-tensors one with qarl_trl.quant.start.load_master_weights."
        )

    if not is_peft_model(model) and any(hasattr(module, "lora_A") for module in model.modules()):
        raise ValueError("LoRA layers without a PeftModel: a sync would miss them. Use peft.get_peft_model.")


def _check_layers(model: Any, layers: list[Matched], frozen: bool) -> None:
    """Refuse (`ValueError`) layers that cannot be quantized, and adapters that cannot be merged."""
    if is_peft_model(model):
        from .lora import check_adapters, check_lora_config  # imports peft, which is optional

        for config in model.peft_config.values():
            check_lora_config(config)
        check_adapters(base_model(model), {layer.name: layer.module for layer in layers})

    # With duplicates: a tied parameter counts once for each module that holds it.
    owners = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    for layer in layers:
        _check_layer(layer, owners, frozen, layers)


def _fitting_groups(layers: list[Matched], scheme: QuantizationScheme) -> list[int]:
    """The group sizes that divide the inputs of all layers with a scheme; none for a scheme without groups."""
    inputs = []
    for layer in layers:
        if layer.scheme is scheme:
            inputs += [shape_of(getattr(layer.base, parameter))[-1] for parameter in layer.weights]

    common = math.gcd(*inputs)
    return [size for size in support_of(scheme).group_sizes if size > 0 and common % size == 0]


def _check_layer(layer: Matched, owners: Counter[int], frozen: bool, layers: list[Matched]) -> None:
    """
    Refuse (`ValueError`) other layers than linear ones and experts, and what does not go with them.

    Args:
        layer: The layer.
        owners: Number of modules that hold a parameter, by the parameter's `id`.
        frozen: Whether the layer drops its weight.
        layers: All layers, to say which group sizes fit them.
    """
    # A subclass may have another forward, which the new class would silently drop.
    if not layer.has_experts and type(layer.base) is not nn.Linear:
        raise ValueError(f"{layer.name!r} must be nn.Linear or in quant_ignore, got {type(layer.base)}.")

    for parameter, names in layer.weights.items():
        weight = getattr(layer.base, parameter)
        # A checkpoint stores a tied one once, either quantized or as an embedding.
        if owners[id(weight)] > 1:
            raise ValueError(f"Layer {layer.name!r} has a weight tied to another. Add it to `quant_ignore`.")
        _check_sizes(names, weight, layer.scheme, layers)

    if frozen and layer.has_experts:
        raise ValueError(f"lora_base='frozen' needs linear layers, got the experts {layer.name!r}. Use 'merged'.")

    is_plain = type(layer.module) is nn.Linear
    if has_global_scale(layer.scheme) and (frozen or not is_plain):
        raise ValueError(f"NVFP4A16 of {layer.name!r} does not go with LoRA or experts. Choose another scheme.")


def _check_sizes(names: list[str], weight: Any, scheme: QuantizationScheme, layers: list[Matched]) -> None:
    """
    Refuse (`ValueError`) sizes that groups or blocks do not divide.

    Checkpoints can store blocks padded at the edge, but engines that merge layers (q, k, v) cannot load them.
    """
    height, width = scheme.weights.block_structure or (1, effective_group_size(scheme) or 1)
    *stack, columns = shape_of(weight)
    rows = math.prod(stack) // len(names)
    if rows % height or columns % width:
        raise ValueError(
            f"Layer {names[0]!r} has out_features={rows} and in_features={columns}, "
            f"which groups of {height} x {width} weights do not divide. "
            f"{_advice_on_groups(_fitting_groups(layers, scheme))}, add the layer to `quant_ignore`, "
            "or choose another scheme."
        )


def _advice_on_groups(groups: list[int]) -> str:
    """What to set `quant_group_size` to."""
    if not groups:
        return "Set `quant_group_size` to -1 (one scale per channel)"
    fitting = " or ".join(map(str, sorted(groups, reverse=True)))
    return f"Set `quant_group_size` to {fitting}, which fit all layers, or to -1 (one scale per channel)"


def check_shardable(plan: QuantizationConfig) -> None:
    """Refuse (`ValueError`) a `plan` with layers that cannot be sharded."""
    if any(has_global_scale(scheme) for scheme in plan.config_groups.values()):
        raise ValueError("NVFP4A16's global scale needs whole q, k, v. FSDP and ZeRO-3 shard them: use DDP, or W4A16.")
