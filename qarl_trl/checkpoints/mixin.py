"""The half of [`~qarl_trl.QaRLTrainer`] that saves and resumes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from trl.trainer.utils import RepeatSampler

from .. import _compat
from ..export import LOW_BIT_FOLDER, save_low_bit
from ..export.files import share
from ..quant.experts import expert_modules
from ..quant.model import quantized_modules
from ..quant.state_dict import iter_low_bit_weights, readable_parameters
from .folder import INCOMING, commit, finished, rotate
from .lock import holding
from .resume import on_first, resume_path
from .signals import StopOnSignal


logger = get_logger(__name__)


class NothingTrained(RuntimeError):
    """A run ended without an update."""


class CheckpointMixin:
    """What [`QaRLTrainer`] saves and resumes, over `GRPOTrainer`."""

    _incoming: Path | None = None  # while a checkpoint is written
    _identity: dict[str, Any]  # what the run is of, for manifests
    _signals: StopOnSignal | None = None
    _sampler: Any = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        The Trainer's, from a weight sync and a rollout of its own; an error names the last checkpoint.

        `resume_from_checkpoint` may also be `"true"` or `"auto"`, see [`resume_path`]. `ValueError` when another run has this
        `output_dir`, `RuntimeError` for a second call under DeepSpeed and for one after `evaluate` there, [`NothingTrained`] when there was
        no update.
        """
        if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
            raise RuntimeError(
                "Under DeepSpeed a trainer trains once, and not after evaluate(): transformers ends its engine and takes it again. "
                "Build a new trainer, and resume from a checkpoint."
            )
        with ExitStack() as stack:
            checkpoint = resume_path(resume_from_checkpoint, self.args, self._identity)
            # Until this call ends, by the first process; all refuse when another run has it.
            on_first(self.args, lambda: stack.enter_context(holding(Path(self.args.output_dir))))
            self._signals = signals = StopOnSignal(self._any_process)
            self.add_callback(signals)
            stack.callback(self.remove_callback, signals)
            # Left from an earlier call they are of other weights: it may have failed, and this one may resume.
            self._step, self._buffered_inputs = 0, None
            self._weights_change()
            try:
                with signals.listening():
                    output = super().train(checkpoint, *args, **kwargs)
            except Exception as error:
                last = _last_finished(Path(self.args.output_dir))
                error.add_note(f"The run stopped after {self.state.global_step} updates. {last}")
                raise
        if output.global_step == 0:
            raise NothingTrained(
                "The run ended without an update, so nothing was trained. The data or the batch sizes gave no full rollout batch: "
                "look at train_dataset, max_steps and num_train_epochs."
            )
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Write the low-bit checkpoint (with quantization off: what TRL writes).

        With LoRA: the adapter, and the merged low-bit checkpoint in its sub-folder `low_bit/`.

        Args:
            output_dir (`str`, *optional*): Folder; defaults to `args.output_dir`.
        """
        path = Path(output_dir or self.args.output_dir)
        if not self.args.quantized:
            super().save_model(str(path), _internal_call)
            share(path)
            return
        if self._incoming or is_peft_model(self._unwrapped):
            super().save_model(str(path), _internal_call=True)
            share(path)
            if self.args.export_low_bit or not self._incoming:
                self._save_low_bit(path / LOW_BIT_FOLDER)
        else:
            self._save_low_bit(path)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_low_bit(self, path: Path) -> None:
        weights = iter_low_bit_weights(self._unwrapped, readable_parameters(self._unwrapped, self._dist))
        if self.args.should_save:
            save_low_bit(self._unwrapped, self.processing_class, path, weights=weights, recipe=self.args.quant_recipe)
            self._describe(path)
        else:
            for _ in weights:  # take part in the gathers
                pass
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._incoming or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's, in a folder beside its place; what it would rotate and upload there is done after the rename."""
        output_dir = Path(self._get_output_dir(trial))
        incoming, name = output_dir / INCOMING, f"checkpoint-{self.state.global_step}"
        try:
            if self.args.should_save:
                shutil.rmtree(incoming, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            self._incoming = incoming
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            best = f"checkpoint-{self.state.best_global_step}"
            if self.state.best_global_step and (best == name or (output_dir / best).is_dir()):
                self.state.best_model_checkpoint = str(output_dir / best)  # also where the folder has moved since
            if self.args.should_save:
                self.state.save_to_json(str(incoming / name / TRAINER_STATE_NAME))
                commit(incoming / name, output_dir / name, processes=self.args.world_size, **self._identity)
                kept = self.state.best_model_checkpoint
                rotate(output_dir, self.args.save_total_limit, [Path(kept)] if kept else [])
                shutil.rmtree(incoming, ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.args.should_save:
                shutil.rmtree(incoming, ignore_errors=True)
            raise OSError(f"{name} could not be saved: {error}. {_last_finished(output_dir)}") from error
        finally:
            self._incoming = None
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(output_dir / name))

    def _finalize_training(self, *args: Any) -> Any:
        """The Trainer's, which with a limit of one deletes every `checkpoint-*` but the best, whoever wrote it."""
        with patch.object(self.args, "save_total_limit", None):
            return super()._finalize_training(*args)

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """The Trainer's; with `save_strategy="best"` its answer decides whether to save, which a signal asks for too."""
        return super()._determine_best_metric(*args, **kwargs) or bool(self._signals and self._signals.leaving)

    def _save_rng_state(self, output_dir: str) -> None:
        """The Trainer's, and of a rollout batch that is not used up the completions with their log-probs and advantages."""
        super()._save_rng_state(output_dir)
        used_up = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        content = {"cycle": self._cycle, "step": self._step, "sampled_at": self._step_of_rollout}
        content["batches"] = None if used_up else self._buffered_inputs
        torch.save(content, self._rollout_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Trainer's, and what is left of the rollout batch."""
        super()._load_rng_state(checkpoint)
        file = self._rollout_file(checkpoint)
        # All or none: who has the rest of a batch would not take part in the next rollout.
        if self._any_process(not file.exists()):
            logger.warning(
                "A process has no rollout file in %s: the rest of a rollout batch is sampled again.", checkpoint
            )
            return
        stored = torch.load(file, map_location=self.accelerator.device, weights_only=True)
        if stored["batches"] is not None and stored["cycle"] != self._cycle:
            raise ValueError(
                f"{checkpoint} lies within a rollout batch of another size: (steps_per_generation, num_iterations, "
                f"per_device_train_batch_size) was {stored['cycle']}, is {self._cycle}. Keep these settings."
            )
        self._step, self._buffered_inputs = stored["step"], stored["batches"]
        self._step_of_rollout = stored["sampled_at"]

    def _any_process(self, flag: bool) -> bool:
        """Whether `flag` is set on any process, asked by all of them."""
        flags = torch.tensor([flag], device=self.accelerator.device)
        return bool(self.accelerator.gather(flags).any())

    @property
    def _cycle(self) -> list[int]:
        return [self.args.steps_per_generation, self.num_iterations, self.args.per_device_train_batch_size]

    def _rollout_file(self, folder: str) -> Path:
        return Path(folder) / f"rollout_{self.args.process_index}.pt"

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """The Trainer's, with TRL's order of prompts also in an epoch that a resume enters, and nothing when all is trained."""
        if self.state.global_step >= self.state.max_steps:
            return  # the Trainer looks after the step, so a resume of a complete run would train one more
        sampler = self._sampler
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            # TRL's sampler draws one permutation an epoch from a generator that no checkpoint holds. Seeded again, with as many
            # drawn and dropped as there were epochs before, it draws that of this epoch whether the run began with it or not.
            sampler.generator.manual_seed(sampler.seed)
            for _ in range(epoch):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        super()._run_epoch(epoch=epoch, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._restores(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._restores(self.state.best_model_checkpoint):
            super()._load_best_model()
        self._weights_change()

    def _restores(self, checkpoint: str) -> bool:
        """Load a mixture or a model of several parts, which `save_pretrained` stores under other names; other models stay as they are."""
        model = self._unwrapped
        # FSDP, DeepSpeed and peft write the files by the model's own names.
        own_names = is_peft_model(model) or self.is_fsdp_enabled or self.is_deepspeed_enabled
        one_part = model.config.get_text_config() is model.config and not any(expert_modules(model))
        if own_names or one_part:
            return False
        _compat.restore_master_weights(model, checkpoint)
        return True

    def _weights_change(self) -> None:
        """Weight sync before the next rollout, and quantize before the next pass: shards do not tell that they were loaded."""
        self._last_loaded_step = -1
        for _, layer in quantized_modules(self._unwrapped):
            layer.forget()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The Trainer's, but a weight that a checkpoint lacks is an error: training would go on from another one."""
        super()._issue_warnings_after_load(load_result)
        missing = set(load_result.missing_keys) - set(self._unwrapped.all_tied_weights_keys)
        if missing:
            raise RuntimeError(f"The checkpoint lacks {len(missing)} weights of the model, first {min(missing)!r}.")


def _last_finished(output_dir: Path) -> str:
    return f"The last complete checkpoint: {next(reversed(finished(output_dir)), 'none')}."
