"""The config that `qarl-trl plan` reads is that of all processes of the run, by TRL's own arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import PartialState
from trl import GRPOConfig, RLOOConfig

from qarl_trl.cli import main
from qarl_trl.methods import QARL, RLOO, Method
from qarl_trl.tools.plan.memory.moments import moments
from qarl_trl.tools.plan.recipe import read_settings
from qarl_trl.tools.plan.run import GIB, Hardware
from qarl_trl.tools.plan.settings import batch_of, run_of


RECIPES = Path(__file__).parents[3] / "recipes"
OF_METHOD = {QARL: RECIPES / "one_gpu" / "qwen2.5-1.5b.yaml", RLOO: RECIPES / "trainers" / "rloo.yaml"}
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}
BATCHES = [{"generation_batch_size": 256}, {"steps_per_generation": 16}, {}]


def recipe(folder: Path, method: Method = QARL, **fields: object) -> list[str]:
    """A recipe without the sizes of a batch but these."""
    lines = OF_METHOD[method].read_text().splitlines()
    of_batch = (*SIZES, "generation_batch_size", "steps_per_generation")
    kept = [line for line in lines if line.partition(":")[0] not in of_batch]
    path = folder / "recipe.yaml"
    path.write_text("\n".join([*kept, *(f"{name}: {value}" for name, value in fields.items())]))
    return ["--config", str(path)]


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("batch", BATCHES, ids=["generation_batch_size", "steps_per_generation", "neither"])
@pytest.mark.parametrize("of_trl", [GRPOConfig, RLOOConfig])
def test_a_rollout_batch_is_the_one_that_trl_makes_on_so_many_processes(tmp_path, monkeypatch, gpus, batch, of_trl):
    method = QARL if of_trl is GRPOConfig else RLOO
    settings, _ = read_settings(recipe(tmp_path, method, **SIZES, **batch), gpus, method=method)
    planned = batch_of(settings, None, None)

    # What accelerate says in a process of such a run. It counts the processes itself when a config is made.
    monkeypatch.setattr(PartialState, "num_processes", property(lambda _: gpus, lambda *_: None), raising=False)
    expected = of_trl(str(tmp_path), use_cpu=True, bf16=False, **SIZES, **batch)
    assert expected.world_size == gpus

    assert planned.answers == expected.generation_batch_size
    assert planned.prompts == expected.generation_batch_size // 8
    assert planned.micro_batches == expected.steps_per_generation
    assert planned.updates == max(1, expected.steps_per_generation * settings.num_iterations // 8)
    # Every answer is in a micro-batch of one of the GPUs.
    assert planned.micro_batches * SIZES["per_device_train_batch_size"] * gpus == planned.answers


def numbers_of(folder, *argv, gpus=1):
    """The settings of a recipe with further options, and its run on so many GPUs of 79 GiB."""
    settings, model_args = read_settings([*recipe(folder, **SIZES), *argv], gpus)
    return settings, run_of(settings, model_args, Hardware(gpus, 79))


def test_a_penalty_asks_a_reference_model(tmp_path):
    for beta, expected in (("0.04", True), ("0.0", False)):
        settings, _ = numbers_of(tmp_path, "--beta", beta)
        assert batch_of(settings, None, None).has_reference is expected


def test_a_cache_of_a_given_size_does_not_depend_on_the_share(tmp_path):
    """vLLM leaves the share aside then."""
    size = ("--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 2147483648}')
    for share in ("0.3", "0.9"):
        _, run = numbers_of(tmp_path, *size, "--vllm_gpu_memory_utilization", share)
        assert moments(run)["rollout"]["key-value cache"] == 2 * GIB

    # Control: without it the share decides.
    _, run = numbers_of(tmp_path, "--vllm_gpu_memory_utilization", "0.9")
    assert moments(run)["rollout"]["key-value cache"] > 60 * GIB


def test_fsdp2_trains_in_float32_whatever_dtype_loads(tmp_path):
    """accelerate makes what is trained float32, and a reference too (`test_model.py`)."""

    def run_on_eight(*argv, sharding="fsdp2"):
        settings, model_args = read_settings(
            [*recipe(tmp_path, **SIZES), "--beta", "0.04", "--optim", "adamw_torch", *argv], 8
        )
        return run_of(settings, model_args, Hardware(8, 79, sharding))

    float32 = moments(run_on_eight("--dtype", "float32"))["backward"]
    for dtype in ("bfloat16", "auto"):
        sharded = moments(run_on_eight("--dtype", dtype))["backward"]
        for item in ("master weights", "gradients", "optimizer state", "reference model"):
            assert sharded[item] == float32[item]

    # Controls: DDP shards nothing, without mixed precision nothing is cast, and neither is the base of an adapter.
    ddp = run_on_eight("--dtype", "bfloat16", sharding="ddp")
    unmixed = run_on_eight("--dtype", "bfloat16", "--bf16", "false", "--quant_scheme", "none", "--loss_type", "grpo")
    for run in (ddp, unmixed):
        assert {parameter.size for parameter in run.parameters} == {2}
    lora = run_on_eight("--dtype", "bfloat16", "--use_peft", "true", "--lora_dropout", "0")
    for parameter in lora.parameters:
        assert parameter.size == (4 if parameter.in_adapter else 2)


@pytest.mark.parametrize(
    ("argv", "laid_out_again"),
    [
        (["--quant_kernel", "engine"], True),
        ([], False),
        # Its products are those of bfloat16 weights.
        (["--quant_kernel", "engine", "--quantize_learner", "false"], False),
    ],
)
def test_the_engines_kernel_keeps_the_weights_twice(tmp_path, argv, laid_out_again):
    _, run = numbers_of(tmp_path, *argv)

    assert ("the kernels' layout of them" in moments(run)["backward"]) == laid_out_again


def test_a_group_may_be_spread_over_gpus(tmp_path, capsys):
    """4 micro-batches of one row hold half of a group; on 8 GPUs they hold 4 groups."""
    argv = recipe(
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        steps_per_generation=4,
        num_generations=8,
    )

    with pytest.raises(ValueError, match=r"generation_batch_size \(4\) must be divisible by num_generations"):
        read_settings(argv, 1)

    main(["plan", *argv, "--gpus", "8", "--gpu", "h100"])
    assert "rollout batch on 8 x h100: 32 answers" in capsys.readouterr().out


def test_a_rollout_batch_that_the_gpus_cannot_share_is_one_line(tmp_path, capsys):
    argv = recipe(tmp_path, **SIZES, generation_batch_size=96)
    read_settings(argv, 8 // 4)  # control: 3 micro-batches of 4 rows on 8 GPUs, 12 on 2

    with pytest.raises(SystemExit) as stopped:
        main(["plan", *argv, "--gpus", "16", "--gpu", "h100"])
    assert stopped.value.code == 2
    assert "generation_batch_size (96) must be divisible by the global batch size (64)" in capsys.readouterr().err
