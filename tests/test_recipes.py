"""Every recipe parses, validates, and says what the paper's Table 2 says; the arms of a model differ in the method alone."""

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from trl import get_peft_config

from qarl_trl.quant.modifier import read_modifier
from qarl_trl.train import describe, parse
from qarl_trl.validate import check_adapter


ROOT = Path(__file__).parents[1]
OTHERS = "accelerate", "llmcompressor", "one_gpu"  # the last: tests/tools/plan/test_ways.py
RECIPES = sorted(path for path in ROOT.glob("recipes/*/*.yaml") if path.parent.name not in OTHERS)
MODELS = ["qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen3-8b-base", "qwen3-30b-a3b-base"]
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
GPUS = 8
# Keys that all arms of one model may differ in.
METHOD = {
    "output_dir", "quant_scheme", "quantize_learner", "loss_type", "importance_sampling_level", "epsilon", "epsilon_high",
    "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
    "tbpo_epsilon_high", "tbpo_delta_low", "tbpo_delta_high", "tbpo_mismatch_cap",
}  # fmt: skip


def recipe_id(path):
    return f"{path.parent.name}/{path.stem}"


def read(path):
    content = yaml.safe_load(path.read_text())
    base = content.pop("base", None)
    return content if base is None else read(path.parent / base) | content


def differing_keys(a, b):
    a, b = read(a), read(b)
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


def arms(model):
    base = "gspo" if "a3b" in model else "grpo"
    names = (f"bf16_{base}", f"w4a16_rollout_{base}", "w4a16_qarl_tbpo", "fp8_qarl_tbpo")
    return [ROOT / "recipes" / model / f"{name}.yaml" for name in names]


def lora_arms():
    return [path for path in RECIPES if path.stem.endswith("_lora")]


def ablations():
    return [path for path in RECIPES if path.parent.name == "ablations"]


def test_every_model_of_the_paper_has_its_four_arms():
    others = {*lora_arms(), *ablations()}
    assert sorted(arm for model in MODELS for arm in arms(model)) == [p for p in RECIPES if p not in others]


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_recipe_validates_with_the_batches_and_bounds_of_table_2(path):
    """An update is 64 prompts, and a rollout batch 8 of them, or on policy one."""
    script_args, args, model_args = parse(["--config", str(path), *ON_CPU])
    expected = read(path)
    found = {**vars(script_args), **vars(args), **vars(model_args)}
    numbers = {key for key, value in expected.items() if isinstance(value, float)}
    assert {k: float(found[k]) if k in numbers else found[k] for k in expected} == expected
    assert args.use_vllm and args.quantized == (not path.stem.startswith("bf16"))

    rollout = args.per_device_train_batch_size * GPUS * args.steps_per_generation
    update = args.per_device_train_batch_size * GPUS * args.gradient_accumulation_steps
    updates = 1 if "on_policy" in path.stem else 8
    assert rollout == 64 * updates * args.num_generations
    assert update == 64 * args.num_generations
    assert rollout // update * args.num_iterations == updates
    assert f"{updates} update" in describe(script_args, args, model_args)

    if "tbpo" in path.stem:
        band = args.trust_band
        assert (band.epsilon_high, band.delta_low, band.delta_high, band.mismatch_cap) == (4e-4, 3e-4, 7e-4, 2.0)
    keys = re.findall(r"^(\w+):", path.read_text(), flags=re.M)  # YAML itself keeps the last one silently
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("model", MODELS)
def test_arms_differ_in_the_method_only(model):
    bf16, rollout, qarl, fp8 = arms(model)
    assert differing_keys(bf16, rollout) == {"output_dir", "quant_scheme", "quantize_learner"}
    # Several engine ranks would each give a part of a token a scale of its own.
    ranks = {"vllm_tensor_parallel_size"} if "30b" in model else set()
    assert differing_keys(qarl, fp8) == {"output_dir", "quant_scheme"} | ranks
    changed = differing_keys(rollout, qarl)
    assert {"quantize_learner", "loss_type"} <= changed <= METHOD - {"quant_scheme"}
    assert len(changed) <= 12


def test_a_lora_arm_differs_from_its_full_one_in_the_adapter_and_the_optimizer():
    assert lora_arms()
    for path in lora_arms():
        full = path.with_stem(path.stem.removesuffix("_lora"))
        adapter = {"use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "dtype"}
        optimizer = {"optim_muon", "learning_rate", "weight_decay", "vllm_gpu_memory_utilization"}
        assert differing_keys(full, path) == {"output_dir"} | adapter | optimizer
        _, args, model_args = parse(["--config", str(path), *ON_CPU])
        check_adapter(get_peft_config(model_args), args)
        model_args.lora_dropout = 0.05  # control: TRL's default
        with pytest.raises(ValueError, match=r"lora_dropout=0\.05"):
            check_adapter(get_peft_config(model_args), args)


def test_a_key_of_an_ablation_overrides_its_base_and_the_command_line_overrides_both():
    config = ["--config", str(ROOT / "recipes/ablations/w4a16_qarl_dual_clip_grpo.yaml"), *ON_CPU]
    args = parse(config)[1]
    assert (args.delta, args.quantize_learner, args.epsilon) == (3.0, True, 0.2)
    assert parse([*config, "--delta", "5.0"])[1].delta == 5.0


@pytest.mark.parametrize(
    ("base", "error", "words"),
    [
        ("missing.yaml", FileNotFoundError, "No such file.*missing.yaml"),
        ("ablations/bf16_tbpo.yaml", ValueError, "must be a whole recipe, without a base of its own"),
    ],
)
def test_a_base_that_is_no_whole_recipe_is_refused(tmp_path, base, error, words):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {ROOT / 'recipes' / base}\nquantize_learner: true\n")
    with pytest.raises(error, match=words):
        parse(["--config", str(recipe), *ON_CPU])


@pytest.mark.parametrize(
    ("name", "kind", "nodes"),
    [("ddp", "MULTI_GPU", 1), ("fsdp2", "FSDP", 1), ("hsdp", "FSDP", 2), ("zero3", "DEEPSPEED", 1)],
)
def test_launch_file_is_read_by_accelerate(name, kind, nodes):
    file = ROOT / f"recipes/accelerate/{name}.yaml"
    config = load_config_from_file(str(file))
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (nodes, nodes * GPUS, "bf16")
    assert config.distributed_type.value == kind
    if kind == "FSDP":
        command = ["--config_file", str(file), "--machine_rank", str(nodes - 1), "train.py"]
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
        assert (arguments.machine_rank, arguments.use_parallelism_config) == (nodes - 1, nodes > 1)
        environment = prepare_multi_gpu_env(arguments)
        assert environment["FSDP_VERSION"] == "2"
        copies, shards = (environment.get(f"PARALLELISM_CONFIG_DP_{n}_SIZE") for n in ("REPLICATE", "SHARD"))
        assert (copies, shards) == ((str(nodes), str(GPUS)) if nodes > 1 else (None, None))


def test_recipes_of_llm_compressor_can_be_read():
    folder = ROOT / "recipes" / "llmcompressor"
    groups = {path.stem: read_modifier(path).config_groups for path in folder.glob("*.yaml")}
    assert {name: len(found) for name, found in groups.items()} == {"w4a16": 1, "fp8_attention_w4a16_mlp": 2}
