"""Many rollout batches of a toy model: does memory, the number of files or threads, or the time of a weight sync grow?

Each case has a process of its own. What grows is told apart: pages (the resident size without mapped files), bytes
that the C library has handed out, and blocks of Python's own allocator; only the last two count what is in use. A rate
is the mean step from one batch to the next over the second half or the last quarter of a case, where buffers have
found their sizes, with 90 % of a bootstrap that draws blocks of ten steps: some are rare and large
(dev/architecture.md), so residuals of a line would not be independent. The median block leaves those out. The time
of a weight sync is the median of the third and of the last quarter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import common


BLOCK = 10
CASES = [(scheme, lora) for scheme in ("W4A16", "FP8_DYNAMIC") for lora in (False, True)]


class _MallInfo(ctypes.Structure):
    """
    `struct mallinfo2` of glibc, over all of its arenas: the fifth is mapped alone, the eighth handed out from arenas.
    """

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def status() -> dict[str, int]:
    """Of this process, after the C library gave back what it had freed; sizes in bytes."""
    libc = ctypes.CDLL(None)
    gc.collect()
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _MallInfo
    heap = libc.mallinfo2().sizes
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory": 1024 * int(lines["RssAnon"].split()[0]),
        "heap": heap[4] + heap[7],
        "blocks": sys.getallocatedblocks(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(lines["Threads"]),
    }


def soak(tick: Callable, path: str, folder: str, scheme: str, lora: bool, seconds: float) -> None:
    """Ticks once, with what `status` says after each rollout batch and the seconds of its sync."""
    from bench_step import distinct_characters
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback

    from qarl_trl import QaRLConfig, QaRLTrainer

    rows: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % args.steps_per_generation == 0:
                rows.append(status() | {"sync": trainer.vllm_generation.sync_seconds})
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
    tick(rows)


def rate(values: list[float]) -> dict[str, float]:
    """
    Mean growth for 100 of `values`, the 5 % and 95 % quantiles of a bootstrap by blocks of steps, and the median
    block's growth.
    """
    steps = [after - before for before, after in pairwise(values)]
    blocks = [sum(steps[i : i + BLOCK]) for i in range(len(steps) - BLOCK + 1)] or [sum(steps)]
    draw, number, per_100 = random.Random(0), max(1, len(steps) // BLOCK), 100 / min(BLOCK, len(steps))
    means = sorted(per_100 * statistics.fmean(draw.choices(blocks, k=number)) for _ in range(2000))
    found = 100 * statistics.fmean(steps), means[100], means[-101], per_100 * statistics.median(blocks)
    return dict(zip(("mean", "5 %", "95 %", "median"), found, strict=True))


def row_of(name: str, found: list[dict[str, float]]) -> dict[str, Any]:
    """The line of one case."""
    late, last = found[len(found) // 2 :], found[3 * len(found) // 4 :]
    row: dict[str, Any] = {"case": name, "rollout batches": len(found), "MB at the end": found[-1]["memory"] / 1e6}
    for key, part, of, unit in (
        ("MB per 100", late, "memory", 1e6),
        ("MB per 100 of the last quarter", last, "memory", 1e6),
        ("MB in use per 100", late, "heap", 1e6),
        ("Python blocks per 100", late, "blocks", 1),
    ):
        row |= {f"{key}, {kind}": value / unit for kind, value in rate([r[of] for r in part]).items()}
    quarters = [statistics.median(r["sync"] for r in part) for part in (late[: len(late) // 2], last)]
    row["sync, ms"] = " then ".join(f"{1e3 * seconds:.1f}" for seconds in quarters)
    return row | {key: f"{late[0][key]} to {late[-1][key]}" for key in ("files", "threads")}


def main() -> None:
    args = common.arguments(__doc__, seconds=(140.0, 5.0, "time of each case after its start"))
    load = os.getloadavg()[0]
    rows, series = [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", 256, 2, 512)
        for number, (scheme, lora) in enumerate(CASES):
            name = scheme + (", LoRA" if lora else "")
            worker = common.Worker(soak, path, f"{folder}/{number}", scheme, lora, args.seconds)
            found = worker.wait()
            worker.close()
            kinds = ("memory", "heap", "blocks")
            series[name] = [{kind: found[i][kind] for kind in kinds} for i in range(0, len(found), 10)]
            rows.append(row_of(name, found))
            headline = [
                f"{r['case']}: {r['MB per 100, mean']:.2f} MB per 100 rollout batches ({r['MB per 100, 5 %']:.2f} to "
                f"{r['MB per 100, 95 %']:.2f}, median {r['MB per 100, median']:.2f}), in use "
                f"{r['MB in use per 100, median']:.3f}"
                for r in rows
            ]
            common.report("bench_soak", args, headline, rows, load, every_tenth_batch=series)


if __name__ == "__main__":
    main()
