"""Compare the final answer of a completion with a reference: math-verify, and what it reads differently from us."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

from .boxes import has_box_before, last_box, last_boxes, places_of_parts


# Emphasis of Markdown: **42** or `42`, as a word of its own. Not the signs of 2**3 or (1+2)*(3+4)*(5+6), which touch
# what they multiply; *42* is left as it is, because 2 *3* 4 is a product.
_EMPHASIS = re.compile(r"(?<![^\s(])(\*\*|`)(?=\S)([^*`\n]+?)(?<=\S)\1(?![^\s.,;:!?)])")
# What math-verify reads differently from a person. A text that has any of these is read as it is, and without.
# 4.5e33, which would be Euler's number times 33: Minerva writes a fifth of its answers so.
_E_NOTATION = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?!\w|\.\d)")
# \$18, as Markdown has it; in LaTeX the same dollar sign.
_ESCAPED_DOLLAR = re.compile(r"(?<!\\)\\\$\s*(?=[\d.])")
# 58,500 in LaTeX and out of it, unless it is in brackets: (2,100) is a pair.
_SEPARATOR = r"(?:,|\{,\}|\\[,; ])"
_THOUSANDS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_SEPARATOR}\d{{3}})+(?!\d|{_SEPARATOR}\d)")
_START_OF_FORMULA = re.compile(r"\n|\\boxed\{|\$|\\[(\[]")
_OPENING = re.compile(r"[(\[]|\\\{|\\langle")
_CLOSING = re.compile(r"[)\]]|\\\}|\\rangle")
# \text{27.0} and \mathbf{\frac{1}{2}}: a number in another font, without letters but those of a fraction's command.
_FONT_OF_NUMBER = re.compile(
    # What stands before it may take it as an argument: \sqrt\mathbf{16}.
    r"(?P<before>(?:\\[a-zA-Z]+|[\]}])\s*)?"
    # Not without a digit: 5\text{-}12 is no difference.
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|boldsymbol|bm|mbox)\{(?=[^{}]*\d|[\s,.()]*\}|\\[dt]?frac)"
    r"(?P<number>(?:[^{}a-zA-Z\\]|\\[dt]?frac\{[^{}a-zA-Z]*\}\{[^{}a-zA-Z]*\})*)\}"
)
# \boxed{\approx 42}. \sim before a letter is a negation.
_RELATION_IN_BOX = re.compile(
    r"(\\boxed\{)\s*(?:(?:\\approx|\\simeq|\\cong|≈|=)(?![a-zA-Z])|\\sim(?!\s*[a-zA-Z(]))(?:\s|\\[,;! ])*"
)
# \boxed{18.}, where the sentence ends in the box.
_STOP_IN_BRACES = re.compile(r"(?<=[\w)\]}%$°])\s*[.,;]\s*(?=\})")
_FINAL_ANSWER = "final answer is"
_END_OF_THOUGHTS = "</think>"
# The last line of GSM8K's solutions, maybe with a unit of one or two words. A heading, such as "#### 2. Add", is none.
_LAST_LINE_OF_GSM8K = re.compile(
    r"(?:\A|\n)####[ \t]*([-\N{MINUS SIGN}]?\$?[-\N{MINUS SIGN}]?[\d,.]*\d(?:(?: \d+)?/\d+)?%?)"
    r"(?:[ \t]+[a-z]+(?:[ /][a-z]+)?)?\.?\s*\Z"
)
# What sets words in a formula, and spaces of LaTeX.
_SET_AS_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SPACES = re.compile(r"(?:\s|~|\\[ ,;!])+")
# Numbers and formulas of commands alone are for math-verify to compare.
_LETTER = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]")
# 12 000 and 12\,000, which math-verify reads as 12 times 0. The spaces may be narrow, or not to be broken. Not the
# fraction of 2 100/3, nor what follows an exponent.
_SPACE = r"(?:[ ~\u00a0\u2009\u202f]|\\[,; ])"
_SPACED_THOUSANDS = re.compile(rf"(?<![\w.,^])[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}})+(?!\d|/|{_SPACE}\d)")
# "1 1/2", which math-verify reads as a product.
_MIXED_NUMBER = re.compile(r"(?<![\w./])(\d{1,30}) (\d{1,30})/(\d{1,30})(?!\.?\d|/)")
# What the whole part of one is only the end of: 1,000 1/2 and x^2 1/2.
_BEFORE_PART_OF_NUMBER = re.compile(r"(?:\d,|\}|\\[,; ]|\^)\Z")
# Where a mixed number is divided by, or multiplied with what follows it: 3 : 2 1/2 and 2 1/2 \pi.
# Not "the answer is: 2 1/2", "part (2): 2 1/2" or "**The answer (hours)**: 2 1/2".
_DIVISION_BEFORE = re.compile(r"(?:(?:[/÷]|\\div)\s*|\d[)}]*(?:\s+:\s*|:)|(?:\A|[{$])[^a-zA-Z{}$]*\d\)*:\s*)\Z")
_FACTOR_AFTER = re.compile(r"\s*(?:\\(?:pi|sqrt|theta|alpha|beta|omega)(?![a-zA-Z])|[π√]|[a-zA-Z](?![a-zA-Z]))")
# "It is 14/3.", of which math-verify reads 14 and a third that is rounded.
_STOP_AFTER_FRACTION = re.compile(r"(?<=/)(\d+)\.(?!\d)")
# Signs that math-verify does not read as LaTeX's commands.
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))")
_SIGNS = {
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "·": r"\cdot ",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "∞": r"\infty ",
    r"\varnothing": r"\emptyset",
}
# x² and 10⁻³
_EXPONENT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_DIGITS_OF_EXPONENTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_DATE = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d(?!\d)")
# math-verify compares floats to six places, in which numbers below this have no three digits left.
_TINY = 1e-3
_FEWEST_DIGITS = 3
# math-verify's own limit, for parsing and again for comparing.
_ALARM_S = 5
# Of one second attempt at a reference: the alarm counts the time for which a busy machine lets a process wait, too.
# With the first attempts at three readings it is less than `rewards._LIMIT_S`.
_LONG_ALARM_S = 10


def grade(completion: str, reference: str) -> float | None:
    """
    Compare the final answer of a completion with a reference; only in a main thread, whose alarm ends endless work.

    Args:
        completion: A text.
        reference: A text.

    Returns:
        1 if they are equal, else 0; `None` if the reference is unreadable.
    """
    # Garbage is normal here.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    from math_verify import verify

    _, has_thoughts, rest = completion.rpartition(_END_OF_THOUGHTS)

    # math-verify subtracts: 2024-01-05 would be 2018.
    if _DATE.fullmatch(reference.strip()):
        return float((_last_date(rest) or _last_date(completion)) == reference.strip())

    gold = _parse_reference(reference)
    if not gold:
        return None

    # What comes after the thoughts of a reasoning model counts, unless it only says that there is an answer above.
    rest = _with_last_line_in_box(rest)
    if not has_thoughts or last_box(rest) or next(_announced_in(rest), None) is not None:
        completion = rest

    # math-verify tells words in a formula from the same words out of it: \text{not enough} from "not enough".
    words = _boxed_words(completion)
    expected_words = _boxed_words(reference) if last_box(reference) else _plain(reference)
    if words and expected_words:
        if words.casefold() == expected_words.casefold():
            return 1.0
        # "post" is not "stop". Names may come in another order.
        are_words = _are_words(words) and _are_words(expected_words)
        if are_words and sorted(words.casefold().split()) != sorted(expected_words.casefold().split()):
            return 0.0

    for answer in _announced_in(completion):
        for expected in gold:
            is_equal = verify(expected, answer, timeout_seconds=_ALARM_S)
            if is_equal and not _are_different_tiny_numbers(expected, answer):
                return 1.0
    return 0.0


def _announced_in(completion: str) -> Iterator[Any]:
    """The expressions that a completion has in a box or announces as its answer, of all its readings."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    announced = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    # math-verify finds no number in "The answer is **42**.", the way in which chat models write.
    plain = _EMPHASIS.sub(r"\2", completion)
    for text in _without_other_guesses(_readings(_with_parts_in_one_box(plain))):
        yield from parse(text, extraction_config=announced, parsing_timeout=_ALARM_S)


