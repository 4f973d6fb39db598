"""Export: `apply_quantization` and `save_low_bit` against llm-compressor's data-free `oneshot`.

Claim: the same bytes, at least 5 times faster. The bytes of every tensor are compared before any ratio is printed.

Both start from the same loaded model (a loaded copy for each, since both change it) and end with a complete folder.
The time of loading is the same for both and left out of the headline; the ratio with it stands beside. Two models:
layers as wide as those of Qwen2.5-Math-1.5B, the smallest of the paper, four instead of 28; and many narrow layers,
where what each layer costs whatever its size weighs more.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch


SCHEMES = ("W4A16", "FP8_DYNAMIC")
GOAL = 5.0
# Width, layers, width of the MLP.
MODELS = {"wide": (1536, 4, 8960), "narrow": (768, 12, 2048)}
QUICK = {"narrow": (256, 2, 512)}


def ours(model: Any, scheme: str, path: Path) -> None:
    """Quantize and save a model by qarl_trl."""
    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization

    apply_quantization(model, scheme)
    save_low_bit(model, None, path)


def theirs(model: Any, scheme: str, path: Path) -> None:
    """Quantize and save a model by llm-compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model=model, recipe=recipe, output_dir=str(path))


SIDES = (ours, theirs)


def digests(folder: Path) -> dict[str, str]:
    """A hash of each weights file of a folder, by its name."""
    hashes = {}
    for file in sorted(folder.glob("*.safetensors")):
        hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two folders hold the same weights files."""
    return bool(digests(a)) and digests(a) == digests(b)


class Exports:
    """
    Exports of one model in one scheme, into a folder for each side.

    Args:
        model: The folder of the model.
        scheme: Of the exports.
        work: Gets the folders, which have the names of the sides.
    """

    def __init__(self, model: str, scheme: str, work: Path) -> None:
        self.model = model
        self.scheme = scheme
        self.work = work
        # Seconds of each load so far, by whichever side.
        self.loading: list[float] = []

    def run(self, side: Callable[[Any, str, Path], None]) -> float:
        """Load the model and export it. Returns the seconds of the export alone."""
        from transformers import AutoModelForCausalLM

        target = self.work / side.__name__
        shutil.rmtree(target, ignore_errors=True)

        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)
        self.loading.append(time.perf_counter() - start)

        start = time.perf_counter()
        side(model, self.scheme, target)
        return time.perf_counter() - start


def row_of(model_name: str, scheme: str, times: common.Times, loading: list[float]) -> dict[str, Any]:
    """The line of one model and scheme, whose exports are equal."""
    exported = common.ratio(times, "theirs", "ours")

    load_seconds = statistics.median_high(loading)
    with_load: common.Times = {}
    for side, seconds in times.items():
        with_load[side] = [of_export + load_seconds for of_export in seconds]

    return {
        "model": model_name,
        "scheme": scheme,
        "speed-up": exported["ratio"],
        "quartiles": f"{exported['quartile_low']:.1f}-{exported['quartile_high']:.1f}",
        "with loading": common.ratio(with_load, "theirs", "ours")["ratio"],
        "bytes equal": True,
        "ours s": exported["base_seconds"],
        "oneshot s": exported["seconds"],
        "load s": load_seconds,
    }


def headline_of(row: dict[str, Any]) -> str:
    """The claim for one model and scheme."""
    return (
        f"{row['model']}, {row['scheme']}: {row['speed-up']:.1f}x faster than oneshot, byte-identical "
        f"{common.verdict(row['speed-up'], GOAL, at_most=False)}; with loading the model "
        f"{row['with loading']:.1f}x"
    )


def main() -> None:
    args = common.arguments(
        __doc__,
        vocabulary=(8192, 256, "tokens in the vocabulary"),
        rounds=(7, 2, "exports by each side, model and scheme"),
    )
    load = os.getloadavg()[0]

    # Imported before the clock starts.
    from llmcompressor import oneshot  # noqa: F401
    from loguru import logger

    logger.remove()
    warnings.filterwarnings("ignore")

    models = QUICK if args.quick else MODELS
    rows: list[dict[str, Any]] = []
    all_times: dict[str, common.Times] = {}
    # llm-compressor writes its logs into the current folder.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        work = Path(folder)
        for model_name, (hidden, layers, inner) in models.items():
            path = common.save_model(work / model_name, hidden, layers, inner, args.vocabulary, torch.bfloat16)
            for scheme in SCHEMES:
                exports = Exports(path, scheme, work)
                arms = {side.__name__: functools.partial(exports.run, side) for side in SIDES}
                times = common.interleave(arms, args.rounds)
                if not same_bytes(work / "ours", work / "theirs"):
                    raise SystemExit(f"{model_name}, {scheme}: the two exports differ, so their times mean nothing.")

                all_times[f"{model_name} {scheme}"] = times
                rows.append(row_of(model_name, scheme, times, exports.loading))

    headlines = [headline_of(row) for row in rows]
    common.report("bench_export", args, headlines, rows, load, times=all_times, models=MODELS)


if __name__ == "__main__":
    main()
