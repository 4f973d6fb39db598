"""Checks of what a launcher and the environment set beside the settings of a run."""

from __future__ import annotations

import os

from accelerate.logging import get_logger

from .rollouts import uses_server
from .types import RunSettings


logger = get_logger(__name__)
# vLLM's own variables (`vllm/envs.py`).
MARLIN_INPUTS = "VLLM_MARLIN_INPUT_DTYPE"
FLOAT32_PRODUCTS = "VLLM_FLOAT32_MATMUL_PRECISION"
# What `accelerate launch` sets, for DeepSpeed alone.
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def check_launch(args: RunSettings) -> None:
    """
    Refuse what would count in place of a setting, or make engine or processes differ; warn of what would not count.

    Args:
        args: Settings of the run.

    Raises:
        ValueError: for settings of accelerate by which updates or the rows of processes are others than the settings
            say, and for variables of vLLM that change the engine alone.
    """
    _check_accelerator(args)
    if args.has_engine:
        _check_engine_variables(args)

    _check_accumulation(args)


def _check_accumulation(args: RunSettings) -> None:
    """Refuse (`ValueError`), or say, that the launcher has another number of micro-batches for an update."""
    of_launcher = os.environ.get(ACCUMULATION)
    if of_launcher in (None, str(args.gradient_accumulation_steps)):
        return

    # A launch of DeepSpeed without a file makes its configuration of this, and transformers compares the two late.
    is_of_deepspeed = getattr(args, "deepspeed_plugin", None) and not getattr(args, "deepspeed", None)
    if is_of_deepspeed and not os.environ.get(DEEPSPEED_FILE):
        raise ValueError(
            f"gradient_accumulation_steps must be {of_launcher}, as the launcher has it for DeepSpeed, got "
            f"{args.gradient_accumulation_steps}. Give accelerate launch the same --gradient_accumulation_steps."
        )
    if of_launcher != "1":
        logger.warning(
            f"{ACCUMULATION}={of_launcher} does not count beside the Trainer of transformers: "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} of the run does. Set that."
        )


def _check_accelerator(args: RunSettings) -> None:
    """Refuse (`ValueError`) fields of `accelerator_config` that change updates, or end processes apart."""
    config = args.accelerator_config
    # The Trainer takes it in its constructor, after all that was computed from the field, and refuses it there beside
    # a field above 1.
    accumulation = config.gradient_accumulation_kwargs or {}
    steps = accumulation.get("num_steps", 1)
    if "num_steps" in accumulation and (steps != 1 or args.gradient_accumulation_steps != 1):
        raise ValueError(
            f"accelerator_config: gradient_accumulation_kwargs must not have num_steps, got {steps}: set "
            "gradient_accumulation_steps, from which batches and checks are computed."
        )

    if args.world_size == 1:
        return
    if config.split_batches:
        raise ValueError(
            "accelerator_config: split_batches must be false with several processes, got true: "
            "per_device_train_batch_size would be that of all of them, where batches of each are counted, and TRL's "
            "sampler of rollouts would leave prompts out."
        )
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node must be false, got true: transformers writes weights on the first node alone. Set "
            "output_dir to a folder that all nodes share."
        )
    # Without incomplete batches all have as many.
    if not config.even_batches and not args.dataloader_drop_last:
        raise ValueError(
            "accelerator_config: even_batches must be true with several processes, got false: one with fewer rows "
            "would end, and the others wait for it."
        )


def _check_engine_variables(args: RunSettings) -> None:
    """Refuse (`ValueError`) a variable by which the engine alone would round; say which one settles the learner's."""
    inputs = os.environ.get(MARLIN_INPUTS)
    if inputs and args.quantized:
        raise ValueError(
            f"{MARLIN_INPUTS} must not be set, got {inputs}: vLLM's Marlin would quantize the inputs of layers whose "
            "scheme has none (0.016 nats per token in a toy), and the learner would not. Remove it from the "
            "environment."
        )

    # The worker sets it when it starts, in the process of the trainer.
    of_engine = os.environ.get(FLOAT32_PRODUCTS, "highest")
    if args.tf32 and of_engine == "highest" and not uses_server(args):
        logger.warning(
            f"tf32={args.tf32} does not count beside a colocated engine: vLLM sets the precision of float32 products "
            f"of the whole process when it starts. {FLOAT32_PRODUCTS}=high sets it for both."
        )
