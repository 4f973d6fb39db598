"""llm-compressor's `oneshot`, run on texts of ours: what `qarl-trl precondition` and `qarl-trl ptq` share.

Invariant: nothing here computes on a weight. llm-compressor's modifiers do, and an empty or unreadable calibration set is
refused before a model loads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from datasets import Dataset, load_dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import _compat
from .data import local_path


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
    with _compat.calibration():
        return oneshot(model=model, recipe=list(modifiers), tokenizer=tokenizer, output_dir=output, **settings)
