"""
HSDP on a CPU, as recipes/accelerate/hsdp.yaml has it: four processes as two nodes, and two copies of the model, each
cut in two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slow.isolated import isolated_group
from slow.processes import FSDP2, as_arrays, as_tensors, count_packed, same, shard_on_cpu, whole_arrays
from slow.toys import make_trainer, save_model, stored_tensors


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def _train_all(model: str, folder: str) -> dict[str, Any]:
    """Runs on two nodes, on one node, and on two nodes of which the second reads the rows of the first."""
    os.environ.update(FSDP2, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    shard_on_cpu()
    torch.set_num_threads(1)
    # Three runs in the same four processes, which start once.
    return {
        "two": _train(model, Path(folder, "two"), 2, {}),
        "flat": _train(model, Path(folder, "flat"), 1, {}),
        "twins": _train(model, Path(folder, "twins"), 2, _rows_of_first_node()),
    }


def _rows_of_first_node() -> dict[str, Any]:
    """Arguments of accelerate's data loader by which both nodes get the same rows."""
    return {"num_processes": 2, "process_index": int(os.environ["RANK"]) % 2, "torch_device_mesh": None}


def _train(model: str, folder: Path, nodes: int, loading: dict[str, Any]) -> dict[str, Any]:
    """What four processes on some nodes train in an update of two micro-batches."""
    from accelerate import accelerator

    # As `accelerate launch` says it to the processes.
    os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = str(nodes)
    os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(4 // nodes)
    prepare_data_loader = accelerator.prepare_data_loader

    def prepare(*args: Any, **kwargs: Any) -> Any:
        return prepare_data_loader(*args, **(kwargs | loading))

    changes = {
        "use_vllm": False,
        "max_completion_length": 8,
        "optim_muon": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "max_steps": 1,
        "seed": 1,
    }
    with patch.object(accelerator, "prepare_data_loader", prepare):
        trainer = make_trainer(model, folder, **changes)
        gradients = _record_gradients(trainer)
        trainer.train()
    trainer.save_model()

    return {
        "placements": {str(parameter.placements) for parameter in trainer.model.parameters()},
        "packed": count_packed(trainer),
        "gradients": gradients[-1],
        "master_weights": whole_arrays(trainer),
    }


def _record_gradients(trainer: Any) -> list[dict[str, np.ndarray]]:
    """The whole gradients after each backward that begins from now on."""
    recorded = []
    # The Trainer clips and zeroes them after the last one.
    backward = trainer.accelerator.backward

    def recording(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        gradients = {}
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor()
        recorded.append(as_arrays(gradients))

    trainer.accelerator.backward = recording
    return recorded


def _distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest distance of two arrays of one name, relative to the norm of that in `b`."""
    assert a
    assert a.keys() == b.keys()

    distances = []
    for name, array in b.items():
        distances.append(np.linalg.norm(a[name] - array) / np.linalg.norm(array))
    # Of NaN numpy's maximum is NaN, where Python's may be another one.
    return float(np.max(distances))


def test_two_nodes_train_one_model(tmp_path):
    model = save_model(tmp_path / "model", layers=1)

    ranks = isolated_group(_train_all, 4, model, str(tmp_path))
    two = ranks[0]["two"]
    flat = ranks[0]["flat"]
    twins = ranks[0]["twins"]

    # Control: there were two copies of the model in the one run and one in the other.
    assert two["placements"] == {"(Replicate(), Shard(dim=0))"}
    assert flat["placements"] == {"(Shard(dim=0),)"}
    # All 7 layers of the block gather quantized values, not weights.
    assert two["packed"] == flat["packed"] == 7
    for other in ranks[1:]:
        assert same(two["master_weights"], other["two"]["master_weights"])

    # Sums of bfloat16 (8 bits) in float32 (24) are nearly always exact in any order: 4e-10 measured, 12 of 623,488
    # entries.
    assert _distance(two["gradients"], flat["gradients"]) < 1e-8
    # Control: gradients of other rows.
    assert _distance(twins["gradients"], flat["gradients"]) > 0.1

    _check_saved(model, tmp_path / "two", two["master_weights"])


def _check_saved(model: str, saved: Path, master_weights: dict[str, np.ndarray]) -> None:
    """The saved model must be what one process makes of the same master weights."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    alone = apply_quantization(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), "W4A16")
    start = dict(iter_low_bit_weights(alone))
    alone.load_state_dict(as_tensors(master_weights))
    expected = dict(iter_low_bit_weights(alone))

    stored = stored_tensors(saved)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor)
    # Control: it was trained.
    assert not all(torch.equal(start[name], tensor) for name, tensor in expected.items())
