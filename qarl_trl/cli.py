"""The command `qarl-trl`. Only the standard library is imported until a command runs, so `--help` is instant."""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from json import JSONDecodeError
from pathlib import Path
from traceback import walk_tb
from typing import Any

from .redact import redact


# Commands with a parser of their own: the module and function that get the other arguments, `--help` included. A function
# may return another one: the long work, whose errors keep their traceback.
_FORWARDED = {
    "train": (".train:main", "train from a recipe; on several GPUs accelerate launch -m qarl_trl.train"),
    "serve": (".tools.serve:main", "the engine of a recipe as a server, for a trainer with vllm_mode=server"),
    "plan": (".tools.plan.command:main", "what a recipe needs of each GPU's memory, estimated without a model"),
    "eval": (".tools.evaluate.command:main", "what a checkpoint scores on math problems, through vLLM"),
    "report": (".tools.report.command:main", "plots and one page of what runs logged, side by side"),
    "doctor": (
        ".tools.doctor.command:main",
        "check this machine, a recipe, its data and rewards, and the log-prob mismatch",
    ),
}
# What a user can mend by another setting, file or package; the second by name, because their packages load late.
_USER_ERRORS = (ValueError, OSError, ImportError, OverflowError)
_USER_ERRORS_BY_NAME = ("YAMLError", "SafetensorError", "StrictDataclassError")
_OTHERS_SPEAK_AFTER_S = 10


def main(argv: Sequence[str] | None = None) -> None:
    """
    Run one command; `argv` (without the program's name) defaults to that of the process.

    Bad input is one line on stderr and exit code 2, with `--debug` a traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = _take_debug(argv)
    try:
        work = run(argv)
    except Exception as error:
        if debug or not _is_of_the_user(error):
            raise
        # torchrun ends the other processes when one has failed: what all of them found is said once.
        time.sleep(_OTHERS_SPEAK_AFTER_S if int(os.environ.get("LOCAL_RANK", "0")) else 0)
        print(f"qarl-trl {argv[0]}: {_in_one_line(error)} (--debug: where)", file=sys.stderr)
        raise SystemExit(2) from error
    if work is None:
        return
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun and accelerate launch end their output with what is in it
        from torch.distributed.elastic.multiprocessing.errors import record

        work = record(work)
    work()


def _is_of_the_user(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    # transformers takes any JSON for a config, and fails on its first key.
    is_config = Path(list(walk_tb(error.__traceback__))[-1][0].f_code.co_filename).name == "configuration_utils.py"
    return isinstance(error, _USER_ERRORS) or bool(names & {*_USER_ERRORS_BY_NAME}) or is_config


def _in_one_line(error: Exception) -> str:
    """The message, with the name of the file that was read where the message is a parser's, which does not know it."""
    text = " ".join(str(error).split())
    if found := re.match(r"Repo id must .*?: '([^']*)'\.", text):  # huggingface_hub's, of a folder that is not there
        return f"{found[1]!r} is neither a folder here nor a Hub id (user/name)."
    if isinstance(error, UnicodeDecodeError | JSONDecodeError) or not isinstance(error, _USER_ERRORS):
        read = [file for frame, _ in walk_tb(error.__traceback__) for file in _files(frame.f_locals.values())]
        text = f"{read[-1]} cannot be read: {text}" if read else text
    return redact(text)


