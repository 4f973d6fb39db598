"""The command `qarl-trl doctor`: print sections one after the other. A failure does not stop the next section."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from itertools import chain

from ...methods import METHODS, choose_method
from ..plan.gpus import GPUS
from . import FAIL, OK, WARN, CheckResult


def main(argv: Sequence[str]) -> None:
    """
    Print all sections. The exit code is 1 if a check failed.

    Args:
        argv: Options of `qarl-trl doctor`; all others belong to the recipe, as for the command that trains it.

    Raises:
        ValueError, OSError, ImportError: if the recipe, the data or a reward function cannot be read.
    """
    options, recipe_argv = _parser().parse_known_args(argv)
    # The checks load vLLM and tokenizers, whose notes would stand between the results.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    statuses = []
    for title, results in sections(options, recipe_argv):
        print(f"\n{title}")
        for result in with_error_as_result(title, results):
            # Flushed, because the next check may take minutes.
            print(result, flush=True)
            statuses.append(result.status)

    print(f"\n{statuses.count(FAIL)} failed, {statuses.count(WARN)} warnings")
    if options.config is None and not recipe_argv:
        print("Only the machine was checked. To check a run, too: qarl-trl doctor --config recipe.yaml")
    if FAIL in statuses:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    """The options of the command itself."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl doctor",
        usage="qarl-trl doctor [--config FILE] [--key value ...]",
        description="Check this machine and, with a recipe or keys of `qarl-trl train`, `sft`, `rloo` or `distill`, "
        "the run: settings, data, rewards, and with a local model the mismatch of log-probs (starts two engines, "
        "minutes).",
        epilog="Exit code: 0 fine, 1 a check failed, 2 bad use.",
        # What looks like the beginning of an option may be a key of the recipe.
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="recipe; any of its keys may also be given here, as for `qarl-trl train`")
    parser.add_argument(
        "--trainer", choices=METHODS, help="which command trains the recipe (default: by the recipe's keys)"
    )
    parser.add_argument("--gpu", choices=GPUS, help="check the run for such a GPU, which this machine need not have")
    parser.add_argument("--probe_prompts", type=int, default=8, help="prompts to measure the mismatch with (8)")
    return parser


def with_error_as_result(title: str, results: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """
    Yield the results of a section. An error that ends it, such as a refused setting, becomes its last result.

    Args:
        title: The section's title, which names the error.
        results: The section's results. Its checks run as they are read.
    """
    try:
        yield from results
    except Exception as error:
        yield CheckResult(FAIL, title.lower(), f"{type(error).__name__}: {error}")


def sections(options: argparse.Namespace, recipe_argv: list[str]) -> Iterator[tuple[str, Iterator[CheckResult]]]:
    """
    Yield the sections, cheap ones first; without a recipe only the machine's.

    Args:
        options: The options of the command itself.
        recipe_argv: Keys of the recipe and their values, which override the recipe's own.

    Yields:
        The title of a section, and its results. Its checks run as they are read.
    """
    # These load torch, transformers and TRL, which `--help` must not.
    from ...quant.supported import SUPPORTED
    from .machine import check_cpu_engine, compare_versions, describe_devices

    has_recipe = options.config is not None or recipe_argv
    # Without a recipe any scheme may be meant.
    schemes = [] if has_recipe else SUPPORTED.values()
    # Before the recipe is read: an error in the recipe must not hide what is wrong with the machine.
    yield "Machine", chain(compare_versions(), describe_devices(), check_cpu_engine(schemes))
    if not has_recipe:
        return

    from ...rewards import load_rewards
    from ...train import evaluates, load_datasets, model_settings, parse
    from .measure import probe_mismatch
    from .rewards import check_rewards
    from .settings import check_for_gpu, check_settings, local_folder, schemes_of

    argv = list(recipe_argv)
    if options.config:
        argv = ["--config", options.config, *argv]
    method, note = choose_method(argv, options.trainer)
    script_args, args, model_args = parse(argv, any_device=True, method=method)
    # As the trainer gets them.
    args.model_init_kwargs = model_settings(args, model_args)
    dataset, _ = load_datasets(script_args, evaluates(args), args, method)
    folder = local_folder(model_args.model_name_or_path, args.model_init_kwargs["revision"])

    if note:
        yield "Recipe", iter([CheckResult(OK, "trainer", note)])
    rewards = None
    if method.has_rewards:
        rewards = load_rewards(script_args.reward_funcs)
        yield "Rewards", check_rewards(rewards, dataset)

    if options.gpu:
        # The other sections check this machine's devices and engine, which say nothing about that GPU.
        yield f"One {options.gpu}", check_for_gpu(options.gpu, argv, args, dataset, method)
        return

    cpu_engine = check_cpu_engine(schemes_of(args))
    yield "Settings", chain(cpu_engine, check_settings(folder, args, model_args, dataset, rewards))

    number_of_prompts = min(options.probe_prompts, len(dataset))
    yield "Mismatch", probe_mismatch(folder, args, dataset.select(range(number_of_prompts)))
