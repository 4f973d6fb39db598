"""Check the teacher of a distillation before a model loads."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..quant.names import base_model
from ..quant.source import CheckpointSource
from .types import RunSettings, TrainerArguments


def check_teacher(
    model: str | nn.Module,
    config: PretrainedConfig,
    source: CheckpointSource | None,
    args: RunSettings,
    trainer_arguments: TrainerArguments,
) -> None:
    """
    Refuse a teacher of another vocabulary, and one that has nothing to teach.

    Args:
        model: The student, or its name.
        config: The student's config.
        source: The quantized checkpoint that the run starts from.
        args: Settings of the run. Only those of a distillation have a teacher.
        trainer_arguments: All arguments of the trainer by name.

    Raises:
        ValueError: if the teacher is not found or is a part of the student, the vocabularies differ, or a quantized
            checkpoint would be its own teacher.
    """
    if not hasattr(args, "teacher_model_name_or_path"):
        return

    teacher: Any = trainer_arguments.get("teacher_model")
    # Its own start comes as the student's name, or as `None` where the base of an adapter teaches.
    if source is not None and teacher in (None, model):
        raise ValueError(
            "teacher_model_name_or_path is missing: the run starts from a quantized checkpoint, whose own weights "
            "have nothing to teach. Name the model that it was made from."
        )
    is_own_start = teacher in (None, model) and not args.teacher_model_name_or_path
    if is_own_start and getattr(args, "teacher_model_revision", None):
        raise ValueError(
            f"teacher_model_revision={args.teacher_model_revision!r} needs teacher_model_name_or_path: here the "
            "student's start teaches, in the revision that the student has. Name the teacher, also if it is the same "
            "model on another branch."
        )
    # Its own start has its vocabulary.
    if teacher is None:
        return

    check_same_vocabulary(_config_of(teacher, args), config)
    if isinstance(teacher, nn.Module) and isinstance(model, nn.Module):
        _check_apart(teacher, model, args.quantized)


def _check_apart(teacher: nn.Module, student: nn.Module, quantized: bool) -> None:
    """Refuse (`ValueError`) a teacher that has trained weights or layers of the student: both would be one model."""
    trained = {id(parameter) for parameter in student.parameters() if parameter.requires_grad}
    # A student may share what stays as it is: in high precision all that is frozen.
    layers = {id(module) for module in student.modules() if isinstance(module, nn.Linear)}
    parts = layers if quantized else set()
    # In low bits such as a frozen embedding or output layer.
    base = base_model(student)
    if isinstance(base, PreTrainedModel):
        parts.discard(id(base.get_output_embeddings()))

    shared = [name for name, module in teacher.named_modules() if id(module) in parts]
    shared += [name for name, parameter in teacher.named_parameters() if id(parameter) in trained]
    if shared:
        raise ValueError(
            f"teacher_model has {shared[0]!r} and {len(shared) - 1} more parts in common with the student, which "
            "would be frozen or quantized in both. Leave teacher_model out, so that the student's start teaches, or "
            "give a copy: copy.deepcopy(model)."
        )


def teacher_to_load(args: RunSettings, trainer_arguments: TrainerArguments) -> PretrainedConfig | None:
    """
    The config of a teacher that loads as a second model.

    Args:
        args: Settings of the run.
        trainer_arguments: All arguments of the trainer by name.

    Returns:
        `None` for other trainers, for a teacher that is in memory already, and for one that is quantized, of which
        nothing tells the bytes.
    """
    teacher: Any = trainer_arguments.get("teacher_model")
    if not hasattr(args, "teacher_model_name_or_path") or not isinstance(teacher, str):
        return None
    config = _config_of(teacher, args)
    return None if getattr(config, "quantization_config", None) is not None else config


def check_same_vocabulary(teacher: PretrainedConfig, student: PretrainedConfig) -> None:
    """
    Refuse a teacher of another vocabulary.

    Args:
        teacher: The teacher's config.
        student: The student's config.

    Raises:
        ValueError: with the two sizes.
    """
    vocabulary = student.get_text_config().vocab_size
    of_teacher = teacher.get_text_config().vocab_size
    if of_teacher != vocabulary:
        raise ValueError(
            f"teacher_model must have the student's vocabulary of {vocabulary} tokens, got {of_teacher}: the loss "
            "compares the two token by token."
        )


def _config_of(teacher: Any, args: RunSettings) -> PretrainedConfig:
    """The config of a teacher, or of a teacher's name."""
    if not isinstance(teacher, str):
        return teacher.config
    loading = getattr(args, "teacher_model_init_kwargs", None) or {}
    revision = loading.get("revision") or getattr(args, "teacher_model_revision", None)
    try:
        return AutoConfig.from_pretrained(teacher, revision=revision, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        # Not every message of transformers has the name.
        reason = str(error).partition("\n")[0]
        raise ValueError(f"teacher_model={teacher!r} cannot be read: {reason}") from error
