"""Short runs of small models without an engine, and comparisons of what they trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from configs import field_names
from peft import LoraConfig
from quant.schemes import same_bytes
from slow.toys import distinct_characters, prompts, settings
from trl import GRPOConfig, GRPOTrainer

from qarl_trl import QaRLConfig, QaRLTrainer


# Settings with which `QaRLTrainer` is TRL's trainer. Packed passes are ours too: TRL pads, and so adds numbers up in
# another order.
OFF = {"quant_scheme": None, "max_tokens_per_pass": None}


def without_engine(folder: Path, **changes: Any) -> dict[str, Any]:
    """The settings of a run of four steps in which transformers samples."""
    small = {"use_vllm": False, "max_completion_length": 8, "per_device_train_batch_size": 4, "bf16": False}
    return settings(folder, **small) | changes


def stock_config(folder: Path, **changes: Any) -> GRPOConfig:
    """TRL's config of the same run."""
    values = without_engine(folder, **changes)
    # Those that this package adds.
    for name in values.keys() - field_names(GRPOConfig):
        del values[name]
    return GRPOConfig(**values)


def make(model: Any, folder: Path, peft_config: LoraConfig | None = None, **changes: Any) -> QaRLTrainer:
    """A trainer of `model`, a folder or a model, with the settings of `without_engine`."""
    args = QaRLConfig(**without_engine(folder, **changes))
    return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), peft_config=peft_config)


def adapter() -> LoraConfig:
    """LoRA on two of the seven layers of a block."""
    # Few, so that tests see what happens to quantized layers without an adapter, too.
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def copies_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def master_weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters of the model that is trained, by name."""
    return copies_of(trainer.model)


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The names of the tensors that are not the same bytes; both dicts must have the same names."""
    # A name that is lost would otherwise count as unchanged.
    assert before.keys() == after.keys()
    return {name for name, tensor in after.items() if not same_bytes(tensor, before[name])}


def train(trainer: GRPOTrainer) -> list[float]:
    """Train, and return the loss of each micro-batch."""
    losses = []
    compute_loss = trainer._compute_loss

    def spy(*args: Any) -> torch.Tensor:
        loss = compute_loss(*args)
        losses.append(loss.item())
        return loss

    trainer._compute_loss = spy
    trainer.train()
    return losses
