"""Training checkpoints of `QaRLTrainer`: master weights, the low-bit model beside them, and an exact resume."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from safetensors.torch import load_file, save_file
from slow.toys import distinct_characters, forge, logged, prompts, stored_tensors
from toy_runs import adapter, changed, make, master_weights, without_engine
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import ExportableState

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.checkpoints.folder import read_manifest
from qarl_trl.checkpoints.rollout_buffer import RolloutBuffer
from qarl_trl.quant import iter_low_bit_weights, remove_quantization
from qarl_trl.quant.layers.frozen import adapter_tensors


# Every step is a rollout batch and an update, and the last ones do not depend on how many there are.
STEPWISE = {"steps_per_generation": 1, "lr_scheduler_type": "constant"}


def make_straight(model: str, folder: Path, peft_config: LoraConfig | None = None, **changes) -> QaRLTrainer:
    """A trainer for four steps, with a checkpoint after the second."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    return make(model, folder, peft_config, **saving, **STEPWISE, **changes)


def resume(
    checkpoint: Path, model: str, folder: Path, peft_config: LoraConfig | None = None, **changes
) -> QaRLTrainer:
    """A run that continues from a checkpoint."""
    trainer = make(model, folder, peft_config, **STEPWISE, **changes)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


# Nine micro-batches an epoch, in rollout batches of three and updates of two: the last update of an epoch has one.
UNEVEN = {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}


def uneven(model: str, folder: Path, checkpoint: str | None = None, **changes) -> QaRLTrainer:
    """A run of two epochs of five updates, from the beginning or from a checkpoint."""
    args = QaRLConfig(**without_engine(folder, **UNEVEN | changes))
    trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(9))
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def updates_from_0(trainer: QaRLTrainer) -> list[int]:
    """The updates of a rollout batch if all before were whole."""
    start = trainer._step - trainer._step % 3
    return [step // 2 for step in range(start, start + 3)]


def test_after_an_update_that_was_cut_short_a_run_resumes_bit_for_bit(dense_model, tmp_path, monkeypatch):
    def distance(folder: Path) -> set[str]:
        straight = uneven(dense_model, folder, save_strategy="steps", save_steps=5)
        resumed = uneven(dense_model, folder / "resumed", str(folder / "checkpoint-5"))
        assert straight.state.global_step == resumed.state.global_step == 10
        return changed(master_weights(straight), master_weights(resumed))

    assert not distance(tmp_path / "counted")
    # Control: micro-batches share other passes, which round otherwise.
    monkeypatch.setattr(QaRLTrainer, "_updates_of_rollout", updates_from_0)
    assert distance(tmp_path / "from_0")


class AsksForRows(TrainerCallback):
    """Looks at a batch of the training set before a run, with a loader of its own."""

    def __init__(self, trainer: QaRLTrainer):
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        next(iter(self.trainer.get_train_dataloader()))


def test_a_resumed_run_has_its_order_of_prompts_though_a_callback_asked_for_rows(dense_model, tmp_path):
    def run(folder: Path, checkpoint: str | None = None) -> tuple[list[str], QaRLTrainer]:
        rolled_out = []

        def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
            rolled_out.extend(prompts)
            return distinct_characters(completions)

        changes = UNEVEN | {"save_strategy": "steps", "save_steps": 5}
        args = QaRLConfig(**without_engine(folder, **changes))
        trainer = QaRLTrainer(dense_model, reward, args, train_dataset=prompts(9))
        trainer.add_callback(AsksForRows(trainer))
        trainer.train(resume_from_checkpoint=checkpoint)
        return rolled_out, trainer

    prompts_of_both, straight = run(tmp_path)
    prompts_of_second, resumed = run(tmp_path / "resumed", str(tmp_path / "checkpoint-5"))
    assert prompts_of_second == prompts_of_both[-len(prompts_of_second) :]
    assert not changed(master_weights(straight), master_weights(resumed))


def test_a_resume_within_a_rollout_batch_keeps_the_answers_in_its_files(dense_model, tmp_path, monkeypatch):
    """The run that resumes samples nothing before the next batch, and TRL would write a file without rows."""

    def answers(folder: Path, step: int) -> list[dict[str, Any]]:
        return pandas.read_parquet(folder / "completions" / f"completions_{step:05d}.parquet").to_dict("records")

    def answers_after_resume(folder: Path) -> list[dict[str, Any]]:
        # As after a kill: the files of the first run are there.
        shutil.copytree(tmp_path / "a", folder)
        make(dense_model, folder, **settings).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return answers(folder, 3)

    settings = {"steps_per_generation": 4, "log_completions": True, "save_strategy": "steps", "save_steps": 2}
    make(dense_model, tmp_path / "a", **settings).train()
    expected = answers(tmp_path / "a", 3)
    assert expected

    assert answers_after_resume(tmp_path / "b") == expected
    # A checkpoint may not hold them: a reward logged a type that no file gives back.
    monkeypatch.setattr(RolloutBuffer, "_logged_rows", lambda self: None)
    shutil.rmtree(tmp_path / "a")
    make(dense_model, tmp_path / "a", **settings).train()
    assert answers_after_resume(tmp_path / "c") == expected
    # Control: TRL's own file.
    monkeypatch.setattr(RolloutBuffer, "has_rows_to_log", True)
    assert answers_after_resume(tmp_path / "d") == []


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dense_model", {"quant_scheme": "FP8_DYNAMIC"}),
        # transformers' own way to resume leaves the experts of a mixture as they were before training.
        ("mixture_model", {}),
        ("mixture_model", {"optim_muon": True}),
    ],
)
def test_resuming_after_two_of_four_steps_gives_the_same_master_weights_bit_for_bit(request, tmp_path, kind, changes):
    model = request.getfixturevalue(kind)
    straight = make_straight(model, tmp_path / "a", **changes)
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, model, tmp_path / "b", **changes)

    assert not changed(master_weights(straight), master_weights(resumed))
    # Control: what the checkpoint holds is not yet what four steps give.
    halfway = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert changed(master_weights(straight), dict(halfway.named_parameters()))


