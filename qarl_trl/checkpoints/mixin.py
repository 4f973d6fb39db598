"""The half of [`~qarl_trl.QaRLTrainer`] that saves and resumes."""

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
from ..quant.model import quantized_modules
from ..quant.names import base_model
from ..quant.state_dict import iter_low_bit_weights, readable_parameters
from .folder import INCOMING, commit, rotate
from .lock import holding
from .resume import BATCH, resume_path
from .signals import StopOnSignal


class NoUpdateError(RuntimeError):
    """A run ended without an update: nothing was trained."""


class CheckpointMixin:
    """What [`QaRLTrainer`] saves and resumes, over `GRPOTrainer`."""

    _incoming: Path | None = None  # while a checkpoint is written
    _identity: dict[str, Any]  # what the run is of, for manifests
    _sampler: Any = None
    _base_folders: frozenset[Path] = frozenset()  # with the frozen base

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        The Trainer's, from a weight sync and a rollout of its own.

        `resume_from_checkpoint` may also be `"true"` or `"auto"`, see [`resume_path`]. `ValueError` when another run has this
        `output_dir`, [`NoUpdateError`] when there was no update, `RuntimeError` for a second call under DeepSpeed and for one after `evaluate` there.
        """
        # transformers ends DeepSpeed's engine and takes it again
        if self.is_deepspeed_enabled and self.model_wrapped is not self.model:
            raise RuntimeError("With DeepSpeed a trainer trains once, before any evaluate(). Resume in a new trainer.")
        with ExitStack() as stack:
            checkpoint = resume_path(resume_from_checkpoint, self.args, self._identity)
            # Until this call ends, by the first process; all refuse when another run has it.
            on_first(self.args, lambda: stack.enter_context(holding(Path(self.args.output_dir))))
            signals = StopOnSignal(self._any_process)
            self.add_callback(signals)
            stack.callback(self.remove_callback, signals)
            stack.enter_context(signals.listening())
            # Left from an earlier call they are of other weights: it may have failed, and this one may resume.
            self._step, self._buffered_inputs, self._last_loaded_step = 0, None, -1
            for _, layer in quantized_modules(self._unwrapped):
                layer.low_bit_cache.clear()  # shards do not tell that they were loaded
            output = super().train(checkpoint, *args, **kwargs)
        if output.global_step == 0:
            raise NoUpdateError("The run ended without an update: train_dataset gave no full rollout batch.")
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Write the low-bit checkpoint (with quantization off: what TRL writes) into `output_dir`, by default `args.output_dir`.

        With LoRA: the adapter, and in its sub-folder `low_bit/` the merged low-bit checkpoint. An adapter beside a frozen base names
        that: the checkpoint it started from, or what the run quantized, which is in `base/`, for all training checkpoints in one.
        """
        path, args = Path(output_dir or self.args.output_dir), self.args
        beside = self._incoming is not None or is_peft_model(self._unwrapped)  # of master weights, an adapter
        if beside or not args.quantized:
            super().save_model(str(path), _internal_call=True)
            share(path)
        if args.frozen:
            self._save_base(path)
        elif args.quantized and (args.export_low_bit or not self._incoming):
            self._save_low_bit(path / LOW_BIT_FOLDER if beside else path)

    def _save_base(self, path: Path) -> None:
        """Let the adapter in `path` name its frozen base; write one that this run quantized, once."""
        revision = (self.args.model_init_kwargs or {}).get("revision") if self.args.from_checkpoint else None
        if self.args.from_checkpoint:
            name = base_model(self._unwrapped).config._name_or_path
            folder = Path(name).absolute()
            name = str(folder) if folder.is_dir() else name
        else:
            name = str(Path(".." if self._incoming else "", BASE_FOLDER))
            folder = (Path(self.args.output_dir) if self._incoming else path) / BASE_FOLDER
            if folder not in self._base_folders:
                self._save_low_bit(folder)
                self._base_folders |= {folder}
        if self.args.should_save:
            name_base(path, name, revision, folder)

    def _save_low_bit(self, path: Path) -> None:
        weights = iter_low_bit_weights(self._unwrapped, readable_parameters(self._unwrapped, self._dist))
        if self.args.should_save:
            save_low_bit(self._unwrapped, self.processing_class, path, weights=weights)
            repository = self._frozen_base if self.args.frozen and self.hub_model_id else self.hub_model_id
            write_card(path, repository, **training_facts(self))
        else:
            for _ in weights:  # take part in the gathers
                pass
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._incoming or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's, in a folder beside its place; what it would rotate there is rotated after the rename."""
        output_dir, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        incoming = output_dir / INCOMING
        # The rest of a rollout batch is of micro-batches of one size.
        facts = {key: value for key, value in self._identity.items() if self._in_rollout_batch or key not in BATCH}
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
        """The Trainer's, and of a rollout batch that is not used up the completions with their log-probs and advantages."""
        super()._save_rng_state(output_dir)
        batches = self._buffered_inputs if self._in_rollout_batch else None
        torch.save((self._step, self._step_of_rollout, batches), self._rollout_file(output_dir))

    def _load_rng_state(self, checkpoint: str) -> None:
        """The Trainer's, and what is left of the rollout batch."""
        super()._load_rng_state(checkpoint)
        stored = torch.load(self._rollout_file(checkpoint), map_location=self.accelerator.device, weights_only=True)
        self._step, self._step_of_rollout, self._buffered_inputs = stored

    def _any_process(self, flag: bool) -> bool:
        """Whether `flag` is set on any process, asked by all of them."""
        return bool(self.accelerator.gather(torch.tensor([flag], device=self.accelerator.device)).any())

    @property
    def _in_rollout_batch(self) -> bool:
        """Whether a rollout batch is not used up."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0

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
        """The Trainer's, but for a mixture or a model of several parts, which `save_pretrained` stores under other names."""
        module = self._unwrapped
        # FSDP, DeepSpeed and peft write the files by the model's own names.
        own_names = is_peft_model(module) or self.is_fsdp_enabled or self.is_deepspeed_enabled
        one_part = module.config.get_text_config() is module.config and not any(expert_modules(module))
        if own_names or one_part:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            _compat.restore_master_weights(module, resume_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """The Trainer's, but a weight that a checkpoint lacks is an error: training would go on from another one."""
        super()._issue_warnings_after_load(load_result)
        missing = set(load_result.missing_keys) - set(self._unwrapped.all_tied_weights_keys)
        if missing:
            raise RuntimeError(f"The checkpoint lacks {len(missing)} weights of the model, first {min(missing)!r}.")
