"""The model card: rendered from the files of a low-bit folder alone, so that it can be written again for another address.

`training.yaml` in that folder holds what a run says of itself, without paths, hosts, tokens or names of users.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from compressed_tensors.quantization import QuantizationScheme
from huggingface_hub import ModelCard, ModelCardData

from .. import __version__
from ..quant.names import base_model
from ..quant.scheme import describe_scheme, support_of
from .files import tensor_names


if TYPE_CHECKING:
    from trl import GRPOTrainer


CARD, FACTS = "README.md", "training.yaml"
# A card without this line was edited: it stays as it is.
GENERATED = "<!-- Written by qarl_trl, which writes it again at each save. Delete this line to keep your edits. -->"
PAPER = {
    "title": "QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under Training-Inference "
    "Mismatch",
    "id": "2604.07853",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @inproceedings{gu2026qarl,
            title        = {{QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under Training-Inference Mismatch}},
            author       = {Hao Gu and Hao Wang and Jiacheng Liu and Lujun Li and Qiyuan Zhu and Bei Liu and Binxing Xu and Lei Wang and Xintong Yang and Sida Lin and Sirui Han and Yike Guo},
            year         = 2026,
            booktitle    = {Findings of the Association for Computational Linguistics: ACL 2026},
            eprint       = {arXiv:2604.07853},
        }"""),
}
# Settings that a card shows: none of them can be a path, an address or a token.
SETTINGS = (
    *("learning_rate", "optim_muon", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("steps_per_generation", "num_iterations", "max_completion_length", "temperature", "beta", "advantage_filter"),
    *("quant_scheme", "quant_group_size", "quantize_learner", "learner_ops"),
    *("tbpo_epsilon_high", "tbpo_delta_low", "tbpo_delta_high", "tbpo_mismatch_cap"),
)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def base_facts(name: str) -> dict[str, Any]:
    """What a card says of the model that a low-bit one was made from: its Hub id, or of a local folder the last name alone."""
    known = name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None
    return {"base_id": known, "base": known or Path(name).name or "a local model"}


def training_facts(trainer: GRPOTrainer) -> dict[str, Any]:
    """What a card says of a training run so far, as plain YAML types."""
    args = trainer.args
    return base_facts(base_model(trainer._unwrapped).config._name_or_path) | {
        "rewards": list(trainer.reward_func_names),
        "objective": "TBPO (trust-band policy optimization)" if args.loss_type == "tbpo" else args.loss_type,
        "aligned": args.quantize_learner,
        "steps": trainer.state.global_step,
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "code": f"qarl_trl {__version__}, "
        + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "transformers", "torch")),
    }


def write_card(folder: Path, repo: str | None = None, **facts: Any) -> None:
    """Write `README.md`, unless it was edited, into a low-bit folder; `facts` replace those of `training.yaml` there."""
    facts = _stored(folder) | facts
    (folder / FACTS).write_text(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True))
    card = folder / CARD
    if not card.exists() or GENERATED in card.read_text():
        card.write_text(model_card(folder, repo).content)


def model_card(folder: Path, repo: str | None = None) -> ModelCard:
    """
    The card of a low-bit folder, with its `training.yaml`; `ValueError` when it holds no low-bit model.

    `repo` is where it will be loaded from. Unset: commands are for a shell in the folder.
    """
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    if "config_groups" not in (quantized := config.get("quantization_config") or {}):
        raise ValueError(f"{folder} holds no low-bit model: its config.json must have a quantization_config.")
    facts = {"base": "a local model"} | _stored(folder)
    schemes = [QuantizationScheme.model_validate(group) for group in quantized["config_groups"].values()]
    names = [_name(scheme) for scheme in schemes]
    base_id, trained = facts.get("base_id"), bool(facts.get("steps"))
    data = ModelCardData(
        base_model=base_id,
        base_model_relation=base_id and "quantized",
        datasets=facts.get("datasets"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["compressed-tensors", "vllm", *(name.lower() for name in names)]
        + ["qarl", "trl", "grpo"] * trained
        + facts.get("tags", []),
    )
    values = {
        "name": repo.split("/")[-1] if repo else folder.resolve().name,
        "target": repo or ".",
        "schemes": {name: describe_scheme(scheme) for name, scheme in zip(names, schemes, strict=True)},
        "ignored": quantized.get("ignore") or [],
        "int4": any(s.weights.num_bits == 4 and s.input_activations is None for s in schemes),
        "chat": (folder / "chat_template.jinja").is_file(),
        "experts": any(".experts." in name and name.endswith(".weight_scale") for name in tensor_names(folder)),
        "settings": yaml.safe_dump(facts.pop("settings", {}), sort_keys=False).strip(),
        "paper": PAPER["citation"],
        "generated": GENERATED,
    }
    return ModelCard.from_template(data, template_path=Path(__file__).with_name("card.md"), **facts, **values)


def _stored(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / FACTS).read_text()) if (folder / FACTS).is_file() else {}


def _name(scheme: QuantizationScheme) -> str:
    try:
        return support_of(scheme).name
    except ValueError:  # made by another method: GPTQ with an order of its own, a fixed scale of activations
        return f"W{scheme.weights.num_bits}A{scheme.input_activations.num_bits if scheme.input_activations else 16}"
