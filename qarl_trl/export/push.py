"""A model to the Hub: exactly its files, in one commit, tried again while the connection fails. What is on disk is never touched."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from .low_bit import LOW_BIT_FOLDER


# All that a model repository needs: no pickles, logs, completions or states of a run, whatever else is in the folder.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "*_config.json", "tokenizer*", "vocab*"),
    *("merges.txt", "*_map.json", "added_tokens.json", "chat_template.json", "tekken.json", "*.jinja", "*.model"),
    *("recipe.yaml", "training.yaml", "README.md"),
)
# What a push removes at the root of a repository when the new model does not have it: an engine would load it too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")
STAGING = ".push-"
WAITS_S = (2, 20)  # before the second and third try

logger = logging.getLogger(__name__)


class HubError(OSError):
    """A push that failed, with the reason and what to do."""


class Repository:
    """
    A model repository on the Hub; it is created where it does not exist.

    Args:
        name (`str`): `user/model`, or `model` of the token's user.
        token (`str`, *optional*): By default that of `HF_TOKEN` or `hf auth login`.
        private (`bool`, *optional*): Of a new repository. Unset: as the Hub's settings of the owner say.
        revision (`str`, *optional*): Branch of the low-bit model, created where missing. Unset: `main`.
        master weights (`str`, *optional*): Branch of the master weights, which starts empty.

    Raises:
        HubError: when the Hub cannot be reached or refuses.
    """

    def __init__(
        self,
        name: str,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        master_weights: str | None = None,
    ) -> None:
        self.api, self.name, self.revision, self.master_weights = HfApi(token=token), name, revision, master_weights
        self.name = self._tried(lambda: self.api.create_repo(name, private=private, exist_ok=True)).repo_id
        # To create what is there passes for those who may only read it.
        self._tried(lambda: self.api.auth_check(self.name, write=True))
        for branch in {revision, master_weights} - {None, "main"}:
            self._tried(lambda branch=branch: self._create_branch(branch))

    def push(self, folder: Path, message: str, revision: str | None = None, blocking: bool = True) -> Any:
        """
        Make the repository's content the model of `folder`.

        Returns:
            `CommitInfo`, or a `Future` of it without `blocking`.
        """
        if not blocking:
            return self.api.run_as_future(self.push, folder, message, revision)
        try:
            return self._push_model(folder, message, revision or self.revision)
        except HubError as error:
            branch = revision or self.revision
            command = f"qarl-trl push {folder} {self.name}" + (f" --revision {branch}" if branch else "")
            again = f"Nothing is lost: the model is in {folder}; `{command}` tries again."
            raise HubError(f"{error} {again}") from error

    def push_checkpoint(self, checkpoint: Path, strategy: str) -> Future:
        """
        Push the low-bit model of a training checkpoint in a thread, and with `master_weights` what belongs there.

        It works on hard links, which neither a save nor the rotation of checkpoints changes. A failure is one line in the
        log, and training goes on.
        """
        source = checkpoint if self.master_weights else checkpoint / LOW_BIT_FOLDER
        scratch = checkpoint.parent / f"{STAGING}{checkpoint.name}"
        copy, message = scratch / source.name, f"Training in progress, {checkpoint.name}"
        broken: OSError | None = None
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.copytree(source, copy, copy_function=_link_or_copy)
        except OSError as error:  # a full disk
            broken = error

        def run() -> None:
            try:
                if broken is not None:
                    raise broken
                self._push_model(copy / LOW_BIT_FOLDER if self.master_weights else copy, message, self.revision)
                if self.master_weights:
                    subfolders = {"checkpoint": "last-checkpoint", "all_checkpoints": checkpoint.name}
                    self._push_master_weights(copy, message, subfolders.get(strategy))
            except Exception as error:
                logger.warning("Push failed. %s Training goes on; nothing is lost of %s.", error, checkpoint)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

        return self.api.run_as_future(run)

    def _push_model(self, folder: Path, message: str, revision: str | None) -> CommitInfo:
        return self._commit(
            model_files(folder), message, revision, lambda name: "/" not in name and _any(name, WEIGHTS)
        )

    def _push_master_weights(self, folder: Path, message: str, subfolder: str | None) -> None:
        if subfolder is None:
            self._push_model(folder, message, self.master_weights)
            return
        found = (file for file in sorted(folder.rglob("*")) if file.is_file())
        files = {f"{subfolder}/{file.relative_to(folder).as_posix()}": file for file in found}
        self._commit(files, message, self.master_weights, lambda name: name.startswith(f"{subfolder}/"))

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
        start = first if branch == self.master_weights else None
        self.api.create_branch(self.name, branch=branch, revision=start, exist_ok=True)

    def _tried(self, call: Callable[[], Any]) -> Any:
        waits = list(WAITS_S)
        while True:
            try:
                return call()
            except Exception as error:
                cause = _root(error)
                if not waits or not _may_pass(cause):
                    raise HubError(f"{self.name} on {self.api.endpoint}: {_reason(cause)}") from error
                time.sleep(waits.pop(0))


def repository_of(args: Any, token: str | None = None) -> Repository:
    """The repository of a run with these settings (a `QaRLConfig`); errors as of [`Repository`]."""
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    return Repository(name, token or args.hub_token, args.hub_private_repo, args.hub_revision)


def model_files(folder: Path) -> dict[str, Path]:
    """
    The files of `folder` that make up its model, by their names in a repository.

    Raises:
        ValueError: when it has no weights.
    """
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and _any(file.name, MODEL_FILES)]
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder} holds no model to push: it has no *.safetensors.")
    files += sorted(folder.glob("additional_chat_templates/*.jinja"))
    return {file.relative_to(folder).as_posix(): file for file in files}


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a filesystem without hard links
        shutil.copy2(source, target)


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _status(error: BaseException) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None


def _root(error: BaseException) -> BaseException:
    """huggingface_hub wraps what an upload raised in a `RuntimeError`."""
    return _root(error.__cause__) if type(error) is RuntimeError and error.__cause__ else error


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
    return advice.get(_status(error)) or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
