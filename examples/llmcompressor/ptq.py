"""Quantize a model with llm-compressor: the baseline without RL, and a checkpoint to start RL from.

    python examples/llmcompressor/ptq.py --model Qwen/Qwen2.5-Math-1.5B --method gptq --scheme W4A16 \
        --dataset Elliott/Openr1-Math-46k-8192 --columns prompt --output runs/w4a16_gptq

Then train an adapter with `model_name_or_path: runs/w4a16_gptq`, `quant_scheme: checkpoint` and `lora_base: frozen`:
the base in learner and engine is this checkpoint, byte for byte. Needs `pip install 'qarl_trl[llmcompressor]'`.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from qarl_trl.data import load_rows
from qarl_trl.export import check_target
from qarl_trl.export.files import ADAPTER_CONFIG, check_apart
from qarl_trl.quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
from qarl_trl.quant.source import quantized_source


if not torch.accelerator.is_available():
    # llm-compressor 0.14 pins the activations that AWQ keeps, which torch refuses without an accelerator.
    IntermediatesCache.pin_memory = lambda *_: None


def make_recipe(method: str, scheme: str, group_size: int | None = None) -> list:
    """llm-compressor's modifiers: `rtn` rounds to nearest, `gptq` and `awq` also look at calibration texts."""
    # The layers and groups that qarl_trl itself quantizes, so that training can take the checkpoint as it is.
    plan = single_group(resolve_scheme(scheme, group_size), ["Linear"], DEFAULT_IGNORE)
    settings = {"config_groups": plan.config_groups, "ignore": plan.ignore}

    recipes = {
        "rtn": [QuantizationModifier(**settings)],
        "gptq": [GPTQModifier(**settings)],
        # AWQ only scales the weights; rounding is the second modifier's.
        "awq": [AWQModifier(), QuantizationModifier(**settings)],
    }
    return recipes[method]


def calibration_set(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The first rows of `args.dataset` (Hub id or .jsonl file) as token ids; chats go through the chat template."""
    rows = load_rows(args.dataset, f"train[:{args.num_samples}]")

    def tokenize(row: dict) -> dict:
        text = ""
        for column in args.columns:
            part = row[column]
            if not isinstance(part, str):
                part = tokenizer.apply_chat_template(part, tokenize=False)
            text += part

        # Cut here: `truncation=True` would stay in the tokenizer, and be saved with it.
        ids = tokenizer(text)["input_ids"][: args.max_length]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    return rows.map(tokenize, remove_columns=rows.column_names)


def make_parser(text: str, methods: tuple[str, ...]) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub id, not quantized")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--method", choices=methods, default=methods[0])
    parser.add_argument("--scheme", default="W4A16", help="as in `qarl-trl schemes`")
    parser.add_argument("--group_size", type=int, help="weights that share one scale (default: the scheme's own)")
    parser.add_argument("--dataset", help="calibration texts: Hub id or .jsonl file")
    parser.add_argument("--columns", nargs="+", default=["text"], help="joined to one text a row")
    parser.add_argument("--num_samples", type=int, default=512, help="rows")
    parser.add_argument("--max_length", type=int, default=2048, help="tokens of a row")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Read the options, and refuse what neither script can do."""
    args = parser.parse_args(argv)

    # Before a model loads: is it a scheme that qarl_trl can train?
    resolve_scheme(args.scheme, args.group_size)
    if args.dataset is None and args.method != "rtn":
        parser.error(f"--method {args.method} needs --dataset")
    if Path(args.model, ADAPTER_CONFIG).is_file():
        parser.error(f"--model must be a model, got {args.model}, a LoRA adapter: `merge_and_unload()` of peft first")
    check_apart(args.output, "output", args.model)

    return args


def main(argv: list[str] | None = None) -> None:
    """Read the options, quantize, and check that layers were quantized."""
    parser = make_parser(__doc__, ("gptq", "awq", "rtn"))
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="in which it computes and stores scales; float32 is faster on a CPU without AVX512_BF16",
    )
    args = parse(parser, argv)
    check_target(args.output)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    # Rounding to nearest looks at the weights alone.
    data = {}
    if args.method != "rtn":
        rows = calibration_set(args, tokenizer)
        data = {"dataset": rows, "num_calibration_samples": len(rows), "max_seq_length": args.max_length}

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    recipe = make_recipe(args.method, args.scheme, args.group_size)
    oneshot(model=model, recipe=recipe, tokenizer=tokenizer, output_dir=args.output, **data)

    # llm-compressor saves the model as it came when no layer matched (GPT-2 has Conv1D layers, not Linear).
    source = quantized_source(args.output)
    if source is None:
        raise SystemExit(f"{args.output} must hold low-bit layers, got none: no layer of {args.model} is a Linear.")

    print(f"{args.method} checkpoint with {len(source.layers)} low-bit layers written to {args.output}")


if __name__ == "__main__":
    main()
