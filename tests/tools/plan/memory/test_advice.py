"""What saves memory: each lever alone, and lines that are accepted as they stand and fit as they say."""

import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trl import get_peft_config

from qarl_trl import cli
from qarl_trl.tools.plan.gpus import GPUS
from qarl_trl.tools.plan.memory import advice, backward
from qarl_trl.tools.plan.memory.advice import advise
from qarl_trl.tools.plan.memory.engine import cache_tokens, engine_bytes, synced_bytes
from qarl_trl.tools.plan.memory.learner import host_bytes, optimizer_state
from qarl_trl.tools.plan.memory.moments import fits, moments, peaks
from qarl_trl.tools.plan.recipe import as_arguments
from qarl_trl.tools.plan.run import GIB, Hardware
from qarl_trl.train import parse
from qarl_trl.validate import check_arguments
from tools.plan.runs import trial_of


RECIPES = Path(__file__).parents[4] / "recipes"
ONE_GPU = RECIPES / "one_gpu"
FROZEN = ONE_GPU / "qwen2.5-7b_frozen.yaml"


def advice_for(path, gpu, *argv):
    """What `plan` says of a recipe with more options, on one GPU."""
    return advise(["--config", str(path), *argv], Hardware(1, GPUS[gpu].memory))


def peak(run):
    return max(peaks(run).values())


@pytest.fixture(autouse=True)
def bitsandbytes(monkeypatch):
    """Is not installed here: `optim: adamw_8bit` is refused before a model loads."""
    # In the module that asks for it.
    module = sys.modules[check_arguments.__module__]
    monkeypatch.setattr(module, "find_spec", lambda name: object())


def accepted(path, line):
    """The settings of a run with a proposed line, checked as the trainer checks them before it loads a model."""
    _, args, model_args = parse(["--config", str(path), *line.split()], any_device=True)
    check_arguments(model_args.model_name_or_path, args, {"peft_config": get_peft_config(model_args)})
    return args


# Recipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(ONE_GPU.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_for_one_gpu_fits_and_says_in_what(path, capsys):
    """Also `train --dry_run` takes it."""
    hardware = path.read_text().splitlines()[2]
    gpu = re.search(r"--gpu (\w+)", hardware)[1]
    run = advice_for(path, gpu).run

    assert fits(run)
    # Room for 16 of the longest rows at once: with fewer, rollouts would be slow.
    assert run.tokens * 16 <= cache_tokens(run)
    assert hardware.endswith(f": {peak(run) / GIB:.1f} GiB of {GPUS[gpu].memory}.")

    cli.main(["train", "--config", str(path), "--dry_run"])
    assert "8 updates per rollout batch" in capsys.readouterr().out
    accepted(path, "")


# Combinations that fit ----------------------------------------------------------------------------------------------


def completions(args):
    """Completions of a process in an update, and in a rollout batch."""
    rows = args.per_device_train_batch_size
    return rows * args.gradient_accumulation_steps, rows * args.steps_per_generation


def options_that_must_be_needed(line):
    """Of a proposed line those options without which the run must not fit."""
    words = line.split()
    # The three options of smaller micro-batches belong together: without one of them an update has another size.
    names = {"--optim", "--vllm_gpu_memory_utilization", "--max_tokens_per_pass"}
    if "--lora_base" not in words:
        names.add("--use_peft")
    return [name for name in words if name in names]


