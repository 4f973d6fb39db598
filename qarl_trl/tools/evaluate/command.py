"""The command `qarl-trl eval`: options, the order of the checks, and what is written. Libraries load after the options."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from .store import CompletionStore
    from .suites import Problem

# Of the options: what decides a completion, beside model, prompt and engine.
SAMPLING = ("k", "temperature", "top_p", "max_new_tokens", "seed", "tensor_parallel_size", "engine_kwargs")
# And what decides a prompt.
PROMPTING = ("prompt_template", "system_prompt", "chat_template_kwargs")


@dataclass
class Job:
    """What passed the checks: problems and number of problems left out, by suite, and where completions go."""

    options: argparse.Namespace
    precision: str
    problems: dict[str, list[Problem]]
    left_out: dict[str, int]
    store: CompletionStore

    @property
    def todo(self) -> list[Problem]:
        """What the store lacks; a prompt that several suites have is sampled once."""
        rows = itertools.chain.from_iterable(self.problems.values())
        return list({p.prompt_ids: p for p in rows if p.prompt_ids not in self.store}.values())


def main(argv: Sequence[str] | None = None) -> Callable[[], None] | None:
    """Check everything and start the engine; what is returned samples and writes the results."""
    job, engine = prepare(make_parser().parse_args(argv))

    def work() -> None:
        complete(job, engine)
        report(job)

    return None if job is None else work


def make_parser() -> argparse.ArgumentParser:
    """All options, named as in a recipe where that has the same setting."""
    parser = argparse.ArgumentParser(
        prog="qarl-trl eval",
        description="What a checkpoint, low-bit or plain, scores on math problems: avg@k and pass@k through vLLM.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="model folder as `save_model` and `qarl-trl export` write it, or Hub id")
    add("--suite", nargs="+", default=[], help="math (the paper's six), or names of docs/evaluation.md")
    add("--data", nargs="+", default=[], help="own problems: FILE or NAME=FILE; or a folder of files for --suite")
    add("--k", type=int, default=4, help="completions per problem (default: 4; the paper does not give its k)")
    add("--pass_at", type=int, nargs="+", help="pass@ to give, each at most --k (default: k)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6, paper Table 2)")
    add("--top_p", type=float, default=1.0, help="nucleus of the sampling (default: 1.0)")
    add("--max_new_tokens", type=int, default=16384, help="tokens of a completion (default: 16384, paper Table 2)")
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add("--limit", type=int, help="only the first so many problems of each suite")
    add("--prompt_template", help="text around {problem} (default: none, as the recipes)")
    add("--system_prompt", help="system message (default: none, as the recipes)")
    add("--chat_template_kwargs", type=json.loads, default={}, help="arguments of the chat template, JSON")
    add("--problem_column", help="column of the problem (default: guessed)")
    add("--answer_column", help="column of the reference answer (default: guessed)")
    add(
        "--show_prompts", type=int, metavar="N", help="print N prompts of each suite as the engine gets them, and stop"
    )
    add("--tensor_parallel_size", type=int, default=1, help="GPUs of the engine (default: 1)")
    add("--engine_kwargs", type=json.loads, default={}, help="more arguments of vllm.LLM: '{\"max_num_seqs\": 64}'")
    add("--trust_remote_code", action="store_true", help="run code that the checkpoint brings")
    add("--output_dir", help="folder of completions and results (default: runs/eval/<model>-<digest of the settings>)")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse (`ValueError`) what the options alone can tell."""
    options.pass_at = options.pass_at or [options.k]
    for name in ("k", "max_new_tokens", "limit", "show_prompts", "tensor_parallel_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be 1 or more, got {value}.")
    if options.temperature < 0:
        raise ValueError(f"--temperature must be 0 or more, got {options.temperature}.")
    if not 0 < options.top_p <= 1:
        raise ValueError(f"--top_p must be above 0 and at most 1, got {options.top_p}.")
    if options.temperature == 0 and options.k > 1:
        raise ValueError(f"--k {options.k} with --temperature 0: greedy completions are all the same. Use --k 1.")
    if not all(1 <= k <= options.k for k in options.pass_at):
        raise ValueError(f"--pass_at must be between 1 and --k {options.k}, got {options.pass_at}.")
    for name in ("engine_kwargs", "chat_template_kwargs"):
        if not isinstance(getattr(options, name), dict):
            raise ValueError(f"--{name} must be a JSON object, got {getattr(options, name)!r}.")


