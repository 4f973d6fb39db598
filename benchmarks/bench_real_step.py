"""Training steps of a real model, SmolLM2-135M-Instruct, beside its CPU engine: the package's tree against others.

Claim: a change that should not alter results leaves every logged loss, norm and reward as it is, bit for bit; the ratios say what it
costs. This decides whether a kernel written by hand earns its place.

`bench_real_step.py --model FOLDER --before WORKTREE` trains on rollout batches of 64 answers, four updates each, in a process for
each tree and round, in turns and with the same seed. Reported is one cycle behind the first update, which starts the engine
and its kernels: updates 2 to 5, which hold the second rollout and the second sync. `--more 1` adds rounds to the result file, for machines that are quiet for minutes only.
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
# Renamed since the trees that this one is compared with.
OLDER = {"time/publish": "time/sync", "mismatch/logp_gap_mean": "mismatch/logp_diff_mean"}
SAME = ("loss", "grad_norm", "reward")
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


def train(model: str, batches: int, group_size: int) -> list[dict[str, float]]:
    """What the trainer of this process's package logs, update by update."""
    from datasets import Dataset

    from qarl_trl import QaRLConfig, QaRLTrainer

    with tempfile.TemporaryDirectory() as folder:
        args = QaRLConfig(
            output_dir=folder,
            use_cpu=True,
            quant_scheme="W4A16",
            quant_group_size=group_size,
            use_vllm=True,
            vllm_engine_kwargs={"enforce_eager": True},
            vllm_max_model_length=256,
            max_completion_length=64,
            num_generations=8,
            per_device_train_batch_size=16,
            steps_per_generation=4,
            max_steps=4 * batches + 1,
            learning_rate=2e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        )
        trainer = QaRLTrainer(model, distinct_words, args, train_dataset=Dataset.from_list(problems()))
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{OLDER.get(name, name): value for name, value in row.items()} for row in rows]


def measured(tree: str, args: Any) -> list[dict[str, float]]:
    """[`train`] in a process of its own with the package of `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows.json"
        command = [sys.executable, __file__, "--out", out, "--model", args.model]
        command += ["--batches", str(args.batches), "--group-size", str(args.group_size)]
        result = subprocess.run(command, env=os.environ | {"PYTHONPATH": tree}, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{tree}: {result.stdout[-2000:]}{result.stderr[-4000:]}")
        return json.loads(Path(out).read_text())


def quantizing(model: str, group_size: int) -> float:
    """Least seconds to quantize and dequantize all low-bit weights once, as each update and each sync does."""
    from transformers import AutoModelForCausalLM

    from qarl_trl.quant import apply_quantization
    from qarl_trl.quant.model import quantized_modules
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
        model=("/tmp/real_model/base", "/tmp/real_model/base", "folder of ../shared/real_model/prepare.py"),
        before=("", "", "root of another tree of the package"),
        group_size=(64, 64, "weights of a scale"),
        batches=(1, 1, "rollout batches of a process, before the last update"),
        rounds=(3, 1, "processes of each tree"),
        more=(0, 0, "1: add the rounds to those of the result file"),
        out=("", "", "for the process of one tree: its file"),
    )
    if args.out:
        Path(args.out).write_text(json.dumps(train(args.model, args.batches, args.group_size)))
        return
    load, file = os.getloadavg()[0], common.result_file("bench_real_step", args.quick)
    trees = {"before": args.before, "now": str(common.ROOT)} if args.before else {"now": str(common.ROOT)}
    logs = json.loads(file.read_text())["logs"] if args.more and file.exists() else {name: [] for name in trees}
    for _ in range(args.rounds):
        names = list(trees) if len(logs["now"]) % 2 == 0 else list(trees)[::-1]
        for name in names:
            logs[name].append(measured(trees[name], args))
    results = {
        name: [[tuple(row[key] for key in SAME if key in row) for row in log] for log in logs[name]] for name in logs
    }
    equal = len({json.dumps(log) for name in logs for log in results[name]}) == 1
    last = {name: [log[-4:] for log in logs[name]] for name in logs}
    times = {
        part: {name: [sum(row[f"time/{part}"] for row in log) for log in last[name]] for name in last}
        for part in PARTS
    }
    times["step"] = {
        name: [sum(values) for values in zip(*(times[part][name] for part in PARTS), strict=True)] for name in last
    }
    base = "before" if args.before else "now"
    found = {part: common.ratio(times[part], "now", base) for part in times}
    rows = [
        {"part": part, f"now / {base}": r["ratio"], "now s": r["seconds"], f"{base} s": r["base_seconds"]}
        for part, r in found.items()
    ]
    quantizer, step = 5 * quantizing(args.model, args.group_size), min(times["step"]["now"])
    rows.append({"part": "all quantizing of a step (4 updates, a sync)", "now s": quantizer})
    headlines = [
        f"all quantizing of a step takes {quantizer:.2f} of its {step:.0f} s, {quantizer / step:.1%}: no kernel could save more",
        f"step, now / {base}: {found['step']['ratio']:.3f}x ({found['step']['quartile_low']:.3f} to {found['step']['quartile_high']:.3f})",
        f"{', '.join(SAME)} of {sum(map(len, logs.values()))} runs are {'equal, bit for bit' if equal else 'NOT EQUAL'}",
    ]
    common.report("bench_real_step", args, headlines, rows, load, times=times, logs=logs)


if __name__ == "__main__":
    main()
