"""The model card: rendered from the files of a low-bit folder alone, so that it can be written again for another address.

`training.yaml` in that folder holds what a run says of itself, without paths, hosts, tokens or names of users.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from .. import __version__
from ..quant.names import base_model, is_peft_model
from ..quant.scheme import effective_group_size, support_of
from .low_bit import digest


if TYPE_CHECKING:
    from ..trainer import QaRLTrainer


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
# The settings that a card shows: numbers and names that decide the result, nothing that may hold an address.
SETTINGS = (
    *("quant_scheme", "quant_group_size", "quant_ignore", "quant_freeze_scales", "quantize_learner"),
    *("quant_kernel", "learner_ops", "max_tokens_per_pass", "loss_type", "advantage_filter", "tbpo_epsilon_high"),
    *("tbpo_delta_low", "tbpo_delta_high", "tbpo_mismatch_cap", "epsilon", "epsilon_high", "delta", "beta"),
    *("scale_rewards", "importance_sampling_level", "vllm_importance_sampling_mode", "mask_truncated_completions"),
    *("num_iterations", "num_generations", "generation_batch_size", "steps_per_generation"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length"),
    *("vllm_max_model_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "use_vllm"),
    *("bf16", "seed", "max_steps", "num_train_epochs"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "optim_muon"),
    *("adam_beta1", "adam_beta2"),
)
LOGGED = {
    "mismatch/logp_diff_mean": "mean abs(learner - engine) of the sampled tokens",
    "mismatch/kl_k3": "k3 estimate of KL(engine, learner)",
    "sync/verify_logp_diff": "sync check prompt after a weight sync: mean abs(learner - engine)",
    "sync/verify_noise_floor": "its noise floor: what one rounding per layer does to the learner",
}
_IN_CACHE = re.compile(r"models--([\w.-]+?)--([\w.-]+)[/\\]snapshots")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_OF_HUB_DATASET = re.compile(r"hf://datasets/([^/@]+/[^/@]+)@")


def hub_id(name: str) -> str | None:
    """The Hub id that a model name means, also the name of a folder in the Hub's cache; `None` for other folders."""
    if cached := _IN_CACHE.search(name):
        return "/".join(cached.groups())
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def base_facts(name: str) -> dict[str, Any]:
    """What a card says of the model that a low-bit model was made from; of a local one its last name alone."""
    known = hub_id(name)
    return {"base_id": known, "base": known or Path(name).name or "a local model"}


def dataset_id(dataset: Any) -> str | None:
    """The Hub id of a `datasets.Dataset` that was loaded from there."""
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    found = {match.group(1) for source in sources if (match := _OF_HUB_DATASET.match(source))}
    return found.pop() if len(found) == 1 else None


