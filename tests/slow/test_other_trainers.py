"""RLOO and distillation beside a real engine, and TRL's trainers under FSDP2: one producer, three readers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quant.schemes import same_tensors
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from slow.isolated import isolated, isolated_group
from slow.processes import FSDP2, as_arrays, as_bytes, as_tensors, same, shard_on_cpu, whole, whole_arrays
from slow.test_invariants import _agree, _changed_layers, _layers_of, _record_forward, _sync_another_and_back
from slow.toys import (
    CHARACTERS,
    copies,
    distinct_characters,
    engine_logprobs,
    fresh_engine_logprobs,
    logged,
    prompts,
    random_adapter,
    randomize_adapter,
    save_model,
    settings,
    stored_tensors,
    sync,
    trained_parameters,
)


pytestmark = pytest.mark.slow
# Of `slow.toys.settings`, what only GRPO and TBPO have.
OF_GRPO = ("tbpo_epsilon_high", "tbpo_delta_low", "tbpo_delta_high")
OF_GROUPS = ("num_generations", "steps_per_generation")
KINDS = ["rloo", "distillation", "distillation-merged", "distillation-frozen"]
# Runs without an engine, on given answers.
WITHOUT_ENGINE = {
    "use_cpu": True,
    "bf16": True,
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "save_strategy": "no",
    "report_to": [],
    "logging_steps": 1,
}


def make_other_trainer(kind: str, model: str, folder: Path, **changes: Any) -> Any:
    """A trainer of `slow.toys.settings`; a student learns from its own start."""
    from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer, LowBitRLOOConfig, LowBitRLOOTrainer

    name, _, base = kind.partition("-")
    values = settings(folder, **changes)
    # Their configs have no such fields.
    for field in OF_GRPO if name == "rloo" else (*OF_GRPO, *OF_GROUPS):
        del values[field]
    values["lora_base"] = base or "merged"
    peft_config = random_adapter() if base else None

    if name == "rloo":
        args = LowBitRLOOConfig(**values)
        return LowBitRLOOTrainer(model, distinct_characters, args, train_dataset=prompts(), peft_config=peft_config)
    args = LowBitDistillationConfig(**values, beta=0.0)
    return LowBitDistillationTrainer(model, None, args, train_dataset=prompts(), peft_config=peft_config)


def _answers() -> Any:
    """Prompts with answers: "40+40=" and "0000", "41+41=" and "1111"."""
    from datasets import Dataset

    rows = []
    for n in range(40, 72):
        rows.append({"prompt": f"{n}+{n}=", "completion": CHARACTERS[n % 10] * 4})
    return Dataset.from_list(rows)


# Beside an engine ----------------------------------------------------------------------------------------------------


def _train_and_compare(kind: str, model: str, folder: str) -> dict[str, Any]:
    from qarl_trl.quant import iter_low_bit_weights

    trainer = make_other_trainer(kind, model, Path(folder) / "run")
    if "-" in kind:
        randomize_adapter(trainer.model)
    before = dict(iter_low_bit_weights(trainer.model))
    trainer.train()

    engine = trainer.vllm_generation
    synced = sync(engine)
    answers = engine_logprobs(engine.llm)
    facts = {"losses": logged(trainer, "loss"), "answers": answers, "syncs": engine.num_syncs}

    saved_to = Path(folder) / "saved"
    trainer.save_model(saved_to)
    if not kind.endswith("frozen"):
        forward = _record_forward(trainer.model)
        saved = stored_tensors(saved_to / "low_bit" if "-" in kind else saved_to)
        facts |= {
            "changed": _changed_layers(before, saved),
            "saved_is_synced": set(saved) == set(synced) and _agree(saved, synced),
            "forward_layers": len(_layers_of(forward)),
            "forward_is_synced": _agree(forward, synced),
        }

    answers_of_other, answers_again = _sync_another_and_back(trainer)
    return facts | {"answers_of_other": answers_of_other, "answers_again": answers_again}


@pytest.fixture(scope="module", params=KINDS)
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(folder / "model", layers=1, norms=True)
    return request.param, folder, isolated(_train_and_compare, request.param, model, str(folder))


def test_forward_synced_and_saved_tensors_are_the_same_bytes(outcome):
    kind, _, result = outcome
    if kind.endswith("frozen"):
        return  # its base is never written again: tests/slow/test_frozen.py

    assert result["forward_layers"] == 7
    assert result["forward_is_synced"]
    assert result["saved_is_synced"]
    # Control: training changed what is compared.
    assert len(result["changed"]) == (5 if "-" in kind else 7)


def test_syncing_a_then_b_then_a_gives_the_first_answers_bit_for_bit(outcome):
    _, _, result = outcome

    assert result["answers_again"] == result["answers"]
    # Control: the engine does follow a weight sync.
    assert result["answers_of_other"] != result["answers"]


def test_each_update_samples_with_new_weights(outcome):
    kind, _, result = outcome

    assert len(result["losses"]) == 4
    # One before each rollout batch, and one by this test. RLOO has two updates to a batch.
    assert result["syncs"] == (3 if kind == "rloo" else 5)


def test_a_fresh_engine_from_the_saved_checkpoint_answers_bit_for_bit_the_same(outcome):
    kind, folder, result = outcome
    if kind.endswith("frozen"):
        return

    saved = folder / "saved" / "low_bit" if "-" in kind else folder / "saved"
    assert isolated(fresh_engine_logprobs, str(saved)) == result["answers"]


def _train_with_engine(kind: str, model: str, folder: str, resume: str | None) -> dict[str, Any]:
    changes = {"save_strategy": "steps", "save_steps": 1}
    trainer = make_other_trainer(kind, model, Path(folder), **changes)
    trainer.train(resume_from_checkpoint=resume)
    return whole_arrays(trainer)


@pytest.mark.parametrize("kind", ["rloo", "distillation"])
def test_a_run_beside_an_engine_resumes_bit_for_bit(kind, tmp_path):
    """RLOO from the middle of a rollout batch."""
    model = save_model(tmp_path / "model", layers=1)
    straight = isolated(_train_with_engine, kind, model, str(tmp_path / "straight"), None)

    checkpoint = str(tmp_path / "straight" / "checkpoint-3")
    resumed = isolated(_train_with_engine, kind, model, str(tmp_path / "resumed"), checkpoint)

    assert same(straight, resumed)
    # Control: the last update did change the weights. Tied ones are in the file once.
    earlier = as_arrays(load_file(Path(checkpoint) / "model.safetensors"))
    assert earlier
    assert any((array != straight[name]).any() for name, array in earlier.items())


# Under FSDP2 ---------------------------------------------------------------------------------------------------------


def _train_sharded(kind: str, model: str, folder: str) -> dict[str, Any]:
    """Train two processes under FSDP2, and save."""
    from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer, LowBitSFTConfig, LowBitSFTTrainer

    # Two processes on two cores.
    torch.set_num_threads(1)
    os.environ.update(FSDP2)
    shard_on_cpu()
    values = WITHOUT_ENGINE | {"output_dir": folder, "learning_rate": 1e-3}
    if kind == "sft":
        trainer = LowBitSFTTrainer(model, LowBitSFTConfig(**values), train_dataset=_answers())
    else:
        args = LowBitDistillationConfig(**values, distill_on="answers", max_completion_length=8)
        trainer = LowBitDistillationTrainer(model, None, args, train_dataset=_answers())
    assert trainer.accelerator.is_fsdp2

    trainer.train()
    trainer.save_model()
    teacher = {}
    sizes = (0, 0)
    if kind == "distillation":
        sizes = _shards_and_copies(trainer.teacher_model)
        teacher = _rounded_arrays(trainer.teacher_model.named_parameters())
    return {"losses": logged(trainer, "loss"), "weights": whole_arrays(trainer), "teacher": teacher, "sizes": sizes}


def _rounded_arrays(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Whole weights as bfloat16 numbers, in which FSDP2 keeps some copies after a forward without a backward."""
    arrays = {}
    for name, weight in weights:
        arrays[name] = whole(weight).bfloat16().float().numpy()
    return arrays


