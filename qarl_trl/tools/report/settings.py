"""What a run was: its arm and the edges of its clip, read from `training_args.bin` without running anything in it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

from ...metrics.bounds import Bounds, clip_bounds


# What the report may show of a run's settings; all others, hub_token among them, are dropped as they are read.
FIELDS = (
    "quant_scheme",
    "quant_recipe",
    "quantize_learner",
    "loss_type",
    "importance_sampling_level",
    "advantage_filter",
    "epsilon",
    "epsilon_high",
    "delta",
    "tbpo_epsilon_high",
    "tbpo_delta_low",
    "tbpo_delta_high",
    "tbpo_mismatch_cap",
)


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
    """`FIELDS` of the newest `training_args.bin` in `folder` or its checkpoints; empty if there is none to be read."""
    files = [*folder.glob("training_args.bin"), *folder.glob("checkpoint-*/training_args.bin")]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            with zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(name) as data:
                    found = vars(_Reader(data).load())
        except Exception:  # whatever a foreign pickle raises
            continue
        return {name: found[name] for name in FIELDS if isinstance(found.get(name), (bool, int, float, str))}
    return {}


def arm(settings: dict[str, Any]) -> str:
    """In words: precision, loss and level of its ratio."""
    if not settings:
        return "settings not found"
    scheme = "llm-compressor recipe" if "quant_recipe" in settings else settings.get("quant_scheme", "none")
    if "quantize_learner" not in settings and scheme == "none":
        words = ["plain TRL"]
    elif scheme == "none":
        words = ["not quantized"]
    elif settings.get("quantize_learner", True):
        words = [f"{scheme} engine and learner"]
    else:
        words = [f"{scheme} engine, learner not quantized"]
    words.append(settings.get("loss_type", ""))
    if words[-1] != "tbpo" and settings.get("importance_sampling_level") == "sequence":
        words.append("sequence ratio")
    if settings.get("advantage_filter", "none") != "none":
        words.append(f"{settings['advantage_filter']} advantages only")
    return ", ".join(filter(None, words))


def bounds(settings: dict[str, Any]) -> Bounds:
    """The edges of the arm's clip (paper eq. 6 for TBPO, else TRL's `epsilon`, `epsilon_high`, `delta`)."""
    loss, low = settings.get("loss_type"), settings.get("epsilon")
    if loss == "tbpo":
        high, below, above = (settings[f"tbpo_{name}"] for name in ("epsilon_high", "delta_low", "delta_high"))
        return Bounds(1 + high, 1 - below, 1 + above)
    if low is None:  # not known
        return Bounds()
    return clip_bounds(loss, low, settings.get("epsilon_high", low), settings.get("delta"))


def level(settings: dict[str, Any]) -> str:
    """At which the arm clips: "sequence" or "token"."""
    return "sequence" if settings.get("loss_type") == "tbpo" else settings.get("importance_sampling_level", "token")
