"""DeepSpeed ZeRO in two processes on a CPU: it trains as DDP does, and syncs, saves and resumes (see `zero3`)."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tools.plan.runs import peak_bytes
from transformers import TrainerCallback

from qarl_trl.quant.names import base_model
from qarl_trl.tools.plan import model as meta
from slow.isolated import isolated, isolated_group
from slow.processes import FLOOR, as_bytes, as_tensors, same
from slow.toys import logged, random_adapter, save_model, stored_tensors, sync, trained_parameters
from slow.zero3 import (
    SETTINGS,
    compile_deepspeed,
    count_quantizations,
    low_bit_bytes,
    master_weights,
    trainer_of_two,
    whole_parameters,
)


pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.deepspeed]
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: dev/plan.md says how to get it for a CPU", allow_module_level=True)

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """DeepSpeed's operations: a process that is killed while it compiles leaves a lock, and later ones wait for it."""
    isolated(compile_deepspeed)


# In float32: DDP's bits ----------------------------------------------------------------------------------------------


def _train(
    model: str, folder: str, zero3: bool, lora: bool, changes: dict[str, Any], pieces: bool = False
) -> dict[str, Any]:
    """A run whose last update has a gradient of NaN in the second process; `pieces` keeps hooks around each module."""
    # Without checkpointing, nothing but `fit_to_zero3` makes the first layer's input need a gradient.
    if lora:
        changes = changes | {"peft_config": random_adapter(), "gradient_checkpointing": False}
    if pieces:
        import deepspeed

        deepspeed.utils.set_z3_leaf_modules = lambda *_, **__: None
    trainer = trainer_of_two(model, folder, zero3, False, **changes)
    _draw_adapter(trainer)

    # Before the first update, so that both ways of loading are compared, too.
    results = {"synced": low_bit_bytes(trainer), "start": whole_parameters(trainer)}
    calls = count_quantizations(trainer)
    callback = _NaNInTheLastUpdate(trainer)
    trainer.add_callback(callback)
    with pytest.raises(RuntimeError) as error:
        trainer.train()

    return results | {
        "master_weights": callback.master_weights,
        "after": callback.low_bit_bytes,
        "calls": calls[:-1],
        "error": str(error.value),
        "master weights after NaN": master_weights(trainer),
    }


def _draw_adapter(trainer: Any) -> None:
    """Give the adapter, if any, the same numbers in every run: loading under ZeRO-3 takes other random numbers."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in trainer._unwrapped.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


class _NaNInTheLastUpdate(TrainerCallback):
    """After the third update it keeps what there is; in the fourth the second process has a gradient of NaN."""

    master_weights: Arrays
    low_bit_bytes: Arrays

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step < 3:
            return

        self.master_weights = master_weights(self.trainer)
        self.low_bit_bytes = low_bit_bytes(self.trainer)
        if args.process_index == 1:
            norm = base_model(self.trainer._unwrapped).model.norm
            # Of one process alone: the reduced gradient is NaN in both, and both must stop.
            norm.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * math.nan,))


@pytest.mark.parametrize("kind", ["dense", "lora", "experts"])
def test_zero3_syncs_and_trains_as_ddp(tmp_path, kind):
    """In float32: the same bits, as long as no gradient is clipped or accumulated."""
    model = save_model(tmp_path / "model", experts=4 if kind == "experts" else 0)
    is_lora = kind == "lora"

    ddp = _train_in_two(model, tmp_path / "ddp", False, is_lora)
    zero3 = _train_in_two(model, tmp_path / "zero3", True, is_lora)

    assert same(ddp["synced"], zero3["synced"])
    assert same(ddp["master_weights"], zero3["master_weights"])
    assert same(ddp["after"], zero3["after"])
    # Control: it was trained.
    assert not same(ddp["synced"], zero3["after"])
    if not is_lora:
        assert same(zero3["after"], _of_one_process(model, zero3["master_weights"]))
    # The store notices updates by DeepSpeed's optimizer as often as those by torch's, and no more often.
    assert zero3["calls"] == ddp["calls"]

    # Control: with DeepSpeed's hooks around each module, sums of gradients have another order.
    if kind == "dense":
        in_pieces = _train_in_two(model, tmp_path / "pieces", True, is_lora, pieces=True)
        apart = _distance(ddp["master_weights"], in_pieces["master_weights"])
        moved = _distance(ddp["master_weights"], ddp["start"])
        # Not 0, or this comparison would not see another order. Far less than what three updates moved.
        assert 0 < apart < 3e-4 * moved


@pytest.mark.parametrize(("stage", "is_lora"), [(1, False), (2, False), (2, True)])
def test_zero1_and_zero2_train_as_ddp(tmp_path, stage, is_lora):
    """They shard the optimizer alone, which writes into the parameters itself."""
    model = save_model(tmp_path / "model")

    ddp = _train_in_two(model, tmp_path / "ddp", False, is_lora)
    zero = _train_in_two(model, tmp_path / "zero", True, is_lora, settings=_settings_of(stage))

    assert same(ddp["master_weights"], zero["master_weights"])
    # A store that does not see an update would keep the tensors of the start.
    assert same(ddp["after"], zero["after"])
    assert zero["calls"] == ddp["calls"]
    # Control: it was trained.
    assert not same(ddp["synced"], zero["after"])


def _settings_of(stage: int) -> dict[str, Any]:
    """DeepSpeed's settings in another stage than the third."""
    return SETTINGS | {"zero_optimization": {"stage": stage}}


