"""
The paper's comparison on a real model: SmolLM2-135M-Instruct on SVAMP, from a start as examples/smollm2 makes it.

    python examples/smollm2/prepare.py runs/smollm2 --data FOLDER; python examples/smollm2/warm_start.py runs/smollm2
    python benchmarks/real_arms.py                       runs the cells that have no file yet, one at a time
    python benchmarks/real_arms.py --table               writes the tables (real_table.py) and runs nothing

A cell trains one arm with one seed and scores all held-out problems with draws of that seed. QaRL TBPO at `g64` is the
example's recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDER = Path(__file__).resolve().parent / "results" / "real"
PORTABLE = Path(__file__).with_name("portable_engine.py")
START = Path("runs/smollm2")
TIS = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
# IcePop (Ring-1T, arXiv 2510.18855): tokens whose ratio leaves [0.5, 5] do not count.
ICEPOP = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0,
}
NO_WEIGHT = {"vllm_importance_sampling_correction": False}
# Neighbours differ in one thing: the loss, its weight for the mismatch, or what the learner computes with.
ARMS: dict[str, dict[str, Any]] = {
    "bf16 GRPO": TIS | {"quant_scheme": "none"},
    "bf16 TBPO": {"quant_scheme": "none"},
    "rollout-only GRPO": TIS | {"quantize_learner": False},
    "rollout-only GRPO, no weight": {"loss_type": "grpo", "quantize_learner": False} | NO_WEIGHT,
    # TRL's own default: drops answers whose ratio, the product over their tokens, is above 3, and weighs the others by
    # it.
    "rollout-only GRPO, TRL default": {"loss_type": "grpo", "quantize_learner": False},
    "rollout-only GRPO, IcePop": ICEPOP | {"quantize_learner": False},
    "rollout-only TBPO": {"quantize_learner": False},
    "rollout-only TBPO, no weight": {"quantize_learner": False} | NO_WEIGHT,
    "QaRL GRPO": TIS,
    "QaRL TBPO": {},
    "QaRL GSPO": TIS | {"importance_sampling_level": "sequence"},
    # As a user with one GPU would train; the rate was not tuned.
    "QaRL TBPO, LoRA merged": {"lora_base": "merged", "learning_rate": 2e-4},
    "QaRL TBPO, LoRA beside a frozen base": {"lora_base": "frozen", "learning_rate": 2e-4},
}
# The arms of a comparison at other rates than that of bf16 GRPO.
RATED: dict[str, dict[str, Any]] = {
    "rollout-only GRPO, rate 6e-5": ARMS["rollout-only GRPO"] | {"learning_rate": 6e-5},
    "rollout-only GRPO, rate 1.2e-4": ARMS["rollout-only GRPO"] | {"learning_rate": 1.2e-4},
    "QaRL GRPO, rate 6e-5": ARMS["QaRL GRPO"] | {"learning_rate": 6e-5},
    "QaRL GRPO, rate 1.2e-4": ARMS["QaRL GRPO"] | {"learning_rate": 1.2e-4},
}
ARMS |= RATED
RANK = 16  # of the adapters, on all quantized layers; lora_alpha is twice that
# Chosen on bf16 GRPO alone, before any other arm ran (results/real/README.md).
G64: dict[str, Any] = {
    "quantization": {"quant_scheme": "W4A16", "quant_group_size": 64},
    "learning_rate": 2e-5,
    "prompts": 16,
    "answers": 8,
    "updates": 2,  # of a rollout batch
    "batches": 20,
    "band": 2e-3,  # epsilon_high, delta_low and delta_high are 4, 3 and 7 of these; the paper's is 1e-4
    "max_completion_length": 24,
    # Answers of a pass, so that two cells fit into 24 GB. Cells of `g64` whose settings lack it took 32: the same
    # sums, rounded otherwise.
    "micro": 16,
}
CHANNEL: dict[str, Any] = G64 | {"quantization": {"quant_scheme": "W4A16", "quant_group_size": -1}}
REGIMES: dict[str, dict[str, Any]] = {
    "g64": G64,
    "channel": CHANNEL,
    # For CPUs without AVX-512: the learner computes in float32, the engine's 4-bit layers too (portable_engine.py),
    # and all is scored in float32. QaRL's learner is on torch's operations.
    "channel_portable": CHANNEL | {"portable": True},
    "fp8": G64 | {"quantization": {"quant_scheme": "FP8_DYNAMIC"}},
    "paper": G64 | {"band": 1e-4},
    # Four times as many updates of a rollout batch: where the toy's learner in bfloat16 fails. Chosen before any arm
    # ran in it.
    "stale": G64 | {"updates": 8},
    # One start and the same, distilled into 4 bits by real_distill.py: `--start` names the folder. What an arm trained
    # from either is distilled afterwards, as it is put through GPTQ.
    "undistilled": G64 | {"distill_again": True},
    "distilled": G64 | {"distill_again": True},  # cells of before 2026-11-30, 18:00 UTC, lack it
    # What a start scores by AWQ, which is too slow in bfloat16 on the CPUs that these runs had.
    "g64_portable": G64 | {"portable": True, "awq": 128},
    # Which rate of `RATED` an arm takes: by its rewards, hence on training problems, and nothing is scored.
    "rate_choice": G64 | {"batches": 10, "is_scored": False},
}
# Chosen by real_distill.py on training problems.
DISTILL_ON = "answers"
DISTILL_UPDATES = 90  # of 16 answers: about three passes over the training problems
BEFORE = "before training"
# What a cell may score: the trained weights, the low-bit model of its run, by GPTQ, by AWQ, and distilled again.
MODELS = ("masters", "low_bit", "gptq", "awq", "again")
SAMPLES = 4  # of a held-out problem, at temperature 1
# How the names of the logged columns begin that a cell keeps.
KEPT = (
    "reward",
    "entropy",
    "grad_norm",
    "completions/mean_length",
    "completions/clipped_ratio",
    "step_time",
    "mismatch/",
    "ratio/",
    "error_tokens/",
    "quant/",
    "clip_ratio/",
    "time/",
    "sampling/importance_sampling_ratio/",
    "sync/bytes",
)


# Training ------------------------------------------------------------------------------------------------------------


def train(start: Path, regime: dict[str, Any], arm: dict[str, Any], seed: int, folder: Path) -> dict[str, list]:
    """
    Train one cell.

    Args:
        start: Folder with `start/` and `train.jsonl`.
        regime: An entry of `REGIMES`.
        arm: An entry of `ARMS`.
        seed: Of the trainer.
        folder: Gets `masters` in bfloat16 (not of an adapter) and, for low-bit engines, `low_bit`.

    Returns:
        The log by column.
    """
    import common  # sets what torch and vLLM read when they load
    import portable_engine
    from datasets import load_dataset
    from peft import LoraConfig

    from qarl_trl import QaRLConfig, QaRLTrainer
    from qarl_trl.rewards import math_reward

    if regime.get("portable"):
        portable_engine.install()

    adapter = None
    if "lora_base" in arm:
        layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)

    data = load_dataset("json", data_files=str(start / "train.jsonl"), split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
    trainer = QaRLTrainer(
        str(start / "start"),
        math_reward,
        QaRLConfig(**settings_of(regime, arm, seed, folder / "low_bit")),
        train_dataset=data,
        peft_config=adapter,
    )
    trainer.train()

    if "quant_scheme" not in arm:
        trainer.save_model()
    if adapter is None:
        save_masters(trainer.model, start / "start", folder / "masters")
    return common.logged_columns(trainer.state.log_history, KEPT)


def settings_of(regime: dict[str, Any], arm: dict[str, Any], seed: int, output_dir: Path) -> dict[str, Any]:
    """The arguments of `QaRLConfig`."""
    updates = regime["updates"]
    band = regime["band"]
    rows = regime["prompts"] * regime["answers"]
    micro = min(regime["micro"], rows // updates)
    settings = {
        "output_dir": str(output_dir),
        "use_vllm": True,
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "vllm_max_model_length": 256,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": regime["max_completion_length"],
        "num_generations": regime["answers"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // updates // micro,
        "steps_per_generation": rows // micro,
        "max_steps": regime["batches"] * updates,
        "learning_rate": regime["learning_rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": updates,
        "tbpo_epsilon_high": 4 * band,
        "tbpo_delta_low": 3 * band,
        "tbpo_delta_high": 7 * band,
        "logging_steps": updates,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": seed,
        **regime["quantization"],
    }

    if regime.get("portable"):
        settings |= {"bf16": False, "learner_ops": "stock", "quant_kernel": "dequant"}
    # An arm in bfloat16 has no low bits to set.
    if arm.get("quant_scheme") == "none":
        settings = {name: value for name, value in settings.items() if not name.startswith("quant_")}
    if "importance_sampling_level" in arm:
        # Table 2: GSPO's bounds are delta_low and epsilon_high of TBPO.
        settings["epsilon"] = 3 * band
        settings["epsilon_high"] = 4 * band
    if "lora_base" in arm:
        settings["model_init_kwargs"] = {"dtype": "bfloat16"}
    return settings | arm


def save_masters(model: Any, start: Path, folder: Path) -> None:
    """Write the trained master weights in bfloat16, with the tokenizer of the start."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    masters = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16)
    trained = {name: weight.detach() for name, weight in model.named_parameters()}
    # Tied ones once.
    for name, weight in masters.named_parameters():
        weight.data.copy_(trained.pop(name))
    assert not trained, f"The trained model has weights that the start has not: {list(trained)}"

    masters.save_pretrained(folder)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder)


