"""What a plan says, against the tensors of a real engine, the bytes that a weight sync moved, and the shards of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools.plan.runs import example_run, resident
from transformers import TrainerCallback

from qarl_trl.tools.plan import items
from qarl_trl.tools.plan import model as meta
from slow.isolated import isolated, isolated_group
from slow.test_processes import _trainer
from slow.toys import make_trainer, save_model


pytestmark = [pytest.mark.slow, pytest.mark.alone]


def _engine(model: str, folder: str, scheme: str) -> tuple[int, dict[str, int], tuple[int, int]]:
    """Bytes of a weight sync, of the parameters of the engine that took it, and of its cache; and the tokens of that."""
    trainer = make_trainer(model, Path(folder), quant_scheme=scheme, verify_sync="off")
    engine = trainer.vllm_generation
    engine.sync_weights()
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    held = {name: p.nbytes for name, p in runner.model.named_parameters()}
    settings = engine.llm.llm_engine.vllm_config.cache_config
    tokens = settings.num_gpu_blocks * settings.block_size
    return engine.synced_bytes, held, (sum(t.nbytes for t in runner.kv_caches), tokens)


def test_bytes_of_a_sync_and_of_the_engine_that_took_it(tmp_path):
    model = save_model(tmp_path / "model")
    moved, held, (cache, tokens) = isolated(_engine, model, str(tmp_path), "FP8_DYNAMIC")
    config, plans = meta.read_config(model), ("FP8_DYNAMIC", "W4A16")
    runs = [example_run(meta.skeleton(config, torch.float32, plan=p), config) for p in plans]
    planned, wrong = map(items.synced_bytes, runs)
    assert moved == planned != wrong  # control: of another scheme
    assert items.cache_tokens(runs[0]) == items.cache_bytes(runs[0]) * tokens // cache > 0
    assert sum(held.values()) == pytest.approx(moved, rel=0.02)
    assert sum(held.values()) != pytest.approx(wrong, rel=0.02)  # control


class Gradients(TrainerCallback):
    held = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **_) -> None:
        self.held = sum(p.grad.to_local().nbytes for p in model.parameters())


def _shards(model: str, folder: str) -> dict[str, int]:
    changes = {"use_vllm": False, "max_completion_length": 8, "max_steps": 1, "optim_muon": True}
    trainer, gradients = _trainer(model, folder, True, **changes), Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    state = [t for held in trainer.optimizer.optimizer.state.values() for t in held.values()]
    weights = trainer.low_bit_store.kept().values()
    return {
        "quantized values": sum(sum(t.nbytes for t in w.tensors.values()) for w in weights),
        "master weights": sum(p.to_local().nbytes for p in trainer.model.parameters()),
        "gradients": gradients.held,
        "optimizer state": sum(getattr(t, "_local_tensor", t).nbytes for t in state if isinstance(t, torch.Tensor)),
    }


def test_shards_of_two_processes(tmp_path):
    model = save_model(tmp_path / "model")
    config = meta.read_config(model)
    skeleton = meta.skeleton(config, torch.float32, plan="W4A16")
    run = example_run(skeleton, config, True, ranks=2, fsdp2=True)
    expected = {"gradients": items.trained_bytes(run)} | resident(run)
    alone = {"gradients": items.trained_bytes(run)} | resident(example_run(skeleton, config, True))
    for held in isolated_group(_shards, 2, model, str(tmp_path / "run")):
        assert held == {name: pytest.approx(expected[name], rel=0.001) for name in held}
        assert held["master weights"] < 0.6 * alone["master weights"]  # control
        assert held["quantized values"] < 0.6 * alone["quantized values"]
