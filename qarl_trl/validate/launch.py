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
# What `accelerate launch --gradient_accumulation_steps` sets.
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


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

    of_launcher = os.environ.get(ACCUMULATION, "1")
    if of_launcher not in ("1", str(args.gradient_accumulation_steps)):
        logger.warning(
            f"{ACCUMULATION}={of_launcher}, of the launcher, does not count beside the Trainer of transformers: "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} of the run does. Set that."
        )


def _check_accelerator(args: RunSettings) -> None:
    """Refuse (`ValueError`) fields of `accelerator_config` that change updates, or end processes apart."""
    config = args.accelerator_config
    # The Trainer takes it in its constructor, after all that was computed from the field.
    steps = (config.gradient_accumulation_kwargs or {}).get("num_steps")
    if steps not in (None, args.gradient_accumulation_steps):
        raise ValueError(
            f"accelerator_config: gradient_accumulation_kwargs must not have num_steps, got {steps}: set "
            "gradient_accumulation_steps, from which batches and checks are computed."
        )

    if args.world_size == 1:
        return
    if config.split_batches:
        raise ValueError(
            "accelerator_config: split_batches must be false with several processes, got true: "
            "per_device_train_batch_size would be that of all of them, and TRL's samplers count each."
        )
    if not config.even_batches:
        raise ValueError(
            "accelerator_config: even_batches must be true with several processes, got false: one with fewer rows "
            "would end, and the others wait for it."
        )


def _check_engine_variables(args: RunSettings) -> None:
    """Refuse (`ValueError`) variables of vLLM by which engine or learner would compute otherwise than the other."""
    inputs = os.environ.get(MARLIN_INPUTS)
    if inputs and args.quantized:
        raise ValueError(
            f"{MARLIN_INPUTS} must not be set, got {inputs}: vLLM's Marlin would quantize the inputs of layers whose "
            "scheme has none (0.016 nats per token in a toy), and the learner would not. unset it, or take a scheme "
            "with low-bit activations."
        )

    # The worker sets it when it starts, in the process of the trainer.
    of_engine = os.environ.get(FLOAT32_PRODUCTS, "highest")
    if args.tf32 and of_engine == "highest" and not uses_server(args):
        raise ValueError(
            f"tf32 must be left out beside a colocated engine, got {args.tf32}: vLLM sets the precision of float32 "
            f"products of the whole process when it starts. {FLOAT32_PRODUCTS}=high sets it for both."
        )
