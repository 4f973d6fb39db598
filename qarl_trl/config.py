"""`QaRLConfig`: the settings of the method, on top of TRL's `GRPOConfig` (paper Sec. 3 and Table 2).

What would silently bias the method is refused here, before a model loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from transformers import PretrainedConfig
from transformers.hf_argparser import HfArg
from trl import GRPOConfig

from . import _compat
from .loss import TrustBand
from .quant.plan import single_group
from .quant.recipe import read_recipe
from .quant.scheme import DEFAULT_IGNORE, is_off, resolve_scheme
from .rollout.cpu_ops import unsupported


logger = get_logger(__name__)

TBPO = "tbpo"
# What TRL applies to negative advantages alone.
FOR_NEGATIVE_ADVANTAGES = (
    *("delta", "off_policy_mask_threshold", "sapo_temperature_neg", "vespo_k_neg", "vespo_lambda_neg"),
)
STOCK_LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo")
# Fields of a few values. TRL would notice a wrong one after the first rollout, or never.
CHOICES = {
    "loss_type": (TBPO, *STOCK_LOSSES),
    "advantage_filter": ("none", "positive"),
    "quant_kernel": ("auto", "dequant", "engine"),
    "learner_ops": ("auto", "stock", "engine"),
}
# Set by TRL from its own fields, or by the rollout so that engine and learner agree.
OWNED_ENGINE_ARGUMENTS = (
    *("model", "load_format", "dtype", "hf_overrides", "quantization", "logprobs_mode", "seed", "max_model_len"),
    *("max_num_seqs", "tensor_parallel_size", "gpu_memory_utilization", "enable_sleep_mode"),
    *("distributed_executor_backend", "trust_remote_code"),
)
# `quant_scheme` that stands for the scheme, targets and ignore list of a quantized `model`.
FROM_CHECKPOINT = "checkpoint"
SCHEME_FIELDS = ("quant_scheme", "quant_group_size", "quant_targets", "quant_ignore")
# Of the engine's sampling parameters: what leaves the distribution of a token alone, and the values that do.
HARMLESS_SAMPLING = (
    *("seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
NEUTRAL_SAMPLING = {
    **dict.fromkeys(("top_p", "repetition_penalty", "n"), (1,)),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    "top_k": (0, -1),
}


@dataclass
class QaRLConfig(GRPOConfig):
    """
    Configuration of [`QaRLTrainer`]: the fields of [`~trl.GRPOConfig`] with TRL's meaning, and those below.

    `loss_type` is `"tbpo"` by default. The help of each field gives its meaning, unit and source.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    loss_type: str = HfArg(
        default=TBPO,
        help="'tbpo' (QaRL paper Sec. 3.2), or TRL's 'grpo', 'dapo', 'dr_grpo', 'bnpo', 'cispo', 'sapo', 'luspo', 'vespo'.",
    )
    quant_scheme: str | None = HfArg(
        default="W4A16",
        help="Low-bit format of the rollout engine and of the learner's forward: 'W4A16' (4-bit weights), 'FP8_DYNAMIC' "
        "(8-bit float weights and activations), or another of `qarl-trl schemes`. 'checkpoint' is the scheme of a "
        "quantized `model`, 'none' trains without quantization. Paper Sec. 3.1.",
    )
    quant_group_size: int | None = HfArg(
        default=None,
        help="Weights along the input dimension that share one scale: 32, 64, 128, or -1 for one scale per output channel. "
        "Unset: the scheme's own (128 for W4A16).",
    )
    quant_targets: list[str] = HfArg(
        default_factory=lambda: ["Linear"],
        help="Modules to quantize: class names, module names, or patterns starting with 're:'.",
    )
    quant_ignore: list[str] = HfArg(
        default_factory=lambda: list(DEFAULT_IGNORE),
        help="Modules left in high precision, same syntax. Default: lm_head and MoE routers.",
    )
    quant_recipe: str | None = HfArg(
        default=None,
        help="llm-compressor recipe (.yaml) with one QuantizationModifier, in place of quant_scheme, quant_group_size, "
        "quant_targets and quant_ignore. It may give several groups of layers schemes of their own.",
    )
    quant_freeze_scales: bool = HfArg(
        default=False,
        help="Start from a quantized checkpoint and keep its scales and zero points for the whole run, so that the first "
        "sync has the checkpoint's own quantized values. Without it scales follow the weights.",
    )
    quantize_learner: bool = HfArg(
        default=True,
        help="Run the learner's forward on the low-bit weights. False keeps it in bfloat16 while the engine samples in "
        "low bits: the quantized-rollout baseline of the paper.",
    )
    quant_kernel: Literal["auto", "dequant", "engine"] = HfArg(
        default="auto",
        help="GEMM of the learner's forward: 'dequant' multiplies by the dequantized weight, 'engine' calls the rollout "
        "engine's own kernel (dense layers only; untested on GPUs; on CPU: W4A16, W4A16_ASYM, W4A8, W8A8, FP8_DYNAMIC); "
        "'auto' is 'engine' beside a CPU engine, otherwise torch's own product of the scheme ('dequant' for weight-only "
        "schemes).",
    )
    learner_ops: Literal["auto", "stock", "engine"] = HfArg(
        default="auto",
        help="Norms, residual sums, rotary embedding and attention of the learner. 'stock': transformers'. 'engine': "
        "rounds where the CPU engine rounds, so that log-probs are bitwise equal (Llama, Qwen2 and Qwen3 beside a "
        "CPU engine; enforce_eager is then on by default). 'auto': 'engine' where a low-bit learner can have "
        "it, otherwise 'stock'.",
    )
    max_tokens_per_pass: int | None = HfArg(
        default=22528,
        help="Tokens that one forward pass of the learner may hold, without padding. Rows of a micro-batch are packed into "
        "passes of at most this many; the activations of a micro-batch's passes are kept until its backward. At least the "
        "longest prompt and completion together. Where rows cannot be packed (images, linear attention) padding counts. "
        "Unset (null): rows padded to the longest of the rollout batch, as in TRL. "
        "Table 2, ppo_max_token_len_per_gpu.",
    )
    tbpo_epsilon_high: float = HfArg(
        default=4e-4, help="Positive advantage: sequence ratio <= 1 + this. eps_h (Table 2, seq_clip_ratio_high)."
    )
    tbpo_delta_low: float = HfArg(
        default=3e-4, help="Negative advantage: sequence ratio >= 1 - this. delta_l (Table 2, neg_seq_clip_ratio_low)."
    )
    tbpo_delta_high: float = HfArg(
        default=7e-4,
        help="Negative advantage: sequence ratio <= 1 + this. delta_h >= eps_h (Table 2, neg_seq_clip_ratio_high).",
    )
    tbpo_mismatch_cap: float = HfArg(
        default=2.0, help="The mismatch weight is kept in [1/c, c]. c (Eq. 5; Table 2, seq_tis_imp_ratio_cap)."
    )
    advantage_filter: Literal["none", "positive"] = HfArg(
        default="none",
        help="'positive' sets negative advantages to 0, so that only completions better than their group's mean teach "
        "(positive-only GRPO, paper Fig. 8). They still count in the mean, and in entropy and KL terms.",
    )
    eval_temperature: float | None = HfArg(
        default=None,
        help="Sampling temperature of evaluation during training, > 0; the learner scores at the same one. Unset: temperature. The "
        "paper evaluates at 0.6 (Sec. 4).",
    )
    log_token_stats: int = HfArg(
        default=0,
        help="Completions per rollout batch, of the main process, whose every token is written to "
        "output_dir/token_stats/token_stats_{step}.parquet after each update that trains on them: ids, log-probs, masks. 0: none.",
    )
    mismatch_abort_threshold: float | None = HfArg(
        default=None,
        help="Stop the run when the mean absolute log-prob mismatch between engine and learner, in nats per token, exceeds this. "
        "Choose it from the first logged mismatch/logp_diff_mean, for instance three times that.",
    )
    optim_muon: bool = HfArg(
        default=False,
        help="Use Muon for hidden matrices and routed experts (rate: learning_rate) and AdamW for embeddings, norms, routers "
        "and the head. The paper's optimizer (Sec. 4, Table 2).",
    )
    muon_adamw_learning_rate: float | None = HfArg(
        default=None, help="Learning rate of the AdamW part with optim_muon. Unset: learning_rate."
    )
    muon_momentum: float = HfArg(default=0.95, help="Momentum of Muon (Nesterov).")
    muon_ns_steps: int = HfArg(default=5, help="Newton-Schulz iterations of Muon.")
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = HfArg(
        default="match_rms_adamw",
        help="How Muon scales the rate by a matrix's shape: 'match_rms_adamw' makes the update as large as AdamW's, so AdamW "
        "learning rates carry over; 'original' follows Keller Jordan's.",
    )
    verify_sync: str = HfArg(
        default="first",
        help="Compare engine and learner on a fixed prompt after a weight sync, and stop when the engine is stale or corrupted: "
        "'first' (the first sync, onto an engine with random weights), a number N (the first and every N-th after it), or "
        "'off'. Costs an engine prompt of 128 tokens a check, and some learner forwards.",
    )
    sync_folder: str | None = HfArg(
        default=None,
        help="vllm_mode='server': folder on a file system that trainer and server both mount, through which a weight sync goes. Unset: "
        "vLLM's NCCL transfer from GPU to GPU (vllm_group_port), untested.",
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = HfArg(
        default=None,
        help="More arguments for vllm.LLM, for instance {'enforce_eager': true}, which starts faster and "
        "needs no compiler.",
    )
    hub_master_weights: str | None = HfArg(
        default=None,
        help="Branch of the Hub repository for the master weights (with LoRA: the adapter) of every checkpoint that is pushed; the "
        "main branch holds the low-bit model alone. hub_strategy 'checkpoint' and 'all_checkpoints' push whole training "
        "checkpoints there, into last-checkpoint/ or checkpoint-N/. Unset: master weights are not pushed.",
    )
    resume_from_checkpoint: str | None = HfArg(
        default=None,
        help="Of a recipe, as of `QaRLTrainer.train`. 'true': the newest complete checkpoint of output_dir; 'auto': the same, "
        "and the start where there is none; or the path of one.",
    )
    export_low_bit: bool = HfArg(
        default=True, help="Also write the low-bit model into the sub-folder low_bit/ of every training checkpoint."
    )

    @property
    def quantized(self) -> bool:
        """Whether the rollout runs in low bits."""
        return self.quant_recipe is not None or not is_off(self.quant_scheme)

    @property
    def quant_name(self) -> str:
        """What a person would call the quantization: the recipe's file or the scheme."""
        return self.quant_recipe or self.quant_scheme or "none"

    @property
    def from_checkpoint(self) -> bool:
        """Whether a quantized `model` decides what is quantized, and how."""
        return isinstance(self.quant_scheme, str) and self.quant_scheme.strip().lower() == FROM_CHECKPOINT

    @property
    def trust_band(self) -> TrustBand:
        """The TBPO bounds of this run."""
        return TrustBand(self.tbpo_epsilon_high, self.tbpo_delta_low, self.tbpo_delta_high, self.tbpo_mismatch_cap)

    @property
    def weighs_mismatch(self) -> bool:
        """Whether a weight corrects the loss for the difference between engine and learner."""
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def learner_kernel(self) -> str:
        """`quant_kernel` with "auto" resolved: beside a CPU engine the learner calls that engine's own GEMM."""
        if self.quant_kernel == "auto" and self.quantized and self._beside_cpu_engine:
            return "engine"
        return self.quant_kernel

    @property
    def _beside_cpu_engine(self) -> bool:
        return self.use_vllm and self.device.type == "cpu"

    def engine_ops_for(self, config: PretrainedConfig) -> bool:
        """Whether the learner runs a model of this `config` on the engine's operations; `ValueError` if it must and cannot."""
        if self.learner_ops == "stock" or not self._beside_cpu_engine:
            return False
        if self.learner_ops == "auto" and not (self.quantized and self.quantize_learner):
            return False  # the baselines are TRL's learner
        reason = self._other_roundings() or unsupported(config)
        if reason is None:
            return True
        if self.learner_ops == "engine":
            raise ValueError(f"learner_ops='engine' cannot be had: {reason}. Use learner_ops='auto' or 'stock'.")
        logger.warning("Learner and CPU engine round at different places, because %s.", reason)
        return False

    def _other_roundings(self) -> str | None:
        """Why, whatever the model, the engine's operations in the learner would not give the engine's log-probs."""
        engine = self.vllm_engine_kwargs or {}
        defaults = {"enforce_eager": True, "compilation_config": None, "kv_cache_dtype": "auto"}
        changed = [name for name, default in defaults.items() if engine.get(name, default) != default]
        reasons = {
            "bf16 is off, so the learner computes in float32": not self.bf16,
            "quant_kernel='dequant' is not the engine's product": self.quantized and self.quant_kernel == "dequant",
            "quantize_learner=False multiplies by other weights": self.quantized and not self.quantize_learner,
            "cast_lm_head_to_fp32 gives the learner another output layer": self.cast_lm_head_to_fp32,
            f"vllm_engine_kwargs sets {', '.join(changed)}": bool(changed),
            "vllm_model_impl='transformers' is another engine": self.vllm_model_impl == "transformers",
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def quant_plan(self, source: QuantizationConfig | None = None) -> QuantizationConfig | None:
        """
        Which layers are quantized, and how: from the recipe, the checkpoint or the scheme fields.

        `source` is the plan of the checkpoint that `model` names. `None` without quantization, and for
        `quant_scheme="checkpoint"` as long as `source` is not known.
        """
        if not self.quantized:
            return None
        if self.quant_recipe is not None:
            return read_recipe(self.quant_recipe)
        if self.from_checkpoint:
            return source
        scheme = resolve_scheme(self.quant_scheme, self.quant_group_size)
        return single_group(scheme, self.quant_targets, self.quant_ignore)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled into training_args.bin beside every checkpoint, which people upload.
        return {name: None if name.endswith("_token") else value for name, value in self.__dict__.items()}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_secrets(self)
        _check_hub(self)
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
        _check_objective(self)
        if self.loss_type == TBPO:
            _check_tbpo(self)
        if self.quantized:
            _check_one_source(self)
            self.quant_plan()
            _check_quantized(self)
        elif self.quant_freeze_scales:
            raise ValueError("quant_freeze_scales=True with quantization off: set quant_scheme: checkpoint.")
        if self.quantized or self.loss_type == TBPO:
            _check_sampling(self)
            if self.use_liger_kernel:
                raise ValueError(
                    "use_liger_kernel=True computes with layers and a loss of its own, so neither the low-bit forward "
                    "nor TBPO would run. Set use_liger_kernel=False."
                )
        if self.enable_jit_checkpoint:
            raise ValueError(
                "enable_jit_checkpoint=True saves within a step, which no resume continues exactly. Remove it: SIGTERM saves "
                "at the end of the step anyway."
            )
        _check_rollout(self)
        _check_passes(self)
        _check_muon(self)


def _check_objective(args: QaRLConfig) -> None:
    try:
        _ = args.trust_band  # every loss is measured by it
    except ValueError as error:
        raise ValueError(f"tbpo_{error}") from None
    if args.advantage_filter == "positive":
        own = ("off_policy_mask_threshold", "tbpo_delta_low", "tbpo_delta_high")  # `delta` is TBPO's to set
        if unused := changed_fields(args, own if args.loss_type == TBPO else FOR_NEGATIVE_ADVANTAGES):
            raise ValueError(
                f"advantage_filter='positive' leaves no negative advantage, and {unused} acts on nothing else. Remove one "
                "of the two."
            )


def _check_tbpo(args: QaRLConfig) -> None:
    band = args.trust_band
    if band.delta_high < band.epsilon_high:
        raise ValueError(
            f"tbpo_delta_high={band.delta_high} must be at least tbpo_epsilon_high={band.epsilon_high}: TRL's two-sided "
            "clip, which the loss runs as, keeps the gradient of negative samples up to the larger of the two."
        )
    weight = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
    changed = changed_fields(args, ("epsilon", "epsilon_high", "delta", *weight))
    if changed.get("delta") == 1 + band.delta_high:  # set by a trainer that had this config
        del changed["delta"]
    if changed:
        raise ValueError(
            f"loss_type='tbpo' does not use {changed}: its bounds are tbpo_epsilon_high, tbpo_delta_low and "
            "tbpo_delta_high, its weight is capped by tbpo_mismatch_cap. Remove them, or choose a stock loss_type."
        )
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if updates <= 1:
        logger.warning_once(
            f"loss_type='tbpo' with steps_per_generation={args.steps_per_generation} x "
            f"num_iterations={args.num_iterations} / gradient_accumulation_steps={args.gradient_accumulation_steps} = "
            f"{updates:g} update per rollout batch: every ratio is 1 and no trust band can bind. Raise "
            "steps_per_generation (the paper: 8 x gradient_accumulation_steps)."
        )


def changed_fields(args: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass (of `names`, if given) that are not at their defaults, with their values."""
    found = {}
    for f in fields(args):
        default = f.default_factory() if callable(f.default_factory) else f.default
        if (not names or f.name in names) and getattr(args, f.name) != default:
            found[f.name] = getattr(args, f.name)
    return found


def _check_one_source(args: QaRLConfig) -> None:
    """A recipe, a checkpoint or the scheme fields: one of them says what is quantized."""
    own = "quant_recipe" if args.quant_recipe is not None else args.from_checkpoint and "quant_scheme: checkpoint"
    changed = [*changed_fields(args, SCHEME_FIELDS)]
    if args.quant_recipe is None and args.from_checkpoint:
        changed.remove("quant_scheme")
    if own and changed:
        raise ValueError(f"{own} says which layers are quantized and how, and so do {changed}. Leave one out.")
    if args.quant_recipe is not None and args.quant_freeze_scales:
        raise ValueError(
            "quant_freeze_scales=True keeps what the checkpoint has, and a quant_recipe would change it. Use quant_scheme: "
            "checkpoint."
        )


def _check_quantized(args: QaRLConfig) -> None:
    if not args.quant_targets:
        raise ValueError("quant_targets is empty: nothing would be quantized. Use ['Linear'], or quant_scheme: none.")
    if args.fp16:
        raise ValueError("fp16=True: the engine computes in bfloat16 and the learner must too. Use bf16=True.")
    if args.use_transformers_continuous_batching:
        raise ValueError(
            "use_transformers_continuous_batching casts master weights to bfloat16, which loses small updates. Use use_vllm=True."
        )
    cast = [name for name in ("bf16_full_eval", "fp16_full_eval") if getattr(args, name)]
    if cast:
        raise ValueError(
            f"{cast[0]}=True makes every evaluation outside of train() cast the float32 master weights, for good. Set {cast[0]}=False: "
            "evaluations compute in bfloat16 as training does."
        )
    init_kwargs = args.model_init_kwargs or {}
    foreign = [k for k in ("quantization_config", "load_in_4bit", "load_in_8bit") if init_kwargs.get(k)]
    if foreign:
        raise ValueError(
            f"model_init_kwargs sets {foreign}, and master weights must be in high precision. Remove it, or set quant_scheme='none'."
        )
    device_map = init_kwargs.get("device_map")
    several = isinstance(device_map, dict) and len(set(device_map.values())) > 1
    if several or device_map in ("balanced", "sequential"):
        raise ValueError(
            f"device_map={device_map!r} replaces forwards to spread the model over devices, so the low-bit ones would "
            "not run. Use one device a process (accelerate launch with DDP or FSDP2)."
        )


def _check_secrets(args: QaRLConfig) -> None:
    for field in ("model_init_kwargs", "vllm_engine_kwargs"):
        tokens = [key for key, value in (getattr(args, field) or {}).items() if "token" in key and type(value) is str]
        if tokens:
            raise ValueError(
                f"{field} sets {tokens}: it would be in logs and checkpoints. Remove it, and set HF_TOKEN or run `hf auth login`."
            )


def _check_hub(args: QaRLConfig) -> None:
    strategy = args.hub_strategy
    if args.hub_master_weights is not None:
        own = args.hub_master_weights not in ("main", args.hub_revision)
        if not (own and args.quantized and args.push_to_hub and strategy != "end"):
            raise ValueError(
                f"hub_master_weights={args.hub_master_weights!r} must be a branch of its own, got quant_scheme={args.quant_name!r}, push_to_hub={args.push_to_hub}, "
                f"hub_strategy={str(strategy.value)!r}, hub_revision={args.hub_revision!r}. It needs quantization, push_to_hub=True "
                "and a hub_strategy that pushes checkpoints: 'every_save', 'checkpoint' or 'all_checkpoints'."
            )
    elif args.quantized and args.push_to_hub and strategy in ("checkpoint", "all_checkpoints"):
        raise ValueError(
            f"hub_strategy={str(strategy.value)!r} pushes training checkpoints, and the main branch holds the low-bit model. "
            "Set hub_master_weights to a branch for them, or hub_strategy to 'every_save' or 'end'."
        )
    if args.quantized and args.push_to_hub and not args.export_low_bit:
        raise ValueError(
            "push_to_hub=True with export_low_bit=False: what is pushed during training is the low-bit model of a "
            "checkpoint. Set export_low_bit=True."
        )


def _check_sampling(args: QaRLConfig) -> None:
    """The engine's log-probs are those of the distribution it samples from; the learner's are not (trl issue 6789)."""
    if not args.weighs_mismatch:
        return
    extra = args.generation_kwargs or {}
    if "temperature" in extra:
        raise ValueError("Set `temperature` itself: inside generation_kwargs the learner would not know of it.")
    given = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    given |= {"vllm_structured_outputs_regex": args.vllm_structured_outputs_regex} | extra
    biased = {
        name: value
        for name, value in given.items()
        if name not in HARMLESS_SAMPLING and value is not None and value not in NEUTRAL_SAMPLING.get(name, ())
    }
    if biased:
        raise ValueError(
            f"{biased} changes the distribution that is sampled from, and with it the mismatch weight. Use top_p=1.0, "
            f"top_k=0, min_p=0.0, no penalties, and in generation_kwargs only {', '.join(HARMLESS_SAMPLING)}; or set "
            "vllm_importance_sampling_correction=False."
        )


def _check_rollout(args: QaRLConfig) -> None:
    if args.use_vllm:
        _compat.require_vllm()
    if args.learner_ops == "engine" and not args._beside_cpu_engine:
        raise ValueError(
            f"learner_ops='engine' needs a CPU engine, got use_vllm={args.use_vllm} on device "
            f"{args.device.type!r}. Use learner_ops='auto' or 'stock'."
        )
    _check_server(args)
    owned = sorted(set(args.vllm_engine_kwargs or {}) & set(OWNED_ENGINE_ARGUMENTS))
    if owned:
        raise ValueError(
            f"vllm_engine_kwargs sets {owned}, which the trainer sets itself. Remove them: they come from quant_scheme "
            "and from the fields of the same name that start with vllm_."
        )
    if args.log_token_stats < 0:
        raise ValueError(f"log_token_stats={args.log_token_stats} must be >= 0 completions; 0 writes none.")
    _check_eval_temperature(args)
    args.verify_sync = _checked_verify(args.verify_sync)
    threshold = args.mismatch_abort_threshold
    if threshold is not None and not args.use_vllm:
        raise ValueError(
            f"mismatch_abort_threshold={threshold} needs use_vllm=True, without which there is no engine to compare with. "
            "Set it, or unset the threshold."
        )
    if threshold is not None and not threshold > 0:
        raise ValueError(f"mismatch_abort_threshold={threshold} must be > 0 nats per token; unset it to never abort.")


def _check_server(args: QaRLConfig) -> None:
    server, folder = args.use_vllm and args.vllm_mode == "server", args.sync_folder
    room, answer = args.vllm_max_model_length, args.max_completion_length
    if server and room and answer and answer >= room:
        raise ValueError(
            f"max_completion_length={answer} must be below vllm_max_model_length={room} with vllm_mode='server': a server refuses "
            "a prompt that leaves less room than that."
        )
    if folder is not None and not server:
        raise ValueError(
            f"sync_folder={folder!r} needs use_vllm=True and vllm_mode='server', got use_vllm={args.use_vllm} and "
            f"vllm_mode={args.vllm_mode!r}: a colocated engine is given the tensors. Remove it."
        )


def _check_eval_temperature(args: QaRLConfig) -> None:
    value = args.eval_temperature
    if value is None:
        return
    if not 0 < value < math.inf:
        raise ValueError(
            f"eval_temperature={value} must be > 0 and finite: a log-prob is of a distribution, and greedy decoding has none. "
            "`qarl-trl eval` scores a saved model at temperature 0."
        )
    if "temperature" in (args.generation_kwargs or {}):
        raise ValueError(f"eval_temperature={value} and a temperature in generation_kwargs: set `temperature` itself.")


def _check_passes(args: QaRLConfig) -> None:
    budget = args.max_tokens_per_pass
    if budget is None:
        return
    if budget < 1:
        raise ValueError(f"max_tokens_per_pass={budget} must be at least 1, or unset for padded rows.")
    longest = (args.vllm_max_model_length if args.use_vllm else None) or 0
    # A completion alone has a prompt before it.
    needed = longest or (args.max_completion_length or 0) + 1
    if budget < needed:
        limit = (
            f"vllm_max_model_length={longest}" if longest else f"max_completion_length={args.max_completion_length}"
        )
        raise ValueError(
            f"max_tokens_per_pass={budget} cannot hold one sequence, which may have {needed} tokens by {limit}. Raise it to at "
            f"least {needed}, or lower {limit.split('=')[0]}."
        )


def _checked_verify(value: Any) -> str | int:
    """`"off"`, `"first"` or an `int`: YAML makes `False` of a bare `off`, the command line a string of a number."""
    if value is False:
        return "off"
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value in ("off", "first") or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"verify_sync={value!r} must be 'off', 'first' or a number of syncs >= 1.")


def _check_muon(args: QaRLConfig) -> None:
    if args.optim_muon and (args.deepspeed or getattr(args, "deepspeed_plugin", None)):
        raise ValueError(
            "optim_muon=True with DeepSpeed: ZeRO leaves Muon no whole matrix. Use DDP or FSDP2, or optim_muon=False."
        )
    if args.muon_ns_steps < 1 or not 0 <= args.muon_momentum < 1:
        raise ValueError(
            f"muon_ns_steps={args.muon_ns_steps} must be >= 1 and muon_momentum={args.muon_momentum} in [0, 1)."
        )
