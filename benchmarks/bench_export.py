"""Export: `apply_quantization` and `save_low_bit` against llm-compressor's data-free `oneshot`.

Claim: the same bytes, at least 5 times faster. The bytes of every tensor are compared before any ratio is printed.

Both start from the same loaded model (a loaded copy for each, since both change it) and end with a complete folder.
The time of loading is the same for both and left out of the headline; the ratio with it stands beside. Two models:
layers as wide as those of Qwen2.5-Math-1.5B, the smallest of the paper, four instead of 28; and many narrow layers,
where what each layer costs whatever its size weighs more.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
import time
import warnings
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
    from qarl_trl.export import save_low_bit
    from qarl_trl.quant import apply_quantization

    apply_quantization(model, scheme)
    save_low_bit(model, None, path)


def theirs(model: Any, scheme: str, path: Path) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model=model, recipe=recipe, output_dir=str(path))


def same_bytes(a: Path, b: Path) -> bool:
    """Whether two folders hold the same weights files."""

    def digests(folder: Path) -> dict[str, str]:
        return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.glob("*.safetensors"))}

    return bool(digests(a)) and digests(a) == digests(b)


def main() -> None:
    args = common.arguments(
        __doc__,
        vocabulary=(8192, 256, "tokens in the vocabulary"),
        rounds=(7, 2, "exports by each side, model and scheme"),
    )
    load = os.getloadavg()[0]
    from llmcompressor import oneshot  # noqa: F401  (imported before the clock starts)
    from loguru import logger
    from transformers import AutoModelForCausalLM

    logger.remove()
    warnings.filterwarnings("ignore")
    rows, headlines, all_times = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # llm-compressor writes its logs into the current folder
        work = Path(folder)
        for model_name, (hidden, layers, inner) in (QUICK if args.quick else MODELS).items():
            path = common.save_model(work / model_name, hidden, layers, inner, args.vocabulary, torch.bfloat16)
            for scheme in SCHEMES:
                loading: list[float] = []

                def export(side: Any, path: str = path, scheme: str = scheme, loading: list = loading) -> float:
                    target = work / side.__name__
                    shutil.rmtree(target, ignore_errors=True)
                    start = time.perf_counter()
                    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
                    loading.append(time.perf_counter() - start)
                    start = time.perf_counter()
                    side(model, scheme, target)
                    return time.perf_counter() - start

                arms = {side.__name__: functools.partial(export, side) for side in (ours, theirs)}
                times = all_times[f"{model_name} {scheme}"] = common.interleave(arms, args.rounds)
                if not same_bytes(work / "ours", work / "theirs"):
                    raise SystemExit(f"{model_name}, {scheme}: the two exports differ, so their times mean nothing.")
                result = common.ratio(times, "theirs", "ours")
                load_seconds = sorted(loading)[len(loading) // 2]
                with_load = {side: [t + load_seconds for t in seconds] for side, seconds in times.items()}
                rows.append(
                    {
                        "model": model_name,
                        "scheme": scheme,
                        "speed-up": result["ratio"],
                        "quartiles": f"{result['quartile_low']:.1f}-{result['quartile_high']:.1f}",
                        "with loading": common.ratio(with_load, "theirs", "ours")["ratio"],
                        "bytes equal": True,
                        "ours s": result["base_seconds"],
                        "oneshot s": result["seconds"],
                        "load s": load_seconds,
                    }
                )
                headlines.append(
                    f"{model_name}, {scheme}: {result['ratio']:.1f}x faster than oneshot, byte-identical "
                    f"{common.verdict(result['ratio'], GOAL, at_most=False)}; with loading the model "
                    f"{rows[-1]['with loading']:.1f}x"
                )
        os.chdir(common.ROOT)
    common.report("bench_export", args, headlines, rows, load, times=all_times, models=MODELS)


if __name__ == "__main__":
    main()
