"""How a low-bit trainer saves its training checkpoints, and how it resumes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.trainer import TRAINER_STATE_NAME

from .._compat.resuming import dtypes_and_flags_kept, restore_default_adapter, restore_master_weights
from .._compat.sharding import parameters_kept, reshard
from ..guards import on_first
from ..quant.layers.experts import expert_modules
from ..quant.names import file_conversions, is_peft_model
from ..quant.store import LowBitStore
from .changes import KEPT_BY_OPTIMIZER, READ_IN_TRAIN, changes, compared_settings, rows_per_update
from .data_order import DataOrderMixin, EpochWatch
from .folder import INCOMING, MISSES_EPOCH_END, commit, read_manifest, rotate
from .identity import SETTINGS
from .lock import holding
from .model import ModelMixin
from .optimizer import (
    apply_settings,
    changed_settings_of_groups,
    made_fact,
    say_if_of_another_model,
    settings_of_groups,
    trained_fact,
)
from .resume import (
    MADE,
    TRAINED,
    WITHIN_BATCH,
    changed_settings,
    check_start,
    resume_path,
    why_callbacks_forget,
    why_never_resumed,
)
from .rollout_buffer import RolloutBuffer
from .signals import StopOnSignal


logger = get_logger(__name__)


class NoUpdateError(RuntimeError):
    """A run ended without an update: nothing was trained."""


class CheckpointMixin(DataOrderMixin, ModelMixin):
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that saves and resumes. It overrides methods of the Trainer.

    Attributes:
        _identity: The facts that identify the run in its manifests.
        _made: What the optimizer began with, from [`made_fact`]; `None` before there is one.
        _made_with: The settings of the run at that time.
        _optimizer_of_trainer: The optimizer that the trainer made by its settings; `None` if a script gave one.
        _has_failed: Whether a call of `train` has ended with an error.
    """

    _identity: dict[str, Any]
    _made: list[dict[str, str]] | None = None
    _made_with: Mapping[str, Any] = {}
    _optimizer_of_trainer: Any = None
    _has_failed = False

    # What it needs of `LowBitMixin` and of the Trainer, beside it:
    low_bit_store: LowBitStore | None
    optimizer: Any

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

        # For the comparison with a checkpoint; without one less may count, see below.
        self._identity[SETTINGS] |= self._settings_that_count(is_resumed=True)

        with ExitStack() as stack:
            if resume_from_checkpoint is None and not self._owns_checkpoints:
                self._check_wish_of_settings()
            checkpoint = resume_path(resume_from_checkpoint, self.args, self._identity)
            never = why_never_resumed(self.args) or why_callbacks_forget(self.callback_handler.callbacks)
            if checkpoint is not None:
                if never is not None:
                    raise ValueError(never)
                # Parts of it are read after an evaluation, in which a reward may change the current folder.
                checkpoint = os.path.abspath(checkpoint)
            # The first process holds the folder until this call ends. All processes refuse if another run holds it.
            on_first(self.args, lambda: stack.enter_context(holding(Path(self.args.output_dir))))
            # A second call of one trainer goes on from its weights, and replaces its own checkpoints.
            if not self._owns_checkpoints:
                check_start(checkpoint, self.args)
            self._resumed = checkpoint is not None
            self._identity[SETTINGS] |= self._settings_that_count(self._resumed)

            signals = StopOnSignal(self._any_process)
            self._epochs = EpochWatch()
            for callback in (signals, self._epochs):
                self.add_callback(callback)
                stack.callback(self.remove_callback, callback)
            stack.enter_context(signals.listening())

            self._forget_earlier_call()
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
            if checkpoint is not None:
                self._say_resumed(checkpoint)
            elif never is not None and self.args.save_strategy != "no":
                logger.warning("The checkpoints of this run will not resume it: %s", never)
            elif self.args.save_only_model and self.args.save_strategy != "no":
                logger.warning("save_only_model: no checkpoint but that of a signal will resume this run.")
            try:
                output = super().train(checkpoint, *args, **kwargs)
            except BaseException:
                self._end_failed_call()
                raise
            self._owns_checkpoints = True

        if output.global_step == 0:
            raise NoUpdateError("The run ended without an update: train_dataset gave no full rollout batch.")
        return output

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

    def _forget_earlier_call(self) -> None:
        """Drop what was made from other weights: an earlier call may have failed, and this one may resume."""
        self._rollout_buffer.forget()
        if self.low_bit_store is not None:
            self.low_bit_store.forget()

    def _check_wish_of_settings(self) -> None:
        """Refuse (`ValueError`) to begin anew where the settings name a checkpoint, which transformers ignores."""
        checkpoint = resume_path(self.args.resume_from_checkpoint, self.args, self._identity)
        if checkpoint is not None:
            raise ValueError(
                f"The settings resume from {checkpoint}, but train() got no resume_from_checkpoint, and would begin "
                "anew: trainer.train(resume_from_checkpoint=args.resume_from_checkpoint), or False for a new run."
            )

    # Training checkpoints --------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """The folder in which the Trainer makes its folder of a checkpoint."""
        return str(self._incoming or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """
        The Trainer's method. It writes into a temporary folder, renames that at the end, and only then deletes old
        checkpoints.
        """
        output_dir = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        incoming = output_dir / INCOMING

        # The optimizer has shards, and a signal may have come within an evaluation.
        reshard(self._unwrapped)
        # The rest of a rollout batch needs the same micro-batches. Between two rollout batches they may change.
        facts = self._identity | {
            WITHIN_BATCH: self._rollout_buffer.in_batch,
            MISSES_EPOCH_END: self._epochs.misses_end(self.state),
            TRAINED: trained_fact(self.optimizer, self._unwrapped),
            MADE: self._made,
        }

        try:
            if self.args.should_save:
                shutil.rmtree(incoming, ignore_errors=True)
            # No process may write into a folder that the first is still deleting.
            self.accelerator.wait_for_everyone()

            self._incoming = incoming
            super()._save_checkpoint(model, trial)
            # The manifest lists the files of all processes, so all of them must be there.
            self.accelerator.wait_for_everyone()

            if self.args.should_save:
                commit(incoming / name, output_dir / name, **facts)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.args.should_save:
                shutil.rmtree(incoming, ignore_errors=True)
            raise OSError(f"{name} could not be saved: {error}. Other checkpoints are unchanged.") from error
        finally:
            self._incoming = None

        if self.args.should_save:
            rotate(output_dir, self.args.save_total_limit)
            shutil.rmtree(incoming, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _save_rng_state(self, output_dir: str) -> None:
        """
        The Trainer's method. It also saves the random state of the beginning of the epoch, and the completions,
        log-probs and advantages of a rollout batch that is not used up.
        """
        super()._save_rng_state(output_dir)
        # A callback may save the start of the run, before an epoch begins.
        if self._rng_of_epoch is not None:
            torch.save(self._rng_of_epoch, self._epoch_file(output_dir))
        if self._rollout_buffer.exists:
            torch.save(self._rollout_buffer.dump(), self._rollout_file(output_dir))

    def _load_rng_state(self, checkpoint: str) -> None:
        """The Trainer's method. It also loads a rollout batch that is not used up."""
        super()._load_rng_state(checkpoint)
        if self._rollout_buffer.exists:
            file = self._rollout_file(checkpoint)
            stored = torch.load(file, map_location=self.accelerator.device, weights_only=True)
            self._rollout_buffer.load(*stored)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """
        The Trainer's method. With `log_completions` TRL writes the answers of the rollout batch into a file of each
        log line; without any, after a resume from a checkpoint that could not store them, it would empty the file that
        the run wrote before.
        """
        writes = getattr(self, "log_completions", False)
        if writes and not self._rollout_buffer.has_rows_to_log:
            self.log_completions = False
        try:
            super().log(logs, start_time)
        finally:
            if writes:
                self.log_completions = True

    @cached_property
    def _rollout_buffer(self) -> RolloutBuffer:
        """TRL's buffer of completions in this trainer."""
        return RolloutBuffer(self)

    def _rollout_file(self, folder: str) -> Path:
        """The file of this process's rollout batch in a checkpoint."""
        return Path(folder) / f"rollout_{self.args.process_index}.pt"

    # Resuming --------------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, *args: Any) -> tuple:
        """The Trainer's method, which makes the optimizer, and in a resumed run loads its state."""
        is_of_script = self.optimizer is not None
        kept: AbstractContextManager = nullcontext()
        if isinstance(self._unwrapped, FSDPModule):
            # An earlier call has sharded it. The method below makes no other optimizer then.
            self.create_optimizer()
            kept = parameters_kept(self.optimizer, self._unwrapped)
        with kept:
            prepared = super()._prepare_for_training(*args)
        if not is_of_script:
            self._optimizer_of_trainer = self.optimizer
        self._note_optimizer()
        return prepared

    def _note_optimizer(self) -> None:
        """Keep what the optimizer began with. A second call of `train` finds one that has counted on."""
        if self._made is None:
            self._made = made_fact(self.optimizer)
            self._made_with = compared_settings(self.args)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """
        The Trainer's method, which takes learning rate, schedule and so on from the checkpoint. Here they are the
        run's own. `ValueError` if the optimizer trains other parameters than that of the checkpoint.
        """
        # DeepSpeed has loaded its optimizer already. `refuses` lets no setting of it change.
        if checkpoint is None or self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return

        self._check_trained(checkpoint)
        self._note_optimizer()
        settings = settings_of_groups(self.optimizer)
        super()._load_optimizer_and_scheduler(checkpoint)

        before = read_manifest(Path(checkpoint)).get(MADE)
        changed = changed_settings_of_groups(settings, before, self._made)
        apply_settings(changed, self.optimizer, self.lr_scheduler)

    def _check_trained(self, checkpoint: str) -> None:
        """Refuse (`ValueError`) a checkpoint whose optimizer trained other parameters."""
        trained = trained_fact(self.optimizer, self._unwrapped)
        before = read_manifest(Path(checkpoint)).get(TRAINED, trained)
        if before != trained:
            raise ValueError(
                f"{checkpoint} is a checkpoint of another run: its optimizer trained {before} by their names, and "
                f"this one trains {trained}. Freeze the same parameters, with an equal optimizer, or start a new "
                "run."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """
        The Trainer's method, but for models that `save_pretrained` stores under other names than the model has: those
        with experts, those of several parts, such as a vision tower and a language model, and some others, such as
        GPT-NeoX. Of several adapters, as a `PeftModel` has with a KL penalty, it loads all.
        """
        module = self._unwrapped
        # FSDP, DeepSpeed and peft write the files by the model's own names.
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        is_one_part = module.config.get_text_config() is module.config and not any(expert_modules(module))
        is_plain = is_one_part and not file_conversions(module)

        if is_peft_model(module) and not is_sharded:
            with dtypes_and_flags_kept(module):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
                restore_default_adapter(module, resume_from_checkpoint)
        elif is_sharded or is_plain:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            restore_master_weights(module, resume_from_checkpoint)

        if self.low_bit_store is not None:
            self.low_bit_store.forget()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The Trainer's method. A missing weight is an error here: training would continue from other values."""
        super()._issue_warnings_after_load(load_result)
        # A tied weight is stored under one of its names.
        missing = set(load_result.missing_keys) - set(self._unwrapped.all_tied_weights_keys)
        if missing:
            raise RuntimeError(f"The checkpoint lacks {len(missing)} weights of the model, first {min(missing)!r}.")
