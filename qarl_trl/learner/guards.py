"""What stops a run before it steps on something that is no number, and what says that a run learns nothing."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


logger = get_logger(__name__)

# Rollout batches in a row without a learning signal, from one warning to the next.
IDLE_BATCHES = 10


def check_gradient(norm: Tensor | float | None, model: nn.Module) -> None:
    """
    Stop (`RuntimeError`) at a gradient norm that is NaN or infinite, before the optimizer writes it into the weights.

    The norm is that of all processes, so all of them stop.
    """
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if norm is None or math.isfinite(norm):
        return
    shards = {
        name: getattr(p, "ds_tensor", p) for name, p in model.named_parameters()
    }  # under ZeRO-3 p itself is empty
    master_weights = {name: getattr(p, "to_local", lambda p=p: p)() for name, p in shards.items()}
    broken = [name for name, p in master_weights.items() if not p.detach().isfinite().all()]
    if broken:
        cause = f"{len(broken)} weights hold NaN or infinity already, first {broken[0]!r}."
    else:
        cause = "The weights hold numbers and are as before this step, so a log-prob, an advantage or the backward overflowed."
    raise RuntimeError(
        f"The gradient norm is {float(norm)}, and a step would make NaN of the weights. {cause} Resume from the last checkpoint "
        "with a lower learning rate or max_grad_norm, and look at grad_norm, entropy and reward in the log before it."
    )


def of_all(what: str, calculate: Callable[[], Any], accelerator: Any) -> Any:
    """`calculate()`; its error where it raised, and on the other processes a `RuntimeError` instead of a wait."""
    failure = None
    try:
        result = calculate()
    except Exception as error:
        failure = error
    failed = accelerator.gather(torch.tensor([failure is not None], device=accelerator.device))
    if failure is not None:
        raise failure
    if failed.any():
        raise RuntimeError(f"The {what} failed in process {int(failed.nonzero()[0])}, which says why.")
    return result


def rewards_of_all(calculate: Callable[[], Tensor], rows: int, names: Sequence[str], accelerator: Any) -> Tensor:
    """
    The rewards of all processes `(processes * rows, functions)`, from the `(rows, functions)` that `calculate` gives each.

    Raises as [`of_all`], and `ValueError` on all for a reward that is infinite. NaN is TRL's word for `None`, not applicable.
    """
    rewards = accelerator.gather(of_all("rewards", calculate, accelerator))
    if not rewards.isinf().any():
        return rewards
    row, column = rewards.isinf().nonzero()[0].tolist()
    process, row = divmod(row, rows)
    raise ValueError(
        f"The reward function {names[column]!r} gave an infinite reward to completion {row} of process {process}. A reward must "
        "be a number, or None where it does not apply: the advantages of its whole group would be NaN or 0."
    )


def rollout_of_all(rollout_func: Callable[..., Any], prompts: Sequence[Any], trainer: Any) -> Any:
    """What TRL's `rollout_func` returns for `prompts`, checked; errors as of [`of_all`]."""

    def checked() -> Any:
        check_rollout(output := rollout_func(prompts, trainer), len(prompts))
        return output

    return of_all("rollout_func", checked, trainer.accelerator)


def check_rollout(output: Any, rows: int) -> None:
    """Refuse (`ValueError`) a rollout without a completion of at least one token, with its log-probs, for each of `rows` prompts."""
    names = ("prompt_ids", "completion_ids", "logprobs")
    if not isinstance(output, Mapping) or not set(names) <= output.keys():
        raise ValueError(f"rollout_func must return a dict with {', '.join(names)} (or None), got {output!r:.100}.")
    prompts, completions, logps = (output[name] for name in names)
    logps = completions if logps is None else logps
    if not len(prompts) == len(completions) == len(logps) == rows:
        raise ValueError(
            f"rollout_func must return a row for each of {rows} prompts, got {len(prompts)} prompt_ids, {len(completions)} "
            f"completion_ids and {len(logps)} logprobs."
        )
    for row, (tokens, values) in enumerate(zip(completions, logps, strict=True)):
        if len(tokens) == 0 or len(tokens) != len(values):
            raise ValueError(
                f"Completion {row} of rollout_func must have at least one token (the EOS token, if nothing was said) and a "
                f"log-prob for each, got {len(tokens)} tokens and {len(values)} log-probs."
            )


class _Expired(BaseException):
    """Not an `Exception`, which a reward function may catch, and no Ctrl-C."""


def _expire(*_: Any) -> None:
    raise _Expired


def within(seconds: float | None, calculate: Callable[[], Any]) -> Any:
    """
    `calculate()`, interrupted by a `TimeoutError` when it takes longer. Only in the main thread, where signals arrive.

    A call into C code is not interrupted until it returns. By SIGUSR2: math-verify needs SIGALRM for itself, and SIGINT is ignored
    in what a shell started in the background. A function and no context manager, which could be interrupted between block and exit.
    `ValueError` outside of the main thread.
    """
    if seconds is None:
        return calculate()
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(f"reward_timeout={seconds:g} needs training in the main thread of a process. Unset it.")
    before = signal.signal(signal.SIGUSR2, _expire)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        try:
            return calculate()
        finally:
            timer.cancel()
            timer.join()  # an interruption that is on its way arrives here
    except _Expired as interruption:
        raise TimeoutError(
            f"The reward functions took longer than reward_timeout={seconds:g} s; the traceback above shows where. Repair "
            "what hangs, give it a limit of its own, or raise reward_timeout."
        ) from interruption
    finally:
        signal.signal(signal.SIGUSR2, before)


class IdleBatches:
    """Warns at every tenth rollout batch in a row from which no process learns anything."""

    def __init__(self) -> None:
        self.count = 0

    def see(self, advantages: Iterable[float], tokens: float) -> None:
        """Count a batch by the advantages of all completions and by the number of tokens in the loss."""
        # The mean of equal rewards misses them by a rounding, which leaves advantages of 1e-4.
        learns = tokens and any(abs(advantage) > 1e-3 for advantage in advantages)
        self.count = 0 if learns else self.count + 1
        if self.count and self.count % IDLE_BATCHES == 0:
            cause = (
                "all advantages are 0, because the completions of each group got the same reward, or none"
                if tokens
                else "all completions were cut off, which mask_truncated_completions leaves out"
            )
            logger.warning("The last %d rollout batches taught nothing: %s.", self.count, cause)
