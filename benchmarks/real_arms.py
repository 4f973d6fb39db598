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
REGIMES: dict[str, dict[str, Any]] = {
    "g64": G64,
    "channel": G64 | {"quantization": {"quant_scheme": "W4A16", "quant_group_size": -1}},
    "fp8": G64 | {"quantization": {"quant_scheme": "FP8_DYNAMIC"}},
    "paper": G64 | {"band": 1e-4},
    # Four times as many updates of a rollout batch: where the toy's learner in bfloat16 fails. Chosen before any arm
    # ran in it.
    "stale": G64 | {"updates": 8},
    # One start and the same, distilled into 4 bits by real_distill.py: `--start` names the folder. What an arm trained
    # from the first is distilled afterwards, as it is put through GPTQ.
    "undistilled": G64 | {"distill_again": True},
    "distilled": G64,
}
# Chosen by real_distill.py on training problems.
DISTILL_ON = "answers"
DISTILL_UPDATES = 90  # of 16 answers: about three passes over the training problems
BEFORE = "before training"
SAMPLES = 4  # of a held-out problem, at temperature 1
KEPT = (
    *("reward", "entropy", "grad_norm", "completions/mean_length", "completions/clipped_ratio", "step_time"),
    *(
        "mismatch/",
        "ratio/",
        "error_tokens/",
        "quant/",
        "clip_ratio/",
        "time/",
        "sampling/importance_sampling_ratio/",
        "sync/bytes",
    ),
)


# One cell ------------------------------------------------------------------------------------------------------------


