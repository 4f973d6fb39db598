"""What the constructor of a TRL trainer makes: its engine, its models, and the reference under FSDP2."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from inspect import Parameter
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_enabled
from transformers.distributed.utils import is_local_dist_rank_0


# Where TRL's trainers that have an engine import its class from, if they import it late. A name, because importing the
# module imports vLLM, which the checks of settings do not need.
ENGINE_HOME = "trl.generation.vllm_generation"
# By which TRL's trainers load models that are given by name.
_LOADER = "create_model_from_path"


def trl_class(trainer_class: type) -> type:
    """
    The nearest trainer of TRL that a class subclasses: its `__init__` is the one that runs.

    Args:
        trainer_class: A subclass of a trainer of TRL.

    Raises:
        TypeError: if it is none.
    """
    for base in trainer_class.__mro__:
        if base.__module__.startswith("trl."):
            return base
    raise TypeError(f"{trainer_class.__name__} must subclass a trainer of TRL.")


def trl_module(trainer_class: type) -> str:
    """
    The module of the TRL trainer whose constructor makes engine and models: it looks names up there.

    A subclass in TRL may have a constructor that only calls the one above it (GMPO in TRL 1.16).

    Args:
        trainer_class: A subclass of a trainer of TRL.

    Raises:
        TypeError: if it is none.
    """
    nearest = trl_class(trainer_class).__module__
    for base in trainer_class.__mro__:
        if base.__module__.startswith("trl.") and hasattr(import_module(base.__module__), _LOADER):
            return base.__module__
    return nearest


def bind_arguments(
    constructor: Callable[..., Any], trainer_class: type, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """
    The arguments of a trainer by their names.

    Args:
        constructor: The one that gets them, bound: of a trainer of TRL, or of a user's subclass of one. A user's may
            pass `*args` and `**kwargs` on, beside arguments of its own.
        trainer_class: The class of the trainer that is made.
        positional: The arguments by place.
        named: The arguments by name.

    Returns:
        First those by place, in their order. A user's own are among them.

    Raises:
        TypeError: if they do not fit, or if the constructor hides which of them is the model.
    """
    signature = inspect.signature(constructor)
    signature.bind(*positional, **named)

    by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    places = [parameter.name for parameter in signature.parameters.values() if parameter.kind in by_place]
    if len(positional) > len(places):
        # The others are passed on by `*args`.
        of_trl = list(inspect.signature(trl_class(trainer_class)).parameters)
        places = of_trl if of_trl[: len(places)] == places else []

    arguments = {**dict(zip(places, positional, strict=False)), **named}
    if "model" not in arguments:
        raise TypeError(
            f"The constructor that {trainer_class.__name__} calls must have an argument `model`, or pass *args and "
            f"**kwargs on, got {signature}. Give the model and what follows by name: model=..., args=..."
        )
    return arguments


def loads_by_name(trainer_class: type) -> bool:
    """
    Whether a TRL trainer loads a model that is given by name with TRL's own function.

    Args:
        trainer_class: A subclass of a trainer of TRL.
    """
    return hasattr(import_module(trl_module(trainer_class)), _LOADER)


def streams_its_weights(trainer_class: type) -> bool:
    """
    Whether a TRL trainer sends an engine its parameters as they are, by itself.

    TRL's asynchronous trainers (1.16, experimental) do, in `_streaming_iter`. A subclass may replace it.

    Args:
        trainer_class: A subclass of a trainer of TRL.
    """
    stream = getattr(trainer_class, "_streaming_iter", None)
    return stream is not None and stream.__module__.startswith("trl.")


@contextmanager
def construction(
    trainer_class: type,
    build_engine: Callable[..., Any],
    load: Callable[..., Any] | None,
    join_digest: Callable[[str, Any], str],
) -> Iterator[None]:
    """
    Make the constructor of a TRL trainer build its engine and load its models our way.

    Replaced in the trainer's module (TRL 1.16): `VLLMGeneration`, `create_model_from_path`, `prepare_fsdp`, and
    `hash_module` where a trainer keeps log-probs of its reference (DPO, KTO). TRL has no argument for the first two
    (https://github.com/huggingface/trl/pull/6816 would add one for the engine). If a name is gone, `patch` raises
    `AttributeError`; if TRL builds its engine by another one, `LowBitMixin` raises, because the engine is not ours.

    Args:
        trainer_class: A subclass of a trainer of TRL.
        build_engine: Stands for TRL's `VLLMGeneration`, with its arguments.
        load: Loads the policy and the reference, called as `load(name, **model_init_kwargs)`. TRL's own loader
            (`None`) would give a compressed checkpoint to transformers' quantizer, whose model has no master weights.
        join_digest: Joins to TRL's digest of a model what that has not, called as `join_digest(digest, model)`.
    """
    module = import_module(trl_module(trainer_class))

    # TRL's GRPO, RLOO and distillation import the class at the top of their module, so it must be replaced there. SDFT
    # and SDPO import it within a function, which reads its home at that time.
    engine_home = ENGINE_HOME
    if hasattr(module, "VLLMGeneration"):
        engine_home = module.__name__

    with ExitStack() as stack:
        stack.enter_context(patch(f"{engine_home}.VLLMGeneration", build_engine))
        stack.enter_context(_shared_zeros())
        if hasattr(module, "prepare_fsdp"):
            stack.enter_context(_sharded_reference(module.__name__))
        # On a class of accelerate, not in TRL's module: TRL calls it as a method.
        stack.enter_context(_prepared_teacher())
        if load is not None:
            stack.enter_context(patch(f"{module.__name__}.{_LOADER}", load))
        if hasattr(trainer_class, "_precompute_ref_logps"):
            stack.enter_context(_joined_digest(module, join_digest))
        yield


def _joined_digest(module: Any, join_digest: Callable[[str, Any], str]) -> AbstractContextManager:
    """Join to the digest that TRL's trainer makes of its reference what `join_digest` adds."""
    original = module.hash_module

    def hash_module(model: Any) -> str:
        return join_digest(original(model), model)

    return patch.object(module, "hash_module", hash_module)


@contextmanager
def _shared_zeros() -> Iterator[None]:
    """
    With FSDP's RAM-efficient loading, keep the models of processes that read no weights small.

    One process of a machine reads the weights and sends the others their shards. transformers (5.17) loads the weights
    in the others, too, and then fills their models with zeros as large as the real model: 32 GB in float32 for 8B
    parameters, seven times. Here they load onto the meta device, and all entries of a parameter share one zero. A
    write to it raises. Replaced are `_load_pretrained_model` and `_move_missing_keys_from_meta_to_device` of
    `PreTrainedModel`; if one is gone, this raises `AttributeError`.
    """
    original_load = PreTrainedModel._load_pretrained_model
    original_fill = PreTrainedModel._move_missing_keys_from_meta_to_device

    def load(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, **of_adapter: Any
    ) -> Any:
        # An adapter of a reward model loads into a model that has its zeros already.
        if is_fsdp_enabled() and not is_local_dist_rank_0() and not of_adapter:
            load_config = dataclasses.replace(load_config, device_map={"": "meta"})
        return original_load(model, state_dict, checkpoint_files, load_config, **of_adapter)

    def fill(model: PreTrainedModel, *args: Any) -> None:
        if not is_fsdp_enabled() or is_local_dist_rank_0():
            return original_fill(model, *args)

        # Parameters and buffers are on the meta device here: they have a shape and a dtype, but no memory.
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            parent, _, local = name.rpartition(".")
            setattr(model.get_submodule(parent), local, _zeros_like(tensor))

    with (
        patch.object(PreTrainedModel, original_load.__name__, staticmethod(load)),
        patch.object(PreTrainedModel, original_fill.__name__, fill),
    ):
        yield


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU: for a parameter one zero that all its entries share, for a buffer ordinary ones."""
    # transformers computes some buffers afterwards, in place (rotary frequencies), and they are small.
    if not isinstance(tensor, torch.nn.Parameter):
        return torch.zeros_like(tensor, device="cpu")

    # Strides of 0: the tensor has the shape that accelerate shards by, and the memory of one number. torch
    # allows no gradients of integers.
    zero = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return torch.nn.Parameter(zero, requires_grad=tensor.is_floating_point())


def _sharded_reference(module: str) -> AbstractContextManager:
    """
    Under FSDP2 send all processes the weights of the reference model.

    TRL's `prepare_fsdp` (1.16) shards it by `fully_shard` alone, so the shards of processes that read no weights would
    stay zero. accelerate's `fsdp2_prepare_model` sends them the weights, as for the policy. If either is gone, the
    import raises.
    """
    from trl.models import prepare_fsdp

    # In evaluation mode, as TRL's own function leaves a reference: a dropout would make it another model.
    def prepare(model: PreTrainedModel, accelerator: Any) -> Any:
        if accelerator.is_fsdp2:
            return fsdp2_prepare_model(accelerator, model).eval()
        return prepare_fsdp(model, accelerator).eval()

    return patch(f"{module}.prepare_fsdp", prepare)


def _prepared_teacher() -> AbstractContextManager:
    """
    Freeze a distillation's teacher, and under FSDP2 shard it and send all processes its weights.

    TRL (1.16) prepares it by accelerate's `Accelerator.prepare_model(teacher, evaluation_mode=True)`, which leaves a
    model as it is under FSDP2. It would stay on the CPU, and with RAM-efficient loading it would be zero in all
    processes but the first, without an error. So would TRL's reward models, which stay whole: they get the weights.

    Weights that want a gradient cost more memory, and a teacher's get none. Autocast keeps the copies that it makes of
    them until the loss is done (torch, `cached_cast`), and accelerate (1.15) shards them in float32, whatever their
    dtype is.
    """
    original = Accelerator.prepare_model

    def prepare(
        accelerator: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        # The policy comes with `evaluation_mode=False`. TRL's reward models come with a `device_placement`, which says
        # that they must be whole on a device.
        is_left_alone = not evaluation_mode or device_placement is not None
        if not is_left_alone:
            model.requires_grad_(False)
            if accelerator.is_fsdp2:
                return fsdp2_prepare_model(accelerator, model).eval()
        prepared = original(accelerator, model, device_placement, evaluation_mode)
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)
        if evaluation_mode and is_left_alone and fsdp is not None and fsdp.cpu_ram_efficient_loading:
            for tensor in (*model.parameters(), *model.buffers()):
                torch.distributed.broadcast(tensor.detach(), src=0)
        return prepared

    return patch.object(Accelerator, original.__name__, prepare)
