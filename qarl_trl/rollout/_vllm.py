"""Every private seam of vLLM that a weight sync and a start go through, each with its reason."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trl.generation import vllm_generation

from .._compat import installed_version
from . import _vllm_cpu


# Places that vLLM reserves for checkpoints of other kinds: with a quantized KV cache, in every attention layer; with reordered
# channels, in experts of 4-bit weights (0.26).
_RESERVED = re.compile(r"\.(q|k|v|prob)_(scale|zero_point)$|_g_idx(_sort_indices)?$")
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


def reload_engine(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """
    Stream tensors of a checkpoint into a colocated engine; one call must carry all of them.

    vLLM restores each layer's checkpoint layout, loads, processes and copies into the storage its kernels already hold, so
    CUDA graphs stay valid.
    """
    worker = llm.llm_engine.model_executor.driver_worker
    reload = partial(worker.reload_weights, weights_iterator=iter(weights))
    reload_model(engine_model(llm), llm.llm_engine.vllm_config, reload)


def reload_model(model: torch.nn.Module, vllm_config: Any, reload: Callable[[], None]) -> None:
    """
    Run vLLM's `reload` of an engine's model, which calls `model.load_weights`, and see that every tensor came.

    Raises:
        RuntimeError: when the engine did not take every tensor it has a place for, which it only logs itself.
    """
    load_weights, tied = model.load_weights, _tied_names(model)
    expected: set[str] = set()
    loaded: set[str] = set()

    def checked(stream: Iterable[tuple[str, Tensor]]) -> set[str]:
        # The first call comes after the restore: the parameters are now those of the checkpoint, not of the kernels.
        if not expected:
            expected.update(_loader_name(name) for name, _ in model.named_parameters() if not _RESERVED.search(name))
        names = set(load_weights(stream))
        loaded.update(map(_loader_name, names))
        return names

    load, kept = patch.object(model, "load_weights", checked), (_biases_in_place(model), _locks_in_place(model))
    with (
        _loading(vllm_config),
        load,
        _vllm_cpu.quick_repack(),
        _vllm_cpu.complete_reload(model),
        kept[0],
        kept[1],
        _merged_in_part(model) as in_part,
    ):
        reload()
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


@contextmanager
def _loading(vllm_config: Any) -> Iterator[None]:
    """
    What vLLM 0.31 does for a reload and 0.26 does not.

    Kernels of experts are made anew, and may ask for the engine's settings. And on a GPU every tensor had the sizes of all that
    wait added up, for one message: the 55,296 tensors of 48 layers of 128 experts would take an hour.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    with (
        set_current_vllm_config(vllm_config),
        patch.object(layerwise, "has_device_tensors", lambda arguments: False),
    ):
        yield


@contextmanager
def _merged_in_part(model: torch.nn.Module) -> Iterator[list[str]]:
    """
    Names of the merged parameters (q, k, v; gate, up; all experts) that get a part of their checkpoint tensors, as they come.

    vLLM takes such a layer for a padded one (`finalize_layerwise_processing`), and the rest is whatever was in the memory.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    names, process, in_part = {id(m): name for name, m in model.named_modules()}, layerwise._layerwise_process, []

    def checked(layer: torch.nn.Module, info: Any) -> None:
        came: dict[str, set[Any]] = {}
        for name, bound in info.loaded_weights:
            came.setdefault(name, set()).update(_parts(bound.arguments))
        # A shape comes once for each part, and is taken once.
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


@contextmanager
def _locks_in_place(model: torch.nn.Module) -> Iterator[None]:
    """
    Keep the locks of Marlin's layers in the storage that CUDA graphs were captured with, and open.

    vLLM 0.26 makes new ones in every reload and gives the memory of the old ones away, into which a graph would go on to write. An
    engine that slept has anything in them. From 0.31 on they are not the layers' own.
    """
    kernels = [getattr(getattr(module, "scheme", None), "kernel", None) for module in model.modules()]
    holders = [h for h in (*model.modules(), *kernels) if isinstance(getattr(h, "workspace", None), Tensor)]
    before = [holder.workspace for holder in holders]
    yield
    for holder, locks in zip(holders, before, strict=True):
        holder.workspace = locks.zero_()


@contextmanager
def _biases_in_place(model: torch.nn.Module) -> Iterator[None]:
    """
    Keep every bias of the engine in the storage that CUDA graphs were captured with.

    vLLM's reload copies what a kernel has prepared back into the old storage, but leaves biases out of that (`SKIP_TENSORS`),
    and Marlin's layers permute theirs into a new tensor: a graph would go on reading the loaded one, not permuted.
    """
    before = {name: p.data for name, p in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    yield
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


def _loader_name(name: str) -> str:
    """A parameter's name as `load_weights` reports it, which leaves out the module inside a mixture of experts."""
    return name.replace(".routed_experts.", ".")


def reset_prefix_cache(llm: Any) -> None:
    """Forget cached keys, values and features of images, which belong to the old weights; an engine that refuses raises."""
    llm.llm_engine.reset_encoder_cache()
    if llm.reset_prefix_cache() is False:
        raise RuntimeError("vLLM could not reset its prefix cache: requests are still running during a weight sync.")
