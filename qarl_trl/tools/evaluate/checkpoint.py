"""Find, check and describe the checkpoint to evaluate, before an engine starts."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from compressed_tensors.quantization import QuantizationConfig
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import PretrainedConfig

from ...export import adapter_base, files
from ...export.card import scheme_name
from ...export.tensors import Checked, check_tensors
from ...quant.scheme import describe_scheme
from ...quant.source import INDEX, check_one_index, weight_map
from ...rollout.cpu_support import check_engine_cpu
from ...rollout.vllm.platform import is_cpu_engine


# Fields of a `config.json` that count something. With a 0 an engine fails long after it has started.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def find_checkpoint(name_or_path: str, revision: str | None = None) -> tuple[Path, Path | None]:
    """
    Find the folders of a checkpoint.

    Args:
        name_or_path: A folder with a model or a LoRA adapter, or the Hub id of one, which is downloaded.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The folder of the model, and `None`; for an adapter, the folders of its base and of the adapter.

    Raises:
        FileNotFoundError: if the folder holds no model.
        ValueError: for an adapter without a frozen base, or with the wrong base, for a damaged
            `generation_config.json`, and for a folder of whose name an engine would read another.
    """
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        folder = _download(name_or_path, revision)
    # vLLM (0.31) takes the path for a pattern when it looks for the weights: of run[1] it would load those of run1.
    if glob.has_magic(str(folder.absolute())):
        raise ValueError(f"A model's folder must have no *, ? or [ in its path, got {str(folder.absolute())!r}.")

    # Both kinds of folders hold *.safetensors; this file tells them apart.
    is_adapter = (folder / files.ADAPTER_CONFIG).is_file()
    config_name = files.ADAPTER_CONFIG if is_adapter else "config.json"
    # Without a tokenizer transformers makes an empty one. Mistral's own has one file alone.
    for needed in ((config_name,), ("*.safetensors",), ("tokenizer*", "tekken.json")):
        if not any(any(folder.glob(pattern)) for pattern in needed):
            raise FileNotFoundError(f"{folder} is no model: it has no {needed[0]}.")
    if not is_adapter:
        files.check_generation_config(folder)
        return folder, None

    has_frozen_base = (folder / adapter_base.BASE_CONFIG).is_file()
    # A later run with all weights may have left its model in the same folder.
    has_model = (folder / "config.json").is_file()
    if has_model or not has_frozen_base:
        raise ValueError(
            f"{folder} must be a model, or an adapter that was trained beside a frozen base, got another adapter. "
            f"Give its {files.LOW_BIT_FOLDER}/ folder, or what `qarl-trl export` makes of it."
        )

    # The base may be a folder or a Hub id, with files of its own to look for.
    base, _ = find_checkpoint(*adapter_base.base_of(folder))
    adapter_base.check_base(folder, base)
    return base, folder


def _download(name: str, revision: str | None) -> Path:
    """The folder of a model of the Hub, which is downloaded if it is not in the cache."""
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files.READ_BY_ENGINE)))
    except (LocalEntryNotFoundError, RepositoryNotFoundError) as error:
        # Their words do not name it, and mostly a folder was meant.
        raise FileNotFoundError(f"{name!r} is no folder here, and as a model of the Hub: {error}") from error


def check_sizes(folder: Path, config: PretrainedConfig) -> None:
    """
    Refuse a model without layers, heads, positions and so on.

    Args:
        folder: The folder of the model, for the message.
        config: The model's config, as it was loaded from the folder.

    Raises:
        ValueError: for the first field in `SIZES` that is 0 or less.
    """
    text_config = config.get_text_config()
    for name in SIZES:
        size = getattr(text_config, name, None)
        # Some models have a list of sizes, or `None` where another field decides.
        if isinstance(size, int) and size <= 0:
            raise ValueError(f"{folder / 'config.json'}: {name} must be above 0, got {size}.")


def check_vocabulary(folder: Path, config: PretrainedConfig, prompts: Iterable[Sequence[int]]) -> None:
    """
    Refuse prompts with tokens that the model does not have.

    A tokenizer may know more tokens than its model: only those of the prompts count.

    Args:
        folder: The folder of the model, for the message.
        config: The model's config, as it was loaded from the folder.
        prompts: Token ids of each prompt.

    Raises:
        ValueError: for the largest token id, if it is at or above `vocab_size`.
    """
    size = config.get_text_config().vocab_size
    largest = max((max(prompt, default=0) for prompt in prompts), default=0)
    if largest >= size:
        raise ValueError(
            f"{folder / 'config.json'}: vocab_size is {size}, and the tokenizer makes token {largest} of a prompt. "
            "One of the two is of another model."
        )


def check_complete(folder: Path, trust_remote_code: bool = False) -> None:
    """
    Refuse missing or cut-off files and, for a compressed-tensors checkpoint, missing or wrong tensors.

    vLLM loads such a checkpoint without an error and generates garbage. It refuses a broken plain checkpoint itself.

    Args:
        folder: The folder of a model.
        trust_remote_code: As for `from_pretrained`.

    Raises:
        ValueError: if the checkpoint is not complete.
    """
    index = folder / INDEX
    stored = files.tensor_shapes(folder)
    listed: dict[str, str] = {}
    if index.is_file():
        listed = weight_map(index)
    # A download that was broken off leaves whole files out; vLLM reads those that are there.
    missing = sorted(listed.keys() - stored)
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} tensors of {index.name} ({missing[0]}). Download it again.")

    check = check_tensors(folder, trust_remote_code)
    if check.checked in (Checked.STORED_LAYERS, Checked.NOTHING):
        print(f"{folder}: its tensors are not checked for missing ones, because {check.reason}")


def check_one_model(folder: Path) -> None:
    """
    Refuse a folder with weights of two models, of which vLLM would score one.

    Without an index vLLM reads every `*.safetensors`, also a copy of other weights that a user keeps beside the model,
    and keeps the last. With an index it reads the files that this lists, where transformers takes `model.safetensors`.

    Args:
        folder: The folder of a model.

    Raises:
        ValueError: if two files hold a tensor of one name, and no index says which of them counts; if an index lists
            others than `model.safetensors`, which is there; if what it lists is not there.
    """
    index = folder / INDEX
    if index.is_file():
        check_one_index(folder)
        return

    file_of: dict[str, str] = {}
    # A link to one of the files holds no other weights.
    different: dict[Path, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        different.setdefault(file.resolve(), file)
    for file in different.values():
        for name in files.shapes_in([file]):
            if name in file_of:
                raise ValueError(
                    f"{folder} must hold the weights of one model, got {name} in {file_of[name]} and in {file.name}: "
                    f"an engine reads both, and keeps the last. Move {file.name} or {file_of[name]} out of the folder."
                )
            file_of[name] = file.name


def precision(config: PretrainedConfig) -> str:
    """
    The precision of the quantized layers in words.

    Args:
        config: The model's config, as it was loaded from the checkpoint.

    Raises:
        ValueError: on a CPU that vLLM's engine does not support, or for a group without weights.
    """
    stored = getattr(config, "quantization_config", {"quant_method": "not quantized"})
    device = "cpu" if is_cpu_engine() else "cuda"
    # The kernel of this format is the one that needs more of a CPU. It may stand at any group, or for all of them.
    check_engine_cpu(device, four_bits="pack-quantized" in str(stored))
    if stored["quant_method"] != "compressed-tensors":
        return stored["quant_method"]

    schemes = QuantizationConfig.model_validate(stored).config_groups.values()
    if not schemes or any(scheme.weights is None for scheme in schemes):
        raise ValueError("quantization_config must have config_groups, each with weights: the scheme is not known.")
    # A scheme that is not ours has only a name from its bits, so the description stands beside it.
    return ", ".join(f"{scheme_name(scheme)} ({describe_scheme(scheme)})" for scheme in schemes)
