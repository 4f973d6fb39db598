"""The engine's log-probs of sampled tokens, read without an object for each token.

vLLM returns a dictionary of `Logprob` objects for each token, or with `flat_logprobs` plain lists for a completion
(`vllm/logprobs.py: FlatLogprobs`). TRL 1.16 reads both token by token, and sorts the candidates of each. Where each
token has only its own log-prob there is nothing to sort, and the lists are what TRL needs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl.generation.vllm_generation import extract_logprobs as extract_from_objects


if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs

# Of all completions, by token and by candidate: log-probs and token ids.
Extracted = tuple[list[list[list[float | None]]] | None, list[list[list[int]]] | None]


def extract_logprobs(requests: Sequence[Any]) -> Extracted:
    """
    The result of TRL's `extract_logprobs`, without its sorting where only the sampled token has a log-prob.

    Args:
        requests: vLLM's `RequestOutput`s, sampled with `flat_logprobs`.

    Returns:
        Log-probs and token ids, each `(completions, tokens, candidates)`; a NaN is `None`. Two times `None` if vLLM
        returned no log-probs.
    """
    with _without_collections():
        return _extract(requests)


def _extract(requests: Sequence[Any]) -> Extracted:
    all_logprobs = []
    all_token_ids = []

    for request in requests:
        for completion in request.outputs:
            flat = completion.logprobs
            if flat is None:
                return None, None
            # TRL's own reads a list with an object for each token, and sorts several of a token by their rank.
            if isinstance(flat, list) or not _has_one_a_token(flat):
                return extract_from_objects(requests)

            # Only a NaN differs from itself.
            all_logprobs.append([[None if logprob != logprob else logprob] for logprob in flat.logprobs])
            all_token_ids.append([[token_id] for token_id in flat.token_ids])

    return all_logprobs, all_token_ids


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let Python not look for garbage in the block: with two new lists a token it would visit all of them often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _has_one_a_token(flat: FlatLogprobs) -> bool:
    """Whether every token has one log-prob."""
    return flat.end_indices == list(range(1, len(flat.logprobs) + 1))
