"""The options of `qarl-trl eval`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..arguments import CommandParser


def make_parser() -> argparse.ArgumentParser:
    """All options. An option that is also a setting of recipes has the same name."""
    parser = CommandParser(
        prog="qarl-trl eval",
        description="Score a checkpoint, low-bit or plain, on math problems: avg@k and pass@k through vLLM.",
        example="qarl-trl eval runs/sums --suite problems.jsonl",
    )
    add = parser.add_argument
    add(
        "model",
        help="model folder as `save_model` and `qarl-trl export` write it, adapter of a frozen base, or Hub id",
    )
    add(
        "--suite",
        nargs="+",
        # Without it only the last of several options would count.
        action="extend",
        required=True,
        help="math (the paper's six), names of docs/after_training.md, or files",
    )
    add("--k", type=int, default=4, help="completions per problem (default: 4; the paper does not give its k)")
    add("--pass_at", type=int, nargs="+", help="the k of the pass@k to report, each at most --k (default: k)")
    add("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6, paper Table 2)")
    add("--top_p", type=float, default=1.0, help="top-p of the sampling (default: 1.0)")
    add("--max_new_tokens", type=int, default=16384, help="completion token limit (default: 16384, paper Table 2)")
    add("--stop", nargs="+", help="strings that end an answer (default: none; a recipe's are in generation_kwargs)")
    add("--stop_token_ids", type=int, nargs="+", help="ids of tokens that end an answer (default: those of the model)")
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    add("--limit", type=int, help="number of problems from the start of each suite (default: all)")
    add(
        "--reward_funcs",
        nargs="+",
        default=["math_reward"],
        help="math_reward, or import paths (default: math_reward)",
    )
    add("--conversational", type=switch, help="prompts as chat messages (default: true with a chat template)")
    add("--problem_column", help="column of the problems (default: problem, question or prompt)")
    add("--answer_column", help="column of the answers (default: answer, ...)")
    add("--prompt_template", help="text around {problem} (default: none, as in the recipes)")
    add("--system_prompt", help="system message (default: none, as in the recipes)")
    add("--chat_template_kwargs", type=json_object, default={}, help="arguments of the chat template, JSON")
    add(
        "--vllm_gpu_memory_utilization",
        type=float,
        help="share of the memory for model and cache (default: vLLM's 0.92 on a GPU; on a CPU the cache has "
        "VLLM_CPU_KVCACHE_SPACE or 4 GiB)",
    )
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


def switch(text: str) -> bool:
    """
    The type of an option that is true or false, in the words of a recipe.

    Args:
        text: What the user wrote.

    Raises:
        ArgumentTypeError: for any other word.
    """
    # Late: the import takes a second, and `--help` does not need it.
    from transformers.hf_argparser import string_to_bool

    return string_to_bool(text)
