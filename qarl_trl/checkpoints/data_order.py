"""Where a resumed run goes on in its training data: order, epoch and place are those of the run before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length
from trl.trainer.utils import RepeatSampler

from .._compat.resuming import add_states_of_callbacks
from .folder import MISSES_EPOCH_END, read_manifest


logger = get_logger(__name__)


class EpochWatch(TrainerCallback):
    """Knows whether the end of an epoch, at which a run may evaluate, is still to come after its last update."""

    _is_within = False
    _began_at = 0.0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note how many epochs are done."""
        self._is_within = True
        self._began_at = state.epoch

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the end."""
        self._is_within = False

    def misses_end(self, state: Any) -> bool:
        """
        Whether a checkpoint that is saved now lacks the end of its epoch.

        Args:
            state: The Trainer's.
        """
        is_last = state.epoch == int(state.epoch) or state.global_step >= state.max_steps
        return self._is_within and state.epoch > self._began_at and is_last


class DataOrderMixin:
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that keeps the order of the data. It overrides methods of the
    Trainer.

    Attributes:
        _owns_checkpoints: Whether the checkpoints in `output_dir` are of this trainer, so that it may replace them.
        _latest_sampler: The sampler of the training set that was made last.
        _sampler: The one that the run trains from: callbacks may ask for a loader of their own later.
        _rng_of_epoch: torch's random state at the beginning of the current epoch; `None` before the first one.
        _epochs: The callback that watches the epochs of the current call of `train`.
        _before_epoch_end: The checkpoint that the run resumes from, while the end of its epoch is still to come.
    """

    _owns_checkpoints = False
    _latest_sampler: Any = None
    _sampler: Any = None
    _rng_of_epoch: torch.Tensor | None = None
    _epochs = EpochWatch()
    _before_epoch_end: str | None = None

    # What it needs of the Trainer, and of `CheckpointMixin`:
    args: Any
    state: Any
    control: Any
    callback_handler: Any
    model_wrapped: Any
    train_dataset: Any
    _tr_loss: torch.Tensor
    _maybe_log_save_evaluate: Callable[..., None]
    _load_rng_state: Callable[[str], None]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's method. It keeps the sampler for [`_init_training_state`]."""
        self._latest_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._latest_sampler

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """The Trainer's method. A resumed epoch keeps TRL's order of prompts, and a complete run trains nothing."""
        # The Trainer checks this only after a step, so it would train a resumed complete run for one step more.
        if self.state.global_step >= self.state.max_steps:
            # Of a stream the Trainer would begin epochs without end.
            self.control.should_training_stop = True
            return

        if self._before_epoch_end is not None:
            self._end_epoch_of_checkpoint(kwargs["trial"], kwargs["start_time"], kwargs["ignore_keys_for_eval"])
            # An evaluation may stop a run.
            if self.control.should_training_stop:
                return
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
            if kwargs["steps_trained_in_current_epoch"] == 0:
                # Else the Trainer loads the random state of the checkpoint, which is that before the evaluation.
                kwargs["resume_from_checkpoint"] = None

        self._check_place_is_found(epoch, **kwargs)
        self._take_rng_of_epoch(epoch, **kwargs)
        sampler = self._sampler
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            # TRL's sampler draws one permutation per epoch, from a generator that is in no checkpoint. Seed it again
            # and draw the permutations of all earlier epochs: the next one is that of this epoch.
            sampler.generator.manual_seed(sampler.seed)
            for _ in range(epoch):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        # Not before: a resume that was refused leaves them those of another trainer.
        self._owns_checkpoints = True
        super()._run_epoch(epoch=epoch, **kwargs)

    def _end_epoch_of_checkpoint(self, trial: Any, start_time: float, ignore_keys_for_eval: Any = None) -> None:
        """
        Do what the Trainer does at the end of an epoch, for that of a checkpoint of its last update.

        The Trainer saves such a checkpoint before the evaluation, and would begin a resumed run with the next epoch,
        or end it.
        """
        self._load_rng_state(str(self._before_epoch_end))
        file = self._epoch_file(str(self._before_epoch_end))
        if file.exists():
            # A callback may ask for a save here, which is of the same epoch.
            self._rng_of_epoch = torch.load(file, weights_only=True)
        self._before_epoch_end = None
        # With `restore_callback_states_from_checkpoint` it still asks for the save that wrote the checkpoint.
        self.control.should_save = False
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._maybe_log_save_evaluate(
            self._tr_loss, None, self.model_wrapped, trial, self.state.epoch, ignore_keys_for_eval, start_time
        )

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """The Trainer's method, also of a resumed run that had nothing to train."""
        if self._before_epoch_end is not None:
            self._end_epoch_of_checkpoint(trial, start_time)
        return super()._finalize_training(trial, num_train_samples, start_time)

    def _check_place_is_found(
        self,
        epoch: int,
        *,
        train_dataloader: Any,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **_: Any,
    ) -> None:
        """
        Refuse to go on within an epoch of a loader that wraps another: `accelerate.skip_first_batches` (1.15) takes
        the one in it, and so leaves out other rows. The loader of TRL's IW-OPD, which repeats each batch, is one.
        """
        is_within = resume_from_checkpoint is not None and epoch == epochs_trained and steps_trained_in_current_epoch
        if is_within and not self.args.ignore_data_skip and not isinstance(train_dataloader, DataLoader):
            raise ValueError(
                f"{resume_from_checkpoint} ends within an epoch, so the training data must come from a torch "
                f"DataLoader, whose first batches accelerate leaves out, got {type(train_dataloader).__name__}. "
                "Resume from a checkpoint at the end of an epoch."
            )

    def _take_rng_of_epoch(
        self,
        epoch: int,
        *,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        **_: Any,
    ) -> None:
        """
        Keep torch's random state of the beginning of an epoch, and begin a resumed one with that of its checkpoint.

        A sampler without a generator of its own, as the one of `group_by_length`, draws its order from it.
        """
        if resume_from_checkpoint is not None and epoch == epochs_trained:
            file = self._epoch_file(resume_from_checkpoint)
            if steps_trained_in_current_epoch == 0:
                # The Trainer does so next. The state is that of the end of the epoch before.
                self._load_rng_state(resume_from_checkpoint)
            elif file.exists():  # earlier versions did not write it
                torch.set_rng_state(torch.load(file, weights_only=True))
        self._rng_of_epoch = torch.get_rng_state()

    def _epoch_file(self, folder: str) -> Path:
        """The file of this process's random state at the beginning of the epoch, in a checkpoint."""
        return Path(folder) / f"epoch_rng_{self.args.process_index}.pt"

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """
        The Trainer's method, which takes the steps of logs, checkpoints and evaluations from the checkpoint. The
        Trainer calls it when it has made the run's loader, before any callback.
        """
        self._sampler = self._latest_sampler
        place = super()._init_training_state(max_steps, *args)
        add_states_of_callbacks(self)
        updates_of_epoch, _, checkpoint, _ = args
        # A user's loader may know how long a stream is. Then the Trainer counts as for other data.
        has_no_end = not has_length(self.train_dataset) and updates_of_epoch == max_steps
        if checkpoint is not None and has_no_end and not self.args.ignore_data_skip:
            place = self._place_in_stream(place, checkpoint)
        self.state.compute_steps(self.args, max_steps)
        is_complete = self.state.global_step >= max_steps
        self._before_epoch_end = None
        if checkpoint is not None and read_manifest(Path(checkpoint)).get(MISSES_EPOCH_END, False):
            # Else the run has more updates than that of the checkpoint, and goes on within the epoch. The Trainer ends
            # that of a stream itself, when it finds no further row.
            is_at_end = not has_no_end and self.state.epoch == int(self.state.epoch)
            self._before_epoch_end = checkpoint if is_at_end or is_complete else None
        if is_complete:
            logger.warning(
                "Nothing is left to train: the checkpoint has all %d updates. max_steps or num_train_epochs says how "
                "many.",
                max_steps,
            )
        return place

    def _place_in_stream(self, place: tuple[int, int], checkpoint: str) -> tuple[int, int]:
        """
        The epoch, and its micro-batches that are done, where the training set has no length.

        The Trainer (transformers 5.17) takes all updates for those of the first epoch. Of a stream that has begun
        again it would leave out more rows than there are, and go on with the first ones.

        Args:
            place: The Trainer's.
            checkpoint: The checkpoint's folder.
        """
        stored = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())
        # In its epochs the Trainer counts `max_steps` updates, also if a stream ends before.
        done = round(stored["epoch"] * stored["max_steps"])
        if done == stored["global_step"]:
            return place
        epoch = int(stored["epoch"])
        updates = done - epoch * stored["max_steps"]
        return epoch, updates * self.args.gradient_accumulation_steps
