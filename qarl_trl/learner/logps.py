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
from .packing import PackedRow, merge_micro_batches, pack, split_rows, unpack
from .probe import crossing, unfit


logger = get_logger(__name__)

# What TRL's method returns: the attributes of `Scores`, in their order.
TrlResult = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Scores:
    """
    The learner's results for a padded batch.

    Attributes:
        logps: Log-probs of the last tokens, `(B, logits_to_keep)`, 0 where there is padding.
        entropies: Entropy of the distribution that scores each of these tokens, same shape; `None` if not wanted.
        balance_loss: The balancing loss of a mixture, a scalar: the mean over passes. `None` if not wanted.
    """

    logps: Tensor
    entropies: Tensor | None
    balance_loss: Tensor | None


@dataclass
class PackedPasses:
    """
    The passes of one trainer, for models for which `packs` is true.

    Args:
        budget: Maximum number of tokens in a pass.
        autocast: Makes the context of the model's forward.
        gather: Concatenates the 1-D tensors of all processes.
        unwrap: Removes accelerate's wrappers from a model.
    """

    budget: int
    autocast: Callable[[], AbstractContextManager[Any]]
    gather: Callable[[Tensor], Tensor]
    unwrap: Callable[[nn.Module], nn.Module]

    # Of each model that was tested: why its rows stay padded, or `None`. Weak keys do not keep a model alive.
    _why_padded: WeakKeyDictionary[nn.Module, str | None] = field(default_factory=WeakKeyDictionary)

    def run(
        self, arguments: Mapping[str, Any], order: Tensor | None = None, updates: Sequence[int] | None = None
    ) -> TrlResult:
        """
        The result of TRL's `_get_per_token_logps_and_entropies`.

        Micro-batches of `batch_size` rows run one after the other, in several passes if they exceed the budget, and
        several in one pass if they fit it together and belong to one update.

        Args:
            arguments: The arguments of TRL's method by name, for a batch of text: `model`, `input_ids` and
                `attention_mask` `(B, L)`, `logits_to_keep`; optional are `batch_size`, `compute_entropy` and
                `compute_aux_loss`.
            order: The rows in the order in which micro-batches take them, int64 `(B,)`; `None`: as they stand.
            updates: For each micro-batch the number of its update; `None`: no two of them share a pass.

        Returns:
            The attributes of [`Scores`], in this order.

        Raises:
            ValueError: if a sequence of any process exceeds the budget.
        """
        rows = len(arguments["input_ids"])
        if order is None:
            order = torch.arange(rows)

        micro_batch_size = arguments.get("batch_size") or rows
        micro_batches = [micro_batch.tolist() for micro_batch in order.split(micro_batch_size)]

        scores = self._score(
            arguments["model"],
            arguments["input_ids"],
            arguments["attention_mask"],
            arguments["logits_to_keep"],
            micro_batches,
            updates,
            with_entropies=bool(arguments.get("compute_entropy")),
            with_balance_loss=bool(arguments.get("compute_aux_loss")),
        )
        return scores.logps, scores.entropies, scores.balance_loss

    def _score(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        micro_batches: Sequence[list[int]],
        updates: Sequence[int] | None,
        *,
        with_entropies: bool,
        with_balance_loss: bool,
    ) -> Scores:
        """Run the rows of the micro-batches in packed passes, and put the results at their places in the batch."""
        # Padding may stand on both sides, so lengths are counts, not positions.
        lengths = attention_mask.sum(1)
        if updates is not None:
            micro_batches = self._merged(lengths, micro_batches, updates)

        passes = self._rows_of_passes(lengths, micro_batches)
        packed_rows = [pack(input_ids, attention_mask, logits_to_keep, rows) for rows in passes]

        # Only on demand: without experts a model's forward does not know the argument.
        options = {"output_router_logits": True} if with_balance_loss else {}
        outputs = [self._forward(model, packed_row, **options) for packed_row in packed_rows]

        # Passes take rows in another order than the batch, so each value goes back by its row and column.
        def padded(values: list[Tensor]) -> Tensor:
            return unpack(values, packed_rows, len(input_ids), logits_to_keep)

        logps = padded([output.log_probs for output in outputs])

        entropies = None
        if with_entropies:
            entropies = padded([output.entropy for output in outputs])

        balance_loss = None
        if with_balance_loss:
            # As TRL takes the mean over its micro-batches.
            balance_loss = torch.stack([output.aux_loss for output in outputs]).mean()

        return Scores(logps, entropies, balance_loss)

    def merge(self, tokens: Tensor, updates: Sequence[int]) -> list[int]:
        """
        Choose the micro-batches that share a pass. All processes must ask together, and they get the same answer.

        Args:
            tokens: Number of tokens of each micro-batch of this process, int64 `(M,)`.
            updates: For each micro-batch the number of its update. Different updates share no pass.

        Returns:
            The number of micro-batches in each group of consecutive ones.
        """
        # `(processes, M)`. Decided from the numbers of all processes, so each of them makes as many passes.
        by_process = self.gather(tokens).view(-1, len(tokens))
        return merge_micro_batches(by_process.T.tolist(), updates, self.budget)

    def _merged(
        self, lengths: Tensor, micro_batches: Sequence[list[int]], updates: Sequence[int]
    ) -> Sequence[list[int]]:
        """The rows of each group of micro-batches that share a pass; `lengths` as in `_rows_of_passes`."""
        tokens = torch.stack([lengths[rows].sum() for rows in micro_batches])

        groups = []
        start = 0
        for size in self.merge(tokens, updates):
            together = micro_batches[start : start + size]
            groups.append([row for rows in together for row in rows])
            start += size
        return groups

    def _rows_of_passes(self, lengths: Tensor, micro_batches: Sequence[list[int]]) -> list[list[int]]:
        """The rows of each pass; `lengths` are the numbers of tokens of all rows, `(B,)`."""
        self._check_longest(lengths)

        lengths_by_micro_batch = [lengths[rows].tolist() for rows in micro_batches]
        numbers = self._numbers_of_passes(lengths_by_micro_batch, lengths.device)

        passes = []
        for rows, row_lengths, number in zip(micro_batches, lengths_by_micro_batch, numbers, strict=True):
            # `split_rows` numbers the rows within the micro-batch.
            for places in split_rows(row_lengths, self.budget, number):
                passes.append([rows[place] for place in places])
        return passes

    def _check_longest(self, lengths: Tensor) -> None:
        """`ValueError` if a sequence of any process exceeds the budget."""
        # The longest of all processes, so that all of them stop: the others would wait for one that stops alone.
        longest = int(self.gather(lengths.amax().view(1)).max())
        if longest > self.budget:
            raise ValueError(
                f"A sequence of {longest} tokens does not fit into max_tokens_per_pass={self.budget}. "
                "Set max_tokens_per_pass to at least the longest prompt and completion together."
            )

    def _numbers_of_passes(self, lengths_by_micro_batch: Sequence[list[int]], device: torch.device) -> list[int]:
        """The number of passes of each micro-batch: that of the process which needs most for it."""
        # Wrappers (DDP, FSDP2) wait for each other in every pass, so all processes must make equally many.
        needed = [len(split_rows(row_lengths, self.budget)) for row_lengths in lengths_by_micro_batch]
        needed_by_process = self.gather(torch.tensor(needed, device=device)).view(-1, len(needed))
        return needed_by_process.amax(0).tolist()

    def _forward(self, model: nn.Module, packed_row: PackedRow, **options: Any) -> Any:
        """The output of one pass: log-probs and entropies `(1, T - 1)` by TRL's fused head."""
        sequences = sequence_arguments(self.unwrap(model), packed_row.lengths, packed_row.input_ids.device)
        with self.autocast():
            # The fused head never has the logits of all tokens in memory.
            return model(
                input_ids=packed_row.input_ids,
                position_ids=packed_row.position_ids,
                labels=packed_row.labels,
                fused_lm_head=True,
                **options,
                **sequences,
            )

    def packs(self, model: nn.Module) -> bool:
        """
        Whether packed rows of a model give correct results. Otherwise a warning says why not.

        All processes must ask together: the first call for a model runs it, and they agree on the answer.

        Args:
            model: The model as the trainer calls it, with accelerate's wrappers.
        """
        unwrapped = self.unwrap(model)
        if unwrapped not in self._why_padded:
            reason = self._reason_to_pad(model, unwrapped)
            self._why_padded[unwrapped] = reason
            if reason is not None:
                model_class = type(unwrapped).__name__
                logger.warning("max_tokens_per_pass: %s runs on padded rows, because %s.", model_class, reason)

        return self._why_padded[unwrapped] is None

    def _reason_to_pad(self, model: nn.Module, unwrapped: nn.Module) -> str | None:
        """Why packed rows of a model would be wrong in some process, or `None`."""
        reason = unfit(unwrapped)
        if reason is not None:
            # From the config alone, so every process returns here, and none waits in the measurement.
            return reason
        return self._crossing(model, unwrapped)

    def _crossing(self, model: nn.Module, unwrapped: Any) -> str | None:
        """What a measurement in all processes finds wrong with packed rows, or `None`."""
        # Before the measurement, which must run what the passes will run.
        use_packed_attention(unwrapped)
        device = next(unwrapped.parameters()).device

        def score(ids: Tensor, keep: int) -> Tensor:
            every_token = torch.ones_like(ids, device=device)
            packed_row = pack(ids.to(device), every_token, keep, range(len(ids)))
            output = self._forward(model, packed_row)
            return unpack([output.log_probs], [packed_row], len(ids), keep)

        try:
            reason = crossing(model, score, unwrapped.config)
        except LostSequences:
            reason = "its layers do not tell their attention where sequences start"

        # If one process padded and the others packed, they would make different numbers of passes.
        wrong_somewhere = self.gather(torch.tensor([reason is not None], device=device)).any()
        if reason is None and wrong_somewhere:
            return "another process found its sequences mixed"
        return reason
