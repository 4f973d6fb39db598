"""Every private seam of vLLM that a weight sync and a start go through, each with its reason."""

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


# Parameters of attention layers for checkpoints with a quantized KV cache, which a sync never has.
_CACHE_SCALES = re.compile(r"(^|\.)(q|k|v|prob)_(scale|zero_point)$")
# vLLM's switch for scales of float8 blocks that are powers of two, on wherever DeepGEMM is installed (`vllm.utils.deep_gemm`).
BLOCK_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


def keep_block_scales() -> None:
    """Have the engine multiply by the block scales that were synced; by default a Hopper engine rounds them up first."""
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
    Start engines of random weights with scales of 1 for KV cache, queries and attention probabilities.

    vLLM's loader of random weights (`load_format="dummy"`) draws these scales as well, a reload of weights leaves attention
    layers alone, and FlashInfer's kernels and CUDA graphs keep the numbers that they see in the first forward. So the scales
    have to be right before that: vLLM's loader is replaced, once, for the whole process.
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
    """Set the scales of KV cache, queries and attention probabilities to 1 in every attention layer, copies on the host included."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    for layer in model.modules():
        if not hasattr(layer, "_k_scale"):
            continue
        # What a checkpoint would fill, from which vLLM makes the scales as soon as weights are loaded; gone afterwards.
        for name, parameter in layer.named_parameters(recurse=False):
            if _CACHE_SCALES.search(name):
                parameter.fill_(1)
        set_default_quant_scales(layer)


@contextmanager
def same_draws(group: Any) -> Iterator[None]:
    """
    Let numpy's global generator draw the same numbers in all processes of `group`, a torch group, and put it back afterwards.

    vLLM's model runner V2, which GPUs use, takes the seeds of requests from it (`SamplingStates.add_request`). The ranks of one
    engine sample each for itself: after a reward function that drew on one of them their tokens would differ.
    """
    seed = [int(np.random.randint(2**32, dtype=np.uint64))]  # drawn by all, so that the next seed is another one
    torch.distributed.broadcast_object_list(seed, group=group, group_src=0)
    state = np.random.get_state()
    np.random.seed(seed[0])
    try:
        yield
    finally:
        np.random.set_state(state)


def reload_engine(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """
    Stream tensors of a checkpoint into a colocated engine; one call must carry all of them.

    vLLM restores each layer's checkpoint layout, loads, processes and copies into the storage its kernels already hold, so
    CUDA graphs stay valid.
    """
    worker = llm.llm_engine.model_executor.driver_worker
    reload_model(engine_model(llm), partial(worker.reload_weights, weights_iterator=iter(weights)))


def reload_model(model: torch.nn.Module, reload: Callable[[], None]) -> None:
    """
    Run vLLM's `reload` of an engine's model, and check that every parameter came whole.

    Around it this mends what vLLM 0.31's reload leaves out: loaders and storage of biases, layouts of CPU kernels
    (`_vllm_cpu.complete_reload`) and scales of attention layers.

    Raises:
        RuntimeError: when the engine did not get every element it has a place for, which it only logs, or not even that: what a
            merged layer (q, k, v; gate, up; all experts) lacks it takes for padding, and computes with what was in the memory.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    tied, biases, count = _tied_names(model), _prepare_biases(model), layerwise.get_numel_loaded
    expected: dict[str, tuple[Tensor, int]] = {}
    came: Counter[int] = Counter()

    def counted(loader: Callable[..., Any], call: inspect.BoundArguments) -> tuple[int, Any]:
        # The first call comes after vLLM has put the parameters of the checkpoint into the place of the kernels'.
        if not expected:
            expected.update(_places(model))
        number, result = count(loader, call)
        came[id(call.arguments["param"])] += max(number, 1)  # scalars are filled, and vLLM counts what is copied
        return number, result

    with patch.object(layerwise, "get_numel_loaded", counted), _vllm_cpu.complete_reload(model):
        reload()
    _keep_biases(model, biases)
    reset_cache_scales(model)
    if not expected:
        raise RuntimeError(f"vLLM {installed_version('vllm')} reloaded without its loaders. Use a tested version.")
    whole = {name for name, (parameter, number) in expected.items() if came[id(parameter)] >= number}
    # A tied parameter is one storage again after the reload: loaded under one name it is loaded under all.
    missing = sorted(name for name in expected.keys() - whole if not tied.get(name, set()) & whole)
    if missing:
        raise RuntimeError(
            f"The engine kept old values for {len(missing)} tensors, first {missing[:3]}: the synced stream does "
            "not have them. The engine would answer from a mix of old and new weights."
        )


def _places(model: torch.nn.Module) -> dict[str, tuple[Tensor, int]]:
    """By name, each parameter that vLLM's loaders fill, and how many elements a checkpoint has for it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    places = {}
    for prefix, layer in model.named_modules():
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if _CACHE_SCALES.search(name) or name.rpartition(".")[2] in SKIP_LOAD_TENSORS:
                continue
            # The last rows of a vocabulary are padding, which never comes; of the shapes of experts vLLM counts the calls.
            uncounted = isinstance(layer, VocabParallelEmbedding) or name.endswith("_weight_shape")
            places[name] = parameter, 1 if uncounted else get_tensor_load_numel(parameter)
    return places


def _prepare_biases(model: torch.nn.Module) -> dict[str, Tensor]:
    """
    Let every bias of the engine be loaded, and return the storage of each by name, for [`_keep_biases`].

    Kernels that permute or cast a bias (Marlin for NVFP4 and FP8, W4A8 on a CPU) put a plain parameter in its place, without the loader
    that vLLM's stream of a merged layer calls, or without the dimension along which it cuts; the layer itself still has the loader.
    """
    for layer in model.modules():
        bias: Any = getattr(layer, "bias", None)
        plain = isinstance(bias, torch.nn.Parameter) and not hasattr(bias, "output_dim")
        if plain and hasattr(layer, "weight_loader"):
            bias.output_dim, bias.weight_loader = 0, layer.weight_loader
    return {name: p.data for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"}


def _keep_biases(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    """
    Put every bias back into the storage that CUDA graphs were captured with.

    vLLM's reload copies what a kernel has prepared into the old storage, but leaves biases out of that (`SKIP_TENSORS`), and
    Marlin's layers permute theirs into a new tensor: a graph would go on reading the loaded one, not permuted.
    """
    for name, old in before.items():
        bias = model.get_parameter(name)
        if bias.data_ptr() != old.data_ptr():
            old.copy_(bias.data)
            bias.data = old


def _tied_names(model: torch.nn.Module) -> dict[str, set[str]]:
    """For each parameter that the engine holds under several names, all of them."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def reset_prefix_cache(llm: Any) -> None:
    """Forget cached keys, values and features of images, which belong to the old weights; an engine that refuses raises."""
    llm.llm_engine.reset_encoder_cache()
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running during a weight sync.")
