"""
Tables of the toy from its committed cells, standard library only: `python benchmarks/arms_table.py`.

They stand between marks as `<!-- table: hard -->` and `<!-- end -->`: those of each regime in results/arms/README.md,
and in docs/results.md the one that a user reads.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arms import ARMS, FOLDER, LEVELS, REGIMES, arms_of, file_of
from real_table import markdown, put_tables


Cell = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "benchmarks" / "results" / "arms" / "README.md", ROOT / "docs" / "results.md")
SHOWN_REGIMES = ("hard", "again", "hot", "easy")
LONG_REGIMES = ("long",)
USERS_REGIMES = ("hard", "hot")
# Of the long regimes: from, to, and how each is scored. All by transformers in float32, from the trained weights.
COMPARED = (
    ("QaRL less rollout-only, GRPO", ("rollout-only GRPO", "rounded"), ("QaRL GRPO", "rounded")),
    ("the same, without TIS", ("rollout-only GRPO without TIS", "rounded"), ("QaRL GRPO", "rounded")),
    ("the same, TBPO", ("rollout-only TBPO", "rounded"), ("QaRL TBPO", "rounded")),
    ("the same, TBPO without weight", ("rollout-only TBPO without weight", "rounded"), ("QaRL TBPO", "rounded")),
    ("both by GPTQ, GRPO", ("rollout-only GRPO", "gptq"), ("QaRL GRPO", "gptq")),
    ("both by GPTQ, GRPO without TIS", ("rollout-only GRPO without TIS", "gptq"), ("QaRL GRPO", "gptq")),
    ("both by GPTQ, TBPO", ("rollout-only TBPO", "gptq"), ("QaRL TBPO", "gptq")),
    ("QaRL GRPO rounded less bf16 GRPO rounded", ("bf16 GRPO", "rounded"), ("QaRL GRPO", "rounded")),
    ("QaRL GRPO rounded less bf16 GRPO by GPTQ", ("bf16 GRPO", "gptq"), ("QaRL GRPO", "rounded")),
    # Added when two seeds were run: the row of the real model that decides what to deploy.
    ("QaRL GRPO rounded less rollout-only GRPO by GPTQ", ("rollout-only GRPO", "gptq"), ("QaRL GRPO", "rounded")),
    ("QaRL TBPO rounded less rollout-only TBPO by GPTQ", ("rollout-only TBPO", "gptq"), ("QaRL TBPO", "rounded")),
    ("QaRL TBPO less GSPO", ("QaRL GSPO", "rounded"), ("QaRL TBPO", "rounded")),
)
# Of the users' tables.
SHOWN_ARMS = (
    "bf16 GRPO",
    "rollout-only GRPO",
    "rollout-only GRPO without TIS",
    "QaRL GRPO",
    "rollout-only TBPO",
    "QaRL TBPO",
)
NOT_SHOWN_OF_LONG = ("rollout-only GRPO without TIS", "QaRL GSPO")
NOT_RUN = "not run"
# The paper's figures: Table 1 (math average, Qwen3-8B-Base); Table 3 (MATH-500, AIME 2025, AMC); Fig. 8 prints no
# numbers.
PAPER = {
    "bf16 GRPO": "51.8; 57.2 (Table 3)",
    "rollout-only GRPO": "43.9; 49.2 (Table 3)",
    "rollout-only TBPO": "52.1 (Table 3)",
    "QaRL TBPO": "48.9",
    "QaRL GSPO": "curve: collapses",
    "QaRL dual-clip GRPO": "curve: below TBPO",
    "QaRL MIS-GSPO": "curve: below TBPO",
}
LEVEL_NAMES = dict(
    zip(LEVELS, ("bfloat16", "low bits, stock operations", "low bits, engine's operations"), strict=True)
)


def read(regime: str, arm: str) -> list[Cell]:
    """The cells of a row that were run, by seed."""
    return [json.loads(path.read_text()) for seed in range(100) if (path := file_of(regime, arm, seed)).exists()]


def collapsed(cell: Cell) -> bool:
    """Whether the sampled reward of the last three rollout batches is below half of the best three in a row."""
    reward = cell["log"]["reward"]
    return sum(reward[-3:]) < 0.5 * max(sum(reward[i : i + 3]) for i in range(len(reward) - 2))


def mean_of(cell: Cell, name: str, last: int = 0) -> float | None:
    """Mean of a logged column, or of its last entries; `None` where the arm does not log it."""
    values = [value for value in cell["log"].get(name, [])[-last:] if value is not None]
    return statistics.fmean(values) if values else None


def neg_high(cell: Cell) -> str:
    """
    Name of the share beyond TBPO's upper bound of negatives: with TBPO, whose own bound it is, it has no "paper_".
    """
    return next(name for name in ("ratio/paper_neg_high_frac", "ratio/neg_high_frac") if name in cell["log"])


def spread(cells: list[Cell], value: Callable[[Cell], float | None], form: str) -> str:
    """`mean ± standard deviation` over seeds; the mean alone of one seed, and where the deviation rounds to 0."""
    values = [v for cell in cells if (v := value(cell)) is not None]
    if not values:
        return "-"
    mean = form.format(statistics.fmean(values))
    deviation = form.format(statistics.stdev(values)) if len(values) > 1 else "0"
    return f"{mean} ± {deviation}" if float(deviation) else mean


def row(arm: str, cells: list[Cell]) -> list[str]:
    """One line of a regime's table."""
    return [
        arm,
        accuracies(cells, "{:.1f}"),
        spread(cells, lambda c: 100 * c["accuracy_after"], "{:.1f}"),
        spread(cells, lambda c: c.get("accuracy_learner") and 100 * c["accuracy_learner"], "{:.1f}"),
        spread(cells, lambda c: mean_of(c, "reward", 3), "{:.2f}"),
        f"{sum(map(collapsed, cells))} of {len(cells)}",
        spread(cells, lambda c: mean_of(c, "mismatch/logp_diff_mean"), "{:.1g}"),
        spread(cells, lambda c: 100 * mean_of(c, neg_high(c)), "{:.1f}"),
        spread(cells, lambda c: 100 * mean_of(c, "completions/clipped_ratio", 3), "{:.1f}"),
        spread(cells, lambda c: 100 * mean_of(c, "error_tokens/frac", 3), "{:.2f}"),
        PAPER.get(arm, "-"),
    ]


