"""The half of [`~qarl_trl.QaRLTrainer`] that writes model cards and pushes to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model

from .card import training_facts, write_card
from .low_bit import LOW_BIT_FOLDER
from .push import Repository, repository_of


class SharingMixin:
    """The card and the pushes of [`QaRLTrainer`], over `GRPOTrainer`. With quantization off they are TRL's."""

    _repository: Repository  # of the main process
    _named_in_card: dict[str, list[str]] = {}  # by the user: datasets, tags

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """The card of the low-bit model in `output_dir`, if there is one. `model_name` is not used: it is the repository's."""
        if not self.args.quantized:
            super().create_model_card(model_name, dataset_name, tags)
            return
        named = {"datasets": dataset_name, "tags": tags}
        named = {key: [value] if isinstance(value, str) else list(value) for key, value in named.items() if value}
        self._named_in_card = self._named_in_card | named
        # While a checkpoint is written, what is in `output_dir` is of an earlier step.
        if self.is_world_process_zero() and not self._incoming and (self._low_bit_output / "config.json").exists():
            write_card(self._low_bit_output, self.hub_model_id, **self._named_in_card)

    def init_hf_repo(self, token: str | None = None) -> None:
        """The Trainer's, with the branch of `hub_revision`."""
        if self.is_world_process_zero():
            self._repository = repository_of(self.args, token)
            self.hub_model_id, self.push_in_progress = self._repository.name, None

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Save the low-bit model and make it the content of the Hub repository; called as [`~transformers.Trainer.push_to_hub`].

        `HubError` says what failed and what to do. The model is saved then.
        """
        if not self.args.quantized:
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # before the Hub is asked anything
        if self.hub_model_id is None or token is not None:
            self.init_hf_repo(token)
        self.create_model_card(**kwargs)
        if not self.is_world_process_zero():
            return None
        return self._repository.push(self._low_bit_output, commit_message, revision, blocking)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Of a quantized run nothing: its model is pushed at the end."""
        if not self.args.quantized and not self._incoming:  # in its place
            super()._push_from_checkpoint(checkpoint_folder)

    def _describe(self, folder: Path) -> None:
        """Write the card of the low-bit model that was just saved in `folder`."""
        write_card(folder, self.hub_model_id, **training_facts(self) | self._named_in_card)

    @property
    def _low_bit_output(self) -> Path:
        output_dir = Path(self.args.output_dir)
        return output_dir / LOW_BIT_FOLDER if is_peft_model(self._unwrapped) else output_dir
