"""The command `qarl-trl plan`: the memory of each GPU, whether a run fits, and how fast each kind of run may be."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

# These import only the standard library, so that `--help` is instant.
from ...methods import METHODS, QARL, RLOO, Method, choose_method
from ..arguments import CommandParser
from .gpus import GPUS
from .memory import table as memory_table
from .memory.moments import fits
from .run import Hardware, Run


# What samples in rollout batches and learns from advantages, of which the seconds are estimated.
WITH_SECONDS = (QARL, RLOO)


def main(argv: Sequence[str]) -> None:
    """
    `qarl-trl plan`.

    Args:
        argv: The command line. Options that are not of this command go to the recipe.

    Raises:
        SystemExit: with code 1 if the run does not fit, or the GPU has no kernel for it; without a GPU, if that is so
            for all of the list.
        ValueError: if it cannot work.
    """
    args, overrides = _parser().parse_known_args(argv)
    _check_options(args)
    recipe = ["--config", args.config, *overrides]

    method, note = choose_method(recipe, args.trainer)
    if args.measured is not None and method not in WITH_SECONDS:
        raise ValueError(f"--from corrects seconds, which plan does not estimate for {method.command}.")
    if note:
        print(note)

    # So that a script can ask before it rents a machine.
    if not _print_plan(args, recipe, method):
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="qarl-trl plan",
        description="Estimate the memory of each GPU from a recipe, and with --gpu the seconds of a rollout batch in "
        "bfloat16 and in low bits, without loading a model. Other options override the recipe.",
        example="qarl-trl plan --config recipe.yaml",
    )
    parser.add_argument("--config", required=True, help="recipe (.yaml) of qarl-trl train, sft, rloo or distill")
    parser.add_argument("--trainer", choices=METHODS, help="which of them trains it (default: by the recipe's keys)")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one GPU each (default: 1)")
    parser.add_argument("--gpu", choices=GPUS, help="GPU; A100 and H100 have 80 GB. Without one: memory on each")
    parser.add_argument("--memory", type=float, help="GiB of each GPU, for another type, or a part of one")
    parser.add_argument("--sharding", choices=("fsdp2", "ddp"), help="for several GPUs (default: fsdp2)")
    parser.add_argument("--prompt_tokens", type=float, help="mean length of a prompt, for the seconds (assumed: 200)")
    parser.add_argument(
        "--answer_tokens", type=float, help="mean length of an answer (assumed: half of max_completion_length)"
    )
    parser.add_argument(
        "--from",
        dest="measured",
        type=Path,
        metavar="FOLDER",
        help="a run of this recipe on this GPU: its times and its mean length correct the estimate",
    )
    return parser


def _check_options(args: argparse.Namespace) -> None:
    """`ValueError` for options that no estimate can take."""
    for name in ("prompt_tokens", "answer_tokens"):
        value = getattr(args, name)
        # Written so that NaN is refused too.
        if value is not None and not value >= 1:
            raise ValueError(f"--{name} must be at least 1, got {value:g}.")

    if args.measured is not None and args.gpu is None:
        raise ValueError("--from needs --gpu, the GPU of that run: other arms are estimated from its data sheet.")
    if args.measured is not None and args.answer_tokens is not None:
        raise ValueError("--from and --answer_tokens exclude each other: the log has the mean length of the answers.")


def _print_plan(args: argparse.Namespace, recipe: Sequence[str], method: Method) -> bool:
    """Print the plan of a recipe, and return whether it fits."""
    # Late as well.
    from .kernels import missing_kernel
    from .memory.advice import advise

    if args.gpu is None and args.memory is None:
        # No GPU is assumed: those of the list are shown instead.
        largest = max(gpu.memory for gpu in GPUS.values())
        advice = advise(recipe, Hardware(args.gpus, largest, args.sharding), method)
        missing = {name: missing_kernel(advice.run, gpu) for name, gpu in GPUS.items()}
        _print(memory_table.for_each_gpu(advice.name, advice.run, missing))
        return any(fits(memory_table.on_gpu(advice.run, name)) and not missing[name] for name in GPUS)

    memory = GPUS[args.gpu].memory if args.memory is None else args.memory
    hardware = Hardware(args.gpus, memory, args.sharding)
    advice = advise(recipe, hardware, method)
    seconds = _seconds(args, recipe, hardware, advice.run, method)

    _print(memory_table.table(advice.name, advice.run, advice.alone, advice.one_pass))
    _print(seconds)
    _print(["", *memory_table.verdict(advice.run, advice.together)])

    kernel = missing_kernel(advice.run, GPUS[args.gpu]) if args.gpu is not None else ""
    if kernel:
        print(f"But it does not run on {args.gpu}: {kernel}.")
    return fits(advice.run) and not kernel


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _seconds(
    args: argparse.Namespace, recipe: Sequence[str], hardware: Hardware, run: Run, method: Method
) -> list[str]:
    """Lines about seconds, if a GPU is named."""
    if method not in WITH_SECONDS:
        return [f"No seconds: those of {method.command} are not estimated."]
    if args.gpu is None:
        return ["No seconds: name a GPU with --gpu."]
    if not run.engine:
        return ["No seconds: rollouts without vLLM are not estimated."]

    # Late, because they load torch.
    from .seconds.arms import compare
    from .seconds.table import table

    gpu = GPUS[args.gpu]
    comparison = compare(recipe, hardware, gpu, args.prompt_tokens, args.answer_tokens, args.measured, method)
    return list(table(comparison, args.gpu, gpu, args.gpus))
