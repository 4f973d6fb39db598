"""`QaRLConfig`: the settings of the method, on top of TRL's `GRPOConfig` (paper Sec. 3 and Table 2).

This module refuses settings that would silently bias the method, before a model loads. `validate.py` checks what depends on the
model or the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from transformers import PretrainedConfig
from transformers.hf_argparser import HfArg
from trl import GRPOConfig
from trl.import_utils import is_vllm_available

from .cpu_exact.ops import unsupported
from .loss import TrustBand
from .quant.modifier import read_modifier
from .quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group


logger = get_logger(__name__)

TBPO = "tbpo"
LossType = Literal["tbpo", "grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
STOCK_LOSSES = get_args(LossType)[1:]
# Whole numbers above 0: a run divides by them, or trains nothing if they are 0.
POSITIVE = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_iterations"),
    *("steps_per_generation", "max_completion_length", "max_tokens_per_pass"),
)
# Switches of TRL and transformers that do not work with low-bit layers or TBPO, each with the reason.
UNFIT = {
    "fp16": "the engine computes in bfloat16 and the learner must too, so set bf16: true",
    "bf16_full_eval": "an evaluation outside of train() would cast the float32 master weights, for good",
    "fp16_full_eval": "an evaluation outside of train() would cast the float32 master weights, for good",
    "use_transformers_continuous_batching": "it casts the master weights to bfloat16, which loses small updates",
    "use_liger_kernel": "it has its own layers and loss, so neither low-bit layers nor TBPO would run",
    "enable_jit_checkpoint": "it saves within a step, which no resume continues exactly; SIGTERM saves at the end of a step",
}
# TRL sets these from its own fields, or the trainer sets them so that engine and learner agree.
OWNED_ENGINE_ARGUMENTS = (
    *("model", "load_format", "dtype", "hf_overrides", "quantization", "logprobs_mode", "seed", "max_model_len"),
    *("max_num_seqs", "tensor_parallel_size", "gpu_memory_utilization", "enable_sleep_mode"),
    *("distributed_executor_backend", "trust_remote_code"),
)
# Sampling parameters that do not change the distribution of a token, and the values at which the others do not.
HARMLESS_SAMPLING = "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens"
NEUTRAL_SAMPLING = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}


@dataclass
class QaRLConfig(GRPOConfig):
    """
    Configuration of [`QaRLTrainer`]: the fields of [`~trl.GRPOConfig`], with TRL's meaning, and the fields below.

    `loss_type` is `"tbpo"` by default. The help of each field gives its meaning, unit and source. With `push_to_hub` the model is
    pushed once, at the end.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "vllm_engine_kwargs"]

    loss_type: LossType = HfArg(default=TBPO, help="'tbpo' (paper Sec. 3.2), or one of TRL's: 'grpo', 'dapo' ...")
    quant_scheme: str | None = HfArg(
        default="W4A16",
        help="Low-bit format of the weights in the rollout engine and in the learner's forward (paper Sec. 3.1): a name from "
        "`qarl-trl schemes`, 'checkpoint' for the scheme of a quantized `model`, or 'none' for no quantization.",
    )
    quant_group_size: int | None = HfArg(
        default=None,
        help="How many weights along the input dimension share one scale: 32, 64, 128, or -1 for one scale per output channel. "
        "Unset: the scheme's own number (128 for W4A16).",
    )
    quant_ignore: list[str] = HfArg(
        default_factory=lambda: list(DEFAULT_IGNORE),
        help="Linear layers that stay in high precision: class names, module names, or patterns that begin with 're:'. "
        "Default: lm_head and MoE routers.",
    )
    quant_recipe: str | None = HfArg(
        default=None,
        help="llm-compressor recipe (.yaml) with one QuantizationModifier, in place of the fields above. It may give each group "
        "of layers another scheme.",
    )
    lora_base: Literal["merged", "frozen"] = HfArg(
        default="merged",
        help="With LoRA: 'merged' quantizes W + s B A at each step. 'frozen' quantizes W once, keeps no master weights, and adds s B (A x); "
        "weight syncs send the base once and then only the adapter. `model` must be a name.",
    )
    quantize_learner: bool = HfArg(
        default=True,
        help="Run the learner's forward on the low-bit weights. False: in bfloat16, as in the paper's quantized-rollout baseline.",
    )
    quant_kernel: Literal["auto", "dequant", "engine"] = HfArg(
        default="auto",
        help="GEMM of the learner's forward. 'dequant' multiplies by the dequantized weight. 'engine' calls the rollout engine's "
        "kernel. 'auto' is 'engine' beside a CPU engine, and otherwise torch's own product for the scheme.",
    )
    learner_ops: Literal["auto", "stock"] = HfArg(
        default="auto",
        help="Norms, residual sums, rotary embedding and attention of the learner. 'stock': transformers'. 'auto': they round where a "
        "CPU engine rounds, so that log-probs are equal bit for bit (Llama, Qwen2, Qwen3); it warns if it cannot.",
    )
    max_tokens_per_pass: int | None = HfArg(
        default=22528,
        help="Maximum number of tokens in a forward pass of the learner. The rows of a micro-batch are packed into such passes without "
        "padding. null: padded rows, as in TRL. (Table 2: ppo_max_token_len_per_gpu.)",
    )
    tbpo_epsilon_high: float = HfArg(default=4e-4, help="Clip ratios above 1 + this where A > 0 (eps_h, Table 2).")
    tbpo_delta_low: float = HfArg(default=3e-4, help="Clip ratios below 1 - this where A < 0 (delta_l, Table 2).")
    tbpo_delta_high: float = HfArg(default=7e-4, help="Clip ratios above 1 + this where A < 0 (delta_h, Table 2).")
    tbpo_mismatch_cap: float = HfArg(default=2.0, help="c: the mismatch weight stays in [1/c, c] (Eq. 5, Table 2).")
    advantage_filter: Literal["none", "positive"] = HfArg(
        default="none", help="'positive' sets negative advantages to 0."
    )
    mismatch_abort_threshold: float | None = HfArg(
        default=None,
        help="Stop the run when the mean absolute log-prob mismatch between engine and learner exceeds this many nats per token: "
        "for instance three times the first logged mismatch/logp_diff_mean.",
    )
    optim_muon: bool = HfArg(default=False, help="Train matrices and experts with Muon, the rest with AdamW (Sec. 4).")
    verify_sync: str = HfArg(
        default="first",
        help="When to compare engine and learner on a fixed prompt, and stop if the engine is stale or corrupted. 'first': after the "
        "first weight sync. A number N: after the first and then every N syncs. 'off': never.",
    )
    sync_folder: str | None = HfArg(
        default=None,
        help="For vllm_mode='server': a folder that trainer and server both mount. Weight syncs go through it.",
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = HfArg(default=None, help="More arguments for vllm.LLM.")
    export_low_bit: bool = HfArg(default=True, help="Also write low_bit/, for vLLM, into every training checkpoint.")

    @property
    def quantized(self) -> bool:
        """Whether the rollout runs in low bits."""
        return self.quant_recipe is not None or self.quant_scheme not in (None, "none")

    @property
    def quant_name(self) -> str:
        """Name of the quantization: the recipe's file or the scheme."""
        return self.quant_recipe or self.quant_scheme or "none"

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """`vllm_engine_kwargs` as a dict; a command line leaves them as text until `__post_init__`."""
        return cast(dict[str, Any], self.vllm_engine_kwargs or {})

    @property
    def from_checkpoint(self) -> bool:
        """Whether scheme and layers are those of a quantized `model`."""
        return self.quant_recipe is None and self.quant_scheme == "checkpoint"

    @property
    def frozen(self) -> bool:
        """Whether the adapter's base is frozen in low bits."""
        return self.lora_base == "frozen"

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
        """Whether the learner runs a model with this `config` on the CPU engine's operations; warns if it cannot."""
        # Without quantization, or with quantize_learner=False, the run is a baseline with TRL's learner.
        if self.learner_ops == "stock" or not (self._beside_cpu_engine and self.quantized and self.quantize_learner):
            return False
        reason = self._other_roundings() or unsupported(config)
        if reason is not None:
            logger.warning("Learner and CPU engine round at different places, because %s.", reason)
        return reason is None

    def _other_roundings(self) -> str | None:
        """The setting that makes learner and engine round differently for every model; `None` if there is none."""
        engine = self.engine_kwargs
        defaults = {"enforce_eager": True, "compilation_config": None, "kv_cache_dtype": "auto"}
        changed = [name for name, default in defaults.items() if engine.get(name, default) != default]
        reasons = {
            "bf16 is off, so the learner computes in float32": not self.bf16,
            "quant_kernel='dequant' is not the engine's GEMM": self.quant_kernel == "dequant",
            "cast_lm_head_to_fp32 gives the learner another output layer": self.cast_lm_head_to_fp32,
            f"vllm_engine_kwargs sets {', '.join(changed)}": bool(changed),
            "vllm_model_impl='transformers' is another engine": self.vllm_model_impl == "transformers",
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def quant_plan(self, source: QuantizationConfig | None = None) -> QuantizationConfig | None:
        """
        Which layers are quantized, and how: from the recipe, the checkpoint or the scheme fields.

        `source` is the plan of the checkpoint that `model` names. Returns `None` without quantization, and for
        `quant_scheme="checkpoint"` without a `source`.
        """
        if not self.quantized:
            return None
        if self.quant_recipe is not None:
            return read_modifier(self.quant_recipe)
        if self.from_checkpoint:
            return source
        return single_group(resolve_scheme(self.quant_scheme, self.quant_group_size), ["Linear"], self.quant_ignore)

    def __getstate__(self) -> dict[str, Any]:
        # Pickled into training_args.bin beside every checkpoint, which people upload.
        return {name: None if name.endswith("_token") else value for name, value in self.__dict__.items()}

    def __post_init__(self) -> None:
        _check_numbers(self)  # before TRL divides by them
        super().__post_init__()
        for name, hint in get_type_hints(QaRLConfig).items():  # nothing else checks them in a script
            value = getattr(self, name, None)
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, get_args(hint)))}.")
        _ = self.trust_band  # refuses bad bounds; the metrics of every loss use them
        if self.metric_for_best_model:  # transformers sets it for load_best_model_at_end
            raise ValueError("metric_for_best_model and load_best_model_at_end must be off: the last ones are kept.")
        if self.push_to_hub and self.hub_strategy in ("checkpoint", "all_checkpoints"):
            raise ValueError("hub_strategy must be 'end': training checkpoints are not pushed.")
        if self.loss_type == TBPO:
            _check_tbpo(self)
        if self.quantized:
            _check_one_source(self)
            self.quant_plan()  # refuses schemes and recipes that it cannot read
        if self.quantized or self.loss_type == TBPO:
            _check_sampling(self)
            for name, why in UNFIT.items():
                if getattr(self, name):
                    raise ValueError(f"{name} must be False: {why}.")
        if self.frozen and not (self.quantized and self.quantize_learner):
            raise ValueError("lora_base='frozen' needs quantization and quantize_learner: it has no other weights.")
        _check_engine(self)
        self.verify_sync = _checked_verify(self.verify_sync)
        _check_passes(self)
        if self.optim_muon and (self.deepspeed or getattr(self, "deepspeed_plugin", None)):
            raise ValueError("optim_muon must be False with DeepSpeed: ZeRO cuts the matrices that Muon needs whole.")


