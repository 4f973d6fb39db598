"""Compare what `qarl-trl export` made of a run's checkpoint with what the run trained."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors import safe_open
from torch import Tensor

from ...checkpoints.folder import MANIFEST
from ...checkpoints.identity import BASE, SETTINGS, scheme_fact
from ...checkpoints.models import weights_fact
from ...export.adapter_base import BASE_CONFIG
from ...export.files import ADAPTER_CONFIG, LOW_BIT_FOLDER, weight_files
from ...quant.layers.layer import LowBitLayer
from ...quant.match import match_layers
from ...quant.names import checkpoint_modules, computed_by
from ...quant.scheme import describe_scheme


# So many bytes, and a thousandth of all, may differ in a tensor of a merged layer: a GPU adds up in another order. A
# guess, because nobody has compared merges of two devices; on one CPU all bytes are equal.
_ROUNDED_OTHERWISE = 4


def say_if_trained_as_another_model(checkpoint: str, output: str, trained: dict[str, str], model: Any) -> bool:
    """
    Print a line if a run trained the checkpoint with other layers in low bits, or with other schemes, than the
    exported model has.

    Args:
        checkpoint: The folder that was exported.
        output: The folder that was written.
        trained: The layers of the run, from [`layers_of_run`].
        model: The exported model.

    Returns:
        Whether it did.
    """
    exported = _layers_of(model)
    differing = sorted(name for name in trained | exported if trained.get(name) != exported.get(name))
    if not differing:
        return False

    first = differing[0]
    high = "high precision"
    print(
        f"{checkpoint} was trained with {', '.join(sorted(set(trained.values())))}, and {output} differs in "
        f"{len(differing)} layers: it is another model. {first}: {trained.get(first, high)} in the run, "
        f"{exported.get(first, high)} here. --scheme, --group_size and --ignore of the run give the one that was "
        "trained."
    )
    low_bit = Path(checkpoint, LOW_BIT_FOLDER)
    if (low_bit / "config.json").is_file():
        print(f"{low_bit} has the one that was trained, too.")
    return True


def say_if_base_differs(checkpoint: str, output: str, base: str, trained: dict[str, str], loaded: str) -> None:
    """
    Print a line if an adapter was trained on another base than the one into which it was merged: its folder has been
    replaced since, a script had changed the model, or it was loaded with another config.

    Args:
        checkpoint: The folder of the adapter.
        output: The folder that was written.
        base: The folder of the base, or its Hub id.
        trained: The layers of the run, from [`layers_of_run`], which are those of the output.
        loaded: The digest of the base as it was loaded here, from [`loaded_base_fact`].
    """
    manifest = Path(checkpoint, MANIFEST)
    run = json.loads(manifest.read_text()) if manifest.is_file() else {}
    low_bit = Path(checkpoint, LOW_BIT_FOLDER)
    if (low_bit / "config.json").is_file():
        differing = _differing_entries(low_bit, Path(output)) or _differing_tensors(low_bit, Path(output), trained)
        if differing:
            print(
                f"{output} is another model than {low_bit}, which the run saved: {differing[0]} differs. {base} is "
                "not the base as the run had it."
            )
            return
    elif Path(base).is_dir() and run.get("weights") not in (None, weights_fact(base, None)):
        print(
            f"{base} has other files than in the run (weights, config or tokenizer): {output} may be another model "
            "than the one that was trained."
        )
        return

    if _has_digest_of_file(run) and run[BASE] != loaded:
        print(
            f"{output} is another model than the one that was trained: {base} has other weights than the run had "
            "below its adapter. If a script had changed them, as by merging an adapter of an earlier stage, save that "
            f"model, and name its folder as base_model_name_or_path in {Path(checkpoint, ADAPTER_CONFIG)}."
        )


def _has_digest_of_file(run: dict[str, Any]) -> bool:
    """Whether the manifest of a run has a digest of its loaded base that the same files give here."""
    settings = run.get(SETTINGS, {})
    # In 16 bits it had rounded them.
    is_whole = settings.get("model_init_kwargs", {}).get("dtype") == "float32"
    # Of another model; TRL then gives the embedding other rows, which the adapter has.
    has_other_template = bool(settings.get("chat_template_path"))
    return BASE in run and is_whole and not has_other_template


def _differing_entries(one: Path, other: Path) -> list[str]:
    """The entries by which two models compute, and in which their configs differ."""
    first = computed_by(json.loads((one / "config.json").read_text()))
    second = computed_by(json.loads((other / "config.json").read_text()))
    return sorted(name for name in first if first[name] != second.get(name))


def _differing_tensors(one: Path, other: Path, low_bit_layers: Iterable[str]) -> list[str]:
    """The tensors in which two models differ; in low bits by more than merging on another device may."""
    layers = set(low_bit_layers)
    first = _open_tensors(one)
    second = _open_tensors(other)
    differing = []
    for name in sorted(first):
        if name not in second:
            differing.append(name)
            continue
        in_low_bits = name.rpartition(".")[0] in layers
        if not _are_same(first[name].get_tensor(name), second[name].get_tensor(name), in_low_bits):
            differing.append(name)
    return differing


def _are_same(one: Tensor, other: Tensor, in_low_bits: bool) -> bool:
    """Whether two tensors have the same bytes, of a merged layer in low bits almost all of them."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # As bytes: torch compares no float8.
    differ = one.flatten().view(torch.uint8) != other.flatten().view(torch.uint8)
    tolerated = _ROUNDED_OTHERWISE + differ.numel() // 1000 if in_low_bits else 0
    return int(differ.sum()) <= tolerated


