"""Short runs of TRL's trainers on low-bit weights, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """The arguments of the config of a short run."""
    return {"output_dir": str(folder)} | SETTINGS | changes


def pairs(number: int = 32) -> Dataset:
    """Prompts and completions as text: "40+40=" and "80#"."""
    return Dataset.from_list(
        [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}#"} for n in range(40, 40 + number)],
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def losses(trainer: Any) -> list[float]:
    """The losses that were logged."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def same_weights(one: Any, other: Any) -> bool:
    """Whether two trainers ended with the same bits."""
    expected = weights(other)
    return all(torch.equal(weight, expected[name]) for name, weight in weights(one).items())
