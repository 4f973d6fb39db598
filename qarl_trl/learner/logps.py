"""Log-probs of a padded batch by passes of real tokens, called and answered as TRL's method for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from accelerate.logging import get_logger
from torch import Tensor, nn

from .attention import LostSequences, sequence_arguments, use_packed_attention
from .packing import PackedRow, check_longest, outer_columns, pack, padded_tokens, spans_of, split_rows, unpack
from .probe import crossing, unfit


logger = get_logger(__name__)

# TRL's arguments that every batch has; the others come with images and token types.
TEXT = {"model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss"}
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
COLUMNS = ("input_ids", "attention_mask", *TOKEN_TYPES)

# Log-probs and entropies `(B, logits_to_keep)`, and the balancing loss of a mixture.
Result = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class PackedPasses:
    """The passes of one trainer."""

    budget: int  # tokens that a pass may hold
    autocast: Callable[[], AbstractContextManager]  # in which the model is called
    gather: Callable[[Tensor], Tensor]  # puts the 1-D tensors of all processes one after the other
    unwrap: Callable[[nn.Module], nn.Module]  # takes the wrappers of accelerate off a model
    _why_padded: WeakKeyDictionary[nn.Module, str | None] = field(default_factory=WeakKeyDictionary)

    def run(self, padded: Callable[..., Result], given: Mapping[str, Any], order: Tensor | None = None) -> Result:
        """
        What TRL's method `padded` returns for the arguments `given`; the balancing loss is the mean over passes.

        Micro-batches of `batch_size` rows, cut in `order` (int64 `(B,)`), go through one after the other, split into several
        passes where they are over the budget. A model that cannot be packed, and a batch with images or token types, goes to
        `padded` in such passes, without the columns that are padding in all of their rows; there padding counts.
        `ValueError` for a sequence over the budget.
        """
        rows = len(given["input_ids"])
        order = torch.arange(rows) if order is None else order
        chunks = [chunk.tolist() for chunk in order.split(given.get("batch_size") or rows)]
        # Asked in every process, also in one whose batch has images: the answer takes passes of all.
        fit = self._packs(given["model"])
        if fit and all(value is None for name, value in given.items() if name not in TEXT):
            return self._packed(given, chunks)
        return self._trimmed(padded, given, chunks)

    def _packed(self, given: Mapping[str, Any], chunks: Sequence[list[int]]) -> Result:
        ids, mask, keep = given["input_ids"], given["attention_mask"], given["logits_to_keep"]
        router = {"output_router_logits": True} if given.get("compute_aux_loss") else {}
        packed = [pack(ids, mask, keep, rows) for rows in self._passes(mask, chunks)]
        outputs = [self._forward(given["model"], row, **router) for row in packed]
        logps, entropies = unpack([o.log_probs for o in outputs], packed, len(ids), keep), None
        if given.get("compute_entropy"):
            entropies = unpack([o.entropy for o in outputs], packed, len(ids), keep)
        return logps, entropies, torch.stack([o.aux_loss for o in outputs]).mean() if router else None

    def _trimmed(self, padded: Callable[..., Result], given: Mapping[str, Any], chunks: Sequence[list[int]]) -> Result:
        mask, keep, results = given["attention_mask"], given["logits_to_keep"], []
        real = mask.bool()
        for types in (given[name] for name in TOKEN_TYPES if given.get(name) is not None):
            real = real | types.bool()  # an image in a completion that is masked keeps its columns
        passes = self._passes(mask, chunks, spans_of(real), padded_tokens)
        for rows in passes:
            start, end = outer_columns(real[rows], keep)
            part = _rows_of(given, rows)
            part |= {name: part[name][:, start:end] for name in COLUMNS if part.get(name) is not None}
            cut = mask.shape[1] - end
            values = padded(**{**given, **part, "batch_size": None, "logits_to_keep": keep - cut})
            results.append([None if v is None else F.pad(v, (0, cut)) if v.dim() else v for v in values])
        logps, entropies, balance = zip(*results, strict=True)
        back = torch.tensor([row for rows in passes for row in rows]).argsort()
        return (
            torch.cat(logps)[back],
            None if entropies[0] is None else torch.cat(entropies)[back],
            None if balance[0] is None else torch.stack(balance).mean(),
        )

    def _passes(
        self,
        mask: Tensor,
        chunks: Sequence[list[int]],
        sizes: Sequence[Any] = (),
        tokens: Callable[[list[Any]], int] = sum,
    ) -> list[list[int]]:
        """
        The rows of each pass, by the `tokens` that rows of some `sizes` make together: by default their real ones.

        All processes have as many passes of a micro-batch, since wrappers let them wait for each other.
        """
        # On any process, so that all of them stop: one alone would leave the others waiting.
        check_longest(int(self.gather(mask.sum(1).amax().view(1)).max()), self.budget)
        sizes = sizes or mask.sum(1).tolist()
        split = [partial(split_rows, [sizes[row] for row in chunk], self.budget, tokens=tokens) for chunk in chunks]
        numbers = torch.tensor([len(bins()) for bins in split], device=mask.device)
        numbers = self.gather(numbers).view(-1, len(chunks)).amax(0).tolist()
        return [
            [chunk[i] for i in rows]
            for chunk, bins, passes in zip(chunks, split, numbers, strict=True)
            for rows in bins(passes)
        ]

    def _forward(self, model: nn.Module, packed: PackedRow, **more: Any) -> Any:
        more |= sequence_arguments(self.unwrap(model), packed.lengths, packed.input_ids.device)
        with self.autocast():
            ids, positions, labels = packed.input_ids, packed.position_ids, packed.labels
            return model(input_ids=ids, position_ids=positions, labels=labels, fused_lm_head=True, **more)

    def _packs(self, model: nn.Module) -> bool:
        """Whether packed rows of `model` are right; asked once, and answered alike on all processes."""
        bare = self.unwrap(model)
        if bare not in self._why_padded:
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
        use_packed_attention(bare)
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


def _rows_of(given: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Of what has rows in `given`, these; their images as in TRL's micro-batches."""
    from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

    whole = {name: v for name, v in given.items() if v is not None and (name in COLUMNS or name not in TEXT)}
    by_row = split_pixel_values_by_grid(whole)
    part = {name: v[rows] if isinstance(v, Tensor) else [v[row] for row in rows] for name, v in by_row.items()}
    if "num_images" in part and not sum(part["num_images"]):
        return {name: v if name in COLUMNS else None for name, v in part.items()}
    return unsplit_pixel_values_by_grid(part)
