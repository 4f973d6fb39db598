"""
Tables of the toy from its committed cells, standard library only: `python benchmarks/arms_table.py`.

They stand between marks as `<!-- table: hard -->` and `<!-- end -->`: those of each regime in results/arms/README.md,
and in docs/results.md the one that a user reads.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from arms import ARMS, FOLDER, REGIMES, SEEDS, arms_of, file_of
from real_table import markdown, put_tables


Cell = dict[str, Any]
# Regime, arm, and how its weights are scored.
Deployed = tuple[str, str, str]
ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "benchmarks" / "results" / "arms" / "README.md", ROOT / "docs" / "results.md")
SHOWN_REGIMES = ("hard", "again", "hot", "easy")
# Those of the portable regimes that have cells.
DEPLOYED_REGIMES = ("long", "long_stale", "long_stale_slow", "hot_portable", "stale_portable")
# With the names that users read.
USERS_REGIMES = {"hard": "hard", "hot_portable": "hot"}
# Of the portable regimes: from, to, and how each is scored. All by transformers in float32, from the trained weights.
COMPARED = (
    ("QaRL minus rollout-only, GRPO", ("rollout-only GRPO", "rounded"), ("QaRL GRPO", "rounded")),
    ("the same, without TIS", ("rollout-only GRPO without TIS", "rounded"), ("QaRL GRPO", "rounded")),
    ("the same, TBPO", ("rollout-only TBPO", "rounded"), ("QaRL TBPO", "rounded")),
    ("the same, TBPO without weight", ("rollout-only TBPO without weight", "rounded"), ("QaRL TBPO", "rounded")),
    ("both by GPTQ, GRPO", ("rollout-only GRPO", "gptq"), ("QaRL GRPO", "gptq")),
    ("both by GPTQ, GRPO without TIS", ("rollout-only GRPO without TIS", "gptq"), ("QaRL GRPO", "gptq")),
    ("both by GPTQ, TBPO", ("rollout-only TBPO", "gptq"), ("QaRL TBPO", "gptq")),
    ("QaRL GRPO rounded minus bf16 GRPO rounded", ("bf16 GRPO", "rounded"), ("QaRL GRPO", "rounded")),
    ("QaRL GRPO rounded minus bf16 GRPO by GPTQ", ("bf16 GRPO", "gptq"), ("QaRL GRPO", "rounded")),
    # Added when two seeds were run: the row of the real model that decides what to deploy.
    ("QaRL GRPO rounded minus rollout-only GRPO by GPTQ", ("rollout-only GRPO", "gptq"), ("QaRL GRPO", "rounded")),
    ("QaRL TBPO rounded minus rollout-only TBPO by GPTQ", ("rollout-only TBPO", "gptq"), ("QaRL TBPO", "rounded")),
    ("QaRL TBPO minus GSPO", ("QaRL GSPO", "rounded"), ("QaRL TBPO", "rounded")),
    # Added when all seeds of both losses were run: the best of each side.
    ("QaRL TBPO minus QaRL GRPO", ("QaRL GRPO", "rounded"), ("QaRL TBPO", "rounded")),
    ("QaRL TBPO rounded minus rollout-only GRPO by GPTQ", ("rollout-only GRPO", "gptq"), ("QaRL TBPO", "rounded")),
    ("QaRL GSPO rounded minus rollout-only GRPO by GPTQ", ("rollout-only GRPO", "gptq"), ("QaRL GSPO", "rounded")),
)
# Of the start of `long` after its distillation: from, to, each with its regime.
DISTILLED = "long_distilled"
COMPARED_DISTILLED = (
    ("QaRL rounded minus bf16 by GPTQ", (DISTILLED, "bf16 GRPO", "gptq"), (DISTILLED, "QaRL GRPO", "rounded")),
    ("QaRL rounded minus bf16 distilled", (DISTILLED, "bf16 GRPO", "distilled"), (DISTILLED, "QaRL GRPO", "rounded")),
    (
        "QaRL minus rollout-only, both rounded",
        (DISTILLED, "rollout-only GRPO", "rounded"),
        (DISTILLED, "QaRL GRPO", "rounded"),
    ),
    (
        "QaRL rounded minus rollout-only by GPTQ",
        (DISTILLED, "rollout-only GRPO", "gptq"),
        (DISTILLED, "QaRL GRPO", "rounded"),
    ),
    (
        "QaRL rounded minus rollout-only distilled",
        (DISTILLED, "rollout-only GRPO", "distilled"),
        (DISTILLED, "QaRL GRPO", "rounded"),
    ),
    (
        "QaRL rounded, this start minus that of *long*",
        ("long", "QaRL GRPO", "rounded"),
        (DISTILLED, "QaRL GRPO", "rounded"),
    ),
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
NOT_RUN = "not run"
# The columns that the tables of all regimes have.
FIGURES = ("reward", "collapsed", "mismatch, nats", "A < 0 above, %", "cut, %", "error tokens, %")
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
# Arms that differ in what the learner computes with.
LEVEL_NAMES = {
    "rollout-only TBPO": "bfloat16",
    "QaRL TBPO, stock operations": "low bits, stock operations",
    "QaRL TBPO": "low bits, engine's operations",
}


# Figures of cells ----------------------------------------------------------------------------------------------------


def read(regime: str, arm: str) -> list[Cell]:
    """The cells of an arm that were run, by seed."""
    cells = []
    for seed in SEEDS:
        path = file_of(regime, arm, seed)
        if path.exists():
            cells.append(json.loads(path.read_text()))
    return cells


def collapsed(cell: Cell) -> bool:
    """Whether the sampled reward of the last three rollout batches is below half of the best three in a row."""
    reward = cell["log"]["reward"]
    sums = [sum(reward[first : first + 3]) for first in range(len(reward) - 2)]
    return sums[-1] < 0.5 * max(sums)


def mean_of(cell: Cell, name: str, last: int = 0) -> float | None:
    """
    Average a logged column.

    Args:
        cell: The cell.
        name: Of the column.
        last: Take its last entries only; 0: all.

    Returns:
        The mean, `None` where the arm does not log it.
    """
    column = cell["log"].get(name, [])
    values = [value for value in column[-last:] if value is not None]
    if not values:
        return None
    return statistics.fmean(values)


def neg_high(cell: Cell) -> str:
    """
    Name of the share beyond TBPO's upper bound of negatives: with TBPO, whose own bound it is, it has no "paper_".
    """
    if "ratio/paper_neg_high_frac" in cell["log"]:
        return "ratio/paper_neg_high_frac"
    return "ratio/neg_high_frac"


def percent(share: float | None) -> float | None:
    """A share in percent."""
    return None if share is None else 100 * share


def spread(cells: list[Cell], value: Callable[[Cell], float | None], form: str) -> str:
    """
    Write `mean ± standard deviation` over seeds; the mean alone of one seed, and where the deviation rounds to 0.

    Args:
        cells: Of one arm.
        value: A cell's figure, or `None`.
        form: Format of both, as "{:.1f}".
    """
    values = [figure for figure in map(value, cells) if figure is not None]
    if not values:
        return "-"

    mean = form.format(statistics.fmean(values))
    if len(values) == 1:
        return mean
    deviation = form.format(statistics.stdev(values))
    if float(deviation) == 0:
        return mean
    return f"{mean} ± {deviation}"


def accuracies(cells: list[Cell], form: str) -> str:
    """Percent of the held-out problems that are right, a figure for each seed."""
    return ", ".join(form.format(100 * cell["accuracy_after"]) for cell in cells) or "-"


def mean_accuracy(cells: list[Cell], form: str) -> str:
    """The same as a mean over seeds."""
    return spread(cells, lambda cell: 100 * cell["accuracy_after"], form)


def deployed_accuracy(cells: list[Cell], way: str, form: str) -> str:
    """Percent of right answers of the trained weights "as it is" or quantized in one way, over seeds."""
    return spread(cells, lambda cell: percent(cell["scores"].get(way)), form)


def mean_mismatch(cells: list[Cell]) -> str:
    """Nats per token, over seeds."""
    return spread(cells, lambda cell: mean_of(cell, "mismatch/logp_diff_mean"), "{:.1g}")


def starts_of(regime: str) -> dict[str, float]:
    """Share of right answers before training, of the bf16 model and of the quantized one."""
    shares: dict[str, float] = {}
    for arm in ARMS:
        model = "bf16" if arm.startswith("bf16") else "quantized"
        for cell in read(regime, arm):
            if cell["accuracy_before"] is not None:
                shares.setdefault(model, cell["accuracy_before"])
    return shares


# Tables for users ----------------------------------------------------------------------------------------------------


def users_table() -> str:
    """Accuracy of the main arms, over seeds."""
    header = ["regime", "start in 4 bits", *SHOWN_ARMS]
    rows = []
    for regime, name in USERS_REGIMES.items():
        row = [name, f"{100 * starts_of(regime)['quantized']:.0f}"]
        row += [mean_accuracy(read(regime, arm), "{:.0f}") for arm in SHOWN_ARMS]
        rows.append(row)
    return markdown(header, rows)


def users_long_table(regime: str) -> str:
    """Accuracy of the arms of a long regime, with three seeds and more, by how their weights are deployed."""
    ways = ("as it is", "rounded", "gptq")
    # All long regimes have one start.
    before = json.loads((FOLDER / "long_before.json").read_text())["scores"]
    of_start = [f"{100 * before[way]:.0f}" for way in ways]

    rows = [["before training", *of_start]]
    for arm in arms_of(regime):
        cells = read(regime, arm)
        if len(cells) < 3:
            continue
        deployed = [deployed_accuracy(cells, way, "{:.0f}") for way in ways]
        rows.append([arm, *deployed])
    return markdown(["trained by", "unquantized", "rounded", "GPTQ"], rows)


# Tables of a regime --------------------------------------------------------------------------------------------------


def regime_table(regime: str) -> str:
    """The arms of a regime, one a line."""
    header = ["arm", "accuracy by seed, %", "mean", "of the learner", *FIGURES]
    if regime == "hard":
        header.append("paper, %")  # the same for every regime

    rows = []
    missing = []
    for arm in ARMS:
        cells = read(regime, arm)
        if cells:
            rows.append(_row(arm, cells)[: len(header)])
        elif arm in arms_of(regime):
            missing.append(arm)
    return f"{markdown(header, rows)}\n\n{_note(regime, missing)}"


def _row(arm: str, cells: list[Cell]) -> list[str]:
    """One line of `regime_table`, with the paper's figure."""
    return [
        arm,
        accuracies(cells, "{:.1f}"),
        mean_accuracy(cells, "{:.1f}"),
        spread(cells, lambda cell: percent(cell.get("accuracy_learner")), "{:.1f}"),
        *_figures(cells),
        PAPER.get(arm, "-"),
    ]


