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
ENVIRONMENT = {
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
}
for variable, value in ENVIRONMENT.items():
    os.environ.setdefault(variable, value)
warnings.simplefilter("ignore")
# vLLM sets its own level only when an engine starts, after its first warnings.
logging.getLogger("vllm").setLevel(logging.ERROR)

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
    """What the run trains with, but for `changes`."""
    rollouts = 4 if options.short else options.rollouts

    values: dict[str, Any] = {
        "output_dir": options.output_dir,
        # Of the learner and of the engine: this one field makes a GRPO run a QaRL run.
        "quant_scheme": options.scheme,
        "use_vllm": True,
        "use_cpu": True,
        # Questions and answers are short. Without a limit the engine makes room for the model's longest text.
        "vllm_max_model_length": 64,
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": 16,
        "num_generations": 8,
        # A rollout batch is cut into as many parts as it gets updates: each part is trained on once.
        "per_device_train_batch_size": COMPLETIONS // UPDATES,
        "steps_per_generation": UPDATES,
        "max_steps": rollouts * UPDATES,
        # Far above that of a large model, so that this one learns within minutes.
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
    trainer = QaRLTrainer(
        model=str(base),
        reward_funcs=correct,
        args=args,
        train_dataset=train_dataset,
        callbacks=[TrainingBar()],
    )
    # It prints each log as a dict, between the lines of the bar.
    trainer.remove_callback(PrinterCallback)

    return trainer


class TrainingBar(ProgressCallback):
    """transformers' bar, with the reward and the mismatch in place of the whole log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # The last log of a run has its seconds, but no reward.
        if logs and "reward" in logs:
            text = f"reward {logs['reward']:.2f}, mismatch {logs['mismatch/logp_diff_mean']:.0e}"
            # The bar shows it with its next step.
            self.training_bar.set_postfix_str(text, refresh=False)


def measure_floor(base: Path, args: QaRLConfig) -> float:
    """Mean log-prob mismatch over two rollouts without learning."""
    trainer = make_trainer(base, args)
    trainer.train()

    return mean(trainer.state.log_history, "mismatch/logp_diff_mean")


def answer(llm: Any, problems: list[dict[str, Any]]) -> list[str]:
    """Greedy answers of a `vllm.LLM`, never of the learner."""
    from vllm import SamplingParams

    prompts = [problem["prompt"] for problem in problems]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate(prompts, params, use_tqdm=False)

    return [output.outputs[0].text for output in outputs]


def answer_in_training(trainer: QaRLTrainer, problems: list[dict[str, Any]]) -> list[str]:
    """Sync the learner's current low-bit weights to the training engine, then answer."""
    trainer.vllm_generation.sync_weights()
    return answer(trainer.vllm_generation.llm, problems)


def answer_afresh(checkpoint: Path, problems: list[dict[str, Any]]) -> list[str]:
    """Answers of an engine that knows nothing but the folder; run it in a process of its own."""
    llm = start_engine(
        str(checkpoint),
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=False,
        # TRL gives its engine room for one rollout batch. Batch shapes decide which kernels run, so this one gets the
        # same.
        max_model_len=64,
        max_num_seqs=COMPLETIONS,
        max_num_batched_tokens=4096,
    )

    return answer(llm, problems)


def accuracy(answers: list[str], problems: list[dict[str, Any]]) -> float:
    """Share of right answers."""
    right_answers = [problem["answer"] for problem in problems]
    rewards = correct(answers, right_answers)

    return sum(rewards) / len(answers)


def mean(log: list[dict[str, Any]], name: str) -> float:
    """Mean of `name` over the rows of the log that have it."""
    values = [row[name] for row in log if name in row]

    return sum(values) / len(values)


def run(options: argparse.Namespace) -> None:
    """All four steps, then the report."""
    start = time.perf_counter()
    output = Path(options.output_dir)
    base = output / "sums-1.2M-base"
    args = settings(options)
    held_out = distinct_problems(256, seed=1, held_out=True)

    print("1/4 supervised warm start", flush=True)
    model = make_model(options.seed)
    tokenizer = make_tokenizer()
    warm_start(model, tokenizer, options.seed, steps=60 if options.short else STEPS)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)

    # A vLLM engine keeps global state in its process, so each but the training one gets a process of its own.
    step = "2/4 the bfloat16 floor: one rollout with quantization off"
    print(step, flush=True)
    unquantized = settings(
        options,
        output_dir=str(output / "floor"),
        quant_scheme="none",
        # Nothing is learned: the run is only there for its mismatch.
        learning_rate=0.0,
        max_steps=2 * UPDATES,
    )
    floor = in_fresh_process(step, measure_floor, base, unquantized, limit_s=LIMIT_S)

    print(f"3/4 QaRL: {options.scheme} engine, {options.scheme} learner, TBPO", flush=True)
    trainer = make_trainer(base, args)
    before = accuracy(answer_in_training(trainer, held_out), held_out)
    trainer.train()
    answers = answer_in_training(trainer, held_out)
    trainer.save_model()

    step = "4/4 the saved checkpoint in a fresh vLLM process"
    print(step, flush=True)
    fresh = in_fresh_process(step, answer_afresh, output, held_out, limit_s=LIMIT_S)

    log = trainer.state.log_history
    after = accuracy(answers, held_out)
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

    # As rows of the trainer's log the two accuracies are in the report's plots.
    log.append({"step": 0, "eval_reward": before})
    log.append({"step": trainer.state.global_step, "eval_reward": after})
    trainer.save_state()
    cli.main(["report", str(output)])

    for name, value in summary.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:<28}{shown}")
    print(f"models and report in {output}")

    # Last, so that the report is there to look into.
    if fresh != answers:
        sys.exit("The fresh engine answers differently: the checkpoint is not what was trained. Please report this.")
    if not options.short and after < before + 0.15:
        sys.exit("Held-out accuracy rose by less than 15 points. Please report the seed.")


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument("--output_dir", default="runs/quickstart", help="where the models and the report go")

    # By default a scheme that the engine can run on this CPU.
    no_four_bits = why_no_engine(cpu_flags(), platform.machine(), four_bits=True)
    default = "FP8_DYNAMIC" if no_four_bits else "W4A16"
    parser.add_argument("--scheme", default=default, help="quant_scheme of the run, %(default)s on this CPU")

    parser.add_argument("--rollouts", type=int, default=30, help="rollout batches of 128 completions")
    parser.add_argument("--short", action="store_true", help="a few rollouts only, for CI")
    options = parser.parse_args()

    # Now, not after the minute that the warm start takes.
    check_engine_cpu("cpu", four_bits=options.scheme.startswith("W4A16"))
    if no_four_bits:
        print(f"{options.scheme} instead of W4A16, whose kernel in vLLM needs a CPU with AVX-512.")

    # One bar is enough, the trainer's: loading and mapping this little takes no time.
    transformers.utils.logging.disable_progress_bar()
    disable_progress_bars()
    print("About 3 minutes on 2 idle cores with 30 rollouts, less with --short.", flush=True)

    run(options)


if __name__ == "__main__":
    import quickstart  # what runs in another process is found by its module's name, which `__main__` is not

    quickstart.main()
