"""What `qarl-trl plan` proposes: each way alone, and lines that are accepted as they stand and fit as they say."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl import get_peft_config

from qarl_trl import cli
from qarl_trl.config import QaRLConfig
from qarl_trl.tools.plan import items
from qarl_trl.tools.plan import model as meta
from qarl_trl.tools.plan.command import GPUS
from qarl_trl.tools.plan.items import GIB
from qarl_trl.tools.plan.ways import explore
from qarl_trl.train import parse
from qarl_trl.validate import check_arguments


ROOT = Path(__file__).parents[3]
RECIPES = sorted(ROOT.glob("recipes/one_gpu/*.yaml"))


def plan_of(path, gpu, *argv):
    _, run, alone, together = explore(["--config", str(path), *argv], 1, GPUS[gpu][0], None)
    return SimpleNamespace(run=run, alone=alone, together=together)


def peak(run):
    return max(items.peaks(run).values())


@pytest.fixture(autouse=True)
def bitsandbytes(monkeypatch):
    """Is not installed here: `optim: adamw_8bit` is refused before a model loads."""
    monkeypatch.setattr("qarl_trl.validate.is_bitsandbytes_available", lambda: True)


def accepted(path, line):
    """The settings of a run with a proposed line, checked as the trainer checks them before it loads a model."""
    _, args, model_args = parse(["--config", str(path), *line.split()], any_device=True)
    check_arguments(model_args.model_name_or_path, args, {"peft_config": get_peft_config(model_args)})
    return args


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_for_one_gpu_fits_and_says_in_what(path, capsys):
    """Also `train --dry_run` takes it."""
    head = path.read_text().splitlines()[2]
    gpu = re.search(r"--gpu (\w+)", head)[1]
    run = plan_of(path, gpu).run
    assert items.fits(run) and run.tokens * 16 <= items.cache_tokens(run)
    assert head.endswith(f": {peak(run) / GIB:.1f} GiB of {GPUS[gpu][0]}.")
    cli.main(["train", "--config", str(path), "--dry_run"])
    assert "8 updates per rollout batch" in capsys.readouterr().out
    accepted(path, "")


@pytest.mark.parametrize(
    ("path", "gpu", "proposed"),
    [("qwen3-8b-base/w4a16_qarl_tbpo", "a100", 1), ("qwen2.5-math-1.5b/w4a16_qarl_tbpo", "4090", 2)],
)
def test_proposed_lines_are_accepted_as_they_stand_and_fit_as_they_say(path, gpu, proposed, capsys):
    path = ROOT / f"recipes/{path}.yaml"
    found = plan_of(path, gpu)
    proposed += "lora_base" in QaRLConfig.__dataclass_fields__
    assert not items.fits(found.run) and len(found.together) == proposed
    before = accepted(path, "")
    for line, run in found.together.items():
        again = plan_of(path, gpu, *line.split())
        assert items.fits(again.run) and peak(again.run) == peak(run) and not again.together
        after = accepted(path, line)
        for name in ("gradient_accumulation_steps", "steps_per_generation"):
            completions = {args.per_device_train_batch_size * getattr(args, name) for args in (before, after)}
            assert len(completions) == 1
        cli.main(["train", "--config", str(path), *line.split(), "--dry_run"])
        # Control: without a change that was proposed it does not fit.
        words = line.split()
        needed = {"--optim", "--vllm_gpu_memory_utilization", "--max_tokens_per_pass"} & {*words}
        for name in needed | ({"--use_peft"} & {*words} if "--lora_base" not in words else set()):
            at = words.index(name)
            assert not items.fits(plan_of(path, gpu, *words[:at], *words[at + 2 :]).run), name
    capsys.readouterr()


def test_what_a_recipe_excludes_is_not_proposed(tmp_path):
    """TRL takes either of the two fields."""
    recipe = ROOT / "recipes/one_gpu/qwen2.5-1.5b.yaml"
    text = recipe.read_text().replace("steps_per_generation: 128", "generation_batch_size: 512")
    plans = []
    for name, content in {"steps": recipe.read_text(), "batch": text}.items():
        (path := tmp_path / f"{name}.yaml").write_text(content)
        plans.append(plan_of(path, "4090", "--vllm_max_model_length", "9216", "--max_tokens_per_pass", "9216"))
    steps, batch = (" ".join(found.together) for found in plans)
    assert "--steps_per_generation" in steps and "--steps_per_generation" not in batch


def test_each_way_alone_is_compared_and_what_is_refused_says_why():
    recipe = ROOT / "recipes/one_gpu/qwen2.5-0.5b.yaml"
    found = plan_of(recipe, "4090", "--vllm_enable_sleep_mode", "false", "--gradient_checkpointing", "false")
    options, run = found.alone["Liger kernels"]
    assert run is None and "neither low-bit layers nor TBPO" in options
    smaller = {"sleep mode": "backward", "gradient checkpointing": "backward", "AdamW in 8 bits": "rollout"}
    smaller |= {"LoRA": "backward", "LoRA, frozen base": "rollout"}
    for name, moment in {**smaller, "the same, kept on the host": "rollout"}.items():
        options, run = found.alone[name]
        assert items.peaks(run)[moment] < items.peaks(found.run)[moment], name
        accepted(recipe, options)
    plain = plan_of(recipe, "4090", "--quant_scheme", "none", "--loss_type", "grpo")
    options, run = plain.alone["Liger kernels"]
    assert run is not None and accepted(recipe, f"--quant_scheme none --loss_type grpo {options}").use_liger_kernel


def test_moments_in_8_bits():
    """Two bytes an entry and a float32 scale for 256 entries of a moment, float32 for embeddings; on the host if paged."""
    found = plan_of(ROOT / "recipes/one_gpu/qwen2.5-0.5b.yaml", "4090")
    (_, on_gpu), (_, paged) = found.alone["AdamW in 8 bits"], found.alone["the same, kept on the host"]
    embedding = 151936 * 896
    others = 494_032_768 - embedding
    assert items.optimizer_state(on_gpu) == pytest.approx(8 * embedding + others * (2 + 8 / 256), rel=1e-6)
    assert items.optimizer_state(paged) == 0
    assert items.optimizer_state(paged, paged=True) == items.optimizer_state(on_gpu)


def test_models_that_are_named_need_no_download():
    named = set(re.findall(r'"(Qwen/[\w.-]+)"', (ROOT / "README.md").read_text()))
    for path in ROOT.glob("recipes/*/*.yaml"):
        named |= set(re.findall(r"^model_name_or_path: (\S+)", path.read_text(), re.MULTILINE))
    assert len(named) > 5
    for name in named | {"Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.2-1B"}:
        assert meta.read_config(name).hidden_size > 0
    with pytest.raises(ValueError, match="nobody/Qwen3-8B"):  # control
        meta.read_config("nobody/Qwen3-8B")


def test_an_optimizer_of_bitsandbytes_needs_it(monkeypatch):
    monkeypatch.setattr("qarl_trl.validate.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ImportError, match="paged_adamw_8bit needs bitsandbytes: pip install bitsandbytes"):
        accepted(ROOT / "recipes/one_gpu/qwen2.5-1.5b.yaml", "")
    accepted(ROOT / "recipes/one_gpu/qwen2.5-0.5b.yaml", "")  # control


def test_a_frozen_base_is_not_proposed_where_a_run_refuses_it():
    recipe = str(ROOT / "recipes/one_gpu/qwen2.5-7b_frozen.yaml")
    server = ["--vllm_mode", "server", "--sync_folder", "s", "--vllm_enable_sleep_mode", "false"]
    with pytest.raises(ValueError, match="and vllm_mode='colocate'"):
        explore(["--config", recipe, *server], 1, 80, None)
    merged = explore(["--config", recipe, *server, "--lora_base", "merged"], 1, 12, None)
    assert not any("frozen" in line for line in merged[3])


def test_each_gpu_has_the_whole_frozen_base():
    """Also under FSDP2, which shards parameters: embeddings, norms and the adapter."""
    recipe = str(ROOT / "recipes/one_gpu/qwen2.5-7b_frozen.yaml")
    ddp, fsdp2 = (items.moments(explore(["--config", recipe], 8, 80, way)[1])["backward"] for way in ("ddp", "fsdp2"))
    assert fsdp2["quantized values"] == ddp["quantized values"]
    assert fsdp2["master weights"] < ddp["master weights"] / 7


def test_a_frozen_base_is_its_low_bits_and_syncs_its_adapter():
    recipe = ROOT / "recipes/one_gpu/qwen2.5-7b_frozen.yaml"
    frozen = plan_of(recipe, "a100", "--vllm_enable_sleep_mode", "false").run
    merged = plan_of(recipe, "a100", "--vllm_enable_sleep_mode", "false", "--lora_base", "merged").run
    layers = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    adapter = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert items.synced_bytes(frozen) == 2 * adapter
    assert items.engine_bytes(frozen) == items.synced_bytes(merged) + 2 * adapter
    weights = [items.moments(run)["rollout"]["master weights"] for run in (merged, frozen)]
    assert weights[0] - weights[1] == 2 * layers
    assert items.host_bytes(frozen) < 0.5 * items.host_bytes(merged)