def _figures(cells: list[Cell]) -> list[str]:
    """The cells of `FIGURES` in a line."""
    return [
        spread(cells, lambda cell: mean_of(cell, "reward", 3), "{:.2f}"),
        f"{sum(map(collapsed, cells))} of {len(cells)}",
        mean_mismatch(cells),
        spread(cells, lambda cell: 100 * mean_of(cell, neg_high(cell)), "{:.1f}"),
        spread(cells, lambda cell: 100 * mean_of(cell, "completions/clipped_ratio", 3), "{:.1f}"),
        spread(cells, lambda cell: 100 * mean_of(cell, "error_tokens/frac", 3), "{:.2f}"),
    ]


def _note(regime: str, missing: list[str]) -> str:
    """The line below a regime's table: what its arms start from, and which were not run."""
    shares = [f"{model} {100 * share:.1f}" for model, share in sorted(starts_of(regime).items())]
    text = f"Before training: {', '.join(shares) or NOT_RUN}."
    if missing:
        text += f" Not run: {'; '.join(missing)}."
    return text


def portable_table(regime: str) -> str:
    """The arms of a portable regime, one a line, and what each deployment of their weights scores."""
    header = ["arm", "seeds", "engine, by seed, %", "as it is", "rounded", "GPTQ", "AWQ", *FIGURES]
    rows = []
    missing = []
    for arm in arms_of(regime):
        cells = read(regime, arm)
        if not cells:
            missing.append(arm)
            continue
        deployed = [deployed_accuracy(cells, way, "{:.1f}") for way in ("as it is", "rounded", "gptq", "awq")]
        rows.append([arm, str(len(cells)), accuracies(cells, "{:.0f}"), *deployed, *_figures(cells)])
    return f"{markdown(header, rows)}\n\n{_note(regime, missing)}"


