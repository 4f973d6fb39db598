"""How a run is sharded, as accelerate and transformers keep it, and what of that is put right.

Invariant: as in `_compat`, the names of others that are not public are known here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.distributed.utils import is_local_dist_rank_0


def fsdp_version(args: Any) -> int | None:
    """Which FSDP the run shards with: by `args.fsdp`, or by `accelerate launch`, which says so in the environment."""
    plugin = args.fsdp_plugin_args
    if plugin is not None:
        return int(plugin["fsdp_version"])
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    return int(os.environ.get("FSDP_VERSION", "1"))


def offloads_parameters(args: Any) -> bool:
    """Whether FSDP keeps the shards on the CPU, by `args.fsdp` or by `accelerate launch`."""
    if args.fsdp_plugin_args is not None:
        return bool(args.fsdp_plugin_args.get("cpu_offload"))
    return fsdp_version(args) is not None and os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"


def loads_weights() -> bool:
    """
    Whether a model that this process loads has its weights at once.

    With FSDP's RAM-efficient loading only the first process of a machine reads them; those of the others are zero until they
    are sharded (`PreTrainedModel._move_missing_keys_from_meta_to_device`, transformers 5.17).
    """
    return not is_fsdp_enabled() or is_local_dist_rank_0()


def keep_log_probs_float32(accelerator: Any) -> None:
    """
    Under FSDP2 in 16-bit precision, let log-probs leave the model as TRL computed them, in float32.

    accelerate's policy casts all that the model returns to the parameters' dtype. bfloat16 log-probs are up to 0.016 apart at
    -3, and the paper's trust bands 0.0004 wide. (`FullyShardedDataParallelPlugin.set_mixed_precision`, accelerate 1.15)
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = None if plugin is None else plugin.mixed_precision_policy
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)
