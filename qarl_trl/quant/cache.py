"""When quantized values are computed again: the low-bit weights of a layer, for as long as they are valid."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .zero import is_partitioned


_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


class LowBitCache:
    """
    What a layer quantized last, by slot (an adapter's or a parameter's name).

    It is computed again when, since the last call,

    - any optimizer of the process has made a step, unless no source needs a gradient. Fused and sharded optimizers write
      through aliases whose version counters a parameter does not share, so the parameter itself cannot tell;
    - a source was written in place, is another tensor or has another storage (not asked of shards, whose storage comes and
      goes). The storage alone does not tell: FSDP frees a parameter that a rank has not loaded yet, and may put the whole one
      in its place, and ZeRO-3 puts it at another address for each forward;
    - something else that the result depends on has changed;

    and whenever shards are read, because those may have been loaded without an optimizer step.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[tuple, list[weakref.ref[Tensor]], Any]] = {}
        self._sharded = False

    def get(
        self,
        slot: str,
        own: Sequence[Tensor],
        gathered: Sequence[Tensor] | None,
        quantize: Callable[..., Any],
        others: tuple = (),
    ) -> Any:
        """
        `quantize(*sources)`, or what it gave last if that is still valid.

        Args:
            slot (`str`): Where to keep the result.
            own (`Sequence[Tensor]`): The layer's parameters as they are now.
            gathered (`Sequence[Tensor]`, *optional*): The same in full or as shards, which are quantized instead.
            quantize (`Callable`): Makes the quantized values.
            others (`tuple`, *optional*): What else the result depends on.
        """
        if any(map(is_partitioned, own)) or (gathered is not None and not all(map(_is_alias, gathered, own))):
            self._sharded = True
        step = _optimizer_steps if any(tensor.requires_grad for tensor in own) else None
        identity = () if self._sharded else tuple((tensor.data_ptr(), tensor._version) for tensor in own)
        key = (step, others, identity)
        its_key, tensors, _ = self._entries.get(slot, (None, [], None))
        same = self._sharded or all(last() is tensor for last, tensor in zip(tensors, own, strict=False))
        if its_key != key or not same or (self._sharded and gathered):
            self._entries.pop(slot, None)  # frees the old quantized values before the new ones are made
            result = quantize(*(own if gathered is None else gathered))
            self._entries[slot] = key, [weakref.ref(tensor) for tensor in own], result
        return self._entries[slot][2]

    def last(self) -> dict[str, Any]:
        """What `get` returned last for each slot."""
        return {slot: result for slot, (_, _, result) in self._entries.items()}

    def clear(self) -> None:
        """Free the quantized values."""
        self._entries.clear()


def _is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is the whole of `b` under another name, such as `b.data`."""
    return not isinstance(b, DTensor) and a.shape == b.shape and a.data_ptr() == b.data_ptr()
