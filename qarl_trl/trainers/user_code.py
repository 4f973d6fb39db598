"""Which code of a trainer is a user's: a class, a callback, a method. It may do what no library does."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import TrainerCallback


# Whose code is no user's.
LIBRARIES = ("qarl_trl", "trl", "transformers", "accelerate", "torch")


def is_of_library(module: str) -> bool:
    """
    Whether a module belongs to this library or to one of those that it builds on.

    Args:
        module: Its dotted name.
    """
    return module.partition(".")[0] in LIBRARIES


def callback_of_user(trainer: Any, event: str) -> Any | None:
    """
    The first callback of a user that acts on an event; `None` if there is none.

    Args:
        trainer: A trainer.
        event: The name of the callbacks' method.
    """
    for callback in trainer.callback_handler.callbacks:
        acts = getattr(type(callback), event, None) is not getattr(TrainerCallback, event) or event in vars(callback)
        if acts and not is_of_library(type(callback).__module__):
            return callback
    return None


def method_of_user(trainer: Any, methods: tuple[str, ...]) -> str | None:
    """
    The first of some methods that is a user's, of a class or put in place of the trainer's by a script; or `None`.

    Args:
        trainer: A trainer.
        methods: Names. Those that the trainer lacks do not count.
    """
    for method in methods:
        function = getattr(trainer, method, None)
        # Through decorators: a wrapper by functools.wraps has the name and the module of what it wraps.
        while function is not None:
            while isinstance(function, partial):
                function = function.func
            code = getattr(function, "__func__", function)
            scope = getattr(code, "__globals__", {})
            module = scope.get("__name__") or getattr(code, "__module__", None) or ""
            if module and not is_of_library(module):
                return method
            function = getattr(code, "__wrapped__", None)
    return None
