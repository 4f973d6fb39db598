"""Prompts with images, for a colocated engine.

The processor repeats an image's token for each of its features. TRL hands these token ids to vLLM together with the
image, and vLLM repeats the first once more, so it samples after another prompt than the learner scores
(https://github.com/huggingface/trl/issues/6294). Here vLLM gets one token for each image, and its prompt is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def with_single_tokens(prompts: Sequence[Sequence[int]], image_token: int | None) -> list[list[int]]:
    """
    The prompts with one image token in place of each run of them.

    Args:
        prompts: Token ids of each prompt.
        image_token: The processor's `image_token_id`; `None` for one that has none.
    """
    single = []
    for prompt in prompts:
        tokens: list[int] = []
        for token, run in itertools.groupby(prompt):
            tokens += [token] if token == image_token else run
        single.append(tokens)
    return single


def check_engine_prompts(prompts: Sequence[Sequence[int]], of_engine: Sequence[Sequence[int]]) -> None:
    """
    Refuse completions of other prompts than the learner's.

    Args:
        prompts: Token ids that the learner scores, of each prompt.
        of_engine: Token ids that the engine sampled after.

    Raises:
        RuntimeError: with the first difference.
    """
    for row, (expected, actual) in enumerate(zip(prompts, of_engine, strict=True)):
        if list(expected) != list(actual):
            raise RuntimeError(
                f"Prompt {row} has {len(expected)} tokens for the learner and {len(actual)} for vLLM, or others: its "
                "images are put in differently. Train this model with use_vllm: false."
            )
