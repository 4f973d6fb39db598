"""The command `qarl-trl eval`: its options, its checks before an engine starts, and its output."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


VERSIONS = ("qarl_trl", "vllm", "torch", "transformers", "compressed-tensors", "math-verify")


def main(argv: Sequence[str] | None = None) -> Callable[[], None]:
    """
    Check everything and start the engine.

    Args:
        argv: The arguments of the command, without its name.

    Returns:
        A function that samples, grades and writes the results.
    """
    options = make_parser().parse_args(argv)
    options.pass_at = options.pass_at or [options.k]
    if not all(1 <= k <= options.k for k in options.pass_at):
        raise ValueError(f"--pass_at must be between 1 and --k {options.k}, got {options.pass_at}.")

    # Late imports, so that `--help` and a wrong option need not wait for them. Cheap checks come first.
    from transformers import AutoConfig, AutoTokenizer

    from .checkpoint import check_complete, find_checkpoint, precision
    from .sample import start_engine
    from .suites import find_suites

    suites = find_suites(options.suite)
    params = _sampling_params(options)

    folder, adapter = find_checkpoint(options.model)
    # An adapter's folder has the tokenizer of the training, which may have another chat template than the base.
    config = AutoConfig.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
    check_complete(folder)
    described = precision(config)
    if adapter is not None:
        described += ", with an adapter beside it"
    head = _head(options, described)

    problems = _load_problems(suites, tokenizer, options)
    # A folder that cannot be written must not be found out after hours of sampling.
    output = _output_folder(options)

    settings = {"seed": options.seed} | options.engine_kwargs
    # It comes last, since a smaller length would cut completions off. vLLM refuses more than the model's maximum.
    settings["max_model_len"] = _longest_prompt(problems) + options.max_new_tokens
    engine = start_engine(folder, adapter, **settings)
    # The command line prints errors up to here in one line, and those of the function with their traceback.
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
    """
    The type of an option that holds a JSON object.

    Args:
        text: What the user wrote.

    Raises:
        ArgumentTypeError: if it is other JSON; a `ValueError`, which argparse reports too, if it is none.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


# Checks before the engine starts ------------------------------------------------------------------------------------


def _sampling_params(options: argparse.Namespace) -> Any:
    """The `vllm.SamplingParams` of the options; `ValueError`, in vLLM's words, for those that it refuses."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        return SamplingParams(
            n=options.k,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_new_tokens,
        )
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error


def _head(options: argparse.Namespace, described: str) -> dict[str, Any]:
    """What the results begin with. Options may hold secrets, such as a token for the engine."""
    from ..._compat.versions import installed_version
    from ...redact import redact

    return {
        "model": options.model,
        "precision": described,
        "settings": redact(vars(options)),
        "versions": {name: installed_version(name) for name in VERSIONS},
    }


def _load_problems(
    suites: Mapping[str, tuple[str, str, str | None]], tokenizer: Any, options: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """The problems of each suite."""
    from .suites import load_problems

    problems = {}
    for name, (source, split, config_name) in suites.items():
        problems[name] = load_problems(
            source,
            split,
            config_name,
            tokenizer,
            template_kwargs=options.chat_template_kwargs,
            prompt_template=options.prompt_template,
            system_prompt=options.system_prompt,
            max_samples=options.limit,
        )
    return problems


def _longest_prompt(problems: Mapping[str, list[dict[str, Any]]]) -> int:
    """The number of tokens of the longest prompt."""
    longest = 0
    for rows in problems.values():
        for problem in rows:
            longest = max(longest, len(problem["prompt_ids"]))
    return longest


def _output_folder(options: argparse.Namespace) -> Path:
    """Create the folder for the results."""
    # The time keeps two evaluations of one model apart.
    name = f"{Path(options.model).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(options.output_dir or f"runs/eval/{name}").expanduser()
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"--output_dir {output} must be new or empty: existing results are not overwritten.")

    output.mkdir(parents=True, exist_ok=True)
    return output


# The evaluation -----------------------------------------------------------------------------------------------------


def evaluate(
    engine: Any, params: Any, problems: dict[str, list[dict]], output: Path, head: dict, options: argparse.Namespace
) -> None:
    """
    Sample, grade, write `completions.jsonl` and `results.json`, and print the table.

    Args:
        engine: A `vllm.LLM`.
        params: `vllm.SamplingParams` without a seed.
        problems: The problems of each suite, from [`~qarl_trl.tools.evaluate.suites.load_problems`].
        output: The folder to write into.
        head: What `results.json` begins with: `model`, `precision` and more.
        options: The options of the command.
    """
    from .sample import sample
    from .score import summarize, table

    rewards: dict[str, list[list[Any]]] = {}
    figures: dict[str, dict[str, float]] = {}
    with (output / "completions.jsonl").open("w") as file:
        for name, rows in problems.items():
            print(f"{name}: {len(rows)} problems, {options.k} completions each", flush=True)
            answers = sample(engine, rows, params, options.seed)

            rewards[name] = []
            for problem, completions in zip(rows, answers, strict=True):
                graded = _grade(problem, completions)
                rewards[name].append(graded)
                # One line a problem, so that a broken evaluation leaves what it has graded.
                row = {"suite": name, **problem, "completions": completions, "rewards": graded}
                file.write(json.dumps(row) + "\n")
            figures[name] = _figures(answers)

    summary = summarize(rewards, options.pass_at)
    for name, suite in summary["suites"].items():
        suite |= figures[name]
    (output / "results.json").write_text(json.dumps(head | summary, indent=2) + "\n")
    print(f"\n{head['model']}: {head['precision']}\n\n{table(summary)}\n\nwritten to {output / 'results.json'}")


def _grade(problem: Mapping[str, Any], completions: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The reward of each completion. None is `None`, since problems without a readable answer are left out."""
    from ...rewards import math_reward

    texts = [completion["text"] for completion in completions]
    return math_reward(texts, [problem["answer"]] * len(texts))


def _figures(answers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Figures of a suite beside its scores, from the completions of each problem."""
    number = 0
    tokens = 0
    cut_off = 0
    for completions in answers:
        for completion in completions:
            number += 1
            tokens += completion["tokens"]
            cut_off += completion["cut_off"]
    return {"problems": len(answers), "mean_tokens": tokens / number, "cut_off": cut_off / number}
