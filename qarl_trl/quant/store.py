"""`LowBitStore`: the one owner of the low-bit weights of a model.

The learner's forward, the weight sync and the exported file all get a weight from here, so they have the same tensors,
byte for byte (paper Sec. 3.1). A forward asks `weight_of`, which makes a weight again when its master weights have
changed (`_state_of`). Syncs and files go through `tensors`, which makes every weight again. `_quantize` makes a whole
weight, `rows_of` the rows of a shard. A frozen weight is read from a checkpoint. So all low-bit tensors come from
`quantize_weight`, or are stored ones.

The store also knows where master weights are: whole, sharded by FSDP2 or ZeRO-3, or dropped by a frozen base.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .kept import NOT_TRAINED, UNKNOWN, KeptWeights, State, identity
from .layers.layer import LowBitLayer, quantized_modules
from .quantize import LowBitWeight, largest_magnitude, quantize_weight
from .samples import LastLook, Seen, sample
from .sharding.gathers import GatheredWeight, is_master_shard, make_master_shards
from .sharding.shards import is_partitioned, quantize_rows, quantize_shards
from .stream import Gather, checkpoint_stream


class LowBitStore:
    """
    The low-bit weights of one model.

    A weight is made when a forward or a sync first asks for it, and kept until the master weights change. How the
    store learns of a change:

    - it follows the optimizer ([`follow`]), or somebody tells it after each step ([`weights_changed`]). A store that
      nobody promised to tell quantizes trained weights on every forward: that is slow, and never wrong. Weights do not
      show steps, because fused and sharded optimizers write through aliases, which leave a parameter's version as it
      is. A store with a promise also counts the steps of all optimizers of torch;
    - somebody tells it that weights were loaded ([`forget`]);
    - it sees a whole parameter that was written in place, or was replaced by another one. A store without a promise
      also compares samples of untrained ones on every forward.

    [`tensors`], for weight syncs and files, makes every weight again from the master weights as they are.

    Args:
        model: The model with the low-bit layers. Checkpoint names count from here, so it is the `PeftModel` if there
            is one.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._kept = KeptWeights()
        self._last_look = LastLook()
        # Whether the next forward looks at the master weights that nobody trains.
        self._look_is_due = False
        self._changes = 0
        self._is_told = False
        self._sharded = False
        self._model: weakref.ref[nn.Module] | None = None
        if model is not None:
            self.attach(model)

    # The model -------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model. `RuntimeError` for a store that was unpickled, until `attach` names its model."""
        model = self._model_if_any()
        if model is None:
            raise RuntimeError("This store has no model. Call `store.attach(model)`.")
        return model

    def _model_if_any(self) -> nn.Module | None:
        # A weak reference, because the model's layers refer to the store: a cycle would keep a deleted model in
        # memory.
        return None if self._model is None else self._model()

    def attach(self, model: nn.Module) -> None:
        """Make `model`, which contains the low-bit layers, the one from which checkpoint names count."""
        self._model = weakref.ref(model)

    def layers(self) -> Iterator[tuple[str, LowBitLayer]]:
        """The low-bit layers with their names in the model, in module order."""
        return quantized_modules(self.model)

    def bypassed_layers(self) -> list[str]:
        """Names of the layers that should have trained in low bits and never did."""
        return [name for name, layer in self.layers() if layer.quantized_forward and not layer.ran_in_training]

    # When weights change ---------------------------------------------------------------------------------------------

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """
        Keep low-bit weights between the steps of `optimizer`. Nothing else may train the model.

        Args:
            optimizer: For a model that FSDP2 shards, the optimizer of its shards.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer  # the wrapper calls it, and has no hooks of its own
        # After a step: low-bit weights that are made within one would have half of the old weights.
        optimizer.register_step_post_hook(lambda *_: self.weights_changed())
        self.will_be_told()

    def will_be_told(self) -> None:
        """Promise to call [`weights_changed`] after every optimizer step, as a trainer's callback does."""
        if not self._is_told:
            self._listen_to_optimizers()
        self._is_told = True
        self._look_for_shards()

    def _listen_to_optimizers(self) -> None:
        """
        Count the steps of all optimizers of torch.

        After its run a trainer tells nothing, and a script may go on with its model in a loop of its own.
        """
        reference = weakref.ref(self)

        def count(*_: Any) -> None:
            store = reference()
            if store is not None:
                store._changes += 1

        handle = register_optimizer_step_post_hook(count)
        weakref.finalize(self, handle.remove)

    def weights_changed(self) -> None:
        """
        Say that the optimizer made a step, or that something else may have written to the weights that it trains.
        Weights that need no gradient are still up to date.
        """
        self._changes += 1
        self._look_for_shards()

    def untrained_may_have_changed(self) -> None:
        """Say that somebody may write to master weights that nobody trains. The next forward looks at them."""
        self._look_is_due = True

    def refresh_untrained(self) -> None:
        """
        Forget all low-bit weights if master weights that nobody trains changed since the last call.

        A write through `param.data` leaves no trace, so samples are compared. Shards are not looked at.
        """
        if self._sharded:
            return

        layers = [layer for _, layer in self.layers()]
        if self._last_look.saw_other_untrained(layers):
            self.forget()

    def refresh_trained(self) -> Seen:
        """
        Make low-bit weights again if the master weights that are trained changed since the last call, by their
        samples. Shards are not looked at: those of them are always made again.

        Returns:
            What changed since the last call.
        """
        if self._sharded:
            self.weights_changed()
            return Seen.STEP

        layers = [layer for _, layer in self.layers()]
        seen = self._last_look.at_trained(layers, self._changes)
        if seen is not Seen.NOTHING:
            self.weights_changed()
        self._last_look.count(self._changes)
        return seen

    def use_once(self) -> None:
        """Make low-bit weights again when asked, and let the next [`refresh_trained`] call that no change."""
        self.weights_changed()
        self._last_look.count(self._changes)

    def forget(self) -> None:
        """
        Say that weights were loaded, sharded or written: free all low-bit weights, and make them again when asked.
        """
        self._kept.clear()
        self._look_for_shards()

    # One weight ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def weight_of(self, layer: LowBitLayer, name: str) -> LowBitWeight:
        """
        The low-bit weight that the forward of a layer multiplies by.

        Args:
            layer: A low-bit layer of the model.
            name: One of its low-bit weights.

        Raises:
            ValueError: if a master weight holds NaN or infinity.
        """
        if layer.frozen_weight is not None:
            return layer.frozen_weight
        if self._look_is_due:
            self._look_is_due = False
            self.refresh_untrained()

        # Where FSDP2 gathers quantized values, it has them during a forward, and only rows before and after it.
        parameters = layer.sources(name)
        parameter = parameters[0]
        if isinstance(parameter, GatheredWeight):
            return parameter.low_bit
        if is_master_shard(parameter):
            return quantize_shards(parameter, layer.scheme, self.rows_of(layer, name))

        # The master weight is here: whole, or a shard that is gathered to be quantized.
        state = self._state_of(layer, name, parameters)
        return self._kept.get(layer, name, state, lambda: self._quantize(layer, name, parameters))

    @torch.no_grad()
    def rows_of(self, layer: LowBitLayer, parameter: str) -> LowBitWeight:
        """The low-bit rows of this process, of a parameter whose quantized values FSDP2 gathers."""
        weight: Any = getattr(layer, parameter)
        shard = weight.to_local()
        # A write to a shard raises one of the two versions.
        versions = (shard.data_ptr(), shard._version, weight._version)
        state = State(self._changes_of([weight]), versions)
        return self._kept.get(layer, parameter, state, lambda: quantize_rows(weight, layer.scheme))

    def kept(self) -> dict[str, LowBitWeight]:
        """The low-bit weights that the store keeps now, by `layer.weight`; under FSDP2 the rows of this process."""
        weights = {}
        for layer_name, layer in self.layers():
            for name, weight in self._kept.of_layer(layer).items():
                weights[f"{layer_name}.{name}"] = weight
        return weights

    # All weights -----------------------------------------------------------------------------------------------------

    def tensors(self, gather: Gather = nullcontext) -> Iterator[tuple[str, Tensor]]:
        """
        [`iter_low_bit_weights`] of the store's model, for a loop of one's own.

        Args:
            gather: Makes parameters whole, under ZeRO-3. Collective there and under FSDP2: every process must iterate.

        Yields:
            Checkpoint names and tensors, see [`~qarl_trl.quant.stream.checkpoint_stream`]. A forward after it uses the
            same tensors.
        """
        yield from iter_low_bit_weights(self.model, gather)

    @torch.no_grad()
    def fresh_weight_of(self, layer: LowBitLayer, name: str) -> LowBitWeight:
        """
        Like `weight_of`, but always made again, from the master weights as they are: a write through `param.data`
        leaves no trace.
        """
        frozen = layer.frozen_weight
        if frozen is not None:
            return frozen

        # Also what else is made from these master weights: LoRA's base, which the reference model multiplies by.
        sources = set(layer.source_names(name))
        kept = self._kept.of_layer(layer)
        self._kept.drop(layer, [other for other in kept if sources & set(layer.source_names(other))])
        del kept  # frees the old values before new ones are made
        return self.weight_of(layer, name)

    # Sharding --------------------------------------------------------------------------------------------------------

    def prepare_gathers(self, ranks: int, device: torch.device) -> None:
        """
        Make FSDP2 gather quantized values instead of weights, where it can. Call it before FSDP2 shards the model.

        Args:
            ranks: Number of processes that will share a copy of the weights.
            device: Where the learner's forward will run.
        """
        layers = [layer for _, layer in self.layers()]
        make_master_shards(layers, ranks, device)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _look_for_shards(self) -> None:
        model = self._model_if_any()
        self._sharded = model is not None and _is_sharded(model)

    def _state_of(self, layer: LowBitLayer, name: str, parameters: list[Any]) -> State:
        """The state of the master weights that a low-bit weight would be made from now."""
        # A layer that shares its global scale changes with the weights of the others.
        sources = [*parameters, *(other.weight for other in layer.merged_with)]
        changes = self._changes_of(sources)
        others = layer.depends_on(name)
        if self._sharded or any(map(_is_shard, parameters)):
            # For shards address and version mean nothing: FSDP frees a parameter and gathers it again with the same
            # version, and ZeRO-3 puts it at another address in each forward.
            return State(changes, others)

        if changes == NOT_TRAINED and not self._is_told:
            # Nobody says when somebody writes through `param.data`, as an average of weights (EMA) in a copied model.
            others = (*others, *(_numbers_of(param) for param in sources))
        return State(changes, others, tuple(identity(param) for param in parameters))

    def _changes_of(self, parameters: list[Any]) -> int:
        """How often one of these parameters may have changed."""
        if not any(param.requires_grad for param in parameters):
            return NOT_TRAINED
        # Without a promise a trained weight counts as changed each time.
        return self._changes if self._is_told else UNKNOWN

    def _quantize(self, layer: LowBitLayer, name: str, parameters: list[Any]) -> LowBitWeight:
        """Quantize a weight of a layer from its master weights."""
        matrix = layer.to_quantize(name, *parameters)
        if isinstance(matrix, DTensor):
            return quantize_shards(matrix, layer.scheme)
        return quantize_weight(matrix.flatten(0, -2), layer.scheme, _shared_largest(layer))

    def __deepcopy__(self, memo: dict[int, Any]) -> LowBitStore:
        # A copied model gets its own low-bit weights. `memo` has its copy, because copying a model comes before
        # copying its layers.
        copied = LowBitStore()
        model = self._model_if_any()
        if id(model) in memo:
            copied.attach(memo[id(model)])
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return LowBitStore, ()  # low-bit weights are made again


