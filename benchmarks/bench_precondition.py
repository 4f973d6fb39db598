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


SCHEMES = (("W4A16", 64), ("W8A8", None), ("FP8_DYNAMIC", None))
METHODS = ("smoothquant", "awq", "rotation")


def texts(folder: Path, tokenizer: Any) -> dict[str, list[list[int]]]:
    """Token ids of problems with solutions, for calibration and held out."""
    sys.path.insert(
        0, str(common.ROOT / "examples" / "smollm2")
    )  # before the quickstart, whose warm_start.py is another
    from warm_start import solution

    found = {}
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        turns = [[("user", row["problem"]), ("assistant", solution(row["equation"]))] for row in rows]
        chats = [[{"role": role, "content": content} for role, content in chat] for chat in turns]
        found[name] = [tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"] for chat in chats]
    return found


def main() -> None:
    args = common.arguments(
        __doc__,
        folder=("runs/smollm2", "runs/smollm2", "with start/, train.jsonl and test.jsonl"),
        samples=(32, 2, "calibration rows"),
        probes=(100, 2, "held-out rows"),
    )
    load = os.getloadavg()[0]
    from datasets import Dataset
    from precondition import fold, log_probs, quantization_cost, transforms
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(args.folder).resolve()
    rows = texts(folder, AutoTokenizer.from_pretrained(folder / "start"))
    calibration, probes = rows["train"][: args.samples], rows["test"][: args.probes]
    masks = [[1] * len(row) for row in calibration]
    data = {"dataset": Dataset.from_dict({"input_ids": calibration, "attention_mask": masks})}
    data |= {"num_calibration_samples": args.samples, "max_seq_length": 256}

    def start() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32).eval()

    found = []
    model = start()
    plain = log_probs(model, probes)
    for scheme, group in SCHEMES:
        found.append({"scheme": scheme, "method": "none", "nats": quantization_cost(model, scheme, probes, group)})
    with tempfile.TemporaryDirectory() as logs, contextlib.chdir(logs):  # llm-compressor writes its own there
        for method in METHODS:
            models: dict[Any, Any] = {}
            for scheme, group in SCHEMES:
                key = scheme if method == "awq" else None  # the others do not look at the scheme
                if key not in models:
                    models[key] = fold(
                        start(), transforms(method, scheme, group), **({} if method == "rotation" else data)
                    )
                change = (log_probs(models[key], probes) - plain).abs().max().item()
                cost = quantization_cost(models[key], scheme, probes, group)
                found.append({"scheme": scheme, "method": method, "nats": cost, "change": change})
                print(found[-1], flush=True)
    cost = {(row["scheme"], row["method"]): row["nats"] for row in found}
    headlines = []
    for scheme, _ in SCHEMES:
        shares = ", ".join(f"{method} {cost[scheme, method] / cost[scheme, 'none']:.2f}" for method in METHODS)
        headlines.append(f"{scheme}: of the mismatch without a transform {shares}")
    common.report("bench_precondition", args, headlines, found, load, tokens=sum(len(row) - 1 for row in probes))


if __name__ == "__main__":
    main()
