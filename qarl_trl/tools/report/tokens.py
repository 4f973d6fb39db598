"""What `log_token_stats` stored: distributions of r and w (paper Fig. 4) and of r by probability (Fig. 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .draw import COLOURS, STYLES, Picture, log_scale, look, panels, picture, style_legend
from .runs import Run


if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = 48  # read of a run, evenly spaced over it
PROBABILITIES = np.geomspace(1e-4, 1.0, 9)  # edges of the groups of Fig. 5; the lowest takes all below
FEWEST = 10  # tokens in such a group
# Of `token_stats`: what is read, for the figures and for the examples.
COLUMNS = ("step", "rollout_step", "prompt", "completion", "reward", "advantage", "ratio", "mismatch_weight")
COLUMNS += ("token_ids", "old_logps", "current_logps", "engine_logps", "mask", "error_mask")
# A panel of Fig. 4: its title, the numbers, the sign of the advantage, the level, and the bounds to draw.
PANELS = (
    ("r of tokens, A > 0", "token_r", 1, "token", ("pos_high",)),
    ("r of tokens, A < 0", "token_r", -1, "token", ("neg_low", "neg_high")),
    ("w of tokens, A > 0", "token_w", 1, "token", ()),
    ("w of tokens, A < 0", "token_w", -1, "token", ()),
    ("r of completions, A > 0", "sequence_r", 1, "sequence", ("pos_high",)),
    ("r of completions, A < 0", "sequence_r", -1, "sequence", ("neg_low", "neg_high")),
    ("w of completions, A > 0", "sequence_w", 1, "sequence", ("cap",)),
    ("w of completions, A < 0", "sequence_w", -1, "sequence", ("cap",)),
)


@dataclass
class Tokens:
    """Of some completions: ratios and their old probability by token, ratios by completion, and signs of both."""

    token_r: np.ndarray
    token_w: np.ndarray
    old: np.ndarray
    token_sign: np.ndarray
    sequence_r: np.ndarray
    sequence_w: np.ndarray
    sequence_sign: np.ndarray
    rows: list[dict[str, Any]] = field(repr=False)

    def of(self, name: str, sign: int) -> np.ndarray:
        """Finite numbers `name` above 0 of completions whose advantage has this sign."""
        values, signs = getattr(self, name), getattr(self, f"{name.split('_')[0]}_sign")
        return values[np.isfinite(values) & (values > 0) & (signs == sign)]


def read_tokens(run: Run) -> Tokens | None:
    """The stored completions of a run, or None. Of a rollout batch's first update, where r is 1, only w is taken."""
    rows = list(read_rows(run, run.parquet_files("token_stats"), COLUMNS))
    if not rows:
        return None
    tokens, sequences = [], []
    for row in rows:
        mask, sign = np.array(row["mask"], dtype=bool), np.sign(row["advantage"])
        old, current, engine = (_floats(row[f"{name}_logps"], mask) for name in ("old", "current", "engine"))
        first = row["step"] == row["rollout_step"]
        r, w = (np.full(len(old), math.nan) if first else np.exp(current - old)), np.exp(old - engine)
        tokens.append(np.stack([r, w, np.exp(old), np.full(len(old), sign)]))
        sequences.append([math.nan if first else row["ratio"], row["mismatch_weight"], sign])
    return Tokens(*np.concatenate(tokens, axis=1), *np.array(sequences, dtype=float).T, rows)


