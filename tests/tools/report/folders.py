"""Folders of runs as trainers leave them, with made-up numbers."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qarl_trl.metrics.token_stats import SCHEMA


# What a run with an engine logs for the report's figures; tests/slow/test_sync_check.py holds it against a real one.
LOGGED = {
    "quant": ("flip_frac", "flip_frac/attention", "flip_frac/mlp"),
    "sync": ("bytes", "verify_logp_diff", "verify_noise_floor", "verify_allowed"),
    "mismatch": ("kl_k3", "seq_weight_mean", "seq_weight_min", "seq_weight_max"),
    "ratio": ("kl_k3", "min", "max", "neg_q50", "neg_q99", "pos_high_frac", "neg_low_frac"),
    "ratio/paper": ("pos_high_frac", "neg_low_frac", "neg_high_frac"),
    "error_tokens": ("frac", "pos_frac", "neg_frac", "extreme_frac", "inside_frac"),
    "completions": ("mean_length", "clipped_ratio"),
}
NAMES = ["reward_std", *(f"{family}/{name}" for family, names in LOGGED.items() for name in names)]
NAMES = [name.replace("paper/", "paper_") for name in NAMES]
# What a run logs that has experts, or answers of that kind.
RARE = ["quant/flip_frac/experts", "error_tokens/extreme_corr"]
RARE += ["completions/pos_clipped_ratio", "completions/neg_clipped_ratio"]


def row(step, **changes):
    """A log line. The metrics of `NAMES` and `RARE` have values of their own."""
    values = {"step": step, "reward": 0.1 * step, "entropy": 1.0 / step, "step_time": 2.0}
    values |= {"time/rollout": 1.0, "time/sync": 0.25, "time/update": 0.75, "mismatch/logp_diff_mean": 10.0**-step}
    values |= {"ratio/neg_high_frac": 0.01 * step, "ratio/pos_q50": 1.0, "ratio/pos_q99": 1.0 + 0.01 * step}
    return values | {name: (i + 2) / 40 + 0.001 * step for i, name in enumerate([*NAMES, *RARE])} | changes


def write_run(folder, log, checkpoint=None):
    place = folder if checkpoint is None else folder / f"checkpoint-{checkpoint}"
    place.mkdir(parents=True, exist_ok=True)
    last = max((line.get("step", 0) for line in log), default=0)
    (place / "trainer_state.json").write_text(json.dumps({"global_step": last, "log_history": log}))
    return folder


def token_rows(count, seed=0):
    """Completions of 6 tokens over updates 1 to 4 of one rollout batch; the last two tokens of every third are errors."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        old, mask = np.log(rng.uniform(0.001, 1.0, 6)), [True] * 5 + [i % 2 == 0]
        step = 1 + i % 4
        current = old if step == 1 else old + rng.normal(0, 0.1, 6)
        engine = [None if i % 5 == 0 and t == 0 else float(old[t] + 0.01) for t in range(6)]
        kept = np.array(mask)
        rows.append(
            {"step": step, "rollout_step": 1, "prompt": f"p{i}", "completion": f"answer {i}", "reward": float(i % 2)}
            | {"advantage": float(rng.choice([-1, 0, 1])), "token_ids": list(range(6)), "mask": mask}
            | {"old_logps": old.tolist(), "current_logps": current.tolist(), "engine_logps": engine}
            | {"error_mask": [i % 3 == 0 and t > 3 for t in range(6)], "mismatch_weight": 0.99}
            | {"ratio": math.exp((current - old)[kept].mean())}
        )
    return rows


def write_tokens(folder, rows):
    (folder / "token_stats").mkdir(parents=True, exist_ok=True)
    for step in {line["step"] for line in rows}:
        table = pa.Table.from_pylist([line for line in rows if line["step"] == step], SCHEMA)
        pq.write_table(table, folder / "token_stats" / f"token_stats_{step:08d}.parquet")
    return folder
