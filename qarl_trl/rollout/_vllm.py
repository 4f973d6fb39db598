"""Every private part of vLLM that starts and weight syncs use, each with its reason."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from trl.generation import vllm_generation

from .._compat import installed_version
from . import _vllm_cpu


# Parameters of attention layers for checkpoints with a quantized KV cache; our syncs never have them.
_CACHE_SCALES = re.compile(r"(^|\.)(q|k|v|prob)_(scale|zero_point)$")
# vLLM's switch that rounds scales of float8 blocks to powers of two; on if DeepGEMM is installed (`vllm.utils.deep_gemm`).
BLOCK_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


def keep_block_scales() -> None:
    """Make the engine use the synced block scales; by default a Hopper engine rounds them up first."""
    os.environ[BLOCK_SCALES] = "0"


@contextmanager
def llm_arguments(built: Callable[[Any], None] | None = None, /, **extra: Any) -> Iterator[None]:
    """Add keyword arguments to the `vllm.LLM(...)` that TRL builds, and call `built` with the engine before TRL uses it."""
    original = vllm_generation.LLM

    def build(**kwargs: Any) -> Any:
        llm = original(**kwargs | extra)
        if built is not None:
            built(llm)
        return llm

    with patch.object(vllm_generation, "LLM", build):
        yield


def engine_model(llm: Any) -> torch.nn.Module:
    """The model inside a colocated `vllm.LLM`."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()


def keep_cache_scales() -> None:
    """
    Start engines with random weights, but with scales of 1 for KV cache, queries and attention probabilities.

    vLLM's loader of random weights (`load_format="dummy"`) also draws these scales. A reload does not touch attention layers, and
    FlashInfer's kernels and CUDA graphs keep the numbers of the first forward. So the scales must be right before that: this
    replaces vLLM's loader, once, for the whole process.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_with_scales_of_one(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        load(self, model, model_config)
        reset_cache_scales(model)

    DummyModelLoader.load_weights = load_with_scales_of_one


@torch.no_grad()
def reset_cache_scales(model: torch.nn.Module) -> None:
    """Set the scales of KV cache, queries and attention probabilities to 1 in every attention layer, also their copies on the host."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    for layer in model.modules():
        if not hasattr(layer, "_k_scale"):
            continue
        # A checkpoint would fill these; vLLM makes the scales from them after it loads weights, and removes them.
        for name, parameter in layer.named_parameters(recurse=False):
            if _CACHE_SCALES.search(name):
                parameter.fill_(1)
        set_default_quant_scales(layer)


@contextmanager
def same_draws(group: Any) -> Iterator[None]:
    """
    Make numpy's global generator draw the same numbers in all processes of `group` (a torch group); restore it afterwards.

    vLLM's model runner V2, which GPUs use, takes the seeds of requests from it (`SamplingStates.add_request`). Each rank of an
    engine samples for itself: if a reward function drew a number in one of them, their tokens would differ.
    """
    seed = [int(np.random.randint(2**32, dtype=np.uint64))]  # all draw, so that the next seed differs
    torch.distributed.broadcast_object_list(seed, group=group, group_src=0)
    state = np.random.get_state()
    np.random.seed(seed[0])
    try:
        yield
    finally:
        np.random.set_state(state)