def accuracies(cells: list[Cell], form: str) -> str:
    """Percent of the held-out problems that are right, a figure for each seed."""
    return ", ".join(form.format(100 * cell["accuracy_after"]) for cell in cells) or "-"


def users_table() -> str:
    """Accuracy of the main arms, over seeds."""
    header = ["regime", "start in 4 bits", *SHOWN_ARMS]
    rows = []
    for regime in USERS_REGIMES:
        row = [regime, f"{100 * starts_of(regime)['quantized']:.0f}"]
        for arm in SHOWN_ARMS:
            row.append(spread(read(regime, arm), lambda c: 100 * c["accuracy_after"], "{:.0f}"))
        rows.append(row)
    return markdown(header, rows)


def users_long_table(regime: str) -> str:
    """Accuracy of the arms of a long regime by how their weights are deployed."""
    ways = ("as it is", "rounded", "gptq")
    before = json.loads((FOLDER / f"{regime}_before.json").read_text())["scores"]
    rows = [["before training", *(f"{100 * before[name]:.0f}" for name in ways)]]
    for arm in arms_of(regime):
        if arm in NOT_SHOWN_OF_LONG:
            continue
        cells = read(regime, arm)
        shown = [arm]
        for name in ways:
            shown.append(spread(cells, lambda c, name=name: percent(c["scores"][name]), "{:.0f}"))
        rows.append(shown)
    return markdown(["trained by", "unquantized", "rounded", "GPTQ"], rows)


def starts_of(regime: str) -> dict[str, float]:
    """Share of right answers before training, of the bf16 model and of the quantized one."""
    shares = {}
    for arm in ARMS:
        for cell in read(regime, arm):
            if cell["accuracy_before"] is not None:
                shares.setdefault("bf16" if arm.startswith("bf16") else "quantized", cell["accuracy_before"])
    return shares


def starts(regime: str) -> str:
    """A line below a regime's table."""
    shown = ", ".join(f"{name} {100 * value:.1f}" for name, value in sorted(starts_of(regime).items()))
    return f"Before training: {shown or NOT_RUN}."


def regime_table(regime: str) -> str:
    """The arms of a regime, one a line."""
    header = [
        "arm",
        "accuracy by seed, %",
        "mean",
        "of the learner",
        "reward",
        "collapsed",
        "mismatch, nats",
        "A < 0 above, %",
        "cut, %",
        "error tokens, %",
    ]
    if regime == "hard":
        header.append("paper, %")  # the same for every regime

    rows = []
    missing = []
    for arm in ARMS:
        cells = read(regime, arm)
        if cells:
            rows.append(row(arm, cells)[: len(header)])
        elif arm in arms_of(regime):
            missing.append(arm)

    text = markdown(header, rows) + f"\n\n{starts(regime)}"
    if missing:
        text += f" Not run: {'; '.join(missing)}."
    return text


