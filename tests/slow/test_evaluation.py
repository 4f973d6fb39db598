"""`qarl-trl eval` with a real engine; and the grader on the published sets, where their folder is found."""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from configs import MATH_SETS, needs_math_sets

from slow.isolated import isolated
from slow.toys import save_model


pytestmark = pytest.mark.slow
# Sampled, so that the seed matters.
SETTINGS = ["--k", "3", "--max_new_tokens", "24", "--temperature", "1.0", "--seed", "5"]
# 4.5e33, which a model writes as 4.5 \times 10^{33}.
E_NOTATION = re.compile(r"^([\d.]+)e(-?\d+)$")


# A checkpoint --------------------------------------------------------------------------------------------------------


def _evaluate(model: str, data: str, output: str) -> dict[str, Any]:
    """What `eval` writes of half of the problems and of all; and the same requests one by one, in the same engine."""
    from qarl_trl import cli
    from qarl_trl.tools.evaluate import sample

    # The command starts an engine each time; here both times the same one.
    start_engine = sample.start_engine
    engines: list[Any] = []

    def start_once(*args: Any, **kwargs: Any) -> Any:
        if not engines:
            engines.append(start_engine(*args, **kwargs))
        return engines[0]

    sample.start_engine = start_once
    command = ["eval", model, "--suite", data, *SETTINGS]
    cli.main([*command, "--output_dir", f"{output}/half", "--limit", "6"])
    cli.main([*command, "--output_dir", f"{output}/whole"])

    rows = _rows(output, "whole")
    alone = []
    for row in rows:
        alone.append(_complete_alone(engines[0], row))
    return {
        "half": _rows(output, "half"),
        "whole": rows,
        "alone": alone,
        "results": json.loads(Path(output, "whole", "results.json").read_text()),
        "quantized": engines[0].llm_engine.model_config.quantization,
    }


def _rows(output: str, part: str) -> list[dict[str, Any]]:
    """Problems and completions that an evaluation wrote."""
    lines = Path(output, part, "completions.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def _column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _complete_alone(llm: Any, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The completions of a problem that is alone in the engine."""
    from vllm import SamplingParams

    from qarl_trl.tools.evaluate.sample import prompt_seed

    # What else is in a batch must not matter to the draws: the seed is the problem's own.
    params = SamplingParams(n=3, temperature=1.0, max_tokens=24, seed=prompt_seed(row["prompt_ids"], 5))
    (output,) = llm.generate([row["prompt"]], params, use_tqdm=False)

    completions = []
    for answer in output.outputs:
        cut_off = answer.finish_reason == "length"
        tokens = list(answer.token_ids)
        completions.append({"text": answer.text, "token_ids": tokens, "tokens": len(tokens), "cut_off": cut_off})
    return completions


def test_a_checkpoint_is_evaluated(tmp_path, monkeypatch):
    from qarl_trl import cli

    monkeypatch.setenv("TQDM_DISABLE", "1")  # with which vLLM's bar divides by 0
    model = str(tmp_path / "low_bit")
    # Not the default of 128: the engine must read the size from the checkpoint.
    cli.main(["export", save_model(tmp_path / "plain"), model, "--group_size", "64"])
    data = tmp_path / "sums.jsonl"
    problems = []
    with data.open("w") as lines:
        for number in range(12):
            problems.append(f"{number}+{number}=")
            print(json.dumps({"problem": problems[-1], "answer": str(2 * number)}), file=lines)

    evaluated = isolated(_evaluate, model, str(data), str(tmp_path / "out"))

    assert evaluated["quantized"] == "compressed-tensors"
    assert evaluated["results"]["precision"].startswith("W4A16")
    assert _column(evaluated["whole"], "prompt") == problems

    completions = _column(evaluated["whole"], "completions")
    of_half = _column(evaluated["half"], "completions")
    # In another batch the engine may round otherwise, which can move a draw. Measured: 12 of 12 are equal.
    assert _number_equal(completions, evaluated["alone"]) >= 10
    assert _number_equal(completions[:6], of_half) >= 5

    texts = set()
    for of_problem in completions:
        texts |= {completion["text"] for completion in of_problem}
    assert len(texts) > 18  # control: the draws differ


def _number_equal(some: list[Any], others: list[Any]) -> int:
    assert len(some) == len(others)
    return sum(map(operator.eq, some, others))


# The grader ----------------------------------------------------------------------------------------------------------


@needs_math_sets
@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "aime24", "amc23", "minerva_math"])
def test_the_grader_takes_gold_answers_and_no_others(name):
    from qarl_trl.data import load_math_dataset

    answers = load_math_dataset(str(MATH_SETS / f"{name}.jsonl"))["answer"][:]
    rotated = answers[1:] + answers[:1]
    broken = ["}}$$ \\frac{"] * len(answers)
    # Neighbours may have one answer.
    differing = list(map(operator.ne, answers, rotated))
    # A fifth of Minerva's answers are such numbers.
    as_written = [E_NOTATION.sub(r"\1 \\times 10^{\2}", answer) for answer in answers]
    rotated = as_written[1:] + as_written[:1]

    of_gold = _share_correct(as_written, answers, differing)
    of_rotated = _share_correct(rotated, answers, differing)
    of_broken = _share_correct(broken, answers, differing)

    print(name, len(answers), sum(differing), of_gold, of_rotated, of_broken)  # the table of dev/numerics.md
    assert of_gold >= 0.99
    assert of_rotated <= 0.01
    assert of_broken == 0.0


def _share_correct(texts: list[str], answers: list[str], counted: list[bool]) -> float:
    """The share of the counted answers that the grader takes `texts` for."""
    from qarl_trl.rewards import math_reward

    completions = [rf"So the answer is $\boxed{{{text}}}$." for text in texts]
    correct = 0.0
    for reward, counts in zip(math_reward(completions, answers), counted, strict=True):
        if counts:
            correct += reward or 0.0  # none where a reference cannot be read
    return correct / sum(counted)
