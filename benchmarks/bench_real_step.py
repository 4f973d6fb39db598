"""Training steps of a real model, SmolLM2-135M-Instruct, beside its CPU engine: bf16, rollout-only and QaRL, by batch
size.

Claim: on a CPU low bits cost time; the ratios say where. Nothing here predicts a GPU.

A process trains on rollout batches of 16 or 64 answers, in updates of 16, with one seed; arms take turns. Reported are
the seconds of one rollout batch (rollout, sync, updates) behind the first update, which starts the engine and its
kernels. `--more 1` adds rounds to the result file, for machines that are quiet for minutes only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch


PARTS = ("rollout", "sync", "update")
BASE = "bf16"
ARMS: dict[str, dict[str, Any]] = {
    BASE: {"quant_scheme": "none"},
    "rollout-only": {"quant_scheme": "W4A16", "quant_group_size": 64, "quantize_learner": False},
    "QaRL": {"quant_scheme": "W4A16", "quant_group_size": 64},
}
# Of an update.
BATCH = 16
# Of a rollout batch.
ANSWERS = (16, 64)
PLACES = ("bag", "box", "jar", "drawer")
THINGS = ("apples", "marbles", "stamps", "pencils")

# What is known of each rollout batch, by its arm and number of answers, see `cell_name`.
Cells = dict[str, list[dict[str, float]]]


# In the process of one run ------------------------------------------------------------------------------------------


def distinct_words(completions: list[Any], **_: Any) -> list[float]:
    """A reward that the samples of a group disagree on."""
    rewards = []
    for completion in completions:
        words = completion[0]["content"].split()
        rewards.append(float(len(set(words))))
    return rewards


def problems() -> list[dict[str, Any]]:
    """64 word problems of one step."""
    rows = []
    for number in range(64):
        place = PLACES[number % 4]
        thing = THINGS[number // 4 % 4]
        content = (
            f"A {place} holds {20 + 7 * number} {thing}. Somebody takes {3 + number} of them out. How many are left?"
            " Think step by step."
        )
        rows.append({"prompt": [{"role": "user", "content": content}]})
    return rows


def train(model: str, arm: str, answers: int) -> list[dict[str, float]]:
    """What the trainer logs, update by update."""
    from datasets import Dataset

    from qarl_trl import QaRLConfig, QaRLTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = QaRLConfig(
            output_dir=folder,
            use_cpu=True,
            use_vllm=True,
            vllm_engine_kwargs={"enforce_eager": True},
            vllm_max_model_length=256,
            max_completion_length=64,
            num_generations=8,
            per_device_train_batch_size=BATCH,
            steps_per_generation=answers // BATCH,
            max_steps=answers // BATCH + 1,
            learning_rate=2e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **ARMS[arm],
        )
        trainer = QaRLTrainer(model, distinct_words, args, train_dataset=Dataset.from_list(problems()))
        trainer.train()
        return [row for row in trainer.state.log_history if "loss" in row]


# Measurements -------------------------------------------------------------------------------------------------------


def measured(model: str, arm: str, answers: int) -> dict[str, float]:
    """Seconds of the last rollout batch's parts, and tokens of an answer, from [`train`] in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        command = [sys.executable, __file__, "--out", out, "--model", model, "--arm", arm, "--answers", str(answers)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{arm}: {result.stdout[-2000:]}{result.stderr[-4000:]}")
        rows = json.loads(Path(out).read_text())
    return last_batch(rows, answers)


