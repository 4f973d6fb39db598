"""
`qarl_trl.trainers.LowBitMixin` on other trainers of TRL, without an engine: those of this package, and DPO, KTO
and others by a class and a config of a user's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_dataset
from lines import write_rows
from peft import LoraConfig
from slow.toys import distinct_characters, prompts, save_model, stored_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

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
from qarl_trl.quant.convert import remove_quantization
from qarl_trl.quant.layers.layer import quantized_modules
from trainers.runs import assert_saved, losses, moved, same_weights, settings, weights


@dataclass
class LowBitDPOConfig(LowBitConfig, DPOConfig):
    pass


class LowBitDPOTrainer(LowBitMixin, DPOTrainer):
    pass


@dataclass
class LowBitKTOConfig(LowBitConfig, KTOConfig):
    pass


class LowBitKTOTrainer(LowBitMixin, KTOTrainer):
    pass


@dataclass
class LowBitCPOConfig(LowBitConfig, CPOConfig):
    pass


class LowBitCPOTrainer(LowBitMixin, CPOTrainer):
    pass


@dataclass
class LowBitGMPOConfig(LowBitConfig, GMPOConfig):
    pass


class LowBitGMPOTrainer(LowBitMixin, GMPOTrainer):
    pass


@dataclass
class LowBitIWOPDConfig(LowBitConfig, IWOPDConfig):
    pass


class LowBitIWOPDTrainer(LowBitMixin, IWOPDTrainer):
    pass


# Name of the trainer: stock class and config, ours.
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig, LowBitSFTTrainer, LowBitSFTConfig),
    "kto": (KTOTrainer, KTOConfig, LowBitKTOTrainer, LowBitKTOConfig),
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
        elif name == "kto":
            rows.append({"prompt": f"{number}+1=", "completion": f"{number + 1}#", "label": number % 2 == 0})
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


def test_a_trainer_whose_constructor_is_that_of_another_of_trl_loads_our_way(model, tmp_path):
    """GMPO's calls GRPO's, in whose module the loader is."""
    args = LowBitGMPOConfig(**settings_of("rloo", tmp_path, max_steps=1, lora_base="frozen"))
    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")

    trainer = LowBitGMPOTrainer(model, distinct_characters, args=args, train_dataset=prompts(), peft_config=adapter)
    trainer.train()

    # TRL's loader would have left a base in high precision.
    assert trainer.low_bit_store is not None
    layer = trainer.model.base_model.model.model.layers[0].mlp.up_proj
    assert not any(parameter.is_floating_point() and parameter.ndim > 1 for parameter in layer.parameters())


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


def make_opd(model, folder, number_of_rows, peft_config=None, **changes):
    """A trainer of IW-OPD, whose teacher is given by name."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    rows = []
    for number in range(10, 10 + number_of_rows):
        question = {"role": "user", "content": f"{number}+1="}
        rows.append({"messages": [question, {"role": "assistant", "content": f"{number + 1}#"}]})
    args = LowBitIWOPDConfig(
        **settings(
            folder,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_completion_length=8,
            max_length=24,
            **changes,
        )
    )
    teacher = str(Path(model).with_name("teacher"))
    data = Dataset.from_list(rows)
    return LowBitIWOPDTrainer(
        model, teacher, args, train_dataset=data, processing_class=tokenizer, peft_config=peft_config
    )


def test_a_loader_that_wraps_another_resumes_at_the_end_of_an_epoch_alone(model, tmp_path):
    """As TRL's IW-OPD has it. accelerate would skip rows of the loader in it, and stop after two of four updates."""
    # Two updates are an epoch.
    whole = make_opd(model, tmp_path / "whole", 8)
    whole.train()
    resumed = make_opd(model, tmp_path / "whole", 8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert same_weights(resumed, whole)

    # Half of one.
    make_opd(model, tmp_path / "half", 16).train()
    resumed = make_opd(model, tmp_path / "half", 16)
    with pytest.raises(ValueError, match="ends within an epoch, .* got _RepeatBatchDataLoader"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))


def test_a_named_teacher_stays_in_high_precision_beside_a_frozen_base(model, tmp_path):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")

    trainer = make_opd(model, tmp_path, 8, adapter, lora_base="frozen")

    teacher = trainer.accelerator.unwrap_model(trainer.teacher_model)
    assert list(quantized_modules(teacher)) == []
    assert_has_weights_of(teacher, Path(model).with_name("teacher"))
    # Control: the policy has low-bit layers.
    assert list(quantized_modules(trainer.model))


def assert_has_weights_of(model, folder):
    """A model's weights are those of a folder's file, bit for bit."""
    weights = dict(model.named_parameters())
    stored = stored_tensors(folder)
    assert stored
    for name, tensor in stored.items():
        assert torch.equal(weights[name], tensor), name


