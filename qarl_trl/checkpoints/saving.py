"""The part of a low-bit trainer that saves and resumes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from torch import nn
from trl.trainer.utils import RepeatSampler

from .. import _compat
from ..export import LOW_BIT_FOLDER, save_low_bit
from ..export.card import training_facts, write_card
from ..export.files import BASE_FOLDER, name_base, share
from ..guards import on_first
from ..quant.experts import expert_modules
from ..quant.names import base_model
from ..quant.store import iter_low_bit_weights
from .folder import INCOMING, commit, rotate
from .lock import holding
from .resume import BATCH, resume_path
from .signals import StopOnSignal


class NoUpdateError(RuntimeError):
    """A run ended without an update: nothing was trained."""


class CheckpointMixin:
    """
    How a [`~qarl_trl.trainers.LowBitMixin`] saves and resumes; overrides the Trainer.

    Attributes:
        _incoming: The folder in which a checkpoint is being written, `None` at other times.
        _identity: What identifies the run, for manifests.
        _sampler: The sampler of the training set.
        _base_folders: Folders that already hold the frozen base.
        _step_of_rollout: The optimizer step at which the current rollout batch was sampled.
    """

    _incoming: Path | None = None
    _identity: dict[str, Any]
    _sampler: Any = None
    _base_folders: frozenset[Path] = frozenset()
    _step_of_rollout = -1

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        As the Trainer's, but a call uses no weight sync and no rollout of an earlier call.

        Args:
            resume_from_checkpoint: May also be `"true"` or `"auto"`, see [`resume_path`].

        Raises:
            ValueError: if another run uses this `output_dir`.
            NoUpdateError: if there was no update.
            RuntimeError: under DeepSpeed for a second call or a call after `evaluate`.
        """
        # transformers would use a DeepSpeed engine that it has destroyed
        if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
            raise RuntimeError("With DeepSpeed a trainer trains once, before any evaluate(). Resume in a new trainer.")

        with ExitStack() as stack:
            checkpoint = resume_path(resume_from_checkpoint, self.args, self._identity)
            # The first process holds the folder until this call ends. All processes refuse if another run holds it.
            on_first(self.args, lambda: stack.enter_context(holding(Path(self.args.output_dir))))

            signals = StopOnSignal(self._any_process)
            self.add_callback(signals)
            stack.callback(self.remove_callback, signals)
            stack.enter_context(signals.listening())

            self._forget_earlier_call()
            output = super().train(checkpoint, *args, **kwargs)

        if output.global_step == 0:
            raise NoUpdateError("The run ended without an update: train_dataset gave no full rollout batch.")
        return output

    def _forget_earlier_call(self) -> None:
        """Drop values that belong to other weights: an earlier call may have failed, and this one may resume."""
        if self._samples:
            self._step = 0
            self._buffered_inputs = None
            self._last_loaded_step = -1
        if self.low_bit_store is not None:
            self.low_bit_store.forget()

    # The model -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Write the low-bit checkpoint (with quantization off: what TRL writes).

        With LoRA: the adapter, and in its sub-folder `low_bit/` the merged low-bit checkpoint. With a frozen base: the
        adapter, which names the base: the run's checkpoint, or the base that the run quantized, in one `base/` folder
        for all training checkpoints.

        Args:
            output_dir: The folder, by default `args.output_dir`.
        """
        path = Path(output_dir or self.args.output_dir)
        writes_checkpoint = self._incoming is not None
        # Master weights or an adapter; the low-bit model then lies in a sub-folder.
        has_more = writes_checkpoint or is_peft_model(self._unwrapped)

        if has_more or not self.args.quantized:
            super().save_model(str(path), _internal_call=True)
            share(path)

        if self.args.frozen:
            self._save_base(path)
        elif self.args.quantized and (self.args.export_low_bit or not writes_checkpoint):
            self._save_low_bit(path / LOW_BIT_FOLDER if has_more else path)

    def _save_base(self, path: Path) -> None:
        """
        Write the name of the frozen base beside the adapter in `path`. If this run quantized the base, write that too,
        once.
        """
        revision = None
        if self.args.from_checkpoint:
            revision = (self.args.model_init_kwargs or {}).get("revision")
            name = base_model(self._unwrapped).config._name_or_path
            folder = Path(name).absolute()
            if folder.is_dir():
                name = str(folder)
        else:
            # Of all checkpoints of a run the base is the same, so it lies beside them.
            name = str(Path("..", BASE_FOLDER)) if self._incoming else BASE_FOLDER
            folder = (Path(self.args.output_dir) if self._incoming else path) / BASE_FOLDER
            if folder not in self._base_folders:
                self._save_low_bit(folder)
                self._base_folders |= {folder}

        if self.args.should_save:
            name_base(path, name, revision, folder)

    def _save_low_bit(self, path: Path) -> None:
        """Write the low-bit model and its card, as the master weights are now. Collective."""
        weights = iter_low_bit_weights(self._unwrapped, self._gather_params)
        if self.args.should_save:
            save_low_bit(self._unwrapped, self.processing_class, path, weights=weights)
            repository = self._frozen_base if self.args.frozen and self.hub_model_id else self.hub_model_id
            write_card(path, repository, **training_facts(self))
        else:
            for _ in weights:  # take part in the gathers
                pass
        self.accelerator.wait_for_everyone()

    # Training checkpoints --------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._incoming or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """
        As the Trainer's, but into a temporary folder, which is renamed at the end. Old checkpoints are rotated after
        the rename.
        """
        output_dir = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        incoming = output_dir / INCOMING

        # The rest of a rollout batch needs the same micro-batch size; between two rollout batches it may change.
        facts = dict(self._identity)
        if not self._in_rollout_batch:
            facts = {key: value for key, value in facts.items() if key not in BATCH}

        try:
            if self.args.should_save:
                shutil.rmtree(incoming, ignore_errors=True)
            self.accelerator.wait_for_everyone()

            self._incoming = incoming
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()

            if self.args.should_save:
                commit(incoming / name, output_dir / name, **facts)
                rotate(output_dir, self.args.save_total_limit)
                shutil.rmtree(incoming, ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            if self.args.should_save:
                shutil.rmtree(incoming, ignore_errors=True)
            raise OSError(f"{name} could not be saved: {error}. Earlier checkpoints are unchanged.") from error
        finally:
            self._incoming = None
        self.accelerator.wait_for_everyone()

    def _save_rng_state(self, output_dir: str) -> None:
        """
        As the Trainer's. Also saves the completions, log-probs and advantages of a rollout batch that is not used up.
        """
        super()._save_rng_state(output_dir)
        if self._samples:
            batches = self._buffered_inputs if self._in_rollout_batch else None
            torch.save((self._step, self._step_of_rollout, batches), self._rollout_file(output_dir))

    def _load_rng_state(self, checkpoint: str) -> None:
        """As the Trainer's. Also loads a rollout batch that is not used up."""
        super()._load_rng_state(checkpoint)
        if self._samples:
            file = self._rollout_file(checkpoint)
            stored = torch.load(file, map_location=self.accelerator.device, weights_only=True)
            self._step, self._step_of_rollout, self._buffered_inputs = stored

    def _any_process(self, flag: bool) -> bool:
        """Whether `flag` is set on any process. All processes must call this."""
        flags = self.accelerator.gather(torch.tensor([flag], device=self.accelerator.device))
        return bool(flags.any())

    @property
    def _samples(self) -> bool:
        """Whether the trainer samples rollout batches, and uses each for several updates."""
        return hasattr(self, "_buffered_inputs")

    @property
    def _in_rollout_batch(self) -> bool:
        """Whether the current rollout batch is not used up."""
        if not self._samples:
            return False
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0

    def _rollout_file(self, folder: str) -> Path:
        return Path(folder) / f"rollout_{self.args.process_index}.pt"

    # Resuming --------------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """As the Trainer's, but a resumed epoch keeps TRL's order of prompts, and a complete run trains nothing."""
        if self.state.global_step >= self.state.max_steps:
            return  # the Trainer checks this after a step, so a resumed complete run would train one more

        sampler = self._sampler
        if isinstance(sampler, RepeatSampler) and sampler.shuffle:
            # TRL's sampler draws one permutation per epoch from a generator that no checkpoint holds. Seed it again
            # and drop one permutation for each earlier epoch: then it draws the permutation of this epoch.
            sampler.generator.manual_seed(sampler.seed)
            for _ in range(epoch):
                torch.randperm(sampler.num_samples, generator=sampler.generator)
        super()._run_epoch(epoch=epoch, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """
        As the Trainer's, except for MoE models and models of several parts, which `save_pretrained` stores under other
        names.
        """
        module = self._unwrapped
        # FSDP, DeepSpeed and peft write the files by the model's own names.
        stored_by_own_names = is_peft_model(module) or self.is_fsdp_enabled or self.is_deepspeed_enabled
        is_one_part = module.config.get_text_config() is module.config and not any(expert_modules(module))

        if stored_by_own_names or is_one_part:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            _compat.restore_master_weights(module, resume_from_checkpoint)

        if self.low_bit_store is not None:
            self.low_bit_store.forget()

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As the Trainer's, but a missing weight is an error: training would continue from other values."""
        super()._issue_warnings_after_load(load_result)
        missing = set(load_result.missing_keys) - set(self._unwrapped.all_tied_weights_keys)
        if missing:
            raise RuntimeError(f"The checkpoint lacks {len(missing)} weights of the model, first {min(missing)!r}.")
