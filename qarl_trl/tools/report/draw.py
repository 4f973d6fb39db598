"""How pictures look: runs by colour and marker, a light and a dark theme, legends outside of the data."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which stay apart for colour-blind readers, without those that vanish on white; and a grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = {"-": "full", "--": "none", ":": "top"}  # of lines, with what is filled of their markers
DPI = 100
MARKED = 12  # markers on a line
SMOOTHED = 120  # a line of more points than this is drawn pale, with its moving average


def _theme(ink: str, paper: str, grid: str) -> dict[str, Any]:
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    faces = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)
    sizes = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
    return (
        dict.fromkeys(names, ink)
        | faces
        | sizes
        | {"grid.color": grid, "axes.grid": True, "axes.axisbelow": True, "lines.linewidth": 1.4}
    )


THEMES = {"light": _theme("#24292f", "#ffffff", "#e4e7eb"), "dark": _theme("#d6dae0", "#15181d", "#31363e")}


@dataclass(frozen=True)
class Picture:
    """A figure of the page: PNG bytes in both themes. `key` is the file's name."""

    key: str
    title: str
    caption: str
    light: bytes
    dark: bytes


def picture(key: str, title: str, caption: str, draw: Callable[[], Figure]) -> Picture:
    """Let `draw` make the figure once in each theme."""
    import matplotlib
    from PIL import Image

    images = []
    for theme in THEMES.values():
        with matplotlib.rc_context(theme):
            drawn, small = io.BytesIO(), io.BytesIO()
            draw().savefig(drawn, format="png", dpi=DPI)
        # A palette of 256 colours makes the file a third as large.
        Image.open(drawn).convert("RGB").quantize(256).save(small, format="png", optimize=True)
        images.append(small.getvalue())
    return Picture(key, title, caption, *images)


def panels(number: int, names: dict[int, str]) -> tuple[Figure, list[Axes]]:
    """
    A figure of `number` panels with the names of the runs that it shows above them, by their index. Three abreast, or two
    where that leaves no mismatch in the last row.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = 2 if number in (2, 4, 8) else min(number, 3)
    rows = math.ceil(number / columns)
    figure = Figure(figsize=(10 if columns > 1 else 6, 2.9 * rows + 0.4), layout="constrained")
    handles = [Line2D([], [], **look(index)) for index in names]
    labels = [plain(name) for name in names.values()]
    abreast = 7 if sum(map(len, labels)) < 80 else 3
    figure.legend(handles, labels, loc="outside upper center", ncols=abreast, frameon=False)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(number)]
    return figure, axes


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the run with this index."""
    return {"color": COLOURS[index], "marker": MARKERS[index], "markersize": 4}


def plain(text: str, longest: int = 32) -> str:
    """Text of a run as matplotlib shows it as it is: no formulas, no names that a legend hides, no endless ones."""
    text = text if len(text) <= longest else text[: longest - 3] + "..."
    return text.replace("$", r"\$").replace("_", " _", 1) if text.startswith("_") else text.replace("$", r"\$")


def line(axis: Axes, steps: np.ndarray, values: np.ndarray, index: int, style: str = "-") -> None:
    """A metric of one run. NaN leaves a mismatch; a point between two mismatches is seen by its marker."""
    options = look(index) | {"linestyle": style, "fillstyle": STYLES[style]}
    if len(values) > SMOOTHED:
        axis.plot(steps, values, color=options["color"], linewidth=0.6, alpha=0.3)
        values = moving_average(values, len(values) // 40)
    alone = np.isfinite(values) & ~np.isfinite(np.roll(values, 1)) & ~np.isfinite(np.roll(values, -1))
    marked = sorted({*range(0, len(values), max(1, len(values) // MARKED)), *np.flatnonzero(alone).tolist()})
    axis.plot(steps, values, markevery=marked, **options)


def moving_average(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite values at most `width` away; NaN where there is none."""
    kernel, finite = np.ones(2 * width + 1), np.isfinite(values)
    counts = np.convolve(finite, kernel)[width:-width]
    sums = np.convolve(np.where(finite, values, 0.0), kernel)[width:-width]
    return np.divide(sums, counts, out=np.full(len(values), math.nan), where=counts > 0)


def style_legend(axis: Axes, styles: dict[str, str]) -> None:
    """What solid, dashed and dotted mean, and their markers, below the panel; `styles` by label."""
    from matplotlib.lines import Line2D

    if set(styles.values()) - {"-"}:
        ink = axis.xaxis.label.get_color()
        shape = {"color": ink, "marker": "o", "markersize": 4}
        handles = [Line2D([], [], linestyle=style, fillstyle=STYLES[style], **shape) for style in styles.values()]
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": len(styles)}
        axis.legend(handles, list(styles), frameon=False, fontsize=8, handlelength=2.2, columnspacing=1.2, **place)


def log_scale(values: Sequence[np.ndarray]) -> dict[str, Any] | None:
    """
    Arguments of `set_yscale` if the values above 0 span more than a factor of 30, else None. Where values of 0 are among
    them, the axis is straight below the smallest other one.
    """
    joined = np.concatenate([*values, np.array([])])
    joined = joined[np.isfinite(joined)]
    above = joined[joined > 0]
    if len(above) < 2 or float(above.max() / above.min()) <= 30:
        return None
    if (joined > 0).all():
        return {"value": "log"}
    return {"value": "symlog", "linthresh": float(above.min()), "linscale": 0.5}
