"""SmoothQuant, AWQ's scaling and a rotation before RL: do they bring the quantized model nearer to the model?

Claim: none of them changes the model; whether its quantization gains depends on the model. This is
examples/llmcompressor/precondition.py on the start that examples/smollm2/warm_start.py makes, in every scheme, on
held-out problems with their solutions. Nothing is timed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import torch


# Before the quickstart, whose warm_start.py is another.
sys.path.insert(0, str(common.ROOT / "examples" / "smollm2"))
# Schemes with their group sizes.
SCHEMES = (("W4A16", 64), ("W8A8", None), ("FP8_DYNAMIC", None))
METHODS = ("smoothquant", "awq", "rotation")


def texts(folder: Path, name: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of the problems of a file, with their solutions."""
    from warm_start import solution

    rows = []
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        problem = json.loads(line)
        chat = [
            {"role": "user", "content": problem["problem"]},
            {"role": "assistant", "content": solution(problem["equation"])},
        ]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        rows.append(tokenizer(text)["input_ids"])
    return rows


def start(folder: Path) -> Any:
    """The model that RL would start from, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32).eval()


def without_transform(folder: Path, probes: list[list[int]]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The log-probs of the model on held-out rows, in one row, and what each scheme costs it."""
    from precondition import log_probs, quantization_cost

    model = start(folder)
    plain = log_probs(model, probes)
    rows = []
    for scheme, group in SCHEMES:
        rows.append({"scheme": scheme, "method": "none", "nats": quantization_cost(model, scheme, probes, group)})
    return plain, rows


def with_transform(
    method: str, folder: Path, calibration: dict[str, Any], plain: torch.Tensor, probes: list[list[int]]
) -> list[dict[str, Any]]:
    """
    What each scheme costs after a transform, and by how much the transform changes the model.

    Args:
        method: One of `METHODS`.
        folder: Has the model.
        calibration: llm-compressor's options for its calibration data.
        plain: Log-probs of the model before, in one row.
        probes: Token ids of the held-out rows.
    """
    from precondition import fold, log_probs, quantization_cost, transforms

    # Rotations need no texts.
    data = {} if method == "rotation" else calibration
    # Only AWQ looks at the scheme. The others fold one model for all.
    folded = None
    rows = []
    for scheme, group in SCHEMES:
        if folded is None or method == "awq":
            folded = fold(start(folder), transforms(method, scheme, group), **data)

        change = (log_probs(folded, probes) - plain).abs().max().item()
        nats = quantization_cost(folded, scheme, probes, group)
        row = {"scheme": scheme, "method": method, "nats": nats, "change": change}
        rows.append(row)
        print(row, flush=True)
    return rows


def headlines_of(rows: list[dict[str, Any]]) -> list[str]:
    """For each scheme, the share of its mismatch that remains with each method."""
    nats = {(row["scheme"], row["method"]): row["nats"] for row in rows}
    headlines = []
    for scheme, _ in SCHEMES:
        shares = [f"{method} {nats[scheme, method] / nats[scheme, 'none']:.2f}" for method in METHODS]
        headlines.append(f"{scheme}: of the mismatch without a transform {', '.join(shares)}")
    return headlines


def main() -> None:
    args = common.arguments(
        __doc__,
        folder=("runs/smollm2", "runs/smollm2", "with start/, train.jsonl and test.jsonl"),
        samples=(32, 2, "calibration rows"),
        probes=(100, 2, "held-out rows"),
    )
    load = os.getloadavg()[0]

    from datasets import Dataset
    from transformers import AutoTokenizer

    # The current folder changes below.
    folder = Path(args.folder).resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    samples = texts(folder, "train", tokenizer)[: args.samples]
    probes = texts(folder, "test", tokenizer)[: args.probes]
    masks = [[1] * len(row) for row in samples]
    calibration = {
        "dataset": Dataset.from_dict({"input_ids": samples, "attention_mask": masks}),
        "num_calibration_samples": args.samples,
        "max_seq_length": 256,
    }

    plain, rows = without_transform(folder, probes)
    # llm-compressor writes its logs into the current folder.
    with tempfile.TemporaryDirectory() as logs, contextlib.chdir(logs):
        for method in METHODS:
            rows += with_transform(method, folder, calibration, plain, probes)

    tokens = sum(len(row) - 1 for row in probes)
    common.report("bench_precondition", args, headlines_of(rows), rows, load, tokens=tokens)


if __name__ == "__main__":
    main()
