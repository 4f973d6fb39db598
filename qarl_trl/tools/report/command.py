"""The command `qarl-trl report`: options, and what is written. matplotlib loads with the first plot."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


DESCRIPTION = """One HTML page of what runs logged, side by side: a verdict and plots. A RUN is the
output_dir of a QaRLTrainer or of TRL's GRPOTrainer with a trainer_state.json (at the top or in a checkpoint-*)."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write `report.html`; `ValueError` for a folder without a log."""
    parser = argparse.ArgumentParser(prog="qarl-trl report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--output_dir", help="where report.html goes (default: the first run's folder)")
    options = parser.parse_args(argv)
    from .page import page
    from .runs import read_run

    folders = [Path(one).expanduser().resolve() for one in options.runs]
    root = os.path.commonpath([folder.parent for folder in folders])  # the rest of a path may hold names of users
    text = page([read_run(folder, str(folder.relative_to(root))) for folder in folders])
    file = Path(options.output_dir or folders[0]).expanduser() / "report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(f"written to {file}")
