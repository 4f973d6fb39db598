"""Refuse patterns for layer names that would need hours: a regular expression may try endlessly many ways to match."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache

from compressed_tensors.quantization import QuantizationConfig

from .scheme import DEFAULT_IGNORE, check_pattern


# Seconds of a processor for one pattern and all names of a model. Plain patterns need milliseconds.
LIMIT_S = 10
# In a process of its own, because nothing else ends a match in every thread: Python's `re` holds the interpreter.
_PROGRAM = """
import json, re, resource, sys
pattern, names, limit_s = json.load(sys.stdin)
# Not by the clock, which a busy machine would use up.
resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
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
        ValueError: for a pattern that is no regular expression, or needs more than `LIMIT_S` seconds.
    """
    # Those of the default are quick.
    expressions = [pattern for pattern in patterns if pattern.startswith("re:") and pattern not in DEFAULT_IGNORE]
    if not expressions:
        return

    tried_names = tuple(sorted(set(names)))
    for expression in expressions:
        # One of a `config.json` may be no regular expression.
        check_pattern(expression)
        if not _is_quick(expression.removeprefix("re:"), tried_names, LIMIT_S):
            raise ValueError(
                f"The pattern {expression!r} (quant_ignore, targets or quantization_config) needs more than "
                f"{LIMIT_S} seconds for the names of this model's layers. Repeat nothing that is a repetition "
                "already: 'a+' in place of '(a+)+'."
            )


@lru_cache(maxsize=256)
def _is_quick(expression: str, names: tuple[str, ...], limit_s: int) -> bool:
    """Whether an expression was matched with all names within `limit_s` seconds of a processor."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    request = json.dumps([expression, names, limit_s]).encode()
    process = subprocess.run(command, input=request)

    # How the system ends a process at its limit.
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return False
    # One that failed in another way has tried nothing.
    process.check_returncode()
    return True
