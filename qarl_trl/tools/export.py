"""`qarl-trl export` writes a low-bit checkpoint for vLLM; `qarl-trl push` uploads it to the Hub."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str]) -> None:
    """
    Quantize a checkpoint, or a LoRA adapter merged into its base, by round-to-nearest, and write it for vLLM.

    If the run used the same scheme, the output has the tensors of training. An adapter that is merged into a frozen base becomes
    another policy; the command prints their distance. `ValueError` if the model cannot be quantized.
    """
    parser = argparse.ArgumentParser("qarl-trl export", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", help="model folder with high-precision weights, or LoRA adapter")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--scheme", help="a scheme of `qarl-trl schemes` (default: W4A16, or a quantized base's own)")
    parser.add_argument("--group_size", type=int, help="weights per scale, -1: per channel (default: the scheme's)")
    parser.add_argument("--targets", nargs="+", default=["Linear"], help="modules to quantize (default: Linear)")
    parser.add_argument("--ignore", nargs="+", help="modules not to quantize (default: lm_head and MoE routers)")
    args = parser.parse_args(argv)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..export import check_target, check_writable, save_low_bit
    from ..export.card import base_facts, write_card
    from ..export.files import ADAPTER_CONFIG, BASE_CONFIG, base_of, check_base, tensor_shapes
    from ..quant import apply_quantization
    from ..quant.scheme import DEFAULT_IGNORE, resolve_scheme
    from ..quant.start import load_master_weights, quantized_source

    resolve_scheme(args.scheme or "W4A16", args.group_size)  # before the weights are read
    load, weights, hub = AutoModelForCausalLM.from_pretrained, args.checkpoint, dict[str, Any]()
    if adapter := Path(weights, ADAPTER_CONFIG).is_file():
        from peft import AutoPeftModelForCausalLM, PeftModel

        load, (weights, revision) = AutoPeftModelForCausalLM.from_pretrained, base_of(Path(weights))
        hub = {"revision": revision} if revision else {}
    if (source := quantized_source(weights, **hub)) and not adapter:
        raise ValueError(f"{weights} is quantized already. Give the checkpoint that holds the master weights.")
    if source and (args.group_size or args.targets != ["Linear"] or args.ignore is not None) and not args.scheme:
        raise ValueError("--group_size, --targets and --ignore need --scheme: without it the base's own are used.")
    if frozen := source and Path(args.checkpoint, BASE_CONFIG).is_file():
        check_base(Path(args.checkpoint), source.folder)
    tensor_shapes(args.checkpoint)
    check_writable(args.output, "output")
    check_target(args.output)
    if source is None:
        model = load(args.checkpoint, dtype="auto")
    else:
        model = PeftModel.from_pretrained(load_master_weights(weights, dtype="auto", **hub), args.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    ignore = DEFAULT_IGNORE if args.ignore is None else args.ignore
    scheme = args.scheme or (source.plan() if source else "W4A16")
    apply_quantization(model, scheme, args.targets, ignore, group_size=args.group_size)
    folder = save_low_bit(model, tokenizer, args.output)
    write_card(folder, **base_facts(weights))
    if frozen:
        distance = _distance(model, source, args.checkpoint, tokenizer.eos_token_id)
        print(f"{args.output} is {distance:.4f} nats per token from base and adapter, in what these sample.")
    print(f"The low-bit checkpoint is in {args.output}. `qarl-trl push` shares it.")


def _distance(model: Any, source: Any, adapter: str, start: int) -> float:
    """Mean absolute log-prob difference between `model` and the adapter on its low-bit base `source`, over 256 tokens from the latter."""
    import torch
    from peft import PeftModel

    from ..quant.frozen import align_adapters
    from ..quant.start import load_master_weights
    from ..rollout.sync_check import learner_logps

    frozen: Any = PeftModel.from_pretrained(load_master_weights(str(source.folder), freeze=source.plan()), adapter)
    align_adapters(frozen)
    torch.manual_seed(0)
    (tokens,) = frozen.generate(
        torch.tensor([[start]]), do_sample=True, top_k=0, top_p=1.0, min_new_tokens=256, max_new_tokens=256
    )
    with torch.autocast("cpu", torch.bfloat16):
        one, other = (learner_logps(policy, tokens.tolist()).plain for policy in (model, frozen))
    return (one - other).abs().mean().item()


def push(argv: Sequence[str]) -> None:
    """Push a low-bit folder to the Hub, and put its Hub id into its card."""
    parser = argparse.ArgumentParser("qarl-trl push", description=push.__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="folder, as `save_model` and `qarl-trl export` write it")
    parser.add_argument("repo", help="user/model; created if it does not exist")
    # The token comes from HF_TOKEN or `hf auth login`: other users can read a command line.
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch to push to (default: main)")
    args = parser.parse_args(argv)

    from ..export.card import ADDRESS, CARD, model_card
    from ..export.push import open_repo
    from ..export.push import push as push_model

    model_card(args.folder)  # refuses a folder without a low-bit model
    name = open_repo(args.repo, private=args.private, revision=args.revision)
    if (card := args.folder / CARD).exists():
        card.write_text(card.read_text().replace(ADDRESS, name))
    print(f"pushed: {push_model(args.folder, name, 'Low-bit model', revision=args.revision).commit_url}")