def _without_other_guesses(readings: list[str]) -> list[str]:
    """
    The readings of a text whose last box math-verify reads, or that box alone if it reads it in none; without a box
    all of them. Of a text whose box it does not read, it takes what is announced elsewhere: a second guess.
    """
    boxes = [_last_box_alone(text) for text in readings]
    if not any(boxes):
        return readings
    return [text for text, box in zip(readings, boxes, strict=True) if _is_readable(box)] or boxes[-1:]


def _last_box_alone(text: str) -> str:
    """The last box of a text; empty if there is none, nothing is in it, or math-verify does not know its kind."""
    begin, start, end = last_box(text) or (0, 0, 0)
    is_known = text.startswith(r"\boxed", begin)
    return text[begin : end + 1] if is_known and text[start:end].strip() else ""


def _is_readable(box: str) -> bool:
    """Whether math-verify reads a box as more than a string."""
    from math_verify import LatexExtractionConfig, parse

    # Without it any number in the box would do.
    in_boxes = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    expressions = parse(box, extraction_config=in_boxes, parsing_timeout=_ALARM_S)
    return not all(isinstance(expression, str) for expression in expressions)


def _with_last_line_in_box(completion: str) -> str:
    """The number of a last line `#### 42` in a box, if the completion has none; else the completion as it is."""
    line = _LAST_LINE_OF_GSM8K.search(_EMPHASIS.sub(r"\2", completion))
    if line is None or last_box(completion):
        return completion
    return rf"\boxed{{{line[1].replace('$', '')}}}"


