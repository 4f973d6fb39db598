"""
The paper's comparison in miniature: arms, seeds and regimes on a task that runs on a CPU (results/arms/README.md).

    python benchmarks/arms.py --regime hard --jobs 2      run the cells that have no file yet
    python benchmarks/arms.py --table                     write the tables (arms_table.py)

A cell is one arm with one seed in one regime. It has a process of its own and a file under results/arms/, so a stopped
run goes on where it was. A cell takes a minute or two on one core, one of long answers six.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


# Regime, arm and seed of a cell.
Cell = tuple[str, str, int]

FOLDER = Path(__file__).resolve().parent / "results" / "arms"
WEIGHTS = "model.safetensors"  # of a warm start
SEEDS = range(100)  # more than any arm has
# How held-out answers draw their random numbers. Cells without this were run with one seed for all 256; they are run
# again.
DRAWS = "a seed for each problem"

# Arms: fields of QaRLConfig; epsilon and epsilon_high of GSPO come from the regime's band.
TIS = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
# IcePop (Ring-1T, arXiv 2510.18855): tokens whose ratio leaves [0.5, 5] do not count.
ICEPOP = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0,
}
# KPop (https://ringtech.notion.site/kpop): tokens do not count whose binary KL divergence, either way, is above 0.1
# nats.
KPOP = {
    "loss_type": "grpo",
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1e9,
    "kpop": 0.1,
}
STOCK = {"learner_ops": "stock", "quant_kernel": "dequant"}
GSPO = TIS | {"importance_sampling_level": "sequence"}
ARMS: dict[str, dict[str, Any]] = {
    "bf16 GRPO": TIS | {"quant_scheme": "none"},
    "bf16 TBPO": {"quant_scheme": "none"},
    "rollout-only GRPO": TIS | {"quantize_learner": False},
    "rollout-only TBPO": {"quantize_learner": False},
    "QaRL TBPO": {},
    "QaRL GSPO": GSPO,
    "QaRL GRPO": TIS,
    "QaRL dual-clip GRPO": TIS | {"delta": 3.0},
    "QaRL MIS-GSPO": GSPO | {"vllm_importance_sampling_mode": "sequence_mask"},
    # The same low-bit weights, everything else as transformers and torch compute it: how a learner is aligned on a
    # GPU.
    "QaRL TBPO, stock operations": STOCK,
    "QaRL GRPO, stock operations": TIS | STOCK,
    "QaRL GRPO, IcePop, stock operations": ICEPOP | STOCK,
    "rollout-only GRPO, IcePop": ICEPOP | {"quantize_learner": False},
    "rollout-only GRPO, KPop": KPOP | {"quantize_learner": False},
    # What the weight of TIS does to a baseline whose learner does not make the engine's mistakes.
    "rollout-only GRPO without TIS": {
        "loss_type": "grpo",
        "quantize_learner": False,
        "vllm_importance_sampling_correction": False,
    },
    "rollout-only TBPO without weight": {"quantize_learner": False, "vllm_importance_sampling_correction": False},
}
# Five seeds in the hard regime; all others three.
MAIN = (
    "bf16 GRPO",
    "rollout-only GRPO",
    "rollout-only TBPO",
    "QaRL TBPO",
    "QaRL GSPO",
)
UNWEIGHTED = ("rollout-only GRPO without TIS", "rollout-only TBPO without weight")
# Of the regimes whose trained weights are scored in every deployment.
PORTABLE_ARMS = (
    "bf16 GRPO",
    "rollout-only GRPO",
    "rollout-only GRPO without TIS",
    "rollout-only TBPO",
    "rollout-only TBPO without weight",
    "QaRL GRPO",
    "QaRL GSPO",
    "QaRL TBPO",
)
DISTILLED_ARMS = ("bf16 GRPO", "rollout-only GRPO", "QaRL GRPO")
LEVELS = ("rollout-only TBPO", "QaRL TBPO, stock operations", "QaRL TBPO")

TOY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
HARD: dict[str, Any] = {
    "model": TOY,
    "start": 0,  # which warm start: seed of its weights and demonstrations
    "forgotten": 0.15,  # share of carries that the demonstrations forget
    "warm_steps": 1200,
    "outliers": {"channels": 16, "factor": 8},
    "quantization": {"quant_scheme": "W4A16", "quant_group_size": -1},
    "learning_rate": 1e-4,
    "rollouts": 10,
    "updates": 8,  # of a rollout batch
    "band": 2e-3,  # epsilon_high, delta_low and delta_high are 4, 3 and 7 of these: those of the quickstart
    "max_completion_length": 140,
}
# Answers three times as long, where error tokens can occur. The learner is in float32, on torch's operations, and the
# engine's 4-bit layers are those of portable_engine.py: so it runs on every x86-64 CPU.
LONG = HARD | {
    "model": TOY | {"max_position_embeddings": 512},
    "numbers": 14,  # of a sum: an answer has 376 tokens
    "outliers": {"channels": 4, "factor": 8},
    "forgotten": 0.08,
    "warm_steps": 1000,
    "max_completion_length": 440,
    "portable": True,
}
REGIMES: dict[str, dict[str, Any]] = {
    "hard": HARD,
    "again": HARD | {"start": 1},
    "hot": HARD | {"learning_rate": 3e-4},
    "easy": HARD | {"outliers": {"channels": 0, "factor": 1}},
    "w4a8": HARD | {"quantization": {"quant_scheme": "W4A8"}},
    "long": LONG,
    "long_stale": LONG | {"updates": 32},
    "long_stale_slow": LONG | {"updates": 32, "learning_rate": 3e-5},
    # As `long` computes, so that they run on every x86-64 CPU.
    "hot_portable": HARD | {"learning_rate": 3e-4, "portable": True},
    "stale_portable": HARD | {"updates": 32, "portable": True},
    # Arms in 4 bits begin with a distilled start, and every trained model is distilled again.
    "long_distilled": LONG | {"distilled": {"updates": 300, "rate": 3e-4}},
}
# Eight arms each, and as a rule eight seeds.
PORTABLE = ("long", "long_stale", "long_stale_slow", "hot_portable", "stale_portable")


# Which cells there are -----------------------------------------------------------------------------------------------


def cells(options: argparse.Namespace) -> list[Cell]:
    """
    List the cells that are asked for: the first seed of all arms, then the second, so that rows fill evenly.

    Args:
        options: `regime`, and `arms` and `seeds`, which may be `None`: those that are meant to run.
    """
    wanted = []
    for regime in options.regime:
        arms = options.arms or arms_of(regime)
        for seed in SEEDS:
            for arm in arms:
                seeds = options.seeds or range(seeds_of(regime, arm))
                if seed in seeds:
                    wanted.append((regime, arm, seed))
    return wanted


def seeds_of(regime: str, arm: str) -> int:
    """How many seeds an arm has in a regime."""
    if regime == "long_stale":
        return 1  # in it bf16 GRPO fails, too, so that it compares nothing
    if regime == "long_distilled":
        return 3
    if regime in PORTABLE:
        return 8
    if regime == "hard" and arm in MAIN:
        return 5
    return 3


def arms_of(regime: str) -> list[str]:
    """The arms that are meant to run in a regime."""
    if regime == "hard":
        return list(ARMS)
    if regime == "w4a8":
        return list(LEVELS)
    if regime in PORTABLE:
        return list(PORTABLE_ARMS)
    if regime == "long_distilled":
        return list(DISTILLED_ARMS)
    if regime == "hot":
        return [*MAIN, *UNWEIGHTED, "QaRL GRPO", "bf16 TBPO"]
    return [*MAIN, *UNWEIGHTED]


def file_of(regime: str, arm: str, seed: int) -> Path:
    """Where a cell is, if it was run."""
    name = arm.lower().replace(",", "").replace(" ", "_")
    return FOLDER / regime / f"{name}.{seed}.json"


def distilled_file_of(settings: dict[str, Any]) -> Path:
    """Where the weights of a regime's distilled start are (arms_distilled_start.py)."""
    return FOLDER / f"{start_of(settings)}_distilled.safetensors"


