"""Settings of a recipe that save memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..recipe import Options, as_text
from ..run import BFLOAT16, Run
from .backward import passes_of_micro_batch, rows_of_pass


@dataclass(frozen=True)
class Lever:
    """
    A setting that saves memory.

    Attributes:
        name: Its name in the table.
        options: The fields that it sets, and their values.
        adds_adapter: Whether it trains an adapter instead of the weights: another training, which the user chooses.
    """

    name: str
    options: Options
    adds_adapter: bool = False

    @property
    def text(self) -> str:
        """Its options, as a user pastes them after the command that trains."""
        return as_text(self.options)


SLEEP_MODE = Lever("sleep mode", {"vllm_enable_sleep_mode": "true"})
GRADIENT_CHECKPOINTING = Lever("gradient checkpointing", {"gradient_checkpointing": "true"})
ADAMW_8BIT = Lever("AdamW in 8 bits", {"optim_muon": "false", "optim": "adamw_8bit"})
PAGED_ADAMW_8BIT = Lever("the same, kept on the host", {"optim_muon": "false", "optim": "paged_adamw_8bit"})
LIGER = Lever("Liger kernels", {"use_liger_kernel": "true"})

LORA_OPTIONS = {
    "use_peft": "true",
    "lora_r": "32",
    "lora_alpha": "64",
    "lora_dropout": "0",
    "lora_target_modules": "all-linear",
    # The base is not trained, so bfloat16 is enough for it.
    "dtype": "bfloat16",
    # The trainer refuses Muon: its step of the two factors is none of their product.
    "optim_muon": "false",
}
# Of a mixture of experts. PEFT reads `all-linear` as its experts too, which no low-bit layer can merge.
ATTENTION = {"lora_target_modules": r".*\.[qkvo]_proj"}
FROZEN_BASE_OPTIONS = {"lora_base": "frozen"}


def adapter_levers(uses_adapter: bool, experts: bool) -> list[Lever]:
    """
    An adapter whose base is quantized in each step, and one whose base is frozen in low bits.

    Args:
        uses_adapter: Whether the recipe has an adapter, which then stays as it is.
        experts: Whether the model is a mixture of experts.
    """
    adapter = {} if uses_adapter else LORA_OPTIONS
    if adapter and experts:
        adapter = adapter | ATTENTION
    return [
        Lever("LoRA", adapter, adds_adapter=True),
        Lever("LoRA, frozen base", adapter | FROZEN_BASE_OPTIONS, adds_adapter=True),
    ]


def levers_to_compare(uses_adapter: bool, run: Run, settings: Any) -> list[Lever]:
    """
    The levers of the table, which takes each alone.

    Args:
        uses_adapter: Whether the recipe has an adapter.
        run: The run.
        settings: The config of its recipe.
    """
    optimizers = [ADAMW_8BIT, PAGED_ADAMW_8BIT]
    experts = any(".experts." in parameter.name for parameter in run.parameters)
    levers = [SLEEP_MODE, GRADIENT_CHECKPOINTING, *optimizers, *adapter_levers(uses_adapter, experts), LIGER]
    return [*_of_config(levers, settings), *teacher_in_bfloat16(run, settings)]


def _of_config(levers: Iterable[Lever], settings: Any) -> list[Lever]:
    """The levers whose options a config has. Where it has no Muon, there is none to turn off."""
    known = {field.name for field in fields(settings)}
    # The adapter and the dtype are of TRL's `ModelConfig`, which every recipe has.
    known |= LORA_OPTIONS.keys() - {"optim_muon"}

    fitting = []
    for lever in levers:
        # Without an engine nothing sleeps.
        if lever == SLEEP_MODE and not settings.has_engine:
            continue
        options = dict(lever.options)
        if "optim_muon" not in known:
            options.pop("optim_muon", None)
        if options.keys() <= known:
            fitting.append(replace(lever, options=options))
    return fitting


def teacher_in_bfloat16(run: Run, settings: Any) -> list[Lever]:
    """
    A teacher of 2 bytes a weight, where it has more; nothing for others.

    Args:
        run: The run.
        settings: The config of its recipe.
    """
    weights = run.teacher.parameters if run.teacher is not None else ()
    if all(parameter.size <= BFLOAT16 for parameter in weights):
        return []

    # What else the recipe sets there stays.
    loading = (settings.teacher_model_init_kwargs or {}) | {"dtype": "bfloat16"}
    return [Lever("teacher in bfloat16", {"teacher_model_init_kwargs": json.dumps(loading)})]


def levers_to_combine(run: Run, settings: Any) -> list[Lever]:
    """
    The levers of the search, from cheap to costly: the first cost some time at most, and the last change the training.

    Args:
        run: The run.
        settings: The config of its recipe.
    """
    one_row_a_pass = Lever("one row in a pass", {"max_tokens_per_pass": str(run.tokens)})

    levers = [SLEEP_MODE, *teacher_in_bfloat16(run, settings), GRADIENT_CHECKPOINTING, one_row_a_pass]
    levers += smaller_micro_batches(run.rows, settings)
    if not run.has_adapter:  # whose optimizer state is small
        levers += [ADAMW_8BIT, PAGED_ADAMW_8BIT]
    return _of_config(levers, settings)


def smaller_micro_batches(rows: int, settings: Any) -> list[Lever]:
    """
    Micro-batches of fewer rows, those with most rows first. An update and a rollout batch keep their rows.

    Args:
        rows: Rows of a micro-batch now.
        settings: The config of the recipe.
    """
    levers = []
    for parts in range(2, rows + 1):
        # Only divisors: an update must keep its number of rows.
        if rows % parts != 0:
            continue

        # TRL counts the last two in micro-batches, so that they grow as these shrink.
        options = {
            "per_device_train_batch_size": str(rows // parts),
            "gradient_accumulation_steps": str(parts * settings.gradient_accumulation_steps),
        }
        if hasattr(settings, "steps_per_generation"):
            options["steps_per_generation"] = str(parts * settings.steps_per_generation)
        levers.append(Lever(f"micro-batches of {rows // parts} rows", options))
    return levers


def one_pass_a_micro_batch(run: Run, settings: Any) -> Lever | None:
    """
    The largest micro-batches that are one pass each, so that no gradients are kept between passes.

    Args:
        run: The run.
        settings: The config of its recipe.

    Returns:
        `None` if micro-batches are one pass now.
    """
    if passes_of_micro_batch(run) == 1:
        return None

    fitting = rows_of_pass(run)
    for lever in smaller_micro_batches(run.rows, settings):
        if int(lever.options["per_device_train_batch_size"]) <= fitting:
            return lever
    return None


def changes_micro_batches(lever: Lever) -> bool:
    """
    Whether a lever makes micro-batches smaller.

    Args:
        lever: One of [`levers_to_combine`].
    """
    return "per_device_train_batch_size" in lever.options


def merge(levers: Sequence[Lever]) -> Options:
    """
    The options of several levers.

    Args:
        levers: A later one may set an option again, such as a yet smaller micro-batch or a paged optimizer. Its value
            counts, at the place where the option first came.
    """
    options: dict[str, str] = {}
    for lever in levers:
        options |= lever.options
    return options
