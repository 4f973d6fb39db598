"""Check on which devices a run places its model, and how it shards the model."""

from __future__ import annotations

from typing import Any

from .. import _compat
from ..quant.convert import check_shardable
from .types import RunSettings


def check_placement(args: RunSettings) -> None:
    """
    Refuse placements of the model that low-bit layers do not work with.

    Args:
        args: Settings of the run.

    Raises:
        ValueError: for a process with several GPUs, for FSDP1 or offloaded shards, and for schemes that cannot be
            sharded.
    """
    # By default TRL loads with device_map="auto", and the Trainer wraps the model in DataParallel. Both use all GPUs
    # that the process sees.
    if args.n_gpu > 1:
        raise ValueError(f"A process needs one GPU, got {args.n_gpu}: use accelerate launch or CUDA_VISIBLE_DEVICES.")

    fsdp = _compat.fsdp_settings(args)
    zero3 = _compat.is_zero3(args)

    # Under FSDP2 each process has the whole base, and ZeRO-3 would shard it.
    if args.frozen and zero3:
        raise ValueError("lora_base='frozen' runs on one process, DDP or FSDP2. Or use 'merged'.")

    if args.quant_keep_matrices and (fsdp or zero3):
        raise ValueError(
            "quant_keep_matrices must be false under FSDP2 and ZeRO-3, which free the weights of a layer after use."
        )

    if fsdp:
        _check_fsdp(fsdp)

    plan = args.quant_plan()
    if plan is not None and (fsdp or zero3):
        check_shardable(plan)


def _check_fsdp(settings: dict[str, Any]) -> None:
    """Refuse (`ValueError`) FSDP1 and offloaded shards."""
    if int(settings["fsdp_version"]) == 1:
        raise ValueError("FSDP1 flattens the matrices to quantize. Use FSDP2 (recipes/accelerate/fsdp2.yaml).")
    if settings.get("cpu_offload"):
        raise ValueError("fsdp_offload_params must be false: low-bit weights are made from shards on the GPU.")
