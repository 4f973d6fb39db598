"""`MeasuredMixin`: what a QaRL run logs beside TRL's metrics, and in place of some of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import guards
from ..loss import loss_mask
from ..metrics.columns import merge_micro_batches
from ..metrics.endings import Endings, ending_metrics
from ..metrics.error_tokens import find_error_tokens, written_tokens
from ..metrics.mismatch import check_mismatch, mismatch_metrics
from ..metrics.ratios import measure_ratios
from .sampling import with_stop_tokens


class MeasuredMixin:
    """
    The part of a [`~qarl_trl.QaRLTrainer`] that measures (docs/metrics.md), and stops a run whose mismatch is too
    large. Nothing here changes what is learned.

    It overrides methods of TRL's `GRPOTrainer`, above a [`~qarl_trl.trainers.LowBitMixin`]. The trainer calls the
    other methods where it has what they measure.

    Attributes:
        _endings: Finds answers that ended on a stop string or token, of which TRL does not know.
        _looked_at_rewards: Whether the first rollout batch was looked at.
    """

    _endings: Endings
    _looked_at_rewards = False

    def _choose_endings(self) -> None:
        """Take the run's stop strings and tokens; at the end of the constructor."""
        of_engine = self.args.generation_kwargs if self.args.use_vllm else None
        generation_kwargs = with_stop_tokens(of_engine, self._tokenizer)
        # As the engine decodes, which looks for stop strings in its text.
        skips = (generation_kwargs or {}).get("skip_special_tokens", True)
        self._endings = Endings(generation_kwargs, partial(self._tokenizer.decode, skip_special_tokens=skips))

    # Of a rollout batch ----------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> tuple:
        """TRL's method; answers that ended on a stop string or a stop token are not counted as cut off."""
        output = super()._generate(prompts)
        if self._endings:
            _, completion_ids, tool_mask, *_ = output
            self._log_endings(completion_ids, tool_mask)
        return output

    def _log_endings(self, completion_ids: list[list[int]], tool_mask: list[list[int]] | None) -> None:
        # TRL's own rule counts an answer as ended if its last token is one of these.
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        ended = [tokens[-1] in ends or self._endings.ended(tokens) for tokens in completion_ids]
        # Without tools all tokens are the model's; the mask leaves out what tools answered, as TRL does in its
        # lengths.
        lengths = [sum(mask) for mask in tool_mask] if tool_mask is not None else map(len, completion_ids)

        # One collective for both columns: `(rows, 2)`, of all processes `(processes * rows, 2)`.
        rows = torch.tensor(list(zip(lengths, ended, strict=True)), device=self.accelerator.device)
        of_all, ended_of_all = self.accelerator.gather(rows).unbind(1)
        for name, value in ending_metrics(of_all, ended_of_all.bool()).items():
            self._replace_metric(name, value)

    def _look_at_rewards(self, rewards: Tensor, completion_ids: list[list[int]]) -> None:
        """
        Say so if nothing can be learned from the first rollout batch.

        Args:
            rewards: Of all processes, `(rows, functions)`.
            completion_ids: Of this process.
        """
        if self._looked_at_rewards:
            return

        # In all processes at the first batch: there is a `gather` below.
        self._looked_at_rewards = True
        # As TRL sums its functions: a reward of NaN ("does not apply") counts as 0.
        weighted = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        # The hash of a tuple of numbers is the same in each process.
        hashes = torch.tensor([hash(tuple(tokens)) for tokens in completion_ids], device=rewards.device)
        guards.say_if_nothing_is_learned(weighted, self.accelerator.gather(hashes), self.num_generations)

    def _look_at_truncated(self, mask: Tensor) -> None:
        """Say so if all answers of the first rollout batch were cut off, and left out: `mask` is of the loss."""
        if self.args.mask_truncated_completions:
            kept = self.accelerator.gather(mask.sum().view(1)).sum()
            guards.say_if_all_are_cut_off(int(kept), self.args.max_completion_length)

    @property
    def _compares_sampler(self) -> bool:
        """
        Whether to log the mismatch: always with our engine, for a `rollout_func` only if the loss uses its log-probs.
        """
        return self.args.weighs_mismatch or (self.args.use_vllm and self.rollout_func is None)

    def _log_mismatch(self, old: Tensor, sampling: Tensor, mask: Tensor) -> None:
        """
        Log how far `old` of the learner and `sampling` of the engine are apart, over the tokens in the loss, and act
        on it. All processes call it together.
        """
        # All processes must enter the collectives together, also those that have no token in the loss.
        if not self.accelerator.gather(mask.sum().view(1)).any():
            return
        metrics = mismatch_metrics(old, sampling, mask, self.args.tbpo_mismatch_cap, self.accelerator.gather)
        for name, value in metrics.items():
            self._log_value(f"mismatch/{name}", value)

        if self._tbpo and self.args.weighs_mismatch:
            for name in ("min", "mean", "max"):  # TRL logged its own weight there; this loss does not use it
                weight = metrics[f"seq_weight_{name}"]
                self._replace_metric(f"sampling/importance_sampling_ratio/{name}", weight)
        self._act_on_mismatch(metrics)

    def _act_on_mismatch(self, metrics: dict[str, float]) -> None:
        """Stop a run whose mismatch is too large (`RuntimeError`), and tell the sync check of the mismatch."""
        check_mismatch(metrics["logp_diff_mean"], metrics["unscored_max"], self.args.mismatch_abort_threshold)

        sync_check = self.vllm_generation.sync_check if self.args.use_vllm else None
        # Evaluations may have other sampling settings and weights.
        if sync_check is not None and self._mode == "train":
            sync_check.watch(metrics["logp_diff_mean"])

    # Of a loss -------------------------------------------------------------------------------------------------------

    def _measure_ratios(self, logps: Tensor, inputs: dict[str, Any]) -> None:
        """Log how far the policy moved since it sampled, and the error tokens."""
        written = written_tokens(inputs, self._tokenizer.pad_token_id)
        errors = find_error_tokens(inputs["completion_ids"], written)
        # Until the first optimizer step after the rollout every ratio must be 1.
        is_fresh = self._mode == "train" and self.state.global_step == self._rollout_buffer.step_of_sampling
        prefix = "" if self._tbpo else "paper_"
        # With another loss TBPO's bounds are measured under other names: TRL logs the shares of its own clip.
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
            self._log_mismatch(logps, inputs["sampling_per_token_logps"], loss_mask(inputs))

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

    def _log_policy_loss(self, policy_loss: Tensor) -> None:
        """Add TBPO's loss to the one that TRL logs with an entropy bonus, of which only the KL penalty is left."""
        if self._entropy_bonus_enabled:
            mean_of_all = self.accelerator.gather(policy_loss.detach()).nanmean().item()
            # Of a pass with advantages of zero, see `_terms_beside_the_policy_loss`.
            of_trl = self._metrics[self._mode]["policy_loss"][-1]
            self._replace_metric("policy_loss", of_trl + mean_of_all)

    # In the log ------------------------------------------------------------------------------------------------------

    def _replace_metric(self, name: str, value: float) -> None:
        """Log a value in place of the one that TRL just logged, for a quantity that TRL computes for another loss."""
        logged = self._metrics[self._mode][name]
        if not logged:
            raise RuntimeError(f"TRL did not log {name!r}: untested version.")
        logged[-1] = value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's method, which averages over micro-batches; minima and maxima stay minima and maxima."""
        merge_micro_batches(self._metrics[self._mode])
        super().log(logs, start_time)
