"""`qarl-trl report`: one HTML file with embedded pictures and without scripts.

This module escapes every text of a run.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from ..arguments import CommandParser
from .plots import COLOURS, FLOOR, PANELS, STYLES, Panel, png
from .runs import LoggedRun, read_run
from .verdict import Judgement, headline, judge


MARKS = {"good": "✓", "look": "▲", "bad": "✗", "unknown": "?"}


def main(argv: Sequence[str] | None = None) -> None:
    """
    Write one HTML page about one or more runs: a verdict and plots. A RUN is the output_dir of any trainer with a
    trainer_state.json (at the top or in a checkpoint-*). Most is judged of trainers that sample, such as QaRLTrainer
    and TRL's GRPOTrainer; of SFT hardly anything can be.
    """
    # The docstring is also the text of --help.
    parser = CommandParser(prog="qarl-trl report", description=main.__doc__, example="qarl-trl report runs/sums")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--output_dir", help="where report.html goes (default: the first run's folder)")
    options = parser.parse_args(argv)

    folders = [Path(folder).expanduser().resolve() for folder in options.runs]
    # Runs are named by what differs in their paths: the rest may contain user names.
    # The common folder of their parents, so that one run alone keeps the name of its folder.
    root = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder, str(folder.relative_to(root))) for folder in folders]
    text = page(runs)

    file = Path(options.output_dir or folders[0]).expanduser() / "report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)

    for run in runs:
        judgements = judge(run)
        print(f"{run.name}: {headline(judgements)}")
        if run.note:
            print(f"  {run.note}")
        for judgement in judgements:
            if judgement.level != "good":
                print(f"  {MARKS[judgement.level]} {judgement.text}. {judgement.advice}".rstrip())
    print(f"written to {file}")


def page(runs: Sequence[LoggedRun]) -> str:
    """
    The whole report as HTML.

    Args:
        runs: The runs, in the order of their colours.

    Raises:
        ValueError: if there are more runs than colours.
    """
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(COLOURS)} runs fit in one report, got {len(runs)}.")

    headings = []
    for run, colour in zip(runs, COLOURS, strict=False):
        headings.append(f'<h3><span style="color: {colour}">⬤</span> {escape(run.name)}</h3>')

    constants = []
    for panel in PANELS:
        _, constant = panel.split(runs)
        constants += [f"<code>{name}</code> {value:.3g}" for name, value in constant.items()]

    # `Template` does not look at the values again, so a `$` in a run's name stays what it is.
    template = Template(Path(__file__).with_name("page.html").read_text())
    return template.substitute(
        title=escape(", ".join(run.name for run in runs)),
        verdicts="\n".join(map(_verdict, runs, headings)),
        docs=_link("metrics.md"),
        names="\n".join(headings),
        plots="\n".join(_figure(panel, runs) for panel in PANELS),
        constant=", ".join(constants) or "nothing",
    )


def _link(page: str) -> str:
    """A link to a page of the docs site (`[project.urls]`), with the name of its file in the repository."""
    if not page:
        return ""

    # The address of the docs stands in pyproject.toml alone.
    entries = importlib.metadata.metadata("qarl_trl").get_all("Project-URL", [])
    urls = dict(entry.split(", ") for entry in entries)
    name, _, anchor = page.partition(".md")
    return f'<a href="{escape(urls["Documentation"])}/{name}/{anchor}">docs/{page}</a>'


def _verdict(run: LoggedRun, heading: str) -> str:
    """The section about a run: its state, and a line for each judgement."""
    judgements = judge(run)
    lines = "".join(map(_line, judgements))
    note = f"<p>{escape(run.note)}</p>" if run.note else ""
    return f"<section>{heading}<b>{headline(judgements)}</b>{note}{lines}</section>"


def _line(judgement: Judgement) -> str:
    """One judgement, with what to do."""
    mark = MARKS[judgement.level]
    advice = f"<i>{escape(judgement.advice)} {_link(judgement.page)}</i>"
    return f"<p>{mark} {escape(judgement.text)}. {advice}</p>"


def _figure(panel: Panel, runs: Sequence[LoggedRun]) -> str:
    """A picture with the names of its metrics, as in docs/metrics.md; empty if none of them varies."""
    varying, _ = panel.split(runs)
    if not varying:
        return ""

    # Legends inside the picture would cover lines at this size.
    drawn = dict(zip(varying, STYLES, strict=False))
    if panel.log and any(len(run.values(FLOOR)) for run in runs):
        drawn[FLOOR] = "dotted"
    keys = ", ".join(f"{style} <code>{name}</code>" for name, style in drawn.items())

    # Embedded, so that the page is one file that can be sent.
    image = base64.b64encode(png(panel, runs)).decode()
    return (
        f'<figure><b>{panel.title}</b><img alt="{panel.title}" src="data:image/png;base64,{image}">'
        f'<figcaption class="note">{keys}</figcaption></figure>'
    )
