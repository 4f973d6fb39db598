"""Check the settings that the trainer would refuse on this machine, or on a GPU that is not here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import snapshot_download
from trl import get_peft_config

from ...methods import QARL, Method
from ...quant.scheme import support_of
from ...quant.supported import SchemeSupport, gpu_generation
from ...trainers.teacher import loading_of_own_start, teacher_of_own_start, warn_of_masters
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


def schemes_of(args: Any) -> list[SchemeSupport]:
    """
    The rows of the support table for the schemes of a run; empty if only the checkpoint has them.

    Args:
        args: The settings of the run.
    """
    plan = args.quant_plan()
    if plan is None:
        return []
    return [support_of(scheme) for scheme in plan.config_groups.values()]


def check_settings(
    folder: str | None, args: Any, model_args: Any, dataset: Dataset, rewards: list[Any] | None = None
) -> Iterator[CheckResult]:
    """
    Run the checks that the trainer makes before it loads the model.

    Args:
        folder: The model's folder. `None` checks all but its layers.
        args: The settings of the run: a `QaRLConfig`, or that of another trainer.
        model_args: TRL's `ModelConfig` of the run.
        dataset: The training set.
        rewards: The rewards, of a trainer that has such.

    Raises:
        ValueError, OSError, ImportError: those of the trainer's checks.
    """
    # A copy, because later sections read the settings of the run.
    args = copy.copy(args)
    args.push_to_hub = False  # the trainer's check creates the repository
    name = model_args.model_name_or_path
    trainer_arguments = {
        "model": name,
        "peft_config": get_peft_config(model_args),
        "train_dataset": dataset,
        "reward_funcs": rewards,
    }
    if hasattr(args, "teacher_model_name_or_path"):
        trainer_arguments["teacher_model"] = _teacher_of(folder or name, args, trainer_arguments["peft_config"])

    if folder is None:
        yield CheckResult(SKIPPED, "model", f"{name} is not on this machine: its layers were not checked")
        check_arguments(name, args, trainer_arguments)
        check_data(trainer_arguments, args)
    else:
        check_run(folder, args, trainer_arguments)

    yield CheckResult(OK, "settings", _describe(args, dataset))


def _teacher_of(model: str, args: Any, peft_config: Any) -> Any:
    """The `teacher_model` of a distillation; may change how `args` load it."""
    if args.teacher_model_name_or_path is not None:
        warn_of_masters(args.teacher_model_name_or_path, args.teacher_model_init_kwargs)
        return args.teacher_model_name_or_path
    args.teacher_model_init_kwargs = loading_of_own_start(args)
    return teacher_of_own_start(model, args, peft_config)


def _describe(args: Any, dataset: Dataset) -> str:
    """Scheme, loss and data of a run, and who samples for it."""
    # RLOO and distillation have one loss.
    loss = [args.loss_type] if hasattr(args, "loss_type") else []
    if not hasattr(args, "max_completion_length") or getattr(args, "distill_on", "rollouts") != "rollouts":
        return ", ".join([args.quant_name, *loss, f"{len(dataset)} rows, nothing is sampled"])

    engine = "vLLM" if args.use_vllm else "transformers (slow)"
    return ", ".join([args.quant_name, *loss, f"{len(dataset)} prompts", f"rollouts by {engine}"])


def check_for_gpu(
    gpu: str, argv: Sequence[str], args: Any, dataset: Dataset, method: Method = QARL
) -> Iterator[CheckResult]:
    """
    Check a run for one GPU that need not be here: schemes, memory, number of prompts.

    Args:
        gpu: A name in `GPUS`.
        argv: The run, as options of the command that trains.
        args: Its settings.
        dataset: The training set.
        method: What is trained.

    Raises:
        ValueError: if the dataset has too few prompts, or the run cannot be planned.
    """
    capability = GPUS[gpu].capability
    yield from _check_schemes(args, gpu_generation(capability))

    advice = advise(argv, Hardware(gpus=1, memory=GPUS[gpu].memory), method)
    status = OK if fits(advice.run) else FAIL
    for line in verdict(advice.run, advice.together):
        yield CheckResult(status, "memory", line)

    check_data({"train_dataset": dataset}, args)


def _check_schemes(args: Any, generation: str | None) -> Iterator[CheckResult]:
    """Whether each scheme of a run has kernels on this generation of GPUs."""
    for support in schemes_of(args):
        status = OK if generation in support.gpus else FAIL
        generations = " or ".join(support.gpus) or "no GPU"
        yield CheckResult(status, "scheme", f"{support.name} runs on {generations}, this is {generation}")
