"""The half of [`~qarl_trl.QaRLTrainer`] that writes model cards and pushes to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo

from .card import training_facts, write_card
from .low_bit import LOW_BIT_FOLDER
from .push import push, repository_of


class SharingMixin:
    """The card and the pushes of [`QaRLTrainer`], over `GRPOTrainer`. With quantization off the card is TRL's."""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """The card of the low-bit model in `output_dir`. `model_name` is not used: it is the repository's."""
        if not self.args.quantized:
            super().create_model_card(model_name, dataset_name, tags)
        # While a checkpoint is written, what is in `output_dir` is of an earlier step.
        elif self.is_world_process_zero() and not self._incoming:
            data, tags = dataset_name and [dataset_name], [tags] if isinstance(tags, str) else tags
            write_card(self._model_output, self.hub_model_id, **training_facts(self), datasets=data, tags=tags)

    def push_to_hub(self, commit_message: str = "End of training", **kwargs: Any) -> CommitInfo | None:
        """Save the model and make it the content of the Hub repository; `kwargs` are those of `create_model_card`."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model()  # before the Hub is asked anything
        if not self.is_world_process_zero():
            return None
        self.hub_model_id = self.hub_model_id or repository_of(self.args)
        self.create_model_card(**{"model_name": self.hub_model_id} | kwargs)
        args = self.args
        return push(self._model_output, self.hub_model_id, commit_message, args.hub_token, args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: the model is pushed at the end."""

    @property
    def _model_output(self) -> Path:
        beside = self.args.quantized and is_peft_model(self._unwrapped)
        return Path(self.args.output_dir, LOW_BIT_FOLDER if beside else "")
