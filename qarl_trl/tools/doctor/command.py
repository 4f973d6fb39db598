"""The command `qarl-trl doctor`: sections one after the other, each of which says why it cannot be run, if so."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .findings import Finding

# Of vLLM and OpenMP, before they are imported.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
REWARD_ROWS = 32


def main(argv: Sequence[str] | None = None) -> None:
    """
    Print all sections; exit code 1 when a check failed.

    Raises:
        ValueError, OSError, ImportError: For a recipe or an option that is wrong: bad use.
    """
    own, others = make_parser().parse_known_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    from .findings import FAIL, SKIPPED, Finding, render

    given = None
    if own.config is not None or others:
        from ...train import parse

        given = parse([*(["--config", own.config] if own.config else []), *others], any_device=True)
    failed = warned = 0
    for title, check in sections(given, own):
        try:
            findings = check()
        except Exception as error:  # one section must not take the others with it
            findings = [Finding(FAIL, title, f"{type(error).__name__}: {error}")]
        print("\n".join(render(title, findings or [Finding(SKIPPED, title, "nothing to check")])), flush=True)
        failed += sum(f.status == FAIL for f in findings)
        warned += sum(f.status == "warn" for f in findings)
    print(f"\n{failed} failed, {warned} warnings")
    if failed:
        raise SystemExit(1)


def make_parser() -> argparse.ArgumentParser:
    """The options that are not those of `qarl-trl train`."""
    parser = argparse.ArgumentParser(
        "qarl-trl doctor",
        "qarl-trl doctor [--config FILE] [--key value ...]",
        description="Check this machine and, with a recipe or keys of `qarl-trl train`, the run: settings, memory, disk, "
        "data, rewards, and with a local model where the log-prob mismatch comes from (starts two engines, minutes).",
        epilog="Exit code: 0 fine, 1 a check failed, 2 bad use.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="recipe; its keys can also be given here, as to `qarl-trl train`")
    parser.add_argument("--gpus", type=int, help="processes to estimate memory for (default: as launched)")
    parser.add_argument("--sharding", choices=("ddp", "fsdp2"), help="of --gpus (default: fsdp2)")
    parser.add_argument(
        "--probe_prompts", type=int, default=8, help="prompts of the mismatch's budget (default: 8, 0: none)"
    )
    parser.add_argument("--probe_tokens", type=int, default=64, help="tokens sampled after each (default: 64)")
    return parser


def sections(given: Any, own: argparse.Namespace) -> list[tuple[str, Callable[[], list[Finding]]]]:
    """Titles and checks, cheap ones first; those of a run only if there is one."""
    from .machine import devices, versions

    machine: list[tuple[str, Callable]] = [("Versions", versions), ("Devices", devices)]
    if given is None:
        return machine
    from .run import Run

    run = Run(*given)
    return [
        *machine,
        ("Settings", run.settings),
        ("Memory of one process at its largest moment, estimated", lambda: run.memory(own.gpus, own.sharding)),
        ("Data and rewards", lambda: run.data(REWARD_ROWS)),
        (
            "Log-prob mismatch between engine and learner, nats per token",
            lambda: run.budget(own.probe_prompts, own.probe_tokens),
        ),
    ]
