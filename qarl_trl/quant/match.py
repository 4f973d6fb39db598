"""Which layers of a model a plan quantizes, and what is refused before any of them changes.

Patterns match as in compressed-tensors, by the names of the model and by those of its files: a user reads the former,
a quantized checkpoint has the latter. Experts match by the linear layers that a checkpoint has in their place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import match_name, match_targets
from torch import nn

from .layers.experts import (
    EXPERTS_LAYOUT,
    PROJECTIONS,
    UNREADABLE,
    expert_modules,
    has_known_layout,
    layer_names,
    layout_of,
)
from .layers.layer import quantized_modules
from .names import base_model, check_adapters_of_peft, checkpoint_modules, checkpoint_renaming, is_peft_model
from .patterns import check_patterns, patterns_of
from .quantize import PACKED_TOGETHER
from .scheme import DEFAULT_IGNORE, INDEXERS, ROUTERS, effective_group_size, has_global_scale, scheme_for, support_of
from .sharding.shards import shape_of


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


# Which layers -------------------------------------------------------------------------------------------------------


def match_layers(model: nn.Module, plan: QuantizationConfig) -> list[Matched]:
    """
    The modules that `plan` quantizes, in module order; every group must match one.

    Ignores containers, norms and activations that a wide pattern matches.
    """
    experts = dict(expert_modules(model))
    modules = list(checkpoint_modules(model))
    names_of = names_for_patterns(model)
    _check_patterns(plan, modules, experts, names_of)

    matched = []
    for name, module in modules:
        # peft's layer stands for the one that it wraps: it has the checkpoint's name, the other has the weight.
        base = getattr(module, "base_layer", module)
        # Shapes by `shape_of`, because a parameter that ZeRO-3 holds is an empty vector.
        if not any(len(shape_of(param)) >= 2 for param in base.parameters(recurse=False)):
            continue

        if name in experts:
            weights = _expert_layers(name, module)
            scheme = _scheme_of_experts(name, module, weights, plan, names_of)
        else:
            weights = {"weight": [name]}
            scheme = _scheme_of_layer(names_of(name), base, plan)
        if scheme is not None:
            for layers in weights.values():
                for layer in layers:
                    _check_one_group(names_of(layer), plan)
            matched.append(Matched(name, module, base, scheme, weights))

    groups = list(plan.config_groups.values())
    used = [layer.scheme for layer in matched]
    # By identity: two groups of a plan may have equal schemes.
    empty = [group.targets for group in groups if not any(group is scheme for scheme in used)]
    if empty or not groups:
        raise ValueError(
            f"targets={empty} must match a layer that is not in ignore={plan.ignore}, got none. "
            f"The model has matrices in {_classes_with_matrices(model)}; only Linear can be quantized."
        )
    return matched


def names_for_patterns(model: nn.Module) -> Callable[[str], list[str]]:
    """
    Return a function from the name of a module to the names by which patterns may mean it: its own, and that in the
    files of the model if that is another one, as of Mixtral, GPT-NeoX and many models with images.

    Args:
        model: The model, or a `PeftModel`.
    """
    rename = checkpoint_renaming(model)

    def names_of(name: str) -> list[str]:
        # Some of transformers' patterns need the end of a parameter's name.
        in_files = rename(f"{name}.weight").removesuffix(".weight")
        return [name] if in_files == name else [name, in_files]

    return names_of


def _scheme_of_layer(names: list[str], module: nn.Module, plan: QuantizationConfig) -> QuantizationScheme | None:
    """
    The scheme of a linear layer.

    Args:
        names: Its names, from [`names_for_patterns`].
        module: The layer; targets may name its class.
        plan: The plan.
    """
    if any(match_targets(name, module, plan.ignore or []) for name in names):
        return None

    by_class = []
    for name in names:
        scheme = scheme_for(name, module, plan)
        if scheme is None:
            continue
        # Names of classes come last.
        if any(match_name(name, target) for target in scheme.targets):
            return scheme
        by_class.append(scheme)
    return by_class[0] if by_class else None


def _check_one_group(names: list[str], plan: QuantizationConfig) -> None:
    """
    Refuse (`ValueError`) a layer whose names match targets of two groups that quantize differently.

    compressed-tensors takes the group of the first by the alphabet, a name before a pattern, and vLLM that of the
    first in the checkpoint. And an engine knows the names in the files alone.

    Args:
        names: The layer's names, from [`names_for_patterns`].
        plan: The plan.
    """
    by_target = {}
    for group in plan.config_groups.values():
        by_target.update(dict.fromkeys(group.targets, group))

    # Names of classes come after them everywhere.
    hits = [target for target in by_target if any(match_name(name, target) for name in names)]
    # Groups may differ in their targets alone.
    arithmetics = [by_target[target].model_copy(update={"targets": []}) for target in hits]
    if any(arithmetic != arithmetics[0] for arithmetic in arithmetics):
        raise ValueError(
            f"{names[0]!r} matches the targets {hits} of several groups, of which engines may take another one than "
            "the learner. Write targets that exclude each other."
        )


def _check_patterns(
    plan: QuantizationConfig,
    modules: list[tuple[str, nn.Module]],
    experts: dict[str, nn.Module],
    names_of: Callable[[str], list[str]],
) -> None:
    """Refuse (`ValueError`) a pattern of the plan that would match endlessly."""
    own_names = [name for name, _ in modules]
    for name, module in experts.items():
        if has_known_layout(module):
            for parameter in PROJECTIONS:
                own_names += layer_names(name, module, parameter)

    names = []
    for name in own_names:
        names += names_of(name)
    check_patterns(patterns_of(plan), names)


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
    if any(kind.__name__ in UNREADABLE for kind in type(module).__mro__):
        raise ValueError(
            f"The experts {name!r} ({type(module).__name__}) are stored under names that vLLM does not read for this "
            "model: it would run random ones. Such a model needs quant_scheme='none'; quant_ignore does not help."
        )
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    # In this order, on which `layer_names` and the stream rely.
    if not has_known_layout(module) or parameters != [*PROJECTIONS]:
        raise ValueError(
            f"The experts {name!r} ({type(module).__name__}) must have "
            f"the parameters {[*PROJECTIONS]} and {EXPERTS_LAYOUT}, "
            f"got {parameters} and {layout_of(module)}. Such a model needs quant_scheme='none'; quant_ignore does not "
            "help, because an engine could not be told how its experts are stored."
        )
    return {parameter: layer_names(name, module, parameter) for parameter in PROJECTIONS}


def _scheme_of_experts(
    name: str,
    module: nn.Module,
    weights: dict[str, list[str]],
    plan: QuantizationConfig,
    names_of: Callable[[str], list[str]],
) -> QuantizationScheme | None:
    """
    The scheme of a module of experts. Patterns match the linear layers that a checkpoint has instead of it.

    llm-compressor matches them too; in addition, an ignore pattern for the module or its class means all of it.
    """
    if any(match_targets(each, module, plan.ignore or []) for each in names_of(name)):
        return None

    # A checkpoint has these layers, the model does not. This one stands for them where a target names a class.
    linear = nn.Linear(1, 1, device="meta")
    schemes = {}
    for layers in weights.values():
        for layer in layers:
            schemes[layer] = _scheme_of_layer(names_of(layer), linear, plan)

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


def check_model(model: nn.Module) -> None:
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

    check_adapters_of_peft(model)


def check_layers(model: Any, layers: list[Matched], frozen: bool) -> None:
    """Refuse (`ValueError`) layers that cannot be quantized, and adapters that cannot be merged."""
    if is_peft_model(model):
        from .layers.lora import check_adapters, check_lora_config  # imports peft, which is optional

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

    # What divides the greatest common divisor divides the inputs of each layer.
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

    routers = match_targets(layer.name, layer.base, ROUTERS)
    indexers = match_targets(layer.name, layer.base, INDEXERS)
    if routers or indexers:
        chosen = "weighs experts" if routers else "chooses the tokens of attention"
        # A list of one's own replaces the default. Not by `repr`, which doubles backslashes.
        missing = ", ".join(f"'{pattern}'" for pattern in routers[:1] or (*DEFAULT_IGNORE, *INDEXERS))
        raise ValueError(
            f"{layer.name!r} must stay in high precision, as engines have it: it {chosen}. quant_ignore must have "
            f"{missing}."
        )

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
    Refuse (`ValueError`) sizes that groups or blocks do not divide, and rows that do not fill whole words.

    Checkpoints can store blocks padded at the edge, but engines that merge layers (q, k, v) cannot load them.
    """
    # A block has several rows, a group has one. A scale per channel fits every size.
    height, width = scheme.weights.block_structure or (1, effective_group_size(scheme) or 1)
    *stack, columns = shape_of(weight)
    # Of one linear layer: a parameter of experts stacks `len(names)` of them.
    rows = math.prod(stack) // len(names)
    if rows % height or columns % width:
        raise ValueError(
            f"Layer {names[0]!r} has out_features={rows} and in_features={columns}, "
            f"which groups of {height} x {width} weights do not divide. "
            f"{_advice_on_groups(_fitting_groups(layers, scheme))}, add the layer to `quant_ignore`, "
            "or choose another scheme."
        )
    if "pack" in scheme.format and columns % PACKED_TOGETHER:
        raise ValueError(
            f"Layer {names[0]!r} has in_features={columns}, which must be a multiple of {PACKED_TOGETHER} to fill the "
            "words of a packed checkpoint. Add the layer to `quant_ignore`, or choose a scheme of 8 bits that is not "
            "packed (FP8_DYNAMIC, W8A8)."
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
