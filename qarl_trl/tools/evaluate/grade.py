"""Grade completions with reward functions, called as TRL's trainer calls them."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
        completions: Each with its `text` and its `token_ids`; with a `message` in place of the text where
            [`message_parser`] made one.

    Returns:
        A number for each completion; `None` where the function does not apply.

    Raises:
        ValueError: if there are not as many rewards as completions, or one is infinite.
    """
    answers = [completion.get("message", completion["text"]) for completion in completions]
    rewards = call_reward(
        reward,
        prompts=[problem["messages"]] * len(answers),
        answers=answers,
        completion_ids=[completion["token_ids"] for completion in completions],
        answer=[problem["answer"]] * len(answers),
    )

    name = getattr(reward, "__name__", reward)
    if len(rewards) != len(answers):
        raise ValueError(f"The reward function {name!r} must give {len(answers)} rewards, got {len(rewards)}.")

    numbers = [_number(value) for value in rewards]
    # No mean and no error can be made of it, and a training stops at it too.
    if any(number is not None and math.isinf(number) for number in numbers):
        raise ValueError(f"The reward function {name!r} must give finite numbers or None, got {numbers}.")
    return numbers


def message_parser(tokenizer: Any, problem: Mapping[str, Any]) -> Callable[..., dict[str, Any]] | None:
    """
    What makes a chat message of a completion's tokens where TRL (1.16) does so in training: with a tokenizer that says
    how, after a chat prompt. The thoughts of such a message are no part of its content.

    Args:
        tokenizer: The model's.
        problem: From [`~qarl_trl.tools.evaluate.suites.load_problems`].

    Returns:
        A function of token ids; `None` where TRL takes their text.
    """
    describes_messages = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
    if not describes_messages or isinstance(problem["messages"], str):
        return None

    from trl.chat_template_utils import parse_response

    return partial(parse_response, tokenizer, prefix=problem["prompt_ids"])


def call_reward(
    reward: Reward,
    prompts: Sequence[Any],
    answers: Sequence[str | dict[str, Any]],
    completion_ids: Sequence[list[int]],
    **others: Any,
) -> Sequence[Any]:
    """
    The answer of a reward function that is called as TRL calls it.

    Args:
        reward: The function, which may be async.
        prompts: A prompt for each completion: all texts, or all lists of chat messages.
        answers: The completions, texts or messages. After chat messages a text becomes one, as in training.
        completion_ids: Their token ids.
        others: What else it gets, such as the columns of the data.
    """
    completions: list[Any] = list(answers)
    if not isinstance(prompts[0], str):
        messages = [
            {"role": "assistant", "content": answer} if isinstance(answer, str) else answer for answer in answers
        ]
        completions = [[message] for message in messages]

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