def _open_tensors(folder: Path) -> dict[str, Any]:
    """The names of the tensors of a model, each with the open file that holds it."""
    files: dict[str, Any] = {}
    for path in weight_files(folder):
        file = safe_open(path, framework="pt")
        files |= dict.fromkeys(file.keys(), file)
    return files


def _layers_of(model: Any) -> dict[str, str]:
    """The layers of a quantized model by their names in a checkpoint, each with its scheme in words."""
    layers = {}
    for name, module in checkpoint_modules(model):
        if isinstance(module, LowBitLayer):
            layers[name] = describe_scheme(module.scheme)
    return layers


def layers_of_run(checkpoint: str, model: Any) -> dict[str, str] | None:
    """
    The layers that a run had in low bits, as [`_layers_of`] gives those of a model.

    Args:
        checkpoint: The folder to export.
        model: Its model, before it is quantized.

    Returns:
        `None` for a folder that no run in low bits saved, or that does not say which layers.
    """
    groups: dict[str, QuantizationScheme] = {}
    try:
        fact = _scheme_of_run(Path(checkpoint))
        if fact == "none":
            return None

        # As `identity_of` writes it: a dictionary of targets by the schemes in words, and a list of what is ignored.
        written, _, ignore = fact.rpartition(" without ")
        for words, targets in ast.literal_eval(written).items():
            # Only for its targets: the words do not tell all of the scheme.
            groups[words] = QuantizationScheme(targets=targets, weights=QuantizationArgs())
        plan = QuantizationConfig(config_groups=groups, ignore=ast.literal_eval(ignore))
        matched = match_layers(model, plan)
    except (ValueError, SyntaxError) as error:
        print(
            f"{checkpoint} does not say which layers its run had in low bits ({error}): nothing is compared with it."
        )
        return None

    layers = {}
    for layer in matched:
        layers[layer.name] = next(words for words, group in plan.config_groups.items() if group is layer.scheme)
    return layers


def _scheme_of_run(folder: Path) -> str:
    """The scheme of a run: from the manifest of its checkpoint, or of the low-bit model beside a merged adapter."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        return json.loads(manifest.read_text()).get("scheme", "none")

    low_bit = folder / LOW_BIT_FOLDER / "config.json"
    # A run with a frozen base may have its adapter in the folder of an earlier one.
    if not low_bit.is_file() or (folder / BASE_CONFIG).exists():
        return "none"
    quantization = json.loads(low_bit.read_text()).get("quantization_config")
    return scheme_fact(QuantizationConfig.model_validate(quantization)) if quantization else "none"
