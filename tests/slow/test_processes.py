"""
Two processes on a CPU, each with an engine of its own or half of one: DDP and FSDP2 as `accelerate launch` sets them up, with
accelerate, TRL and vLLM as they are. One thing is bent: accelerate shards on accelerators only, `_shard_on_cpu` also here.
"""

from __future__ import annotations

import functools
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from slow.isolated import isolated_group
from slow.toys import forge, make_trainer, save_model, stored_tensors, sync


pytestmark = [pytest.mark.slow, pytest.mark.alone]
# As `accelerate launch --config_file recipes/accelerate/fsdp2.yaml` puts it into the environment.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
# Of test_logp_diff.py: the mismatch of a bf16 engine and a bf16 learner on transformers' operations.
FLOOR = 0.0102


def _shard_on_cpu() -> None:
    from accelerate import state

    original = state.AcceleratorState.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = plugin
            self.distributed_type = state.PartialState._shared_state["distributed_type"] = state.DistributedType.FSDP

    state.AcceleratorState.__init__ = init


def _trainer(model: str, folder: str, fsdp: bool, **changes: Any) -> Any:
    torch.set_num_threads(1)
    if fsdp:
        os.environ.update(FSDP2)
        _shard_on_cpu()
    trainer = make_trainer(model, Path(folder), **changes)
    kind = "FSDP" if fsdp else "MULTI_CPU"
    assert (trainer.accelerator.distributed_type, trainer.accelerator.num_processes) == (kind, 2)
    return trainer


def _whole(trainer: Any) -> dict[str, torch.Tensor]:
    """The master weights, put together from their shards."""
    parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in parameters}


def _coded(trainer: Any) -> int:
    """Of how many master weights FSDP2 gathers quantized values."""
    from qarl_trl.quant.gathers import MasterShard

    with torch.no_grad():
        return sum(
            isinstance(p.to_local() if hasattr(p, "to_local") else p, MasterShard) for p in trainer.model.parameters()
        )


