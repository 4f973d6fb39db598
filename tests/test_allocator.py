"""`qarl_trl.allocator`: when segments of torch's allocator grow, and that torch still reads the setting."""

import os
import subprocess
import sys

import pytest
import torch
from lines import command_line

from qarl_trl import allocator
from qarl_trl.recipe import RecipeParser
from qarl_trl.train import parse


COLOCATED = {"use_vllm": True, "vllm_mode": "colocate"}


@pytest.fixture(autouse=True)
def as_a_user_who_set_nothing(monkeypatch):
    for name in allocator.VARIABLES:
        # Set first, so that what a test sets is taken away after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ({}, True),
        (COLOCATED, True),
        (COLOCATED | {"vllm_enable_sleep_mode": False, "vllm_tensor_parallel_size": 1}, True),
        (COLOCATED | {"vllm_enable_sleep_mode": True}, False),
        (COLOCATED | {"vllm_tensor_parallel_size": 2}, False),
        # TRL's default is an engine in this process.
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, False),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True}, True),
        # Without an engine it means nothing.
        ({"vllm_enable_sleep_mode": True}, True),
        ({"use_cpu": True}, False),
    ],
)
def test_segments_grow_where_the_engine_allows_it(values, grows):
    assert allocator.let_segments_grow(values) == grows

    assert os.environ.get("PYTORCH_ALLOC_CONF") == ("expandable_segments:True" if grows else None)


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_what_the_user_set_stays(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")

    assert not allocator.let_segments_grow({})

    # Nothing is added under another of the names, either.
    for variable in allocator.VARIABLES:
        assert os.environ.get(variable) == ("max_split_size_mb:512" if variable == name else None)


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 cannot be asked")
@pytest.mark.parametrize(("values", "expected"), [({}, "expandable_segments:True"), ({"use_cpu": True}, "")])
def test_torch_reads_what_is_set_after_its_import(values, expected):
    """In a new process, because torch reads it once. The second case is the control."""
    code = (
        "import torch; from qarl_trl.allocator import let_segments_grow; "
        f"let_segments_grow({values}); print(torch._C._accelerator_getAllocatorSettings())"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "expandable_segments:True"),
        (["--use_vllm", "true", "--vllm_enable_sleep_mode", "true"], None),
        (["--dry_run", "true"], None),
    ],
)
def test_training_sets_it_before_the_settings_ask_for_devices(monkeypatch, tmp_path, options, expected):
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    build = RecipeParser.build
    seen = []

    def recorded_build(parser, values):
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        return build(parser, values)

    monkeypatch.setattr(RecipeParser, "build", recorded_build)
    arguments = {"model_name_or_path": "m", "dataset_name_or_path": problems, "output_dir": tmp_path, "bf16": "false"}

    parse([*command_line(arguments), *options])

    # A config asks torch for devices when it is built, and torch reads the variable then.
    assert seen == [expected]
