"""Every recipe is accepted and says what the paper's Table 2 says; the arms of a model differ in the method alone."""

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from trl import get_peft_config

from qarl_trl.describe import describe
from qarl_trl.methods import DISTILL, RLOO, SFT
from qarl_trl.quant.modifier import read_modifier
from qarl_trl.train import parse
from qarl_trl.validate.adapters import check_adapter


ROOT = Path(__file__).parents[1]
# Not of the paper's runs. tests/tools/plan/memory/test_advice.py reads those for one GPU.
OTHER_FOLDERS = ("accelerate", "llmcompressor", "one_gpu", "trainers")
MODELS = ["qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen3-8b-base", "qwen3-30b-a3b-base"]
ON_CPU = ["--use_cpu", "true", "--bf16", "false"]
GPUS = 8
MICRO_BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"}
# Keys that all arms of one model may differ in.
METHOD = {
    "output_dir",
    "quant_scheme",
    "quantize_learner",
    "loss_type",
    "importance_sampling_level",
    "epsilon",
    "epsilon_high",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "tbpo_epsilon_high",
    "tbpo_delta_low",
    "tbpo_delta_high",
    "tbpo_mismatch_cap",
}


def recipes_of_the_paper():
    """Their files, in a fixed order."""
    paths = []
    for path in sorted(ROOT.glob("recipes/*/*.yaml")):
        if path.parent.name not in OTHER_FOLDERS:
            paths.append(path)
    return paths


RECIPES = recipes_of_the_paper()


def recipe_id(path):
    return f"{path.parent.name}/{path.stem}"


def read(path):
    """The content of a recipe, over that of its base."""
    content = yaml.safe_load(path.read_text())
    base = content.pop("base", None)
    if base is None:
        return content
    return read(path.parent / base) | content


def differing_keys(path, other_path):
    """The keys whose values differ between two recipes."""
    recipe = read(path)
    other = read(other_path)

    keys = set()
    for key in recipe.keys() | other.keys():
        # No recipe sets a key to `null`, so a missing one differs from all.
        if recipe.get(key) != other.get(key):
            keys.add(key)
    return keys


def settings_of(script_args, args, model_args):
    """All settings of a run, whichever of the three has them."""
    return vars(script_args) | vars(args) | vars(model_args)


def assert_settings_are_those_of(path, settings):
    """Each key of a recipe reached the run."""
    for key, value in read(path).items():
        read_value = settings[key]
        # Some fields keep a number as text.
        if isinstance(value, float):
            read_value = float(read_value)
        assert read_value == value, key


def arms(model):
    """The recipes of a model's four arms."""
    # The paper trains the mixture by GSPO.
    base = "gspo" if "a3b" in model else "grpo"
    names = (f"bf16_{base}", f"w4a16_rollout_{base}", "w4a16_qarl_tbpo", "fp8_qarl_tbpo")
    return [ROOT / "recipes" / model / f"{name}.yaml" for name in names]


def lora_arms():
    return [path for path in RECIPES if path.stem.endswith("_lora")]


def ablations():
    return [path for path in RECIPES if path.parent.name == "ablations"]


def test_every_model_of_the_paper_has_its_four_arms():
    expected = set()
    for model in MODELS:
        expected.update(arms(model))

    of_the_paper = set(RECIPES) - {*lora_arms(), *ablations()}
    assert of_the_paper == expected
    assert len(expected) == 4 * len(MODELS)


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_recipe_validates_with_the_batches_and_bounds_of_table_2(path, caplog):
    """An update is 64 prompts, and a rollout batch 8 of them, or on policy one."""
    script_args, args, model_args = parse(["--config", str(path), *ON_CPU])

    assert_settings_are_those_of(path, settings_of(script_args, args, model_args))
    assert args.use_vllm
    assert args.quantized == (not path.stem.startswith("bf16"))
    assert "does not read tbpo_" not in caplog.text

    # TRL counts both in micro-batches of a process.
    rollout = args.per_device_train_batch_size * GPUS * args.steps_per_generation
    update = args.per_device_train_batch_size * GPUS * args.gradient_accumulation_steps
    updates = 1 if "on_policy" in path.stem else 8
    assert rollout == 64 * updates * args.num_generations
    assert update == 64 * args.num_generations
    assert rollout // update * args.num_iterations == updates
    assert f"{updates} update" in describe(script_args, args, model_args)

    if "tbpo" in path.stem:
        band = args.trust_band
        assert band.epsilon_high == 4e-4
        assert band.delta_low == 3e-4
        assert band.delta_high == 7e-4
        assert band.mismatch_cap == 2.0


@pytest.mark.parametrize("path", RECIPES, ids=recipe_id)
def test_recipe_has_each_key_once(path):
    """YAML keeps the last one silently."""
    keys = re.findall(r"^(\w+):", path.read_text(), flags=re.M)

    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("model", MODELS)
