"""When a layer quantizes again: its low-bit weights, for as long as they are valid."""

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


# Steps of every optimizer in the process count, because a layer cannot tell whose step changed it: fused and sharded optimizers
# write through aliases (a shard's `to_local()`, the flat float32 copy of ZeRO-3) whose version counters a parameter does not
# share. A step that was somebody else's costs one quantization; a step that was missed would be a stale weight.
register_optimizer_step_post_hook(_count_step)


class LowBitCache:
    """
    What a layer quantized last, by slot (an adapter's or a parameter's name).

    It is quantized again when, since the last call,

    - any optimizer of the process has made a step, unless no source needs a gradient;
    - a source was written in place, is another tensor or has another storage, unless it is a shard;
    - something else that the result depends on has changed;

    and whenever shards are given, because those may have been loaded without an optimizer step.
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
        """`quantize` of a layer's `own` parameters, or of those `given` instead (in full or as shards); or what it gave last."""
        # Once a layer was seen in shards it stays so: in its forward FSDP shows it a whole parameter like any other.
        if any(map(is_partitioned, own)) or (given is not None and not all(map(_is_alias, given, own))):
            self._sharded = True
        anew = self._sharded and given is not None
        key = others, self._state(own)
        if anew or self._entries.get(slot, (None,))[0] != key:
            self._entries.pop(slot, None)  # so that the old values are freed before the new ones are made
            self._entries[slot] = key, quantize(*(own if given is None else given))
        return self._entries[slot][1]

    def _state(self, own: Sequence[Tensor]) -> tuple[Any, ...]:
        """What changes whenever these parameters may have changed."""
        # Frozen weights outlive steps.
        step = _optimizer_steps if any(tensor.requires_grad for tensor in own) else None
        if self._sharded:
            # Of shards address and version say nothing: FSDP frees and gathers a parameter again under the same version, ZeRO-3
            # puts it at another address for each forward.
            return (step,)
        # Nor do they say enough of whole weights: FSDP may gather a parameter where one was that this rank had not loaded, hence
        # the object itself.
        return step, *((WeakIdRef(tensor), tensor.data_ptr(), tensor._version) for tensor in own)

    def last(self) -> dict[str, Any]:
        """What `get` returned last for each slot."""
        return {slot: result for slot, (_, result) in self._entries.items()}

    def clear(self) -> None:
        """Free the low-bit weights."""
        self._entries.clear()


def _is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is the whole of `b` under another name, such as `b.data`."""
    return not isinstance(b, DTensor) and a.shape == b.shape and a.data_ptr() == b.data_ptr()