def portable_differences(regime: str) -> str:
    """Differences of two arms of a portable regime, paired by seed."""
    return differences([(text, (regime, *first), (regime, *second)) for text, first, second in COMPARED])


def differences(compared: Sequence[tuple[str, Deployed, Deployed]]) -> str:
    """What lies between the two that each entry names, paired by seed."""
    header = ["what is compared", "pairs", "points", "pairs above 0", "range"]
    rows = []
    for text, first, second in compared:
        before = scores_by_seed(*first)
        after = scores_by_seed(*second)
        seeds = sorted(before.keys() & after.keys())
        points = [100 * (after[seed] - before[seed]) for seed in seeds]
        rows.append([text, str(len(points)), *summary(points)])
    return markdown(header, rows)


def distilled_table() -> str:
    """The arms that begin with a distilled start, and bf16 GRPO, which is distilled after training alone."""
    ways = ("as it is", "rounded", "gptq", "distilled")
    rows = []
    for name, start in (("start in bfloat16", "long"), ("start, distilled", DISTILLED)):
        shares = json.loads((FOLDER / f"{start}_before.json").read_text())["scores"]
        of_start = [f"{100 * shares[way]:.1f}" if way in shares else "-" for way in ways]
        rows.append([name, "-", "-", *of_start, "-", "-"])

    for arm in arms_of(DISTILLED):
        cells = read(DISTILLED, arm)
        deployed = [deployed_accuracy(cells, way, "{:.1f}") for way in ways]
        reward = spread(cells, lambda cell: mean_of(cell, "reward", 3), "{:.2f}")
        rows.append([arm, str(len(cells)), accuracies(cells, "{:.0f}"), *deployed, reward, mean_mismatch(cells)])
    header = ["arm", "seeds", "engine, by seed, %", "as it is", "rounded", "GPTQ", "distilled", "reward"]
    return markdown([*header, "mismatch, nats"], rows)


