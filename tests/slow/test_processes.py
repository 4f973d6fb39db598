"""Two processes on a CPU, each with an engine of its own or half of one, under DDP and FSDP2 (see `processes`)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.numpy import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from slow.isolated import isolated_group
from slow.processes import (
    FLOOR,
    FSDP2,
    as_arrays,
    as_bytes,
    as_tensors,
    count_packed,
    same,
    shard_on_cpu,
    trainer_of_two,
    whole_arrays,
    whole_weights,
)
from slow.toys import (
    forge,
    logged,
    make_tokenizer,
    prompts,
    random_adapter,
    save_model,
    settings,
    stored_tensors,
    sync,
)


pytestmark = [pytest.mark.slow, pytest.mark.alone]


# One model and its engines -------------------------------------------------------------------------------------------


def _train(model: str, folder: str, fsdp: bool, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of_two(model, folder, fsdp, **changes)
    before = whole_weights(trainer)
    trainer.train()
    trainer.save_model()
    sent = sync(trainer.vllm_generation)

    after = whole_weights(trainer)
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    return {
        "logp_diffs": logged(trainer, "mismatch/logp_diff_mean"),
        "ratios": list(zip(logged(trainer, "ratio/min"), logged(trainer, "ratio/max"), strict=True)),
        "moved": len(moved),
        "packed": count_packed(trainer),
        "master_weights": as_arrays(after),
        "sent": as_bytes(sent.items()),
    }


@pytest.mark.parametrize(
    ("fsdp", "engines", "most", "kernel"),
    [
        # Bit for bit, but for the two formulas of a log-softmax.
        (False, 2, 1e-6, "engine"),
        # As on a GPU: FSDP2 gathers quantized values, also for the sync check.
        (True, 2, FLOOR, "dequant"),
        # Half a matrix product in each process, rounded before the halves are added. FSDP2 casts what a block is given
        # to bfloat16, and the engine's residual sums are float32.
        (True, 1, FLOOR, "engine"),
    ],
)
def test_processes_train_one_model_and_every_engine_gets_it(tmp_path, fsdp, engines, most, kernel):
    changes = {"vllm_tensor_parallel_size": 2 // engines, "seed": 1, "quant_kernel": kernel}
    if kernel == "dequant":
        # Learner and engine round at different places anyway. FSDP2 gathers no quantized values for the engine's gemm,
        # which keeps its own form of them.
        changes["learner_ops"] = "stock"

    first, second = isolated_group(_train, 2, save_model(tmp_path / "model"), str(tmp_path / "run"), fsdp, changes)

    assert same(first["master_weights"], second["master_weights"])
    assert same(first["sent"], second["sent"])
    assert same(first["sent"], as_bytes(stored_tensors(tmp_path / "run").items()))
    assert first["moved"] == len(first["master_weights"])
    # 7 layers in each of 2 blocks.
    assert first["packed"] == (14 if kernel == "dequant" else 0)
    # Two rollout batches of two updates: ratios are 1 in the first update, and the learner has moved in the second.
    for process in (first, second):
        assert len(process["logp_diffs"]) == 2
        assert max(process["logp_diffs"]) < most
        assert process["ratios"][0] == (1, 1)
        assert process["ratios"][1] != (1, 1)


def _load_reference(model: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Entries that transformers loads in this process, bytes of its policy before FSDP2 cuts it, and the reference."""
    from transformers import core_model_loading

    loaded = []
    materialize = core_model_loading._materialize_copy

    def counted(tensor: Any, *args: Any) -> torch.Tensor:
        result = materialize(tensor, *args)
        # What a file holds takes no memory, so it is no tensor yet.
        was_in_memory = isinstance(tensor, torch.Tensor) and not tensor.is_meta
        if was_in_memory or not result.is_meta:
            loaded.append(result.numel())
        return result

    core_model_loading._materialize_copy = counted
    trainer = trainer_of_two(model, folder, True, use_vllm=False, beta=0.1, **changes)

    # By address, since tied parameters share their memory.
    sizes = {}
    for parameter in trainer.model.parameters():
        storage = parameter.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()

    reference = {}
    for name, shard in trainer.ref_model.named_parameters():
        reference[name] = shard.full_tensor().detach()
    return {"loaded": sum(loaded), "bytes": sum(sizes.values()), "reference": as_arrays(reference)}