def _train_in_two(
    model: str, folder: Path, zero3: bool, lora: bool, pieces: bool = False, **more: Any
) -> dict[str, Any]:
    """The run of the first of two processes, after checks that both agree and that NaN reached no weight."""
    changes = {"use_vllm": False, "max_completion_length": 8, "learner_ops": "stock"} | more
    run = (model, str(folder), zero3, lora, changes, pieces)
    # Short, because a collective that only one process enters would wait for half an hour.
    first, second = isolated_group(_train, 2, *run, timeout=100)

    assert same(first["master_weights"], second["master_weights"])
    assert same(first["synced"], second["synced"])
    # DeepSpeed steps within the backward, before the Trainer asks for the norm.
    for process in (first, second):
        assert "a step would turn the weights into NaN" in process["error"]
        assert same(process["master weights after NaN"], first["master_weights"])
    return first


def _distance(a: Arrays, b: Arrays) -> float:
    square = 0.0
    for name, array in a.items():
        square += float(((array - b[name]) ** 2).sum())
    return square**0.5


def _of_one_process(model: str, weights: Arrays, peft_config: Any = None) -> Arrays:
    """The low-bit tensors that one process makes of the same master weights."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    alone = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if peft_config is not None:
        alone = get_peft_model(alone, peft_config)
    assert weights.keys() == trained_parameters(alone).keys()

    # With an adapter the master weights are only a part of the model.
    alone.load_state_dict(as_tensors(weights), strict=peft_config is None)
    return as_bytes(iter_low_bit_weights(apply_quantization(alone, "W4A16")))


# In bfloat16, beside engines -----------------------------------------------------------------------------------------


def _train_beside_engines(
    model: str, folder: str, changes: dict[str, Any], by_address: bool = False
) -> dict[str, Any]:
    """A run whose store knows that parameters are gathered, or takes them for whole and knows weights `by_address`."""
    from qarl_trl.quant import store

    rounded = _watch_gradients()
    trainer = trainer_of_two(model, folder, True, True, **changes)
    calls = count_quantizations(trainer)
    as_if_whole = patch.object(store, "is_partitioned", lambda _: False)
    with as_if_whole if by_address else nullcontext():
        trainer.train()
    trainer.save_model()
    return {
        "calls": calls[:-1],
        "rounded": rounded,
        "sent": as_bytes(sync(trainer.vllm_generation).items()),
        "master_weights": master_weights(trainer),
        "logp_diffs": logged(trainer, "mismatch/logp_diff_mean"),
        "ratios": list(zip(logged(trainer, "ratio/min"), logged(trainer, "ratio/max"), strict=True)),
    }


def _watch_gradients() -> list[bool]:
    """Of each step that is taken from now on: whether bfloat16 holds the gradients of this process."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    rounded = []
    step = DeepSpeedZeroOptimizer_Stage3.step

    def watched(self: Any, *args: Any) -> None:
        gradients = list(itertools.chain.from_iterable(self.averaged_gradients.values()))
        # Of no gradient at all the second part would be true.
        rounded.append(len(gradients) > 0 and all(map(_fits_bfloat16, gradients)))
        step(self, *args)

    DeepSpeedZeroOptimizer_Stage3.step = watched
    return rounded


