"""`qarl-trl export` and `qarl-trl push`: a checkpoint in low bits for vLLM, and such a folder on the Hub."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """
    Write a high-precision checkpoint, or a LoRA adapter merged into its base, as vLLM loads it, by round-to-nearest.

    Of a run in the same scheme these are the tensors it trained with. `ValueError` if it cannot be quantized.
    """
    parser = argparse.ArgumentParser("qarl-trl export", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", help="model folder with high-precision weights, or LoRA adapter")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--scheme", default="W4A16", help="a scheme of `qarl-trl schemes` (default: W4A16)")
    parser.add_argument("--group_size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    parser.add_argument("--targets", nargs="+", default=["Linear"], help="modules to quantize (default: Linear)")
    parser.add_argument("--ignore", nargs="+", help="modules to leave alone (default: lm_head and MoE routers)")
    args = parser.parse_args(argv)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from ..export import check_target, check_writable, save_low_bit
    from ..export.card import base_facts, write_card
    from ..export.files import tensor_shapes
    from ..quant import apply_quantization
    from ..quant.scheme import DEFAULT_IGNORE, resolve_scheme

    resolve_scheme(args.scheme, args.group_size)  # before the weights are read
    loader, weights = AutoModelForCausalLM, args.checkpoint
    if (Path(args.checkpoint) / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM, PeftConfig

        loader, weights = AutoPeftModelForCausalLM, PeftConfig.from_pretrained(args.checkpoint).base_model_name_or_path
    if getattr(AutoConfig.from_pretrained(weights), "quantization_config", None) is not None:
        raise ValueError(f"{weights} is quantized already. Give the checkpoint that holds the master weights.")
    tensor_shapes(args.checkpoint)
    check_writable(args.output, "output")
    check_target(args.output)
    model = loader.from_pretrained(args.checkpoint, dtype="auto")
    ignore = DEFAULT_IGNORE if args.ignore is None else args.ignore
    apply_quantization(model, args.scheme, args.targets, ignore, group_size=args.group_size)
    folder = save_low_bit(model, AutoTokenizer.from_pretrained(args.checkpoint), args.output)
    write_card(folder, **base_facts(weights))
    print(f"{args.scheme} checkpoint written to {args.output}. `qarl-trl push` shares it.")


def push(argv: Sequence[str]) -> None:
    """Push a low-bit folder to the Hub, with that address in its card."""
    parser = argparse.ArgumentParser("qarl-trl push", description=push.__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="as `save_model` and `qarl-trl export` write it")
    parser.add_argument("repo", help="user/model; created if it is not there")
    # The token is that of HF_TOKEN or `hf auth login`: on a command line others could read it.
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch to push to (default: main)")
    args = parser.parse_args(argv)

    from ..export.card import ADDRESS, CARD, model_card
    from ..export.push import open_repo
    from ..export.push import push as push_model

    model_card(args.folder)  # refuses what is no low-bit model
    name = open_repo(args.repo, private=args.private, revision=args.revision)
    if (card := args.folder / CARD).exists():
        card.write_text(card.read_text().replace(ADDRESS, name))
    print(f"pushed: {push_model(args.folder, name, 'Low-bit model', revision=args.revision).commit_url}")
