"""Check the settings that the trainer would refuse on this machine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import snapshot_download
from trl import get_peft_config

from ...config import QaRLConfig
from ...quant.scheme import gpu_generation, support_of
from ...validate import check_arguments, check_data, check_run
from ..plan.command import GPUS, verdict
from ..plan.items import fits
from ..plan.ways import explore
from . import FAIL, OK, SKIPPED, Finding


def local_folder(name: str) -> str | None:
    """The folder of a model on this machine, also in the Hub's cache; `None` if there is none. Downloads nothing."""
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):
        return None


def check_settings(folder: str | None, args: QaRLConfig, model_args: Any, dataset: Dataset) -> Iterator[Finding]:
    """Run the trainer's checks before it loads the model, and raise its errors."""
    args = copy.copy(args)
    args.push_to_hub = False  # the trainer's check creates the repository
    given = {"peft_config": get_peft_config(model_args), "train_dataset": dataset}
    if folder is None:
        name = model_args.model_name_or_path
        yield Finding(SKIPPED, "model", f"{name} is not on this machine: its layers were not checked")
        check_arguments(name, args, given)
        check_data(given, args)
    else:
        check_run(folder, args, given)
    engine = "vLLM" if args.use_vllm else "transformers (slow)"
    text = f"{args.quant_name}, {args.loss_type}, {len(dataset)} prompts, rollouts by {engine}"
    yield Finding(OK, "settings", text)


def check_elsewhere(gpu: str, argv: Sequence[str], args: QaRLConfig, dataset: Dataset) -> Iterator[Finding]:
    """Check the run of `argv` for one `gpu` that is not here: schemes, memory, number of prompts."""
    memory, capability = GPUS[gpu]
    generation, scheme = gpu_generation(capability), args.quant_plan()
    for row in [] if scheme is None else map(support_of, scheme.config_groups.values()):
        found = OK if generation in row.gpus else FAIL
        yield Finding(found, "scheme", f"{row.name} runs on {' or '.join(row.gpus) or 'no GPU'}, this is {generation}")
    _, run, _, together = explore(argv, 1, memory, None)
    for line in verdict(run, together):
        yield Finding(OK if fits(run) else FAIL, "memory", line)
    check_data({"train_dataset": dataset}, args)
