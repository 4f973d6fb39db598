"""Names and patterns of a user that match no layer: by a typing error another model would be trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressed_tensors.utils import match_targets
from torch import nn

from ..quant.layers.experts import PROJECTIONS, QuantExperts, expert_modules, has_known_layout, layer_names
from ..quant.layers.layer import LowBitLayer, quantized_modules
from ..quant.match import names_for_patterns
from ..quant.names import checkpoint_modules
from ..quant.scheme import DEFAULT_IGNORE


# A layer as a pattern for classes, such as `Linear`, sees those that became low-bit layers. One for all of them: a
# mixture has thousands.
_LINEAR = nn.Linear(1, 1, device="meta")


def unused_patterns(model: nn.Module, ignore: Sequence[str]) -> list[str]:
    """
    Ignored names that keep nothing in high precision: with a typing error a layer that was to stay is quantized.

    Args:
        model: A quantized model.
        ignore: The names and patterns.
    """
    can_stay = []
    for name, module in checkpoint_modules(model):
        # The name of a module is not that of the layers in it, which are quantized.
        if not any(quantized_modules(module)):
            can_stay.append((name, module))
    for name, module in expert_modules(model):
        if has_known_layout(module):
            can_stay += _layers_of_experts(name, module)

    # Those of the default are for all models.
    of_user = [pattern for pattern in ignore if pattern not in DEFAULT_IGNORE]
    return _without_match(model, of_user, can_stay)


def words_of_unused(patterns: Sequence[str]) -> str:
    """What to say of [`unused_patterns`]."""
    return (
        f"{patterns} match no layer of the model, so they keep nothing in high precision. All layers of a module are "
        r"'re:model\.layers\.0\..*'."
    )


def unused_layer_targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """
    Targets by which no layer is quantized. [`~qarl_trl.quant.apply_quantization`] raises only if a group has no other.

    Args:
        model: A quantized model.
        targets: The names and patterns, of all groups.
    """
    quantized: list[tuple[str, nn.Module]] = []
    for name, module in checkpoint_modules(model):
        if isinstance(module, LowBitLayer):
            quantized.append((name, _LINEAR))
    for name, module in expert_modules(model):
        if isinstance(module, QuantExperts):
            quantized += _layers_of_experts(name, module)
    return _without_match(model, targets, quantized)


def words_of_unused_targets(targets: Sequence[str]) -> str:
    """What to say of [`unused_layer_targets`]."""
    return f"{targets} match no layer that is quantized, so what they mean stays in high precision."


def unused_targets(model: nn.Module, adapter: Any) -> list[str]:
    """
    Names of layers for an adapter that match none. PEFT raises only if all of them do.

    Args:
        model: The model without an adapter.
        adapter: The `peft.LoraConfig`. A text as its `target_modules` is one regular expression.
    """
    targets = adapter.target_modules
    if targets is None or isinstance(targets, str):
        return []

    # As PEFT compares them.
    names = [f".{name}" for name, _ in model.named_modules()]
    return sorted(target for target in targets if not any(name.endswith(f".{target}") for name in names))


def _layers_of_experts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that a file has in place of a module of experts, by name."""
    layers: list[tuple[str, nn.Module]] = []
    for parameter in PROJECTIONS:
        for layer in layer_names(name, module, parameter):
            layers.append((layer, _LINEAR))
    return layers


def _without_match(model: nn.Module, patterns: Sequence[str], layers: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """
    The patterns that match none of the layers.

    Args:
        model: Whose layers they are: it says by which names a layer can be meant.
        patterns: Names and patterns.
        layers: The layers, each with its name in a file.
    """
    names_of = names_for_patterns(model)
    named = []
    for name, module in layers:
        for each in names_of(name):
            named.append((each, module))

    unmatched = []
    for pattern in patterns:
        if not any(match_targets(name, module, [pattern]) for name, module in named):
            unmatched.append(pattern)
    return unmatched
