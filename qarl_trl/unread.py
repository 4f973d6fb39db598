"""Keys of a recipe, and of the command line over it, that nothing would read: refused before anything loads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


# Settings that TRL reads only with `use_peft`. `lora_base: frozen` without it is refused by the trainer.
OF_ADAPTER = (
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_parameters",
    "lora_modules_to_save",
    "use_rslora",
    "use_dora",
)


def check_switches(values: Mapping[str, Any], known: Collection[str]) -> None:
    """
    Refuse settings whose switch is not set, so that nothing would read them: whoever sets one expects it to count.

    Args:
        values: The keys of a recipe and of the command line. A switch that is off there is a choice.
        known: The keys that the recipe may have. SFT has no switch for an engine, and so no engine.

    Raises:
        ValueError: with the settings and their switch.
    """
    are_set = [name for name, value in values.items() if value is not None]
    of_adapter = [name for name in are_set if name in OF_ADAPTER]
    if of_adapter and "use_peft" not in are_set:
        raise ValueError(
            f"use_peft must be set beside {', '.join(of_adapter)}: without it all weights are trained, and no adapter "
            "is made. Set use_peft: true, or false to train all weights."
        )

    of_engine = [name for name in are_set if name.startswith("vllm_") or name == "verify_sync"]
    if of_engine and "use_vllm" in known and "use_vllm" not in are_set:
        raise ValueError(
            f"use_vllm must be set beside {', '.join(of_engine)}: without it transformers samples, and no engine "
            "starts. Set use_vllm: true, or false to sample without one."
        )

    if "completion_column" in are_set and "distill_on" in known and "distill_on" not in are_set:
        raise ValueError(
            "distill_on must be set beside completion_column: without it the student samples its answers, and nothing "
            "reads the column. Set distill_on: answers, or rollouts to sample."
        )

    of_evaluation = [name for name in are_set if name.startswith("eval_dataset_")]
    if of_evaluation and "eval_strategy" not in are_set and not values.get("eval_on_start"):
        raise ValueError(
            f"eval_strategy must be set beside {', '.join(of_evaluation)}: without it nothing is evaluated. Set "
            "eval_strategy: steps, with eval_steps, or no."
        )


def check_length(values: Mapping[str, Any], argv: Sequence[str]) -> None:
    """
    Refuse epochs on the command line beside a recipe's number of updates, which would count. The other way round a
    run becomes shorter, as asked.

    Args:
        values: The keys of the recipe and of the command line.
        argv: The command line.

    Raises:
        ValueError: with what to add.
    """
    # `--max-steps` is read, too.
    words = [word.partition("=")[0] for word in argv if word.startswith("--")]
    options = {word.removeprefix("--").replace("-", "_") for word in words}
    steps = values.get("max_steps") or -1
    if "num_train_epochs" in options and "max_steps" not in options and steps > 0:
        raise ValueError(
            f"--num_train_epochs has no effect beside the recipe's max_steps: {steps}. Add --max_steps -1 to train "
            "whole epochs."
        )
