"""The command `qarl-trl doctor`: print sections one after the other. A failure does not stop the next section."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import chain

from ..plan.command import GPUS
from . import FAIL, WARN, Finding


def main(argv: Sequence[str]) -> None:
    """Print all sections; exit code 1 if a check failed. `ValueError`, `OSError` or `ImportError` for bad use."""
    parser = argparse.ArgumentParser(
        "qarl-trl doctor",
        "qarl-trl doctor [--config FILE] [--key value ...]",
        description="Check this machine and, with a recipe or keys of `qarl-trl train`, the run: settings, "
        "data, rewards, and with a local model the log-prob mismatch (starts two engines, minutes).",
        epilog="Exit code: 0 fine, 1 a check failed, 2 bad use.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="recipe; any of its keys may also be given here, as for `qarl-trl train`")
    parser.add_argument("--gpu", choices=GPUS, help="check the run for such a GPU, which this machine need not have")
    parser.add_argument("--probe_prompts", type=int, default=8, help="prompts to measure the mismatch with (8)")
    own, others = parser.parse_known_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = []
    for title, findings in sections(own, others):
        print(f"\n{title}")
        for finding in caught(title, findings):
            print(finding, flush=True)
            found.append(finding.status)
    print(f"\n{found.count(FAIL)} failed, {found.count(WARN)} warnings")
    if FAIL in found:
        raise SystemExit(1)


def caught(title: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings of a section; an error that ends it, such as a refused setting, is the last one."""
    try:
        yield from findings
    except Exception as error:
        yield Finding(FAIL, title.lower(), f"{type(error).__name__}: {error}")


def sections(own: argparse.Namespace, others: list[str]) -> Iterator[tuple[str, Iterator[Finding]]]:
    """Titles and checks, cheap ones first; without a recipe only the machine's."""
    from .machine import devices, versions

    yield "Machine", chain(versions(), devices())
    if own.config is None and not others:
        return
    from ...rewards import load_rewards
    from ...train import load_datasets, parse
    from .measure import check_mismatch
    from .rewards import check_reward
    from .settings import check_elsewhere, check_settings, local_folder

    argv = [*(["--config", own.config] if own.config else []), *others]
    script_args, args, model_args = parse(argv, any_device=True)
    dataset, _ = load_datasets(script_args, with_eval=args.eval_strategy != "no")
    rewards = load_rewards(script_args.reward_funcs)
    folder = local_folder(model_args.model_name_or_path)
    yield "Rewards", (check_reward(reward, dataset) for reward in rewards)
    if own.gpu:
        yield f"One {own.gpu}", check_elsewhere(own.gpu, argv, args, dataset)
        return
    yield "Settings", check_settings(folder, args, model_args, dataset)
    yield "Mismatch", check_mismatch(folder, args, dataset.select(range(min(own.probe_prompts, len(dataset)))))