# One cell ------------------------------------------------------------------------------------------------------------


def run_cell(
    start: Path,
    regime: str,
    arm: str,
    seed: int,
    keep: Path | None = None,
    scored: Sequence[str] = (),
    trained: Path | None = None,
) -> None:
    """
    Train (or, before training, take the start), score, write the file.

    Args:
        start: Folder with `start/`, `train.jsonl` and `test.jsonl`.
        regime: A key of `REGIMES`.
        arm: A key of `ARMS`, or `BEFORE`.
        seed: Of training and draws.
        keep: Folder that gets the trained weights.
        scored: Only these of `MODELS` (default: all).
        trained: Folder in which the trained models of a cell wait for their scores. A cell that was stopped after its
            training is only scored.
    """
    import common

    path = file_of(regime, arm, seed)
    settings = REGIMES[regime]
    chosen = ARMS.get(arm, {})
    log: dict[str, list] = {}
    trained_before: dict[str, Any] | None = None
    scores = {}
    greedy = {}

    waiting = None if trained is None else trained / regime / path.stem
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arm == BEFORE:
            (folder / "masters").symlink_to((start / "start").resolve())
        elif waiting is not None and waiting.is_dir():
            shutil.copytree(waiting, folder, dirs_exist_ok=True)
            trained_before = json.loads((folder / "trained.json").read_text())
            assert trained_before["start_sha256"] == sha_of(start / "start" / "model.safetensors"), "of another start"
            log = trained_before["log"]
        else:
            # Its 9 GB go before GPTQ comes.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                log = process.submit(train, start, settings, chosen, seed, folder).result()
            if keep is not None:
                shutil.copytree(folder / "masters", keep / regime / path.stem)
            if waiting is not None:
                of_start = sha_of(start / "start" / "model.safetensors")
                facts = {"log": log, "machine": common.machine(), "start_sha256": of_start}
                set_aside(folder, facts, waiting)

        models = []
        if settings.get("is_scored", True):
            models = make_models(folder, start, regime, arm, scored)
        for model in models:
            scores[model.name] = score(model, settings, start, seed)
        for model in models:
            greedy[model.name] = score(model, settings, start, seed, greedy=True)

    result = {
        "regime": regime,
        "arm": arm,
        "seed": seed,
        "settings": settings,
        "arm_settings": chosen,
        "scores": scores,
        "samples": SAMPLES,
        "greedy": greedy,  # cells of before 2026-11-25 lack it
        "log": log,
        "start_sha256": sha_of(start / "start" / "model.safetensors"),
        "machine": common.machine(),
    }
    # Another commit or machine may have scored it.
    if trained_before is not None:
        result["machine_of_training"] = trained_before["machine"]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete: a cell that has a file is not run again.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    part.rename(path)
    if waiting is not None:
        shutil.rmtree(waiting, ignore_errors=True)


