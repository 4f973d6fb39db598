"""How a low-bit trainer writes its training checkpoints, and loads them when it resumes."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .._compat.resuming import dtypes_and_flags_kept, restore_default_adapter, restore_master_weights
from .._compat.sharding import parameters_kept, reshard
from ..quant.layers.experts import expert_modules
from ..quant.names import file_conversions, is_peft_model
from .calls import CallMixin
from .changes import compared_settings
from .folder import INCOMING, MISSES_EPOCH_END, commit, read_manifest, rotate
from .optimizer import (
    apply_settings,
    changed_settings_of_groups,
    class_fact,
    made_fact,
    settings_of_groups,
    trained_fact,
)
from .rollout_buffer import RolloutBuffer
from .same_run import MADE, OPTIMIZER, TRAINED, WITHIN_BATCH


class CheckpointMixin(CallMixin):
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that saves and loads training checkpoints. It overrides methods of
    the Trainer.
    """

    # Saving ----------------------------------------------------------------------------------------------------------

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
            OPTIMIZER: class_fact(self.optimizer),
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
        run's own. `ValueError` if the optimizer is of another class than that of the checkpoint, or trains other
        parameters.
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
        """Refuse (`ValueError`) a checkpoint whose optimizer was of another class, or trained other parameters."""
        stored = read_manifest(Path(checkpoint))
        optimizer = class_fact(self.optimizer)
        # What one keeps of each parameter the other would read as its own, or not find.
        if stored.get(OPTIMIZER, optimizer) != optimizer:
            raise ValueError(
                f"{checkpoint} is a checkpoint of another run: its optimizer was {stored[OPTIMIZER]}, and is "
                f"{optimizer}. Take an equal optimizer, or start a new run."
            )

        trained = trained_fact(self.optimizer, self._unwrapped)
        before = stored.get(TRAINED, trained)
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
