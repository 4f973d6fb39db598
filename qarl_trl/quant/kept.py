"""Low-bit weights that are kept while the master weights that they were made from stay as they are.

The [`~qarl_trl.quant.store.LowBitStore`] says in which state master weights are; this module only compares.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdRef

from .quantize import LowBitWeight


# Changes of parameters that need no gradient, and of those whose changes nobody counts.
NOT_TRAINED = -1
UNKNOWN = -2


@dataclass(frozen=True)
class State:
    """
    A state of master weights: equal ones mean an equal low-bit weight.

    Attributes:
        changes: How often the store was told of a change so far; `NOT_TRAINED`, or `UNKNOWN` if nobody tells it.
        others: What else the low-bit weight depends on.
        identities: [`identity`] of each parameter that is whole; empty for shards.
    """

    changes: int
    others: tuple[Any, ...]
    identities: tuple[Any, ...] = ()


def identity(parameter: Tensor) -> tuple[Any, ...]:
    """Object, address and version of a whole parameter: another one, or one written in place, has another."""
    # Address and version are not enough: a new parameter may be at the address of a freed one, with its version.
    return WeakIdRef(parameter), parameter.data_ptr(), parameter._version


@dataclass(frozen=True)
class _Kept:
    """A low-bit weight, and the state of the master weights that it was made from."""

    weight: LowBitWeight
    state: State


class KeptWeights:
    """The low-bit weights of layers, by layer and by the name of the weight."""

    def __init__(self) -> None:
        # Weak, so that a deleted layer's weights go with it.
        self._by_layer: weakref.WeakKeyDictionary[Any, dict[str, _Kept]] = weakref.WeakKeyDictionary()

    def get(self, layer: Any, name: str, state: State, make: Callable[[], LowBitWeight]) -> LowBitWeight:
        """
        The kept weight, if it was made in this state; otherwise a new one, which is kept.

        Args:
            layer: A low-bit layer.
            name: One of its low-bit weights.
            state: The state in which its master weights are now. An `UNKNOWN` one equals none.
            make: Makes the weight.
        """
        of_layer = self._by_layer.setdefault(layer, {})
        # Taken out first, so that an error in `make` leaves no old weight to be used.
        kept = of_layer.pop(name, None)
        if kept is None or kept.state != state or state.changes == UNKNOWN:
            del kept  # frees the old values before new ones are made
            kept = _Kept(make(), state)

        of_layer[name] = kept
        return kept.weight

    def of_layer(self, layer: Any) -> dict[str, LowBitWeight]:
        """The weights of a layer that are kept now, by name."""
        return {name: kept.weight for name, kept in self._by_layer.get(layer, {}).items()}

    def drop(self, layer: Any, names: Collection[str]) -> None:
        """Free some weights of a layer."""
        of_layer = self._by_layer.get(layer, {})
        for name in names:
            of_layer.pop(name, None)

    def clear(self) -> None:
        """Free all weights."""
        self._by_layer.clear()
