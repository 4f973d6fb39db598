"""`examples/countdown`: problems that can be solved, a reward that cannot be cheated, and the script from its recipe to a saved adapter."""

import sys
from pathlib import Path

import pytest
from conftest import save_chat_model
from safetensors.torch import load_file

from qarl_trl import cli


FOLDER = Path(__file__).parents[2] / "examples" / "countdown"


@pytest.fixture(scope="module")
def countdown():
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
        ("<answer>3 * 4 + 5</answer>", 0.1),  # another value
        ("<answer>35</answer>", 0.1),  # not of these numbers
        ("<answer>(3 + 4) * 5 * (5 / 5)</answer>", 0.1),  # a number twice
        ("<answer>3 ** 4</answer>", 0.0),
        ("<answer>7 / (3 - 3)</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>" + "(" * 150 + "</answer>", 0.0),
        ("(3 + 4) * 5", 0.0),
    ],
)
def test_only_an_answer_of_the_numbers_is_right(countdown, text, reward):
    messages = [{"role": "assistant", "content": text}]
    assert countdown.countdown_reward([messages, text], [[3, 4, 5]] * 2, [35] * 2, prompts=None) == [reward] * 2


def test_problems_are_the_same_for_a_seed(countdown):
    problems = countdown.make_problems(50, seed=1)
    assert problems.to_list() == countdown.make_problems(50, seed=1).to_list()
    assert problems.to_list() != countdown.make_problems(50, seed=2).to_list()  # control
    assert all(str(row["target"]) in row["prompt"][0]["content"] for row in problems)


def small_run(model, folder, **changes):
    """The command line of two updates of `model` by the recipe, without an engine."""
    small = {"max_steps": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_completion_length": 8}
    small |= {"per_device_train_batch_size": 8, "num_problems": 8, "output_dir": folder / "out", "report_to": "none"}
    small |= {"use_vllm": False, "use_cpu": True, "model_name_or_path": model}
    return [
        "--config",
        str(FOLDER / "lora.yaml"),
        *(w for k, v in (small | changes).items() for w in (f"--{k}", str(v))),
    ]


def test_the_script_trains_an_adapter_by_its_recipe(countdown, tmp_path):
    trainer = countdown.main(small_run(save_chat_model(tmp_path / "model"), tmp_path, save_strategy="no"))
    assert trainer.state.global_step == 2 and trainer.args.quant_name == "W4A16"
    assert all("lora" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_the_recipe_starts_a_server(tmp_path, capsys):
    given = ["--use_cpu", "true", "--sync_folder", "/dev/shm/countdown", "--dry_run"]
    cli.main(
        [
            "serve",
            "--config",
            str(FOLDER / "lora.yaml"),
            "--model_name_or_path",
            save_chat_model(tmp_path / "model"),
            *given,
        ]
    )
    assert "--load-format dummy" in capsys.readouterr().out
