"""The arms of a comparison: a recipe in bfloat16, with low bits in the engine alone, and with low bits in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ....methods import QARL, Method
from ...report.runs import read_run
from ..gpus import Gpu
from ..kernels import missing_kernel
from ..memory.engine import cache_tokens
from ..memory.moments import best_utilization, fits, peaks
from ..recipe import Options, quiet, read_settings
from ..run import GIB, Hardware, Run
from ..settings import batch_of, run_of
from .batch import Batch
from .measured import Measured, check_same_run
from .parts import NO_FIT, Parts, batch_seconds
from .rollout import sequences_at_once


# Keys that say how a recipe quantizes, and that are nothing to an arm with another scheme.
OF_ANOTHER_SCHEME = ("quant_recipe", "quant_group_size")


@dataclass(frozen=True)
class Arm:
    """
    A run to compare.

    Attributes:
        run: The run; `None` if it is refused.
        seconds: Of a rollout batch; `None` if the run cannot work.
        at_once: Sequences that an engine runs at once, 0 if it does not work.
        note: Why it cannot work, or what must be changed for it to work; may be empty.
    """

    run: Run | None = None
    seconds: Parts | None = None
    at_once: int = 0
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """
    The arms of a recipe on a GPU.

    Attributes:
        arms: The arms by name, bf16 first.
        batch: The rollout batch of all of them.
        factors: Measured seconds as multiples of estimated ones.
        measured: What a run of the recipe logged, or `None`.
        assumed: Which mean lengths are assumed: `"prompts"`, `"answers"`.
    """

    arms: dict[str, Arm]
    batch: Batch
    factors: Parts = NO_FIT
    measured: Measured | None = None
    assumed: tuple[str, ...] = ()


def compare(
    argv: Sequence[str],
    hardware: Hardware,
    gpu: Gpu,
    prompt_tokens: float | None = None,
    answer_tokens: float | None = None,
    measured_run: Path | None = None,
    method: Method = QARL,
) -> Comparison:
    """
    Estimate a rollout batch of each arm.

    Args:
        argv: The recipe, as options of the command that trains.
        hardware: The GPUs.
        gpu: What the data sheet says of one.
        prompt_tokens: Mean tokens of a prompt; `None`: assumed.
        answer_tokens: Mean tokens of an answer; `None`: as measured, or assumed.
        measured_run: Folder of a run of this recipe, to whose times the estimates are fitted.
        method: What is trained: QaRL or RLOO.

    Raises:
        ValueError: if the recipe cannot work, or the folder is not that of such a run.
    """
    settings, model_args = read_settings(argv, hardware.gpus, method=method)
    run = run_of(settings, model_args, hardware)
    batch = batch_of(settings, prompt_tokens, answer_tokens)

    measured = None
    factors = NO_FIT
    if measured_run is not None:
        log = read_run(measured_run, measured_run.name).log
        measured = Measured.from_log(log, batch.updates)
        check_same_run(run, measured)

        batch = replace(batch, answer_tokens=min(batch.longest, measured.answer_tokens))
        # Its cache was large enough, whatever the memory of the GPU that is named here.
        estimate = batch_seconds(run_that_fits(run), batch, gpu)
        factors = measured.factors(estimate)

    arms = {}
    with quiet():
        for name, options in arms_of(settings).items():
            # A scheme excludes what the recipe says of another one.
            without = OF_ANOTHER_SCHEME if "quant_scheme" in options else ()
            read = partial(read_settings, argv, hardware.gpus, options, method, without)
            arms[name] = _arm(read, hardware, gpu, batch, factors)

    assumed = []
    if prompt_tokens is None:
        assumed.append("prompts")
    if answer_tokens is None and measured is None:
        assumed.append("answers")
    return Comparison(arms, batch, factors, measured, tuple(assumed))


def arms_of(settings: Any) -> dict[str, Options]:
    """
    The options of each arm, by its name: neighbours differ in one thing.

    Args:
        settings: The config of the recipe.
    """
    scheme = settings.quant_name
    # A recipe in bfloat16 is compared with the scheme that is the default.
    if scheme == "none":
        scheme = "W4A16"
    # One arm of each kind: 4-bit weights, and float8 products.
    other = "W4A16" if scheme.startswith("FP8") else "FP8_DYNAMIC"

    # What the recipe itself names is not given again: it may be a file, or in the checkpoint.
    quantized = {} if settings.quant_name == scheme else {"quant_scheme": scheme}
    unfrozen = {"lora_base": "merged"} if settings.frozen else {}
    cache = {"kv_cache_dtype": "auto"} if settings.has_low_bit_cache else {}
    shown = scheme if settings.quant_recipe is None else Path(scheme).name
    return {
        "bf16": {"quant_scheme": "none", **cache, **unfrozen},
        f"rollout-only {shown}": {**quantized, "quantize_learner": "false", **unfrozen},
        f"QaRL {shown}": {**quantized, "quantize_learner": "true"},
        f"QaRL {other}": {"quant_scheme": other, "quantize_learner": "true"},
    }


def _arm(read: Callable[[], Any], hardware: Hardware, gpu: Gpu, batch: Batch, factors: Parts) -> Arm:
    """One arm, whose settings `read` gives, or why there is none."""
    try:
        settings, model_args = read()
        run = run_of(settings, model_args, hardware)
    except ValueError as error:
        return Arm(note=f"refused: {str(error).splitlines()[0]}")

    kernel = missing_kernel(run, gpu)
    if kernel:
        return Arm(run, note=kernel)

    fitting = run_that_fits(run)
    if not fits(fitting):
        return Arm(run, note=_why_not(run))

    note = ""
    if fitting is not run:
        note = f"{_why_not(run)}; shown with --vllm_gpu_memory_utilization {fitting.utilization:g}"
    estimate = batch_seconds(fitting, batch, gpu) * factors
    return Arm(fitting, estimate, sequences_at_once(fitting, batch), note)


def run_that_fits(run: Run) -> Run:
    """
    A run, if need be with the share of the engine with which it fits; the run as it is if there is none.

    Args:
        run: The run.
    """
    if fits(run) or run.engine != "colocate":
        return run
    share = best_utilization(run)
    return replace(run, utilization=share) if share else run


def _why_not(run: Run) -> str:
    """Why a run does not fit as it stands."""
    reasons = []
    peak = max(peaks(run).values())
    if peak > run.memory:
        reasons.append(f"needs {peak / GIB:.1f} of {run.memory / GIB:g} GiB")
    if run.engine and cache_tokens(run) < run.tokens:
        reasons.append("the cache does not hold one sequence")
    return ", ".join(reasons)
