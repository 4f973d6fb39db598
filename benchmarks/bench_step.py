"""Whole training step of `QaRLTrainer`, low-bit against the same trainer with quantization off.

Claim: none about speed on a CPU, where 4-bit arithmetic has no unit of its own: here the figures show that the parts
fit together and where the time goes. The paper's 1.3x is a GPU figure, with a rollout that is bound by memory
bandwidth: not run here.

One rollout batch, the updates on it and the sync before it make a cycle; the trainers live at once, each in its own
process, and take turns cycle by cycle. Completions have the same length in all of them, so that the tokens are equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common


BASE = "bf16"
ARMS: dict[str, dict[str, Any]] = {
    BASE: {"quant_scheme": None},
    "W4A16": {"quant_scheme": "W4A16"},
    "FP8_DYNAMIC": {"quant_scheme": "FP8_DYNAMIC"},
    "W4A16, quantize_learner=False": {"quant_scheme": "W4A16", "quantize_learner": False},
}
PARTS = ("rollout", "sync", "update")

# Of each arm, for each of its cycles: seconds of the parts, and tokens of a completion in the mean.
Cycles = dict[str, list[dict[str, float]]]


# In the process of one arm ------------------------------------------------------------------------------------------


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """
    A reward that the samples of a group disagree on.

    Args:
        completions: The texts.

    Returns:
        For each text its number of different characters.
    """
    return [float(len(set(completion))) for completion in completions]


def last_cycle(log: list[dict[str, Any]], updates: int) -> dict[str, float]:
    """
    Sum up the last cycle of a trainer.

    Args:
        log: The trainer's log history.
        updates: Number of updates of a rollout batch.

    Returns:
        Seconds of each part, and `length`, tokens of a completion in the mean.

    Raises:
        RuntimeError: if updates are missing.
    """
    rows = [row for row in log if "time/update" in row][-updates:]
    if len(rows) != updates:
        raise RuntimeError(f"{len(rows)} of {updates} updates were logged with their times")

    cycle = {part: sum(row[f"time/{part}"] for row in rows) for part in PARTS}
    cycle["length"] = rows[0]["completions/mean_length"]
    return cycle


def train(tick: Any, path: str, folder: str, cycles: int, updates: int, sizes: dict[str, int], changes: dict) -> None:
    """A trainer that waits before each rollout and reports `time/*` of the updates since the last one."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from qarl_trl import QaRLConfig, QaRLTrainer

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                tick()
            elif state.global_step % updates == 0:
                tick(last_cycle(state.log_history, updates))

    args = QaRLConfig(
        output_dir=folder,
        use_cpu=True,
        use_vllm=True,
        vllm_engine_kwargs={"enforce_eager": True},
        vllm_max_model_length=sizes["length"] + 32,
        max_completion_length=sizes["length"],
        generation_kwargs={"ignore_eos": True},
        num_generations=8,
        per_device_train_batch_size=sizes["batch"],
        steps_per_generation=updates,
        max_steps=updates * (cycles + 1),
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **changes,
    )
    prompts = Dataset.from_list([{"prompt": f"{10 + number}+{99 - number}="} for number in range(64)])
    trainer = QaRLTrainer(path, distinct_characters, args, train_dataset=prompts)
    trainer.remove_callback(PrinterCallback)
    # First in line, so that the trainer's own clock starts after the wait.
    trainer.callback_handler.callbacks.insert(0, Turns())
    trainer.train()


# Here ---------------------------------------------------------------------------------------------------------------


class Recorder:
    """An arm's trainer, which runs one cycle at a time, and all of its cycles so far."""

    def __init__(self, worker: common.Worker) -> None:
        self.worker = worker
        self.cycles: list[dict[str, float]] = []

    def run(self) -> float:
        """Run one cycle. Returns the seconds of its parts together."""
        cycle = self.worker.step()
        self.cycles.append(cycle)
        return sum(cycle[part] for part in PARTS)


def measure(args: argparse.Namespace) -> tuple[common.Times, Cycles]:
    """Seconds of each arm's cycles, which take turns, and the cycles with those that are not timed."""
    sizes = {"length": args.length, "batch": args.batch}
    recorders: dict[str, Recorder] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner)
        try:
            for index, (name, changes) in enumerate(ARMS.items()):
                run = str(Path(folder) / f"run{index}")
                worker = common.Worker(train, path, run, args.rounds + 1, args.updates, sizes, changes)
                recorders[name] = Recorder(worker)
                worker.wait()

            times = common.interleave({name: recorder.run for name, recorder in recorders.items()}, args.rounds)
        finally:
            for recorder in recorders.values():
                recorder.worker.close()

    return times, {name: recorder.cycles for name, recorder in recorders.items()}


def check_lengths(cycles: Cycles, length: int) -> None:
    """Raise `RuntimeError` unless all completions had `length` tokens."""
    lengths = set()
    for of_arm in cycles.values():
        lengths |= {cycle["length"] for cycle in of_arm}
    if lengths != {float(length)}:
        raise RuntimeError(f"The trainers did not sample the same number of tokens: mean lengths {sorted(lengths)}")


def seconds_of(part: str, cycles: list[dict[str, float]]) -> list[float]:
    """Seconds of a part in each cycle that is timed."""
    # The first cycle warms up.
    return [cycle[part] for cycle in cycles[1:]]


def row_of(name: str, times: common.Times, cycles: Cycles) -> dict[str, Any]:
    """
    The line of one arm.

    Args:
        name: Of the arm.
        times: Seconds of the cycles of all arms.
        cycles: Seconds of their parts.
    """
    whole = common.ratio(times, name, BASE)
    shares: dict[str, float] = {}
    against: dict[str, float] = {}
    for part in PARTS:
        seconds = seconds_of(part, cycles[name])
        base_seconds = seconds_of(part, cycles[BASE])
        of_part = zip(seconds, times[name], strict=True)
        shares[part] = statistics.median(spent / in_all for spent, in_all in of_part)
        compared = common.ratio({"arm": seconds, "base": base_seconds}, "arm", "base")
        against[f"{part} / bf16"] = compared["ratio"]

    return {"arm": name, "step / bf16": whole["ratio"], **shares, **against, "seconds": whole["seconds"]}


def headline_of(row: dict[str, Any]) -> str:
    """The time of one arm beside that without quantization, and where it goes."""
    shares = [f"{part} {row[part]:.1%}" for part in PARTS]
    return f"{row['arm']} / quantization off: {row['step / bf16']:.2f}x; of its step {', '.join(shares)}"


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(512, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(1536, 512, "width of the MLP"),
        length=(64, 16, "tokens of a completion"),
        batch=(32, 8, "completions of an update"),
        updates=(2, 2, "updates of a rollout batch"),
        rounds=(12, 2, "cycles timed, after one that is not"),
    )
    load = os.getloadavg()[0]

    times, cycles = measure(args)
    check_lengths(cycles, args.length)

    rows = [row_of(name, times, cycles) for name in ARMS]
    headlines = [headline_of(row) for row in rows if row["arm"] != BASE]
    headlines.append("On a CPU this shows correctness, not speed. The paper's 1.3x is a GPU figure: not run.")
    common.report("bench_step", args, headlines, rows, load, times=times, cycles=cycles)


if __name__ == "__main__":
    main()
