"""Refuse patterns for layer names that would need hours: a regular expression may try endlessly many ways to match."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache

from compressed_tensors.quantization import QuantizationConfig

from .scheme import DEFAULT_IGNORE


# Seconds for one pattern and all names of a model, with the start of a process. Plain patterns need milliseconds.
LIMIT_S = 10.0
# In a process of its own, because nothing else ends a match in every thread: Python's `re` holds the interpreter.
_PROGRAM = """
import json, re, sys
pattern, names = json.load(sys.stdin)
match = re.compile(pattern).match
for name in names:
    match(name)
"""


def patterns_of(plan: QuantizationConfig) -> list[str]:
    """The targets of all groups of a plan, and what it ignores."""
    patterns = list(plan.ignore or ())
    for group in plan.config_groups.values():
        patterns += group.targets
    return patterns


def check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    """
    Try the regular expressions among some patterns on the names that they will meet, in limited time.

    Args:
        patterns: Names, classes of modules, or patterns for names after `re:`.
        names: The names of modules.

    Raises:
        ValueError: for a pattern that needs more than `LIMIT_S` seconds.
    """
    # Those of the default are quick.
    expressions = [pattern for pattern in patterns if pattern.startswith("re:") and pattern not in DEFAULT_IGNORE]
    if not expressions:
        return

    tried_names = tuple(sorted(set(names)))
    for expression in expressions:
        if not _is_quick(expression.removeprefix("re:"), tried_names, LIMIT_S):
            raise ValueError(
                f"The pattern {expression!r} (quant_ignore, targets or quantization_config) needs more than "
                f"{LIMIT_S:g} seconds for the names of this model's layers. Repeat nothing that is a repetition "
                "already: 'a+' in place of '(a+)+'."
            )


@lru_cache(maxsize=256)
def _is_quick(expression: str, names: tuple[str, ...], limit_s: float) -> bool:
    """Whether an expression was matched with all names within `limit_s` seconds."""
    request = json.dumps([expression, names])
    try:
        subprocess.run([sys.executable, "-I", "-S", "-c", _PROGRAM], input=request.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True