def prepare(options: argparse.Namespace) -> tuple[Job | None, Any]:
    """The checks, cheap ones first, and the engine if anything is to be sampled; nothing after `--show_prompts`."""
    check_options(options)
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from ..._compat import installed_version, require_vllm
    from ...export.low_bit import digest
    from .checkpoint import check_complete, find_checkpoint, precision
    from .sample import start_engine
    from .store import CompletionStore
    from .suites import find_suites

    suites = find_suites(options.suite, options.data)
    require_vllm()
    folder = find_checkpoint(options.model)
    config, tokenizer = (
        kind.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        for kind in (AutoConfig, AutoTokenizer)
    )
    check_complete(folder, config)
    describe_scheme = precision(config)
    problems, left_out = load(suites, tokenizer, options)
    if options.show_prompts:
        show(problems, options.show_prompts)
        return None, None
    length = needed_length(config, problems, options)
    settings = {"model_sha256": digest(folder), **{name: getattr(options, name) for name in SAMPLING}}
    settings["vllm"] = installed_version("vllm")
    settings["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    short = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    output = options.output_dir or f"runs/eval/{Path(options.model).resolve().name}-{short}"
    job = Job(options, describe_scheme, problems, left_out, CompletionStore(Path(output).expanduser(), settings))
    if not job.todo:
        return job, None
    names = ("seed", "tensor_parallel_size", "trust_remote_code")
    arguments = {"max_model_len": length} | {name: getattr(options, name) for name in names} | options.engine_kwargs
    try:
        return job, start_engine(str(folder), **arguments)
    except Exception as error:  # whatever vLLM raises for a checkpoint that it cannot load
        text = str(error)[:500]  # some list every architecture there is
        raise ValueError(f"vLLM cannot load {options.model}: {type(error).__name__}: {text}") from error


def load(suites: Sequence[Any], tokenizer: Any, options: argparse.Namespace) -> tuple[dict, dict]:
    """Problems and number of problems left out, by suite."""
    from .suites import load_problems

    names = ("prompt_template", "system_prompt", "problem_column", "answer_column")
    settings = {name: getattr(options, name) for name in names} | {"max_samples": options.limit}
    problems, left_out = {}, {}
    for suite in suites:
        name = suite.name
        problems[name], left_out[name] = load_problems(suite, tokenizer, options.chat_template_kwargs, **settings)
        if left_out[name]:
            print(f"{name}: {left_out[name]} left out, because math-verify cannot read the reference answer")
    return problems, left_out


def show(problems: dict[str, list[Problem]], number: int) -> None:
    """Print the first prompts of each suite as the engine gets them."""
    for name, rows in problems.items():
        for problem in rows[:number]:
            print(f"--- {name}, {len(problem.prompt_ids)} tokens, answer {problem.answer}\n{problem.prompt}")


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


def complete(job: Job, engine: Any) -> None:
    """Sample what the store lacks."""
    from tqdm import tqdm

    from .sample import sample

    options, todo = job.options, job.todo
    if not todo:
        print(f"all completions are in {job.store.folder}: nothing to sample")
        return
    settings = {"temperature": options.temperature, "top_p": options.top_p, "max_tokens": options.max_new_tokens}
    finished = sample(engine, todo, options.seed, n=options.k, **settings)
    for problem, completions in tqdm(finished, total=len(todo), desc="sampling", unit="problem"):
        job.store.add(problem, completions)


def report(job: Job) -> None:
    """Grade, write `results.json`, print the table."""
    from tqdm import tqdm

    from ...rewards import math_reward
    from .score import summarize, table

    rewards = {
        name: [
            math_reward([c.text for c in job.store[problem.prompt_ids]], [problem.answer] * job.options.k)
            for problem in tqdm(rows, desc=f"grading {name}", unit="problem")
        ]
        for name, rows in job.problems.items()
    }
    summary = summarize(rewards, job.options.pass_at)
    for name, rows in job.problems.items():
        completions = [c for problem in rows for c in job.store[problem.prompt_ids]]
        summary["suites"][name] |= {
            "problems": len(rows),
            "left_out": job.left_out[name],
            "mean_tokens": sum(c.tokens for c in completions) / len(completions),
            "cut_off": sum(c.cut_off for c in completions) / len(completions),
        }
    prompts = {name: getattr(job.options, name) for name in PROMPTING}
    head = {"model": job.options.model, "precision": job.precision, "settings": job.store.settings | prompts}
    path = results_file(job.store.folder, head, list(job.problems))
    path.write_text(json.dumps(head | summary, indent=2) + "\n")
    print(f"\n{job.options.model}: {job.precision}\n\n{table(summary)}\n\nwritten to {path}")


def results_file(folder: Path, head: dict[str, Any], suites: list[str]) -> Path:
    """`results.json`, or `results-2.json` and so on where that is of other suites or other prompts: no result is lost."""
    for number in itertools.count(1):
        path = folder / ("results.json" if number == 1 else f"results-{number}.json")
        if not path.exists():
            return path
        stored = json.loads(path.read_text())
        if list(stored["suites"]) == suites and all(stored.get(name) == value for name, value in head.items()):
            return path
