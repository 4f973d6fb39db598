"""Which answers ended by themselves: TRL knows an EOS token alone, and a run may stop at strings and other tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Endings:
    """
    Finds answers that ended on a stop string or a stop token.

    Args:
        generation_kwargs: The run's, with vLLM's `stop` and `stop_token_ids`.
        decode: Token ids to text, without special tokens, as the engine makes it.
    """

    def __init__(self, generation_kwargs: Mapping[str, Any] | None, decode: Callable[[Sequence[int]], str]) -> None:
        stop = (generation_kwargs or {}).get("stop") or ()
        self.strings = (stop,) if isinstance(stop, str) else tuple(stop)
        self.tokens = frozenset((generation_kwargs or {}).get("stop_token_ids") or ())
        self._decode = decode

    def __bool__(self) -> bool:
        return bool(self.strings or self.tokens)

    def ended(self, token_ids: Sequence[int]) -> bool:
        """
        Whether an answer ended on one of them.

        Args:
            token_ids: Those of the answer, at least one. Its last turn, if there are tools.
        """
        if token_ids[-1] in self.tokens:
            return True
        if not self.strings:
            return False

        # The engine looks at the text after each token, so the string ends within the last one.
        text = self._decode(token_ids)
        before = len(self._decode(token_ids[:-1]))
        # A stop string may begin up to `len(string) - 1` characters before the last token.
        return any(string in text[max(0, before - len(string) + 1) :] for string in self.strings)


def ending_metrics(lengths: Tensor, ended: Tensor) -> dict[str, float]:
    """
    TRL's metrics of truncated answers.

    Args:
        lengths: Tokens of each answer of all processes, `(rows,)`.
        ended: Whether it ended by itself, `(rows,)` bool.
    """
    of_ended = lengths[ended].float()
    if len(of_ended) == 0:
        of_ended = torch.zeros(1)  # as TRL
    return {
        "completions/clipped_ratio": 1 - ended.float().mean().item(),
        "completions/mean_terminated_length": of_ended.mean().item(),
        "completions/min_terminated_length": of_ended.min().item(),
        "completions/max_terminated_length": of_ended.max().item(),
    }
