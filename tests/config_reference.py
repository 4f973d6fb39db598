"""
Every setting of this package, from the help of the dataclasses: docs/config_reference.md.

`python tests/config_reference.py` writes the page.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pathlib import Path

from qarl_trl.config import QaRLConfig
from qarl_trl.methods import DataArguments, DistillationArguments, PromptArguments, QaRLScriptArguments
from qarl_trl.trainers.configs import LowBitDistillationConfig
from qarl_trl.trainers.settings import LowBitConfig


PAGE = Path(__file__).parents[1] / "docs" / "config_reference.md"

HEAD = """# All settings

This page has the settings that the package adds to those of TRL, which keep
[their meaning](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig). Each is a key of a recipe and an option
of the command line (`--quant_scheme W4A16`); those of a trainer are also arguments of its config.

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
        lines += [_row(field) for field in fields(config) if field.name in config.__annotations__]
        lines.append("")
    return "\n".join(lines)


def _row(field: Field) -> str:
    """A row of the table of a dataclass."""
    kind = field.type.replace(" | ", " or ")  # a "|" would end the cell
    return f"| `{field.name}` | `{kind}` | `{_default(field)}` | {field.metadata['help']} |"


def _default(field: Field) -> str:
    """The default as a recipe writes it."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, bool) or value is None:
        return words[value]
    return str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
