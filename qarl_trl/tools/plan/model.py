"""Whose memory is planned: a model without weights, made from its config and prepared as the trainer prepares the real one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from trl import get_peft_config

from ...optim import split_parameters
from ...quant import apply_quantization
from ...quant.experts import PROJECTIONS, QuantExperts
from ...quant.layers import check_shardable
from ...quant.linear import LowBitLayer
from ...quant.model import quantized_modules
from .formulas import Layer, quantized_bytes
from .rank import Run


PROMPT = 512  # tokens, assumed where nothing limits the length
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
_MOE = _QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8}
# From the config.json of each on the Hugging Face Hub. A test compares the parameters with what the model cards say.
BUNDLED: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", (1536, 8960, 28, 12, 2), {"vocab_size": 151936, "tie_word_embeddings": True}),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", (3584, 18944, 28, 28, 4), {"vocab_size": 152064, "tie_word_embeddings": False}),
    "Qwen/Qwen3-8B-Base": ("qwen3", (4096, 12288, 36, 32, 8), _QWEN3),
    "Qwen/Qwen3-30B-A3B-Base": ("qwen3_moe", (2048, 6144, 48, 32, 4), _MOE | {"moe_intermediate_size": 768}),
    "Qwen/Qwen3-235B-A22B": ("qwen3_moe", (4096, 12288, 94, 64, 4), _MOE | {"moe_intermediate_size": 1536}),
}


def read_config(name: str) -> PretrainedConfig:
    """
    The config of a model folder, of a model of the Hub that is in the local cache, or from the bundled sizes; no download.

    Raises:
        ValueError: for a model whose sizes are not known here.
    """
    if name in BUNDLED and not Path(name).exists():
        kind, sizes, more = BUNDLED[name]
        return AutoConfig.for_model(kind, **dict(zip(_SIZES, sizes, strict=True)), **more)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        known = ", ".join(BUNDLED)
        raise ValueError(
            f"model_name_or_path={name!r} is no folder with a config.json that transformers reads, and its sizes are not bundled "
            f"({known}). Download its config.json and give that folder. ({str(error).strip().partition(chr(10))[0]})"
        ) from error
    vars(config).pop("quantization_config", None)
    return config


def longest_row(settings: Any) -> int:
    """Tokens of prompt and completion together, at most; `PROMPT` for the prompt where nothing limits it."""
    return settings.vllm_max_model_length or (settings.max_completion_length or 0) + PROMPT


def run_of(settings: Any, model_args: Any, config: PretrainedConfig, source: Any = None, **size: Any) -> Run:
    """
    The run of `settings` (`QaRLConfig`) and TRL's `model_args`; `ValueError` for what cannot be quantized, or not in shards.

    Args:
        source (`QuantizedSource`, *optional*): Of a quantized start.
        size: `ranks`, `sharded`, `memory` and `tokens` of [`Run`], and `zero3`, if it is.
    """
    wanted = (settings.model_init_kwargs or {}).get("dtype") or model_args.dtype or "float32"
    wanted = (config.dtype or "float32") if wanted == "auto" else wanted
    dtype = wanted if isinstance(wanted, torch.dtype) else getattr(torch, str(wanted).removeprefix("torch."))
    plan = settings.quant_plan(None if source is None else source.plan())
    if plan is not None and size["sharded"]:
        check_shardable(plan)
    model = skeleton(config, dtype, get_peft_config(model_args), plan, settings.trust_remote_code)
    text, kept_whole = config.get_text_config(), settings.accelerator_config.gradient_accumulation_kwargs or {}
    packed = settings.quantize_learner and settings.quant_kernel != "engine"
    return Run(
        parameters=tuple(parameters(model, settings.optim_muon, packed and dtype == torch.float32)),
        layer=decoder_layer(model, config, settings.quantize_learner),
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        quantized=quantized(model),
        synced=synced(model),
        reference=settings.beta > 0 and not model_args.use_peft,
        rows=settings.per_device_train_batch_size,
        budget=settings.max_tokens_per_pass,
        checkpointing=settings.gradient_checkpointing,
        half=settings.bf16,
        accumulates=settings.gradient_accumulation_steps > 1 and not kept_whole.get("sync_each_batch", True),
        utilization=settings.vllm_gpu_memory_utilization if settings.use_vllm else 0.0,
        served=settings.use_vllm and settings.vllm_mode == "server",
        sleep=settings.vllm_enable_sleep_mode,
        engine_ranks=settings.vllm_tensor_parallel_size,
        **size,
    )


def skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype,
    adapter: Any = None,
    plan: Any = None,
    trust_remote_code: bool = False,
    **how: Any,
) -> nn.Module:
    """
    The model of `config` on the meta device, with master weights of `dtype`, peft's `adapter` and the low-bit layers of `plan`.

    `how` goes to [`~qarl_trl.quant.apply_quantization`], which raises `ValueError` for what it cannot quantize.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    return model if plan is None else apply_quantization(model, plan, **how)


