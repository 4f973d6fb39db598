"""Packed passes in two processes that would need different numbers of them, through `QaRLTrainer`.

They train as padded rows do.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from learner.test_features import SMALL, Gradients, apart, assert_equal_runs, make, plain_losses, tokens_of, train
from transformers import TrainerCallback

from qarl_trl.trainers import shards
from slow.isolated import isolated_group
from slow.processes import FSDP2, as_arrays, as_tensors, same, shard_on_cpu
from slow.toys import save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


# Processes of unequal lengths ----------------------------------------------------------------------------------------


def _train_padded_and_packed(
    model: str, folder: str, fsdp: bool, scheme: str | None, budget: int, changes: dict[str, Any]
) -> list[dict[str, Any]]:
    """Gradients of the first update, and numbers of tokens of the passes: of padded rows, then of packed ones."""
    torch.set_num_threads(1)
    if fsdp:
        # In float32, where packed and padded rows are a rounding apart and mistakes are far above that.
        os.environ.update(FSDP2 | {"ACCELERATE_MIXED_PRECISION": "no"})
        shard_on_cpu()

    runs = []
    for number in (None, budget):
        trainer = make(
            model, Path(folder) / str(number), max_tokens_per_pass=number, **plain_losses(scheme), **changes
        )
        # Two processes that do not know of each other would train as padded rows do, too.
        kind = "FSDP" if fsdp else "MULTI_CPU"
        assert (trainer.accelerator.distributed_type, trainer.accelerator.num_processes) == (kind, 2)
        # The other test of this function compares the loss of each micro-batch under FSDP2.
        runs.append(train(trainer, with_losses=not (fsdp and changes)))

    padded, packed = runs
    assert_equal_runs(packed, padded)
    return [_summary(padded), _summary(packed)]


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    # As arrays: a tensor in a pipe needs its sender alive.
    return {"gradients": as_arrays(run["gradients"][0]), "tokens": tokens_of(run["passes"])}


@pytest.mark.parametrize(("fsdp", "scheme"), [(False, None), (True, "W4A16")], ids=["DDP", "FSDP2"])
def test_processes_of_unequal_lengths_train_as_padded_rows_do(tmp_path, fsdp, scheme):
    """A process that made fewer passes would leave the other waiting under FSDP2, until the limit below."""
    model = save_model(tmp_path / "model", layers=1)

    one, two = isolated_group(_train_padded_and_packed, 2, model, str(tmp_path), fsdp, scheme, SMALL, {}, timeout=100)

    padded, packed = one
    padded_of_two, packed_of_two = two
    assert len(packed["tokens"]) == len(packed_of_two["tokens"]) > len(padded["tokens"])
    # The second process alone would need one pass for a micro-batch.
    assert sum(packed_of_two["tokens"]) <= SMALL * len(padded_of_two["tokens"])
    assert same(packed["gradients"], packed_of_two["gradients"])


@pytest.mark.parametrize(("fsdp", "scheme"), [(False, None), (True, "W4A16")], ids=["DDP", "FSDP2"])
def test_micro_batches_share_a_pass_in_all_processes_and_train_as_padded_rows_do(tmp_path, fsdp, scheme):
    """Two passes of two micro-batches to an update. DDP reduces gradients in the last backward, FSDP2 in both."""
    model = save_model(tmp_path / "model", layers=1)
    changes = {"steps_per_generation": 8, "gradient_accumulation_steps": 4}
    # Room for two micro-batches of at most 112 tokens in the first process, and for many in the second.
    budget = 140

    one, two = isolated_group(
        _train_padded_and_packed, 2, model, str(tmp_path), fsdp, scheme, budget, changes, timeout=200
    )

    padded, packed = one
    _, packed_of_two = two
    assert len(packed["tokens"]) == len(packed_of_two["tokens"]) < len(padded["tokens"])
    assert same(packed["gradients"], packed_of_two["gradients"])


# Gradients of many micro-batches -------------------------------------------------------------------------------------


class UnshardedBytes(TrainerCallback):
    """The bytes of whole gradients that FSDP2 holds on to between the micro-batches of an update, at most."""

    most = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        groups = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                groups += module._get_fsdp_state()._fsdp_param_groups
        assert groups

        held = 0
        for group in groups:
            for param in group.fsdp_params:
                for gradient in _whole_gradients(param):
                    held += gradient.nbytes
        self.most = max(self.most, held)


def _whole_gradients(param: Any) -> list[torch.Tensor]:
    """What FSDP2 holds of the gradient of a parameter besides its shard."""
    # In the first place FSDP2 sums up where it reduces in another dtype than that of the weights, else in the second.
    unsharded = getattr(param, "_unsharded_param", None)
    gradients = []
    for gradient in (param.unsharded_accumulated_grad, getattr(unsharded, "grad", None)):
        if gradient is not None:
            gradients.append(gradient)
    return gradients


def _keep_only_outputs_float32(accelerator: Any) -> None:
    """In place of `keep_float32`: outputs are float32, and gradients have accelerate's dtype."""
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


def _accumulate(model: str, folder: str, how: str) -> dict[str, Any]:
    """The gradients of an update of eight micro-batches, and the bytes of whole ones between them."""
    torch.set_num_threads(1)
    os.environ.update(FSDP2)
    shard_on_cpu()

    changes = {
        "bf16": True,
        "loss_type": "grpo",
        "quant_scheme": "W4A16",
        "max_steps": 1,
        "gradient_accumulation_steps": 8,
        "steps_per_generation": 8,
        # Less than two micro-batches, which would otherwise share a pass and its backward.
        "max_tokens_per_pass": SMALL,
    }
    if how != "ours":
        # Whole gradients stay until the last micro-batch: the fewest communications, and the most memory.
        changes["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    keep_float32 = shards.keep_float32
    if how == "accelerate's own":
        keep_float32 = _keep_only_outputs_float32
    with patch.object(shards, "keep_float32", keep_float32):
        trainer = make(model, Path(folder) / how, **changes)

    gradients = Gradients()
    unsharded = UnshardedBytes()
    trainer.add_callback(gradients)
    trainer.add_callback(unsharded)
    trainer.train()

    # In float32, because numpy has no bfloat16.
    arrays = {}
    for name, gradient in gradients.seen[0].items():
        arrays[name] = gradient.float().numpy()
    return {"gradients": arrays, "unsharded": unsharded.most}


def test_gradients_of_many_micro_batches_stay_sharded_and_lose_no_digits(tmp_path):
    """
    Eight micro-batches an update. What torch sums up whole and in float32 is the oracle; accelerate's own setting, the
    control, holds the whole gradient in bfloat16.
    """
    model = save_model(tmp_path / "model")

    gradients = {}
    unsharded = {}
    for how in ("ours", "kept whole in float32", "accelerate's own"):
        one, two = isolated_group(_accumulate, 2, model, str(tmp_path), how, timeout=100)
        assert same(one["gradients"], two["gradients"])
        gradients[how] = as_tensors(one["gradients"])
        unsharded[how] = one["unsharded"]

    parameters = sum(gradient.numel() for gradient in gradients["ours"].values())
    assert unsharded["ours"] == 0
    # accelerate's bfloat16 has 2 bytes a parameter.
    assert unsharded["kept whole in float32"] > unsharded["accelerate's own"] > 1.9 * parameters

    oracle = gradients["kept whole in float32"]
    assert apart(gradients["ours"], oracle) < 1e-5  # two orders of eight float32 sums
    assert apart(gradients["accelerate's own"], oracle) > 1e-3  # 3.6e-3 seen
