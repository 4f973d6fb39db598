"""The supervised phase: the model learns to work a problem, then sees mostly answers given at once.

It ends where a base model stands before RL: it can do better than what it usually writes. Invariant: the same seed and the same number of threads give the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .model import EOS, PAD
from .task import problems


BATCH = 64
LEARNING_RATE = 1e-3
WORKED_ACCURACY = 0.95  # phase 1 ends here, or after WORKED_STEPS
WORKED_STEPS = 500
MIXED_STEPS = 50
MIXED_RATE = 3e-4
WORKED_SHARE = 0.25
PROBE_EVERY = 20


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    worked_steps: int = WORKED_STEPS,
    mixed_steps: int = MIXED_STEPS,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """
    Train `model` in place on right answers.

    First on worked answers only, until it completes `WORKED_ACCURACY` of them without an error, then on a mixture with
    `WORKED_SHARE` of them.

    Args:
        model (`Qwen3ForCausalLM`): A fresh model.
        tokenizer (`PreTrainedTokenizerFast`): Its tokenizer.
        seed (`int`): Order of the problems and choice of the form.
        worked_steps (`int`, *optional*): Most updates of the first phase, 64 problems each.
        mixed_steps (`int`, *optional*): Updates of the second phase.
        progress (`Callable[[int, float], None]`, *optional*): Called after each update with its number and loss.
    """
    rng, stream = random.Random(seed), problems(seed)
    probe = _encode(islice(problems(seed + 1), 256), ["working"] * 256, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    done = 0

    def update(forms: list[str]) -> None:
        nonlocal done
        loss = completion_loss(model, *_encode(islice(stream, BATCH), forms, tokenizer))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
        if progress is not None:
            progress(done, loss.item())

    for step in range(worked_steps):
        update(["working"] * BATCH)
        if step % PROBE_EVERY == PROBE_EVERY - 1 and exact_share(model, *probe) >= WORKED_ACCURACY:
            break
    optimizer.param_groups[0]["lr"] = MIXED_RATE
    for _ in range(mixed_steps):
        update(["working" if rng.random() < WORKED_SHARE else "direct" for _ in range(BATCH)])


@torch.no_grad()
def exact_share(model: Qwen3ForCausalLM, ids: Tensor, mask: Tensor) -> float:
    """Share of completions whose every token is the most likely one given those before it."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    right = (logits[:, :-1].argmax(-1) == ids[:, 1:]) | ~mask[:, 1:]
    return right.all(1).float().mean().item()


def _encode(rows: Iterable[dict], forms: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    return collate(
        [(tokenizer.encode(r["prompt"]), [*tokenizer.encode(r[f]), EOS]) for r, f in zip(rows, forms, strict=True)]
    )


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Prompts and completions to right-padded ids `(B, T)` and the completion mask `(B, T)`."""
    length = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids, mask = torch.full((len(rows), length), PAD), torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor(prompt + completion)
        mask[i, len(prompt) : end] = True
    return ids, mask


def completion_loss(model: Qwen3ForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy of the completion tokens."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    return F.cross_entropy(logits[:, :-1][mask[:, 1:]].float(), ids[:, 1:][mask[:, 1:]])
