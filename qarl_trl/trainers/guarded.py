"""`GuardedRewardsMixin`: rewards that would end a run in one process alone, or train nothing, stop all of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .. import guards
from .._compat.construction import trl_module
from .._compat.rollout_batch import ungathered_rewards


class GuardedRewardsMixin:
    """
    The part of a trainer with reward functions that checks what they return, above a
    [`~qarl_trl.trainers.LowBitMixin`].
    """

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids: list[list[int]]
    ) -> Tensor:
        """TRL's method; an error in one process stops all of them, and so does a rollout batch without rewards."""
        calculate = partial(super()._calculate_rewards, inputs, prompts, completions, completion_ids)
        with ungathered_rewards(trl_module(type(self))):
            rewards = guards.rewards_of_all(calculate, self.reward_func_names, self.accelerator)

        if self._mode == "train":
            guards.check_scored(rewards, self.reward_func_names)
        return rewards
