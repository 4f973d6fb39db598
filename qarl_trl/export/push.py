"""Push a low-bit model to the Hub: only its files, in one commit. huggingface_hub retries failed connections."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import PretrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from .card import has_low_bit_model
from .card_edits import CARD, addressed, edited_card, is_card_of_base
from .files import RECIPE, is_llmcompressor_recipe, modules_here, weight_files


logger = logging.getLogger(__name__)

CONFIG = "config.json"
# The files of a model repository, besides its weights. A push leaves out pickles, logs, training state and all else.
MODEL_FILES = (
    "model.safetensors.index.json",
    CONFIG,
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
    "*.tiktoken",
    "emoji.json",
    "README.md",
)
# Of these, the files that name code in `auto_map`.
NAME_CODE = (CONFIG, "tokenizer_config.json", "processor_config.json", "*preprocessor_config.json")
# A push deletes such files if the new model lacks them, and other `MODEL_FILES`, too: an engine would load them.
TEMPLATES = "additional_chat_templates/"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "adapter_config.json")
# A start that is pinned by its commit may be on any branch. The main one is likely.
_COMMIT = re.compile("[0-9a-f]{40}")


def open_repo(
    name: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    saved_in: Path | None = None,
) -> str:
    """
    Create a model repository if it does not exist.

    Args:
        name: `user/model`, or `model` of the token's user.
        token: Defaults to that of `HF_TOKEN` or `hf auth login`.
        private: Whether a new repository is private; `None` leaves it to the Hub.
        revision: A branch other than `main`, created too.
        saved_in: Folder of the model to push, for the message; `None` before there is one.

    Returns:
        The repository's full name.

    Raises:
        OSError: if the Hub cannot be reached or refuses. The message says why and what to do, and where the model is.
        ValueError: if the repository must be private, and a public one is there.
    """
    api = HfApi(token=token)
    is_public = False
    with _errors_named(name, api, _ways_on(saved_in, name, revision)):
        name = api.create_repo(name, private=private, exist_ok=True).repo_id
        # `create_repo` also succeeds for a user who may only read an existing repository.
        api.auth_check(name, write=True)
        # Of a repository that exists `create_repo` changes nothing.
        if private:
            is_public = not api.model_info(name).private
        if revision not in (None, "main"):
            api.create_branch(name, branch=revision, exist_ok=True)
    # Outside of the block, because it is no error of the Hub.
    if is_public:
        raise ValueError(
            f"{name} on {api.endpoint} must be private (--private, hub_private_repo), and it is public. "
            f"Make it private in its settings there, or give another name.{_ways_on(saved_in, name, revision)}"
        )
    return name


def repository_of(
    name: str,
    args: Any,
    start: PretrainedConfig,
    is_adapter: bool,
    token: str | None,
    revision: str | None,
    saved_in: Path | None = None,
) -> str:
    """
    Open the repository of a run, see [`open_repo`].

    Args:
        name, token, revision, saved_in: As for [`open_repo`].
        args: Settings of the run, a config with `LowBitConfig`.
        start: The config of the model that it starts from.
        is_adapter: Whether it trains an adapter.

    Returns:
        The repository's full name.

    Raises:
        OSError: as [`open_repo`].
        ValueError: if a low-bit model or an adapter would replace the start of its run, or the base of an adapter
            another model.
    """
    pushes_base = args.frozen and not args.from_checkpoint
    # Before the repository is made, if its owner is known.
    if pushes_base and "/" in name:
        _check_base(name, token, revision, saved_in)
    repository = open_repo(name, token, args.hub_private_repo, revision, saved_in)
    if pushes_base and repository != name:
        _check_base(repository, token, revision, saved_in)

    # A model in high precision goes on in the repository of its start, as with TRL.
    is_of_another_kind = args.quantized or is_adapter
    if is_of_another_kind and start._name_or_path == repository and _is_branch_of(start, args, token, revision):
        raise ValueError(
            f"A push to {repository} would replace the model that the run starts from: set hub_model_id to another "
            "repository, or hub_revision to another branch."
        )
    return repository


def _is_branch_of(start: PretrainedConfig, args: Any, token: str | None, revision: str | None) -> bool:
    """Whether a model is the content of a branch of its repository, which exists."""
    branch = revision or "main"
    start_branch = (args.model_init_kwargs or {}).get("revision") or "main"
    if _COMMIT.fullmatch(start_branch):
        start_branch = "main"
    if branch == start_branch:
        return True

    # A script may have loaded it from any branch, or a run by a tag. A new branch has the content of the main one.
    commit = getattr(start, "_commit_hash", None)
    if commit is None:
        return False
    name = start._name_or_path
    api = HfApi(token=token)
    with _errors_named(name, api, ""):
        heads = {each: api.model_info(name, revision=each).sha for each in ("main", branch)}
    return commit == heads[branch] and (branch == "main" or commit != heads["main"])


def base_repository(adapter: str) -> str:
    """The repository of the base that a run quantized, beside that of its adapter."""
    return f"{adapter}-base"


def _check_base(adapter: str, token: str | None, revision: str | None, saved_in: Path | None) -> None:
    """Refuse (`ValueError`) to push the base of an adapter over a model, if that is no base of an earlier run."""
    name = base_repository(adapter)
    api = HfApi(token=token)
    texts = {}
    with _errors_named(name, api, _ways_on(saved_in, adapter, revision)), tempfile.TemporaryDirectory() as folder:
        try:
            present = api.list_repo_files(name, revision=revision)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return
        if not any(_matches(file, (*WEIGHTS, CONFIG)) for file in present):
            return
        for file in {CONFIG, CARD} & set(present):
            texts[file] = Path(api.hf_hub_download(name, file, revision=revision, local_dir=folder)).read_bytes()

    is_quantized = b'"quantization_config"' in texts.get(CONFIG, b"")
    if not (is_quantized and is_card_of_base(texts.get(CARD, b""))):
        raise ValueError(
            f"A push to {adapter} puts the adapter's base into {name}, which holds another model: set hub_model_id "
            "to another repository."
        )


def name_of_output(args: Any) -> str:
    """The name of the repository of a run without `hub_model_id`: that of its `output_dir`."""
    return Path(args.output_dir).absolute().name


def push(
    folder: Path,
    name: str,
    message: str,
    token: str | None = None,
    revision: str | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> CommitInfo:
    """
    Make the model of a folder the content of a repository.

    Args:
        folder: The model's folder. Only its [`model_files`] are pushed, and the card gets the repository's name.
        name: The repository's full name, from [`open_repo`].
        message: The commit's message.
        token: Defaults to that of `HF_TOKEN` or `hf auth login`.
        revision: A branch other than `main`.
        replaced: By the names of files their content in the repository, where it differs from that in the folder.

    Raises:
        ValueError: if the folder has no weights.
        OSError: if the Hub cannot be reached or refuses. The message says how to try again.
    """
    api = HfApi(token=token)
    files: dict[str, Any] = model_files(folder)
    if CARD in files:
        # The card here may name another repository, to which the model was pushed before.
        files[CARD] = addressed(files[CARD].read_bytes(), name, revision)
    files |= replaced or {}

    with _errors_named(name, api, _ways_on(folder, name, revision)):
        present = api.list_repo_files(name, revision=revision)
        if CARD in present and CARD in files and edited_card(folder) is None:
            files = _without_card_of_user(files, api, name, revision)
        changes: list[Any] = [CommitOperationAdd(there, here) for there, here in files.items()]
        changes += [CommitOperationDelete(file) for file in present if _is_stale(file, files)]
        if RECIPE in present and RECIPE not in files and _holds_llmcompressor_recipe(api, name, revision):
            # It would say of the new model how another one was quantized.
            changes.append(CommitOperationDelete(RECIPE))
        # `upload_folder` may make several commits: a download between two of them would get half a model.
        return api.create_commit(name, changes, commit_message=message, revision=revision)


def _ways_on(folder: Path | None, name: str, revision: str | None) -> str:
    """Where the model is, and how to push it again; empty without a folder."""
    if folder is None:
        return ""

    # `qarl-trl push` takes low-bit models only.
    if has_low_bit_model(folder):
        retry = f"`qarl-trl push {folder} {name}`"
        if revision:
            retry = f"`qarl-trl push {folder} {name} --revision {revision}`"
    else:
        retry = "trainer.push_to_hub(), or `qarl-trl train` with resume_from_checkpoint: auto,"
    return f" Nothing is lost: the model is in {folder}; {retry} tries again."


def _without_card_of_user(files: dict[str, Any], api: HfApi, name: str, revision: str | None) -> dict[str, Any]:
    """What is pushed: not a generated card, if a user has written or edited that in the repository."""
    with tempfile.TemporaryDirectory() as there:
        api.hf_hub_download(name, CARD, revision=revision, local_dir=there)
        if edited_card(Path(there)) is None:
            return files

    logger.warning(f"{name} keeps its card, which is not one of qarl_trl's. Delete it there to get that of this push.")
    return {file: content for file, content in files.items() if file != CARD}


def _holds_llmcompressor_recipe(api: HfApi, name: str, revision: str | None) -> bool:
    """Whether the recipe in a repository is one of llm-compressor. Any other file of this name is the user's."""
    with tempfile.TemporaryDirectory() as folder:
        file = api.hf_hub_download(name, RECIPE, revision=revision, local_dir=folder)
        return is_llmcompressor_recipe(Path(file))


