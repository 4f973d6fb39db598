"""The supervised phase, to where a base model stands before RL: it can do better than what it mostly writes.

You would load a model of the Hub in its place. Nothing to run here: `quickstart.py` and `quickstart.ipynb` call
`warm_start`.
"""

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
    stream = problems(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    # A small model takes a large rate, but not in its first steps, when Adam has seen few gradients.
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    losses = []

    model.train()
    for _ in trange(steps):
        # The demonstration, not the solution: what it forgets is what RL has to find out.
        rows = []
        for problem in islice(stream, 64):
            rows.append((problem["prompt"], problem["demonstration"]))

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
    texts = []
    targets = []
    for prompt, completion in rows:
        prompt_ids = tokenizer.encode(prompt)
        # With the end, or the model would never stop by itself.
        completion_ids = [*tokenizer.encode(completion), EOS]

        texts.append(torch.tensor(prompt_ids + completion_ids))
        # The operands of a prompt are drawn, so there is nothing to learn from them.
        targets.append(torch.tensor([IGNORED] * len(prompt_ids) + completion_ids))

    ids = pad_sequence(texts, batch_first=True, padding_value=PAD)
    labels = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
    attention_mask = (ids != PAD).long()

    return model(input_ids=ids, attention_mask=attention_mask, labels=labels).loss
