"""Log-probs of a padded batch in passes without padding, with the arguments and results of TRL's method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn

from .attention import LostSequences, sequence_arguments, use_packed_attention
from .packing import PackedRow, pack, split_rows, unpack
from .probe import crossing, unfit


logger = get_logger(__name__)

# Log-probs and entropies `(B, logits_to_keep)`, and the balancing loss of a mixture.
Result = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass
class PackedPasses:
    """The passes of one trainer, for models for which `packs` is true."""

    budget: int  # maximum number of tokens in a pass
    autocast: Callable[[], AbstractContextManager[Any]]  # context for the model's forward
    gather: Callable[[Tensor], Tensor]  # concatenates the 1-D tensors of all processes
    unwrap: Callable[[nn.Module], nn.Module]  # removes accelerate's wrappers from a model
    _why_padded: WeakKeyDictionary[nn.Module, str | None] = field(default_factory=WeakKeyDictionary)

    def run(self, given: Mapping[str, Any], order: Tensor | None = None) -> Result:
        """
        The result of TRL's method for its arguments `given` (text only); the balancing loss is the mean over passes.

        Runs micro-batches of `batch_size` rows, taken in `order` (int64 `(B,)`), one after the other, in several passes if they
        exceed the budget. `ValueError` if a sequence exceeds the budget.
        """
        ids, mask, keep = given["input_ids"], given["attention_mask"], given["logits_to_keep"]
        order = torch.arange(len(ids)) if order is None else order
        chunks = [chunk.tolist() for chunk in order.split(given.get("batch_size") or len(ids))]
        router = {"output_router_logits": True} if given.get("compute_aux_loss") else {}
        packed = [pack(ids, mask, keep, rows) for rows in self._split(mask.sum(1), chunks)]
        outputs = [self._forward(given["model"], row, **router) for row in packed]
        logps, entropies = unpack([o.log_probs for o in outputs], packed, len(ids), keep), None
        if given.get("compute_entropy"):
            entropies = unpack([o.entropy for o in outputs], packed, len(ids), keep)
        return logps, entropies, torch.stack([o.aux_loss for o in outputs]).mean() if router else None

    def _split(self, lengths: Tensor, chunks: Sequence[list[int]]) -> list[list[int]]:
        """Rows of each pass of the micro-batches, by the `lengths` of all rows. All processes need equally many passes: wrappers wait for each other."""
        # The longest of all processes, so that all of them stop: the others would wait for one that stops alone.
        longest = int(self.gather(lengths.amax().view(1)).max())
        if longest > self.budget:
            raise ValueError(
                f"A sequence of {longest} tokens does not fit into max_tokens_per_pass={self.budget}. Set max_tokens_per_pass to "
                "at least the longest prompt and completion together."
            )
        by_chunk = [lengths[chunk].tolist() for chunk in chunks]
        own_numbers = torch.tensor([len(split_rows(own, self.budget)) for own in by_chunk], device=lengths.device)
        numbers = self.gather(own_numbers).view(-1, len(chunks)).amax(0).tolist()
        return [
            [chunk[i] for i in rows]
            for chunk, own, passes in zip(chunks, by_chunk, numbers, strict=True)
            for rows in split_rows(own, self.budget, passes)
        ]

    def _forward(self, model: nn.Module, packed: PackedRow, **more: Any) -> Any:
        more |= sequence_arguments(self.unwrap(model), packed.lengths, packed.input_ids.device)
        with self.autocast():
            ids, positions, labels = packed.input_ids, packed.position_ids, packed.labels
            return model(input_ids=ids, position_ids=positions, labels=labels, fused_lm_head=True, **more)

    def packs(self, model: nn.Module) -> bool:
        """Whether packed rows of `model` give correct results; all processes test it together, once, and agree."""
        bare = self.unwrap(model)
        if bare not in self._why_padded:
            reason = unfit(bare) or self._crossing(model, bare)
            self._why_padded[bare] = reason
            if reason is not None:
                logger.warning("max_tokens_per_pass: %s runs on padded rows, because %s.", type(bare).__name__, reason)
        return self._why_padded[bare] is None

    def _crossing(self, model: nn.Module, bare: Any) -> str | None:
        use_packed_attention(bare)
        device = next(bare.parameters()).device

        def score(ids: Tensor, keep: int) -> Tensor:
            packed = pack(ids.to(device), torch.ones_like(ids, device=device), keep, range(len(ids)))
            return unpack([self._forward(model, packed).log_probs], [packed], len(ids), keep)

        try:
            reason = crossing(model, score, bare.config)
        except LostSequences:
            reason = "its layers do not tell their attention where sequences start"
        wrong = self.gather(torch.tensor([reason is not None], device=device)).any()
        return reason or ("another process found its sequences mixed" if wrong else None)
