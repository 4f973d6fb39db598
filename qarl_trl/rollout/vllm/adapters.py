"""An engine that holds a frozen low-bit base, and gets an adapter at each weight sync.

vLLM can apply a LoRA adapter beside a quantized layer (`enable_lora`), to requests that ask for it
(`LoRARequest`). It loads adapters from files only, and TRL's calls of `llm.generate` do not ask for one. So from its
start on all requests of a colocated engine ask for the adapter in a folder, and a sync writes it there and makes the
engine load it (`lora/worker_manager.py`). In a server `server/worker.py` loads it, and requests name it as their
model.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor

from ..._compat.versions import installed_version
from .reloading import engine_model, reload_engine


# vLLM knows the adapter by this name and this number.
ADAPTER_NAME = "policy"
ADAPTER_NUMBER = 1


def engine_rank(rank: int) -> int:
    """The smallest maximum rank of vLLM's engines that is at least `rank`. `ValueError` if there is none."""
    from vllm.config.lora import MaxLoRARanks

    sizes = get_args(MaxLoRARanks)
    fitting = [size for size in sizes if size >= rank]
    if not fitting:
        raise ValueError(f"r must be at most {max(sizes)} for vLLM (lora_base='frozen'), got {rank}.")
    return fitting[0]


def lora_settings(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """
    The arguments of `vllm.LLM` for an engine that takes the adapter. Layers without one stay as they are.

    Args:
        shapes: The shapes of the tensors in the adapter's file, by name (`....q_proj.lora_A.weight`).
    """
    # One rank for each kind of layer: a run with `rank_pattern` is refused (`validate/adapters.py`).
    ranks: dict[str, int] = {}
    for name, shape in shapes.items():
        if name.endswith("lora_A.weight"):
            module = name.split(".")[-3]
            ranks[module] = shape[0]

    return {
        "enable_lora": True,
        "lora_target_modules": sorted(ranks),
        "max_lora_rank": engine_rank(max(ranks.values())),
        "max_loras": 1,
        "lora_dtype": "bfloat16",
    }


def settings_of(model: Any) -> dict[str, Any]:
    """
    [`lora_settings`] of a model.

    Args:
        model: A `PeftModel` on a frozen base, with weights or without.
    """
    from ...quant.layers.frozen import adapter_tensors  # imports peft

    return lora_settings({name: tensor.shape for name, tensor in adapter_tensors(model)})


def send(llm: Any, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """
    Send `weights` to an engine: the base, if `weights` begin with it, and then the factors of the adapter.

    Args:
        llm: A colocated `vllm.LLM`.
        weights: Names and tensors. Those of the adapter's factors contain `.lora_`, and come after all others.
        folder: vLLM loads the adapter from there. Requests use it after [`sample_with`].

    Raises:
        RuntimeError: if the engine does not take all of the adapter, or the base beside it.
    """
    factors: dict[str, Tensor] = {}
    # Two parts of one stream. vLLM has read the first to its end before the second begins.
    for are_factors, part in groupby(weights, key=is_factor):
        if are_factors:
            factors.update(part)
        else:
            _send_base(llm, part)

    save_adapter(factors, folder)
    load_adapter(engine_model(llm), llm.llm_engine.add_lora, folder)


def _send_base(llm: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    model = engine_model(llm)
    try:
        reload_engine(llm, inside_wrappers(model, weights))
    except KeyError as error:
        # Such as DeepSeek's: its `load_weights` looks names up in a list of its own.
        raise RuntimeError(
            f"vLLM's {type(model).__name__} cannot load a base whose layers have an adapter: it knows no {error}. Set "
            "lora_base: merged."
        ) from error


def is_factor(weight: tuple[str, Tensor]) -> bool:
    """Whether a tensor, with its name, is one of the adapter's factors."""
    name, _ = weight
    return ".lora_" in name


def inside_wrappers(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """
    Give weights of layers that have an adapter the names that vLLM's loader finds them under.

    Args:
        model: The engine's model.
        weights: Names and tensors of the base.
    """
    # From 0.27 on vLLM looks inside the wrapper itself; of those, 0.31 was run.
    if Version(str(installed_version("vllm"))) >= Version("0.27"):
        yield from weights
        return

    manager: Any = model.lora_manager
    wrapped = set()
    for name in manager.modules:
        parent, _, layer = name.rpartition(".")
        # A merged layer (qkv_proj) has the names of its parts in a checkpoint.
        for part in manager.packed_modules_mapping.get(layer, [layer]):
            wrapped.add(f"{parent}.{part}")

    for name, tensor in weights:
        layer, _, parameter = name.rpartition(".")
        if layer in wrapped:
            name = f"{layer}.base_layer.{parameter}"
        yield name, tensor


def save_adapter(factors: Mapping[str, Tensor], folder: Path) -> None:
    """
    Write the files that vLLM loads an adapter from.

    Args:
        factors: The tensors of its factors, by their names in peft's files.
        folder: An existing folder.
    """
    tensors = {name: tensor.contiguous() for name, tensor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")

    rank = max(len(tensor) for name, tensor in factors.items() if name.endswith("lora_A.weight"))
    # vLLM scales B by lora_alpha / r. These factors are scaled already, so the quotient must be 1.
    config = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def load_adapter(model: Any, add: Callable[[Any], bool], folder: Path) -> None:
    """
    Make an engine load its adapter again.

    Args:
        model: The engine's model.
        add: vLLM's function that loads an adapter, of the engine or of a worker.
        folder: Where [`save_adapter`] wrote it.

    Raises:
        RuntimeError: if the engine takes only a part of it.
    """
    # In place: under a number that it knows, vLLM would otherwise keep the adapter that it has.
    added = add(request_of(folder, load_inplace=True))
    if not added:
        raise RuntimeError("vLLM took no adapter; its log may say why.")

    # vLLM leaves out factors of layers that it does not know, without an error.
    manager: Any = model.lora_manager
    lost = manager.get_adapter(ADAPTER_NUMBER).loras.keys() - manager.modules.keys()
    if lost:
        raise RuntimeError(f"vLLM took no adapter for {min(lost)}; its log may say why.")


def sample_with(llm: Any, adapter: Path) -> None:
    """
    Make all requests of a `vllm.LLM` use the adapter in a folder, which must be there by the first one.

    Args:
        llm: The engine, started by the arguments of [`lora_settings`].
        adapter: The adapter's folder.
    """
    # TRL has no place to give the adapter to `generate`. A `rollout_func` may also call `chat` or another method, and
    # the base alone would answer.
    for name, function in inspect.getmembers(type(llm), inspect.isfunction):
        is_public = not name.startswith("_")  # private ones get the adapter from these
        if is_public and "lora_request" in inspect.signature(function).parameters:
            setattr(llm, name, partial(getattr(llm, name), lora_request=request_of(adapter)))


def request_of(folder: Path, **options: Any) -> Any:
    """
    vLLM's name for the adapter in a folder, which a request for tokens gives.

    Args:
        folder: The adapter's folder. vLLM reads it only if it does not have the adapter yet.
        options: Further arguments of `LoRARequest`.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_NUMBER, str(folder), **options)
