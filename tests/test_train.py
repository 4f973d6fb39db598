"""`qarl_trl.train`: reading a recipe, refusing a wrong one, and a run from end to end."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from conftest import make_model, make_tokenizer

from qarl_trl import cli, train
from qarl_trl.recipe import checked, construct
from qarl_trl.rewards import load_rewards
from qarl_trl.train import parse


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
    recipe.write_text("reward_funcs: my.reward\nlearning_rate: 1e-5\ntbpo_delta_low: 0.002\nlora_r: 4\n")
    script_args, training_args, model_args = parse(["--config", str(recipe), "--learning_rate", "2e-5", *base])
    assert script_args.reward_funcs == ["my.reward"]
    assert (training_args.learning_rate, training_args.tbpo_delta_low) == (2e-5, 0.002)
    assert model_args.lora_r == 4
    assert parse([f"--config={recipe}", *base])[1].learning_rate == 1e-5


@pytest.mark.parametrize(
    ("key", "near"),
    [("learning_rte", "learning_rate"), ("answer_colum", "answer_column")],
)
def test_unknown_keys_are_refused_with_the_nearest_one(base, tmp_path, key, near):
    (tmp_path / "recipe.yaml").write_text(f"{key}: 1e-5\n")
    for argv in (["--config", str(tmp_path / "recipe.yaml"), *base], [*base, f"--{key}", "1"], [*base, f"--{key}=1"]):
        with pytest.raises(ValueError, match=f"{key} is not a key.* Did you mean {near}"):
            parse(argv)


WRONG = {
    "a mapping": {"a": [1]},
    "a list": [[1]],
    "text": "wrong",
    "NaN": float("nan"),
    "infinity": float("inf"),
    "boolean": True,
    "negative": -3,
    "negative fraction": -1.5,
    "nothing": None,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_value_of_any_field_is_accepted_or_an_error_that_names_the_field(base, kind):
    """Of all fields, by their types: a number is never NaN, infinite or text, and a switch or a number is no list."""
    given = dict(zip((key[2:] for key in base[::2]), base[1::2], strict=True)) | {"lora_dropout": 0}
    accepted, types = set(), {}
    for group in train._groups():
        types |= get_type_hints(group)
        for field in fields(group):
            try:
                construct(group, checked(given | {field.name: WRONG[kind]}, [group]))
                accepted.add(field.name)
            except (ValueError, OSError) as error:
                assert field.name in str(error), f"{field.name}: {error}"
    numbers = {name for name, hint in types.items() if hint in (int, float, int | None, float | None)}
    if kind in ("a mapping", "a list", "text"):
        numbers |= {name for name, hint in types.items() if hint is bool}
    if kind.startswith("negative"):
        numbers -= {"entropy_coef", "local_rank", "save_total_limit", "top_k"}
    assert not accepted & numbers or kind == "nothing"
    assert len(numbers) >= 60  # control


def test_values_of_a_recipe_and_of_the_command_line_have_the_same_types(base, tmp_path):
    written = {"learning_rate": "1e-5", "max_steps": "7", "use_vllm": "no", "reward_funcs": "math_reward"}
    written |= {"save_strategy": "no", "generation_kwargs": '{"n": 1}', "quant_ignore": "lm_head"}
    written |= {"trackio_static_space_id": "false"}  # else a push copies the log to a public Space
    (tmp_path / "recipe.yaml").write_text("".join(f"{key}: {value}\n" for key, value in written.items()))
    options = [part for key, value in written.items() for part in (f"--{key}", value)]
    (script, args, _), (_, same, _) = (
        parse([*base, *options]),
        parse(["--config", str(tmp_path / "recipe.yaml"), *base]),
    )
    assert (args.learning_rate, args.max_steps, args.use_vllm) == (1e-5, 7, False)
    assert args.trackio_static_space_id is False
    assert (args.generation_kwargs, args.quant_ignore, script.reward_funcs) == ({"n": 1}, ["lm_head"], ["math_reward"])
    ran_at = {"logging_dir", "run_name"}
    assert {k: v for k, v in args.to_dict().items() if k not in ran_at} == {
        k: v for k, v in same.to_dict().items() if k not in ran_at
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model_name_or_path", ""], "model_name_or_path"),
        (["--dataset_name_or_path", ""], "dataset_name_or_path"),
        (["--eval_strategy", "steps"], "eval_dataset_name_or_path"),
        (["--max_steps"], "max_steps"),
        (["--max_steps", "1", "2"], "max_steps"),
        (["--quant_ignore", "re:["], "re:\\["),
        (["--quant_scheme", "W2A2"], "W2A2"),
    ],
)
def test_wrong_settings_stop_before_a_model_loads(base, extra, message):
    with pytest.raises(ValueError, match=message):
        parse([*base, *extra])


def test_options_are_texts_lists_or_switches():
    given = train._given(["--a", "1", "--b", "x", "y", "--c", "--d-e=f=g", "--b=", "--h", "-1"])
    assert given == {"a": "1", "b": "", "c": True, "d_e": "f=g", "h": "-1"}
    assert train._given(["--b", "x", "y", "--c", "z"]) == {"b": ["x", "y"], "c": "z"}
    with pytest.raises(ValueError, match=r"'recipe.yaml' is no option"):
        train._given(["recipe.yaml"])


def test_rewards_come_by_name_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = ["math_reward", "my_rewards.short", "trl.rewards.think_format_reward"]
    names = [reward.__name__ for reward in load_rewards(given)]
    assert names == ["math_reward", "short", "think_format_reward"]
    assert sys.path[-1] == str(tmp_path)
    for given in ([], ["os.path"]):  # none, and what is no function
        with pytest.raises(ValueError, match="reward_funcs"):
            load_rewards(given)
    for name in ("no_such_reward", "json.no_such_reward"):
        with pytest.raises(ValueError, match=f"{name}.*Give math_reward"):
            load_rewards([name])


@pytest.mark.parametrize("name", ["math_reward", "math_rewards", "trl.rewards.think_format_reward"])
def test_no_file_of_the_current_folder_stands_in_for_a_package(tmp_path, name):
    for module in ("math_verify", "math_rewards", "trl"):
        (tmp_path / f"{module}.py").write_text(f"print('ran {module}')\n")
    code = f"""
