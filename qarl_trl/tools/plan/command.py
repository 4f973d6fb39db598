"""The command `qarl-trl plan`: the memory of each GPU, whether a run fits, and how fast each kind of run may be."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import items  # imports only the standard library, so that --help is instant
from .costs import GPUS
from .run import GIB, Run


if TYPE_CHECKING:  # loads torch and transformers
    from .ways import Way


def main(argv: Sequence[str]) -> None:
    """
    `qarl-trl plan`.

    Args:
        argv: The command line. Options that are not of this command go to the recipe.

    Raises:
        SystemExit: with code 1 if the run does not fit; without a GPU, if it fits none of the list.
        ValueError: if it cannot work.
    """
    args, overrides = _parser().parse_known_args(argv)
    _check_options(args)
    # Late, because it loads torch and transformers: `--help` and a wrong option have ended above.
    from .ways import explore

    recipe = ["--config", args.config, *overrides]
    if args.gpu is None and args.memory is None:
        # No GPU is assumed: those of the list are shown instead.
        plan = explore(recipe, args.gpus, max(gpu.memory for gpu in GPUS.values()), args.sharding)
        print("\n".join(for_each_gpu(plan.name, plan.run)))
        fits_somewhere = any(items.fits(on_gpu(plan.run, name)) for name in GPUS)
        raise SystemExit(0 if fits_somewhere else 1)

    memory = GPUS[args.gpu].memory if args.memory is None else args.memory
    plan = explore(recipe, args.gpus, memory, args.sharding)
    lines = [*table(plan.name, plan.run, plan.alone)]
    lines += _seconds(args, recipe, memory, plan.run)
    lines += ["", *verdict(plan.run, plan.together)]
    print("\n".join(lines))

    # So that a script can ask before it rents a machine.
    if not items.fits(plan.run):
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qarl-trl plan",
        description="Estimate the memory of each GPU from a recipe, and with --gpu the seconds of a rollout batch in "
        "bfloat16 and in low bits, without loading a model. Other options override the recipe.",
        allow_abbrev=False,  # the start of an option's name may be a field of the recipe
    )
    parser.add_argument("--config", required=True, help="recipe (.yaml), as for qarl-trl train")
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


def _seconds(args: argparse.Namespace, recipe: Sequence[str], memory: float, run: Run) -> list[str]:
    """Lines about seconds, if a GPU is named."""
    if args.gpu is None:
        return ["No seconds: name a GPU with --gpu."]
    if not run.engine:
        return ["No seconds: rollouts without vLLM are not estimated."]

    # Late, because they load torch.
    from .arms import compare
    from .speed_table import table as speed_table

    gpu = GPUS[args.gpu]
    comparison = compare(
        recipe, args.gpus, gpu, memory, args.sharding, args.prompt_tokens, args.answer_tokens, args.measured
    )
    return list(speed_table(comparison, args.gpu, gpu, args.gpus))


def on_gpu(run: Run, name: str) -> Run:
    """
    A run on another GPU.

    Args:
        run: The run.
        name: A name in `GPUS`.
    """
    return replace(run, memory=int(GPUS[name].memory * GIB))


def for_each_gpu(name: str, run: Run) -> Iterator[str]:
    """
    Lines that show the memory that a run needs on each GPU of the list.

    Args:
        name: The model and its scheme.
        run: The run.
    """
    yield f"{name}, {run.ranks} GPU(s), {_sharding(run)}; no GPU is named (--gpu, or --memory), so:"
    yield f"{'GPU':8}{'GiB':>8}{'needed (estimated)':>20}{'cache, tokens':>16}"

    for gpu_name, gpu in GPUS.items():
        there = on_gpu(run, gpu_name)
        peak = max(items.peaks(there).values()) / GIB
        cache = f"{max(0, items.cache_tokens(there)):,}" if run.engine else "-"
        fits = "fits" if items.fits(there) else "does not fit as it stands"
        yield f"{gpu_name:8}{gpu.memory:8g}{peak:20.1f}{cache:>16}   {fits}"


def table(name: str, run: Run, alone: Mapping[str, Way]) -> Iterator[str]:
    """
    Lines that show the memory of each GPU, in GiB.

    Args:
        name: The model and its scheme.
        run: The run.
        alone: Ways to save memory, each taken alone. Empty: the part that compares them is left out.
    """
    yield from _heading(name, run)
    yield from _memory_of_each_gpu(run)
    if alone:
        yield from _comparison(run, alone)


def _heading(name: str, run: Run) -> Iterator[str]:
    """What the run is, and what is no part of a GPU's memory."""
    entries = sum(parameter.entries for parameter in run.parameters)
    yield f"{name}: {entries / 1e9:.2f} billion parameters"
    yield f"{run.ranks} x {run.memory / GIB:g} GiB, {_sharding(run)}"

    # Each once, in the order of the model.
    optimizers = dict.fromkeys(parameter.optimizer for parameter in run.parameters if parameter.trained)
    micro_batch = f"{run.rows} rows of {run.tokens} tokens"
    yield f"micro-batch: {micro_batch}; max_tokens_per_pass: {run.budget}; optimizer: {', '.join(optimizers)}"

    host = items.host_bytes(run) / GIB
    synced = items.synced_bytes(run) / GIB
    yield f"host memory of a machine: {host:.0f} GiB; a sync moves {synced:.2f} GiB"

    if run.engine:
        yield _engine_line(run)


