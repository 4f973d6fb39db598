"""Render and tokenize all prompts once: a run would find a bad one only when it comes to it, after hours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from transformers import AutoProcessor, PretrainedConfig, ProcessorMixin
from trl.data_utils import is_conversational, is_conversational_from_value

from .data import data_sets
from .rollouts import prompts_per_rollout, uses_server
from .types import RunSettings, TrainerArguments


# Rows that are tokenized at once.
ROWS = 1000

logger = get_logger(__name__)


def check_prompts(name: str, config: PretrainedConfig, args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """
    Refuse prompts that the chat template cannot render, that are empty, that have tokens unknown to the model, or that
    fill the context of the engine.

    Not checked: streamed data sets, prompts with images, and prompts that environments or a `rollout_func` complete.

    Args:
        name: The model's name, from which TRL loads the tokenizer if there is none among the arguments.
        config: The model's config.
        args: Settings of the run.
        trainer_arguments: All arguments of the trainer by name.

    Raises:
        ValueError: with the row, and for a prompt that is too long its length in tokens; for messages without a chat
            template.
    """
    _check_template(name, args, trainer_arguments)
    completes_prompts = trainer_arguments.get("environment_factory") or trainer_arguments.get("rollout_func")
    if prompts_per_rollout(args) is None or completes_prompts:
        return

    # Loads only if there is a data set to check.
    tokenizer: Any = None
    for title, data in _prompt_sets(trainer_arguments):
        if tokenizer is None:
            tokenizer = trainer_arguments.get("processing_class") or load_tokenizer(name, args)
        if not isinstance(tokenizer, ProcessorMixin):
            vocabulary = getattr(config.get_text_config(), "vocab_size", None)
            tools = trainer_arguments.get("tools")
            _check_set(title, data, tokenizer, vocabulary, _context(config, args), args, tools)


def _check_template(name: str, args: RunSettings, trainer_arguments: TrainerArguments) -> None:
    """Refuse (`ValueError`) messages for supervised fine-tuning of a tokenizer without a chat template."""
    # Only SFT's config has the field. TRL renders its rows at the start, but after the model has loaded.
    is_sft = getattr(args, "dataset_text_field", None) is not None
    if not is_sft or args.chat_template_path or trainer_arguments.get("formatting_func"):
        return

    data = trainer_arguments.get("train_dataset")
    if not isinstance(data, Dataset) or len(data) == 0:
        return
    # TRL renders nothing that is tokens already.
    if "input_ids" in data.column_names or (args.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return
    if not (is_conversational_from_value(data[0]) or is_conversational(data[0])):
        return

    tokenizer: Any = trainer_arguments.get("processing_class") or load_tokenizer(name, args)
    if not renders_messages(tokenizer):
        raise ValueError(
            "train_dataset has messages, and the tokenizer has no chat template: set chat_template_path, or give text."
        )


def renders_messages(tokenizer: Any) -> bool:
    """
    Whether a tokenizer can write chat messages as text.

    Args:
        tokenizer: A tokenizer or processor.
    """
    # Mistral's own does so without a template.
    return tokenizer.chat_template is not None or type(tokenizer).__name__ == "MistralCommonBackend"


def _prompt_sets(trainer_arguments: TrainerArguments) -> Iterator[tuple[str, Dataset]]:
    """The data sets in memory that have prompts without images, by their names."""
    for title, data in data_sets(trainer_arguments, "train_dataset", "eval_dataset"):
        columns = set(data.column_names)
        if len(data) > 0 and "prompt" in columns and not columns & {"image", "images"}:
            yield title, data


def load_tokenizer(name: str, args: RunSettings) -> Any:
    """
    The tokenizer or processor of a model, as TRL loads it.

    Args:
        name: The model's name.
        args: Settings of the run.
    """
    revision = (args.model_init_kwargs or {}).get("revision")
    return AutoProcessor.from_pretrained(
        name, revision=revision, padding_side="left", trust_remote_code=args.trust_remote_code
    )


def _context(config: PretrainedConfig, args: RunSettings) -> int | None:
    """Number of tokens of prompt and answer that the engine takes; `None` if it is not known here."""
    if not args.has_engine:
        return None
    of_model = getattr(config.get_text_config(), "max_position_embeddings", None)
    # `qarl-trl serve` gives a server the same.
    return args.vllm_max_model_length or of_model


def _check_set(
    title: str,
    data: Dataset,
    tokenizer: Any,
    vocabulary: int | None,
    context: int | None,
    args: RunSettings,
    tools: Any,
) -> None:
    """Refuse (`ValueError`) the first bad prompt of a data set; warn of those that leave little room for an answer."""
    # What a request asks for.
    limits = getattr(args, "generation_kwargs", None) or {}
    answer = limits.get("max_tokens") or args.max_completion_length or 0
    short_of_room = 0
    beyond_pass = 0
    # Not every trainer packs.
    budget = getattr(args, "max_tokens_per_pass", None)
    for first in range(0, len(data), ROWS):
        prompts = data[first : first + ROWS]["prompt"]
        token_ids = _tokenized(title, first, prompts, tokenizer, args, tools)
        if vocabulary is not None:
            _check_ids(title, first, token_ids, vocabulary)
        lengths = [len(ids) for ids in token_ids]
        if 0 in lengths:
            raise ValueError(
                f"{title}[{first + lengths.index(0)}]: the prompt has no tokens, and nothing can follow it. Leave "
                "such rows out."
            )
        if budget is not None:
            longest = [length + (args.max_completion_length or 0) for length in lengths]
            beyond_pass += sum(min(tokens, context or tokens) > budget for tokens in longest)
        if context is None:
            continue

        for row, length in enumerate(lengths, start=first):
            # Not even one token of an answer would fit.
            if length >= context:
                raise ValueError(
                    f"{title}[{row}]: the prompt has {length} tokens, and the engine's context is {context} with the "
                    "answer. Leave such rows out, or raise vllm_max_model_length."
                )
            if length + answer <= context:
                continue
            short_of_room += 1
            # vLLM's server refuses all prompts of such a request (0.31, `_token_len_check` of `renderers/params.py`).
            # Without a length of the recipe's its context may be another than is known here.
            if uses_server(args) and args.vllm_max_model_length is not None:
                raise ValueError(
                    f"{title}[{row}]: the prompt has {length} tokens, which leaves less than the longest answer's "
                    f"{answer} of the server's context of {context}, and a server refuses that. "
                    "Leave such rows out, or raise vllm_max_model_length, also for the server."
                )

    if short_of_room:
        logger.warning(
            "%s: %d of %d prompts leave less than max_completion_length=%d tokens of the engine's context of %d, so "
            "%s.",
            title,
            short_of_room,
            len(data),
            args.max_completion_length,
            context,
            "a server with this context refuses them" if uses_server(args) else "their answers may be cut off",
        )
    if beyond_pass:
        logger.warning(
            "%s: %d of %d prompts have more than max_tokens_per_pass=%d tokens with an answer of "
            "max_completion_length=%s, at which the run would stop. Raise max_tokens_per_pass.",
            title,
            beyond_pass,
            len(data),
            budget,
            args.max_completion_length,
        )


def _check_ids(title: str, first: int, token_ids: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Refuse (`ValueError`) tokens that the model has no embedding for; the first prompt is row `first`."""
    for row, ids in enumerate(token_ids, start=first):
        largest = max(ids, default=0)
        if largest >= vocabulary:
            raise ValueError(
                f"{title}[{row}]: the prompt has the token {largest}, and the model's vocabulary is {vocabulary}: the "
                "tokenizer is another model's, or got tokens that the model did not. Use the model's own, or "
                "model.resize_token_embeddings() and save it."
            )


