"""What happens to low-bit weights at the steps of the Trainer, besides the training itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ..quant.layers.late_adapters import check_late_adapters
from ..quant.names import is_peft_model
from ..quant.store import LowBitStore
from ..validate.adapters import check_saved


class TellStore(TrainerCallback):
    """
    Tells the owner of the low-bit weights when master weights change.

    Args:
        store: The owner.
        acts_within_step: Returns something true if another callback acts between the micro-batches of a step.
    """

    def __init__(self, store: LowBitStore, acts_within_step: Callable[[], Any]) -> None:
        self._store = store
        self._acts_within_step = acts_within_step
        store.will_be_told()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        check_late_adapters(model)
        if is_peft_model(model):
            # A script may have made a norm or an embedding trainable, after the trainer had made the adapter.
            check_saved(model)
        self._store.forget()  # a checkpoint may have been loaded
        # What the first step is compared with.
        self._store.refresh_untrained()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A callback may have written to the weights between two steps, as those that average them do (EMA). If nothing
        # asked for low-bit weights since the last step, it costs nothing.
        self._store.weights_changed()
        # Or to weights that nobody trains, as those that merge an adapter into its base do (ReLoRA). Callbacks after
        # this one may still do so.
        self._store.untrained_may_have_changed()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # It may write to weights. What it does comes after this, and before the next forward.
        if self._acts_within_step():
            self._store.weights_changed()
            self._store.untrained_may_have_changed()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._store.weights_changed()


class CheckLayers(TrainerCallback):
    """Calls `forget` before the first step, and `check` after it."""

    def __init__(self, check: Callable[[], None], forget: Callable[[], None]) -> None:
        self._check: Callable[[], None] | None = check
        self._forget = forget

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A script may have run the model before, for a sync or an evaluation.
        if self._check is not None:
            self._forget()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._check is not None:
            self._check()
        self._check = None
