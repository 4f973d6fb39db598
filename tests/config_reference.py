"""
Every setting of this package, from the help of the dataclasses: docs/config_reference.md.

`python tests/config_reference.py` writes the page.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qarl_trl.config import QaRLConfig
from qarl_trl.methods import DataArguments, DistillationArguments, PromptArguments, QaRLScriptArguments
from qarl_trl.trainers.configs import LowBitDistillationConfig
from qarl_trl.trainers.settings import LowBitConfig


PAGE = Path(__file__).parents[1] / "docs" / "config_reference.md"

HEAD = """# All settings

This page has the settings that the package adds to those of TRL, which keep
[their meaning](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig). Each is a key of a recipe and an option
of the command line (`--quant_scheme W4A16`); those of a trainer are also arguments of its config. `null` is no value,
in a recipe and on the command line.

<!-- Written by tests/config_reference.py from the help of each field. -->
"""

SECTIONS: dict[type, str] = {
    LowBitConfig: "All trainers have these: quantization, engine, weight sync.",
    QaRLConfig: "`qarl-trl train` and `QaRLTrainer` also have these: loss and learner.",
    LowBitDistillationConfig: "`qarl-trl distill` also has:",
    DataArguments: "Recipes of all commands that train have these keys for the data.",
    PromptArguments: "Recipes of `train`, `rloo` and `distill` also have:",
    QaRLScriptArguments: "Recipes of `train` and `rloo` also have:",
    DistillationArguments: "Recipes of `distill` also have:",
}


def page() -> str:
    """The page, in Markdown."""
    lines = [HEAD]

    for config, who in SECTIONS.items():
        lines += [f"## {config.__name__}\n", f"{who}\n"]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]

        # Annotations are texts, because the modules import them from `__future__`.
        types = get_type_hints(config)
        for field in fields(config):
            # The others are TRL's, or in another table.
            if field.name in config.__annotations__:
                cells = [_code(field.name), _kind(types[field.name]), _default(field), _meaning(field)]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")

    return "\n".join(lines)


def _code(value: Any) -> str:
    return f"`{value}`"


def _kind(hint: Any) -> str:
    """A type in words, without the "|" that would end a cell."""
    if hint is NoneType:
        return "`null`"
    if get_origin(hint) is Literal:
        return ", ".join(map(_code, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_kind, get_args(hint)))

    # `str` of a class would be "<class 'int'>". `list[str]` has a name too, which lacks what is in it.
    return _code(hint.__name__ if isinstance(hint, type) else hint)


def _default(field: Field) -> str:
    """The default as a recipe writes it."""
    value = field.default if field.default_factory is MISSING else field.default_factory()

    # YAML's words, not Python's.
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return _code(str(value).lower())

    if isinstance(value, list):
        return ", ".join(map(_code, value))
    return _code(value)


def _meaning(field: Field) -> str:
    """The help text in a cell of a table."""
    # A "|" would end the cell.
    return field.metadata["help"].replace("|", "&#124;")


if __name__ == "__main__":
    PAGE.write_text(page())
