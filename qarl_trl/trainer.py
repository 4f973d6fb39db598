"""`QaRLTrainer`: TRL's `GRPOTrainer` with low-bit rollouts, a low-bit learner and the TBPO loss (paper Sec. 3, Fig.
2).

Here is the method, in the order of a step: rollout, log-probs, loss. Its other parts have files of their own in
`trainers/`: low-bit weights and engine ([`~qarl_trl.trainers.LowBitMixin`]), passes without padding (`packed.py`) and
what is measured (`measured.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from . import guards
from .config import TBPO, QaRLConfig
from .learner.logps import TrlResult
from .loss import filter_advantages, loss_mask, mismatch_weight, tbpo_loss
from .optim import build_muon
from .quant.names import base_model
from .trainers.low_bit import LowBitMixin
from .trainers.measured import MeasuredMixin
from .trainers.packed import PackedMixin


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


class QaRLTrainer(MeasuredMixin, PackedMixin, LowBitMixin, GRPOTrainer):
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

        if args.optim_muon and optimizers[0] is not None:
            raise ValueError(
                "optim_muon must be False beside an optimizer in `optimizers`, which would train instead."
            )

        # Before the model gets them. A subclass may have its own.
        if args.loss_type == TBPO and type(self)._tag_names is QaRLTrainer._tag_names:
            self._tag_names = ["trl", TBPO, "qarl"]
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

        # TRL calls it once in each process, and gathers afterwards: a process that raises alone would leave the others
        # waiting.
        if self.rollout_func is not None:
            self.rollout_func = partial(self._roll_out, self.rollout_func)

        self._tbpo = args.loss_type == TBPO
        # Only now: they read what TRL's constructor sets, such as the accelerator, the tokenizer and
        # `aux_loss_enabled`.
        self._choose_passes()
        self._choose_endings()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """With `optim_muon` Muon for matrices and AdamW for the rest, otherwise TRL's optimizer."""
        if self.optimizer is None and self.args.optim_muon:
            optimizer = build_muon(self.model if model is None else model, self.args)
            self.optimizer = optimizer
            return optimizer
        return super().create_optimizer(model)

    # Rollout ---------------------------------------------------------------------------------------------------------

    def _roll_out(self, rollout_func: Callable[..., Any], prompts: Any, trainer: Any) -> Any:
        """The result of a `rollout_func`, checked. It may have sampled with other weights, as a user's class may."""
        # Its number of generations may differ between processes, as that of a loop of tool calls does.
        with self._generating_alone(), self._mode_kept():
            output = guards.rollout_of_all(rollout_func, prompts, trainer)
        if self.low_bit_store is not None:
            self.low_bit_store.weights_changed()
        return output

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """
        TRL's method, with filtered advantages, TBPO's mismatch weight (Eq. 5) in place of TRL's, and the mismatch
        logged.
        """
        if self._mode == "train":
            # Before TRL samples: the ratios of this batch must be 1 until `global_step` moves on.
            self._rollout_buffer.step_of_sampling = self.state.global_step

        is_first = self._mode == "train" and not self._looked_at_rewards
        output = super()._generate_and_score_completions(inputs)
        # After TRL has normalized them, so that dropping the negative ones does not shift the positive ones.
        if self.args.advantage_filter != "none":
            output["advantages"] = filter_advantages(output["advantages"], self.args.advantage_filter)
            self._filter_logged_advantages()

        old = output.get("old_per_token_logps")
        sampling = output.get("sampling_per_token_logps")
        mask = loss_mask(output)
        if is_first:
            self._look_at_truncated(mask)
        if self._tbpo and self.args.weighs_mismatch:
            weight = mismatch_weight(old, sampling, mask, self.args.tbpo_mismatch_cap)
            # TRL's stock weight is the exponential of a sum over tokens, and by default 0 above 3: of long answers
            # beside a low-bit engine it would drop most. `(B, 1)` is the shape of TRL's own weight of a sequence.
            output["importance_sampling_ratio"] = weight.unsqueeze(1)

        if old is not None and self._compares_sampler:  # without `old` see `_measure_mismatch`
            self._log_mismatch(old, sampling, mask)
        return output

    def _filter_logged_advantages(self) -> None:
        """Show the advantages of the loss in the table of `log_completions`, where TRL put them before the filter."""
        logged = self._logs["advantages"]
        filtered = filter_advantages(torch.tensor([*logged]), self.args.advantage_filter).tolist()
        logged.clear()
        logged.extend(filtered)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids: list[list[int]]
    ) -> Tensor:
        """TRL's method, guarded; the first rewards are looked at."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        if self._mode == "train":
            self._look_at_rewards(rewards, completion_ids)
        return rewards

    # Log-probs -------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> TrlResult:
        """TRL's method, for `old` and for the loss, by the low-bit forward and in passes without padding."""
        # Only a rollout batch has one: it was just sampled.
        if kwargs.get("batch_size") is not None:
            self._user_may_have_written()
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._loss_forward.note(result)
        return result

    # Loss ------------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, or with `loss_type="tbpo"` [`tbpo_loss`] and TRL's other terms; logs what its ratios say."""
        self._loss_forward.forget()
        with self._loss_forward.as_called(self):
            return self._loss_of(model, inputs)

    def _loss_of(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The loss of [`_compute_loss`], whose forward is noted."""
        if self._tbpo:
            shape = tuple(inputs["advantages"].shape)
            if len(shape) != 1:
                raise ValueError(
                    f"With loss_type='tbpo' advantages must be one number a completion, got the shape {shape}. For "
                    "advantages of tokens set another loss_type, such as 'dapo'."
                )
            other_terms, logps, entropies = self._terms_beside_the_policy_loss(model, inputs)
            policy_loss = self._tbpo_loss(logps, entropies, inputs)
            # As TRL divides its terms: the Trainer sums the gradients of the micro-batches. Evaluations accumulate
            # nothing.
            micro_batches = self.current_gradient_accumulation_steps if self._mode == "train" else 1
            loss = policy_loss / micro_batches + other_terms
            self._log_policy_loss(policy_loss)
        else:
            loss = super()._compute_loss(model, inputs)
            logps, _ = self._loss_forward.take()

        # Metrics of every loss, after it: they must neither change it nor stay in its graph.
        self._measure_ratios(logps.detach(), inputs)
        self._measure_mismatch(logps.detach(), inputs)
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
        # TRL does not know TBPO. With this loss, its KL penalty with `use_bias_correction_kl` takes the ratio of the
        # sequence, as TBPO does.
        with patch.multiple(self, loss_type="grpo", importance_sampling_level="sequence"):
            other_terms = super()._compute_loss(model, inputs | {"advantages": zeros})
        logps, entropies = self._loss_forward.take()
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

        # The same calls with the same arguments as in TRL's `_compute_loss` (1.16), whose own masks met advantages of
        # zero.
        if self.off_policy_mask_threshold is not None:
            kept = self.get_off_policy_mask(
                advantages=inputs["advantages"].unsqueeze(1),
                per_token_logps=logps,
                # The engine's log-probs where there are any: the mask is also about the mismatch, not only about
                # updates.
                sampling_per_token_logps=inputs.get("sampling_per_token_logps", _old_logps(logps, inputs)),
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if self.top_entropy_quantile < 1.0:
            high = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
            kept = high if kept is None else kept * high
        return kept


def _old_logps(logps: Tensor, inputs: dict[str, Any]) -> Tensor:
    """
    Log-probs `(B, T)` of the learner at rollout time.

    TRL leaves them out if no update comes between rollout and loss: then they are the present ones.
    """
    return inputs.get("old_per_token_logps", logps.detach())
