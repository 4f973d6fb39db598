"""What runs inside the processes of a vLLM server that `qarl-trl serve` starts; each names this file on its command line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
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


class WholeUpdate(WeightTransferEngine):
    """
    Weights that come in one `update_weights`, with the reload of a colocated engine, whoever sends them.

    Attributes:
        version (`str`, *optional*): Of the weights, as [`mark`] named them; `None` for random ones and for any other update.
    """

    version: str | None = None
    updates = 0  # since `mark` began a weight sync
    unfinished = False  # an update began and did not end
    touched = False  # weights came, from anybody

    def mark(self, version: str) -> None:
        """
        Begin a weight sync (an empty `version`), or name what exactly one update since then has brought.

        `RuntimeError` when an earlier update did not end: vLLM's reload would go on with what that had buffered.
        """
        if self.unfinished:
            raise RuntimeError(
                "an earlier sync to this server failed, so it may hold a mix of weights: start it again"
            )
        if version and self.updates != 1:
            raise RuntimeError(
                f"a weight sync must be one update of the weights, got {self.updates}: let one run alone send to this server"
            )
        self.version, self.updates = version or None, 0

    def start_weight_update(self) -> None:
        """All in one call: see `update_weights`."""

    finish_weight_update = start_weight_update

    def update_weights(self, update_info: dict[str, Any]) -> None:
        parsed, updates = self.parse_update_info(update_info), self.updates
        self.mark("")
        self.touched, self.unfinished, self.updates = True, True, updates + 1

        def reload() -> None:
            initialize_layerwise_reload(self.model)
            self.receive_weights(parsed)
            finalize_layerwise_reload(self.model, self.model_config)

        _vllm.reload_model(self.model, self.vllm_config, reload)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.unfinished = False


class NCCLTransfer(WholeUpdate, NCCLWeightTransferEngine):
    """vLLM's transfer between GPUs, as TRL's client speaks it. Untested: no GPU."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """
    A folder in the server's `sync_folder`, and the tensors in its `0.safetensors`, `1.safetensors`..., each in the order to load.
    """

    folder: str
    parts: list[list[str]]


class FolderTransfer(WholeUpdate):
    """Files that trainer and server both see."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nothing to open."""

    def receive_weights(self, update_info: FolderUpdate) -> None:
        root = self.vllm_config.additional_config.get("sync_folder", "")
        self.model.load_weights(tensors_of(root, update_info.folder, update_info.parts))

    def shutdown(self) -> None:
        """Nothing to close."""


WeightTransferEngineFactory.register_engine("qarl_nccl", NCCLTransfer)
WeightTransferEngineFactory.register_engine("qarl_folder", FolderTransfer)


def told(method: Callable[..., Any]) -> Callable[..., Any]:
    """
    A worker's method whose error is its answer, `{"error": ...}`.

    vLLM raises the error of the first rank that has one, and takes what later ranks answered for answers to its next call.
    """

    @wraps(method)
    def call(worker: Any, *args: str) -> Any:
        try:
            return method(worker, *args)
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            return {"error": f"{type(error).__name__}: {error}"}

    return call


class WorkerExtension:
    """Methods that every worker of the server gets, for `/collective_rpc`, whose arguments are strings."""

    @told
    def qarl_load(self, version: str, parts: str) -> None:
        """
        A whole sync through a folder that is called as its `version`; `parts` is JSON of [`FolderUpdate`]'s.

        One call, so that a trainer that dies meanwhile leaves a server that can go on.
        """
        self._qarl_mark("")
        self.start_weight_update()
        self.update_weights({"folder": version, "parts": json.loads(parts)})
        self.finish_weight_update()
        self._qarl_mark(version)

    @told
    def qarl_mark(self, version: str) -> None:
        """Begin a weight sync (an empty `version`) or end it: [`WholeUpdate.mark`]."""
        self._qarl_mark(version)

    def _qarl_mark(self, version: str) -> None:
        self.weight_transfer_engine.mark(version)
        if not version and self._weight_update_active:  # somebody's who died before `update_weights`, or after
            self.finish_weight_update()

    @told
    def qarl_state(self) -> dict[str, Any]:
        """What this worker runs, as [`~qarl_trl.rollout.server.needed_of_server`] has it, and the version of its weights."""
        model_config = self.vllm_config.model_config
        config = model_config.hf_config.to_dict()
        quantization = config.pop("quantization_config", None)
        for name in ("total_num_heads", "total_num_kv_heads") if quantization else ():  # vLLM's own notes
            quantization.pop(name, None)
        return {
            "version": self.weight_transfer_engine.version,
            "random": not self.weight_transfer_engine.touched,
            "quantization_config": quantization,
            "config": config,
            "config_class": type(model_config.hf_config).__module__,
            "engine": engine_facts(self.device.type)
            | {
                "dtype": str(model_config.dtype).removeprefix("torch."),
                "logprobs_mode": model_config.logprobs_mode,
                "eos_token_id": getattr(cached_tokenizer_from_config(model_config), "eos_token_id", None),
                "transport": self.vllm_config.weight_transfer_config.backend.removeprefix("qarl_"),
            },
        }


def tensors_of(root: str, folder: str, parts: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a weight sync in `root/folder`, in order. An error for a folder elsewhere, and for one that lacks any."""
    shared, inside = Path(root).resolve(), Path(root, folder).resolve()
    if inside.parent != shared or not inside.is_dir():
        raise ValueError(
            f"the server has no folder {folder!r} in its sync_folder {root!r}: give trainer and server the same folder, on "
            "a file system that both machines mount"
        )
    for number, names in enumerate(parts):
        with safe_open(inside / f"{number}.safetensors", "pt") as part:
            for name in names:
                yield name, part.get_tensor(name)


class Guard:
    """
    ASGI middleware: the key on every path, and an answer when the engine dies.

    vLLM's own asks for the key on `/v1`, and would let anybody replace the weights. Who asks its workers for something, as a
    sync does, waits for ever when the engine's process is killed meanwhile.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, _digest(f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode())

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        locked = scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        if locked and os.environ.get("VLLM_API_KEY") and not hmac.compare_digest(_digest(given), self.expected):
            await _say(send, 401, b"Unauthorized")
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not await _finished(self.app(scope, receive, send), scope["app"].state.engine_client):
            await _say(send, 500, b"The engine of this server died: start it again.")


async def _finished(answer: Coroutine[Any, Any, None], engine: Any) -> bool:
    """Let a request be answered, and whether it was before the engine died."""
    task, died = asyncio.ensure_future(answer), False
    try:
        while not (await asyncio.wait({task}, timeout=1))[0]:
            if died:  # a second ago: vLLM itself answers some
                return False
            died = engine.errored
        await task
        return True
    finally:
        task.cancel()


async def _say(send: Any, status: int, text: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": text})


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