def _shards_and_copies(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of a model's shards in this process under FSDP2, and of the gathered copies that are there too."""
    # The last norm and the output layer have one state.
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    shards = 0
    gathered = 0
    for state in states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                shards += parameter._sharded_param_data.nbytes
                for output in parameter.all_gather_outputs:
                    # FSDP2 frees a copy by resizing its storage to nothing.
                    gathered += output.untyped_storage().nbytes()
    return shards, gathered


def _counted_teacher(model: str, processes: int) -> int:
    """The bytes of its own start that `qarl-trl plan` counts for a process of a distillation."""
    from tools.plan.runs import example_run

    from qarl_trl.tools.plan import model as meta
    from qarl_trl.tools.plan.memory.learner import teacher_bytes
    from qarl_trl.tools.plan.run import Teacher

    config = meta.read_config(model)
    skeleton = meta.model_without_weights(config, torch.bfloat16)
    teacher = Teacher("its own start", meta.parameters(skeleton, ""), config, 8)
    return teacher_bytes(example_run(skeleton, config, muon=False, teacher=teacher, ranks=processes, fsdp2=True))


@pytest.mark.parametrize("kind", ["sft", "distillation"])
def test_trainers_of_trl_train_sharded_weights_and_save_them_in_low_bits(kind, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl.quant import apply_quantization, iter_low_bit_weights

    model = str(tmp_path / "model")
    folder = save_model(tmp_path / "float32", layers=1)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(folder).save_pretrained(model)
    first, second = isolated_group(_train_sharded, 2, kind, model, str(tmp_path / "run"))

    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 3
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    start = copies(plain.named_parameters())
    trained = as_tensors(first["weights"])
    # Control: the updates moved what is compared below.
    assert not torch.equal(trained["model.layers.0.mlp.up_proj.weight"], start["model.layers.0.mlp.up_proj.weight"])

    if kind == "distillation":
        # As `qarl-trl plan` counts them: a teacher in bfloat16 stays in it, and some of it stays gathered.
        counted = _counted_teacher(model, processes=2)
        assert sum(first["sizes"]) == sum(second["sizes"]) == counted
        assert min(first["sizes"]) > 0

    # Every process has the teacher as it was read, although only the first one reads it.
    expected_teacher = _rounded_arrays(start.items()) if kind == "distillation" else {}
    assert same(first["teacher"], expected_teacher)
    assert same(second["teacher"], expected_teacher)

    # The file is what one process makes of the trained weights.
    plain.load_state_dict(trained)
    expected = dict(iter_low_bit_weights(apply_quantization(plain, "W4A16")))
    assert same_tensors(stored_tensors(tmp_path / "run"), expected)


def _train_frozen(kind: str, model: str, folder: str, fsdp: bool) -> dict[str, Any]:
    """An adapter beside a frozen base, in one of two processes: what it learned, sent and saved."""
    from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer, LowBitSFTConfig, LowBitSFTTrainer
    from qarl_trl.quant import iter_low_bit_weights

    torch.set_num_threads(1)
    if fsdp:
        os.environ.update(FSDP2)
        shard_on_cpu()

    if kind == "rloo":
        # Beside an engine. The penalty asks the base without its adapter.
        changes = {"max_steps": 2, "steps_per_generation": 1, "beta": 0.05, "learner_ops": "stock", "bf16": True}
        changes["quant_scheme"] = "FP8_DYNAMIC"  # whose engine runs on any CPU
        trainer = make_other_trainer("rloo-frozen", model, Path(folder), **changes)
    else:
        # An adapter begins at zero, so its steps are larger.
        values = WITHOUT_ENGINE | {"output_dir": folder, "learning_rate": 1e-2, "lora_base": "frozen"}
        peft_config = random_adapter()
        if kind == "sft":
            args = LowBitSFTConfig(**values)
            trainer = LowBitSFTTrainer(model, args, train_dataset=_answers(), peft_config=peft_config)
        else:
            args = LowBitDistillationConfig(**values, distill_on="answers", max_completion_length=8, beta=0.0)
            trainer = LowBitDistillationTrainer(model, None, args, train_dataset=_answers(), peft_config=peft_config)
    assert trainer.accelerator.is_fsdp2 == fsdp
    assert trainer.accelerator.num_processes == 2

    before = as_bytes(iter_low_bit_weights(trainer.accelerator.unwrap_model(trainer.model)))
    trainer.train()
    trainer.save_model()
    trained = {}
    for name, weight in trained_parameters(trainer.accelerator.unwrap_model(trainer.model)).items():
        assert hasattr(weight, "full_tensor") == fsdp, name
        trained[name] = whole(weight).numpy()

    facts = {
        "losses": logged(trainer, "loss"),
        "adapter": trained,
        "before": before,
        "after": as_bytes(iter_low_bit_weights(trainer.accelerator.unwrap_model(trainer.model))),
    }
    if kind == "distillation":
        facts["teacher"] = _rounded_arrays(trainer.teacher_model.named_parameters())
    return facts


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["sft", "rloo", "distillation"])
def test_two_processes_train_an_adapter_beside_a_frozen_base_under_fsdp2(kind, tmp_path):
    """Each has the whole base in low bits, and shards of the adapter; as under DDP."""
    model = save_model(tmp_path / "model", layers=1)

    def run(fsdp: bool) -> list[dict[str, Any]]:
        folder = str(tmp_path / ("fsdp2" if fsdp else "ddp"))
        return isolated_group(_train_frozen, 2, kind, model, folder, fsdp, timeout=400)

    one, two = run(True)
    assert one["losses"] == two["losses"]
    assert same(one["adapter"], two["adapter"])
    # Before they are sharded, only the first process has the embeddings.
    assert same(one["after"], two["after"])
    assert one["adapter"]
    assert same(one["before"], one["after"])
    assert any(array.any() for name, array in one["adapter"].items() if "lora_B" in name)  # control: it has moved

    # What was saved is what both have.
    stored = load_file(tmp_path / "fsdp2" / "adapter_model.safetensors")
    assert len(stored) == len(one["adapter"])
    for name, tensor in stored.items():
        place = name.replace(".weight", ".default.weight")
        assert (tensor.float().numpy() == one["adapter"][place]).all(), name
    assert (tmp_path / "fsdp2" / "base" / "config.json").is_file()

    if kind == "distillation":
        start = _rounded_arrays(stored_tensors(model).items())
        assert same(one["teacher"], start)
        assert same(two["teacher"], start)

    if kind != "rloo":  # whose samples are others
        of_ddp, _ = run(False)
        assert one["losses"] == pytest.approx(of_ddp["losses"], rel=0.02)
        assert one["losses"][0] != pytest.approx(one["losses"][-1], rel=0.02)  # control: updates count