def _fits_bfloat16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.bfloat16().float(), tensor.float())


@pytest.mark.parametrize("kind", ["dense", "lora"])
def test_engines_get_what_one_process_makes_of_the_master_weights(tmp_path, kind):
    """In bfloat16, where ZeRO-3 hands the layers a copy of the float32 master weights."""
    changes = {"peft_config": random_adapter()} if kind == "lora" else {}
    model = save_model(tmp_path / "model")
    run = tmp_path / "run"

    first, second = isolated_group(
        _train_beside_engines, 2, model, str(run), {"verify_sync": "first", **changes}, timeout=120
    )

    assert same(first["sent"], second["sent"])
    stored = stored_tensors(run / "low_bit" if kind == "lora" else run)
    assert same(first["sent"], as_bytes(stored.items()))
    assert same(first["sent"], _of_one_process(model, first["master_weights"], **changes))
    # Control: this is no comparison of things that hardly depend on the master weights.
    moved = {name: weight * 1.01 for name, weight in first["master_weights"].items()}
    assert not same(first["sent"], _of_one_process(model, moved, **changes))

    assert len(first["logp_diffs"]) == 2
    assert max(first["logp_diffs"]) < FLOOR
    assert first["ratios"][0] == (1, 1)
    assert first["ratios"][1] != (1, 1)
    # Once an update: 7 layers in each of 2 blocks. Between two updates of a rollout batch only adapted layers change.
    assert first["calls"] == {"dense": [14] * 4, "lora": [14, 10] * 2}[kind]
    # Gradients were reduced in float32.
    assert first["rounded"] == [False] * 4


def test_the_address_of_a_gathered_parameter_is_no_key_and_bfloat16_rounds_gradients(tmp_path):
    model = save_model(tmp_path / "model")
    # DeepSpeed's own way, of which the run asks for another where the settings say nothing.
    in_bfloat16 = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    changes = {"verify_sync": "off", "settings": SETTINGS | in_bfloat16}

    first, _ = isolated_group(_train_beside_engines, 2, model, str(tmp_path / "run"), changes, True, timeout=120)

    # More than the 14 layers: a gathered parameter comes back elsewhere, and its layer is quantized again.
    assert min(first["calls"]) > 14
    assert first["rounded"] == [True] * 4


# Resuming ------------------------------------------------------------------------------------------------------------