def _check_numbers(args: QaRLConfig) -> None:
    for name in POSITIVE:
        value = getattr(args, name)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}.")
    if not (args.temperature > 0 and 0 < args.top_p <= 1):
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {args.temperature} and {args.top_p}.")
    if not (args.max_steps > 0 or (args.max_steps == -1 and args.num_train_epochs > 0)):
        raise ValueError(f"max_steps={args.max_steps} with num_train_epochs={args.num_train_epochs} trains nothing.")


def _check_tbpo(args: QaRLConfig) -> None:
    weight = [f"vllm_importance_sampling_{name}" for name in ("mode", "clip_max", "clip_min")]
    changed = changed_fields(args, ("epsilon", "epsilon_high", "delta", *weight))
    if changed:
        raise ValueError(f"loss_type='tbpo' ignores {changed}. Remove them, and set the tbpo_* fields.")
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if updates <= 1:
        logger.warning_once(
            f"steps_per_generation x num_iterations / gradient_accumulation_steps = {updates:g} update per rollout batch: every "
            "ratio is 1 and no trust band of loss_type='tbpo' can bind. The paper has 8 updates."
        )


def changed_fields(args: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass (only `names`, if given) that differ from their defaults, with their values."""
    found = {}
    for f in fields(args):
        default = f.default_factory() if callable(f.default_factory) else f.default
        if (not names or f.name in names) and getattr(args, f.name) != default:
            found[f.name] = getattr(args, f.name)
    return found


def _check_one_source(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) scheme fields beside a recipe or a checkpoint, which already says what is quantized."""
    own = "quant_recipe" if args.quant_recipe is not None else "quant_scheme"
    changed = [n for n in changed_fields(args, ("quant_scheme", "quant_group_size", "quant_ignore")) if n != own]
    if changed and (args.quant_recipe is not None or args.from_checkpoint):
        raise ValueError(f"{own} decides which layers are quantized and how, so {changed} must not be set.")


def _check_sampling(args: QaRLConfig) -> None:
    """Refuse (`ValueError`) truncation and penalties: they change the engine's log-probs, not the learner's (trl issue 6789)."""
    if not args.weighs_mismatch:
        return
    given = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    given |= {"vllm_structured_outputs_regex": args.vllm_structured_outputs_regex} | (args.generation_kwargs or {})
    for name, value in given.items():
        if name not in HARMLESS_SAMPLING and value not in (None, *NEUTRAL_SAMPLING.get(name, ())):
            raise ValueError(
                f"{name}={value!r} changes the engine's sampling distribution, so the mismatch weight would be wrong. Leave it out "
                "(temperature is allowed), or set vllm_importance_sampling_correction=False."
            )


def _check_engine(args: QaRLConfig) -> None:
    if args.use_vllm and not is_vllm_available():
        raise ImportError("vLLM is missing: pip install 'qarl_trl[vllm]' (CPU: make install), or use_vllm=False.")
    for field in ("model_init_kwargs", "vllm_engine_kwargs"):
        tokens = [key for key, value in (getattr(args, field) or {}).items() if "token" in key and type(value) is str]
        if tokens:
            raise ValueError(f"{field} sets {tokens}, which would be in logs and checkpoints. Set HF_TOKEN instead.")
    owned = sorted(set(args.engine_kwargs) & set(OWNED_ENGINE_ARGUMENTS))
    if owned:
        raise ValueError(f"vllm_engine_kwargs sets {owned}, which the trainer sets from its own fields. Remove them.")
    threshold = args.mismatch_abort_threshold
    if threshold is not None and not (args.use_vllm and threshold > 0):
        raise ValueError(f"mismatch_abort_threshold must be above 0 nats and needs use_vllm, got {threshold}.")


def _check_passes(args: QaRLConfig) -> None:
    field = "vllm_max_model_length" if args.use_vllm and args.vllm_max_model_length else "max_completion_length"
    longest = getattr(args, field) or 0
    if args.max_tokens_per_pass is not None and args.max_tokens_per_pass < longest:
        raise ValueError(f"max_tokens_per_pass must be at least {field}={longest}, got {args.max_tokens_per_pass}.")


def _checked_verify(value: Any) -> str:
    """`"off"`, `"first"` or a number: YAML reads a bare `off` as `False`, and a script may give an `int`."""
    text = "off" if value is False else str(value)
    if text not in ("off", "first") and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"verify_sync={value!r} must be 'off', 'first' or a number of syncs >= 1.")
    return text
