"""Packed passes in two processes that would need different numbers of them, through `QaRLTrainer`: padded rows' training."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from learner.test_features import SMALL, Gradients, apart, assert_equal_runs, make, plain_losses, train
from transformers import TrainerCallback

from qarl_trl import _compat
from slow.isolated import isolated_group
from slow.test_processes import FSDP2, _shard_on_cpu
from slow.toys import save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def _trained(model: str, folder: str, fsdp: bool, scheme: str | None) -> list[dict[str, Any]]:
    """Gradients and sizes of the passes, padded and packed."""
    torch.set_num_threads(1)
    if fsdp:
        os.environ.update(FSDP2 | {"ACCELERATE_MIXED_PRECISION": "no"})
        _shard_on_cpu()
    runs = []
    for budget in (None, SMALL):
        changes = plain_losses(scheme) | {"max_tokens_per_pass": budget}
        trainer = make(model, Path(folder) / str(budget), **changes)
        kind = "FSDP" if fsdp else "MULTI_CPU"
        assert (trainer.accelerator.distributed_type, trainer.accelerator.num_processes) == (kind, 2)
        runs.append(train(trainer))
    assert_equal_runs(runs[1], runs[0])
    return [
        {
            "gradients": {name: gradient.numpy() for name, gradient in run["gradients"][0].items()},
            "tokens": [size.numel() for size in run["passes"]],
        }
        for run in runs
    ]


@pytest.mark.parametrize(("fsdp", "scheme"), [(False, None), (True, "W4A16")], ids=["DDP", "FSDP2"])
def test_processes_of_unequal_lengths_train_as_padded_rows_do(tmp_path, fsdp, scheme):
    """A process that made fewer passes would leave the other waiting under FSDP2, until the limit below."""
    model = save_model(tmp_path / "model", layers=1)
    first, second = isolated_group(_trained, 2, model, str(tmp_path), fsdp, scheme, timeout=100)
    assert len(first[1]["tokens"]) == len(second[1]["tokens"]) > len(first[0]["tokens"])
    # The second alone would need one pass for a micro-batch.
    assert sum(second[1]["tokens"]) <= SMALL * len(second[0]["tokens"])
    for name, gradient in first[1]["gradients"].items():
        assert (gradient == second[1]["gradients"][name]).all(), name


class Unsharded(TrainerCallback):
    """The bytes of whole gradients that FSDP2 holds on to between the micro-batches of an update."""

    most = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [group for state in states for group in state._fsdp_param_groups]
        found = [tensor for group in groups for param in group.fsdp_params for tensor in _whole_gradients(param)]
        assert groups
        self.most = max(self.most, sum(tensor.numel() * tensor.element_size() for tensor in found))


def _whole_gradients(param: Any) -> list[torch.Tensor]:
    kept = [param.unsharded_accumulated_grad, getattr(getattr(param, "_unsharded_param", None), "grad", None)]
    return [tensor for tensor in kept if tensor is not None]


def _only_outputs(accelerator: Any) -> None:
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


def _accumulated(model: str, folder: str, how: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ.update(FSDP2)
    _shard_on_cpu()
    changes = {"bf16": True, "loss_type": "grpo", "quant_scheme": "W4A16", "max_steps": 1}
    changes |= {"gradient_accumulation_steps": 8, "steps_per_generation": 8}
    if how != "ours":
        changes["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    with patch.object(_compat, "keep_float32", _only_outputs if how == "accelerate's own" else _compat.keep_float32):
        trainer = make(model, Path(folder) / how, **changes)
    gradients, unsharded = Gradients(), Unsharded()
    trainer.add_callback(gradients)
    trainer.add_callback(unsharded)
    trainer.train()
    return {"gradients": {n: g.float().numpy() for n, g in gradients.seen[0].items()}, "unsharded": unsharded.most}


def test_gradients_of_many_micro_batches_stay_sharded_and_lose_no_digits(tmp_path):
    """
    Eight micro-batches an update. What torch sums up whole and in float32 is the oracle; accelerate's own setting, the control,
    holds the whole gradient in bfloat16.
    """
    model, found = save_model(tmp_path / "model"), {}
    for how in ("ours", "kept whole in float32", "accelerate's own"):
        first, second = isolated_group(_accumulated, 2, model, str(tmp_path), how, timeout=100)
        assert all((g == second["gradients"][name]).all() for name, g in first["gradients"].items())
        found[how] = {n: torch.from_numpy(g) for n, g in first["gradients"].items()}, first["unsharded"]
    parameters = sum(gradient.numel() for gradient in found["ours"][0].values())
    assert found["ours"][1] == 0
    assert found["kept whole in float32"][1] > found["accelerate's own"][1] > 1.9 * parameters
    oracle = found["kept whole in float32"][0]
    assert apart(found["ours"][0], oracle) < 1e-5  # two orders of eight float32 sums
    assert apart(found["accelerate's own"][0], oracle) > 1e-3  # 3.6e-3 seen
