"""Keys and values as an engine's FP8 key-value cache holds them (`kv_cache_dtype`), for the learner's attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .names import base_model


# vLLM's names of caches in 8-bit floats, each with its format. Scales are 1, vLLM's default.
FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


# Rounding ------------------------------------------------------------------------------------------------------------


def round_to_cache(states: Tensor, cache_dtype: str) -> Tensor:
    """
    Round keys or values as vLLM's CPU engine does when it writes them into its cache.

    The engine casts to bfloat16 and then cuts off the digits that the format lacks: it rounds toward zero, not to the
    nearest number. What is beyond the largest number becomes that number. Reading the cache changes nothing.

    Args:
        states: Keys after the rotary embedding, or values; any shape, any floating dtype that holds bfloat16.
        cache_dtype: One of `FORMATS`.

    Returns:
        The numbers that attention reads from the cache, in the shape and dtype of `states`. NaN stays NaN, also where
        the engine would store its largest number instead.
    """
    limits = torch.finfo(FORMATS[cache_dtype])
    x = states.to(torch.bfloat16).float().clamp(limits.min, limits.max)

    # |x| lies in [2^(exponent - 1), 2^exponent), where numbers of the format are `step` apart. Below the smallest
    # normal number the distance stays the same.
    _, exponent = torch.frexp(x)
    smallest = torch.full_like(x, limits.smallest_normal)
    power = torch.ldexp(torch.ones_like(x), exponent - 1)
    step = torch.maximum(power, smallest) * limits.eps

    # Exact in float32: powers of two, and quotients of at most 8 digits.
    return ((x / step).trunc() * step).to(states.dtype)


class _FromCache(torch.autograd.Function):
    """[`round_to_cache`]; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, cache_dtype: str) -> Tensor:
        return round_to_cache(states, cache_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def from_cache(states: Tensor, cache_dtype: str) -> Tensor:
    """
    [`round_to_cache`] with a straight-through gradient.

    Args:
        states: As for [`round_to_cache`].
        cache_dtype: One of `FORMATS`.
    """
    return _FromCache.apply(states, cache_dtype)


# transformers' attention implementations -----------------------------------------------------------------------------


def with_cache(name: str, cache_dtype: str) -> str:
    """The name of an attention implementation that rounds keys and values first; see [`register_with_cache`]."""
    return f"{name}_{cache_dtype}"


def without_cache(name: str) -> str:
    """The name of the implementation beside which `name` was registered; `name` itself if it does not round."""
    for cache_dtype in FORMATS:
        name = name.removesuffix(with_cache("", cache_dtype))
    return name


def attend_without_cache(model: nn.Module) -> None:
    """
    Make a model attend to keys and values as they are, whatever cache an earlier trainer had it attend from.

    Args:
        model: Any module, also inside of a `PeftModel` or of DDP. One that does not round is left alone.
    """
    inner = base_model(getattr(model, "module", model))
    name = getattr(getattr(inner, "config", None), "_attn_implementation", None) or ""
    if without_cache(name) != name:
        inner.set_attn_implementation(without_cache(name))


def register_with_cache(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """
    Register an attention implementation for each FP8 cache, beside the one without such a cache.

    Args:
        name: The name of the one without, in transformers. The others are called [`with_cache`].
        attention: Its function, which takes a keyword argument `cache_dtype`, one of `FORMATS`.
        mask: The function of its mask.
    """
    # The cache is part of the name, because transformers passes an attention no further settings. The mask has the
    # same name, by which transformers looks it up.
    for cache_dtype in FORMATS:
        AttentionInterface.register(with_cache(name, cache_dtype), partial(attention, cache_dtype=cache_dtype))
        AttentionMaskInterface.register(with_cache(name, cache_dtype), mask)
