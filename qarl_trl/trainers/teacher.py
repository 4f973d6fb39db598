"""The teacher of a distillation whose teacher is the run's own start, in the form that costs least memory.

- With an adapter that is merged before each quantization, the base weights never change. They are the teacher, and
  cost nothing ([`BaseOfAdapter`]).
- Without an adapter the master weights are trained, and a frozen base has only low-bit weights. Then the teacher is a
  second model. TRL loads it in the dtype of the checkpoint: 2 bytes a weight in bfloat16, beside 16 of a student that
  is trained with AdamW in float32.
- Beside an FP8 key-value cache all layers of the student round keys and values: there, too, the teacher is a second
  model.
- FSDP2 and ZeRO-3 gather low-bit weights of a layer, or all of them for one model at a time: there, too, the teacher
  is a second model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger
from torch import nn

from .._compat.sharding import fsdp_settings, is_zero3
from ..checkpoints.same_run import run_of_masters
from ..quant.layers.layer import multiplying
from ..quant.names import adapter_configs, base_model
from .loading import load_whole


logger = get_logger(__name__)


def teaches_by_its_base(args: Any, peft_config: Any, is_sharded: bool) -> bool:
    """
    Whether the base weights of an adapter are the teacher.

    Args:
        args: The config of the run.
        peft_config: The adapter that the run adds to its model; `None` without one.
        is_sharded: Whether FSDP2 or ZeRO-3 shards the run.

    Raises:
        ValueError: if they are, and the config has settings for a teacher that is loaded.
    """
    # The base would attend to the rounded keys and values of the student.
    rounds_cache = args.aligned_cache is not None
    if rounds_cache or is_sharded or not _base_never_changes(args, peft_config):
        return False

    if args.teacher_model_init_kwargs:
        raise ValueError(
            f"teacher_model_init_kwargs={args.teacher_model_init_kwargs!r} needs a teacher that is loaded: here "
            "the base below the student's adapter teaches. Leave it out, or name the teacher "
            "(teacher_model_name_or_path), also if it is the same model."
        )
    return True


def _base_never_changes(args: Any, peft_config: Any) -> bool:
    """Whether a run keeps the weights of its start, below an adapter."""
    if peft_config is None or args.frozen:
        return False
    # Of such modules, among them the output layer, the adapter trains copies.
    return not getattr(peft_config, "modules_to_save", None)


def check_own_start(model: str | nn.Module, args: Any) -> None:
    """
    Refuse a run whose own start cannot be its teacher.

    Args:
        model: The trainer's model, or its name.
        args: The config of the run.

    Raises:
        ValueError: if the student would equal its start, or the model has an adapter already.
    """
    if not (args.quantized and args.quantize_learner):
        raise ValueError(
            "teacher_model_name_or_path is missing: without low-bit weights in the learner, the student equals its "
            "own start. Name a teacher, or set quant_scheme and quantize_learner."
        )
    if not isinstance(model, str) and adapter_configs(model, None):
        raise ValueError("A PeftModel has no start of its own to learn from: merge it, or give teacher_model.")


def teacher_of_own_start(model: str | nn.Module, args: Any, peft_config: Any) -> str | nn.Module | None:
    """
    The `teacher_model` of a run that learns from its own start.

    Args:
        model: The trainer's model, or its name.
        args: The config of the run.
        peft_config: The adapter that the run adds to its model; `None` without one.

    Returns:
        `None` if the base of the adapter teaches.

    Raises:
        ValueError: as [`check_own_start`] and [`teaches_by_its_base`].
    """
    check_own_start(model, args)
    warn_of_masters(name_of_teacher(model), args.model_init_kwargs)
    is_sharded = fsdp_settings(args) is not None or is_zero3(args)
    if teaches_by_its_base(args, peft_config, is_sharded):
        return None
    return own_start(model)


def warn_of_masters(name: str, loading: dict[str, Any] | None) -> None:
    """
    Warn of a teacher that a low-bit run trained to be rounded, and that is to teach as it is.

    Args:
        name: The teacher's name.
        loading: The arguments by which it loads.
    """
    run = run_of_masters(name, loading)
    if run:
        logger.warning(
            f"{name} has master weights of a low-bit run, which are good only rounded, and is the teacher without "
            "rounding. Set teacher_model_name_or_path to the model that the first run began with (this one: "
            f"{run['model']!r})."
        )


def own_start(model: str | nn.Module) -> str | nn.Module:
    """
    The start of a run as a second model: its name, or a copy of a model that is loaded.

    Args:
        model: The trainer's model, or its name.
    """
    return model if isinstance(model, str) else copy.deepcopy(model)


def for_policy_alone(
    args: Any, load: Callable[..., Any] | None, model: Any, teacher: Any
) -> Callable[..., Any] | None:
    """
    Have one function load the policy, and [`load_whole`] the teacher, which stays in high precision.

    Args:
        args: The config of the run.
        load: Loads the policy; `None` for TRL's loader.
        model: The policy, or its name.
        teacher: The same of a teacher; `None` without one: another model is a reference, and loads as the policy does.
    """
    if load is None or not isinstance(teacher, str):
        return load
    names = [model] if isinstance(model, str) else []

    def load_next(name: str, *architecture: Any, **loading: Any) -> Any:
        if name not in names:
            return load_whole(args, name, *architecture, **loading)
        # The teacher may have the same name. TRL loads the policy first.
        names.remove(name)
        return load(name, *architecture, **loading)

    return load_next


def name_of_teacher(teacher: Any) -> str:
    """
    The name by which a resumed run is compared with its checkpoint: that of a loaded model is where it came from.

    Args:
        teacher: The teacher, or its name.
    """
    if isinstance(teacher, str):
        return teacher
    # One that a script built has no name.
    return base_model(teacher).config._name_or_path or type(teacher).__name__


def loading_of_own_start(args: Any) -> dict[str, Any]:
    """
    The `teacher_model_init_kwargs` with which the start of a run loads: those of the student, but for the dtype.

    Args:
        args: The config of the run. Its `teacher_model_init_kwargs` come first.
    """
    # The student's dtype is that of master weights, float32. A teacher needs only that of its checkpoint.
    loading = {name: value for name, value in (args.model_init_kwargs or {}).items() if name != "dtype"}
    return loading | (args.teacher_model_init_kwargs or {})


class BaseOfAdapter(nn.Module):
    """
    The base of a student's adapter in high precision, in the place of TRL's teacher model.

    Args:
        student: The `PeftModel`, whose low-bit layers merge the adapter before each quantization.
    """

    def __init__(self, student: Any) -> None:
        super().__init__()
        # Not as an attribute: it would become a part of this module, and `eval()` would reach it.
        self._of = (student,)

    @property
    def config(self) -> Any:
        """The student's config."""
        return self._of[0].config

    def get_output_embeddings(self) -> nn.Module:
        """The output layer, which no adapter changes."""
        return self._of[0].get_output_embeddings()

    def base_model(self, **inputs: Any) -> Any:
        """
        The backbone's forward, called as TRL calls that of a model.

        Args:
            inputs: The arguments of the backbone of transformers' model.
        """
        (student,) = self._of
        was_training = student.training
        # Both are needed: without an adapter the layers would still multiply by the quantized base.
        with multiplying(student, low_bits=False), student.disable_adapter():
            # A teacher has no dropout.
            student.eval()
            try:
                return student.get_base_model().base_model(**inputs)
            finally:
                student.train(was_training)
