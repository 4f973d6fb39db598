"""A plan against real runs: the tensors of an engine, the bytes of a weight sync, and the shards of two processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.plan.runs import example_run, resident
from transformers import TrainerCallback

from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.memory.engine import cache_bytes, cache_tokens, synced_bytes
from qarl_trl.tools.plan.memory.learner import trained_bytes
from slow.isolated import isolated, isolated_group
from slow.processes import trainer_of_two
from slow.toys import make_trainer, save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


# The engine ----------------------------------------------------------------------------------------------------------


@dataclass
class EngineSizes:
    """
    Bytes, but for the tokens.

    Attributes:
        synced: Of a weight sync.
        parameters: Of all parameters of the engine that took it.
        cache: Of its keys and values.
        cache_tokens: How many tokens have room there.
    """

    synced: int
    parameters: int
    cache: int
    cache_tokens: int


def _engine_sizes(model: str, folder: str, scheme: str) -> EngineSizes:
    trainer = make_trainer(model, Path(folder), quant_scheme=scheme, verify_sync="off")
    engine = trainer.vllm_generation
    engine.sync_weights()

    vllm_engine = engine.llm.llm_engine
    runner = vllm_engine.model_executor.driver_worker.model_runner
    cache = vllm_engine.vllm_config.cache_config
    return EngineSizes(
        synced=engine.synced_bytes,
        parameters=sum(param.nbytes for param in runner.model.parameters()),
        cache=sum(tensor.nbytes for tensor in runner.kv_caches),
        cache_tokens=cache.num_gpu_blocks * cache.block_size,
    )


def test_bytes_of_a_sync_and_of_the_engine_that_took_it(tmp_path):
    model = save_model(tmp_path / "model")
    config = meta.read_config(model)

    def planned_run(scheme):
        return example_run(meta.model_without_weights(config, torch.float32, quantization=scheme), config)

    run = planned_run("FP8_DYNAMIC")
    planned = synced_bytes(run)
    of_other_scheme = synced_bytes(planned_run("W4A16"))

    sizes = isolated(_engine_sizes, model, str(tmp_path), "FP8_DYNAMIC")

    assert sizes.synced == planned != of_other_scheme  # control
    # The plan's bytes a token are the engine's own; how much it may have for its cache is a setting.
    assert cache_tokens(run) == cache_bytes(run) * sizes.cache_tokens // sizes.cache > 0
    assert sizes.parameters == pytest.approx(sizes.synced, rel=0.02)
    assert sizes.parameters != pytest.approx(of_other_scheme, rel=0.02)  # control


# The learner's shards ------------------------------------------------------------------------------------------------


class GradientBytes(TrainerCallback):
    """The bytes of this process's gradients before the last update."""

    held = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.held = _local_bytes(param.grad for param in model.parameters())


def _shards(model: str, folder: str) -> dict[str, int]:
    """The bytes that this process holds."""
    changes = {"use_vllm": False, "max_completion_length": 8, "max_steps": 1, "optim_muon": True}
    trainer = trainer_of_two(model, folder, True, **changes)
    gradients = GradientBytes()
    trainer.add_callback(gradients)
    trainer.train()

    state = []
    for of_param in trainer.optimizer.optimizer.state.values():
        for value in of_param.values():
            if isinstance(value, torch.Tensor):
                state.append(value)

    # Under FSDP2 the store keeps the rows of this process.
    quantized_values = []
    for weight in trainer.low_bit_store.kept().values():
        quantized_values += weight.tensors.values()

    return {
        "quantized values": _local_bytes(quantized_values),
        "master weights": _local_bytes(trainer.model.parameters()),
        "gradients": gradients.held,
        "optimizer state": _local_bytes(state),
    }


def _local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors in this process, which has a shard of each `DTensor`."""
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


def test_shards_of_two_processes(tmp_path):
    model = save_model(tmp_path / "model")
    config = meta.read_config(model)
    skeleton = meta.model_without_weights(config, torch.float32, quantization="W4A16")
    run = example_run(skeleton, config, muon=True, ranks=2, fsdp2=True)
    planned = {"gradients": trained_bytes(run)} | resident(run)
    of_one_process = resident(example_run(skeleton, config, muon=True))

    for held in isolated_group(_shards, 2, model, str(tmp_path / "run")):
        assert held == {name: pytest.approx(planned[name], rel=0.001) for name in held}
        # The control.
        assert held["master weights"] < 0.6 * of_one_process["master weights"]
        assert held["quantized values"] < 0.6 * of_one_process["quantized values"]
