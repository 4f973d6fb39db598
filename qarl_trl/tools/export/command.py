"""`qarl-trl export`: write a low-bit checkpoint for vLLM."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import CommandParser
from .source import DEFAULT_TARGETS, ExportSource, find_source, tokenizer_folder


# Modules of the method are imported in the functions: `--help` is instant.
if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig

DEFAULT_SCHEME = "W4A16"


def main(argv: Sequence[str]) -> None:
    """
    Quantize a model by round-to-nearest, and write it for vLLM.

    Args:
        argv: Options of `qarl-trl export`.

    Raises:
        ValueError: if the model cannot be quantized, or the output would overwrite another model.
        OSError: if the model cannot be read, or the output cannot be written.
    """
    args = _export_parser().parse_args(argv)

    from transformers import GenerationConfig
    from transformers.trainer_utils import align_special_tokens

    from ...checkpoints.lock import LOCK, holding
    from ...checkpoints.models import loaded_base_fact
    from ...export import check_target, check_writable, save_low_bit
    from ...export.card import write_card
    from ...export.card_facts import base_facts
    from ...export.files import check_apart, check_generation_config, tensor_shapes
    from ...export.vocabulary import check_vocabulary_files
    from ...quant import apply_quantization
    from ...quant.names import is_peft_model
    from ...quant.scheme import DEFAULT_IGNORE, resolve_scheme
    from ...quant.source import check_index, check_one_index
    from ...validate.model import check_can_be_saved
    from ...validate.unused import unused_layer_targets, unused_patterns, words_of_unused, words_of_unused_targets
    from .frozen import distance_to_frozen, serving_the_two
    from .of_run import layers_of_run, say_if_base_differs, say_if_trained_as_another_model

    # All that can be refused is refused before the weights are read.
    resolve_scheme(args.scheme or DEFAULT_SCHEME, args.group_size)
    source = find_source(args)
    # Reads only the headers of the weight files, and so finds one that is cut off.
    tensor_shapes(args.checkpoint)
    check_index(Path(args.checkpoint))
    check_one_index(Path(args.checkpoint))
    for folder in (args.checkpoint, source.base):
        check_generation_config(folder)
        with suppress(OSError):  # a model without one
            check_can_be_saved(GenerationConfig.from_pretrained(folder))
        check_apart(args.output, "output", folder)
    check_writable(args.output, "output")
    if Path(args.output, LOCK).exists():
        # Refused while a run holds it, which would write its own model there.
        with holding(Path(args.output)):
            pass
    check_target(args.output)

    # Also for an adapter from its own folder: a run may have changed the tokenizer of the base.
    of_tokenizer = tokenizer_folder(args.checkpoint, source.base)
    processing_class = _processing_class(of_tokenizer, args.trust_remote_code)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    check_vocabulary_files(of_tokenizer, tokenizer)
    model = source.load()
    is_adapter = is_peft_model(model)
    if is_adapter:
        # As the run did: an adapter has no generation config, in which answers would end at the base's token alone.
        align_special_tokens(model, tokenizer)
    trained = layers_of_run(args.checkpoint, model)
    # As a run computes it: before its layers are quantized.
    loaded = loaded_base_fact(model) if is_adapter else ""
    apply_quantization(
        model,
        scheme=_scheme(args, source),
        targets=args.targets,
        ignore=DEFAULT_IGNORE if args.ignore is None else args.ignore,
        group_size=args.group_size,
    )

    unused = unused_patterns(model, args.ignore or ())
    if unused:
        print(f"--ignore: {words_of_unused(unused)}")
    missing = unused_layer_targets(model, args.targets)
    if missing:
        print(f"--targets: {words_of_unused_targets(missing)}")

    folder = save_low_bit(model, processing_class, args.output)
    if trained is not None:
        is_other = say_if_trained_as_another_model(args.checkpoint, args.output, trained, model)
        # A frozen base has been compared before.
        if is_adapter and not is_other and not source.frozen:
            say_if_base_differs(args.checkpoint, args.output, source.base, trained, loaded)
    write_card(folder, **base_facts(source.base))

    # Only here: an adapter with master weights below it was merged in training, too.
    if source.frozen:
        distance = distance_to_frozen(
            model,
            base=source.quantized_base,
            adapter=args.checkpoint,
            first_token=tokenizer.eos_token_id,
        )
        print(f"{args.output} is {distance:.4f} nats per token from base and adapter, on tokens that these sampled.")
        print(serving_the_two(args.checkpoint, source.base))
    print(f"The low-bit checkpoint is in {args.output}. `qarl-trl push` shares it.")


def _processing_class(folder: str, trust_remote_code: bool) -> Any:
    """The processor of a model for images, as its run saved it; else the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    if any(Path(folder, name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        try:
            return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (ImportError, ValueError, AttributeError) as error:
            print(
                f"The processor of {folder} does not load ({' '.join(str(error).split())[:200]}): the output gets the "
                "tokenizer alone. Copy the processor's files into it, without which nobody gives it images."
            )
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _export_parser() -> argparse.ArgumentParser:
    """The options of `qarl-trl export`."""
    parser = CommandParser(
        prog="qarl-trl export",
        description="Quantize a checkpoint, or a LoRA adapter merged into its base, by round-to-nearest, and write it "
        "for vLLM. If the run used the same scheme, the output has the tensors of training. An adapter that is merged "
        "into a frozen base becomes another policy; the command prints their distance.",
        example="qarl-trl export runs/sums runs/sums-w4a16",
    )

    parser.add_argument("checkpoint", help="model folder with high-precision weights, or LoRA adapter")
    parser.add_argument("output", help="folder to write")
    parser.add_argument(
        "--scheme",
        help="a scheme of `qarl-trl schemes` (default: W4A16, or a quantized base's own)",
    )
    parser.add_argument(
        "--group_size",
        type=int,
        help="weights per scale, -1: per channel (default: the scheme's)",
    )
    parser.add_argument("--targets", nargs="+", default=DEFAULT_TARGETS, help="modules to quantize (default: Linear)")
    parser.add_argument("--ignore", nargs="+", help="modules not to quantize (default: lm_head and MoE routers)")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code of a model that has its own, which comes with the output",
    )
    return parser


def _scheme(args: argparse.Namespace, source: ExportSource) -> str | QuantizationConfig:
    """The scheme to quantize with: the user's, or else that of a quantized base."""
    if args.scheme:
        return args.scheme
    if source.quantized_base is not None:
        return source.quantized_base.plan()
    return DEFAULT_SCHEME