def _train(model: str, folder: str, fsdp: bool, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = _trainer(model, folder, fsdp, **changes)
    before = _whole(trainer)
    trainer.train()
    trainer.save_model()
    sent = sync(trainer.vllm_generation)
    rows = trainer.state.log_history
    return {
        "logp_diffs": [row["mismatch/logp_diff_mean"] for row in rows if "mismatch/logp_diff_mean" in row],
        "ratios": [(row["ratio/min"], row["ratio/max"]) for row in rows if "ratio/min" in row],
        "moved": sum(not torch.equal(before[name], p) for name, p in _whole(trainer).items()),
        "packed": _coded(trainer),
        "master_weights": {name: p.numpy() for name, p in _whole(trainer).items()},
        "sent": {name: tensor.view(torch.uint8).numpy() for name, tensor in sent.items()},
    }


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize(
    ("fsdp", "engines", "most", "kernel"),
    [
        (False, 2, 1e-6, "engine"),  # bit for bit, but for the two formulas of a log-softmax
        (True, 2, FLOOR, "dequant"),  # as on a GPU: FSDP2 gathers quantized values, also for the sync check
        # Half a matrix product in each process, rounded before the halves are added. FSDP2 casts what a block is given to
        # bfloat16, and the engine's residual sums are float32.
        (True, 1, FLOOR, "engine"),
    ],
)
def test_processes_train_one_model_and_every_engine_gets_it(tmp_path, fsdp, engines, most, kernel):
    changes = {"vllm_tensor_parallel_size": 2 // engines, "seed": 1, "quant_kernel": kernel}
    if kernel == "dequant":
        changes["learner_ops"] = "stock"
    ranks = isolated_group(_train, 2, save_model(tmp_path / "model"), str(tmp_path / "run"), fsdp, changes)
    assert _same(ranks[0]["master_weights"], ranks[1]["master_weights"])
    assert _same(ranks[0]["sent"], ranks[1]["sent"])
    stored = stored_tensors(tmp_path / "run")
    assert _same({name: tensor.view(torch.uint8).numpy() for name, tensor in stored.items()}, ranks[0]["sent"])
    assert ranks[0]["moved"] == len(ranks[0]["master_weights"])
    assert ranks[0]["packed"] == (14 if kernel == "dequant" else 0)
    for found in ranks:
        assert len(found["logp_diffs"]) == 2 and max(found["logp_diffs"]) < most
        assert found["ratios"][0] == (1, 1)
        assert found["ratios"][1] != (1, 1)


def _held(model: str, folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """Bytes of the policy in this process before FSDP2 cuts it, and the whole reference model."""
    trainer = _trainer(model, folder, True, use_vllm=False, beta=0.1)
    storages = {s.data_ptr(): s.nbytes() for p in trainer.model.parameters() for s in [p.untyped_storage()]}
    return sum(storages.values()), {
        n: p.full_tensor().detach().numpy() for n, p in trainer.ref_model.named_parameters()
    }


def test_one_process_of_a_machine_holds_the_weights_until_they_are_cut_and_the_reference_model_has_them_all(tmp_path):
    """Eight processes would take 262 GB of host memory for 8B parameters. TRL leaves half of the reference at zero here."""
    model = save_model(tmp_path / "model")
    (main, reference), (other, _) = isolated_group(_held, 2, model, str(tmp_path / "run"))
    assert main > 1_000_000 and other < main / 1000
    assert _same(reference, {name: tensor.numpy() for name, tensor in stored_tensors(model).items()})


def _measured(model: str, folder: str) -> dict[str, Any]:
    """What was logged of the ratios, and this process's completions of each micro-batch."""
    from qarl_trl.metrics import ratios

    columns, original = [], ratios.completion_columns
    ratios.completion_columns = lambda *given: columns.append(original(*given)) or columns[-1]
    trainer = _trainer(model, folder, False, use_vllm=False, max_completion_length=8, learning_rate=3e-2)
    trainer.train()
    names = ("ratio/", "error_tokens/")
    rows = [{k: v for k, v in row.items() if k.startswith(names)} for row in trainer.state.log_history]
    columns = [{name: column.numpy() for name, column in given.items()} for given in columns]
    return {"logged": [row for row in rows if row], "columns": columns}


def test_ratios_are_measured_over_the_completions_of_all_processes(tmp_path):
    from qarl_trl.loss import TrustBand
    from qarl_trl.metrics.ratios import ratio_metrics

    first, second = isolated_group(_measured, 2, save_model(tmp_path / "model"), str(tmp_path / "run"))
    assert first["logged"] == second["logged"]
    assert len(first["logged"]) == 4
    band, differ = TrustBand(0.03, 0.04, 0.07, 2.0), []
    for logged, mine, others in zip(first["logged"], first["columns"], second["columns"], strict=True):
        both = {name: torch.from_numpy(np.concatenate([mine[name], others[name]])).float() for name in mine}
        alone = {name: torch.from_numpy(mine[name]).float() for name in mine}
        assert logged == ratio_metrics(both, band, "")
        differ.append(ratio_metrics(alone, band, "")["ratio/kl_k3"] != logged["ratio/kl_k3"])
    assert differ == [False, True, False, True]  # control; before the first update of a rollout batch ratios are 1


def _resumed(
    model: str, folder: str, checkpoint: str | None, changes: dict[str, Any], fsdp: bool = True
) -> dict[str, Any]:
    trainer = _trainer(model, folder, fsdp, save_strategy="steps", save_steps=2, optim_muon=True, seed=1, **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return {name: p.numpy() for name, p in _whole(trainer).items()}


def test_uneven_shards_resume_bit_for_bit(tmp_path):
    """Three experts for two processes; without an engine, since none on a CPU runs low-bit experts."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    model = save_model(tmp_path / "model", layers=1, experts=3)
    changes = {"use_vllm": False, "max_completion_length": 8}
    straight, _ = isolated_group(_resumed, 2, model, str(tmp_path / "straight"), None, changes)
    half = tmp_path / "straight" / "checkpoint-2"
    again, _ = isolated_group(_resumed, 2, model, str(tmp_path / "again"), str(half), changes)
    assert _same(straight, again)
    experts = "model.layers.0.mlp.experts"
    stored = stored_tensors(half)[f"{experts}.2.down_proj.weight"].numpy()
    assert not (stored == straight[f"{experts}.down_proj"][2]).all()  # control
    alone = apply_quantization(AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32), "W4A16")
    low_bit = stored_tensors(half / "low_bit")
    assert all(torch.equal(low_bit[name], tensor) for name, tensor in iter_low_bit_weights(alone))


def test_ddp_resumes_bit_for_bit(tmp_path):
    """From within a rollout batch, of which each process has its own completions."""
    model = save_model(tmp_path / "model", layers=1)
    changes = {"use_vllm": False, "max_completion_length": 8, "steps_per_generation": 4}

    def run(name: str, checkpoint: Path | None) -> list[dict[str, Any]]:
        there = str(tmp_path / name), checkpoint and str(checkpoint), changes, False
        return isolated_group(_resumed, 2, model, *there)

    half = tmp_path / "straight" / "checkpoint-2"
    straight, again = run("straight", None), run("again", half)
    assert _same(straight[0], again[0]) and _same(straight[1], again[1])
    # The file that all have to see is gone; the lock's stays.
    assert [path.name for path in half.parent.iterdir() if path.name.startswith("_")] == ["_lock"]
    shutil.copy(half / "rollout_0.pt", half / "rollout_1.pt")  # control
    forge(half)
    assert not _same(straight[0], run("other", half)[0])


def _gathered(model: str, folder: str, quantized: bool) -> dict[str, Any]:
    """Master weights and losses of a run whose forward gathers quantized values, or weights; and how many master weights are such."""

    changes = {"use_vllm": False, "max_completion_length": 8, "optim_muon": True, "gradient_checkpointing": True}
    trainer = _trainer(model, folder, True, max_steps=2, seed=1, **changes)
    with patch("qarl_trl.quant.store.gather_quantized", lambda *_: None) if not quantized else nullcontext():
        trainer.train()
    rows = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
    return {
        "packed": _coded(trainer),
        "rows": rows,
        "master_weights": {name: p.numpy() for name, p in _whole(trainer).items()},
    }


def test_a_run_by_gathered_quantized_is_a_run_by_gathered_weights(tmp_path):
    model = save_model(tmp_path / "model", layers=1, experts=4)
    quantized, weights = (
        isolated_group(_gathered, 2, model, str(tmp_path / str(form)), form)[0] for form in (True, False)
    )
    assert (quantized["packed"], weights["packed"]) == (4 + 2, 0)
    assert quantized["rows"] == weights["rows"] and len(quantized["rows"]) == 2
    assert _same(quantized["master_weights"], weights["master_weights"])


def _apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest distance of two tensors of one name, relative to their size."""
    assert a.keys() == b.keys() and a
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in a)


def _on_nodes(model: str, folder: str, how: str, number: int) -> dict[str, Any]:
    """What four processes on `number` nodes train in an update of two micro-batches."""

    import accelerate

    shape = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": number, "PARALLELISM_CONFIG_DP_SHARD_SIZE": 4 // number}
    os.environ.update({name: str(size) for name, size in shape.items()})
    loader, twins = accelerate.accelerator.prepare_data_loader, {}
    if how == "twins":  # the second node reads the rows of the first
        twins = {"num_processes": 2, "process_index": int(os.environ["RANK"]) % 2, "torch_device_mesh": None}
    changes = {"use_vllm": False, "max_completion_length": 8, "optim_muon": True, "gradient_accumulation_steps": 2}
    rows = {"steps_per_generation": 4, "per_device_train_batch_size": 4}
    with patch.object(accelerate.accelerator, "prepare_data_loader", lambda *a, **k: loader(*a, **(k | twins))):
        trainer, gradients = make_trainer(model, Path(folder) / how, max_steps=1, seed=1, **changes, **rows), []
        backward = trainer.accelerator.backward

        def seen(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            parameters = trainer.model.named_parameters()
            gradients.append({n: p.grad.full_tensor().numpy() for n, p in parameters if p.grad is not None})

        trainer.accelerator.backward = seen
        trainer.train()
    trainer.save_model()
    return {
        "placements": {str(p.placements) for p in trainer.model.parameters()},
        "packed": _coded(trainer),
        "gradients": gradients[-1],
        "master_weights": {name: p.numpy() for name, p in _whole(trainer).items()},
    }


def _two_nodes(model: str, folder: str) -> dict[str, Any]:
    os.environ.update(FSDP2, ACCELERATE_USE_PARALLELISM_CONFIG="true")
    _shard_on_cpu()
    torch.set_num_threads(1)
    return {how: _on_nodes(model, folder, how, nodes) for how, nodes in {"two": 2, "flat": 1, "twins": 2}.items()}


def test_two_nodes_train_one_model(tmp_path):
    """HSDP, as recipes/accelerate/hsdp.yaml has it: two copies, each cut in two."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    model = save_model(tmp_path / "model", layers=1)
    ranks = isolated_group(_two_nodes, 4, model, str(tmp_path))
    two, flat, twins = (ranks[0][how] for how in ("two", "flat", "twins"))
    assert (two["placements"], flat["placements"]) == ({"(Replicate(), Shard(dim=0))"}, {"(Shard(dim=0),)"})
    assert two["packed"] == flat["packed"] == 7  # not gathered weights
    assert all(_same(two["master_weights"], other["two"]["master_weights"]) for other in ranks[1:])
    # Sums of bfloat16 (8 bits) in float32 (24) are nearly always exact in any order: 4e-10 measured, 12 of 623,488 entries.
    assert _apart(two["gradients"], flat["gradients"]) < 1e-8
    assert _apart(twins["gradients"], flat["gradients"]) > 0.1  # control
    alone = apply_quantization(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), "W4A16")
    stored, start = stored_tensors(tmp_path / "two"), dict(iter_low_bit_weights(alone))
    alone.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in two["master_weights"].items()})
    expected = dict(iter_low_bit_weights(alone))
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(start[name], tensor) for name, tensor in expected.items())  # control: it was trained


def _stopped(model: str, folder: str, how: str) -> str:
    from qarl_trl import _compat

    if how == "log-probs in bfloat16":
        with patch.object(_compat, "keep_float32", lambda accelerator: None):
            trainer = _trainer(model, folder, True)
    else:
        trainer = _trainer(model, folder, how == "incomplete sync")
        engine, stream = trainer.vllm_generation, trainer.vllm_generation._iter_named_params
        if trainer.accelerator.process_index == 1:
            wrong = "model.layers.1.mlp.down_proj.weight_packed"
            if how == "one engine":
                engine._iter_named_params = lambda: ((n, t.flip(0) if n == wrong else t) for n, t in stream())
            else:
                engine._iter_named_params = lambda: ((n, t) for n, t in stream() if n != wrong)
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("one engine", ("sync check prompt",) * 2),
        (  # without the word of the other, the first would wait in its next collective for ever
            "incomplete sync",
            (
                "The sync failed in process ",
                "kept old values for 1 tensors, first ['model.layers.1.mlp.down_proj",
            ),
        ),
        # The control of `keep_float32`: accelerate's own policy, as before.
        ("log-probs in bfloat16", ("log-probs must be float32, got torch.bfloat16",) * 2),
    ],
)
def test_what_is_broken_in_one_process_stops_every_process(tmp_path, how, words):
    model = save_model(tmp_path / "model")
    messages = isolated_group(_stopped, 2, model, str(tmp_path / "run"), how, timeout=300)
    assert all(word in message for word, message in zip(words, messages, strict=True)), messages