def _files(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        path = value if isinstance(value, str | os.PathLike) else getattr(value, "name", "")
        if isinstance(path, str | os.PathLike) and len(str(path)) < 4096 and os.path.isfile(path):
            yield str(path)


def run(argv: Sequence[str]) -> Callable[[], None] | None:
    """Run one command and raise what it raises; of a command that trains, return the training."""
    if argv and argv[0] in _FORWARDED:
        module, _, function = _FORWARDED[argv[0]][0].partition(":")
        return getattr(import_module(module, __package__), function)(argv[1:])
    args = _make_parser().parse_args(argv)
    if args.command == "schemes":
        print(schemes())
    elif args.command == "push":
        push(args)
    else:
        export(args)
    return None


def _take_debug(argv: list[str]) -> bool:
    """Remove `--debug` without a value; with one it is a field of transformers' `TrainingArguments`."""
    for i, option in enumerate(argv):
        if option == "--debug" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            del argv[i]
            return True
    return False


def export(args: argparse.Namespace) -> None:
    """
    Write a high-precision checkpoint, or a LoRA adapter merged into its base, as vLLM loads it, by round-to-nearest.

    Of a run in the same scheme these are the tensors it trained with. `ValueError` if it cannot be quantized.
    """
    from tqdm import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .export import check_target, check_writable, save_low_bit
    from .export.card import FACTS, base_facts, write_card
    from .export.files import tensor_names
    from .export.push import Repository
    from .quant import apply_quantization, iter_low_bit_weights
    from .quant.scheme import DEFAULT_IGNORE, resolve_scheme

    resolve_scheme(args.scheme, args.group_size)  # before the weights are read
    loader, weights = AutoModelForCausalLM, args.checkpoint
    if (Path(args.checkpoint) / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM, PeftConfig

        loader, weights = AutoPeftModelForCausalLM, PeftConfig.from_pretrained(args.checkpoint).base_model_name_or_path
    if getattr(AutoConfig.from_pretrained(weights), "quantization_config", None) is not None:
        raise ValueError(f"{weights} is quantized already. Give the checkpoint that holds the master weights.")
    tensor_names(args.checkpoint)
    check_writable(args.output, "output")
    check_target(args.output)
    # Before the work: the Hub may refuse.
    repository = Repository(args.push, private=args.private, revision=args.revision) if args.push else None
    model = loader.from_pretrained(args.checkpoint, dtype="auto")
    ignore = DEFAULT_IGNORE if args.ignore is None else args.ignore
    apply_quantization(model, args.scheme, args.targets, ignore, group_size=args.group_size)
    stream = tqdm(iter_low_bit_weights(model), "quantizing", unit=" tensors")
    folder = save_low_bit(model, AutoTokenizer.from_pretrained(args.checkpoint), args.output, weights=stream)
    (folder / FACTS).unlink(missing_ok=True)  # of a model that was here before
    write_card(folder, repository and repository.name, **base_facts(weights))
    print(f"{args.scheme} checkpoint written to {args.output}")
    if repository is not None:
        print(f"pushed: {repository.push(folder, f'{args.scheme} model').commit_url}")


def push(args: argparse.Namespace) -> None:
    """Push a low-bit folder with its card, written anew for that address and with the evaluations in its sub-folders."""
    from .export.card import model_card, write_card
    from .export.push import Repository

    folder = Path(args.folder)
    model_card(folder)  # refuses what is no low-bit model
    repository = Repository(args.repo, private=args.private, revision=args.revision)
    write_card(folder, repository.name)
    print(f"pushed: {repository.push(folder, args.message).commit_url}")


def schemes() -> str:
    """Table of what is quantized in each scheme, and where learner, engine and export run, tested or untested."""
    from .quant.table import GPU_GENERATIONS, SUPPORTED

    head = "scheme", "group sizes", "activations", "learner CPU", "learner GPU", "engine CPU"
    rows = [(*head, *GPU_GENERATIONS, "export", "LoRA, experts")]
    for row in SUPPORTED.values():
        groups = ", ".join("channel" if size == -1 else str(size) for size in row.group_sizes) or "fixed"
        learner = "tested", "untested" if row.gpus else "no"
        engines = ["tested" if row.cpu_engine else "no"]
        engines += ["untested" if name in row.gpus else "no" for name in GPU_GENERATIONS]
        merged = "no" if row.global_scale else "tested"
        rows.append((row.name, groups, row.activations, *learner, *engines, "tested", merged))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qarl-trl",
        description="Reinforcement learning with low-bit rollouts on TRL.",
        epilog="Every command takes --debug: a traceback where bad input is otherwise one line.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in _FORWARDED.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("schemes", help="what can be trained, sampled and exported, and where", allow_abbrev=False)
    exporter = commands.add_parser("export", help="write a checkpoint in low bits for vLLM", allow_abbrev=False)
    exporter.add_argument("checkpoint", help="model folder with high-precision weights, or LoRA adapter")
    exporter.add_argument("output", help="folder to write")
    exporter.add_argument("--scheme", default="W4A16", help="a scheme of `qarl-trl schemes` (default: W4A16)")
    exporter.add_argument("--group_size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    exporter.add_argument("--targets", nargs="+", default=["Linear"], help="modules to quantize (default: Linear)")
    exporter.add_argument("--ignore", nargs="+", help="modules to leave alone (default: lm_head and MoE routers)")
    exporter.add_argument("--push", metavar="REPO", help="push it to this repository of the Hub: user/model")
    pusher = commands.add_parser("push", help="push a low-bit folder with its card to the Hub", allow_abbrev=False)
    pusher.add_argument("folder", help="as `save_model` and `qarl-trl export` write it")
    pusher.add_argument("repo", help="user/model; created if it is not there")
    pusher.add_argument("--message", default="Low-bit model", help="of the commit")
    for command in (exporter, pusher):
        # The token is that of HF_TOKEN or `hf auth login`: on a command line others could read it.
        command.add_argument("--private", action="store_true", default=None, help="make a new repository private")
        command.add_argument("--revision", help="branch to push to (default: main)")
    return parser


if __name__ == "__main__":
    main()
