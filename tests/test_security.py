"""What others wrote (recipes, checkpoints) runs no code, sets no address and reaches no file outside of its folder."""

import json
import os
import sys

import pytest
from safetensors.torch import save_file

from qarl_trl import LowBitDistillationConfig, QaRLConfig, cli
from qarl_trl.quant.modifier import read_modifier
from qarl_trl.recipe_file import read_recipe
from qarl_trl.redact import HIDDEN, redact
from qarl_trl.train import parse
from qarl_trl.validate import check_run


CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({mark!r}).touch()
class OwnConfig(PretrainedConfig):
    model_type = "own"
"""


@pytest.fixture
def foreign(tmp_path):
    """A checkpoint that brings code, and the file that this code makes when it runs."""
    folder = tmp_path / "foreign"
    mark = tmp_path / "it-ran"
    folder.mkdir()

    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}))
    save_file({}, folder / "model.safetensors")
    return folder, mark


def config(tmp_path, **changes):
    """The settings of a run on a CPU."""
    return QaRLConfig(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", **changes)


CALLS = {
    "training": lambda folder, tmp_path: check_run(folder, config(tmp_path), {}),
    "export": lambda folder, tmp_path: cli.main(["export", folder, str(tmp_path / "out"), "--traceback"]),
    "eval": lambda folder, tmp_path: cli.main(["eval", folder, "--suite", "sums.jsonl", "--traceback"]),
}


@pytest.mark.parametrize("call", CALLS)
def test_code_of_a_checkpoint_does_not_run(foreign, tmp_path, monkeypatch, call):
    folder, mark = foreign
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    # Nobody to ask.
    monkeypatch.setattr(sys, "stdin", None)

    # Not a SystemExit, of an option that is refused before the model is read.
    with pytest.raises((ValueError, OSError, RuntimeError)):
        CALLS[call](str(folder), tmp_path)

    assert not mark.exists()


def test_code_of_a_checkpoint_runs_when_it_is_asked_for(foreign, tmp_path):
    """The control of the test above."""
    folder, mark = foreign

    check_run(str(folder), config(tmp_path, trust_remote_code=True), {})

    assert mark.exists()


# Recipes ---------------------------------------------------------------------------------------------------------


def test_a_recipe_is_data(tmp_path):
    # What `yaml.load` calls while it reads.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"x: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'it-ran'}]\n")

    with pytest.raises(ValueError, match="recipe.yaml must have no tags.*pathlib.Path.touch"):
        read_recipe(recipe)
    with pytest.raises(Exception, match="could not determine a constructor"):
        read_modifier(recipe)

    assert not (tmp_path / "it-ran").exists()


def test_a_recipe_with_an_alias_is_refused(tmp_path):
    # Aliases of aliases grow to any size: a few lines would fill the memory.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: &a {x: 1}\nb: *a\n")

    with pytest.raises(ValueError, match="recipe.yaml must have no aliases"):
        read_recipe(recipe)

    # Control: the same without the alias.
    recipe.write_text("a: &a {x: 1}\n")
    assert read_recipe(recipe) == {"a": {"x": 1}}


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 1\n", "x: {a: 1, b: 2, a: 3}\n", "x: [{a: 1, a: 1}]\n"])
def test_a_recipe_with_a_key_twice_is_refused(tmp_path, text):
    """YAML would take the last one, and a reader may see the first."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)

    with pytest.raises(ValueError, match="recipe.yaml must have each key once, got a twice"):
        read_recipe(recipe)

    # Control: the same key in two mappings.
    recipe.write_text("a: {a: 1}\nx: [{a: 1}, {a: 1}]\n")
    assert read_recipe(recipe).keys() == {"a", "x"}


@pytest.mark.parametrize("written", ["12:30", "0123", "1_000", "0x1F", "off", "Yes", "2026-11-29", "1:30.5"])
def test_a_value_that_yaml_reads_otherwise_than_it_is_written_is_refused(tmp_path, written):
    """A system prompt's `12:30` would be 750, an option `off` would be False, and nobody would say so."""
    recipe = tmp_path / "recipe.yaml"
    for text in (f"x: {{a: {written}}}\n", f"x: [1, {written}]\n", f"x: [{{a: [{written}]}}]\n"):
        recipe.write_text(text)
        with pytest.raises(ValueError, match=f"recipe.yaml has {written} within a list or a mapping"):
            read_recipe(recipe)

    # Controls: in quotes, and at the top, where a value is taken as it is written.
    recipe.write_text(f"x: {{a: '{written}'}}\ny: {written}\n")
    assert read_recipe(recipe) == {"x": {"a": written}, "y": written}


