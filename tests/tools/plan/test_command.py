"""`qarl-trl plan`: recipes, the table, refusals, and the tables of the documents."""

import json
from pathlib import Path

import pytest

from qarl_trl.cli import main
from qarl_trl.tools.plan import model as meta


ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
EIGHT = RECIPES / "qwen3-8b-base" / "w4a16_qarl_tbpo.yaml"
THIRTY = RECIPES / "qwen3-30b-a3b-base" / "w4a16_qarl_tbpo.yaml"


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


@pytest.mark.parametrize(
    ("path", "gib", "sharding"),
    [
        *((path, 79, "fsdp2") for path in sorted(RECIPES.glob("qwen3-8b-base/*.yaml")) if "lora" not in path.stem),
        (EIGHT.with_stem("w4a16_qarl_tbpo_lora"), 79, "ddp"),
        *((path, 79, "fsdp2") for path in sorted(RECIPES.glob("qwen2.5-math-7b/*.yaml"))),
        *((path, 79, "ddp") for path in sorted(RECIPES.glob("qwen2.5-math-1.5b/*.yaml"))),
        *((path, 139, "fsdp2") for path in sorted(RECIPES.glob("qwen3-30b-a3b-base/*.yaml"))),
        *((path, 79, "fsdp2") for path in sorted(RECIPES.glob("ablations/*.yaml"))),
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
    assert path.read_text().splitlines()[2].endswith(f"Estimated by qarl-trl plan: {peak:.0f} GiB of {gib}.")


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


SMALL = "--model_name_or_path", "Qwen/Qwen2.5-Math-1.5B", "--vllm_tensor_parallel_size", "3"
PLAIN = "none", "FP8_DYNAMIC"
MIXTURE = "--model_name_or_path", "Qwen/Qwen3-30B-A3B-Base"


def test_an_unknown_model_and_wrong_settings_are_one_line(capsys):
    for argv, words in (
        (["--model_name_or_path", "nobody/knows-this"], "no folder with a config.json"),
        (["--gpus", "0"], "--gpus must be a number above 0, got 0"),
        (["--tokens", "-5"], "--tokens must be a number above 0, got -5"),
        (["--tokens", "0"], "--tokens must be a number above 0, got 0"),
        (["--memory", "inf"], "--memory must be a number above 0, got inf"),
        (["--replicas", "-1"], "--replicas must be a number above 0, got -1"),
        (["--vllm_tensor_parallel_size", "0"], "vllm_tensor_parallel_size must be at least 1, got 0"),
        *(
            (["--gpus", "6", *SMALL, "--quant_scheme", scheme], "must divide the 2 key-value heads")
            for scheme in PLAIN
        ),
        (["--quant_scheme", "W3A16"], "quant_scheme='W3A16'"),
        (["--gpus", "8", "--vllm_tensor_parallel_size", "3"], "vllm_tensor_parallel_size=3 must divide the GPUs"),
        (["--gpus", "1", "--vllm_tensor_parallel_size", "8"], "got --gpus 1"),
        (["--gpus", "8", *MIXTURE, "--vllm_tensor_parallel_size", "4"], "768 inputs of mlp.experts.0.down_proj"),
        (["--gpus", "8", "--replicas", "3"], "--replicas 3 must divide --gpus 8"),
        (["--gpus", "8", "--sharding", "zero3"], "--optim_muon false"),
        (["--gpus", "8", "--quant_scheme", "NVFP4A16"], "FSDP and ZeRO-3 cut them"),
        (["--gpus", "8", "--quant_scheme", "W4A8"], "no GPU kernel for W4A8"),
        (["--gpus", "8", "--bf16_full_eval", "true"], "bf16_full_eval=True"),
    ):
        code, out = plan(capsys, "--config", EIGHT, *argv)
        assert code == 2 and words in out.err and len(out.err.strip().splitlines()) == 1
    _, found = found_of(capsys, "--config", EIGHT, "--gpus", "8", "--sharding", "ddp", "--quant_scheme", "NVFP4A16")
    assert found["scheme"] == "NVFP4A16"  # whole on each GPU


def found_of(capsys, *argv):
    code, out = plan(capsys, *argv, "--json")
    return code, json.loads(out.out)


def test_a_server_has_its_own_gpus_and_the_trainer_syncs_to_it(capsys):
    eight = "--config", EIGHT, "--gpus", 8
    server = *eight, "--vllm_mode", "server", "--max_completion_length", 15000
    (_, beside), (code, found) = found_of(capsys, *eight), found_of(capsys, *server, "--sync_folder", "f")
    assert code == 0 and found["served"] and not beside["served"]
    assert set(beside["peaks"]) - set(found["peaks"]) == {"rollout"}  # the learner's GPUs wait
    for name in ("sync", "engine_weights", "cache_tokens"):
        assert found[name] == beside[name] > 0
    assert "engine weights" in beside["moments"]["sync"] and "engine weights" not in found["moments"]["sync"]
    assert found_of(capsys, *server) == (0, found)  # over NCCL, whatever this machine has
    _, out = plan(capsys, *server, "--vllm_gpu_memory_utilization", 0.1)
    assert "a weight sync moves 5.7 GiB" in out.out and "of the server's own 1 x 79 GiB" in out.out
    assert "The engine has no room for one row" in out.out and "would fit" not in out.out


def test_copies_of_the_model_over_nodes_cost_what_one_node_costs(capsys):
    (_, two), (_, one) = (
        found_of(capsys, "--config", EIGHT, *more) for more in (("--gpus", 16, "--replicas", 2), ("--gpus", 8))
    )
    assert (two.pop("gpus"), one.pop("gpus")) == (16, 8)
    assert (two.pop("sharding"), one.pop("sharding")) == ("HSDP, 2 copies", "FSDP2")
    assert two == one
    _, flat = found_of(capsys, "--config", EIGHT, "--gpus", 16)
    assert max(flat["peaks"].values()) < max(one["peaks"].values())  # control
