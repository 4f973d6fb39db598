"""TRL's ways to save memory: each alone, and the fewest that fit together, as options of `qarl-trl train`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...train import parse
from . import items
from .items import Run
from .model import plan_run


SLEEP, CHECKPOINTING = "--vllm_enable_sleep_mode true", "--gradient_checkpointing true"
ADAMW_8BIT, PAGED = ("--optim_muon false --optim " + name for name in ("adamw_8bit", "paged_adamw_8bit"))
LORA = (
    "--use_peft true --lora_r 32 --lora_alpha 64 --lora_dropout 0 --lora_target_modules all-linear --dtype bfloat16 "
    "--optim_muon false"
)
WAYS = {
    "sleep mode": SLEEP,
    "gradient checkpointing": CHECKPOINTING,
    "AdamW in 8 bits": ADAMW_8BIT,
    "the same, kept on the host": PAGED,
    "LoRA": LORA,
    "LoRA, frozen base": LORA + " --lora_base frozen",
    "Liger kernels": "--use_liger_kernel true",
}


def explore(
    argv: Sequence[str], gpus: int, memory: float, sharding: str | None
) -> tuple[str, Run, dict[str, tuple[str, Run | None]], dict[str, Run]]:
    """
    Name and run of `qarl-trl train` with `argv`; each way's options and run (or why it is refused); options that fit, with runs.

    The other arguments are those of [`plan_run`]. `ValueError` for settings that cannot run.
    """

    def run_of(options: str) -> Run:
        settings, model_args = parse([*argv, *options.split()], any_device=True)[1:]
        return plan_run(settings, model_args, gpus, memory, sharding)

    _, settings, model_args = parse(argv, any_device=True)
    given, alone, together, bases = run_of(""), dict[str, tuple[str, Run | None]](), dict[str, Run](), [""]
    logging.disable(logging.WARNING)  # of settings that are tried
    for name, options in [] if items.fits(given) and gpus > 1 else WAYS.items():
        try:
            options = options.removeprefix(LORA if model_args.use_peft else "")
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
    """The options `base` with the fewest more that make the run fit, cheap ones before dear ones; `None` if none do."""
    run, names = run_of(base), ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    steps = [getattr(settings, name) for name in names[1:]]  # fewer rows in a micro-batch, as many in an update
    sizes = ((run.rows // n, *(n * count for count in steps)) for n in range(2, run.rows + 1) if run.rows % n == 0)
    fewer = [" ".join(f"--{name} {size}" for name, size in zip(names, of, strict=True)) for of in sizes]
    levers = [SLEEP, CHECKPOINTING, f"--max_tokens_per_pass {run.tokens}", *fewer]
    levers += [] if any("lora_" in p.name for p in run.parameters) else [ADAMW_8BIT, PAGED]

    def fitted(levers: list[str]) -> tuple[str, Run] | None:
        words = " ".join([base, *levers]).split()
        options = dict(zip(words[::2], words[1::2], strict=True))  # of several values of one option the last
        run = run_of(" ".join(map(" ".join, options.items())))
        if not items.fits(run) and run.engine == "colocate":
            run = replace(run, utilization=items.best_utilization(run))
            options["--vllm_gpu_memory_utilization"] = f"{run.utilization:g}"
        return (" ".join(map(" ".join, options.items())), run) if items.fits(run) else None

    found = fitted(levers)
    for lever in reversed(levers) if found else ():
        if without := fitted(rest := [other for other in levers if other is not lever]):
            levers, found = rest, without
    return found