@pytest.mark.parametrize("quantized", [False, True])
def test_one_process_of_a_machine_loads_the_weights_until_they_are_cut_and_the_reference_has_them_all(
    tmp_path, quantized
):
    """
    Eight processes would take 262 GB of host memory for 8B parameters. transformers loads all weights in each, TRL
    leaves half of the reference at zero, and a quantized checkpoint is decompressed before either.
    """
    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.start import load_master_weights

    model = save_model(tmp_path / "model")
    weights = stored_tensors(model)
    changes = {}
    if quantized:
        low_bit = apply_quantization(AutoModelForCausalLM.from_pretrained(model), "W4A16")
        model = str(tmp_path / "low_bit")
        save_low_bit(low_bit, make_tokenizer(), model)
        weights = load_master_weights(model).state_dict()
        changes = {"quant_scheme": "checkpoint"}

    first, second = isolated_group(_load_reference, 2, model, str(tmp_path / "run"), changes)

    # Policy and reference.
    assert first["loaded"] == 2 * sum(weight.numel() for weight in weights.values())
    assert second["loaded"] == 0
    assert first["bytes"] > 1_000_000
    assert second["bytes"] < first["bytes"] / 1000
    assert same(first["reference"], as_arrays(weights))


def _reward_model_of(model: str, folder: str, reward_model: str) -> dict[str, np.ndarray]:
    """The weights with which this process scores completions."""
    from qarl_trl import QaRLConfig, QaRLTrainer

    torch.set_num_threads(1)
    os.environ.update(FSDP2)
    shard_on_cpu()
    args = QaRLConfig(**settings(Path(folder), use_vllm=False, vllm_engine_kwargs=None, vllm_max_model_length=None))

    trainer = QaRLTrainer(model, reward_model, args, train_dataset=prompts(64))

    (scorer,) = trainer.reward_funcs
    return as_arrays(scorer.state_dict())


def test_a_reward_model_is_whole_in_every_process(tmp_path):
    """transformers loads it in the first one alone, to save memory, and it would give all others a reward of 0."""
    model = save_model(tmp_path / "model")
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    scorer.save_pretrained(tmp_path / "scorer")
    make_tokenizer().save_pretrained(tmp_path / "scorer")

    first, second = isolated_group(_reward_model_of, 2, model, str(tmp_path / "run"), str(tmp_path / "scorer"))

    assert all(np.abs(weights).sum() > 0 for weights in second.values())
    assert same(first, second)
    assert same(first, as_arrays(scorer.state_dict()))


# Metrics -------------------------------------------------------------------------------------------------------------


def _train_and_measure(model: str, folder: str) -> dict[str, Any]:
    """What was logged of the ratios, and this process's completions of each micro-batch."""
    from qarl_trl.metrics import ratios

    micro_batches = []
    completion_columns = ratios.completion_columns

    def recorded(*args: Any) -> dict[str, torch.Tensor]:
        columns = completion_columns(*args)
        micro_batches.append(as_arrays(columns))
        return columns

    ratios.completion_columns = recorded
    trainer = trainer_of_two(model, folder, False, use_vllm=False, max_completion_length=8, learning_rate=3e-2)
    trainer.train()

    rows = []
    for row in trainer.state.log_history:
        of_ratios = {}
        for name, value in row.items():
            if name.startswith(("ratio/", "error_tokens/")):
                of_ratios[name] = value
        # The last row has the times of the run alone.
        if of_ratios:
            rows.append(of_ratios)
    return {"logged": rows, "columns": micro_batches}


def test_ratios_are_measured_over_the_completions_of_all_processes(tmp_path):
    from qarl_trl.loss import TrustBand
    from qarl_trl.metrics.ratios import ratio_metrics

    band = TrustBand(0.03, 0.04, 0.07, 2.0)
    first, second = isolated_group(_train_and_measure, 2, save_model(tmp_path / "model"), str(tmp_path / "run"))

    assert first["logged"] == second["logged"]
    assert len(first["logged"]) == 4
    differs_alone = []
    for row, of_first, of_second in zip(first["logged"], first["columns"], second["columns"], strict=True):
        of_both = {}
        for name, column in of_first.items():
            of_both[name] = np.concatenate([column, of_second[name]])
        assert row == ratio_metrics(_as_float32(of_both), band, "")

        alone = ratio_metrics(_as_float32(of_first), band, "")
        differs_alone.append(alone["ratio/kl_k3"] != row["ratio/kl_k3"])
    # Control. Before the first update of a rollout batch all ratios are 1.
    assert differs_alone == [False, True, False, True]