def test_a_quantized_start_with_free_scales_resumes_bit_for_bit(gptq_model, tmp_path):
    straight = make_straight(gptq_model, tmp_path / "a", quant_scheme="checkpoint")
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, gptq_model, tmp_path / "b", quant_scheme="checkpoint")

    for parameter in straight.model.parameters():
        assert parameter.dtype == torch.float32
    assert not changed(master_weights(straight), master_weights(resumed))
    assert stored_tensors(checkpoint / "low_bit").keys() == stored_tensors(gptq_model).keys()


def test_a_resume_with_an_optimizer_of_another_class_is_refused(dense_model, tmp_path):
    """torch gives SGD the moments of AdamW without a word, and other optimizers miss theirs."""

    def trainer(optimizer, folder):
        model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
        args = QaRLConfig(**without_engine(folder, **STEPWISE, save_strategy="steps", save_steps=2))
        return QaRLTrainer(
            model,
            distinct_characters,
            args,
            train_dataset=prompts(),
            processing_class=AutoTokenizer.from_pretrained(dense_model),
            optimizers=(optimizer(model.parameters(), lr=1e-3), None),
        )

    trainer(torch.optim.AdamW, tmp_path / "a").train()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")

    for other in (torch.optim.SGD, torch.optim.NAdam):
        refused = trainer(other, tmp_path / other.__name__)
        with pytest.raises(ValueError, match=f"its optimizer was AdamW, and is {other.__name__}"):
            refused.train(resume_from_checkpoint=checkpoint)
    # Control: the same class.
    trainer(torch.optim.AdamW, tmp_path / "b").train(resume_from_checkpoint=checkpoint)


