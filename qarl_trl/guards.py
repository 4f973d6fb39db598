"""Stop a run in every process, also when only one of them failed: the others would wait for it in a collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.distributed.tensor import DTensor


def check_gradient(norm: Tensor | float | None) -> None:
    """
    Stop all processes before the optimizer would change the weights by a gradient that is no number.

    Args:
        norm: The gradient norm, a scalar, which all processes have; `None` where the Trainer computes none.

    Raises:
        RuntimeError: if the norm is NaN or infinite.
    """
    if isinstance(norm, DTensor):
        # A collective: under FSDP2 each process has its part of the sum.
        norm = norm.full_tensor()

    if norm is not None and not math.isfinite(norm):
        raise RuntimeError(
            f"The gradient norm is {float(norm)}, so a step would turn the weights into NaN. Resume from the last "
            "checkpoint with a lower learning rate or max_grad_norm, and look at grad_norm, entropy and reward in the "
            "log."
        )


# The largest reward: in float32 the variance of a batch of them is still a number, at 1e20 it is infinite.
LARGEST_REWARD = 1e15
# Rollout batches without a reward, one after the other, that stop a run.
MOST_WITHOUT_REWARDS = 5

logger = get_logger(__name__)


@contextmanager
def all_or_none(what: str, accelerator: Any) -> Iterator[None]:
    """
    Stop all processes if the block failed in one of them. All must enter it together.

    Args:
        what: What the block does, for the error.
        accelerator: Has `gather` and `device`.

    Raises:
        Exception: the block's own, in the process where it failed.
        RuntimeError: in the others; it names the first process that failed.
    """
    failure = None
    try:
        yield
    except Exception as error:
        # Raised below, after the other processes know.
        failure = error

    # Also after a success, because a gather waits for all processes.
    failed = accelerator.gather(torch.tensor([failure is not None], device=accelerator.device))
    # Its own error in the process where it failed, because that one has the traceback.
    if failure is not None:
        raise failure
    if failed.any():
        raise RuntimeError(f"The {what} failed in process {int(failed.nonzero()[0])}, which says why.")


def on_first(state: Any, decide: Callable[[], Any]) -> Any:
    """
    Call a function in the first process, and return its result in all processes.

    Args:
        state: Has `process_index`: accelerate's state, or the arguments of a run.
        decide: The function. Other processes get its result pickled.

    Raises:
        Exception: the function's own, in the first process.
        OSError: in the others, so that at the start of a run they too print one line.
    """
    result: Any = None
    failure: Exception | None = None
    if state.process_index == 0:
        try:
            result = decide()
        except Exception as error:
            # Raised below, after the other processes know.
            failure = error

    # The error goes as text, because not every error can be pickled.
    message = None if failure is None else str(failure)
    sent = [result, message]
    broadcast_object_list(sent)

    if failure is not None:
        raise failure
    result, message = sent
    if message is not None:
        raise OSError(f"The first process failed, and says why: {message}")
    return result


def rewards_of_all(calculate: Callable[[], Tensor], names: Sequence[str], accelerator: Any) -> Tensor:
    """
    The rewards of all processes.

    Args:
        calculate: Returns the rewards of this process, `(rows, functions)`, NaN for TRL's `None`.
        names: Names of the reward functions.
        accelerator: Has `gather` and `device`.

    Returns:
        `(processes * rows, functions)`.

    Raises:
        Exception: as in [`all_or_none`].
        ValueError: in all processes, if a reward is infinite or above `LARGEST_REWARD`.
    """
    with all_or_none("rewards", accelerator):
        rewards_here = calculate()
    rewards = accelerator.gather(rewards_here)

    # After the gather, so that all processes see the same rewards, and stop together.
    # NaN is left alone: for TRL it is a function that does not apply.
    too_large = (rewards.abs() > LARGEST_REWARD).any(0).nonzero().flatten().tolist()
    if too_large:
        column = rewards[:, too_large[0]]
        worst = column[column.abs() > LARGEST_REWARD][0].item()
        kind = "an infinite reward" if math.isinf(worst) else f"the reward {worst:.3g}"
        raise ValueError(
            f"The reward function {names[too_large[0]]!r} gave {kind}. It must be a finite number of at most "
            f"{LARGEST_REWARD:g}, or None where it does not apply: all advantages of its group would be NaN or 0."
        )
    return rewards


class ScoredBatches:
    """
    Refuses rollout batches in which no completion has a reward: they train nothing, and look like training.

    One such batch in the middle of a run is let pass, as TRL does: a batch may be one prompt, whose reference no
    reward can read.
    """

    def __init__(self) -> None:
        self._has_scored = False
        self._without_in_a_row = 0

    def check(self, rewards: Tensor, names: Sequence[str], is_resumed: bool) -> None:
        """
        Look at the rewards of a batch.

        Args:
            rewards: Of all processes, `(rows, functions)`, from [`rewards_of_all`].
            names: Names of the reward functions.
            is_resumed: Whether the run has trained before.

        Raises:
            ValueError: in all processes, for a run's first batch, and for `MOST_WITHOUT_REWARDS` of them in a row.
        """
        if not rewards.isnan().all():
            self._has_scored = True
            self._without_in_a_row = 0
            return

        self._without_in_a_row += 1
        message = f"No completion of a rollout batch got a reward: {', '.join(names)} gave None for all {len(rewards)}"
        may_learn = self._has_scored or is_resumed
        if not may_learn or self._without_in_a_row == MOST_WITHOUT_REWARDS:
            raise ValueError(
                f"{message}, so nothing can be learned. `qarl-trl doctor` tries the rewards on answers of the data "
                "set."
            )
        logger.warning("%s. Nothing is learned from it.", message)


def say_if_nothing_is_learned(rewards: Tensor, answers: Tensor, num_generations: int) -> None:
    """
    Warn if no group of a rollout batch has anything to compare, so that all advantages are 0.

    Args:
        rewards: The weighted reward of each completion of all processes, `(rows,)`.
        answers: A number for each completion, equal for equal tokens, `(rows,)`.
        num_generations: Number of completions in a group; those of a group stand together.
    """
    groups = len(rewards) // num_generations
    # `(groups, num_generations)`: all of a group are equal if each equals its first.
    equal_answers = (answers.view(groups, -1) == answers.view(groups, -1)[:, :1]).all()
    equal_rewards = (rewards.view(groups, -1) == rewards.view(groups, -1)[:, :1]).all()

    # First, because equal answers have equal rewards: the other message would name an effect.
    if equal_answers:
        logger.warning(
            "In the first rollout batch all answers to a prompt are equal, for each of its %d prompts: nothing is "
            "learned from it. Look at temperature, generation_kwargs and stop strings.",
            groups,
        )
    elif equal_rewards:
        logger.warning(
            "In the first rollout batch all answers to a prompt have equal rewards, for each of its %d prompts (mean "
            "%.3g): nothing is learned from it. The problems may be too hard or too easy, or the reward may not read "
            "the answers: `qarl-trl doctor` tries it on right and wrong ones.",
            groups,
            rewards.mean().item(),
        )


def say_if_all_are_cut_off(kept: int, max_completion_length: int) -> None:
    """
    Warn if no token of a rollout batch is left to learn from, because `mask_truncated_completions` left out all.

    Args:
        kept: Number of tokens in the loss, of all processes.
        max_completion_length: Where answers were cut off, in tokens.
    """
    if kept == 0:
        logger.warning(
            "In the first rollout batch all answers were cut off at max_completion_length=%d, and "
            "mask_truncated_completions leaves them out: nothing is learned from it. Raise the length, or train on "
            "cut answers.",
            max_completion_length,
        )


def rollout_of_all(rollout_func: Callable[..., Any], prompts: Sequence[Any], trainer: Any) -> Any:
    """
    The result of TRL's `rollout_func`, checked.

    Args:
        rollout_func: The user's function of `prompts` and `trainer`.
        prompts: The prompts of this process.
        trainer: The trainer, as `rollout_func` gets it.

    Raises:
        Exception: as in [`all_or_none`]; in the process where the check failed that of [`check_rollout`].
    """
    # The check is inside, because only one process may have got a wrong result.
    with all_or_none("rollout_func", trainer.accelerator):
        try:
            output = rollout_func(prompts, trainer)
        except Exception:
            # That of the server is its cause.
            _raise_failure_of_server(trainer)
            raise
        _raise_failure_of_server(trainer)
        check_rollout(output, len(prompts), trainer.args.weighs_mismatch)
    return output


def _raise_failure_of_server(trainer: Any) -> None:
    """Raise the error of what a `rollout_func` asked the server itself. The client keeps errors for later."""
    client: Any = getattr(getattr(trainer, "vllm_generation", None), "vllm_client", None)
    if hasattr(client, "raise_failure"):
        client.raise_failure()


def check_rollout(output: Mapping[str, Any], rows: int, weighs_mismatch: bool) -> None:
    """
    Refuse results of a `rollout_func` that TRL would train on silently.

    Args:
        output: Lists with a list for each prompt: `prompt_ids`, `completion_ids`, and `logprobs`, which may be `None`;
            and TRL's `env_mask`, if there is one.
        rows: Number of prompts.
        weighs_mismatch: Whether the loss needs the log-probs.

    Raises:
        ValueError: if a list is missing, numbers of rows, of log-probs or of a mask are wrong, an answer is empty, or
            the loss needs log-probs that are `None`.
    """
    # TRL says so, too, but only in the process where it is so, for which the others would wait.
    lacking = [name for name in ("prompt_ids", "completion_ids", "logprobs") if name not in output]
    if lacking:
        raise ValueError(f"rollout_func must return prompt_ids, completion_ids and logprobs, got no {lacking}.")

    # TRL (1.16) fails at this after it has scored the rollout batch, in a subtraction.
    if output["logprobs"] is None and weighs_mismatch:
        raise ValueError(
            "rollout_func must return logprobs, got None: vllm_importance_sampling_correction weighs each answer by "
            "them. Return those of the sampler, or set vllm_importance_sampling_correction: false."
        )

    # TRL checks none of this. It would take log-probs of too few tokens, and train on them.
    prompts = len(output["prompt_ids"])
    tokens = _lengths(output["completion_ids"])
    logps = _lengths(output["logprobs"])

    rows_are_right = prompts == len(tokens) == rows
    has_empty_answer = 0 in tokens
    logps_are_right = output["logprobs"] is None or logps == tokens

    if not rows_are_right or has_empty_answer or not logps_are_right:
        raise ValueError(
            f"rollout_func must return, for each of {rows} prompts, prompt_ids, at least one token of completion_ids "
            "(EOS for an empty answer) and as many logprobs (or None for all). "
            f"Got {prompts} prompts, {tokens} tokens and {logps} log-probs."
        )

    # TRL fills up a mask that is too short with ones, and would train on the tokens of a tool.
    mask = output.get("env_mask")
    masked = _lengths(mask)
    if mask is not None and masked != tokens:
        raise ValueError(
            f"rollout_func must return an env_mask with a number for each token of completion_ids, got {masked} "
            f"numbers for {tokens} tokens: 1 for a token of the model, its EOS too, and 0 for one of a tool."
        )


def _lengths(sequences: Sequence[Sequence[Any]] | None) -> list[int]:
    return [len(sequence) for sequence in sequences or ()]
