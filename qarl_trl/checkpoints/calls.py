"""A call of `train` of a low-bit trainer: where it begins, which settings count in it, and what it says of both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers.trainer import TRAINER_STATE_NAME

from .._compat.sharding import reshard
from ..guards import on_first
from ..quant.store import LowBitStore
from .changes import KEPT_BY_OPTIMIZER, READ_IN_TRAIN, changes, compared_settings, rows_per_update
from .data_order import DataOrderMixin, EpochWatch
from .folder import read_manifest
from .identity import REPLACED_DATA, SETTINGS, replaced_data_fact
from .lock import holding
from .model import ModelMixin
from .optimizer import say_if_of_another_model
from .resume import check_start, resume_path, why_callbacks_forget, why_never_resumed
from .rollout_buffer import RolloutBuffer
from .same_run import changed_settings
from .signals import StopOnSignal


logger = get_logger(__name__)


class NoUpdateError(RuntimeError):
    """A run ended without an update: nothing was trained."""


class CallMixin(DataOrderMixin, ModelMixin):
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that stands around a call of `train`, the Trainer's method.

    Attributes:
        _identity: The facts that identify the run in its manifests.
        _first_data: The training set of the trainer's arguments, as the trainer has prepared it.
        _made: What the optimizer began with, from [`~qarl_trl.checkpoints.optimizer.made_fact`]; `None` before there
            is one.
        _made_with: The settings of the run at that time.
        _optimizer_of_trainer: The optimizer that the trainer made by its settings; `None` if a script gave one.
        _has_failed: Whether a call of `train` has ended with an error.
    """

    _identity: dict[str, Any]
    _first_data: Any
    _made: list[dict[str, str]] | None = None
    _made_with: Mapping[str, Any] = {}
    _optimizer_of_trainer: Any = None
    _has_failed = False

    # What it needs of the parts beside it. Of `LowBitMixin` and of the Trainer:
    low_bit_store: LowBitStore | None
    optimizer: Any
    # Of `CheckpointMixin`:
    _rollout_buffer: RolloutBuffer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        The Trainer's method. A call uses neither the rollout batch nor the weight sync of an earlier call.

        Args:
            resume_from_checkpoint: May also be `"true"` or `"auto"`, see [`resume_path`].

        Raises:
            ValueError: if another run uses this `output_dir` or has its checkpoints there, if the checkpoint cannot
                be resumed, or if only the settings name one.
            NoUpdateError: if the run ended without an update.
            RuntimeError: under DeepSpeed for a second call or a call after `evaluate`; under FSDP after a call that
                failed; with quantization if the model has no low-bit layers.
        """
        self._check_can_train()
        self._identify_data()
        # For the comparison with a checkpoint; without one less may count, see below.
        self._identity[SETTINGS] |= self._settings_that_count(is_resumed=True)

        with ExitStack() as stack:
            never = why_never_resumed(self.args) or why_callbacks_forget(self.callback_handler.callbacks)
            checkpoint = self._checkpoint_to_resume(resume_from_checkpoint, never)

            # The first process holds the folder until this call ends. All processes refuse if another run holds it.
            on_first(self.args, lambda: stack.enter_context(holding(Path(self.args.output_dir))))
            # A second call of one trainer goes on from its weights, and replaces its own checkpoints.
            if not self._owns_checkpoints:
                check_start(checkpoint, self.args)

            self._resumed = checkpoint is not None
            self._identity[SETTINGS] |= self._settings_that_count(self._resumed)

            self._watch_signals_and_epochs(stack)
            self._forget_earlier_call()
            self._ready_optimizer()
            self._say_resume(checkpoint, never)

            try:
                output = super().train(checkpoint, *args, **kwargs)
            except BaseException:
                self._end_failed_call()
                raise
            self._owns_checkpoints = True
            if self._identity[REPLACED_DATA] == "none":
                # TRL's A2PO has filtered it.
                self._first_data = self.train_dataset

        if output.global_step == 0:
            raise NoUpdateError("The run ended without an update: train_dataset gave no full rollout batch.")
        return output

    # Before the call of the Trainer ----------------------------------------------------------------------------------

    def _check_can_train(self) -> None:
        """Refuse (`RuntimeError`) a call that an earlier one, or a script, has made impossible."""
        # transformers would use the DeepSpeed engine of the earlier call, which it has destroyed.
        if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
            raise RuntimeError("With DeepSpeed a trainer trains once, before any evaluate(). Resume in a new trainer.")
        # FSDP2 keeps gradients and gathers of the update in which the call failed.
        if self.is_fsdp_enabled and self._has_failed:
            raise RuntimeError("With FSDP no train() follows one that failed. Resume in a new trainer.")
        if self.args.quantized and self.low_bit_store is None:
            raise RuntimeError(
                "trainer.model has no low-bit layers, so it would train in high precision: a script replaced it, or "
                "removed its quantization. Make a new trainer with that model."
            )

    def _identify_data(self) -> None:
        """Add the training set that a script has put in place of the first one, for a curriculum in several calls."""
        replaced = "none"
        if self.train_dataset is not self._first_data:
            replaced = on_first(self.args, lambda: replaced_data_fact(self.train_dataset))
        self._identity[REPLACED_DATA] = replaced

    def _checkpoint_to_resume(self, wish: str | bool | None, never: str | None) -> str | None:
        """
        The absolute path of the checkpoint that a call resumes from; `None` to begin anew.

        Args:
            wish: What `train` got.
            never: Why no checkpoint of this run resumes it; `None` if one can.

        Raises:
            ValueError: if there is none to resume from, if the run cannot be resumed, or if only the settings name
                one.
        """
        if wish is None and not self._owns_checkpoints:
            self._check_wish_of_settings()

        checkpoint = resume_path(wish, self.args, self._identity)
        if checkpoint is None:
            return None
        if never is not None:
            raise ValueError(never)
        # Parts of it are read after an evaluation, in which a reward may change the current folder.
        return os.path.abspath(checkpoint)

    def _watch_signals_and_epochs(self, stack: ExitStack) -> None:
        """Until `stack` ends, stop at a signal with a checkpoint, and know how far the epoch is."""
        signals = StopOnSignal(self._any_process)
        self._epochs = EpochWatch()
        for callback in (signals, self._epochs):
            self.add_callback(callback)
            stack.callback(self.remove_callback, callback)
        stack.enter_context(signals.listening())

    def _ready_optimizer(self) -> None:
        """Drop an optimizer that this call makes anew, and warn of what does not count for one that it keeps."""
        # A script may have had the model answer. An optimizer must be made of its shards.
        reshard(self._unwrapped)

        if self._makes_optimizer(self._resumed):
            # Its state comes from the checkpoint, and its settings may have changed since an earlier call.
            self.optimizer = None
            # The next one is another.
            self._made = None
        elif self.optimizer is self._optimizer_of_trainer or not self._resumed:
            self._say_settings_of_the_optimizer()

        # Shards are other parameters than those that an optimizer was made of.
        if not self.is_fsdp_enabled:
            say_if_of_another_model(self.optimizer, self.model)

    def _say_resume(self, checkpoint: str | None, never: str | None) -> None:
        """Log where the run resumes, or warn if its checkpoints will not let it."""
        if checkpoint is not None:
            self._say_resumed(checkpoint)
        elif self.args.save_strategy == "no":
            return
        elif never is not None:
            logger.warning("The checkpoints of this run will not resume it: %s", never)
        elif self.args.save_only_model:
            logger.warning("save_only_model: no checkpoint but that of a signal will resume this run.")

    def _check_wish_of_settings(self) -> None:
        """Refuse (`ValueError`) to begin anew where the settings name a checkpoint, which transformers ignores."""
        checkpoint = resume_path(self.args.resume_from_checkpoint, self.args, self._identity)
        if checkpoint is not None:
            raise ValueError(
                f"The settings resume from {checkpoint}, but train() got no resume_from_checkpoint, and would begin "
                "anew: trainer.train(resume_from_checkpoint=args.resume_from_checkpoint), or False for a new run."
            )

    def _forget_earlier_call(self) -> None:
        """Drop what was made from other weights: an earlier call may have failed, and this one may resume."""
        self._rollout_buffer.forget()
        if self.low_bit_store is not None:
            self.low_bit_store.forget()

    def _makes_optimizer(self, is_resumed: bool) -> bool:
        """Whether a call of `train` makes an optimizer. A second call without a resume keeps that of the first."""
        if self.optimizer is None:
            return True
        # transformers has taken the groups out of a script's dictionary when it made the first.
        is_of_trainer = self.optimizer is self._optimizer_of_trainer and self.optimizer_cls_and_kwargs is None
        return is_resumed and is_of_trainer

    def _settings_that_count(self, is_resumed: bool) -> dict[str, Any]:
        """What a call of `train` reads of the settings; of an optimizer that it keeps, what that was made with."""
        settings = compared_settings(self.args)
        counting = {name: settings[name] for name in READ_IN_TRAIN}
        if not self._makes_optimizer(is_resumed):
            counting |= {name: self._made_with[name] for name in KEPT_BY_OPTIMIZER if name in self._made_with}
        return counting

    def _say_settings_of_the_optimizer(self) -> None:
        """Warn of settings that a script changed after the optimizer was made, which a second call keeps."""
        changed = []
        for change in changes(self._made_with, compared_settings(self.args)):
            if change.name in KEPT_BY_OPTIMIZER:
                changed.append(str(change))
        if changed:
            logger.warning(
                "The optimizer keeps what it was made with, and these do not count: %s. Set trainer.optimizer = None "
                "before train(), or make a new trainer.",
                ", ".join(changed),
            )

    def _say_resumed(self, checkpoint: str) -> None:
        """Log which checkpoint the run takes, and which settings differ from that of its run."""
        changed = changed_settings(checkpoint, self._identity)
        applied = "with the settings of its run"
        if changed:
            applied = "and these settings count from the next update on: " + ", ".join(map(str, changed))
        logger.warning("Training resumes from %s, %s.", checkpoint, applied)
        self._say_moved_rows(checkpoint)

    def _say_moved_rows(self, checkpoint: str) -> None:
        """Warn if the place in the data, which the Trainer counts in updates, is another one by the run's settings."""
        stored = read_manifest(Path(checkpoint))
        if SETTINGS not in stored or self.args.ignore_data_skip:
            return

        settings = self._identity[SETTINGS]
        now = rows_per_update(settings, self.args.world_size)
        # A setting that the checkpoint lacks is none that changed.
        before = rows_per_update(settings | stored[SETTINGS], self.args.world_size)
        updates = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())["global_step"]
        moved = round(abs(now - before) * updates)
        if moved:
            logger.warning(
                "An update takes %g rows of the data set now and took %g, and %d updates are done: about %d rows are "
                "%s, and the run ends by its number of updates. With an equal product of "
                "per_device_train_batch_size and gradient_accumulation_steps the data go on where they were.",
                now,
                before,
                updates,
                moved,
                "left out" if now > before else "trained again",
            )

    # After it --------------------------------------------------------------------------------------------------------

    def _end_failed_call(self) -> None:
        """Forget what a failed call has left: metrics, which TRL forgets when it logs them, and NEFTune's hook."""
        self._has_failed = True
        # The Trainer removes it at the end of a call. A second one beside it would add noise twice.
        hook = getattr(self, "neftune_hook_handle", None)
        if hook is not None:
            hook.remove()
        # Else they would be averaged into the next line of the log. Some of TRL's trainers have the second name.
        for name in ("_metrics", "_stored_metrics"):
            for of_mode in getattr(self, name, {}).values():
                of_mode.clear()
        # What rewards of an unfinished batch have logged, and the micro-batches of an unfinished update (GRPO, RLOO).
        for name in ("_pending_metrics", "_pending_extra_logs"):
            getattr(self, name, {}).clear()
        if hasattr(self, "_entropy_window_stats"):
            self._entropy_window_stats = None
