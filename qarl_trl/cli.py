"""The command `qarl-trl`. It imports only the standard library until a command runs, so `--help` is instant."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module

from .errors import in_one_line, is_of_the_user, naming_config
from .redact import redact


# The module and function that get the other arguments, also `--help`. It may return a function for the long work,
# whose errors keep their traceback.
COMMANDS = {
    "train": (".train:main", "train from a recipe; on several GPUs: accelerate launch -m qarl_trl.cli train"),
    "sft": (".train:sft", "fine-tune low-bit weights on given texts, by TRL's SFT"),
    "rloo": (".train:rloo", "train by TRL's RLOO on low-bit rollouts"),
    "distill": (".train:distill", "distill a model in high precision, also a run's own start, into low bits"),
    "serve": (".tools.serve:main", "run the engine of a recipe as a server, for a trainer with vllm_mode=server"),
    "plan": (".tools.plan.command:main", "estimate memory and seconds of a recipe, without loading the model"),
    "eval": (".tools.evaluate.command:main", "score a checkpoint on math problems, through vLLM"),
    "report": (".tools.report.page:main", "write one page about one or more runs: a verdict and plots"),
    "doctor": (".tools.doctor.command:main", "check machine, recipe, data and rewards, and measure the mismatch"),
    "export": (".tools.export.command:main", "round a checkpoint or a merged LoRA adapter to nearest, for vLLM"),
    "push": (".tools.push:main", "push a low-bit model with its card to the Hub"),
    "schemes": (".cli:schemes", "list the schemes: when to take which, and where they run"),
}
_ABOUT_SCHEMES = (
    "Print the schemes, when to take which, and where vLLM can sample with them; learner and export run on any CPU."
)
_OTHERS_SPEAK_AFTER_S = 10
# The commands whose runs have checkpoints.
_TRAIN = ("train", "sft", "rloo", "distill")
# 128 + SIGINT, as a shell says it.
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run one command.

    Args:
        argv: The arguments, by default those of the process. `--traceback` asks for the traceback of bad input.

    Raises:
        SystemExit: after one line on stderr, with code 2 for bad input and 130 for Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    shows_traceback = "--traceback" in arguments
    if shows_traceback:
        arguments.remove("--traceback")

    try:
        _run_to_the_end(arguments, shows_traceback)
    except KeyboardInterrupt:
        if shows_traceback:
            raise
        line = f"qarl-trl {arguments[0]}: interrupted."
        if arguments[0] in _TRAIN:
            line += (
                " Finished checkpoints stay: resume_from_checkpoint: auto goes on from the last. SIGTERM saves first."
            )
        print(line, file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None


def _run_to_the_end(arguments: list[str], shows_traceback: bool) -> None:
    """Run one command; exit with 2 and one line for bad input."""
    try:
        # Most commands get their model on the command line.
        with naming_config(arguments):
            work = run(arguments)
    except Exception as error:
        if shows_traceback or not is_of_the_user(error):
            raise
        _let_the_first_process_speak()
        line = redact(in_one_line(error, arguments))
        print(f"qarl-trl {arguments[0]}: {line} (--traceback: where)", file=sys.stderr)
        raise SystemExit(2) from error

    # Outside of the try: an error in the middle of training is no bad input.
    if work is not None:
        work()


def _let_the_first_process_speak() -> None:
    """Wait in the other processes: torchrun ends them when one fails, so an error of all of them is printed once."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        time.sleep(_OTHERS_SPEAK_AFTER_S)


def run(argv: Sequence[str]) -> Callable[[], None] | None:
    """
    Run one command, and return its long work, if it has one.

    Args:
        argv: The command's name and its arguments.

    Raises:
        Exception: all errors of the command.
    """
    parser = argparse.ArgumentParser(
        prog="qarl-trl",
        description="Reinforcement learning with low-bit rollouts on TRL.",
        epilog="Every command takes --traceback: bad input then gives a traceback instead of one line.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    # Only for the list in `--help`: each command parses its own arguments.
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    # The first word alone: all others are the command's own.
    command = parser.parse_args(argv[:1]).command

    place, _ = COMMANDS[command]
    module, _, function = place.partition(":")
    run_command = getattr(import_module(module, __package__), function)
    return run_command(argv[1:])


def schemes(argv: Sequence[str]) -> None:
    """
    Print a row for each scheme.

    Args:
        argv: The arguments, of which there are none but `--help`.
    """
    argparse.ArgumentParser("qarl-trl schemes", description=_ABOUT_SCHEMES).parse_args(argv)
    from .quant.supported import GPU_GENERATIONS, SUPPORTED

    rows = [("scheme", "group sizes", "activations", "CPU", *GPU_GENERATIONS, "take it")]
    for scheme in SUPPORTED.values():
        sizes = ["channel" if size == -1 else str(size) for size in scheme.group_sizes]
        on_cpu = "tested" if scheme.cpu_engine else "no"
        on_gpus = []
        for generation in GPU_GENERATIONS:
            may_run = "tested" if generation in scheme.ran_on else "untested"
            on_gpus.append(may_run if generation in scheme.gpus else "no")

        advice = scheme.advice
        if scheme.activations != "none":
            advice += "; some mismatch stays"
        rows.append((scheme.name, ", ".join(sizes) or "fixed", scheme.activations, on_cpu, *on_gpus, advice))

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    print("\nA GPU: W4A16 first. NVFP4A16 has no LoRA and no experts. More: docs/schemes.md")


if __name__ == "__main__":
    # `python -m` puts the current folder first: no file there may replace a package.
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))
    main()
