"""The lines about memory: what is on each GPU, what each lever saves, and whether the run fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..gpus import GPUS
from ..run import GIB, Run, Teacher
from .backward import passes_of_micro_batch
from .engine import cache_tokens, synced_bytes
from .learner import host_bytes
from .moments import best_utilization, fits, moments, peaks


if TYPE_CHECKING:  # loads torch and transformers
    from .advice import Trial
    from .search import Fitting


def on_gpu(run: Run, name: str) -> Run:
    """
    A run on another GPU.

    Args:
        run: The run.
        name: A name in `GPUS`.
    """
    return replace(run, memory=int(GPUS[name].memory * GIB))


def for_each_gpu(name: str, run: Run, missing: Mapping[str, str]) -> Iterator[str]:
    """
    Lines that show the memory that a run needs on each GPU of the list.

    Args:
        name: The model and its scheme.
        run: The run.
        missing: Of each GPU, why it has no kernel for the run; empty if it has.
    """
    yield f"{name}, {run.ranks} GPU(s), {_sharding(run)}; no GPU is named (--gpu, or --memory), so:"
    yield f"{'GPU':8}{'GiB':>8}{'needed (estimated)':>20}{'cache, tokens':>16}"

    for gpu_name, gpu in GPUS.items():
        there = on_gpu(run, gpu_name)
        peak = _highest_peak(there)
        cache = f"{max(0, cache_tokens(there)):,}" if run.engine else "-"
        answer = "fits" if fits(there) else "does not fit as it stands"
        if missing[gpu_name]:
            answer = f"no kernel: {missing[gpu_name]}"
        yield f"{gpu_name:8}{gpu.memory:8g}{peak:20.1f}{cache:>16}   {answer}"


def table(name: str, run: Run, alone: Sequence[Trial], one_pass: Trial | None = None) -> Iterator[str]:
    """
    Lines that show the memory of each GPU, in GiB.

    Args:
        name: The model and its scheme.
        run: The run.
        alone: Levers, each taken alone. Empty: the part that compares them is left out.
        one_pass: Smaller micro-batches, if now gradients are kept between the passes of one.
    """
    yield from _heading(name, run)
    yield from _memory_of_each_gpu(run)
    if one_pass is not None:
        yield _between_passes(run, one_pass)
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
    # Only QaRL's passes have a limit. Other trainers pad rows, or pack them to their longest.
    limit = "" if run.budget is None else f"max_tokens_per_pass: {run.budget}; "
    yield f"micro-batch: {micro_batch}; {limit}optimizer: {', '.join(optimizers)}"
    if run.teacher is not None:
        yield _teacher_line(run.teacher)

    host = host_bytes(run) / GIB
    sync = f"; a sync moves {synced_bytes(run) / GIB:.2f} GiB" if run.engine else ""
    yield f"host memory of a machine: {host:.0f} GiB{sync}"

    if run.engine:
        yield _engine_line(run)


def _sharding(run: Run) -> str:
    if run.ranks == 1:
        return "one GPU"
    return "FSDP2" if run.fsdp2 else "DDP"


def _teacher_line(teacher: Teacher) -> str:
    if not teacher.parameters:
        return f"teacher: {teacher.name}, without a second model"

    entries = sum(parameter.entries for parameter in teacher.parameters)
    size = sum(parameter.entries * parameter.size for parameter in teacher.parameters) / entries
    return f"teacher: {teacher.name}, {entries / 1e9:.2f} billion parameters of {size:g} bytes"


def _engine_line(run: Run) -> str:
    line = f"engine of {run.engine_ranks} GPU(s): key-value cache for {cache_tokens(run):,} tokens"
    # A server has its GPUs for itself, so that any share fits.
    if run.engine == "colocate" and run.cache_size is None:
        share = best_utilization(run)
        line += f"; vllm_gpu_memory_utilization: {f'at most {share:g}' if share else 'none'} would fit"
    return line


def _memory_of_each_gpu(run: Run) -> Iterator[str]:
    """A row for each item, a column for each moment."""
    at_moment = moments(run)
    yield "\n" + _row("GiB on each GPU (estimated)", at_moment)

    # Moments share most items. Each item has one row, where it first comes; an empty cell where it is not there.
    names = dict.fromkeys(name for sizes in at_moment.values() for name in sizes)
    for name in names:
        yield _row(name, [sizes.get(name, "") for sizes in at_moment.values()])
    yield _row("sum", peaks(run).values())


def _between_passes(run: Run, one_pass: Trial) -> str:
    """Why gradients are kept between passes, and what does not keep them."""
    passes = passes_of_micro_batch(run)
    reason = f"A micro-batch of its longest rows is {passes} passes, between which whole gradients stay."
    if one_pass.run is None:
        return f"{reason} A smaller per_device_train_batch_size is one pass."

    backward = peaks(one_pass.run)["backward"] / GIB
    return f"{reason} With one pass the backward takes {backward:.1f} GiB: {one_pass.lever.text}"


def _comparison(run: Run, alone: Sequence[Trial]) -> Iterator[str]:
    """A row for each lever: the peaks with it, what a sync moves if there is one, the host memory, and its options."""
    columns = [*moments(run)]
    if run.engine:
        columns.append("sync moves")
    yield "\n" + _row("each alone", [*columns, "host"])

    as_it_is = _sizes(run)
    for trial in alone:
        if trial.run is None:
            yield f"{_row(trial.lever.name, [])}  {trial.refusal}"
            continue

        sizes = _sizes(trial.run)
        # What the recipe has already, or what such a run ignores.
        text = "changes nothing here" if sizes == as_it_is else trial.lever.text
        yield f"{_row(trial.lever.name, sizes)}  {text}"


def _sizes(run: Run) -> list[int]:
    """The peaks of a run, what a sync moves if there is one, and the host memory, in bytes."""
    sizes = [*peaks(run).values()]
    if run.engine:
        sizes.append(synced_bytes(run))
    sizes.append(host_bytes(run))
    return sizes


def _row(name: str, values: Iterable[int | str]) -> str:
    """A row of the table: texts as they are, bytes in GiB."""
    row = f"{name:30}"
    for value in values:
        text = value if isinstance(value, str) else f"{value / GIB:.1f}"
        row += f"{text:>16}"
    return row


def verdict(run: Run, together: Sequence[Fitting]) -> Iterator[str]:
    """
    Lines that say whether the run fits and, if not, which options make it fit.

    Args:
        run: The run.
        together: Levers that make it fit, for the user to choose from.
    """
    if fits(run):
        yield f"It fits: {_highest_peak(run):.1f} GiB of {run.memory / GIB:g}, {_assumed(run):g} of them assumed."
        return

    for moment, size in peaks(run).items():
        if size > run.memory:
            yield f"It does not fit: {moment} {size / GIB:.1f} GiB, mostly {_largest_items(run, moment)}."
    # Every moment may fit and the cache still be too small: the engine then refuses to start.
    if run.engine and cache_tokens(run) < run.tokens:
        yield "The engine has no room for one row."

    for fitting in together:
        yield f"This fits, in {_highest_peak(fitting.run):.1f} GiB: {fitting.text}"
    if not together:
        yield "Nothing here fits: take more --gpus with fsdp2, shorter rows, or a smaller model."


def _highest_peak(run: Run) -> float:
    """The memory that the run needs on each GPU, in GiB."""
    return max(peaks(run).values()) / GIB


def _assumed(run: Run) -> float:
    """The GiB of the highest peak that nobody has computed or measured."""
    at_moment = moments(run)
    highest = max(at_moment.values(), key=lambda sizes: sum(sizes.values()))
    return sum(size for name, size in highest.items() if "assumed" in name) / GIB


def _largest_items(run: Run, moment: str) -> str:
    """The three largest items at a moment, with their sizes in GiB."""
    sizes = moments(run)[moment]
    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    return ", ".join(f"{name} {sizes[name] / GIB:.1f}" for name in largest_first[:3])
