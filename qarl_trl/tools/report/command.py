"""The command `qarl-trl report`: options, checks, and what is written. matplotlib loads with the first figure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .runs import Run

DESCRIPTION = """Plots of what runs logged, side by side: PNG files and one HTML page, which needs no network. A RUN is the
output_dir of a QaRLTrainer or of TRL's GRPOTrainer with a trainer_state.json (at the top or in a checkpoint-*), or the
quickstart's folder. NAME=RUN gives it another name than the folder's."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Bad input is one line and exit code 2, and then nothing is written."""
    options = make_parser().parse_args(argv)
    try:
        path = write_report(options.runs, options.output_dir, options.baseline)
    except (ValueError, OSError, ImportError) as error:
        print(f"qarl-trl report: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from error
    print(f"written to {path}")


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(prog="qarl-trl report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or NAME=FOLDER")
    parser.add_argument("--baseline", metavar="RUN", help="name or folder of the run that speed-ups are over")
    parser.add_argument(
        "--output_dir", help="where report.html, report.png and report/*.png go (default: the first run's folder)"
    )
    return parser


def write_report(given: Sequence[str], output_dir: str | None = None, baseline: str | None = None) -> Path:
    """
    Write `report.html`, `report.png` (its first figure) and `report/<figure>.png`.

    Args:
        given (`Sequence[str]`): `FOLDER` or `NAME=FOLDER`, one for each run.
        output_dir (`str`, *optional*): The first run's folder unless given.
        baseline (`str`, *optional*): Name or folder of the run that speed-ups are over; one more run if not in `given`.

    Returns:
        `Path`: of the page.

    Raises:
        ValueError: for a folder that is missing, no run, or without a log; for two runs of one name or too many.
        ImportError: without matplotlib.
    """
    runs, base = load(given, baseline)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("the report needs matplotlib: pip install 'qarl_trl[report]'.") from error
    from .figures import line_charts
    from .page import page
    from .texts import examples
    from .times import time_chart
    from .tokens import distributions, read_tokens

    tokens = {run.name: found for run in runs if (found := read_tokens(run)) is not None}
    pictures = [*line_charts(runs), *distributions(runs, tokens), *time_chart(runs, base)]
    if not pictures:
        raise ValueError(f"nothing that the report shows was logged by {', '.join(run.name for run in runs)}.")
    texts = {run.name: examples(run, tokens.get(run.name)) for run in runs}
    folder = Path(output_dir).expanduser() if output_dir else runs[0].folder
    (folder / "report").mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / "report" / f"{picture.key}.png").write_bytes(picture.light)
    (folder / "report.png").write_bytes(pictures[0].light)
    (folder / "report.html").write_text(page(runs, pictures, texts, base))
    return folder / "report.html"


def load(given: Sequence[str], baseline: str | None) -> tuple[list[Run], Run | None]:
    """The runs, and the baseline, which is one of them."""
    from .draw import COLOURS
    from .runs import read_run

    runs = [read_run(one) for one in given]
    base = None
    if baseline is not None:
        base = next((run for run in runs if run.name == baseline), None)
        if base is None:
            found = read_run(baseline)
            base = next((run for run in runs if run.folder.resolve() == found.folder.resolve()), found)
            runs += [] if base in runs else [base]
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two runs are named {sorted(twice)[0]!r}: name them with NAME=FOLDER.")
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(COLOURS)} runs fit in one report, got {len(runs)}.")
    return runs, base