def test_a_resume_that_trains_other_parameters_of_the_same_shapes_is_refused(dense_model, tmp_path):
    """The optimizer's moments lie in the checkpoint by place: those of `q_proj` would move `o_proj`."""

    def without(layer):
        model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
        model.get_submodule(f"model.layers.0.self_attn.{layer}").requires_grad_(False)
        return model

    def trainer(layer, folder):
        args = QaRLConfig(**without_engine(folder, **STEPWISE, save_strategy="steps", save_steps=2))
        tokenizer = AutoTokenizer.from_pretrained(dense_model)
        data = prompts()
        return QaRLTrainer(without(layer), distinct_characters, args, train_dataset=data, processing_class=tokenizer)

    trainer("o_proj", tmp_path / "a").train()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")

    with pytest.raises(ValueError, match="its optimizer trained 13 parameters, .* trains 13 parameters"):
        trainer("q_proj", tmp_path / "b").train(resume_from_checkpoint=checkpoint)
    # In the folder of the run, too, and then its checkpoints are not those of the trainer, which would replace them.
    refused = trainer("q_proj", tmp_path / "a")
    with pytest.raises(ValueError, match="its optimizer trained 13 parameters"):
        refused.train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="checkpoint-"):
        refused.train()
    # Control: the same ones.
    trainer("o_proj", tmp_path / "c").train(resume_from_checkpoint=checkpoint)


def test_lora_trains_the_adapter_and_resumes_bit_for_bit(dense_model, tmp_path):
    straight = make_straight(dense_model, tmp_path / "a", adapter())
    start = master_weights(straight)
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, dense_model, tmp_path / "b", adapter())

    trained = master_weights(straight)
    assert not changed(trained, master_weights(resumed))
    low_bit = dict(iter_low_bit_weights(straight.model))
    assert not changed(low_bit, dict(iter_low_bit_weights(resumed.model)))

    # Two factors in each of two layers.
    moved = changed(start, trained)
    assert len(moved) == 4
    for name in moved:
        assert "lora_" in name

    # Control: what the checkpoint holds is not yet what four steps give.
    halfway = AutoPeftModelForCausalLM.from_pretrained(checkpoint)
    assert changed(trained, dict(halfway.named_parameters())) <= moved
    assert changed(trained, dict(halfway.named_parameters()))


def test_a_second_trainer_of_one_adapter_config_is_the_same_run(dense_model, tmp_path):
    """peft writes the layers that it chose into the config that it gets."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    first = make_straight(dense_model, tmp_path, config, max_steps=2)
    first.train()
    assert first.model.peft_config["default"].target_modules != "all-linear"  # control

    resumed = resume(tmp_path / "checkpoint-2", dense_model, tmp_path, config)

    assert resumed.state.global_step == 4
    assert config.target_modules == "all-linear"


def test_a_frozen_base_resumes_bit_for_bit(gptq_model, tmp_path):
    settings = {"quant_scheme": "checkpoint", "lora_base": "frozen"}
    straight = make_straight(gptq_model, tmp_path / "a", adapter(), **settings)
    straight.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"

    resumed = resume(checkpoint, gptq_model, tmp_path / "b", adapter(), **settings)

    assert not changed(dict(adapter_tensors(straight.model)), dict(adapter_tensors(resumed.model)))
    assert not (checkpoint / "low_bit").exists()
    with pytest.raises(ValueError, match="another run: lora_base was 'frozen'"):
        resume(checkpoint, gptq_model, tmp_path / "c", adapter(), quant_scheme="checkpoint")


@pytest.mark.parametrize("kind", ["dense_model", "mixture_model"])
def test_a_checkpoint_that_lacks_a_weight_is_not_resumed(request, tmp_path, kind):
    model = request.getfixturevalue(kind)
    make(model, tmp_path, save_strategy="steps", save_steps=1, max_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    forge(checkpoint)

    trainer = make(model, tmp_path / "resumed")
    with pytest.raises(RuntimeError, match=r"lacks.*model\.layers\.0\.self_attn\.q_proj"):
        trainer.train(resume_from_checkpoint=str(checkpoint))


def test_a_training_checkpoint_holds_master_weights_and_beside_them_the_low_bit_model(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-4"

    restored = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    assert not changed(master_weights(trainer), dict(restored.named_parameters()))
    assert "quantization_config" not in (checkpoint / "config.json").read_text()
    assert '"pack-quantized"' in (checkpoint / "low_bit" / "config.json").read_text()
    AutoTokenizer.from_pretrained(checkpoint / "low_bit")


# A run that goes on with other settings ------------------------------------------------------------------------------


def test_a_model_that_an_earlier_trainer_of_the_script_has_changed_resumes(dense_model, tmp_path):
    """It has other layers then, another attention, and the tokenizer's end token among its own."""
    model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
    model.generation_config.eos_token_id = [2]
    make(model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2, **STEPWISE).train()
    assert model.generation_config.eos_token_id != [2]  # control: the Trainer writes it there
    remove_quantization(model)

    resumed = make(model, tmp_path, max_steps=4, **STEPWISE)
    resumed.train(resume_from_checkpoint=True)

    assert resumed.state.global_step == 4


