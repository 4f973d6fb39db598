"""Folders of runs as trainers leave them, with made-up numbers."""

import json

from qarl_trl.tools.report.plots import FLOOR, PANELS


def drawn_metrics():
    """What the page draws of the log lines of a training."""
    names = [FLOOR]
    for panel in PANELS:
        names += panel.metrics

    # It has log lines of its own.
    names.remove("eval_reward")
    return names


DRAWN = drawn_metrics()
# Prefixes of the metrics that are logged once for a rollout batch, at its first update.
OF_A_ROLLOUT = ("reward", "mismatch/", "sync/", "quant/", "completions/")


def log(batches=9, updates=4, **changes):
    """A log as a healthy run writes it, a line an update; every drawn metric has values of its own, and varies."""
    return [log_line(step, updates, changes) for step in range(1, batches * updates + 1)]


def log_line(step, updates, changes):
    """The line of one update."""
    batch, update = divmod(step - 1, updates)

    row = {}
    for i, name in enumerate(DRAWN):
        row[name] = (i + 2) / 100 + 1e-4 * step
    # Sums of powers of two, which tests compare exactly. The ratio goes away from 1 within a rollout batch.
    row["ratio/min"] = 1 - update / 64 - batch / 1024
    row["ratio/max"] = 1 + update / 64 + batch / 1024
    # Of a healthy run: within the limits of `verdict`.
    row["error_tokens/frac"] = 1e-5 * step
    row["mismatch/logp_diff_mean"] = 1e-7 * (batch + 1)
    row["mismatch/kl_k3"] = 1e-14
    row["reward"] = 0.1 * batch
    row |= changes

    if update:
        row = without(row, OF_A_ROLLOUT)
    return {"step": step, **row}


def without(row, prefixes):
    """A line of a log without the metrics whose names begin with one of some prefixes."""
    kept = {}
    for name, value in row.items():
        if not name.startswith(prefixes):
            kept[name] = value
    return kept


def write_run(folder, rows, checkpoint=None):
    """Write a log as the trainer's state, at the top of a folder or in a checkpoint; returns the folder."""
    place = folder if checkpoint is None else folder / f"checkpoint-{checkpoint}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder
