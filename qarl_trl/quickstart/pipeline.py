"""The quickstart's steps: warm start, QaRL on a real 4-bit engine, and the proof that what was trained is what is served."""

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
from tqdm import tqdm
from transformers import PrinterCallback

from .. import QaRLConfig, QaRLTrainer
from ..processes import in_fresh_process
from ..tools.report.command import write_report
from .evaluate import accuracy, answers_in_training, answers_of_checkpoint
from .model import make_model, make_tokenizer
from .report import TrainingBar, logged, print_summary
from .task import correct, distinct_problems
from .warmstart import STEPS, warm_start


HELD_OUT = 256
COMPLETIONS = 128  # a rollout batch: 16 problems, 8 answers each
UPDATES_PER_ROLLOUT = 4
# TRL gives its engine room for one rollout batch; batch shapes decide which kernels run, so a fresh engine gets the same.
MAX_NUM_SEQS = COMPLETIONS
LIMIT_S = 1800  # of a step in another process, which takes well under a minute on two cores


def run(options: argparse.Namespace) -> None:
    """Run all steps with the options of `python -m qarl_trl.quickstart`."""
    start = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    output = Path(options.output_dir)
    held_out = distinct_problems(HELD_OUT, seed=1, held_out=True)

    print("1/4 supervised warm start", flush=True)
    model, tokenizer = make_model(options.seed), make_tokenizer()
    with tqdm(total=STEPS) as bar:
        warm_start(model, tokenizer, options.seed, progress=lambda step, loss: bar.update())
    with tempfile.TemporaryDirectory() as base:
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
        # A vLLM engine keeps global state in its process, so each but the training one gets a process of its own.
        step = "2/4 the bfloat16 floor: one rollout with quantization off"
        print(step, flush=True)
        floor = in_fresh_process(step, _measure_floor, base, options, limit_s=LIMIT_S)
        print(f"3/4 QaRL: {options.scheme} engine, {options.scheme} learner, TBPO", flush=True)
        trainer = _make_trainer(base, options)
        before = accuracy(answers_in_training(trainer, held_out), held_out)
        trainer.train()
        answers = answers_in_training(trainer, held_out)
        trainer.save_model()
    step = "4/4 the saved checkpoint in a fresh vLLM process"
    print(step, flush=True)
    fresh = in_fresh_process(step, answers_of_checkpoint, output, held_out, MAX_NUM_SEQS, limit_s=LIMIT_S)

    log, after = trainer.state.log_history, accuracy(answers, held_out)
    seconds = {part: sum(logged(log, f"time/{part}")) for part in ("rollout", "sync", "update")}
    summary = {
        "seed": options.seed,
        "scheme": options.scheme,
        "held_out_problems": HELD_OUT,
        "accuracy_before": before,
        "accuracy_after": after,
        "logp_diff": _mean_logp_diff(trainer),
        "logp_diff_bf16_floor": floor,
        "time_shares": {part: value / sum(seconds.values()) for part, value in seconds.items()},
        "fresh_engine_answers_equal": fresh == answers,
        "minutes": (time.perf_counter() - start) / 60,
    }
    (output / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    (output / "quickstart.json").write_text(json.dumps(summary, indent=2) + "\n")
    write_report([str(output)])
    print_summary(summary, output)
    if fresh != answers:
        sys.exit("The fresh engine answers differently: the checkpoint is not what was trained. Please report this.")
    if not options.short and after < before + 0.15:
        sys.exit("Held-out accuracy rose by less than 15 points. Please report the seed.")


def _make_trainer(base: str, options: argparse.Namespace, **changes: Any) -> QaRLTrainer:
    settings: dict[str, Any] = {
        "output_dir": options.output_dir,
        "quant_scheme": options.scheme,
        "use_vllm": True,
        "use_cpu": True,
        "vllm_max_model_length": 64,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": 16,
        "num_generations": 8,
        "per_device_train_batch_size": COMPLETIONS // UPDATES_PER_ROLLOUT,
        "steps_per_generation": UPDATES_PER_ROLLOUT,
        "max_steps": (4 if options.short else options.rollouts) * UPDATES_PER_ROLLOUT,
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
    trainer = QaRLTrainer(
        base,
        reward_funcs=correct,
        args=QaRLConfig(**settings | changes),
        train_dataset=Dataset.from_list(distinct_problems(4096, seed=2)),
        callbacks=[TrainingBar()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _measure_floor(base: str, options: argparse.Namespace) -> float:
    """Mean log-prob mismatch of the same model with quantization off, over two rollouts without learning."""
    folder, steps = str(Path(base) / "floor"), 2 * UPDATES_PER_ROLLOUT
    trainer = _make_trainer(base, options, output_dir=folder, quant_scheme="none", learning_rate=0.0, max_steps=steps)
    trainer.train()
    return _mean_logp_diff(trainer)


def _mean_logp_diff(trainer: QaRLTrainer) -> float:
    return float(np.mean(logged(trainer.state.log_history, "mismatch/logp_diff_mean")))
