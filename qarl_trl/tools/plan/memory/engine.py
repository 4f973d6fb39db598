"""What an engine keeps on each of its GPUs, and what a weight sync brings it."""

from __future__ import annotations

import math
from dataclasses import replace

from ..run import BFLOAT16, GIB, Run


# Bytes of an awake engine beside weights and cache: passes of 4096 tokens and CUDA graphs. Assumed, not measured.
ENGINE_WORK = 3 * GIB
# Layers that keep nothing for each token, as transformers names them in `layer_types`.
WITHOUT_CACHE = ("linear_attention", "conv", "mlp", "moe")


def engine_bytes(run: Run) -> int:
    """
    Bytes of the weights of a whole engine: low-bit tensors, bfloat16 for the rest, and with a frozen base the adapter.

    Args:
        run: The run.
    """
    weights = 0
    for parameter in run.parameters:
        if parameter.in_adapter and not run.frozen:  # the engine gets weights with the adapter merged into them
            continue
        if ".original_module." in parameter.name:  # of `lora_modules_to_save` the engine gets the trained copy
            continue
        weights += parameter.stored or BFLOAT16 * parameter.entries
    return weights


def synced_bytes(run: Run) -> int:
    """
    Bytes of a weight sync: all weights, or with a frozen base only the adapter, unless sleep mode drops the base.

    Args:
        run: The run.
    """
    # vLLM's sleep drops weights, and only the learner has those of its step.
    if not run.frozen or run.sleep:
        return engine_bytes(run)
    return sum(BFLOAT16 * parameter.entries for parameter in run.parameters if parameter.in_adapter)


def engine_weights(run: Run) -> int:
    """
    Bytes of the engine's weights on each of its GPUs; 0 without an engine.

    Args:
        run: The run.
    """
    if not run.engine:
        return 0
    return math.ceil(engine_bytes(run) / run.engine_ranks)


def cache_bytes(run: Run) -> int:
    """
    Bytes of the engine's key-value cache on each of its GPUs: the rest of `vllm_gpu_memory_utilization`.

    Args:
        run: The run.

    Returns:
        Negative if not even the weights fit, 0 without an engine.
    """
    if not run.engine:
        return 0

    # It then leaves the share aside (`vllm/config/cache.py`).
    if run.cache_size is not None:
        return run.cache_size

    # vLLM measures weights and work at its start, and gives the cache all that is left of its share.
    share = int(run.utilization * run.memory)
    return share - engine_weights(run) - ENGINE_WORK


def cache_tokens(run: Run) -> int:
    """
    Number of tokens in the cache.

    Args:
        run: The run.
    """
    return cache_bytes(run) // token_bytes(run)


def token_bytes(run: Run) -> int:
    """
    Bytes of a token in the cache: keys and values for the heads of one engine rank, in the mean of the longest row.
    Of latent attention (MLA) each rank has the one latent vector and the rotated part of the keys (vLLM 0.31,
    `MLAAttentionSpec`).

    Args:
        run: The run.
    """
    latent = getattr(run.config, "kv_lora_rank", None)
    # vLLM 0.31 caches whole heads of this family.
    if latent and run.config.model_type != "minicpm3":
        return math.ceil(run.cache_entry * _cached_layers(run) * (latent + run.config.qk_rope_head_dim))

    all_heads = getattr(run.config, "num_key_value_heads", None) or run.config.num_attention_heads
    # With more ranks than heads vLLM gives several ranks a copy of the same head.
    heads = max(1, all_heads // run.engine_ranks)

    keys = run.cache_entry * _cached_layers(run) * heads * run.head_dim
    return math.ceil(2 * keys)


def sampled_cache(run: Run) -> int:
    """
    Bytes of keys and values where transformers samples: of a whole rollout batch at once, in the dtype of the forward.

    Args:
        run: The run.
    """
    on_one_gpu = replace(run, cache_entry=run.compute, engine_ranks=1)
    return run.sampled_rows * run.tokens * token_bytes(on_one_gpu)


def _cached_layers(run: Run) -> float:
    """
    In how many layers a token is cached, in the mean of the longest row.

    A layer of linear attention or of a convolution has a state for each sequence, which is not counted here. One with
    a sliding window keeps the tokens of its window (vLLM 0.31, `SlidingWindowSpec`). Other kinds count whole.
    """
    window = getattr(run.config, "sliding_window", None)
    # Without a list vLLM takes the window for all layers.
    kinds = getattr(run.config, "layer_types", None)
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * run.config.num_hidden_layers

    cached = 0.0
    for kind in kinds:
        if kind in WITHOUT_CACHE:
            continue
        if kind == "sliding_attention" and window is not None:
            cached += min(1, window / run.tokens)
        else:
            cached += 1
    return cached
