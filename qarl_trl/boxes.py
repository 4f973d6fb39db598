r"""The boxes of an answer, `\boxed{}` or `\fbox{}`: where they are, and which of them are parts of one answer."""

from __future__ import annotations

import re


# Between two boxes that math-verify reads as parts of one answer: "$x=\boxed{1}$ or $x=\boxed{2}$".
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;]|\\[()\[\],;!]|\\q?quad|\\text\{|\}|\b(?:and|or)\b|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)
_JOINS = re.compile(r"[,;]|\b(?:and|or)\b")
# Between two boxes of which the second is another statement: the end of a sentence or a line, and words.
_END_OF_SENTENCE = re.compile(r"[.!?]\s+[A-Z]|\n")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# math-verify joins no boxes that are farther apart.
_NEAR_CHARS = 70


def last_boxes(text: str) -> list[str]:
    r"""
    The contents of the last boxes that are the parts of one answer, `\boxed{1}` or `\boxed{2}`: as a completion's.

    Args:
        text: A completion or a solution.

    Returns:
        In their order; none if there is no box, or the last one is not closed.
    """
    return [text[start:end].strip() for _, start, end in places_of_parts(text)]


def places_of_parts(text: str) -> list[tuple[int, int, int]]:
    """
    Where the boxes of [`last_boxes`] are.

    Args:
        text: A completion or a solution.

    Returns:
        Of each what [`last_box`] gives, in their order.
    """
    places: list[tuple[int, int, int]] = []
    place = last_box(text)
    while place is not None:
        places.insert(0, place)

        # Of the boxes before it the one that ends nearest, if only such words stand between as join two parts.
        begin, _, _ = place
        place = last_box(text[:begin])
        if place is None:
            break
        between = text[place[2] + 1 : begin]
        if not (_BETWEEN_BOXES.fullmatch(between) and _JOINS.search(between)):
            break
    return places


def last_box(text: str) -> tuple[int, int, int] | None:
    """
    Find the last box.

    Args:
        text: A completion or a solution.

    Returns:
        Where it begins, and where its content starts and ends; `None` if there is no box, or it is not closed.
    """
    begin = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
    if begin < 0:
        return None

    start = text.index("{", begin) + 1
    depth = 1
    for position in range(start, len(text)):
        # \{ and \} are printed braces: {1, 2} as a set.
        if text[position - 1] == "\\":
            continue
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return begin, start, position
    return None


def has_box_before(text: str, begin: int) -> bool:
    """
    Whether a box ends so near before a place that math-verify may join it to one that begins there, and in the same
    sentence.

    Args:
        text: A completion or a solution.
        begin: The place, counted in characters.
    """
    before = last_box(text[:begin])
    if before is None or begin - before[2] > _NEAR_CHARS:
        return False
    between = text[before[2] + 1 : begin]
    return not (_END_OF_SENTENCE.search(between) and _WORD.search(between))