@pytest.mark.parametrize(
    ("path", "gpu", "proposed"),
    [("qwen3-8b-base/w4a16_qarl_tbpo", "a100", 2), ("qwen2.5-math-1.5b/w4a16_qarl_tbpo", "4090", 3)],
)
def test_proposed_lines_are_accepted_as_they_stand_and_fit_as_they_say(path, gpu, proposed, capsys):
    path = RECIPES / f"{path}.yaml"
    advised = advice_for(path, gpu)
    before = accepted(path, "")

    assert not fits(advised.run)
    assert len(advised.together) == proposed

    for fitting in advised.together:
        line = fitting.text
        words = line.split()

        # The line is enough as it stands.
        advised_again = advice_for(path, gpu, *words)
        assert fits(advised_again.run)
        assert peak(advised_again.run) == peak(fitting.run)
        assert not advised_again.together

        # It changes what a pass takes, not what an update sees.
        assert completions(accepted(path, line)) == completions(before)
        cli.main(["train", "--config", str(path), *words, "--dry_run"])

        # Control: without a change that was proposed it does not fit.
        for name in options_that_must_be_needed(line):
            at = words.index(name)
            without = [*words[:at], *words[at + 2 :]]
            if name == "--use_peft":
                # Its options are refused beside a switch that is not set.
                without += [name, "false"]
            assert not fits(advice_for(path, gpu, *without).run), name
    capsys.readouterr()


def test_what_a_recipe_excludes_is_not_proposed(tmp_path):
    """TRL takes either of the two fields."""
    steps = (ONE_GPU / "qwen2.5-1.5b.yaml").read_text()
    batch = steps.replace("steps_per_generation: 256", "generation_batch_size: 512")

    def proposed(content):
        path = tmp_path / "recipe.yaml"
        path.write_text(content)
        advised = advice_for(path, "4090", "--vllm_max_model_length", "9216", "--max_tokens_per_pass", "9216")
        return " ".join(fitting.text for fitting in advised.together)

    # Control: it is a lever where the recipe has this field.
    assert "--steps_per_generation" in proposed(steps)
    assert "--steps_per_generation" not in proposed(batch)


def test_warnings_are_logged_again_after_an_error(monkeypatch):
    def fail(*args):
        raise OSError("disk")

    monkeypatch.setattr(advice, "try_each_alone", fail)
    with pytest.raises(OSError, match="disk"):
        advice_for(ONE_GPU / "qwen2.5-0.5b.yaml", "4090")

    # While levers are tried, `quiet` logs no warnings. Without its `finally` all later ones would be lost.
    assert logging.getLogger("qarl_trl").isEnabledFor(logging.WARNING)


# Each lever alone ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wasteful():
    """What `plan` says of a run that keeps the engine awake and all activations."""
    options = ["--vllm_enable_sleep_mode", "false", "--gradient_checkpointing", "false"]
    return advice_for(ONE_GPU / "qwen2.5-0.5b.yaml", "4090", *options)


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("sleep mode", "backward"),
        ("gradient checkpointing", "backward"),
        ("AdamW in 8 bits", "rollout"),
        ("the same, kept on the host", "rollout"),
        ("LoRA", "backward"),
        ("LoRA, frozen base", "rollout"),
    ],
)
def test_each_lever_alone_saves_memory(wasteful, name, moment):
    trial = trial_of(wasteful, name)

    assert peaks(trial.run)[moment] < peaks(wasteful.run)[moment]
    accepted(ONE_GPU / "qwen2.5-0.5b.yaml", trial.lever.text)


def test_a_lever_that_is_refused_says_why(wasteful):
    # Refused by the config itself, as `trainers/settings.py` has it among the switches that do not work.
    trial = trial_of(wasteful, "Liger kernels")

    assert trial.run is None
    assert "use_liger_kernel must be False" in trial.refusal


def test_liger_kernels_are_a_lever_without_low_bit_layers():
    recipe = ONE_GPU / "qwen2.5-0.5b.yaml"
    plain = "--quant_scheme none --loss_type grpo"
    trial = trial_of(advice_for(recipe, "4090", *plain.split()), "Liger kernels")

    assert trial.run is not None
    assert accepted(recipe, f"{plain} {trial.lever.text}").use_liger_kernel


def test_moments_in_8_bits():
    """Two bytes an entry, and a float32 scale for 256 of a moment; embeddings in float32; on the host if paged."""
    advised = advice_for(ONE_GPU / "qwen2.5-0.5b.yaml", "4090")
    on_gpu = trial_of(advised, "AdamW in 8 bits").run
    paged = trial_of(advised, "the same, kept on the host").run

    # Of Qwen2.5-0.5B. bitsandbytes keeps the moments of embeddings in float32.
    embedding = 151936 * 896
    others = 494_032_768 - embedding
    assert optimizer_state(on_gpu) == pytest.approx(8 * embedding + others * (2 + 8 / 256), rel=1e-6)
    assert optimizer_state(paged) == 0
    assert optimizer_state(paged, paged=True) == optimizer_state(on_gpu)


