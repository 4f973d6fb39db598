"""What the metrics cost: the step with them, and of the same trainer with the measuring functions left out.

Claim: at most 1 % of a step, and one collective for each micro-batch. Measured in one trainer, whose rollout batches
are taken with and without in turns; the time within the functions themselves says the same with less noise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from bench_step import distinct_characters


GOAL = 0.01
# What measures, by what it measures: the owner's attribute, and the owner.
MEASURED = {
    "ratios, error tokens": ("_measure_ratios", lambda trainer: trainer),
    "logp_diff": ("_log_mismatch", lambda trainer: trainer),
    "flips of quantized weights": ("update", lambda trainer: trainer._weight_flips),
}
# What runs while none of them does.
REST = "the rest"


class Switch:
    """
    Lets the measuring functions of a trainer run, with their seconds and collectives counted, or leaves them out.
    """

    def __init__(self, trainer: Any) -> None:
        self.on = True
        self.seconds: dict[str, float] = defaultdict(float)
        self.collectives: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self._running = REST

        for name, (attribute, owner_of) in MEASURED.items():
            owner = owner_of(trainer)
            setattr(owner, attribute, self._counted(name, getattr(owner, attribute)))
        trainer.accelerator.gather = self._counted_gather(trainer.accelerator.gather)

    def clear(self) -> None:
        """Forget what was counted so far."""
        self.seconds.clear()
        self.collectives.clear()
        self.calls.clear()

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A measuring function that counts, or does nothing."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                # The flips are a dictionary of metrics, the others return nothing.
                return {} if name == "flips of quantized weights" else None

            outer = self._running
            self._running = name
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spent = time.perf_counter() - start

            self.seconds[name] += spent
            # One of them calls another; those of the rest are not read.
            self.seconds[outer] -= spent
            self.calls[name] += 1
            self._running = outer
            return result

        return call

    def _counted_gather(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        """The accelerator's collective, counted for the function that calls it."""

        def call(tensor: Any) -> Any:
            if self.on:
                self.collectives[self._running] += 1
            return gather(tensor)

        return call


def make_turns(switch: Switch, updates: int, times: common.Times) -> Any:
    """
    Make a callback that turns the measuring on and off, in pairs that start with the one and the other in turn.

    Args:
        switch: Of the trainer.
        updates: Number of updates of a rollout batch.
        times: Gets the seconds of each rollout batch after the first, `with` and `without`.
    """
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        start = 0.0

        def on_step_begin(self, config: Any, state: Any, control: Any, **kwargs: Any) -> None:
            batches, update = divmod(state.global_step, updates)
            if update > 0:
                return

            now = time.perf_counter()
            # The first rollout batch warms up.
            if batches > 1:
                times["with" if switch.on else "without"].append(now - self.start)
            if batches == 1:
                switch.clear()

            pair, second = divmod(batches - 1, 2)
            switch.on = batches == 0 or (pair + second) % 2 == 0
            self.start = time.perf_counter()

    return Turns()


def train(path: str, folder: str, args: argparse.Namespace) -> tuple[Switch, common.Times]:
    """Train a model. Returns what was counted, and the seconds of the rollout batches with and without."""
    from datasets import Dataset
    from transformers import PrinterCallback

    from qarl_trl import QaRLConfig, QaRLTrainer

    config = QaRLConfig(
        output_dir=folder,
        use_cpu=True,
        use_vllm=True,
        vllm_engine_kwargs={"enforce_eager": True},
        vllm_max_model_length=args.length + 32,
        max_completion_length=args.length,
        generation_kwargs={"ignore_eos": True},
        num_generations=8,
        per_device_train_batch_size=args.batch,
        steps_per_generation=args.updates,
        # The last step ends the last pair.
        max_steps=args.updates * (2 * args.pairs + 1) + 1,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": f"{10 + number}+{99 - number}="} for number in range(64)])
    trainer = QaRLTrainer(path, distinct_characters, config, train_dataset=prompts)

    switch = Switch(trainer)
    times: common.Times = {"with": [], "without": []}
    trainer.remove_callback(PrinterCallback)
    trainer.callback_handler.callbacks.insert(0, make_turns(switch, args.updates, times))
    trainer.train()
    return switch, times


def rows_of(switch: Switch, whole: float) -> list[dict[str, Any]]:
    """
    The table: a line for each measuring function.

    Args:
        switch: What was counted.
        whole: Seconds of all rollout batches with the functions.
    """
    rows = []
    for name in MEASURED:
        calls = switch.calls[name]
        rows.append(
            {
                "what": name,
                "share of the step": switch.seconds[name] / whole,
                "milliseconds a call": 1e3 * switch.seconds[name] / calls,
                "collectives a call": switch.collectives[name] / calls,
            }
        )
    return rows


def headlines_of(switch: Switch, times: common.Times) -> list[str]:
    """The claim, the same by the seconds of whole rollout batches, and what else is collective."""
    share = sum(switch.seconds[name] for name in MEASURED) / sum(times["with"])
    compared = common.ratio(times, "with", "without")
    others = switch.collectives[REST] / switch.calls["logp_diff"]
    return [
        f"time within the measuring functions: {share:.2%} of the step {common.verdict(share, GOAL)}",
        f"with all of it / without: {compared['ratio']:.3f} ({compared['quartile_low']:.3f} to "
        f"{compared['quartile_high']:.3f})",
        f"other collectives in the same steps: {others:.0f} a rollout batch",
    ]


def main() -> None:
    args = common.arguments(
        __doc__,
        hidden=(256, 256, "model width"),
        layers=(4, 2, "decoder layers"),
        inner=(768, 256, "width of the MLP"),
        length=(256, 64, "tokens of a completion"),
        batch=(32, 8, "completions of an update"),
        updates=(2, 2, "updates of a rollout batch"),
        pairs=(3, 1, "rollout batches with and without, after one that is not counted"),
    )
    load = os.getloadavg()[0]

    with tempfile.TemporaryDirectory() as folder:
        path = common.save_model(Path(folder) / "model", args.hidden, args.layers, args.inner)
        switch, times = train(path, folder, args)

    rows = rows_of(switch, sum(times["with"]))
    common.report("bench_metrics", args, headlines_of(switch, times), rows, load, times=times)


if __name__ == "__main__":
    main()
