"""`qarl-trl plan`: recipes, the table and refusals."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from qarl_trl.cli import main
from qarl_trl.rollout.vllm.adapters import engine_rank
from qarl_trl.tools.plan.memory.advice import advise
from qarl_trl.tools.plan.memory.engine import cache_tokens, engine_weights, synced_bytes
from qarl_trl.tools.plan.memory.learner import host_bytes
from qarl_trl.tools.plan.memory.moments import fits, peaks
from qarl_trl.tools.plan.run import GIB, Hardware
from qarl_trl.tools.plan.settings import USUAL_RANK, decompresses_beside
from tools.plan.runs import model_in_low_bits


RECIPES = Path(__file__).parents[3] / "recipes"
EIGHT_GPUS = RECIPES / "qwen3-8b-base" / "w4a16_qarl_tbpo.yaml"
EIGHT_H100 = ("--config", EIGHT_GPUS, "--gpus", 8, "--gpu", "h100")


def plan(capsys, *argv):
    """The exit code of `qarl-trl plan`, and what it printed."""
    code = 0
    try:
        main(["plan", *map(str, argv)])
    except SystemExit as stopped:
        code = stopped.code
    return code, capsys.readouterr()


def run_of(path, gpus=8, memory=79, sharding="fsdp2", *argv):
    """The run of a recipe, in numbers."""
    # 79 GiB are what an H100 of 80 GB has.
    return advise(["--config", str(path), *map(str, argv)], Hardware(gpus, memory, sharding)).run


# By folder the GiB of each GPU, and how the learner is distributed.
HARDWARE = {
    "qwen3-8b-base": (79, "fsdp2"),
    "qwen2.5-math-7b": (79, "fsdp2"),
    "qwen2.5-math-1.5b": (79, "ddp"),
    "qwen3-30b-a3b-base": (139, "fsdp2"),
}


def recipes_with_hardware():
    for folder, (gib, sharding) in HARDWARE.items():
        for path in sorted(RECIPES.glob(f"{folder}/*.yaml")):
            # An adapter's base has no gradients, so that each GPU has room for the whole model.
            distribution = "ddp" if "lora" in path.stem else sharding
            yield pytest.param(path, gib, distribution, id=f"{folder}/{path.stem}")


@pytest.mark.parametrize(("path", "gib", "sharding"), recipes_with_hardware())
def test_every_recipe_fits_its_hardware_at_its_longest_rows(path, gib, sharding):
    run = run_of(path, 8, gib, sharding)

    assert fits(run)
    # An engine that holds few rows at once would make rollouts slow.
    assert cache_tokens(run) > 4 * 18432

    # The header of the recipe quotes the result.
    peak = max(peaks(run).values()) / GIB
    hardware = path.read_text().splitlines()[2]
    assert hardware.endswith(f"Estimated by qarl-trl plan: {peak:.0f} GiB of {gib}.")


def test_what_does_not_fit_names_its_largest_items(capsys):
    code, printed = plan(capsys, *EIGHT_H100, "--vllm_enable_sleep_mode", "false")

    assert code == 1
    assert "It does not fit: backward" in printed.out
    assert "vllm_gpu_memory_utilization: at most 0.25 would fit" in printed.out
    assert "mostly key-value cache" in printed.out


def test_what_fits_says_in_what_memory(capsys):
    code, printed = plan(capsys, *EIGHT_H100)

    assert code == 0
    assert printed.out.endswith("It fits: 67.9 GiB of 79, 7 of them assumed.\n")
    assert "at most 0.8 would fit" in printed.out


def test_a_gpu_without_a_kernel_is_no_fit(capsys):
    float8 = ("--config", EIGHT_GPUS, "--gpus", 8, "--quant_scheme", "FP8_DYNAMIC")
    code, printed = plan(capsys, *float8, "--gpu", "a100")

    assert code == 1
    assert printed.out.endswith("But it does not run on a100: FP8_DYNAMIC needs Ada or Hopper or Blackwell.\n")

    # Without a GPU the list says it, and the run has others to fit.
    code, printed = plan(capsys, *float8)
    rows = {line.split()[0]: line for line in printed.out.splitlines()}
    assert code == 0
    assert rows["a100"].endswith("no kernel: FP8_DYNAMIC needs Ada or Hopper or Blackwell")
    assert rows["h100"].endswith("fits")

    # Supervised fine-tuning has no engine.
    sft = RECIPES / "trainers" / "sft.yaml"
    code, printed = plan(capsys, "--config", sft, "--quant_scheme", "FP8_DYNAMIC", "--gpu", "a100")
    assert code == 0
    assert "does not run" not in printed.out


def test_an_engine_whose_gpus_would_cut_a_group_does_not_fit():
    recipe = RECIPES / "qwen3-30b-a3b-base" / "w4a16_qarl_tbpo.yaml"

    # 768 inputs of each expert.
    with pytest.raises(
        ValueError, match="got 192 of the 768 inputs.*quant_group_size: 64 or vllm_tensor_parallel_size: 2"
    ):
        run_of(recipe, 8, 139, "fsdp2", "--vllm_tensor_parallel_size", 4)
    assert run_of(recipe, 8, 139, "fsdp2", "--vllm_tensor_parallel_size", 2).engine_ranks == 2  # control


def test_a_lever_that_the_recipe_has_changes_nothing(capsys):
    recipe = RECIPES / "one_gpu" / "qwen2.5-7b_frozen.yaml"
    _, printed = plan(capsys, "--config", recipe, "--gpu", "4090")

    lines = printed.out.splitlines()
    changing = [line for line in lines[lines.index("") :] if "  --" in line]
    unchanging = [line.split("  ")[0] for line in lines if line.endswith("changes nothing here")]
    assert unchanging == ["sleep mode", "gradient checkpointing", "LoRA", "LoRA, frozen base"]
    assert [line.split("  ")[0] for line in changing] == ["AdamW in 8 bits", "the same, kept on the host"]


def test_host_memory_is_one_model_a_machine_when_sharded_and_one_a_process_otherwise():
    sharded = host_bytes(run_of(EIGHT_GPUS, 16, 79, "fsdp2"))
    copied = host_bytes(run_of(EIGHT_GPUS, 16, 79, "ddp"))

    # Qwen3-8B's parameters in float32.
    assert sharded == 4 * 8_190_735_360
    # 8 of the 16 processes are on one machine.
    assert copied == 8 * sharded


def test_a_quantized_checkpoint_is_decompressed_beside_the_model():
    run = run_of(EIGHT_GPUS)
    # Two bytes for each of Qwen3-8B's parameters.
    assert host_bytes(replace(run, decompresses=True)) == host_bytes(run) + 2 * 8_190_735_360

    # In float16 it is converted, too.
    assert decompresses_beside(SimpleNamespace(frozen=False), "float16")
    # They become those of the model; nothing is decompressed.
    assert not decompresses_beside(SimpleNamespace(frozen=False), torch.bfloat16)
    assert not decompresses_beside(SimpleNamespace(frozen=True), "float32")


@pytest.mark.parametrize("scheme", ["checkpoint", "W4A16", "FP8_DYNAMIC"])
def test_a_quantized_checkpoint_is_decompressed_whatever_scheme_the_run_has(tmp_path, scheme):
    recipe = RECIPES / "one_gpu" / "qwen2.5-1.5b.yaml"
    options = ("--quant_scheme", scheme, "--model_name_or_path", model_in_low_bits(tmp_path))

    run = run_of(recipe, 1, 79, "fsdp2", *options)

    entries = sum(parameter.entries for parameter in run.parameters)
    assert host_bytes(run) == (4 + 2) * entries
    assert not run_of(recipe, 1, 79, "fsdp2", *options, "--dtype", "bfloat16").decompresses
    # Control: there is nothing to decompress.
    assert host_bytes(run_of(recipe, 1, 79, "fsdp2")) == 4 * entries


def test_a_checkpoint_that_cannot_be_sharded_is_refused(tmp_path):
    recipe = RECIPES / "one_gpu" / "qwen2.5-1.5b.yaml"
    options = ("--quant_scheme", "checkpoint", "--model_name_or_path", model_in_low_bits(tmp_path, "NVFP4A16"))

    with pytest.raises(ValueError, match="global scale"):
        run_of(recipe, 2, 79, "fsdp2", *options)
    # Control: DDP shards nothing.
    assert run_of(recipe, 2, 79, "ddp", *options).decompresses


def test_a_quantized_checkpoint_is_no_start_without_quantization(tmp_path):
    recipe = RECIPES / "one_gpu" / "qwen2.5-1.5b.yaml"

    with pytest.raises(ValueError, match="is quantized, and quant_scheme is 'none'"):
        run_of(recipe, 1, 79, "ddp", "--quant_scheme", "none", "--model_name_or_path", model_in_low_bits(tmp_path))


def test_a_frozen_base_has_the_scheme_of_its_checkpoint(tmp_path):
    recipe = RECIPES / "one_gpu" / "qwen2.5-7b_frozen.yaml"
    model = ("--model_name_or_path", model_in_low_bits(tmp_path))

    with pytest.raises(ValueError, match="is quantized: lora_base='frozen' keeps its tensors with quant_scheme: chec"):
        run_of(recipe, 1, 79, "fsdp2", *model, "--quant_scheme", "FP8_DYNAMIC")
    assert not run_of(recipe, 1, 79, "fsdp2", *model, "--quant_scheme", "checkpoint").decompresses


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--model_name_or_path", "nobody/knows-this"], "model_name_or_path"),
        (["--gpus", "0"], "--gpus"),
        (["--memory", "nan"], "--memory"),
        (["--vllm_tensor_parallel_size", "0"], "vllm_tensor_parallel_size"),
        (["--gpus", "8", "--vllm_tensor_parallel_size", "3"], "vllm_tensor_parallel_size=3"),
        (["--quant_scheme", "W3A16"], "quant_scheme"),
        (["--kv_cache_dtype", "fp8"], "quantize_learner_kv"),
    ],
)
def test_an_unknown_model_and_wrong_settings_are_one_line_that_names_the_field(capsys, argv, field):
    code, printed = plan(capsys, "--config", EIGHT_GPUS, "--gpu", "h100", *argv)

    assert code == 2
    assert field in printed.err
    assert len(printed.err.strip().splitlines()) == 1


SERVER = ("--vllm_mode", "server", "--max_completion_length", 15000, "--sync_folder", "syncs")
LORA = RECIPES / "one_gpu" / "qwen3-8b.yaml"
FROZEN = RECIPES / "one_gpu" / "qwen2.5-7b_frozen.yaml"


@pytest.mark.parametrize(
    ("recipe", "gpus", "refused", "accepted", "words"),
    [
        (LORA, 1, ["--optim_muon", "true"], ["--optim_muon", "false"], "optim_muon must be False with LoRA"),
        (
            EIGHT_GPUS,
            8,
            ["--quant_keep_matrices", "true"],
            ["--quant_keep_matrices", "true", "--sharding", "ddp"],
            "quant_keep_matrices must be false under FSDP2",
        ),
        (FROZEN, 1, ["--lora_modules_to_save", "lm_head"], [], "vLLM serves no adapter with modules_to_save"),
        (FROZEN, 1, ["--lora_r", "1024"], ["--lora_r", "512"], "r must be at most 512 for vLLM"),
        (EIGHT_GPUS, 8, SERVER[:4], SERVER, "vllm_mode='server' needs sync_folder"),
        (
            EIGHT_GPUS,
            8,
            ["--vllm_engine_kwargs", '{"kv_cache_memory_bytes": "8GiB"}'],
            ["--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 8589934592}'],
            "kv_cache_memory_bytes must be a number of bytes above 0, got '8GiB'",
        ),
    ],
)
def test_what_the_trainer_refuses_fits_no_gpu(capsys, recipe, gpus, refused, accepted, words):
    code, printed = plan(capsys, "--config", recipe, "--gpus", gpus, *refused)
    assert code == 2
    assert words in printed.err
    assert len(printed.err.strip().splitlines()) == 1

    # Control.
    code, printed = plan(capsys, "--config", recipe, "--gpus", gpus, *accepted)
    assert code in (0, 1)
    assert printed.err == ""


def test_a_setting_of_low_bits_is_no_refusal_of_a_run_without_them(capsys):
    settings = ("--quant_scheme", "none", "--optim_muon", "true", "--quantize_learner", "false")
    code, _ = plan(capsys, "--config", LORA, *settings)
    assert code in (0, 1)


def test_vllm_has_the_ranks_that_it_is_not_asked_for():
    assert engine_rank(USUAL_RANK) == USUAL_RANK


def test_the_longest_row_limits_an_answer_that_has_no_limit_of_its_own(capsys, tmp_path):
    # TRL's config says "no limit" by `None`, and then vLLM's model length is one.
    recipe = yaml.safe_load(EIGHT_GPUS.read_text()) | {"max_completion_length": None}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))

    code, _ = plan(capsys, "--config", path, "--gpus", 8, "--gpu", "h100")
    assert code == 0

    # Control: a recipe that limits neither.
    path.write_text(yaml.safe_dump(recipe | {"vllm_max_model_length": None}))
    code, printed = plan(capsys, "--config", path, "--gpus", 8, "--gpu", "h100")
    assert code == 2
    assert "max_completion_length" in printed.err
    assert len(printed.err.strip().splitlines()) == 1


def test_transformers_samples_a_whole_rollout_batch_at_once():
    path = RECIPES / "one_gpu" / "qwen2.5-0.5b.yaml"
    recipe = yaml.safe_load(path.read_text())

    run = run_of(path, 1, 23.5, None, "--use_vllm", "false")

    assert run.sampled_rows == recipe["per_device_train_batch_size"] * recipe["steps_per_generation"]
    assert run_of(path, 1, 23.5, None).sampled_rows == 0  # control


@pytest.mark.parametrize(
    ("recipe", "setting", "value"),
    [("sft.yaml", "attn_implementation", "eager"), ("sft.yaml", "label_smoothing_factor", "0.1")],
)
def test_memory_that_no_formula_counts_is_refused(capsys, recipe, setting, value):
    path = RECIPES / "trainers" / recipe
    code, printed = plan(capsys, "--config", path, "--gpu", "4090", f"--{setting}", value)
    assert code == 2
    assert "plan does not count the" in printed.err
    assert setting in printed.err

    # Control: the advice.
    code, _ = plan(capsys, "--config", path, "--gpu", "4090", f"--{setting}", {"eager": "sdpa", "0.1": "0"}[value])
    assert code == 0


def test_an_fp8_cache_holds_twice_the_sequences():
    stock = run_of(EIGHT_GPUS)
    in_fp8 = run_of(EIGHT_GPUS, 8, 79, "fsdp2", "--kv_cache_dtype", "fp8", "--quantize_learner_kv", "false")

    assert cache_tokens(in_fp8) // 2 == cache_tokens(stock)
    assert peaks(in_fp8) == peaks(stock)


def test_a_server_has_its_own_gpus_and_the_trainer_syncs_to_it():
    colocated = run_of(EIGHT_GPUS)
    server = run_of(EIGHT_GPUS, 8, 79, None, *SERVER)

    assert fits(server)
    # The trainer's GPUs wait during a rollout.
    assert peaks(server)["rollout"] < peaks(colocated)["rollout"]
    for count in (synced_bytes, engine_weights, cache_tokens):
        assert count(server) == count(colocated) > 0


def test_a_server_is_named_beside_the_gpus_of_the_learner(capsys):
    _, printed = plan(capsys, *EIGHT_H100, *SERVER, "--vllm_tensor_parallel_size", 2)
    assert "rollout batch on 8 x h100 and 2 of a server: 4096 answers" in printed.out

    _, printed = plan(capsys, *EIGHT_H100)  # control
    assert "rollout batch on 8 x h100: 4096 answers" in printed.out


def test_a_server_without_room_for_a_row_does_not_fit(capsys):
    small_share = ("--vllm_gpu_memory_utilization", 0.1)
    code, printed = plan(capsys, *EIGHT_H100, *SERVER, *small_share)

    assert code == 1
    assert "The engine has no room for one row" in printed.out
    # The share of another machine is no lever of this one.
    assert "would fit" not in printed.out
