"""`qarl_trl.train`: reading a recipe, refusing a wrong one, and a run from end to end."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from conftest import make_model, make_tokenizer
from datasets import Dataset
from lines import additions, command_line, write_rows

from qarl_trl import cli, methods, train
from qarl_trl.checkpoints.folder import commit
from qarl_trl.methods import METHODS, groups_of
from qarl_trl.recipe import RecipeParser
from qarl_trl.recipe_file import read_recipe
from qarl_trl.rewards import load_rewards
from qarl_trl.tools.report.runs import read_run
from qarl_trl.train import model_settings, parse


ON_CPU = ["--use_cpu", "true", "--bf16", "false"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of data sets for each test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def problems(tmp_path):
    """A file with nine problems."""
    return write_rows(tmp_path / "problems.jsonl", additions(9))


@pytest.fixture
def base(problems, tmp_path):
    """The options that every run needs."""
    return ["--model_name_or_path", "org/model", "--dataset_name_or_path", problems,
            "--output_dir", str(tmp_path / "out"), *ON_CPU]  # fmt: skip


def run(argv):
    """`qarl-trl train`."""
    cli.main(["train", *argv])


def test_recipe_fills_three_groups_and_the_command_line_wins(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    keys = {"reward_funcs": "my.reward", "learning_rate": "1e-5", "tbpo_delta_low": 0.002, "lora_r": 4}
    recipe.write_text(yaml.safe_dump(keys | {"use_peft": True}))

    # A key of the script, of TRL, of this package and of the model.
    script_args, training_args, model_args = parse(["--config", str(recipe), "--learning_rate", "2e-5", *base])

    assert script_args.reward_funcs == ["my.reward"]
    assert training_args.learning_rate == 2e-5
    assert training_args.tbpo_delta_low == 0.002
    assert model_args.lora_r == 4
    # Control: without the option the recipe's value counts.
    assert parse([f"--config={recipe}", *base])[1].learning_rate == 1e-5


def test_a_second_recipe_is_refused(base, tmp_path):
    # The last one would count, and a user may mean both.
    first = tmp_path / "first.yaml"
    second = tmp_path / "second.yaml"
    first.write_text("learning_rate: 1e-5\n")
    second.write_text("lora_r: 4\n")

    with pytest.raises(ValueError, match=r"--config must be there once, got .*first.yaml, .*second.yaml.* base:"):
        parse(["--config", str(first), "--config", str(second), *base])


def test_numbers_of_a_schedule_are_numbers(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-7}\n")

    _, training_args, _ = parse(["--config", str(recipe), *base])

    assert training_args.lr_scheduler_kwargs == {"min_lr": 1e-7}

    recipe.write_text("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e999}\n")
    with pytest.raises(ValueError, match="lr_scheduler_kwargs must be a finite number, got inf"):
        parse(["--config", str(recipe), *base])


@pytest.mark.parametrize(
    ("eval_name", "eval_config", "expected"),
    [("org/train", None, "main"), ("org/other", None, None), ("org/other", "hard", "hard"), ("org/train", "x", "x")],
)
def test_an_evaluation_set_has_the_configuration_of_its_own_dataset(monkeypatch, eval_name, eval_config, expected):
    loaded = []

    def load_rows(*which):
        loaded.append(which)
        return Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(methods, "load_rows", load_rows)
    settings = methods.DataArguments(
        dataset_name_or_path="org/train",
        dataset_config="main",
        eval_dataset_name_or_path=eval_name,
        eval_dataset_config=eval_config,
    )

    train.load_datasets(settings, with_eval=True, method=methods.SFT)

    assert loaded == [("org/train", "train", "main"), (eval_name, "test", expected)]


@pytest.mark.parametrize(
    ("key", "near"),
    [("learning_rte", "learning_rate"), ("answer_colum", "answer_column")],
)
def test_unknown_keys_are_refused_with_the_nearest_one(base, tmp_path, key, near):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: 1e-5\n")

    # In a recipe, as an option with its value behind it, and with the value in one word.
    for argv in (["--config", str(recipe), *base], [*base, f"--{key}", "1"], [*base, f"--{key}=1"]):
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


# transformers' errors about these name what is wrong in the value, or another field that the first one sets.
NAMED_OTHERWISE = {
    "accelerator_config": "AcceleratorConfig|No such file",
    "use_transformers_paged": "use_transformers_continuous_batching",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_value_of_any_field_is_accepted_or_an_error_that_names_the_field(base, tmp_path, kind):
    """Of all fields, by their types: a number is never NaN, infinite or text, and a switch or a number is no list."""
    recipe = tmp_path / "recipe.yaml"
    # What the config of each group needs to be built, so that an error is about the one wrong value.
    names = [key.removeprefix("--") for key in base[::2]]
    right = dict(zip(names, base[1::2], strict=True)) | {"lora_dropout": 0}
    accepted = set()
    types = {}

    for group in groups_of():
        types |= get_type_hints(group)
        parser = RecipeParser([group])
        known = [field.name for field in fields(group)]
        for name in known:
            values = {key: value for key, value in right.items() if key in known} | {name: WRONG[kind]}
            recipe.write_text(yaml.safe_dump(values))
            try:
                parser.build(parser.convert(read_recipe(recipe)))
                accepted.add(name)
            except ValueError as error:
                assert re.search(rf"\b{name}\b|{NAMED_OTHERWISE.get(name, name)}", str(error)), name

    numbers = fields_of_types(types, int, float, int | None, float | None)
    # A switch may be given as a number.
    if kind in ("a mapping", "a list", "text"):
        numbers |= fields_of_types(types, bool)
    # -1 has a meaning for these, or a negative number is one like others.
    if kind.startswith("negative"):
        numbers -= {"entropy_coef", "local_rank", "save_total_limit", "top_k"}
    # `null` is "not set" for many of them.
    if kind != "nothing":
        assert not accepted & numbers
    # Control: there are numbers.
    assert len(numbers) >= 60


def fields_of_types(types, *wanted):
    """The names of the fields whose annotation is one of `wanted`."""
    names = set()
    for name, hint in types.items():
        if hint in wanted:
            names.add(name)
    return names


# As text, of which YAML makes numbers, switches and `None` by rules of its own: "1e-5" stays text, "no" is false.
WRITTEN = {
    "learning_rate": "1e-5",
    "max_steps": "7",
    "use_vllm": "no",
    "optim_muon": "off",
    "reward_funcs": "math_reward",
    "save_strategy": "no",
    "scale_rewards": "false",
    "verify_sync": "off",
    "pad_to_multiple_of": "8",
    "generation_kwargs": '{"n": 1}',
    "quant_ignore": "lm_head",
    # Otherwise a push copies the log to a public Space.
    "trackio_static_space_id": "false",
}


def test_values_of_a_recipe_and_of_the_command_line_have_the_same_types(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("".join(f"{key}: {value}\n" for key, value in WRITTEN.items()))

    script_args, args, _ = parse([*base, *command_line(WRITTEN)])
    _, from_recipe, _ = parse(["--config", str(recipe), *base])

    assert script_args.reward_funcs == ["math_reward"]
    assert args.learning_rate == 1e-5
    assert args.max_steps == 7
    assert args.use_vllm is False
    assert args.optim_muon is False
    assert args.save_strategy == "no"
    assert args.scale_rewards == "none"
    assert args.verify_sync == "off"
    assert args.pad_to_multiple_of == 8
    assert args.generation_kwargs == {"n": 1}
    assert args.quant_ignore == ["lm_head"]
    assert args.trackio_static_space_id is False
    assert settings_of(args) == settings_of(from_recipe)


def settings_of(args):
    """The settings without those that depend on the time."""
    settings = args.to_dict()
    for name in ("logging_dir", "run_name"):
        settings.pop(name, None)
    return settings


def test_what_no_option_can_say_is_taken_from_the_recipe_by_its_type(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "max_tokens_per_pass: null\nquant_ignore: []\nreport_to: []\nreward_weights: [1, -1e-5]\n"
        "generation_kwargs: {n: 1, stop: ['1']}\n"
    )

    _, args, _ = parse(["--config", str(recipe), *base])

    assert args.max_tokens_per_pass is None
    assert args.quant_ignore == []
    assert args.report_to == []
    assert args.reward_weights == [1.0, -1e-5]
    assert args.generation_kwargs == {"n": 1, "stop": ["1"]}
    # The command line overrides it.
    assert parse(["--config", str(recipe), *base, "--max_tokens_per_pass", "512"])[1].max_tokens_per_pass == 512


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_field_that_may_be_null_in_a_recipe_may_be_null_on_the_command_line(method, tmp_path):
    parser = RecipeParser(groups_of(method))
    recipe = tmp_path / "recipe.yaml"
    may_be_null = set()

    for name in parser._fields:
        recipe.write_text(f"{name}: null\n")
        try:
            in_recipe = parser.read(["--config", str(recipe)])
            may_be_null.add(name)
        except ValueError as error:
            in_recipe = str(error)
            assert "null" in in_recipe or "must be one of" in in_recipe

        for option in ([f"--{name}", "null"], [f"--{name.replace('_', '-')}=~"]):
            try:
                on_command_line = parser.read(option)
            except ValueError as error:
                on_command_line = str(error)
            assert on_command_line == in_recipe, name

    assert len(may_be_null) > 60
    # Control: what must be there is no such field.
    assert {"max_steps", "learning_rate", "dataset_split"}.isdisjoint(may_be_null)


def test_null_on_the_command_line_overrides_and_is_overridden(base, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("quant_group_size: 32\nlora_target_modules: [q_proj]\n")
    argv = ["--config", str(recipe), *base]

    nulls = ["--quant_group_size", "null", "--lora_target_modules", "null", "--max_tokens_per_pass", "null"]
    _, args, model_args = parse([*argv, "--quant_group_size", "64", *nulls])

    assert args.quant_group_size is None
    assert args.max_tokens_per_pass is None
    assert model_args.lora_target_modules is None
    assert parse([*argv, *nulls, "--quant_group_size", "64"])[1].quant_group_size == 64


@pytest.mark.parametrize(
    ("written", "read"),
    [
        # TRL makes a text of a list of one, and peft a regular expression of that.
        (["q_proj"], ["q_proj"]),
        (["self_attn.q_proj"], ["self_attn.q_proj"]),
        # Controls: what peft reads as a text.
        (["all-linear"], "all-linear"),
        ([r".*\.[qk]_proj"], r".*\.[qk]_proj"),
        (["q_proj", "k_proj"], ["q_proj", "k_proj"]),
    ],
)
def test_the_name_of_one_layer_is_no_regular_expression(base, written, read):
    model_args = parse([*base, "--use_peft", "true", "--lora_target_modules", *written])[2]

    assert model_args.lora_target_modules == read


@pytest.mark.parametrize("name", ["quant_group_size", "system_prompt", "bf16", "lora_target_modules"])
@pytest.mark.parametrize("word", ["none", "None"])
def test_pythons_word_for_null_is_no_text(base, tmp_path, name, word):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{name}: {word}\n")

    for argv in ([f"--{name}", word], [f"--{name}={word}"], ["--config", str(recipe)]):
        with pytest.raises(ValueError, match=f"{name} must be a value or null, got '{word}': write null"):
            parse([*base, *argv])


def test_none_is_a_word_where_another_value_is_the_default(base):
    _, args, _ = parse([*base, "--quant_scheme", "none", "--report_to", "none", "--advantage_filter", "none"])

    assert args.quant_scheme == "none"
    assert args.report_to == []
    assert args.advantage_filter == "none"


def test_a_pair_of_numbers_is_no_text():
    parser = RecipeParser(groups_of(METHODS["rloo"]))

    assert parser.read(["--reward_clip_range", "[-1, 2.5]"]) == {"reward_clip_range": (-1.0, 2.5)}
    for wrong in ("5", "12", "[1]", "[1, x]", '["1", "2"]', "[0, NaN]"):
        with pytest.raises(ValueError, match="reward_clip_range"):
            parser.read(["--reward_clip_range", wrong])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model_name_or_path", ""], "model_name_or_path"),
        (["--dataset_name_or_path", ""], "dataset_name_or_path"),
        (["--eval_strategy", "steps"], "eval_dataset_name_or_path"),
        (["--eval_on_start", "true"], "eval_dataset_name_or_path"),
        # Options without a value, and with one too many.
        (["--max_steps"], "max_steps"),
        (["--max_steps", "1", "2"], "'2' is neither an option"),
        (["--num_generations", "0"], "num_generations must be a whole number above 0, got 0"),
        (["--reward_timeout", "nan"], "reward_timeout must be a finite number"),
        (["--reward_weights", "1", "inf"], "reward_weights must be a finite number"),
        (["--vllm_engine_kwargs", "x=1"], "vllm_engine_kwargs: must be a mapping"),
        (["--quant_recipe", "nowhere.yaml"], "quant_recipe='nowhere.yaml': .*No such file"),
        (["--quant_ignore", "re:["], "re:\\["),
        (["--quant_scheme", "W2A2"], "W2A2"),
    ],
)
def test_wrong_settings_stop_before_a_model_loads(base, extra, message):
    with pytest.raises(ValueError, match=message):
        parse([*base, *extra])


def test_sft_which_has_no_engine_needs_no_switch_for_one(base):
    engine = ["--vllm_engine_kwargs", '{"enforce_eager": true}']

    parse([*base, *engine], method=METHODS["sft"])

    # Control: RLOO has one.
    with pytest.raises(ValueError, match="use_vllm must be set beside vllm_engine_kwargs"):
        parse([*base, *engine], method=METHODS["rloo"])


def test_a_column_of_answers_without_its_switch_is_refused(base):
    """A distillation would sample answers, and never read those of the data."""
    column = ["--completion_column", "solution"]
    with pytest.raises(ValueError, match="distill_on must be set beside completion_column"):
        parse([*base, *column], method=METHODS["distill"])

    # Control: with it. Rollouts are a choice, too.
    for source in ("answers", "rollouts"):
        parse([*base, *column, "--distill_on", source], method=METHODS["distill"])


@pytest.mark.parametrize(
    ("setting", "switch", "values"),
    [
        (["--lora_r", "8"], "use_peft", ("true", "false")),
        (["--lora_target_modules", "q_proj", "v_proj"], "use_peft", ("true", "false")),
        (["--vllm_max_model_length", "64"], "use_vllm", ("true", "false")),
        (["--eval_dataset_name_or_path", "PROBLEMS"], "eval_strategy", ("epoch", "no")),
    ],
)
def test_a_setting_without_its_switch_is_refused(base, problems, setting, switch, values):
    setting = [word.replace("PROBLEMS", problems) for word in setting]
    with pytest.raises(ValueError, match=f"{switch} must be set beside {setting[0].removeprefix('--')}"):
        parse([*base, *setting])

    # Control: with it all is well. Off is a choice, too.
    for value in values:
        parse([*base, *setting, f"--{switch}", value])


def test_epochs_on_the_command_line_do_not_lose_to_a_recipe_in_silence(base, tmp_path):
    recipe = tmp_path / "short.yaml"
    recipe.write_text("max_steps: 3\nnum_train_epochs: 2\n")
    command = ["--config", str(recipe), *base]
    # Of a recipe that has both, one is a default of its base.
    assert parse(command)[1].max_steps == 3

    for option in ("--num_train_epochs", "--num-train-epochs"):
        with pytest.raises(ValueError, match="no effect beside the recipe's max_steps: 3. Add --max_steps -1"):
            parse([*command, option, "5"])

    _, args, _ = parse([*command, "--num_train_epochs", "5", "--max_steps", "-1"])
    assert (args.num_train_epochs, args.max_steps) == (5, -1)


def test_options_are_texts_lists_switches_and_negative_numbers():
    parser = RecipeParser(groups_of())

    values = parser.read(
        [
            "--bf16",
            "--run-name=a=b",
            "--prompt_template",
            "",
            "--quant_ignore",
            "x",
            "y",
            "--use_vllm",
            "--top_k",
            "-1",
        ]
    )

    assert values == {
        "bf16": True,
        "run_name": "a=b",
        "prompt_template": "",
        "quant_ignore": ["x", "y"],
        "use_vllm": True,
        "top_k": -1,
    }
    with pytest.raises(ValueError, match="learning_rate must not be negative, got -1e-05"):
        parser.read(["--learning_rate", "-1e-5"])
    with pytest.raises(ValueError, match=r"'recipe.yaml' is neither an option nor the value of one"):
        parser.read(["recipe.yaml"])
    with pytest.raises(ValueError, match="learning_rat is not a key of a recipe. Did you mean learning_rate?"):
        parser.read(["--learning_rat", "1"])


def test_rewards_come_by_name_and_by_path(tmp_path, monkeypatch):
    module = "def short(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
    (tmp_path / "my_rewards.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    # Loading adds the current folder, last.
    monkeypatch.setattr(sys, "path", list(sys.path))

    rewards = load_rewards(["math_reward", "my_rewards.short", "trl.rewards.think_format_reward"])

    assert [reward.__name__ for reward in rewards] == ["math_reward", "short", "think_format_reward"]
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "reward_funcs must name a function"),
        (["os.path"], "reward_funcs.*it is not a function"),
        (["no_such_reward"], "no_such_reward.*Give math_reward"),
        (["json.no_such_reward"], "json.no_such_reward.*Give math_reward"),
    ],
)
def test_rewards_that_are_no_functions_are_refused(names, words):
    with pytest.raises(ValueError, match=words):
        load_rewards(names)


@pytest.mark.parametrize("seconds", [0.0, math.nan])
def test_a_reward_without_time_is_refused(seconds):
    with pytest.raises(ValueError, match="reward_timeout must be above 0"):
        load_rewards(["math_reward"], seconds)


CALL_A_REWARD = """
import sys
sys.path = [path for path in sys.path if path]  # as the command's own script has it
from qarl_trl.rewards import load_rewards
from qarl_trl.tools.report.runs import read_run
try:
    reward, = load_rewards(["{name}"])
    print(reward([[{{"role": "assistant", "content": r"\\boxed{{1}}"}}]], answer=["1"]))
