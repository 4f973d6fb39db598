"""`qarl_trl.LowBitDistillationTrainer`: teachers, given answers, adapters, and refusals before a model loads."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from quant.schemes import same_tensors
from safetensors.torch import save_file
from slow import toys
from slow.toys import logged, prompts, randomize_adapter, save_model, stored_tensors
from toy_runs import OFF, adapter
from toy_runs import make as make_qarl
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_trl import LowBitDistillationConfig, LowBitDistillationTrainer
from qarl_trl.learner.attention import attend_from_cache
from qarl_trl.quant import iter_low_bit_weights
from qarl_trl.quant.start import load_master_weights
from qarl_trl.trainers.teacher import teaches_by_its_base
from qarl_trl.validate import check_run
from qarl_trl.validate.teacher import _check_apart
from trainers.runs import assert_saved, losses, moved, pairs, same_weights, settings, weights


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A toy with other weights than `dense_model`."""
    return save_model(tmp_path_factory.mktemp("other") / "teacher", layers=1, seed=1)


def make(model, folder, data=None, teacher=None, peft_config=None, processing_class=None, eval_data=None, **changes):
    """A student on given answers, if `changes` do not say otherwise."""
    values = {"distill_on": "answers", "max_completion_length": 8, "beta": 0.0} | changes
    args = LowBitDistillationConfig(**settings(folder, **values))
    data = pairs() if data is None else data
    return LowBitDistillationTrainer(
        model, teacher, args, data, eval_data, processing_class=processing_class, peft_config=peft_config
    )


# The teacher ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distill_on", ["rollouts", "answers"])
def test_a_student_comes_closer_to_its_own_start(dense_model, tmp_path, distill_on):
    changes = {"distill_on": distill_on, "max_steps": 12, "learning_rate": 1e-4, "per_device_train_batch_size": 16}
    trainer = make(dense_model, tmp_path / "run", **changes)
    trainer.train()
    trainer.save_model()

    # The first one is what quantization alone costs. Means of three, since each step has other prompts.
    divergences = losses(trainer)
    assert divergences[0] > 0.005
    assert sum(divergences[-3:]) < 0.7 * sum(divergences[:3])
    assert "distilled from its own start in high precision" in (tmp_path / "run" / "README.md").read_text()
    # The start is still what it was.
    start = AutoModelForCausalLM.from_pretrained(dense_model).state_dict()
    assert not moved(start, trainer.teacher_model.state_dict())


def test_a_teacher_that_numbers_its_tokens_otherwise_is_refused_before_a_model_loads(
    dense_model, other_model, tmp_path, caplog
):
    """The sizes of the two vocabularies are equal, so the loss could be computed."""

    def check(teacher, **changes):
        args = LowBitDistillationConfig(**settings(tmp_path / "run", **changes))
        check_run(dense_model, args, {"teacher_model": teacher, "train_dataset": prompts()})

    mixed_up = tmp_path / "mixed up"
    # The same 15 characters in reverse order: all but the middle one have another number.
    shutil.copytree(other_model, mixed_up)
    toys.make_tokenizer(toys.CHARACTERS[::-1]).save_pretrained(mixed_up)
    words = "the student's tokenizer: 14 of 17 tokens differ. Token 2 is '0' for the student, and ' ' for the teacher"
    with pytest.raises(ValueError, match=words):
        # By name the tokenizer is read beside the model, by a loaded model where its config says that it came from.
        check(str(mixed_up))
    with pytest.raises(ValueError, match=words):
        check(AutoModelForCausalLM.from_pretrained(mixed_up))

    # Controls: the same tokenizer, and none.
    check(other_model)
    assert "no tokenizer that could be compared" not in caplog.text
    for file in mixed_up.glob("tokenizer*"):
        file.unlink()
    check(str(mixed_up))
    assert "no tokenizer that could be compared" in caplog.text
    # `beta` chooses the divergence here, and no KL penalty.
    assert "reference model" not in caplog.text


def test_a_model_that_is_loaded_already_is_copied_for_its_teacher(dense_model, tmp_path):
    by_name = make(dense_model, tmp_path / "name")
    by_name.train()

    loaded = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
    # Without a copy student and teacher would be one model.
    by_model = make(loaded, tmp_path / "model")
    by_model.train()

    assert losses(by_model) == losses(by_name)
    assert same_weights(by_model, by_name)


