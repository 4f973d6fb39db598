"""
DeepSpeed ZeRO-3 in two processes on a CPU, over gloo, as `accelerate launch` sets it up. Two things are bent: accelerate names no
backend where there is no GPU, and the Trainer takes bfloat16 without `use_cpu` on GPUs only.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tools.plan.test_formulas import peak_bytes
from transformers import TrainerCallback

from qarl_trl.quant.names import base_model
from qarl_trl.tools.plan import model as meta
from slow.isolated import isolated, isolated_group
from slow.test_processes import FLOOR, _same
from slow.toys import make_trainer, random_adapter, save_model, stored_tensors, sync


pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.deepspeed]
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: dev/memory.md says how to get it for a CPU", allow_module_level=True)

# What recipes/accelerate/zero3.yaml says, and that small parameters are partitioned as the large ones of a real model are.
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


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What DeepSpeed compiles at its first start. A process that is killed meanwhile leaves a lock, at which all later ones wait."""
    isolated(_compile)


def _compile() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder("ShareMemCommBuilder").load()


def _trainer(model: str, folder: str, zero3: bool, bf16: bool, **changes: Any) -> Any:
    from transformers import training_args

    torch.set_num_threads(1)
    more: dict[str, Any] = {"bf16": bf16, "optim_muon": False, "max_grad_norm": 1e9}
    if zero3:
        file = Path(f"{folder}_{os.environ['RANK']}.json")
        file.write_text(json.dumps(SETTINGS))
        os.environ.update(
            ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_ZERO3_INIT="true", DS_ACCELERATOR="cpu"
        )
        os.environ.update(
            ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file), ACCELERATE_MIXED_PRECISION="bf16" if bf16 else "no"
        )
        training_args.is_torch_bf16_gpu_available = lambda: True
        more |= {"use_cpu": False, "ddp_backend": "gloo"}
    trainer = make_trainer(model, Path(folder), **more | changes)
    kind = "DEEPSPEED" if zero3 else "MULTI_CPU"
    assert (trainer.accelerator.distributed_type, trainer.accelerator.num_processes) == (kind, 2)
    return trainer


def _parameters(trainer: Any) -> dict[str, Any]:
    parameters = {}
    for name, param in trainer._unwrapped.named_parameters():
        with trainer._dist.gather_params([param]):
            parameters[name] = param.data.clone().numpy()
    return parameters


def _master_weights(trainer: Any) -> dict[str, Any]:
    """What the optimizer steps, in float32, also where the parameters are its bfloat16 copies."""
    if trainer._dist.is_zero3:
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            n: safe_get_full_fp32_param(p).numpy() for n, p in trainer._unwrapped.named_parameters() if p.requires_grad
        }
    trained = {name for name, p in trainer._unwrapped.named_parameters() if p.requires_grad}
    return {name: p for name, p in _parameters(trainer).items() if name in trained}


def _stream(trainer: Any) -> dict[str, Any]:
    return _bytes(trainer.low_bit_store.tensors(trainer._dist.gather_params))


def _bytes(tensors: Any) -> dict[str, Any]:
    return {name: t.clone().reshape(-1).view(torch.uint8).numpy() for name, t in tensors}


def _count_calls(trainer: Any) -> list[int]:
    """How often each update of a run that starts now calls the quantizer."""
    from qarl_trl.quant import linear

    calls: list[int] = [0]
    original = linear.quantize_weight

    def counted(*args: Any) -> Any:
        calls[-1] += 1
        return original(*args)

    linear.quantize_weight = counted

    class EndOfStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            calls.append(0)

    trainer.add_callback(EndOfStep())
    return calls


class _NaN(TrainerCallback):
    """In the last update the second process has a gradient of NaN; `found` is what there was before."""

    def __init__(self, trainer: Any, found: dict[str, Any]) -> None:
        self.trainer, self.found = trainer, found

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step < 3:
            return
        self.found.update(master_weights=_master_weights(self.trainer), after=_stream(self.trainer))
        if args.process_index == 1:
            norm = base_model(self.trainer._unwrapped).model.norm
            norm.register_full_backward_hook(lambda module, grads, _: (grads[0] * math.nan,))


def _train(
    model: str, folder: str, zero3: bool, lora: bool, changes: dict[str, Any], pieces: bool = False
) -> dict[str, Any]:
    if lora:  # without checkpointing, nothing but `_compat.fit_to_zero3` makes the first layer's input need a gradient
        changes = changes | {"peft_config": random_adapter(), "gradient_checkpointing": False}
    if pieces:
        import deepspeed

        deepspeed.utils.set_z3_leaf_modules = lambda *_, **__: None
    trainer = _trainer(model, folder, zero3, False, **changes)
    generator = torch.Generator().manual_seed(7)
    for name, p in trainer._unwrapped.named_parameters():
        if "lora_" in name:  # loading the model under ZeRO-3 takes other random numbers
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.02)
    found = {"synced": _stream(trainer), "start": _parameters(trainer)}
    calls = _count_calls(trainer)
    trainer.add_callback(_NaN(trainer, found))
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return found | {
        "calls": calls[:-1],
        "error": str(error.value),
        "master weights after NaN": _master_weights(trainer),
    }


