"""Check on which devices a run places its model, and how it shards the model."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from compressed_tensors.quantization import QuantizationConfig

from .._compat.sharding import fsdp_settings, is_zero3
from ..quant.match import check_shardable
from .types import RunSettings


def check_placement(args: RunSettings) -> None:
    """
    Refuse placements of the model that low-bit layers do not work with.

    Args:
        args: Settings of the run.

    Raises:
        ValueError: for a process with several GPUs, for a learner that is cut within layers, for FSDP1, offloaded
            shards or FSDP2 on CPUs, and for schemes that cannot be sharded.
    """
    # By default TRL loads with device_map="auto", and the Trainer wraps the model in DataParallel. Both use all GPUs
    # that the process sees.
    if args.n_gpu > 1:
        raise ValueError(f"A process needs one GPU, got {args.n_gpu}: use accelerate launch or CUDA_VISIBLE_DEVICES.")

    _check_parallelism(args)
    fsdp = fsdp_settings(args)

    # Under FSDP2 each process has the whole base, and ZeRO-3 would shard it. With the other stages of DeepSpeed, which
    # casts all parameters, nobody has tried it.
    if args.frozen and args.deepspeed_plugin is not None:
        raise ValueError("lora_base='frozen' runs on one process, DDP or FSDP2, not with DeepSpeed. Or use 'merged'.")

    if fsdp:
        _check_fsdp(fsdp)
        if args.world_size > 1 and not shards_on(args.device):
            raise ValueError(
                "FSDP2 needs GPUs: on CPUs accelerate would run these processes as DDP, without a word. "
                "On a CPU use torchrun without FSDP (docs/many_gpus.md)."
            )

    if shards_parameters(args):
        check_sharded(args)


def _check_parallelism(args: RunSettings) -> None:
    """Refuse (`ValueError`) a learner whose layers, or whose rollouts' sequences, several processes share."""
    parallelism = args.parallelism_config
    # As `Accelerator.__init__` (accelerate 1.15) reads what its launcher was told.
    if parallelism is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        parallelism = ParallelismConfig()

    loading = args.model_init_kwargs or {}
    is_cut = parallelism is not None and parallelism.tp_enabled
    if is_cut or any(loading.get(name) for name in ("tp_plan", "tp_size", "distributed_config")):
        raise ValueError(
            "The learner must not be tensor-parallel: scales would be those of a part of a weight. Use FSDP2, and "
            "vllm_tensor_parallel_size for the engine."
        )
    # TRL gives each process prompts of its own.
    samples_answers = args.has_engine or getattr(args, "distill_on", None) == "rollouts"
    has_rollouts = hasattr(args, "num_generations") or samples_answers
    if parallelism is not None and has_rollouts and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "cp_size and sp_size must be 1 with rollouts: processes that share a sequence would sample different ones."
        )


def shards_parameters(args: RunSettings) -> bool:
    """Whether FSDP or ZeRO-3 shards the parameters of a run."""
    return bool(fsdp_settings(args)) or is_zero3(args)


def check_sharded(args: RunSettings, source: QuantizationConfig | None = None) -> None:
    """
    The checks of a run under FSDP2 or ZeRO-3 that ask the settings and the plan of a quantized checkpoint alone.

    Args:
        args: Settings of the run.
        source: The plan of the checkpoint that the run starts from; `None` without one, or before it is read.

    Raises:
        ValueError: for matrices that stay, and for schemes that cannot be sharded.
    """
    if args.quant_keep_matrices:
        raise ValueError(
            "quant_keep_matrices must be false under FSDP2 and ZeRO-3, which free the weights of a layer after use."
        )
    plan = args.quant_plan(source)
    if plan is not None:
        check_shardable(plan)


def shards_on(device: torch.device) -> bool:
    """Whether accelerate shards a model over processes on such devices, if it is asked for FSDP."""
    # `AcceleratorState` (accelerate 1.15) takes its FSDP plugin in `MULTI_GPU` and its like; `MULTI_CPU` ignores it.
    return device.type != "cpu"


def _check_fsdp(settings: dict[str, Any]) -> None:
    """Refuse (`ValueError`) FSDP1 and offloaded shards."""
    if int(settings["fsdp_version"]) == 1:
        raise ValueError("FSDP1 flattens the matrices to quantize. Use FSDP2 (recipes/accelerate/fsdp2.yaml).")
    if settings.get("cpu_offload"):
        raise ValueError("fsdp_offload_params must be false: low-bit weights are made from shards on the GPU.")