def scores_by_seed(regime: str, arm: str, way: str) -> dict[int, float]:
    """Share of right answers of an arm's weights, deployed in one way."""
    return {cell["seed"]: cell["scores"][way] for cell in read(regime, arm)}


def summary(differences: list[float]) -> list[str]:
    """
    Write the cells of a line about some pairs.

    Args:
        differences: In points, a figure for each pair.

    Returns:
        Mean with its standard error over seeds (of two and fewer all are printed), pairs above 0, and range.
    """
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
        for arm, learner in LEVEL_NAMES.items():
            cells = read(regime, arm)
            figures = [NOT_RUN] * 3
            if cells:
                divergence = spread(cells, lambda cell: mean_of(cell, "mismatch/kl_k3"), "{:.1g}")
                figures = [mean_accuracy(cells, "{:.1f}"), mean_mismatch(cells), divergence]
            rows.append([scheme, learner, str(len(cells)), *figures])
    return markdown(["scheme", "learner", "seeds", "accuracy, %", "mismatch, nats", "KL, nats"], rows)


# Pages ---------------------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """All tables by their marks."""
    by_name = {}
    for regime in SHOWN_REGIMES:
        by_name[regime] = regime_table(regime)
    for regime in DEPLOYED_REGIMES:
        by_name[regime] = portable_table(regime)
        by_name[f"{regime}, pairs"] = portable_differences(regime)
    by_name["distilled"] = distilled_table()
    by_name["distilled, pairs"] = differences(COMPARED_DISTILLED)
    by_name["alignment"] = level_table()
    by_name["toy"] = users_table()
    by_name["toy, long"] = users_long_table("long")
    by_name["toy, long, slow"] = users_long_table("long_stale_slow")
    return {f"<!-- table: {name} -->\n": text for name, text in by_name.items()}


def main() -> None:
    made = tables()
    for page in PAGES:
        put_tables(page, made)
    cells = list(FOLDER.glob("*/*.json"))
    print(f"{len(cells)} cells in {FOLDER}")


if __name__ == "__main__":
    main()
