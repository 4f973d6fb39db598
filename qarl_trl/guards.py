"""Stop a run in every process, also when only one of them failed: the others would wait for it in a collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.tensor import DTensor


def check_gradient(norm: Tensor | float | None) -> None:
    """Stop all processes (`RuntimeError`) if the gradient norm is NaN or infinite, before the optimizer changes the weights."""
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if norm is not None and not math.isfinite(norm):
        raise RuntimeError(
            f"The gradient norm is {float(norm)}, so a step would turn the weights into NaN. Resume from the last checkpoint with a "
            "lower learning rate or max_grad_norm, and look at grad_norm, entropy and reward in the log."
        )


@contextmanager
def all_or_none(what: str, accelerator: Any) -> Iterator[None]:
    """Raise the error of the block in this process, and a `RuntimeError` in the others."""
    failure = None
    try:
        yield
    except Exception as error:  # raised again below, after the other processes know
        failure = error
    failed = accelerator.gather(torch.tensor([failure is not None], device=accelerator.device))
    if failure is not None:
        raise failure
    if failed.any():
        raise RuntimeError(f"The {what} failed in process {int(failed.nonzero()[0])}, which says why.")


def on_first(state: Any, decide: Callable[[], Any]) -> Any:
    """
    Call `decide` in the first process, and return its result in all processes; `state` has `process_index`.

    Its error is raised there, and an `OSError` in the others, so that at the start of a run they too print one line.
    """
    answer, failure = list[Any]([None, None]), None
    if state.process_index == 0:
        try:
            answer[0] = decide()
        except Exception as error:
            answer[1], failure = str(error), error
    broadcast_object_list(answer)  # as text, because not every error can be pickled
    if answer[1] is not None:
        raise failure or OSError(f"The first process failed, and says why: {answer[1]}")
    return answer[0]


def rewards_of_all(calculate: Callable[[], Tensor], names: Sequence[str], accelerator: Any) -> Tensor:
    """The rewards of all processes `(processes * rows, functions)`. Errors as in [`all_or_none`], and `ValueError` for infinity; NaN is TRL's `None`."""
    with all_or_none("rewards", accelerator):
        own = calculate()
    rewards = accelerator.gather(own)
    if infinite := rewards.isinf().any(0).nonzero().flatten().tolist():
        raise ValueError(
            f"The reward function {names[infinite[0]]!r} gave an infinite reward. It must be a finite number, or None where it "
            "does not apply: the advantages of its whole group would be NaN or 0."
        )
    return rewards


def rollout_of_all(rollout_func: Callable[..., Any], prompts: Sequence[Any], trainer: Any) -> Any:
    """The result of TRL's `rollout_func` for `prompts`, checked; errors as in [`all_or_none`]."""
    with all_or_none("rollout_func", trainer.accelerator):
        check_rollout(output := rollout_func(prompts, trainer), len(prompts))
    return output


def check_rollout(output: Mapping[str, Any], rows: int) -> None:
    """Refuse (`ValueError`) results that TRL would train on silently: wrong numbers of rows or log-probs, empty answers."""
    prompts = len(output["prompt_ids"])
    tokens, logps = ([len(row) for row in output[name] or ()] for name in ("completion_ids", "logprobs"))
    scored = output["logprobs"] is None or logps == tokens
    if not prompts == len(tokens) == rows or 0 in tokens or not scored:
        raise ValueError(
            f"rollout_func must return, for each of {rows} prompts, prompt_ids, at least one token of completion_ids (EOS for an empty "
            f"answer) and as many logprobs (or None for all). Got {prompts} prompts, {tokens} tokens and {logps} log-probs."
        )