def set_aside(folder: Path, facts: dict[str, Any], waiting: Path) -> None:
    """Copy the trained models of a cell, with facts of their training, to where they wait for their scores."""
    (folder / "trained.json").write_text(json.dumps(facts))
    # Renamed when it is complete.
    part = waiting.with_name(f"{waiting.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(folder, part)
    part.rename(waiting)


def make_models(folder: Path, start: Path, regime: str, arm: str, scored: Sequence[str]) -> list[Path]:
    """Make the models of a cell that training did not write into `folder`. Returns those that are to be scored."""
    settings = REGIMES[regime]
    quantization = settings["quantization"]
    chosen = ARMS.get(arm, {})

    if chosen.get("lora_base") == "merged":
        names = ["low_bit/low_bit"]
    elif "lora_base" in chosen:
        names = ["low_bit"]
    else:
        names = ["masters", "low_bit"]

    if arm == BEFORE or "quant_scheme" in chosen:
        export(folder / "masters", folder / "low_bit", quantization)
    wants_gptq = not scored or "gptq" in scored
    dtype = "float32" if settings.get("portable") else "bfloat16"
    if "masters" in names and wants_gptq and quantization["quant_scheme"].startswith("W4"):
        calibrated("gptq", folder / "masters", folder / "gptq", quantization, start, dtype)
        names.append("gptq")
    if "awq" in settings:
        calibrated("awq", folder / "masters", folder / "awq", quantization, start, dtype, settings["awq"])
        names.append("awq")
    wants_again = not scored or "again" in scored
    if settings.get("distill_again") and arm != BEFORE and wants_again:
        distill(folder / "masters", folder / "again", start)
        names.append("again")
    # That of a merged adapter lies deeper.
    return [folder / name for name in names if not scored or Path(name).name in scored]


def score(model: Path, regime: dict[str, Any], start: Path, seed: int, greedy: bool = False) -> list[int]:
    """
    Score a model on the held-out problems, with `qarl-trl eval`.

    Args:
        model: Its folder.
        regime: An entry of `REGIMES`.
        start: Folder with `test.jsonl`.
        seed: Of the draws.
        greedy: Take the greedy answer alone; else `SAMPLES`.

    Returns:
        How many answers to each problem are right.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "qarl_trl.cli"]
        if regime.get("portable"):
            command = [sys.executable, str(PORTABLE)]
        command += ["eval", str(model), "--suite", str(start / "test.jsonl")]
        if regime.get("portable"):
            command += ["--engine_kwargs", '{"dtype": "float32"}']
        if greedy:
            command += ["--k", "1", "--temperature", "0"]
        else:
            command += ["--k", str(SAMPLES), "--temperature", "1"]
        command += ["--seed", str(seed), "--max_new_tokens", str(regime["max_completion_length"])]
        command += ["--output_dir", f"{scratch}/out"]
        subprocess.run(command, check=True)
        lines = Path(scratch, "out", "completions.jsonl").read_text().splitlines()

    right = []
    for line in lines:
        rewards = json.loads(line)["rewards"]["math_reward"]
        right.append(int(sum(rewards)))
    return right


# Quantization after training -----------------------------------------------------------------------------------------


def export(model: Path, folder: Path, quantization: dict[str, Any]) -> None:
    """
    Round a model to nearest: what a user does after training in bfloat16.

    Args:
        model: Its folder.
        folder: Gets the 4-bit model.
        quantization: `quant_scheme` and, where the scheme has it, `quant_group_size`.
    """
    command = [sys.executable, "-m", "qarl_trl.cli", "export", str(model), str(folder)]
    command += ["--scheme", quantization["quant_scheme"]]
    if "quant_group_size" in quantization:
        command += ["--group_size", str(quantization["quant_group_size"])]
    subprocess.run(command, check=True)


def calibrated(
    method: str,
    model: Path,
    folder: Path,
    quantization: dict[str, Any],
    start: Path,
    dtype: str = "bfloat16",
    samples: int = 512,
) -> None:
    """
    Quantize a model by llm-compressor, calibrated on the training problems with their solutions.

    Args:
        method: "gptq" or "awq".
        model: Its folder.
        folder: Gets the 4-bit model.
        quantization: `quant_scheme` and `quant_group_size`.
        start: Folder with `train.jsonl`.
        dtype: In which it computes.
        samples: Problems, at most.
    """
    lines = []
    for row in solved_problems(start):
        question = {"role": "user", "content": row["problem"]}
        answer = {"role": "assistant", "content": row["solution"]}
        lines.append(json.dumps({"chat": [question, answer]}) + "\n")
    calibration = folder.parent / "calibration.jsonl"
    calibration.write_text("".join(lines))

    script = EXAMPLES / "llmcompressor" / "ptq.py"
    command = [sys.executable, str(script), "--model", str(model), "--output", str(folder), "--method", method]
    command += ["--dtype", dtype, "--num_samples", str(samples)]
    command += ["--scheme", quantization["quant_scheme"], "--group_size", str(quantization["quant_group_size"])]
    command += ["--dataset", str(calibration), "--columns", "chat"]
    subprocess.run(command, check=True)


def distill(
    model: Path,
    folder: Path,
    start: Path,
    answers: str = DISTILL_ON,
    updates: int = DISTILL_UPDATES,
    seed: int | None = None,
) -> None:
    """
    Distill a model into 4 bits, with its own bfloat16 weights as the teacher (examples/smollm2/distill.yaml).

    Args:
        model: Its folder.
        folder: Gets the run.
        start: Folder with `train.jsonl`.
        answers: "rollouts" or "answers", `distill_on` of the config.
        updates: Optimizer steps.
        seed: Of the order of the problems (default: transformers' own).
    """
    problems = folder.parent / "solutions.jsonl"
    problems.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in solved_problems(start)]
    problems.write_text("".join(lines))

    command = [sys.executable, "-m", "qarl_trl.cli", "distill", "--config", str(EXAMPLES / "smollm2" / "distill.yaml")]
    command += ["--model_name_or_path", str(model), "--output_dir", str(folder), "--distill_on", answers]
    command += ["--max_steps", str(updates), "--save_steps", str(updates)]
    if seed is not None:
        command += ["--seed", str(seed)]
    if answers == "rollouts":
        command += ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", "256"]
        command += ["--vllm_engine_kwargs", '{"enforce_eager": true}']
    command += ["--dataset_name_or_path", str(problems)]
    subprocess.run(command, check=True)


def solved_problems(start: Path) -> list[dict[str, str]]:
    """The training problems, each with its solution as warm_start.py teaches it."""
    # Before the quickstart, whose warm_start.py is another.
    sys.path.insert(0, str(EXAMPLES / "smollm2"))
    from warm_start import solved

    return solved(start / "train.jsonl")


# All cells -----------------------------------------------------------------------------------------------------------


def file_of(regime: str, arm: str, seed: int) -> Path:
    """Where a cell is, if it was run."""
    name = arm.lower().replace(",", "").replace(" ", "_")
    return FOLDER / regime / f"{name}.{seed}.json"


def sha_of(weights: Path) -> str:
    """Which start a cell has."""
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def run_all(options: argparse.Namespace) -> None:
    """Run the cells without a file, `jobs` at a time, the first seed of all arms before the second."""
    waiting = []
    for regime, seed, arm in itertools.product(options.regime, options.seeds, options.arms):
        if not file_of(regime, arm, seed).exists():
            waiting.append((regime, arm, seed))

    running: dict[subprocess.Popen, tuple[str, str, int]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            cell = waiting.pop(0)
            running[start_cell(options, *cell)] = cell

        # Takes the child, so a process cannot tell how it ended.
        os.wait()
        for process in list(running):
            if process.poll() is not None:
                cell = running.pop(process)
                print(*cell, "done" if file_of(*cell).exists() else "FAILED", flush=True)


def start_cell(options: argparse.Namespace, regime: str, arm: str, seed: int) -> subprocess.Popen:
    """Start this script for one cell, which writes what it says into a file of the folder for temporary ones."""
    command = [sys.executable, __file__, "--start", str(options.start), "--regime", regime, "--arms", arm]
    if options.keep is not None:
        command += ["--keep", str(options.keep)]
    if options.trained is not None:
        command += ["--trained", str(options.trained)]
    if options.scored:
        command += ["--scored", *options.scored]
    command += ["--seeds", str(seed), "--one"]

    name = f"real_{regime}_{arm.replace(' ', '_')}_{seed}.log"
    # The process keeps the file open.
    with open(Path(tempfile.gettempdir(), name), "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=START, help="folder with start/, train.jsonl and test.jsonl")
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=["g64"])
    usual = [BEFORE, *(arm for arm in ARMS if arm not in RATED)]
    parser.add_argument("--arms", nargs="+", choices=(BEFORE, *ARMS), default=usual)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (default: 1)")
    parser.add_argument("--keep", type=Path, help="keep the trained bfloat16 weights in this folder")
    parser.add_argument("--trained", type=Path, help="keep trained models in this folder until they are scored")
    parser.add_argument("--scored", nargs="+", choices=MODELS, default=[], help="score these alone (default: all)")
    parser.add_argument("--one", action="store_true", help="the first cell, in this process")
    parser.add_argument("--table", action="store_true", help="write the tables and run nothing")
    options = parser.parse_args()

    if options.table:
        import real_table

        real_table.main()
    elif options.one:
        cell = (options.regime[0], options.arms[0], options.seeds[0])
        run_cell(options.start, *cell, options.keep, options.scored, options.trained)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