def test_a_checkpoint_of_a_training_set_that_a_script_put_in_later_is_of_another_run(dense_model, tmp_path):
    """Two calls of `train` for a curriculum: a script that begins anew must not resume the first from the second."""
    trainer = make(dense_model, tmp_path, max_steps=2, save_strategy="steps", save_steps=2, **STEPWISE)
    trainer.train()
    assert read_manifest(tmp_path / "checkpoint-2")["replaced_data"] == "none"
    trainer.train_dataset = prompts(7)
    trainer.train()

    again = make(dense_model, tmp_path, max_steps=4, **STEPWISE)
    with pytest.raises(ValueError, match="of another run: replaced_data was '7 rows, .*, and is 'none'"):
        again.train(resume_from_checkpoint=True)

    # Control: with the rows of the checkpoint it resumes.
    again.train_dataset = prompts(7)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4


@pytest.fixture(scope="module")
def halfway(dense_model, tmp_path_factory):
    """The checkpoint of two updates at a rate of 1e-3."""
    trainer = make_straight(dense_model, tmp_path_factory.mktemp("halfway"))
    trainer.train()
    return Path(trainer.args.output_dir) / "checkpoint-2"


def went(weights: dict[str, torch.Tensor], checkpoint: Path) -> float:
    """The largest distance of a weight from that of a checkpoint."""
    distances = []
    for name, tensor in stored_tensors(checkpoint).items():
        distances.append((weights[name] - tensor).abs().max().item())
    return max(distances)


def test_a_lower_learning_rate_counts_from_the_next_update_on(dense_model, halfway, tmp_path, caplog):
    """As docs/troubleshooting.md advises after a collapse."""
    resumed = resume(halfway, dense_model, tmp_path / "lower", learning_rate=1e-7)
    same_rate = resume(halfway, dense_model, tmp_path / "same")

    assert logged(resumed, "learning_rate")[-2:] == [1e-7, 1e-7]
    # AdamW goes about one rate in each of two updates.
    assert went(master_weights(resumed), halfway) < 5e-7
    # Control: at the rate of the checkpoint.
    assert went(master_weights(same_rate), halfway) > 5e-4

    lower, same = re.findall(r"resumes from .*", caplog.text)
    assert lower.endswith("these settings count from the next update on: learning_rate 0.001 -> 1e-07.")
    assert same.startswith(f"resumes from {halfway}, with the settings of its run")


def test_a_rate_that_a_script_changes_between_two_calls_counts_in_the_second_that_resumes(
    dense_model, halfway, tmp_path, caplog
):
    """After an update that went wrong, say: the optimizer has the rate of the first call."""
    trainer = make(dense_model, tmp_path, **STEPWISE, save_strategy="steps", save_steps=4)
    trainer.train()
    assert logged(trainer, "learning_rate")[-1] == 1e-3  # control
    trainer.args.learning_rate = 1e-7
    # The checkpoint of its fourth step is written again.
    trainer.train(resume_from_checkpoint=str(halfway))

    assert logged(trainer, "learning_rate")[-2:] == [1e-7, 1e-7]
    assert went(master_weights(trainer), halfway) < 5e-7
    assert "count from the next update on: learning_rate 0.001 -> 1e-07." in caplog.text
    assert read_manifest(tmp_path / "checkpoint-4")["settings"]["learning_rate"] == 1e-7


