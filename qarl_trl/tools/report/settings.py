"""A run's settings from its `training_args.bin`, read without running anything that is pickled in it."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...redact import redact


SHOWN = ("quant_scheme", "quantize_learner", "loss_type", "learning_rate")  # also where all runs have the same
WHERE = ("output_dir", "logging_dir", "run_name", "hub_model_id")  # says nothing about the training


class _Inert:
    """Stands for every class and function that a pickle names; to call it does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        return _Inert

    def persistent_load(self, pid: Any) -> None:
        return None


def read_settings(folder: Path) -> dict[str, Any]:
    """Plain values, secrets redacted, of the newest `training_args.bin` in `folder` or its checkpoints; empty without one."""
    files = [*folder.glob("training_args.bin"), *folder.glob("checkpoint-*/training_args.bin")]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            with zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(name) as data:
                    found = vars(_Reader(data).load())
        except Exception:  # whatever a foreign pickle raises
            continue
        plain = (bool, int, float, str, list, dict, type(None))
        return redact({name: value for name, value in found.items() if isinstance(value, plain) and name not in WHERE})
    return {}


def differing(runs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Settings that not all runs share, and `SHOWN`: a text for each run, empty where its settings are not known."""
    names = dict.fromkeys((*SHOWN, *sorted(set().union(*runs))))
    rows = {name: [str(settings.get(name, "")) for settings in runs] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1 or (name in SHOWN and any(row))}
