"""Folders of runs as trainers leave them, with made-up numbers."""

import json

from qarl_trl.tools.report.plots import FLOOR, PANELS


DRAWN = [FLOOR, *(name for panel in PANELS for name in panel.metrics if name != "eval_reward")]
OF_A_ROLLOUT = ("reward", "mismatch/", "sync/", "quant/", "completions/")


def log(batches=8, updates=4, **changes):
    """A log as a healthy run writes it, a line an update; every drawn metric has values of its own, and varies."""
    rows = []
    for step in range(1, batches * updates + 1):
        batch, update = divmod(step - 1, updates)
        row = {name: (i + 2) / 100 + 1e-4 * step for i, name in enumerate(DRAWN)}
        row |= {
            "ratio/min": 1 - update / 64 - batch / 1024,
            "ratio/max": 1 + update / 64 + batch / 1024,
            "error_tokens/frac": 1e-5 * step,
        }
        row |= {"mismatch/logp_diff_mean": 1e-7 * (batch + 1), "mismatch/kl_k3": 1e-14, "reward": 0.1 * batch}
        row |= changes
        if update:
            row = {name: value for name, value in row.items() if not name.startswith(OF_A_ROLLOUT)}
        rows.append({"step": step, **row})
    return rows


def write_run(folder, rows, checkpoint=None):
    place = folder if checkpoint is None else folder / f"checkpoint-{checkpoint}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder
