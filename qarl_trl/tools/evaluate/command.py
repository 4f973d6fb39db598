"""The command `qarl-trl eval`: its checks before an engine starts, and its output."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from .options import make_parser


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
    # Paths are those of the start: a reward may change the current folder, and the scores come last.
    start = Path.cwd()
    options.pass_at = options.pass_at or [options.k]
    if not all(1 <= k <= options.k for k in options.pass_at):
        raise ValueError(f"--pass_at must be between 1 and --k {options.k}, got {options.pass_at}.")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {options.limit}; without it all problems count.")
    if "max_model_len" in options.engine_kwargs:
        raise ValueError(
            "--engine_kwargs must not set max_model_len: it is the longest prompt and --max_new_tokens together."
        )

    # Late imports, so that `--help` and a wrong option need not wait for them. Cheap checks come first.
    from transformers import AutoConfig, AutoTokenizer

    from ...export.adapter_base import cache_beside_base
    from ...export.vocabulary import check_vocabulary_files
    from ...rewards import load_rewards
    from ...rollout.engine_settings import check_engine_arguments
    from .checkpoint import check_complete, check_one_model, check_sizes, check_vocabulary, find_checkpoint, precision
    from .grade import reward_names, try_rewards
    from .suites import find_suites

    suites = find_suites(options.suite)
    rewards = load_rewards(options.reward_funcs)
    reward_names(rewards)  # refuses two of one name
    _sampling_params(options)  # refuses what vLLM refuses
    check_engine_arguments(options.engine_kwargs, "--engine_kwargs")
    if "model" in options.engine_kwargs:
        raise ValueError("--engine_kwargs must not set model, which is the first argument of this command.")

    folder, adapter = find_checkpoint(options.model)
    _say_if_masters(folder)
    # An adapter's folder has the tokenizer of the training, which may have another chat template than the base.
    trust_remote_code = options.engine_kwargs.get("trust_remote_code", False)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    check_sizes(folder, config)
    tokenizer = AutoTokenizer.from_pretrained(adapter or folder, trust_remote_code=trust_remote_code)
    check_vocabulary_files(adapter or folder, tokenizer)
    params = _sampling_params(options, tokenizer)
    check_complete(folder, trust_remote_code)
    check_one_model(folder)
    described = precision(config)
    by_engine = options.engine_kwargs.get("quantization")
    if by_engine is not None:
        described += f", loaded with quantization={by_engine}"
    cache = None
    if adapter is not None:
        described += ", with an adapter beside it"
        # As the two were trained.
        cache = cache_beside_base(adapter)
    cache = options.engine_kwargs.get("kv_cache_dtype", cache)
    if cache is not None:
        described += f", keys and values in {cache}"
    head = _head(options, described)

    problems = _load_problems(suites, tokenizer, options)
    prompts = [problem["prompt_ids"] for rows in problems.values() for problem in rows]
    check_vocabulary(folder, config, prompts)
    try_rewards(rewards, next(iter(problems.values()))[0])
    # A folder that cannot be written must not be found out after hours of sampling.
    output = _output_folder(options, start)

    settings: dict[str, Any] = {"seed": options.seed}
    if options.vllm_gpu_memory_utilization is not None:
        settings["gpu_memory_utilization"] = options.vllm_gpu_memory_utilization
    if cache is not None:
        settings["kv_cache_dtype"] = cache
    settings |= options.engine_kwargs
    # vLLM refuses more than the model's maximum.
    settings["max_model_len"] = _longest_prompt(problems) + options.max_new_tokens
    engine = _start_engine(folder, adapter, options.max_new_tokens, settings)
    # The command line prints errors up to here in one line, and those of the function with their traceback.
    return lambda: evaluate(engine, params, tokenizer, problems, rewards, output, head, options)


def _say_if_masters(folder: Path) -> None:
    """Say that the weights of a folder are the masters of a low-bit run, and where the model is that it trained."""
    from ...checkpoints.folder import read_manifest
    from ...export.files import LOW_BIT_FOLDER

    low_bit = folder / LOW_BIT_FOLDER
    if (low_bit / "config.json").is_file():
        print(f"{folder} holds master weights, and they are scored; the low-bit model that was trained is {low_bit}.")
        return

    scheme = "none"
    # A folder without a manifest is no checkpoint of a run.
    with suppress(OSError, ValueError, AttributeError):
        scheme = read_manifest(folder).get("scheme", "none")
    if scheme != "none":
        print(
            f"{folder} holds the master weights of a low-bit run, and they are scored. `qarl-trl export` makes the "
            "model that was trained of them."
        )


def _start_engine(folder: Path, adapter: Path | None, answer: int, settings: dict[str, Any]) -> Any:
    """Start the engine; refuse (`ValueError`) answers beyond the model's context in words of this command."""
    from .sample import start_engine

    try:
        return start_engine(folder, adapter, **settings)
    except ValueError as error:
        # vLLM knows how far positions can be scaled. Its own words advise a switch with which answers may be NaN.
        beyond = re.search(r"greater than the derived max_model_len \((\S+)", str(error))
        if beyond is None:
            raise
        raise ValueError(
            f"--max_new_tokens must leave room for the prompts in the model's context ({beyond[1]}), got {answer}: "
            f"with the longest prompt they need {settings['max_model_len']} tokens."
        ) from error


# Checks before the engine starts ------------------------------------------------------------------------------------


def _sampling_params(options: argparse.Namespace, tokenizer: Any = None) -> Any:
    """
    The `vllm.SamplingParams` of the options.

    Args:
        options: Of the command line.
        tokenizer: The model's, by which a training ends answers at stop strings that are added tokens; `None` to only
            try the options.

    Raises:
        ValueError: in vLLM's words, for those that it refuses.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from ...trainers.sampling import with_stop_tokens

    endings: Any = {"stop": options.stop, "stop_token_ids": options.stop_token_ids}
    if tokenizer is not None:
        endings = with_stop_tokens(endings, tokenizer)
    try:
        return SamplingParams(
            n=options.k,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_new_tokens,
            **endings,
            # A reward of the training sees it, because TRL's texts are made of all tokens.
            include_stop_str_in_output=True,
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
    from .grade import MATH_REWARD
    from .suites import load_problems

    problems = {}
    for name, (source, split, config_name) in suites.items():
        problems[name] = load_problems(
            source,
            split,
            config_name,
            tokenizer,
            template_kwargs=options.chat_template_kwargs,
            conversational=options.conversational,
            needs_math=options.reward_funcs == [MATH_REWARD],
            problem_column=options.problem_column,
            answer_column=options.answer_column,
            prompt_template=options.prompt_template,
            system_prompt=options.system_prompt,
            max_samples=options.limit,
        )
        repeated = len(problems[name]) - len({tuple(problem["prompt_ids"]) for problem in problems[name]})
        if repeated:
            print(
                f"{name}: {repeated} of {len(problems[name])} rows repeat the prompt of another, and ± counts each as "
                "a problem of its own, so it is too small. Give each problem once, and --k."
            )
    return problems


def _longest_prompt(problems: Mapping[str, list[dict[str, Any]]]) -> int:
    """The number of tokens of the longest prompt."""
    longest = 0
    for rows in problems.values():
        for problem in rows:
            longest = max(longest, len(problem["prompt_ids"]))
    return longest


def _output_folder(options: argparse.Namespace, start: Path) -> Path:
    """Create the folder for the results; a relative one is below `start`."""
    if not options.output_dir:
        return _folder_of_its_own(start / "runs" / "eval", (start / options.model).resolve().name)

    output = start / Path(options.output_dir).expanduser()
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"--output_dir {output} must be new or empty: existing results are not overwritten.")

    output.mkdir(parents=True, exist_ok=True)
    return output


def _folder_of_its_own(parent: Path, model: str) -> Path:
    """Create a folder that no other evaluation has."""
    # The time keeps two evaluations of one model apart, but not those that a script starts at once, one on each GPU:
    # the low-bit models of all checkpoints have one name.
    name = f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = parent / name
    number = 1
    while True:
        try:
            output.mkdir(parents=True)
        except FileExistsError:
            number += 1
            output = parent / f"{name}-{number}"
        else:
            return output


# The evaluation -----------------------------------------------------------------------------------------------------


def evaluate(
    engine: Any,
    params: Any,
    tokenizer: Any,
    problems: dict[str, list[dict]],
    reward_funcs: Sequence[Callable[..., Any]],
    output: Path,
    head: dict,
    options: argparse.Namespace,
) -> None:
    """
    Sample, grade, write `completions.jsonl` and `results.json`, and print the table.

    Args:
        engine: A `vllm.LLM`.
        params: `vllm.SamplingParams` without a seed.
        tokenizer: The model's.
        problems: The problems of each suite, from [`~qarl_trl.tools.evaluate.suites.load_problems`].
        reward_funcs: The functions that grade.
        output: The folder to write into.
        head: What `results.json` begins with: `model`, `precision` and more.
        options: The options of the command.
    """
    from .grade import reward_names
    from .sample import sample
    from .score import summarize, table

    named_rewards = dict(zip(reward_names(reward_funcs), reward_funcs, strict=True))
    rewards: dict[str, dict[str, list[list[Any]]]] = {}
    figures: dict[str, dict[str, float]] = {}
    # A new file: another evaluation may have been started with the same folder while it was empty.
    with (output / "completions.jsonl").open("x") as file:
        for suite, rows in problems.items():
            print(f"{suite}: {len(rows)} problems, {options.k} completions each", flush=True)
            answers = sample(engine, rows, params, options.seed)
            rewards[suite] = _grade_suite(suite, rows, answers, named_rewards, tokenizer, file)
            # A later suite may end the process without closing files.
            file.flush()
            figures[suite] = _figures(answers)

    summary = summarize(rewards, options.k, options.pass_at)
    for suite, scores in summary["suites"].items():
        scores |= figures[suite]
    (output / "results.json").write_text(json.dumps(head | summary, indent=2) + "\n")
    print(f"\n{head['model']}: {head['precision']}\n\n{table(summary)}\n\nwritten to {output / 'results.json'}")


def _grade_suite(
    suite: str,
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Sequence[dict[str, Any]]],
    named_rewards: Mapping[str, Callable[..., Any]],
    tokenizer: Any,
    file: TextIO,
) -> dict[str, list[list[Any]]]:
    """
    Grade the completions of a suite, and write a line for each problem.

    Args:
        suite: Its name.
        rows: Its problems.
        answers: The completions of each problem.
        named_rewards: The functions that grade, by their names.
        tokenizer: The model's.
        file: The open `completions.jsonl`.

    Returns:
        By the name of a reward, and for each problem, what it gave each completion.
    """
    from .grade import grade, message_parser

    rewards: dict[str, list[list[Any]]] = {name: [] for name in named_rewards}
    written = 0
    try:
        for problem, completions in zip(rows, answers, strict=True):
            parse = message_parser(tokenizer, problem)
            if parse is not None:
                for completion in completions:
                    completion["message"] = parse(completion["token_ids"])

            graded = {}
            for name, reward in named_rewards.items():
                graded[name] = grade(reward, problem, completions)
                rewards[name].append(graded[name])
            # One line a problem, so that a broken evaluation leaves what it has graded.
            file.write(_line(suite, problem, completions, graded))
            written += 1
    except BaseException as error:
        # Sampling took hours, and a reward that fails on one answer can be mended.
        for problem, completions in zip(rows[written:], answers[written:], strict=True):
            file.write(_line(suite, problem, completions, None))
        error.add_note(f"All completions so far are in {file.name}; from this problem on without rewards.")
        raise
    return rewards


def _line(
    suite: str, problem: Mapping[str, Any], completions: Sequence[Mapping[str, Any]], rewards: Mapping[str, Any] | None
) -> str:
    """A problem's line of `completions.jsonl`; `rewards` are `None` for completions that were not graded."""
    # The message has the text once more.
    completions = [{name: part for name, part in each.items() if name != "message"} for each in completions]
    return json.dumps({"suite": suite, **problem, "completions": completions, "rewards": rewards}) + "\n"


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
