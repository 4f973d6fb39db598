"""The weight sync of a colocated engine or of a server's worker: vLLM's own reload, made complete.

`GPUModelRunner.reload_weights` (`v1/worker/gpu_model_runner.py`) takes a stream of checkpoint tensors. Layer by layer
(`model_loader/reload/layerwise.py`) it

1. keeps the tensors that the kernels use, and gives the layer the empty parameters of a checkpoint again;
2. lets the model's loaders fill them, and counts the copied elements;
3. when a layer has all of its elements, makes the kernels' form of them, as after a first load;
4. copies that into the tensors of step 1, whose addresses CUDA graphs keep.

It does so for the parameters of most layers. What it leaves out:

- biases, which keep the kernels' form in step 1: `reload_biases`;
- what a kernel holds outside of a layer's parameters: `reload_experts` on GPUs, `reload_cpu` on CPUs;
- scales of attention layers, which no checkpoint of ours has: `attention_scales`;
- an error for tensors that the stream lacks: `loaded_elements`.

And it takes Python's time for each expert: `reload_stacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ..._compat.versions import installed_version
from .attention_scales import reset_cache_scales
from .loaded_elements import LoadedElements, tied_names
from .reload_biases import biases_of_checkpoint
from .reload_cpu import refresh_cpu_kernels
from .reload_experts import keep_expert_kernels
from .reload_stacks import load_stacks


def reload_engine(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """
    Stream tensors of a checkpoint into a colocated engine.

    Args:
        llm: A colocated `vllm.LLM`.
        weights: Names and tensors of a whole checkpoint: one call must have all of them.

    Raises:
        RuntimeError: as [`reload_model`] does.
    """
    # Of this process: each rank of an engine in several processes reloads its own model.
    worker = llm.llm_engine.model_executor.driver_worker
    has_graphs = not llm.llm_engine.vllm_config.model_config.enforce_eager
    model = engine_model(llm)
    reload_model(model, weights, lambda stream: worker.reload_weights(weights_iterator=stream), has_graphs)


def reload_model(
    model: torch.nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    reload: Callable[[Iterator[tuple[str, Tensor]]], None],
    has_graphs: bool = True,
) -> None:
    """
    Run vLLM's reload of an engine's model, and check that every parameter was loaded completely.

    Args:
        model: The engine's model.
        weights: Names and tensors of a whole checkpoint.
        reload: Calls vLLM's reload of this model with the stream of tensors that it gets.
        has_graphs: Whether the engine may have captured graphs, which go on reading the tensors of before. An eager
            engine takes the new kernels of experts as vLLM makes them.

    Raises:
        RuntimeError: if the stream lacks elements of a parameter. vLLM only logs that, or takes the missing part of a
            merged layer (q, k, v; gate, up; all experts) for padding, and computes with old memory. Also if the
            engine has no place for a bias, without which it would compute.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    # Before the reload, which replaces a tied parameter by one for each of its names.
    tied = tied_names(model)
    loaded = LoadedElements(model, layerwise.get_numel_loaded)

    with (
        patch.object(layerwise, "get_numel_loaded", loaded.load),
        refresh_cpu_kernels(model),
        biases_of_checkpoint(),
        keep_expert_kernels(model) if has_graphs else nullcontext(),
    ):
        reload(load_stacks(model, loaded.watched(weights)))

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

    left_out = loaded.left_out()
    if left_out:
        raise RuntimeError(
            f"vLLM {installed_version('vllm')} has no place for {len(left_out)} biases of this model, first "
            f"{left_out[0]}: it skips them without a word, and the engine would answer without them. Train a model "
            "without these biases, or sample by transformers (use_vllm: false)."
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


def engine_model(llm: Any) -> torch.nn.Module:
    """The model inside a colocated `vllm.LLM`."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
