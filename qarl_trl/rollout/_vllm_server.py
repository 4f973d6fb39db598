"""What runs inside the workers of a vLLM server that `qarl-trl serve` starts; its command line names this file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.tokenizers import cached_tokenizer_from_config

from . import _vllm, _vllm_cpu
from .cpu import choose_arithmetic
from .server import engine_facts


logger = logging.getLogger(__name__)

# A worker imports this file before it makes its model.
if _vllm_cpu.is_cpu_engine():
    choose_arithmetic()
_vllm_cpu.let_kernel_scan_pass()
_vllm.keep_cache_scales()


@dataclass
class Weights:
    """Which weights a worker's model holds."""

    version: str | None = None  # of the last whole sync; `None` for random weights and within a sync
    updates: int = 0  # since the last `begin`
    touched: bool = False  # weights came, from any run
    broken: bool = False  # an update began and did not end

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around one update of the weights; `RuntimeError` after one that failed, with which vLLM's reload would go on."""
        self.begin()
        self.updates, self.touched, self.broken = self.updates + 1, True, True
        yield
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.broken = False

    def begin(self) -> None:
        """Take the version away until all weights of the next one are there."""
        if self.broken:
            raise RuntimeError(
                "an earlier sync to this server failed, so it may hold a mix of weights: start it again"
            )
        self.version = None


def weights_of(model: nn.Module) -> Weights:
    """The one record that belongs to a worker's model."""
    return vars(model).setdefault("qarl_weights", Weights())


class NCCLTransfer(NCCLWeightTransferEngine):
    """vLLM's transfer between GPUs, as TRL's client speaks it, with the reload of a colocated engine. Untested: no GPU."""

    def start_weight_update(self) -> None:
        """Nothing: all tensors come in one `update_weights`."""

    finish_weight_update = start_weight_update

    def update_weights(self, update_info: dict[str, Any]) -> None:
        parsed = self.parse_update_info(update_info)

        def reload() -> None:
            initialize_layerwise_reload(self.model)
            self.receive_weights(parsed)
            finalize_layerwise_reload(self.model, self.model_config)

        with weights_of(self.model).update():
            _vllm.reload_model(self.model, reload)


WeightTransferEngineFactory.register_engine("qarl_nccl", NCCLTransfer)


def told(method: Callable[..., Any]) -> Callable[..., Any]:
    """
    A worker's method whose error is its answer, `{"error": ...}`.

    vLLM raises the error of the first rank that has one, and takes what later ranks answered for answers to its next call.
    """

    @wraps(method)
    def call(worker: Any, *args: str) -> Any:
        try:
            return method(worker, *args)
        except Exception as error:  # the trainer raises it
            logger.exception("%s failed", method.__name__)
            return {"error": f"{type(error).__name__}: {error}"}

    return call


class WorkerExtension:
    """Methods that every worker of the server gets, for `/collective_rpc`, whose arguments are strings."""

    @told
    def qarl_load(self, version: str, parts: str) -> None:
        """
        A whole sync from the folder `version` in the server's `sync_folder`; `parts` is JSON of the names in each file.

        One call, so that a trainer that dies meanwhile leaves a server that can go on. Everything is opened first: a folder
        that lacks something leaves the weights as they are.
        """
        tensors = tensors_of(self.vllm_config.additional_config.get("sync_folder", ""), version, json.loads(parts))
        model = self.model_runner.get_model()
        with weights_of(model).update():
            _vllm.reload_model(model, partial(self.reload_weights, weights_iterator=tensors))
        weights_of(model).version = version

    @told
    def qarl_mark(self, version: str) -> None:
        """Begin a sync over NCCL (an empty `version`), or name what exactly one update since then has brought."""
        weights = weights_of(self.model_runner.get_model())
        if not version:
            weights.begin()
            weights.updates = 0
            if self._weight_update_active:  # a sender died before `finish_weight_update`
                self.finish_weight_update()
        elif weights.updates != 1 or weights.broken:
            raise RuntimeError(
                f"a weight sync must be one update of the weights, got {weights.updates}: let one run alone send to this server"
            )
        else:
            weights.version = version

    @told
    def qarl_state(self) -> dict[str, Any]:
        """What this worker runs, as [`~qarl_trl.rollout.server.needed_of_server`] has it, and the version of its weights."""
        model_config, transfer = self.vllm_config.model_config, self.vllm_config.weight_transfer_config
        config, weights = model_config.hf_config.to_dict(), weights_of(self.model_runner.get_model())
        quantization = config.pop("quantization_config", None)
        for name in ("total_num_heads", "total_num_kv_heads") if quantization else ():  # vLLM's own notes
            quantization.pop(name, None)
        engine = {
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "logprobs_mode": model_config.logprobs_mode,
            "eos_token_id": getattr(cached_tokenizer_from_config(model_config), "eos_token_id", None),
            "transport": "folder" if transfer is None else transfer.backend.removeprefix("qarl_"),
        }
        return {
            "version": weights.version,
            "random": not weights.touched,
            "quantization_config": quantization,
            "config": config,
            "config_class": type(model_config.hf_config).__module__,
            "engine": engine_facts(self.device.type) | engine,
        }


def tensors_of(root: str, folder: str, parts: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    """
    The tensors of a weight sync in `root/folder`, in order.

    `ValueError` at once, not amid the reload, for a folder elsewhere and for one that lacks a file or a tensor.
    """
    shared, inside = Path(root).resolve(), Path(root, folder).resolve()
    if inside.parent != shared or not inside.is_dir():
        raise ValueError(
            f"the server has no folder {folder!r} in its sync_folder {root!r}: give trainer and server the same folder, on "
            "a file system that both machines mount"
        )
    for number, names in enumerate(parts):
        path = inside / f"{number}.safetensors"
        try:
            with safe_open(path, "pt") as part:
                lacking = sorted(set(names) - set(part.keys()))
        except Exception as error:  # OSError, SafetensorError: missing, unreadable or cut short
            raise ValueError(f"the server cannot read {path}: {error}") from error
        if lacking:
            raise ValueError(f"{path} lacks {len(lacking)} tensors of the sync, first {lacking[0]!r}")

    def read() -> Iterator[tuple[str, Tensor]]:
        for number, names in enumerate(parts):
            with safe_open(inside / f"{number}.safetensors", "pt") as part:
                for name in names:
                    yield name, part.get_tensor(name)

    return read()
