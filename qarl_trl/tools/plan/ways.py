"""Options of `qarl-trl train` that save memory: each alone, and the fewest together that make a run fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...train import parse
from . import items
from .run import Run
from .settings import plan_run


SLEEP_MODE = "--vllm_enable_sleep_mode true"
GRADIENT_CHECKPOINTING = "--gradient_checkpointing true"
ADAMW_8BIT = "--optim_muon false --optim adamw_8bit"
PAGED_ADAMW_8BIT = "--optim_muon false --optim paged_adamw_8bit"
# The base is not trained, so bfloat16 is enough for it. The trainer refuses Muon: its step of the factors is none of
# their product.
LORA = (
    "--use_peft true --lora_r 32 --lora_alpha 64 --lora_dropout 0 --lora_target_modules all-linear --dtype bfloat16 "
    "--optim_muon false"
)
FROZEN_BASE = "--lora_base frozen"
LIGER = "--use_liger_kernel true"
ADAPTERS = ("LoRA", "LoRA, frozen base")  # among the names of `_ways`

# From further options, as text, to the run with them. `ValueError` if the trainer would refuse it.
RunOf = Callable[[str], Run]


@dataclass(frozen=True)
class Way:
    """
    One way to save memory, taken alone.

    Attributes:
        text: Its options, or if the run is refused with them, why.
        run: The run with them; `None` if it is refused.
        has_adapter: Whether it trains an adapter instead of the weights: another training, which the user chooses.
    """

    text: str
    run: Run | None
    has_adapter: bool = False


@dataclass(frozen=True)
class Fitting:
    """
    Options that make a run fit.

    Attributes:
        options: As `qarl-trl train` takes them.
        run: The run with them.
    """

    options: str
    run: Run


class Plan(NamedTuple):
    """
    What `qarl-trl plan` knows of a run.

    Attributes:
        name: The model and its scheme.
        run: The run of the recipe.
        alone: By its name each way to save memory; empty for a run that fits on several GPUs.
        together: Options that make the run fit, and the run with them; empty for a run that fits.
    """

    name: str
    run: Run
    alone: dict[str, Way]
    together: dict[str, Run]


def explore(argv: Sequence[str], gpus: int, memory: float, sharding: str | None) -> Plan:
    """
    Plan a run, and look for options that save memory.

    Args:
        argv: The options of `qarl-trl train`.
        gpus: Processes, with one GPU each.
        memory: GiB of each GPU.
        sharding: `"ddp"` or `"fsdp2"`, for several GPUs; `None` means `"fsdp2"`.

    Raises:
        ValueError: if the run cannot work, or its model is unknown.
    """

    def run_of(options: str) -> Run:
        _, settings, model_args = parse([*argv, *options.split()], any_device=True)
        return plan_run(settings, model_args, gpus, memory, sharding)

    _, settings, model_args = parse(argv, any_device=True)
    # Here and not below: what is wrong with the recipe itself is raised, and its warnings are logged.
    run = run_of("")
    fits = items.fits(run)
    alone: dict[str, Way] = {}
    together: dict[str, Run] = {}

    with quiet():
        # On one GPU even if the run fits: memory that is saved allows longer rows or a larger model.
        if gpus == 1 or not fits:
            alone = _take_each_alone(_ways(model_args.use_peft), run_of)
        if not fits:
            together = _combinations_that_fit(alone, settings, run_of)
    return Plan(f"{model_args.model_name_or_path}, {settings.quant_name}", run, alone, together)


@contextmanager
def quiet() -> Iterator[None]:
    """Log no warnings: they would be about settings that are only tried."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _ways(uses_peft: bool) -> dict[str, str]:
    """The options of each way to save memory. A recipe that uses an adapter keeps it as it is."""
    lora = "" if uses_peft else LORA
    return {
        "sleep mode": SLEEP_MODE,
        "gradient checkpointing": GRADIENT_CHECKPOINTING,
        "AdamW in 8 bits": ADAMW_8BIT,
        "the same, kept on the host": PAGED_ADAMW_8BIT,
        "LoRA": lora,
        "LoRA, frozen base": join_options([lora, FROZEN_BASE]),
        "Liger kernels": LIGER,
    }


