"""
The task and the toy of arms.py: sums that are worked step by step, and outlier channels, which quantization hurts.
"""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sums import make_model, make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import completion_loss


NUMBERS = 8  # of a sum: an answer has 118 tokens
HELD_OUT = 256  # problems by which an arm is scored
BATCH, RATE = 32, 2e-3  # of the supervised phase


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


def problems(
    seed: int, forgotten: float = 0.0, held_out: bool = False, count: int = NUMBERS
) -> Iterator[dict[str, Any]]:
    """Sums of `count` numbers with their answer (the last line) and a demonstration that forgets some carries."""
    rng, slips = random.Random(seed), random.Random(seed + 1)
    coin = iter(lambda: slips.random() < forgotten, None)
    while True:
        numbers = [rng.randint(10, 99), *(rng.randint(1, 9) for _ in range(count - 1))]
        if (zlib.crc32(repr(numbers).encode()) % 5 == 0) == held_out:
            solution = work(numbers)
            yield {
                "prompt": "+".join(map(str, numbers)) + "=",
                "answer": solution.rsplit("=", 1)[1],
                "demonstration": work(numbers, coin),
            }


# Model --------------------------------------------------------------------------------------------------------------


def warm_start(folder: Path, regime: dict[str, Any], kept: Path) -> None:
    """
    Write the model that all arms and seeds of a regime start from: with the weights of the file `kept`, if it is
    there.
    """
    model, tokenizer = make_model(regime["start"], **regime["model"]), make_tokenizer()
    if not kept.exists():
        _train(model, tokenizer, regime)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kept.exists():
        shutil.copyfile(kept, folder / "model.safetensors")


def _train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, regime: dict[str, Any]) -> None:
    count = regime.get("numbers", NUMBERS)
    stream, steps = problems(100 * regime["start"], regime["forgotten"], count=count), regime["warm_steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
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


@torch.no_grad()
def add_outliers(model: torch.nn.Module, channels: int, factor: int) -> None:
    """
    Give some inputs of the projections that follow a norm `factor` times the weight, and the norm the inverse.

    With a power of two the function of the unquantized model stays the same bit by bit; a scale that these weights
    share with others grows, as it does with the outlier channels of large models.
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


# A loss that TRL lacks -----------------------------------------------------------------------------------------------


def kept_by_kpop(learner: torch.Tensor, engine: torch.Tensor, threshold: float) -> torch.Tensor:
    """
    Which tokens count by KPop (https://ringtech.notion.site/kpop).

    Learner and engine are compared as two coins, this token or another: KL(p | q) and KL(q | p) must be at most the
        threshold.

    Args:
        learner, engine (`torch.Tensor`): Log-probs of the sampled tokens, float32, `(B, T)`.
        threshold (`float`): In nats; the authors' is 0.1.
    """
    p, q = (logps.double().exp().clamp(1e-6, 1 - 1e-6) for logps in (learner, engine))
    up, down = (p / q).log(), ((1 - p) / (1 - q)).log()
    return (p * up + (1 - p) * down <= threshold) & (-q * up - (1 - q) * down <= threshold)
