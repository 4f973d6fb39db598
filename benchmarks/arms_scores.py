"""
What a trained toy of arms.py scores as it is, and in 4 bits: rounded to nearest, by GPTQ, by AWQ and distilled.

    python benchmarks/arms_scores.py FOLDER REGIME WAY...      a regime as JSON; prints the scores as JSON
    python benchmarks/arms_scores.py before NAME               writes those of the start of `arms.REGIMES[NAME]`
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import common  # finds the scripts of examples/
import torch
from arms import FOLDER, REGIMES, start_of
from arms_distill import distill
from arms_task import HELD_OUT, add_outliers, numbers_of, problems
from datasets import Dataset
from llmcompressor import oneshot
from ptq import make_recipe
from safetensors.torch import load_model
from sums import correct, make_model, make_tokenizer
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


WAYS = {"rounded": "rtn", "gptq": "gptq", "awq": "awq"}  # AWQ's scaling folds outlier channels back
CALIBRATION = 128  # solutions of training problems
TEMPERATURE = 0.6  # as in the paper's Table 2


def scores(folder: Path, regime: dict[str, Any], ways: list[str]) -> dict[str, float]:
    """
    Score a trained toy as it is and in 4 bits, by answers that transformers samples in float32 with one seed.

    Args:
        folder: The toy.
        regime: An entry of `arms.REGIMES`.
        ways: Keys of `WAYS`, or "distilled": how it is quantized.

    Returns:
        Shares of right answers, of "as it is" and of each way.
    """
    tokenizer = make_tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    held_out = list(islice(problems(1, held_out=True, count=numbers_of(regime)), HELD_OUT))
    length = regime["max_completion_length"]

    shares = {"as it is": accuracy(model, tokenizer, held_out, length)}
    for way in ways:
        if way == "distilled":
            distilled, _ = distill(model, regime, **regime["distilled"])
            quantized = quantize(distilled, tokenizer, WAYS["rounded"], regime)
        else:
            quantized = quantize(model, tokenizer, WAYS[way], regime)
        shares[way] = accuracy(quantized, tokenizer, held_out, length)
    return shares


def quantize(model: nn.Module, tokenizer: PreTrainedTokenizerFast, method: str, regime: dict[str, Any]) -> nn.Module:
    """A copy of `model` whose layers compute with llm-compressor's low-bit weights."""
    settings = regime["quantization"]
    data: dict[str, Any] = {}
    if method != "rtn":
        data = {"dataset": calibration_set(tokenizer, regime), "num_calibration_samples": CALIBRATION}

    quantized = copy.deepcopy(model)
    recipe = make_recipe(method, settings["quant_scheme"], settings["quant_group_size"])
    # It prints a line and a bar for each layer.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        oneshot(model=quantized, recipe=recipe, tokenizer=tokenizer, **data)
    return quantized


def calibration_set(tokenizer: PreTrainedTokenizerFast, regime: dict[str, Any]) -> Dataset:
    """Training problems with their right solutions, as token ids."""
    rows = []
    for problem in islice(problems(0, count=numbers_of(regime)), CALIBRATION):
        # Without slips a demonstration is right.
        ids = tokenizer.encode(problem["prompt"] + problem["demonstration"])
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids)})
    return Dataset.from_list(rows)


@torch.no_grad()
def accuracy(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, held_out: list[dict[str, Any]], length: int
) -> float:
    """Share of right answers of a model."""
    model.eval()
    # Prompts have one length.
    ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in held_out])

    torch.manual_seed(0)
    answers = model.generate(ids, do_sample=True, temperature=TEMPERATURE, top_k=0, max_new_tokens=length)
    texts = tokenizer.batch_decode(answers[:, ids.shape[1] :], skip_special_tokens=True)
    rewards = correct(texts, [row["answer"] for row in held_out])
    return sum(rewards) / len(rewards)


def make_start(regime: dict[str, Any]) -> nn.Module:
    """What arms in bfloat16 begin with in a regime, from the weights beside its cells."""
    model = make_model(regime["start"], **regime["model"])
    load_model(model, FOLDER / f"{start_of(regime)}.safetensors")
    add_outliers(model, **regime["outliers"])
    return model


def score_start(name: str) -> None:
    """Score what a regime begins with, as its trained models are, into a file beside its cells."""
    regime = REGIMES[name]
    model = make_start(regime)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        shares = scores(Path(folder), regime, list(WAYS))

    result = {"regime": name, "settings": regime, "scores": shares, "machine": common.machine()}
    (FOLDER / f"{name}_before.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


def main() -> None:
    """Score the start of a regime, or a folder."""
    if sys.argv[1] == "before":
        score_start(sys.argv[2])
        return

    folder, regime, *ways = sys.argv[1:]
    print(json.dumps(scores(Path(folder), json.loads(regime), ways)))


if __name__ == "__main__":
    main()
