"""The supervised phase, to where a base model stands before RL: it can do better than what it mostly writes."""

from __future__ import annotations

from itertools import islice

import torch
from sums import EOS, PAD, problems
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


STEPS = 420
IGNORED = -100  # as a label: not in the loss


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int = STEPS
) -> list[float]:
    """Train `model` in place on `steps` batches of 64 demonstrations; the losses, the same for a seed and threads."""
    stream, losses = problems(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    model.train()
    for _ in trange(steps):
        rows = [(row["prompt"], row["demonstration"]) for row in islice(stream, 64)]
        loss = completion_loss(model, tokenizer, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
    return losses


def completion_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]]
) -> Tensor:
    """Mean cross-entropy of the completions of `rows`, prompts and completions, with their ends."""
    pairs = [(tokenizer.encode(prompt), [*tokenizer.encode(completion), EOS]) for prompt, completion in rows]
    ids = pad_sequence([torch.tensor(p + c) for p, c in pairs], batch_first=True, padding_value=PAD)
    labels = [torch.tensor([IGNORED] * len(p) + c) for p, c in pairs]
    labels = pad_sequence(labels, batch_first=True, padding_value=IGNORED)
    return model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels).loss
