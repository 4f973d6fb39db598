"""`make quickstart`: a small model learns by RL on low-bit rollouts, on a CPU, and the saved model is served.

1. A supervised warm start, where you would load a base model. 2. The same rollout without quantization, for
comparison. 3. QaRL. 4. The saved checkpoint in a fresh vLLM process: it must answer what the training engine answered.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any


# Before torch and vLLM are imported: threads do not spin, no compiler is needed, and only errors are said.
for variable, value in {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_MININTERVAL": "0.1" if sys.stderr.isatty() else "20",  # seconds; a log gets a few lines only
}.items():
    os.environ.setdefault(variable, value)
warnings.simplefilter("ignore")
logging.getLogger("vllm").setLevel(
    logging.ERROR
)  # its level is set only when an engine starts, after its first warnings

import transformers
from datasets import Dataset, disable_progress_bars
from sums import correct, distinct_problems, make_model, make_tokenizer
from transformers import PrinterCallback, ProgressCallback
from warm_start import STEPS, warm_start

from qarl_trl import QaRLConfig, QaRLTrainer, cli
from qarl_trl.processes import in_fresh_process
from qarl_trl.rollout.cpu_support import check_engine_cpu, cpu_flags, why_no_engine
from qarl_trl.tools.evaluate.sample import start_engine


COMPLETIONS = 128  # a rollout batch: 16 problems, 8 answers each
UPDATES = 4  # of a rollout batch
LIMIT_S = 1800  # of a step in another process, which takes well under a minute on two cores


def settings(options: argparse.Namespace, **changes: Any) -> QaRLConfig:
    """What the run trains with."""
    values: dict[str, Any] = {
        "output_dir": options.output_dir,
        "quant_scheme": options.scheme,
        "use_vllm": True,
        "use_cpu": True,
        "vllm_max_model_length": 64,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": 16,
        "num_generations": 8,
        "per_device_train_batch_size": COMPLETIONS // UPDATES,
        "steps_per_generation": UPDATES,
        "max_steps": (4 if options.short else options.rollouts) * UPDATES,
        "learning_rate": 1.5e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": UPDATES,
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
    return QaRLConfig(**values | changes)


def make_trainer(base: Path, args: QaRLConfig) -> QaRLTrainer:
    """The trainer, as it would be made of any model, reward and dataset with prompts."""
    train_dataset = Dataset.from_list(distinct_problems(4096, seed=2))
    trainer = QaRLTrainer(str(base), correct, args, train_dataset, callbacks=[TrainingBar()])
    trainer.remove_callback(PrinterCallback)
    return trainer


class TrainingBar(ProgressCallback):
    """transformers' bar, with the reward and the mismatch in place of the whole log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            text = f"reward {logs['reward']:.2f}, mismatch {logs['mismatch/logp_diff_mean']:.0e}"
            self.training_bar.set_postfix_str(text, refresh=False)  # shown with the next step


def measure_floor(base: Path, args: QaRLConfig) -> float:
    """Mean log-prob mismatch over two rollouts without learning."""
    trainer = make_trainer(base, args)
    trainer.train()
    return mean(trainer.state.log_history, "mismatch/logp_diff_mean")


def answer(llm: Any, problems: list[dict[str, Any]]) -> list[str]:
    """Greedy answers of a `vllm.LLM`, never of the learner."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate([problem["prompt"] for problem in problems], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def answer_in_training(trainer: QaRLTrainer, problems: list[dict[str, Any]]) -> list[str]:
    """Sync the learner's current low-bit weights to the training engine, then answer."""
    trainer.vllm_generation.sync_weights()
    return answer(trainer.vllm_generation.llm, problems)


def answer_afresh(checkpoint: Path, problems: list[dict[str, Any]]) -> list[str]:
    """Answers of an engine that knows nothing but the folder; run it in a process of its own."""
    # TRL gives its engine room for one rollout batch. Batch shapes decide which kernels run, so this one gets the
    # same.
    shapes = {"max_model_len": 64, "max_num_seqs": COMPLETIONS, "max_num_batched_tokens": 4096}
    llm = start_engine(str(checkpoint), logprobs_mode="processed_logprobs", use_tqdm_on_load=False, **shapes)
    return answer(llm, problems)


