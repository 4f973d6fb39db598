"""`qarl_trl.validate.prompts`: a bad prompt is found at the start, with its row."""

import pytest
from configs import config
from datasets import Dataset
from slow.toys import make_tokenizer, save_model

from qarl_trl import QaRLTrainer, cli
from qarl_trl.validate import check_run


# Renders roles, and refuses system messages, as those of Gemma and Mistral do.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ message.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), layers=1)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def texts(*prompts):
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def chats(*roles):
    return Dataset.from_list([{"prompt": [{"role": role, "content": "1+1="}]} for role in roles])


def check(model, tmp_path, data, **changes):
    engine = {"use_vllm": True, "vllm_max_model_length": 64, "max_completion_length": 8}
    args = config(tmp_path, per_device_train_batch_size=8, num_generations=4, **engine | changes)
    check_run(model, args, {"train_dataset": data})


# The check reads a thousand rows at once.
@pytest.mark.parametrize("row", [2, 1200])
def test_a_prompt_that_fills_the_context_is_refused_with_its_row_and_length(model, tmp_path, row):
    # One token a character: 64 fill the context of `check`, and leave no room for an answer.
    prompts = ["1+1="] * 1500
    prompts[row] = "1" * 64

    with pytest.raises(ValueError, match=rf"train_dataset\[{row}\]: the prompt has 64 tokens, .*context is 64"):
        check(model, tmp_path, texts(*prompts))

    # Controls: one token less, and transformers in the place of the engine, which has no such limit.
    prompts[row] = "1" * 63
    check(model, tmp_path, texts(*prompts))
    prompts[row] = "1" * 64
    check(model, tmp_path, texts(*prompts), use_vllm=False)


@pytest.mark.parametrize("row", [0, 1200])
def test_a_token_that_the_model_does_not_know_is_refused_with_its_row(model, tmp_path, row):
    """A tokenizer with tokens that the embedding did not get: torch would end in an IndexError while it samples."""
    tokenizer = make_tokenizer()
    # The embedding of a toy has more rows than its tokenizer has tokens.
    tokenizer.add_tokens([f"<{number}>" for number in range(1000)])
    args = config(tmp_path, per_device_train_batch_size=8, num_generations=4, max_completion_length=8)
    prompts = ["1+1="] * 1500

    check_run(model, args, {"train_dataset": texts(*prompts), "processing_class": tokenizer})  # control
    prompts[row] = "1+<999>="
    with pytest.raises(ValueError, match=rf"train_dataset\[{row}\]: the prompt has the token \d+, and the model's"):
        check_run(model, args, {"train_dataset": texts(*prompts), "processing_class": tokenizer})


@pytest.mark.parametrize("row", [0, 1200])
@pytest.mark.parametrize("use_vllm", [True, False])
def test_a_prompt_without_tokens_is_refused_with_its_row(model, tmp_path, row, use_vllm):
    prompts = ["1+1="] * 1500
    check(model, tmp_path, texts(*prompts), use_vllm=use_vllm)  # control

    prompts[row] = ""
    with pytest.raises(ValueError, match=rf"train_dataset\[{row}\]: the prompt has no tokens"):
        check(model, tmp_path, texts(*prompts), use_vllm=use_vllm)


def test_without_a_length_of_its_own_the_engine_has_that_of_the_model(model, tmp_path):
    with pytest.raises(ValueError, match=r"train_dataset\[1\]: the prompt has 1024 tokens, .*context is 1024"):
        check(model, tmp_path, texts("1", "1" * 1024), vllm_max_model_length=None)


def test_a_prompt_that_leaves_little_room_is_said(model, tmp_path, caplog):
    # 60 tokens leave 4 of the 8, and 56 leave exactly 8.
    check(model, tmp_path, texts("1" * 60, "1", "1" * 56))

    (record,) = [one for one in caplog.records if "leave less than" in one.getMessage()]
    assert "1 of 3 prompts leave less than max_completion_length=8" in record.getMessage()


def test_a_server_needs_room_for_the_longest_answer(model, tmp_path):
    server = {"vllm_mode": "server", "sync_folder": str(tmp_path)}
    with pytest.raises(ValueError, match=r"train_dataset\[1\]: the prompt has 60 tokens, .*server's context of 64"):
        check(model, tmp_path, texts("1" * 56, "1" * 60), **server)

    # Control: just enough.
    check(model, tmp_path, texts("1" * 56, "1" * 56), **server)


@pytest.mark.parametrize("use_vllm", [True, False])
def test_a_prompt_that_a_pass_may_not_hold_is_said(model, tmp_path, caplog, use_vllm):
    """The learner finds it when the first such answer comes."""
    data = texts("1+1=", "1" * 40, "1" * 41)
    engine = {"use_vllm": use_vllm, "vllm_max_model_length": 64 if use_vllm else None}

    check(model, tmp_path, data, max_completion_length=24, max_tokens_per_pass=64, **engine)

    # An engine cuts the answer off before.
    is_said = "1 of 3 prompts have more than max_tokens_per_pass=64 tokens" in caplog.text
    assert is_said != use_vllm


def test_a_prompt_that_the_template_refuses_has_its_row(model, tmp_path):
    with pytest.raises(ValueError, match=r"train_dataset\[2\]: .*System role not supported") as error:
        check(model, tmp_path, chats("user", "user", "system"))
    assert "\n" not in str(error.value)

    check(model, tmp_path, chats("user", "user", "user"))  # control


def test_the_evaluation_set_is_checked_too(model, tmp_path):
    args = config(tmp_path, per_device_train_batch_size=8, num_generations=4, use_vllm=True)
    arguments = {"train_dataset": chats("user", "user"), "eval_dataset": {"a": chats("user"), "b": chats("system")}}

    with pytest.raises(ValueError, match=r"eval_dataset\['b'\]\[0\]: "):
        check_run(model, args, arguments)


def test_what_completes_prompts_itself_is_left_alone(model, tmp_path):
    args = config(tmp_path, per_device_train_batch_size=8, num_generations=4)
    data = chats("system", "system")

    check_run(model, args, {"train_dataset": data, "rollout_func": lambda *_: None})
    with pytest.raises(ValueError, match="System role"):  # control
        check_run(model, args, {"train_dataset": data})


def test_the_trainer_finds_it_before_the_model_loads(model, tmp_path):
    args = config(tmp_path, per_device_train_batch_size=8, num_generations=4)

    with pytest.raises(ValueError, match=r"train_dataset\[1\]"):
        QaRLTrainer(model, len, args, train_dataset=chats("user", "system"))


def test_the_doctor_finds_it(model, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"problem": "{text}", "answer": "1"}}\n' for text in ["1"] * 8 + ["1" * 64]))
    argv = ["--model_name_or_path", model, "--dataset_name_or_path", str(rows), "--output_dir", str(tmp_path / "out")]
    argv += ["--use_vllm", "true", "--vllm_max_model_length", "64", "--max_completion_length", "8"]
    argv += ["--report_to", "none", "--conversational", "false", "--probe_prompts", "0"]

    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", *argv])

    assert stopped.value.code == 1
    assert "train_dataset[8]: the prompt has 64 tokens" in capsys.readouterr().out
