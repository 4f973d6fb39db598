"""`qarl_trl.LowBitSFTTrainer`: the options of TRL's SFT, adapters, and what is refused before a model loads."""

from __future__ import annotations

import shutil

import pytest
import torch
from datasets import Dataset
from slow.test_invariants import _agree, _layers_of, _record_forward
from slow.toys import make_tokenizer, stored_tensors
from torch.utils.data import DataLoader, WeightedRandomSampler
from toy_runs import adapter
from transformers import Lfm2Config, OPTConfig, OPTForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from qarl_trl import LowBitSFTConfig, LowBitSFTTrainer
from qarl_trl.checkpoints.folder import damage
from qarl_trl.quant import remove_quantization
from qarl_trl.validate import check_run
from qarl_trl.validate.data import check_rows
from trainers.runs import losses, moved, pairs, same_weights, settings, weights


def texts(number=32):
    """Rows of texts."""
    rows = []
    for n in range(40, 40 + number):
        rows.append({"text": f"{n}+{n}={2 * n}#"})
    return Dataset.from_list(rows)


def make(model, folder, data=None, peft_config=None, **changes):
    args = LowBitSFTConfig(**settings(folder, **changes))
    return LowBitSFTTrainer(model, args, train_dataset=pairs() if data is None else data, peft_config=peft_config)


# Settings of TRL's SFT: rows that share a sequence, which tokens count, losses, memory.
OPTIONS = {
    "bfd packing": {"packing": True, "max_length": 32},
    "wrapped packing": {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
    "padding free": {"padding_free": True, "max_length": None},
    "all tokens": {"completion_only_loss": False},
    "dft": {"loss_type": "dft"},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_trl_means_the_same_with_the_scheme_off_and_trains_low_bit_weights(dense_model, tmp_path, option):
    changes = OPTIONS[option]
    args = SFTConfig(**settings(tmp_path / "stock", **changes))
    stock = SFTTrainer(dense_model, args, train_dataset=pairs())
    stock.train()
    off = make(dense_model, tmp_path / "off", quant_scheme="none", **changes)
    off.train()
    low_bit = make(dense_model, tmp_path / "low", **changes)
    low_bit.train()

    assert losses(off) == losses(stock)
    assert same_weights(off, stock)
    assert losses(low_bit) != losses(stock)  # control
    assert low_bit.low_bit_store.bypassed_layers() == []


def test_rows_that_share_a_sequence_do_not_see_each_other(dense_model, tmp_path):
    """The first loss: of packed rows and of rows with padding, over the same tokens."""
    few = texts(4)
    alone = make(dense_model, tmp_path / "alone", few, max_steps=1)
    # One row of a batch of one, for the four rows of the other trainer's batch.
    packed = make(
        dense_model, tmp_path / "packed", few, max_steps=1, packing=True, max_length=64, per_device_train_batch_size=1
    )
    assert len(packed.train_dataset) == 1  # control: they share one

    alone.train()
    packed.train()

    assert losses(packed)[0] == pytest.approx(losses(alone)[0], abs=1e-5)


@pytest.mark.parametrize("method", ["predict", "evaluate"])
def test_weights_that_were_written_past_the_optimizer_are_scored(dense_model, tmp_path, method):
    """`param.data` leaves no trace of a write."""
    trainer = LowBitSFTTrainer(
        dense_model, LowBitSFTConfig(**settings(tmp_path)), train_dataset=pairs(), eval_dataset=pairs(4)
    )
    trainer.train()
    # Now the store has low-bit weights that were in use, and would go on with them.
    before = trainer.predict(trainer.eval_dataset).metrics["test_loss"]

    for parameter in trainer.model.parameters():
        parameter.data.mul_(1.5)

    if method == "predict":
        after = trainer.predict(trainer.eval_dataset).metrics["test_loss"]
    else:
        after = trainer.evaluate()["eval_loss"]
    written = load_scaled(dense_model, trainer)
    assert after != before
    assert after == pytest.approx(written, rel=1e-6)


def load_scaled(model, trainer):
    """The loss of a new trainer with the weights of `trainer`."""
    args = LowBitSFTConfig(**settings(trainer.args.output_dir))
    other = LowBitSFTTrainer(model, args, train_dataset=pairs(), eval_dataset=pairs(4))
    other.model.load_state_dict(trainer.model.state_dict())
    return other.evaluate()["eval_loss"]


def test_packed_evaluations_need_the_positions_of_packed_training(tmp_path):
    with pytest.raises(ValueError, match="eval_packing must be False without packing"):
        LowBitSFTConfig(**settings(tmp_path, eval_packing=True))

    # Controls: positions come with each of these, and 'wrapped' joins texts on purpose.
    LowBitSFTConfig(**settings(tmp_path, eval_packing=True, packing=True))
    LowBitSFTConfig(**settings(tmp_path, eval_packing=True, padding_free=True, max_length=None))
    LowBitSFTConfig(**settings(tmp_path, eval_packing=True, packing_strategy="wrapped"))


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": True},
        {"packing": True, "eval_packing": True},
        {"padding_free": True, "max_length": None},
    ],
)
def test_rows_that_share_a_sequence_are_refused_where_layers_run_on(tmp_path, changes):
    """A convolution or a state space reads its neighbours whatever their positions say."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # A config says enough: the refusal comes before a model is built.
    for name, layer_types in (("mixed", ["conv", "full_attention"]), ("attention", ["full_attention"] * 2)):
        Lfm2Config(**sizes, **heads, layer_types=layer_types).save_pretrained(tmp_path / name)
    mixed = str(tmp_path / "mixed")

    def check(model, **more):
        check_run(model, LowBitSFTConfig(**settings(tmp_path / "run", **more)), {})

    with pytest.raises(
        ValueError, match="must be off for a model of type 'lfm2': it has layers of type 'conv', which run on"
    ):
        check(mixed, **changes)

    # Controls.
    check(mixed)
    check(mixed, packing=True, packing_strategy="wrapped")
    check(mixed, quant_scheme="none", **changes)
    check(str(tmp_path / "attention"), **changes)


def test_rows_that_share_a_sequence_are_refused_where_attention_does_not_read_their_positions(tmp_path):
    """OPT takes positions and masks by none. No config says so: the first pass of a run measures it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 2, "vocab_size": 64, "word_embed_proj_dim": 128}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = OPTForCausalLM(OPTConfig(**sizes, **ends, num_attention_heads=2, max_position_embeddings=64, init_std=0.2))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")

    packed = make(name, tmp_path / "packed", texts(), packing=True, max_length=32)
    # The second call, too: a notebook may try again.
    for _ in range(2):
        with pytest.raises(ValueError, match="of type 'opt': a sequence's log-probs change by .* neighbour"):
            packed.train()

    # Controls: alone, and cut and joined on purpose.
    make(name, tmp_path / "alone", texts(), max_steps=1).train()
    make(
        name, tmp_path / "wrapped", texts(), max_steps=1, packing=True, packing_strategy="wrapped", max_length=32
    ).train()


