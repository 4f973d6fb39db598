"""The figures over time, as a table: which metric stands in which panel of which figure. The drawing is one function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .draw import COLOURS, STYLES, Picture, line, log_scale, panels, picture, plain, style_legend
from .runs import Run


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panel:
    """`metrics` with what tells them apart. `log`: if they span decades. `edges`: which of the arm's bounds to draw."""

    title: str
    unit: str
    metrics: dict[str, str]
    log: bool = False
    share: bool = False
    edges: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A figure: its name, title, what to see in it, and the panels."""

    key: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


SHARE = "share of completions"
CHARTS = (
    Chart(
        "overview",
        "Overview",
        "Reward of the sampled completions and on held-out problems (the quickstart's are greedy); mismatch between engine and "
        "learner; share of completions, or of tokens in an arm that clips tokens, whose ratio has left the arm's own bounds "
        "(plain TRL: clip_ratio/high_mean and low_mean). Where values span decades the axis is logarithmic, and straight down to a 0.",
        (
            Panel("Reward", "mean reward", {"reward": "sampled", "eval_reward": "held out"}),
            Panel(
                "Mismatch between engine and learner",
                "nats per token",
                {"mismatch/logp_diff_mean": "mean", "logp_diff_floor": "bf16 before RL"},
                log=True,
            ),
            Panel(
                "Beyond the arm's own bounds",
                "share",
                {
                    "ratio/pos_high_frac": "A>0, above",
                    "ratio/neg_low_frac": "A<0, below",
                    "ratio/neg_high_frac": "A<0, above",
                },
                share=True,
            ),
            Panel(
                "Quantized values changed between syncs",
                "share of quantized values",
                {"quant/flip_frac": ""},
                share=True,
            ),
            Panel("Entropy (paper Fig. 10)", "nats per token", {"entropy": ""}),
            Panel("Time of an update", "seconds", {"step_time": ""}, log=True),
        ),
    ),
    Chart(
        "mismatch",
        "Mismatch and KL",
        "Engine against learner: KL by the k3 estimator and the sequence weight w. Learner at rollout time against learner "
        "now: KL within a rollout batch. A mismatch that grows over the run ends in collapse (paper Fig. 8).",
        (
            Panel("KL, engine to learner", "nats per token", {"mismatch/kl_k3": ""}, log=True),
            Panel("KL, old to current policy", "nats per token", {"ratio/kl_k3": ""}, log=True),
            Panel("KL to the reference model", "nats per token", {"kl": ""}),
            Panel(
                "Sequence weight w",
                "learner / engine",
                {
                    "mismatch/seq_weight_mean": "mean",
                    "mismatch/seq_weight_min": "min",
                    "mismatch/seq_weight_max": "max",
                },
            ),
        ),
    ),
    Chart(
        "ratios",
        "Sequence ratio by the sign of the advantage",
        "r = learner now / learner at rollout, of a completion. Thin lines: the arm's own bounds, where it clips sequences.",
        (
            Panel("A > 0", "r", {"ratio/pos_q50": "median", "ratio/pos_q99": "99 %"}, edges=("pos_high",)),
            Panel("A < 0", "r", {"ratio/neg_q50": "median", "ratio/neg_q99": "99 %"}, edges=("neg_low", "neg_high")),
            Panel("Extremes", "r", {"ratio/min": "min", "ratio/max": "max"}, log=True),
        ),
    ),
    Chart(
        "bands",
        "Completions outside the paper's band",
        "The same band in every arm, whatever the arm clips. A < 0 above the band is what one-sided clipping keeps (paper "
        "Sec. 3.2).",
        (
            Panel("A > 0, above", SHARE, {"ratio/paper_pos_high_frac": ""}, share=True),
            Panel("A < 0, below", SHARE, {"ratio/paper_neg_low_frac": ""}, share=True),
            Panel("A < 0, above", SHARE, {"ratio/paper_neg_high_frac": ""}, share=True),
        ),
    ),
    Chart(
        "error_tokens",
        "Error tokens",
        "Tokens in repetitions, as docs/metrics.md defines them, and the completions that have any (paper Figs. 1 and 6).",
        (
            Panel("Error tokens", "share of tokens", {"error_tokens/frac": ""}, share=True),
            Panel(
                "Error tokens by advantage",
                "share of tokens",
                {"error_tokens/pos_frac": "A > 0", "error_tokens/neg_frac": "A < 0"},
                share=True,
            ),
            Panel(
                "Completions with error tokens",
                SHARE,
                {"error_tokens/extreme_frac": "r outside the paper's band", "error_tokens/inside_frac": "r inside"},
                share=True,
            ),
            Panel("Error tokens with extreme r", "correlation", {"error_tokens/extreme_corr": ""}),
        ),
    ),
    Chart(
        "completions",
        "Completions",
        "Their length, how they end, and how far the rewards of one prompt spread: without spread there is no gradient.",
        (
            Panel("Length", "tokens", {"completions/mean_length": ""}),
            Panel(
                "Cut off at the longest length",
                SHARE,
                {
                    "completions/clipped_ratio": "all",
                    "completions/pos_clipped_ratio": "A > 0",
                    "completions/neg_clipped_ratio": "A < 0",
                },
                share=True,
            ),
            Panel("Spread of rewards within a prompt", "standard deviation", {"reward_std": ""}),
        ),
    ),
    Chart(
        "sync",
        "Synces",
        "Quantized values that changed since the last sync, by the type of their layer. The sync check's mismatch after a checked sync, beside "
        "what one rounding per layer does and the mismatch that stops the run.",
        (
            Panel(
                "Quantized values changed: attention",
                "share of quantized values",
                {"quant/flip_frac/attention": ""},
                share=True,
            ),
            Panel(
                "Quantized values changed: MLP and experts",
                "share of quantized values",
                {"quant/flip_frac/mlp": "MLP", "quant/flip_frac/experts": "experts"},
                share=True,
            ),
            Panel(
                "Mismatch on the sync check prompt",
                "nats per token",
                {
                    "sync/verify_logp_diff": "logp_diff",
                    "sync/verify_noise_floor": "one rounding",
                    "sync/verify_allowed": "stops",
                },
                log=True,
            ),
            Panel("Published stream", "bytes", {"sync/bytes": ""}),
        ),
    ),
)


def line_charts(runs: Sequence[Run]) -> list[Picture]:
    """Every chart that has something to show."""
    shown = []
    for chart in CHARTS:
        filled = [panel for panel in chart.panels if any(run.has(name) for run in runs for name in panel.metrics)]
        if filled:
            shown.append(picture(chart.key, chart.title, chart.caption, partial(draw_panels, filled, runs)))
    return shown


def missing(run: Run) -> list[str]:
    """Metrics of the charts that this run did not log, but for quantized values of layers that its model does not have."""
    names = [name for chart in CHARTS for panel in chart.panels for name in panel.metrics if name != "logp_diff_floor"]
    flips = "quant/flip_frac"
    return [name for name in names if not run.has(name) and not (name.startswith(f"{flips}/") and run.has(flips))]


def draw_panels(filled: Sequence[Panel], runs: Sequence[Run]) -> Figure:
    """The panels, each with those runs that have its metrics."""
    from matplotlib.ticker import MaxNLocator

    shown = {
        i: run.name for i, run in enumerate(runs) if any(run.has(name) for panel in filled for name in panel.metrics)
    }
    figure, axes = panels(len(filled), shown)
    for panel, axis in zip(filled, axes, strict=True):
        scale = log_scale([run.series(name)[1] for run in runs for name in panel.metrics]) if panel.log else None
        styles = {}
        for (name, label), style in zip(panel.metrics.items(), STYLES, strict=False):
            if label and any(run.has(name) for run in runs):
                styles[label] = style
            for index, run in enumerate(runs):
                steps, values = run.series(name)
                if len(values):
                    line(axis, steps, values, index, style)
        for index, run in enumerate(runs):
            for edge in run.edges(panel.edges, "sequence"):
                axis.axhline(edge, color=COLOURS[index], linewidth=0.8, alpha=0.7)
        axis.set(title=plain(panel.title, 99), xlabel="update", ylabel=panel.unit)
        if scale:
            axis.set_yscale(**scale)
            axis.set_ylim(bottom=0 if scale["value"] == "symlog" else None)
        elif panel.share:
            top = max(axis.get_ylim()[1], 0.01)
            axis.set_ylim(-0.02 * top, 1.03 * top)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        style_legend(axis, styles)
    return figure
