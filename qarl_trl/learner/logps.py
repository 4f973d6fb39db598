"""Log-probs of a padded batch by passes of real tokens, called and answered as TRL's method for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from accelerate.logging import get_logger
from torch import Tensor, nn

from .attention import LostSequences, sequence_arguments, use_packed_attention
from .packing import PackedRow, check_longest, outer_columns, pack, split_rows, unpack
from .probe import crossing, unfit


logger = get_logger(__name__)

# TRL's arguments that every batch has; the others come with images and token types.
TEXT = {"model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"}

# Log-probs and entropies `(B, logits_to_keep)`, and the balancing loss of a mixture.
Result = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class PackedPasses:
    """The passes of one trainer."""

    budget: int  # real tokens that a pass may hold
    autocast: Callable[[], AbstractContextManager]  # in which the model is called
    gather: Callable[[Tensor], Tensor]  # puts the 1-D tensors of all processes one after the other
    unwrap: Callable[[nn.Module], nn.Module]  # takes the wrappers of accelerate off a model
    _why_padded: WeakKeyDictionary[nn.Module, str | None] = field(default_factory=WeakKeyDictionary)

    def run(self, padded: Callable[..., Result], given: Mapping[str, Any], order: Tensor | None = None) -> Result:
        """
        What TRL's method `padded` returns for the arguments `given`; the balancing loss is the mean over passes.

        Micro-batches of `batch_size` rows, cut in `order` (int64 `(B,)`), go through one after the other, split into several
        passes where they are over the budget. A model that cannot be packed gets them padded, without the columns that are
        padding in all rows; a batch with images or token types goes to `padded` as it is. `ValueError` for a sequence over the
        budget.
        """
        if any(value is not None for name, value in given.items() if name not in TEXT):
            return padded(**given)
        rows = len(given["input_ids"])
        order = torch.arange(rows) if order is None else order
        chunks = [chunk.tolist() for chunk in order.split(given.get("batch_size") or rows)]
        if self._packs(given["model"]):
            return self._packed(given, chunks)
        return _trimmed(padded, given, chunks)

    def _packed(self, given: Mapping[str, Any], chunks: Sequence[list[int]]) -> Result:
        ids, mask, keep = given["input_ids"], given["attention_mask"], given["logits_to_keep"]
        router = {"output_router_logits": True} if given.get("compute_aux_loss") else {}
        packed = [pack(ids, mask, keep, rows) for rows in self._passes(mask, chunks)]
        outputs = [self._forward(given["model"], row, **router) for row in packed]
        logps, entropies = unpack([o.log_probs for o in outputs], packed, len(ids), keep), None
        if given.get("compute_entropy"):
            entropies = unpack([o.entropy for o in outputs], packed, len(ids), keep)
        return logps, entropies, torch.stack([o.aux_loss for o in outputs]).mean() if router else None

    def _passes(self, mask: Tensor, chunks: Sequence[list[int]]) -> list[list[int]]:
        """The rows of each pass. All processes have as many passes of a micro-batch, since wrappers let them wait for each other."""
        # On any process, so that all of them stop: one alone would leave the others waiting.
        check_longest(int(self.gather(mask.sum(1).amax().view(1)).max()), self.budget)
        lengths = mask.sum(1).tolist()
        lengths = [[lengths[row] for row in chunk] for chunk in chunks]
        numbers = torch.tensor([len(split_rows(n, self.budget)) for n in lengths], device=mask.device)
        numbers = self.gather(numbers).view(-1, len(chunks)).amax(0).tolist()
        bins = [split_rows(n, self.budget, passes) for n, passes in zip(lengths, numbers, strict=True)]
        return [[chunk[i] for i in rows] for chunk, split in zip(chunks, bins, strict=True) for rows in split]

    def _forward(self, model: nn.Module, packed: PackedRow, **more: Any) -> Any:
        more |= sequence_arguments(self.unwrap(model), packed.lengths, packed.input_ids.device)
        with self.autocast():
            ids, positions, labels = packed.input_ids, packed.position_ids, packed.labels
            return model(input_ids=ids, position_ids=positions, labels=labels, fused_lm_head=True, **more)

    def _packs(self, model: nn.Module) -> bool:
        """Whether packed rows of `model` are right; asked once, and answered alike on all processes."""
        bare = self.unwrap(model)
        if bare not in self._why_padded:
            use_packed_attention(bare)
            reason = unfit(bare) or self._crossing(model, bare)
            self._why_padded[bare] = reason
            if reason is not None:
                logger.warning(
                    "max_tokens_per_pass: %s runs on padded rows, cut to the longest of each micro-batch, because %s.",
                    type(bare).__name__,
                    reason,
                )
        return self._why_padded[bare] is None

    def _crossing(self, model: nn.Module, bare: nn.Module) -> str | None:
        device = next(bare.parameters()).device

        def score(ids: Tensor, keep: int) -> Tensor:
            packed = pack(ids.to(device), torch.ones_like(ids, device=device), keep, range(len(ids)))
            return unpack([self._forward(model, packed).log_probs], [packed], len(ids), keep)

        try:
            reason = crossing(model, score, bare.config.get_text_config().vocab_size)
        except LostSequences:
            reason = "its layers do not tell their attention where sequences start"
        wrong = self.gather(torch.tensor([reason is not None], device=device)).any()
        return reason or ("another process found its sequences mixed" if wrong else None)


def _trimmed(padded: Callable[..., Result], given: Mapping[str, Any], chunks: Sequence[list[int]]) -> Result:
    """Micro-batch by micro-batch without the columns that are padding in all of its rows."""
    keep, columns, results = given["logits_to_keep"], given["input_ids"].shape[1], []
    for chunk in chunks:
        start, end = outer_columns(given["attention_mask"][chunk], keep)
        short = {name: given[name][chunk, start:end] for name in ("input_ids", "attention_mask")}
        values = padded(**{**given, **short, "batch_size": None, "logits_to_keep": keep - (columns - end)})
        results.append([None if v is None else F.pad(v, (0, columns - end)) if v.dim() else v for v in values])
    logps, entropies, balance = zip(*results, strict=True)
    back = torch.tensor([row for chunk in chunks for row in chunk]).argsort()
    return (
        torch.cat(logps)[back],
        None if entropies[0] is None else torch.cat(entropies)[back],
        None if balance[0] is None else torch.stack(balance).mean(),
    )