except ValueError as error:
    print("Give math_reward" in str(error))
"""


@pytest.mark.parametrize(
    ("name", "answer"),
    [("math_reward", "[1.0]"), ("math_rewards", "True"), ("trl.rewards.think_format_reward", "[0.0]")],
)
def test_no_file_of_the_current_folder_stands_in_for_a_package(tmp_path, name, answer):
    # Two are packages that are installed, the third is a name that is misspelt.
    for module in ("math_verify", "math_rewards", "trl"):
        (tmp_path / f"{module}.py").write_text(f"print('ran {module}')\n")
    done = run_python(["-c", CALL_A_REWARD.format(name=name)], folder=tmp_path)

    assert "ran " not in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == answer


def run_python(words, folder):
    """Run Python in a folder, with this package on its path."""
    environment = os.environ | {"PYTHONPATH": str(Path(train.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize(
    ("command", "module", "refusal"),
    [
        (["qarl_trl.train", "--config", "recipe.yaml"], "yaml", "recipe.yaml must be a mapping"),
        (["qarl_trl.cli", "report", "no_run"], "json", "no_run"),
    ],
)
def test_python_m_takes_the_current_folder_last(tmp_path, command, module, refusal):
    (tmp_path / f"{module}.py").write_text("print('ran')\n")
    (tmp_path / "recipe.yaml").write_text("- 1\n")

    done = run_python(["-m", *command], folder=tmp_path)

    assert done.returncode == 2
    assert refusal in done.stderr
    assert not done.stdout


def test_a_dry_run_prints_batches_data_and_settings_and_needs_no_gpu(base, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(train, "make_trainer", lambda *args: pytest.fail("a dry run must not train"))
    # As the recipes have it: for a GPU, which the machine of who checks them may lack.
    for_gpu = [option for option in base if option not in ON_CPU]

    run([*for_gpu, "--use_vllm", "--dry_run", "--gradient_accumulation_steps", "4",
         "--per_device_train_batch_size", "4", "--steps_per_generation", "32", "--hub_token", "secret"])  # fmt: skip

    printed = capsys.readouterr().out
    assert "model: org/model, scheme W4A16, learner quantized" in printed
    assert "no CUDA device here, so the settings were read for a CPU" in printed
    assert "rollout batch: 16 prompts x 8 = 128 completions on 1 process(es)" in printed
    assert "update: 16 completions; 8 updates per rollout batch" in printed
    assert "QaRLConfig.steps_per_generation: 32" in printed
    # The value of `--hub_token`. What is printed is pasted into issues.
    assert "secret" not in printed
    assert "QaRLConfig.hub_token: '<hidden>'" in printed

    # A recipe that says so is read for a CPU, too.
    assert parse([*for_gpu, "--use_cpu", "false"], any_device=True)[1].use_cpu
    # Control: without the dry run transformers refuses them.
    with pytest.raises(ValueError, match="use_cpu"):
        parse(for_gpu)


PLANS = {
    "as it is": (
        [],
        {"start": "from the beginning", "output": "the low-bit model in {out}", "push": "nothing"},
    ),
    "checkpoints": (
        ["--save_steps", "20", "--save_total_limit", "3"],
        {"checkpoints": "every 20 updates, in {out}; the last 3 stay"},
    ),
    # transformers takes it for no limit.
    "checkpoints without a limit": (
        ["--save_steps", "20", "--save_total_limit", "0"],
        {"checkpoints": "every 20 updates, in {out}; all stay"},
    ),
    "a part of the run": (["--save_steps", "0.1"], {"checkpoints": "every 10% of the run, in {out}; all stay"}),
    "none": (["--save_strategy", "no"], {"checkpoints": "none, so nothing can be resumed"}),
    "merged adapter": (
        ["--use_peft", "--lora_dropout", "0"],
        {"output": "the adapter in {out}, the low-bit model in {out}/low_bit"},
    ),
    "frozen base, pushed": (
        ["--use_peft", "--lora_dropout", "0", "--lora_base", "frozen", "--push_to_hub", "--hub_model_id", "me/sums"],
        {
            "output": "the adapter in {out}, its base in {out}/base",
            "push": "to me/sums at the end, its base to me/sums-base",
        },
    ),
    "unquantized, pushed": (
        ["--quant_scheme", "none", "--push_to_hub"],
        {"output": "the model in {out}", "push": "to out at the end"},
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_dry_run_says_where_it_starts_and_what_it_writes_and_pushes(base, tmp_path, capsys, case):
    options, expected = PLANS[case]

    run([*base, *options, "--dry_run"])

    printed = capsys.readouterr().out.splitlines()
    for what, words in expected.items():
        assert f"{what}: {words.format(out=tmp_path / 'out')}" in printed


def test_a_dry_run_names_the_checkpoint_that_auto_finds(base, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (2, 10):
        incoming = tmp_path / "incoming"
        incoming.mkdir()
        for file in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            (incoming / file).write_text("{}")
        (tmp_path / "out").mkdir(exist_ok=True)
        commit(incoming, tmp_path / "out" / f"checkpoint-{number}")

    run([*base, "--output_dir", "out", "--resume_from_checkpoint", "auto", "--dry_run"])

    assert f"start: resumes from {tmp_path}/out/checkpoint-10" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora_base", "frozen"], "needs an adapter"),
        (["--use_peft"], "lora_dropout: 0.0"),  # TRL's own value is another
    ],
)
def test_a_dry_run_refuses_an_adapter_as_the_run_would(base, options, words):
    with pytest.raises(ValueError, match=words):
        cli.run(["train", *base, "--dry_run", *options])

    # Control: without low bits any adapter may train.
    if "--use_peft" in options:
        cli.run(["train", *base, "--dry_run", *options, "--quant_scheme", "none"])


def test_a_dry_run_finds_a_missing_reward(base):
    with pytest.raises(ValueError, match="no_such_reward"):
        cli.run(["train", *base, "--dry_run", "--reward_funcs", "no_such_reward"])


@pytest.mark.parametrize("quant_scheme", ["none", "W4A16"])
def test_run_trains_evaluates_and_saves(base, problems, tmp_path, capsys, quant_scheme):
    from transformers import AutoConfig

    # End to end: two steps, an evaluation after them, and a model and the log in the output folder.
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
    # The run has no checkpoint.
    assert [row["step"] for row in read_run(tmp_path / "out", "out").log if "loss" in row] == [1, 2]

    # Which nobody takes the log for.
    again = [*base, "--model_name_or_path", str(model), "--quant_scheme", quant_scheme, "--dry_run"]
    run([*again, "--resume_from_checkpoint", "auto"])
    assert "start: from the beginning" in capsys.readouterr().out.splitlines()
    with pytest.raises(ValueError, match="is not a complete checkpoint of this trainer: .*manifest.json is missing"):
        cli.run(["train", *again, "--resume_from_checkpoint", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("option", "value", "key", "other"),
    [("dtype", "bfloat16", "dtype", "float32"), ("model_revision", "v2", "revision", "v1")],
)
def test_an_argument_of_the_model_that_is_set_twice_must_be_one(base, option, value, key, other):
    def settings(of_kwargs):
        _, args, model_args = parse([*base, f"--{option}", value, "--model_init_kwargs", json.dumps({key: of_kwargs})])
        return model_settings(args, model_args)

    with pytest.raises(ValueError, match=f"{option}='{value}' and model_init_kwargs: .*{other}.* must not differ"):
        settings(other)
    # Controls: set alike, and set once.
    assert settings(value)[key] == value
    _, args, model_args = parse([*base, "--model_init_kwargs", json.dumps({key: other})])
    assert model_settings(args, model_args)[key] == other