def train(start: Path, regime: dict[str, Any], arm: dict[str, Any], seed: int, folder: Path) -> dict[str, list]:
    """
    Train; write `folder`/masters in bfloat16 (not of an adapter) and, for low-bit engines, `folder`/low_bit. Returns
    the log by column.
    """
    import common  # noqa: F401  # sets what torch and vLLM read when they load
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from qarl_trl import QaRLConfig, QaRLTrainer
    from qarl_trl.rewards import math_reward

    updates, band, rows = regime["updates"], regime["band"], regime["prompts"] * regime["answers"]
    micro = min(regime["micro"], rows // updates)
    settings = {
        "output_dir": str(folder / "low_bit"),
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
    if arm.get("quant_scheme") == "none":
        settings = {name: value for name, value in settings.items() if not name.startswith("quant_")}
    if "importance_sampling_level" in arm:  # Table 2: GSPO's bounds are delta_low and epsilon_high of TBPO
        arm = arm | {"epsilon": 3 * band, "epsilon_high": 4 * band}
    adapter = None
    if "lora_base" in arm:
        layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
        adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)
        settings["model_init_kwargs"] = {"dtype": "bfloat16"}
    data = load_dataset("json", data_files=str(start / "train.jsonl"), split="train")
    data = data.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
    trainer = QaRLTrainer(
        str(start / "start"), math_reward, QaRLConfig(**settings | arm), train_dataset=data, peft_config=adapter
    )
    trainer.train()
    if "quant_scheme" not in arm:
        trainer.save_model()
    log = [row for row in trainer.state.log_history if "reward" in row]
    names = sorted({name for row in log for name in row if name.startswith(KEPT)})
    columns = {name: [_short(row.get(name)) for row in log] for name in names}
    if adapter is not None:
        return columns
    masters = AutoModelForCausalLM.from_pretrained(start / "start", dtype=torch.bfloat16)
    trained = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    for name, weight in masters.named_parameters():  # tied ones once
        weight.data.copy_(trained.pop(name))
    assert not trained, f"The trained model has weights that the start has not: {list(trained)}"
    masters.save_pretrained(folder / "masters")
    AutoTokenizer.from_pretrained(start / "start").save_pretrained(folder / "masters")
    return columns


def score(model: Path, regime: dict[str, Any], start: Path, seed: int, greedy: bool = False) -> list[int]:
    """Right answers of each held-out problem, of `SAMPLES` or of the greedy one."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "qarl_trl.cli", "eval", str(model), "--suite", str(start / "test.jsonl")]
        samples, temperature = (1, 0) if greedy else (SAMPLES, 1)
        command += ["--k", str(samples), "--temperature", str(temperature), "--seed", str(seed)]
        command += ["--max_new_tokens", str(regime["max_completion_length"]), "--output_dir", f"{scratch}/out"]
        subprocess.run(command, check=True)
        rows = Path(scratch, "out", "completions.jsonl").read_text().splitlines()
    return [int(sum(json.loads(row)["rewards"]["math_reward"])) for row in rows]


def run_cell(
    start: Path, regime: str, arm: str, seed: int, keep: Path | None = None, scored: Sequence[str] = ()
) -> None:
    """
    Train (or, before training, take the start), score, write the file.

    Args:
        keep: Folder that gets the trained weights.
        scored: Only these of "masters", "low_bit", "gptq" and "again" (default: all).
    """
    import common

    settings, chosen, log = REGIMES[regime], ARMS.get(arm, {}), {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if arm == BEFORE:
            (out / "masters").symlink_to((start / "start").resolve())
        else:
            with ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn")
            ) as process:  # its 9 GB go before GPTQ comes
                log = process.submit(train, start, settings, chosen, seed, out).result()
        path = file_of(regime, arm, seed)
        if keep is not None and arm != BEFORE:
            shutil.copytree(out / "masters", keep / regime / path.stem)

        models = ["low_bit"] if "lora_base" in chosen else ["masters", "low_bit"]
        if chosen.get("lora_base") == "merged":
            models = ["low_bit/low_bit"]
        if arm == BEFORE or "quant_scheme" in chosen:
            export(out / "masters", out / "low_bit", settings["quantization"])
        wants_gptq = not scored or "gptq" in scored
        if "masters" in models and wants_gptq and settings["quantization"]["quant_scheme"].startswith("W4"):
            gptq(out / "masters", out / "gptq", settings["quantization"], start)
            models.append("gptq")
        if settings.get("distill_again") and arm != BEFORE:
            distill(out / "masters", out / "again", start)
            models.append("again")
        models = [name for name in models if not scored or name in scored]
        scores, greedy = (
            {Path(name).name: score(out / name, settings, start, seed, one) for name in models}
            for one in (False, True)
        )
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    path.with_suffix(".part").rename(path)


def export(model: Path, folder: Path, quantization: dict[str, Any]) -> None:
    """Round to nearest: what a user does after training in bfloat16."""
    command = [sys.executable, "-m", "qarl_trl.cli", "export", str(model), str(folder)]
    command += ["--scheme", quantization["quant_scheme"]]
    if "quant_group_size" in quantization:
        command += ["--group_size", str(quantization["quant_group_size"])]
    subprocess.run(command, check=True)


def gptq(model: Path, folder: Path, quantization: dict[str, Any], start: Path) -> None:
    """llm-compressor's GPTQ, calibrated on the training problems with their solutions."""
    calibration = folder.parent / "calibration.jsonl"
    chats = [
        [
            {"role": "user", "content": row["problem"]},
            {"role": "assistant", "content": row["solution"]},
        ]
        for row in solved_problems(start)
    ]
    calibration.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    script = EXAMPLES / "llmcompressor" / "ptq.py"
    command = [sys.executable, str(script), "--model", str(model), "--output", str(folder), "--method", "gptq"]
    command += ["--scheme", quantization["quant_scheme"], "--group_size", str(quantization["quant_group_size"])]
    subprocess.run([*command, "--dataset", str(calibration), "--columns", "chat"], check=True)


def distill(
    model: Path,
    folder: Path,
    start: Path,
    answers: str = DISTILL_ON,
    updates: int = DISTILL_UPDATES,
    seed: int | None = None,
) -> None:
    """
    Distill into 4 bits, with the model's own bfloat16 weights as the teacher (examples/smollm2/distill.yaml).

    Args:
        answers: "rollouts" or "answers", `distill_on` of the config.
        updates: Optimizer steps.
        seed: Of the order of the problems (default: transformers' own).
    """
    command = [sys.executable, "-m", "qarl_trl.cli", "distill", "--config", str(EXAMPLES / "smollm2" / "distill.yaml")]
    command += ["--model_name_or_path", str(model), "--output_dir", str(folder), "--distill_on", answers]
    command += ["--max_steps", str(updates), "--save_steps", str(updates)]
    if seed is not None:
        command += ["--seed", str(seed)]
    if answers == "rollouts":
        command += ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_max_model_length", "256"]
        command += ["--vllm_engine_kwargs", '{"enforce_eager": true}']
    problems = folder.parent / "solutions.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in solved_problems(start)))
    subprocess.run([*command, "--dataset_name_or_path", str(problems)], check=True)


def solved_problems(start: Path) -> list[dict[str, str]]:
    """The training problems, each with its solution as warm_start.py teaches it."""
    sys.path.insert(0, str(EXAMPLES / "smollm2"))  # before the quickstart, whose warm_start.py is another
    from warm_start import solved

    return solved(start / "train.jsonl")


# All cells -----------------------------------------------------------------------------------------------------------


def file_of(regime: str, arm: str, seed: int) -> Path:
    return FOLDER / regime / f"{arm.lower().replace(',', '').replace(' ', '_')}.{seed}.json"


def sha_of(weights: Path) -> str:
    """Which start a cell has."""
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def run_all(options: argparse.Namespace) -> None:
    """Run the cells without a file, `jobs` at a time, the first seed of all arms before the second."""
    wanted = [(r, a, s) for r in options.regime for s in options.seeds for a in options.arms]
    waiting, running = [cell for cell in wanted if not file_of(*cell).exists()], {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            cell = waiting.pop(0)
            regime, arm, seed = cell
            command = [sys.executable, __file__, "--start", str(options.start), "--regime", regime, "--arms", arm]
            if options.keep is not None:
                command += ["--keep", str(options.keep)]
            if options.scored:
                command += ["--scored", *options.scored]
            name = f"real_{regime}_{arm.replace(' ', '_')}_{seed}.log"
            log = open(Path(tempfile.gettempdir(), name), "w")  # noqa: SIM115
            running[subprocess.Popen([*command, "--seeds", str(seed), "--one"], stdout=log, stderr=log)] = cell
        os.wait()
        for process in [process for process in running if process.poll() is not None]:
            print(*running.pop(process), "done" if process.returncode == 0 else "FAILED", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=START, help="folder with start/, train.jsonl and test.jsonl")
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=["g64"])
    parser.add_argument("--arms", nargs="+", choices=(BEFORE, *ARMS), default=[BEFORE, *ARMS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time (default: 1)")
    parser.add_argument("--keep", type=Path, help="keep the trained bfloat16 weights in this folder")
    parser.add_argument("--scored", nargs="+", default=[], help="score these models of a cell alone (default: all)")
    parser.add_argument("--one", action="store_true", help="the first cell, in this process")
    parser.add_argument("--table", action="store_true", help="write the tables and run nothing")
    options = parser.parse_args()
    if options.table:
        import real_table

        real_table.main()
    elif options.one:
        run_cell(options.start, options.regime[0], options.arms[0], options.seeds[0], options.keep, options.scored)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
