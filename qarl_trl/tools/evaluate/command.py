"""The command `qarl-trl eval`: its options, its checks before an engine starts, and its output."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


VERSIONS = ("qarl_trl", "vllm", "torch", "transformers", "compressed-tensors", "math-verify")


def main(argv: Sequence[str] | None = None) -> Callable[[], None]:
    """Check everything and start the engine. Returns a function that samples, grades and writes the results."""
    options = make_parser().parse_args(argv)
    options.pass_at = options.pass_at or [options.k]
    if not all(1 <= k <= options.k for k in options.pass_at):
        raise ValueError(f"--pass_at must be between 1 and --k {options.k}, got {options.pass_at}.")
    from transformers import AutoConfig, AutoTokenizer

    from ..._compat import installed_version
    from ...redact import redact
    from .checkpoint import check_complete, find_checkpoint, precision
    from .sample import start_engine
    from .suites import find_suites, load_problems

    suites = find_suites(options.suite)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    settings = {"n": options.k, "temperature": options.temperature, "top_p": options.top_p}
    try:
        params = SamplingParams(**settings, max_tokens=options.max_new_tokens)
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error
    folder, adapter = find_checkpoint(options.model)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(adapter or folder)
    check_complete(folder, config)
    head = {
        "model": options.model,
        "precision": precision(config) + (", with an adapter beside it" if adapter else ""),
        "settings": redact(vars(options)),
        "versions": {name: installed_version(name) for name in VERSIONS},
    }
    prompting = {name: getattr(options, name) for name in ("prompt_template", "system_prompt")}
    prompting |= {"template_kwargs": options.chat_template_kwargs, "max_samples": options.limit}
    problems = {name: load_problems(*source, tokenizer, **prompting) for name, source in suites.items()}
    length = max(len(problem["prompt_ids"]) for rows in problems.values() for problem in rows) + options.max_new_tokens
    name = f"{Path(options.model).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(options.output_dir or f"runs/eval/{name}").expanduser()
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"--output_dir {output} must be new or empty: existing results are not overwritten.")
    output.mkdir(parents=True, exist_ok=True)  # before the engine starts
    # `max_model_len` comes last: a smaller one would cut completions off. vLLM refuses more than the model's maximum.
    engine = start_engine(
        folder, adapter, **{"seed": options.seed} | options.engine_kwargs | {"max_model_len": length}
    )
    return lambda: evaluate(engine, params, problems, output, head, options)


def make_parser() -> argparse.ArgumentParser:
    """All options. An option that is also a setting of recipes has the same name."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl eval",
        description="Score a checkpoint, low-bit or plain, on math problems: avg@k and pass@k through vLLM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        help="model folder as `save_model` and `qarl-trl export` write it, adapter of a frozen base, or Hub id",
    )
    add("--suite", nargs="+", required=True, help="math (the paper's six), names of docs/after_training.md, or files")
    add("--k", type=int, default=4, help="completions per problem (default: 4; the paper does not give its k)")
    add("--pass_at", type=int, nargs="+", help="the k of the pass@k to report, each at most --k (default: k)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6, paper Table 2)")
    add("--top_p", type=float, default=1.0, help="top-p of the sampling (default: 1.0)")
    add("--max_new_tokens", type=int, default=16384, help="completion token limit (default: 16384, paper Table 2)")
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add("--limit", type=int, help="number of problems from the start of each suite (default: all)")
    add("--prompt_template", help="text around {problem} (default: none, as in the recipes)")
    add("--system_prompt", help="system message (default: none, as in the recipes)")
    add("--chat_template_kwargs", type=json_object, default={}, help="arguments of the chat template, JSON")
    add("--engine_kwargs", type=json_object, default={}, help="arguments of vllm.LLM: '{\"tensor_parallel_size\": 2}'")
    add("--output_dir", help="new folder for results.json and completions.jsonl (default: runs/eval/<model>-<time>)")
    return parser


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that holds a JSON object."""
    if not isinstance(found := json.loads(text), dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return found


def evaluate(
    engine: Any, params: Any, problems: dict[str, list[dict]], output: Path, head: dict, options: argparse.Namespace
) -> None:
    """Sample, grade, write `completions.jsonl` and `results.json` (which begins with `head`), print the table."""
    from ...rewards import math_reward
    from .sample import sample
    from .score import summarize, table

    rewards, figures = dict[str, Any](), dict[str, Any]()
    with (output / "completions.jsonl").open("w") as file:
        for name, rows in problems.items():
            print(f"{name}: {len(rows)} problems, {options.k} completions each", flush=True)
            answers, rewards[name] = sample(engine, rows, params, options.seed), []
            for problem, completions in zip(rows, answers, strict=True):
                rewards[name].append(
                    math_reward([c["text"] for c in completions], [problem["answer"]] * len(completions))
                )
                row = {"suite": name, **problem, "completions": completions}
                file.write(json.dumps(row | {"rewards": rewards[name][-1]}) + "\n")
            flat = [completion for completions in answers for completion in completions]
            figures[name] = {
                "problems": len(rows),
                "mean_tokens": sum(c["tokens"] for c in flat) / len(flat),
                "cut_off": sum(c["cut_off"] for c in flat) / len(flat),
            }
    summary = summarize(rewards, options.pass_at)
    for name, suite in summary["suites"].items():
        suite |= figures[name]
    (output / "results.json").write_text(json.dumps(head | summary, indent=2) + "\n")
    print(f"\n{head['model']}: {head['precision']}\n\n{table(summary)}\n\nwritten to {output / 'results.json'}")