def _numbers_of(parameter: Tensor) -> tuple[float, ...]:
    """A sample of a parameter's numbers; of one without memory none."""
    return () if parameter.is_meta else tuple(sample(parameter).tolist())


def low_bit_store(model: nn.Module) -> LowBitStore:
    """The store of a quantized model. `ValueError` if the model has no low-bit layer."""
    store = find_store(model)
    if store is None:
        raise ValueError("The model has no quantized layer. Call apply_quantization(model, scheme) first.")
    return store


def find_store(model: nn.Module) -> LowBitStore | None:
    """The store of a quantized model, `None` for another model."""
    for _, layer in quantized_modules(model):
        if isinstance(layer.store, LowBitStore):
            return layer.store
    return None


def iter_low_bit_weights(
    model: nn.Module, gather: Gather = nullcontext, stacked: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """
    Yield every tensor of the checkpoint of `model`, as the master weights are now: low-bit if it is quantized, else
    bfloat16. Weight syncs and files have these.

    Args:
        model: A model, or a `PeftModel`, whose active adapter is merged.
        gather: Makes parameters whole, under ZeRO-3.
        stacked: Yield one tensor for all experts of a projection, as [`~qarl_trl.quant.stream.checkpoint_stream`]
            names them. Weight syncs have these.
    """
    store = find_store(model)
    weight_of = None if store is None else store.fresh_weight_of
    yield from checkpoint_stream(model, weight_of, gather, stacked)


def _is_sharded(model: nn.Module) -> bool:
    """
    Whether FSDP2 or ZeRO-3 shards the model: in its forwards a layer sees a parameter that it does not have
    afterwards.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return True
    return any(map(_is_shard, model.parameters()))


def _is_shard(param: Tensor) -> bool:
    return is_partitioned(param) or isinstance(param, DTensor)


def _shared_largest(layer: Any) -> Tensor | None:
    """
    The largest magnitude of all weights that share a global scale with this layer's; `None` if there are no others.
    """
    if not layer.merged_with:
        return None
    weights = [layer.weight, *(other.weight for other in layer.merged_with)]
    return torch.stack([largest_magnitude(weight, layer.scheme) for weight in weights]).max()
