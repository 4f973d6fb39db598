"""`examples/countdown`: a reward that cannot be cheated, and the script from its recipe to a saved adapter."""

import sys
from pathlib import Path

import pytest
from conftest import save_chat_model
from lines import command_line
from safetensors.torch import load_file

from qarl_trl import cli


FOLDER = Path(__file__).parents[2] / "examples" / "countdown"
RECIPE = FOLDER / "lora.yaml"


@pytest.fixture(scope="module")
def countdown():
    """The script, imported."""
    # Not for the other tests: the folder of a script is on the path only while it runs.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        import countdown

        yield countdown
        sys.modules.pop("countdown")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>(3 + 4) * 5</answer>", 1.0),
        ("<answer>1</answer> no: <answer> 5*(4+3) </answer>", 1.0),
        # A tenth for what can be computed: another value, another number, and a number twice.
        ("<answer>3 * 4 + 5</answer>", 0.1),
        ("<answer>35</answer>", 0.1),
        ("<answer>(3 + 4) * 5 * (5 / 5)</answer>", 0.1),
        # Nothing for what is no sum of numbers, or would crash a reward that evaluates it.
        ("<answer>3 ** 4</answer>", 0.0),
        ("<answer>7 / (3 - 3)</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>" + "(" * 150 + "</answer>", 0.0),
        ("(3 + 4) * 5", 0.0),
    ],
)
def test_only_an_answer_of_the_numbers_is_right(countdown, text, reward):
    numbers = [3, 4, 5]
    # As messages, and as plain text.
    completions = [[{"role": "assistant", "content": text}], text]

    rewards = countdown.countdown_reward(completions, [numbers, numbers], [35, 35], prompts=None)

    assert rewards == [reward, reward]


def test_problems_are_the_same_for_a_seed(countdown):
    problems = countdown.make_problems(50, seed=1)

    assert problems.to_list() == countdown.make_problems(50, seed=1).to_list()
    # Control: the seed counts.
    assert problems.to_list() != countdown.make_problems(50, seed=2).to_list()
    # The model must be told what to reach.
    for row in problems:
        assert str(row["target"]) in row["prompt"][0]["content"]


def small_run(model, folder, **changes):
    """The command line of two updates of `model` by the recipe, without an engine."""
    # What the recipe takes from vLLM and a GPU, off; and two updates of one rollout batch.
    small = {
        "model_name_or_path": model,
        "output_dir": folder / "out",
        "num_problems": 8,
        "use_cpu": True,
        "use_vllm": False,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 8,
        "report_to": "none",
    }
    return ["--config", str(RECIPE), *command_line(small | changes)]


def test_the_script_trains_an_adapter_by_its_recipe(countdown, tmp_path):
    model = save_chat_model(tmp_path / "model")

    trainer = countdown.main(small_run(model, tmp_path, save_strategy="no"))

    assert trainer.state.global_step == 2
    assert trainer.args.quant_name == "W4A16"
    # The adapter alone: its base is frozen.
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved
    for name in saved:
        assert "lora" in name


def test_the_recipe_starts_a_server(tmp_path, capsys):
    # `serve` reads the recipe of the training, and starts nothing in a dry run.
    settings = {
        "config": RECIPE,
        "model_name_or_path": save_chat_model(tmp_path / "model"),
        "use_cpu": "true",
        "sync_folder": "/dev/shm/countdown",
    }

    cli.main(["serve", *command_line(settings), "--dry_run"])

    assert "--load-format dummy" in capsys.readouterr().out
