"""FSDP2 and DeepSpeed ZeRO-3, as accelerate sets them up: their settings, their dtypes, and what they gather."""

from __future__ import annotations

import dataclasses
import os
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel


def fsdp_settings(args: Any) -> dict[str, Any] | None:
    """
    The settings with which a run shards its model by FSDP.

    Args:
        args: The settings of the run. transformers (5.17) has read `args.fsdp` into `fsdp_plugin_args`.

    Returns:
        `fsdp_version`, `cpu_offload` and others, from `args.fsdp` or from `accelerate launch`, which sets environment
        variables (`accelerate.utils.launch`, 1.15); `None` without FSDP.
    """
    # With these the Trainer gives accelerate a plugin, and accelerate makes none from the environment.
    if args.fsdp_plugin_args is not None:
        return args.fsdp_plugin_args
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None

    # `accelerate launch` passes all of its options as text.
    version = int(os.environ.get("FSDP_VERSION", "1"))
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"
    return {"fsdp_version": version, "cpu_offload": offload}


def sharding_of(args: Any) -> str:
    """
    What shards the parameters of a run, by name: neither reads the checkpoints of the other.

    Args:
        args: The settings of the run.
    """
    if fsdp_settings(args) is not None:
        return "FSDP"
    return "none" if args.deepspeed_plugin is None else "DeepSpeed"


def writes_whole_models(accelerator: Any) -> bool:
    """
    Whether the Trainer's `save_model` writes a model under FSDP (transformers 5.17): only with `FULL_STATE_DICT`.

    Args:
        accelerator: The Trainer's, of a run under FSDP.
    """
    return "FULL_STATE_DICT" in str(accelerator.state.fsdp_plugin.state_dict_type)


def is_zero3(args: Any) -> bool:
    """
    Whether DeepSpeed shards the parameters.

    Args:
        args: The settings of a run, or accelerate's state.
    """
    return args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3


def fit_to_zero3(model: PreTrainedModel) -> None:
    """
    Tell DeepSpeed ZeRO-3 that the forward of a model reads its output head, and that it must gather whole decoder
    layers.

    TRL's fused head (`trl.trainer.utils.add_fused_lm_head`) reads it, and DeepSpeed notices that at the first use. If
    it traced the sync check's pass, without the fused head, before, a later pass stops with "tracing error" (DeepSpeed
    0.19.8).

    Hooks around each module in a layer would sum the gradients of the residual stream in another order than autograd,
    and master weights would differ from DDP's. So ZeRO-3 gathers a whole layer, as FSDP2 does. DeepSpeed reduces a
    layer's gradients when its backward ends. If no input of the layer needs a gradient, torch reports that end too
    early.

    Args:
        model: The model, before accelerate prepares it.
    """
    import deepspeed

    # "External" are parameters that another module's forward reads: ZeRO-3 then gathers them for that forward, too.
    for param in model.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(model, param)
    deepspeed.utils.set_z3_leaf_modules(model, list(model._no_split_modules or ()))
    # So that an input of the first layer needs a gradient, also when embeddings are frozen (LoRA).
    model.enable_input_require_grads()


def keep_float32(accelerator: Any) -> None:
    """
    Keep log-probs and sums of gradients in float32, whatever shards the model.

    Args:
        accelerator: Before it prepares the model.
    """
    _keep_float32_under_fsdp2(accelerator)
    plugin: Any = accelerator.state.deepspeed_plugin
    # All of its stages round.
    if plugin is not None:
        _keep_float32_under_deepspeed(plugin.deepspeed_config)


