"""Push a low-bit model to the Hub: only its files, in one commit. huggingface_hub retries failed connections."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from .card import CARD, addressed
from .files import weight_files


# The files of a model repository, besides its weights. A push leaves out pickles, logs, training state and all else.
MODEL_FILES = (
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "base_config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "*preprocessor_config.json",
    "tokenizer.*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "tekken.json",
    "*.model",
    "README.md",
)
# A user's recipe has this name too, and may hold a token.
RECIPE = "recipe.yaml"
# A push deletes such files at a repository's root if the new model lacks them: an engine would load them too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")


def open_repo(name: str, token: str | None = None, private: bool | None = None, revision: str | None = None) -> str:
    """
    Create a model repository if it does not exist.

    Args:
        name: `user/model`, or `model` of the token's user.
        token: Defaults to that of `HF_TOKEN` or `hf auth login`.
        private: Whether a new repository is private; `None` leaves it to the Hub.
        revision: A branch other than `main`, created too.

    Returns:
        The repository's full name.

    Raises:
        OSError: if the Hub cannot be reached or refuses. The message says why and what to do.
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
    """
    Open the repository of a run, see [`open_repo`].

    Args:
        args: Settings of the run, a config with `LowBitConfig`. Without `hub_model_id` the repository has the name of
            `output_dir`.

    Returns:
        The repository's full name.
    """
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    return open_repo(name, args.hub_token, args.hub_private_repo, args.hub_revision)


def push(
    folder: Path, name: str, message: str, token: str | None = None, revision: str | None = None, **replaced: bytes
) -> CommitInfo:
    """
    Make the model of a folder the content of a repository.

    Args:
        folder: The model's folder. Only its [`model_files`] are pushed, and the card gets the repository's name.
        name: The repository's full name, from [`open_repo`].
        message: The commit's message.
        token: Defaults to that of `HF_TOKEN` or `hf auth login`.
        revision: A branch other than `main`.
        replaced: Files whose content in the repository differs from that in the folder.

    Raises:
        ValueError: if the folder has no weights.
        OSError: if the Hub cannot be reached or refuses. The message says how to try again.
    """
    api = HfApi(token=token)
    files: dict[str, Any] = model_files(folder)
    if CARD in files:
        # The card here may name another repository, to which the model was pushed before.
        files[CARD] = addressed(files[CARD].read_bytes(), name)
    files |= replaced

    retry = _retry_command(folder, name, revision, replaced)
    with _errors_named(name, api, f"Nothing is lost: the model is in {folder}; `{retry}` tries again."):
        present = api.list_repo_files(name, revision=revision)
        changes: list[Any] = [CommitOperationAdd(there, here) for there, here in files.items()]
        changes += [CommitOperationDelete(file) for file in present if _is_stale(file, files)]
        # `upload_folder` may make several commits: a download between two of them would get half a model.
        return api.create_commit(name, changes, commit_message=message, revision=revision)


def _retry_command(folder: Path, name: str, revision: str | None, replaced: Mapping[str, bytes]) -> str:
    """What to type to push again."""
    # `qarl-trl push` takes no adapters, whose configuration is what differs in the repository.
    if replaced:
        return "trainer.push_to_hub()"
    command = f"qarl-trl push {folder} {name}"
    if revision:
        command += f" --revision {revision}"
    return command


def _is_stale(file: str, pushed: Collection[str]) -> bool:
    """Whether a file of a repository is a weight at its root that is not in the new model."""
    return "/" not in file and _matches(file, WEIGHTS) and file not in pushed


@contextmanager
def _errors_named(name: str, api: HfApi, remedy: str) -> Iterator[None]:
    """Turn each error of the block into an `OSError` of one line, with the repository's name and what to do."""
    try:
        yield
    except Exception as error:
        reason = _one_line(error)
        # `from None`: the chain of errors would show what the line leaves out.
        raise OSError(f"{name} on {api.endpoint}: {reason} {remedy}") from None


def _one_line(error: BaseException) -> str:
    """Kind and message of an error, without the signed queries of storage addresses."""
    # An upload wraps its error, and so hides what happened.
    while type(error) is RuntimeError and error.__cause__:
        error = error.__cause__

    line = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"\?[^\s']+", "", line)


def model_files(folder: Path) -> dict[str, Path]:
    """
    Find the files of a model.

    Args:
        folder: The model's folder. Of its sub-folders only further chat templates are files of the model.

    Returns:
        The files by their names in a repository.

    Raises:
        ValueError: if it has no weights.
    """
    weights = weight_files(folder)
    if not weights:
        raise ValueError(f"{folder} holds no model to push: it has no *.safetensors.")

    others = [file for file in sorted(folder.iterdir()) if file.is_file() and _matches(file.name, MODEL_FILES)]
    files = [*weights, *others]
    if _is_llmcompressor_recipe(folder / RECIPE):
        files.append(folder / RECIPE)

    # transformers puts further templates of a tokenizer into this folder.
    files += sorted(folder.glob("additional_chat_templates/*.jinja"))
    return {file.relative_to(folder).as_posix(): file for file in files}


def _is_llmcompressor_recipe(file: Path) -> bool:
    """Whether a file is what llm-compressor writes beside a model: stages of modifiers, and nothing else."""
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


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name matches one of some patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)
