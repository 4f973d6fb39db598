"""Read the rows of a dataset, from the Hub or a file, as they are."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rows import as_written


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
READ_IN_FOLDERS = (*BUILDERS, ".arrow", ".csv", ".tsv", ".txt", ".gz", ".bz2", ".xz", ".zst", ".zip")
# A file is known by so many blocks of so many bytes: all of it up to 64 MiB, then blocks at equal distances.
BLOCK = 2**16
BLOCKS = 2**10
READ_BY_TRAINERS = ("text", "messages", "prompt", "completion")


def load_rows(name_or_path: str, split: str, config_name: str | None = None) -> Dataset:
    """
    Load a dataset unchanged. Of a JSON file, texts that its reader took for times are texts again in the columns that
    a trainer reads.

    Args:
        name_or_path: A Hub id, a folder, or a `.jsonl`, `.json` or `.parquet` file.
        split: For a single local file it may be any.
        config_name: The configuration of a dataset on the Hub.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if the dataset cannot be read.
    """
    from datasets import load_dataset

    path = local_path(name_or_path)
    if path is not None and BUILDERS.get(path.suffix) == "json" and path.is_file():
        _refuse_null_rows(path)
    try:
        if path is not None and path.is_file():
            if config_name is not None:
                logger.warning(
                    f"The dataset {name_or_path!r} is a file, so its configuration {config_name!r} is not used."
                )
            # A file has one split, so give it the name that is asked for, without the slice.
            # Absolute and escaped: datasets takes the name as a pattern, and the current folder is a part of it.
            files = {split.partition("[")[0]: glob.escape(str(path.absolute()))}
            builder = BUILDERS[path.suffix]
            dataset = load_dataset(builder, data_files=files, split=split, cache_dir=_cache_of(path))
            return _with_times_as_text(dataset) if builder == "json" else dataset
        cache = None if path is None else _cache_of(path)
        return load_dataset(str(path or name_or_path), name=config_name, split=split, cache_dir=cache)
    except OSError:  # a missing file, or no network
        raise
    except Exception as error:
        # The reader of a format may raise anything: an empty file is a StopIteration, a cut one an EOFError. Messages
        # name neither the file nor the cause.
        raise ValueError(
            f"The dataset {name_or_path!r} (split {split!r}) cannot be read: {_reason(error.__cause__ or error)}"
        ) from error


def _cache_of(path: Path) -> str:
    """
    Where datasets may keep the rows of a file or folder: a folder for this content of it. datasets itself knows a file
    by its path and modification time, and would give the rows of another one that a copy or an archive wrote there
    with the same time, or that a link at this path led to.
    """
    from datasets import config

    digest = hashlib.sha256()
    for file in [path] if path.is_file() else _data_files(path):
        size = file.stat().st_size
        digest.update(repr((str(file.absolute()), size)).encode())
        with file.open("rb") as stream:
            for place in range(0, size, max(BLOCK, size // BLOCKS)):
                stream.seek(place)
                digest.update(stream.read(BLOCK))
    return os.path.join(config.HF_DATASETS_CACHE, "qarl_trl", digest.hexdigest()[:32])


def _data_files(folder: Path) -> list[Path]:
    """The files in a folder that datasets may read as data, or for how to read them."""
    files = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not is_hidden and file.is_file() and (file.suffix in READ_IN_FOLDERS or file.name == "README.md"):
            files.append(file)
    return files


def _with_times_as_text(dataset: Dataset) -> Dataset:
    """The rows, with texts in place of times in the columns that a trainer reads; a warning says which they are."""
    from datasets import Features

    features = dict(dataset.features)
    for name in READ_BY_TRAINERS:
        if name in features:
            features[name] = _as_text(features[name])
    changed = [name for name in features if features[name] != dataset.features[name]]
    # Most data have none, and stay on the disk.
    if not changed:
        return dataset

    _say_times(changed)
    return dataset.map(
        lambda row: {name: as_written(row[name]) for name in changed},
        features=Features(features),
        desc="Reading dates",
        load_from_cache_file=False,
        keep_in_memory=True,
    )


def say_if_times(dataset: Dataset, columns: Sequence[str]) -> None:
    """Warn of columns whose texts the reader of a JSON file took for times, which are written anew."""
    # Dates of a Parquet file were no texts.
    types = dataset.features
    names = [name for name in dict.fromkeys(columns) if _as_text(types[name]) != types[name]]
    if names and dataset.builder_name == "json":
        _say_times(names)


def _say_times(names: Sequence[str]) -> None:
    logger.warning(
        f"All of {', '.join(names)} are dates or times for the reader of JSON, so a time is written as "
        "2024-01-05 10:30:00, whatever the file has, and without the time of a midnight."
    )


def _as_text(feature: Any) -> Any:
    """The type of a column, or of a part of it, with text in place of times."""
    from datasets import List, Value

    if isinstance(feature, dict):
        return {name: _as_text(part) for name, part in feature.items()}
    if isinstance(feature, List):
        return List(_as_text(feature.feature), length=feature.length)
    if isinstance(feature, Value) and feature.dtype.startswith("timestamp"):
        return Value("string")
    return feature


def local_path(name_or_path: str) -> Path | None:
    """
    The file or folder of a dataset, or `None` for a Hub id.

    Args:
        name_or_path: A Hub id, a folder, or a file.

    Raises:
        FileNotFoundError: if the name is that of a file which is missing.
        ValueError: for a file of an unknown kind, or a folder whose path datasets would take for a pattern.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix in BUILDERS and not path.exists():
        raise FileNotFoundError(f"The dataset {name_or_path!r} was not found at {path.absolute()}.")
    if path.is_file() and path.suffix not in BUILDERS:
        raise ValueError(f"The dataset {name_or_path!r} is a {path.suffix!r} file. Give one of {sorted(BUILDERS)}.")
    # Escaped, datasets does not find a folder; as it is, datasets reads others: data1 for data[1].
    if path.is_dir() and glob.has_magic(str(path.absolute())):
        raise ValueError(f"The dataset's folder must have no *, ? or [ in its path, got {str(path.absolute())!r}.")
    return path if path.exists() else None


def _reason(error: BaseException) -> str:
    """Why a file cannot be read, in a line."""
    text = " ".join(str(error).split())
    if not text:
        return f"it is empty or damaged ({type(error).__name__})."
    return text[:300]


def _refuse_null_rows(path: Path) -> None:
    """Refuse (`ValueError`) a row that is null: pyarrow 26 ends the process if a block of a file begins with one."""
    with path.open("rb") as file:
        is_array = file.read(1) == b"["
        file.seek(0)
        # A file of rows has one in each line. In an array a line may be any part of a row.
        if not is_array:
            for number, line in enumerate(file, start=1):
                if line.lstrip().startswith(b"null"):
                    raise ValueError(f"The dataset {str(path)!r} must have an object in line {number}, got null.")
            return

        try:
            rows = json.load(file)
        except ValueError:  # datasets says what is wrong with it
            return
    if None in rows:
        raise ValueError(f"The dataset {str(path)!r} must have an object in row {rows.index(None)}, got null.")