class FailsOnce(TrainerCallback):
    """Stops the first call within its second update, unless it has failed already."""

    def __init__(self, has_failed: bool = False):
        self.has_failed = has_failed

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("as if out of memory")


def test_a_manifest_has_the_micro_batches_that_a_script_set_after_the_constructor(dense_model, tmp_path):
    """The Trainer reads their number in `train`."""
    trainer = make(dense_model, tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **STEPWISE)
    trainer.args.gradient_accumulation_steps = 2
    trainer.train()

    assert read_manifest(tmp_path / "checkpoint-1")["settings"]["gradient_accumulation_steps"] == 2


def test_a_call_after_one_that_failed_within_an_update_is_as_a_first_one(dense_model, tmp_path):
    """As in a notebook."""
    changes = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
    changes |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    straight = make(dense_model, tmp_path / "straight", **changes)
    # Such a callback keeps micro-batches in passes of their own, which round otherwise.
    straight.add_callback(FailsOnce(has_failed=True))
    straight.train()
    trainer = make(dense_model, tmp_path / "run", **changes)
    trainer.add_callback(FailsOnce())
    with pytest.raises(RuntimeError, match="as if out of memory"):
        trainer.train()

    trainer.train(resume_from_checkpoint=True)

    assert not changed(master_weights(straight), master_weights(trainer))
    for name in ("entropy", "completions/mean_length", "ratio/kl_k3"):
        assert logged(trainer, name) == logged(straight, name)


def test_a_call_that_failed_leaves_no_metric_of_a_reward_for_the_next(dense_model, tmp_path):
    values = iter([1000.0, 1.0, 1.0])

    def logs_then_fails(completions, log_metric, **_):
        value = next(values)
        log_metric("mine", value)
        if value == 1000.0:
            raise RuntimeError("as if a judge were away")
        return [float(len(completion)) for completion in completions]

    args = QaRLConfig(**without_engine(tmp_path, max_steps=1))
    trainer = QaRLTrainer(dense_model, logs_then_fails, args, train_dataset=prompts())
    with pytest.raises(RuntimeError, match="as if a judge were away"):
        trainer.train()

    trainer.train()

    assert logged(trainer, "mine") == [1.0]


def test_schedule_decay_betas_and_the_end_are_those_of_the_new_run(dense_model, halfway, tmp_path):
    changes = {"weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 1e-6, "max_steps": 6}
    trainer = make(dense_model, tmp_path, **STEPWISE | {"lr_scheduler_type": "linear"} | changes)

    trainer.train(resume_from_checkpoint=str(halfway))

    # A line from 1e-3 at the start to 0 after six updates, of which two were before the checkpoint.
    assert logged(trainer, "learning_rate")[2:] == pytest.approx([4e-3 / 6, 3e-3 / 6, 2e-3 / 6, 1e-3 / 6])
    groups = trainer.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    for group in groups:
        assert (group["betas"], group["eps"]) == ((0.5, 0.7), 1e-6)


def test_steps_of_logs_and_checkpoints_are_those_of_the_new_run(dense_model, halfway, tmp_path):
    resume(halfway, dense_model, tmp_path, save_strategy="steps", save_steps=1)

    # The first run saved every second step, and the Trainer keeps such numbers in its state.
    assert {folder.name for folder in tmp_path.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}


class CountsSaves(TrainerCallback, ExportableState):
    """A callback whose state the Trainer saves."""

    saves = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saves": self.saves}}

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1


def test_a_run_may_go_on_with_a_stateful_callback_more(dense_model, halfway, tmp_path):
    def state_at(step: int) -> dict[str, Any]:
        file = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        return json.loads(file.read_text())["stateful_callbacks"]["CountsSaves"]["attributes"]

    resumed = make(dense_model, tmp_path, **STEPWISE, save_strategy="steps", save_steps=1)
    resumed.add_callback(CountsSaves())

    resumed.train(resume_from_checkpoint=str(halfway))

    assert state_at(3) == {"saves": 0}
    assert state_at(4) == {"saves": 1}


def test_a_schedule_that_cannot_be_computed_anew_takes_no_new_rate(dense_model, tmp_path):
    def run(folder: str, rate: float, **changes) -> QaRLTrainer:
        # Optimizer and schedule of the user, of which the package knows no formula.
        args = QaRLConfig(**without_engine(tmp_path / folder, **STEPWISE, **changes))
        model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        optimizers = (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        return QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), optimizers=optimizers)

    run("a", 1e-3, max_steps=2, save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "a" / "checkpoint-2")

    with pytest.raises(ValueError, match=r"initial_lr was 0\.001 in the checkpoint, and is 0\.1"):
        run("b", 0.1).train(resume_from_checkpoint=checkpoint)
    # Control: with the rate that it had it goes on where it was.
    resumed = run("c", 1e-3)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert logged(resumed, "learning_rate")[-1] == 1e-3 / 8


