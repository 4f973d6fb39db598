"""Whole training step of `QaRLTrainer`, low-bit against the same trainer with quantization off.

Claim: none about speed on a CPU, where 4-bit arithmetic has no unit of its own: here the figures show that the parts
fit together and where the time goes. The paper's 1.3x is a GPU figure, with a rollout that is bound by memory
bandwidth: not run here.

One rollout batch, the updates on it and the sync before it make a cycle; the trainers live at once, each in its own
process, and take turns cycle by cycle. Completions have the same length in all of them, so that the tokens are equal.
"""

from __future__ import annotations

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


def distinct_characters(completions: list[str], **_: Any) -> list[float]:
    """A reward that the samples of a group disagree on."""
    return [float(len(set(completion))) for completion in completions]


def train(tick: Any, path: str, folder: str, cycles: int, updates: int, sizes: dict[str, int], changes: dict) -> None:
    """A trainer that waits before each rollout and reports `time/*` of the updates since the last one."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from qarl_trl import QaRLConfig, QaRLTrainer

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % updates == 0:
                tick(self.last_cycle(state) if state.global_step else None)

        @staticmethod
        def last_cycle(state: Any) -> dict[str, float]:
            rows = [row for row in state.log_history if "time/update" in row][-updates:]
            if len(rows) != updates:
                raise RuntimeError(f"{len(rows)} of {updates} updates were logged with their times")
            result = {part: sum(row[f"time/{part}"] for row in rows) for part in PARTS}
            return result | {"length": rows[0]["completions/mean_length"]}

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
    prompts = Dataset.from_list([{"prompt": f"{10 + i}+{99 - i}="} for i in range(64)])
    trainer = QaRLTrainer(path, distinct_characters, args, train_dataset=prompts)
    trainer.remove_callback(PrinterCallback)
    # First in line, so that the trainer's own clock starts after the wait.
    trainer.callback_handler.callbacks.insert(0, Turns())
    trainer.train()


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
    workers: dict[str, common.Worker] = {}
    cycles: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    sizes = {"length": args.length, "batch": args.batch}
    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner)
        try:
            for index, (name, changes) in enumerate(ARMS.items()):
                run = str(Path(folder) / f"run{index}")
                more = (args.rounds + 1, args.updates, sizes, changes)
                workers[name] = common.Worker(train, path, run, *more)
                workers[name].wait()

            def cycle(name: str) -> float:
                result = workers[name].step()
                cycles[name].append(result)
                return sum(result[part] for part in PARTS)

            times = common.interleave({name: (lambda name=name: cycle(name)) for name in ARMS}, args.rounds)
        finally:
            for worker in workers.values():
                worker.close()
    lengths = {c["length"] for done in cycles.values() for c in done}
    if lengths != {float(args.length)}:
        raise RuntimeError(f"The trainers did not sample the same number of tokens: mean lengths {sorted(lengths)}")
    rows, headlines = [], []
    for name in ARMS:
        whole = common.ratio(times, name, BASE)
        parts = {part: [c[part] for c in cycles[name][1:]] for part in PARTS}  # the first cycle warms up
        base = {part: [c[part] for c in cycles[BASE][1:]] for part in PARTS}
        shares = {
            part: statistics.median(p / t for p, t in zip(parts[part], times[name], strict=True)) for part in PARTS
        }
        against = {
            f"{part} / bf16": common.ratio({"a": parts[part], "b": base[part]}, "a", "b")["ratio"] for part in PARTS
        }
        rows.append({"arm": name, "step / bf16": whole["ratio"], **shares, **against, "seconds": whole["seconds"]})
        if name != BASE:
            headlines.append(
                f"{name} / quantization off: {whole['ratio']:.2f}x; of its step "
                + ", ".join(f"{part} {shares[part]:.1%}" for part in PARTS)
            )
    headlines.append("On a CPU this shows correctness, not speed. The paper's 1.3x is a GPU figure: not run.")
    common.report("bench_step", args, headlines, rows, load, times=times, cycles=cycles)


if __name__ == "__main__":
    main()