def long_table(regime: str) -> str:
    """The arms of a long regime, one a line, and what each deployment of their weights scores."""
    header = ["arm", "seeds", "engine, by seed, %", "as it is", "rounded", "GPTQ", "AWQ", "reward", "collapsed"]
    header += ["mismatch, nats", "A < 0 above, %", "cut, %", "error tokens, %"]

    rows = []
    missing = []
    for arm in arms_of(regime):
        cells = read(regime, arm)
        if cells:
            rows.append(_long_row(arm, cells))
        else:
            missing.append(arm)

    text = markdown(header, rows) + f"\n\n{starts(regime)}"
    if missing:
        text += f" Not run: {'; '.join(missing)}."
    return text


def _long_row(arm: str, cells: list[Cell]) -> list[str]:
    """One line of `long_table`."""
    shown = [arm, str(len(cells)), accuracies(cells, "{:.0f}")]
    for name in ("as it is", "rounded", "gptq", "awq"):
        shown.append(spread(cells, lambda c, name=name: percent(c["scores"].get(name)), "{:.1f}"))
    return shown + row(arm, cells)[4:-1]


def percent(share: float | None) -> float | None:
    """A share in percent."""
    return None if share is None else 100 * share


def long_differences(regime: str) -> str:
    """Differences of two arms of a long regime, paired by seed."""
    header = ["what is compared", "pairs", "points", "pairs above 0", "range"]
    rows = []
    for text, (base, base_score), (other, other_score) in COMPARED:
        before = {cell["seed"]: cell["scores"][base_score] for cell in read(regime, base)}
        after = {cell["seed"]: cell["scores"][other_score] for cell in read(regime, other)}
        differences = [100 * (after[seed] - before[seed]) for seed in sorted(before.keys() & after.keys())]
        rows.append([text, str(len(differences)), *summary(differences)])
    return markdown(header, rows)


def summary(differences: list[float]) -> list[str]:
    """Mean with its standard error over seeds (of two and fewer all are printed), pairs above 0, and range."""
    if not differences:
        return [NOT_RUN] * 3

    points = ", ".join(f"{value:+.1f}" for value in differences)
    if len(differences) > 2:
        error = statistics.stdev(differences) / len(differences) ** 0.5
        points = f"{statistics.fmean(differences):+.1f} ± {error:.1f}"
    above = sum(value > 0 for value in differences)
    return [points, f"{above} of {len(differences)}", f"{min(differences):+.1f} to {max(differences):+.1f}"]


def level_table() -> str:
    """Mismatch and accuracy of TBPO by what the learner computes with."""
    rows = []
    for regime in ("hard", "w4a8"):
        scheme = REGIMES[regime]["quantization"]["quant_scheme"]
        for arm in LEVELS:
            cells = read(regime, arm)
            values = [NOT_RUN] * 3
            if cells:
                values = [
                    spread(cells, lambda c: 100 * c["accuracy_after"], "{:.1f}"),
                    spread(cells, lambda c: mean_of(c, "mismatch/logp_diff_mean"), "{:.1g}"),
                    spread(cells, lambda c: mean_of(c, "mismatch/kl_k3"), "{:.1g}"),
                ]
            rows.append([scheme, LEVEL_NAMES[arm], str(len(cells)), *values])
    return markdown(["scheme", "learner", "seeds", "accuracy, %", "mismatch, nats", "KL, nats"], rows)


def tables() -> dict[str, str]:
    """All tables by their marks."""
    made = {regime: regime_table(regime) for regime in SHOWN_REGIMES}
    made |= {regime: long_table(regime) for regime in LONG_REGIMES}
    made |= {f"{regime}, pairs": long_differences(regime) for regime in LONG_REGIMES}
    made["alignment"] = level_table()
    made["toy"] = users_table()
    made["toy, long"] = users_long_table("long")
    return {f"<!-- table: {name} -->\n": text for name, text in made.items()}


def main() -> None:
    made = tables()
    for page in PAGES:
        put_tables(page, made)
    print(f"{len(list(FOLDER.glob('*/*.json')))} cells in {FOLDER}")


if __name__ == "__main__":
    main()