def _keep_float32_under_fsdp2(accelerator: Any) -> None:
    """
    In 16-bit precision, return outputs as the model computes them, and reduce gradients in float32.

    accelerate's policy (`FullyShardedDataParallelPlugin.set_mixed_precision`, 1.15) casts all outputs of the model to
    the parameters' dtype. Around -3, bfloat16 log-probs are up to 0.016 apart, and the paper's trust bands are 0.0004
    wide. If the policy has other fields, `dataclasses.replace` raises `TypeError`.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return

    policy: Any = plugin.mixed_precision_policy
    # FSDP1's policy has no such field. `param_dtype` stays: parameters are gathered in 16 bits.
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None, reduce_dtype=torch.float32)


def _keep_float32_under_deepspeed(config: dict[str, Any]) -> None:
    """
    Reduce and accumulate gradients in float32, unless DeepSpeed's configuration sets another dtype.

    By default DeepSpeed (0.19.8) does both in the dtype of the forward.
    """
    # One key for what is sent, one for what is summed over micro-batches: either alone would round.
    if not config.get("communication_data_type"):
        config["communication_data_type"] = "fp32"

    data_types = dict(config.get("data_types") or {})
    if not data_types.get("grad_accum_dtype"):
        data_types["grad_accum_dtype"] = "fp32"
    config["data_types"] = data_types


def keep_gradients_sharded(accelerator: Any, args: Any) -> None:
    """
    Under FSDP2 reduce the gradients of every micro-batch, unless `args.accelerator_config` decides it.

    The Trainer reduces only after the last one (`Trainer._inner_training_loop`, transformers 5.17). Until then FSDP2
    keeps the whole gradient on every GPU: 16 GB in bfloat16 for 8B parameters. accelerate (1.15) reads the switch from
    `gradient_state.plugin_kwargs`; without that dict this raises `AttributeError`.

    Args:
        accelerator: The Trainer's.
        args: The settings of the run.
    """
    chosen = args.accelerator_config.gradient_accumulation_kwargs or {}
    # Reduced gradients are sharded at once. It costs one reduction more for each further micro-batch.
    if accelerator.is_fsdp2 and "sync_each_batch" not in chosen:
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


def reshard(model: nn.Module) -> None:
    """
    Give a model under FSDP2 its shards back, before somebody names or compares its parameters, or writes to them.

    After a forward without a backward some modules keep whole parameters, which are other objects than their shards:
    the output layer and the last norm, for which accelerate (1.15, `fsdp2_prepare_model`) sets
    `reshard_after_forward=False`, or all of them where a user does. Until the next backward an optimizer that is made
    of them trains nothing, and what is written to the shards counts for no forward.

    Args:
        model: Any model. One that FSDP2 does not shard is left alone.
    """
    if not isinstance(model, FSDPModule):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def parameters_kept(optimizer: Any, model: Any) -> AbstractContextManager:
    """
    Leave an optimizer its parameters while accelerate prepares it and a model that FSDP2 has sharded before.

    accelerate (1.15, `_prepare_fsdp2`) knows parameters by their addresses. Shards without rows, as a process has of
    an adapter whose rank is smaller than the number of processes, all have the address 0, and all but one would train
    no more. If `fsdp2_switch_optimizer_parameters` is gone, this raises `AttributeError`.

    Args:
        optimizer: Made of the shards, also one that accelerate wraps.
        model: The model, sharded.

    Raises:
        ValueError: if the optimizer, one of a script, was made of other parameters, which nothing would train.
    """
    shards = {id(parameter) for parameter in model.parameters()}
    # Copies: accelerate writes into these lists.
    of_groups = [list(group["params"]) for group in optimizer.param_groups]
    if any(id(parameter) not in shards for group in of_groups for parameter in group):
        raise ValueError(
            "The optimizer was made of parameters that are not the model's shards. Make it of "
            "trainer.model.parameters() right after the first train(), or leave it out."
        )

    def put_back(prepared: Any, mapping: dict[int, Any]) -> None:
        for group, parameters in zip(prepared.param_groups, of_groups, strict=True):
            group["params"] = parameters

    return patch("accelerate.accelerator.fsdp2_switch_optimizer_parameters", put_back)


def unsharded_class(model: nn.Module) -> type[nn.Module]:
    """
    The class of a model as its config names it. FSDP2 (torch 2.13) puts one of its own in place, such as
    `FSDPLlamaForCausalLM`, which has `FSDPModule` and then the model's class as its bases.

    Args:
        model: Any model.
    """
    if isinstance(model, FSDPModule):
        return type(model).__mro__[2]
    return type(model)