class PassesOn(DPOTrainer):
    """A user's trainer, with an argument of its own."""

    def __init__(self, *args, note="", **kwargs):
        self.note = note
        super().__init__(*args, **kwargs)


class PassesAllOn(PassesOn):
    """And one of it, which names none."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class TakesItOut(DPOTrainer):
    def __init__(self, *args, **kwargs):
        self.note = kwargs.pop("note", "")
        super().__init__(*args, **kwargs)


class NamesTheModel(DPOTrainer):
    def __init__(self, model, *args, note="", **kwargs):
        self.note = note
        super().__init__(model, *args, **kwargs)


class NamesTwo(DPOTrainer):
    def __init__(self, model, args, note="", **kwargs):
        self.note = note
        super().__init__(model, args=args, **kwargs)


class ByNameAlone(DPOTrainer):
    """Its arguments of TRL have another order."""

    def __init__(self, *positional, note="", train_dataset=None, args=None, **kwargs):
        self.note = note
        super().__init__(*positional, args=args, train_dataset=train_dataset, **kwargs)


class HasItFirst(DPOTrainer):
    def __init__(self, note, *args, **kwargs):
        self.note = note
        super().__init__(*args, **kwargs)


OF_USERS = [PassesOn, PassesAllOn, TakesItOut, NamesTheModel, NamesTwo, ByNameAlone, HasItFirst]


@pytest.mark.parametrize("of_user", OF_USERS, ids=lambda of_user: of_user.__name__)
def test_a_constructor_of_a_user_has_the_arguments_of_trl_by_their_names(model, tmp_path, of_user):
    low_bit = type("Mine", (LowBitMixin, of_user), {})
    rows = data_of("dpo", model)["train_dataset"]
    args = LowBitDPOConfig(**settings_of("dpo", tmp_path))

    mine = low_bit(model=model, args=args, note="mine", train_dataset=rows)

    assert mine.note == "mine"
    assert mine.low_bit_store is not None
    # What a resume compares is read from the arguments: here the rows.
    assert mine._identity == make("dpo", model, tmp_path)._identity


def test_a_constructor_of_a_user_may_pass_its_arguments_on(model, tmp_path):
    data = data_of("dpo", model)
    args = LowBitDPOConfig(**settings_of("dpo", tmp_path / "mine"))
    by_place = type("Mine", (LowBitMixin, PassesOn), {})(model, None, args, **data)
    by_place.train()
    of_model = type("Mine", (LowBitMixin, NamesTheModel), {})(model, None, args, **data)
    of_model.train()
    plain = make("dpo", model, tmp_path / "plain")
    plain.train()

    assert by_place.note == ""
    assert same_weights(by_place, plain)
    assert same_weights(of_model, plain)


def test_a_constructor_of_a_user_that_hides_the_model_is_refused(model, tmp_path):
    data = data_of("dpo", model)
    args = LowBitDPOConfig(**settings_of("dpo", tmp_path))
    low_bit = type("Mine", (LowBitMixin, HasItFirst), {})

    with pytest.raises(TypeError, match="must have an argument `model`, or pass .args and .*kwargs on, got .note"):
        low_bit("mine", model, args=args, **data)
    # A place of its own does not hide what has a name.
    assert low_bit("mine", model=model, args=args, **data).note == "mine"

    # Python's own words for what does not fit.
    for of_user in (DPOTrainer, PassesOn):
        low_bit = type("Mine", (LowBitMixin, of_user), {})
        with pytest.raises(TypeError, match="unexpected keyword argument 'notes'"):
            low_bit(model, args=args, notes="", **data)
        with pytest.raises(TypeError, match="multiple values for argument 'model'"):
            low_bit(model, model=model, args=args, **data)
    with pytest.raises(TypeError, match="positional arguments"):
        low_bit(model, None, args, *[None] * 30)


def test_a_trainer_without_trls_log_of_metrics_trains(model, tmp_path):
    """TRL's experimental CPO, of a model that is loaded."""
    args = LowBitCPOConfig(**settings_of("cpo", tmp_path, max_length=64))
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = LowBitCPOTrainer(loaded, args, processing_class=tokenizer, **data_of("dpo", model))

    trainer.train()

    assert len(losses(trainer)) == 3
    assert trainer.low_bit_store.bypassed_layers() == []


