"""What an export starts from: a model, or a LoRA adapter and its base, which may be quantized."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any


# Modules of the method are imported in the functions: `--help` is instant.
if TYPE_CHECKING:
    from ...quant.source import CheckpointSource

DEFAULT_TARGETS = ["Linear"]


@dataclass(frozen=True)
class ExportSource:
    """
    What an export starts from, found and checked but not loaded.

    Attributes:
        base: Folder or Hub id of the model, or of the base of an adapter. The card names it.
        load: Loads the model with high-precision weights; an adapter as a `PeftModel`.
        quantized_base: The base of an adapter, if it is stored in low bits.
        frozen: Whether the adapter was trained beside the low bits of this base, so that merging makes another policy.
    """

    base: str
    load: Callable[[], Any]
    quantized_base: CheckpointSource | None = None
    frozen: bool = False


def find_source(args: argparse.Namespace) -> ExportSource:
    """
    Find out what the user gave, and check it, without reading weights.

    Args:
        args: Options of `qarl-trl export`.

    Raises:
        ValueError: if the folder holds several adapters, shards of FSDP or low bits, or an adapter that fits no causal
            language model.
    """
    from ...export.files import ADAPTER_CONFIG, LOW_BIT_FOLDER

    checkpoint = Path(args.checkpoint)
    # Adapters below a model are others than it: some models are published with theirs.
    is_model = (checkpoint / "config.json").is_file()
    named = [] if is_model else _named_adapters(checkpoint)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        others = _others_of_run(checkpoint, named)
        if others:
            print(
                f"{checkpoint} has several adapters: 'default' is exported, and not {', '.join(others)}. If another "
                f"one was trained, export its folder: {checkpoint / others[0]}."
            )
        return _adapter(args, args.checkpoint)
    if len(named) > 1:
        raise ValueError(f"{checkpoint} has several adapters ({', '.join(named)}). Move all but one of them away.")
    if named:
        return _adapter(args, str(checkpoint / named[0]))

    shards = sorted(folder.name for folder in checkpoint.glob("pytorch_model_fsdp*") if folder.is_dir())
    if shards and not is_model:
        raise ValueError(
            f"{checkpoint} has the master weights in FSDP's shards ({shards[0]}), which this command does not read. "
            f"With export_low_bit the low-bit model is in {checkpoint / LOW_BIT_FOLDER}."
        )
    return _full_checkpoint(args.checkpoint, _loading(args))


def _loading(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `from_pretrained` that the options name."""
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def _named_adapters(checkpoint: Path) -> list[str]:
    """The adapters that peft saved into folders of their names, as it does with all but "default"."""
    from ...export.files import ADAPTER_CONFIG, is_of_run

    names = sorted(file.parent.name for file in checkpoint.glob(f"*/{ADAPTER_CONFIG}"))
    # TRL keeps the start of the run in the second.
    return [name for name in names if not is_of_run(name) and name != "ref"]


def _others_of_run(checkpoint: Path, named: Sequence[str]) -> list[str]:
    """
    Those of the named adapters that a run has beside its first one, as far as the folder tells.

    Args:
        checkpoint: The folder, with peft's first adapter.
        named: From [`_named_adapters`].
    """
    from ...checkpoints.folder import read_manifest
    from ...export.files import ADAPTER_CONFIG

    try:
        files = read_manifest(checkpoint)["files"]
    except (OSError, ValueError, KeyError, TypeError):
        # `save_model` writes no list of its files.
        return list(named)
    return [name for name in named if f"{name}/{ADAPTER_CONFIG}" in files]


def tokenizer_folder(checkpoint: str, base: str | None = None) -> str:
    """
    Where the tokenizer of a model is: of an adapter with a name of its own, in the folder above peft's; of one that
    was saved without a tokenizer, in its base.

    Args:
        checkpoint: Folder of the model or adapter, or a Hub id.
        base: The base of an adapter; `None` for one that must have a tokenizer.
    """
    from ...export.files import ADAPTER_CONFIG

    folder = Path(checkpoint).absolute()
    names = ("tokenizer_config.json", "tokenizer.json")
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    has_one = any((folder / name).is_file() for name in names)
    has_one_above = any((folder.parent / name).is_file() for name in names)
    if not is_adapter or has_one:
        return checkpoint
    if has_one_above:
        return str(folder.parent)
    has_another = any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "tekken.json"))
    return checkpoint if base is None or has_another else base


