"""`qarl-trl plan`: recipes, the table, refusals."""

import json
from pathlib import Path

import pytest

from qarl_trl.cli import main


RECIPES = Path(__file__).parents[2] / "recipes"
EIGHT = RECIPES / "qwen3-8b-base" / "w4a16_qarl_tbpo.yaml"


def plan(capsys, *argv):
    code = 0
    try:
        main(["plan", *map(str, argv)])
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    ("path", "gib", "sharding"),
    [
        *((path, 79, "fsdp2") for path in sorted(RECIPES.glob("qwen3-8b-base/*.yaml")) if "lora" not in path.stem),
        (EIGHT.with_stem("w4a16_qarl_tbpo_lora"), 79, "ddp"),
        *((path, 79, "fsdp2") for path in sorted(RECIPES.glob("qwen2.5-math-7b/*.yaml"))),
        *((path, 79, "ddp") for path in sorted(RECIPES.glob("qwen2.5-math-1.5b/*.yaml"))),
        *((path, 139, "fsdp2") for path in sorted(RECIPES.glob("qwen3-30b-a3b-base/*.yaml"))),
    ],
    ids=lambda value: f"{value.parent.name}/{value.stem}" if isinstance(value, Path) else None,
)
def test_every_recipe_fits_its_hardware_at_its_longest_rows(capsys, path, gib, sharding):
    code, out = plan(capsys, "--config", path, "--gpus", 8, "--memory", gib, "--sharding", sharding, "--json")
    found = json.loads(out.out)
    assert (code, found["fits"], found["over"]) == (0, True, [])
    assert found["cache_tokens"] > 4 * found["tokens"]
    # Quoted in the header.
    peak = max(found["peaks"].values()) / 2**30
    assert f"{peak:.0f} GiB" in path.read_text().splitlines()[2]


def test_the_table_names_what_does_not_fit_and_what_to_change(capsys):
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 1, "--memory", 139, "--tokens", 2000)
    assert code == 1
    assert "It does not fit: rollout" in out.out and "  vllm_gpu_memory_utilization: 0." in out.out
    assert max(map(len, out.out.splitlines())) <= 100
    assert "  use_peft: true" in out.out
    lora = "--config", EIGHT.with_stem("w4a16_qarl_tbpo_lora")
    code, out = plan(capsys, *lora, "--gpus", 1, "--memory", 20, "--tokens", 2000)
    assert code == 1 and "It does not fit" in out.out and "use_peft" not in out.out  # it has it
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 8)
    assert code == 0 and out.out.rstrip().endswith("It fits.") and max(map(len, out.out.splitlines())) <= 100


def test_an_unknown_model_and_wrong_settings_are_one_line(capsys):
    for argv, words in (
        (["--model_name_or_path", "nobody/knows-this"], "no folder with a config.json"),
        (["--gpus", "0"], "--gpus 0"),
        (["--quant_scheme", "W3A16"], "quant_scheme='W3A16'"),
    ):
        code, out = plan(capsys, "--config", EIGHT, *argv)
        assert code == 2 and words in out.err and len(out.err.strip().splitlines()) == 1
