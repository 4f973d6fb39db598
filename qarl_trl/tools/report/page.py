"""The page: one HTML file without scripts, whose pictures are in it. Every text of a run is escaped here or in texts.py."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from html import escape

import numpy as np

from .draw import COLOURS, Picture
from .figures import missing
from .runs import Run
from .times import speed_up


STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --paper: #fff; --soft: #f3f5f7; --line: #d5dae0; --mark: #ffd6c9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #d6dae0; --paper: #15181d; --soft: #1f242b; --line: #3a4049; --mark: #8a2f12 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px; margin: 2em auto; padding: 0 1em }
h1, h2 { line-height: 1.2 }
h2 { margin-top: 2em; border-top: 1px solid var(--line); padding-top: 1em }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .35em .8em; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap }
td:nth-child(2), td:nth-child(8) { white-space: normal; min-width: 8em }
img { max-width: 100%; height: auto; display: block }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em }
.facts, figcaption, .missing { font-size: 13px; opacity: .85 }
figure { margin: 1em 0 }
.runs { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); mismatch: 1.5em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6em; margin: .3em 0; font-size: 12.5px }
mark { background: var(--mark); color: inherit }
"""
# The browser itself then loads nothing from elsewhere and runs nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
HEAD = (
    "run",
    "arm",
    "updates",
    "reward, last",
    "reward, best",
    "held out, last",
    "mismatch, mean",
    "time",
    "s an update",
)


def page(runs: Sequence[Run], pictures: Sequence[Picture], examples: dict[str, str], baseline: Run | None) -> str:
    """
    The whole report.

    Args:
        runs (`Sequence[Run]`): In the order of their colours.
        pictures (`Sequence[Picture]`): In the order of the page.
        examples (`dict[str, str]`): HTML of each run's examples of text, by its name.
        baseline (`Run` or `None`): What speed-ups are over.
    """
    title = escape(", ".join(run.name for run in runs))
    parts = [f"<h1>Report: {title}</h1>", _table(runs, baseline), *map(_missing, runs)]
    for picture in pictures:
        parts += [f"<h2>{escape(picture.title)}</h2>", _figure(picture)]
        if picture.key == "error_tokens" and any(examples.values()):
            parts.append(_texts(runs, examples))
    if not any(picture.key == "error_tokens" for picture in pictures) and any(examples.values()):
        parts.append(_texts(runs, examples))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>qarl-trl report: {title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _table(runs: Sequence[Run], baseline: Run | None) -> str:
    head = HEAD if baseline is None else (*HEAD, f"faster than {baseline.name}")
    rows = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for run, colour in zip(runs, COLOURS, strict=False):
        name, *cells = _cells(run, baseline)
        dot = f'<span class="dot" style="background: {colour}"></span>'
        rows.append(f"<td>{dot}{escape(name)}</td>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells))
    return '<div class="wide"><table>' + "\n".join(f"<tr>{row}</tr>" for row in rows) + "</table></div>"


def _cells(run: Run, baseline: Run | None) -> list[str]:
    steps, rewards = run.series("reward")
    best = f"{np.nanmax(rewards):.3f} at {steps[np.nanargmax(rewards)]:.0f}" if run.has("reward") else ""
    phases, seconds = run.phases(), run.seconds()
    total = sum(phases.values()) or math.nan
    cells = [run.name, run.arm, str(run.last_step), _last(rewards), best, _last(run.series("eval_reward")[1])]
    cells.append(_number(run.mean("mismatch/logp_diff_mean"), ".1e"))
    cells.append(", ".join(f"{phase} {value / total:.0%}" for phase, value in phases.items()))
    cells.append(_number(seconds, ".3g"))
    return cells if baseline is None else [*cells, _number(speed_up(run, baseline), ".2f")]


def _last(values: np.ndarray) -> str:
    finite = values[np.isfinite(values)]
    return f"{finite[-1]:.3f}" if len(finite) else ""


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""


def _missing(run: Run) -> str:
    """What a run lacks, once; a family of metrics of which it has none is one entry."""
    absent, text = missing(run), ""
    families = {name.split("/")[0] for name in absent if "/" in name}
    logged = {name.split("/")[0] for row in run.log for name in row}
    shown = dict.fromkeys(
        f"{family}/*" if (family := name.split("/")[0]) in families - logged else name for name in absent
    )
    if shown:
        text += f"not logged by this run: {', '.join(shown)}. "
    if run.unreadable:
        text += f"cannot be read and left out: {', '.join(run.unreadable)}."
    return f'<p class="missing"><b>{escape(run.name)}</b>: {escape(text)}</p>' if text else ""


def _figure(picture: Picture) -> str:
    light, dark = (base64.b64encode(image).decode() for image in (picture.light, picture.dark))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{light}"></picture>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _texts(runs: Sequence[Run], examples: dict[str, str]) -> str:
    columns = [
        f"<section><h3>{escape(run.name)}</h3>{examples[run.name]}</section>" for run in runs if examples[run.name]
    ]
    which = "With the most error tokens, marked where the run has its tokenizer; without any, best and worst of the last update."
    return f'<h2>Examples of text</h2><p class="facts">{which}</p><div class="runs">{"".join(columns)}</div>'