def _as_float32(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in as_tensors(arrays).items()}


# Resuming ------------------------------------------------------------------------------------------------------------


def _resume(
    model: str, folder: str, checkpoint: str | None, changes: dict[str, Any], fsdp: bool = True
) -> dict[str, np.ndarray]:
    """The master weights of a run from its start or from a checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of_two(model, folder, fsdp, optim_muon=True, seed=1, **saving, **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return whole_arrays(trainer)


def test_uneven_shards_resume_bit_for_bit(tmp_path):
    """Three experts for two processes; without an engine, since none on a CPU runs low-bit experts."""
    from qarl_trl.quant import iter_low_bit_weights

    model = save_model(tmp_path / "model", layers=1, experts=3)
    changes = {"use_vllm": False, "max_completion_length": 8}

    straight, _ = isolated_group(_resume, 2, model, str(tmp_path / "straight"), None, changes)
    half = tmp_path / "straight" / "checkpoint-2"
    again, _ = isolated_group(_resume, 2, model, str(tmp_path / "again"), str(half), changes)

    assert same(straight, again)
    experts = "model.layers.0.mlp.experts"
    stored = stored_tensors(half)[f"{experts}.2.down_proj.weight"].numpy()
    # Control: it was trained after the checkpoint.
    assert not (stored == straight[f"{experts}.down_proj"][2]).all()
    # Those of three experts, cut between two processes, come together in the low-bit file.
    low_bit = stored_tensors(half / "low_bit")
    for name, tensor in iter_low_bit_weights(_quantized(half)):
        assert torch.equal(low_bit[name], tensor)


def _train_again(model: str, folder: str) -> dict[str, Any]:
    """A run, and further ones from its checkpoint by the same trainer, the last of which fails."""
    settings = {"use_vllm": False, "max_completion_length": 4, "save_strategy": "steps", "save_steps": 2}
    settings |= {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "export_low_bit": False}
    # Of half of its matrices the second process has no rows.
    adapter = LoraConfig(r=1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = trainer_of_two(model, folder, True, seed=1, peft_config=adapter, weight_decay=0.1, **settings)
    trainer.train()
    trained = whole_arrays(trainer)
    checkpoint = str(Path(folder) / "checkpoint-2")

    trainer.train(resume_from_checkpoint=checkpoint)
    again = whole_arrays(trainer)

    trainer.args.weight_decay = 0.5
    trainer.train(resume_from_checkpoint=checkpoint)
    decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]

    class FailsWithinAnUpdate(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("as if out of memory")

    trainer.add_callback(FailsWithinAnUpdate)
    with pytest.raises(RuntimeError, match="as if out of memory"):
        trainer.train(resume_from_checkpoint=checkpoint)
    with pytest.raises(RuntimeError, match="Resume in a new trainer"):
        trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "trained": trained,
        "again": again,
        "decays": decays,
        "parameters": len({id(one) for group in trainer.optimizer.param_groups for one in group["params"]}),
    }


def test_one_trainer_resumes_several_times_bit_for_bit(tmp_path):
    """What the trainer has of an optimizer is not that of the checkpoint."""
    model = save_model(tmp_path / "model", layers=1)

    for process in isolated_group(_train_again, 2, model, str(tmp_path / "run")):
        assert same(process["trained"], process["again"])
        assert process["decays"] == [0.5, 0.0]
        # accelerate alone takes the matrices without rows for one.
        assert process["parameters"] == 4


def _evaluate(model: str, folder: str) -> dict[str, Any]:
    """A run that evaluates with other weights before it saves, and a second one by the same trainer."""
    settings = {"use_vllm": False, "max_completion_length": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of_two(model, folder, True, optim_muon=True, seed=1, max_steps=2, **settings)
    parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters
    evaluated: list[bool] = []

    class EvaluateHalved(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                for _, parameter in parameters():
                    parameter.mul_(0.5)
                trainer.evaluate(trainer.train_dataset.select(range(2)))
                # Exact, as the halving was.
                for _, parameter in parameters():
                    parameter.mul_(2)
            evaluated.append(all(isinstance(parameter, DTensor) for _, parameter in parameters()))

    trainer.add_callback(EvaluateHalved())
    with pytest.raises(ValueError, match=r"Call train\(\) first, or set eval_on_start"):
        trainer.evaluate(trainer.train_dataset.select(range(2)))

    trainer.train()
    trained = whole_weights(trainer)

    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    trainer.save_model()
    again = whole_weights(trainer)
    return {
        "evaluated": evaluated,
        "trained": as_arrays(trained),
        "unchanged": [name for name in trained if torch.equal(trained[name], again[name])],
    }


def test_an_evaluation_leaves_the_shards_in_place(tmp_path):
    """
    FSDP2 keeps the last norm and the output layer whole after a forward without a backward. Then no checkpoint could
    be resumed, a new optimizer trained them no more, and writes to the shards did not count.
    """
    model = save_model(tmp_path / "model", layers=1)

    first, _ = isolated_group(_evaluate, 2, model, str(tmp_path / "run"))

    assert first["evaluated"] == [True] * 4
    assert first["unchanged"] == []
    # Under FSDP2 the class of the model is another.
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["architectures"] == json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
    # A checkpoint after an evaluation has the digest of the optimizer's own parameters.
    checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"))
    changes = {"use_vllm": False, "max_completion_length": 4, "max_steps": 4}
    isolated_group(_resume, 2, model, str(tmp_path / "again"), str(checkpoints[0]), changes)


def _quantized(path: str | Path) -> Any:
    """The model at `path`, in one process, in W4A16."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization

    return apply_quantization(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), "W4A16")


