"""How a low-bit trainer writes model cards and pushes to the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo

from ..quant.names import base_model
from .card import ADDRESS, CARD, base_facts, training_facts, write_card
from .files import ADAPTER_CONFIG, BASE_FOLDER, LOW_BIT_FOLDER
from .push import open_repo, push, repository_of


# How to load an adapter with its frozen base.
ADAPTER_CARD = Path(__file__).with_name("adapter.md")


class SharingMixin:
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that writes the model card and pushes to the Hub.

    It overrides methods of TRL's trainer and the Trainer. With quantization off, the card is TRL's.
    """

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Write the low-bit model's card; with a frozen base TRL's card of the adapter, and how to load both.

        Args:
            model_name: For TRL's card. A low-bit model's card is named after its repository or folder.
            dataset_name: Hub id of the training data.
            tags: More tags.
        """
        if not self.args.quantized or self.args.frozen:
            super().create_model_card(model_name, dataset_name, tags)
            if self.args.frozen and self.is_world_process_zero():
                self._describe_adapter()
            return

        # While a checkpoint is written, the model in `output_dir` is from an earlier step.
        if self._incoming or not self.is_world_process_zero():
            return

        datasets = [dataset_name] if dataset_name else None
        if isinstance(tags, str):
            tags = [tags]
        write_card(self._model_output, self.hub_model_id, **training_facts(self), datasets=datasets, tags=tags)

    def _describe_adapter(self) -> None:
        """Add to the card of an adapter how to load it with its frozen base."""
        (config,) = self._unwrapped.peft_config.values()
        text = ADAPTER_CARD.read_text().format(
            adapter=self.hub_model_id or ADDRESS,
            base=self._frozen_base,
            rank=_served_rank(config.r),
        )
        with Path(self.args.output_dir, CARD).open("a") as card:
            card.write(text)

    def push_to_hub(self, commit_message: str = "End of training", **kwargs: Any) -> CommitInfo | None:
        """
        Save the model and push it to its Hub repository. Only the first process pushes.

        Args:
            commit_message: The commit's message.
            kwargs: Arguments of `create_model_card`.

        Returns:
            The Hub's answer to the commit; `None` in the other processes.

        Raises:
            OSError: if the Hub cannot be reached or refuses. The model has been saved by then.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        # Saved before any request to the Hub, so that nothing is lost if one fails.
        self.save_model()
        if not self.is_world_process_zero():
            return None

        if not self.hub_model_id:
            self.hub_model_id = repository_of(self.args)
        # Written again, because the card of `save_model` lacks `kwargs`, and the name of a new repository.
        self.create_model_card(**{"model_name": self.hub_model_id} | kwargs)

        replaced: dict[str, bytes] = {}
        if self.args.frozen and not self.args.from_checkpoint:
            base = self._push_base(commit_message)
            replaced[ADAPTER_CONFIG] = self._adapter_config(base)
        return self._push(self._model_output, self.hub_model_id, commit_message, replaced)

    def _push_base(self, commit_message: str) -> str:
        """Push the base that the run quantized to a repository of its own, and return that repository's name."""
        # vLLM and transformers load a base and its adapter by two names.
        args = self.args
        folder = Path(args.output_dir, BASE_FOLDER)
        repository = open_repo(self._frozen_base, args.hub_token, args.hub_private_repo, args.hub_revision)

        write_card(folder, repository, **training_facts(self))
        self._push(folder, repository, commit_message, {})
        return repository

    def _adapter_config(self, base: str) -> bytes:
        """The adapter's configuration for the Hub, where it names the base's repository."""
        # The file on this machine names the base's folder, so the files here and those on the Hub are independent.
        config = json.loads(Path(self.args.output_dir, ADAPTER_CONFIG).read_text())
        config["base_model_name_or_path"] = base
        config["revision"] = self.args.hub_revision
        return json.dumps(config, indent=2).encode()

    def _push(self, folder: Path, repository: str, message: str, replaced: dict[str, bytes]) -> CommitInfo:
        """[`push`] with the token and the branch of the run."""
        return push(folder, repository, message, self.args.hub_token, self.args.hub_revision, **replaced)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push nothing at a checkpoint: the model is pushed at the end."""

    @property
    def _frozen_base(self) -> str:
        """The name by which the frozen base can be loaded."""
        # The run pushes only what it made. A base that was there before keeps its name.
        if self.args.from_checkpoint:
            return base_facts(base_model(self._unwrapped).config._name_or_path)["base"]
        if self.hub_model_id:
            return f"{self.hub_model_id}-base"
        return f"{ADDRESS}/{BASE_FOLDER}"

    @property
    def _model_output(self) -> Path:
        """The folder of the model to push. A run with an adapter pushes its merged low-bit model only."""
        beside_adapter = self.args.quantized and not self.args.frozen and is_peft_model(self._unwrapped)
        return Path(self.args.output_dir, LOW_BIT_FOLDER if beside_adapter else "")


def _served_rank(rank: int) -> int:
    """
    A value of `vllm serve --max-lora-rank` that is at least `rank`: the next power of two, from 8 on.

    For an engine of our own, `engine_rank` in `rollout/_vllm_lora.py` asks vLLM which ranks it takes. A card is also
    written where vLLM is not installed, so this uses those that all versions take: powers of two from 8 to 512.
    """
    next_power_of_two = 1 << (rank - 1).bit_length()
    return max(8, next_power_of_two)
