"""Every private seam of vLLM that a weight sync and a start go through, each with its reason."""

from __future__ import annotations

import os
import re
import socket
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


def rounds_block_scales() -> bool:
    """Whether the user asked the engine to round the scales of float8 blocks up to powers of two."""
    return os.environ.get(BLOCK_SCALES, "0") not in ("", "0")


def keep_block_scales() -> None:
    """Have the engine multiply by the block scales that were synced; by default a Hopper engine rounds them up first."""
    os.environ[BLOCK_SCALES] = "0"


@contextmanager
def llm_arguments(built: Callable[[Any], None] | None = None, /, **extra: Any) -> Iterator[None]:
    """
    Add keyword arguments to the `vllm.LLM(...)` that TRL builds, and to dictionaries that it passes itself.

    `built` is called with the engine before TRL does anything with it.
    """
    original = vllm_generation.LLM

    def build(**kwargs: Any) -> Any:
        merged = {k: {**kwargs[k], **v} if isinstance(v, dict) and kwargs.get(k) else v for k, v in extra.items()}
        llm = original(**kwargs | merged)
        if built is not None:
            built(llm)
        return llm

    with patch.object(vllm_generation, "LLM", build):
        yield


def choose_rendezvous_port(num_processes: int) -> None:
    """Give a single-process engine a port of its own: two runs race for TRL's four. A launcher's port is left alone."""
    if num_processes == 1 and "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


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
    Run vLLM's `reload` of an engine's model, which calls `model.load_weights`, and check that every tensor came.

    Around it this mends what vLLM 0.31's reload leaves out: loaders and storage of biases, layouts of CPU kernels
    (`_vllm_cpu.complete_reload`), merged layers of which only a part came, and scales of attention layers.

    Raises:
        RuntimeError: when the engine did not take every tensor it has a place for, which it only logs itself.
    """
    load_weights, tied = model.load_weights, _tied_names(model)
    expected: set[str] = set()
    loaded: set[str] = set()

    def checked(stream: Iterable[tuple[str, Tensor]]) -> set[str]:
        # The first call comes after the restore: the parameters are now those of the checkpoint, not of the kernels.
        if not expected:
            expected.update(_loader_name(n) for n, _ in model.named_parameters() if not _CACHE_SCALES.search(n))
        names = set(load_weights(stream))
        loaded.update(map(_loader_name, names))
        return names

    biases = _prepare_biases(model)
    with (
        patch.object(model, "load_weights", checked),
        _vllm_cpu.complete_reload(model),
        _merged_in_part(model) as in_part,
    ):
        reload()
    _keep_biases(model, biases)
    reset_cache_scales(model)
    if not expected:
        raise RuntimeError(
            f"vLLM {installed_version('vllm')} reloaded without calling the model's load_weights, so nothing is known "
            "about what it took. Use a tested version."
        )
    # A tied parameter is one storage again after the reload: loaded under one name it is loaded under all.
    missing = sorted(in_part + [name for name in expected - loaded if not tied.get(name, set()) & loaded])
    if missing:
        raise RuntimeError(
            f"The engine kept old values for {len(missing)} tensors, first {missing[:3]}: the synced stream does "
            "not have them. The engine would answer from a mix of old and new weights."
        )


def _prepare_biases(model: torch.nn.Module) -> dict[str, Tensor]:
    """
    Let every bias of the engine be loaded, and return the storage of each by name, for [`_keep_biases`].

    Kernels that permute or cast a bias (Marlin for NVFP4 and FP8, W4A8 on a CPU) put a plain parameter in its place, without the loader
    that vLLM's stream of a merged layer calls, or without the dimension along which it cuts; the layer itself still has the loader.
    """
    for layer in model.modules():
        bias = getattr(layer, "bias", None)
        if (
            isinstance(bias, torch.nn.Parameter)
            and hasattr(layer, "weight_loader")
            and not hasattr(bias, "output_dim")
        ):
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


@contextmanager
def _merged_in_part(model: torch.nn.Module) -> Iterator[list[str]]:
    """
    Collect the names of merged parameters (q, k, v; gate, up; all experts) of which only a part of the checkpoint tensors came.

    vLLM's own check knows names alone, and has seen the name of a merged parameter after its first part. When a reload ends, it
    takes such a layer for one with padding, whose last elements never come (`finalize_layerwise_processing`), and processes
    it with whatever was in the memory. But it keeps the arguments of every call of a loader until it processes the layer
    (`info.loaded_weights`), and these say which part each call filled.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    names, process, in_part = {id(m): name for name, m in model.named_modules()}, layerwise._layerwise_process, []

    def checked(layer: torch.nn.Module, info: Any) -> None:
        came: dict[str, set[Any]] = {}
        for name, bound in info.loaded_weights:
            came.setdefault(name, set()).update(_parts(bound.arguments))
        # A `weight_shape` comes once for each part, and vLLM takes the first alone.
        lacking = [name for name, parts in came.items() if "_shape" not in name and not _is_whole(layer, name, parts)]
        in_part.extend(f"{names[id(layer)]}.{name}" for name in lacking)
        process(layer, info)

    with patch.object(layerwise, "_layerwise_process", checked):
        yield in_part


def _parts(arguments: dict[str, Any]) -> list[Any]:
    """Which parts of a merged parameter a call of its loader fills; `None` for all."""
    part = arguments.get("loaded_shard_id", arguments.get("shard_id"))
    if "expert_id" in arguments:
        expert = arguments["expert_id"]
        return [None if expert is None or part is None else (expert, part)]
    return list(part) if isinstance(part, tuple) else [part]


def _is_whole(layer: torch.nn.Module, name: str, parts: set[Any]) -> bool:
    """Whether `parts` are all that a layer has in the parameter `name`; of experts those of this rank count."""
    if None in parts:
        return True
    if not all(isinstance(part, tuple) for part in parts):
        return len(parts) == len(getattr(layer, "output_sizes", parts))
    if not hasattr(layer, "local_num_experts"):
        return True
    gated = name.startswith("w13") and layer.moe_config.is_act_and_mul
    matrices = {"w1", "w3"} if gated else {matrix for _, matrix in parts}
    places = None if layer.expert_map is None else layer.expert_map.tolist()  # -1: another rank's
    local = [part for part in parts if places is None or places[part[0]] >= 0]
    return len(local) >= layer.local_num_experts * len(matrices)


def _tied_names(model: torch.nn.Module) -> dict[str, set[str]]:
    """For each parameter that the engine holds under several names, all of them."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _loader_name(name: str) -> str:
    """A parameter's name as `load_weights` reports it, which leaves out the module inside a mixture of experts."""
    return name.replace(".routed_experts.", ".")


def reset_prefix_cache(llm: Any) -> None:
    """Forget cached keys, values and features of images, which belong to the old weights; an engine that refuses raises."""
    llm.llm_engine.reset_encoder_cache()
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running during a weight sync.")