def training_facts(trainer: QaRLTrainer) -> dict[str, Any]:
    """What a card says of a training run so far, as plain YAML types."""
    from ..config import TBPO, changed_fields

    args, log, model = trainer.args, trainer.state.log_history, trainer._unwrapped
    dataset = dataset_id(trainer.train_dataset)
    plain = {name: getattr(value, "value", value) for name, value in changed_fields(args, SETTINGS).items()}
    band = args.trust_band
    objective = f"Objective: {args.loss_type}, as TRL computes it."
    if args.loss_type == TBPO:
        plain.pop("delta", None)  # the trainer set it from the band
        objective = (
            f"Objective: TBPO (trust-band policy optimization); sequence ratio at most 1 + {band.epsilon_high:g} for "
            f"positive advantages, within 1 - {band.delta_low:g} and 1 + {band.delta_high:g} for negative ones, mismatch "
            f"weight within 1/{args.tbpo_mismatch_cap:g} and {args.tbpo_mismatch_cap:g}."
        )
    if args.advantage_filter != "none":
        objective += " Negative advantages were set to 0."
    last = {text: next((row[name] for row in reversed(log) if name in row), None) for name, text in LOGGED.items()}
    return base_facts(base_model(model).config._name_or_path) | {
        "adapter": is_peft_model(model),
        "datasets": [dataset] if dataset else [],
        "rewards": list(trainer.reward_func_names),
        "objective": objective,
        "aligned": args.quantize_learner,
        "steps": trainer.state.global_step,
        "settings": json.loads(json.dumps(plain)),
        "mismatch": {text: f"{float(value):.2g}" for text, value in last.items() if value is not None},
        "code": f"qarl_trl {__version__}{_commit()}, "
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
    The card of a low-bit folder, with its `training.yaml` and evaluations; `ValueError` when it holds no low-bit model.

    `repo` is where it will be loaded from. Unset: commands are for a shell in the folder.
    """
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    if "config_groups" not in (quantized := config.get("quantization_config") or {}):
        raise ValueError(f"{folder} holds no low-bit model: its config.json must have a quantization_config.")
    facts = _stored(folder)
    schemes = [QuantizationScheme.model_validate(group) for group in quantized["config_groups"].values()]
    names = [_name(scheme) for scheme in schemes]
    base_id, trained = facts.get("base_id"), bool(facts.get("steps"))
    data = ModelCardData(
        base_model=base_id,
        base_model_relation=base_id and "quantized",
        datasets=facts.get("datasets") or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["compressed-tensors", "vllm", *(name.lower() for name in names)]
        + ["qarl", "trl", "grpo"] * trained
        + facts.get("tags", []),
    )
    weights = sorted(folder.glob("*.safetensors"))
    layers, experts = _low_bit_layers(weights)
    values = {
        "name": repo.split("/")[-1] if repo else folder.resolve().name,
        "target": repo or ".",
        "local": repo is None,
        "schemes": " + ".join(dict.fromkeys(names)),
        "size": f"{sum(file.stat().st_size for file in weights) / 1e9:.2g} GB",
        "int4": any(s.weights.num_bits == 4 and s.input_activations is None for s in schemes),
        "chat": _has_chat_template(folder),
        "experts": experts,
        "groups": [_in_table(scheme, layers if len(schemes) == 1 else None) for scheme in schemes],
        "ignored": _in_short(quantized.get("ignore") or []),
        "evaluations": evaluations(folder),
        "paper": PAPER["citation"],
        "generated": GENERATED,
    }
    facts = {"base": "A local model"} | facts
    facts["settings"] = yaml.safe_dump(facts.get("settings") or {}, sort_keys=False).strip()
    return ModelCard.from_template(data, template_path=Path(__file__).with_name("card.md"), **facts, **values)


def evaluations(folder: Path) -> list[str]:
    """Markdown tables of what `qarl-trl eval` wrote into sub-folders, of exactly the files that are in `folder` now."""
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*/results*.json"))]
    found = [(path, content) for path, content in found if "model_sha256" in content.get("settings", ())]
    current = digest(folder) if found else None
    tables = []
    for _, content in found:
        if content["settings"]["model_sha256"] != current:
            continue  # of an earlier state of the model
        metrics = list(content["mean"])
        rows = [["suite", "problems", *metrics], ["---"] * (2 + len(metrics))]
        for name, suite in content["suites"].items():
            scores = [suite[metric] for metric in metrics]
            texts = ["{:.1f} [{:.1f}, {:.1f}]".format(*(100 * s[k] for k in ("value", "low", "high"))) for s in scores]
            rows.append([name, str(suite["problems"]), *texts])
        sampling = {k: content["settings"].get(k) for k in ("temperature", "top_p", "max_new_tokens", "seed")}
        lines = [f"| {' | '.join(row)} |" for row in rows]
        tables.append("\n".join([*lines, "", ", ".join(f"{k} {v}" for k, v in sampling.items()) + "."]))
    return tables


def _stored(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / FACTS).read_text()) if (folder / FACTS).is_file() else {}


def _name(scheme: QuantizationScheme) -> str:
    try:
        return support_of(scheme).name
    except ValueError:  # made by another method: GPTQ with an order of its own, a fixed scale of activations
        return f"W{scheme.weights.num_bits}A{scheme.input_activations.num_bits if scheme.input_activations else 16}"


def _in_table(scheme: QuantizationScheme, layers: int | None) -> list[str]:
    weights, activations = scheme.weights, scheme.input_activations
    size = effective_group_size(scheme)
    per = f"{size} weights" if size else "output channel"
    if weights.strategy == QuantizationStrategy.BLOCK:
        per = "block of {} x {}".format(*weights.block_structure)
    zeros = "" if weights.symmetric else ", with zero points"
    kind = f"{weights.num_bits}-bit {weights.type}, a scale per {per}{zeros}"
    inputs = "bfloat16"
    if activations is not None:
        inputs = f"{activations.num_bits}-bit {activations.type}, {'dynamic' if activations.dynamic else 'static'}"
    which = f"{layers}" if layers is not None else ", ".join(f"`{target}`" for target in scheme.targets)
    return [_name(scheme), kind, inputs, which, getattr(scheme.format, "value", scheme.format)]


def _in_short(ignored: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in ignored[:4])
    return (shown or "embeddings and norms") + (f" and {len(ignored) - 4} more layers" if len(ignored) > 4 else "")


def _low_bit_layers(files: list[Path]) -> tuple[int, bool]:
    """Number of layers with scales, and whether experts are among them."""
    names = [name for file in files for name in safe_open(file, framework="pt").keys()]  # noqa: SIM118
    scales = [name for name in names if name.endswith(".weight_scale")]
    return len(scales), any(".experts." in name for name in scales)


def _has_chat_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    inline = settings.is_file() and "chat_template" in json.loads(settings.read_text())
    return inline or (folder / "chat_template.jinja").is_file()


def _commit() -> str:
    """The commit of this package where pip or a checkout knows it."""
    try:
        origin = json.loads(importlib.metadata.distribution("qarl_trl").read_text("direct_url.json") or "{}")
        commit = origin.get("vcs_info", {}).get("commit_id")
    except importlib.metadata.PackageNotFoundError:
        commit = None
    root = Path(__file__).parents[2]
    if commit is None and (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git here
            commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    return f" (commit {commit[:12]})" if commit else ""