def accuracy(answers: list[str], problems: list[dict[str, Any]]) -> float:
    """Share of right answers."""
    return sum(correct(answers, [problem["answer"] for problem in problems])) / len(answers)


def mean(log: list[dict[str, Any]], name: str) -> float:
    """Mean of `name` over the rows of the log that have it."""
    values = [row[name] for row in log if name in row]
    return sum(values) / len(values)


def run(options: argparse.Namespace) -> None:
    """All four steps, then the report."""
    start, output = time.perf_counter(), Path(options.output_dir)
    args, base, held_out = settings(options), output / "sums-1.2M-base", distinct_problems(256, seed=1, held_out=True)

    print("1/4 supervised warm start", flush=True)
    model, tokenizer = make_model(options.seed), make_tokenizer()
    warm_start(model, tokenizer, options.seed, steps=60 if options.short else STEPS)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)

    # A vLLM engine keeps global state in its process, so each but the training one gets a process of its own.
    step = "2/4 the bfloat16 floor: one rollout with quantization off"
    print(step, flush=True)
    off = {"output_dir": str(output / "floor"), "quant_scheme": "none", "learning_rate": 0.0, "max_steps": 2 * UPDATES}
    floor = in_fresh_process(step, measure_floor, base, settings(options, **off), limit_s=LIMIT_S)

    print(f"3/4 QaRL: {options.scheme} engine, {options.scheme} learner, TBPO", flush=True)
    trainer = make_trainer(base, args)
    before = accuracy(answer_in_training(trainer, held_out), held_out)
    trainer.train()
    answers = answer_in_training(trainer, held_out)
    trainer.save_model()

    step = "4/4 the saved checkpoint in a fresh vLLM process"
    print(step, flush=True)
    fresh = in_fresh_process(step, answer_afresh, output, held_out, limit_s=LIMIT_S)

    log, after = trainer.state.log_history, accuracy(answers, held_out)
    summary = {
        "seed": options.seed,
        "scheme": options.scheme,
        "held_out_problems": len(held_out),
        "accuracy_before": before,
        "accuracy_after": after,
        "logp_diff": mean(log, "mismatch/logp_diff_mean"),
        "logp_diff_bf16_floor": floor,
        "fresh_engine_answers_equal": fresh == answers,
        "minutes": (time.perf_counter() - start) / 60,
    }
    (output / "quickstart.json").write_text(json.dumps(summary, indent=2) + "\n")
    log += [{"step": 0, "eval_reward": before}, {"step": trainer.state.global_step, "eval_reward": after}]
    trainer.save_state()
    cli.main(["report", str(output)])
    for name, value in summary.items():
        print(f"{name:<28}{value:.4g}" if isinstance(value, float) else f"{name:<28}{value}")
    print(f"models and report in {output}")
    if fresh != answers:
        sys.exit("The fresh engine answers differently: the checkpoint is not what was trained. Please report this.")
    if not options.short and after < before + 0.15:
        sys.exit("Held-out accuracy rose by less than 15 points. Please report the seed.")


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument("--output_dir", default="runs/quickstart", help="where the models and the report go")
    no_four_bits = why_no_engine(cpu_flags(), platform.machine(), four_bits=True)
    default = "FP8_DYNAMIC" if no_four_bits else "W4A16"
    parser.add_argument("--scheme", default=default, help="quant_scheme of the run, %(default)s on this CPU")
    parser.add_argument("--rollouts", type=int, default=30, help="rollout batches of 128 completions")
    parser.add_argument("--short", action="store_true", help="a few rollouts only, for CI")
    options = parser.parse_args()
    check_engine_cpu("cpu", four_bits=options.scheme.startswith("W4A16"))
    if no_four_bits:
        print(f"{options.scheme} instead of W4A16, whose kernel in vLLM needs a CPU with AVX-512.")
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    print("About 3 minutes on 2 idle cores with 30 rollouts, less with --short.", flush=True)
    run(options)


if __name__ == "__main__":
    import quickstart  # what runs in another process is found by its module's name, which `__main__` is not

    quickstart.main()
