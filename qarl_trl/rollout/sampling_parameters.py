"""The arguments of vLLM's `SamplingParams` that a trainer's engine needs beside those of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def sampling_parameters(
    of_user: Mapping[str, Any], stop_token_ids: Sequence[int | None] | None, is_colocated: bool
) -> dict[str, Any]:
    """
    The user's arguments, and what the trainer needs.

    Args:
        of_user: `generation_kwargs` of the config.
        stop_token_ids: Tokens that end an answer for the trainer, and no others do. `None`: the trainer has no such
            list, and those of the model's files end it.
        is_colocated: Whether the engine runs in this process.
    """
    # The trainer decodes token ids itself. Text takes a fifth of the engine's CPU time, and only stop strings need it.
    needs_text = bool(of_user.get("stop"))
    parameters = {"detokenize": needs_text, **of_user}

    parameters["stop_token_ids"] = _stop_tokens(of_user, stop_token_ids or ())
    if stop_token_ids is not None:
        # By itself vLLM also stops at the end tokens of the model's files, which a script may have changed in memory.
        # Such an answer would count as cut off.
        parameters["ignore_eos"] = True
    if is_colocated:
        # Lists of numbers: vLLM would make an object for each token, and Python's garbage collection visit them.
        parameters["flat_logprobs"] = True
    return parameters


def _stop_tokens(of_user: Mapping[str, Any], of_trainer: Sequence[int | None]) -> list[int]:
    """The tokens that end an answer: the trainer's and the user's. vLLM stops at them also with `ignore_eos`."""
    also = of_user.get("stop_token_ids") or ()
    if of_user.get("ignore_eos"):
        return list(also)

    # A tokenizer without an EOS token gives TRL a None.
    known = [token for token in (*of_trainer, *also) if token is not None]
    return list(dict.fromkeys(known))
