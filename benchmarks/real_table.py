"""
Tables of the real model from its committed cells, standard library only: `python benchmarks/real_table.py`.

They stand between marks as `<!-- real: g64 -->` and `<!-- end -->`: those of each regime in results/real/README.md,
and in docs/results.md those that a user reads.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_arms
from real_arms import ARMS, BEFORE, RATED, REGIMES


Cell = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "benchmarks" / "results" / "real" / "README.md",
    ROOT / "docs" / "results.md",
    ROOT / "docs" / "recover.md",
)
END = "<!-- end -->"
# What a cell's models are called in its file, and in a table's header.
MODELS = {"masters": "bfloat16", "low_bit": "low bits", "gptq": "GPTQ"}
# Only where the regime asks for them.
AGAIN = {"again": "distilled again"}
AWQ = {"awq": "AWQ"}

# What is compared, problem by problem: what changes, and the arms before and after the change, or a model of them, see
# `NAMED_MODELS`.
PAIRS = (
    ("the learner's weights", "rollout-only GRPO", "QaRL GRPO"),
    ("the learner's weights, both by GPTQ", "rollout-only GRPO, GPTQ", "QaRL GRPO, GPTQ"),
    ("the learner's weights, no weight for the mismatch", "rollout-only GRPO, no weight", "QaRL GRPO"),
    ("the learner's weights, TBPO", "rollout-only TBPO", "QaRL TBPO"),
    ("the learner's weights, TBPO, both by GPTQ", "rollout-only TBPO, GPTQ", "QaRL TBPO, GPTQ"),
    ("the learner's weights, TBPO, no weight for the mismatch", "rollout-only TBPO, no weight", "QaRL TBPO"),
    ("the weight for the mismatch", "rollout-only GRPO, no weight", "rollout-only GRPO"),
    ("the weight for the mismatch, TBPO", "rollout-only TBPO, no weight", "rollout-only TBPO"),
    ("the learner's weights, TRL's default weight", "rollout-only GRPO, TRL default", "QaRL GRPO"),
    ("the weight: TRL's default, not TIS", "rollout-only GRPO", "rollout-only GRPO, TRL default"),
    ("the weight: IcePop, not TIS", "rollout-only GRPO", "rollout-only GRPO, IcePop"),
    ("the loss, and its weight", "QaRL GRPO", "QaRL TBPO"),
    ("the loss", "QaRL GSPO", "QaRL TBPO"),
    ("the loss, and its weight, learner in bfloat16", "rollout-only GRPO", "rollout-only TBPO"),
    ("the engine's weights", "bf16 GRPO", "rollout-only GRPO"),
    ("the engine's weights, both by GPTQ", "bf16 GRPO, GPTQ", "rollout-only GRPO, GPTQ"),
    ("quantization after training, not during it", "QaRL GRPO", "bf16 GRPO"),
    ("quantization after training, TBPO", "QaRL TBPO", "bf16 TBPO"),
    ("GPTQ after training, not rounding", "bf16 GRPO", "bf16 GRPO, GPTQ"),
    ("GPTQ, TBPO", "bf16 TBPO", "bf16 TBPO, GPTQ"),
    ("GPTQ, rollouts in low bits", "rollout-only GRPO", "rollout-only GRPO, GPTQ"),
    ("GPTQ, rollouts in low bits, TBPO", "rollout-only TBPO", "rollout-only TBPO, GPTQ"),
    ("GPTQ, QaRL", "QaRL GRPO", "QaRL GRPO, GPTQ"),
    ("GPTQ, QaRL, TBPO", "QaRL TBPO", "QaRL TBPO, GPTQ"),
    ("GPTQ after rollout-only, not QaRL", "QaRL GRPO", "rollout-only GRPO, GPTQ"),
    ("GPTQ after rollout-only, not QaRL, TBPO", "QaRL TBPO", "rollout-only TBPO, GPTQ"),
    ("GPTQ after bf16, not QaRL", "QaRL GRPO", "bf16 GRPO, GPTQ"),
    ("GPTQ after bf16, not QaRL, TBPO", "QaRL TBPO", "bf16 TBPO, GPTQ"),
    (
        "the learner's weights, both distilled again",
        "rollout-only GRPO, distilled again",
        "QaRL GRPO, distilled again",
    ),
    ("distilled again, not rounded, rollouts in low bits", "rollout-only GRPO", "rollout-only GRPO, distilled again"),
    ("distilled again, not rounded, QaRL", "QaRL GRPO", "QaRL GRPO, distilled again"),
)
# How a name of `PAIRS` ends that means such a model of its arm.
NAMED_MODELS = {", GPTQ": "gptq", ", distilled again": "again"}
# Of the table of real_distill.py: its names, as a reader has them.
DISTILLED = {
    "bfloat16": "bfloat16 itself",
    "rounded": "rounded",
    "rollouts": "distilled, 30 updates on sampled answers",
    "answers": "distilled, 30 updates on given answers",
    "answers, 90 updates": "distilled, 90 updates on given answers",
}
# What a user decides, over all regimes: contrast, then learner and model before and after the change.
CHOICES = (
    ("rollout-only minus bf16 rollouts, in bfloat16", ("bf16", "masters"), ("rollout-only", "masters")),
    ("rollout-only minus bf16 rollouts, both by GPTQ", ("bf16", "gptq"), ("rollout-only", "gptq")),
    ("QaRL minus rollout-only, rounded", ("rollout-only", "low_bit"), ("QaRL", "low_bit")),
    ("QaRL minus rollout-only, both by GPTQ", ("rollout-only", "gptq"), ("QaRL", "gptq")),
    ("QaRL minus rollout-only, both in bfloat16", ("rollout-only", "masters"), ("QaRL", "masters")),
    ("QaRL rounded minus rollout-only by GPTQ", ("rollout-only", "gptq"), ("QaRL", "low_bit")),
    ("QaRL rounded minus bf16 rollouts by GPTQ", ("bf16", "gptq"), ("QaRL", "low_bit")),
    ("GPTQ minus rounding, bf16 rollouts", ("bf16", "low_bit"), ("bf16", "gptq")),
    ("GPTQ minus rounding, rollout-only", ("rollout-only", "low_bit"), ("rollout-only", "gptq")),
    ("GPTQ minus rounding, QaRL", ("QaRL", "low_bit"), ("QaRL", "gptq")),
)
# Those whose start was not distilled: distilled master weights are made to be rounded, so GPTQ and bfloat16 mean
# another thing of them.
CHOICE_REGIMES = tuple(name for name in REGIMES if name != "distilled")
# RL from the distilled start, as trained, against every way to a 4-bit model without it: regime, arm and model.
RECOVERED = ("distilled", "QaRL GRPO", "low_bit")
INSTEAD = (
    ("rollout-only GRPO from the distilled start", ("distilled", "rollout-only GRPO", "low_bit")),
    ("bf16 GRPO, GPTQ", ("undistilled", "bf16 GRPO", "gptq")),
    ("bf16 GRPO, distilled again", ("undistilled", "bf16 GRPO", "again")),
    ("rollout-only GRPO, GPTQ", ("undistilled", "rollout-only GRPO", "gptq")),
    ("rollout-only GRPO, distilled again", ("undistilled", "rollout-only GRPO", "again")),
    ("QaRL GRPO from the rounded start", ("undistilled", "QaRL GRPO", "low_bit")),
    ("QaRL GRPO from the rounded start, distilled again", ("undistilled", "QaRL GRPO", "again")),
)
# Of those, what the users' table of choices has.
CHOICES_DISTILLED = (
    ("QaRL from a distilled start minus rollout-only from it", ("distilled", "rollout-only GRPO", "low_bit")),
    ("QaRL from a distilled start minus rollout-only by GPTQ", ("undistilled", "rollout-only GRPO", "gptq")),
    ("QaRL from a distilled start minus bf16 rollouts by GPTQ", ("undistilled", "bf16 GRPO", "gptq")),
)
LOSSES = ("GRPO", "TBPO")
SEEDS = range(100)
# Trained by x deployed as, for users: from one start, and from its distillations.
DEPLOYED = {"masters": "bfloat16", "low_bit": "rounded", "gptq": "GPTQ", "again": "distilled"}
DEPLOYED_ARMS = (
    ("bf16 GRPO", "undistilled", "bf16 GRPO"),
    ("rollout-only GRPO", "undistilled", "rollout-only GRPO"),
    ("QaRL GRPO", "undistilled", "QaRL GRPO"),
    ("rollout-only GRPO from a distilled start", "distilled", "rollout-only GRPO"),
    ("QaRL GRPO from a distilled start", "distilled", "QaRL GRPO"),
)
# The same from another start, with TBPO: the seeds that all of these arms have.
SHOWN_REGIME = "g64"
SHOWN_SEEDS = (2, 3)
SHOWN = (BEFORE, "bf16 GRPO", "rollout-only GRPO", "rollout-only TBPO", "QaRL GRPO", "QaRL TBPO")


# Cells ---------------------------------------------------------------------------------------------------------------


def read_cell(regime: str, arm: str, seed: int) -> Cell | None:
    """Read a cell; `None` for one that was not run."""
    path = real_arms.file_of(regime, arm, seed)
    if not path.exists():
        return None
    return json.loads(path.read_text())


def cells_of(regime: str, arm: str) -> list[Cell]:
    """The cells of an arm that were run, by seed."""
    cells = []
    for seed in SEEDS:
        cell = read_cell(regime, arm, seed)
        if cell is not None:
            cells.append(cell)
    return cells


def shares(cell: Cell, model: str, greedy: bool = False) -> list[float]:
    """
    Percent of the answers to each held-out problem that are right.

    Args:
        cell: The cell.
        model: A key of `MODELS` that is scored in it.
        greedy: Of the greedy answer; else of the samples.
    """
    if greedy:
        return [100.0 * right for right in cell["greedy"][model]]
    return [100 * right / cell["samples"] for right in cell["scores"][model]]


def is_scored(cell: Cell, model: str, greedy: bool = False) -> bool:
    """Whether a cell has answers of a model."""
    return model in cell.get("greedy" if greedy else "scores", {})


# Errors --------------------------------------------------------------------------------------------------------------


def error_of_problems(percents: list[float]) -> float:
    """
    Standard error of one model's mean: it holds the choice of the problems and nothing of training.

    Args:
        percents: A figure for each problem.
    """
    return (statistics.variance(percents) / len(percents)) ** 0.5


def mean_and_error(rows: list[list[float]]) -> tuple[float, float]:
    """
    Average over models (or pairs of them) and problems.

    The error holds the choice of the held-out problems (the spread of the problems' means) and, of several rows, that
    of training and sampling (the spread of the rows' means). The first contains part of the second: the error is
    rather too large.

    Args:
        rows: Percent by problem, a list for each model; all lists have the same problems.

    Returns:
        The mean and its standard error, in percent.
    """
    problems = [statistics.fmean(values) for values in zip(*rows, strict=True)]
    means = [statistics.fmean(row) for row in rows]
    variance = statistics.variance(problems) / len(problems)
    if len(means) > 1:
        variance += statistics.variance(means) / len(means)
    return statistics.fmean(means), variance**0.5


def difference(first: Cell, second: Cell, models: tuple[str, str]) -> list[float]:
    """
    Points from the first to the second cell, problem by problem.

    Args:
        first: The cell before the change.
        second: The one after it.
        models: Which model of each.

    Raises:
        ValueError: if the two did not begin with one start.
    """
    starts = {first["start_sha256"], second["start_sha256"]}
    if len(starts) > 1:
        raise ValueError(
            f"Cells must have one start to be compared, got {first['arm']} and {second['arm']}: {starts}."
        )
    model_before, model_after = models
    before = shares(first, model_before)
    after = shares(second, model_after)
    return points_between(before, after)


def points_between(before: list[float], after: list[float]) -> list[float]:
    """What is gained in each problem, in points."""
    return [second - first for first, second in zip(before, after, strict=True)]


# Words ---------------------------------------------------------------------------------------------------------------


def percent(values: list[float]) -> str:
    """The mean with its error by problems; the values are percents by problem."""
    return f"{statistics.fmean(values):.1f} ± {error_of_problems(values):.1f}"


def gain(points: list[float]) -> str:
    """The same of a difference, with its sign."""
    return f"{statistics.fmean(points):+.1f} ± {error_of_problems(points):.1f}"


def mean_gain(rows: list[list[float]]) -> str:
    """The mean of several differences, a list for each, with its error by problems and trainings."""
    mean, error = mean_and_error(rows)
    return f"{mean:+.1f} ± {error:.1f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """
    A Markdown table.

    Args:
        header: Names of the columns.
        rows: Texts of the cells.
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Tables of a regime --------------------------------------------------------------------------------------------------


def cells_table(regime: str) -> str:
    """The cells of a regime, one a line, and which arms were not run."""
    models = models_of(regime)
    header = ["arm", "seed"]
    header += [f"{name}, %" for name in models.values()]
    header += [f"greedy: {name}, %" for name in models.values()]
    header += ["any of four: low bits, GPTQ, bfloat16", "reward", "mismatch, nats"]

    rows = []
    missing = []
    for arm in (BEFORE, *ARMS):
        cells = cells_of(regime, arm)
        # Of the rates an arm takes one.
        if not cells and arm not in RATED:
            missing.append(arm)
        rows += [row_of(cell, models) for cell in cells]

    text = markdown(header, rows)
    # In a regime of a start alone none is.
    if missing and any(cells_of(regime, arm) for arm in ARMS):
        text += f"\n\nNot run: {'; '.join(missing)}."
    return text


def models_of(regime: str) -> dict[str, str]:
    """The models that the cells of a regime have, and their names in a header."""
    if REGIMES[regime].get("distill_again"):
        return MODELS | AGAIN
    if "awq" in REGIMES[regime]:
        return MODELS | AWQ
    return MODELS


def row_of(cell: Cell, models: Iterable[str]) -> list[str]:
    """A line of a regime's table, with those of the models that were scored."""
    row = [cell["arm"], str(cell["seed"])]
    for greedy in (False, True):
        row += [with_error(cell, model, greedy) for model in models]

    any_right = []
    for model in ("low_bit", "gptq", "masters"):
        if is_scored(cell, model):
            problems = [right > 0 for right in cell["scores"][model]]
            any_right.append(f"{100 * statistics.fmean(problems):.1f}")
    row.append(", ".join(any_right))

    row.append(logged_mean(cell, "reward", "{:.2f}", last=4))
    row.append(logged_mean(cell, "mismatch/logp_diff_mean", "{:.2g}"))
    return row


def with_error(cell: Cell, model: str, greedy: bool) -> str:
    """What a model of a cell scores, if it was scored."""
    if not is_scored(cell, model, greedy):
        return "-"
    return percent(shares(cell, model, greedy))


def logged_mean(cell: Cell, name: str, form: str, last: int = 0) -> str:
    """Mean of a logged column over the rollout batches, or over the `last` of them."""
    column = cell["log"].get(name, [])
    values = [value for value in column[-last:] if value is not None]
    if not values:
        return "-"
    return form.format(statistics.fmean(values))


def differences_table(regime: str) -> str:
    """What each change in `PAIRS` moves, in points: seed by seed, and the mean of three and more."""
    header = ["what changes", "from", "to", "seeds", "low bits, by seed", "mean", "bfloat16, by seed", "mean"]
    rows = []
    for what, *names in (*PAIRS, *rated_pairs()):
        pairs = pairs_of(regime, names)
        if pairs:
            seeds = ", ".join(map(str, pairs))
            rows.append([what, *names, seeds, *by_seed(pairs, names, "low_bit"), *by_seed(pairs, names, "masters")])
    if not rows:
        return "No two arms were run that can be compared."
    return markdown(header, rows)


def rated_pairs() -> list[tuple[str, str, str]]:
    """More of `PAIRS`: the arms at the rates that they chose, against their own usual rate and against each other."""
    rollout_only = chosen_rate("rollout-only GRPO")
    qarl = chosen_rate("QaRL GRPO")
    if rollout_only is None or qarl is None:
        return []
    return [
        ("the learner's weights, each at its rate", rollout_only, qarl),
        ("the learner's weights, each at its rate, both by GPTQ", f"{rollout_only}, GPTQ", f"{qarl}, GPTQ"),
        ("GPTQ after rollout-only, not QaRL, each at its rate", qarl, f"{rollout_only}, GPTQ"),
        ("the rate", "rollout-only GRPO", rollout_only),
        ("the rate, both by GPTQ", "rollout-only GRPO, GPTQ", f"{rollout_only}, GPTQ"),
        ("the rate", "QaRL GRPO", qarl),
        ("the rate, both by GPTQ", "QaRL GRPO, GPTQ", f"{qarl}, GPTQ"),
    ]


def chosen_rate(arm: str) -> str | None:
    """The arm of `RATED` with the highest reward in the second half of its run of `rate_choice`; `None` before it."""
    rewards = {}
    for rated in RATED:
        if rated.startswith(f"{arm}, "):
            for cell in cells_of("rate_choice", rated):
                rewards[rated] = halves_of_reward(cell)[1]
    if not rewards:
        return None
    return max(rewards, key=rewards.__getitem__)


def halves_of_reward(cell: Cell) -> tuple[float, float]:
    """Mean reward of both halves of a run."""
    rewards = cell["log"]["reward"]
    half = len(rewards) // 2
    return statistics.fmean(rewards[:half]), statistics.fmean(rewards[half:])


def pairs_of(regime: str, names: list[str]) -> dict[int, tuple[Cell, Cell]]:
    """The cells of both names of `PAIRS`, by the seeds that both have."""
    before, after = names
    pairs = {}
    for seed in SEEDS:
        first = read_cell(regime, arm_of(before), seed)
        second = read_cell(regime, arm_of(after), seed)
        if first is None or second is None:
            continue
        if is_scored(first, model_of(before, "low_bit")) and is_scored(second, model_of(after, "low_bit")):
            pairs[seed] = (first, second)
    return pairs


def arm_of(name: str) -> str:
    """The arm that a name of `PAIRS` means."""
    for ending in NAMED_MODELS:
        name = name.removesuffix(ending)
    return name


def model_of(name: str, model: str) -> str:
    """The model that a name of `PAIRS` means; `model`, if it names none."""
    for ending, named in NAMED_MODELS.items():
        if name.endswith(ending):
            return named
    return model


def by_seed(pairs: dict[int, tuple[Cell, Cell]], names: list[str], model: str) -> list[str]:
    """Two cells of a row: the difference of each seed, and the mean of at least three."""
    before, after = names
    models = (model_of(before, model), model_of(after, model))
    if model != "low_bit" and not {*NAMED_MODELS.values()}.isdisjoint(models):
        return ["-", "-"]

    gains = []
    points = []
    for first, second in pairs.values():
        if is_scored(first, models[0]) and is_scored(second, models[1]):
            points.append(difference(first, second, models))
            gains.append(gain(points[-1]))
        else:
            gains.append("-")
    return [", ".join(gains), mean_of_three(points)]


def mean_of_three(points: list[list[float]]) -> str:
    """The mean of at least three differences: of two, one degree of freedom is left for their spread."""
    if len(points) < 3:
        return "-"
    return mean_gain(points)


# Tables over the regimes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """
    Two models of equal regime, loss, seed and start.

    Attributes:
        points: From the first to the second, by problem.
    """

    regime: str
    loss: str
    seed: int
    points: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.points)


def pairs_of_choice(first: tuple[str, str], second: tuple[str, str]) -> list[Pair]:
    """
    All pairs of a contrast that were run.

    Args:
        first: Learner ("bf16", "rollout-only", "QaRL") and model, before the change.
        second: The same after it.
    """
    learner_before, model_before = first
    learner_after, model_after = second
    pairs = []
    for regime, loss, seed in itertools.product(CHOICE_REGIMES, LOSSES, SEEDS):
        before = read_cell(regime, f"{learner_before} {loss}", seed)
        after = read_cell(regime, f"{learner_after} {loss}", seed)
        if before is None or after is None:
            continue
        if is_scored(before, model_before) and is_scored(after, model_after):
            points = difference(before, after, (model_before, model_after))
            pairs.append(Pair(regime, loss, seed, points))
    return pairs


def choices_table() -> str:
    """Each contrast of `CHOICES` over all of its pairs, then those of the distilled start."""
    rows = []
    for what, first, second in CHOICES:
        pairs = pairs_of_choice(first, second)
        rows.append([what, *summary([pair.points for pair in pairs])])

    for what, other in CHOICES_DISTILLED:
        points = []
        for before, after in seeds_of_both(other).values():
            points.append(points_between(shares(before, other[2]), shares(after, RECOVERED[2])))
        if points:
            rows.append([what, *summary(points)])
    return markdown(["what is compared", "points", "pairs above 0", "range"], rows)


def summary(points: list[list[float]]) -> list[str]:
    """Mean with its error, pairs above 0, and range of some differences, each a list of points by problem."""
    means = [statistics.fmean(pair) for pair in points]
    above = sum(mean > 0 for mean in means)
    return [mean_gain(points), f"{above} of {len(means)}", f"{min(means):+.1f} to {max(means):+.1f}"]


def deployed_table(greedy: bool) -> str:
    """Trained by x deployed as, of the arms that were trained three times from one start or its distillations."""
    before = cells_of("undistilled", BEFORE)
    row = [of_trainings(before, model, greedy) for model in MODELS]
    distilled = of_trainings(cells_of("distilled", BEFORE), "low_bit", greedy)
    rows = [[BEFORE, *row, distilled]]

    for words, regime, arm in DEPLOYED_ARMS:
        cells = cells_of(regime, arm)
        rows.append([words, *(of_trainings(cells, model, greedy) for model in DEPLOYED)])
    return markdown(["trained by", *DEPLOYED.values()], rows)


def of_trainings(cells: list[Cell], model: str, greedy: bool) -> str:
    """
    The percent of a model over its trainings, and how many they are.

    Three and more have a mean, whose error holds problems and trainings. Of two both are given.
    """
    scored = [shares(cell, model, greedy) for cell in cells if is_scored(cell, model, greedy)]
    if len(scored) < 3:
        percents = by_training(cells, model, greedy)
    else:
        mean, error = mean_and_error(scored)
        percents = f"{mean:.1f} ± {error:.1f}"
    return f"{percents} ({len(scored)})" if scored else "-"


def tbpo_table() -> str:
    """Trained by x deployed as, from another start, with TBPO: the seeds that all arms have."""
    rows = []
    for arm in SHOWN:
        cells = [cell for cell in cells_of(SHOWN_REGIME, arm) if cell["seed"] in SHOWN_SEEDS]
        rows.append([arm, *(by_training(cells, model, greedy=False) for model in MODELS)])
    return markdown(["trained by", MODELS["masters"], "rounded", MODELS["gptq"]], rows)


def by_training(cells: list[Cell], model: str, greedy: bool) -> str:
    """The percent of each training, and the largest of their errors by the choice of problems."""
    scored = [shares(cell, model, greedy) for cell in cells if is_scored(cell, model, greedy)]
    if not scored:
        return "-"
    percents = ", ".join(f"{statistics.fmean(values):.1f}" for values in scored)
    error = max(map(error_of_problems, scored))
    return f"{percents} ± {error:.1f}"


def noise_table() -> str:
    """One training, twice: bf16 GRPO does not see the scheme, so the two differ in the rows of a pass alone."""
    cells = [read_cell(regime, "bf16 GRPO", 2) for regime in ("g64", "channel")]
    rows = []
    for cell in cells:
        # Cells whose settings lack it took 32.
        answers = cell["settings"].get("micro", 32)
        rows.append([f"bf16 GRPO, seed 2, passes of {answers} answers", with_error(cell, "masters", False)])

    points = difference(*cells, ("masters", "masters"))
    rows.append(["difference, paired by problem", mean_gain([points])])
    return markdown(["training", "bfloat16, %"], rows)


def mismatch_table() -> str:
    """Mismatch of the arms by regime: first rollout batch, mean of the run, and the largest of a single token."""
    rows = []
    for regime in REGIMES:
        for arm in ARMS:
            for cell in cells_of(regime, arm):
                means = cell["log"]["mismatch/logp_diff_mean"]
                largest = max(cell["log"]["mismatch/logp_diff_max"])
                figures = (means[0], statistics.fmean(means), largest)
                rows.append([regime, arm, str(cell["seed"]), *(f"{value:.2g}" for value in figures)])
    return markdown(["regime", "arm", "seed", "first batch", "mean of the run", "largest of a token"], rows)


def distill_table() -> str:
    """What real_distill.py chose by, on training problems."""
    result = json.loads((real_arms.FOLDER / "distill.json").read_text())
    rows = []
    for name, words in DISTILLED.items():
        scores = result["results"][name]
        sampled = [100 * right / result["samples"] for right in scores["scores"]]
        greedy = [100.0 * right for right in scores["greedy"]]
        # Of the first and of the last five updates, where something was distilled.
        ends = ["-", "-"]
        if scores.get("loss"):
            losses = scores["loss"]
            ends = [f"{statistics.fmean(losses[:5]):.3f}", f"{statistics.fmean(losses[-5:]):.3f}"]
        rows.append([words, *ends, percent(sampled), percent(greedy)])
    return markdown(["start", "KL at first", "KL at last", "4 samples, %", "greedy, %"], rows)


def rates_table() -> str:
    """What an arm chose its rate by: rewards on training problems, in both halves of the runs of `rate_choice`."""
    rows = []
    for arm in RATED:
        for cell in cells_of("rate_choice", arm):
            rows.append([arm, *(f"{reward:.3f}" for reward in halves_of_reward(cell))])
    return markdown(["arm", "reward, batches 1 to 5", "batches 6 to 10"], rows)


def recovered_table() -> str:
    """One start, rounded, by GPTQ and by each distillation of it, on the held-out problems."""
    (undistilled,) = cells_of("undistilled", BEFORE)
    distilled = cells_of("distilled", BEFORE)
    models = [
        ("bfloat16 itself", undistilled, "masters"),
        ("rounded", undistilled, "low_bit"),
        ("GPTQ", undistilled, "gptq"),
    ]
    for cell in distilled:
        models.append(("distilled", cell, "low_bit"))

    rows = []
    for words, cell, model in models:
        sampled = percent(shares(cell, model))
        greedy = percent(shares(cell, model, greedy=True))
        rows.append([words, sampled, greedy])
    for cell in distilled:
        sampled = gain_of_distillation(undistilled, cell, greedy=False)
        greedy = gain_of_distillation(undistilled, cell, greedy=True)
        rows.append(["distilled minus rounded, by problem", sampled, greedy])
    return markdown(["4-bit start", "4 samples, %", "greedy, %"], rows)


def gain_of_distillation(before: Cell, after: Cell, greedy: bool) -> str:
    """The difference of two 4-bit models, problem by problem. Their starts differ, so `difference` refuses them."""
    points = points_between(shares(before, "low_bit", greedy), shares(after, "low_bit", greedy))
    return gain(points)


def instead_table() -> str:
    """`RECOVERED` minus each of `INSTEAD`, by seed, and the mean of three and more seeds."""
    rows = []
    for words, other in INSTEAD:
        pairs = seeds_of_both(other)
        if not pairs:
            rows.append([words, "-", "not run", "-", "not run", "-"])
            continue
        row = [words, ", ".join(map(str, pairs))]
        for greedy in (False, True):
            points = []
            for before, after in pairs.values():
                points.append(points_between(shares(before, other[2], greedy), shares(after, RECOVERED[2], greedy)))
            row += [", ".join(map(gain, points)), mean_of_three(points)]
        rows.append(row)
    return markdown(["less", "seeds", "4 samples, points by seed", "mean", "greedy, points by seed", "mean"], rows)


def seeds_of_both(other: tuple[str, str, str]) -> dict[int, tuple[Cell, Cell]]:
    """
    The cells of `other` and of `RECOVERED`, by the seeds that have both.

    Their starts differ, one being the other, distilled, so `difference` refuses them.

    Raises:
        ValueError: if a cell has another start than that of its regime which was scored before training.
    """
    regime, arm, model = other
    pairs = {}
    for seed in SEEDS:
        before = read_cell(regime, arm, seed)
        after = read_cell(*RECOVERED[:2], seed)
        if before is None or after is None or not is_scored(before, model):
            continue
        for cell in (before, after):
            starts = {start["start_sha256"] for start in cells_of(cell["regime"], BEFORE)}
            if cell["start_sha256"] not in starts:
                raise ValueError(
                    f"{cell['arm']}, seed {seed}, must begin at a start of {cell['regime']!r} that was scored, "
                    f"{starts}, got {cell['start_sha256']}."
                )
        pairs[seed] = (before, after)
    return pairs


# Pages ---------------------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """All tables by their marks."""
    by_name = {
        "real: deployed": deployed_table(greedy=False),
        "real: deployed, greedy": deployed_table(greedy=True),
        "real: deployed, TBPO": tbpo_table(),
        "real: choices": choices_table(),
        "real: noise": noise_table(),
        "real: mismatch": mismatch_table(),
        "real: distill": distill_table(),
        "real: rates": rates_table(),
    }
    if cells_of("undistilled", BEFORE) and cells_of("distilled", BEFORE):
        by_name["real: recovered"] = recovered_table()
        by_name["real: instead"] = instead_table()

    for regime in REGIMES:
        is_scored_at_all = REGIMES[regime].get("is_scored", True)
        if is_scored_at_all and (real_arms.FOLDER / regime).exists():
            by_name[f"real: {regime}"] = cells_table(regime)
            if any(cells_of(regime, arm) for arm in ARMS):
                by_name[f"real differences: {regime}"] = differences_table(regime)
    return {f"<!-- {name} -->\n": text for name, text in by_name.items()}


def put_tables(page: Path, made: dict[str, str]) -> None:
    """
    Write the tables between those marks that a page has.

    Args:
        page: The file, which is changed.
        made: The tables by their marks, each a line of the page.
    """
    text = page.read_text()
    for mark, table in made.items():
        if mark not in text:
            continue
        before, after = text.split(mark)
        _, rest = after.split(END, 1)
        text = f"{before}{mark}{table}\n{END}{rest}"
    page.write_text(text)


def main() -> None:
    made = tables()
    for page in PAGES:
        put_tables(page, made)


if __name__ == "__main__":
    main()
