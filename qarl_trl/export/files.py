"""Files of an exported model: check folders before the work, find and compare weights, flush to the disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import yaml
from safetensors import SafetensorError, safe_open


# The files that vLLM reads. A Hub repository may hold a second copy of the weights in another format.
READ_BY_ENGINE = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
ADAPTER_CONFIG = "adapter_config.json"
# What llm-compressor did to a model. A user's recipe of a run has this name too, and may hold a token.
RECIPE = "recipe.yaml"
# The trained low-bit model, beside its master weights or its adapter.
LOW_BIT_FOLDER = "low_bit"
# The frozen low-bit base of an adapter.
BASE_FOLDER = "base"
# What a run makes in its output folder, and may overwrite or delete.
_OF_A_RUN = re.compile(rf"{LOW_BIT_FOLDER}|{BASE_FOLDER}|checkpoint-\d+")
# The files of weights that transformers, peft and vLLM read. Others are the user's ("model-backup.safetensors").
_MODEL_OR_ADAPTER = re.compile(r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors")
# A digest reads so many bytes at about so many places of a weight file.
_SAMPLE_BYTES = 256
_SAMPLES = 256


def check_writable(folder: str | os.PathLike[str], field: str) -> None:
    """
    Create a folder and try to write into it.

    Args:
        folder: The folder.
        field: The setting that names it, for the message.

    Raises:
        OSError: if that fails.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(f"{field}={str(folder)!r} must be a folder that can be written: {error}.") from error


def check_apart(folder: str | os.PathLike[str], field: str, model: str | os.PathLike[str]) -> None:
    """
    Refuse to write into the folder of a model that is only to be read, or into the folders that a run makes in its
    output folder, if the model lies there.

    Args:
        folder: The folder to write into. It need not exist: one with the name of a model on the Hub would be taken for
            the model from then on.
        field: The setting that names it, for the message.
        model: The model's folder or Hub id; empty for a model without one.

    Raises:
        ValueError: if they are the same.
    """
    if not str(model):
        return

    output = Path(folder).resolve()
    place = Path(model).resolve()
    if not place.is_relative_to(output):
        return

    # Another folder in it is the user's, and stays.
    inside = place.relative_to(output).parts
    if not inside or _OF_A_RUN.fullmatch(inside[0]):
        raise ValueError(
            f"{field}={str(folder)!r} must not be the folder of the model {str(model)!r}, which would be overwritten. "
            "Use another."
        )


def is_of_run(name: str) -> bool:
    """
    Whether a run makes folders of this name in its output folder.

    Args:
        name: The name of a folder.
    """
    return _OF_A_RUN.fullmatch(name) is not None


def tensor_shapes(folder: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """
    Read the shapes of all tensors in a folder's `*.safetensors`, without their content.

    Args:
        folder: A model's folder, or an adapter's. One that does not exist has no tensors.

    Returns:
        Shapes by the names of the tensors.

    Raises:
        ValueError: if a file is cut off.
    """
    return shapes_in(sorted(Path(folder).glob("*.safetensors")))


def shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """
    Read the shapes of all tensors in weight files, without their content.

    Args:
        files: The files, as those of [`weight_files`].

    Returns:
        Shapes by the names of the tensors.

    Raises:
        ValueError: if a file is cut off.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            # safetensors compares the file's size with its header when it opens the file.
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}. Copy or download it again.") from error
    return shapes


def check_generation_config(folder: str | os.PathLike) -> None:
    """
    Refuse a damaged `generation_config.json`: transformers would do without it, and so lose end tokens.

    Args:
        folder: A model's folder. One without this file, or that does not exist, is not refused.

    Raises:
        ValueError: if the file is no JSON object.
    """
    path = Path(folder, "generation_config.json")
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Copy or download it again, or delete it.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}.")


def check_no_adapter(model: str) -> None:
    """
    Refuse the folder of a LoRA adapter where a whole model is needed.

    Args:
        model: Folder or Hub id.

    Raises:
        ValueError: for a folder with an adapter and without a model.
    """
    folder = Path(model)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"{model} is a LoRA adapter, and no model to start from. resume_from_checkpoint goes on with that of a "
            "checkpoint. A new run needs one model: merge_and_unload() of peft makes it, of a frozen base a different "
            "policy."
        )


def weight_files(folder: Path) -> list[Path]:
    """
    Find the files of weights of a model or an adapter.

    Args:
        folder: The folder. One that does not exist has no files.

    Returns:
        The files in the order of their names. Copies that a user made beside them are left out.
    """
    return sorted(file for file in folder.glob("*.safetensors") if _MODEL_OR_ADAPTER.fullmatch(file.name))


def is_llmcompressor_recipe(file: Path) -> bool:
    """
    Find out whether a file is what llm-compressor writes beside a model: stages of modifiers, and nothing else.

    Args:
        file: The file. One that is missing or no YAML is none.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return False
    if not (isinstance(content, dict) and content):
        return False

    for stage, groups in content.items():
        if not (str(stage).endswith("_stage") and isinstance(groups, dict)):
            return False
        if not all(str(group).endswith("_modifiers") for group in groups):
            return False
    return True


def modules_here(classes: str | list[str | None]) -> list[str]:
    """
    The files of code that must lie beside a config.

    Args:
        classes: What an `auto_map` has for one of transformers' auto classes. Tokenizers have a list of two, of which
            one may be missing.

    Returns:
        The names of the files; none for the code of another repository ("user/repository--module.Class").
    """
    paths = classes if isinstance(classes, list) else [classes]
    return [f"{path.partition('.')[0]}.py" for path in paths if path and "--" not in path]


def digest(files: Iterable[Path]) -> str:
    """
    Compute a digest of the names and contents of files.

    Args:
        files: The files, in an order that does not depend on the machine. Of a weight file only samples are read, 256
            bytes at about 256 places: any training changes them.

    Returns:
        16 hexadecimal digits.
    """
    content = [(path.name, _sample(path)) for path in files]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _sample(file: Path) -> bytes:
    """The content of a file; of a weight file the bytes at places with equal distances."""
    if file.suffix not in (".safetensors", ".bin"):
        return file.read_bytes()

    # Mapped, so that only the pages with samples are read.
    data = np.memmap(file, mode="r")
    step = max(_SAMPLE_BYTES, len(data) // _SAMPLES)
    # Whole steps: what is left over is shorter than one.
    steps = len(data) // step
    return data[: steps * step].reshape(steps, step)[:, :_SAMPLE_BYTES].tobytes()


def apply_umask(folder: Path) -> None:
    """
    Give a folder's weight files the permissions that the umask says, as all other files have them. Those of a user
    and of other users stay as they are.

    Args:
        folder: Only files directly in it are changed, not those of sub-folders.
    """
    # safetensors 0.8 ignores the umask and lets only the owner read its files.
    mode = 0o666 & ~_umask()
    for path in weight_files(folder):
        with suppress(PermissionError):
            path.chmod(mode)


def _umask() -> int:
    """The umask of this process."""
    # It can only be read by setting another one.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def flush(folder: Path, tree: bool = True) -> None:
    """
    Flush a folder to the disk, so that a power cut loses nothing of it.

    Args:
        folder: The folder.
        tree: Whether to flush all its content too, or only its list of names.
    """
    paths = [folder]
    if tree:
        paths.extend(folder.rglob("*"))

    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
