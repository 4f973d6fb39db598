"""Every private part of vLLM that starts and weight syncs use, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..._compat import installed_version
from .attention_scales import reset_cache_scales
from .loaded_elements import LoadedElements, tied_names
from .reload_biases import biases_of_checkpoint
from .reload_cpu import complete_reload
from .reload_experts import keep_expert_kernels


def engine_model(llm: Any) -> torch.nn.Module:
    """The model inside a colocated `vllm.LLM`."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()


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
    (`complete_reload`), kernels of experts (`keep_expert_kernels`) and scales of attention
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
        complete_reload(model),
        biases_of_checkpoint(),
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
