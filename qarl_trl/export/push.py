"""A model to the Hub: exactly its files, in one commit, tried again while the connection fails. What is on disk is never touched."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
from accelerate.logging import get_logger
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled


# All that a model repository needs: no pickles, logs, completions or states of a run, whatever else is in the folder.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "*_config.json", "tokenizer*", "vocab*", "merges.txt"),
    *("*_map.json", "added_tokens.json", "*.jinja", "*.model", "recipe.yaml", "training.yaml", "README.md"),
)
# What a push removes at the root of a repository when the new model does not have it: an engine would load it too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")
STAGING = ".push-"
WAITS_S = (2, 20)  # before the second and third try

logger = get_logger(__name__)


class HubError(RuntimeError):
    """A push that failed, with the reason and what to do."""


class Repository:
    """
    A model repository on the Hub; it is created where it does not exist.

    Args:
        name (`str`): `user/model`, or `model` of the token's user.
        token (`str`, *optional*): By default that of `HF_TOKEN` or `hf auth login`.
        private (`bool`, *optional*): Of a new repository. Unset: as the Hub's settings of the owner say.
        revision (`str`, *optional*): Branch of the low-bit model, created where missing. Unset: `main`.
        masters (`str`, *optional*): Branch of the masters, which starts empty.

    Raises:
        HubError: when the Hub cannot be reached or refuses.
    """

    def __init__(
        self,
        name: str,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        masters: str | None = None,
    ) -> None:
        self.api, self.name, self.revision, self.masters = HfApi(token=token), name, revision, masters
        self.name = self._tried(lambda: self.api.create_repo(name, private=private, exist_ok=True)).repo_id
        for branch in {revision, masters} - {None, "main"}:
            self._tried(lambda branch=branch: self._create_branch(branch))

    def push(self, folder: Path, message: str) -> CommitInfo:
        """Make the repository's content the model of `folder`."""
        files = {file.name: file for file in model_files(folder)}
        return self._commit(files, message, self.revision, lambda name: "/" not in name and _any(name, WEIGHTS))

    def push_masters(self, folder: Path, message: str, subfolder: str | None = None) -> CommitInfo:
        """The model files of a training checkpoint on the branch of masters, or into `subfolder` all that it holds."""
        if subfolder is None:
            files = {file.name: file for file in model_files(folder)}
            return self._commit(files, message, self.masters, lambda name: "/" not in name and _any(name, WEIGHTS))
        found = (file for file in sorted(folder.rglob("*")) if file.is_file())
        files = {f"{subfolder}/{file.relative_to(folder).as_posix()}": file for file in found}
        return self._commit(files, message, self.masters, lambda name: name.startswith(f"{subfolder}/"))

    def in_background(self, pushes: list[Callable[[], CommitInfo]], kept_in: Path) -> Future:
        """Run `pushes` one after the other in a thread. A failure is one line in the log; training goes on."""

        def run() -> None:
            try:
                for push in pushes:
                    push()
            except Exception as error:
                logger.warning("%s Training goes on; the model is in %s.", error, kept_in)

        return self.api.run_as_future(run)

    def _commit(
        self, files: dict[str, Path], message: str, revision: str | None, stale: Callable[[str], bool]
    ) -> CommitInfo:
        def commit() -> CommitInfo:
            # One commit, unlike `upload_folder`: nobody downloads half of a model.
            present = self.api.list_repo_files(self.name, revision=revision)
            operations = [CommitOperationAdd(name, file) for name, file in files.items()]
            operations += [CommitOperationDelete(name) for name in present if stale(name) and name not in files]
            return self.api.create_commit(self.name, operations, commit_message=message, revision=revision)

        return self._tried(commit)

    def _create_branch(self, branch: str) -> None:
        first = self.api.list_repo_commits(self.name)[-1].commit_id
        start = first if branch == self.masters else None
        self.api.create_branch(self.name, branch=branch, revision=start, exist_ok=True)

    def _tried(self, call: Callable[[], Any]) -> Any:
        for wait in (*WAITS_S, None):
            try:
                return call()
            except Exception as error:
                if wait is None or not _may_pass(error):
                    raise HubError(f"{self.name} on {self.api.endpoint}: {_reason(error)}") from error
                time.sleep(wait)
        return None


def model_files(folder: Path) -> list[Path]:
    """
    The files of `folder` that make up its model, sorted.

    Raises:
        ValueError: when there is none, or it brings code of its own.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file() and _any(file.name, MODEL_FILES))
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder} holds no model to push: it has no *.safetensors.")
    return files


def staged(folder: Path, beside: Path) -> Path:
    """`folder` as hard links in a new folder in `beside`: a save or a rotation during the upload does not change it."""
    target = Path(tempfile.mkdtemp(dir=beside, prefix=STAGING))
    return Path(shutil.copytree(folder, target / folder.name, copy_function=_link_or_copy))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, target)


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _status(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def _may_pass(error: BaseException) -> bool:
    status = _status(error)
    return isinstance(error, httpx.TransportError) or status == 429 or (status is not None and status >= 500)


def _reason(error: BaseException) -> str:
    """What went wrong and what to do, in one line and without headers, which hold the token."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set. Unset it to push."
    if isinstance(error, httpx.TransportError):
        return f"no connection ({type(error).__name__}), after {1 + len(WAITS_S)} tries."
    advice = {
        401: "the token is missing or not valid (401). Set HF_TOKEN or run `hf auth login`.",
        403: "the token may not write there (403). Use one with write access, or another name.",
        404: "it is not there, or the token may not see it (404).",
    }
    return advice.get(_status(error)) or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
