"""`QaRLTrainer`: TRL's `GRPOTrainer` with low-bit rollouts, a low-bit learner and the TBPO loss (paper Sec. 3, Fig.
2).

The low-bit half is [`~qarl_trl.trainers.LowBitMixin`]. Here are the loss, the passes without padding and the metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from . import guards
from ._compat.rollout_batch import is_text, shuffled_in, ungathered_rewards
from ._compat.training_loop import accumulating
from .config import TBPO, QaRLConfig
from .learner.groups import MicroBatchGroups, scored_arguments
from .learner.logps import PackedPasses, TrlResult
from .learner.packing import row_order
from .loss import filter_advantages, loss_mask, mismatch_weight, tbpo_loss
from .metrics.endings import Endings, ending_metrics
from .metrics.error_tokens import find_error_tokens, written_tokens
from .metrics.mismatch import check_mismatch, mismatch_metrics
from .metrics.ratios import measure_ratios
from .optim import build_muon
from .quant.names import base_model
from .trainers.low_bit import LowBitMixin


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
    from peft import PeftConfig, PeftModel
    from transformers import (
        BitsAndBytesConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
        TrainerCallback,
    )


class QaRLTrainer(LowBitMixin, GRPOTrainer):
    """
    Reinforcement learning on low-bit rollouts with a learner that runs the same low-bit weights.

    It differs from [`~trl.GRPOTrainer`] in five ways. It quantizes the linear layers of the policy in place. The vLLM
    engine runs in the same scheme and gets the packed tensors. `loss_type="tbpo"` is the trust-band objective. The
    learner skips padding. `save_model` writes the low-bit checkpoint. With the scheme off, a stock loss and
    `max_tokens_per_pass=None` the losses are those of [`~trl.GRPOTrainer`], bit for bit.

    Args:
        model: The policy: a Hub id or folder (also of a compressed-tensors checkpoint), a model, or a `PeftModel`.
            Master weights should be float32, TRL's default for a name.
        reward_funcs: One or several functions, reward models or their names. They return a finite number for each
            completion, or `None` where they do not apply.
        args: The settings; by default those of [`QaRLConfig`], in a folder named after the model.
        train_dataset: With a column `prompt`. It must have at least one rollout batch of prompts.
        eval_dataset: The same for evaluations.
        processing_class: The tokenizer or processor, by default that of the model.
        reward_processing_classes: Tokenizers of reward models.
        callbacks: Callbacks of the Trainer.
        optimizers: An optimizer and a schedule in place of those in `args`.
        quantization_config: Of bitsandbytes. Only with `quant_scheme="none"`: it leaves no master weights.
        peft_config: Trains a LoRA adapter. `lora_base` says whether it is merged before each quantization, or stays
            beside a frozen low-bit base.
        tools: Functions that the model may call while it answers.
        rollout_func: Samples in place of the engine: `(prompts, trainer)` to `prompt_ids`, `completion_ids` and
            `logprobs`.
        environment_factory: Makes the environments of tools.

    Raises:
        ValueError: if model, settings, data and machine do not go together; raised before any weights load.
        ImportError: if a package is missing, or has a version that was not tested.
        OSError: if a folder cannot be written, or a model cannot be found.
    """

    _tag_names = ["trl", "grpo", "qarl"]
    _name = "QaRL"
    # In place of GRPO's, which would be inherited.
    _paper = {
        "title": "QaRL: Rollout-Aligned Quantization-Aware RL for Fast and Stable Training under Training-Inference "
        "Mismatch",
        "id": "2604.07853",
    }

    args: QaRLConfig

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: QaRLConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:  # named as TRL names its own
            name = model if isinstance(model, str) else base_model(model).config._name_or_path
            args = QaRLConfig(f"{name.rstrip('/').split('/')[-1]}-QaRL")
        if not isinstance(args, QaRLConfig):
            raise TypeError(f"QaRLTrainer needs a QaRLConfig, got {type(args).__name__}. It takes the same fields.")

        self._passes: PackedPasses | None = None
        self._looked_at_rewards = False
        self._groups: MicroBatchGroups | None = None
        self._shared_forward: TrlResult | None = None
        self._last_forward: tuple[Tensor, Tensor | None] | None = None
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )

        if self.rollout_func is not None:
            self.rollout_func = partial(guards.rollout_of_all, self.rollout_func)

        generation_kwargs = args.generation_kwargs if args.use_vllm else None
        self._endings = Endings(generation_kwargs, partial(self._tokenizer.decode, skip_special_tokens=True))

        self._tbpo = args.loss_type == TBPO
        if self._tbpo:
            # For TRL's part of the loss, see `_compute_loss`: it does not know TBPO. Its KL penalty with
            # `use_bias_correction_kl` takes the ratio of the sequence, as TBPO does.
            self.loss_type = "grpo"
            self.importance_sampling_level = "sequence"

        if args.max_tokens_per_pass is not None:
            self._passes = PackedPasses(
                args.max_tokens_per_pass,
                autocast=self.accelerator.autocast,
                gather=self.accelerator.gather,
                # Without keep_torch_compile=False accelerate would change DDP's compiled wrapper, which then
                # synchronizes every micro-batch.
                unwrap=partial(self.accelerator.unwrap_model, keep_torch_compile=False),
            )
            # The balancing loss of a pass is no mean over its micro-batches, and DeepSpeed counts backwards.
            if not (self.aux_loss_enabled or self.is_deepspeed_enabled):
                self._groups = MicroBatchGroups(self._passes.merge)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """With `optim_muon` Muon for matrices and AdamW for the rest, otherwise TRL's optimizer."""
        if self.optimizer is None and self.args.optim_muon:
            optimizer = build_muon(self.model if model is None else model, self.args)
            self.optimizer = optimizer
            return optimizer
        return super().create_optimizer(model)

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """
        TRL's method, with filtered advantages, TBPO's mismatch weight (Eq. 5) in place of TRL's, and the mismatch
        logged.
        """
        if self._mode == "train":
            # Until the next optimizer step every ratio of these completions must be 1, see `_measure_ratios`.
            self._step_of_rollout = self.state.global_step

        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = filter_advantages(output["advantages"], self.args.advantage_filter)

        old = output.get("old_per_token_logps")
        sampling = output.get("sampling_per_token_logps")
        mask = loss_mask(output)
        if self._tbpo and self.args.weighs_mismatch:
            weight = mismatch_weight(old, sampling, mask, self.args.tbpo_mismatch_cap)
            output["importance_sampling_ratio"] = weight.unsqueeze(1)

        if old is not None and self._compares_sampler:  # without `old` see `_measure_mismatch`
            self._log_mismatch(old, sampling, mask)
        return output

    def _generate(self, prompts: list[Any]) -> tuple:
        """TRL's method; answers that ended on a stop string or a stop token are not counted as cut off."""
        output = super()._generate(prompts)
        if self._endings:
            _, completion_ids, tool_mask, *_ = output
            self._log_endings(completion_ids, tool_mask)
        return output

    def _log_endings(self, completion_ids: list[list[int]], tool_mask: list[list[int]] | None) -> None:
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        ended = [tokens[-1] in ends or self._endings.ended(tokens) for tokens in completion_ids]
        lengths = [sum(mask) for mask in tool_mask] if tool_mask is not None else map(len, completion_ids)

        rows = torch.tensor(list(zip(lengths, ended, strict=True)), device=self.accelerator.device)
        of_all, ended_of_all = self.accelerator.gather(rows).unbind(1)
        for name, value in ending_metrics(of_all, ended_of_all.bool()).items():
            self._replace_metric(name, value)

    def _tool_call_loop(self, *args: Any) -> tuple:
        """
        TRL's method; its number of generations differs between processes, so the engine must not wait for the others.
        """
        if not self.use_vllm:
            return super()._tool_call_loop(*args)
        with patch.object(self.vllm_generation, "alone", True):
            return super()._tool_call_loop(*args)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids: list[list[int]]
    ) -> Tensor:
        """TRL's method; an error in one process stops all of them, and so does a rollout batch without rewards."""
        calculate = partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids)
        with ungathered_rewards():
            rewards = guards.rewards_of_all(calculate, self.reward_func_names, self.accelerator)

        if self._mode == "train":
            guards.check_scored(rewards, self.reward_func_names)
            if not self._looked_at_rewards:
                self._look_at_rewards(rewards, completion_ids)
        return rewards

    def _look_at_rewards(self, rewards: Tensor, completion_ids: list[list[int]]) -> None:
        """Say so if nothing can be learned from this rollout batch, the first one."""
        self._looked_at_rewards = True
        weighted = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        # The hash of a tuple of numbers is the same in each process.
        hashes = torch.tensor([hash(tuple(tokens)) for tokens in completion_ids], device=rewards.device)
        guards.say_if_nothing_is_learned(weighted, self.accelerator.gather(hashes), self.num_generations)

    # Log-probs -------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        """TRL's method, in passes without padding (`max_tokens_per_pass`) where the model's rows can be packed."""
        padded = super()._get_per_token_logps_and_entropies
        arguments = inspect.signature(padded).bind(*args, **kwargs).arguments

        if self._shared_forward is not None:
            # The micro-batch of this loss ran in a pass with others.
            result = self._shared_forward
            self._shared_forward = None
        elif self._passes is not None and self._packs(self._passes, arguments):
            result = self._run_passes(self._passes, arguments)
        else:
            result = padded(*args, **kwargs)

        self._last_forward = result[:2]  # for `_take_forward`
        return result

    def _run_passes(self, passes: PackedPasses, arguments: dict[str, Any]) -> TrlResult:
        """The result of TRL's method by packed passes."""
        # Only a rollout batch has a `batch_size`. Its passes must be those of the loss, or kernels would round `old`
        # differently.
        if self._mode != "train" or arguments.get("batch_size") is None:
            return passes.run(arguments)

        updates = None if self._groups is None else self._updates_of_rollout()
        return passes.run(arguments, self._row_order(len(arguments["input_ids"])), updates)

    def _updates_of_rollout(self) -> list[int]:
        """For each micro-batch of the current rollout batch the number of its update."""
        micro_batches = self.args.steps_per_generation
        start = self._step - self._step % micro_batches
        return [step // self.args.gradient_accumulation_steps for step in range(start, start + micro_batches)]

    def _packs(self, passes: PackedPasses, arguments: dict[str, Any]) -> bool:
        """Whether to compute the log-probs of these arguments without padding."""
        return is_text(arguments) and passes.packs(arguments["model"])

    def _take_forward(self) -> tuple[Tensor, Tensor | None]:
        """
        Log-probs and entropies `(B, T)` of the forward pass inside TRL's `_compute_loss`, which returns only the loss.

        They are handed on once, so that no later loss can use those of an earlier pass.
        """
        forward = self._last_forward
        self._last_forward = None
        if forward is None:
            raise RuntimeError("TRL computed the loss without `_get_per_token_logps_and_entropies`: untested version.")
        return forward

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's method, with micro-batches in the order of rows in which `old` was computed."""
        if self._passes is None:
            return super()._prepare_inputs(generation_batch)
        with shuffled_in(self._row_order):
            inputs = super()._prepare_inputs(generation_batch)

        if self._groups is not None and self._mode == "train":
            self._groups.choose(self._buffered_inputs, self._updates_of_rollout())
        return inputs

    def _row_order(self, rows: int) -> Tensor:
        return row_order(rows, self.args.seed, self.state.global_step, self.accelerator.process_index)

    # Loss ------------------------------------------------------------------------------------------------------------

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """
        TRL's method for the losses of a group of micro-batches that share a pass, when the last one comes; zero
        before.

        Args:
            model: The model as the Trainer calls it.
            inputs: The micro-batch.
            args: TRL's other arguments.
            kwargs: TRL's other arguments.

        Returns:
            The loss, a scalar: the sum of the losses of the group.
        """
        if self._groups is None or self._mode != "train" or not self._runs_packed(model, inputs):
            return super().compute_loss(model, inputs, *args, **kwargs)

        place = self._step % self.args.steps_per_generation
        together = self._groups.take(inputs, place, ends_update=self.accelerator.sync_gradients)
        if not together:
            # The Trainer calls `backward` on it.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        if len(together) == 1:
            return super().compute_loss(model, inputs, *args, **kwargs)

        logps, entropies, _ = self._get_per_token_logps_and_entropies(model, **scored_arguments(together))
        rows = [len(micro_batch["prompt_ids"]) for micro_batch in together]
        forwards = zip(logps.split(rows), entropies.split(rows), strict=True)

        losses = []
        for micro_batch, (of_logps, of_entropies) in zip(together, forwards, strict=True):
            self._shared_forward = (of_logps, of_entropies, None)
            # TRL ends its window of entropies where gradients are synchronized, so only with the last one.
            ends_update = self.accelerator.sync_gradients and micro_batch is inputs
            with accumulating(self.accelerator, ends_update):
                losses.append(super().compute_loss(model, micro_batch, *args, **kwargs))
            if self._shared_forward is not None:
                raise RuntimeError("A loss without `_get_per_token_logps_and_entropies` cannot share a pass.")
        return torch.stack(losses).sum()

    def _runs_packed(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether TRL's loss of a micro-batch runs in packed passes."""
        parameters = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
        arguments = {name: inputs.get(name) for name in parameters} | {"model": model}
        return self._passes is not None and self._packs(self._passes, arguments)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, or with `loss_type="tbpo"` [`tbpo_loss`] and TRL's other terms; logs what its ratios say."""
        if self._tbpo:
            other_terms, logps, entropies = self._terms_beside_the_policy_loss(model, inputs)
            policy_loss = self._tbpo_loss(logps, entropies, inputs)
            micro_batches = self.current_gradient_accumulation_steps if self._mode == "train" else 1
            loss = policy_loss / micro_batches + other_terms
        else:
            loss = super()._compute_loss(model, inputs)
            logps, _ = self._take_forward()

        self._measure_ratios(logps.detach(), inputs)
        self._measure_mismatch(logps.detach(), inputs)
        if self._tbpo and self._entropy_bonus_enabled:
            # Then TRL logs its policy loss, of which here only the KL penalty is left.
            both = self._metrics[self._mode]["policy_loss"][-1] + self._mean_of_all(policy_loss)
            self._replace_metric("policy_loss", both)
        return loss

    def _terms_beside_the_policy_loss(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """
        TRL's KL penalty, entropy bonus and balancing loss, divided by the micro-batches as TRL does.

        Returns:
            Their sum, and log-probs and entropies `(B, T)` of the forward pass, which TBPO shares.
        """
        # With advantages of zero nothing is left of TRL's policy loss.
        zeros = torch.zeros_like(inputs["advantages"])
        other_terms = super()._compute_loss(model, inputs | {"advantages": zeros})
        logps, entropies = self._take_forward()
        return other_terms, logps, entropies

    def _tbpo_loss(self, logps: Tensor, entropies: Tensor | None, inputs: dict[str, Any]) -> Tensor:
        """[`tbpo_loss`] of a micro-batch."""
        if logps.dtype != torch.float32:
            # One rounding step of a smaller dtype is wider than the trust bands. FSDP's mixed precision casts the
            # model's outputs.
            raise RuntimeError(f"The learner's log-probs must be float32, got {logps.dtype}: something casts them.")

        weight = None
        if self.use_vllm and self.vllm_importance_sampling_correction:  # TRL's condition
            weight = inputs["importance_sampling_ratio"].squeeze(1)
        return tbpo_loss(
            logps,
            _old_logps(logps, inputs),
            inputs["advantages"],
            loss_mask(inputs),
            self.args.trust_band,
            weight=weight,
            kept=self._kept_tokens(logps, entropies, inputs),
        )

    def _kept_tokens(self, logps: Tensor, entropies: Tensor | None, inputs: dict[str, Any]) -> Tensor | None:
        """TRL's masks of the policy loss, `(B, 1)` or `(B, T)`: off-policy completions, and tokens of low entropy."""
        mask = loss_mask(inputs)
        kept: Tensor | None = None

        if self.off_policy_mask_threshold is not None:
            kept = self.get_off_policy_mask(
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", _old_logps(logps, inputs)),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if self.top_entropy_quantile < 1.0:
            high = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
            kept = high if kept is None else kept * high
        return kept

    # Metrics ---------------------------------------------------------------------------------------------------------

    @property
    def _compares_sampler(self) -> bool:
        """
        Whether to log the mismatch: always with our engine, for a `rollout_func` only if the loss uses its log-probs.
        """
        return self.args.weighs_mismatch or (self.args.use_vllm and self.rollout_func is None)

    def _log_mismatch(self, old: Tensor, sampling: Tensor, mask: Tensor) -> None:
        metrics = mismatch_metrics(old, sampling, mask, self.args.tbpo_mismatch_cap, self.accelerator.gather)
        for name, value in metrics.items():
            self._log_value(f"mismatch/{name}", value)

        if self._tbpo and self.args.weighs_mismatch:
            for name in ("min", "mean", "max"):  # TRL logged its own weight there; this loss does not use it
                weight = metrics[f"seq_weight_{name}"]
                self._replace_metric(f"sampling/importance_sampling_ratio/{name}", weight)
        check_mismatch(metrics["logp_diff_mean"], metrics["unscored_max"], self.args.mismatch_abort_threshold)

    def _measure_ratios(self, logps: Tensor, inputs: dict[str, Any]) -> None:
        """Log how far the policy moved since it sampled, and the error tokens."""
        written = written_tokens(inputs, self._tokenizer.pad_token_id)
        errors = find_error_tokens(inputs["completion_ids"], written)
        is_fresh = self._mode == "train" and self.state.global_step == self._step_of_rollout
        prefix = "" if self._tbpo else "paper_"
        measured = measure_ratios(
            logps, inputs, errors, self.args.trust_band, prefix, self.accelerator.gather, is_fresh
        )

        for name, value in measured.items():
            self._log_value(name, value)
        if self._tbpo:
            self._log_clipped(measured["ratio/neg_low_frac"], measured["ratio/pos_high_frac"])

    def _measure_mismatch(self, logps: Tensor, inputs: dict[str, Any]) -> None:
        """Log how far learner and sampler are apart, where the rollout batch had no `old` to tell it from."""
        if self._compares_sampler and "old_per_token_logps" not in inputs:
            # TRL computes no `old` if no update comes before the loss: then `logps` belongs to the weights that
            # sampled.
            mask = loss_mask(inputs)
            if self.accelerator.gather(mask.sum().view(1)).any():
                self._log_mismatch(logps, inputs["sampling_per_token_logps"], mask)

    def _log_clipped(self, low: float, high: float) -> None:
        """
        Log the shares of completions beyond the two bounds that TRL counts, in place of those for advantages of zero.
        """
        self._replace_metric("clip_ratio/low_mean", low)
        self._replace_metric("clip_ratio/high_mean", high)
        self._replace_metric("clip_ratio/region_mean", low + high)
        # Of a completion the share is 0 or 1.
        self._replace_metric("clip_ratio/low_min", float(low == 1))
        self._replace_metric("clip_ratio/high_max", float(high > 0))

    def _replace_metric(self, name: str, value: float) -> None:
        """Log a value in place of the one that TRL just logged, for a quantity that TRL computes for another loss."""
        logged = self._metrics[self._mode][name]
        if not logged:
            raise RuntimeError(f"TRL did not log {name!r}: untested version.")
        logged[-1] = value

    def _mean_of_all(self, value: Tensor) -> float:
        """The mean of a scalar over all processes."""
        return self.accelerator.gather(value.detach()).nanmean().item()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's method, which averages over micro-batches; minima and maxima stay minima and maxima."""
        for name, values in self._metrics[self._mode].items():
            if not name.startswith(("ratio/", "mismatch/")):
                continue
            if name.endswith("min"):
                values[:] = [min(values)]
            elif name.endswith("max"):
                values[:] = [max(values)]
        super().log(logs, start_time)


def _old_logps(logps: Tensor, inputs: dict[str, Any]) -> Tensor:
    """
    Log-probs `(B, T)` of the learner at rollout time.

    TRL leaves them out if no update comes between rollout and loss: then they are the present ones.
    """
    return inputs.get("old_per_token_logps", logps.detach())