import sys
sys.path = [path for path in sys.path if path]  # as the command's own script has it
from qarl_trl.recipe import checked, construct
from qarl_trl.rewards import load_rewards
try:
    reward, = load_rewards(["{name}"])
    print(reward([[{{"role": "assistant", "content": r"\\boxed{{1}}"}}]], answer=["1"]))
except ValueError as error:
    print("Give math_reward" in str(error))
"""
    path = os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=path)
    assert "ran " not in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == {"math_reward": "[1.0]", "math_rewards": "True"}.get(name, "[0.0]")


@pytest.mark.parametrize("module", ["train", "cli"])
def test_python_m_takes_the_current_folder_last(tmp_path, module):
    (tmp_path / "yaml.py").write_text("print('ran')\n")
    (tmp_path / "recipe.yaml").write_text("- 1\n")
    words = ["train"] if module == "cli" else []
    command = [sys.executable, "-m", f"qarl_trl.{module}", *words, "--config", "recipe.yaml"]
    path = os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=path)
    assert done.returncode == 2 and "recipe.yaml must be a mapping" in done.stderr and not done.stdout


def test_a_dry_run_prints_batches_data_and_settings_and_needs_no_gpu(base, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(train, "make_trainer", lambda *args: pytest.fail("a dry run must not train"))
    for_gpu = [option for option in base if option not in ON_CPU]
    run([*for_gpu, "--use_vllm", "--dry_run", "--gradient_accumulation_steps", "4",
         "--per_device_train_batch_size", "4", "--steps_per_generation", "32", "--hub_token", "secret"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "model: org/model, scheme W4A16, learner quantized" in printed
    assert "no CUDA device here, so the settings were checked for a CPU" in printed
    assert "rollout batch: 16 prompts x 8 = 128 completions on 1 process(es)" in printed
    assert "update: 16 completions; 8 updates per rollout batch" in printed
    assert "QaRLConfig.steps_per_generation: 32" in printed
    assert "secret" not in printed and "QaRLConfig.hub_token: '<hidden>'" in printed
    with pytest.raises(ValueError, match="use_cpu"):  # control: without the dry run transformers refuses them
        parse(for_gpu)


def test_a_dry_run_finds_a_missing_reward(base):
    with pytest.raises(ValueError, match="no_such_reward"):
        cli.run(["train", *base, "--dry_run", "--reward_funcs", "no_such_reward"])


@pytest.mark.parametrize("quant_scheme", ["none", "W4A16"])
def test_run_trains_evaluates_and_saves(base, problems, tmp_path, capsys, quant_scheme):
    from transformers import AutoConfig

    model = tmp_path / "model"
    make_model(num_hidden_layers=1).save_pretrained(model)
    make_tokenizer().save_pretrained(model)
    run([*base, "--model_name_or_path", str(model), "--quant_scheme", quant_scheme, "--conversational", "false",
         "--max_steps", "2", "--max_completion_length", "4", "--num_generations", "2", "--logging_steps", "1",
         "--per_device_train_batch_size", "4", "--steps_per_generation", "2", "--gradient_accumulation_steps", "1",
         "--save_strategy", "no", "--report_to", "none", "--dataset_split", "train[:4]",
         "--eval_strategy", "steps", "--eval_steps", "2", "--eval_dataset_name_or_path", problems,
         "--eval_dataset_split", "test[:2]"])  # fmt: skip
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (getattr(config, "quantization_config", None) is None) == (quant_scheme == "none")
    assert "eval_rewards/math_reward/mean" in capsys.readouterr().out
