"""Grade completions with reward functions, called as TRL's trainer calls them."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


# The reward function of the suites: its name is also that of its references.
MATH_REWARD = "math_reward"

Reward = Callable[..., Any]


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    """
    The names of reward functions, as TRL names their metrics.

    Args:
        rewards: The functions.

    Raises:
        ValueError: if two have one name.
    """
    names = [getattr(reward, "__name__", type(reward).__name__) for reward in rewards]
    if len(set(names)) < len(names):
        raise ValueError(f"--reward_funcs must have different names, got {', '.join(names)}.")
    return names


def grade(reward: Reward, problem: Mapping[str, Any], completions: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """
    The rewards of the completions of one problem.

    Args:
        reward: The reward function. It gets `prompts`, `completions`, `completion_ids` and `answer`, as in training
            from a recipe, but nothing of the trainer.
        problem: From [`~qarl_trl.tools.evaluate.suites.load_problems`].
        completions: Each with its `text` and its `token_ids`.

    Returns:
        A number for each completion; `None` where the function does not apply.

    Raises:
        ValueError: if there are not as many rewards as completions, or one is infinite.
    """
    texts = [completion["text"] for completion in completions]
    rewards = call_reward(
        reward,
        prompts=[problem["messages"]] * len(texts),
        texts=texts,
        completion_ids=[completion["token_ids"] for completion in completions],
        answer=[problem["answer"]] * len(texts),
    )

    name = getattr(reward, "__name__", reward)
    if len(rewards) != len(texts):
        raise ValueError(f"The reward function {name!r} must give {len(texts)} rewards, got {len(rewards)}.")

    numbers = [_number(value) for value in rewards]
    # No mean and no error can be made of it, and a training stops at it too.
    if any(number is not None and math.isinf(number) for number in numbers):
        raise ValueError(f"The reward function {name!r} must give finite numbers or None, got {numbers}.")
    return numbers


def call_reward(
    reward: Reward, prompts: Sequence[Any], texts: Sequence[str], completion_ids: Sequence[list[int]], **others: Any
) -> Sequence[Any]:
    """
    The answer of a reward function that is called as TRL calls it.

    Args:
        reward: The function, which may be async.
        prompts: A prompt for each completion: all texts, or all lists of chat messages.
        texts: The completions. After chat messages each becomes one, as in training.
        completion_ids: Their token ids.
        others: What else it gets, such as the columns of the data.
    """
    completions: list[Any] = list(texts)
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in texts]

    rewards = reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **others)
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(_result_of(rewards))
    return rewards


async def _result_of(rewards: Any) -> Any:
    return await rewards


def _number(reward: Any) -> float | None:
    """A reward as a float; for TRL NaN means the same as `None`."""
    if reward is None:
        return None
    number = float(reward)
    return None if number != number else number


def try_rewards(rewards: Sequence[Reward], problem: Mapping[str, Any]) -> None:
    """
    Call each reward function with an empty answer, before an engine starts.

    Args:
        rewards: The functions.
        problem: Any problem.

    Raises:
        ValueError: with the error of a function that fails.
    """
    empty = [{"text": "", "token_ids": []}]
    for name, reward in zip(reward_names(rewards), rewards, strict=True):
        try:
            grade(reward, problem, empty)
        except Exception as error:  # any error of a user's function
            raise ValueError(
                f"The reward function {name!r} fails on an empty answer: {type(error).__name__}: {error}. `eval` "
                "gives it prompts, completions, completion_ids and answer."
            ) from error
