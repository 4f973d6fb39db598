"""`QaRLConfig`: the settings of the method, on top of TRL's `GRPOConfig` (paper Sec. 3 and Table 2).

This module refuses settings that would silently bias the method, before a model loads. `validate` checks what depends
on the model or the data.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from accelerate.logging import get_logger
from trl import GRPOConfig

from .loss import TrustBand
from .options import ENGINE, LOSS, option
from .trainers.sampling import check_endings, check_noise, check_seed
from .trainers.setting_checks import SET_BY, changed_fields, check_fit
from .trainers.settings import LowBitConfig


logger = get_logger(__name__)

TBPO = "tbpo"
LossType = Literal["tbpo", "grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
STOCK_LOSSES = get_args(LossType)[1:]
# Sampling parameters that do not change the distribution of a token, and the values at which the others do not.
HARMLESS_SAMPLING = (
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)
NEUTRAL_SAMPLING = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}
# Of parameters that are no fields of TRL's.
NEUTRAL_ARGUMENTS = {"frequency_penalty": (0,), "presence_penalty": (0,), "min_tokens": (0,), "n": (1,)}
# Arguments of an engine that change the draws of every request.
PROCESSORS = ("logits_processors", "watermark_config")
TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")
BOUNDS_OF_TBPO = ("tbpo_epsilon_high", "tbpo_delta_low", "tbpo_delta_high", "tbpo_mismatch_cap")
# Fields of TRL in whose place TBPO has its own.
REPLACED_BY_TBPO = (
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    # Of other losses.
    *(field.name for field in fields(GRPOConfig) if field.name.startswith(("sapo_", "vespo_"))),
)


@dataclass
class QaRLConfig(LowBitConfig, GRPOConfig):
    """
    Configuration of [`QaRLTrainer`]: the fields of [`~trl.GRPOConfig`], with TRL's meaning, those of [`LowBitConfig`],
    and the fields below.

    `loss_type` is `"tbpo"` by default. The help of each field gives its meaning, unit and source.
    """

    loss_type: LossType = option(
        LOSS, default=TBPO, help="'tbpo' (paper Sec. 3.2), or one of TRL's: 'grpo', 'dapo' ..."
    )
    max_tokens_per_pass: int | None = option(
        ENGINE,
        default=22528,
        help="Maximum number of tokens in a forward pass of the learner. The rows of a micro-batch are packed into "
        "such passes without padding, and micro-batches of an update that fit together share one. null: padded rows, "
        "as in TRL. (Table 2: ppo_max_token_len_per_gpu.)",
    )
    tbpo_epsilon_high: float = option(
        LOSS, default=4e-4, help="Clip ratios above 1 + this where A > 0 (eps_h, Table 2)."
    )
    tbpo_delta_low: float = option(
        LOSS, default=3e-4, help="Clip ratios below 1 - this where A < 0 (delta_l, Table 2)."
    )
    tbpo_delta_high: float = option(
        LOSS, default=7e-4, help="Clip ratios above 1 + this where A < 0 (delta_h, Table 2)."
    )
    tbpo_mismatch_cap: float = option(
        LOSS, default=2.0, help="c: the mismatch weight stays in [1/c, c] (Eq. 5, Table 2)."
    )
    advantage_filter: Literal["none", "positive"] = option(
        LOSS, default="none", help="'positive' sets negative advantages to 0."
    )
    mismatch_abort_threshold: float | None = option(
        ENGINE,
        default=None,
        help="Stop the run when the mean absolute log-prob mismatch between engine and learner exceeds this many nats "
        "per token: for instance three times the first logged mismatch/logp_diff_mean.",
    )
    optim_muon: bool = option(
        LOSS, default=False, help="Train matrices and experts with Muon, the rest with AdamW (Sec. 4)."
    )

    @property
    def trust_band(self) -> TrustBand:
        """The TBPO bounds of this run."""
        return TrustBand(self.tbpo_epsilon_high, self.tbpo_delta_low, self.tbpo_delta_high, self.tbpo_mismatch_cap)

    @property
    def weighs_mismatch(self) -> bool:
        """Whether a weight corrects the loss for the difference between engine and learner."""
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def reads_engine(self) -> bool:
        """Whether the loss reads the engine's log-probs: for a weight, or for TRL's mask of off-policy answers."""
        return self.weighs_mismatch or (self.use_vllm and self.off_policy_mask_threshold is not None)

    def __post_init__(self) -> None:
        super().__post_init__()

        _ = self.trust_band  # refuses bad bounds; the metrics of every loss use them

        # Also without quantization: fp16 and casts of master weights round by more than TBPO's bands allow.
        if self.loss_type == TBPO:
            _check_tbpo(self)
            check_fit(self)
        else:
            _warn_of_bounds(self)
        if self.quantized or self.loss_type == TBPO:
            _check_sampling(self)
            check_noise(self)
        check_seed(self)
        check_endings(self)
        if self.cast_lm_head_to_fp32 and self.has_engine and self.quantized and self.quantize_learner:
            logger.warning(
                "cast_lm_head_to_fp32: the learner multiplies with the float32 output layer, and the engine with its "
                "bfloat16 values (0.001 nats per token apart in a toy)."
            )
        _check_threshold(self)
        _check_passes(self)
        if self.optim_muon and (self.deepspeed or getattr(self, "deepspeed_plugin", None)):
            raise ValueError("optim_muon must be False with DeepSpeed: ZeRO cuts the matrices that Muon needs whole.")
        _check_optimizer(self)


def _check_optimizer(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) settings of another optimizer beside Muon, in whose place that would train."""
    changed = changed_fields(args, ("optim", "optim_args", "optim_target_modules"))
    # torch's AdamW trains what Muon does not.
    if args.optim in TORCH_ADAMW:
        changed.pop("optim", None)
    if args.optim_muon and changed:
        raise ValueError(
            f"optim_muon=True trains by Muon and torch's AdamW alone, and ignores {', '.join(changed)}. Leave one of "
            "them out."
        )


