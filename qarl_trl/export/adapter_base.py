"""
The frozen low-bit base of an adapter: its name and digest beside the adapter, and the base that they lead back to.

peft reads the name in the adapter's config. The digest is ours, in a file of its own: an adapter beside another
base is another policy, and nothing else would tell.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import ADAPTER_CONFIG, BASE_FOLDER, digest, weight_files


# Beside an adapter of a frozen base: a digest of the base, and an FP8 cache of the run's engine.
BASE_CONFIG = "base_config.json"
# Its entries.
_WEIGHTS = "weights"
_CACHE = "kv_cache_dtype"


def name_base(adapter: Path, name: str, revision: str | None, base: Path, cache: str | None = None) -> None:
    """
    Write the name and a digest of the frozen base beside a LoRA adapter, and the cache that the two were trained with.

    Args:
        adapter: The adapter's folder.
        name: The base's folder, relative to the adapter's or absolute, or its Hub id.
        revision: The revision of a Hub id.
        base: The base's folder on this machine. If it holds no weights, there is no digest.
        cache: The `kv_cache_dtype` of the run's engine; `None` for a cache in the model's dtype, or no engine.
    """
    file = adapter / ADAPTER_CONFIG
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = name
    config["revision"] = revision
    file.write_text(json.dumps(config, indent=2))

    weights = weight_files(base)
    content = {_WEIGHTS: digest(weights) if weights else None}
    if cache is not None:
        content[_CACHE] = cache
    (adapter / BASE_CONFIG).write_text(json.dumps(content))


def forget_base(adapter: Path) -> None:
    """
    Delete the digest of a frozen base that belongs to an earlier adapter in a folder: with it the new adapter would
    be taken for one that was trained beside that base.

    Args:
        adapter: The adapter's folder. A user's own file of this name stays.
    """
    file = adapter / BASE_CONFIG
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return
    if isinstance(content, dict) and _WEIGHTS in content and content.keys() <= {_WEIGHTS, _CACHE}:
        file.unlink()


def base_of(adapter: Path) -> tuple[str, str | None]:
    """
    Find the base of a LoRA adapter.

    Args:
        adapter: The adapter's folder. A relative name of its base starts there.

    Returns:
        The base's folder and `None`, or its Hub id and revision.

    Raises:
        FileNotFoundError: if the base must lie beside the adapter, and does not.
        ValueError: if the adapter does not name its base.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    name = config.get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise ValueError(
            f"base_model_name_or_path in {adapter / ADAPTER_CONFIG} must be the base of the adapter, got {name!r}. "
            "Write its folder or Hub id there."
        )
    folder = adapter / name
    if folder.is_dir():
        return str(folder), None

    # Any other name is a Hub id. These would be one too, of a repository that nobody means.
    if name in (BASE_FOLDER, f"../{BASE_FOLDER}"):
        raise FileNotFoundError(f"{folder}, the base of the adapter in {adapter}, is missing. Copy it there.")
    return name, config.get("revision")


def cache_beside_base(adapter: Path) -> str | None:
    """
    The FP8 cache of keys and values with which an adapter was trained beside its frozen base.

    Args:
        adapter: The adapter's folder, in which [`name_base`] wrote.

    Returns:
        A `kv_cache_dtype` of vLLM; `None` for a cache in the model's dtype. Earlier versions did not write it.
    """
    return _facts_of_base(adapter).get(_CACHE)


def _facts_of_base(adapter: Path) -> dict[str, Any]:
    """What [`name_base`] wrote beside an adapter; `ValueError` if it is damaged."""
    path = adapter / BASE_CONFIG
    with suppress(ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and _WEIGHTS in content:
            return content
    raise ValueError(f"{path} is damaged. Copy it again from the run's folder.")


def check_base(adapter: Path, base: Path) -> None:
    """
    Compare a base with the one beside which an adapter was trained.

    Args:
        adapter: The adapter's folder, in which [`name_base`] wrote.
        base: The base's folder.

    Raises:
        ValueError: if the weights differ, or if the file is damaged. Without a digest beside the adapter nothing is
            compared.
    """
    expected = _facts_of_base(adapter)[_WEIGHTS]
    if not expected:
        return
    if digest(weight_files(base)) != expected:
        raise ValueError(f"{base} has other weights than the base beside which the adapter {adapter} was trained.")
