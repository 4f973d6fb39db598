"""Training steps of a real model, SmolLM2-135M-Instruct, beside its CPU engine: bf16, rollout-only and QaRL, by batch
size.

Claim: on a CPU low bits cost time; the ratios say where. Nothing here predicts a GPU.

A process trains on rollout batches of 16 or 64 answers, in updates of 16, with one seed; arms take turns. Reported are
the seconds of one rollout batch (rollout, sync, updates) behind the first update, which starts the engine and its
kernels. `--more 1` adds rounds to the result file, for machines that are quiet for minutes only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch


PARTS = ("rollout", "sync", "update")
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"quant_scheme": "none"},
    "rollout-only": {"quant_scheme": "W4A16", "quant_group_size": 64, "quantize_learner": False},
    "QaRL": {"quant_scheme": "W4A16", "quant_group_size": 64},
}
ANSWERS = (16, 64)  # of a rollout batch
PLACES = ("bag", "box", "jar", "drawer")
THINGS = ("apples", "marbles", "stamps", "pencils")


def distinct_words(completions: list[Any], **_: Any) -> list[float]:
    """A reward that the samples of a group disagree on."""
    return [float(len(set(completion[0]["content"].split()))) for completion in completions]


def problems() -> list[dict[str, Any]]:
    """64 word problems of one step."""
    text = "A {} holds {} {}. Somebody takes {} of them out. How many are left?"
    contents = (
        text.format(PLACES[i % 4], 20 + 7 * i, THINGS[i // 4 % 4], 3 + i) + " Think step by step." for i in range(64)
    )
    return [{"prompt": [{"role": "user", "content": content}]} for content in contents]


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
            per_device_train_batch_size=16,
            steps_per_generation=answers // 16,
            max_steps=answers // 16 + 1,
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


def measured(args: Any, arm: str, answers: int) -> dict[str, float]:
    """Seconds of the last rollout batch's parts, and tokens of an answer, from [`train`] in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        command = [sys.executable, __file__, "--out", out, "--model", args.model, "--arm", arm]
        result = subprocess.run([*command, "--answers", str(answers)], capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{arm}: {result.stdout[-2000:]}{result.stderr[-4000:]}")
        rows = json.loads(Path(out).read_text())
    first, last = rows[0], rows[-(answers // 16) :]
    found = {part: sum(row[f"time/{part}"] for row in last) for part in PARTS}
    return found | {"length": rows[0]["completions/mean_length"], "first sync": first["time/sync"]}


def quantizing(model: str, group_size: int) -> float:
    """Least seconds to quantize and dequantize all low-bit weights once, as each update and each sync does."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization, quantized_modules
    from qarl_trl.quant.quantize import dequantize, quantize_weight

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    apply_quantization(policy, "W4A16", group_size=group_size)
    layers, seconds = [layer for _, layer in quantized_modules(policy)], []
    for _ in range(10):
        start = time.perf_counter()
        for weight in [quantize_weight(layer.weight, layer.scheme) for layer in layers]:
            dequantize(weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


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
        Path(args.out).write_text(json.dumps(train(args.model, args.arm, args.answers)))
        return
    amx = "amx_bf16" in Path("/proc/cpuinfo").read_text()  # which changes the ratios: a file of its own
    name = "bench_real_step" + (".amx" if amx else "")
    load, file = os.getloadavg()[0], common.result_file(name, args.quick)
    done = json.loads(file.read_text())["found"] if args.more and file.exists() else {}
    cells = {(arm, answers): done.setdefault(f"{arm}, {answers}", []) for answers in ANSWERS for arm in ARMS}
    for number in range(args.rounds):
        for arm, answers in list(cells)[:: 1 if number % 2 == 0 else -1]:
            cells[arm, answers].append(measured(args, arm, answers))
            print(arm, answers, cells[arm, answers][-1], flush=True)
    rows, headlines = [], []
    for (arm, answers), found in cells.items():
        row = {"arm": arm, "answers": answers}
        for part in (*PARTS, "step"):
            times = {
                name: [sum(c[p] for p in PARTS) if part == "step" else c[part] for c in cells[name, answers]]
                for name in ARMS
            }
            r = common.ratio(times, arm, "bf16")
            row |= {f"{part} s": r["seconds"], f"{part} / bf16": r["ratio"]}
        row |= {"quartiles": f"{r['quartile_low']:.2f} to {r['quartile_high']:.2f}", "rounds": r["rounds"]}
        row["first sync s"] = sorted(c["first sync"] for c in found)[len(found) // 2]
        rows.append(row)
        if arm != "bf16":
            headlines.append(f"{arm} / bf16, {answers} answers: {row['step / bf16']:.2f} ({row['quartiles']})")
    quantizer, step = 5 * quantizing(args.model, 64), rows[-1]["step s"]
    headlines.append(
        f"all quantizing of QaRL's {ANSWERS[-1]} answers takes {quantizer:.2f} of {step:.0f} s, {quantizer / step:.1%}"
    )
    common.report(name, args, headlines, rows, load, found=done)


if __name__ == "__main__":
    main()
