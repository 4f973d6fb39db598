"""`qarl_trl.train`: reading a recipe, refusing a wrong one, and a run from end to end."""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import make_model, make_tokenizer

from qarl_trl import cli, train
from qarl_trl.rewards import load_rewards
from qarl_trl.train import describe, parse


ON_CPU = ["--use_cpu", "true", "--bf16", "false"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + 1", "answer": str(i + 1)}) + "\n" for i in range(9)))
    return str(path)


@pytest.fixture
def base(problems, tmp_path):
    return ["--model_name_or_path", "org/model", "--dataset_name_or_path", problems,
            "--output_dir", str(tmp_path / "out"), *ON_CPU]  # fmt: skip


def run(argv):
    cli.main(["train", *argv])


def test_recipe_fills_three_groups_and_the_command_line_wins(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("reward_funcs: boxed_format_reward\nlearning_rate: 1e-5\ntbpo_delta_low: 0.002\nlora_r: 4\n")
    script_args, training_args, model_args = parse(["--config", str(recipe), "--learning_rate", "2e-5", *base])
    assert script_args.reward_funcs == ["boxed_format_reward"]
    assert (training_args.learning_rate, training_args.tbpo_delta_low) == (2e-5, 0.002)
    assert model_args.lora_r == 4
    assert parse([f"--config={recipe}", *base])[1].learning_rate == 1e-5


def test_unknown_keys_are_refused_in_the_recipe_and_on_the_command_line(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rte: 1e-5\n")
    with pytest.raises(ValueError, match="learning_rte"):
        parse(["--config", str(recipe), *base])
    with pytest.raises(ValueError, match="learning_rte"):
        parse([*base, "--learning_rte", "1"])
    with pytest.raises(ValueError, match="quant_schem"):  # argparse would take it for quant_scheme
        parse([*base, "--quant_schem", "none"])


def test_env_of_the_recipe_is_set_before_the_parser_is_built(base, tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env:\n  QARL_TEST_VARIABLE: 3\nlearning_rate: 1e-5\n")
    monkeypatch.setenv("QARL_TEST_VARIABLE", "before")
    real, seen = train.make_parser, []

    def watched():
        seen.append(os.environ["QARL_TEST_VARIABLE"])
        return real()

    monkeypatch.setattr(train, "make_parser", watched)
    assert parse(["--config", str(recipe), *base])[1].learning_rate == 1e-5
    assert seen == ["3"]


def test_missing_recipe_is_named(base):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        parse(["--config", "nowhere.yaml", *base])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model_name_or_path", ""], "model_name_or_path"),
        (["--dataset_name_or_path", ""], "dataset_name_or_path"),
        (["--eval_strategy", "steps"], "eval_dataset_name_or_path"),
        (["--load_in_4bit", "true"], "load_in_4bit"),
        (["--reward_funcs", "no_such_reward"], "no_such_reward"),
        (["--reward_funcs", "json.no_such_reward"], "no_such_reward"),
        (["--quant_scheme", "W2A2"], "W2A2"),
    ],
)
def test_wrong_settings_stop_before_a_model_loads(base, extra, message):
    with pytest.raises(ValueError, match=message):
        parse([*base, *extra])


def test_missing_local_dataset_is_named(base):
    with pytest.raises(FileNotFoundError, match="missing"):
        parse([*base, "--dataset_name_or_path", "missing.jsonl"])


def test_rewards_come_by_name_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = ["math_reward", "boxed_format_reward", "my_rewards.short", "trl.rewards.think_format_reward"]
    names = [reward.__name__ for reward in load_rewards(given)]
    assert names == ["math_reward", "boxed_format_reward", "short", "think_format_reward"]


def test_wrong_settings_on_the_command_line_are_one_message(base, capsys):
    with pytest.raises(SystemExit) as stopped:
        run([*base, "--quant_scheme", "W2A2"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "qarl-trl train: " in said and "W2A2" in said and "Traceback" not in said


def test_dry_run_prints_batches_data_and_settings_and_loads_no_model(base, capsys, monkeypatch):
    monkeypatch.setattr(train, "make_trainer", lambda *args: pytest.fail("a dry run must not train"))
    run([*base, "--dry_run", "--prompt_template", "Q: {problem}", "--gradient_accumulation_steps", "4",
         "--per_device_train_batch_size", "4", "--steps_per_generation", "32", "--hub_token", "secret"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "model: org/model, scheme W4A16, learner quantized" in printed
    assert "objective: tbpo, adamw_torch" in printed
    assert "rollout batch: 16 prompts x 8 = 128 completions on 1 process(es)" in printed
    assert "update: 16 completions; 8 updates per rollout batch" in printed
    assert "Q: 0 + 1" in printed and "first answer: '1'" in printed
    assert "QaRLConfig.steps_per_generation: 32" in printed
    assert "secret" not in printed


def test_a_dry_run_of_a_recipe_for_gpus_needs_no_gpu_and_no_option(base, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for_gpu = [option for option in base if option not in ON_CPU]
    run([*for_gpu, "--dry_run", "--use_vllm"])
    printed = capsys.readouterr().out
    assert "no CUDA device here, so the settings were checked for a CPU" in printed and "bfloat16" in printed
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match="use_cpu"):  # control: without the dry run transformers refuses them
        parse(for_gpu)
    recipe = Path(base[-1 - len(ON_CPU)]).parent / "dry.yaml"
    recipe.write_text("dry_run: true\n")
    run(["--config", str(recipe), *for_gpu])
    assert "no CUDA device here" in capsys.readouterr().out


def test_a_recipe_that_is_no_mapping_of_keys_is_named(tmp_path):
    for text, word in (("a: [1\n", "is not YAML"), ("- a\n", "must be a mapping of keys to values, got list")):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ValueError, match=word):
            parse(["--config", str(tmp_path / "recipe.yaml")])


def test_help_is_short_and_help_all_has_every_key(capsys):
    run(["--help"])
    short = capsys.readouterr().out
    assert "--reward_funcs" in short and "--tbpo_delta_low" not in short
    run(["--help_all"])
    assert "--tbpo_delta_low" in capsys.readouterr().out


def test_dry_run_finds_a_wrong_column(base, tmp_path):
    (tmp_path / "wrong.jsonl").write_text('{"task": "1", "gold": "2"}\n')
    with pytest.raises(ValueError, match="problem_column"):
        cli.run(["train", *base, "--dry_run", "--dataset_name_or_path", str(tmp_path / "wrong.jsonl")])


def test_dry_run_leaves_the_hub_alone(base):
    arguments = parse([*base, "--dataset_name_or_path", "some/dataset"])
    assert "some/dataset (Hub id, not contacted)" in describe(*arguments)


def test_parsed_settings_are_those_of_the_parser(base):
    # control: `parse` adds checks, not values
    from_parser = train.make_parser().parse_args_and_config(args=base)
    assert [type(group).__name__ for group in from_parser] == ["QaRLScriptArguments", "QaRLConfig", "ModelConfig"]
    assert vars(from_parser[0]) == vars(parse(base)[0])


@pytest.mark.parametrize("quant_scheme", ["none", "W4A16"])
def test_run_trains_evaluates_and_saves(base, problems, tmp_path, capsys, quant_scheme):
    from transformers import AutoConfig

    model = tmp_path / "model"
    make_model(num_hidden_layers=1).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    run([*base, "--model_name_or_path", str(model), "--quant_scheme", quant_scheme, "--conversational", "false",
         "--max_steps", "2", "--max_completion_length", "4", "--num_generations", "2", "--logging_steps", "1",
         "--per_device_train_batch_size", "4", "--steps_per_generation", "2", "--gradient_accumulation_steps", "1",
         "--save_strategy", "no", "--report_to", "none", "--max_train_samples", "4",
         "--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name_or_path", problems,
         "--max_eval_samples", "2"])  # fmt: skip
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (getattr(config, "quantization_config", None) is None) == (quant_scheme == "none")
    assert "eval_rewards/math_reward/mean" in capsys.readouterr().out
