"""Every token of some completions, with its log-probs, as a parquet file for each update (`log_token_stats`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import TrainerCallback

from ..loss import loss_mask
from .error_tokens import written_tokens


if TYPE_CHECKING:
    from ..config import QaRLConfig

FLOATS, BOOLS = pa.list_(pa.float32()), pa.list_(pa.bool_())
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "prompt": pa.string(),
        "completion": pa.string(),
        "reward": pa.float32(),
        "advantage": pa.float32(),
        "token_ids": pa.list_(pa.int32()),
        "old_logps": FLOATS,
        "current_logps": FLOATS,
        "engine_logps": FLOATS,
        "mask": BOOLS,
        "error_mask": BOOLS,
    }
)


class TokenStats(TrainerCallback):
    """
    Writes `token_stats_{step:08d}.parquet` after each update: a row for each followed completion that it trained on.

    Args:
        folder (`Path`): Where the files go.
        count (`int`): The first so many completions of a rollout batch are followed.
        tokenizer (`PreTrainedTokenizerBase`): Gives the texts.
    """

    def __init__(self, folder: Path, count: int, tokenizer: Any) -> None:
        self._folder, self._count, self._tokenizer = folder, count, tokenizer
        self._rows: list[dict[str, Any]] = []

    def follow(self, batch: dict[str, Any], rewards: Tensor) -> None:
        """Mark the completions of a rollout batch, which is shuffled and cut later, and give them their rewards `(B,)`."""
        batch["reward"] = rewards
        batch["followed"] = torch.arange(len(rewards), device=rewards.device) < self._count

    def add(self, step: int, batch: dict[str, Any], logps: Tensor, errors: Tensor) -> None:
        """
        Take down the followed completions of a micro-batch, on which update `step` trains; the first is 1.

        `logps` are of the current policy, `errors` the error tokens, both `(B, T)`.
        """
        if "followed" not in batch:  # a resume brought it along, and when it was sampled nothing was followed
            return
        by_token = {
            "token_ids": batch["completion_ids"],
            "old_logps": batch.get("old_per_token_logps"),
            "current_logps": logps,
            "engine_logps": batch.get("sampling_per_token_logps"),
            "mask": loss_mask(batch).bool(),
            "error_mask": errors,
        }
        written = written_tokens(batch, self._tokenizer.pad_token_id)
        for i in batch["followed"].nonzero().flatten().tolist():
            row = {name: None if value is None else value[i][written[i]].tolist() for name, value in by_token.items()}
            row |= {"step": step, "reward": batch["reward"][i].item(), "advantage": batch["advantages"][i].item()}
            row["prompt"] = self._tokenizer.decode(batch["prompt_ids"][i][batch["prompt_mask"][i].bool()])
            row["completion"] = self._tokenizer.decode(row["token_ids"])
            self._rows.append(row)

    def on_step_end(self, args: QaRLConfig, state: Any, control: Any, **kwargs: Any) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"token_stats_{state.global_step:08d}.parquet"
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
