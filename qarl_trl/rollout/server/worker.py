"""What each worker of a server does: load a sync, and say what it holds.

vLLM makes its worker class a subclass of the class that `--worker-extension-cls` names
(`v1/worker/worker_base.py`), so every process of the engine has these methods. A worker imports this file before it
makes its model.

Each set of weights has a version, which is an attribute of the engine's model: a model that vLLM has just made with
random weights has none (`RANDOM`), and it is `None` during a sync and after one that failed.
"""

from __future__ import annotations

import logging
from typing import Any

from ...cpu_exact.arithmetic import choose_arithmetic
from ..vllm import adapters, reloading
from ..vllm.platform import is_cpu_engine
from ..vllm.random_start import keep_constants
from .facts import RANDOM, engine_facts
from .files import folder_of, read_parts


logger = logging.getLogger(__name__)

# What must be so before the model is made.
if is_cpu_engine():
    choose_arithmetic()
keep_constants()


class WorkerExtension:
    """Methods of every worker of the server, which [`~qarl_trl.rollout.server.guard.Guard`] calls."""

    def qarl(self, method: str, *args: Any) -> Any:
        """
        Call one of the methods below. An error is returned, and the trainer raises it.

        If it were raised here, vLLM would raise the error of the first such rank, and take later ranks' answers for
        those of its next call.

        Args:
            method: Its name.
            args: Its arguments.

        Returns:
            What the method returns, or `{"error": ...}`.
        """
        try:
            return getattr(self, method)(*args)
        except Exception as error:
            logger.exception("%s failed", method)
            return {"error": f"{type(error).__name__}: {error}"}

    def qarl_load(self, version: str, files: int, has_adapter: bool = False) -> None:
        """
        Load a sync from the server's `sync_folder`.

        It is one call, so the server stays usable if the trainer dies meanwhile. It opens everything first, so an
        incomplete folder does not change the weights.

        Args:
            version: The version of the sync, and the name of its folder.
            files: The number of its files with weights; 0: only the adapter, beside the base of an earlier sync.
            has_adapter: Whether an adapter lies beside those files.

        Raises:
            RuntimeError: if an earlier sync failed, or if an adapter came alone and the base is not of its run.
            ValueError: if the folder is incomplete.
        """
        sync_folder = self.vllm_config.additional_config.get("sync_folder", "")
        tensors = read_parts(sync_folder, version, files)

        # vLLM's next reload would continue with the tensors that a failed one has buffered.
        model = self.model_runner.get_model()
        held = getattr(model, "qarl_version", RANDOM)
        if held is None:
            raise RuntimeError("an earlier sync to this server failed, so it may hold mixed weights: start it again")
        if not files and _run_of(held) != _run_of(version):
            raise RuntimeError(f"an adapter came for a base of run {_run_of(version)}, but the server holds {held!r}")

        # Nothing may be sampled until the end: a failure leaves old and new weights.
        model.qarl_version = None
        if files:
            weights = adapters.inside_wrappers(model, tensors) if has_adapter else tensors
            has_graphs = not self.vllm_config.model_config.enforce_eager
            reloading.reload_model(
                model, weights, lambda stream: self.reload_weights(weights_iterator=stream), has_graphs
            )
        if has_adapter:
            adapters.load_adapter(model, self.add_lora, folder_of(sync_folder, version))
        model.qarl_version = version

    def qarl_state(self) -> dict[str, Any]:
        """The version of this worker's weights, and its facts ([`~qarl_trl.rollout.server.facts.engine_facts`])."""
        config = self.vllm_config.model_config.hf_config
        quantization = config.to_dict().get("quantization_config")
        if quantization:
            # vLLM adds these to the config that the server was started with.
            quantization.pop("total_num_heads", None)
            quantization.pop("total_num_kv_heads", None)

        version = getattr(self.model_runner.get_model(), "qarl_version", RANDOM)
        cache_dtype = self.vllm_config.cache_config.cache_dtype
        adapter = self.vllm_config.additional_config.get("adapter")
        return {"version": version, "facts": engine_facts(config, quantization, cache_dtype, adapter)}


def _run_of(version: str) -> str:
    """The run that a version of the weights belongs to; see `ServerClient.sync`."""
    return version.rpartition("-")[0]