def is_done(cell: Cell) -> bool:
    """Whether a cell has a file, measured as it is measured now."""
    file = file_of(*cell)
    return file.exists() and json.loads(file.read_text()).get("draws") == DRAWS


def settings_of(regime: str, arm: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The regime's settings, and the arm's with the bounds that belong to the regime."""
    settings = REGIMES[regime]
    chosen = dict(ARMS[arm])

    if "importance_sampling_level" in chosen:
        # Table 2: GSPO's bounds are delta_low and epsilon_high of TBPO.
        chosen["epsilon"] = 3 * settings["band"]
        chosen["epsilon_high"] = 4 * settings["band"]
    if settings["quantization"]["quant_scheme"] == "W4A8":
        # torch has no product of its own for 8-bit integer activations.
        chosen.pop("quant_kernel", None)
    return settings, chosen


# Running them --------------------------------------------------------------------------------------------------------


def run_cell(regime: str, arm: str, seed: int, base: str) -> None:
    """In a process of its own: train, evaluate, write the file."""
    import arms_cell

    os.nice(19)
    settings, chosen = settings_of(regime, arm)
    try:
        with tempfile.TemporaryDirectory() as folder:
            measured = arms_cell.run(Path(base), chosen, settings, seed, Path(folder))
    except Exception:
        traceback.print_exc()
        raise

    result = {"regime": regime, "arm": arm, "seed": seed, "settings": settings, "arm_settings": chosen, **measured}
    path = file_of(regime, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete: a cell that has a file is not run again.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n")
    part.rename(path)


def run_all(wanted: list[Cell], jobs: int, bases: Path) -> None:
    """
    Run the cells without a file, `jobs` at a time, each in a fork of a process that has only imported.

    `bases` is the folder of the warm starts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["arms_cell"])
    running: list[tuple[Cell, BaseProcess]] = []

    for cell in wanted:
        if is_done(cell):
            continue
        regime, _, _ = cell
        base = make_start(context, REGIMES[regime], bases)
        wait_for_others(running, jobs - 1)
        process = context.Process(target=run_cell, args=(*cell, str(base)))
        process.start()
        running.append((cell, process))
    wait_for_others(running, 0)