def _is_stale(file: str, pushed: Collection[str]) -> bool:
    """Whether a file of a repository is one of an earlier model's, and not in the new model."""
    if file in pushed or file == CARD:
        return False
    # Of the folders only that of the templates is the tokenizer's.
    if "/" in file:
        return file.startswith(TEMPLATES)
    return _matches(file, (*WEIGHTS, *MODEL_FILES))


@contextmanager
def _errors_named(name: str, api: HfApi, ways_on: str) -> Iterator[None]:
    """Turn each error of the block into an `OSError` of one line, with the repository's name and what to do."""
    try:
        yield
    except Exception as error:
        # `from None`: the chain of errors would show what the line leaves out.
        raise OSError(f"{name} on {api.endpoint}: {_one_line(error)} {_remedy(error)}{ways_on}") from None


def _remedy(error: BaseException) -> str:
    """What to do about an error of the Hub or of the network."""
    error = _innermost(error)
    response = getattr(error, "response", None)
    if response is None and not isinstance(error, LocalTokenNotFoundError):
        return "No answer came: look at the network, HF_ENDPOINT and HF_HUB_OFFLINE."
    if response is not None and response.status_code >= 500:
        return "The Hub has a problem of its own: try again later."
    return "Set HF_TOKEN or run `hf auth login`, with a token that may write there."