@dataclass(frozen=True)
class Parameter:
    """
    One parameter: `(…)` shape, bytes per entry, the layer that FSDP2 gathers it with ("" outside of them), its optimizer.

    `scheme` is that of the quantized values which FSDP2 may gather instead of it, if any.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    layer: str
    optimizer: str  # "muon", "experts", "adamw", or "" for a frozen one
    scheme: Any = None

    @property
    def entries(self) -> int:
        return math.prod(self.shape)


def parameters(model: nn.Module, muon: bool, packed: bool = True) -> list[Parameter]:
    """The parameters of `model`, tied ones once, with the optimizer that `optim_muon=muon` gives each; `packed`: with schemes."""
    matrices, experts, _ = split_parameters(model) if muon else ([], {}, [])
    chosen = dict.fromkeys(matrices, "muon") | dict.fromkeys(experts, "experts")
    layers = tuple(f"{name}." for name, module in model.named_modules() if _is_layer(module))
    quantized = [module for _, module in quantized_modules(model)] if packed else []
    schemes = {id(getattr(module, name)): module.scheme for module in quantized for name in module.packed_parameters}
    return [
        Parameter(
            name,
            tuple(param.shape),
            param.element_size(),
            next((layer for layer in layers if name.startswith(layer)), ""),
            chosen.get(name, "adamw") if param.requires_grad else "",
            schemes.get(id(param)),
        )
        for name, param in model.named_parameters()
    ]


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


def low_bit_weights(model: nn.Module) -> Iterator[tuple[int, int, int, Any]]:
    """Rows, columns, layers in the checkpoint and scheme of every low-bit weight of `model`."""
    for _, module in quantized_modules(model):
        if isinstance(module, QuantExperts):
            for name, projections in PROJECTIONS.items():
                experts, rows, columns = getattr(module, name).shape
                yield experts * rows, columns, experts * len(projections), module.scheme
        else:
            yield module.out_features, module.in_features, 1, module.scheme


def quantized(model: nn.Module) -> int:
    """Bytes of the low-bit weights as the learner keeps them: all experts of a parameter are one."""
    return sum(quantized_bytes(rows, columns, scheme) for rows, columns, _, scheme in low_bit_weights(model))


def synced(model: nn.Module) -> int:
    """Bytes of the checkpoint's tensors, which a weight sync moves and the engine keeps: low bits, and bfloat16 for the rest."""
    low_bit = {id(param) for _, m in quantized_modules(model) for param in _quantized_parameters(m)}
    plain = (p for n, p in model.named_parameters() if id(p) not in low_bit and "lora_" not in n)
    packed = sum(
        quantized_bytes(rows, columns, scheme, pieces) for rows, columns, pieces, scheme in low_bit_weights(model)
    )
    return packed + sum(2 * param.numel() for param in plain)


def _quantized_parameters(module: LowBitLayer) -> list[nn.Parameter]:
    if isinstance(module, QuantExperts):
        return [getattr(module, name) for name in PROJECTIONS]
    return [getattr(module, "base_layer", module).weight]


def decoder_layer(model: nn.Module, config: PretrainedConfig, low_bit_forward: bool) -> Layer:
    """The sizes of a decoder layer of `model`, and the schemes of its forward; the last layer's, which has experts if any has."""
    text = config.get_text_config()
    schemes: dict[str, Any] = {}
    for name, module in quantized_modules(model) if low_bit_forward else ():
        schemes["attention" if "attn" in name else "mlp"] = module.scheme
    sizes = [p.shape for name, p in model.named_parameters() if name.endswith("experts.gate_up_proj")]
    experts, inner = (sizes[-1][0], sizes[-1][1] // 2) if sizes else (0, text.intermediate_size)
    return Layer(
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        inner=inner,
        experts=experts,
        top_k=text.num_experts_per_tok if experts else 0,
        query_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        **schemes,
    )
