"""`qarl-trl plan`: recipes, the table and refusals."""

import json
from pathlib import Path

import pytest

from qarl_trl.cli import main
from qarl_trl.tools.plan import model as meta


RECIPES = Path(__file__).parents[3] / "recipes"
EIGHT = RECIPES / "qwen3-8b-base" / "w4a16_qarl_tbpo.yaml"


@pytest.fixture(scope="module", autouse=True)
def built_once():
    """Recipes of one model and scheme share the model, which a plan only reads."""
    skeleton, built = meta.skeleton, {}

    def cached(config, *args, **how):
        key = repr((config.to_dict(), args, how))
        return built[key] if key in built else built.setdefault(key, skeleton(config, *args, **how))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta, "skeleton", cached)
        yield


def plan(capsys, *argv):
    code = 0
    try:
        main(["plan", *map(str, argv)])
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr()


def found_of(capsys, *argv):
    code, out = plan(capsys, *argv, "--json")
    return code, json.loads(out.out)


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
    code, found = found_of(capsys, "--config", path, "--gpus", 8, "--memory", gib, "--sharding", sharding)
    assert (code, found["fits"], found["over"]) == (0, True, [])
    assert found["cache_tokens"] > 4 * 18432
    # Quoted in the header.
    peak = max(found["peaks"].values()) / 2**30
    assert path.read_text().splitlines()[2].endswith(f"Estimated by qarl-trl plan: {peak:.0f} GiB of {gib}.")


def test_what_does_not_fit_names_its_largest_items(capsys):
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 8, "--vllm_enable_sleep_mode", "false")
    assert code == 1 and "It does not fit: backward" in out.out and "mostly key-value cache" in out.out
    code, out = plan(capsys, "--config", EIGHT, "--gpus", 8)
    assert code == 0 and out.out.rstrip().endswith("It fits.") and "at most 0.8 would fit" in out.out


@pytest.mark.parametrize(("kernel", "words"), [("auto", "fake quantization"), ("engine", "engine's own kernel")])
def test_the_kernel_of_the_learner_is_said(capsys, kernel, words):
    assert words in plan(capsys, "--config", EIGHT, "--gpus", 8, "--quant_kernel", kernel)[1].out


def test_host_memory_is_one_model_a_machine_when_sharded_and_one_a_process_otherwise(capsys):
    found = {
        kind: found_of(capsys, "--config", EIGHT, "--gpus", 16, "--sharding", kind)[1] for kind in ("fsdp2", "ddp")
    }
    assert found["fsdp2"]["host"] == 4 * 8_190_735_360  # float32
    assert found["ddp"]["host"] == 8 * found["fsdp2"]["host"]  # 8 of the 16 are on one machine


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--model_name_or_path", "nobody/knows-this"], "model_name_or_path"),
        (["--gpus", "0"], "--gpus"),
        (["--memory", "nan"], "--memory"),
        (["--vllm_tensor_parallel_size", "0"], "vllm_tensor_parallel_size"),
        (["--gpus", "8", "--vllm_tensor_parallel_size", "3"], "vllm_tensor_parallel_size=3"),
        (["--quant_scheme", "W3A16"], "quant_scheme"),
        (["--gpus", "8", "--sharding", "zero3"], "--sharding"),
    ],
)
def test_an_unknown_model_and_wrong_settings_are_one_line_that_names_the_field(capsys, argv, field):
    code, out = plan(capsys, "--config", EIGHT, *argv)
    assert code == 2 and field in out.err and len(out.err.strip().splitlines()) == 1


def test_a_server_has_its_own_gpus_and_the_trainer_syncs_to_it(capsys):
    eight = "--config", EIGHT, "--gpus", 8
    server = *eight, "--vllm_mode", "server", "--max_completion_length", 15000
    (_, beside), (code, found) = found_of(capsys, *eight), found_of(capsys, *server)
    assert code == 0 and found["peaks"]["rollout"] < beside["peaks"]["rollout"]  # the learner's GPUs wait
    for name in ("sync", "engine_weights", "cache_tokens"):
        assert found[name] == beside[name] > 0
    assert "engine weights" in beside["moments"]["sync"] and "engine weights" not in found["moments"]["sync"]
    code, out = plan(capsys, *server, "--vllm_gpu_memory_utilization", 0.1)
    assert code == 1 and "The engine has no room for one row" in out.out and "would fit" not in out.out
