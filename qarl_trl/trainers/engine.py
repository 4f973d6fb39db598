"""The engine of a low-bit trainer, and the check of its weight syncs."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..export import quantization_config
from ..learner.attention import attending_from_cache
from ..rollout.engine import LowBitVLLMGeneration
from ..rollout.scheme_support import default_engine_kwargs
from ..rollout.sync_check.check import SyncCheck, usual_mismatch
from ..rollout.sync_check.learner_logps import LearnerLogps, learner_logps
from ..rollout.sync_check.prompt import LENGTH, sync_check_tokens
from .sampling import with_stop_tokens


def build_engine(trainer: Any, args: Any, model: nn.Module, **engine_args: Any) -> LowBitVLLMGeneration:
    """
    Start the engine of a run, in the scheme of the model's layers.

    Args:
        trainer: A trainer with [`~qarl_trl.trainers.LowBitMixin`], inside its constructor.
        args: Its config.
        model: The policy, with low-bit layers.
        engine_args: TRL's other arguments for its `VLLMGeneration`.
    """
    # What the user sets wins over what a model needs by default.
    engine_kwargs = default_engine_kwargs(model) | args.engine_kwargs
    engine_args["generation_kwargs"] = with_stop_tokens(engine_args.get("generation_kwargs"), _tokenizer_of(trainer))

    return LowBitVLLMGeneration(
        model,
        quantization_config=quantization_config(model),
        engine_kwargs=engine_kwargs,
        frozen=args.frozen,
        sync_folder=args.sync_folder,
        sync_check=build_sync_check(trainer),
        seed=args.seed,
        # For TRL an answer ends by these, and vLLM knows only the end tokens of the model's files.
        stop_token_ids=getattr(trainer, "eos_token_ids", None),
        **engine_args,
    )


def build_sync_check(trainer: Any) -> SyncCheck | None:
    """
    Build the check of weight syncs; `None` if the run has none.

    Args:
        trainer: A trainer with [`~qarl_trl.trainers.LowBitMixin`], inside its constructor.
    """
    args = trainer.args
    if args.verify_sync == "off":
        return None

    text_config = trainer.model.config.get_text_config()
    # The engine's context, which has room for the prompt and one token.
    of_model = getattr(text_config, "max_position_embeddings", None)
    longest = args.vllm_max_model_length or of_model or LENGTH + 1
    length = min(LENGTH, longest - 1)
    tokens = sync_check_tokens(_tokenizer_of(trainer), text_config.vocab_size, length)
    # The check's learner rounds as the engine does even where training does not: weights always, an unaligned cache
    # if its rounding is known.
    unaligned = args.has_low_bit_cache and args.aligned_cache is None
    cache_dtype = args.kv_cache_dtype if unaligned and args.device.type == "cpu" else None

    def score() -> LearnerLogps:
        # accelerate puts autocast into the forward of the model that it prepares, and a sync may come before.
        with trainer.accelerator.autocast(), attending_from_cache(trainer._unwrapped, cache_dtype):
            return learner_logps(trainer._unwrapped, tokens)

    usual = usual_mismatch(trainer.model)
    return SyncCheck(
        tokens,
        args.verify_sync,
        score,
        trainer.accelerator.gather,
        trainer._log_with_training,
        usual,
        scores_as_trained=not unaligned and (args.quantize_learner or not args.quantized),
    )


def _tokenizer_of(trainer: Any) -> Any:
    # A processor of images has its tokenizer within.
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
