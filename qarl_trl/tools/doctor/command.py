"""The command `qarl-trl doctor`: sections one after the other, each of which says why it cannot be run, if so."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence

from . import FAIL, WARN, Finding


def main(argv: Sequence[str]) -> None:
    """
    Print all sections; exit code 1 when a check failed.

    Raises:
        ValueError, OSError, ImportError: For a recipe or an option that is wrong: bad use.
    """
    own, others = make_parser().parse_known_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found: list[Finding] = []
    for title, check in sections(own, others):
        try:
            findings = check()
        except Exception as error:  # one section must not take the others with it
            findings = [Finding(FAIL, title, f"{type(error).__name__}: {error}")]
        print("\n".join([f"\n{title}", *map(str, findings)]), flush=True)
        found += findings
    failed, warned = (sum(f.status == status for f in found) for status in (FAIL, WARN))
    print(f"\n{failed} failed, {warned} warnings")
    if failed:
        raise SystemExit(1)


def make_parser() -> argparse.ArgumentParser:
    """The options that are not those of `qarl-trl train`."""
    parser = argparse.ArgumentParser(
        "qarl-trl doctor",
        "qarl-trl doctor [--config FILE] [--key value ...]",
        description="Check this machine and, with a recipe or keys of `qarl-trl train`, the run: settings, "
        "data, rewards, and with a local model the log-prob mismatch (starts two engines, minutes).",
        epilog="Exit code: 0 fine, 1 a check failed, 2 bad use.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="recipe; its keys can also be given here, as to `qarl-trl train`")
    parser.add_argument(
        "--probe_prompts", type=int, default=8, help="to measure the mismatch with (default: 8, 0: none)"
    )
    parser.add_argument("--probe_tokens", type=int, default=64, help="tokens sampled after each (default: 64)")
    return parser


def sections(own: argparse.Namespace, others: list[str]) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    """Titles and checks, cheap ones first; those of a recipe only if there is one."""
    from .machine import devices, versions

    yield "Machine", lambda: [*versions(), *devices()]
    if own.config is None and not others:
        return
    from ...train import parse
    from .recipe import Recipe

    recipe = Recipe(*parse([*(["--config", own.config] if own.config else []), *others], any_device=True))
    yield "Data and rewards", recipe.data
    yield "Settings", recipe.settings
    yield (
        "Log-prob mismatch between engine and learner, nats per token",
        lambda: recipe.mismatch(own.probe_prompts, own.probe_tokens),
    )
