"""Low-bit weights in forwards that are not the trainer's own: of a callback, a reward function or a user's loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.sharding import reshard
from ..quant.samples import Seen
from ..quant.store import LowBitStore
from .user_code import is_of_library, method_of_user


# The methods that make a loss, and an argument of TRL's SFT. One of a user may run the model with other weights in
# between.
OF_A_LOSS = (
    "compute_loss",
    "training_step",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
    "compute_loss_func",
)
# What a user gives a trainer to sample with. It may run the policy.
OF_SAMPLING = ("rollout_func", "tools", "environment_factories")


class Trust(Enum):
    """What a forward may use of the low-bit weights that were made before."""

    KEPT = "those that the trainer knows to be up to date"
    LOOKED_AT = "those of which a sample of the master weights is unchanged"
    LOSS = "the same, and none of a forward without gradients: a backward may compute layers of another one again"


class ForwardGuard:
    """
    Makes low-bit weights again for forwards before which somebody wrote to the master weights.

    Averages of weights (EMA), teachers and noise are put in place for one forward, often through `param.data`, which
    leaves no trace. The trainer's own forwards come right after what it knows: its optimizer's steps, its checkpoints.

    Args:
        store: The low-bit weights of the model; `None` for a model without.
    """

    def __init__(self, store: LowBitStore | None) -> None:
        self._store = store
        self._trust = Trust.LOOKED_AT
        # Whether low-bit weights may have been made of weights that somebody put in place.
        self._is_doubtful = False
        # What changed right before the current forward. Weights that are new may be in place for it alone.
        self._seen = Seen.NOTHING
        self._shards: nn.Module | None = None

    def watch(self, model: nn.Module) -> None:
        """
        Look at the weights around each forward of the model.

        Args:
            model: A causal language model. Each of its forwards is one of its backbone, which some losses call alone.
        """
        if self._store is None:
            return
        backbone: Any = getattr(model, "base_model", model)
        # A compiled model would compile the hooks, too.
        backbone.register_forward_pre_hook(torch.compiler.disable(self.before))
        backbone.register_forward_hook(torch.compiler.disable(self.after))

    def watch_shards(self, model: nn.Module) -> None:
        """
        Give a model its shards back after forwards of others: weights may be written to them before the next one.

        Args:
            model: The whole model, with its adapter, after FSDP2 has sharded it. Only after the hooks of FSDP2, which
                come before this one, no module is in its forward any more.
        """
        if self._shards is None:
            self._shards = model
            model.register_forward_hook(self._reshard)

    def _reshard(self, *_: Any) -> None:
        """A hook after a forward. Before a backward, FSDP2 needs what the forward has."""
        if self._shards is not None and self._trust is not Trust.KEPT and not torch.is_grad_enabled():
            reshard(self._shards)

    @contextmanager
    def trusting(self, trust: Trust) -> Iterator[None]:
        """How forwards in the block go; afterwards as before it."""
        outside = self._trust
        self._trust = trust
        self._settle()
        try:
            yield
        finally:
            self._trust = outside
            self._settle()

    def _settle(self) -> None:
        """Before the trainer's own forwards: what others made in theirs is not used."""
        if self._shards is not None:
            reshard(self._shards)
        if self._is_doubtful and self._trust is Trust.KEPT and self._store is not None:
            self._store.weights_changed()
            self._is_doubtful = False

    def before(self, *_: Any) -> None:
        """A hook before a forward."""
        if self._store is not None and self._trust is not Trust.KEPT:
            self._is_doubtful = True
            self._seen = self._store.refresh_trained()
            self._store.untrained_may_have_changed()

    def after(self, *_: Any) -> None:
        """A hook after a forward: a backward that computes layers again has the weights that are back in place."""
        if self._store is None or self._trust is Trust.KEPT:
            return
        # Of the base of an adapter, which may be put back as well.
        self._store.untrained_may_have_changed()
        if self._trust is Trust.LOSS:
            # The first forward with gradients after a step is the student's: its backward uses what it made.
            is_for_once = self._seen is Seen.WRITE or not torch.is_grad_enabled()
        else:
            is_for_once = self._seen is not Seen.NOTHING
        if is_for_once:
            self._store.use_once()

    # A copy of the model is another model, whose layers have a store of their own.
    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGuard:
        return ForwardGuard(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardGuard, (None,)


class ForwardsMixin:
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that says which forwards are the trainer's own. It overrides
    methods of the Trainer.

    Attributes:
        _guard: Of the policy; set when a trainer is made.
    """

    _guard: ForwardGuard

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's method. A user's loss may run the model with other weights."""
        with self._guard.trusting(self._trust_of_loss()):
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's method, as [`training_step`]. Callbacks of an evaluation run outside of it."""
        with self._guard.trusting(self._trust_of_loss()):
            return super().prediction_step(*args, **kwargs)

    def _trust_of_loss(self) -> Trust:
        """How forwards of a loss go."""
        return Trust.LOSS if method_of_user(self, OF_A_LOSS) else Trust.KEPT

    def _trust_of_sampling(self) -> Trust:
        """How forwards go where a trainer samples and scores."""
        samples_by_user = self._is_of_user or any(getattr(self, name, None) for name in OF_SAMPLING)
        return Trust.LOOKED_AT if samples_by_user or method_of_user(self, OF_A_LOSS) else Trust.KEPT

    @property
    def _is_of_user(self) -> bool:
        """Whether the class is a user's."""
        return not is_of_library(type(self).__module__)
