"""What a recipe file says before the libraries load that read the rest of it: its environment, and whether it is tried only."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


# What a recipe's `env:` may set: how libraries run. Not what they load (PATH, LD_PRELOAD) or whom they talk to (HF_ENDPOINT).
ENVIRONMENT = (
    *("VLLM_", "NCCL_", "CUDA_", "OMP_", "MKL_", "PYTORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TOKENIZERS_"),
    *("HF_HUB_", "WANDB_PROJECT", "WANDB_MODE", "WANDB_NAME", "TRACKIO_PROJECT", "QARL_"),
)
_SECRET = re.compile(
    "TOKEN$|KEY|SECRET|PASSWORD|INSECURE|PATH$|DIR$|ROOT$|HOME$|FOLDER$|PLUGIN|MODELSCOPE|HOST|INJECTION"
)


def read_recipe(recipe: Path) -> dict[str, Any]:
    """
    The recipe, on top of the one that its `base:` names (a path from its own folder), with its `env:` exported.

    TrlParser exports `env:` too, but building it needs `QaRLConfig`, and with it torch. `ValueError` if it is no YAML
    mapping, its base has a base, or `env:` sets what a recipe may not.
    """
    content = _load(recipe)
    if "base" in content:
        path = recipe.parent / str(content.pop("base"))
        base = _load(path)
        if "base" in base:
            raise ValueError(f"base of {recipe}: {path} must be a whole recipe, without a base of its own.")
        content = base | content
    if isinstance(content.get("env"), dict):
        _export(recipe, content["env"])
    return content


def _load(recipe: Path) -> dict[str, Any]:
    import yaml

    if not recipe.is_file():
        raise FileNotFoundError(f"--config {recipe}: there is no such file in {Path.cwd()}.")
    try:
        content = yaml.safe_load(recipe.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"--config {recipe} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {recipe} must be a mapping of keys to values, got {type(content).__name__}.")
    return content


def _export(recipe: Path, env: dict[str, Any]) -> None:
    refused = sorted(key for key in env if not key.startswith(ENVIRONMENT) or _SECRET.search(key))
    if refused:
        raise ValueError(
            f"env of {recipe} sets {', '.join(refused)}. A recipe may set names that start with {', '.join(ENVIRONMENT)}, and no "
            "tokens or keys: recipes get shared. Export it in the shell."
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"env of {recipe}:", *(f"{key}={value}" for key, value in env.items()), file=sys.stderr)
    os.environ.update({key: str(value) for key, value in env.items()})


def is_dry(recipe: dict[str, Any], options: Sequence[str]) -> bool:
    """Whether the recipe or the command line, which wins, asks for a dry run."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--dry_run", nargs="?", const="true", default=str(recipe.get("dry_run", "")))
    return early.parse_known_args(options)[0].dry_run.lower() in ("true", "1", "yes", "t", "y")


def without_gpu(recipe: dict[str, Any], options: Sequence[str]) -> list[str]:
    """Where there is no GPU, the option with which transformers accepts a GPU's settings, bf16 among them."""
    import torch

    given = "use_cpu" in recipe or any(option.partition("=")[0] == "--use_cpu" for option in options)
    return [] if given or torch.cuda.is_available() else ["--use_cpu", "true"]
