"""`qarl-trl eval` without an engine: what is refused before one starts, and the way from completions to results."""

import json
import shutil
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_model, make_tokenizer
from lines import lines_that_begin, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template

from qarl_trl import cli
from qarl_trl.checkpoints.folder import MANIFEST
from qarl_trl.export.adapter_base import name_base
from qarl_trl.rewards import math_reward
from qarl_trl.tools.evaluate import sample
from qarl_trl.tools.evaluate.checkpoint import check_complete
from qarl_trl.tools.evaluate.grade import grade, message_parser


SECRET = "hf_thisIsASecret"
FACTOR = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.fixture(autouse=True)
def no_engine(tmp_path, monkeypatch):
    # A refusal that comes after an engine has started is too late.
    def start(*args, **kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(sample, "start_engine", start)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A plain checkpoint of 256 positions, a W4A16 one made of it, and damaged copies of both."""
    folder = tmp_path_factory.mktemp("models")
    make_model(num_hidden_layers=1).save_pretrained(folder / "plain")
    make_tokenizer().save_pretrained(folder / "plain")
    cli.main(["export", str(folder / "plain"), str(folder / "w4a16")])

    shutil.copytree(folder / "plain", folder / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))

    # Of this class transformers would make an empty tokenizer.
    shutil.copytree(folder / "plain", folder / "no_vocabulary", ignore=shutil.ignore_patterns("tokenizer.json"))
    (folder / "no_vocabulary" / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')

    shutil.copytree(folder / "plain", folder / "two_models")
    listed = dict.fromkeys(load_file(folder / "plain" / "model.safetensors"), "model-00001-of-00001.safetensors")
    (folder / "two_models" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))

    shutil.copytree(folder / "w4a16", folder / "cut")
    # Its index lists one tensor more than the file holds.
    names = [*load_file(folder / "cut" / "model.safetensors"), "b"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "cut" / "model.safetensors.index.json").write_text(json.dumps(index))

    # A layer without its scale, of which transformers would only warn.
    shutil.copytree(folder / "w4a16", folder / "no_scale")
    tensors = load_file(folder / "no_scale" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "no_scale" / "model.safetensors")
    return folder


@pytest.fixture
def sums(tmp_path):
    """A suite of four problems."""
    rows = []
    for number in range(4):
        rows.append({"problem": f"{number}+{number}=", "answer": str(2 * number)})
    return write_rows(tmp_path / "sums.jsonl", rows)


def stopped(capsys, *argv):
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", *argv])
    assert end.value.code == 2

    (line,) = lines_that_begin(capsys.readouterr().err, "qarl-trl eval: ")
    return line


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        # vLLM's words.
        (["--k", "4", "--temperature", "0"], "greedy"),
        (["--limit", "-1"], "--limit must be at least 1, got -1; without it all problems count"),
        (["--pass_at", "1", "8"], "--pass_at"),
        (["--engine_kwargs", "[1]"], "--engine_kwargs"),
        (["--engine_kwargs", '{"max_model_len": 64}'], "--engine_kwargs must not set max_model_len"),
        (["--engine_kwargs", '{"model": "other"}'], "--engine_kwargs must not set model"),
        (["--engine_kwargs", '{"foo": 1}'], "--engine_kwargs sets ['foo'], which vllm.LLM does not have"),
        (["--conversational", "perhaps"], "--conversational"),
        (["--reward_funcs", "no_such_module.reward"], "reward_funcs"),
        (["--reward_funcs", "math_reward", "math_reward"], "different names"),
        (["--suite", "math500"], "--suite has 'math500' twice"),
    ],
)
def test_wrong_options_are_one_line(capsys, argv, field):
    assert field in stopped(capsys, "no/such/model", "--suite", "math500", *argv)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_tokenizer", "it has no tokenizer*"),
        ("no_vocabulary", "must have the vocabulary of its tokenizer"),
        ("two_models", "must hold the weights of one model, got model.safetensors beside"),
        ("cut", "lacks 1 tensors of model.safetensors.index.json (b)"),
        ("no_scale", "must hold model.layers.0.mlp.up_proj.weight_scale of shape (256, 1), got None"),
    ],
)
def test_a_model_that_cannot_be_evaluated_is_refused_before_the_engine(capsys, models, sums, model, message):
    assert message in stopped(capsys, str(models / model), "--suite", sums)


def test_a_folder_of_whose_name_an_engine_would_read_another_is_refused(capsys, models, sums, tmp_path):
    # vLLM globs: it would load run1.
    for name in ("run1", "run[1]"):
        shutil.copytree(models / "plain", tmp_path / name)

    assert "must have no *, ? or [ in its path" in stopped(capsys, str(tmp_path / "run[1]"), "--suite", sums)


def test_weights_of_another_model_beside_the_model_are_refused_because_an_engine_reads_both(
    capsys, models, sums, tmp_path
):
    # A user's copy of earlier weights. vLLM reads the files by the alphabet, and keeps what it reads last.
    folder = shutil.copytree(models / "plain", tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "old.safetensors")

    message = stopped(capsys, str(folder), "--suite", sums)
    assert "must hold the weights of one model" in message
    assert "model.safetensors and in old.safetensors" in message


def test_other_weights_may_lie_beside_an_index_or_have_other_names(models, sums, tmp_path, engine_calls):
    folder = shutil.copytree(models / "plain", tmp_path / "model")
    # As vision towers and heads of other tools lie there.
    save_file({"extra.weight": torch.zeros(1)}, folder / "extra.safetensors")
    (folder / "newest.safetensors").symlink_to("model.safetensors")
    evaluate(folder, sums)

    tensors = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors", folder / "old.safetensors")
    evaluate(folder, sums, "--output_dir", "again")


def with_config(folder, models, model, **changes):
    """A copy of a model with other fields in its `config.json`."""
    shutil.copytree(models / model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("model", ["plain", "w4a16"])
@pytest.mark.parametrize("name", ["num_attention_heads", "max_position_embeddings", "num_key_value_heads"])
def test_a_model_without_heads_or_positions_is_refused_before_the_engine(capsys, models, sums, tmp_path, model, name):
    folder = with_config(tmp_path / "empty", models, model, **{name: 0})

    line = stopped(capsys, str(folder), "--suite", sums)

    assert f"{folder}/config.json: {name} must be above 0, got 0." in line


def test_answers_beyond_the_models_context_name_the_option(capsys, models, sums, monkeypatch):
    """vLLM's error names none of this command's options, and a variable that lets the engine answer NaN."""

    def start(*args, max_model_len, **kwargs):
        # As vLLM 0.31 says it.
        raise ValueError(
            f"User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len "
            "(max_position_embeddings=256.0 or model_max_length=None in model's config.json)."
        )

    monkeypatch.setattr(sample, "start_engine", start)

    line = stopped(capsys, str(models / "plain"), "--suite", sums)

    assert "--max_new_tokens must leave room" in line
    assert "(max_position_embeddings=256.0), got 16384" in line


def test_a_tokenizer_of_another_model_is_refused_before_the_engine(capsys, models, sums, tmp_path):
    folder = with_config(tmp_path / "small", models, "plain", vocab_size=3)

    line = stopped(capsys, str(folder), "--suite", sums)

    # Of all characters in the prompts the equals sign has the largest token.
    tokens = make_tokenizer()("0+0=3")["input_ids"]
    assert f"{folder}/config.json: vocab_size is 3, and the tokenizer makes token {max(tokens)} of a prompt." in line


def test_a_tokenizer_may_know_more_tokens_than_its_model_if_no_prompt_has_them(models, sums, tmp_path, engine_calls):
    # Control of the test above: the tokens of the prompts are what counts.
    size = max(make_tokenizer()("0123+=")["input_ids"]) + 1
    assert size < len(make_tokenizer())
    folder = with_config(tmp_path / "small", models, "plain", vocab_size=size)

    evaluate(folder, sums)

    assert engine_calls.folders[0] == folder


def test_what_was_not_checked_is_said(capsys, models, tmp_path):
    folder = tmp_path / "unknown"
    shutil.copytree(models / "w4a16", folder)
    # transformers knows this config, but no causal language model for it.
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["OfTheFuture"], "model_type": "qwen3_vl_text"}
    (folder / "config.json").write_text(json.dumps(config))

    check_complete(folder)

    reason = "transformers has no model 'OfTheFuture'"
    assert f"{folder}: its tensors are not checked for missing ones, because {reason}" in capsys.readouterr().out


# What is evaluated --------------------------------------------------------------------------------------------------


@dataclass
class EngineCalls:
    """
    What the engine was started and asked with.

    Attributes:
        folders: The folders of model and adapter.
        settings: The arguments of `vllm.LLM`.
        params: The `vllm.SamplingParams` of each prompt.
    """

    folders: tuple = ()
    settings: dict[str, Any] = field(default_factory=dict)
    params: list[Any] = field(default_factory=list)


@pytest.fixture
def engine_calls(monkeypatch):
    """An engine's stand-in, half of whose answers are right, half cut off."""
    calls = EngineCalls()

    def generate(prompts, params, use_tqdm):
        calls.params = params
        outputs = []
        for number in range(len(prompts)):
            # The answer to `number + number`, in the order of the suite.
            text = f"\\boxed{{{2 * number}}}"
            right = SimpleNamespace(text=text, token_ids=range(10), finish_reason="stop")
            cut = SimpleNamespace(text="hm", token_ids=range(30), finish_reason="length")
            outputs.append(SimpleNamespace(outputs=[right, right, cut, cut]))
        return outputs

    def start(*folders, **settings):
        calls.folders = folders
        calls.settings = settings
        return SimpleNamespace(generate=generate)

    monkeypatch.setattr(sample, "start_engine", start)
    return calls


def make_adapter(folder, models, base):
    """A folder with a LoRA adapter that names its base, and a tokenizer."""
    folder.mkdir()
    for file in (models / "plain").glob("tokenizer*"):
        shutil.copy(file, folder)
    save_file({FACTOR: torch.ones(4, 8)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return folder


def test_an_adapter_is_evaluated_beside_its_frozen_base_alone(capsys, models, sums, tmp_path, engine_calls):
    """Beside another model it is another policy, which nobody trained."""
    base = models / "w4a16"
    adapter = make_adapter(tmp_path / "run", models, base)
    # Its config names a base, but nothing says that it was frozen: it may have been merged before each quantization.
    assert "got another adapter" in stopped(capsys, str(adapter), "--suite", sums)

    name_base(adapter, str(base), None, models / "plain")
    assert "w4a16 has other weights than the base" in stopped(capsys, str(adapter), "--suite", sums)

    name_base(adapter, str(base), None, base)
    argv = ["eval", str(adapter), "--suite", sums, "--max_new_tokens", "16", "--output_dir", "out"]
    cli.main(argv)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["precision"] == "W4A16 (weights int4 per group 128), with an adapter beside it"
    assert engine_calls.folders == (base, adapter)

    # Of a later run with all weights in the same folder.
    (adapter / "config.json").write_text("{}")
    assert "got another adapter" in stopped(capsys, *argv[1:])


def evaluate(model, sums, *argv):
    """Run the command on short answers, into the folder `out`."""
    cli.main(["eval", str(model), "--suite", sums, "--max_new_tokens", "16", "--output_dir", "out", *argv])


def test_results_hold_scores_and_settings_and_versions(capsys, models, sums, engine_calls, tmp_path):
    evaluate(models / "w4a16", sums, "--limit", "3", "--pass_at", "1", "4")

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["precision"] == "W4A16 (weights int4 per group 128)"
    assert results["settings"]["temperature"] == 0.6
    # A library that is not installed would have no version, and the results could not be repeated.
    assert None not in results["versions"].values()
    # Two of four completions are right, and the other two are three times as long.
    suite = results["suites"]["sums"]
    # Every problem has the same share, so there is no error between problems.
    assert suite["avg@4"] == suite["pass@1"] == {"value": 0.5, "stderr": 0.0}
    assert suite["pass@4"]["value"] == 1.0
    assert (suite["problems"], suite["mean_tokens"], suite["cut_off"]) == (3, 20.0, 0.5)
    assert "sums   3         50.0 ± 0.0" in capsys.readouterr().out


def test_results_say_what_the_engine_quantizes_and_rounds(models, sums, engine_calls, tmp_path):
    evaluate(models / "plain", sums, "--engine_kwargs", '{"quantization": "fp8", "kv_cache_dtype": "fp8"}')

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["precision"] == "not quantized, loaded with quantization=fp8, keys and values in fp8"


def test_an_adapter_is_scored_on_the_cache_that_it_was_trained_with(models, sums, engine_calls, tmp_path):
    base = models / "w4a16"
    adapter = make_adapter(tmp_path / "adapter", models, base)
    name_base(adapter, str(base), None, base, cache="fp8_e4m3")
    evaluate(adapter, sums)
    assert engine_calls.settings["kv_cache_dtype"] == "fp8_e4m3"

    # What the user says counts.
    evaluate(adapter, sums, "--engine_kwargs", '{"kv_cache_dtype": "auto"}', "--output_dir", "again")
    assert engine_calls.settings["kv_cache_dtype"] == "auto"


@pytest.mark.parametrize("scheme", ["{'W4A16': ['Linear']} without ['lm_head']", "none"])
def test_the_master_weights_of_a_checkpoint_are_named_as_such(models, sums, engine_calls, tmp_path, capsys, scheme):
    folder = shutil.copytree(models / "plain", tmp_path / "checkpoint-2")
    (folder / MANIFEST).write_text(json.dumps({"number": 2, "files": {}, "scheme": scheme}))

    evaluate(folder, sums)

    assert ("holds the master weights of a low-bit run" in capsys.readouterr().out) == (scheme != "none")


def test_completions_are_written_with_their_prompts_and_rewards(models, sums, engine_calls, tmp_path):
    evaluate(models / "w4a16", sums, "--limit", "3")

    lines = (tmp_path / "out" / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["prompt"] for row in rows] == ["0+0=", "1+1=", "2+2="]
    assert [row["rewards"] for row in rows] == [{"math_reward": [1.0, 1.0, 0.0, 0.0]}] * 3


REWARDS = """
def answer_length(completions, prompts, completion_ids, answer, **kwargs):
    assert all(isinstance(text, str) for text in [*completions, *prompts])
    return [len(ids) / 10 for ids in completion_ids]


async def digits(completions, **kwargs):
    return [float(any(character.isdigit() for character in text)) for text in completions]


def no_sevens(completions, answer, **kwargs):
    return [float(answer[0] != "4" or not text or 1 / 0) for text in completions]


def surprise(completions, answer, **kwargs):
    return [float("-inf") if text and answer[0] == "4" else 0.5 for text in completions]


def moves(completions, **kwargs):
    import os

    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    return [1.0] * len(completions)


def needs_the_trainer(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    """A module of reward functions in the current folder."""
    (tmp_path / "rewards_of_a_user.py").write_text(REWARDS)
    monkeypatch.delitem(sys.modules, "rewards_of_a_user", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def test_rewards_of_the_user_grade(models, sums, engine_calls, tmp_path, own_rewards):
    """Beside `math_reward`, and also async ones. Two of four answers are right, the others three times as long."""
    names = ["math_reward", "rewards_of_a_user.answer_length", "rewards_of_a_user.digits"]

    evaluate(models / "w4a16", sums, "--reward_funcs", *names)

    scores = json.loads((tmp_path / "out" / "results.json").read_text())["suites"]["sums"]
    assert scores["math_reward avg@4"]["value"] == scores["digits avg@4"]["value"] == 0.5
    assert scores["answer_length mean@4"]["value"] == 2.0
    row = json.loads((tmp_path / "out" / "completions.jsonl").read_text().splitlines()[0])
    assert row["rewards"]["answer_length"] == [1.0, 1.0, 3.0, 3.0]


def test_a_reward_that_cannot_be_called_is_refused_before_the_engine(capsys, models, sums, own_rewards):
    argv = [str(models / "w4a16"), "--suite", sums, "--reward_funcs", "rewards_of_a_user.needs_the_trainer"]

    line = stopped(capsys, *argv)

    assert "'needs_the_trainer' fails on an empty answer: TypeError" in line


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ("no_sevens", ZeroDivisionError, "division by zero"),
        # statistics fails at it with an AttributeError, after all suites.
        ("surprise", ValueError, "'surprise' must give finite numbers or None, got [-inf"),
    ],
)
def test_a_reward_that_fails_on_an_answer_leaves_all_completions(
    models, sums, engine_calls, tmp_path, own_rewards, reward, error, message
):
    with pytest.raises(error) as raised:
        evaluate(models / "w4a16", sums, "--reward_funcs", f"rewards_of_a_user.{reward}")

    assert message in str(raised.value)
    assert f"All completions so far are in {tmp_path}/out/completions.jsonl" in raised.value.__notes__[0]
    rows = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["0", "2", "4", "6"]
    assert [len(row["completions"]) for row in rows] == [4] * 4
    # The third fails.
    assert [row["rewards"] is None for row in rows] == [False, False, True, True]


def test_scores_are_written_where_the_command_was_started(models, sums, engine_calls, tmp_path, own_rewards):
    evaluate(models / "w4a16", sums, "--reward_funcs", "rewards_of_a_user.moves")

    assert (tmp_path / "out" / "results.json").is_file()
    assert not list((tmp_path / "elsewhere").rglob("*.json*"))


def test_a_chat_prompt_has_a_chat_message_for_an_answer():
    """As TRL gives it to rewards."""
    seen = []

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [None, float("nan")]

    problem = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
    answers = [{"text": "2", "token_ids": [3]}, {"text": "3", "token_ids": [4]}]

    # Neither is a reward that can be averaged.
    assert grade(reward, problem, answers) == [None, None]
    assert seen == [[{"role": "assistant", "content": "2"}], [{"role": "assistant", "content": "3"}]]
    with pytest.raises(ValueError, match="must give 1 rewards, got 2"):
        grade(reward, problem, answers[:1])


def test_a_message_is_read_as_in_training_if_the_tokenizer_says_how():
    """TRL parses an answer then, and rewards see its content without the thoughts."""
    tokenizer = make_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    ids = tokenizer(r"<think>it is \boxed{42}</think>done.<|im_end|>")["input_ids"]
    problem = {
        "messages": [{"role": "user", "content": "6*7="}],
        "answer": "42",
        "prompt_ids": tokenizer("6")["input_ids"],
    }
    answer = {"text": r"<think>it is \boxed{42}</think>done.", "token_ids": ids}
    # Control: without, TRL takes the text.
    assert message_parser(tokenizer, problem) is None
    assert grade(math_reward, problem, [answer]) == [1.0]

    tokenizer.response_template = qwen3_template
    answer["message"] = message_parser(tokenizer, problem)(ids)
    assert answer["message"]["content"] == "done."
    assert grade(math_reward, problem, [answer]) == [0.0]
    # A prompt that is no chat has no messages.
    assert message_parser(tokenizer, problem | {"messages": "6*7="}) is None


def test_a_cpu_engine_does_not_ask_for_the_whole_machine(monkeypatch):
    """vLLM's default is 92 % of the memory, whatever others use."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert sample.cpu_cache({}) == {"kv_cache_memory_bytes": 4 * 2**30}

    # What the user says counts.
    assert sample.cpu_cache({"gpu_memory_utilization": 0.2}) == {}
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert sample.cpu_cache({}) == {}


def test_the_share_of_memory_reaches_the_engine(models, sums, engine_calls):
    evaluate(models / "w4a16", sums, "--vllm_gpu_memory_utilization", "0.3")

    assert engine_calls.settings["gpu_memory_utilization"] == 0.3


def test_the_cache_of_the_training_reaches_the_engine(models, sums, engine_calls):
    evaluate(models / "w4a16", sums, "--engine_kwargs", '{"kv_cache_dtype": "fp8"}')

    assert engine_calls.settings["kv_cache_dtype"] == "fp8"


def test_each_prompt_has_its_own_seed(models, sums, engine_calls):
    evaluate(models / "w4a16", sums, "--limit", "3")

    # With one seed for all, equal prompts would get equal answers.
    assert len({params.seed for params in engine_calls.params}) == 3
    assert engine_calls.params[0].n == 4


@pytest.mark.parametrize("stop", [["##", "\n"], None])
def test_strings_that_end_an_answer_reach_the_engine(models, sums, engine_calls, stop):
    """A run may stop at strings. Without them its model writes on, and another answer is graded."""
    evaluate(models / "w4a16", sums, *(["--stop", *stop] if stop else []))

    params = engine_calls.params[0]
    assert params.stop == (stop or [])
    assert params.include_stop_str_in_output


def test_a_stop_string_that_is_a_special_token_ends_an_answer_as_in_training(models, sums, engine_calls):
    """vLLM looks for strings in text without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(models / "w4a16")
    evaluate(models / "w4a16", sums, "--stop", "=", tokenizer.eos_token, "--stop_token_ids", "5")

    # Control: "=" is a token of the usual vocabulary.
    assert engine_calls.params[0].stop_token_ids == [5, tokenizer.eos_token_id]
    assert engine_calls.params[0].stop == ["=", tokenizer.eos_token]


def test_a_prompt_that_comes_again_is_sampled_again_and_named(capsys, models, tmp_path, engine_calls):
    """AIME comes in files with each problem 32 times: one seed would count one answer 32 times."""
    rows = [{"problem": f"{number % 2}+1=", "answer": "2"} for number in range(6)]
    evaluate(models / "w4a16", write_rows(tmp_path / "again.jsonl", rows), "--k", "4")

    assert len({params.seed for params in engine_calls.params}) == 6
    assert "again: 4 of 6 rows repeat the prompt of another" in capsys.readouterr().out
    seeds = [params.seed for params in engine_calls.params]

    # Control: the same problems once have the seeds of the first rows, and nothing is said.
    shutil.rmtree(tmp_path / "out")
    evaluate(models / "w4a16", write_rows(tmp_path / "once.jsonl", rows[:2]), "--k", "4")
    assert [params.seed for params in engine_calls.params] == seeds[:2]
    assert "repeat" not in capsys.readouterr().out


def test_master_weights_beside_the_low_bit_model_are_scored_and_named(capsys, models, sums, engine_calls, tmp_path):
    """A checkpoint of a run holds both, and its name alone does not tell which is meant."""
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(models / "plain", checkpoint)
    shutil.copytree(models / "w4a16", checkpoint / "low_bit")

    evaluate(checkpoint, sums)
    assert f"the low-bit model that was trained is {checkpoint / 'low_bit'}" in capsys.readouterr().out

    shutil.rmtree(tmp_path / "out")
    evaluate(checkpoint / "low_bit", sums)
    assert "that was trained" not in capsys.readouterr().out  # control


def test_secrets_reach_the_engine_and_nothing_else(capsys, models, sums, engine_calls, tmp_path):
    settings = {"hf_token": SECRET, "max_num_seqs": 2}

    evaluate(models / "w4a16", sums, "--engine_kwargs", json.dumps(settings))

    assert engine_calls.settings["hf_token"] == SECRET
    assert engine_calls.settings["max_num_seqs"] == 2
    written = (tmp_path / "out" / "results.json").read_text()
    completions = (tmp_path / "out" / "completions.jsonl").read_text()
    assert SECRET not in written + completions + capsys.readouterr().out
    # Control: the rest is there.
    assert json.loads(written)["settings"]["engine_kwargs"]["max_num_seqs"] == 2


def test_results_are_not_overwritten(capsys, models, sums, engine_calls):
    evaluate(models / "w4a16", sums)

    line = stopped(capsys, str(models / "w4a16"), "--suite", sums, "--output_dir", "out")

    assert "new or empty" in line


def test_evaluations_that_start_in_one_second_have_folders_of_their_own(
    models, sums, engine_calls, monkeypatch, tmp_path
):
    # A script scores all checkpoints at once, one on each GPU. Each has its low-bit model in a folder of one name.
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-120000")
    for step in (80, 160):
        shutil.copytree(models / "w4a16", tmp_path / f"checkpoint-{step}" / "low_bit")
        model = f"checkpoint-{step}/low_bit"
        cli.main(["eval", model, "--suite", sums, "--max_new_tokens", "16", "--limit", "1"])

    scored = {}
    for file in (tmp_path / "runs" / "eval").glob("*/results.json"):
        scored[file.parent.name] = json.loads(file.read_text())["model"]
    assert scored == {
        "low_bit-20260101-120000": "checkpoint-80/low_bit",
        "low_bit-20260101-120000-2": "checkpoint-160/low_bit",
    }


def test_two_evaluations_with_one_empty_folder_do_not_overwrite_each_other(models, sums, engine_calls, tmp_path):
    sampled = cli.run(
        ["eval", str(models / "w4a16"), "--suite", sums, "--max_new_tokens", "16", "--output_dir", "out"]
    )
    # Another one that found the folder empty too, and was faster.
    evaluate(models / "w4a16", sums)
    first = (tmp_path / "out" / "completions.jsonl").read_bytes()

    with pytest.raises(FileExistsError, match="completions.jsonl"):
        sampled()

    assert (tmp_path / "out" / "completions.jsonl").read_bytes() == first


def test_an_answer_that_vllm_aborted_is_not_scored():
    with pytest.raises(RuntimeError, match="'abort'"):
        sample._completion(SimpleNamespace(finish_reason="abort"))
