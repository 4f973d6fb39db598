"""Settings with which engine and learner would draw or score differently, of every trainer that samples."""

from __future__ import annotations

from typing import Any

from accelerate.logging import get_logger


logger = get_logger(__name__)

# Fields of a generation config that change which tokens are drawn and that TRL leaves open, with the values that
# change nothing.
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "watermarking_config": (),
}


def check_noise(args: Any) -> None:
    """
    Refuse noise on the learner's embeddings, which the engine does not have.

    Args:
        args: The settings of a trainer that samples.

    Raises:
        ValueError: if `neftune_noise_alpha` is set.
    """
    if args.neftune_noise_alpha:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} draws other noise for `old` and for the loss, so no "
            "ratio would be 1 before the first update, and the engine samples without it. Leave it out."
        )


def check_seed(args: Any) -> None:
    """
    Refuse a seed for each request: colocated vLLM gets the prompt of a group once for each answer.

    Args:
        args: The settings of a trainer that samples groups.

    Raises:
        ValueError: if `generation_kwargs` has a seed.
    """
    seed = (args.generation_kwargs or {}).get("seed")
    if args.use_vllm and args.vllm_mode == "colocate" and seed is not None:
        raise ValueError(
            f"generation_kwargs must have no seed with vllm_mode='colocate', got {seed}: all answers of a group would "
            "be equal, and nothing would be trained. `seed` decides the draws of a run."
        )


def check_end_tokens(trainer: Any) -> None:
    """
    Refuse end tokens of transformers' generation that the trainer does not know.

    Generation pads an answer that ended there, and TRL cuts answers at the end tokens of tokenizer and model alone. It
    would train on the padding.

    Args:
        trainer: A trainer of TRL. Those that sample with vLLM or not at all have no `generation_config`.

    Raises:
        ValueError: with the tokens, if `generation_kwargs` has such.
    """
    generation_config = getattr(trainer, "generation_config", None)
    known = getattr(trainer, "eos_token_ids", None)
    if generation_config is None or known is None:
        return

    ends = generation_config.eos_token_id
    ends = ends if isinstance(ends, list | tuple) else [ends]
    unknown = sorted(set(ends) - {*known, None})
    if unknown:
        raise ValueError(
            f"generation_kwargs has the eos_token_id {unknown}, and the tokenizer and the model have {known}: TRL "
            "would train on the padding after it. Add it to eos_token_id in the model's generation_config.json."
        )


def say_inherited(trainer: Any) -> None:
    """
    Warn of fields in the model's `generation_config.json` that change how transformers samples: it takes from there
    what TRL leaves open, which are all but temperature, top_k, top_p and repetition_penalty.

    Args:
        trainer: A trainer of TRL. Those that sample with vLLM or not at all have no `generation_config`.
    """
    of_run = getattr(trainer, "generation_config", None)
    of_model = getattr(trainer.model, "generation_config", None)
    if of_run is None or of_model is None:
        return

    inherited = {}
    for name, neutral in _SAMPLING.items():
        value = getattr(of_model, name, None)
        if value is not None and value not in neutral and getattr(of_run, name, None) is None:
            inherited[name] = value
    if inherited:
        logger.warning(
            "The model's generation_config.json has %s, by which transformers samples the answers: the loss knows "
            "nothing of it. With an engine it does not count. Remove it there, or name it in generation_kwargs.",
            inherited,
        )


def with_stop_tokens(generation_kwargs: dict[str, Any] | None, tokenizer: Any) -> dict[str, Any] | None:
    """
    Let an answer stop at a stop string that is one added token of the tokenizer, such as a special one.

    vLLM looks for stop strings in its text. That lacks special tokens, and tokens that were added in memory, because
    the engine has the tokenizer of the model's files.

    Args:
        generation_kwargs: The run's, with vLLM's `stop` and `stop_token_ids`.
        tokenizer: The trainer's.

    Returns:
        The same settings, with the ids of such strings in `stop_token_ids`.
    """
    settings = generation_kwargs or {}
    strings = settings.get("stop") or ()
    strings = [strings] if isinstance(strings, str) else strings

    if not strings:
        return generation_kwargs

    # Mistral's own tokenizer has no such method.
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    tokens = [added[string] for string in strings if string in added]
    if not tokens:
        return generation_kwargs
    return settings | {"stop_token_ids": [*(settings.get("stop_token_ids") or ()), *tokens]}


def check_endings(args: Any) -> None:
    """
    Refuse to mask answers that TRL takes for cut off although they ended on a stop string.

    Args:
        args: The settings of a trainer that can leave out answers that were cut off.

    Raises:
        ValueError: if `generation_kwargs` has stop strings or tokens beside `mask_truncated_completions`.
    """
    set_here = [name for name in ("stop", "stop_token_ids") if (args.generation_kwargs or {}).get(name)]
    if args.use_vllm and args.mask_truncated_completions and set_here:
        raise ValueError(
            f"mask_truncated_completions must be False with generation_kwargs {set_here}: TRL knows an EOS token "
            "alone, so the answers that end there would not be trained on."
        )
