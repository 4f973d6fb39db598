"""llm-compressor's `oneshot` on texts of ours: what `qarl-trl precondition` and `qarl-trl ptq` share."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from compressed_tensors.quantization import QuantizationConfig
from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...data import load_rows
from ...quant.recipe import read_recipe
from ...quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group


# The first that exists is a whole text; otherwise the parts that exist are joined in this order.
WHOLE_TEXT = ("text", "messages")
PARTS = ("problem", "question", "prompt", "solution", "completion", "answer")


def read_plan(args: argparse.Namespace) -> QuantizationConfig:
    """
    The quantization that the options ask for, after the checks that need no weights.

    `ImportError` without llm-compressor; `ValueError` for an output folder that is not empty, a quantized model, and a scheme
    or recipe that is not supported.
    """
    if importlib.util.find_spec("llmcompressor") is None:
        raise ImportError(
            "This command needs llm-compressor: pip install 'qarl_trl[llmcompressor]'. Beside vLLM 0.31, which pins another "
            "compressed-tensors: pip install --no-deps llmcompressor==0.14.0.1 compressed-tensors==0.19.0."
        )
    output = Path(args.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty. Use a new folder.")
    if getattr(AutoConfig.from_pretrained(args.model), "quantization_config", None) is not None:
        raise ValueError(f"{args.model} is quantized already. Give the model in high precision.")
    if args.quant_recipe:
        return read_recipe(args.quant_recipe)
    return single_group(resolve_scheme(args.scheme, args.group_size), ["Linear"], DEFAULT_IGNORE)


def calibration_set(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """
    The first rows of `args.dataset` as `oneshot` takes them: `input_ids` and `attention_mask`.

    A row is its `text`, its `messages` (chat template applied), or its problem and solution one after the other. `ValueError`
    when there is no row, or no column to read.
    """
    rows = load_rows(args.dataset, f"{args.split}[:{args.num_samples}]")
    columns = [c for c in WHOLE_TEXT if c in rows.column_names][:1] or [c for c in PARTS if c in rows.column_names]
    if not columns or not len(rows):
        raise ValueError(
            f"{args.dataset} must have rows with {' or '.join(WHOLE_TEXT)}, or some of {', '.join(PARTS)}; got "
            f"{len(rows)} rows with the columns {rows.column_names}."
        )

    def tokenize(row: dict[str, Any]) -> dict[str, list[int]]:
        parts = [row[column] for column in columns if row[column] is not None]
        texts = [p if isinstance(p, str) else tokenizer.apply_chat_template(p, tokenize=False) for p in parts]
        # Cut here: `truncation=True` would stay in the tokenizer, and be saved with it.
        ids = tokenizer("".join(texts))["input_ids"][: args.max_length]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    tokens = rows.map(tokenize, remove_columns=rows.column_names).filter(lambda row: len(row["input_ids"]) > 1)
    if not len(tokens):
        raise ValueError(f"{args.dataset} has no row of two or more tokens in {columns}.")
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
    `llmcompressor.oneshot` on `model`, in place, and on the rows of [`calibration_set`] where the modifiers need any.

    With `output`, it saves the compressed checkpoint there, with the tokenizer beside it.
    """
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
    again: with an RMS norm that is another model (measured in tests/llmcompressor/test_precondition.py).
    """
    from llmcompressor.modifiers.transform import SpinQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    center = SpinQuantModifier._center_embeddings

    def center_before_layer_norms(self: Any, model: torch.nn.Module) -> None:
        if any(isinstance(module, torch.nn.LayerNorm) for module in model.modules()):
            center(self, model)

    pin = IntermediatesCache.pin_memory if torch.accelerator.is_available() else lambda *_: None
    with (
        patch.object(SpinQuantModifier, "_center_embeddings", center_before_layer_norms),
        patch.object(IntermediatesCache, "pin_memory", pin),
    ):
        yield
