"""Every private part of vLLM that starts and weight syncs use, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from trl.generation import vllm_generation

from .._compat.versions import installed_version
from . import _vllm_cpu
from ._vllm_experts import keep_expert_kernels
from ._vllm_loaded import CACHE_SCALES as _CACHE_SCALES
from ._vllm_loaded import LoadedElements, tied_names


# vLLM's switch that rounds scales of float8 blocks to powers of two. It is on if DeepGEMM is installed
# (`vllm.utils.deep_gemm`).
BLOCK_SCALES = "VLLM_USE_DEEP_GEMM_E8M0"


def keep_block_scales() -> None:
    """Make the engine use the synced block scales; by default a Hopper engine rounds them up first."""
    os.environ[BLOCK_SCALES] = "0"


def choose_master_port() -> None:
    """Let the engine's process group meet at a free port. By default two runs would race for TRL's four ports."""
    from vllm.utils.network_utils import get_open_port

    os.environ.setdefault("MASTER_PORT", str(get_open_port()))


@contextmanager
def llm_arguments(built: Callable[[Any], None] | None = None, /, **extra: Any) -> Iterator[None]:
    """
    Add keyword arguments to the `vllm.LLM(...)` that TRL builds inside this context.

    Args:
        built: Is called with the engine before TRL uses it.
        extra: The arguments. They replace TRL's of the same names.
    """
    # TRL builds the engine from arguments of its own, and has no place for others.
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

    vLLM's loader of random weights (`load_format="dummy"`) also draws these scales. A reload does not touch attention
    layers, and FlashInfer's kernels and CUDA graphs keep the numbers of the first forward. So the scales must be right
    before that: this replaces vLLM's loader, once, for the whole process.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights
    if hasattr(load, "__wrapped__"):  # replaced already
        return

    @wraps(load)
    def load_with_scales_of_one(self: Any, model: torch.nn.Module, model_config: Any) -> None:
        load(self, model, model_config)
        reset_cache_scales(model)

    DummyModelLoader.load_weights = load_with_scales_of_one


@torch.no_grad()
def reset_cache_scales(model: torch.nn.Module) -> None:
    """
    Set the scales of KV cache, queries and attention probabilities to 1, also their copies on the host.

    Args:
        model: The engine's model. Every attention layer in it has such scales.
    """
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
    Make numpy's global generator draw the same numbers in all processes of a group; restore it afterwards.

    vLLM's model runner V2, which GPUs use, takes the seeds of requests from it (`SamplingStates.add_request`). Each
    rank of an engine samples for itself: if a reward function drew a number in one of them, their tokens would differ.

    Args:
        group: A torch process group, all of whose processes enter this context.
    """
    # Every process draws, although only the first one's number counts: so the next seed differs from this one.
    seed = [int(np.random.randint(2**32, dtype=np.uint64))]
    torch.distributed.broadcast_object_list(seed, group=group, group_src=0)

    state = np.random.get_state()
    np.random.seed(seed[0])
    try:
        yield
    finally:
        np.random.set_state(state)


def reload_engine(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """
    Stream tensors of a checkpoint into a colocated engine.

    vLLM restores each layer's checkpoint layout, loads, processes, and copies into the memory that its kernels already
    use, so CUDA graphs stay valid.

    Args:
        llm: A colocated `vllm.LLM`.
        weights: Names and tensors of a whole checkpoint: one call must have all of them.

    Raises:
        RuntimeError: as [`reload_model`] does.
    """
    # Of this process: each rank of an engine in several processes reloads its own model.
    worker = llm.llm_engine.model_executor.driver_worker
    has_graphs = not llm.llm_engine.vllm_config.model_config.enforce_eager
    reload_model(engine_model(llm), partial(worker.reload_weights, weights_iterator=iter(weights)), has_graphs)


def reload_model(model: torch.nn.Module, reload: Callable[[], None], has_graphs: bool = True) -> None:
    """
    Run vLLM's reload of an engine's model, and check that every parameter was loaded completely.

    It also handles what vLLM 0.31's reload leaves out: the form of biases, layouts of CPU kernels
    (`_vllm_cpu.complete_reload`), kernels of experts (`_vllm_experts.keep_expert_kernels`) and scales of attention
    layers.

    Args:
        model: The engine's model.
        reload: Calls vLLM's reload of this model with a stream of weights.
        has_graphs: Whether the engine may have captured graphs, which go on reading the tensors of before. An eager
            engine takes the new kernels of experts as vLLM makes them.

    Raises:
        RuntimeError: if the stream lacks elements of a parameter. vLLM only logs that, or takes the missing part of a
            merged layer (q, k, v; gate, up; all experts) for padding, and computes with old memory.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    # Before the reload, which replaces a tied parameter by one for each of its names.
    tied = tied_names(model)
    loaded = LoadedElements(model, layerwise.get_numel_loaded)

    with (
        patch.object(layerwise, "get_numel_loaded", loaded.load),
        _vllm_cpu.complete_reload(model),
        _biases_of_checkpoint(),
        keep_expert_kernels(model) if has_graphs else nullcontext(),
    ):
        reload()

    reset_cache_scales(model)

    # Without a single call of vLLM's counter nothing could be missing, and nothing would be checked.
    if not loaded.places:
        raise RuntimeError(f"vLLM {installed_version('vllm')} reloaded without its loaders. Use a tested version.")

    missing = loaded.missing(tied)
    if missing:
        raise RuntimeError(
            f"The engine kept old values for {len(missing)} tensors, first {missing[:3]}: "
            "the synced stream does not have them. The engine would answer from a mix of old and new weights."
        )


@contextmanager
def _biases_of_checkpoint() -> Iterator[None]:
    """
    Let a reload fill biases in the form of a checkpoint, and leave what kernels make of them in their old memory.

    A reload gives the other parameters their first form before it loads, but not biases (`SKIP_TENSORS`). Marlin pads
    and permutes a bias, W4A8 on a CPU casts it: the loader would write over that form, or find a bias that is longer
    than the checkpoint's. Some kernels put an ordinary parameter in its place, without loader and dimension to split;
    others a new tensor into the old parameter, which a CUDA graph would not read.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    restore = layerwise.restore_layer_on_meta

    def restore_with_bias(layer: Any, info: Any) -> None:
        restore(layer, info)

        # vLLM has kept this one, and will copy into it what the kernel makes of the loaded one.
        bias: Any = getattr(layer, "bias", None)
        if isinstance(bias, torch.nn.Parameter) and hasattr(layer, "weight_loader"):
            layer.bias = _empty_bias(layer, bias)

    with patch.object(layerwise, "restore_layer_on_meta", restore_with_bias):
        yield


def _empty_bias(layer: Any, bias: Any) -> torch.nn.Parameter:
    """A bias as vLLM creates it for a linear layer: not padded, with the loader and the dimension of its split."""
    size = getattr(layer, "output_size_per_partition", bias.numel())

    empty: Any = torch.nn.Parameter(bias.data.new_empty(size), requires_grad=False)
    empty.output_dim = getattr(bias, "output_dim", 0)
    empty.weight_loader = getattr(bias, "weight_loader", layer.weight_loader)
    return empty


def reset_prefix_cache(llm: Any) -> None:
    """
    Clear cached keys, values and image features of the old weights.

    Args:
        llm: A colocated `vllm.LLM`.

    Raises:
        RuntimeError: if the engine refuses.
    """
    llm.llm_engine.reset_encoder_cache()

    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running during a weight sync.")
