"""Files that leave a run: folders tried before the work, names of what is in them, and bytes that reached the disk."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open


# What vLLM reads: on the Hub there may be a second copy of the weights in another format.
READ_BY_ENGINE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
ADAPTER_CONFIG = "adapter_config.json"
LOW_BIT_FOLDER = "low_bit"  # the trained low-bit model, beside its master weights or its adapter
BASE_FOLDER = "base"  # the frozen low-bit model that an adapter was trained beside
BASE_CONFIG = "base_config.json"  # beside such an adapter: a digest of its base


def check_writable(folder: str | os.PathLike[str], field: str) -> None:
    """Try to write into `folder`, which is created; `OSError` that names the `field` it comes from."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(f"{field}={str(folder)!r} must be a folder that can be written: {error}.") from error


def tensor_shapes(folder: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the `*.safetensors` of a folder, by name; `ValueError` that names a file which is cut off."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:  # compares the file's size with its header
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}. Copy or download it again.") from error
    return shapes


def name_base(adapter: Path, name: str, revision: str | None, base: Path) -> None:
    """Let the LoRA adapter in a folder name its frozen base, and tell that from others; `base` is its folder, if there is one."""
    file, weights = adapter / ADAPTER_CONFIG, sorted(base.glob("model*.safetensors"))
    named = {"base_model_name_or_path": name, "revision": revision}
    file.write_text(json.dumps(json.loads(file.read_text()) | named, indent=2))
    (adapter / BASE_CONFIG).write_text(json.dumps({"weights": digest(weights) if weights else None}))


def base_of(adapter: Path) -> tuple[str, str | None]:
    """The base of the LoRA adapter in a folder: a folder, whose name may be relative to the adapter's, or Hub id and revision."""
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    name = config["base_model_name_or_path"]
    if Path(name).name == BASE_FOLDER and not (adapter / name).is_dir():
        raise FileNotFoundError(f"{adapter / name}, the base of the adapter in {adapter}, is missing. Copy it there.")
    return (str(adapter / name), None) if (adapter / name).is_dir() else (name, config.get("revision"))


def check_base(adapter: Path, base: Path) -> None:
    """Refuse (`ValueError`) another base than the adapter in a folder was trained beside."""
    expected = json.loads((adapter / BASE_CONFIG).read_text())["weights"]
    if expected and digest(sorted(base.glob("model*.safetensors"))) != expected:
        raise ValueError(f"{base} has other weights than the base beside which the adapter {adapter} was trained.")


def digest(files: Iterable[Path]) -> str:
    """Of names and contents; of weights 256 bytes at each of some 256 places, which any training changes."""
    return hashlib.sha256(repr([(path.name, _sample(path)) for path in files]).encode()).hexdigest()[:16]


def _sample(file: Path) -> bytes:
    if file.suffix != ".safetensors":
        return file.read_bytes()
    data = np.memmap(file, mode="r")
    step = max(256, len(data) // 256)
    return data[: len(data) // step * step].reshape(-1, step)[:, :256].tobytes()


def share(folder: Path) -> None:
    """Give the weights in a folder the rights of any new file: safetensors 0.8 lets nobody else read them, whatever the umask."""
    os.umask(mask := os.umask(0))
    for path in folder.glob("*.safetensors"):
        path.chmod(0o666 & ~mask)


def flush(folder: Path, tree: bool = True) -> None:
    """Have the disk hold a folder before what follows, with all that is in it (`tree`) or as a list of names."""
    for path in [folder, *(folder.rglob("*") if tree else ())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
