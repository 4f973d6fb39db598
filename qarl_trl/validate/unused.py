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


def unused_patterns(model: nn.Module, ignore: Sequence[str]) -> list[str]:
    """
    Ignored names that keep nothing in high precision: with a typing error a layer that was to stay is quantized.

    Args:
        model: A quantized model.
        ignore: The names and patterns.
    """
    # The name of a module is not that of the layers in it, which are quantized.
    modules = [named for named in checkpoint_modules(model) if not any(quantized_modules(named[1]))]
    linear = nn.Linear(1, 1, device="meta")
    for name, module in expert_modules(model):
        if has_known_layout(module):
            for parameter in PROJECTIONS:
                modules += [(layer, linear) for layer in layer_names(name, module, parameter)]

    names_of = names_for_patterns(model)
    named = [(each, module) for name, module in modules for each in names_of(name)]
    # Those of the default are for all models.
    of_user = [pattern for pattern in ignore if pattern not in DEFAULT_IGNORE]
    return [pattern for pattern in of_user if not any(match_targets(*pair, [pattern]) for pair in named)]


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
    linear = nn.Linear(1, 1, device="meta")
    modules = list(checkpoint_modules(model))
    quantized = [(name, linear) for name, module in modules if isinstance(module, LowBitLayer)]
    for name, module in expert_modules(model):
        if isinstance(module, QuantExperts):
            for parameter in PROJECTIONS:
                quantized += [(layer, linear) for layer in layer_names(name, module, parameter)]

    names_of = names_for_patterns(model)
    named = [(each, module) for name, module in quantized for each in names_of(name)]
    return [target for target in targets if not any(match_targets(*pair, [target]) for pair in named)]


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
