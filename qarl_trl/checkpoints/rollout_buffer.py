"""TRL's buffer of completions, which a checkpoint must hold and a resumed run must find again."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch


def _types_that_no_file_gives_back(value: Any) -> list[str]:
    """The types in a value that cannot be stored, or that a resume would not read."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
    # What pickle and torch raise, for a lock and others.
    except (TypeError, AttributeError, RuntimeError, NotImplementedError, pickle.PicklingError) as error:
        return [str(error)]
    file.seek(0)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))


class RolloutBuffer:
    """
    A trainer's current rollout batch, of which TRL trains one micro-batch after the other.

    TRL has no public access to it. These are private attributes of its trainers (GRPO, RLOO and distillation in TRL
    1.16), and no other module should touch them:

    - `_buffered_inputs`: the micro-batches of the rollout batch with their log-probs and advantages; `None` before the
      first one.
    - `_step`: number of micro-batches trained so far, by which TRL takes the next one from the buffer.
    - `_last_loaded_step`: the optimizer step of the last weight sync; only with an engine.
    - `_logs`: prompts, answers, rewards and advantages of the rollout batch, which `log_completions` writes into a
      file at each log line.

    SFT and DPO have none of them, because they sample nothing.

    Args:
        trainer: Any trainer of TRL.

    Attributes:
        step_of_sampling: The optimizer step at which a [`~qarl_trl.QaRLTrainer`] sampled the rollout batch; -1 before
            the first one, and in other trainers.
    """

    def __init__(self, trainer: Any) -> None:
        self.step_of_sampling = -1
        self._trainer = trainer
        self._was_checked = False

    @property
    def exists(self) -> bool:
        """Whether the trainer samples rollout batches and trains on each for several micro-batches."""
        return hasattr(self._trainer, "_buffered_inputs")

    @property
    def micro_batches(self) -> Any:
        """The micro-batches of the current rollout batch; `None` before the first one, and without any."""
        return getattr(self._trainer, "_buffered_inputs", None)

    @property
    def in_batch(self) -> bool:
        """Whether the trainer is in the middle of a rollout batch, so that its rest is still to be trained on."""
        if not self.exists:
            return False
        return self._trainer._step % self._micro_batches_of_a_rollout() != 0

    def _micro_batches_of_a_rollout(self) -> int:
        """How many micro-batches are trained on one rollout batch, each as often as it is used."""
        args = self._trainer.args
        if not hasattr(args, "steps_per_generation"):
            return args.gradient_accumulation_steps  # distillation samples for each optimizer step
        return args.steps_per_generation * self._trainer.num_iterations

    def check(self) -> None:
        """
        Refuse (`ValueError`) a first rollout batch that a checkpoint could store and not give back.

        A subclass may add columns of any type to it. A resume reads only tensors and plain values, because a file with
        others may run code.
        """
        if self._was_checked or self.micro_batches is None:
            return
        # Then each update ends a rollout batch, and no checkpoint stores one.
        if self._trainer.args.gradient_accumulation_steps % self._micro_batches_of_a_rollout() == 0:
            return
        # Trainers that TRL calls experimental fill the buffer bit by bit.
        first = self.micro_batches[0]
        if not isinstance(first, Mapping):
            return

        refused = []
        for name, value in first.items():
            types = _types_that_no_file_gives_back(value)
            if types:
                refused.append(f"{name!r} ({', '.join(types)})")
        if refused:
            raise ValueError(
                "The values of a rollout batch must be tensors, numbers, texts, None, or lists and dictionaries of "
                f"them, so that a checkpoint within the batch can be resumed, got {'; '.join(refused)}. Convert them, "
                'or set save_strategy: "no".'
            )
        self._was_checked = True

    def dump(self) -> tuple[int, int, Any, dict[str, Any] | None]:
        """
        What a checkpoint must store.

        Returns:
            The number of micro-batches trained so far, the step of sampling, the micro-batches of the rollout batch,
            and what `log_completions` writes of it. Between two rollout batches the first is 0 and the last two are
            `None`: nothing of the batch is needed again, and the next may be divided differently.
        """
        if not self.in_batch:
            return 0, self.step_of_sampling, None, None
        return self._trainer._step, self.step_of_sampling, self._trainer._buffered_inputs, self._logged_rows()

    @property
    def has_rows_to_log(self) -> bool:
        """Whether `log_completions` has anything to write."""
        # GOLD keeps its rows elsewhere.
        logs = getattr(self._trainer, "_logs", None)
        return logs is None or bool(logs["prompt"])

    def _logged_rows(self) -> dict[str, Any] | None:
        """What `log_completions` writes of the rollout batch; `None` if nothing does, or a file could not store it."""
        trainer = self._trainer
        # All processes have the rows of all, and the first writes them.
        if not getattr(trainer, "log_completions", False) or not trainer.accelerator.is_main_process:
            return None

        rows: dict[str, Any] = {}
        for name, values in getattr(trainer, "_logs", {}).items():
            if name == "images":
                continue
            # Rewards and columns of one's own have a list for each name.
            if isinstance(values, Mapping):
                rows[name] = {column: list(of_column) for column, of_column in values.items()}
            else:
                rows[name] = list(values)
        # Prompts may have images, and a reward function may log any type.
        return None if _types_that_no_file_gives_back(rows) else rows

    def load(
        self, step: int, step_of_sampling: int, micro_batches: Any, logged_rows: dict[str, Any] | None = None
    ) -> None:
        """
        Continue at the place of a checkpoint.

        Args:
            step: Number of micro-batches trained so far, from [`dump`].
            step_of_sampling: The optimizer step at which the rollout batch was sampled, from [`dump`].
            micro_batches: The rollout batch, from [`dump`].
            logged_rows: What `log_completions` writes of it, from [`dump`]; earlier checkpoints lack it.
        """
        self.step_of_sampling = step_of_sampling
        self._trainer._step = step
        self._trainer._buffered_inputs = micro_batches

        for name, values in (logged_rows or {}).items():
            if isinstance(values, Mapping):
                for column, of_column in values.items():
                    self._trainer._logs[name][column].extend(of_column)
            else:
                self._trainer._logs[name].extend(values)

    def forget(self) -> None:
        """Sample a new rollout batch next, after a weight sync."""
        if self.exists:
            self.load(0, self.step_of_sampling, None)
            self.force_sync()
            self._forget_of_experimental_trainers()

    def force_sync(self) -> None:
        """Make TRL sync the engine before it samples again, even within the same optimizer step."""
        # Trainers without an engine do not have it.
        if hasattr(self._trainer, "_last_loaded_step"):
            self._trainer._last_loaded_step = -1

    def _forget_of_experimental_trainers(self) -> None:
        """The same for the names of trainers in `trl.experimental` (TRL 1.16), which sample in no evaluation."""
        # GOLD syncs again so many steps after it.
        if hasattr(self._trainer, "_last_vllm_sync_step"):
            self._trainer._last_vllm_sync_step = -max(1, self._trainer.vllm_sync_frequency)
        # IW-OPD's place in its rollout batch.
        if hasattr(self._trainer, "_buffer_step"):
            self._trainer._buffer_step = 0