def test_arms_differ_in_the_method_only(model):
    bf16, rollout, qarl, fp8 = arms(model)

    # Its quantized values are whole on each GPU, so that four rows would not fit. An update has as many.
    one_row = MICRO_BATCH if "30b" in model else set()
    assert differing_keys(bf16, rollout) == {"output_dir", "quant_scheme", "quantize_learner"} | one_row
    # Several engine ranks would each give a part of a token a scale of its own.
    ranks = {"vllm_tensor_parallel_size"} if "30b" in model else set()
    assert differing_keys(qarl, fp8) == {"output_dir", "quant_scheme"} | ranks

    # Few: who compares two arms reads the difference of two files.
    changed = differing_keys(rollout, qarl) - one_row
    assert {"quantize_learner", "loss_type"} <= changed <= METHOD - {"quant_scheme"}
    assert len(changed) <= 12


def test_there_is_an_arm_with_lora():
    assert lora_arms()


@pytest.mark.parametrize("path", lora_arms(), ids=recipe_id)
def test_a_lora_arm_differs_from_its_full_one_in_the_adapter_and_the_optimizer(path):
    # Factors have another rate, no decay and no Muon. Their base is whole on each GPU, beside a smaller engine.
    full = path.with_stem(path.stem.removesuffix("_lora"))
    adapter = {"use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "dtype"}
    optimizer = {"optim_muon", "learning_rate", "weight_decay", "vllm_gpu_memory_utilization"}

    assert differing_keys(full, path) == {"output_dir"} | adapter | optimizer


@pytest.mark.parametrize("path", lora_arms(), ids=recipe_id)
def test_the_adapter_of_a_lora_arm_is_accepted(path):
    _, args, model_args = parse(["--config", str(path), *ON_CPU])

    check_adapter(get_peft_config(model_args), args)

    # Control: TRL's default, which draws a mask that no engine has.
    model_args.lora_dropout = 0.05
    with pytest.raises(ValueError, match=r"lora_dropout=0\.05"):
        check_adapter(get_peft_config(model_args), args)


def test_a_key_of_an_ablation_overrides_its_base_and_the_command_line_overrides_both():
    config = ["--config", str(ROOT / "recipes/ablations/w4a16_qarl_dual_clip_grpo.yaml"), *ON_CPU]

    _, args, _ = parse(config)
    _, overridden, _ = parse([*config, "--delta", "5.0"])

    # Two keys of its own, and one of its base.
    assert args.delta == 3.0
    assert args.quantize_learner is True
    assert args.epsilon == 0.2
    assert overridden.delta == 5.0


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
    config = load_config_from_file(str(launch_file(name)))

    assert config.num_machines == nodes
    assert config.num_processes == nodes * GPUS
    assert config.mixed_precision == "bf16"
    assert config.distributed_type.value == kind


@pytest.mark.parametrize(
    ("name", "nodes", "copies", "shards"), [("fsdp2", 1, None, None), ("hsdp", 2, "2", str(GPUS))]
)
def test_launch_file_of_fsdp_sets_the_environment_of_its_processes(name, nodes, copies, shards):
    # As `accelerate launch` reads it, on the last node. Its parser alone does not look into the file.
    command = ["--config_file", str(launch_file(name)), "--machine_rank", str(nodes - 1), "train.py"]

    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    environment = prepare_multi_gpu_env(arguments)

    assert arguments.machine_rank == nodes - 1
    assert arguments.use_parallelism_config == (nodes > 1)
    assert environment["FSDP_VERSION"] == "2"
    assert environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE") == copies
    assert environment.get("PARALLELISM_CONFIG_DP_SHARD_SIZE") == shards


def launch_file(name):
    return ROOT / f"recipes/accelerate/{name}.yaml"


@pytest.mark.parametrize(("name", "groups"), [("w4a16", 1), ("fp8_attention_w4a16_mlp", 2)])
def test_recipe_of_llm_compressor_can_be_read(name, groups):
    plan = read_modifier(ROOT / f"recipes/llmcompressor/{name}.yaml")

    assert len(plan.config_groups) == groups


def test_each_recipe_of_llm_compressor_is_tested():
    # Control of the list above, which names them by hand.
    names = {path.stem for path in ROOT.glob("recipes/llmcompressor/*.yaml")}

    assert names == {"w4a16", "fp8_attention_w4a16_mlp"}


TRAINERS = {"sft": SFT, "rloo": RLOO, "distill": DISTILL}


def test_each_command_that_trains_by_trl_has_a_recipe():
    assert {path.stem for path in ROOT.glob("recipes/trainers/*.yaml")} == set(TRAINERS)


@pytest.mark.parametrize("command", TRAINERS)
def test_recipe_of_another_trainer_is_read_by_its_command(command):
    path = ROOT / f"recipes/trainers/{command}.yaml"

    script_args, args, model_args = parse(["--config", str(path), *ON_CPU], method=TRAINERS[command])

    assert_settings_are_those_of(path, settings_of(script_args, args, model_args))
    assert args.quantized
    assert args.quantize_learner
    assert f"qarl-trl {command} --config recipes/trainers/{command}.yaml" in path.read_text()
    assert "scheme W4A16" in describe(script_args, args, model_args)