def test_ddp_resumes_bit_for_bit(tmp_path):
    """From within a rollout batch, of which each process has its own completions."""
    model = save_model(tmp_path / "model", layers=1)
    changes = {"use_vllm": False, "max_completion_length": 8, "steps_per_generation": 4}
    half = tmp_path / "straight" / "checkpoint-2"

    def run(name: str, checkpoint: str | None) -> list[dict[str, Any]]:
        return isolated_group(_resume, 2, model, str(tmp_path / name), checkpoint, changes, False)

    straight = run("straight", None)
    again = run("again", str(half))

    assert same(straight[0], again[0])
    assert same(straight[1], again[1])
    # The file that all have to see is gone; the lock's stays.
    assert [path.name for path in half.parent.glob("_*")] == ["_lock"]

    # Control: the second process gets the completions of the first.
    shutil.copy(half / "rollout_0.pt", half / "rollout_1.pt")
    forge(half)
    other, _ = run("other", str(half))
    assert not same(straight[0], other)


def _save_adapter(model: str, folder: str, lora_base: str) -> dict[str, np.ndarray]:
    """The trained adapter of a run whose checkpoints are shards, which accelerate chooses where nothing is set."""
    FSDP2["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    changes = {"use_vllm": False, "max_completion_length": 8, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of_two(
        model, folder, True, peft_config=random_adapter(), lora_base=lora_base, max_steps=2, **changes
    )
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model()

    trained = {}
    for name, weight in whole_weights(trainer).items():
        if "lora_" in name:
            trained[name.replace(".default", "")] = weight.numpy()
    return trained


def _train_a_norm(model: str, folder: str) -> str:
    """What a run says of a norm that a script makes trainable beside the adapter."""
    trainer = trainer_of_two(model, folder, True, peft_config=random_adapter(), use_vllm=False)
    trainer.model.get_parameter("base_model.model.model.norm.weight").requires_grad = True

    with pytest.raises(ValueError) as error:
        trainer.train()
    return str(error.value)


def test_a_norm_beside_a_sharded_adapter_is_refused(tmp_path):
    """No file of the adapter has it. Its shards have no addresses by which to look for it there."""
    model = save_model(tmp_path / "model", layers=1)

    messages = isolated_group(_train_a_norm, 2, model, str(tmp_path / "run"))

    for message in messages:
        assert "trains 1 parameters beside its adapter, first 'base_model.model.model.norm.weight'" in message


@pytest.mark.parametrize("lora_base", ["merged", "frozen"])
def test_an_adapter_is_saved_beside_sharded_checkpoints(tmp_path, lora_base):
    """The Trainer would write it nowhere."""
    model = save_model(tmp_path / "model", layers=1)
    run = tmp_path / "run"

    trained, _ = isolated_group(_save_adapter, 2, model, str(run), lora_base)

    assert any((run / "checkpoint-2").glob("pytorch_model_fsdp_0/*.distcp"))  # control
    for folder in (run, run / "checkpoint-2"):
        assert same(load_file(folder / "adapter_model.safetensors"), trained), folder

    # A run resumes from the shards.
    shutil.rmtree(run / "checkpoint-2")
    again, _ = isolated_group(_save_adapter, 2, model, str(run), lora_base)
    assert same(again, trained)


