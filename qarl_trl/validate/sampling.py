"""Checks of the arguments of sampling that a user gives: `generation_kwargs`."""

from __future__ import annotations

import inspect

from transformers import GenerationConfig
from trl import GRPOConfig, RLOOConfig

from .rollouts import uses_server
from .types import RunSettings


# Arguments of sampling that are known by their names, and why they cannot be the user's: of a request to a server, and
# of transformers.
ANSWERS = "TRL expects one answer to each copy of a prompt, and num_generations says how many"
REFUSED_OF_VLLM = {
    "n": ANSWERS,
    "logprobs": "of several candidates TRL takes the log-prob of the likeliest one for that of the sampled token",
}
# TRL's own arguments of a request come before those of `generation_kwargs`, which would replace them.
OF_TRL = "TRL sets it in each request"
REFUSED_OF_SERVER = REFUSED_OF_VLLM | {
    "truncate_prompt_tokens": "the engine would answer a part of the prompt that the learner scores",
    "model": "another name than TRL's asks a frozen base without its adapter",
    "use_beam_search": "its answers are no samples",
    "prompt": OF_TRL,
    "prompt_embeds": OF_TRL,
    "stream": OF_TRL,
    "return_token_ids": OF_TRL,
}
REFUSED_OF_TRANSFORMERS = {
    "num_return_sequences": ANSWERS,
    "stop_strings": "TRL does not give transformers the tokenizer that it needs for them; an engine takes `stop`",
}


def check_sampling_arguments(args: RunSettings) -> None:
    """
    Refuse names in `generation_kwargs` that nothing reads, since transformers and vLLM's server take them in silence,
    and those that TRL's sampling cannot have.

    Args:
        args: Settings of the run.

    Raises:
        ValueError: with the names, and why.
    """
    of_run = getattr(args, "generation_kwargs", None) or {}
    if not of_run:
        return

    if uses_server(args):
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # late: it takes seconds

        # Its fields are not those of `SamplingParams`: `extra_args`, for example, has another name.
        reader = "a request to vLLM's server"
        known = set(CompletionRequest.model_fields)
        refused = REFUSED_OF_SERVER
    elif args.has_engine:
        from vllm import SamplingParams  # late: it takes seconds

        reader = "vLLM's SamplingParams"
        known = set(inspect.signature(SamplingParams).parameters)
        refused = REFUSED_OF_VLLM
    else:
        reader = "transformers' GenerationConfig"
        known = set(vars(GenerationConfig()))
        refused = REFUSED_OF_TRANSFORMERS

    unknown = sorted(set(of_run) - known)
    if unknown:
        raise ValueError(f"generation_kwargs sets {unknown}, which {reader} does not have. Correct the names.")
    # A distillation compares whole distributions, at a temperature of their own.
    temperature = of_run.get("temperature")
    has_ratios = isinstance(args, (GRPOConfig, RLOOConfig)) and args.quantized
    if has_ratios and temperature not in (None, args.temperature):
        raise ValueError(
            f"generation_kwargs sets temperature={temperature}, at which the answers would be sampled, and the "
            f"learner would score them at {args.temperature}. Set the field temperature."
        )
    for name, reason in refused.items():
        # One answer is what TRL asks for, too. A server gets a group in one request.
        is_neutral = reason == ANSWERS and of_run.get(name) == 1 and not uses_server(args)
        if of_run.get(name) is not None and not is_neutral:
            raise ValueError(f"generation_kwargs sets {name}={of_run[name]!r}: {reason}. Leave it out.")