@pytest.mark.parametrize("kind", ["dense", "lora", "experts"])
def test_zero3_syncs_and_trains_as_ddp(tmp_path, kind):
    """In float32: the same bits, as long as no gradient is clipped or accumulated."""
    model = save_model(tmp_path / "model", experts=4 if kind == "experts" else 0)
    changes = {"use_vllm": False, "max_completion_length": 8, "learner_ops": "stock"}
    runs = []
    for zero3, pieces in [(False, False), (True, False), (True, True)][: 3 if kind == "dense" else 2]:
        settings = str(tmp_path / f"{zero3}{pieces}"), zero3, kind == "lora", changes, pieces
        first, second = isolated_group(_train, 2, model, *settings, timeout=100)
        assert _same(first["master_weights"], second["master_weights"])
        assert _same(first["synced"], second["synced"])
        for found in (first, second):  # DeepSpeed steps within the backward, before the Trainer asks for the norm
            assert "a step would turn the weights into NaN" in found["error"]
            assert _same(found["master weights after NaN"], first["master_weights"])
        runs.append(first)
    ddp, zero3, *in_pieces = runs
    assert _same(ddp["synced"], zero3["synced"])
    assert _same(ddp["master_weights"], zero3["master_weights"])
    assert _same(ddp["after"], zero3["after"])
    assert not _same(ddp["synced"], zero3["after"])
    if kind != "lora":
        assert _same(zero3["after"], _synced(model, zero3["master_weights"]))
    assert zero3["calls"] == ddp["calls"]
    for control in in_pieces:  # with DeepSpeed's hooks around each module
        apart, moved = (_distance(ddp["master_weights"], run) for run in (control["master_weights"], ddp["start"]))
        assert 0 < apart < 3e-4 * moved


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return sum(float(((a[name] - b[name]) ** 2).sum()) for name in a) ** 0.5