# Quantized values instead of weights ---------------------------------------------------------------------------------


def _compare_with_noise(model: str, folder: str) -> list[float]:
    """How far the log-probs of a loss are from those with a matrix negated for one forward, in each micro-batch."""
    updates = {"max_steps": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    trainer = trainer_of_two(model, folder, True, use_vllm=False, max_completion_length=8, **updates)
    compute_loss = trainer._compute_loss
    distances = []

    def compare(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        arguments = (model, ids, mask, inputs["completion_ids"].shape[1])

        shard = trainer.model.model.layers[0].mlp.down_proj.weight.to_local()
        shard.data.mul_(-1)
        noisy, _, _ = trainer._get_per_token_logps_and_entropies(*arguments)
        shard.data.mul_(-1)
        loss = compute_loss(model, inputs)
        with torch.no_grad():
            policy, _, _ = trainer._get_per_token_logps_and_entropies(*arguments)
        distances.append((noisy - policy)[inputs["completion_mask"].bool()].abs().max().item())
        return loss

    trainer._compute_loss = compare
    trainer.train()
    return distances


def test_a_loss_with_other_weights_in_its_shards_shares_no_pass(tmp_path):
    """Of the pass that its micro-batches would share, the distances would be 0."""
    model = save_model(tmp_path / "model", layers=1)

    for distances in isolated_group(_compare_with_noise, 2, model, str(tmp_path / "run")):
        assert len(distances) == 4
        assert min(distances) > 1e-2


def _train_sharded(model: str, folder: str, gather_quantized: bool) -> dict[str, Any]:
    """A run whose forward gathers quantized values, or whole weights."""
    changes = {"use_vllm": False, "max_completion_length": 8, "optim_muon": True, "gradient_checkpointing": True}
    trainer = trainer_of_two(model, folder, True, max_steps=2, seed=1, **changes)
    # Then FSDP2 gathers what it gathers of any model.
    whole_weights_instead = patch("qarl_trl.quant.store.make_master_shards", lambda *_: None)
    with nullcontext() if gather_quantized else whole_weights_instead:
        trainer.train()

    return {
        "packed": count_packed(trainer),
        "rows": list(zip(logged(trainer, "loss"), logged(trainer, "grad_norm"), strict=True)),
        "master_weights": whole_arrays(trainer),
    }


def test_a_run_by_gathered_quantized_is_a_run_by_gathered_weights(tmp_path):
    model = save_model(tmp_path / "model", layers=1, experts=4)

    quantized, _ = isolated_group(_train_sharded, 2, model, str(tmp_path / "quantized"), True)
    weights, _ = isolated_group(_train_sharded, 2, model, str(tmp_path / "weights"), False)

    # Four layers of attention, and the two stacks of the experts.
    assert (quantized["packed"], weights["packed"]) == (4 + 2, 0)
    assert quantized["rows"] == weights["rows"]
    assert len(quantized["rows"]) == 2
    assert same(quantized["master_weights"], weights["master_weights"])


# Faults --------------------------------------------------------------------------------------------------------------

BROKEN = "model.layers.1.mlp.down_proj.weight_packed"


def _train_broken(model: str, folder: str, how: str) -> str:
    """What a process says whose run is broken, in itself or in the other."""
    from qarl_trl.trainers import shards

    if how == "log-probs in bfloat16":
        with patch.object(shards, "keep_float32", lambda accelerator: None):
            trainer = trainer_of_two(model, folder, True)
    else:
        trainer = trainer_of_two(model, folder, how == "incomplete sync")
        if trainer.accelerator.process_index == 1:
            _break_stream(trainer.vllm_generation, _drop if how == "incomplete sync" else _flip)

    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return str(error.value)


Stream = Iterator[tuple[str, torch.Tensor]]


def _break_stream(engine: Any, change: Callable[[Stream], Stream]) -> None:
    stream = engine._iter_named_params
    engine._iter_named_params = lambda: change(stream())


def _flip(stream: Stream) -> Stream:
    for name, tensor in stream:
        yield name, tensor.flip(0) if name == BROKEN else tensor


def _drop(stream: Stream) -> Stream:
    for name, tensor in stream:
        if name != BROKEN:
            yield name, tensor


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

    messages = isolated_group(_train_broken, 2, model, str(tmp_path / "run"), how, timeout=300)

    first, second = messages
    words_of_first, words_of_second = words
    assert words_of_first in first, messages
    assert words_of_second in second, messages
