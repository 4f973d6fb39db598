"""Files of an exported model: check folders before the work, name and compare frozen bases, flush files to the disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open


# The files that vLLM reads. A Hub repository may hold a second copy of the weights in another format.
READ_BY_ENGINE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
ADAPTER_CONFIG = "adapter_config.json"
LOW_BIT_FOLDER = "low_bit"  # the trained low-bit model, beside its master weights or its adapter
BASE_FOLDER = "base"  # the frozen low-bit base of an adapter
BASE_CONFIG = "base_config.json"  # beside an adapter of a frozen base: a digest of the base


def check_writable(folder: str | os.PathLike[str], field: str) -> None:
    """Create `folder` and try to write into it. If that fails, raise `OSError` with the name of the setting, `field`."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(f"{field}={str(folder)!r} must be a folder that can be written: {error}.") from error


def tensor_shapes(folder: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a folder's `*.safetensors`, by name. If a file is cut off, `ValueError` names it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:  # compares the file's size with its header
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}. Copy or download it again.") from error
    return shapes


def name_base(adapter: Path, name: str, revision: str | None, base: Path) -> None:
    """Write the name and a digest of the frozen base beside a LoRA adapter. Without weights in the folder `base` there is no digest."""
    file, weights = adapter / ADAPTER_CONFIG, sorted(base.glob("model*.safetensors"))
    named = {"base_model_name_or_path": name, "revision": revision}
    file.write_text(json.dumps(json.loads(file.read_text()) | named, indent=2))
    (adapter / BASE_CONFIG).write_text(json.dumps({"weights": digest(weights) if weights else None}))


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The base of a LoRA adapter: its folder and `None`, or its Hub id and revision. A relative folder starts at the adapter's."""
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    name = config["base_model_name_or_path"]
    if name in (BASE_FOLDER, f"../{BASE_FOLDER}") and not (adapter / name).is_dir():
        raise FileNotFoundError(f"{adapter / name}, the base of the adapter in {adapter}, is missing. Copy it there.")
    return (str(adapter / name), None) if (adapter / name).is_dir() else (name, config.get("revision"))


def check_base(adapter: Path, base: Path) -> None:
    """Refuse (`ValueError`) a `base` whose weights differ from those that the adapter was trained with."""
    expected = json.loads((adapter / BASE_CONFIG).read_text())["weights"]
    if expected and digest(sorted(base.glob("model*.safetensors"))) != expected:
        raise ValueError(f"{base} has other weights than the base beside which the adapter {adapter} was trained.")


def digest(files: Iterable[Path]) -> str:
    """A digest of file names and contents. Of each weight file it reads 256 bytes at about 256 places: any training changes them."""
    return hashlib.sha256(repr([(path.name, _sample(path)) for path in files]).encode()).hexdigest()[:16]


def _sample(file: Path) -> bytes:
    if file.suffix != ".safetensors":
        return file.read_bytes()
    data = np.memmap(file, mode="r")
    step = max(256, len(data) // 256)
    return data[: len(data) // step * step].reshape(-1, step)[:, :256].tobytes()


def share(folder: Path) -> None:
    """Give a folder's weight files the permissions of the umask: safetensors 0.8 ignores it and lets only the owner read them."""
    os.umask(mask := os.umask(0))
    for path in folder.glob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def flush(folder: Path, tree: bool = True) -> None:
    """Flush a folder to the disk: with all its content (`tree`), or only its list of names."""
    for path in [folder, *(folder.rglob("*") if tree else ())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
