"""
All use of vLLM's interfaces for an engine that holds a frozen low-bit base and gets an adapter at each weight sync.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor

from ..._compat import installed_version
from .reloading import engine_model, reload_engine


# vLLM knows the adapter by this name and this number.
ADAPTER_NAME = "policy"
ADAPTER_NUMBER = 1
SHARED_MEMORY = "/dev/shm"


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
    from ...quant.frozen import adapter_tensors  # imports peft

    return lora_settings({name: tensor.shape for name, tensor in adapter_tensors(model)})


def sample_with(llm: Any, adapter: Path) -> None:
    """Make all requests of a `vllm.LLM` use the adapter in a folder."""
    llm.generate = partial(llm.generate, lora_request=request_of(adapter))


def adapter_place(model: Any) -> str | None:
    """
    Where to put the folder of the adapter of a `PeftModel`: in shared memory, or `None` for a folder on disk.

    Shared memory must hold two bfloat16 adapters of each process of this machine; Docker gives it only 64 MB.
    """
    if not os.path.isdir(SHARED_MEMORY):
        return None

    factors = sum(param.numel() for name, param in model.named_parameters() if ".lora_" in name)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = 2 * 2 * factors * processes  # bytes
    if shutil.disk_usage(SHARED_MEMORY).free <= needed:
        return None
    return SHARED_MEMORY


def send(llm: Any, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """
    Send `weights` to an engine: the base, if `weights` begin with it, and then the factors of the adapter.

    Args:
        llm: A colocated `vllm.LLM`.
        weights: Names and tensors. Those of the adapter's factors contain `.lora_`, and come after all others.
        folder: vLLM loads the adapter from there, and later requests use it.

    Raises:
        RuntimeError: if the engine does not take all of the adapter.
    """
    stream = Lookahead(weights)
    if stream.has_next and not is_factor(stream.next_name):
        base = stream.until(is_factor)
        reload_engine(llm, inside_wrappers(engine_model(llm), base))

    save_adapter(dict(stream), folder)
    load_adapter(engine_model(llm), llm.llm_engine.add_lora, folder)

    already_used = "generate" in vars(llm)
    if not already_used:
        sample_with(llm, folder)


def is_factor(name: str) -> bool:
    """Whether a tensor is one of the adapter's factors."""
    return ".lora_" in name


class Lookahead:
    """
    A stream of names and tensors whose next name is known before it is read.

    Args:
        weights: Names and tensors.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = iter(weights)
        self._next = next(self._weights, None)

    @property
    def has_next(self) -> bool:
        """Whether anything is left."""
        return self._next is not None

    @property
    def next_name(self) -> str:
        """The name of what is read next; `""` if nothing is left."""
        return "" if self._next is None else self._next[0]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.until(lambda name: False)

    def until(self, ends: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Read up to the first name that `ends` the part, which stays to be read."""
        while self._next is not None and not ends(self._next[0]):
            current = self._next
            self._next = next(self._weights, None)
            yield current


def inside_wrappers(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """
    Give weights of layers that have an adapter the names that vLLM's loader finds them under.

    Args:
        model: The engine's model.
        weights: Names and tensors of the base.
    """
    # Newer versions (0.31) look inside the wrapper themselves.
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
    added = add(request_of(folder, load_inplace=True))
    if not added:
        raise RuntimeError("vLLM took no adapter; its log may say why.")

    # vLLM leaves out factors of layers that it does not know, without an error.
    manager: Any = model.lora_manager
    lost = manager.get_adapter(ADAPTER_NUMBER).loras.keys() - manager.modules.keys()
    if lost:
        raise RuntimeError(f"vLLM took no adapter for {min(lost)}; its log may say why.")


def request_of(folder: Path, **options: Any) -> Any:
    """
    The `LoRARequest` by which a request for tokens names the adapter.

    Args:
        folder: Where it is loaded from, if the engine does not have it yet.
        options: Further arguments of `LoRARequest`.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_NUMBER, str(folder), **options)
