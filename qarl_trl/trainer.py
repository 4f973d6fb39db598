"""`QaRLTrainer`: TRL's `GRPOTrainer` with low-bit rollouts, a low-bit learner and the TBPO loss (paper Sec. 3, Fig. 2).

Each override calls the module that does the work.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from . import _compat, guards
from .checkpoints.resume import identity_of, resume_path
from .checkpoints.saving import CheckpointMixin
from .config import TBPO, QaRLConfig
from .cpu_exact.arithmetic import choose_arithmetic
from .cpu_exact.ops import use_engine_ops
from .export import quantization_config
from .export.sharing import SharingMixin
from .learner.logps import PackedPasses
from .learner.packing import row_order
from .loss import filter_advantages, loss_mask, mismatch_weight, tbpo_loss
from .metrics.clock import StepClock, WeightFlips
from .metrics.error_tokens import find_error_tokens, written_tokens
from .metrics.mismatch import check_mismatch, mismatch_metrics
from .metrics.ratios import measure_ratios
from .optim import build_muon
from .quant.convert import apply_quantization, bypassed_layers, quantized_modules
from .quant.gathers import gather_quantized
from .quant.names import base_model
from .quant.start import QuantizedSource, load_master_weights
from .rollout.engine import LowBitVLLMGeneration
from .rollout.engine_gemm import GEMMS
from .rollout.support import default_engine_kwargs
from .rollout.sync_check import LENGTH, Scores, SyncCheck, learner_logps, sync_check_tokens
from .validate import check_head, check_run


class QaRLTrainer(CheckpointMixin, SharingMixin, GRPOTrainer):
    """
    Reinforcement learning on low-bit rollouts with a learner that runs the same low-bit weights.

    It takes the arguments of [`~trl.GRPOTrainer`], with a [`QaRLConfig`], and differs in five ways. It quantizes the linear
    layers of the policy in place. The vLLM engine runs in the same scheme and gets the packed tensors. `loss_type="tbpo"` is the
    trust-band objective. The learner skips padding. `save_model` writes the low-bit checkpoint. With the scheme off, a stock
    loss and `max_tokens_per_pass=None` the losses are those of [`~trl.GRPOTrainer`], bit for bit.
    """

    _tag_names = ["trl", "grpo", "qarl"]
    _name = "QaRL"

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: QaRLConfig | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> None:
        _compat.check_versions("trl", "compressed-tensors", "vllm")  # peft only with an adapter
        if args is None:  # named as TRL names its own
            name = model if isinstance(model, str) else base_model(model).config._name_or_path
            args = QaRLConfig(f"{name.rstrip('/').split('/')[-1]}-QaRL")
        if args.device.type == "cpu":
            choose_arithmetic()
        given = inspect.signature(GRPOTrainer.__init__).bind(self, model, reward_funcs, args, *rest, **kwargs)
        source = check_run(model, args, given.arguments)
        plan = args.quant_plan(None if source is None else source.plan())
        self._identity = guards.on_first(args, lambda: identity_of(model, args, plan, given.arguments))
        if args.resume_from_checkpoint:  # a checkpoint of another run is refused before anything loads
            resume_path(args.resume_from_checkpoint, args, self._identity)
        self._weight_flips = WeightFlips()
        self._last_forward: tuple[Tensor, Tensor | None] | None = None
        self._step_of_rollout = -1
        self._passes: PackedPasses | None = None

        def build_engine(model: nn.Module, **engine_args: Any) -> LowBitVLLMGeneration:
            # The engine starts in the scheme of the layers, so quantize them first.
            prepare(model, args, source)
            return LowBitVLLMGeneration(
                model,
                quantization_config=quantization_config(model),
                engine_kwargs=default_engine_kwargs(model) | args.engine_kwargs,
                frozen=args.frozen,
                sync_folder=args.sync_folder,
                sync_check=self._build_sync_check(),
                **engine_args,
            )

        load = partial(load_master_weights, freeze=plan if args.frozen else None, gemm=GEMMS[args.learner_kernel])
        with _compat.construction(build_engine, load if args.frozen or source else None):
            super().__init__(model, reward_funcs, args, *rest, **kwargs)
        if self.rollout_func is not None:
            self.rollout_func = partial(guards.rollout_of_all, self.rollout_func)
        if not self.use_vllm:
            prepare(self.model, args, source)
        elif not isinstance(self.vllm_generation, LowBitVLLMGeneration):
            raise RuntimeError(f"TRL built a {type(self.vllm_generation).__name__} instead of the low-bit engine.")
        self._tbpo = args.loss_type == TBPO
        if self._tbpo:
            # For TRL's part of the loss, see `_compute_loss`.
            self.loss_type = "grpo"
            self.importance_sampling_level = "sequence"
        if args.max_tokens_per_pass is not None:
            # Without keep_torch_compile=False accelerate would change DDP's compiled wrapper, which then synchronizes every micro-batch.
            unwrap = partial(self.accelerator.unwrap_model, keep_torch_compile=False)
            autocast, gather = self.accelerator.autocast, self.accelerator.gather
            self._passes = PackedPasses(args.max_tokens_per_pass, autocast, gather, unwrap)
        engine = self.vllm_generation if self.use_vllm else None
        self.add_callback(StepClock(engine, self._log_value, self._flips, self._check_layers_ran))

    def create_accelerator_and_postprocess(self) -> None:
        """TRL's method; under FSDP2 log-probs stay float32 and gradients stay sharded."""
        super().create_accelerator_and_postprocess()
        _compat.keep_float32(self.accelerator)
        _compat.keep_gradients_sharded(self.accelerator, self.args)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """With `optim_muon` Muon for matrices and AdamW for the rest, otherwise TRL's optimizer."""
        if self.optimizer is None and self.args.optim_muon:
            self.optimizer = optimizer = build_muon(self.model if model is None else model, self.args)
            return optimizer
        return super().create_optimizer(model)

    def _prepare_for_training(self, *args: Any) -> tuple:
        """The Trainer's method, in which FSDP2 shards the model; from then on it gathers quantized values of low-bit weights."""
        layers: list[Any] = [layer for _, layer in quantized_modules(self._unwrapped)]
        if self.accelerator.is_fsdp2 and self.args.frozen:  # no shards of it: each process has the whole base
            for layer in layers:
                layer.hold_on(self.accelerator.device)
        # Without RAM-efficient loading torch moves each parameter to the GPU by `param.data = ...` when it shards it.
        elif self.accelerator.is_fsdp2 and self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            mesh = self.accelerator.parallelism_config  # HSDP: the processes of a node share one copy of the weights
            gather_quantized(layers, mesh.dp_shard_size if mesh else self.args.world_size, self.accelerator.device)
        return super()._prepare_for_training(*args)

    # Rollout --------------------------------------------------------------------------------------------------------

    def _build_sync_check(self) -> SyncCheck | None:
        if self.args.verify_sync == "off":
            return None
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        longest = self.args.vllm_max_model_length or LENGTH + 1
        tokens = sync_check_tokens(tokenizer, self.model.config.get_text_config().vocab_size, min(LENGTH, longest - 1))

        def score() -> Scores:
            with self.accelerator.autocast():
                return learner_logps(self._unwrapped, tokens)

        return SyncCheck(tokens, self.args.verify_sync, score, self.accelerator.gather, self._log_value)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's method, with filtered advantages, TBPO's mismatch weight (Eq. 5) in place of TRL's, and the mismatch logged."""
        if self._mode == "train":
            self._step_of_rollout = self.state.global_step
        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = filter_advantages(output["advantages"], self.args.advantage_filter)
        old, sampling = output.get("old_per_token_logps"), output.get("sampling_per_token_logps")
        mask = loss_mask(output)
        if self._tbpo and self.args.weighs_mismatch:
            weight = mismatch_weight(old, sampling, mask, self.args.tbpo_mismatch_cap)
            output["importance_sampling_ratio"] = weight.unsqueeze(1)
        if old is not None and self._compares_sampler:  # else see `_measure`
            self._log_mismatch(old, sampling, mask)
        return output

    def _tool_call_loop(self, *args: Any) -> tuple:
        """TRL's method; its number of generations differs between processes, so the engine must not wait for the others."""
        if not self.use_vllm:
            return super()._tool_call_loop(*args)
        with patch.object(self.vllm_generation, "alone", True):
            return super()._tool_call_loop(*args)

    def _log_mismatch(self, old: Tensor, sampling: Tensor, mask: Tensor) -> None:
        metrics = mismatch_metrics(old, sampling, mask, self.args.tbpo_mismatch_cap, self.accelerator.gather)
        for name, value in metrics.items():
            self._log_value(f"mismatch/{name}", value)
        if self._tbpo and self.args.weighs_mismatch:
            logged = self._metrics[self._mode]
            for name in ("min", "mean", "max"):  # TRL logged its own weight there; this loss does not use it
                logged[f"sampling/importance_sampling_ratio/{name}"][-1] = metrics[f"seq_weight_{name}"]
        check_mismatch(metrics["logp_diff_mean"], metrics["unscored_max"], self.args.mismatch_abort_threshold)

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any) -> Tensor:
        """TRL's method; an error in one process stops all of them."""
        calculate = partial(super()._calculate_rewards, inputs, *args)
        with _compat.ungathered_rewards():
            return guards.rewards_of_all(calculate, self.reward_func_names, self.accelerator)

    # Loss -----------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        """TRL's method, in passes without padding (`max_tokens_per_pass`) where the model's rows can be packed."""
        padded = super()._get_per_token_logps_and_entropies
        given = inspect.signature(padded).bind(*args, **kwargs).arguments
        if self._passes is not None and self._passes.packs(given["model"]) and _compat.is_text(given):
            # Only a rollout batch has a `batch_size`. Its micro-batches must be those of the loss, or kernels would round `old`
            # differently.
            rollout = self._mode == "train" and given.get("batch_size") is not None
            result = self._passes.run(given, self._row_order(len(given["input_ids"])) if rollout else None)
        else:
            result = padded(*args, **kwargs)
        self._last_forward = result[:2]  # for `_take_forward`
        return result

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's method, with micro-batches in the order of rows in which `old` was computed."""
        if self._passes is None:
            return super()._prepare_inputs(generation_batch)
        with _compat.shuffled_in(self._row_order):
            return super()._prepare_inputs(generation_batch)

    def _row_order(self, rows: int) -> Tensor:
        return row_order(rows, self.args.seed, self.state.global_step, self.accelerator.process_index)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, or with `loss_type="tbpo"` [`tbpo_loss`] and TRL's other terms; also logs the metrics of its ratios."""
        if not self._tbpo:
            loss = super()._compute_loss(model, inputs)
            logps, _ = self._take_forward()
            self._measure(logps.detach(), inputs)
            return loss

        # With advantages of zero nothing is left of TRL's policy loss. Its KL penalty, entropy bonus and balancing loss stay, and
        # so does the forward pass, whose log-probs TBPO shares.
        zeros = torch.zeros_like(inputs["advantages"])
        other_terms = super()._compute_loss(model, inputs | {"advantages": zeros})
        logps, entropies = self._take_forward()
        if logps.dtype != torch.float32:
            # One rounding step of a smaller dtype is wider than the trust bands. FSDP's mixed precision casts the model's outputs.
            raise RuntimeError(f"The learner's log-probs must be float32, got {logps.dtype}: something casts them.")

        weight = None
        if self.use_vllm and self.vllm_importance_sampling_correction:
            weight = inputs["importance_sampling_ratio"].squeeze(1)

        policy_loss = tbpo_loss(
            logps,
            inputs.get("old_per_token_logps", logps.detach()),
            inputs["advantages"],
            loss_mask(inputs),
            self.args.trust_band,
            weight=weight,
            kept=self._kept(logps, entropies, inputs),
        )
        self._measure(logps.detach(), inputs)

        passes = self.current_gradient_accumulation_steps if self._mode == "train" else 1
        return policy_loss / passes + other_terms

    def _take_forward(self) -> tuple[Tensor, Tensor | None]:
        """
        Log-probs and entropies `(B, T)` of the forward pass inside TRL's `_compute_loss`, which returns only the loss.

        They are handed on once, so that no later loss can use those of an earlier pass.
        """
        if self._last_forward is None:
            raise RuntimeError("TRL computed the loss without `_get_per_token_logps_and_entropies`: untested version.")
        forward, self._last_forward = self._last_forward, None
        return forward

    def _kept(self, logps: Tensor, entropies: Tensor | None, inputs: dict[str, Any]) -> Tensor | None:
        """TRL's masks of the policy loss, `(B, 1)` or `(B, T)`: off-policy completions, and tokens of low entropy."""
        mask = loss_mask(inputs)
        kept: Tensor | None = None

        if self.off_policy_mask_threshold is not None:
            old = inputs.get("old_per_token_logps", logps.detach())
            kept = self.get_off_policy_mask(
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", old),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if self.top_entropy_quantile < 1.0:
            high = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
            kept = high if kept is None else kept * high
        return kept

    def _measure(self, logps: Tensor, inputs: dict[str, Any]) -> None:
        written = written_tokens(inputs, self._tokenizer.pad_token_id)
        errors = find_error_tokens(inputs["completion_ids"], written)
        fresh = self._mode == "train" and self.state.global_step == self._step_of_rollout
        prefix = "" if self._tbpo else "paper_"
        measured = measure_ratios(logps, inputs, errors, self.args.trust_band, prefix, self.accelerator.gather, fresh)
        for name, value in measured.items():
            self._log_value(name, value)
        if self._tbpo:
            self._log_clipped(measured["ratio/neg_low_frac"], measured["ratio/pos_high_frac"])
        if self._compares_sampler and "old_per_token_logps" not in inputs:
            # TRL computes no `old` if no update comes before the loss: then `logps` belongs to the weights that sampled.
            mask = loss_mask(inputs)
            if self.accelerator.gather(mask.sum().view(1)).any():
                self._log_mismatch(logps, inputs["sampling_per_token_logps"], mask)

    def _log_clipped(self, low: float, high: float) -> None:
        """Log the shares of completions beyond TBPO's bounds as TRL's `clip_ratio/*`, in place of those for advantages of zero."""
        logged = self._metrics[self._mode]
        logged["clip_ratio/low_mean"][-1] = low
        logged["clip_ratio/high_mean"][-1] = high
        logged["clip_ratio/region_mean"][-1] = low + high
        logged["clip_ratio/low_min"][-1] = float(low == 1)  # of a completion: 0 or 1
        logged["clip_ratio/high_max"][-1] = float(high > 0)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float | None:
        """The Trainer's method, called before each update; a norm that is NaN or infinite stops the run."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        guards.check_gradient(grad_norm)
        return grad_norm

    # Small helpers --------------------------------------------------------------------------------------------------

    @property
    def _unwrapped(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _compares_sampler(self) -> bool:
        """Whether to log the mismatch: always with our engine, for a `rollout_func` only if the loss uses its log-probs."""
        return self.args.weighs_mismatch or (self.args.use_vllm and self.rollout_func is None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's method, which averages over micro-batches; minima and maxima stay minima and maxima."""
        for name, values in self._metrics[self._mode].items():
            if name.endswith(("min", "max")) and name.startswith(("ratio/", "mismatch/")):
                values[:] = [min(values) if name.endswith("min") else max(values)]
        super().log(logs, start_time)

    def _flips(self) -> dict[str, float]:
        return self._weight_flips.update(quantized_modules(self._unwrapped))

    def _log_value(self, name: str, value: float) -> None:
        self._metrics[self._mode][name].append(value)

    def _check_layers_ran(self) -> None:
        """After the first step: every low-bit layer of every process must have run."""
        bypassed = bypassed_layers(self._unwrapped)
        numbers = self.accelerator.gather(torch.tensor([len(bypassed)], device=self.accelerator.device))
        if numbers.any():  # on any process, so that all of them stop
            raise RuntimeError(
                f"{int(numbers.max())} quantized layers did not run in the first step (first: {bypassed[:1]}): another library "
                "replaced their forward, or the batch does not reach them. Add them to `quant_ignore` if that is intended."
            )


def prepare(model: nn.Module, args: QaRLConfig, source: QuantizedSource | None) -> None:
    """Give the policy its low-bit layers and, beside a CPU engine, that engine's operations."""
    if args.quantized:
        plan: Any = args.quant_plan(None if source is None else source.plan())
        if args.frozen:
            from .quant.frozen import align_adapters  # imports peft

            align_adapters(model)
        else:
            gemm, forward = GEMMS[args.learner_kernel], args.quantize_learner
            check_head(apply_quantization(model, plan, gemm=gemm, quantize_forward=forward))
    if _compat.is_zero3(args):
        _compat.fit_to_zero3(base_model(model))
    if args.engine_ops_for(model.config):
        use_engine_ops(model)