def last_batch(rows: list[dict[str, float]], answers: int) -> dict[str, float]:
    """
    What is kept of a run.

    Args:
        rows: What `train` returned.
        answers: Of a rollout batch.

    Returns:
        Seconds of each part of the last rollout batch and of the first sync, and tokens of an answer in the mean.
    """
    # Behind the first update: one rollout with its sync, and as many updates as a rollout batch has.
    last = rows[-(answers // BATCH) :]
    cell = {part: sum(row[f"time/{part}"] for row in last) for part in PARTS}
    cell["length"] = rows[0]["completions/mean_length"]
    cell["first sync"] = rows[0]["time/sync"]
    return cell


def quantizing(model: str, group_size: int) -> float:
    """Least seconds to quantize and dequantize all low-bit weights once, as each update and each sync does."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, quantized_modules
    from qarl_trl.quant.quantize import dequantize, quantize_weight

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    apply_quantization(policy, "W4A16", group_size=group_size)
    layers = [layer for _, layer in quantized_modules(policy)]

    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        weights = [quantize_weight(layer.weight, layer.scheme) for layer in layers]
        for weight in weights:
            dequantize(weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# Report -------------------------------------------------------------------------------------------------------------


def cell_name(arm: str, answers: int) -> str:
    return f"{arm}, {answers}"


def seconds_of(part: str, cell: dict[str, float]) -> float:
    """Seconds of one of `PARTS`, or of the whole `step`."""
    if part == "step":
        return sum(cell[name] for name in PARTS)
    return cell[part]


def row_of(arm: str, answers: int, cells: Cells) -> dict[str, Any]:
    """The line of one arm and size, beside bf16's runs of the same rounds."""
    row: dict[str, Any] = {"arm": arm, "answers": answers}
    for part in (*PARTS, "step"):
        times: common.Times = {}
        for name in ARMS:
            times[name] = [seconds_of(part, cell) for cell in cells[cell_name(name, answers)]]
        compared = common.ratio(times, arm, BASE)
        row[f"{part} s"] = compared["seconds"]
        row[f"{part} / bf16"] = compared["ratio"]

    # Those of the whole step, which comes last.
    row["quartiles"] = f"{compared['quartile_low']:.2f} to {compared['quartile_high']:.2f}"
    row["rounds"] = compared["rounds"]
    first_syncs = [cell["first sync"] for cell in cells[cell_name(arm, answers)]]
    row["first sync s"] = statistics.median_high(first_syncs)
    return row


def headlines_of(rows: list[dict[str, Any]], quantizer: float) -> list[str]:
    """
    What each arm costs beside bf16, and how much of QaRL's step the quantizer takes.

    Args:
        rows: The table, whose last line is QaRL's with most answers.
        quantizer: Seconds of all quantizing of that line.
    """
    headlines = []
    for row in rows:
        if row["arm"] != BASE:
            headlines.append(
                f"{row['arm']} / bf16, {row['answers']} answers: {row['step / bf16']:.2f} ({row['quartiles']})"
            )

    step = rows[-1]["step s"]
    headlines.append(
        f"all quantizing of QaRL's {ANSWERS[-1]} answers takes {quantizer:.2f} of {step:.0f} s, {quantizer / step:.1%}"
    )
    return headlines


def result_name() -> str:
    """The name of the result file. AMX changes the ratios, so that its results have a file of their own."""
    has_amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()
    return "bench_real_step" + (".amx" if has_amx else "")


def compare_arms(args: argparse.Namespace) -> None:
    """Measure all arms and sizes, and report."""
    load = os.getloadavg()[0]
    name = result_name()
    file = common.result_file(name, args.quick)
    cells: Cells = {}
    if args.more and file.exists():
        cells = json.loads(file.read_text())["found"]

    order = [(arm, answers) for answers in ANSWERS for arm in ARMS]
    for arm, answers in order:
        cells.setdefault(cell_name(arm, answers), [])
    for number in range(args.rounds):
        # Forth and back, so that no arm always runs first.
        in_turn = order if number % 2 == 0 else order[::-1]
        for arm, answers in in_turn:
            cell = measured(args.model, arm, answers)
            cells[cell_name(arm, answers)].append(cell)
            print(arm, answers, cell, flush=True)

    rows = [row_of(arm, answers, cells) for arm, answers in order]
    # Once for each update, and once for the sync.
    quantizer = (ANSWERS[-1] // BATCH + 1) * quantizing(args.model, 64)
    common.report(name, args, headlines_of(rows, quantizer), rows, load, found=cells)


def main() -> None:
    args = common.arguments(
        __doc__,
        model=("runs/smollm2/base", "runs/smollm2/base", "folder that examples/smollm2/prepare.py writes"),
        rounds=(3, 1, "processes of each arm and size"),
        more=(0, 0, "1: add the rounds to those of the result file"),
        arm=("", "", "for one process"),
        answers=(0, 0, "for one process"),
        out=("", "", "for one process: its file"),
    )
    if args.out:
        rows = train(args.model, args.arm, args.answers)
        Path(args.out).write_text(json.dumps(rows))
        return

    compare_arms(args)


if __name__ == "__main__":
    main()