def _resume(model: str, folder: str, checkpoint: str | None, adapter: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A run from its start or from a checkpoint."""
    changes = {"use_vllm": False, "max_completion_length": 8, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of_two(model, folder, True, True, settings, **changes, peft_config=adapter)
    trainer.train(checkpoint)

    results = {
        "steps": trainer.state.global_step,
        "master_weights": master_weights(trainer),
        "after": low_bit_bytes(trainer),
    }
    if checkpoint is None:
        # Without this error: no attribute 'backward'.
        with pytest.raises(RuntimeError, match="trains once"):
            trainer.train()
    return results


@pytest.mark.parametrize(("kind", "stage"), [("lora", 3), ("experts", 3), ("dense", 2), ("lora", 2)])
def test_a_resumed_run_ends_in_the_same_master_weights(tmp_path, kind, stage):
    model = save_model(tmp_path / "model", experts=4 if kind == "experts" else 0)
    adapter = random_adapter() if kind == "lora" else None
    # Of four steps, between two rollout batches.
    half = tmp_path / "run" / "checkpoint-2"

    settings = SETTINGS if stage == 3 else _settings_of(stage)
    straight = isolated_group(_resume, 2, model, str(tmp_path / "run"), None, adapter, settings, timeout=120)
    again = isolated_group(_resume, 2, model, str(tmp_path / "again"), str(half), adapter, settings, timeout=120)

    stored = as_bytes(stored_tensors(half / "low_bit").items())
    for uninterrupted, resumed in zip(straight, again, strict=True):
        assert uninterrupted["steps"] == resumed["steps"] == 4
        assert same(uninterrupted["master_weights"], resumed["master_weights"])
        assert same(uninterrupted["after"], resumed["after"])
        # Control: it was trained after the checkpoint.
        assert not same(uninterrupted["after"], stored)


# Memory --------------------------------------------------------------------------------------------------------------


def _storages() -> dict[int, int]:
    """Bytes of all tensors of this process, by the address of what holds them."""
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        # `type`: an object may answer anything when it is asked for its class.
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def _train_and_measure(model: str, folder: str, adapter: Any) -> tuple[dict[str, int], dict[str, int]]:
    """After two updates: bytes that stay, by item and together; and those of the second step."""
    before = _storages()
    peaks = _watch_peaks()
    changes = {"use_vllm": False, "max_completion_length": 8, "max_steps": 2, "peft_config": adapter}
    trainer = trainer_of_two(model, folder, True, True, **changes)
    trainer.train()

    optimizer = trainer.deepspeed.optimizer
    items = {
        "master weights": sum(tensor.nbytes for tensor in optimizer.fp32_partitioned_groups_flat),
        "optimizer state": _state_bytes(optimizer),
        "weights to gather": sum(parameter.ds_tensor.nbytes for parameter in trainer._unwrapped.parameters()),
        "gradients": optimizer.grad_partitions_flat_buffer.nbytes,
        "quantized values": _low_bit_size(trainer.low_bit_store),
    }

    # Of what came since: the libraries hold tensors of their own.
    after = _storages()
    for address in before:
        after.pop(address, None)
    # DeepSpeed's bucket is a setting, and does not grow with the model.
    bucket = sum(bucket.buffer.nbytes for bucket in optimizer.ipg_buckets.values())
    return items, {"together": sum(after.values()), "bucket": bucket, "step": peaks[-1]}


def _watch_peaks() -> list[int]:
    """The most bytes that each step from now on has for itself."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    peaks = []
    step = DeepSpeedZeroOptimizer_Stage3.step

    def measured(self: Any, *args: Any) -> None:
        peaks.append(peak_bytes(lambda: step(self, *args)))

    DeepSpeedZeroOptimizer_Stage3.step = measured
    return peaks


def _state_bytes(optimizer: Any) -> int:
    size = 0
    for state in optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                size += value.nbytes
    return size


def _low_bit_size(store: Any) -> int:
    """Bytes of the low-bit weights that the store keeps."""
    size = 0
    for weight in store.kept().values():
        size += sum(tensor.nbytes for tensor in weight.tensors.values())
    return size


@pytest.mark.parametrize("kind", ["lora", "experts"])
def test_bytes_of_a_rank_are_those_of_the_documentation(tmp_path, kind):
    """The table of dev/plan.md, within 0.1 %. Nothing else of that size stays."""
    model = save_model(tmp_path / "model", experts=4 if kind == "experts" else 0)
    adapter = random_adapter() if kind == "lora" else None
    expected = _planned_bytes(model, adapter)

    for items, rest in isolated_group(_train_and_measure, 2, model, str(tmp_path / "run"), adapter, timeout=120):
        assert items == {name: pytest.approx(size, rel=1e-3) for name, size in expected.items()}
        assert rest["together"] - rest["bucket"] == pytest.approx(sum(expected.values()), rel=0.01)
        # DeepSpeed's step makes one in float32, and needs nothing else of the size of the model.
        copy_of_gradients = expected["gradients"]
        assert rest["step"] == pytest.approx(copy_of_gradients, rel=0.01)


def _planned_bytes(model: str, adapter: Any) -> dict[str, int]:
    """What each of two ranks keeps, by the formulas of dev/plan.md."""
    skeleton = meta.model_without_weights(meta.read_config(model), torch.float32, adapter, quantization="W4A16")
    parameters = meta.parameters(skeleton, "adamw_torch")

    # DeepSpeed cuts each parameter in two, the odd entry rounded up.
    entries = 0
    trained = 0
    for parameter in parameters:
        half = math.ceil(parameter.entries / 2)
        entries += half
        if parameter.optimizer:
            trained += half

    # Bytes an entry: float32 weights, two float32 moments, bfloat16 copies, float32 gradients.
    return {
        "master weights": 4 * trained,
        "optimizer state": 8 * trained,
        "weights to gather": 2 * entries,
        "gradients": 4 * trained,
        "quantized values": sum(parameter.quantized for parameter in parameters),
    }
