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
DRAWS = 2000
CASES = [(scheme, lora) for scheme in ("W4A16", "FP8_DYNAMIC") for lora in (False, True)]
# The kinds of memory whose series go to the result file.
KINDS = ("memory", "heap", "blocks")


# In the process of one case -----------------------------------------------------------------------------------------


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


def soak(tick: Callable[..., Any], path: str, folder: str, scheme: str, lora: bool, seconds: float) -> None:
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
    adapter = None
    if lora:
        adapter = LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    prompts = Dataset.from_list([{"prompt": f"{10 + number}+{99 - number}="} for number in range(64)])
    trainer = QaRLTrainer(path, distinct_characters, args, train_dataset=prompts, peft_config=adapter)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch())

    end = time.monotonic() + seconds
    trainer.train()
    tick(rows)


# Here ---------------------------------------------------------------------------------------------------------------


def rate(values: list[float]) -> dict[str, float]:
    """
    Mean growth for 100 of `values`, the 5 % and 95 % quantiles of a bootstrap by blocks of steps, and the median
    block's growth.
    """
    steps = [after - before for before, after in pairwise(values)]
    blocks = [sum(steps[first : first + BLOCK]) for first in range(len(steps) - BLOCK + 1)]
    # Fewer steps than a block has are one.
    if not blocks:
        blocks = [sum(steps)]
    per_100 = 100 / min(BLOCK, len(steps))

    draw = random.Random(0)
    number = max(1, len(steps) // BLOCK)
    means = []
    for _ in range(DRAWS):
        drawn = draw.choices(blocks, k=number)
        means.append(per_100 * statistics.fmean(drawn))
    means.sort()

    tail = DRAWS // 20
    return {
        "mean": 100 * statistics.fmean(steps),
        "5 %": means[tail],
        "95 %": means[-1 - tail],
        "median": per_100 * statistics.median(blocks),
    }


def row_of(name: str, batches: list[dict[str, float]]) -> dict[str, Any]:
    """
    The line of one case.

    Args:
        name: Of the case.
        batches: What `soak` ticked, a dictionary for each rollout batch.
    """
    late = batches[len(batches) // 2 :]
    third_quarter = late[: len(late) // 2]
    last_quarter = batches[3 * len(batches) // 4 :]

    row: dict[str, Any] = {
        "case": name,
        "rollout batches": len(batches),
        "MB at the end": batches[-1]["memory"] / 1e6,
    }
    for title, part, kind, unit in (
        ("MB per 100", late, "memory", 1e6),
        ("MB per 100 of the last quarter", last_quarter, "memory", 1e6),
        ("MB in use per 100", late, "heap", 1e6),
        ("Python blocks per 100", late, "blocks", 1),
    ):
        rates = rate([batch[kind] for batch in part])
        for statistic, value in rates.items():
            row[f"{title}, {statistic}"] = value / unit

    row["sync, ms"] = f"{sync_milliseconds(third_quarter):.1f} then {sync_milliseconds(last_quarter):.1f}"
    for kind in ("files", "threads"):
        row[kind] = f"{late[0][kind]} to {late[-1][kind]}"
    return row


def sync_milliseconds(batches: list[dict[str, float]]) -> float:
    """The median time of a weight sync."""
    return 1e3 * statistics.median(batch["sync"] for batch in batches)


def headline_of(row: dict[str, Any]) -> str:
    """How the memory of one case grows."""
    return (
        f"{row['case']}: {row['MB per 100, mean']:.2f} MB per 100 rollout batches ({row['MB per 100, 5 %']:.2f} to "
        f"{row['MB per 100, 95 %']:.2f}, median {row['MB per 100, median']:.2f}), in use "
        f"{row['MB in use per 100, median']:.3f}"
    )


def every_tenth(batches: list[dict[str, float]]) -> list[dict[str, float]]:
    """The series of a case that goes to the result file."""
    return [{kind: batch[kind] for kind in KINDS} for batch in batches[::10]]


def main() -> None:
    args = common.arguments(__doc__, seconds=(140.0, 5.0, "time of each case after its start"))
    load = os.getloadavg()[0]

    rows: list[dict[str, Any]] = []
    series: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", 256, 2, 512)
        for number, (scheme, lora) in enumerate(CASES):
            name = scheme + (", LoRA" if lora else "")
            worker = common.Worker(soak, path, f"{folder}/{number}", scheme, lora, args.seconds)
            batches = worker.wait()
            worker.close()

            series[name] = every_tenth(batches)
            rows.append(row_of(name, batches))
            # After each case, so that an end before the last one loses only those that did not run.
            headlines = [headline_of(row) for row in rows]
            common.report("bench_soak", args, headlines, rows, load, every_tenth_batch=series)


if __name__ == "__main__":
    main()