def wait_for_others(running: list[tuple[Cell, BaseProcess]], limit: int) -> None:
    """Wait until at most `limit` of the cells still run. Those that ended leave the list, and a line says how."""
    while len(running) > limit:
        multiprocessing.connection.wait([process.sentinel for _, process in running])
        for cell, process in list(running):
            if not process.is_alive():
                running.remove((cell, process))
                print(*cell, "done" if is_done(cell) else "FAILED", flush=True)


# Where they start ----------------------------------------------------------------------------------------------------


def make_start(context: Any, regime: dict[str, Any], bases: Path) -> Path:
    """Make the warm start of a regime in `bases`, in a process of its own, if it is not there. Returns its folder."""
    base = bases / start_of(regime)
    # Beside the cells, so that another machine can go on.
    kept = FOLDER / f"{base.name}.safetensors"

    is_made = (base / "done").exists()
    is_another = is_made and kept.exists() and sha_of(kept) != sha_of(base / WEIGHTS)
    if not is_made or is_another:
        process = context.Process(target=_warm_start, args=(str(base), regime, str(kept)))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit("The warm start failed.")
        (base / "done").touch()

    check_start(base / WEIGHTS, base.name)
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        part = Path(f"{kept}.part")
        shutil.copyfile(base / WEIGHTS, part)
        part.rename(kept)
    return base


def sha_of(weights: Path) -> str:
    """Which start a cell has."""
    return hashlib.sha256(weights.read_bytes()).hexdigest()[:16]


def start_of(settings: dict[str, Any]) -> str:
    """A name of what a warm start is made from."""
    names = ("model", "start", "forgotten", "warm_steps", "numbers")
    made_from = {name: settings[name] for name in names if name in settings}
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:12]


def check_start(weights: Path, name: str) -> None:
    """Refuse a start that is not that of the cells there are: the warm start of another CPU is another model."""
    here = sha_of(weights)
    others = set()
    for file in FOLDER.glob("*/*.json"):
        cell = json.loads(file.read_text())
        if start_of(cell["settings"]) == name and cell["base_sha256"] != here:
            others.add(cell["base_sha256"])

    if others:
        raise SystemExit(
            f"All cells must have one start: here it is {here}, cells in {FOLDER} have "
            f"{', '.join(sorted(others))}. Remove those cells and run them again, or go on where they were run."
        )


def _warm_start(base: str, regime: dict[str, Any], kept: str) -> None:
    import common  # noqa: F401  # finds the toy of examples/quickstart
    from arms_task import warm_start

    warm_start(Path(base), regime, Path(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=["hard"], help="in this order (default: hard)")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=ARMS,
        help="default: all in 'hard', the three levels of alignment in 'w4a8', else the main ones",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        help="default: 0 to 4 of the main arms in 'hard', 0 to 7 in regimes that run on every CPU, else 0 to 2",
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one thread each (default: 1)")
    parser.add_argument(
        "--bases", type=Path, default=Path(tempfile.gettempdir()) / "qarl_trl_arms", help="warm starts"
    )
    parser.add_argument("--table", action="store_true", help="write the tables and run nothing")
    options = parser.parse_args()

    if options.table:
        import arms_table

        arms_table.main()
        return

    os.environ["OMP_NUM_THREADS"] = "1"
    run_all(cells(options), options.jobs, options.bases)


if __name__ == "__main__":
    main()