def test_a_merged_adapter_is_trained_and_the_merged_model_is_saved(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, peft_config=adapter())
    start = weights(trainer)
    trainer.train()
    # The adapter is what resumes, the merged model in `low_bit` is what an engine loads.
    trainer.save_model()

    changed = moved(start, weights(trainer))
    assert changed
    assert all("lora_" in name for name in changed)

    # All seven layers, of which the adapter has two: the others are in low bits all the same.
    stored = stored_tensors(tmp_path / "low_bit")
    used = _record_forward(trainer.model)
    assert len(_layers_of(used)) == 7
    assert _agree(used, stored)
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_an_adapter_beside_a_frozen_base_is_trained_and_resumes_bit_for_bit(dense_model, tmp_path):
    changes = {"lora_base": "frozen", "save_strategy": "steps", "save_steps": 1}
    straight = make(dense_model, tmp_path / "straight", peft_config=adapter(), **changes)
    straight.train()

    resumed = make(dense_model, tmp_path / "resumed", peft_config=adapter(), **changes)
    start = weights(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-1"))

    assert same_weights(resumed, straight)
    assert moved(start, weights(straight))  # control
    straight.save_model()
    assert (tmp_path / "straight" / "base" / "config.json").is_file()


@pytest.mark.parametrize(
    ("data", "changes", "words"),
    [
        (Dataset.from_list([{"problem": "1+1", "answer": "2"}]), {}, "column 'text' .dataset_text_field.* got"),
        (texts(), {"dataset_text_field": "body"}, "column 'body'"),
        (texts(), {"completion_only_loss": True}, "needs the columns prompt and completion"),
    ],
)
def test_data_without_the_columns_are_refused_before_a_model_loads(dense_model, tmp_path, data, changes, words):
    changed = settings(tmp_path, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.trainer.sft_trainer.create_model_from_path", lambda *_, **__: pytest.fail("it loaded"))
        with pytest.raises(ValueError, match=words):
            LowBitSFTTrainer(dense_model, LowBitSFTConfig(**changed), train_dataset=data)


def chats(*answers):
    """Rows of messages, with these answers."""
    question = {"role": "user", "content": "1+1="}
    rows = []
    for answer in answers:
        rows.append({"messages": [question, {"role": "assistant", "content": answer}]})
    return rows


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": None}], "completion"),
        # datasets makes `None` of a key that a row of a file has not.
        ([{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1="}], "completion"),
        ([{"prompt": "1+1=", "completion": "2"}, {"completion": "2"}], "prompt"),
        ([{"text": "1+1=2"}, {"text": None}], "text"),
        ([*chats("2"), {"messages": []}], "messages"),
        ([{"conversations": [{"from": "gpt", "value": "2"}]}, {"conversations": None}], "conversations"),
    ],
)
def test_a_row_without_a_text_is_named_before_a_model_loads(dense_model, tmp_path, monkeypatch, rows, column):
    monkeypatch.setattr("trl.trainer.sft_trainer.create_model_from_path", lambda *_, **__: pytest.fail("it loaded"))
    args = LowBitSFTConfig(**settings(tmp_path))
    data = Dataset.from_list(rows)

    with pytest.raises(ValueError, match=rf"train_dataset\[1\]: {column} must be text or .*got none.* such rows out"):
        LowBitSFTTrainer(dense_model, args, train_dataset=data)
    with pytest.raises(ValueError, match=rf"eval_dataset\['hard'\]\[1\]: {column} must be"):
        LowBitSFTTrainer(dense_model, args, train_dataset=data.select([0]), eval_dataset={"hard": data})

    # Control.
    check_rows({"train_dataset": data.select([0])}, args)


def test_a_row_may_have_nothing_where_nobody_looks(tmp_path):
    args = LowBitSFTConfig(**settings(tmp_path))

    def check(*rows, **others):
        check_rows({"train_dataset": Dataset.from_list(list(rows)), **others}, args)

    # The chat template may have something to say of each.
    check(*chats("2", None))
    # TRL leaves it out.
    check({"prompt": chats("2")[0]["messages"], "completion": []})
    check({"messages": chats("2")[0]["messages"], "text": None})
    check({"prompt": "1+1=", "completion": "2", "text": "", "messages": None})
    check({"input_ids": [2, 3], "text": None})
    check({"text": None}, formatting_func=str)

    # Control: TRL fails at a prompt without messages.
    with pytest.raises(ValueError, match=r"train_dataset\[0\]: prompt must be text or messages"):
        check({"prompt": [], "completion": chats("2")[0]["messages"]})


@pytest.mark.parametrize("packing", [False, True])
def test_data_of_which_nothing_is_left_to_learn_are_refused(dense_model, tmp_path, packing, caplog):
    """TRL (1.16) trains on packed ones with a loss of 0, and leaves out the others."""
    # Six prompts of six tokens, and two of ten: with max_length=6 no completion begins before the cut.
    some = Dataset.from_list([*pairs(6), *[{"prompt": "1+1+1+1+1=", "completion": "5#"}] * 2])

    with pytest.raises(ValueError, match="No row has a token to learn within max_length=6"):
        make(dense_model, tmp_path / "none", some, max_length=6, packing=packing)

    # Controls.
    make(dense_model, tmp_path / "some", some, max_length=8, packing=packing)
    assert ("2 of 8 rows are left out" in caplog.text) is not packing
    caplog.clear()
    make(dense_model, tmp_path / "all", some, max_length=16, packing=packing)
    assert "left out" not in caplog.text


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_without_a_chat_template_are_refused_before_a_model_loads(dense_model, tmp_path, column):
    messages = [{"role": "user", "content": "1+1="}]
    row = {"prompt": messages, "completion": messages} if column == "prompt" else {column: messages}

    def check(data, **more):
        args = LowBitSFTConfig(**settings(tmp_path / "run", **more))
        check_run(dense_model, args, {"train_dataset": Dataset.from_list(data)})

    with pytest.raises(ValueError, match="has messages, and the tokenizer has no chat template: set chat_template"):
        # TRL would fail only when it maps the data set, after the model has loaded.
        check([row])

    # Controls.
    check([row], chat_template_path="somewhere.jinja")
    check([{"prompt": "1+1=", "completion": "2"}])
    # Of these TRL renders nothing.
    check([row | {"input_ids": [2, 3]}])
    check([row], dataset_kwargs={"skip_prepare_dataset": True})
    check([{"text": "1+1=2", "conversations": ["of a game"]}])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"padding_free": True}, "padding_free without packing does not cut rows to max_length=1024"),
        ({"activation_offloading": True}, "activation_offloading needs a GPU"),
        ({"use_liger_kernel": True}, "use_liger_kernel must be False"),
        ({"torch_compile": True}, "torch_compile must be False in low bits"),
    ],
)
def test_settings_that_cannot_run_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        LowBitSFTConfig(**settings(tmp_path, **changes))


