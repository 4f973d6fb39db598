"""`qarl-trl eval` with a real engine; and the grader on the published sets, where their folder is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from configs import MATH_SETS, needs_math_sets

from slow.isolated import isolated
from slow.toys import save_model


SETTINGS = ["--k", "3", "--max_new_tokens", "24", "--temperature", "1.0", "--seed", "5"]


def _evaluate(model: str, data: str, output: str) -> dict[str, Any]:
    """Half of the problems, then all; and the same requests one at a time in the same engine."""
    from vllm import LLM, SamplingParams

    from qarl_trl import cli
    from qarl_trl.tools.evaluate import sample

    engines, start = [], sample.start_engine
    sample.start_engine = lambda *args, **kwargs: (
        engines[0] if engines else engines.append(start(*args, **kwargs)) or engines[0]
    )
    argv = ["eval", model, "--suite", data, *SETTINGS]
    cli.main([*argv, "--output_dir", f"{output}/half", "--limit", "6"])
    cli.main([*argv, "--output_dir", f"{output}/whole"])
    half, rows = (
        [json.loads(line) for line in Path(output, part, "completions.jsonl").read_text().splitlines()]
        for part in ("half", "whole")
    )
    llm: LLM = engines[0]
    alone = []
    for row in rows:  # one at a time: what else is in the batch must not matter to the draws
        params = SamplingParams(n=3, temperature=1.0, max_tokens=24, seed=sample.prompt_seed(row["prompt_ids"], 5))
        outputs = llm.generate([row["prompt"]], params, use_tqdm=False)[0].outputs
        alone.append(
            [{"text": o.text, "tokens": len(o.token_ids), "cut_off": o.finish_reason == "length"} for o in outputs]
        )
    return {
        "half": half,
        "rows": rows,
        "alone": alone,
        "results": json.loads(Path(output, "whole", "results.json").read_text()),
        "quantized": llm.llm_engine.model_config.quantization,
    }


@pytest.mark.slow
def test_a_checkpoint_is_evaluated(tmp_path, monkeypatch):
    from qarl_trl import cli

    monkeypatch.setenv("TQDM_DISABLE", "1")  # with which vLLM's bar divides by 0
    model = str(tmp_path / "low_bit")
    cli.main(["export", save_model(tmp_path / "plain"), model, "--group_size", "64"])
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"problem": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(12)))
    found = isolated(_evaluate, model, str(data), str(tmp_path / "out"))
    assert found["quantized"] == "compressed-tensors" and found["results"]["precision"].startswith("W4A16")
    assert [row["prompt"] for row in found["rows"]] == [f"{i}+{i}=" for i in range(12)]
    completions = [row["completions"] for row in found["rows"]]
    # In another batch the engine may round otherwise, which can move a draw. Measured: 12 of 12 are equal.
    assert sum(a == b for a, b in zip(completions, found["alone"], strict=True)) >= 10
    assert sum(a == b["completions"] for a, b in zip(completions[:6], found["half"], strict=True)) >= 5
    assert len({c["text"] for row in completions for c in row}) > 18  # control: the draws differ


@pytest.mark.slow
@needs_math_sets
@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "aime24", "amc23", "minerva_math"])
def test_the_grader_takes_gold_answers_and_no_others(name):
    from qarl_trl.data import load_math_dataset
    from qarl_trl.rewards import math_reward

    answers = load_math_dataset(str(MATH_SETS / f"{name}.jsonl"))["answer"][:]
    rotated = answers[1:] + answers[:1]
    differing = [a != b for a, b in zip(answers, rotated, strict=True)]

    def share(completions: list[str]) -> float:
        rewards = math_reward([rf"So the answer is $\boxed{{{text}}}$." for text in completions], answers)
        return sum(reward or 0.0 for reward, counts in zip(rewards, differing, strict=True) if counts) / sum(differing)

    figures = share(answers), share(rotated), share(["}}$$ \\frac{"] * len(answers))
    print(name, len(answers), sum(differing), figures)  # the table of docs/after_training.md
    assert figures[0] >= 0.99 and figures[1] <= 0.01 and figures[2] == 0.0
