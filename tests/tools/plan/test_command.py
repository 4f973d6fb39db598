"""`qarl-trl plan`: recipes, the table and refusals."""

import json
from pathlib import Path

import pytest

from qarl_trl.cli import main
from qarl_trl.tools.plan import model as meta


ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
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


def test_what_helps_can_be_pasted_as_it_stands_and_gives_what_is_said(capsys):
    """LoRA too, with which Muon and dropout are refused; and the table stays narrow."""
    for argv, expected in (
        (["--gpus", "1", "--memory", "139", "--tokens", "2000"], "--vllm_gpu_memory_utilization 0.45"),
        (["--gpus", "1", "--memory", "60", "--tokens", "2000"], "--use_peft true"),
        (["--gpus", "2", "--sharding", "ddp", "--vllm_enable_sleep_mode", "false"], "--sharding fsdp2"),
    ):
        argv = ["--config", str(EIGHT), *argv]
        code, found = found_of(capsys, *argv)
        assert code == 1 and any(expected in change["change"] for change in found["changes"])
        for change in found["changes"]:
            code, after = found_of(capsys, *argv, *change["change"].split())
            assert (after["fits"], max(after["peaks"].values())) == (change["fits"], change["peak"])
            assert code == (not change["fits"])
        _, out = plan(capsys, *argv)
        assert "It does not fit: " in out.out and f"  {found['changes'][0]['change']}: " in out.out
    _, lora = found_of(
        capsys, "--config", EIGHT.with_stem("w4a16_qarl_tbpo_lora"), "--memory", "20", "--tokens", "2000"
    )
    assert not any("use_peft" in change["change"] for change in lora["changes"])  # it has it


def test_few_rows_beside_idle_memory_are_a_warning(capsys):
    half, most = (
        plan(capsys, "--config", EIGHT, "--gpus", 8, "--vllm_gpu_memory_utilization", share)[1].out
        for share in (0.5, 0.8)
    )
    assert "warning: room for 12 whole rows of 512 sequences while 27 GiB are idle" in half
    assert "--vllm_gpu_memory_utilization 0.8 would fit" in half
    assert "warning" not in most and most.rstrip().endswith("It fits.")


def test_host_memory_is_one_model_a_machine_when_sharded_and_one_a_process_otherwise(capsys):
    found = {
        kind: found_of(capsys, "--config", EIGHT, "--gpus", 16, "--sharding", kind)[1] for kind in ("fsdp2", "ddp")
    }
    assert found["fsdp2"]["host"] == 4 * 8_190_735_360  # float32
    assert found["ddp"]["host"] == 8 * found["fsdp2"]["host"]  # 8 of the 16 are on one machine


SMALL = "--model_name_or_path", "Qwen/Qwen2.5-Math-1.5B", "--vllm_tensor_parallel_size", "3"
PLAIN = "none", "FP8_DYNAMIC"
MIXTURE = "--model_name_or_path", "Qwen/Qwen3-30B-A3B-Base"


def test_an_unknown_model_and_wrong_settings_are_one_line_that_names_the_field(capsys):
    for argv, field in (
        (["--model_name_or_path", "nobody/knows-this"], "model_name_or_path"),
        (["--gpus", "0"], "--gpus"),
        (["--tokens", "-5"], "--tokens"),
        *((["--memory", value], "--memory") for value in ("0", "inf", "nan", "1e308")),
        (["--replicas", "-1"], "--replicas"),
        (["--vllm_tensor_parallel_size", "0"], "vllm_tensor_parallel_size"),
        *((["--vllm_gpu_memory_utilization", value], "vllm_gpu_memory_utilization") for value in ("0", "nan", "1.5")),
        *((["--gpus", "6", *SMALL, "--quant_scheme", scheme], "key-value heads") for scheme in PLAIN),
        (["--quant_scheme", "W3A16"], "quant_scheme"),
        (["--gpus", "8", "--vllm_tensor_parallel_size", "3"], "vllm_tensor_parallel_size=3"),
        (["--gpus", "8", *MIXTURE, "--vllm_tensor_parallel_size", "4"], "down_proj"),
        (["--gpus", "8", "--replicas", "3"], "--replicas"),
        (["--gpus", "8", "--sharding", "zero3"], "--optim_muon"),
        (["--gpus", "8", "--quant_scheme", "NVFP4A16"], "NVFP4A16"),
        (["--gpus", "8", "--quant_scheme", "W4A8"], "W4A8"),
    ):
        code, out = plan(capsys, "--config", EIGHT, *argv)
        assert code == 2 and field in out.err and len(out.err.strip().splitlines()) == 1
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
