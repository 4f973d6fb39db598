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
from slow.toys import distinct_characters, prompts, save_model
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
from trainers.runs import assert_saved, losses, moved, same_weights, settings, weights


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
    # Where `data_of` looks for it. Of another seed: a student that equals its teacher has nothing to learn.
    save_model(folder / "teacher", layers=1, seed=1)
    return save_model(folder / "model", layers=1)


def data_of(name, model):
    """Arguments of the trainer besides model and settings."""
    if name == "distillation":
        return {"train_dataset": prompts(), "teacher_model": str(Path(model).with_name("teacher"))}
    if name == "rloo":
        return {"train_dataset": prompts(), "reward_funcs": distinct_characters}

    rows = []
    for number in range(40, 72):
        if name == "sft":
            rows.append({"text": f"{number}+{number}={2 * number}#"})
        else:
            rows.append({"prompt": f"{number}+1=", "chosen": f"{number + 1}#", "rejected": f"{number}#"})
    return {"train_dataset": Dataset.from_list(rows)}


def settings_of(name, folder: Path, **changes):
    # The trainers that sample.
    of_trainer = {
        "rloo": {"num_generations": 2, "max_completion_length": 8},
        "distillation": {"max_completion_length": 8},
    }
    return settings(folder, max_steps=3) | of_trainer.get(name, {}) | changes


def make(name, model, folder, **changes):
    _, _, trainer_class, config_class = TRAINERS[name]
    args = config_class(**settings_of(name, folder, **changes))
    return trainer_class(model=model, args=args, **data_of(name, model))


@pytest.mark.parametrize("name", NAMES)
def test_with_the_scheme_off_it_is_trls_trainer_bit_for_bit(model, tmp_path, name):
    stock_class, stock_config, _, _ = TRAINERS[name]
    # One after the other: both draw from the same generator, which a constructor seeds.
    args = stock_config(**settings_of(name, tmp_path / "stock"))
    stock = stock_class(model=model, args=args, **data_of(name, model))
    stock.train()

    ours = make(name, model, tmp_path / "ours", quant_scheme="none")
    ours.train()

    assert ours.low_bit_store is None
    assert losses(ours) == losses(stock)
    assert same_weights(ours, stock)

    # Control: with a scheme the losses are others.
    low_bit = make(name, model, tmp_path / "low")
    low_bit.train()
    assert losses(low_bit) != losses(stock)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_on_low_bit_weights_and_saves_what_the_forward_used(model, tmp_path, name):
    trainer = make(name, model, tmp_path)
    start = weights(trainer)
    trainer.train()
    assert trainer.low_bit_store.bypassed_layers() == []
    # Control: gradients arrive at the weights below the low-bit forward.
    assert any("_proj" in weight for weight in moved(start, weights(trainer)))

    # The last update made all low-bit weights out of date: a forward makes them anew, before the save could.
    with torch.no_grad():
        trainer.model(torch.tensor([[3, 4, 5]]))
    used = trainer.low_bit_store.kept()
    trainer.save_model()

    assert len(used) == 7
    assert_saved(tmp_path, used)
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

    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    first = make(name, model, tmp_path / "resumed", **changes)
    first.train()
    resumed = make(name, model, tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "resumed" / "checkpoint-2"))

    # Neither saving nor resuming leaves a trace.
    assert same_weights(straight, first)
    assert same_weights(resumed, first)


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

    # A user who writes a stream of low-bit weights has seen to it.
    class WithItsOwnStream(Trainer):
        def _streaming_iter(self):
            yield from ()

    # No server runs: the refusal comes before anything looks for it.
    args = Config(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="Trainer would send its server the weights in high precision"):
        Trainer(model, [distinct_characters], args, train_dataset=prompts())

    # Control: only TRL's own stream is, and no other trainer has one.
    assert streams_its_weights(Trainer)
    assert not streams_its_weights(WithItsOwnStream)
    assert not streams_its_weights(LowBitSFTTrainer)


def test_the_config_takes_json_for_the_fields_of_both_halves():
    assert {"vllm_engine_kwargs", "model_init_kwargs"} <= set(LowBitSFTConfig._VALID_DICT_FIELDS)
