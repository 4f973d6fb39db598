"""`QaRLTrainer`: TRL's `GRPOTrainer` with low-bit rollouts, a low-bit learner and the TBPO loss.

A table of contents: each override hands over to the module that holds the idea. Invariant: with the scheme off and a
stock loss this class is `GRPOTrainer`, and every hook it relies on is checked to have run (paper Sec. 3, Fig. 2).
"""

from __future__ import annotations

import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from . import _compat
from .batch import drop_out_of_band, loss_mask
from .config import TBPO, QaRLConfig
from .export import LOW_BIT_FOLDER, quantization_config, save_low_bit
from .llmcompressor.quantized_start import QuantizedSource, load_masters
from .loss import TrustBand, mismatch_weight, tbpo_loss
from .metrics import CodeFlips, mismatch_sums, weight_stats
from .optim import build_muon
from .preflight import check_arguments, check_config, check_experts, default_output_dir, find_source
from .quant.model import apply_quantization, quantized_modules
from .quant.names import is_peft_model
from .quant.state_dict import full_parameters, iter_low_bit_weights
from .rollout.canary import LENGTH, Canary, canary_tokens, learner_logps
from .rollout.cpu import choose_arithmetic
from .rollout.cpu_ops import has_engine_ops, use_engine_ops
from .rollout.engine import LowBitVLLMGeneration
from .rollout.support import default_engine_kwargs
from .runtime_checks import check_first_codes, check_layers_ran, check_merged_layers, check_mismatch, check_model


# Measured over the first batches of the tests: TRL's arithmetic and `tbpo_loss` differ in float32 rounding only.
LOSS_TOLERANCE = 1e-5
FIRST_RATIO_TOLERANCE = 1e-6

logger = get_logger(__name__)


