"""Files that leave a run: folders tried before the work, names of what is in them, and bytes that reached the disk."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open


# What vLLM reads: on the Hub there may be a second copy of the weights in another format.
READ_BY_ENGINE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
ADAPTER_CONFIG = "adapter_config.json"
LOW_BIT_FOLDER = "low_bit"  # the trained low-bit model, beside its master weights or its adapter
BASE_FOLDER = "base"  # the frozen low-bit model that an adapter was trained beside


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


def base_of(adapter: Path) -> str:
    """The base of the LoRA adapter in a folder: a folder, whose name may be relative to the adapter's, or a Hub id."""
    name = json.loads((adapter / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    return str(adapter / name) if (adapter / name).is_dir() else name


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