def test_plain_values_within_a_recipe_are_read_as_they_are_written(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("x: [0, -12, +3, 1.5, .5, 5., 1e-7, -1.0E+3, true, False, null, ~, text, 1.2.3, q_proj, '']\n")

    numbers = [0, -12, 3, 1.5, 0.5, 5.0, 1e-7, -1000.0]
    assert read_recipe(recipe) == {"x": [*numbers, True, False, None, None, "text", "1.2.3", "q_proj", ""]}


def test_a_recipe_that_merges_is_refused(tmp_path):
    """YAML would put the merged keys before the others."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("a: 1\n<<: {b: 2}\n")

    with pytest.raises(ValueError, match="recipe.yaml must have no merges"):
        read_recipe(recipe)

    # Control: a text.
    recipe.write_text("a: '<<'\n")
    assert read_recipe(recipe) == {"a": "<<"}


@pytest.mark.parametrize("key", ["on", "no", "~", "1.5", "01"])
@pytest.mark.parametrize("text", ["a: {KEY: 1}\n", "a: [{KEY: 1}]\n", "KEY: 1\n"])
def test_a_recipe_whose_keys_yaml_takes_for_something_else_is_refused(tmp_path, text, key):
    """YAML would make the keys true, false, null or numbers of them."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("KEY", key))

    with pytest.raises(ValueError, match=f"must have text as keys, and '{key}' is none"):
        read_recipe(recipe)

    # Control: in quotes. Numbers, such as the token ids of a `logit_bias`, may be keys.
    recipe.write_text('a: {"on": 1, 7: 1}\n')
    assert read_recipe(recipe) == {"a": {"on": 1, 7: 1}}


def test_numbers_within_a_mapping_are_numbers_and_texts_stay_texts(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('a: {min_lr: 1e-7, x: -2E+3, y: .5e1, text: "1e-7", name: 1e-7b, rates: [1e-7]}\n')

    numbers = {"min_lr": 1e-7, "x": -2000.0, "y": 5.0, "text": "1e-7", "name": "1e-7b", "rates": [1e-7]}
    assert read_recipe(recipe)["a"] == numbers


@pytest.mark.parametrize("base", ["/dev/zero", "."])
def test_a_base_without_an_end_is_refused(tmp_path, base):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {base}\n")

    with pytest.raises(ValueError, match="must be a file, got a folder or a device"):
        read_recipe(recipe)


def test_an_error_of_a_recipe_does_not_show_its_lines(tmp_path):
    # A quote that does not end. YAML's own message shows the line.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("hub_token: 'hf_secret\n")

    with pytest.raises(ValueError, match="recipe.yaml must be YAML, got an error in line 2") as refused:
        read_recipe(recipe)

    assert "hf_secret" not in str(refused.value)


def test_a_recipe_sets_no_variable_of_the_environment(tmp_path):
    # TRL's parser sets what is in `env`: tokens would then go to the address of whoever wrote the recipe.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("env:\n  HF_ENDPOINT: value-of-it\n")

    with pytest.raises(ValueError, match="env is not a key of a recipe") as refused:
        parse(["--config", str(recipe)])

    assert os.environ.get("HF_ENDPOINT") != "value-of-it"
    assert "value-of-it" not in str(refused.value)


# Secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (
            {"api_key": "k", "headers": {"Authorization": "Bearer k", "X-Api-Key": "k"}},
            {"api_key": HIDDEN, "headers": {"Authorization": HIDDEN, "X-Api-Key": HIDDEN}},
        ),
        (
            {"hf_token": "k", "accessToken": "k", "AWS_SECRET_ACCESS_KEY": "k", "db_password": "k"},
            {"hf_token": HIDDEN, "accessToken": HIDDEN, "AWS_SECRET_ACCESS_KEY": HIDDEN, "db_password": HIDDEN},
        ),
    ],
)
def test_redaction_hides_what_is_named_as_a_secret(value, shown):
    assert redact(value) == shown


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": "k", "num_key_value_heads": 2, "monkey": "k"},
        {"token": True, "tokenizer": "k", "key_length": 3, "stop": ["k"]},
    ],
)
def test_redaction_keeps_what_is_no_secret(value):
    assert redact(value) == value


def test_redaction_hides_secrets_of_the_environment_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    # So short that it stands everywhere: hidden, it would make the rest unreadable.
    monkeypatch.setenv("SHORT_TOKEN", "1")
    value = {"url": "https://user:from-the-environment@host/1", "args": ["--x=from-the-environment"], "seed": "1"}

    shown = redact(value)

    assert shown == {"url": f"https://user:{HIDDEN}@host/1", "args": [f"--x={HIDDEN}"], "seed": "1"}


def test_a_dry_run_and_an_error_show_no_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_SECRET", "from-the-environment")
    data = tmp_path / "sums.jsonl"
    data.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    options = ["--model_name_or_path", "a/b", "--dataset_name_or_path", str(data), "--use_cpu", "--dry_run"]
    engine = {"api_key": "sk-1", "hf_overrides_": {"headers": {"Authorization": "Bearer sk-1"}}}

    of_engine = ["--use_vllm", "false", "--vllm_engine_kwargs", json.dumps(engine)]
    cli.main(["train", *options, "--run_name", "from-the-environment", *of_engine])
    with pytest.raises(SystemExit):
        cli.main(["train", *options, "--quant_scheme", "from-the-environment"])

    said = "".join(capsys.readouterr())
    assert "sk-1" not in said
    assert "from-the-environment" not in said
    assert said.count(HIDDEN) >= 4


@pytest.mark.parametrize(("field", "key"), [("model_init_kwargs", "token"), ("vllm_engine_kwargs", "hf_token")])
def test_a_token_in_the_settings_is_refused_unseen(tmp_path, field, key):
    with pytest.raises(ValueError, match=f"{field} sets .*HF_TOKEN") as refused:
        config(tmp_path, **{field: {key: "hf_secret"}})

    assert "hf_secret" not in str(refused.value)
    # Control: "the one I am logged in with".
    config(tmp_path, model_init_kwargs={"token": True})


def test_a_token_for_the_teacher_is_refused_unseen(tmp_path):
    def with_teacher(**arguments):
        return LowBitDistillationConfig(
            output_dir=str(tmp_path),
            report_to="none",
            bf16=False,
            use_cpu=True,
            teacher_model_name_or_path="a/b",
            teacher_model_init_kwargs=arguments,
        )

    with pytest.raises(ValueError, match="teacher_model_init_kwargs sets .*HF_TOKEN") as refused:
        with_teacher(token="hf_secret")

    assert "hf_secret" not in str(refused.value)
    # Control: other arguments, and no token that is the user's own.
    with_teacher(token=True, dtype="bfloat16")
