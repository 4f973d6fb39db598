"""`PackedMixin`: GRPO's log-probs in passes without padding, which the micro-batches of an update share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import TrainerCallback

from .._compat.rollout_batch import is_text, shuffled_in
from .._compat.training_loop import accumulating
from ..learner.groups import MicroBatchGroups, scored_arguments
from ..learner.logps import PackedPasses, TrlResult
from ..learner.packing import row_order
from ..quant.names import adapters_in_use
from ..quant.samples import sample_parameters
from .forwards import OF_A_LOSS
from .loss_forward import LossForward
from .user_code import callback_of_user, method_of_user


logger = get_logger(__name__)


class PackedMixin:
    """
    The part of a [`~qarl_trl.QaRLTrainer`] that skips padding (`max_tokens_per_pass`). It overrides methods of TRL's
    `GRPOTrainer`, above a [`~qarl_trl.trainers.LowBitMixin`].

    What runs together is the same for `old` and for the loss, or kernels would round the two differently, and the
    first ratio would not be 1: the rows of a micro-batch, and the micro-batches of a pass.

    Attributes:
        _passes: Runs the passes; `None` for TRL's padded ones.
        _groups: Which micro-batches of an update share a pass; `None` if each has its own, as for a user's class that
            looks at each loss, or one with a loss of its own under FSDP2.
        _loss_forward: Carries the forward of a pass into the losses of the micro-batches that shared it.
        _update_began_at: TRL's `_step` at the first micro-batch of the current update.
    """

    _passes: PackedPasses | None = None
    _groups: MicroBatchGroups | None = None
    _loss_forward: LossForward
    _update_began_at = 0

    def _choose_passes(self) -> None:
        """Choose between padded and packed passes, by the settings; at the end of the constructor."""
        self._loss_forward = LossForward()
        if self.args.max_tokens_per_pass is None:
            return

        self._passes = PackedPasses(
            self.args.max_tokens_per_pass,
            autocast=self.accelerator.autocast,
            gather=self.accelerator.gather,
            # Without keep_torch_compile=False accelerate would change DDP's compiled wrapper, which then synchronizes
            # every micro-batch.
            unwrap=partial(self.accelerator.unwrap_model, keep_torch_compile=False),
        )
        # The balancing loss of a pass is no mean over its micro-batches, and DeepSpeed counts backwards.
        if self.aux_loss_enabled or self.is_deepspeed_enabled:
            return

        self._groups = MicroBatchGroups(self._passes.merge)
        self._keep_apart_if_looked_at()
        if self._groups is not None:
            self.add_callback(_AtUpdate(self._keep_apart_if_looked_at, self._note_update))

    def _keep_apart_if_looked_at(self) -> None:
        """Let no micro-batches share a pass if a user's code sees each of them, and say so."""
        who = self._who_looks_at_micro_batches()
        if who is None or self._groups is None:
            return

        self._groups = None
        if self.args.gradient_accumulation_steps > 1:
            logger.warning("%s, so each micro-batch runs in a pass of its own. That is slower.", who)

    def _who_looks_at_micro_batches(self) -> str | None:
        """By what a user's code sees each micro-batch, in words; `None` if none does."""
        name = type(self).__name__
        method = _looks_at_micro_batches(self)
        if method is not None:
            return f"{name} has a {method} of its own (an override of _compute_loss alone would let them share passes)"

        # It may put other weights in place, and those of shards are not looked at.
        if self.is_fsdp_enabled and method_of_user(self, ("_compute_loss",)):
            return f"{name} has a _compute_loss of its own under FSDP2"

        # It sees gradients, which a shared pass has not computed yet.
        callback = callback_of_user(self, "on_substep_end")
        return None if callback is None else f"{type(callback).__name__} has an on_substep_end"

    # Log-probs -------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> TrlResult:
        """
        TRL's method, in passes without padding where the model's rows can be packed.

        Args:
            model: The model as the Trainer calls it.
            input_ids: Prompts and completions, int64 `(B, L)`.
            attention_mask: 1 for tokens, 0 for padding, `(B, L)`.
            logits_to_keep: T, the number of completion columns.
            batch_size: Rows of a micro-batch; `None`: all of them.
            compute_entropy: Whether to return entropies.
            compute_aux_loss: Whether to return the balancing loss of a mixture.
            images: TRL's other arguments: images, token types.

        Returns:
            Log-probs `(B, T)`, entropies `(B, T)` or `None`, balancing loss or `None`.
        """
        text = {
            "model": model,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "logits_to_keep": logits_to_keep,
            "batch_size": batch_size,
            "compute_entropy": compute_entropy,
            "compute_aux_loss": compute_aux_loss,
        }
        # Before anything else: this may be the call within a loss whose forward ran before.
        if self._passes is not None and self._loss_forward.is_sharing:
            shared = self._loss_forward.take_shared(text | self._policy_of(self._passes.unwrap(model)))
            if shared is not None:
                return shared

        if self._passes is not None and is_text(images) and self._passes.packs(model):
            return self._run_passes(self._passes, text)
        return super()._get_per_token_logps_and_entropies(**text, **images)

    def _run_passes(self, passes: PackedPasses, text: dict[str, Any]) -> TrlResult:
        """The result of TRL's method by packed passes, from its arguments."""
        # Only the passes of a rollout batch must be those of its loss, and only a rollout batch has a `batch_size`.
        if self._mode != "train" or text["batch_size"] is None:
            return passes.run(text)

        rows = len(text["input_ids"])
        updates = None if self._groups is None else self._updates_of_rollout()
        # A user's class may score other rows by micro-batches, such as a part of them. No update is theirs.
        if updates is not None and len(updates) != math.ceil(rows / text["batch_size"]):
            updates = None
        return passes.run(text, self._row_order(rows), updates)

    # Micro-batches ---------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's method, with micro-batches in the order of rows in which `old` was computed."""
        if self._passes is None:
            return super()._prepare_inputs(generation_batch)
        # Around all of it: TRL draws the order once, after it computed `old` in it.
        with shuffled_in(self._row_order):
            inputs = super()._prepare_inputs(generation_batch)

        if self._groups is not None and self._mode == "train":
            self._groups.choose(self._buffered_inputs, self._updates_of_rollout())
        return inputs

    def _row_order(self, rows: int) -> Tensor:
        """The rows of the current rollout batch in the order of its micro-batches, int64 `(rows,)`."""
        return row_order(rows, self.args.seed, self.state.global_step, self.accelerator.process_index)

    def _note_update(self) -> None:
        self._update_began_at = self._step

    def _updates_of_rollout(self) -> list[int]:
        """For each micro-batch of the current rollout batch the number of its update, counted from the current one."""
        micro_batches = self.args.steps_per_generation
        # TRL's `_step` counts micro-batches of the whole run, and a rollout batch begins at a multiple of this number.
        start = self._step - self._step % micro_batches

        # Not from 0: the last update of an epoch may have been cut short, and a resumed run may count anew.
        first = start - self._update_began_at
        return [place // self.args.gradient_accumulation_steps for place in range(first, first + micro_batches)]

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
        # A last update of an epoch may be cut short. Then `sync_gradients` ends the group before its chosen size.
        together = self._groups.take(inputs, place, ends_update=self.accelerator.sync_gradients)
        if not together:
            # The Trainer calls `backward` on it.
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        if len(together) == 1:
            return super().compute_loss(model, inputs, *args, **kwargs)

        # Outside of the lambda, whose first argument `super()` would take for `self`.
        compute_loss = super().compute_loss
        losses = self._losses_of_group(model, together, lambda one: compute_loss(model, one, *args, **kwargs))
        # TRL has divided each by the micro-batches of the update, so their sum is what the Trainer would have summed.
        return torch.stack(losses).sum()

    def _losses_of_group(
        self, model: nn.Module, together: list[dict[str, Any]], compute_one: Callable[[dict[str, Any]], Tensor]
    ) -> list[Tensor]:
        """
        The losses of micro-batches from one forward pass.

        Args:
            model: The model as the Trainer calls it.
            together: The micro-batches. After the last one the optimizer may step.
            compute_one: TRL's loss of a micro-batch.
        """
        losses = []
        for micro_batch, forward in zip(together, self._forwards_of_group(model, together), strict=True):
            # TRL ends its window of entropies where gradients are synchronized, so only with the last one.
            ends_update = self.accelerator.sync_gradients and micro_batch is together[-1]
            scored = self._policy_of(self._unwrapped) | scored_arguments([micro_batch])
            with self._loss_forward.sharing(forward, scored), accumulating(self.accelerator, ends_update):
                losses.append(compute_one(micro_batch))
        return losses

    def _policy_of(self, model: nn.Module) -> dict[str, Any]:
        """
        What tells the policies of forwards apart: the model, its adapters, and where a user's loss may put other
        weights in place, samples of the weights. Shards have none: no pass is shared there with such a loss.
        """
        parameters: list[Tensor] = []
        if method_of_user(self, OF_A_LOSS):
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return {"model": model, "adapters": adapters_in_use(model), "samples": sample_parameters(parameters)}

    def _forwards_of_group(self, model: nn.Module, together: list[dict[str, Any]]) -> list[TrlResult]:
        """One forward pass over micro-batches, as the result of TRL's method for each of them."""
        logps, entropies, _ = self._get_per_token_logps_and_entropies(model, **scored_arguments(together))
        assert entropies is not None  # asked for in `scored_arguments`

        rows = [len(micro_batch["prompt_ids"]) for micro_batch in together]
        parts = zip(logps.split(rows), entropies.split(rows), strict=True)
        # `None`: a run with a balancing loss has no groups ([`_choose_passes`]).
        return [(logps_of_one, entropies_of_one, None) for logps_of_one, entropies_of_one in parts]

    def _runs_packed(self, model: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether TRL's loss of a micro-batch runs in packed passes."""
        # A micro-batch also has columns that are no arguments of the method, such as its advantages.
        arguments = inspect.signature(super()._get_per_token_logps_and_entropies).parameters
        has_only_text = is_text({name: inputs.get(name) for name in arguments})
        return has_only_text and self._passes is not None and self._passes.packs(model)


class _AtUpdate(TrainerCallback):
    """Calls one function when a training begins, and another before the first micro-batch of each update."""

    def __init__(self, at_start: Callable[[], None], at_update: Callable[[], None]) -> None:
        self._at_start = at_start
        self._at_update = at_update

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at_start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._at_update()


def _looks_at_micro_batches(trainer: Any) -> str | None:
    """
    The method by which a user's code sees each micro-batch, or `None`: of a class, or one that a script put in place
    of the trainer's.

    A `compute_loss` or a `training_step` may do with each loss what belongs to its micro-batch, such as a weight: of
    several that share a pass it would see zeros and a sum. A method for log-probs would get those of a shared pass
    twice, joined and for each micro-batch. A `_prepare_inputs` may make micro-batches of different widths.
    """
    methods = ("compute_loss", "training_step", "_prepare_inputs", "_get_per_token_logps_and_entropies")
    return method_of_user(trainer, methods)
