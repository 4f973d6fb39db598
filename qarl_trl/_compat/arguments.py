"""Fields of transformers' `TrainingArguments` that a command line may give as JSON."""

from __future__ import annotations


def add_json_fields(config_class: type, *names: str) -> None:
    """
    Let a config class read fields as JSON, besides those of its bases.

    transformers parses the fields that `TrainingArguments._VALID_DICT_FIELDS` lists (5.17), a private list that a
    class inherits from one base only: of `class MyConfig(LowBitConfig, SFTConfig)` it would be that of `LowBitConfig`,
    without TRL's. If transformers renames it, a dict on a command line stays text, and the checks of the settings
    refuse it (tests/trainers/test_settings.py).

    Args:
        config_class: A new class.
        names: Its own fields.
    """
    fields = list(names)
    # The whole order of bases, TRL's config among them. transformers' `__post_init__` turns a listed field into a dict
    # if its text begins with "{".
    for base in config_class.__mro__:
        for name in vars(base).get("_VALID_DICT_FIELDS", ()):
            if name not in fields:
                fields.append(name)
    config_class._VALID_DICT_FIELDS = fields  # type: ignore[attr-defined]
