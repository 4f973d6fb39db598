"""The command `qarl-trl eval`: options, what is checked before an engine starts, and what is written."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .suites import Problem

# Options that decide a prompt or a completion: they stand in `results.json`.
SETTINGS = ("k", "temperature", "top_p", "max_new_tokens", "seed", "limit", "tensor_parallel_size", "engine_kwargs")
SETTINGS += ("prompt_template", "system_prompt", "chat_template_kwargs")
VERSIONS = ("qarl_trl", "vllm", "torch", "transformers", "compressed-tensors", "math-verify")


def main(argv: Sequence[str] | None = None) -> Callable[[], None]:
    """Check everything and start the engine; what is returned samples, grades and writes the results."""
    options = make_parser().parse_args(argv)
    options.pass_at = options.pass_at or [options.k]
    if not all(1 <= k <= options.k for k in options.pass_at):
        raise ValueError(f"--pass_at must be between 1 and --k {options.k}, got {options.pass_at}.")
    from transformers import AutoConfig, AutoTokenizer

    from ..._compat import require_vllm
    from .checkpoint import check_complete, find_checkpoint, precision
    from .sample import start_engine
    from .suites import find_suites, load_problems

    suites = find_suites(options.suite)
    require_vllm()
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    settings = {"n": options.k, "temperature": options.temperature, "top_p": options.top_p}
    try:
        params = SamplingParams(**settings, max_tokens=options.max_new_tokens)
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error
    folder = find_checkpoint(options.model)
    trust = {"trust_remote_code": options.trust_remote_code}
    config, tokenizer = (kind.from_pretrained(folder, **trust) for kind in (AutoConfig, AutoTokenizer))
    check_complete(folder, config)
    head = {"model": options.model, "precision": precision(config)}
    names = ("prompt_template", "system_prompt", "problem_column", "answer_column")
    prompting = {name: getattr(options, name) for name in names} | {"max_samples": options.limit}
    problems = {s.name: load_problems(s, tokenizer, options.chat_template_kwargs, **prompting) for s in suites}
    output = output_folder(options)
    arguments = {"max_model_len": needed_length(config, problems, options), "seed": options.seed, **trust}
    arguments |= {"tensor_parallel_size": options.tensor_parallel_size} | options.engine_kwargs
    try:
        engine = start_engine(str(folder), **arguments)
    except Exception as error:  # whatever vLLM raises for a checkpoint that it cannot load
        text = str(error)[:500]  # some list every architecture there is
        raise ValueError(f"vLLM cannot load {options.model}: {type(error).__name__}: {text}") from error
    return lambda: evaluate(engine, params, problems, output, head | environment(options, folder), options)


def make_parser() -> argparse.ArgumentParser:
    """All options, named as in a recipe where that has the same setting."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl eval",
        description="What a checkpoint, low-bit or plain, scores on math problems: avg@k and pass@k through vLLM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="model folder as `save_model` and `qarl-trl export` write it, or Hub id")
    add(
        "--suite",
        nargs="+",
        required=True,
        help="math (the paper's six), names of docs/evaluation.md, FILE or NAME=FILE",
    )
    add("--k", type=int, default=4, help="completions per problem (default: 4; the paper does not give its k)")
    add("--pass_at", type=int, nargs="+", help="pass@ to give, each at most --k (default: k)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6, paper Table 2)")
    add("--top_p", type=float, default=1.0, help="nucleus of the sampling (default: 1.0)")
    add("--max_new_tokens", type=int, default=16384, help="tokens of a completion (default: 16384, paper Table 2)")
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add("--limit", type=int, help="only the first so many problems of each suite")
    add("--prompt_template", help="text around {problem} (default: none, as the recipes)")
    add("--system_prompt", help="system message (default: none, as the recipes)")
    add("--chat_template_kwargs", type=json_object, default={}, help="arguments of the chat template, JSON")
    add("--problem_column", help="column of the problem (default: guessed)")
    add("--answer_column", help="column of the reference answer (default: guessed)")
    add("--tensor_parallel_size", type=int, default=1, help="GPUs of the engine (default: 1)")
    add("--engine_kwargs", type=json_object, default={}, help="more arguments of vllm.LLM: '{\"max_num_seqs\": 64}'")
    add("--trust_remote_code", action="store_true", help="run code that the checkpoint brings")
    add("--output_dir", help="where results.json and completions.jsonl go (default: runs/eval/<model>-<time>)")
    return parser


def json_object(text: str) -> dict[str, Any]:
    """The type of an option that holds a JSON object."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return found


def needed_length(config: PretrainedConfig, problems: dict[str, list[Problem]], options: argparse.Namespace) -> int:
    """Tokens of the longest prompt and its completion; `ValueError` where the model has fewer positions."""
    longest = max(len(problem.prompt_ids) for rows in problems.values() for problem in rows)
    length = longest + options.max_new_tokens
    positions = getattr(config.get_text_config(), "max_position_embeddings", length)
    positions = options.engine_kwargs.get("max_model_len", positions)
    if length > positions:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and {options.model} has {positions} positions: --max_new_tokens "
            f"must be {max(positions - longest, 0)} or less, got {options.max_new_tokens}."
        )
    return length


def output_folder(options: argparse.Namespace) -> Path:
    """The folder of the results, created; `FileExistsError` if it has results already."""
    name = f"{Path(options.model).resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(options.output_dir or f"runs/eval/{name}").expanduser()
    if (folder / "results.json").exists():
        raise FileExistsError(f"--output_dir {folder} has a results.json. Use a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def environment(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What else decides a result: options without secrets, the checkpoint's bytes, versions and device."""
    import torch

    from ..._compat import installed_version
    from ...export.files import digest
    from ...redact import redact

    settings = {name: getattr(options, name) for name in SETTINGS}
    return {
        "settings": {"model_sha256": digest(folder), **redact(settings)},
        "versions": {name: installed_version(name) for name in VERSIONS},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def evaluate(
    engine: Any,
    params: Any,
    problems: dict[str, list[Problem]],
    output: Path,
    head: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Sample, grade, write `completions.jsonl` and `results.json` (which begins with `head`), print the table."""
    from ...rewards import math_reward
    from .sample import sample
    from .score import summarize, table

    rewards, further = {}, {}
    with (output / "completions.jsonl").open("w") as file:
        for name, rows in problems.items():
            print(f"{name}: {len(rows)} problems, {options.k} completions each", flush=True)
            answers = sample(engine, rows, params, options.seed)
            rewards[name] = []
            for problem, completions in zip(rows, answers, strict=True):
                rewards[name].append(math_reward([c.text for c in completions], [problem.answer] * len(completions)))
                row = {
                    "suite": name,
                    "prompt": problem.prompt,
                    "prompt_ids": problem.prompt_ids,
                    "answer": problem.answer,
                }
                row |= {"completions": [asdict(c) for c in completions], "rewards": rewards[name][-1]}
                file.write(json.dumps(row) + "\n")
            flat = [c for completions in answers for c in completions]
            further[name] = {
                "problems": len(rows),
                "mean_tokens": sum(c.tokens for c in flat) / len(flat),
                "cut_off": sum(c.cut_off for c in flat) / len(flat),
            }
    summary = summarize(rewards, options.pass_at)
    for name, suite in summary["suites"].items():
        suite |= further[name]
    (output / "results.json").write_text(json.dumps(head | summary, indent=2) + "\n")
    print(f"\n{head['model']}: {head['precision']}\n\n{table(summary)}\n\nwritten to {output / 'results.json'}")