class QaRLTrainer(GRPOTrainer):
    """
    Reinforcement learning on low-bit rollouts with a learner that runs the same low-bit weights.

    Takes what [`~trl.GRPOTrainer`] takes, with a [`QaRLConfig`]. The changes with respect to it: the linear layers of
    the policy are quantized in place, the colocated vLLM engine runs in the same scheme and receives the packed tensors,
    `loss_type="tbpo"` adds the trust-band objective, and `save_model` writes the low-bit checkpoint.
    """

    _tag_names = ["trl", "grpo", "qarl"]
    _name = "QaRL"
    _paper = {
        "title": "QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under Training-Inference "
        "Mismatch",
        "id": "2604.07853",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @inproceedings{gu2026qarl,
                title        = {{QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under Training-Inference Mismatch}},
                author       = {Hao Gu and Hao Wang and Jiacheng Liu and Lujun Li and Qiyuan Zhu and Bei Liu and Binxing Xu and Lei Wang and Xintong Yang and Sida Lin and Sirui Han and Yike Guo},
                year         = 2026,
                booktitle    = {Findings of the Association for Computational Linguistics: ACL 2026},
                eprint       = {arXiv:2604.07853},
            }"""),
    }

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: QaRLConfig | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        _compat.check_versions()
        choose_arithmetic()
        args = QaRLConfig(default_output_dir(model)) if args is None else args
        check_arguments(model, args, kwargs)
        source = find_source(model, args)
        check_experts(model, args, source)
        check_config(model, args, source)
        as_stored = isinstance(model, str)  # masters given as an object may have been changed
        self._band: TrustBand | None = args.trust_band if args.loss_type == TBPO else None
        self._in_loss: dict[str, Any] | None = None
        self._loss_logps: Tensor | None = None
        self._saving_masters = False
        self._code_flips = CodeFlips()

        def build_engine(model: nn.Module, **engine_args: Any) -> LowBitVLLMGeneration:
            # The engine is started in the scheme of the layers, so they have to be quantized first.
            _prepare(model, args, source, as_stored)
            return LowBitVLLMGeneration(
                model,
                quantization_config=quantization_config(model),
                engine_kwargs=default_engine_kwargs(model) | (args.vllm_engine_kwargs or {}),
                **engine_args,
            )

        with _compat.generation_backend(build_engine), _compat.model_loader(source and load_masters):
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.use_vllm:
            if not isinstance(self.vllm_generation, LowBitVLLMGeneration):
                raise RuntimeError(f"TRL built a {type(self.vllm_generation).__name__} instead of the low-bit engine.")
            self.vllm_generation.canary = self._build_canary()
        else:
            _prepare(self.model, args, source, as_stored)
        if self._band is not None:
            # TRL's sequence-level clipped loss is the TBPO surrogate once each completion has its own bounds.
            self.loss_type, self.importance_sampling_level = "grpo", "sequence"
        self.add_callback(_StepClock(self))

    def create_accelerator_and_postprocess(self) -> None:
        """TRL's, with log-probs that stay float32 under FSDP2."""
        super().create_accelerator_and_postprocess()
        _compat.keep_log_probs_float32(self.accelerator)

    # Optimizer ------------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Muon for matrices and AdamW for the rest with `optim_muon`, otherwise TRL's."""
        if self.optimizer is None and self.args.optim_muon:
            self.optimizer = build_muon(self.model if model is None else model, self.args)
            return self.optimizer
        return super().create_optimizer(model)

    # Rollout --------------------------------------------------------------------------------------------------------

    def _build_canary(self) -> Canary | None:
        if self.args.publish_verify == "off":
            return None
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        longest = self.args.vllm_max_model_length or LENGTH + 1
        tokens = canary_tokens(tokenizer, self.model.config.get_text_config().vocab_size, min(LENGTH, longest - 1))

        def score() -> tuple[Tensor, Tensor]:
            with self.accelerator.autocast():
                return learner_logps(self._unwrapped, tokens)

        return Canary(tokens, self.args.publish_verify, score, self.accelerator.gather, self._log_value)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            old, sampling = output["old_per_token_logps"], output["sampling_per_token_logps"]
            mask = loss_mask(output)
            self._log_mismatch(old, sampling, mask)
            if self._band is not None:
                weight = mismatch_weight(old, sampling, mask, self._band.mismatch_cap)
                output["importance_sampling_ratio"] = weight.unsqueeze(1)
        return output

    def _log_mismatch(self, old: Tensor, sampling: Tensor, mask: Tensor) -> None:
        sums = {k: self.accelerator.gather(v) for k, v in mismatch_sums(old, sampling, mask).items()}
        tokens = sums["tokens"].sum().clamp(min=1)
        gap = (sums["gap_sum"].sum() / tokens).item()
        self._log_value("mismatch/logp_gap_mean", gap)
        self._log_value("mismatch/logp_gap_max", sums["gap_max"].max().item())
        self._log_value("mismatch/kl_k3", (sums["k3_sum"].sum() / tokens).item())
        if self._band is not None:
            stats = weight_stats(old, sampling, mask, self._band.mismatch_cap)
            stats = {k: self._reduce(k, v) for k, v in stats.items()}
            for name, value in stats.items():
                self._log_value(f"mismatch/{name}", value)
            for name in ("min", "mean", "max"):
                # TRL logged its own weight here, which this loss does not use.
                self._metrics[self._mode][f"sampling/importance_sampling_ratio/{name}"][-1] = stats[
                    f"seq_weight_{name}"
                ]
        check_mismatch(gap, self.args)

    # Loss -----------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._in_loss is not None:
            self._loss_logps = result[0].detach()
            if self._band.out_of_band == "drop":
                drop_out_of_band(self._in_loss, self._loss_logps, self._band)
        return result

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self._band is None:
            return super()._compute_loss(model, inputs)
        self._in_loss, self._loss_logps = dict(inputs), None
        try:
            with _compat.sequence_clipping(self, self._band, inputs["advantages"]):
                loss = super()._compute_loss(model, self._in_loss)
        finally:
            self._in_loss = None
        self._check_and_log_tbpo(inputs, loss.detach())
        return loss

    @torch.no_grad()
    def _check_and_log_tbpo(self, inputs: dict[str, Any], loss: Tensor) -> None:
        """Recompute the policy loss with the package's own `tbpo_loss`: the run stops if TRL's no longer is that."""
        logps, self._loss_logps = self._loss_logps, None
        if logps is None:
            raise RuntimeError("TRL computed the loss without `_get_per_token_logps_and_entropies`: untested version.")
        old = inputs.get("old_per_token_logps", logps)
        sampling = inputs.get("sampling_per_token_logps") if "importance_sampling_ratio" in inputs else None
        mask = loss_mask(inputs)
        # A completion without a token that counts has ratio 1: a constant in the formula, nothing in TRL's token sum.
        advantages = inputs["advantages"] * mask.bool().any(-1)
        expected, metrics = tbpo_loss(logps, old, sampling, advantages, mask, self._band)
        if self._policy_loss_only():
            scale = self.current_gradient_accumulation_steps if self._mode == "train" else 1
            difference = (loss * scale - expected).abs().item()
            both_nan = bool(loss.isnan() & expected.isnan())  # a diverged model, not another formula
            if not (difference <= LOSS_TOLERANCE * (1 + expected.abs().item()) or both_nan):
                raise RuntimeError(
                    f"TRL's loss {loss.item() * scale:.8f} is not the TBPO loss {expected.item():.8f}. Its arithmetic "
                    "changed; use a tested TRL version."
                )
        metrics.pop("seq_weight_mean")
        self._check_first_ratio(metrics)
        for name, value in metrics.items():
            self._log_value(f"tbpo/{name}", self._reduce(name, value))

    def _check_first_ratio(self, metrics: dict[str, Tensor]) -> None:
        """Before the first update of a rollout batch `logps` and `old` are the same model: the ratio must be 1."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._mode == "train" and self._step % generate_every < self.current_gradient_accumulation_steps:
            off = max(abs(metrics["ratio_min"].item() - 1), abs(metrics["ratio_max"].item() - 1))
            if off > FIRST_RATIO_TOLERANCE:
                logger.warning_once(
                    "The sequence ratio is off by %.1e before any update of this rollout batch: `old` and current "
                    "log-probs come from different kernels or batch shapes, and the trust band clips that noise.",
                    off,
                )

    def _policy_loss_only(self) -> bool:
        return (
            self.beta == 0.0
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
            and self.off_policy_mask_threshold is None
            and self.top_entropy_quantile >= 1.0
        )

    # Saving ---------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Write the low-bit checkpoint (with quantization off: what TRL writes).

        With LoRA: the adapter, and the merged low-bit checkpoint in its sub-folder `low_bit/`.

        Args:
            output_dir (`str`, *optional*): Folder; defaults to `args.output_dir`.
        """
        if not self.args.quantized:
            super().save_model(output_dir, _internal_call)
            return
        path = Path(output_dir or self.args.output_dir)
        if self._saving_masters or is_peft_model(self._unwrapped):
            super().save_model(str(path), _internal_call=True)
            if self.args.export_low_bit or not self._saving_masters:
                self._save_low_bit(path / LOW_BIT_FOLDER)
        else:
            self._save_low_bit(path)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_low_bit(self, path: Path) -> None:
        weights = iter_low_bit_weights(self._unwrapped, full_parameters(self._unwrapped, self._dist))
        if self.args.should_save:
            save_low_bit(self._unwrapped, self.processing_class, path, weights=weights, recipe=self.args.quant_recipe)
        else:
            for _ in weights:  # take part in the gathers
                pass
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._saving_masters = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving_masters = False

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Copies the model files of this folder to `output_dir` and uploads that: never the masters.
        folder = Path(checkpoint_folder)
        if self.args.quantized and is_peft_model(self._unwrapped):
            if self.is_world_process_zero():
                shutil.copytree(
                    folder / LOW_BIT_FOLDER, Path(self.args.output_dir) / LOW_BIT_FOLDER, dirs_exist_ok=True
                )
        elif self.args.quantized:
            folder /= LOW_BIT_FOLDER
        super()._push_from_checkpoint(str(folder))

    # Small helpers --------------------------------------------------------------------------------------------------

    @property
    def _unwrapped(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, which averages over micro-batches, with the extremes kept extreme."""
        for name, values in self._metrics[self._mode].items():
            if name.endswith(("_min", "_max")) and name.startswith(("tbpo/", "mismatch/")):
                values[:] = [min(values) if name.endswith("_min") else max(values)]
        super().log(logs, start_time)

    def _log_value(self, name: str, value: float) -> None:
        self._metrics[self._mode][name].append(value)

    def _reduce(self, name: str, value: Tensor) -> float:
        """One number over all processes: the extreme for `*_min` and `*_max`, otherwise the mean."""
        gathered = self.accelerator.gather(value.float())
        reduce = gathered.min if name.endswith("_min") else gathered.max if name.endswith("_max") else gathered.mean
        return reduce().item()


class _StepClock(TrainerCallback):
    """Splits each optimizer step into rollout, publish and update, and checks after the first that the hooks ran."""

    def __init__(self, trainer: QaRLTrainer) -> None:
        self._trainer = trainer
        self._start = time.perf_counter()
        self._checked = False

    def on_step_begin(self, args: QaRLConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()
        if self._trainer.use_vllm:  # what an evaluation generated does not belong to this step
            self._trainer.vllm_generation.reset_clock()

    def on_step_end(self, args: QaRLConfig, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        total = time.perf_counter() - self._start
        rollout = publish = 0.0
        if trainer.use_vllm:
            engine = trainer.vllm_generation
            rollout, publish = engine.rollout_seconds, sum(p.seconds for p in engine.publishes)
            if engine.publishes:
                trainer._log_value("publish/bytes", float(engine.publishes[-1].num_bytes))
                flips = trainer._code_flips.update(quantized_modules(trainer._unwrapped))
                if flips is not None:
                    trainer._log_value("quant/code_flip_frac", flips)
        trainer._log_value("time/rollout", rollout)
        trainer._log_value("time/publish", publish)
        trainer._log_value("time/update", total - rollout - publish)
        if not self._checked:
            self._checked = True
            check_layers_ran(trainer._unwrapped)


def _prepare(model: nn.Module, args: QaRLConfig, source: QuantizedSource | None, as_stored: bool) -> None:
    """Give the policy its low-bit layers and, beside a CPU engine, that engine's operations."""
    if args.quantized:
        _quantize(model, args, source, as_stored)
    if args.engine_ops_for(model.config):
        use_engine_ops(model)
        logger.info("The learner runs the CPU engine's operations (learner_ops).")
    elif has_engine_ops(model):
        raise ValueError(
            "The model was given the CPU engine's operations by an earlier trainer, and this one asks for transformers'. "
            "Load the model again."
        )


def _quantize(model: nn.Module, args: QaRLConfig, source: QuantizedSource | None, as_stored: bool) -> None:
    check_model(model)
    plan = args.quant_plan(None if source is None else source.plan())
    if args.quant_recipe is not None or args.from_checkpoint:
        scheme, settings = plan, {}
    else:
        scheme = args.quant_scheme
        settings = {
            "targets": args.quant_targets,
            "ignore": args.quant_ignore,
            "group_size": args.quant_group_size,
        }
    apply_quantization(
        model,
        scheme,
        kernel=args.learner_kernel,
        quantize_forward=args.quant_learner,
        qparams=source.qparams() if args.quant_freeze_scales else None,
        **settings,
    )
    if args.use_vllm:
        check_merged_layers(model)
    if args.quant_freeze_scales and as_stored and _compat.loads_weights():
        check_first_codes(model, source)