def _last_date(completion: str) -> str | None:
    """What the last box holds, or without a box the last date of the text; `None` without both."""
    place = last_box(completion)
    if place is not None:
        _, start, end = place
        return _plain(completion[start:end]).rstrip(".")
    dates = _DATE.findall(completion)
    return dates[-1] if dates else None


def _readings(text: str) -> list[str]:
    """A text, and the same as a person reads it, if math-verify reads that differently."""
    # In both: as they stand these equal other numbers, too.
    text = _SPACED_THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = _MIXED_NUMBER.sub(_as_one_fraction, text)
    read = text.replace("\N{MINUS SIGN}", "-")
    read = _STOP_AFTER_FRACTION.sub(r"\1 ", read)
    read = _FONT_OF_NUMBER.sub(_without_font, read)
    read = _RELATION_IN_BOX.sub(r"\1", read)
    read = _ESCAPED_DOLLAR.sub("", read)
    read = _THOUSANDS.sub(_without_separators, read)
    read = _STOP_IN_BRACES.sub("", read)
    read = read.replace("°", r"^\circ")
    read = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", read)
    for sign, command in _SIGNS.items():
        read = read.replace(sign, command)
    read = _EXPONENT.sub(lambda exponent: "^{" + exponent[0].translate(_DIGITS_OF_EXPONENTS) + "}", read)
    read = _E_NOTATION.sub(lambda number: format(Decimal(number[0]), "f"), read)
    return [text] if read == text else [text, read]


def _as_one_fraction(mixed: re.Match[str]) -> str:
    """2 1/2 as 5/2, which math-verify reads within a formula and out of it."""
    whole, numerator, denominator = mixed.groups()
    before = mixed.string[: mixed.start()]
    if _BEFORE_PART_OF_NUMBER.search(before):
        return rf"{whole}\frac{{{numerator}}}{{{denominator}}}"

    improper = int(whole) * int(denominator) + int(numerator)
    # `/` would bind to what is beside it. By itself (5/2) is not read out of a formula.
    if _DIVISION_BEFORE.search(before) or _FACTOR_AFTER.match(mixed.string, mixed.end()):
        return f"({improper}/{denominator})"
    return f"{improper}/{denominator}"


def _without_font(match: re.Match[str]) -> str:
    """A number that [`_FONT_OF_NUMBER`] has found, in braces where it may be an argument."""
    before = match["before"] or ""
    number = match["number"]
    return f"{before}{{{number}}}" if before and any(map(str.isdigit, number)) else before + number


def _with_parts_in_one_box(text: str) -> str:
    r"""
    The parts of an answer in one box, and nothing else; of boxes in several sentences the last one, and what follows
    it; any other text as it is.

    Of "$\boxed{2}$, and $\boxed{4}$" math-verify reads the last one alone, and of "\boxed{2}. No: it is \boxed{4}"
    both. Both readings would be two guesses.
    """
    text_without_stops = _STOP_IN_BRACES.sub("", text)
    places = places_of_parts(text_without_stops)
    # What joins the others to one before them is unknown here, and math-verify may know.
    if not places or has_box_before(text_without_stops, places[0][0]):
        return text
    if len(places) > 1:
        return rf"\boxed{{{', '.join(last_boxes(text_without_stops))}}}"

    begin, _, _ = last_box(text) or (0, 0, 0)
    return text[begin:] if last_box(text[:begin]) else text