def read_rows(run: Run, files: Sequence[Path], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of `FILES` of them. One that cannot be read, as while it is being written, or lacks a column is noted in the run."""
    import pyarrow.parquet as pq

    chosen = sorted(set(np.linspace(0, len(files) - 1, min(FILES, len(files))).astype(int).tolist()))
    for file in (files[i] for i in chosen):
        try:
            yield from pq.read_table(file, columns=list(columns)).to_pylist()
        except (OSError, ValueError):  # pyarrow's errors are of these kinds
            run.unreadable.append(file.name)


def distributions(runs: Sequence[Run], tokens: dict[str, Tokens]) -> list[Picture]:
    """Figs. 4 and 5 of the runs that stored tokens; `tokens` by name of the run."""
    if not tokens:
        return []
    count = ", ".join(f"{name}: {len(found.rows)}" for name, found in tokens.items())
    caption = (
        "r = learner now / learner at rollout, w = learner at rollout / engine. Dashed: the bounds of the arm, at the level at "
        f"which it clips. What lies further out is in the outermost bars. Completions read: {count} (paper Fig. 4)."
    )
    low = (
        "r of tokens by their probability at rollout: the middle 98 % lie between the lines. A tail that opens to the left, "
        f"for A < 0 above all, is what the dual bound is for (paper Fig. 5). Groups of fewer than {FEWEST} tokens are left out."
    )
    charts = [picture("distributions", "Distribution of r and w", caption, partial(_draw_ratios, runs, tokens))]
    if any(len(found.of("token_r", sign)) >= FEWEST for found in tokens.values() for sign in (1, -1)):
        title = "Change of low-probability tokens"
        charts.append(picture("low_probability", title, low, partial(_draw_by_probability, runs, tokens)))
    return charts


def _floats(values: list[float | None] | None, mask: np.ndarray) -> np.ndarray:
    """Where `mask`; NaN for what is null."""
    found = np.full(len(mask), math.nan) if values is None else np.array(values, dtype=float)
    return found[mask]


def _draw_ratios(runs: Sequence[Run], tokens: dict[str, Tokens]) -> Figure:
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = panels(len(PANELS), _shown(runs, tokens))
    for axis, (title, name, sign, level, edges) in zip(axes, PANELS, strict=True):
        values = {i: tokens[run.name].of(name, sign) for i, run in enumerate(runs) if run.name in tokens}
        others = [found.of(name, -sign) for found in tokens.values()]  # both signs have the same bars
        bars, shares = _bars(np.concatenate([*values.values(), *others])), []
        for index, found in values.items():
            if len(found):
                counts, _ = np.histogram(np.clip(found, bars[0], bars[-1]), bars)
                shares.append(counts / counts.sum())
                axis.stairs(shares[-1], bars, color=COLOURS[index], linewidth=1.4)
        for index in values:
            for edge in _edges(runs[index], level, edges, bars):
                axis.axvline(edge, color=COLOURS[index], linewidth=1, linestyle="--")
        axis.set(title=title, xlabel="ratio", ylabel=f"share of {'tokens' if level == 'token' else 'completions'}")
        if log_scale(shares):
            axis.set_yscale("log")
        if bars[-1] / bars[0] > 10:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter(NullFormatter())
    return figure


def _bars(values: np.ndarray) -> np.ndarray:
    """Edges of 10 to 50 bars, geometric, over the middle 99.8 % of the values."""
    low, high = np.quantile(values, [0.001, 0.999]) if len(values) else (1.0, 1.0)
    return np.geomspace(
        min(low, 0.999) * 0.999, max(high, 1.001) * 1.001, int(np.clip(len(values) ** 0.5, 10, 50)) + 1
    )


def _edges(run: Run, level: str, names: tuple[str, ...], bars: np.ndarray) -> list[float]:
    """The bounds of an arm that clips at this level; the cap of w only if anything comes near it."""
    if names != ("cap",):
        return run.edges(names, level)
    cap = run.settings["tbpo_mismatch_cap"] if run.settings.get("loss_type") == "tbpo" else math.inf
    return [edge for edge in (cap, 1 / cap) if bars[0] < edge < bars[-1]]


def _shown(runs: Sequence[Run], tokens: dict[str, Tokens]) -> dict[int, str]:
    return {index: run.name for index, run in enumerate(runs) if run.name in tokens}


def _draw_by_probability(runs: Sequence[Run], tokens: dict[str, Tokens]) -> Figure:
    figure, axes = panels(2, _shown(runs, tokens))
    for axis, sign in zip(axes, (1, -1), strict=True):
        for index, run in enumerate(runs):
            if run.name in tokens:
                middles, low, high = tails(tokens[run.name], sign)
                axis.plot(middles, high, **look(index))
                axis.plot(middles, low, **look(index) | {"linestyle": "--", "fillstyle": STYLES["--"]})
        title = f"A {'>' if sign > 0 else '<'} 0"
        axis.set(title=title, xlabel="probability at rollout", ylabel="r of tokens", xscale="log", xlim=(1e-4, 1))
        style_legend(axis, {"99 %": "-", "1 %": "--"})
    return figure


def tails(tokens: Tokens, sign: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middles of the groups of old probability, and the 1 % and 99 % quantiles of the tokens' r in each."""
    use = np.isfinite(tokens.token_r) & (tokens.token_sign == sign)
    r, groups = tokens.token_r[use], np.digitize(tokens.old[use], PROBABILITIES[1:-1])
    kept = [i for i in range(len(PROBABILITIES) - 1) if (groups == i).sum() >= FEWEST]
    found = np.array([np.quantile(r[groups == i], [0.01, 0.99]) for i in kept]).reshape(-1, 2)
    return np.sqrt(PROBABILITIES[:-1] * PROBABILITIES[1:])[kept], found[:, 0], found[:, 1]
