"""
The supervised phase: the model learns to work sums, slips included.

It ends where a base model stands before RL: it can do better than what it mostly writes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from .model import EOS, PAD
from .task import problems


BATCH = 64
STEPS = 420
LEARNING_RATE = 2e-3
WARMUP = 30


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    steps: int = STEPS,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """
    Train `model` in place on demonstrations, `steps` updates of 64; the same seed and threads give the same weights.

    `progress` is called after each update with its number and loss.
    """
    stream = problems(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    model.train()
    for step in range(steps):
        rows = [
            (tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["demonstration"]), EOS])
            for row in islice(stream, BATCH)
        ]
        loss = completion_loss(model, *collate(rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if progress is not None:
            progress(step + 1, loss.item())


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Prompts and completions to right-padded ids `(B, T)` and the completion mask `(B, T)`."""
    ids = [torch.tensor(prompt + completion) for prompt, completion in rows]
    masks = [torch.arange(len(p) + len(c)) >= len(p) for p, c in rows]
    return pad_sequence(ids, batch_first=True, padding_value=PAD), pad_sequence(masks, batch_first=True)


def completion_loss(model: Qwen3ForCausalLM, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy of the completion tokens."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits
    return F.cross_entropy(logits[:, :-1][mask[:, 1:]].float(), ids[:, 1:][mask[:, 1:]])
