"""The model card of a low-bit folder. It describes the files and the training run, without paths, hosts, tokens or user names."""

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
# A card without this line is not overwritten: a user edited it.
GENERATED = "<!-- Written by qarl_trl, which writes it again at each save. Delete this line to keep your edits. -->"
ADDRESS = "path/to/model"  # in a card's commands, until `qarl-trl push` writes the Hub id there
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def base_facts(name: str) -> dict[str, Any]:
    """Facts about the base model for a card: its Hub id (`None` for a local folder) and its name (the last part of a local path)."""
    known = name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None
    return {"base_id": known, "base": known or Path(name).name or "a local model"}


def training_facts(trainer: Any) -> dict[str, Any]:
    """Facts about the training run so far, for a card."""
    args, packages = trainer.args, ("qarl_trl", "trl", "transformers", "torch")
    facts = base_facts(base_model(trainer._unwrapped).config._name_or_path)
    if args.frozen:  # training did not change these weights
        return facts
    return facts | {
        "rewards": trainer.reward_func_names,
        "objective": "TBPO (trust-band policy optimization)" if args.loss_type == "tbpo" else args.loss_type,
        "aligned": args.quantize_learner,
        "steps": trainer.state.global_step,
        "code": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
    }


def write_card(folder: Path, repo: str | None = None, **facts: Any) -> None:
    """Write `README.md` into a low-bit folder, unless a user edited it. The arguments are those of [`model_card`]."""
    card = folder / CARD
    if not card.exists() or GENERATED in card.read_text():
        card.write_text(model_card(folder, repo, **facts).content)


def model_card(folder: Path, repo: str | None = None, **facts: Any) -> ModelCard:
    """
    The card of a low-bit folder, with commands that load it from `repo`. `ValueError` if the folder holds no low-bit model.

    `facts` come from [`base_facts`] or [`training_facts`], and may include the lists `datasets` and `tags`.
    """
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    if "config_groups" not in (quantized := config.get("quantization_config") or {}):
        raise ValueError(f"{folder} holds no low-bit model: its config.json must have a quantization_config.")
    schemes = [QuantizationScheme.model_validate(group) for group in quantized["config_groups"].values()]
    names = [scheme_name(scheme) for scheme in schemes]
    values: dict[str, Any] = {
        "name": repo.split("/")[-1] if repo else folder.resolve().name,
        "target": repo or ADDRESS,
        "schemes": {name: describe_scheme(scheme) for name, scheme in zip(names, schemes, strict=True)},
        "ignored": quantized.get("ignore") or [],
        "int4": any(s.weights.num_bits == 4 and s.input_activations is None for s in schemes),
        "chat": (folder / "chat_template.jinja").is_file(),
        "experts": any(".experts." in name and name.endswith(".weight_scale") for name in tensor_shapes(folder)),
        "generated": GENERATED,
    }
    return ModelCard.from_template(ModelCardData(), str(Path(__file__).with_name("card.md")), **facts, **values)


def scheme_name(scheme: QuantizationScheme) -> str:
    """The scheme's name in our table, or else a name from its bits, such as `W4A16`."""
    try:
        return support_of(scheme).name
    except ValueError:  # another method made it: GPTQ with its own order, or a static activation scale
        return f"W{scheme.weights.num_bits}A{scheme.input_activations.num_bits if scheme.input_activations else 16}"
