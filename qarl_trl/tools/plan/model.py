"""Convert the settings of a run to numbers, by a model without weights, prepared as the trainer prepares the real one."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ...quant import apply_quantization
from ...quant.convert import quantized_modules
from ...quant.experts import PROJECTIONS, QuantExperts, num_experts
from ...quant.gathers import gathers_quantized
from ...quant.quantize import meta_tensors
from ...quant.scheme import support_of
from ...quant.start import quantized_source
from .items import GIB, Parameter, Run


PROMPT = 512  # tokens, assumed if nothing limits the length
MOST = 10**6  # limit for GPUs and their GiB, far above real ones
# The relevant fields of config.json for each model that README, recipes and TRL's docs name; its variants share them.
BUNDLED = json.loads(Path(__file__).with_name("models.json").read_text())
_kept: dict[str, nn.Module] = {}
VARIANT = re.compile(r"-(Base|Instruct|Math|2507)(?=-|$)")


def plan_run(settings: Any, model_args: Any, gpus: int, memory: float, sharding: str | None) -> Run:
    """
    The run of `settings` (`QaRLConfig`) and TRL's `model_args` on `gpus` of `memory` GiB each.

    `sharding` is "ddp" or "fsdp2" (the default). `ValueError` for a run that cannot work, or an unknown model.
    """
    for name, value in {"gpus": gpus, "memory": memory}.items():
        if not 0 < value <= MOST:
            raise ValueError(f"--{name} must be a number above 0, at most {MOST}, got {value:g}.")
    engine = settings.vllm_mode if settings.use_vllm else ""
    engine_ranks = settings.vllm_tensor_parallel_size
    if engine_ranks < 1 or (engine == "colocate" and gpus % engine_ranks):
        raise ValueError(f"vllm_tensor_parallel_size={engine_ranks} must divide the GPUs, got --gpus {gpus}.")
    name = model_args.model_name_or_path
    config, source = read_config(name), quantized_source(name) if settings.from_checkpoint else None
    plan = settings.quant_plan(None if source is None else source.plan())
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        raise ValueError(f"plan needs a model with attention, got {name} ({config.model_type}).")
    dtype = (settings.model_init_kwargs or {}).get("dtype") or model_args.dtype or "float32"
    dtype = (config.dtype or "float32") if dtype == "auto" else dtype
    adapter = None
    if model_args.use_peft:
        from trl import get_peft_config  # loads pandas and datasets

        adapter = get_peft_config(model_args)
    model = skeleton(config, dtype, adapter, plan)
    frozen, fsdp2 = settings.frozen, gpus > 1 and sharding != "ddp"
    if frozen and (adapter is None or num_experts(config) or engine == "server"):
        raise ValueError("lora_base='frozen' needs use_peft: true, a model without experts, and vllm_mode='colocate'.")
    optim = "muon" if settings.optim_muon else settings.optim.value
    gathers = fsdp2 and settings.quantize_learner and settings.quant_kernel != "engine" and not frozen
    return Run(
        parameters=parameters(model, optim, gpus if gathers else 1, frozen),
        config=config.get_text_config(),
        low_bit_forward=plan is not None and settings.quantize_learner,
        memory=int(memory * GIB),
        rows=settings.per_device_train_batch_size,
        tokens=settings.vllm_max_model_length or (settings.max_completion_length or 0) + PROMPT,
        budget=settings.max_tokens_per_pass,
        checkpointing=settings.gradient_checkpointing,
        compute=2 if settings.bf16 else 4,
        engine=engine,
        utilization=settings.vllm_gpu_memory_utilization,
        sleep=settings.vllm_enable_sleep_mode,
        frozen=frozen,
        engine_ranks=engine_ranks,
        ranks=gpus,
        fsdp2=fsdp2,
        reference=settings.beta > 0 and not hasattr(model, "peft_config"),
    )


def read_config(name: str) -> PretrainedConfig:
    """The config of a model folder, of a model in the Hub's cache, or from the bundled sizes, without download; else `ValueError`."""
    if (known := BUNDLED.get(VARIANT.sub("", name))) and not Path(name).exists():
        return AutoConfig.for_model(**known)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model_name_or_path={name!r} is not a folder with a config.json that transformers reads, and its sizes are not bundled "
            f"({', '.join(BUNDLED)}). Download its config.json and give that folder. ({str(error).strip().splitlines()[0]})"
        ) from error
    vars(config).pop("quantization_config", None)
    return config


def skeleton(config: PretrainedConfig, dtype: torch.dtype | str, adapter: Any = None, plan: Any = None) -> nn.Module:
    """The model of `config` on the meta device, with peft's `adapter` and the low-bit layers of `plan`. Do not change it: it is cached."""
    key = repr((config.to_dict(), dtype, adapter, plan))
    if key not in _kept:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if adapter is not None:
            from peft import get_peft_model

            model = get_peft_model(model, adapter)
        _kept[key] = model if plan is None else apply_quantization(model, plan)
    return _kept[key]


def parameters(model: nn.Module, optim: str, ranks: int = 1, frozen: bool = False) -> tuple[Parameter, ...]:
    """
    The parameters of `model` (tied ones once), each with its optimizer for TRL's `optim`, or "muon".

    `ranks` counts the processes if FSDP2 gathers quantized values, else it is 1; `frozen` low-bit weights have no master weights.
    """
    optimizers, other = {}, optim
    if optim == "muon":
        from ...optim import split_parameters  # loads the Trainer

        matrices, experts, _ = split_parameters(model)
        optimizers = dict.fromkeys(matrices, "muon") | dict.fromkeys(experts, "experts")
        other = "adamw_torch"
    layers = [f"{name}." for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    low_bit: dict[int, dict[str, Any]] = {}
    schemes: dict[int, QuantizationScheme] = {}

    @cache  # most layers are alike
    def nbytes(rows: int, columns: int, scheme: int) -> int:
        return sum(tensor.nbytes for tensor in meta_tensors(schemes[scheme], rows, columns).values())

    for _, module in quantized_modules(model):
        in_experts = isinstance(module, QuantExperts)
        for name in PROJECTIONS if in_experts else ("weight",):
            weight = getattr(getattr(module, "base_layer", module), name)
            packed = name in module.packed_parameters and weight.dtype == torch.float32
            gathered = packed and gathers_quantized(weight.shape, ranks, module.scheme)
            layers_stored = weight.shape[0] * len(PROJECTIONS[name]) if in_experts else 1  # each expert's projections
            rows, kind = math.prod(weight.shape[:-1]), (weight.shape[-1], id(module.scheme))
            schemes[id(module.scheme)] = module.scheme
            low_bit[id(weight)] = {
                "quantized": nbytes(rows // (ranks if gathered else 1), *kind),
                "gathered": gathered,
                "stored": layers_stored * nbytes(rows // layers_stored, *kind),
                "rounds_inputs": support_of(module.scheme).activations != "none",
            }
    return tuple(
        Parameter(
            name,
            tuple(param.shape),
            0 if frozen and id(param) in low_bit else param.element_size(),
            next((layer for layer in layers if name.startswith(layer)), ""),
            optimizers.get(name, other) if param.requires_grad else "",
            **low_bit.get(id(param), {}),
        )
        for name, param in model.named_parameters()
    )