def test_a_resumed_run_has_the_same_reference(model, tmp_path):
    """It is in no checkpoint, and a script loads it itself."""

    def with_reference(folder, seed, **changes):
        args = LowBitDPOConfig(**settings_of("dpo", folder, **changes))
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        torch.manual_seed(seed)
        loaded.lm_head.weight.data.normal_()
        return LowBitDPOTrainer(model, loaded, args, **data_of("dpo", model))

    straight = with_reference(tmp_path / "run", 1, save_strategy="steps", save_steps=1)
    straight.train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")

    for other in (with_reference(tmp_path / "other", 2), make("dpo", model, tmp_path / "none")):
        with pytest.raises(ValueError, match="reference was"):
            other.train(resume_from_checkpoint=checkpoint)

    # Control.
    resumed = with_reference(tmp_path / "same", 1)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert same_weights(resumed, straight)


def test_a_model_that_replaces_the_trainers_does_not_train_in_high_precision(model, tmp_path):
    trainer = make("sft", model, tmp_path)
    trainer.train()  # control
    low_bit = trainer.model

    trainer.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="no low-bit layers, so it would train in high precision"):
        trainer.train()

    # The other way to lose them.
    trainer.model = remove_quantization(low_bit)
    with pytest.raises(RuntimeError, match="no low-bit layers, so it would train in high precision"):
        trainer.train()


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


@pytest.mark.parametrize("kind", [LowBitDPOConfig, LowBitKTOConfig])
def test_dpo_and_kto_in_low_bits_are_not_compiled(tmp_path, kind):
    with pytest.raises(ValueError, match="torch_compile must be False in low bits"):
        kind(**settings_of("dpo", tmp_path), torch_compile=True)

    # Control: without them it is TRL's.
    assert LowBitDPOConfig(**settings_of("dpo", tmp_path) | {"quant_scheme": "none"}, torch_compile=True).compiles


@pytest.mark.parametrize(
    ("half", "other"), [(LowBitMixin, DPOTrainer), (LowBitConfig, DPOConfig)], ids=["trainer", "config"]
)
def test_the_low_bit_half_after_that_of_trl_is_refused(half, other):
    """Python would take TRL's methods: a trainer would train and save in high precision, a config check nothing."""
    words = f"must have {half.__name__} before {other.__name__}"
    with pytest.raises(TypeError, match=words):
        type("Mine", (other, half), {})

    class OfUser(other):
        """A user's class, whose methods call those of the next class."""

    with pytest.raises(TypeError, match=words):
        type("Mine", (OfUser, half), {})

    # Controls: a user's class before a whole low-bit class or before both halves, and a half of a user's own.
    class Whole(half, other):
        pass

    class Own(half):
        pass

    for bases in ((OfUser, Whole), (half, OfUser), (Own, other), (Whole,)):
        mine = type("Mine", bases, {})
        order = mine.__mro__
        assert order.index(half) < order.index(other)


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


# References that TRL computes once and keeps on disk -----------------------------------------------------------------


@pytest.fixture
def pairs_from(tmp_path):
    """Pairs of answers from a file: TRL keeps the log-probs beside the file that datasets makes of it."""

    def pairs(first):
        file = tmp_path / f"{first}.jsonl"
        rows = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}#", "rejected": f"{n}#"} for n in range(first, first + 16)]
        if not file.exists():
            write_rows(file, rows)
        return load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))

    return pairs


def with_a_stored_reference(model, folder, train_dataset, **changes):
    # Without a length TRL filters the data by no function whose key has the settings in it.
    of_run = {"max_steps": 1, "precompute_ref_log_probs": True, "max_length": None}
    args = LowBitDPOConfig(**settings(folder, **of_run | changes))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return LowBitDPOTrainer(model, args=args, train_dataset=train_dataset, peft_config=adapter)


def test_the_low_bits_of_a_frozen_base_have_a_reference_of_their_own(model, pairs_from, tmp_path):
    def reference(folder, group_size):
        of_run = {"lora_base": "frozen", "quant_group_size": group_size}
        trainer = with_a_stored_reference(model, tmp_path / folder, pairs_from(40), **of_run)
        return trainer.train_dataset["ref_chosen_logps"]

    groups_of_128 = reference("first", 128)
    assert reference("other", 32) != groups_of_128
    # Controls: the same low bits, which TRL finds in its file.
    files = len(list(tmp_path.rglob("cache-*.arrow")))
    assert reference("again", 128) == groups_of_128
    assert len(list(tmp_path.rglob("cache-*.arrow"))) == files


def test_a_reference_in_low_bits_is_none_for_a_run_in_high_precision(model, pairs_from, tmp_path):
    """TRL computes that of a data set for `evaluate` after the layers are quantized."""
    with_a_stored_reference(model, tmp_path / "low", pairs_from(40)).evaluate(pairs_from(60))

    # The adapter is 0 before training, so that policy and reference are one model.
    in_high_precision = with_a_stored_reference(model, tmp_path / "high", pairs_from(40), quant_scheme="none")
    metrics = in_high_precision.evaluate(pairs_from(60))
    assert metrics["eval_rewards/chosen"] == 0
    assert metrics["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)  # one rounding of float32
