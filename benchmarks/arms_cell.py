"""One cell of the comparison of arms: a toy that adds step by step, trained by one arm with one seed (see arms.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import common  # sets what torch and vLLM read when they load
import portable_engine
import torch
import vllm  # noqa: F401  # here, so that cells that are forked have it
from arms import DRAWS, STOCK, WEIGHTS, sha_of
from arms_task import HELD_OUT, NUMBERS, add_outliers, kept_by_kpop, problems
from datasets import Dataset, disable_progress_bars
from sums import correct, make_tokenizer
from transformers import PrinterCallback, ProgressCallback, Qwen3ForCausalLM
from transformers.utils import logging

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.tools.evaluate.sample import prompt_seed


PROMPTS, ANSWERS = 16, 8  # of a rollout batch: 128 completions
# By which a process finds a process group.
GROUP = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
MACHINE = common.machine()  # when this was loaded: cells are forked later
# One value a rollout batch.
KEPT = (
    *("reward", "entropy", "grad_norm", "completions/mean_length", "completions/clipped_ratio"),
    *("mismatch/", "ratio/", "error_tokens/", "quant/", "clip_ratio/", "sampling/importance_sampling_ratio/"),
)


def run(base: Path, arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Train and evaluate one cell; what it returns goes to its JSON file."""
    start = time.perf_counter()
    logging.disable_progress_bar()
    disable_progress_bars()
    if regime.get("portable"):
        portable_engine.install()
    trainer = make_trainer(base, arm, regime, seed, folder)
    held_out = list(islice(problems(1, held_out=True, count=numbers_of(regime)), HELD_OUT))
    before = accuracy(trainer, held_out) if seed == 0 else None  # the same for all seeds
    trainer.train()
    after = accuracy(trainer, held_out)
    # Those of older cells are engine scores alone.
    scored = scores_of(trainer, arm, regime, folder) if regime.get("portable") else None
    log = [row for row in trainer.state.log_history if "reward" in row]
    names = sorted({name for row in log for name in row if name.startswith(KEPT)})
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        # What the rollout-only arms trained is a bfloat16 model; the other accuracies are of its quantization.
        "accuracy_learner": learner_accuracy(trainer, held_out) if wants_learner(arm, regime) else None,
        "scores": scored,
        "log": {name: [_short(row.get(name)) for row in log] for name in names},
        "draws": DRAWS,
        "base_sha256": sha_of(base / WEIGHTS),
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "machine": MACHINE,
    }


def wants_learner(arm: dict[str, Any], regime: dict[str, Any]) -> bool:
    """Whether the learner is scored by transformers' `generate` in bfloat16: not where `scores` has it."""
    return not regime.get("portable") and not arm.get("quantize_learner", True)


def scores_of(trainer: QaRLTrainer, arm: dict[str, Any], regime: dict[str, Any], folder: Path) -> dict[str, float]:
    """The scores of the trained master weights, as they are and in 4 bits."""
    # `save_model` would write the low-bit weights.
    masters = folder / "masters"
    model = Qwen3ForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    trained = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(trained[name])
    model.save_pretrained(masters)
    # Another process, without the engine's process group, by which llm-compressor's AWQ would reduce.
    environment = {name: value for name, value in os.environ.items() if name not in GROUP}
    script = Path(__file__).with_name("arms_scores.py")
    ways = ("rounded", "gptq")
    if arm.get("quant_scheme") == "none":
        ways = ("rounded", "gptq", "awq")
    command = [sys.executable, str(script), str(masters), json.dumps(regime), *ways]
    lines = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout.splitlines()
    return json.loads(lines[-1])


def numbers_of(regime: dict[str, Any]) -> int:
    """How many numbers a sum of a regime has."""
    return regime.get("numbers", NUMBERS)


class KPopTrainer(QaRLTrainer):
    """The mask of KPop on TRL's weight for the mismatch."""

    def __init__(self, threshold: float, **settings: Any) -> None:
        self._threshold = threshold
        super().__init__(**settings)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        kept = kept_by_kpop(output["old_per_token_logps"], output["sampling_per_token_logps"], self._threshold)
        output["importance_sampling_ratio"] = output["importance_sampling_ratio"] * kept
        return output


def make_trainer(base: Path, arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> QaRLTrainer:
    """The trainer of a cell, its model with the outlier channels of the regime."""
    updates = regime["updates"]
    band = regime["band"]
    settings = {
        "output_dir": str(folder),
        "use_vllm": True,
        "use_cpu": True,
        "vllm_max_model_length": regime["model"]["max_position_embeddings"],
        "vllm_engine_kwargs": {"enforce_eager": True},
        "max_completion_length": regime["max_completion_length"],
        "num_generations": ANSWERS,
        "per_device_train_batch_size": PROMPTS * ANSWERS // updates,
        "steps_per_generation": updates,
        "max_steps": regime["rollouts"] * updates,
        "learning_rate": regime["learning_rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": updates,
        "tbpo_epsilon_high": 4 * band,
        "tbpo_delta_low": 3 * band,
        "tbpo_delta_high": 7 * band,
        "logging_steps": updates,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": seed,
        **regime["quantization"],
    }
    if regime.get("portable"):
        settings |= {"bf16": False, **STOCK}
    if arm.get("quant_scheme") == "none":
        settings = {name: value for name, value in settings.items() if not name.startswith("quant_")}
    source = folder / "start"
    model = Qwen3ForCausalLM.from_pretrained(base)
    add_outliers(model, **regime["outliers"])
    model.save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    threshold = arm.get("kpop")
    trainer = (QaRLTrainer if threshold is None else partial(KPopTrainer, threshold))(
        model=str(source),
        reward_funcs=correct,
        args=QaRLConfig(**settings | {name: value for name, value in arm.items() if name != "kpop"}),
        train_dataset=Dataset.from_list(list(islice(problems(seed + 2, count=numbers_of(regime)), 4096))),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def accuracy(trainer: QaRLTrainer, held_out: list[dict[str, Any]]) -> float:
    """
    Share of right answers of the training engine with the learner's current weights, at temperature 0.6 (Table 2).
    """
    from vllm import SamplingParams

    trainer.vllm_generation.sync_weights()
    # One seed for all prompts would give every answer the same random numbers.
    seeds = [prompt_seed(trainer.processing_class.encode(row["prompt"]), 0) for row in held_out]
    length = trainer.args.max_completion_length
    params = [SamplingParams(temperature=0.6, max_tokens=length, seed=seed) for seed in seeds]
    outputs = trainer.vllm_generation.llm.generate([row["prompt"] for row in held_out], params, use_tqdm=False)
    rewards = correct([output.outputs[0].text for output in outputs], [row["answer"] for row in held_out])
    return sum(rewards) / len(rewards)


def learner_accuracy(trainer: QaRLTrainer, held_out: list[dict[str, Any]]) -> float:
    """The same of the learner itself, in bfloat16, by transformers' `generate`."""
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in held_out])  # prompts have one length
    length = trainer.args.max_completion_length
    torch.manual_seed(0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        answers = model.generate(ids, do_sample=True, temperature=0.6, top_k=0, max_new_tokens=length)
    texts = tokenizer.batch_decode(answers[:, ids.shape[1] :], skip_special_tokens=True)
    rewards = correct(texts, [row["answer"] for row in held_out])
    return sum(rewards) / len(rewards)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
