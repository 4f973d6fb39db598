"""Many rollout batches of a toy model: does memory, the number of files or threads, or the time of a publish grow?

The cases run one after the other in this process, each with an engine of its own; a slope is the least-squares line through
the second half of a case, where buffers and allocators have found their sizes.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common


CASES = [(scheme, lora) for scheme in ("W4A16", "FP8_DYNAMIC") for lora in (False, True)]


def status() -> dict[str, int]:
    """Resident memory in bytes, open files and threads of this process, after the C library gave back what it had freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"memory": 1024 * int(lines["VmRSS"].split()[0]), "files": files, "threads": int(lines["Threads"])}


def soak(path: str, folder: str, scheme: str, lora: bool, seconds: float) -> list[dict[str, float]]:
    """What `status` says after each rollout batch, with the seconds of its publish."""
    from bench_step import distinct_characters
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback

    from qarl_trl import QaRLConfig, QaRLTrainer

    rows: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % args.steps_per_generation == 0:
                rows.append(status() | {"publish": trainer.vllm_generation.last_publish.seconds})
                control.should_training_stop = time.monotonic() > end

    args = QaRLConfig(
        output_dir=folder,
        quant_scheme=scheme,
        use_cpu=True,
        use_vllm=True,
        vllm_engine_kwargs={"enforce_eager": True},
        vllm_max_model_length=64,
        max_completion_length=8,
        num_generations=4,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        max_steps=10**6,
        learning_rate=1e-5,
        logging_steps=100,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    adapter = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM") if lora else None
    prompts = Dataset.from_list([{"prompt": f"{10 + i}+{99 - i}="} for i in range(64)])
    trainer = QaRLTrainer(path, distinct_characters, args, train_dataset=prompts, peft_config=adapter)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch())
    end = time.monotonic() + seconds
    trainer.train()
    return rows


def slope(values: list[float]) -> tuple[float, float]:
    """Of the least-squares line through `values`, for 100 of them, with its standard error (independent residuals)."""
    mean_x, mean = (len(values) - 1) / 2, statistics.fmean(values)
    squares = sum((x - mean_x) ** 2 for x in range(len(values)))
    rise = sum((x - mean_x) * (y - mean) for x, y in enumerate(values)) / squares
    residual = sum((y - mean - rise * (x - mean_x)) ** 2 for x, y in enumerate(values)) / (len(values) - 2)
    return 100 * rise, 100 * math.sqrt(residual / squares)


def main() -> None:
    args = common.arguments(__doc__, seconds=(140.0, 5.0, "time of each case after its start"))
    load = os.getloadavg()[0]
    rows, series = [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", 256, 2, 512)
        for number, (scheme, lora) in enumerate(CASES):
            name = scheme + (", LoRA" if lora else "")
            found = soak(path, f"{folder}/{number}", scheme, lora, args.seconds)
            series[name] = [round(row["memory"] / 1e6, 1) for row in found[::10]]
            gc.collect()
            late = found[len(found) // 2 :]
            (grows, error), (slower, slower_error) = (slope([r[k] for r in late]) for k in ("memory", "publish"))
            rows.append(
                {
                    "case": name,
                    "rollout batches": len(found),
                    "MB per 100": grows / 1e6,
                    "+-": error / 1e6,
                    "MB at the end": found[-1]["memory"] / 1e6,
                    "publish, ms": 1e3 * statistics.median(r["publish"] for r in late),
                    "its slope per 100": 1e3 * slower,
                    "+- ": 1e3 * slower_error,
                    "files": f"{late[0]['files']} to {late[-1]['files']}",
                    "threads": f"{late[0]['threads']} to {late[-1]['threads']}",
                }
            )
            headline = [
                f"{r['case']}: {r['MB per 100']:.2f} +- {r['+-']:.2f} MB per 100 rollout batches" for r in rows
            ]
            common.report("bench_soak", args, headline, rows, load, memory_of_every_tenth_batch=series)


if __name__ == "__main__":
    main()