def _watch_gradients() -> list[bool]:
    """Of each step that is taken now: whether bfloat16 holds the gradients of this process."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    found, step = [], DeepSpeedZeroOptimizer_Stage3.step

    def watched(self: Any, *args: Any) -> None:
        gradients = [g.float() for group in self.averaged_gradients.values() for g in group]
        found.append(len(gradients) > 0 and all(torch.equal(g.bfloat16().float(), g) for g in gradients))
        step(self, *args)

    DeepSpeedZeroOptimizer_Stage3.step = watched
    return found


def _with_engine(model: str, folder: str, key: bool, verify: str, changes: dict[str, Any]) -> dict[str, Any]:
    from qarl_trl.quant import cache

    if not key:  # DeepSpeed's own way, of which the run asks for another
        SETTINGS.update(communication_data_type="bf16", data_types={"grad_accum_dtype": "bf16"})
    rounded = _watch_gradients()
    trainer = _trainer(model, folder, True, True, verify_sync=verify, **changes)
    calls = _count_calls(trainer)
    with patch.object(cache, "is_partitioned", cache.is_partitioned if key else lambda _: False):
        trainer.train()
    trainer.save_model()
    rows = trainer.state.log_history
    return {
        "calls": calls[:-1],
        "rounded": rounded,
        "sent": _bytes(sync(trainer.vllm_generation).items()),
        "master_weights": _master_weights(trainer),
        "logp_diffs": [row["mismatch/logp_diff_mean"] for row in rows if "mismatch/logp_diff_mean" in row],
        "ratios": [(row["ratio/min"], row["ratio/max"]) for row in rows if "ratio/min" in row],
    }


@pytest.mark.parametrize("kind", ["dense", "lora"])
def test_engines_get_what_one_process_makes_of_the_master_weights(tmp_path, kind):
    """In bfloat16, where ZeRO-3 hands the layers a copy of the float32 master weights."""
    changes = {"peft_config": random_adapter()} if kind == "lora" else {}
    model = save_model(tmp_path / "model")
    run = model, str(tmp_path / "run"), True, "first", changes
    first, second = isolated_group(_with_engine, 2, *run, timeout=120)
    assert _same(first["sent"], second["sent"])
    stored = tmp_path / "run" / ("low_bit" if kind == "lora" else "")
    assert _same(first["sent"], _bytes(stored_tensors(stored).items()))
    assert _same(first["sent"], _synced(model, first["master_weights"], **changes))
    moved = {n: p * 1.01 for n, p in first["master_weights"].items()}
    assert not _same(first["sent"], _synced(model, moved, **changes))
    assert len(first["logp_diffs"]) == 2 and max(first["logp_diffs"]) < FLOOR
    assert first["ratios"][0] == (1, 1) != first["ratios"][1]
    assert first["calls"] == {"dense": [14] * 4, "lora": [14, 10] * 2}[kind]
    assert first["rounded"] == [False] * 4  # reduced in float32


def test_the_address_of_a_gathered_parameter_is_no_key_and_bfloat16_rounds_gradients(tmp_path):
    model = save_model(tmp_path / "model")
    first, _ = isolated_group(_with_engine, 2, model, str(tmp_path / "run"), False, "off", {}, timeout=120)
    assert min(first["calls"]) > 14
    assert first["rounded"] == [True] * 4


def _synced(model: str, master_weights: dict[str, Any], peft_config: Any = None) -> dict[str, Any]:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole = whole if peft_config is None else get_peft_model(whole, peft_config)
    assert master_weights.keys() == {name for name, p in whole.named_parameters() if p.requires_grad}
    whole.load_state_dict(
        {name: torch.from_numpy(p) for name, p in master_weights.items()}, strict=peft_config is None
    )
    return _bytes(iter_low_bit_weights(apply_quantization(whole, "W4A16")))


def _resumed(model: str, folder: str, checkpoint: str | None, adapter: Any) -> dict[str, Any]:
    changes = {"use_vllm": False, "max_completion_length": 8, "save_strategy": "steps", "save_steps": 2}
    trainer = _trainer(model, folder, True, True, **changes, peft_config=adapter)
    trainer.train(checkpoint)
    found = {"steps": trainer.state.global_step, "master_weights": _master_weights(trainer), "after": _stream(trainer)}
    if checkpoint is None:
        with pytest.raises(RuntimeError, match="trains once"):  # without: no attribute 'backward'
            trainer.train()
    return found


@pytest.mark.parametrize("kind", ["lora", "experts"])
def test_a_resumed_run_ends_in_the_same_master_weights(tmp_path, kind):
    model = save_model(tmp_path / "model", experts=4 if kind == "experts" else 0)
    folder, adapter = str(tmp_path / "run"), random_adapter() if kind == "lora" else None
    whole = isolated_group(_resumed, 2, model, folder, None, adapter, timeout=120)
    again = str(tmp_path / "again"), f"{folder}/checkpoint-2", adapter
    for one, other in zip(whole, isolated_group(_resumed, 2, model, *again, timeout=120), strict=True):
        assert one["steps"] == other["steps"] == 4
        assert _same(one["master_weights"], other["master_weights"])
        assert _same(one["after"], other["after"])
        assert not _same(one["after"], _bytes(stored_tensors(f"{folder}/checkpoint-2/low_bit").items()))  # control


def _storages() -> dict[int, int]:
    """Bytes of all tensors of this process, by the address of what holds them."""
    gc.collect()
    tensors = (t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.device.type == "cpu")
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _held(model: str, folder: str, adapter: Any) -> tuple[dict[str, int], dict[str, int]]:
    """After two updates: bytes that stay, by item and together; and those of the second step."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    before, step, steps = _storages(), DeepSpeedZeroOptimizer_Stage3.step, []
    DeepSpeedZeroOptimizer_Stage3.step = lambda self, *args: steps.append(peak_bytes(lambda: step(self, *args)))
    changes = {"use_vllm": False, "max_completion_length": 8, "max_steps": 2, "peft_config": adapter}
    trainer = _trainer(model, folder, True, True, **changes)
    trainer.train()
    held = trainer.deepspeed.optimizer
    state = [t for of_piece in held.optimizer.state.values() for t in of_piece.values() if isinstance(t, torch.Tensor)]
    weights = trainer.low_bit_store.kept().values()
    items = {
        "master weights": sum(t.nbytes for t in held.fp32_partitioned_groups_flat),
        "optimizer state": sum(t.nbytes for t in state),
        "weights to gather": sum(p.ds_tensor.nbytes for p in trainer._unwrapped.parameters()),
        "gradients": held.grad_partitions_flat_buffer.nbytes,
        "quantized values": sum(sum(t.nbytes for t in w.tensors.values()) for w in weights),
    }
    together = sum(size for place, size in _storages().items() if place not in before)
    bucket = sum(bucket.buffer.nbytes for bucket in held.ipg_buckets.values())
    return items, {"together": together, "bucket": bucket, "step": steps[-1]}


@pytest.mark.parametrize("kind", ["lora", "experts"])
def test_bytes_of_a_rank_are_those_of_the_documentation(tmp_path, kind):
    """The table of dev/memory.md, within 0.1 %. Nothing else of that size stays."""
    model = save_model(tmp_path / "model", experts=4 if kind == "experts" else 0)
    config, adapter = meta.read_config(model), random_adapter() if kind == "lora" else None
    parameters = meta.parameters(meta.skeleton(config, torch.float32, adapter, plan="W4A16"), "adamw_torch")
    trained = sum(math.ceil(p.entries / 2) for p in parameters if p.optimizer)
    expected = {
        "master weights": 4 * trained,
        "optimizer state": 8 * trained,
        "weights to gather": 2 * sum(math.ceil(p.entries / 2) for p in parameters),
        "gradients": 4 * trained,
        "quantized values": sum(p.quantized for p in parameters),
    }
    for items, rest in isolated_group(_held, 2, model, str(tmp_path / "run"), adapter, timeout=120):
        assert items == {name: pytest.approx(size, rel=1e-3) for name, size in expected.items()}
        assert rest["together"] - rest["bucket"] == pytest.approx(sum(expected.values()), rel=0.01)
        assert rest["step"] == pytest.approx(4 * trained, rel=0.01)
