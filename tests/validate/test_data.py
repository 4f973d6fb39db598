"""`qarl_trl.validate.data`: a training set must fill a rollout batch."""

import pytest
from configs import config
from datasets import Dataset

from qarl_trl import LowBitDistillationConfig, LowBitSFTConfig, QaRLTrainer
from qarl_trl.validate import check_data


def test_fewer_prompts_than_a_rollout_batch_are_refused_with_the_arithmetic_before_a_model_loads(tmp_path):
    """TRL trains nothing then, and says that all is well."""
    args = config(tmp_path, per_device_train_batch_size=8, steps_per_generation=4, num_generations=4)
    # 8 x 4 = 32 completions, 4 of each prompt, are 8 prompts.
    enough = Dataset.from_dict({"prompt": ["a"] * 8})
    too_few = enough.select(range(7))

    with pytest.raises(ValueError, match=r"at least 8 prompts, got 7.*8 x 1 processes x .*=4 = 32 completions"):
        QaRLTrainer("no/such-model", reward_funcs=[], args=args, train_dataset=too_few)

    # Controls: one prompt more, and a set whose length nobody knows.
    check_data({"train_dataset": enough}, args)
    check_data({"train_dataset": too_few.to_iterable_dataset()}, args)


def test_an_evaluation_without_rows_is_refused(tmp_path):
    args = config(tmp_path, eval_strategy="epoch")
    rows = Dataset.from_dict({"prompt": ["a"] * 64})
    none = rows.select([])

    with pytest.raises(ValueError, match=r"eval_dataset must have rows"):
        check_data({"train_dataset": rows, "eval_dataset": none}, args)
    with pytest.raises(ValueError, match=r"eval_dataset\['hard'\] must have rows"):
        check_data({"train_dataset": rows, "eval_dataset": {"easy": rows, "hard": none}}, args)

    check_data({"train_dataset": rows, "eval_dataset": {"easy": rows}}, args)  # control


def test_a_last_batch_of_an_evaluation_that_is_not_full_is_said(tmp_path, caplog, monkeypatch):
    """TRL weighs batches alike: of 3 and 1 answers with rewards 0, 0, 0 and 1 `eval_reward` is 0.5."""
    args = config(tmp_path, eval_strategy="epoch", num_generations_eval=2, per_device_eval_batch_size=4)
    rows = Dataset.from_dict({"prompt": ["a"] * 64})

    check_data({"train_dataset": rows, "eval_dataset": rows}, args)
    assert "last batch" not in caplog.text  # control: 32 whole batches

    check_data({"train_dataset": rows, "eval_dataset": rows.select(range(5))}, args)
    assert "10 answers to evaluate, and a batch of all processes 4" in caplog.text
    assert "the 2 of the last batch weigh more than others" in caplog.text

    monkeypatch.setattr(type(args), "world_size", 2)
    check_data({"train_dataset": rows, "eval_dataset": rows.select(range(5))}, args)
    assert "the 2 of the last batch are filled up with those of the first prompts" in caplog.text

    args.dataloader_drop_last = True
    check_data({"train_dataset": rows, "eval_dataset": rows.select(range(5))}, args)
    assert "the 2 of the last batch are left out" in caplog.text


def test_rows_without_prompts_are_said_before_a_model_loads(tmp_path, caplog):
    """TRL looks for the column in the first step. A class of a user may make it."""
    args = config(tmp_path, eval_strategy="epoch")
    prompts = Dataset.from_dict({"prompt": ["a"] * 64})
    questions = prompts.rename_column("prompt", "question")

    check_data({"train_dataset": questions}, args)
    assert "train_dataset has no column prompt" in caplog.text
    check_data({"train_dataset": prompts, "eval_dataset": {"hard": questions}}, args)
    assert "eval_dataset['hard'] has no column prompt" in caplog.text

    caplog.clear()
    # Controls: environments make prompts, and so may a transform.
    check_data({"train_dataset": questions, "environment_factory": object}, args)
    check_data({"train_dataset": questions.with_transform(lambda rows: {"prompt": rows["question"]})}, args)
    assert "no column prompt" not in caplog.text


def test_answers_to_distill_on_are_asked_for_in_an_evaluation_too(tmp_path):
    args = LowBitDistillationConfig(
        str(tmp_path), bf16=False, use_cpu=True, eval_strategy="epoch", distill_on="answers"
    )
    answers = Dataset.from_dict({"prompt": ["a"] * 64, "completion": ["b"] * 64})
    prompts = answers.remove_columns("completion")

    with pytest.raises(ValueError, match=r"column completion, and eval_dataset has \['prompt'\]"):
        check_data({"train_dataset": answers, "eval_dataset": prompts}, args)
    check_data({"train_dataset": answers, "eval_dataset": answers}, args)  # control


def test_an_evaluation_without_rows_that_nothing_reads_is_none(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a"] * 64, "text": ["a"] * 64})
    given = {"train_dataset": rows, "eval_dataset": rows.select([])}
    check_data(given, config(tmp_path, eval_strategy="no"))

    # Control: TRL's SFT prepares the rows at once, and fails at none.
    with pytest.raises(ValueError, match="eval_dataset must have rows"):
        check_data(given, LowBitSFTConfig(str(tmp_path), bf16=False, use_cpu=True, eval_strategy="no"))