def test_torch_compile_is_trls_without_quantization(tmp_path):
    assert LowBitSFTConfig(**settings(tmp_path, torch_compile=True, quant_scheme="none")).torch_compile


# Resuming -----------------------------------------------------------------------------------------------------------


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        raise RuntimeError("as if out of memory")


def test_a_call_that_failed_leaves_no_noise_for_the_next(dense_model, tmp_path):
    trainer = make(dense_model, tmp_path, neftune_noise_alpha=5.0, max_steps=2)
    trainer.add_callback(Fails())
    hooks = trainer.model.get_input_embeddings()._forward_hooks
    before = len(hooks)

    with pytest.raises(RuntimeError, match="as if out of memory"):
        trainer.train()

    assert len(hooks) == before


def rows_of_a_run(model, folder, checkpoint=None, **changes):
    """The rows that a run of one epoch trains on."""
    # 16 rows in four updates, and a checkpoint after the second.
    values = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": -1, "save_steps": 2}
    values |= {"num_train_epochs": 1, "save_strategy": "steps"} | changes
    trainer = LowBitSFTTrainer(model, LowBitSFTConfig(**settings(folder, **values)), train_dataset=pairs(16))
    rows = []
    compute_loss = trainer.compute_loss

    def noted(model, inputs, *args, **kwargs):
        # As tuples, of which the test makes sets.
        rows.extend(map(tuple, inputs["input_ids"].tolist()))
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = noted
    trainer.train(resume_from_checkpoint=checkpoint)
    return rows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_accumulation_steps": 1}, "2 updates are done: about 4 rows are trained again"),
        ({"gradient_accumulation_steps": 4}, "2 updates are done: about 8 rows are left out"),
        ({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}, None),
        ({}, None),
    ],
)
def test_a_resume_with_updates_of_another_size_says_which_rows_it_moves(dense_model, tmp_path, caplog, changes, words):
    first = rows_of_a_run(dense_model, tmp_path / "first")[:8]
    caplog.clear()

    rest = rows_of_a_run(dense_model, tmp_path / "rest", str(tmp_path / "first" / "checkpoint-2"), **changes)

    said = [message for message in caplog.messages if "rows of the data set" in message]
    # Each of the 16 rows is another one. The checkpoint was written after the first 8 of them.
    twice = len(set(first) & set(rest))
    never = 16 - len(set(first) | set(rest))
    if words is None:
        assert not said
        assert (twice, never) == (0, 0)
    else:
        assert len(said) == 1
        assert words in said[0]
        assert twice + never in (4, 8)