def _full_checkpoint(name: str, loading: dict[str, Any]) -> ExportSource:
    """A model with all its weights, in high precision; `loading` are arguments of `from_pretrained`."""
    from ...quant.source import quantized_source

    if quantized_source(name, **loading) is not None:
        # Rounding low bits once more would give another model than the one that was trained.
        raise ValueError(f"{name} is quantized already. Give the checkpoint that holds the master weights.")

    return ExportSource(base=name, load=partial(_load_whole, name, **loading))


def _load_whole(name: str, architecture: Any = None, adapter: str | None = None, **hub: Any) -> Any:
    """
    A model in high precision; `ValueError` if its checkpoint lacks weights.

    Args:
        name: Its folder or Hub id.
        architecture: Its class; default: that of its config, as in training, or a causal language model.
        adapter: Folder of an adapter that is put on it, if any.
        hub: May have the revision and `trust_remote_code`.
    """
    architecture = architecture or _class_of(name, **hub)
    folders = [_folder_of_weights(name, hub.get("revision"))]
    if adapter is not None:
        folders.append(Path(adapter))
    model, report = architecture.from_pretrained(name, dtype=_dtype_of(*folders), output_loading_info=True, **hub)
    # transformers makes up random weights for them, and only prints a table.
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise ValueError(
            f"{name} has not the weights that its config.json describes: {len(wrong)} are missing or of another "
            f"shape, first {wrong[0]}."
        )

    return model


