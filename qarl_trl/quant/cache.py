"""The cache of a layer's low-bit weights, and when the layer must quantize again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdRef

from .shards import is_partitioned


_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Count the steps of every optimizer in the process, because a layer cannot tell which step changed it: fused and sharded optimizers
# write through aliases (a shard's `to_local()`, the flat float32 copy of ZeRO-3), and a parameter does not share their version
# counters. An unrelated step costs one quantization; a missed step would leave a stale weight.
register_optimizer_step_post_hook(_count_step)


class LowBitCache:
    """
    A layer's last low-bit weights, by slot (the name of an adapter or a parameter).

    `get` quantizes again when, since the last call,

    - any optimizer of the process has made a step, unless no source needs a gradient;
    - a source was written in place, is another tensor or has another storage, unless it is a shard;
    - something else in `others` has changed;

    and whenever shards are given, because they may have been loaded without an optimizer step.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._sharded = False

    def get(
        self,
        slot: str,
        own: Sequence[Tensor],
        given: Sequence[Tensor] | None,
        quantize: Callable[..., Any],
        others: tuple[Any, ...] = (),  # what else the result depends on
    ) -> Any:
        """`quantize` of a layer's `own` parameters, or of `given` instead (whole or as shards); or its last result."""
        # Once sharded, always sharded: in the forward FSDP shows the layer a whole parameter.
        if any(map(is_partitioned, own)) or (given is not None and not all(map(_is_alias, given, own))):
            self._sharded = True
        anew = self._sharded and given is not None
        key = others, self._state(own)
        if anew or self._entries.get(slot, (None,))[0] != key:
            self._entries.pop(slot, None)  # free the old values before making the new ones
            self._entries[slot] = key, quantize(*(own if given is None else given))
        return self._entries[slot][1]

    def _state(self, own: Sequence[Tensor]) -> tuple[Any, ...]:
        """A key that changes whenever these parameters may have changed."""
        # Optimizer steps do not change frozen weights.
        step = _optimizer_steps if any(tensor.requires_grad for tensor in own) else None
        if self._sharded:
            # For shards address and version mean nothing: FSDP frees a parameter and gathers it again with the same version, and
            # ZeRO-3 puts it at another address in each forward.
            return (step,)
        # For whole weights they are not enough: FSDP may gather a parameter at the address of one that this rank had not loaded.
        # So the key has the object itself.
        return step, *((WeakIdRef(tensor), tensor.data_ptr(), tensor._version) for tensor in own)

    def last(self) -> dict[str, Any]:
        """The last result of `get` for each slot."""
        return {slot: result for slot, (_, result) in self._entries.items()}

    def clear(self) -> None:
        """Free the low-bit weights."""
        self._entries.clear()


def _is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is all of `b` through another tensor object, such as `b.data`."""
    return not isinstance(b, DTensor) and a.shape == b.shape and a.data_ptr() == b.data_ptr()
