"""The page: one HTML file without scripts, whose pictures are in it. Every text of a run is escaped here or in examples.py."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from .examples import examples
from .plots import COLOURS, Panel, png, shown_panels
from .runs import Run
from .settings import differing
from .verdict import headline, verdict


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; max-width: 1240px; margin: 1em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 1.5em; margin: 1em 0 }
.grid > * { margin: 0; min-width: 0 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px }
th, td { text-align: left; padding: .3em .8em .3em 0; border-bottom: 1px solid #d5dae0; overflow-wrap: anywhere }
img { width: 100%; height: auto; display: block }
h3 { display: inline-block; margin: 0 1em 0 0; font-size: 15px; overflow-wrap: anywhere }
ul { list-style: none; padding: 0; margin: .3em 0 }
li { padding-left: 1.5em; text-indent: -1.5em; margin-bottom: .3em }
i, code, .note { font-size: 13px; color: #57606a; overflow-wrap: anywhere }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em }
pre { max-height: 20em; overflow-y: auto; white-space: pre-wrap; overflow-wrap: anywhere; background: #f3f5f7; padding: .6em; font-size: 12.5px }
mark { background: #ffd6c9 }
"""
MARKS = {"good": "✓", "look": "▲", "bad": "✗", "unknown": "?"}


def page(runs: Sequence[Run]) -> str:
    """The whole report as HTML, the runs in the order of their colours."""
    title = escape(", ".join(run.name for run in runs))
    panels, constant = shown_panels(runs)
    names = [_name(run, colour) for run, colour in zip(runs, COLOURS, strict=False)]
    parts = ["<h1>qarl-trl report</h1>", _grid(map(_verdict, runs, names)), "<h2>Plots</h2>"]
    note = "A point is a rollout batch. docs/metrics.md explains each metric."
    parts.append(f'<p class="note">{note}</p>{"".join(names)}')
    parts.append(_grid(_figure(panel, styles, runs) for panel, styles in panels))
    if constant:
        values = [f"<code>{name}</code> {value:.4g}" for name, value in constant.items()]
        parts.append(f"<p>Constant: {', '.join(values)}</p>")
    parts += ["<h2>Runs</h2>", _table(runs, names)]
    texts = {name: text for run, name in zip(runs, names, strict=True) if (text := examples(run))}
    if texts:
        parts.append("<h2>Examples</h2><p>With the most error tokens, marked; without any, best and worst.</p>")
        parts.append(_grid(f"<section>{name}{text}</section>" for name, text in texts.items()))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>qarl-trl report: {title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _grid(parts: Iterable[str]) -> str:
    return '<div class="grid">' + "\n".join(parts) + "</div>"


def _name(run: Run, colour: str) -> str:
    return f'<h3><span class="dot" style="background: {colour}"></span>{escape(run.name)}</h3>'


def _verdict(run: Run, name: str) -> str:
    findings = verdict(run)
    lines = [f"<li>{MARKS[f.level]} {escape(f.text)}. <i>{escape(f.advice)}</i></li>" for f in findings]
    return f"<section>{name}<b>{headline(findings)}</b><ul>{''.join(lines)}</ul></section>"


def _figure(panel: Panel, styles: dict[str, str], runs: Sequence[Run]) -> str:
    """A picture, and below it the names of its metrics as a tracker shows them."""
    keys = []
    for name, style in (styles | dict.fromkeys(panel.floors, "dotted")).items():
        logged = sorted({run.logged_name(name) for run in runs if len(run.values(name))})
        keys += [f"{style} <code>{' or '.join(logged)}</code>"] if logged else []
    image = base64.b64encode(png(panel, styles, runs)).decode()
    return (
        f'<figure><b>{panel.title}</b><img alt="{panel.title}" src="data:image/png;base64,{image}">'
        f'<figcaption class="note">{", ".join(keys)}</figcaption></figure>'
    )


def _table(runs: Sequence[Run], names: Sequence[str]) -> str:
    """What was reached, and the settings that differ, a column for each run."""
    rows = {"": names, "updates": [str(max(row["step"] for row in run.log)) for run in runs]}
    rows["reward, best"] = [_best(run) for run in runs]
    rows["held out, last"] = [_number(run.values("eval_reward")[-1:]) for run in runs]
    rows["mismatch, mean"] = [_number(run.values("mismatch/logp_diff_mean")) for run in runs]
    rows["seconds an update"] = [_seconds(run) for run in runs]
    rows |= {
        f"<code>{escape(name)}</code>": list(map(escape, row))
        for name, row in differing([run.settings for run in runs]).items()
    }
    lines = [f"<tr><th>{name}</th><td>{'</td><td>'.join(row)}</td></tr>" for name, row in rows.items() if any(row)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _number(values: np.ndarray) -> str:
    return f"{values.mean():.3g}" if len(values) else ""


def _best(run: Run) -> str:
    steps, values = run.series("reward")
    return f"{values.max():.3g} at {steps[values.argmax()]:.0f}" if len(values) else ""


def _seconds(run: Run) -> str:
    parts = {name: run.values(f"time/{name}") for name in ("rollout", "sync", "update")}
    return ", ".join(f"{name} {values.mean():.3g}" for name, values in parts.items() if len(values))
