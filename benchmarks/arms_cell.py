"""One cell of the comparison of arms: a toy that adds step by step, trained by one arm with one seed (see arms.py)."""

from __future__ import annotations

import hashlib
import random
import time
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import common  # sets what torch and vLLM read when they load
import torch
import vllm  # noqa: F401  # here, so that cells that are forked have it
from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging

from qarl_trl import QaRLConfig, QaRLTrainer
from qarl_trl.quickstart.model import make_model, make_tokenizer
from qarl_trl.quickstart.task import correct
from qarl_trl.quickstart.warmstart import completion_loss


NUMBERS = 8  # of a sum: an answer has 118 tokens
BATCH, WARM_UP_RATE = 32, 2e-3  # of the supervised phase
PROMPTS, ANSWERS = 16, 8  # of a rollout batch: 128 completions
HELD_OUT = 256
# One value a rollout batch.
KEPT = (
    *("reward", "entropy", "grad_norm", "completions/mean_length", "completions/clipped_ratio"),
    *("mismatch/", "ratio/", "error_tokens/", "quant/", "clip_ratio/", "sampling/importance_sampling_ratio/"),
)


# Task ---------------------------------------------------------------------------------------------------------------


def work(numbers: list[int], forgets: Iterator[bool] | None = None) -> str:
    """
    The working of a sum modulo 100: every line repeats what is left of the problem, filled up with zeros.

    `17+5+8` is worked as `22+8+0=30+0+0`; `forgets` says of each carry whether it is forgotten.
    """
    total, lines = numbers[0], []
    for i, number in enumerate(numbers[1:], start=2):
        carries = total % 10 + number >= 10
        total = (total + number - (10 if carries and forgets is not None and next(forgets) else 0)) % 100
        lines.append("+".join([f"{total:02d}", *map(str, numbers[i:]), *["0"] * (i - 1)]))
    return "=".join(lines)


def problems(seed: int, forgotten: float = 0.0, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Problems with their answer (the last line) and a demonstration that forgets a share of its carries."""
    rng, slips = random.Random(seed), random.Random(seed + 1)
    coin = iter(lambda: slips.random() < forgotten, None)
    while True:
        numbers = [rng.randint(10, 99), *(rng.randint(1, 9) for _ in range(NUMBERS - 1))]
        if (zlib.crc32(repr(numbers).encode()) % 5 == 0) == held_out:
            solution = work(numbers)
            yield {
                "prompt": "+".join(map(str, numbers)) + "=",
                "answer": solution.rsplit("=", 1)[1],
                "demonstration": work(numbers, coin),
            }


# Model --------------------------------------------------------------------------------------------------------------


def warm_start(folder: Path, regime: dict[str, Any]) -> None:
    """Write the model that all arms and seeds of a regime start from."""
    model, tokenizer = make_model(0, **regime["model"]), make_tokenizer()
    stream, steps = problems(0, regime["forgotten"]), regime["warm_steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30, max(0.02, (steps - step) / (0.4 * steps)))
    )
    for step in range(steps):
        rows = [(row["prompt"], row["demonstration"]) for row, _ in zip(stream, range(BATCH), strict=False)]
        loss = completion_loss(model, tokenizer, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"warm start {step + 1}/{steps}: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def add_outliers(model: torch.nn.Module, channels: int, factor: int) -> None:
    """
    Give some inputs of the projections that follow a norm `factor` times the weight, and the norm the inverse.

    With a power of two the function of the unquantized model stays the same bit by bit; a scale that these weights share
    with others grows, as it does with the outlier channels of large models.
    """
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            chosen = torch.randperm(norm.weight.numel(), generator=torch.Generator().manual_seed(0))[:channels]
            norm.weight[chosen] /= factor
            for reader in readers:
                reader.weight[:, chosen] *= factor


# Run ----------------------------------------------------------------------------------------------------------------


def run(base: Path, arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Train and evaluate one cell; what it returns goes to its JSON file."""
    start = time.perf_counter()
    logging.disable_progress_bar()
    disable_progress_bars()
    trainer = make_trainer(base, arm, regime, seed, folder)
    held_out = list(islice(problems(1, held_out=True), HELD_OUT))
    before = accuracy(trainer, held_out) if seed == 0 else None  # the same for all seeds
    trainer.train()
    after = accuracy(trainer, held_out)
    log = [row for row in trainer.state.log_history if "reward" in row]
    names = sorted({name for row in log for name in row if name.startswith(KEPT)})
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "log": {name: [_short(row.get(name)) for row in log] for name in names},
        "base_sha256": hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()[:16],
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "machine": common.machine(),
    }


def make_trainer(base: Path, arm: dict[str, Any], regime: dict[str, Any], seed: int, folder: Path) -> QaRLTrainer:
    """The trainer of a cell, its model with the outlier channels of the regime."""
    updates = regime["updates"]
    band = regime["band"]
    settings = {
        "output_dir": str(folder),
        "use_vllm": True,
        "use_cpu": True,
        "vllm_max_model_length": 192,
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
    if arm.get("quant_scheme") == "none":
        settings = {name: value for name, value in settings.items() if not name.startswith("quant_")}
    source = folder / "start"
    model = make_model(0, **regime["model"]).from_pretrained(base)
    add_outliers(model, **regime["outliers"])
    model.save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    trainer = QaRLTrainer(
        str(source),
        reward_funcs=correct,
        args=QaRLConfig(**settings | arm),
        train_dataset=Dataset.from_list(list(islice(problems(seed + 2), 4096))),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def accuracy(trainer: QaRLTrainer, held_out: list[dict[str, Any]]) -> float:
    """Share of right answers of the training engine with the learner's current weights, at temperature 0.6 (Table 2)."""
    from vllm import SamplingParams

    trainer.vllm_generation.sync_weights()
    params = SamplingParams(temperature=0.6, max_tokens=trainer.args.max_completion_length, seed=0)
    outputs = trainer.vllm_generation.llm.generate([row["prompt"] for row in held_out], params, use_tqdm=False)
    rewards = correct([output.outputs[0].text for output in outputs], [row["answer"] for row in held_out])
    return sum(rewards) / len(rewards)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