def test_the_base_of_a_merged_adapter_is_the_teacher_bit_for_bit_and_there_is_no_second_model(
    dense_model, other_model, tmp_path
):
    # One after the other: a constructor seeds the generator that puts the rows of a batch in order.
    shared = make(dense_model, tmp_path / "shared", peft_config=adapter(), max_steps=4)
    assert not list(shared.teacher_model.parameters())
    shared.train()
    second = make(dense_model, tmp_path / "second", teacher=dense_model, peft_config=adapter(), max_steps=4)
    assert list(second.teacher_model.parameters())
    second.train()

    # Not two students that have nothing to learn: the base in low bits is apart from itself in high precision.
    assert losses(shared) == losses(second)
    assert losses(shared)[0] > 0.005
    assert same_weights(shared, second)
    # Control: with another teacher the losses are others.
    other = make(dense_model, tmp_path / "other", teacher=other_model, peft_config=adapter(), max_steps=4)
    other.train()
    assert losses(other) != losses(shared)


def test_settings_of_a_teacher_that_is_not_loaded_are_refused(dense_model, tmp_path):
    of_teacher = {"teacher_model_init_kwargs": {"revision": "v2"}}

    with pytest.raises(ValueError, match="needs a teacher that is loaded.* Leave it out"):
        make(dense_model, tmp_path, peft_config=adapter(), **of_teacher)
    # Control: how the student loads is no setting of its teacher.
    make(dense_model, tmp_path, peft_config=adapter(), model_init_kwargs={"attn_implementation": "sdpa"})


def test_asking_the_base_leaves_the_student_as_it_was(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, peft_config=adapter())
    randomize_adapter(trainer.model)
    tokens = torch.tensor([[3, 4, 5, 6]])
    trainer.model.train()
    with torch.no_grad():
        before = trainer.model(tokens).logits
        of_teacher = trainer.teacher_model.base_model(input_ids=tokens).last_hidden_state
        after = trainer.model(tokens).logits

    assert torch.equal(after, before)
    assert trainer.model.training
    # peft switches an adapter off by taking its gradients, too.
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            assert parameter.requires_grad, name

    # The teacher is the model of the folder, and knows nothing of the random adapter.
    plain = AutoModelForCausalLM.from_pretrained(dense_model, dtype=torch.float32)
    with torch.no_grad():
        expected = plain.base_model(input_ids=tokens).last_hidden_state
    assert torch.equal(of_teacher, expected)


def test_beside_an_fp8_cache_a_second_model_teaches(dense_model, tmp_path):
    def shares_base(**changes):
        args = LowBitDistillationConfig(**settings(tmp_path, use_vllm=True, bf16=True, **changes))
        return teaches_by_its_base(args, adapter(), is_sharded=False)

    assert not shares_base(kv_cache_dtype="fp8")
    # Controls.
    assert shares_base()
    assert shares_base(kv_cache_dtype="fp8", quantize_learner_kv=False)

    # The reason: the base is a part of the student, whose attention rounds keys and values.
    trainer = make(dense_model, tmp_path / "run", peft_config=adapter())
    tokens = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        before = trainer.teacher_model.base_model(input_ids=tokens).last_hidden_state
        attend_from_cache(trainer.model, "fp8")
        after = trainer.teacher_model.base_model(input_ids=tokens).last_hidden_state
    assert not torch.equal(after, before)


def test_a_frozen_base_has_a_teacher_in_high_precision(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, peft_config=adapter(), lora_base="frozen", max_steps=4)
    start = weights(trainer)
    # The frozen base itself is in low bits, so it cannot teach.
    names = {type(module).__name__ for module in trainer.teacher_model.modules()}
    assert "Linear" in names
    assert not any("Frozen" in name for name in names)

    trainer.train()
    trainer.save_model()

    assert losses(trainer)[0] > 0.005
    changed = moved(start, weights(trainer))
    assert changed
    assert all("lora_" in name for name in changed)
    assert (tmp_path / "base" / "config.json").is_file()


