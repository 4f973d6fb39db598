"""`qarl-trl report`: one HTML file without scripts, whose pictures are in it. Every text of a run is escaped here."""

from __future__ import annotations

import argparse
import base64
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from .plots import COLOURS, PANELS, STYLES, Panel, png
from .runs import Run, read_run
from .verdict import headline, verdict


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 1em auto; padding: 0 1em; overflow-wrap: anywhere }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 1.5em; margin: 1em 0 }
.grid > * { margin: 0; min-width: 0 }
img { width: 100% }
h3 { display: inline-block; margin: 0 1em 0 0; font-size: 15px }
i, code, .note { font-size: 13px; color: #57606a }
"""
MARKS = {"good": "✓", "look": "▲", "bad": "✗", "unknown": "?"}


def main(argv: Sequence[str] | None = None) -> None:
    """
    One HTML page of what runs logged, side by side: a verdict and plots. A RUN is the output_dir of a QaRLTrainer or of TRL's
    GRPOTrainer with a trainer_state.json (at the top or in a checkpoint-*).
    """
    parser = argparse.ArgumentParser(prog="qarl-trl report", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--output_dir", help="where report.html goes (default: the first run's folder)")
    options = parser.parse_args(argv)
    folders = [Path(one).expanduser().resolve() for one in options.runs]
    root = os.path.commonpath([folder.parent for folder in folders])  # the rest of a path may hold names of users
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
    parts = [
        "<h1>qarl-trl report</h1>",
        _grid(map(_verdict, runs, names)),
        '<h2>Plots</h2><p class="note">A point is a rollout batch. docs/metrics.md explains each metric.</p>',
        *names,
        _grid(_figure(panel, runs) for panel in PANELS),
    ]
    title = escape(", ".join(run.name for run in runs))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>qarl-trl report: {title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _grid(parts: Iterable[str]) -> str:
    return '<div class="grid">' + "\n".join(filter(None, parts)) + "</div>"


def _verdict(run: Run, name: str) -> str:
    findings = verdict(run)
    lines = [f"<p>{MARKS[f.level]} {escape(f.text)}. <i>{escape(f.advice)}</i></p>" for f in findings]
    return f"<section>{name}<b>{headline(findings)}</b>{''.join(lines)}</section>"


def _figure(panel: Panel, runs: Sequence[Run]) -> str:
    """A picture, and below it the names of its metrics as docs/metrics.md has them; empty where no run logged one."""
    logged = {
        name: style
        for name, style in zip(panel.metrics, STYLES, strict=False)
        if any(len(r.values(name)) for r in runs)
    }
    if not logged:
        return ""
    keys = ", ".join(f"{style} <code>{name}</code>" for name, style in logged.items())
    image = base64.b64encode(png(panel, runs)).decode()
    return (
        f'<figure><b>{panel.title}</b><img alt="{panel.title}" src="data:image/png;base64,{image}">'
        f'<figcaption class="note">{keys}</figcaption></figure>'
    )
