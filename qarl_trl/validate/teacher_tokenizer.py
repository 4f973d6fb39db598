"""Check that the teacher of a distillation numbers its tokens as the student does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.logging import get_logger
from transformers import AutoTokenizer

from .prompts import load_tokenizer
from .types import RunSettings, TrainerArguments


logger = get_logger(__name__)

# Share of the tokens that may have another name. Models of one family rename a few: ends, roles, marks of thoughts.
RENAMED = 0.01


def check_teacher_tokenizer(name: str, args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse a teacher with another tokenizer.

    It would read the student's token ids as other text, and teach what comes after that. The two vocabularies may have
    the same size all the same: Llama-2 and Mistral have 32,000 tokens each.

    Args:
        name: The student's name, from which TRL loads the tokenizer if there is none among the arguments.
        args: Settings of the run. Only those of a distillation have a teacher.
        trainer_arguments: All arguments of the trainer by name.

    Raises:
        ValueError: with the first token that differs.
    """
    if not hasattr(args, "teacher_model_name_or_path"):
        return

    teacher: Any = trainer_arguments.get("teacher_model")
    teacher_name = teacher if isinstance(teacher, str) or teacher is None else teacher.config._name_or_path
    # Without a name there are no files of a tokenizer, and a model that teaches itself has its own.
    if not teacher_name or teacher_name == name:
        return

    student: Any = trainer_arguments.get("processing_class") or load_tokenizer(name, args)
    vocabulary = getattr(student, "tokenizer", student).get_vocab()
    of_teacher = _vocabulary_of(teacher_name, args)
    # Without files of a tokenizer transformers makes one of a single token.
    if len(of_teacher) < len(vocabulary) / 2:
        logger.warning("%s has no tokenizer that could be compared with the student's.", teacher_name)
        return
    _check_same(vocabulary, of_teacher)


def _vocabulary_of(name: str, args: RunSettings) -> dict[str, int]:
    """The tokens of a model with their numbers; empty if it has no tokenizer."""
    loading: Any = args
    of_loading = (loading.teacher_model_init_kwargs or {}).get("revision")
    # GKD (TRL 1.16) has no such field.
    revision = of_loading or getattr(loading, "teacher_model_revision", None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    # A tokenizer may need a package that only the teacher's text would need.
    except (OSError, ValueError, ImportError):
        return {}
    return tokenizer.get_vocab()


def _check_same(student: Mapping[str, int], teacher: Mapping[str, int]) -> None:
    """Refuse (`ValueError`) two vocabularies that give more than a few numbers to other tokens."""
    token_of = {number: token for token, number in teacher.items()}
    # A number that only one of them has is no difference: sizes are padded.
    others = [(number, token) for token, number in student.items() if token_of.get(number, token) != token]

    if len(others) > RENAMED * len(student):
        number, token = min(others)
        raise ValueError(
            f"teacher_model must have the student's tokenizer: {len(others)} of {len(student)} tokens differ. "
            f"Token {number} is {token!r} for the student, and {token_of[number]!r} for the teacher."
        )