def _boxed_words(text: str) -> str | None:
    """The last box as plain words, to be compared letter by letter; `None` if another answer stands near it."""
    place = last_box(text)
    if place is None:
        return None
    begin, start, end = place
    # The two would be parts of one answer, or two guesses.
    if has_box_before(text, begin):
        return None
    # math-verify takes what comes after these words, and not the box.
    if _FINAL_ANSWER in text[end:].casefold():
        return None
    words = _plain(text[start:end])
    return words if _LETTER.search(words) else None


def _are_words(text: str) -> bool:
    """
    Whether a text is of words, which math-verify would read as products of their letters, in any order: not such
    products as xyz and abcd, and not AB, which may be a line.
    """
    words = text.split()
    if not all(word.isalpha() for word in words):
        return False
    in_capitals = any(len(word) >= 3 and word.isupper() for word in words)
    # Few products have e, i, o or u in them.
    with_vowels = any(len(word) >= 4 and set("eiou") & set(word.casefold()) for word in words)
    return in_capitals or with_vowels


def _plain(answer: str) -> str:
    """An answer as plain words: without LaTeX's commands for text, and with single spaces."""
    words = _SET_AS_TEXT.sub(r"\1", answer.replace("$", " "))
    return _SPACES.sub(" ", words).strip()


def _without_separators(number: re.Match) -> str:
    """A number with thousands separators without them; in brackets as it is."""
    before = _START_OF_FORMULA.split(number.string[: number.start()])[-1]
    if len(_OPENING.findall(before)) > len(_CLOSING.findall(before)):
        return number[0]
    return re.sub(_SEPARATOR, "", number[0])


def _are_different_tiny_numbers(expected: Any, answer: Any) -> bool:
    """Whether two expressions are numbers, the first near 0, and differ in the digits that both have."""
    reference = _value_of(expected)
    value = _value_of(answer)
    if reference is None or value is None or not 0 < abs(reference) < _TINY:
        return False
    # 1/3000 is 0.000333.
    decimals = max(_FEWEST_DIGITS, min(_digits_of(reference), _digits_of(value))) - 1
    return f"{reference:.{decimals}e}" != f"{value:.{decimals}e}"


def _digits_of(value: float) -> int:
    """How many significant digits a number has, of the first twelve, which arithmetic leaves exact."""
    mantissa, _, _ = f"{abs(value):.11e}".partition("e")
    return len(mantissa.rstrip("0").replace(".", ""))


def _value_of(expression: Any) -> float | None:
    """The value of an expression of math-verify, or of the right side of an equation; `None` if it is no number."""
    expression = getattr(expression, "rhs", expression)
    if not getattr(expression, "is_number", False):
        return None
    try:
        return float(expression.evalf())
    except (TypeError, ValueError, OverflowError):  # a complex number
        return None


# The completions of a group share their reference.
@lru_cache(maxsize=1024)
def _parse_reference(reference: str) -> list:
    """The expressions in a reference, of all its readings."""
    reference = reference.strip()
    if not reference:
        return []

    # math-verify reads LaTeX only where it is marked.
    is_marked = r"\boxed" in reference or reference.count("$") > 1
    if not is_marked:
        reference = rf"\boxed{{{reference}}}"

    readings = _readings(reference)
    # As a product, too: math-verify does not take 870000000 for 8.7 times 10^8, which is no whole number for it.
    as_product = _E_NOTATION.sub(r"\1 \\times 10^{\2}", readings[0])
    expressions: list = []
    has_tried_again = False
    for text in dict.fromkeys([*readings, as_product]):
        parsed = _parse_in_time(text, _ALARM_S)
        # What cannot be read is left out for the whole run.
        if parsed is None and not has_tried_again:
            has_tried_again = True
            parsed = _parse_in_time(text, _LONG_ALARM_S)
        expressions += parsed or []
    return expressions


def _parse_in_time(text: str, seconds: int) -> list | None:
    """The expressions of a text, none if it is unreadable; `None` if that took longer."""
    from math_verify import parse
    from math_verify.errors import TimeoutException

    try:
        return parse(text, parsing_timeout=seconds, raise_on_error=True)
    except TimeoutException:
        return None
    except Exception as error:  # math-verify and the parsers behind it have no common class of errors
        # Not the text's fault.
        if "threaded environment" in str(error):
            raise
        return []
