"""Turn errors about a user's input into one line that names the wrong file.

When transformers or safetensors cannot use a file, their error mostly does not say which file it was. Its type alone
does not tell either: some errors have classes of their own, others are a plain `KeyError` from inside transformers.
So this module recognizes an error about a file by the name of its class, or by the source file that raised it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import walk_tb


# Errors that a user can fix by another setting, file or package.
_OF_THE_USER = (ValueError, OSError, ImportError, OverflowError)
# Classes of errors about a model's config or weights, and about any other file. Names instead of the classes, because
# importing their packages takes seconds, and most errors are others.
_ABOUT_A_MODEL = {"StrictDataclassError", "SafetensorError", "ValidationError"}
_ABOUT_A_FILE = {"YAMLError", "JSONDecodeError", "UnicodeDecodeError"}
# The modules of transformers that use a model's config. transformers accepts any JSON as a config, and fails with any
# class of error where it first uses a wrong value.
_USES_A_CONFIG = re.compile(r"(configuration_utils|loading_report|modeling_\w+)\.py$")
_LONGEST_LINE = 2000  # characters
# Its functions that make a model, in which other modules and torch use the config.
_MAKES_A_MODEL = re.compile(r"transformers/.*\.py (from_pretrained|from_config|_from_config)$")


@contextmanager
def naming_config(models: Iterable[str]) -> Iterator[None]:
    """
    Within this context, an error about a model's config or weights names the model's `config.json`.

    Args:
        models: Where the model may come from. Names that are not local model folders are ignored.

    Raises:
        ValueError: in place of an error about a model.
        OSError: in place of an error of safetensors about the disk.
    """
    try:
        yield
    except Exception as error:
        if _is_about_the_disk(error):
            raise OSError(str(error)) from error
        if not _is_about_a_model(error):
            raise
        configs = [f"{model}/config.json" for model in models if os.path.isfile(f"{model}/config.json")]
        # The message of a KeyError is the key alone.
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(_with_paths(message, configs)) from error


def is_of_the_user(error: Exception) -> bool:
    """Whether the user can fix an error by other input. Then one line helps more than a traceback."""
    return isinstance(error, _OF_THE_USER) or bool(_class_names(error) & _ABOUT_A_FILE)


def in_one_line(error: Exception, argv: Sequence[str]) -> str:
    """
    The message of an error.

    Args:
        error: An error of a command.
        argv: The command line. If the error is about the content of a file and does not name it, all files of the
            command line are named.
    """
    text = " ".join(str(error).split())

    # huggingface_hub's message for a folder that does not exist.
    no_folder = re.match(r"Repo id must .*?: '([^']*)'\.", text)
    if no_folder:
        return f"{no_folder[1]!r} is neither a folder here nor a Hub id (user/name)."

    if _class_names(error) & _ABOUT_A_FILE:
        text = _with_paths(text, [word for word in argv if os.path.exists(word)])
    # transformers lists all its models.
    if len(text) <= _LONGEST_LINE:
        return text
    beginning = text[:_LONGEST_LINE]
    return f"{beginning.rpartition(' ')[0] or beginning} [...]"


def _is_about_the_disk(error: Exception) -> bool:
    """Whether safetensors got an error of the system, such as a full disk: it has no class of its own for them."""
    return "SafetensorError" in _class_names(error) and re.search(r"\(os error \d+\)", str(error)) is not None


def _is_about_a_model(error: Exception) -> bool:
    """Whether transformers or safetensors could not use the content of a model's files."""
    # An `OSError` is about a missing file or repository, and its message has the name.
    if isinstance(error, OSError):
        return False
    if _class_names(error) & _ABOUT_A_MODEL:
        return True

    # The same class of error out of other code is a bug, not bad input; and no memory is no error of a config.
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, KeyError | AttributeError | TypeError | RuntimeError) and not is_of_the_user(error):
        places = [f"{code.co_filename} {code.co_name}" for code in codes]
        if "OutOfMemoryError" not in _class_names(error) and any(map(_MAKES_A_MODEL.search, places)):
            return True
    return bool(_USES_A_CONFIG.search(codes[-1].co_filename))  # the innermost, which raised the error


def _with_paths(message: str, paths: Sequence[str]) -> str:
    """The message after the paths, unless it has one of them already."""
    if not paths or any(path in message for path in paths):
        return message
    return f"{' or '.join(paths)}: {message}"


def _class_names(error: Exception) -> set[str]:
    """The names of an error's class and of its base classes."""
    return {kind.__name__ for kind in type(error).__mro__}
