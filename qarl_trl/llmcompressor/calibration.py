"""llm-compressor's `oneshot`, run on texts of ours: what `qarl-trl precondition` and `qarl-trl ptq` share, options included.

Invariant: nothing here computes on a weight. llm-compressor's modifiers do, and an empty or unreadable calibration set is
refused before a model loads.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationConfig
from datasets import Dataset, load_dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import local_path
from ..quant.plan import read_recipe, single_group
from ..quant.scheme import DEFAULT_IGNORE, resolve_scheme


_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
# Read in this order and joined; the first that exists alone when it is a whole text.
WHOLE_TEXT = ("text", "messages")
PARTS = ("problem", "question", "prompt", "solution", "completion", "answer")


def require_llmcompressor() -> None:
    """
    Raises:
        ImportError: when llm-compressor is not installed.
    """
    if importlib.util.find_spec("llmcompressor") is None:
        raise ImportError(
            "This command needs llm-compressor. Install it with pip install 'qarl_trl[llmcompressor]'. Beside vLLM 0.31, "
            "which pins another compressed-tensors: pip install --no-deps llmcompressor==0.14.0.1 "
            "compressed-tensors==0.19.0."
        )


def make_parser(
    command: str, description: str, num_samples: int, max_length: int, needs_dataset: bool
) -> argparse.ArgumentParser:
    """
    The options of both commands.

    Args:
        command (`str`): `"precondition"` or `"ptq"`.
        description (`str`): For `--help`.
        num_samples (`int`): Default of `--num-samples`.
        max_length (`int`): Default of `--max-length`.
        needs_dataset (`bool`): Whether every method reads texts.
    """
    parser = argparse.ArgumentParser(prog=f"qarl-trl {command}", description=description, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="model folder or Hub id, not quantized")
    parser.add_argument("--output", required=True, help="folder to write, new or empty")
    parser.add_argument("--scheme", default="W4A16", help="as quant_scheme (default: W4A16)")
    parser.add_argument("--group-size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    parser.add_argument("--quant-recipe", help="llm-compressor quantization recipe, in place of --scheme")
    parser.add_argument("--dataset", required=needs_dataset, help="texts to calibrate on: Hub id or file")
    parser.add_argument("--split", default="train", help="split of a Hub dataset (default: train)")
    parser.add_argument(
        "--num-samples", type=int, default=num_samples, help=f"calibration rows (default: {num_samples})"
    )
    parser.add_argument("--max-length", type=int, default=max_length, help=f"tokens of a row (default: {max_length})")
    return parser


def read_plan(args: argparse.Namespace) -> QuantizationConfig:
    """
    The quantization that the options ask for, after the checks that need no model.

    Raises:
        ImportError: when llm-compressor is not installed.
        ValueError: when the output folder is not empty, and for a scheme or recipe that is not supported.
    """
    require_llmcompressor()
    output = Path(args.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty. Use a new folder.")
    if args.quant_recipe:
        return read_recipe(args.quant_recipe)
    return single_group(resolve_scheme(args.scheme, args.group_size), ["Linear"], DEFAULT_IGNORE)


def calibration_set(
    name: str, tokenizer: PreTrainedTokenizerBase, num_samples: int, max_length: int, split: str = "train"
) -> Dataset:
    """
    Tokenized texts, as `oneshot` takes them.

    Args:
        name (`str`): Hub id, or a `.jsonl`, `.json`, `.parquet` or `.txt` file. A row is its `text`, its `messages`
            (chat template applied), or its problem and solution one after the other.
        tokenizer (`PreTrainedTokenizerBase`): Of the model.
        num_samples (`int`): Rows taken from the front.
        max_length (`int`): Tokens kept of a row.
        split (`str`, *optional*, defaults to `"train"`): Split of a Hub dataset.

    Returns:
        `Dataset`: `input_ids` and `attention_mask`.

    Raises:
        ValueError: when there is no row, or no column to read.
    """
    path = local_path(name)
    if path is None:
        rows = load_dataset(name, split=f"{split}[:{num_samples}]")
    else:
        rows = load_dataset(_BUILDERS[path.suffix], data_files=str(path), split=f"train[:{num_samples}]")
    columns = [c for c in WHOLE_TEXT if c in rows.column_names][:1] or [c for c in PARTS if c in rows.column_names]
    if not columns or not len(rows):
        raise ValueError(
            f"{name} has {len(rows)} rows with the columns {rows.column_names}, and a text was needed: "
            f"{' or '.join(WHOLE_TEXT)}, or some of {', '.join(PARTS)}."
        )

    def tokenize(row: dict[str, Any]) -> dict[str, list[int]]:
        parts = [row[c] for c in columns]
        text = "".join(
            p if isinstance(p, str) else tokenizer.apply_chat_template(p, tokenize=False)
            for p in parts
            if p is not None
        )
        ids = tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    tokens = rows.map(tokenize, remove_columns=rows.column_names).filter(lambda row: len(row["input_ids"]) > 1)
    if not len(tokens):
        raise ValueError(f"{name} has no row of two or more tokens in {columns}.")
    return tokens


def run_oneshot(
    model: PreTrainedModel,
    modifiers: Sequence[Any],
    dataset: Dataset | None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output: str | None = None,
) -> PreTrainedModel:
    """
    `llmcompressor.oneshot` on tokenized rows; with `output` it saves the compressed checkpoint.

    Args:
        model (`PreTrainedModel`): Changed in place.
        modifiers (`Sequence`): llm-compressor modifiers, in order.
        dataset (`Dataset` or `None`): From [`calibration_set`]; `None` for modifiers that need no data.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Saved beside the weights.
        output (`str`, *optional*): Folder of the checkpoint.
    """
    require_llmcompressor()
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session

    reset_session()  # a recipe that ran before in this process would run again
    settings: dict[str, Any] = {}
    if dataset is not None:
        longest = max(len(row) for row in dataset["input_ids"])
        settings = {"dataset": dataset, "num_calibration_samples": len(dataset), "max_seq_length": longest}
    with calibration():
        return oneshot(model=model, recipe=list(modifiers), tokenizer=tokenizer, output_dir=output, **settings)


@contextmanager
def calibration() -> Iterator[None]:
    """
    Run llm-compressor 0.14 without two of its habits.

    It pins the AWQ activations that it keeps on the CPU, which torch refuses on a machine without an accelerator to copy
    them to; pinning changes no value. And SpinQuant centers the embeddings, also where no layer norm takes the mean off
    again: with an RMS norm that is another model (measured in tests/test_precondition.py).
    """
    from llmcompressor.modifiers.transform import SpinQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    center = SpinQuantModifier._center_embeddings

    def center_before_layer_norms(self: Any, model: torch.nn.Module) -> None:
        if any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()):
            center(self, model)

    with ExitStack() as stack:
        stack.enter_context(patch.object(SpinQuantModifier, "_center_embeddings", center_before_layer_norms))
        if not torch.accelerator.is_available():
            stack.enter_context(patch.object(IntermediatesCache, "pin_memory", lambda *_: None))
        yield
