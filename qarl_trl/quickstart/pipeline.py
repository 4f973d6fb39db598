"""The quickstart's steps: warm start, QaRL on a real 4-bit engine, and the proof that what was trained is what is served.

Invariant: every number in the closing table was measured in this run, accuracy through the low-bit engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback

from .. import QaRLConfig, QaRLTrainer
from .evaluate import greedy_in_training_engine, greedy_of_checkpoint, in_fresh_process
from .model import make_model, make_tokenizer
from .report import Bar, TrainingBar, column, print_table, save_picture, time_shares
from .task import correct, distinct_problems
from .warmstart import STEPS, warm_start


HELD_OUT = 256
ENGINE_LENGTH = 64
COMPLETIONS = 128  # a rollout batch: 16 problems, 8 answers each
UPDATES_PER_ROLLOUT = 4
# TRL gives its engine room for one rollout batch; batch shapes decide which kernels run, so a fresh engine gets the same.
MAX_NUM_SEQS = COMPLETIONS


def run(options: argparse.Namespace) -> None:
    """Run all steps with the options of `qarl_trl.quickstart.run`."""
    start = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    output = Path(options.output_dir)
    held_out = distinct_problems(HELD_OUT, seed=1, held_out=True)

    print("1/4 supervised warm start", flush=True)
    model, tokenizer = make_model(options.seed), make_tokenizer()
    bar = Bar(STEPS)
    warm_start(model, tokenizer, options.seed, progress=lambda step, loss: bar.update(step, f"loss {loss:.2f}"))
    bar.close()
    with tempfile.TemporaryDirectory() as base:
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        print("2/4 the bfloat16 floor: one rollout with quantization off", flush=True)
        floor = in_fresh_process(_measure_floor, base, options)
        print(f"3/4 QaRL: {options.scheme} engine, {options.scheme} learner, TBPO", flush=True)
        trainer = _make_trainer(base, options)
        before = greedy_in_training_engine(trainer, held_out)
        trainer.train()
        after = greedy_in_training_engine(trainer, held_out)
        trainer.save_model()
    print("4/4 the saved checkpoint in a fresh vLLM process", flush=True)
    fresh = in_fresh_process(greedy_of_checkpoint, output, held_out, MAX_NUM_SEQS)

    log = trainer.state.log_history
    save_picture(log, before.accuracy, after.accuracy, floor, output / "report.png")
    summary = {
        "seed": options.seed,
        "scheme": options.scheme,
        "held_out_problems": HELD_OUT,
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "gap": float(np.mean(column(log, "mismatch/logp_gap_mean")[1])),
        "gap_bf16_floor": floor,
        "time_shares": time_shares(log),
        "fresh_engine_answers_equal": fresh.answers == after.answers,
        "minutes": (time.perf_counter() - start) / 60,
    }
    (output / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    (output / "quickstart.json").write_text(json.dumps(summary, indent=2) + "\n")
    _show(summary, output)
    if fresh.answers != after.answers:
        sys.exit("The fresh engine answers differently: the checkpoint is not what was trained. Please report this.")
    if not options.short and after.accuracy < before.accuracy + 0.15:
        sys.exit("Held-out accuracy rose by less than 15 points. Please report the seed.")


def _make_trainer(base: str, options: argparse.Namespace, **changes: Any) -> Any:
    rollouts = 4 if options.short else options.rollouts
    settings: dict[str, Any] = {
        "output_dir": options.output_dir,
        "quant_scheme": options.scheme,
        "use_vllm": True,
        "use_cpu": True,
        "vllm_max_model_length": ENGINE_LENGTH,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": 16,
        "num_generations": 8,
        "per_device_train_batch_size": COMPLETIONS // UPDATES_PER_ROLLOUT,
        "steps_per_generation": UPDATES_PER_ROLLOUT,
        "max_steps": rollouts * UPDATES_PER_ROLLOUT,
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": UPDATES_PER_ROLLOUT,
        # The paper's bands belong to a learning rate of 1e-6 and to answers of thousands of tokens.
        "tbpo_epsilon_high": 0.008,
        "tbpo_delta_low": 0.006,
        "tbpo_delta_high": 0.014,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": options.seed,
    }
    args = QaRLConfig(**settings | changes)
    trainer = QaRLTrainer(
        base,
        reward_funcs=correct,
        args=args,
        train_dataset=Dataset.from_list(distinct_problems(4096, seed=2)),
        callbacks=[TrainingBar(args.max_steps)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _measure_floor(base: str, options: argparse.Namespace) -> float:
    """Mean log-prob gap of the same model with quantization off, over two rollouts without learning."""
    options.output_dir = str(Path(base) / "floor")
    steps = 2 * UPDATES_PER_ROLLOUT
    trainer = _make_trainer(base, options, quant_scheme="none", learning_rate=0.0, max_steps=steps)
    trainer.train()
    return float(np.mean(column(trainer.state.log_history, "mismatch/logp_gap_mean")[1]))


def _show(summary: dict[str, Any], output: Path) -> None:
    shares = summary["time_shares"]
    print_table(
        [
            ("held-out problems", f"{summary['held_out_problems']}, answered by the {summary['scheme']} engine"),
            ("accuracy before RL", f"{summary['accuracy_before']:.1%}"),
            ("accuracy after RL", f"{summary['accuracy_after']:.1%}"),
            ("mean log-prob gap", f"{summary['gap']:.1e} nats per token (mean over the run)"),
            ("bf16 with TRL's learner", f"{summary['gap_bf16_floor']:.1e} (before RL)"),
            ("time", ", ".join(f"{part} {share:.0%}" for part, share in shares.items())),
            ("fresh engine", "identical answers" if summary["fresh_engine_answers_equal"] else "DIFFERENT ANSWERS"),
            ("checkpoint", str(output)),
            ("picture", str(output / "report.png")),
            ("took", f"{summary['minutes']:.1f} minutes"),
        ]
    )
