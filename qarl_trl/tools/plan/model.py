"""From the settings of a run to its numbers: a model without weights, prepared as the trainer prepares the real one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import get_peft_config

from ...optim import split_parameters
from ...quant import apply_quantization
from ...quant.experts import PROJECTIONS, QuantExperts
from ...quant.gathers import gathers_quantized
from ...quant.model import quantized_modules
from ...quant.quantize import meta_tensors
from ...quant.scheme import support_of
from ...quant.start import quantized_source
from .items import GIB, Parameter, Run


PROMPT = 512  # tokens, assumed where nothing limits the length
MOST = 10**6  # of GPUs, of their GiB: beyond any, and far from what a float or an index holds
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


def plan_run(
    settings: Any, model_args: Any, gpus: int, memory: float, sharding: str | None, tokens: int | None
) -> Run:
    """
    The run of `settings` (`QaRLConfig`) and TRL's `model_args` on `gpus` of `memory` GiB each.

    `sharding` is "ddp" or "fsdp2" (the default). `ValueError` for what cannot run so, or an unknown model.
    """
    for name, value in {"gpus": gpus, "memory": memory, "tokens": tokens}.items():
        if value is not None and not 0 < value <= MOST:
            raise ValueError(f"--{name} must be a number above 0, at most {MOST}, got {value:g}.")
    engine = settings.vllm_mode if settings.use_vllm else ""
    engine_ranks = settings.vllm_tensor_parallel_size
    if engine_ranks < 1 or (engine == "colocate" and gpus % engine_ranks):
        raise ValueError(f"vllm_tensor_parallel_size={engine_ranks} must divide the GPUs, got --gpus {gpus}.")
    if sharding not in (None, "ddp", "fsdp2"):
        raise ValueError(f"--sharding must be ddp or fsdp2, got {sharding}. For ZeRO-3 see docs/scaling.md.")
    name = model_args.model_name_or_path
    config, source = read_config(name), quantized_source(name) if settings.from_checkpoint else None
    plan = settings.quant_plan(None if source is None else source.plan())
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        raise ValueError(f"The plan knows models with attention, and {name} ({config.model_type}) has none.")
    dtype = (settings.model_init_kwargs or {}).get("dtype") or model_args.dtype or "float32"
    dtype = (config.dtype or "float32") if dtype == "auto" else dtype
    model = skeleton(config, dtype, get_peft_config(model_args), plan)
    fsdp2 = gpus > 1 and sharding != "ddp"
    gathers = fsdp2 and settings.quantize_learner and settings.quant_kernel != "engine"
    return Run(
        parameters=parameters(model, settings.optim_muon, gpus if gathers else 1),
        config=config.get_text_config(),
        low_bit_forward=plan is not None and settings.quantize_learner,
        memory=int(memory * GIB),
        rows=settings.per_device_train_batch_size,
        tokens=tokens or settings.vllm_max_model_length or (settings.max_completion_length or 0) + PROMPT,
        budget=settings.max_tokens_per_pass,
        checkpointing=settings.gradient_checkpointing,
        compute=2 if settings.bf16 else 4,
        engine=engine,
        utilization=settings.vllm_gpu_memory_utilization,
        sleep=settings.vllm_enable_sleep_mode,
        engine_ranks=engine_ranks,
        ranks=gpus,
        fsdp2=fsdp2,
        reference=settings.beta > 0 and not hasattr(model, "peft_config"),
    )


def read_config(name: str) -> PretrainedConfig:
    """The config of a model folder, of a model in the Hub's cache, or from the bundled sizes; no download. Else `ValueError`."""
    if name in BUNDLED and not Path(name).exists():
        kind, sizes, more = BUNDLED[name]
        return AutoConfig.for_model(kind, **dict(zip(_SIZES, sizes, strict=True)), **more)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model_name_or_path={name!r} is no folder with a config.json that transformers reads, and its sizes are not bundled "
            f"({', '.join(BUNDLED)}). Download its config.json and give that folder. ({str(error).strip().splitlines()[0]})"
        ) from error
    vars(config).pop("quantization_config", None)
    return config


def skeleton(config: PretrainedConfig, dtype: torch.dtype | str, adapter: Any = None, plan: Any = None) -> nn.Module:
    """The model of `config` on the meta device, with peft's `adapter` and the low-bit layers of `plan`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapter is not None:
        from peft import get_peft_model

        model = get_peft_model(model, adapter)
    return model if plan is None else apply_quantization(model, plan)


def parameters(model: nn.Module, muon: bool, ranks: int = 1) -> tuple[Parameter, ...]:
    """
    The parameters of `model`, tied ones once, with the optimizer that `optim_muon=muon` gives each.

    `ranks` is of FSDP2 that gathers quantized values of float32 master weights, 1 otherwise.
    """
    matrices, experts, _ = split_parameters(model) if muon else ([], {}, [])
    optimizers = dict.fromkeys(matrices, "muon") | dict.fromkeys(experts, "experts")
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    low_bit: dict[int, dict[str, Any]] = {}
    for _, module in quantized_modules(model):
        in_experts = isinstance(module, QuantExperts)
        for name in PROJECTIONS if in_experts else ("weight",):
            weight = getattr(getattr(module, "base_layer", module), name)
            packed = name in module.packed_parameters and weight.dtype == torch.float32
            gathered = packed and gathers_quantized(weight.shape, ranks, module.scheme)
            layers_stored = weight.shape[0] * len(PROJECTIONS[name]) if in_experts else 1  # each expert's projections
            low_bit[id(weight)] = {
                "quantized": _low_bit_bytes(weight, ranks if gathered else 1, module.scheme),
                "gathered": gathered,
                "stored": layers_stored * _low_bit_bytes(weight, layers_stored, module.scheme),
                "rounds_inputs": support_of(module.scheme).activations != "none",
            }
    return tuple(
        Parameter(
            name,
            tuple(param.shape),
            param.element_size(),
            next((layer for layer in layers if name.startswith(layer)), ""),
            optimizers.get(name, "adamw") if param.requires_grad else "",
            **low_bit.get(id(param), {}),
        )
        for name, param in model.named_parameters()
    )


def _low_bit_bytes(weight: nn.Parameter, parts: int, scheme: QuantizationScheme) -> int:
    """Of the low-bit tensors of each of `parts` equal parts of the rows of a weight."""
    rows = math.prod(weight.shape[:-1]) // parts
    return sum(tensor.nbytes for tensor in meta_tensors(scheme, rows, weight.shape[-1]).values())
