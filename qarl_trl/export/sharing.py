"""How a low-bit trainer writes model cards and pushes to the Hub."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, ModelCard

from ..quant.names import base_model, is_peft_model
from .card import render_card, served_rank, write_card
from .card_edits import ADDRESS, CARD, edited_card
from .card_facts import base_facts, training_facts
from .files import ADAPTER_CONFIG, BASE_FOLDER
from .low_bit import quantization_config
from .outputs import Outputs, outputs_of
from .push import base_repository, name_of_output, open_repo, push, repository_of


logger = logging.getLogger(__name__)


def check_pushed_adapter(model: Any, args: Any) -> None:
    """
    Refuse to push an adapter that is saved into a folder of its own: the repository would get another one, or none.

    Args:
        model: The policy.
        args: The config of the run. A run in low bits without a frozen base pushes its merged model.

    Raises:
        ValueError: with the name of the trained adapter.
    """
    # peft's rule.
    is_in_a_folder = is_peft_model(model) and model.active_adapter != "default"
    if is_in_a_folder and outputs_of(args, is_adapter=True, in_checkpoint=False).low_bit is None:
        name = model.active_adapter
        raise ValueError(
            f"The trained adapter must be named 'default' to be pushed, got {name!r}: peft saves it in a folder of "
            f"its own. Load it without adapter_name, or train without push_to_hub and then push that folder: "
            f"hf upload USER/NAME {Path(args.output_dir, name)}."
        )


class SharingMixin:
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that writes the model card and pushes to the Hub.

    It overrides methods of TRL's trainer and the Trainer. [`_write_cards`] writes all cards, always of the same facts.
    """

    # Lists of data sets and tags that were named for the cards. They stay in those of later saves.
    _named_facts: Mapping[str, Any] = {}

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Write the cards of the model in `output_dir`, unless a user edited them.

        Args:
            model_name: Not used: a card is named after the repository, or after the base model.
            dataset_name: Hub id of the training data.
            tags: More tags.
        """
        # While a checkpoint is written, the model in `output_dir` is from an earlier step.
        if self._incoming and self.args.quantized:
            return

        self._name_facts(dataset_name, tags)
        self._write_cards(Path(self.args.output_dir))

    def _name_facts(self, dataset_name: str | None, tags: str | list[str] | None) -> None:
        """Name the data set and the tags of the cards from now on. What is not given stays as it was named before."""
        facts = dict(self._named_facts)
        if dataset_name:
            facts["datasets"] = [dataset_name]
        if tags:
            facts["tags"] = [tags] if isinstance(tags, str) else list(tags)
        self._named_facts = facts

    def _write_cards(self, folder: Path) -> None:
        """Write the cards of what was saved into `folder`, unless a user edited them."""
        if not self.is_world_process_zero():
            return

        facts = training_facts(self) | dict(self._named_facts)
        outputs = self._outputs(in_checkpoint=self._incoming is not None)
        if outputs.low_bit is not None:
            write_card(folder / outputs.low_bit, self.hub_model_id, **facts)
        if outputs.card is not None and edited_card(folder) is None:
            card = self._card_of_high_precision(outputs.card, facts)
            (folder / CARD).write_text(card.content)

    def _outputs(self, in_checkpoint: bool) -> Outputs:
        """What a save of this run writes, into a training checkpoint or elsewhere."""
        return outputs_of(self.args, is_peft_model(self._unwrapped), in_checkpoint)

    def _card_of_high_precision(self, kind: str, facts: dict[str, Any]) -> ModelCard:
        """The card of what is no low-bit model: an adapter, or a model without quantization (`kind`)."""
        if kind == "full":
            return render_card(kind, self.hub_model_id, None, **facts)
        return self._card_of_adapter(kind, facts)

    def _card_of_adapter(self, kind: str, facts: dict[str, Any]) -> ModelCard:
        """The card of the adapter."""
        model = self._unwrapped
        config = model.peft_config[model.active_adapter]  # the reference may be another adapter
        repository: str | None = self.hub_model_id
        if kind == "frozen_adapter":
            served_base = self._frozen_base
            # The base that the run quantizes has a page of its own only beside a repository of the adapter.
            if not self.args.from_checkpoint and self.hub_model_id:
                facts = facts | {"base_id": served_base, "base": served_base}
        else:
            if kind == "merged_adapter":
                # The repository of such a run has the merged model alone, and no adapter.
                repository = None
            served_base = facts["base_id"] or f"path/to/{facts['base']}"

        return render_card(
            kind,
            repository,
            quantization_config(self._unwrapped),
            rank=config.r,
            served_rank=served_rank(config.r),
            served_base=served_base,
            **facts,
        )

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **of_card: Any,
    ) -> CommitInfo | None:
        """
        Save the model and push it to its Hub repository. Only the first process pushes.

        Args:
            commit_message: The commit's message.
            blocking: Not used: the push is complete when this returns.
            token: Defaults to that of the run.
            revision: The branch, by default that of the run. It is created if it does not exist.
            of_card: Arguments of [`create_model_card`], by name.

        Returns:
            The Hub's answer to the commit; `None` in the other processes.

        Raises:
            TypeError: for an argument that neither this method nor [`create_model_card`] has.
            ValueError: as [`check_pushed_adapter`]. The model has been saved by then.
            OSError: if the Hub cannot be reached or refuses. The model has been saved, too.
        """
        # By that method's signature, before anything is saved: an argument that nobody reads would look as if it
        # counted.
        named = inspect.signature(self.create_model_card).bind(**of_card).arguments
        token = token or self.args.hub_token
        revision = revision or self.args.hub_revision

        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self._name_facts(named.get("dataset_name"), named.get("tags"))
        # Saved before any request to the Hub, so that nothing is lost if one fails. It writes the cards.
        self.save_model(_internal_call=True)
        check_pushed_adapter(self._unwrapped, self.args)
        if not self.is_world_process_zero():
            return None

        # At its start a run with `push_to_hub` has opened its own branch, and any other run nothing.
        if not self.args.push_to_hub or revision != self.args.hub_revision:
            name = self.hub_model_id or self.args.hub_model_id or name_of_output(self.args)
            start = base_model(self._unwrapped).config
            is_adapter = is_peft_model(self._unwrapped)
            repository = repository_of(name, self.args, start, is_adapter, token, revision, self._model_output)
            if not self.hub_model_id:
                self.hub_model_id = repository
                # Only now the repository has a name, which is in the commands of the cards.
                self._write_cards(Path(self.args.output_dir))

        replaced: dict[str, bytes] = {}
        if self.args.frozen and not self.args.from_checkpoint:
            base, commit = self._push_base(commit_message, token, revision)
            # Not its branch, to which a later run may push another base.
            replaced[ADAPTER_CONFIG] = self._adapter_config(base, commit)
        elif self.args.frozen and self._facts_of_base["base_id"] is None:
            # The file on this machine names the folder.
            replaced[ADAPTER_CONFIG] = self._adapter_config(self._frozen_base, None)
            logger.warning(
                f"{self.hub_model_id} gets the adapter alone, and its base is a folder of this machine: push that too "
                f"(`qarl-trl push`), and put its repository in place of {self._frozen_base} in the adapter's "
                f"{ADAPTER_CONFIG} and card."
            )
        return push(self._model_output, self.hub_model_id, commit_message, token, revision, replaced)

    def _push_base(self, commit_message: str, token: str | None, revision: str | None) -> tuple[str, str]:
        """Push the base that the run quantized to a repository of its own; that repository's name, and the commit."""
        # vLLM and transformers load a base and its adapter by two names.
        folder = Path(self.args.output_dir, BASE_FOLDER)
        private = self.args.hub_private_repo
        repository = open_repo(self._frozen_base, token, private, revision, self._model_output)

        write_card(folder, repository, **self._facts_of_base)
        commit = push(folder, repository, commit_message, token, revision)
        return repository, commit.oid

    def _adapter_config(self, base: str, revision: str | None) -> bytes:
        """The adapter's configuration for the Hub, where it names the base's repository and its commit."""
        # The file on this machine names the base's folder, so the files here and those on the Hub are independent.
        config = json.loads(Path(self.args.output_dir, ADAPTER_CONFIG).read_text())
        config["base_model_name_or_path"] = base
        config["revision"] = revision
        return json.dumps(config, indent=2).encode()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push nothing at a checkpoint: the model is pushed at the end."""

    @property
    def _facts_of_base(self) -> dict[str, Any]:
        """Facts for the card of a frozen base, whose weights the training did not change."""
        return base_facts(base_model(self._unwrapped).config._name_or_path)

    @property
    def _frozen_base(self) -> str:
        """The name by which the frozen base can be loaded."""
        # The run pushes only what it made. A base that was there before keeps its name.
        if self.args.from_checkpoint:
            facts = self._facts_of_base
            return facts["base_id"] or f"path/to/{facts['base']}"
        if self.hub_model_id:
            return base_repository(self.hub_model_id)
        return f"{ADDRESS}/{BASE_FOLDER}"

    @property
    def _model_output(self) -> Path:
        """The folder of the model to push. A run with an adapter pushes its merged low-bit model only."""
        return Path(self.args.output_dir, self._outputs(in_checkpoint=False).low_bit or "")
