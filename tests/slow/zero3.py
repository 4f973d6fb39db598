"""
DeepSpeed ZeRO-3 in two processes on a CPU, as `accelerate launch` sets it up: a trainer, and what to compare.

Two things are bent: accelerate names no backend where there is no GPU (here it is gloo), and the Trainer takes
bfloat16 without `use_cpu` on GPUs only.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from slow.processes import as_bytes
from slow.toys import make_trainer, trained_parameters


# What recipes/accelerate/zero3.yaml says. And small parameters are partitioned, as the large ones of a real model are.
SETTINGS = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def compile_deepspeed() -> None:
    """Compile what DeepSpeed would compile at its first start."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def trainer_of_two(
    model: str, folder: str, zero3: bool, bf16: bool, settings: dict[str, Any] = SETTINGS, **changes: Any
) -> Any:
    """The trainer of one of two processes, under ZeRO-3 with DeepSpeed's `settings`, or under DDP."""
    # Two processes on two cores.
    torch.set_num_threads(1)
    # DeepSpeed cuts the matrices that Muon needs whole, and clips by a rounded reciprocal of the norm (dev/plan.md).
    arguments: dict[str, Any] = {"bf16": bf16, "optim_muon": False, "max_grad_norm": 1e9}
    if zero3:
        _launch(Path(f"{folder}_{os.environ['RANK']}.json"), bf16, settings)
        arguments |= {"use_cpu": False, "ddp_backend": "gloo"}

    trainer = make_trainer(model, Path(folder), **arguments | changes)

    kind = "DEEPSPEED" if zero3 else "MULTI_CPU"
    assert trainer.accelerator.distributed_type == kind
    assert trainer.accelerator.num_processes == 2
    return trainer


def _launch(file: Path, bf16: bool, settings: dict[str, Any]) -> None:
    """Write DeepSpeed's settings into a file, and set the environment as `accelerate launch` does."""
    from transformers import training_args

    file.write_text(json.dumps(settings))
    os.environ.update(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file),
        ACCELERATE_MIXED_PRECISION="bf16" if bf16 else "no",
        DS_ACCELERATOR="cpu",
    )
    training_args.is_torch_bf16_gpu_available = lambda: True


def whole_parameters(trainer: Any) -> dict[str, np.ndarray]:
    """The parameters, gathered one by one. Collective."""
    arrays = {}
    for name, parameter in trainer._unwrapped.named_parameters():
        with trainer._dist.gather_params([parameter]):
            arrays[name] = parameter.data.clone().numpy()
    return arrays


def master_weights(trainer: Any) -> dict[str, np.ndarray]:
    """What the optimizer steps, in float32, also where the parameters are its bfloat16 copies. Collective."""
    arrays = {}
    # With an adapter the base has no master weights.
    for name, parameter in trained_parameters(trainer._unwrapped).items():
        if trainer.is_deepspeed_enabled:
            from deepspeed.utils import safe_get_full_fp32_param

            # The parameter may be a bfloat16 copy; the float32 numbers are those of DeepSpeed's optimizer.
            arrays[name] = safe_get_full_fp32_param(parameter).numpy()
        else:
            # Under DDP each process has them whole.
            arrays[name] = parameter.data.clone().numpy()
    return arrays


def low_bit_bytes(trainer: Any) -> dict[str, np.ndarray]:
    """Every tensor of the low-bit checkpoint, as the master weights are now. Collective."""
    return as_bytes(trainer.low_bit_store.tensors(trainer._dist.gather_params))


def count_quantizations(trainer: Any) -> list[int]:
    """How often each update of a run that starts now calls the quantizer; the last number is of what comes later."""
    from qarl_trl.quant import store

    calls = [0]
    # Nobody but the store quantizes whole weights.
    quantize_weight = store.quantize_weight

    def counted(*args: Any) -> Any:
        calls[-1] += 1
        return quantize_weight(*args)

    store.quantize_weight = counted

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            calls.append(0)

    trainer.add_callback(EndOfStep())
    return calls
