"""What a run saves into a folder: one decision for the files, the cards and the push."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .files import LOW_BIT_FOLDER


@dataclass(frozen=True)
class Outputs:
    """
    What a save of a run writes.

    Args:
        low_bit: The trained low-bit model: the name of its sub-folder, "" for the folder itself; `None`: it is not
            written.
        high_precision: Whether TRL's own method saves: an adapter, master weights, or a model without quantization.
        frozen_base: Whether there is a reference to the frozen base of the adapter, and the base if the run made it.
        card: The kind of card, see [`~qarl_trl.export.card.render_card`], of what TRL's method saves; `None` for
            master weights, which have none.
    """

    low_bit: str | None
    high_precision: bool
    frozen_base: bool
    card: str | None


def outputs_of(args: Any, is_adapter: bool, in_checkpoint: bool) -> Outputs:
    """
    Decide what a save writes.

    Args:
        args: The config of the run, with [`~qarl_trl.LowBitConfig`].
        is_adapter: Whether the run trains an adapter.
        in_checkpoint: Whether the save is part of a training checkpoint, from which the run can resume.
    """
    # An adapter and master weights have the folder for themselves.
    shares_folder = is_adapter or in_checkpoint

    low_bit = None
    trains_low_bit_model = args.quantized and not args.frozen
    # In a checkpoint it is a choice. Elsewhere it is what the run was for.
    if trains_low_bit_model and (args.export_low_bit or not in_checkpoint):
        low_bit = LOW_BIT_FOLDER if shares_folder else ""

    return Outputs(
        low_bit=low_bit,
        high_precision=shares_folder or not args.quantized,
        frozen_base=args.frozen,
        card=_kind_of_card(args, is_adapter),
    )


def _kind_of_card(args: Any, is_adapter: bool) -> str | None:
    """The kind of card of what TRL's method saves; `None` if it has none."""
    if not is_adapter:
        return None if args.quantized else "full"
    if args.frozen:
        return "frozen_adapter"
    return "merged_adapter" if args.quantized else "adapter"
