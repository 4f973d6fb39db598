"""`qarl-trl report`: one HTML file with embedded pictures and without scripts. This module escapes every text of a run."""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from .plots import COLOURS, FLOOR, PANELS, STYLES, Panel, png
from .runs import Run, read_run
from .verdict import headline, verdict


MARKS = {"good": "✓", "look": "▲", "bad": "✗", "unknown": "?"}


def main(argv: Sequence[str] | None = None) -> None:
    """
    Write one HTML page about one or more runs: a verdict and plots. A RUN is the output_dir of a QaRLTrainer or of TRL's
    GRPOTrainer, with a trainer_state.json (at the top or in a checkpoint-*).
    """
    parser = argparse.ArgumentParser(prog="qarl-trl report", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--output_dir", help="where report.html goes (default: the first run's folder)")
    options = parser.parse_args(argv)
    folders = [Path(one).expanduser().resolve() for one in options.runs]
    root = os.path.commonpath([folder.parent for folder in folders])  # the rest of a path may contain user names
    text = page([read_run(folder, str(folder.relative_to(root))) for folder in folders])
    file = Path(options.output_dir or folders[0]).expanduser() / "report.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(f"written to {file}")


def page(runs: Sequence[Run]) -> str:
    """The whole report as HTML, the runs in the order of their colours; `ValueError` if there are more runs than colours."""
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(COLOURS)} runs fit in one report, got {len(runs)}.")
    names = [
        f'<h3><span style="color: {colour}">⬤</span> {escape(run.name)}</h3>'
        for run, colour in zip(runs, COLOURS, strict=False)
    ]
    flat = [f"<code>{name}</code> {value:.3g}" for panel in PANELS for name, value in panel.split(runs)[1].items()]
    return Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(", ".join(run.name for run in runs)),
        verdicts="\n".join(map(_verdict, runs, names)),
        docs=_link("metrics.md"),
        names="\n".join(names),
        plots="\n".join(_figure(panel, runs) for panel in PANELS),
        constant=", ".join(flat) or "nothing",
    )


def _link(page: str) -> str:
    """A link to a page of the docs site (`[project.urls]`), with the name of its file in the repository."""
    urls = dict(url.split(", ") for url in importlib.metadata.metadata("qarl_trl").get_all("Project-URL", []))
    name, _, anchor = page.partition(".md")
    return f'<a href="{escape(urls["Documentation"])}/{name}/{anchor}">docs/{page}</a>' if page else ""


def _verdict(run: Run, name: str) -> str:
    findings = verdict(run)
    lines = [f"<p>{MARKS[f.level]} {escape(f.text)}. <i>{escape(f.advice)} {_link(f.page)}</i></p>" for f in findings]
    return f"<section>{name}<b>{headline(findings)}</b>{''.join(lines)}</section>"


def _figure(panel: Panel, runs: Sequence[Run]) -> str:
    """A picture with the names of its metrics, as in docs/metrics.md; empty if none of them varies."""
    names = panel.split(runs)[0]
    if not names:
        return ""
    has_floor = panel.log and any(len(run.values(FLOOR)) for run in runs)
    drawn = dict(zip(names, STYLES, strict=False)) | ({FLOOR: "dotted"} if has_floor else {})
    keys = ", ".join(f"{style} <code>{name}</code>" for name, style in drawn.items())
    image = base64.b64encode(png(panel, runs)).decode()
    return (
        f'<figure><b>{panel.title}</b><img alt="{panel.title}" src="data:image/png;base64,{image}">'
        f'<figcaption class="note">{keys}</figcaption></figure>'
    )
