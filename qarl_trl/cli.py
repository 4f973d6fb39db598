"""The command `qarl-trl`. Only the standard library is imported until a command runs, so `--help` is instant."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module


# Commands with a parser of their own: the module and function that get the other arguments, `--help` included.
_FORWARDED = {
    "train": (".train:run", "train from a recipe; on several GPUs accelerate launch -m qarl_trl.train"),
    "plan": (".memory.command:main", "what a recipe needs of each GPU's memory, estimated without a model"),
    "precondition": (".llmcompressor.precondition:main", "fold transforms into a model before training"),
    "ptq": (".llmcompressor.ptq:main", "quantize a model after training: GPTQ, AWQ, round-to-nearest"),
    "eval": (".evaluation.command:main", "what a checkpoint scores on math problems, through vLLM"),
    "quickstart": (".quickstart.__main__:main", "train a small model on this machine, with a report at the end"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; `argv` (without the program's name) defaults to that of the process."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in _FORWARDED:
        module, _, function = _FORWARDED[argv[0]][0].partition(":")
        getattr(import_module(module, __package__), function)(argv[1:])
        return
    args = _make_parser().parse_args(argv)
    if args.command == "schemes":
        print(schemes())
    else:
        export(args)


def export(args: argparse.Namespace) -> None:
    """
    Write a high-precision checkpoint, or a LoRA adapter merged into its base, as vLLM loads it, by round-to-nearest.

    Of a run in the same scheme these are the tensors it trained with. `ValueError` if it cannot be quantized.
    """
    from pathlib import Path

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .export import save_low_bit
    from .quant import apply_quantization
    from .quant.scheme import DEFAULT_IGNORE, resolve_scheme

    resolve_scheme(args.scheme, args.group_size)  # before the weights are read
    loader, weights = AutoModelForCausalLM, args.checkpoint
    if (Path(args.checkpoint) / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM, PeftConfig

        loader, weights = AutoPeftModelForCausalLM, PeftConfig.from_pretrained(args.checkpoint).base_model_name_or_path
    if getattr(AutoConfig.from_pretrained(weights), "quantization_config", None) is not None:
        raise ValueError(f"{weights} is quantized already. Give the checkpoint that holds the master weights.")
    model = loader.from_pretrained(args.checkpoint, dtype="auto")
    ignore = DEFAULT_IGNORE if args.ignore is None else args.ignore
    apply_quantization(model, args.scheme, args.targets, ignore, group_size=args.group_size)
    save_low_bit(model, AutoTokenizer.from_pretrained(args.checkpoint), args.output)
    print(f"{args.scheme} checkpoint written to {args.output}")


def schemes() -> str:
    """Table of what is quantized in each scheme, and where learner, engine and export run, tested or untested."""
    from .quant.scheme import GPU_GENERATIONS, SUPPORTED, has_global_scale, resolve_scheme

    head = "scheme", "group sizes", "activations", "learner CPU", "learner GPU", "engine CPU"
    rows = [(*head, *GPU_GENERATIONS, "export", "LoRA, experts")]
    for row in SUPPORTED.values():
        groups = ", ".join("channel" if size == -1 else str(size) for size in row.group_sizes) or "fixed"
        learner = "tested", "untested" if row.gpus else "no"
        engines = ["tested" if row.cpu_engine else "no"]
        engines += ["untested" if name in row.gpus else "no" for name in GPU_GENERATIONS]
        merged = "no" if has_global_scale(resolve_scheme(row.name)) else "tested"
        rows.append((row.name, groups, row.activations, *learner, *engines, "tested", merged))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qarl-trl", description="Reinforcement learning with low-bit rollouts on TRL.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, text) in _FORWARDED.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("schemes", help="what can be trained, sampled and exported, and where", allow_abbrev=False)
    exporter = commands.add_parser("export", help="write a checkpoint in low bits for vLLM", allow_abbrev=False)
    exporter.add_argument("checkpoint", help="model folder with high-precision weights, or LoRA adapter")
    exporter.add_argument("output", help="folder to write")
    exporter.add_argument("--scheme", default="W4A16", help="a scheme of `qarl-trl schemes` (default: W4A16)")
    exporter.add_argument("--group-size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    exporter.add_argument("--targets", nargs="+", default=["Linear"], help="modules to quantize (default: Linear)")
    exporter.add_argument("--ignore", nargs="+", help="modules to leave alone (default: lm_head and MoE routers)")
    return parser


if __name__ == "__main__":
    main()