class CountingSgd(torch.optim.Optimizer):
    """SGD whose steps shrink with their number, which it keeps in its groups, as Prodigy does."""

    def __init__(self, parameters, rate, decay=0.0):
        super().__init__(parameters, {"lr": rate, "decay": decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                parameter.mul_(1 - group["decay"])
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["steps"])


def test_what_an_optimizer_counts_in_its_groups_goes_on_and_its_changed_settings_count(dense_model, tmp_path):
    def run(folder: str, decay: float = 0.0, checkpoint: Path | None = None, **changes) -> QaRLTrainer:
        args = QaRLConfig(**without_engine(tmp_path / folder, **STEPWISE, **changes))
        model = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
        optimizers = (CountingSgd(model.parameters(), 1e-2, decay), None)
        trainer = QaRLTrainer(model, distinct_characters, args, train_dataset=prompts(), optimizers=optimizers)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    straight = run("straight", save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "straight" / "checkpoint-2"

    resumed = run("resumed", checkpoint=checkpoint)
    (group,) = resumed.optimizer.param_groups
    assert group["steps"] == 4
    assert not changed(master_weights(straight), master_weights(resumed))
    # A resumed run saves what its optimizer was made with, and not what it loaded.
    run("again", checkpoint=checkpoint, save_strategy="steps", save_steps=3)
    saved = read_manifest(tmp_path / "again" / "checkpoint-3")
    assert saved["optimizer_began_with"] == read_manifest(checkpoint)["optimizer_began_with"]

    decayed = run("decayed", decay=0.5, checkpoint=checkpoint)
    (group,) = decayed.optimizer.param_groups
    assert (group["decay"], group["steps"]) == (0.5, 4)

    # Control: without what the optimizer began with, its counter is taken for a setting.
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer_began_with": None}))
    reset = run("reset", checkpoint=checkpoint)
    (group,) = reset.optimizer.param_groups
    assert group["steps"] == 2
    assert changed(master_weights(straight), master_weights(reset))


def test_a_new_number_of_micro_batches_trains_on_whole_rollout_batches(dense_model, tmp_path):
    """Two micro-batches of a rollout batch of six stay untrained if the count goes on at four."""
    settings = {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    # Else micro-batches share a pass, at the place of their last one.
    settings["max_tokens_per_pass"] = None
    make(dense_model, tmp_path / "a", **settings, max_steps=2, save_strategy="steps", save_steps=2).train()

    settings |= {"steps_per_generation": 6, "max_steps": 5, "num_generations": 4}
    resumed = make(dense_model, tmp_path / "b", **settings)
    taken = []
    compute_loss = resumed._compute_loss

    def spy(*args):
        taken.append(resumed._step % 6)
        return compute_loss(*args)

    resumed._compute_loss = spy
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))

    # TRL counts a step before or after its loss. Either way each of six places comes once.
    assert taken in ([1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5])