# A frozen base ------------------------------------------------------------------------------------------------------


def test_a_server_keeps_the_frozen_base_and_gets_the_adapter():
    # A server never sleeps, whatever the recipe says of it.
    server = ["--vllm_mode", "server", "--sync_folder", "s", "--vllm_enable_sleep_mode", "true"]

    run = advise(["--config", str(FROZEN), *server], Hardware(1, 80)).run
    assert not run.sleep

    adapter = 0
    for parameter in run.parameters:
        if parameter.in_adapter:
            # It is sent in bfloat16.
            adapter += 2 * parameter.entries
    assert synced_bytes(run) == adapter
    assert adapter < engine_bytes(run) / 10


def test_each_gpu_has_the_whole_frozen_base():
    """Also under FSDP2, which shards parameters: embeddings, norms and the adapter."""

    def backward(sharding):
        run = advise(["--config", str(FROZEN)], Hardware(8, 80, sharding)).run
        return moments(run)["backward"]

    assert backward("fsdp2")["quantized values"] == backward("ddp")["quantized values"]
    assert backward("fsdp2")["master weights"] < backward("ddp")["master weights"] / 7


def test_what_is_not_trained_has_no_gradient_under_fsdp2():
    """Of the base FSDP2 gathers embeddings and output layer in bfloat16; the adapter alone has gradients."""
    run = advise(["--config", str(FROZEN)], Hardware(8, 80, "fsdp2")).run
    outside = 2 * 152064 * 3584 + 3584  # and the last norm

    head = backward._head_work(run)
    layer = backward._layer_work(run) + backward._gathered_layers(run)
    assert backward.backward_work(run) == int(2 * outside + max(head, layer))

    # Control: all weights have gradients, and a copy of each outside the layers for the reduction.
    trained = replace(run, parameters=tuple(replace(one, optimizer="muon") for one in run.parameters))
    assert backward.backward_work(trained) >= 2 * 2 * outside + 4 * outside


def test_a_frozen_base_is_its_low_bits_and_syncs_its_adapter():
    awake = ["--vllm_enable_sleep_mode", "false"]
    frozen = advice_for(FROZEN, "a100", *awake).run
    merged = advice_for(FROZEN, "a100", *awake, "--lora_base", "merged").run

    # Qwen2.5-7B has 28 layers with hidden size 3584, keys and values of size 512, and an MLP of 18944. The rank is 32.
    matrices = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)
    adapter = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))

    assert synced_bytes(frozen) == 2 * adapter
    assert engine_bytes(frozen) == synced_bytes(merged) + 2 * adapter

    def master_weights(run):
        return moments(run)["rollout"]["master weights"]

    assert master_weights(merged) - master_weights(frozen) == 2 * matrices
    assert host_bytes(frozen) < 0.5 * host_bytes(merged)


def test_beside_experts_an_adapter_is_proposed_for_the_attention(mixture_model):
    """PEFT reads `all-linear` as the experts too, so the line was refused with words about what nobody had set."""
    advice_of_mixture = advice_for(
        ONE_GPU / "qwen3-8b.yaml", "4090", "--model_name_or_path", mixture_model, "--use_peft", "false"
    )
    trial = trial_of(advice_of_mixture, "LoRA")

    assert trial.run.has_adapter
    # Control: with all layers it is refused.
    everything = trial.lever.options | {"lora_target_modules": "all-linear"}
    with pytest.raises(ValueError, match=r"target_parameters.*lora_target_modules: \[q_proj"):
        advice_for(ONE_GPU / "qwen3-8b.yaml", "4090", "--model_name_or_path", mixture_model, *as_arguments(everything))
