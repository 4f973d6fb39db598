"""Push a low-bit model to the Hub: only its files, in one commit. huggingface_hub retries failed connections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi


# The files of a model repository. A push leaves out pickles, logs, completions, training state and all else.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "*_config.json", "tokenizer*", "vocab*"),
    *("merges.txt", "*_map.json", "added_tokens.json", "chat_template.json", "tekken.json", "*.jinja", "*.model"),
    *("recipe.yaml", "README.md"),
)
# A push deletes such files at a repository's root if the new model lacks them: an engine would load them too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")


def open_repo(name: str, token: str | None = None, private: bool | None = None, revision: str | None = None) -> str:
    """
    Create the model repository `name` (`user/model`, or `model` of the token's user) if it does not exist; return its full name.

    `token` defaults to that of `HF_TOKEN` or `hf auth login`; `revision` is a branch other than `main`. `OSError`, here and in
    [`push`], if the Hub cannot be reached or refuses; its message says why and what to do.
    """
    api = HfApi(token=token)
    with _errors_named(name, api, "Set HF_TOKEN or run `hf auth login`, with a token that may write there."):
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        # `create_repo` also succeeds for a user who may only read an existing repository.
        api.auth_check(name, write=True)
        if revision not in (None, "main"):
            api.create_branch(name, branch=revision, exist_ok=True)
    return name


def repository_of(args: Any) -> str:
    """Open the repository of a run with these settings (a `QaRLConfig`), see [`open_repo`]."""
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    return open_repo(name, args.hub_token, args.hub_private_repo, args.hub_revision)


def push(
    folder: Path, name: str, message: str, token: str | None = None, revision: str | None = None, **replaced: bytes
) -> CommitInfo:
    """Make the model of `folder` the content of the repository `name`. `replaced` holds files with other bytes than the local ones."""
    api, files = HfApi(token=token), dict[str, Any](model_files(folder)) | replaced
    command = f"qarl-trl push {folder} {name}" + (f" --revision {revision}" if revision else "")
    command = "trainer.push_to_hub()" if replaced else command  # `qarl-trl push` takes no adapters
    with _errors_named(name, api, f"Nothing is lost: the model is in {folder}; `{command}` tries again."):
        present = api.list_repo_files(name, revision=revision)
        stale = [file for file in present if "/" not in file and _any(file, WEIGHTS) and file not in files]
        changes: list[Any] = [CommitOperationAdd(there, here) for there, here in files.items()]
        changes += [CommitOperationDelete(file) for file in stale]
        # `upload_folder` may make several commits: a download between two of them would get half a model.
        return api.create_commit(name, changes, commit_message=message, revision=revision)


@contextmanager
def _errors_named(name: str, api: HfApi, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while type(cause) is RuntimeError and cause.__cause__:  # the error of an upload
            cause = cause.__cause__
        # One line, without the signed queries of storage addresses. `from None`: the chain of errors would show them.
        reason = re.sub(r"\?[^\s']+", "", " ".join(f"{type(cause).__name__}: {cause}".split()))
        raise OSError(f"{name} on {api.endpoint}: {reason} {remedy}") from None


def model_files(folder: Path) -> dict[str, Path]:
    """The model files of `folder`, by their names in a repository. `ValueError` if it has no weights."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and _any(file.name, MODEL_FILES)]
    if not any(file.suffix == ".safetensors" for file in files):
        raise ValueError(f"{folder} holds no model to push: it has no *.safetensors.")
    files += sorted(folder.glob("additional_chat_templates/*.jinja"))
    return {file.relative_to(folder).as_posix(): file for file in files}


def _any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