def _take_each_alone(ways: dict[str, str], run_of: RunOf) -> dict[str, Way]:
    """Each way with its run, or with the reason why that is refused."""
    alone = {}
    for name, options in ways.items():
        # Shown rather than left out, so that the user learns why a known option is not offered.
        try:
            alone[name] = Way(options, run_of(options), has_adapter=name in ADAPTERS)
        except ValueError as error:
            alone[name] = Way(str(error), run=None)
    return alone


def _combinations_that_fit(alone: dict[str, Way], settings: Any, run_of: RunOf) -> dict[str, Run]:
    """Few options that make the run fit, and the run with them: without a new adapter, and with each kind of one."""
    # An adapter is not one of the levers: the user chooses between these answers.
    adapters = [way.text for way in alone.values() if way.has_adapter]

    together = {}
    for base in ["", *adapters]:
        fitting = fewest_options(base, settings, run_of)
        if fitting is not None:
            together[fitting.options] = fitting.run
    return together


def fewest_options(base: str, settings: Any, run_of: RunOf) -> Fitting | None:
    """
    Find few options that make a run fit, by a greedy search.

    Take all levers, then leave out each one, the most costly first, without which the run still fits. Each lever is
    tried once, in this order, so another set might be smaller still.

    Args:
        base: Options that the run has in any case.
        settings: The `QaRLConfig` of the run.
        run_of: The run with some options.

    Returns:
        `None` if the run does not fit even with all levers.
    """
    run = run_of(base)
    one_row_a_pass = f"--max_tokens_per_pass {run.tokens}"
    smaller_batches = _smaller_micro_batches(run.rows, settings)

    # From cheap to costly: the first cost some time at most, and another optimizer changes the training.
    levers = [SLEEP_MODE, GRADIENT_CHECKPOINTING, one_row_a_pass, *smaller_batches]
    if not run.has_adapter:  # an adapter's optimizer state is small
        levers += [ADAMW_8BIT, PAGED_ADAMW_8BIT]

    fitting = _try_levers(base, levers, run_of)
    if fitting is None:
        # A recipe that sets `generation_batch_size` refuses other numbers of steps.
        levers = [lever for lever in levers if lever not in smaller_batches]
        fitting = _try_levers(base, levers, run_of)
    if fitting is None:
        return None

    kept = levers
    for lever in reversed(levers):
        without_lever = [other for other in kept if other != lever]
        still_fitting = _try_levers(base, without_lever, run_of)
        if still_fitting is not None:
            kept = without_lever
            fitting = still_fitting
    return fitting


def _smaller_micro_batches(rows: int, settings: Any) -> list[str]:
    """Options for each smaller micro-batch, the largest first. An update and a rollout batch keep their rows."""
    # TRL counts both numbers in micro-batches, so that they grow as these shrink.
    batches = []
    for parts in range(2, rows + 1):
        if rows % parts != 0:
            continue
        batches.append(
            f"--per_device_train_batch_size {rows // parts} "
            f"--gradient_accumulation_steps {parts * settings.gradient_accumulation_steps} "
            f"--steps_per_generation {parts * settings.steps_per_generation}"
        )
    return batches


def _try_levers(base: str, levers: Sequence[str], run_of: RunOf) -> Fitting | None:
    """The run with `base` and all `levers`, if it fits; if need be, with another share for the engine."""
    options = join_options([base, *levers])
    try:
        run = run_of(options)
    except ValueError:  # an option may conflict with a field of the recipe
        return None

    # The engine's share is computed, not searched: the largest that fits is best for the engine.
    if not items.fits(run) and run.engine == "colocate":
        run = replace(run, utilization=items.best_utilization(run))
        options = join_options([options, f"--vllm_gpu_memory_utilization {run.utilization:g}"])

    if not items.fits(run):
        return None
    return Fitting(options, run)


def join_options(texts: Iterable[str]) -> str:
    """
    One text with all options. Of an option that comes twice the last value counts, at the place of the first.

    Args:
        texts: Texts such as `"--optim_muon false --optim adamw_8bit"`: each option has one value.
    """
    words = " ".join(texts).split()
    # A later lever may set an option again: a yet smaller micro-batch, or a paged optimizer.
    values = dict(zip(words[::2], words[1::2], strict=True))
    return " ".join(f"{name} {value}" for name, value in values.items())
