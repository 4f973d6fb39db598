"""
The distilled start of a regime of arms.py.

    python benchmarks/arms_distilled_start.py choose REGIME    scores of all candidates, on training problems
    python benchmarks/arms_distilled_start.py write REGIME     the weights that its cells load, and their scores
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import common
import torch
from arms import FOLDER, REGIMES, distilled_file_of, sha_of
from arms_distill import distill
from arms_scores import WAYS, accuracy, make_start, quantize, scores
from arms_task import HELD_OUT, numbers_of, problems
from safetensors.torch import save_file
from sums import make_tokenizer
from torch import nn
from transformers import Qwen3ForCausalLM


# Updates and rate.
CANDIDATES = {
    "100 updates, 3e-4": {"updates": 100, "rate": 3e-4},
    "100 updates, 1e-3": {"updates": 100, "rate": 1e-3},
    "300 updates, 3e-4": {"updates": 300, "rate": 3e-4},
    "300 updates, 1e-3": {"updates": 300, "rate": 1e-3},
}
CHOSEN_ON = 10_000  # seed of training problems that nothing else draws


def undistilled_start(regime: dict[str, Any], folder: Path) -> nn.Module:
    """What a regime would begin with if it did not distill, from a new folder, as llm-compressor needs it."""
    make_start(regime).save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def choose(name: str, folder: Path) -> None:
    """Score the start, as it is and in 4 bits, and every candidate in 4 bits, on training problems."""
    regime = REGIMES[name]
    tokenizer = make_tokenizer()
    length = regime["max_completion_length"]
    chosen_on = list(islice(problems(CHOSEN_ON, count=numbers_of(regime)), HELD_OUT))
    model = undistilled_start(regime, folder)

    results: dict[str, Any] = {"as it is": {"score": accuracy(model, tokenizer, chosen_on, length)}}
    for way in ("rounded", "gptq"):
        quantized = quantize(model, tokenizer, WAYS[way], regime)
        results[way] = {"score": accuracy(quantized, tokenizer, chosen_on, length)}
    for candidate, settings in CANDIDATES.items():
        distilled, losses = distill(model, regime, **settings)
        rounded = quantize(distilled, tokenizer, WAYS["rounded"], regime)
        results[candidate] = {"score": accuracy(rounded, tokenizer, chosen_on, length), "losses": losses}
        print(candidate, results[candidate]["score"], losses[0], losses[-1], flush=True)

    result = {"regime": name, "problems": HELD_OUT, "results": results, "machine": common.machine()}
    (FOLDER / f"{name}_choice.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


def write_start(name: str, folder: Path) -> None:
    """Distill the start of a regime, keep its weights beside the cells, and score it as trained models are."""
    regime = REGIMES[name]
    model = undistilled_start(regime, folder)
    distilled, losses = distill(model, regime, **regime["distilled"])
    weights = {key: weight.detach().contiguous() for key, weight in distilled.state_dict().items()}
    save_file(weights, distilled_file_of(regime), metadata={"format": "pt"})

    distilled.save_pretrained(folder)
    shares = scores(folder, regime, ["rounded", "gptq"])
    result = {
        "regime": name,
        "settings": regime,
        "scores": shares,
        "losses": losses,
        "start_sha256": sha_of(distilled_file_of(regime)),
        "machine": common.machine(),
    }
    (FOLDER / f"{name}_before.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


def main() -> None:
    """Run the part that the command line names."""
    parts = {"choose": choose, "write": write_start}
    with tempfile.TemporaryDirectory() as folder:
        parts[sys.argv[1]](sys.argv[2], Path(folder))


if __name__ == "__main__":
    main()
