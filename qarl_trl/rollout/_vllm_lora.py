"""All use of vLLM's interfaces for an engine that holds a frozen low-bit base and gets an adapter at each weight sync."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save_file
from torch import Tensor

from . import _vllm


ADAPTER = "policy", 1  # the name and number that vLLM knows it by


def engine_rank(rank: int) -> int:
    """The smallest maximum rank of vLLM's engines that is at least `rank`. `ValueError` if there is none."""
    from vllm.config.lora import MaxLoRARanks

    fitting = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not fitting:
        raise ValueError(f"r must be at most {max(get_args(MaxLoRARanks))} for vLLM (lora_base='frozen'), got {rank}.")
    return fitting[0]


def lora_settings(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for an adapter file with tensors of these `shapes`. Layers without an adapter stay as they are."""
    ranks = {name.split(".")[-3]: shape[0] for name, shape in shapes.items() if name.endswith("lora_A.weight")}
    sizes = {"max_lora_rank": engine_rank(max(ranks.values())), "max_loras": 1, "lora_dtype": "bfloat16"}
    return {"enable_lora": True, "lora_target_modules": sorted(ranks), **sizes}


def sample_with(llm: Any, adapter: Path) -> None:
    """Make all requests of an engine use the adapter in a folder."""
    from vllm.lora.request import LoRARequest

    llm.generate = partial(llm.generate, lora_request=LoRARequest(*ADAPTER, str(adapter)))


def adapter_place(model: Any) -> str | None:
    """`/dev/shm` if two bfloat16 adapters of a `PeftModel` per process fit (Docker gives it 64 MB), else `None`, for a folder on disk."""
    factors = sum(param.numel() for name, param in model.named_parameters() if ".lora_" in name)
    needed = 4 * factors * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > needed else None


def send(llm: Any, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """
    Send `weights` to an engine: first the base, if `weights` begins with it, then the factors of the adapter.

    vLLM loads the adapter from `folder`, and later requests use it. `RuntimeError` if the engine does not take all of it.
    """
    from vllm.lora.request import LoRARequest

    factors: dict[str, Tensor] = {}
    base = (pair for pair in weights if ".lora_" not in pair[0] or factors.update([pair]))
    if (first := next(base, None)) is not None:
        _vllm.reload_engine(llm, chain([first], base))
    save_file({name: tensor.contiguous() for name, tensor in factors.items()}, folder / "adapter_model.safetensors")
    rank = max(len(tensor) for name, tensor in factors.items() if name.endswith("lora_A.weight"))
    config = {"r": rank, "lora_alpha": rank, "target_modules": "all-linear"}  # the factors are scaled already
    (folder / "adapter_config.json").write_text(json.dumps(config))
    added = llm.llm_engine.add_lora(LoRARequest(*ADAPTER, str(folder), load_inplace=True))
    manager: Any = _vllm.engine_model(llm).lora_manager
    if not added or (lost := manager.get_adapter(ADAPTER[1]).loras.keys() - manager.modules.keys()):
        raise RuntimeError(f"vLLM took {'no adapter' if not added else f'none for {min(lost)}'}; its log may say why.")
    if "generate" not in vars(llm):
        sample_with(llm, folder)