def _one_line(error: BaseException) -> str:
    """Kind and message of an error, without the signed queries of storage addresses."""
    error = _innermost(error)
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"\?[^\s']+", "", line)


def _innermost(error: BaseException) -> BaseException:
    """What happened: an upload wraps its error, and so hides it."""
    while type(error) is RuntimeError and error.__cause__:
        error = error.__cause__
    return error


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
    if is_llmcompressor_recipe(folder / RECIPE):
        files.append(folder / RECIPE)

    files += _code_files(folder)
    # transformers puts further templates of a tokenizer into this folder.
    files += sorted(folder.glob(f"{TEMPLATES}*.jinja"))
    return {file.relative_to(folder).as_posix(): file for file in files}


def _code_files(folder: Path) -> list[Path]:
    """The code of a model that loads with `trust_remote_code`. Other code beside it is the user's, and stays here."""
    modules: set[Path] = set()
    for file in [file for name in NAME_CODE for file in folder.glob(name)]:
        content = json.loads(file.read_text())
        # Old tokenizers have the list of their classes alone.
        auto_map = content.get("auto_map") or {}
        for classes in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
            modules |= {folder / name for name in modules_here(classes)}

    present = [module for module in sorted(modules) if module.is_file()]
    imported = [Path(file) for module in present for file in get_relative_import_files(module)]
    return sorted({*present, *imported})


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name matches one of some patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)
