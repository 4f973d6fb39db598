"""How a low-bit trainer saves its model: what `save_model` writes, into any folder or into a training checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer import TRAINER_STATE_NAME

from .._compat.sharding import writes_whole_models
from ..export import save_low_bit
from ..export.adapter_base import forget_base, name_base
from ..export.card import write_card
from ..export.card_edits import CARD, edited_card
from ..export.files import BASE_FOLDER, apply_umask
from ..export.low_bit import check_adapter_target, holds_low_bit
from ..export.outputs import Outputs
from ..guards import all_or_none
from ..quant.names import base_model, is_peft_model
from ..quant.store import iter_low_bit_weights
from ..quant.weight_stream import WeightStream
from .folder import MANIFEST, read_manifest


class ModelMixin:
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that saves the model. It overrides a method of the Trainer.

    Attributes:
        _incoming: The folder in which a checkpoint is being written; `None` at other times.
        _base_folders: Folders into which this trainer has written the frozen base.
        _resumed: Whether the last call of `train` resumed from a checkpoint.
    """

    _incoming: Path | None = None
    _base_folders: frozenset[Path] = frozenset()
    _resumed = False

    # What it needs of the parts beside it. Of `LowBitMixin`:
    _unwrapped: Any
    _gather_params: Callable[[Any], AbstractContextManager[Any]]
    # Of `SharingMixin`:
    _outputs: Callable[..., Outputs]
    _write_cards: Callable[[Path], None]
    _facts_of_base: dict[str, Any]
    _frozen_base: str

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Write the low-bit checkpoint. With quantization off, this writes what TRL writes.

        With LoRA, the folder gets the adapter, and its sub-folder `low_bit/` the merged low-bit checkpoint. With a
        frozen base, it gets the adapter and a reference to the base. If this run quantized the base, all checkpoints
        share one `base/`.

        With `push_to_hub` a script's call also pushes, as the Trainer's does: the model in `args.output_dir`.

        Collective, also under DDP: every process calls it, and the first one writes.

        Args:
            output_dir: The folder, by default `args.output_dir`.
            _internal_call: Whether the Trainer or this package calls, and not a script.

        Raises:
            ValueError: if the folder is a training checkpoint, to which other weights do not belong, or if an adapter
                would lie beside a model.
        """
        path = Path(output_dir or self.args.output_dir)
        if self._incoming is None and _is_checkpoint(path):
            raise ValueError(
                f"{path} is a training checkpoint: its optimizer would not belong to the weights that are saved now. "
                "Use another folder."
            )
        # `output_dir` was checked at the start, and a script may have written its own files there.
        is_other_folder = self._incoming is None and path.resolve() != Path(self.args.output_dir).resolve()
        if is_other_folder and self.args.quantized and is_peft_model(self._unwrapped):
            check_adapter_target(path)
        outputs = self._outputs(in_checkpoint=self._incoming is not None)
        users_card = edited_card(path)

        try:
            if outputs.high_precision:
                super().save_model(str(path), _internal_call=True)
                self._save_if_sharded(path)
        finally:
            # peft changes a card that is there, and adds the base's local path to it. Weights come after it, and may
            # find the disk full.
            if users_card is not None and self.args.should_save:
                (path / CARD).write_bytes(users_card)

        if outputs.high_precision:
            apply_umask(path)
            if is_peft_model(self._unwrapped) and not outputs.frozen_base and self.args.should_save:
                # An earlier run may have had its adapter here.
                forget_base(path)
        if outputs.frozen_base:
            self._save_base(path)
        if outputs.low_bit is not None:
            self._save_low_bit(path / outputs.low_bit)
        self._write_cards(path)

        # The Trainer's own callers say so, and push what they want to.
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save_if_sharded(self, path: Path) -> None:
        """
        Write what the Trainer leaves out under FSDP with sharded checkpoints, which are accelerate's default: an
        adapter, and outside of a checkpoint a model without quantization. Collective.
        """
        if not self.is_fsdp_enabled or writes_whole_models(self.accelerator):
            return
        # A checkpoint of all weights has them in shards, from which alone a run resumes.
        if self._incoming is not None and not is_peft_model(self._unwrapped):
            return

        state_dict = self.accelerator.get_state_dict(self.model)
        if self.args.should_save:
            self._save(str(path), state_dict=state_dict)

    def _save_base(self, path: Path) -> None:
        """Write a reference to the frozen base beside the adapter in `path`, and the base if this run quantized it."""
        if self.args.from_checkpoint:
            self._name_base_checkpoint(path)
        else:
            self._save_quantized_base(path)

    def _name_base_checkpoint(self, path: Path) -> None:
        """Write a reference to the checkpoint that is the frozen base."""
        config = base_model(self._unwrapped).config
        # The commit first: a branch moves on, and its newest would be taken for the base.
        revision = getattr(config, "_commit_hash", None) or (self.args.model_init_kwargs or {}).get("revision")
        name = config._name_or_path
        folder = Path(name).absolute()
        # A relative path would not be found from the adapter's folder.
        if folder.is_dir():
            name = str(folder)

        if self.args.should_save:
            name_base(path, name, revision, folder, self._low_bit_cache)

    def _save_quantized_base(self, path: Path) -> None:
        """Write the frozen base that this run quantized, but only once, and a reference to it. Collective."""
        # A training checkpoint lies in `output_dir`. The base never changes, so all of them share the one beside them.
        if self._incoming:
            folder = Path(self.args.output_dir, BASE_FOLDER)
            name = str(Path("..", BASE_FOLDER))
        else:
            folder = path / BASE_FOLDER
            name = BASE_FOLDER

        # A script may have deleted or moved what it saved, as one does that keeps the best model alone.
        is_gone = self.args.should_save and not (folder / "config.json").exists()
        if self._any_process(folder not in self._base_folders or is_gone):
            # A kill while it is written again would leave the earlier checkpoints without their base.
            if not (self._resumed and self._has_base(folder)):
                self._save_low_bit(folder)
            self._base_folders |= {folder}

        if self.args.should_save:
            name_base(path, name, None, folder, self._low_bit_cache)

    @property
    def _low_bit_cache(self) -> str | None:
        """The FP8 cache of the engine; `None` without one."""
        return self.args.kv_cache_dtype if self.args.has_low_bit_cache else None

    def _has_base(self, folder: Path) -> bool:
        """Whether `folder` holds the frozen base as this run quantized it. Collective."""
        is_missing = False
        with self._weights_for_a_file("comparison with the frozen base") as weights:
            if self.args.should_save:
                is_missing = not holds_low_bit(self._unwrapped, folder, weights)
        return not self._any_process(is_missing)

    def _save_low_bit(self, path: Path) -> None:
        """Write the low-bit model and its card, from the master weights as they are now. Collective."""
        with self._weights_for_a_file("save of the low-bit model") as weights:
            if self.args.should_save:
                save_low_bit(self._unwrapped, self.processing_class, path, weights=weights)
                # A frozen base has a repository of its own, beside the adapter's.
                if self.args.frozen:
                    repository = self._frozen_base if self.hub_model_id else None
                    write_card(path, repository, **self._facts_of_base)

    @contextmanager
    def _weights_for_a_file(self, what: str) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """
        The low-bit weights, of which some processes read all, and others none. Collective.

        The gathers of sharded weights need all processes to the end, also if one of them fails; then all stop.

        Args:
            what: What the block does, for the error in the other processes.
        """
        weights = WeightStream(iter_low_bit_weights(self._unwrapped, self._gather_params))
        with all_or_none(what, self.accelerator), weights.read_to_the_end():
            yield iter(weights)

    def _any_process(self, flag: bool) -> bool:
        """Whether `flag` is set on any process. All processes must call this."""
        flags = self.accelerator.gather(torch.tensor([flag], device=self.accelerator.device))
        return bool(flags.any())


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a training checkpoint, complete or not."""
    # Others also call a file so, and a run has its log at the top of its output folder.
    if not ((folder / MANIFEST).exists() and (folder / TRAINER_STATE_NAME).exists()):
        return False
    try:
        return "files" in read_manifest(folder)
    except (ValueError, TypeError):
        # Cut off.
        return True
