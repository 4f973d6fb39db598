"""
Distill the start of real_arms.py into 4 bits, and choose on whose answers.

    python examples/smollm2/prepare.py runs/smollm2 --data FOLDER; python examples/smollm2/warm_start.py runs/smollm2
    python benchmarks/real_distill.py --start runs/smollm2

Each candidate is examples/smollm2/distill.yaml with its own `distill_on` and number of updates. The one whose 4-bit
model answers most of the first 150 training problems becomes the start of the regime `distilled`: START-distilled, for
`real_arms.py --start`. The held-out problems are not looked at. Writes results/real/distill.json. `--repeat SEED` only
repeats the chosen one with another order of the problems: START-distilled-SEED.
"""

from __future__ import annotations

import argparse
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
import real_arms


# `distill_on` and updates.
CANDIDATES = {
    "rollouts": ("rollouts", 30),
    "answers": ("answers", 30),
    # Added when the two above had been scored, and neither was above the rounded start in sampled answers.
    "answers, 90 updates": ("answers", 90),
}
CHOSEN_ON = 150  # training problems, the first ones
SEED = 3  # of the draws


def choice_problems(start: Path, folder: Path) -> Path:
    """Write the problems on which is chosen, as `test.jsonl` of a folder."""
    lines = (start / "train.jsonl").read_text().splitlines()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.jsonl").write_text("\n".join(lines[:CHOSEN_ON]) + "\n")
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


def distilled_start(start: Path, run: Path, suffix: str = "") -> Path:
    """Make START-distilled, with the master weights of a run beside the same problems."""
    folder = start.with_name(f"{start.name}-distilled{suffix}")
    folder.mkdir(exist_ok=True)
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(start / name, folder / name)

    weights_and_tokenizer = ("*.safetensors", "config.json", "generation_config.json", "token*", "*.jinja")
    checkpoint = next(run.glob("checkpoint-*"))
    (folder / "start").mkdir(exist_ok=True)
    for pattern in weights_and_tokenizer:
        for file in checkpoint.glob(pattern):
            shutil.copy(file, folder / "start" / file.name)
    return folder


def run_and_measure(name: str, start: Path, runs: Path, problems: Path) -> dict[str, Any]:
    """Score the start ("bfloat16", "rounded"), or a candidate, which is made first; its losses are added."""
    if name == "bfloat16":
        return measure(start / "start", problems)

    model = runs / name
    if name == "rounded":
        real_arms.export(start / "start", model, real_arms.G64["quantization"])
        return measure(model, problems)

    answers, updates = CANDIDATES[name]
    real_arms.distill(start / "start", model, start, answers, updates)
    return measure(model, problems) | {"loss": losses_of(model)}


def main() -> None:
    """Run the candidates, score them beside the start and its rounded form, choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--start", type=Path, default=real_arms.START, help="folder with start/, train.jsonl, test.jsonl"
    )
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: 1)")
    parser.add_argument("--repeat", type=int, metavar="SEED", help="repeat the chosen one with this seed alone")
    options = parser.parse_args()

    start: Path = options.start.resolve()
    runs = start.with_name(f"{start.name}-candidates")
    if options.repeat is None:
        choose(start, runs, options.jobs)
        return

    run = runs / f"seed-{options.repeat}"
    real_arms.distill(start / "start", run, start, seed=options.repeat)
    distilled_start(start, run, f"-{options.repeat}")


def choose(start: Path, runs: Path, jobs: int) -> None:
    """Run the candidates that have no scores yet, `jobs` at a time; make the start of the best, write the file."""
    problems = choice_problems(start, runs / "problems")
    path = real_arms.FOLDER / "distill.json"
    results = {}
    if path.exists():
        results = json.loads(path.read_text())["results"]
    names = [name for name in (*CANDIDATES, "bfloat16", "rounded") if name not in results]

    # Threads that wait: each model is made and scored by processes of its own.
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {name: pool.submit(run_and_measure, name, start, runs, problems) for name in names}
    for name, future in waiting.items():
        results[name] = future.result()

    chosen = max(CANDIDATES, key=lambda name: sum(results[name]["scores"]))
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
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