@pytest.mark.parametrize("bf16", [True, False])
def test_student_and_teacher_compute_in_the_precision_of_the_run(dense_model, tmp_path, bf16):
    """TRL's own trainer computes in the dtype of the weights, whatever `bf16` says."""
    trainer = make(dense_model, tmp_path, max_steps=1, bf16=bf16)
    # Of one layer each: what decides is the same for all of them.
    dtypes = set()
    for model in (trainer.model, trainer.teacher_model):
        layer = model.model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))

    trainer.train()

    assert dtypes == {torch.bfloat16 if bf16 else torch.float32}


# Given answers -------------------------------------------------------------------------------------------------------


def test_answers_end_at_their_end_token_and_are_cut_to_the_longest(dense_model, tmp_path):
    rows = [{"prompt": "1+1=", "completion": "2#"}, {"prompt": "2+2=", "completion": "4" * 20}]
    trainer = make(dense_model, tmp_path, Dataset.from_list(rows * 4))
    tokenizer = make_tokenizer("0123456789+=;# ")

    batch = trainer._generate_and_score_completions(rows)

    # "2", "#" and the end token; eight of the twenty characters of the other, whose end was cut off.
    short, long = batch["completion_ids"]
    assert short.tolist() == [*tokenizer("2#")["input_ids"], 1, *[0] * 5]
    assert batch["completion_mask"][0].tolist() == [1] * 3 + [0] * 5
    assert long.tolist() == tokenizer("4" * 8)["input_ids"]
    assert batch["prompt_ids"][0].tolist() == tokenizer("1+1=")["input_ids"]
    assert batch["num_items_in_batch"] == 11


def test_what_is_not_learned_of_an_answer_is_said(dense_model, tmp_path, caplog):
    trainer = make(dense_model, tmp_path, max_completion_length=4)
    said = {"are cut there": "4444", "up to their first end token": "<eos>5"}

    # Controls: an answer of three tokens and its end token, and those that have written their end token.
    for short in ("444", "44<eos>", "4<eos> "):
        trainer._answer_tokens("1+1=", short)
    assert not any(words in caplog.text for words in said)

    for words, completion in said.items():
        trainer._answer_tokens("1+1=", completion)
        assert words in caplog.text


def chat_rows():
    rows = []
    for n in range(10, 18):
        question = {"role": "user", "content": f"{n}+1="}
        answer = {"role": "assistant", "content": f"{n + 1}"}
        rows.append({"prompt": [question], "completion": [answer]})
    return rows


