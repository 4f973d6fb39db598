"""Errors of a user's input, each in one line that names the file which is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb


# Errors that a user can fix by another setting, file or package.
_OF_THE_USER = (ValueError, OSError, ImportError, OverflowError)
# Errors about a config or a weight file, and about any other file. Their messages mostly lack the name of the file. As
# names of classes, because their packages load late.
_ABOUT_A_MODEL = {"StrictDataclassError", "SafetensorError", "ValidationError"}
_ABOUT_A_FILE = {"YAMLError", "JSONDecodeError", "UnicodeDecodeError"}
# transformers accepts any JSON as a config, and fails where it first uses a value.
_USES_A_CONFIG = re.compile(r"(configuration_utils|loading_report|modeling_\w+)\.py$")


@contextmanager
def naming_config(models: Iterable[str]) -> Iterator[None]:
    """
    Within this context, an error about a model's config or weights names the model's `config.json`.

    Args:
        models: The names that models may be read by. Those that are no model's folder on this machine do not matter.

    Raises:
        ValueError: in place of an error that is about a model.
    """
    try:
        yield
    except Exception as error:
        if not _is_about_a_model(error):
            raise
        configs = [f"{model}/config.json" for model in models if os.path.isfile(f"{model}/config.json")]
        raise ValueError(_with_names(str(error), configs)) from error


def is_of_the_user(error: Exception) -> bool:
    """Whether other input could mend an error, so that a traceback would not help."""
    return isinstance(error, _OF_THE_USER) or bool(_kinds(error) & _ABOUT_A_FILE)


def in_one_line(error: Exception, argv: Sequence[str]) -> str:
    """
    The message of an error.

    Args:
        error: An error of a command.
        argv: The command line. Its files are named if the error is about a file that it does not name.
    """
    text = " ".join(str(error).split())

    # huggingface_hub's message for a folder that does not exist.
    no_folder = re.match(r"Repo id must .*?: '([^']*)'\.", text)
    if no_folder:
        return f"{no_folder[1]!r} is neither a folder here nor a Hub id (user/name)."

    if _kinds(error) & _ABOUT_A_FILE:
        return _with_names(text, [word for word in argv if os.path.exists(word)])
    return text


def _is_about_a_model(error: Exception) -> bool:
    """Whether transformers or safetensors could not use what a model's files say."""
    # A missing file or repository, which the message names.
    if isinstance(error, OSError):
        return False
    if _kinds(error) & _ABOUT_A_MODEL:
        return True

    # Where it was raised: the same kinds of error from elsewhere are faults of a program.
    *_, (last_frame, _) = walk_tb(error.__traceback__)
    return bool(_USES_A_CONFIG.search(last_frame.f_code.co_filename))


def _with_names(message: str, paths: Sequence[str]) -> str:
    """The message, preceded by the paths if it has none of them."""
    if not paths or any(path in message for path in paths):
        return message
    return f"{' or '.join(paths)}: {message}"


def _kinds(error: Exception) -> set[str]:
    """The names of an error's class and of its bases."""
    return {kind.__name__ for kind in type(error).__mro__}
