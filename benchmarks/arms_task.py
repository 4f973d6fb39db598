"""
The task and the toy of arms.py: sums that are worked step by step, and outlier channels, which quantization hurts.
"""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from sums import make_model, make_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from warm_start import completion_loss


NUMBERS = 8  # of a sum: an answer has 118 tokens
HELD_OUT = 256  # problems by which an arm is scored
# Of the supervised phase.
BATCH = 32
RATE = 2e-3


# Task ---------------------------------------------------------------------------------------------------------------


def work(numbers: list[int], forgets: Iterator[bool] | None = None) -> str:
    """
    Work a sum modulo 100: every line repeats what is left of the problem, filled up with zeros.

    Args:
        numbers: What is added: 17, 5 and 8 are worked as `22+8+0=30+0+0`.
        forgets: Says of each carry whether it is forgotten.
    """
    total = numbers[0]
    lines = []

    for position, number in enumerate(numbers[1:], start=2):
        carries = total % 10 + number >= 10
        total += number
        # Asked last, so that a slip is drawn only where there is a carry to forget.
        if carries and forgets is not None and next(forgets):
            total -= 10
        total %= 100

        still_to_add = map(str, numbers[position:])
        zeros = ["0"] * (position - 1)
        lines.append("+".join([f"{total:02d}", *still_to_add, *zeros]))
    return "=".join(lines)


def problems(
    seed: int, forgotten: float = 0.0, held_out: bool = False, count: int = NUMBERS
) -> Iterator[dict[str, Any]]:
    """
    Draw sums, without end. The order of the draws is part of what a seed gives.

    Args:
        seed: Of the numbers and of the slips.
        forgotten: Share of carries that a demonstration forgets.
        held_out: Draw from the held-out fifth of all sums; else from the others.
        count: Numbers of a sum.

    Yields:
        `prompt`, `answer` (the last line of the working) and `demonstration`, the working with its slips.
    """
    numbers_of_seed = random.Random(seed)
    slips_of_seed = random.Random(seed + 1)

    def coin() -> Iterator[bool]:
        while True:
            yield slips_of_seed.random() < forgotten

    forgets = coin()
    while True:
        numbers = [numbers_of_seed.randint(10, 99)]
        for _ in range(count - 1):
            numbers.append(numbers_of_seed.randint(1, 9))

        # The sum decides, not the seed, so streams of different seeds have the same split.
        is_held_out = zlib.crc32(repr(numbers).encode()) % 5 == 0
        if is_held_out != held_out:
            continue

        solution = work(numbers)
        yield {
            "prompt": "+".join(map(str, numbers)) + "=",
            "answer": solution.rsplit("=", 1)[1],
            "demonstration": work(numbers, forgets),
        }


def numbers_of(regime: dict[str, Any]) -> int:
    """How many numbers a sum of a regime has."""
    return regime.get("numbers", NUMBERS)


# Model --------------------------------------------------------------------------------------------------------------


def warm_start(folder: Path, regime: dict[str, Any], kept: Path) -> None:
    """
    Write the model that all arms and seeds of a regime start from.

    Args:
        folder: Gets model and tokenizer.
        regime: An entry of `arms.REGIMES`.
        kept: A file of weights. If it is there, they are copied and nothing is trained.
    """
    model = make_model(regime["start"], **regime["model"])
    tokenizer = make_tokenizer()
    if not kept.exists():
        _train(model, tokenizer, regime)

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kept.exists():
        shutil.copyfile(kept, folder / "model.safetensors")


def _train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, regime: dict[str, Any]) -> None:
    """Train the model on demonstrations of a regime."""
    steps = regime["warm_steps"]

    def share_of_rate(step: int) -> float:
        """It rises for 30 steps, and falls in the last two fifths."""
        rising = (step + 1) / 30
        falling = (steps - step) / (0.4 * steps)
        return min(1.0, rising, max(0.02, falling))

    stream = problems(100 * regime["start"], regime["forgotten"], count=numbers_of(regime))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate)

    for step in range(steps):
        rows = [(row["prompt"], row["demonstration"]) for row in islice(stream, BATCH)]
        # Drawn and not used: so the starts of the committed cells were made.
        next(stream)

        loss = completion_loss(model, tokenizer, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"warm start {step + 1}/{steps}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def add_outliers(model: nn.Module, channels: int, factor: int) -> None:
    """
    Give some inputs of the projections that follow a norm `factor` times the weight, and the norm the inverse.

    With a power of two the function of the unquantized model stays the same bit by bit; a scale that these weights
    share with others grows, as it does with the outlier channels of large models.

    Args:
        model: A Qwen3 model, which is changed.
        channels: How many inputs.
        factor: A power of two.
    """
    for layer in model.model.layers:
        of_attention = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        of_mlp = (layer.mlp.gate_proj, layer.mlp.up_proj)
        _scale_channels(layer.input_layernorm, of_attention, channels, factor)
        _scale_channels(layer.post_attention_layernorm, of_mlp, channels, factor)


def _scale_channels(norm: nn.Module, readers: Iterable[nn.Module], channels: int, factor: int) -> None:
    """Move a factor of some channels from a norm to the projections that read it."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(norm.weight.numel(), generator=generator)[:channels]

    norm.weight[chosen] /= factor
    for reader in readers:
        reader.weight[:, chosen] *= factor


# A loss that TRL lacks -----------------------------------------------------------------------------------------------


def kept_by_kpop(learner: Tensor, engine: Tensor, threshold: float) -> Tensor:
    """
    Choose the tokens that count by KPop (https://ringtech.notion.site/kpop).

    Learner and engine are compared as two coins, this token or another: KL(p | q) and KL(q | p) must be at most the
    threshold.

    Args:
        learner: Log-probs of the sampled tokens, float32, `(B, T)`.
        engine: The same by the engine.
        threshold: In nats; the authors' is 0.1.

    Returns:
        Whether each token counts, `(B, T)`.
    """
    p = _probability(learner)
    q = _probability(engine)
    of_token = (p / q).log()
    of_another = ((1 - p) / (1 - q)).log()

    is_near = p * of_token + (1 - p) * of_another <= threshold
    is_near_back = -q * of_token - (1 - q) * of_another <= threshold
    return is_near & is_near_back


def _probability(logps: Tensor) -> Tensor:
    """In float64, and neither 0 nor 1, whose logarithms are infinite."""
    return logps.double().exp().clamp(1e-6, 1 - 1e-6)
