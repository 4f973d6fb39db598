"""`qarl-trl plan`: recipes, the table and refusals."""

from pathlib import Path

import pytest

from qarl_trl.cli import main
from qarl_trl.tools.plan import items
from qarl_trl.tools.plan.ways import explore


RECIPES = Path(__file__).parents[3] / "recipes"
EIGHT = RECIPES / "qwen3-8b-base" / "w4a16_qarl_tbpo.yaml"


def plan(capsys, *argv):
    code = 0
    try:
        main(["plan", *map(str, argv)])
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr()


def run_of(path, gpus=8, memory=79, sharding="fsdp2", *argv):
    return explore(["--config", str(path), *map(str, argv)], gpus, memory, sharding)[1]


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
def test_every_recipe_fits_its_hardware_at_its_longest_rows(path, gib, sharding):
    run = run_of(path, 8, gib, sharding)
    assert items.fits(run) and items.cache_tokens(run) > 4 * 18432
    # Quoted in the header.
    peak = max(items.peaks(run).values()) / 2**30
    assert path.read_text().splitlines()[2].endswith(f"Estimated by qarl-trl plan: {peak:.0f} GiB of {gib}.")


def test_what_does_not_fit_names_its_largest_items(capsys):
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 8, "--vllm_enable_sleep_mode", "false")
    assert code == 1 and "It does not fit: backward" in out.out and "mostly key-value cache" in out.out
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 8)
    assert code == 0 and out.out.endswith("It fits: 67.9 GiB of 79.\n") and "at most 0.8 would fit" in out.out


def test_host_memory_is_one_model_a_machine_when_sharded_and_one_a_process_otherwise():
    found = {kind: items.host_bytes(run_of(EIGHT, 16, 79, kind)) for kind in ("fsdp2", "ddp")}
    assert found["fsdp2"] == 4 * 8_190_735_360  # float32
    assert found["ddp"] == 8 * found["fsdp2"]  # 8 of the 16 are on one machine


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--model_name_or_path", "nobody/knows-this"], "model_name_or_path"),
        (["--gpus", "0"], "--gpus"),
        (["--memory", "nan"], "--memory"),
        (["--vllm_tensor_parallel_size", "0"], "vllm_tensor_parallel_size"),
        (["--gpus", "8", "--vllm_tensor_parallel_size", "3"], "vllm_tensor_parallel_size=3"),
        (["--quant_scheme", "W3A16"], "quant_scheme"),
    ],
)
def test_an_unknown_model_and_wrong_settings_are_one_line_that_names_the_field(capsys, argv, field):
    code, out = plan(capsys, "--config", EIGHT, *argv)
    assert code == 2 and field in out.err and len(out.err.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--sharding", "--gpu"])
def test_what_can_be_chosen_is_in_the_last_line_of_the_error(capsys, option):
    code, out = plan(capsys, "--config", EIGHT, option, "zero3")
    assert code == 2 and f"argument {option}: invalid choice: 'zero3'" in out.err.splitlines()[-1]


def test_a_server_has_its_own_gpus_and_the_trainer_syncs_to_it(capsys):
    server = "--vllm_mode", "server", "--max_completion_length", 15000
    beside, found = run_of(EIGHT), run_of(EIGHT, 8, 79, None, *server)
    assert items.fits(found) and items.peaks(found)["rollout"] < items.peaks(beside)["rollout"]  # these GPUs wait
    for count in (items.synced_bytes, items.engine_weights, items.cache_tokens):
        assert count(found) == count(beside) > 0
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 8, *server, "--vllm_gpu_memory_utilization", 0.1)
    assert code == 1 and "The engine has no room for one row" in out.out and "would fit" not in out.out
