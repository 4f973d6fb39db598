"""TRL's options that save memory: each alone, and the smallest combination that fits, as options of `qarl-trl train`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...train import parse
from . import items
from .items import Run
from .model import plan_run


LORA = (
    "--use_peft true --lora_r 32 --lora_alpha 64 --lora_dropout 0 --lora_target_modules all-linear --dtype bfloat16 "
    "--optim_muon false"
)
WAYS = {
    "sleep mode": "--vllm_enable_sleep_mode true",
    "gradient checkpointing": "--gradient_checkpointing true",
    "AdamW in 8 bits": "--optim_muon false --optim adamw_8bit",
    "the same, kept on the host": "--optim_muon false --optim paged_adamw_8bit",
    "LoRA": LORA,
    "LoRA, frozen base": LORA + " --lora_base frozen",
    "Liger kernels": "--use_liger_kernel true",
}


def explore(
    argv: Sequence[str], gpus: int, memory: float, sharding: str | None
) -> tuple[str, Run, dict[str, tuple[str, Run | None]], dict[str, Run]]:
    """For `qarl-trl train` with `argv`: name and run; each way's options and run (or the refusal); combinations that fit."""

    def run_of(options: str) -> Run:
        settings, model_args = parse([*argv, *options.split()], any_device=True)[1:]
        return plan_run(settings, model_args, gpus, memory, sharding)

    _, settings, model_args = parse(argv, any_device=True)
    given, alone, together, bases = run_of(""), dict[str, tuple[str, Run | None]](), dict[str, Run](), [""]
    logging.disable(logging.WARNING)  # warnings about settings that it only tries
    for name, options in [] if items.fits(given) and gpus > 1 else WAYS.items():
        try:
            options = options.removeprefix(LORA if model_args.use_peft else "").strip()
            alone[name] = options, run_of(options)
            bases += [options] if "lora" in options else []
        except ValueError as error:
            alone[name] = str(error), None
    for base in [] if items.fits(given) else bases:
        if fitting := fewest(base, settings, run_of):
            together[fitting[0]] = fitting[1]
    logging.disable(logging.NOTSET)
    return f"{model_args.model_name_or_path}, {settings.quant_name}", given, alone, together


def fewest(base: str, settings: Any, run_of: Callable[[str], Run]) -> tuple[str, Run] | None:
    """Add to the options `base` the fewest others that make the run fit, cheap ones first; `None` if nothing fits."""
    run, names = run_of(base), ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    steps = [getattr(settings, name) for name in names[1:]]  # fewer rows in a micro-batch, as many in an update
    sizes = ((run.rows // n, *(n * count for count in steps)) for n in range(2, run.rows + 1) if run.rows % n == 0)
    fewer = [" ".join(f"--{name} {size}" for name, size in zip(names, of, strict=True)) for of in sizes]
    sleep, checkpointing, *optimizers = [*WAYS.values()][:4]
    levers = [sleep, checkpointing, f"--max_tokens_per_pass {run.tokens}", *fewer]
    levers += [] if any("lora_" in p.name for p in run.parameters) else optimizers

    def fitted(levers: list[str]) -> tuple[str, Run] | None:
        words = " ".join([base, *levers]).split()
        options = dict(zip(words[::2], words[1::2], strict=True))  # the last value of an option counts
        with suppress(ValueError):  # an option may conflict with a field of the recipe
            run = run_of(" ".join(map(" ".join, options.items())))
            if not items.fits(run) and run.engine == "colocate":
                run = replace(run, utilization=items.best_utilization(run))
                options["--vllm_gpu_memory_utilization"] = f"{run.utilization:g}"
            if items.fits(run):
                return " ".join(map(" ".join, options.items())), run
        return None

    found = fitted(levers) or fitted(levers := [lever for lever in levers if lever not in fewer])
    for lever in reversed(levers) if found else ():
        if without := fitted(rest := [other for other in levers if other is not lever]):
            levers, found = rest, without
    return found
