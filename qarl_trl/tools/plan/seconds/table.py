"""The table of arms side by side, and what its numbers are not."""

from __future__ import annotations

from collections.abc import Iterator

from ..gpus import Gpu
from ..memory.moments import peaks
from ..run import GIB
from .arms import Arm, Comparison
from .parts import Parts


# By how much a ratio may be wrong, as a factor each way. On an H200 those of dev/plan.md deviate by up to 1.08, but
# some of these runs set constants. Nobody has measured other GPUs.
RATIO_ERROR = 1.25
RATIO_ERROR_ELSEWHERE = 1.4


def table(comparison: Comparison, name: str, gpu: Gpu, gpus: int) -> Iterator[str]:
    """
    Lines that show the arms side by side.

    Args:
        comparison: The arms.
        name: The GPU's name.
        gpu: The GPU.
        gpus: Their number.
    """
    place = f"{gpus} x {name}{_of_server(comparison)}"
    yield f"\nEstimated seconds of a rollout batch on {place}: {_batch(comparison)}"
    columns = f"{'rollout':>9}{'sync':>8}{'update':>9}{'sum':>9}"
    # An arm may have the name of a file.
    width = max(24, *(len(arm_name) + 1 for arm_name in comparison.arms))
    yield f"{'arm':{width}}{columns}   {'speed against bf16':22}{'GiB':>6}{'at once':>9}"

    base = comparison.arms["bf16"].seconds
    near = gpu.measured or comparison.measured is not None
    error = RATIO_ERROR if near else RATIO_ERROR_ELSEWHERE
    for arm_name, arm in comparison.arms.items():
        yield _row(f"{arm_name:{width}}", arm, base, error)

    for arm_name, arm in comparison.arms.items():
        if arm.note:
            yield f"{arm_name}: {arm.note}"
    yield from _about(comparison, gpu)


def _of_server(comparison: Comparison) -> str:
    """The GPUs that a server has beside those of the learner; empty without one."""
    for arm in comparison.arms.values():
        if arm.run is not None and arm.run.engine == "server":
            return f" and {arm.run.engine_ranks} of a server"
    return ""


def _batch(comparison: Comparison) -> str:
    """What is in a rollout batch, and what of it is assumed."""
    batch = comparison.batch
    assumed = {name: " (assumed)" if name in comparison.assumed else "" for name in ("answers", "prompts")}
    answers = f"{batch.answers} answers of {batch.answer_tokens:.0f} tokens{assumed['answers']}"
    prompts = f"prompts of {batch.prompt_tokens:.0f}{assumed['prompts']}"
    return f"{answers}, {prompts}, updates: {batch.updates}"


def _row(name: str, arm: Arm, base: Parts | None, error: float) -> str:
    """The row of an arm, whose `name` fills the first column."""
    if arm.seconds is None or arm.run is None:
        return f"{name}{'cannot run':>35}"

    parts = arm.seconds
    times = f"{parts.rollout:9.1f}{parts.sync:8.2f}{parts.update:9.1f}{parts.sum:9.1f}"
    memory = max(peaks(arm.run).values()) / GIB
    return f"{name}{times}   {_ratio(parts, base, error):22}{memory:6.1f}{arm.at_once:9}"


def _ratio(parts: Parts, base: Parts | None, error: float) -> str:
    """How often an arm is as fast as bf16, whose seconds are `base`, and what else it may be."""
    if parts is base:
        return "1.00"
    if base is None:
        return "no bf16 beside it"
    speed = base.sum / parts.sum
    return f"{speed:.2f} ({speed / error:.1f} to {speed * error:.1f})"


def _about(comparison: Comparison, gpu: Gpu) -> Iterator[str]:
    """What the numbers are, and what they are not."""
    log = comparison.measured
    if log is not None:
        factors = comparison.factors
        yield (
            f"Fitted to a run: rollout {log.seconds.rollout:.1f} s, sync {log.seconds.sync:.2f}, update "
            f"{log.seconds.update:.1f} were measured, {factors.rollout:.2f}, {factors.sync:.2f} and "
            f"{factors.update:.2f} times the estimate. Every arm has these factors; only that run was measured."
        )
    elif not gpu.measured:
        yield "No run was measured on this GPU: --from FOLDER fits the estimate to a run of yours."
    yield (
        "An estimate, from data sheets, counted operations and processor times of other machines. A ratio whose "
        "parentheses hold 1 says nothing."
    )
    yield (
        "Not in it: rewards, tools, saving, evaluation, the files of a server's sync, and what a full cache computes "
        "twice."
    )
