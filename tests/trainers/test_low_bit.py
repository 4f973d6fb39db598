"""
`qarl_trl.trainers.LowBitMixin` on other trainers of TRL, without an engine: those of this package, and DPO by a class
and a config of a user's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from slow.toys import distinct_characters, prompts, save_model, stored_tensors
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from qarl_trl import (
    LowBitConfig,
    LowBitDistillationConfig,
    LowBitDistillationTrainer,
    LowBitMixin,
    LowBitRLOOConfig,
    LowBitRLOOTrainer,
    LowBitSFTConfig,
    LowBitSFTTrainer,
)
from qarl_trl._compat.construction import streams_its_weights


@dataclass
class LowBitDPOConfig(LowBitConfig, DPOConfig):
    pass


class LowBitDPOTrainer(LowBitMixin, DPOTrainer):
    pass


# Name of the trainer: stock class and config, ours.
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, LowBitSFTTrainer, LowBitSFTConfig),
    "dpo": (DPOTrainer, DPOConfig, LowBitDPOTrainer, LowBitDPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig, LowBitRLOOTrainer, LowBitRLOOConfig),
    "distillation": (
        DistillationTrainer,
        DistillationConfig,
        LowBitDistillationTrainer,
        LowBitDistillationConfig,
    ),
}
NAMES = list(TRAINERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "teacher", layers=1, seed=1)
    return save_model(folder / "model", layers=1)


def data_of(name, model):
    """Arguments of the trainer besides model and settings."""
    if name == "sft":
        rows = [{"text": f"{number}+{number}={2 * number}#"} for number in range(40, 72)]
        return {"train_dataset": Dataset.from_list(rows)}
    if name == "dpo":
        rows = [
            {"prompt": f"{number}+1=", "chosen": f"{number + 1}#", "rejected": f"{number}#"}
            for number in range(40, 72)
        ]
        return {"train_dataset": Dataset.from_list(rows)}
    if name == "distillation":
        return {"train_dataset": prompts(), "teacher_model": str(Path(model).with_name("teacher"))}
    return {"train_dataset": prompts(), "reward_funcs": distinct_characters}


def settings_of(name, folder: Path, **changes):
    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    if name == "rloo":
        values |= {"num_generations": 2, "max_completion_length": 8}
    if name == "distillation":
        values |= {"max_completion_length": 8}
    return values | changes


def make(name, model, folder, **changes):
    _, _, trainer_class, config_class = TRAINERS[name]
    args = config_class(**settings_of(name, folder, **changes))
    return trainer_class(model=model, args=args, **data_of(name, model))


def weights(trainer):
    return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("name", NAMES)
def test_with_the_scheme_off_it_is_trls_trainer_bit_for_bit(model, tmp_path, name):
    stock_class, stock_config, _, _ = TRAINERS[name]
    args = stock_config(**settings_of(name, tmp_path / "stock"))
    stock = stock_class(model=model, args=args, **data_of(name, model))
    stock.train()

    ours = make(name, model, tmp_path / "ours", quant_scheme="none")
    ours.train()

    assert ours.low_bit_store is None
    assert losses(ours) == losses(stock)
    expected = weights(stock)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(ours).items())

    low_bit = make(name, model, tmp_path / "low")  # control
    low_bit.train()
    assert losses(low_bit) != losses(stock)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_on_low_bit_weights_and_saves_what_the_forward_used(model, tmp_path, name):
    trainer = make(name, model, tmp_path)
    start = weights(trainer)
    trainer.train()
    assert trainer.low_bit_store.bypassed_layers() == []
    moved = [name for name, weight in weights(trainer).items() if not torch.equal(weight, start[name])]
    assert any("_proj" in name for name in moved)

    with torch.no_grad():
        trainer.model(torch.tensor([[3, 4, 5]]))
    used = trainer.low_bit_store.kept()
    trainer.save_model()

    stored = stored_tensors(tmp_path)
    assert len(used) == 7
    for layer, weight in used.items():
        for local, tensor in weight.data.items():
            assert torch.equal(stored[f"{layer.removesuffix('.weight')}.{local}"], tensor)
    card = (tmp_path / "README.md").read_text()
    assert "The learner ran on weights quantized this way" in card
    assert ("trained by reinforcement learning" in card) == (name == "rloo")
    assert ("distilled from `teacher`" in card) == (name == "distillation")
    # The papers of TRL's trainers, and not QaRL's.
    assert "gu2026qarl" not in card
    assert ("agarwal2024on-policy" in card) == (name == "distillation")
    assert f"- {name}\n" in card
    assert "- qarl\n" not in card


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_with_the_same_bits(model, tmp_path, name):
    straight = make(name, model, tmp_path / "straight", max_steps=4)
    straight.train()

    first = make(name, model, tmp_path / "resumed", max_steps=4, save_strategy="steps", save_steps=2)
    first.train()
    expected = weights(first)
    resumed = make(name, model, tmp_path / "resumed", max_steps=4, save_strategy="steps", save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))

    assert all(torch.equal(weight, expected[name]) for name, weight in weights(straight).items())
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())


def test_a_config_without_the_low_bit_half_is_refused(model, tmp_path):
    args = SFTConfig(**settings_of("sft", tmp_path))
    with pytest.raises(TypeError, match="must be a config with LowBitConfig"):
        LowBitSFTTrainer(model=model, args=args, **data_of("sft", model))


def test_the_low_bit_half_alone_is_no_config():
    with pytest.raises(TypeError, match="half a config"):
        LowBitConfig()


def test_a_mixin_without_a_trainer_of_trl_is_refused():
    class Mine(LowBitMixin):
        pass

    with pytest.raises(TypeError, match="Mine must subclass a trainer of TRL"):
        Mine(model="no/such-model")


def test_a_trainer_that_streams_master_weights_to_its_server_is_refused(model, tmp_path):
    """TRL's asynchronous GRPO: its server would sample from other weights than the learner trains."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    @dataclass
    class Config(LowBitConfig, AsyncGRPOConfig):
        pass

    class Trainer(LowBitMixin, AsyncGRPOTrainer):
        pass

    class WithItsOwnStream(Trainer):
        def _streaming_iter(self):
            yield from ()

    args = Config(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="Trainer would send its server the weights in high precision"):
        Trainer(model, [distinct_characters], args, train_dataset=prompts())

    # Control: only TRL's own stream is, and no other trainer has one.
    assert streams_its_weights(Trainer)
    assert not streams_its_weights(WithItsOwnStream)
    assert not streams_its_weights(LowBitSFTTrainer)


def test_the_config_takes_json_for_the_fields_of_both_halves():
    assert {"vllm_engine_kwargs", "model_init_kwargs"} <= set(LowBitSFTConfig._VALID_DICT_FIELDS)
