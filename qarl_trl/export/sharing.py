"""The half of [`~qarl_trl.QaRLTrainer`] that writes model cards and pushes to the Hub."""

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


class SharingMixin:
    """The model card and the push of [`QaRLTrainer`], which override `GRPOTrainer`. With quantization off the card is TRL's."""

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the low-bit model's card, without `model_name`. With a frozen base write TRL's card, and how to load base and adapter."""
        if not self.args.quantized or self.args.frozen:
            super().create_model_card(model_name, dataset_name, tags)
            if self.args.frozen and self.is_world_process_zero():
                (config,) = self._unwrapped.peft_config.values()
                rank = max(8, 1 << (config.r - 1).bit_length())  # vLLM takes 1, powers of two from 8 to 512, and 320
                names = {"adapter": self.hub_model_id or ADDRESS, "base": self._frozen_base, "rank": rank}
                text = Path(__file__).with_name("adapter.md").read_text()
                with Path(self.args.output_dir, CARD).open("a") as card:
                    card.write(text.format(**names))
        # While a checkpoint is written, the model in `output_dir` is from an earlier step.
        elif self.is_world_process_zero() and not self._incoming:
            data, tags = dataset_name and [dataset_name], [tags] if isinstance(tags, str) else tags
            write_card(self._model_output, self.hub_model_id, **training_facts(self), datasets=data, tags=tags)

    def push_to_hub(self, commit_message: str = "End of training", **kwargs: Any) -> CommitInfo | None:
        """Save the model and push it to its Hub repository. `kwargs` go to `create_model_card`."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model()  # before any request to the Hub
        if not self.is_world_process_zero():
            return None
        self.hub_model_id = self.hub_model_id or repository_of(self.args)
        self.create_model_card(**{"model_name": self.hub_model_id} | kwargs)
        args, replaced = self.args, dict[str, bytes]()
        if args.frozen and not args.from_checkpoint:
            folder = Path(args.output_dir, BASE_FOLDER)
            base = open_repo(self._frozen_base, args.hub_token, args.hub_private_repo, args.hub_revision)
            write_card(folder, base, **training_facts(self))
            push(folder, base, commit_message, args.hub_token, args.hub_revision)
            config = json.loads(Path(args.output_dir, ADAPTER_CONFIG).read_text())
            config |= {"base_model_name_or_path": base, "revision": args.hub_revision}
            replaced[ADAPTER_CONFIG] = json.dumps(config, indent=2).encode()
        return push(
            self._model_output, self.hub_model_id, commit_message, args.hub_token, args.hub_revision, **replaced
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push nothing at a checkpoint: the model is pushed at the end."""

    @property
    def _frozen_base(self) -> str:
        """The name that loads the frozen base: the run's checkpoint, or the repository or folder of the base that the run quantized."""
        if self.args.from_checkpoint:
            return base_facts(base_model(self._unwrapped).config._name_or_path)["base"]
        return f"{self.hub_model_id}-base" if self.hub_model_id else f"{ADDRESS}/{BASE_FOLDER}"

    @property
    def _model_output(self) -> Path:
        beside = self.args.quantized and not self.args.frozen and is_peft_model(self._unwrapped)
        return Path(self.args.output_dir, LOW_BIT_FOLDER if beside else "")
