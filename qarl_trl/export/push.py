"""A low-bit model to the Hub: exactly its files, in one commit. huggingface_hub tries again while a connection fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi


# All that a model repository needs: no pickles, logs, completions or states of a run, whatever else is in the folder.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "*_config.json", "tokenizer*", "vocab*"),
    *("merges.txt", "*_map.json", "added_tokens.json", "chat_template.json", "tekken.json", "*.jinja", "*.model"),
    *("recipe.yaml", "training.yaml", "README.md"),
)
# What a push removes at the root of a repository when the new model does not have it: an engine would load it too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")


class HubError(OSError):
    """A push that failed, with the reason and what to do."""


class Repository:
    """
    A model repository on the Hub (`user/model`, or `model` of the token's user), created where it does not exist.

    `token` is by default that of `HF_TOKEN` or `hf auth login`, `revision` a branch other than `main`. [`HubError`] when the Hub
    cannot be reached or refuses.
    """

    def __init__(
        self, name: str, token: str | None = None, private: bool | None = None, revision: str | None = None
    ) -> None:
        self.api, self.name, self.revision = HfApi(token=token), name, revision
        with self._errors_named("Set HF_TOKEN or run `hf auth login`, with a token that may write there."):
            self.name = self.api.create_repo(name, private=private, exist_ok=True).repo_id
            # To create what is there passes for those who may only read it.
            self.api.auth_check(self.name, write=True)
            if revision not in (None, "main"):
                self.api.create_branch(self.name, branch=revision, exist_ok=True)

    def push(self, folder: Path, message: str, revision: str | None = None, blocking: bool = True) -> Any:
        """
        Make the repository's content the model of `folder`; returns a `CommitInfo`, without `blocking` a `Future` of it.

        [`HubError`] when it cannot be pushed. What is on disk is never touched.
        """
        if not blocking:
            return self.api.run_as_future(self.push, folder, message, revision)
        files, branch = model_files(folder), revision or self.revision
        command = f"qarl-trl push {folder} {self.name}" + (f" --revision {branch}" if branch else "")
        with self._errors_named(f"Nothing is lost: the model is in {folder}; `{command}` tries again."):
            present = self.api.list_repo_files(self.name, revision=branch)
            stale = [name for name in present if "/" not in name and _any(name, WEIGHTS) and name not in files]
            changes: list[Any] = [CommitOperationAdd(name, file) for name, file in files.items()]
            changes += [CommitOperationDelete(name) for name in stale]
            # `upload_folder` may make several commits, between which people would download half of a model.
            return self.api.create_commit(self.name, changes, commit_message=message, revision=branch)

    @contextmanager
    def _errors_named(self, remedy: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = error
            while type(cause) is RuntimeError and cause.__cause__:  # what an upload raised
                cause = cause.__cause__
            # In one line, and without the queries of storage addresses, which are signed.
            reason = re.sub(r"\?[^\s']+", "", " ".join(f"{type(cause).__name__}: {cause}".split()))
            raise HubError(f"{self.name} on {self.api.endpoint}: {reason} {remedy}") from error


def repository_of(args: Any, token: str | None = None) -> Repository:
    """The repository of a run with these settings (a `QaRLConfig`); errors as of [`Repository`]."""
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    return Repository(name, token or args.hub_token, args.hub_private_repo, args.hub_revision)


def model_files(folder: Path) -> dict[str, Path]:
    """The files of `folder` that make up its model, by their names in a repository; `ValueError` when it has no weights."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and _any(file.name, MODEL_FILES)]
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder} holds no model to push: it has no *.safetensors.")
    files += sorted(folder.glob("additional_chat_templates/*.jinja"))
    return {file.relative_to(folder).as_posix(): file for file in files}


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