def _folder_of_weights(name: str, revision: str | None) -> Path:
    """The folder with the safetensors of a model; those of a Hub id are downloaded, as loading it does."""
    from huggingface_hub import snapshot_download

    if Path(name).is_dir():
        return Path(name)
    patterns = ["model.safetensors", "model-*.safetensors"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _dtype_of(*folders: Path) -> Any:
    """
    The dtype in which the weights of a model load without rounding, whatever its config says: the one of 16 bits that
    all of them have, or float32, in which training loads them. Among the folders may be that of an adapter.
    """
    import torch
    from safetensors import safe_open

    from ...export.files import weight_files

    stored = set()
    for file in [file for folder in folders for file in weight_files(folder)]:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118, it is no dictionary
                # peft has the factors of an adapter in float32 beside any base, and its other tensors in the base.
                if ".lora_" not in name:
                    stored.add(weights.get_slice(name).get_dtype())

    # Low bits decompress to the dtype of their scales.
    high = stored & {"F64", "F32", "F16", "BF16"}
    if high == {"BF16"}:
        return torch.bfloat16
    return torch.float16 if high == {"F16"} else torch.float32


def _class_of(name: str, **hub: Any) -> Any:
    """
    The class of a language model, which is the one that its config names: of some models with a vision tower
    (Qwen3.5) `AutoModelForCausalLM` loads the text model alone. `ValueError` for a classifier.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ...quant.names import architecture_of

    config = AutoConfig.from_pretrained(name, **hub)
    saved_as = (config.architectures or [""])[0]
    # With a tied output layer nothing would be missing, and the head would be left out.
    if "Classification" in saved_as:
        raise ValueError(f"{name} must be a language model, got {saved_as}, whose head would be left out.")
    has_images = saved_as.endswith("ForConditionalGeneration") and not config.is_encoder_decoder
    return (architecture_of(config) if has_images else None) or AutoModelForCausalLM


def _adapter(args: argparse.Namespace, adapter: str) -> ExportSource:
    """A LoRA adapter, to be merged into its base; `adapter` is its folder, in or below that of `args`."""
    from peft import PeftConfig

    from ...export.adapter_base import base_of
    from ...export.files import tensor_shapes
    from ...quant.source import quantized_source

    # On a language model peft would drop the head of a classifier, in silence.
    task = PeftConfig.from_pretrained(adapter).task_type
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(f"task_type of the adapter in {adapter} must be CAUSAL_LM, got {task}.")

    tensor_shapes(adapter)  # refuses a file that is cut off
    base, revision = base_of(Path(adapter))
    hub = _loading(args)
    if revision:
        hub["revision"] = revision
    quantized_base = quantized_source(base, **hub)
    if quantized_base is not None:
        return _adapter_of_quantized_base(args, adapter, quantized_base, hub)

    tokenizer = tokenizer_folder(args.checkpoint, base)
    return ExportSource(base=base, load=partial(_load_onto_whole_base, base, adapter, tokenizer, hub))


def _load_onto_whole_base(base: str, adapter: str, tokenizer: str, hub: dict[str, Any]) -> Any:
    """The adapter as a `PeftModel`, on its base in high precision; `tokenizer` is the folder of the tokenizer."""
    import transformers
    from peft import PeftConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # peft writes it for an adapter without task_type: models with a vision tower are no causal language models.
    written = PeftConfig.from_pretrained(adapter).auto_mapping or {}
    architecture = getattr(transformers, written.get("base_model_class", ""), None)
    if architecture is None and not _has_parts(adapter):
        architecture = AutoModelForCausalLM

    # Not by PEFT's class for both, which would take a base that lacks weights.
    model = _load_whole(base, architecture, adapter, **hub)
    # As that class does: a training may have added tokens.
    tokens = len(AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=hub.get("trust_remote_code", False)))
    # Of an embedding that a script resized, also beyond its tokenizer, the adapter has all rows.
    saved_rows = _rows_of_embedding(model, adapter)
    if saved_rows is not None:
        model.resize_token_embeddings(saved_rows, mean_resizing=False)
    elif tokens > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(tokens)
    return _with_adapter(model, adapter)


def _has_parts(adapter: str) -> bool:
    """Whether an adapter is one of a model of several parts, such as a vision tower and a language model."""
    from ...export.files import shapes_in, weight_files

    names = shapes_in(weight_files(Path(adapter)))
    return any(".language_model." in name or ".visual." in name for name in names)


def _rows_of_embedding(model: Any, adapter: str) -> int | None:
    """The number of rows of the embedding in an adapter's file; `None` if it has none, as most."""
    from ...export.files import shapes_in, weight_files

    embedding = model.get_input_embeddings().weight
    shapes = shapes_in(weight_files(Path(adapter)))
    for name, parameter in model.named_parameters():
        # peft's names begin so.
        shape = shapes.get(f"base_model.model.{name}")
        if parameter is embedding and shape is not None:
            return shape[0]
    return None


def _with_adapter(model: Any, adapter: str) -> Any:
    """A model with the adapter in a folder; `ValueError` if that lacks weights, of which PEFT only warns."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(adapter)
    # It trained with dropout, which the trained weights no longer have.
    if hasattr(config, "lora_dropout"):
        config.lora_dropout = 0.0

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")
        try:
            return PeftModel.from_pretrained(model, adapter, config=config)
        except UserWarning as warning:
            raise ValueError(f"{adapter} lacks weights of its adapter: {warning} Copy or save it again.") from warning
        except RuntimeError as error:
            # torch's, with a line for each tensor.
            reason = " ".join(str(error).split())
            raise ValueError(f"The adapter {adapter} does not fit its base: {reason}") from error


def _adapter_of_quantized_base(
    args: argparse.Namespace, adapter: str, quantized_base: CheckpointSource, hub: dict[str, Any]
) -> ExportSource:
    """
    A LoRA adapter in the folder `adapter` whose base is a compressed-tensors checkpoint; `hub` are arguments of
    `from_pretrained` for the base.
    """
    from ...export.adapter_base import BASE_CONFIG, check_base

    changes_layers = args.group_size or args.targets != DEFAULT_TARGETS or args.ignore is not None
    if changes_layers and not args.scheme:
        raise ValueError("--group_size, --targets and --ignore need --scheme: without it the base's own are used.")

    # Only an adapter that was trained beside a frozen base has this file.
    frozen = Path(adapter, BASE_CONFIG).is_file()
    if frozen:
        check_base(Path(adapter), quantized_base.folder)

    return ExportSource(
        base=quantized_base.name,
        load=partial(_load_onto_quantized_base, quantized_base, adapter, hub),
        quantized_base=quantized_base,
        frozen=frozen,
    )


def _load_onto_quantized_base(base: CheckpointSource, adapter: str, hub: dict[str, Any]) -> Any:
    """The adapter as a `PeftModel`, on the base's low bits as high-precision weights."""
    from ...quant.start import load_master_weights

    # PEFT would load the base by transformers, whose model has no weights that could be quantized again.
    dtype = _dtype_of(base.folder, Path(adapter))
    return _with_adapter(load_master_weights(base.name, dtype=dtype, **hub), adapter)
