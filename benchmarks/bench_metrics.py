"""What the metrics cost: the step with them, and of the same trainer with the measuring functions left out.

Claim: at most 1 % of a step, and one collective for each micro-batch. Measured in one trainer, whose rollout batches
are taken with and without in turns; the time within the functions themselves says the same with less noise.
"""

from __future__ import annotations

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


class Switch:
    """
    Lets the measuring functions of a trainer run, with their seconds and collectives counted, or leaves them out.
    """

    def __init__(self, trainer: Any) -> None:
        self.on = True
        self.seconds: dict[str, float] = defaultdict(float)
        self.collectives: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self._running = "the rest"
        for name, (attribute, owner_of) in MEASURED.items():
            owner = owner_of(trainer)
            setattr(owner, attribute, self._counted(name, getattr(owner, attribute)))
        gather = trainer.accelerator.gather

        def counted_gather(tensor: Any) -> Any:
            self.collectives[self._running] += self.on
            return gather(tensor)

        trainer.accelerator.gather = counted_gather

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return {} if name == "flips of quantized weights" else None
            outer, self._running, start = self._running, name, time.perf_counter()
            result = function(*args, **kwargs)
            spent = time.perf_counter() - start
            self.seconds[name] += spent
            self.seconds[outer] -= spent  # one of them calls another; "the rest" is not read
            self.calls[name] += 1
            self._running = outer
            return result

        return call


def train(path: str, folder: str, args: Any) -> tuple[Switch, common.Times]:
    """Seconds of the rollout batches with and without, in pairs that start with the one and the other in turn."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback

    from qarl_trl import QaRLConfig, QaRLTrainer

    times: common.Times = {"with": [], "without": []}

    class Turns(TrainerCallback):
        start = 0.0

        def on_step_begin(self, config: Any, state: Any, control: Any, **kwargs: Any) -> None:
            done, within = divmod(state.global_step, args.updates)
            if within:
                return
            now = time.perf_counter()
            if done > 1:  # the first rollout batch warms up
                times["with" if switch.on else "without"].append(now - self.start)
            pair, second = divmod(done - 1, 2)
            switch.on = done == 0 or (pair + second) % 2 == 0
            if done == 1:
                for counts in (switch.seconds, switch.collectives, switch.calls):
                    counts.clear()
            self.start = time.perf_counter()

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
        max_steps=args.updates * (2 * args.pairs + 1) + 1,  # the last ends the last pair
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": f"{10 + i}+{99 - i}="} for i in range(64)])
    trainer = QaRLTrainer(path, distinct_characters, config, train_dataset=prompts)
    switch = Switch(trainer)
    trainer.remove_callback(PrinterCallback)
    trainer.callback_handler.callbacks.insert(0, Turns())
    trainer.train()
    return switch, times


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
    whole = sum(times["with"])
    rows = [
        {
            "what": name,
            "share of the step": switch.seconds[name] / whole,
            "milliseconds a call": 1e3 * switch.seconds[name] / switch.calls[name],
            "collectives a call": switch.collectives[name] / switch.calls[name],
        }
        for name in MEASURED
    ]
    share = sum(switch.seconds[name] for name in MEASURED) / whole
    compared = common.ratio(times, "with", "without")
    headlines = [
        f"time within the measuring functions: {share:.2%} of the step {common.verdict(share, GOAL)}",
        f"with all of it / without: {compared['ratio']:.3f} ({compared['quartile_low']:.3f} to "
        f"{compared['quartile_high']:.3f})",
        f"other collectives in the same steps: {switch.collectives['the rest'] / switch.calls['logp_diff']:.0f} a "
        "rollout batch",
    ]
    common.report("bench_metrics", args, headlines, rows, load, times=times)


if __name__ == "__main__":
    main()