def _sharding(run: Run) -> str:
    if run.ranks == 1:
        return "one GPU"
    return "FSDP2" if run.fsdp2 else "DDP"


def _engine_line(run: Run) -> str:
    line = f"engine of {run.engine_ranks} GPU(s): key-value cache for {items.cache_tokens(run):,} tokens"
    # A server has its GPUs for itself, so that any share fits.
    if run.engine == "colocate":
        line += f"; vllm_gpu_memory_utilization: at most {items.best_utilization(run):g} would fit"
    return line


def _memory_of_each_gpu(run: Run) -> Iterator[str]:
    """A row for each item, a column for each moment."""
    moments = items.moments(run)
    yield "\n" + _row("GiB on each GPU (estimated)", moments)

    # Moments share most items. Each item has one row, where it first comes; an empty cell where it is not there.
    names = dict.fromkeys([*moments["rollout"], *moments["backward"]])
    for name in names:
        yield _row(name, [moments["rollout"].get(name, ""), moments["backward"].get(name, "")])
    yield _row("sum", items.peaks(run).values())


def _comparison(run: Run, alone: Mapping[str, Way]) -> Iterator[str]:
    """A row for each way to save memory: the peaks with it, what a sync moves, the host memory, and its options."""
    yield "\n" + _row("each alone", [*items.moments(run), "sync moves", "host"])

    for name, way in alone.items():
        sizes: list[int] = []  # none for a way that is refused, whose text says why
        if way.run is not None:
            sizes = [*items.peaks(way.run).values(), items.synced_bytes(way.run), items.host_bytes(way.run)]
        yield f"{_row(name, sizes)}  {way.text}"


def _row(name: str, values: Iterable[int | str]) -> str:
    """A row of the table: texts as they are, bytes in GiB."""
    row = f"{name:30}"
    for value in values:
        text = value if isinstance(value, str) else f"{value / GIB:.1f}"
        row += f"{text:>16}"
    return row


def verdict(run: Run, together: Mapping[str, Run]) -> Iterator[str]:
    """
    Lines that say whether the run fits and, if not, which options make it fit.

    Args:
        run: The run.
        together: Options that make it fit, and the run with them.
    """
    if items.fits(run):
        yield f"It fits: {_highest_peak(run):.1f} GiB of {run.memory / GIB:g}."
        return

    for moment, size in items.peaks(run).items():
        if size > run.memory:
            yield f"It does not fit: {moment} {size / GIB:.1f} GiB, mostly {_largest_items(run, moment)}."
    # Every moment may fit and the cache still be too small: the engine then refuses to start.
    if run.engine and items.cache_tokens(run) < run.tokens:
        yield "The engine has no room for one row."

    for options, fitting in together.items():
        yield f"This fits, in {_highest_peak(fitting):.1f} GiB: {options}"
    if not together:
        yield "Nothing here fits: take more --gpus with fsdp2, shorter rows, or a smaller model."


def _highest_peak(run: Run) -> float:
    """The memory that the run needs on each GPU, in GiB."""
    return max(items.peaks(run).values()) / GIB


def _largest_items(run: Run, moment: str) -> str:
    """The three largest items at a moment, with their sizes in GiB."""
    sizes = items.moments(run)[moment]
    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(f"{name} {sizes[name] / GIB:.1f}" for name in largest_first[:3])
