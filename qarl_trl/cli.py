"""The command `qarl-trl`. It imports only the standard library until a command runs, so `--help` is instant."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from traceback import walk_tb
from typing import Any

from .redact import redact


# The module and function that get the other arguments, also `--help`. It may return a function for the long work, whose errors
# keep their traceback.
COMMANDS = {
    "train": (".train:main", "train from a recipe; on several GPUs: accelerate launch -m qarl_trl.train"),
    "serve": (".tools.serve:main", "run the engine of a recipe as a server, for a trainer with vllm_mode=server"),
    "plan": (".tools.plan.command:main", "estimate the GPU memory of a recipe, without loading the model"),
    "eval": (".tools.evaluate.command:main", "score a checkpoint on math problems, through vLLM"),
    "report": (".tools.report.page:main", "write one page about one or more runs: a verdict and plots"),
    "doctor": (".tools.doctor.command:main", "check machine, recipe, data and rewards, and measure the mismatch"),
    "export": (".tools.export:main", "quantize a checkpoint or a LoRA adapter for vLLM"),
    "push": (".tools.export:push", "push a low-bit model with its card to the Hub"),
    "schemes": (".cli:schemes", "list the schemes: when to take which, and where they run"),
}
# Errors that a user can fix by another setting, file or package.
_USER_ERRORS = (ValueError, OSError, ImportError, OverflowError)
# Errors about a file, whose messages mostly lack its name. As names of classes, because their packages load late.
_OF_A_FILE = {"YAMLError", "SafetensorError", "StrictDataclassError", "ValidationError"}
_OF_A_FILE |= {"JSONDecodeError", "UnicodeDecodeError"}
# transformers accepts any JSON as a config, and fails where it first uses a value.
_OF_A_CONFIG = re.compile(r"(configuration_utils|loading_report|modeling_\w+)\.py$")
_OTHERS_SPEAK_AFTER_S = 10


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command (default: of the process's arguments). Bad input gives one line on stderr and exit code 2, with `--traceback` a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if shows_all := "--traceback" in argv:
        argv.remove("--traceback")
    try:
        work = run(argv)
    except Exception as error:
        if shows_all or not (isinstance(error, _USER_ERRORS) or _is_of_a_file(error)):
            raise
        # torchrun ends the other processes when one fails, so an error of all of them is printed once.
        time.sleep(_OTHERS_SPEAK_AFTER_S if int(os.environ.get("LOCAL_RANK", "0")) else 0)
        print(f"qarl-trl {argv[0]}: {_in_one_line(error)} (--traceback: where)", file=sys.stderr)
        raise SystemExit(2) from error
    if work is not None:
        work()


def _is_of_a_file(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    raised_in = list(walk_tb(error.__traceback__))[-1][0].f_code.co_filename
    return bool(names & _OF_A_FILE) or bool(not isinstance(error, OSError) and _OF_A_CONFIG.search(raised_in))


def _in_one_line(error: Exception) -> str:
    """The message, preceded by the file that was read, or the model's config, if it does not name the file."""
    text = " ".join(str(error).split())
    if found := re.match(r"Repo id must .*?: '([^']*)'\.", text):  # huggingface_hub's message for a missing folder
        return f"{found[1]!r} is neither a folder here nor a Hub id (user/name)."
    if _is_of_a_file(error):
        values = [value for frame, _ in walk_tb(error.__traceback__) for value in frame.f_locals.values()]
        read = [*_files(f"{value}/config.json" for value in values if isinstance(value, str)), *_files(values)]
        text = f"{read[-1]}: {text}" if read and read[-1] not in text else text
    return redact(text)


def _files(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        path = value if isinstance(value, str | os.PathLike) else getattr(value, "name", "")
        if isinstance(path, str | os.PathLike) and len(str(path)) < 4096 and os.path.isfile(path):
            yield str(path)


def run(argv: Sequence[str]) -> Callable[[], None] | None:
    """Run one command and return its long work, if it has one; raises its errors."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl",
        description="Reinforcement learning with low-bit rollouts on TRL.",
        epilog="Every command takes --traceback: bad input then gives a traceback instead of one line.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    name = parser.parse_args(argv[:1]).command
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(import_module(module, __package__), function)(argv[1:])


def schemes(argv: Sequence[str]) -> None:
    """Print the schemes, when to take which, and where vLLM can sample with them; learner and export run on any CPU."""
    argparse.ArgumentParser("qarl-trl schemes", description=schemes.__doc__).parse_args(argv)
    from .quant.scheme import GPU_GENERATIONS, SUPPORTED

    rows = [("scheme", "group sizes", "activations", "CPU", *GPU_GENERATIONS, "take it")]
    for row in SUPPORTED.values():
        groups = ", ".join("channel" if size == -1 else str(size) for size in row.group_sizes) or "fixed"
        engines = ["tested" if row.cpu_engine else "no"]
        engines += ["untested" if name in row.gpus else "no" for name in GPU_GENERATIONS]
        advice = row.advice + ("" if row.activations == "none" else "; some mismatch stays")
        rows.append((row.name, groups, row.activations, *engines, advice))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    print("\nA GPU: W4A16 first. NVFP4A16 has no LoRA and no experts. More: docs/schemes.md")


if __name__ == "__main__":
    if not sys.flags.safe_path:  # `python -m` puts the current folder first: no file there may replace a package
        sys.path.append(sys.path.pop(0))
    main()
