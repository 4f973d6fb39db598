"""The command `qarl-trl report`: options, and what is written. matplotlib loads with the first plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


DESCRIPTION = """One HTML page of what runs logged, side by side: a verdict, plots, and examples of completions. A RUN is the
output_dir of a QaRLTrainer or of TRL's GRPOTrainer with a trainer_state.json (at the top or in a checkpoint-*). NAME=RUN gives it another name than the
folder's."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="qarl-trl report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or NAME=FOLDER")
    parser.add_argument("--output_dir", help="where report.html goes (default: the first run's folder)")
    options = parser.parse_args(argv)
    print(f"written to {write_report(options.runs, options.output_dir)}")


def write_report(given: Sequence[str], output_dir: str | None = None) -> Path:
    """
    Write `report.html` of the runs `given` as `FOLDER` or `NAME=FOLDER` into `output_dir`, or into the first run's folder.

    `ValueError` for a folder that is missing or without a log, for two runs of one name and for too many; `ImportError` without
    matplotlib.
    """
    from .page import page
    from .plots import COLOURS, PANELS
    from .runs import read_run

    runs = [read_run(one) for one in given]
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two runs are named {sorted(twice)[0]!r}: name them with NAME=FOLDER.")
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(COLOURS)} runs fit in one report, got {len(runs)}.")
    if not any(len(run.values(name)) for run in runs for panel in PANELS for name in panel.metrics):
        raise ValueError(f"nothing that the report shows was logged by {', '.join(names)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("the report needs matplotlib: pip install 'qarl_trl[report]'.") from error
    folder = Path(output_dir).expanduser() if output_dir else runs[0].folder
    text = page(runs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(text)
    return folder / "report.html"
