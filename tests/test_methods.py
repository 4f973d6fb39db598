"""`qarl_trl.methods`: the commands `sft`, `rloo` and `distill`, from a recipe to a model that vLLM loads."""

import re
from types import SimpleNamespace

import pytest
from configs import field_names
from huggingface_hub import ModelCard
from lines import lines_that_begin, write_rows
from slow.toys import save_model, stored_tensors
from trl import TrlParser

from qarl_trl import cli
from qarl_trl.describe import describe_options, options_of
from qarl_trl.methods import DISTILL, QARL, RLOO, SFT, groups_of
from qarl_trl.options import GROUPS
from qarl_trl.train import parse


METHODS = {"sft": SFT, "rloo": RLOO, "distill": DISTILL}
# What a recipe for each needs besides model, data and folder.
SETTINGS = {
    "sft": "packing: true\nmax_length: 32\n",
    "rloo": "num_generations: 2\nmax_completion_length: 4\nconversational: false\nbeta: 0.0\n",
    "distill": "distill_on: answers\ncompletion_column: answer\nconversational: false\nbeta: 0.0\n",
}
# The tag of the card, which says what was done.
TAGS = {"sft": "sft", "rloo": "rloo", "distill": "distillation", "train": "tbpo", "a stock loss": "grpo"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache of data sets for each test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def recipe(tmp_path):
    """Factory: the recipe of a command, a file."""

    model = save_model(tmp_path / "model", layers=1)
    # Columns for all three: each command takes its own.
    rows = []
    for number in range(10, 26):
        problem = f"{number}+1="
        answer = str(number + 1)
        rows.append({"text": problem + answer, "problem": problem, "answer": answer})
    data = write_rows(tmp_path / "rows.jsonl", rows)

    def write(command):
        path = tmp_path / f"{command}.yaml"
        path.write_text(
            f"model_name_or_path: {model}\ndtype: float32\ndataset_name_or_path: {data}\n"
            f"output_dir: {tmp_path / 'out'}\nuse_cpu: true\nbf16: false\nreport_to: []\nmax_steps: 1\n"
            f"per_device_train_batch_size: 4\nsave_strategy: 'no'\nlogging_steps: 1\n{SETTINGS[command]}"
        )
        return str(path)

    return write


@pytest.mark.parametrize("command", METHODS)
def test_a_recipe_ends_in_a_low_bit_model(recipe, tmp_path, command):
    cli.main([command, "--config", recipe(command)])

    # The output folder itself is what vLLM loads, with a card that says how it was trained.
    assert "model.layers.0.mlp.down_proj.weight_packed" in stored_tensors(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1 optimizer step" in card
    tags = ModelCard(card).data.tags
    assert set(TAGS.values()) & set(tags) == {TAGS[command]}


def test_texts_that_have_their_question_as_a_prompt_beside_them_are_trained_on(recipe, tmp_path):
    """As UltraChat has it beside its messages; TRL would ask for a completion."""
    data = write_rows(tmp_path / "chats.jsonl", [{"prompt": "0+1=", "text": "0+1=1"}] * 16)

    cli.main(["sft", "--config", recipe("sft"), "--dataset_name_or_path", str(data)])

    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", METHODS)
def test_a_dry_run_prints_the_settings_and_loads_nothing(recipe, capsys, monkeypatch, command):
    monkeypatch.setattr("qarl_trl.train.make_trainer", lambda *args: pytest.fail("a dry run must not train"))

    cli.main([command, "--config", recipe(command), "--dry_run"])

    said = capsys.readouterr().out
    assert "scheme W4A16, learner quantized" in said
    assert "update: 4" in said
    # Fine-tuning samples nothing, and this distillation takes the answers of the data.
    assert ("rollout batch" in said) == (command == "rloo")


@pytest.mark.parametrize("command", METHODS)
def test_help_names_the_command_and_its_own_fields(capsys, command):
    cli.main([command, "--help"])

    said = capsys.readouterr().out
    assert f"usage: qarl-trl {command} --config FILE" in said
    assert f"qarl_trl.cli {command}" in said
    assert ("--reward_funcs" in said) == (command == "rloo")
    assert ("--distill_on" in said) == (command == "distill")
    # TBPO is QaRL's loss alone.
    assert "--tbpo_delta_low" not in said
    assert METHODS[command].trl_config in said
    assert "--quant_scheme" in said


def fields_of_trl(method):
    """Those of the config of TRL that a method's config extends."""
    _, config, _ = groups_of(method)
    (stock,) = [base for base in config.__mro__ if base.__name__ == method.trl_config]
    return field_names(stock)


@pytest.mark.parametrize("method", [QARL, *METHODS.values()], ids=lambda method: method.command)
def test_each_field_of_ours_is_in_a_group_and_in_the_help(method):
    """`kv_cache_dtype` was in none."""
    data, config, _ = groups_of(method)
    ours = field_names(data, config) - fields_of_trl(method)
    # TRL's too, with other values.
    if method is QARL:
        ours.add("loss_type")

    options = options_of(method)
    printed = re.findall(r"^  --(\w+)$", describe_options(method), re.MULTILINE)

    for option in options:
        assert option.metadata["help"].group in GROUPS, option.name
    # As lists: each once.
    assert sorted(option.name for option in options) == sorted(ours)
    assert sorted(printed) == sorted(ours)
    assert "kv_cache_dtype" in printed


def test_the_help_refuses_a_field_without_a_group(monkeypatch):
    """Control."""
    # Its help is a plain text, as dataclasses have it: `options.option` adds the group.
    without = SimpleNamespace(name="new_field", metadata={"help": "Something."}, default=None)
    monkeypatch.setattr("qarl_trl.describe.options_of", lambda method: [without])

    with pytest.raises(AttributeError, match="group"):
        describe_options(QARL)


@pytest.mark.parametrize("method", [QARL, *METHODS.values()], ids=lambda method: method.command)
def test_a_script_of_a_user_reads_the_config_by_trls_parser(method, tmp_path):
    """It hands the metadata of a field to argparse, which knows no groups."""
    _, config, _ = groups_of(method)
    line = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--quant_scheme", "W8A16"]

    (args,) = TrlParser((config,)).parse_args_and_config(line)

    assert args.quant_scheme == "W8A16"


@pytest.mark.parametrize("method", [QARL, *METHODS.values()], ids=lambda method: method.command)
def test_the_config_is_that_of_its_trainer_and_of_trl(method):
    _, config, _ = groups_of(method)
    stock = fields_of_trl(method)

    assert stock
    assert stock <= field_names(config)
    assert method.trainer_class().__annotations__["args"] == config.__name__


@pytest.mark.parametrize(
    ("command", "option", "value", "words"),
    [
        ("sft", "reward_funcs", "math_reward", "reward_funcs is not a key of a recipe"),
        ("sft", "dataset_text_field", "body", "must have a column 'body'"),
        ("rloo", "loss_type", "tbpo", "loss_type is not a key of a recipe"),
        ("distill", "use_vllm", "true", "distill_on='answers' samples nothing"),
        ("distill", "auto_find_batch_size", "true", "auto_find_batch_size must be False"),
        ("distill", "quantize_learner", "false", "the student equals its own start"),
        ("distill", "completion_column", "solution", "no solution. Set completion_column"),
        ("distill", "teacher_model_name_or_path", "no/such-teacher", "teacher_model='no/such-teacher' cannot be read"),
    ],
)
def test_bad_input_ends_in_one_line(recipe, capsys, command, option, value, words):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--config", recipe(command), f"--{option}", value])

    assert stop.value.code == 2
    (line,) = lines_that_begin(capsys.readouterr().err, "qarl-trl ")
    assert line.startswith(f"qarl-trl {command}: ")
    assert words in line


def test_data_that_are_missing_are_named(recipe):
    with pytest.raises(ValueError, match="dataset_name_or_path is missing"):
        parse(["--config", recipe("sft"), "--dataset_name_or_path", ""], method=SFT)