class RandomRows(LowBitSFTTrainer):
    """A user's class whose sampler draws from torch's own generator."""

    def _get_train_sampler(self, *_):
        return WeightedRandomSampler([1.0] * len(self.train_dataset), len(self.train_dataset))


class LoaderWithLength(LowBitSFTTrainer):
    """A user's class that reads all of a stream, so that its loader knows the length."""

    def get_train_dataloader(self):
        rows = list(self.train_dataset)
        loader = DataLoader(rows, self.args.per_device_train_batch_size, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


TRAINER_CLASSES = {"own sampler": RandomRows, "own loader of a stream": LoaderWithLength}


@pytest.mark.parametrize("kind", ["by length", "own sampler", "stream", "own loader of a stream"])
def test_a_resume_in_any_epoch_goes_on_with_the_same_rows(dense_model, tmp_path, kind):
    """Four updates an epoch."""
    rows = [{"prompt": f"{40 + n}+{n}=", "completion": "1" * (1 + n % 7) + "#"} for n in range(16)]
    data = Dataset.from_list(rows)
    # Nobody serves these.
    changes = {"max_steps": 9, "export_low_bit": False}
    if kind == "by length":
        changes["train_sampling_strategy"] = "group_by_length"
    if kind.endswith("stream"):
        data = data.to_iterable_dataset()
    trainer_class = TRAINER_CLASSES.get(kind, LowBitSFTTrainer)

    def run(folder, **saving):
        args = LowBitSFTConfig(**settings(folder, **changes, **saving))
        return trainer_class(dense_model, args, train_dataset=data)

    straight = run(tmp_path / "straight", save_strategy="steps", save_steps=1)
    straight.train()

    for step in (1, 4, 5, 7):
        folder = tmp_path / f"resumed from {step}"
        # The next step is the first that it saves.
        resumed = run(folder, save_strategy="steps", save_steps=step + 1)
        resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / f"checkpoint-{step}"))
        again = run(tmp_path / f"resumed again from {step}")
        again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step + 1}"))

        assert same_weights(resumed, straight), step
        assert same_weights(again, straight), step


