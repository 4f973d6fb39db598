"""What a low-bit trainer does where FSDP2 or ZeRO-3 shards its parameters."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from .._compat.sharding import keep_float32, keep_gradients_sharded
from ..quant.store import LowBitStore
from .forwards import ForwardGuard


class ShardsMixin:
    """
    The part of a [`~qarl_trl.trainers.LowBitMixin`] that prepares low-bit layers for shards. It overrides methods of
    the Trainer, and comes before [`~qarl_trl.checkpoints.saving.CheckpointMixin`], which overrides one of them too.
    """

    args: Any
    accelerator: Any
    low_bit_store: LowBitStore | None
    _guard: ForwardGuard
    _unwrapped: Any

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer's method; in 16-bit precision outputs stay float32, and gradients stay sharded."""
        super().create_accelerator_and_postprocess()
        keep_float32(self.accelerator)
        keep_gradients_sharded(self.accelerator, self.args)

    def _prepare_for_training(self, *args: Any) -> tuple:
        """
        The Trainer's method, in which FSDP2 shards the model; from then on it gathers quantized values of low-bit
        weights.
        """
        store = self.low_bit_store

        # Before the method shards the parameters: FSDP2 takes from their class what it gathers.
        if store is not None and self.accelerator.is_fsdp2:
            self._prepare_shards(store)

        prepared = super()._prepare_for_training(*args)
        if store is not None:
            store.forget()  # the master weights may be shards now
        if store is not None and self.accelerator.is_fsdp2:
            self._guard.watch_shards(self._unwrapped)
        return prepared

    def _prepare_shards(self, store: LowBitStore) -> None:
        device = self.accelerator.device
        if self.args.frozen:  # no shards of it: each process has the whole base
            frozen: Any = store.layers()
            for _, layer in frozen:
                layer.move_to(device)
            return

        # Without RAM-efficient loading torch moves each parameter to the GPU by `param.data = ...` when it shards it.
        if self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            mesh = self.accelerator.parallelism_config  # HSDP: the processes of a node share one copy of the weights
            ranks = mesh.dp_shard_size if mesh else self.args.world_size
            store.prepare_gathers(ranks, device)

    def _check_sharded(self) -> None:
        """Refuse (`ValueError`) to evaluate a model that FSDP2 is still to shard."""
        # accelerate (1.15) shards a model together with its optimizer, and an evaluation of the Trainer has none.
        if self.accelerator.is_fsdp2 and not isinstance(self._unwrapped, FSDPModule):
            raise ValueError(
                "Under FSDP2 the model is sharded when training begins, and cannot be evaluated before. Call train() "
                "first, or set eval_on_start=True."
            )
