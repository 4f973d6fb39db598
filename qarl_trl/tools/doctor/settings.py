"""Check the settings that the trainer would refuse on this machine, or on a GPU that is not here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import snapshot_download
from trl import get_peft_config

from ...config import QaRLConfig
from ...quant.scheme import support_of
from ...quant.supported import gpu_generation
from ...validate import check_arguments, check_data, check_run
from ..plan.gpus import GPUS
from ..plan.memory.advice import advise
from ..plan.memory.moments import fits
from ..plan.memory.table import verdict
from ..plan.run import Hardware
from . import FAIL, OK, SKIPPED, CheckResult


def local_folder(name: str, revision: str | None = None) -> str | None:
    """
    The folder of a model on this machine, also in the Hub's cache; `None` if there is none. Downloads nothing.

    Args:
        name: A folder, in which `~` stands for the user's home, or a Hub id.
        revision: The branch, tag or commit of a Hub id; `None`: its main branch.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)

    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    # ValueError: the name can be no Hub id, as that of a folder that is not there.
    except (OSError, ValueError):
        return None


def check_settings(folder: str | None, args: QaRLConfig, model_args: Any, dataset: Dataset) -> Iterator[CheckResult]:
    """
    Run the checks that the trainer makes before it loads the model.

    Args:
        folder: The model's folder. `None` checks all but its layers.
        args: The settings of the run.
        model_args: TRL's `ModelConfig` of the run.
        dataset: The training set.

    Raises:
        ValueError, OSError, ImportError: those of the trainer's checks.
    """
    # A copy, because later sections read the settings of the run.
    args = copy.copy(args)
    args.push_to_hub = False  # the trainer's check creates the repository
    trainer_arguments = {"peft_config": get_peft_config(model_args), "train_dataset": dataset}

    if folder is None:
        name = model_args.model_name_or_path
        yield CheckResult(SKIPPED, "model", f"{name} is not on this machine: its layers were not checked")
        check_arguments(name, args, trainer_arguments)
        check_data(trainer_arguments, args)
    else:
        check_run(folder, args, trainer_arguments)

    engine = "vLLM" if args.use_vllm else "transformers (slow)"
    text = f"{args.quant_name}, {args.loss_type}, {len(dataset)} prompts, rollouts by {engine}"
    yield CheckResult(OK, "settings", text)


def check_for_gpu(gpu: str, argv: Sequence[str], args: QaRLConfig, dataset: Dataset) -> Iterator[CheckResult]:
    """
    Check a run for one GPU that need not be here: schemes, memory, number of prompts.

    Args:
        gpu: A name in `GPUS`.
        argv: The run, as options of `qarl-trl train`.
        args: Its settings.
        dataset: The training set.

    Raises:
        ValueError: if the dataset has too few prompts, or the run cannot be planned.
    """
    capability = GPUS[gpu].capability
    yield from _check_schemes(args, gpu_generation(capability))

    advice = advise(argv, Hardware(gpus=1, memory=GPUS[gpu].memory))
    status = OK if fits(advice.run) else FAIL
    for line in verdict(advice.run, advice.together):
        yield CheckResult(status, "memory", line)

    check_data({"train_dataset": dataset}, args)


def _check_schemes(args: QaRLConfig, generation: str | None) -> Iterator[CheckResult]:
    """Whether each scheme of a run has kernels on this generation of GPUs."""
    plan = args.quant_plan()
    if plan is None:
        return

    for scheme in plan.config_groups.values():
        support = support_of(scheme)
        status = OK if generation in support.gpus else FAIL
        generations = " or ".join(support.gpus) or "no GPU"
        yield CheckResult(status, "scheme", f"{support.name} runs on {generations}, this is {generation}")