def reload_engine(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """
    Stream tensors of a checkpoint into a colocated engine; one call must have all of them.

    vLLM restores each layer's checkpoint layout, loads, processes, and copies into the memory that its kernels already use, so
    CUDA graphs stay valid.
    """
    worker = llm.llm_engine.model_executor.driver_worker
    reload_model(engine_model(llm), partial(worker.reload_weights, weights_iterator=iter(weights)))


def reload_model(model: torch.nn.Module, reload: Callable[[], None]) -> None:
    """
    Run vLLM's `reload` of an engine's model, and check that every parameter was loaded completely.

    It also handles what vLLM 0.31's reload leaves out: loaders and storage of biases, layouts of CPU kernels
    (`_vllm_cpu.complete_reload`) and scales of attention layers.

    Raises:
        RuntimeError: if the stream lacks elements of a parameter. vLLM only logs that, or takes the missing part of a merged layer
            (q, k, v; gate, up; all experts) for padding, and computes with old memory.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    tied, biases, count = _tied_names(model), _prepare_biases(model), layerwise.get_numel_loaded
    expected: dict[str, tuple[Tensor, int]] = {}
    came: Counter[int] = Counter()

    def counted(loader: Callable[..., Any], call: inspect.BoundArguments) -> tuple[int, Any]:
        # At the first call vLLM has already replaced the kernels' parameters by those of the checkpoint.
        if not expected:
            expected.update(_places(model))
        number, result = count(loader, call)
        came[id(call.arguments["param"])] += max(number, 1)  # vLLM counts copied elements, and it fills scalars
        return number, result

    with patch.object(layerwise, "get_numel_loaded", counted), _vllm_cpu.complete_reload(model):
        reload()
    _keep_biases(model, biases)
    reset_cache_scales(model)
    if not expected:
        raise RuntimeError(f"vLLM {installed_version('vllm')} reloaded without its loaders. Use a tested version.")
    whole = {name for name, (parameter, number) in expected.items() if came[id(parameter)] >= number}
    # After the reload a tied parameter is one storage again: loaded under one name, it is loaded under all.
    missing = sorted(name for name in expected.keys() - whole if not tied.get(name, set()) & whole)
    if missing:
        raise RuntimeError(
            f"The engine kept old values for {len(missing)} tensors, first {missing[:3]}: the synced stream does "
            "not have them. The engine would answer from a mix of old and new weights."
        )


def _places(model: torch.nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Each parameter that vLLM's loaders fill, by name, and its number of elements in a checkpoint."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    places = {}
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if _CACHE_SCALES.search(name) or name.rpartition(".")[2] in SKIP_LOAD_TENSORS:
                continue
            # The last rows of a vocabulary are padding, which no checkpoint has; for the shapes of experts vLLM counts calls.
            uncounted = isinstance(layer, VocabParallelEmbedding) or name.endswith("_weight_shape")
            places[name] = parameter, 1 if uncounted else get_tensor_load_numel(parameter)
    return places


def _prepare_biases(model: torch.nn.Module) -> dict[str, Tensor]:
    """
    Make every bias of the engine loadable, and return the storage of each by name, for [`_keep_biases`].

    Kernels that permute or cast a bias (Marlin for NVFP4 and FP8, W4A8 on a CPU) replace it by an ordinary parameter. That lacks the
    loader that vLLM calls for merged layers, or the dimension along which it splits; the layer itself still has the loader.
    """
    for layer in model.modules():
        bias: Any = getattr(layer, "bias", None)
        plain = isinstance(bias, torch.nn.Parameter) and not hasattr(bias, "output_dim")
        if plain and hasattr(layer, "weight_loader"):
            bias.output_dim, bias.weight_loader = 0, layer.weight_loader
    return {name: p.data for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"}


def _keep_biases(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    """
    Copy every bias back into the storage that CUDA graphs were captured with.

    vLLM's reload copies a kernel's prepared tensors into the old storage, except biases (`SKIP_TENSORS`). Marlin's layers permute
    theirs into a new tensor: a graph would continue to read the old storage, where the bias is not permuted.
    """
    for name, old in before.items():
        bias = model.get_parameter(name)
        if bias.data_ptr() != old.data_ptr():
            old.copy_(bias.data)
            bias.data = old


def _tied_names(model: torch.nn.Module) -> dict[str, set[str]]:
    """All names of each parameter that the engine holds under several names."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def reset_prefix_cache(llm: Any) -> None:
    """Clear cached keys, values and image features of the old weights; `RuntimeError` if the engine refuses."""
    llm.llm_engine.reset_encoder_cache()
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running during a weight sync.")
