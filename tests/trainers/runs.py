"""Short runs of TRL's trainers on low-bit weights, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from slow.toys import copies, logged, stored_tensors


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    # So large that two steps change quantized values.
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
    rows = []
    for n in range(40, 40 + number):
        rows.append({"prompt": f"{n}+{n}=", "completion": f"{2 * n}#"})
    return Dataset.from_list(rows)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return copies(trainer.model.named_parameters())


def losses(trainer: Any) -> list[float]:
    """The losses that were logged."""
    return logged(trainer, "loss")


def same_weights(one: Any, other: Any) -> bool:
    """Whether two trainers ended with the same bits."""
    return not moved(weights(one), weights(other))


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The names of the weights that are not what they were."""
    assert before.keys() == after.keys()
    return {name for name, weight in after.items() if not torch.equal(weight, before[name])}


def assert_saved(folder: Path, used: dict[str, Any]) -> None:
    """The low-bit checkpoint of a folder has every tensor of the `LowBitWeight`s that a forward used."""
    saved = stored_tensors(folder)
    assert used
    for place, weight in used.items():
        layer = place.removesuffix(".weight")
        for local_name, tensor in weight.data.items():
            assert torch.equal(saved[f"{layer}.{local_name}"], tensor), place
