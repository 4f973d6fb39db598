"""Which parameters of an engine a reload has filled, and which tensors it has left out.

For a stream that lacks tensors vLLM only logs a warning, or takes the missing part of a merged layer (q, k, v; gate,
up; all experts) for padding, and computes with old memory. It counts the elements that its loaders copy
(`get_numel_loaded` in `model_loader/reload/meta.py`), but for each layer, and then forgets the number. So that
function is wrapped here, and the elements of each parameter are counted.

Biases are the other way round: a model of vLLM may have fewer than that of transformers (Qwen3's `o_proj`), and vLLM
skips a tensor with such a name without a word (`AutoWeightsLoader` in `models/utils.py`), because checkpoints of GPTQ
have empty ones.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention_scales import CACHE_SCALES


# vLLM 0.26 also makes parameters of experts for checkpoints whose columns have another order than the groups; no
# scheme of this package has one, and then vLLM empties them.
_ORDER_OF_COLUMNS = re.compile(r"_g_idx(_sort_indices)?$")


@dataclass(frozen=True)
class _Place:
    """A parameter of the engine that vLLM's loaders fill, and its number of elements in a checkpoint."""

    parameter: Tensor  # also keeps its `id`, by which loaded elements are counted, from being used again
    elements: int


class LoadedElements:
    """
    Counts the elements that vLLM's loaders copy into each parameter during a reload.

    Args:
        model: The engine's model.
        load: vLLM's function that runs a loader, and returns the number of copied elements and the loader's result.
    """

    def __init__(self, model: torch.nn.Module, load: Callable[..., tuple[int, Any]]) -> None:
        self.places: dict[str, _Place] = {}  # by name; empty until vLLM loads something
        self._model = model
        self._load = load
        self._elements: Counter[int] = Counter()
        self._calls = 0
        # Of the stream: layers of which vLLM loaded a tensor, and the layers of biases that it did not load.
        self._loaded_layers: set[str] = set()
        self._skipped_biases: dict[str, str] = {}

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """A stream of tensors, while it is noted which of them vLLM loads."""
        for name, tensor in weights:
            calls_before = self._calls
            yield name, tensor

            # vLLM asks for the next tensor when it has loaded this one.
            layer, _, local_name = name.rpartition(".")
            if self._calls > calls_before:
                self._loaded_layers.add(layer)
            elif local_name == "bias" and tensor.any():
                self._skipped_biases[name] = layer

    def left_out(self) -> list[str]:
        """
        The names of the biases that reached no parameter, of layers whose other tensors did. An engine may leave whole
        layers out, such as a vision tower without images. Biases of 0, as before training, do no harm.
        """
        return [name for name, layer in self._skipped_biases.items() if layer in self._loaded_layers]

    def load(self, loader: Callable[..., Any], call: inspect.BoundArguments) -> tuple[int, Any]:
        """Stands for vLLM's `get_numel_loaded`: run a loader with the arguments `call`, and count."""
        # Not earlier: at the first call vLLM has replaced the kernels' parameters by those of the checkpoint.
        if not self.places:
            self.places = _places(self._model)

        elements, result = self._load(loader, call)
        self._calls += 1
        # vLLM counts copied elements. It fills scalars instead, so a scalar would count 0.
        self._elements[id(call.arguments["param"])] += max(elements, 1)
        return elements, result

    def missing(self, tied: dict[str, set[str]]) -> list[str]:
        """The names of the parameters that lack elements, sorted; `tied` comes from [`tied_names`]."""
        complete = set()
        for name, place in self.places.items():
            if self._elements[id(place.parameter)] >= place.elements:
                complete.add(name)

        missing = []
        for name in self.places:
            # After the reload a tied parameter is one storage again: loaded under one name, it is loaded under all.
            names = tied.get(name, {name})
            if complete.isdisjoint(names):
                missing.append(name)
        return sorted(missing)


def _places(model: torch.nn.Module) -> dict[str, _Place]:
    """Each parameter that vLLM's loaders fill, by name."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import meta, utils

    # vLLM 0.26 has neither: it skips the same tensors under another name, and declares no padding.
    never_loaded = getattr(meta, "SKIP_LOAD_TENSORS", meta.SKIP_TENSORS)
    elements_in_checkpoint = getattr(utils, "get_tensor_load_numel", torch.numel)

    places = {}
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            local_name = name.rpartition(".")[2]
            if CACHE_SCALES.search(name) or local_name in never_loaded or _ORDER_OF_COLUMNS.search(local_name):
                continue

            # The last rows of a vocabulary are padding, which no checkpoint has, and for the shapes of experts vLLM
            # counts calls. So nobody knows their number: one element must do.
            if isinstance(layer, VocabParallelEmbedding) or name.endswith("_weight_shape"):
                elements = 1
            else:
                elements = elements_in_checkpoint(parameter)
            places[name] = _Place(parameter, elements)
    return places


def tied_names(model: torch.nn.Module) -> dict[str, set[str]]:
    """For each name of a parameter that the engine holds under several names: all of its names."""
    names_of: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(param), set()).add(name)

    tied = {}
    for names in names_of.values():
        if len(names) > 1:
            tied.update(dict.fromkeys(names, names))
    return tied