def with_template(model, template):
    """The tokenizer of a model, with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    return tokenizer


def test_answers_of_a_chat_are_what_its_template_writes_after_the_prompt(dense_model, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{{ '<eos>\\n' if m.role == 'assistant' else '' }}{% endfor %}"
    tokenizer = with_template(dense_model, template)
    trainer = make(dense_model, tmp_path, Dataset.from_list(chat_rows()), processing_class=tokenizer)

    batch = trainer._generate_and_score_completions(chat_rows()[:1])

    tokens = make_tokenizer("0123456789+=;# ")
    assert batch["prompt_ids"][0].tolist() == tokens("10+1=")["input_ids"]
    assert batch["completion_ids"][0].tolist() == [*tokens("11")["input_ids"], 1]

    # It writes the number of messages first, so that the prompt is another one when an answer follows.
    trainer._tokenizer.chat_template = "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="renders a prompt differently when an answer follows"):
        trainer._generate_and_score_completions(chat_rows()[:1])


def test_columns_that_nothing_uses_may_be_removed_and_answers_stay(dense_model, tmp_path):
    runs = []
    for removes in (False, True):
        trainer = make(dense_model, tmp_path / str(removes), max_steps=2, remove_unused_columns=removes)
        trainer.train()
        runs.append(trainer)

    assert same_weights(*runs)


def test_a_run_on_answers_resumes_bit_for_bit_and_saves_what_the_forward_used(dense_model, tmp_path):
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = make(dense_model, tmp_path / "run", **changes)
    straight.train()
    resumed = make(dense_model, tmp_path / "again", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))

    assert same_weights(resumed, straight)
    # The last update made all low-bit weights out of date: a forward makes them anew.
    with torch.no_grad():
        straight.model(torch.tensor([[3, 4, 5]]))
    used = straight.low_bit_store.kept()
    straight.save_model()
    assert_saved(tmp_path / "run", used)


def test_rl_goes_on_from_the_distilled_weights_byte_for_byte(dense_model, tmp_path):
    """As docs/recover.md says: from the master weights of the last checkpoint."""
    student = make(dense_model, tmp_path / "run", save_strategy="steps", save_steps=2)
    student.train()
    student.save_model()
    distilled = stored_tensors(tmp_path / "run")

    policy = make_qarl(str(tmp_path / "run" / "checkpoint-2"), tmp_path / "rl")
    started = dict(iter_low_bit_weights(policy.model))
    assert same_tensors(started, distilled)

    # Control: the start of the distillation had other weights.
    before = dict(iter_low_bit_weights(make_qarl(dense_model, tmp_path / "other").model))
    assert moved(before, distilled)
    policy.train()


@pytest.fixture(scope="module")
def distilled(dense_model, tmp_path_factory):
    """A checkpoint of a distillation in groups of 64."""
    folder = tmp_path_factory.mktemp("distilled")
    make(dense_model, folder, quant_group_size=64, max_steps=1, save_strategy="steps", save_steps=1).train()
    return folder / "checkpoint-1"


def test_a_start_from_weights_that_were_trained_for_another_scheme_is_said_once(distilled, tmp_path, caplog):
    def said(model=str(distilled), **changes):
        caplog.clear()
        make_qarl(model, tmp_path / "rl", **changes)
        return [message for message in caplog.messages if "another model than that run ended with" in message]

    (message,) = said(quant_group_size=32)
    assert f"{distilled} has master weights that a run trained for {{'weights int4 per group 64'" in message
    assert "rounds them to {'weights int4 per group 32'" in message
    # A script may load it.
    assert said(AutoModelForCausalLM.from_pretrained(distilled, dtype=torch.float32), quant_scheme="W8A16")

    # Controls: the same scheme, also in words of an earlier version, and none.
    assert not said(quant_group_size=64)
    earlier = ["lm_head", r"re:.*mlp\.gate$", r"re:.*\.router$", "re:.*shared_expert_gate$"]
    assert not said(quant_group_size=64, quant_ignore=earlier)
    assert not said(**OFF)


@pytest.mark.parametrize("peft_config", [None, adapter()], ids=["a second model", "its base"])
def test_master_weights_that_would_teach_are_said_with_the_way_out(
    dense_model, distilled, tmp_path, caplog, peft_config
):
    def said(model=str(distilled), **changes):
        caplog.clear()
        make(model, tmp_path / "again", peft_config=peft_config, quant_group_size=64, **changes)
        return [message for message in caplog.messages if "good only rounded" in message]

    (message,) = said()
    assert f"{distilled} has master weights of a low-bit run" in message
    assert "Set teacher_model_name_or_path" in message
    assert f"began with (this one: {dense_model!r})" in message
    # A script may load it.
    assert said(AutoModelForCausalLM.from_pretrained(distilled, dtype=torch.float32))
    # Or it is named as the teacher of another start.
    assert said(dense_model, teacher_model_name_or_path=str(distilled))
    assert said(dense_model, teacher=AutoModelForCausalLM.from_pretrained(distilled))

    # Controls: another teacher, and a start that no run has trained.
    assert not said(teacher_model_name_or_path=dense_model)
    assert not said(teacher=dense_model)
    assert not said(dense_model)


def test_weights_of_a_run_in_high_precision_are_trained_for_no_scheme(distilled, tmp_path, caplog):
    """Also those of rollouts alone in low bits, whose manifest names their scheme."""
    copied = shutil.copytree(distilled, tmp_path / "copied")
    manifest = json.loads((copied / "manifest.json").read_text())

    def said(facts):
        caplog.clear()
        (copied / "manifest.json").write_text(json.dumps(facts))
        make_qarl(str(copied), tmp_path / "rl", quant_group_size=32)
        return "another model than that run ended with" in caplog.text

    assert said(manifest)  # control

    assert not said(manifest | {"scheme": "none"})
    assert not said(manifest | {"settings": manifest["settings"] | {"quantize_learner": False}})
    # A file of another program.
    assert not said([])


def test_an_evaluation_leaves_the_student_in_training(dense_model, tmp_path):
    """Of a student with an adapter, whose base is the teacher."""
    with_evaluations = make(
        dense_model, tmp_path / "one", peft_config=adapter(), eval_data=pairs(4), eval_strategy="steps", eval_steps=1
    )
    with_evaluations.train()
    without = make(dense_model, tmp_path / "other", peft_config=adapter())
    without.train()

    divergences = logged(with_evaluations, "eval_loss")
    assert len(divergences) == 2
    assert min(divergences) > 0
    assert losses(with_evaluations) == losses(without)


def test_a_resumed_run_needs_the_same_teacher(dense_model, other_model, tmp_path):
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make(dense_model, tmp_path / "run", **changes).train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")

    other = make(dense_model, tmp_path / "other", teacher=other_model, **changes)
    with pytest.raises(ValueError, match="teacher_model_name_or_path was None there"):
        other.train(resume_from_checkpoint=checkpoint)


def test_a_resumed_run_needs_the_same_teacher_also_if_that_is_a_loaded_model(dense_model, other_model, tmp_path):
    def load(name):
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    # Loaded models have no name in the settings; the trainer keeps where their configs say that they came from.
    make(load(dense_model), tmp_path / "own", **changes).train()
    taught = make(dense_model, tmp_path / "taught", teacher=load(other_model), **changes)
    taught.train()

    another = make(load(dense_model), tmp_path / "a", teacher=load(other_model), **changes)
    with pytest.raises(ValueError, match="teacher_model_name_or_path was None there"):
        another.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-1"))
    another = make(dense_model, tmp_path / "b", teacher=load(dense_model), **changes)
    with pytest.raises(ValueError, match="teacher_model_name_or_path was .*teacher.* there, and is .*dense"):
        another.train(resume_from_checkpoint=str(tmp_path / "taught" / "checkpoint-1"))

    # The start of a loaded model is what it was when it was given, whatever its file says.
    start = load(dense_model)
    start.lm_head.weight.data.mul_(2)
    another = make(start, tmp_path / "d", **changes)
    with pytest.raises(ValueError, match="loaded_teacher was"):
        another.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-1"))

    # Control: the same one.
    resumed = make(dense_model, tmp_path / "c", teacher=load(other_model), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "taught" / "checkpoint-1"))
    assert same_weights(resumed, taught)


def test_a_config_is_left_as_it_was_for_the_next_trainer(dense_model, other_model, tmp_path):
    """The teacher of the first one would be that of the second."""
    values = settings(tmp_path, distill_on="answers", max_completion_length=8)
    args = LowBitDistillationConfig(**values)

    taught = LowBitDistillationTrainer(dense_model, other_model, args, pairs())
    own = LowBitDistillationTrainer(dense_model, None, args, pairs())

    assert args.to_dict() == LowBitDistillationConfig(**values).to_dict()
    assert taught.teacher_model.config._name_or_path == other_model
    assert own.teacher_model.config._name_or_path == dense_model


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_loads(monkeypatch):
    """A model that loads fails the test."""
    monkeypatch.setattr(
        "trl.trainer.distillation_trainer.create_model_from_path", lambda *_, **__: pytest.fail("it loaded")
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_scheme": "none"}, "the student equals its own start"),
        ({"quantize_learner": False}, "the student equals its own start"),
        ({"data": prompts(8)}, "needs a column completion, and train_dataset has .'prompt'"),
        ({"data": pairs(2)}, "at least 4 prompts, got 2.*per_device_train_batch_size=4"),
        ({"teacher": "no/such-teacher"}, "teacher_model='no/such-teacher' cannot be read"),
    ],
)
def test_what_cannot_teach_is_refused_before_a_model_loads(dense_model, tmp_path, nothing_loads, changes, words):
    with pytest.raises(ValueError, match=words):
        make(dense_model, tmp_path, **changes)


def test_a_teacher_of_another_vocabulary_is_refused(dense_model, tmp_path, tiny_model, nothing_loads):
    with pytest.raises(ValueError, match="student's vocabulary of 64 tokens, got 32"):
        make(dense_model, tmp_path, teacher=tiny_model(vocab_size=32))


@pytest.mark.parametrize(
    "loads", [{}, {"peft_config": adapter(), "lora_base": "frozen"}], ids=["whole", "frozen base"]
)
def test_a_teacher_that_lacks_a_weight_is_refused(dense_model, other_model, tmp_path, loads):
    lacking = Path(shutil.copytree(other_model, tmp_path / "lacking"))
    tensors = stored_tensors(lacking)
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, lacking / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ValueError, match=r"lacking lacks 1 weights of its model, first model.*down_proj"):
        make(dense_model, tmp_path / "run", teacher=str(lacking), **loads)

    # Control: the same teacher with all of them.
    make(dense_model, tmp_path / "run", teacher=other_model, **loads)


def test_a_quantized_start_does_not_teach_itself(gptq_model, dense_model, tmp_path):
    with pytest.raises(ValueError, match="starts from a quantized checkpoint.* Name the model"):
        make(gptq_model, tmp_path / "refused", quant_scheme="checkpoint")

    # Control: the model that it was made from does.
    # Its loss is small and not zero: GPTQ's weights are near those of the model.
    trainer = make(gptq_model, tmp_path / "taught", teacher=dense_model, quant_scheme="checkpoint")
    trainer.train()
    assert losses(trainer)[0] > 0.001


def test_a_revision_of_a_teacher_needs_its_name(dense_model, tmp_path, nothing_loads):
    """Without one the start of the student teaches, in the revision that it has."""
    with pytest.raises(ValueError, match="teacher_model_revision='v2' needs teacher_model_name_or_path"):
        make(dense_model, tmp_path, teacher_model_revision="v2")


def test_the_named_teacher_of_a_loaded_quantized_start_is_loaded_as_it_is(gptq_model, dense_model, tmp_path):
    """The loader of quantized checkpoints is for the student, which is loaded already."""
    by_name = make(gptq_model, tmp_path / "name", teacher=dense_model, quant_scheme="checkpoint")
    by_name.train()

    student = load_master_weights(gptq_model)
    by_model = make(student, tmp_path / "model", teacher=dense_model, quant_scheme="checkpoint")
    by_model.train()

    assert losses(by_model) == losses(by_name)


def test_a_teacher_is_apart_from_the_student(dense_model, other_model, tmp_path):
    """One model would be frozen or quantized in both places."""

    def load(name):
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    student = load(dense_model)
    with_its_head = load(other_model)
    with_its_head.lm_head = student.lm_head
    base = load(dense_model)
    with_adapter = get_peft_model(base, adapter())
    for model, teacher in ((student, student), (student, with_its_head), (with_adapter, base)):
        with pytest.raises(ValueError, match="parts in common with the student"):
            make(model, tmp_path / "refused", teacher=teacher)

    # Controls: a copy, and an output layer and an embedding that nobody trains.
    make(student, tmp_path / "copy", teacher=copy.deepcopy(student)).train()
    frozen = load(dense_model)
    teacher = load(other_model)
    teacher.lm_head = frozen.lm_head.requires_grad_(False)
    teacher.model.embed_tokens = frozen.model.embed_tokens.requires_grad_(False)
    make(frozen, tmp_path / "frozen", teacher=teacher).train()


def test_a_student_may_share_with_its_teacher_what_nobody_trains(dense_model, other_model):
    """By an adapter frozen, and in high precision also a layer."""

    def pair(shared, student_of=lambda model: model):
        student = AutoModelForCausalLM.from_pretrained(dense_model)
        teacher = AutoModelForCausalLM.from_pretrained(other_model)
        teacher.set_submodule(shared, student.get_submodule(shared).requires_grad_(False))
        return teacher, student_of(student)

    head = pair("lm_head", lambda student: get_peft_model(student, adapter()))
    layer = pair("model.layers.0.mlp.up_proj")
    _check_apart(*head, quantized=True)
    _check_apart(*layer, quantized=False)

    with pytest.raises(ValueError, match="parts in common with the student"):
        _check_apart(*layer, quantized=True)
    # Controls: both would be trained.
    layer[1].requires_grad_(True)
    with pytest.raises(ValueError, match="parts in common with the student"):
        _check_apart(*layer, quantized=False)


def test_a_model_with_an_adapter_does_not_teach_itself(tiny_model, tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="PeftModel has no start of its own"):
        make(model, tmp_path)


def test_an_engine_beside_given_answers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="samples nothing"):
        LowBitDistillationConfig(**settings(Path(tmp_path), distill_on="answers", use_vllm=True, bf16=True))
