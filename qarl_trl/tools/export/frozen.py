"""How far the export of an adapter is from the policy that was trained beside a frozen base."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def distance_to_frozen(model: Any, base: Any, adapter: str, first_token: int | None) -> float:
    """
    The distance of an exported model from the policy that was trained, an adapter beside its frozen low-bit base.

    Args:
        model: The quantized model, a `PeftModel`.
        base: The `CheckpointSource` of the base.
        adapter: The adapter's folder.
        first_token: The token that both models continue; `None` for the first of the vocabulary.

    Returns:
        Mean absolute log-prob difference, nats per token, over 256 tokens that the adapter on its frozen base samples;
        over fewer if its context has no room for them.
    """
    import torch
    from peft import PeftModel
    from transformers import GenerationConfig

    from ...quant.layers.frozen import align_adapters
    from ...quant.start import load_frozen_base
    from ...rollout.sync_check.learner_logps import learner_logps

    low_bit_base = load_frozen_base(str(base.folder), base.plan())
    frozen: Any = PeftModel.from_pretrained(low_bit_base, adapter)
    # In training, adapters round as the engine's do.
    align_adapters(frozen)

    # Beyond its positions a model was never trained. One is the first token's.
    positions = getattr(frozen.config.get_text_config(), "max_position_embeddings", None)
    length = 256 if positions is None else min(256, positions - 1)
    # From the whole distribution: the base's generation_config.json may have a temperature, penalties and so on.
    frozen.get_base_model().generation_config = GenerationConfig(eos_token_id=first_token, pad_token_id=first_token)
    # So that two exports of one adapter print the same distance.
    torch.manual_seed(0)
    (tokens,) = frozen.generate(
        torch.tensor([[first_token or 0]]),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        min_new_tokens=length,
        max_new_tokens=length,
    )
    token_ids = tokens.tolist()

    # Under the autocast of training, so that both round activations as they do there.
    with torch.autocast("cpu", torch.bfloat16):
        exported_logps = learner_logps(model, token_ids).plain
        frozen_logps = learner_logps(frozen, token_ids).plain
    return (exported_logps - frozen_logps).abs().mean().item()


def serving_the_two(adapter: str, base: str) -> str:
    """How to keep the policy that was trained beside a frozen base."""
    from ...export.adapter_base import cache_beside_base
    from ...export.card import served_rank
    from ...export.files import ADAPTER_CONFIG

    rank = json.loads(Path(adapter, ADAPTER_CONFIG).read_text())["r"]
    command = (
        f"vllm serve {os.path.normpath(base)} --enable-lora --max-lora-rank {served_rank(rank)} "
        f"--lora-modules policy={adapter}"
    )
    # On another cache the policy is a slightly different one.
    cache = cache_beside_base(Path(adapter))
    if cache is not None:
        command += f" --kv-cache-dtype {cache}"
    # That of the run, whose end token may be another than the base's.
    if any(Path(adapter).glob("tokenizer*")):
        command += f" --tokenizer {adapter}"
    return f"To keep the policy that was trained, serve the two: {command}"