@pytest.mark.parametrize("kind", ["end token", "template", "template of a model"])
def test_a_second_trainer_of_a_tokenizer_is_the_same_run(dense_model, tmp_path, kind):
    """TRL writes what the settings say into it."""
    tokenizer = make_tokenizer()
    other = make_tokenizer()
    other.add_tokens(["<more>"])
    other.eos_token = "#"
    other.chat_template = "{{ messages }}"
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "chat.jinja").write_text("{{ messages[0] }}")
    changes = {
        "end token": {"eos_token": "#"},
        "template": {"chat_template_path": str(tmp_path / "chat.jinja")},
        "template of a model": {"chat_template_path": str(tmp_path / "other")},
    }[kind]

    def trainer(tokenizer, **more):
        args = LowBitSFTConfig(**settings(tmp_path / "run", **changes | more))
        return LowBitSFTTrainer(dense_model, args, train_dataset=pairs(), processing_class=tokenizer)

    before = (tokenizer.eos_token, tokenizer.chat_template)
    trainer(tokenizer, max_steps=1, save_strategy="steps", save_steps=1).train()
    assert (tokenizer.eos_token, tokenizer.chat_template) != before  # control: TRL has written into it

    assert trainer(tokenizer).train(resume_from_checkpoint="auto").global_step == 2
    # Control: another tokenizer.
    with pytest.raises(ValueError, match="tokenizer was"):
        trainer(make_tokenizer("0123456789+=# ;"), resume_from_checkpoint="auto")


def test_a_callback_may_save_before_the_first_epoch(dense_model, tmp_path):
    """The start of a run, to compare with. A resume from it is the run."""

    class SaveStart(TrainerCallback):
        def on_train_begin(self, *_, **__):
            trainer._save_checkpoint(trainer.model, trial=None)

    trainer = make(dense_model, tmp_path / "straight")
    trainer.add_callback(SaveStart())
    trainer.train()
    resumed = make(dense_model, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-0"))

    assert same_weights(resumed, trainer)


def test_files_that_a_callback_put_where_a_checkpoint_comes_stay(dense_model, tmp_path):
    class Notes(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            folder = tmp_path / f"checkpoint-{state.global_step}"
            folder.mkdir()
            (folder / "notes.txt").write_text(f"step {state.global_step}")

    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer = make(dense_model, tmp_path, **saving)
    trainer.add_callback(Notes())
    trainer.train()

    assert (tmp_path / "checkpoint-1" / "notes.txt").read_text() == "step 1"
    # The checkpoint is whole, and a changed note is no damage.
    (tmp_path / "checkpoint-1" / "notes.txt").write_text("longer than before")
    assert damage(tmp_path / "checkpoint-1") is None


def test_an_adapter_is_not_saved_beside_a_model(dense_model, tmp_path):
    """transformers would load the model with it from then on."""
    trainer = make(dense_model, tmp_path / "run", peft_config=adapter())
    trainer.train()
    model = tmp_path / "model"
    shutil.copytree(dense_model, model)

    with pytest.raises(ValueError, match="holds a model or a training checkpoint"):
        trainer.save_model(str(model))
    assert not (model / "adapter_config.json").exists()

    # Controls: the run's own folder, which a script wrote into, a new one, and the same once more.
    trainer.save_state()
    (tmp_path / "run" / "scheduler.pt").touch()
    trainer.save_model()
    for _ in range(2):
        trainer.save_model(str(tmp_path / "other"))
    assert (tmp_path / "other" / "low_bit" / "config.json").exists()


def test_a_quantized_model_is_no_start_of_a_run_without_quantization(dense_model, tmp_path):
    """In a notebook the same model is given to the next trainer."""
    first = make(dense_model, tmp_path / "first")
    first.train()

    with pytest.raises(ValueError, match="quant_scheme='none', but the model has low-bit layers"):
        make(first.model, tmp_path / "second", quant_scheme="none")

    # Control.
    again = make(remove_quantization(first.model), tmp_path / "third", quant_scheme="none")
    again.train()
