"""What a row says: the prompt, the completion and the final answer."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np

from ..boxes import last_boxes
from ..rewards import text_of


# Where the problem belongs in a template.
SLOT = "{problem}"
# A comma between thousands, not one between the parts of "(1, 2)".
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def prompt_of(problem: Any, template: str | None, system_prompt: str | None, conversational: bool) -> Any:
    """The prompt of a row, as messages or text; `None` if the user's message is empty."""
    messages = _messages(problem)
    # The last message of the user is the question; those before it are an example or a conversation.
    from_user = [message for message in messages if message["role"] == "user"]
    if not from_user:
        raise ValueError(f"A prompt has no user message: {messages}. Name the problem's column with problem_column.")

    # Data for fine-tuning have the answer after the question: the model would read what it is to find.
    while messages[-1]["role"] == "assistant":
        messages.pop()

    question = from_user[-1]
    if not question["content"]:
        return None
    if template is not None:
        # Not str.format: the template may hold \boxed{}.
        question["content"] = template.replace(SLOT, question["content"])

    if not conversational:
        return question["content"]
    if system_prompt is None:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system_prompt}, *others]


def completion_of(completion: Any, conversational: bool) -> Any:
    """A completion as messages or text; `None` if there is none."""
    if not completion:
        return None
    if not conversational:
        return text_of(completion)
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return _messages(completion)


def _messages(problem: Any) -> list[dict[str, Any]]:
    """A problem as new chat messages of role and content."""
    if isinstance(problem, str) and _are_messages_in_text(problem):
        raise ValueError(
            f"A prompt must be text, or a list of messages, got messages that are JSON in a text: {problem!r:.200}. "
            "Read them by json.loads, and save them as lists."
        )
    if not isinstance(problem, list):
        return [{"role": "user", "content": str(problem)}]

    for message in problem:
        if not (isinstance(message, dict) and message.keys() >= {"role", "content"}):
            raise ValueError(
                f"A prompt must be text, or messages that each have role and content, got {problem!r:.200}."
            )
        # The templates of language models join texts.
        if isinstance(message["content"], list | dict):
            raise ValueError(
                f"The content of a message must be text, got {message['content']!r:.200}. Join its parts to one text."
            )
    return [{"role": message["role"], "content": message["content"]} for message in problem]


def _are_messages_in_text(problem: str) -> bool:
    """Whether a text is a list of messages, as JSON or as Python writes it."""
    if not problem.lstrip().startswith("["):
        return False
    try:
        messages = ast.literal_eval(problem.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return bool(messages) and all(isinstance(part, dict) and {"role", "content"} <= part.keys() for part in messages)


def final_answer(reference: Any) -> str:
    r"""
    Read the final answer in a reference: the text after GSM8K's `####` or in the last `\boxed{}`, else the whole text.

    Boxes beside each other ("`\boxed{1}` or `\boxed{2}`") are the parts of one answer.

    Args:
        reference: A text, a number, a date, a list of these (the parts of one answer; also as JSON in a text), or chat
            messages (the last counts).

    Returns:
        `""` without an answer, also for NaN. Whole floats lose their `.0`.
    """
    reference = _list_in_text(reference)
    if isinstance(reference, list) and not any(isinstance(part, dict) for part in reference):
        # OlympiadBench: the parts of one answer.
        return ", ".join(final_answer(part) for part in reference)

    if isinstance(reference, float) and math.isnan(reference):
        # pandas writes it for a missing answer.
        return ""
    if isinstance(reference, float) and reference.is_integer():
        # AMC has its answers as floats, and "27.0" is not what a model writes.
        reference = int(reference)

    text = text_of(as_written(reference))
    after_mark = text.rsplit("####", 1)[1].strip() if "####" in text else ""
    # GSM8K's is the last line. A heading of Markdown begins like it, and has lines below it.
    if after_mark and "\n" not in after_mark:
        return _THOUSANDS.sub("", after_mark)
    # Boxes beside each other are one answer, as in a completion.
    parts = [part for part in last_boxes(text) if part]
    return (", ".join(parts) or text).strip()


def _list_in_text(reference: Any) -> Any:
    """A list of texts that is JSON in a text, as Skywork-OR1 has its answers; anything else as it is."""
    if not isinstance(reference, str) or not reference.strip().startswith('["'):
        return reference
    try:
        parts = json.loads(reference)
    except ValueError:
        return reference
    # An answer may be a matrix, whose rows are lists. And where backslashes are not doubled, \frac begins with a form
    # feed.
    are_texts = all(isinstance(part, str) and part.isprintable() for part in parts)
    return parts if are_texts else reference


def as_written(value: Any) -> Any:
    """
    A value of a row, or the whole row, with dates and bytes as texts again, also in the messages of a chat.

    The time of a midnight is left out: pyarrow's reader of JSON makes it of a day. Bytes are what some writers of
    Parquet make of texts.

    Raises:
        ValueError: for bytes that are no text.
    """
    if isinstance(value, list):
        return [as_written(part) for part in value]
    if isinstance(value, Mapping):
        return {name: as_written(part) for name, part in value.items()}
    if isinstance(value, datetime):
        return value.isoformat(sep=" ").removesuffix(" 00:00:00")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise ValueError(f"A binary column must hold text in UTF-8, got {value[:40]!r}.") from None
    return value


def with_digits_of(value: Any, dtype: str) -> Any:
    """
    A number of a column in 16 or 32 bits, or a list of such, with the fewest digits that name it in its column.

    Python's own floats have 64 bits: of 199.99 in 32 bits they are 199.99000549316406, an answer that nobody wrote.

    Args:
        value: What Python reads from the column.
        dtype: The column's, `"float16"` or `"float32"`.
    """
    if isinstance(value, list):
        return [with_digits_of(part, dtype) for part in value]
    if value is None:
        return None
    return float(str(np.dtype(dtype).type(value)))
