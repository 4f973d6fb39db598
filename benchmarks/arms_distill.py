"""Distill a toy of arms.py into 4 bits, with its own unquantized weights as the teacher."""

from __future__ import annotations

import copy
import tempfile
from itertools import islice
from typing import Any

import common  # noqa: F401  # finds the toy of examples/quickstart
import torch
from arms import STOCK
from arms_task import numbers_of, problems
from datasets import Dataset
from sums import make_tokenizer
from torch import nn
from transformers import PrinterCallback

from qarl_trl.trainers import LowBitDistillationConfig, LowBitDistillationTrainer


BATCH = 16  # solutions of an update


def distill(model: nn.Module, regime: dict[str, Any], updates: int, rate: float) -> tuple[nn.Module, list[float]]:
    """
    Distill a toy on right solutions of training problems, in float32.

    Args:
        model: The toy, which stays as it is; it is the teacher, too.
        regime: An entry of `arms.REGIMES`.
        updates: How many.
        rate: Of AdamW; it falls as a cosine.

    Returns:
        The student's master weights as a model, and KL(teacher || student) of each update, in nats a token.
    """
    student = copy.deepcopy(model)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "distill_on": "answers",
            "beta": 0.0,  # KL(teacher || student)
            "use_vllm": False,
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": BATCH,
            "max_steps": updates,
            "max_completion_length": regime["max_completion_length"],
            "learning_rate": rate,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 5,
            "weight_decay": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **STOCK,
            **regime["quantization"],
        }
        trainer = LowBitDistillationTrainer(
            model=student,
            teacher_model=copy.deepcopy(model),
            args=LowBitDistillationConfig(**settings),
            train_dataset=solutions(regime, updates * BATCH),
            processing_class=make_tokenizer(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trained = dict(trainer.model.named_parameters())
    # A model of its own, without the trainer's quantization.
    distilled = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in distilled.named_parameters():
            weight.copy_(trained[name])
    return distilled, losses


def solutions(regime: dict[str, Any], count: int) -> Dataset:
    """Training problems with their right solutions."""
    rows = []
    for problem in islice(problems(0, count=numbers_of(regime)), count):
        # Without slips a demonstration is right.
        rows.append({"prompt": problem["prompt"], "completion": problem["demonstration"]})
    return Dataset.from_list(rows)