def _check_tbpo(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) settings that TBPO does not read, or that blur its ratios; warn if no bound can bind."""
    changed = changed_fields(args, REPLACED_BY_TBPO)
    if changed:
        raise ValueError(f"loss_type='tbpo' does not read {changed}. Remove them; its bounds are the tbpo_* fields.")
    if args.compiles:
        raise ValueError(
            f"torch_compile must be False with loss_type='tbpo' ({SET_BY}): a compiled forward rounds differently in "
            "training than where it scored the rollout (4 % of an answer's ratio beside an FP8 engine), and the bands "
            "are narrower."
        )

    # Micro-batches of a rollout batch, each seen `num_iterations` times, over the micro-batches of an update.
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if updates <= 1:
        logger.warning_once(
            f"steps_per_generation x num_iterations / gradient_accumulation_steps = {updates:g} update per rollout "
            "batch: every ratio is 1 and no trust band of loss_type='tbpo' can bind. The paper has 8 updates."
        )


def _warn_of_bounds(args: QaRLConfig) -> None:
    """Warn of TBPO's bounds beside a loss that does not read them: whoever sets one may expect it to clip."""
    changed = changed_fields(args, BOUNDS_OF_TBPO)
    if changed:
        logger.warning(
            f"loss_type={args.loss_type!r} does not read {', '.join(changed)}: beside it they only decide what the "
            "metrics ratio/paper_* and mismatch/seq_weight_* count. Set loss_type: tbpo, or the fields of this loss."
        )


def _check_sampling(args: QaRLConfig) -> None:
    """
    Refuse (`ValueError`) truncation and penalties: they change the engine's log-probs, not the learner's (trl issue
    6789).
    """
    if not args.reads_engine:
        return
    reader = "mismatch weight" if args.weighs_mismatch else "mask of off-policy answers"
    switch = "vllm_importance_sampling_correction=False"
    if args.off_policy_mask_threshold is not None:
        switch += " and off_policy_mask_threshold=None"

    sampling: dict[str, Any] = {name: getattr(args, name) for name in NEUTRAL_SAMPLING}
    sampling["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    sampling |= args.generation_kwargs or {}
    for name in PROCESSORS:
        if args.engine_kwargs.get(name):
            sampling[name] = args.engine_kwargs[name]

    neutral_values = NEUTRAL_SAMPLING | NEUTRAL_ARGUMENTS | {"temperature": (args.temperature,)}
    for name, value in sampling.items():
        # The log-probs of vLLM are those after truncation (`processed_logprobs`), where cut tokens have probability 0;
        # the learner's are over the whole vocabulary, scaled by the temperature alone.
        neutral = (None, *neutral_values.get(name, ()))
        if name not in HARMLESS_SAMPLING and value not in neutral:
            raise ValueError(
                f"{name}={value!r} changes the engine's sampling distribution, so the {reader} would be wrong. Leave "
                f"it out (the field temperature is allowed), or set {switch}."
            )


def _check_threshold(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a threshold that could not stop a run, or would stop every run."""
    threshold = args.mismatch_abort_threshold
    if threshold is not None and not (args.use_vllm and threshold > 0):
        raise ValueError(f"mismatch_abort_threshold must be above 0 nats and needs use_vllm, got {threshold}.")


def _check_passes(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) a token budget that an answer alone could exceed."""
    if args.max_tokens_per_pass is None:
        return

    # The length of the prompts is not known here: `validate.prompts` counts them, and the passes check each row
    # ([`~qarl_trl.learner.logps.PackedPasses`]).
    longest = args.max_completion_length or 0
    if args.max_tokens_per_pass < longest:
        raise ValueError(
            f"max_tokens_per_pass must be at least max_completion_length={longest}, got {args.max_tokens_per_pass}."
        )