def _tokenized(
    title: str, first: int, prompts: Sequence[Any], tokenizer: Any, args: RunSettings, tools: Any
) -> list[list[int]]:
    """Token ids of prompts, the first of which is row `first`."""
    try:
        # All rows at once; only after an error one by one.
        return _token_ids(prompts, tokenizer, args, tools)
    except Exception:
        # Which row is it?
        for row, prompt in enumerate(prompts, start=first):
            try:
                _token_ids([prompt], tokenizer, args, tools)
            except Exception as error:  # any error of a template
                reason = " ".join(str(error).split())  # on one line
                raise ValueError(
                    f"{title}[{row}]: the prompt cannot be rendered and tokenized: {type(error).__name__}: {reason} "
                    "(A base model without a chat template takes text: conversational: false.)"
                ) from error
        raise


def _token_ids(prompts: Sequence[Any], tokenizer: Any, args: RunSettings, tools: Any) -> list[list[int]]:
    """Token ids of prompts, as TRL makes them."""
    if not is_conversational({"prompt": prompts[0]}):
        return tokenizer(text=list(prompts))["input_ids"]

    encoded = tokenizer.apply_chat_template(
        conversation=list(prompts),
        tools=tools or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **args.chat_template_kwargs or {},
    )
    return encoded["input_ids"]
