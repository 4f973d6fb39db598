"""Code for the workers of a vLLM server that `qarl-trl serve` starts; its command line names this file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from ..cpu_exact.arithmetic import choose_arithmetic
from . import _vllm, _vllm_cpu
from .server import engine_facts


logger = logging.getLogger(__name__)

# A worker imports this file before it makes its model.
if _vllm_cpu.is_cpu_engine():
    choose_arithmetic()
_vllm.keep_cache_scales()


class WorkerExtension:
    """Methods of every worker of the server, for [`~qarl_trl.rollout.server_guard.Guard`]."""

    def qarl(self, method: str, *args: Any) -> Any:
        """
        Call one of the methods below. Returns an error as `{"error": ...}`, which the trainer raises.

        If it raised here, vLLM would raise the error of the first such rank, and take later ranks' answers for those of its next call.
        """
        try:
            return getattr(self, method)(*args)
        except Exception as error:
            logger.exception("%s failed", method)
            return {"error": f"{type(error).__name__}: {error}"}

    def qarl_load(self, version: str, files: int) -> None:
        """
        Load a whole sync from the `files` of the folder `version` in the server's `sync_folder`.

        It is one call, so the server stays usable if the trainer dies meanwhile. It opens everything first, so an incomplete
        folder does not change the weights. The version is `None` during a sync and after a failed one. vLLM's next reload would
        continue with the failed sync's buffered tensors, so such a server is refused (`RuntimeError`).
        """
        tensors = tensors_of(self.vllm_config.additional_config.get("sync_folder", ""), version, files)
        model = self.model_runner.get_model()
        if getattr(model, "qarl_version", "random") is None:
            raise RuntimeError("an earlier sync to this server failed, so it may hold mixed weights: start it again")
        model.qarl_version = None
        _vllm.reload_model(model, partial(self.reload_weights, weights_iterator=tensors))
        model.qarl_version = version

    def qarl_state(self) -> dict[str, Any]:
        """The version of this worker's weights, and its facts ([`~qarl_trl.rollout.server.engine_facts`])."""
        config = self.vllm_config.model_config.hf_config
        quantization = config.to_dict().get("quantization_config")
        for name in ("total_num_heads", "total_num_kv_heads") if quantization else ():  # added by vLLM
            quantization.pop(name, None)
        version = getattr(self.model_runner.get_model(), "qarl_version", None)
        return {"version": version, "facts": engine_facts(config, quantization)}


def tensors_of(root: str, folder: str, files: int) -> Iterator[tuple[str, Tensor]]:
    """
    The tensors of a weight sync in `root/folder`.

    `ValueError` immediately, not during the reload, if the folder is not in `root` or a file is missing or truncated.
    """
    shared, inside = Path(root).resolve(), Path(root, folder).resolve()
    if inside.parent != shared or not inside.is_dir():
        raise ValueError(f"the server has no folder {folder!r} in its sync_folder {root!r}: both must mount the same")
    try:
        parts = [safe_open(inside / f"{number}.safetensors", "pt") for number in range(files)]
    except Exception as error:  # OSError, SafetensorError
        raise ValueError(f"the server cannot read all {files} files of {inside}: {error}") from error
    return ((name, part.get_tensor(name)) for part in parts for name in part.keys())  # noqa: SIM118
