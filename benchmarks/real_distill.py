"""
Distill the start of real_arms.py into 4 bits, and choose on whose answers.

    python examples/smollm2/prepare.py runs/smollm2 --data FOLDER; python examples/smollm2/warm_start.py runs/smollm2
    python benchmarks/real_distill.py --start runs/smollm2

Each candidate is examples/smollm2/distill.yaml with its own `distill_on`. The one whose 4-bit model answers most of
the first 150 training problems becomes the start of the regime `distilled`: START-distilled, for `real_arms.py --start`.
The held-out problems are not looked at. Writes results/real/distill.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import common
import real_arms


CANDIDATES = ("rollouts", "answers")
CHOSEN_ON = 150  # training problems, the first ones
SEED = 3  # of the draws


def choice_problems(start: Path, folder: Path) -> Path:
    """A folder whose `test.jsonl` has the problems on which is chosen."""
    rows = (start / "train.jsonl").read_text().splitlines()[:CHOSEN_ON]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def measure(model: Path, problems: Path) -> dict[str, Any]:
    """Right answers by problem: of four samples, and of the greedy answer."""
    settings = real_arms.G64
    return {
        "scores": real_arms.score(model, settings, problems, SEED),
        "greedy": real_arms.score(model, settings, problems, SEED, greedy=True),
    }


def losses_of(run: Path) -> list[float]:
    """KL(teacher || student) of each update, in nats a token."""
    state = json.loads(next(run.glob("checkpoint-*/trainer_state.json")).read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def distilled_start(start: Path, run: Path) -> Path:
    """START-distilled: the master weights of the chosen run beside the same problems."""
    folder = start.with_name(f"{start.name}-distilled")
    folder.mkdir(exist_ok=True)
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(start / name, folder / name)

    weights_and_tokenizer = ("*.safetensors", "config.json", "generation_config.json", "token*", "*.jinja")
    (folder / "start").mkdir(exist_ok=True)
    for pattern in weights_and_tokenizer:
        for file in next(run.glob("checkpoint-*")).glob(pattern):
            shutil.copy(file, folder / "start" / file.name)
    return folder


def main() -> None:
    """Run both candidates, score them beside the rounded start, choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--start", type=Path, default=real_arms.START, help="folder with start/, train.jsonl, test.jsonl"
    )
    options = parser.parse_args()
    start: Path = options.start.resolve()
    runs = start.with_name(f"{start.name}-candidates")
    problems = choice_problems(start, runs / "problems")

    real_arms.export(start / "start", runs / "rounded", real_arms.G64["quantization"])
    results = {"bfloat16": measure(start / "start", problems), "rounded": measure(runs / "rounded", problems)}
    for answers in CANDIDATES:
        run = runs / answers
        real_arms.distill(start / "start", run, start, answers)
        results[answers] = measure(run, problems) | {"loss": losses_of(run)}
        print(answers, "right of", CHOSEN_ON * real_arms.SAMPLES, sum(results[answers]["scores"]), flush=True)

    chosen = max(CANDIDATES, key=lambda answers: sum(results[answers]["scores"]))
    folder = distilled_start(start, runs / chosen)
    result = {
        "chosen": chosen,
        "problems": CHOSEN_ON,
        "samples": real_arms.SAMPLES,
        "results": results,
        "start_sha256": real_arms.sha_of(start / "start" / "model.safetensors"),
        "distilled_sha256": real_arms.sha_of(folder / "start" / "model.safetensors"),
        "machine": common.machine(),
    }
    (real_arms.FOLDER / "distill.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
