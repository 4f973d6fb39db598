"""The page: one HTML file without scripts, whose pictures are in it. Every text of a run is escaped here or in examples.py."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from .examples import examples
from .plots import COLOURS, Panel, png, shown_panels
from .runs import Run
from .verdict import headline, verdict


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 1em auto; padding: 0 1em; overflow-wrap: anywhere }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 1.5em; margin: 1em 0 }
.grid > * { margin: 0; min-width: 0 }
table { border-collapse: collapse }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid #d5dae0 }
img { width: 100% }
h3 { display: inline-block; margin: 0 1em 0 0; font-size: 15px }
i, code, .note { font-size: 13px; color: #57606a }
pre { max-height: 20em; overflow-y: auto; white-space: pre-wrap; background: #f3f5f7; padding: .6em }
"""
MARKS = {"good": "✓", "look": "▲", "bad": "✗", "unknown": "?"}
SHOWN = (
    "quant_scheme",
    "quantize_learner",
    "loss_type",
    "learning_rate",
)  # settings that stand there also if all are equal


def page(runs: Sequence[Run]) -> str:
    """The whole report as HTML, the runs in the order of their colours; `ValueError` if there are more runs than colours."""
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(COLOURS)} runs fit in one report, got {len(runs)}.")
    panels, constant = shown_panels(runs)
    names = [
        f'<h3><span style="color: {colour}">⬤</span> {escape(run.name)}</h3>'
        for run, colour in zip(runs, COLOURS, strict=False)
    ]
    values = ", ".join(f"<code>{name}</code> {value:.4g}" for name, value in constant.items())
    parts = [
        "<h1>qarl-trl report</h1>",
        _grid(map(_verdict, runs, names)),
        '<h2>Plots</h2><p class="note">A point is a rollout batch. docs/metrics.md explains each metric.</p>',
        *names,
        _grid(_figure(panel, styles, runs) for panel, styles in panels),
        f"<p>Constant: {values or 'nothing'}</p><h2>Settings</h2>",
        _settings(runs, names),
    ]
    if any(texts := [examples(run) for run in runs]):
        parts.append("<h2>Examples</h2><p>Best and worst of the last logged completions.</p>")
        parts.append(
            _grid(f"<section>{name}{text}</section>" for name, text in zip(names, texts, strict=True) if text)
        )
    title = escape(", ".join(run.name for run in runs))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>qarl-trl report: {title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _grid(parts: Iterable[str]) -> str:
    return '<div class="grid">' + "\n".join(parts) + "</div>"


def _verdict(run: Run, name: str) -> str:
    findings = verdict(run)
    lines = [f"<p>{MARKS[f.level]} {escape(f.text)}. <i>{escape(f.advice)}</i></p>" for f in findings]
    return f"<section>{name}<b>{headline(findings)}</b>{''.join(lines)}</section>"


def _figure(panel: Panel, styles: dict[str, str], runs: Sequence[Run]) -> str:
    """A picture, and below it the names of its metrics as docs/metrics.md has them."""
    keys = ", ".join(f"{style} <code>{name}</code>" for name, style in styles.items())
    image = base64.b64encode(png(panel, styles, runs)).decode()
    return (
        f'<figure><b>{panel.title}</b><img alt="{panel.title}" src="data:image/png;base64,{image}">'
        f'<figcaption class="note">{keys}</figcaption></figure>'
    )


def _settings(runs: Sequence[Run], names: Sequence[str]) -> str:
    """`SHOWN` and the settings that differ, a column for each run."""
    rows = [f"<tr><th></th><td>{'</td><td>'.join(names)}</td></tr>"]
    for name in (*SHOWN, *sorted(set().union(*(run.settings for run in runs)) - {*SHOWN})):
        values = [escape(str(run.settings.get(name, ""))) for run in runs]
        if name in SHOWN or len(set(values)) > 1:
            rows.append(f"<tr><th>{escape(name)}</th><td>{'</td><td>'.join(values)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"
