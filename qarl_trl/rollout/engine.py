"""The low-bit vLLM engine: started from a scheme, fed with synced tensors.

Invariant: the engine never reads weights from disk and never quantizes. All its weights come from weight syncs of the learner's
low-bit tensors (paper Sec. 3.1, steps 1 and 3).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.utils import is_peft_model
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from trl.generation.vllm_generation import VLLMGeneration

from ..guards import all_or_none, on_first
from ..quant.stream import iter_low_bit_weights, readable_parameters
from . import _vllm, _vllm_layer, _vllm_lora
from .server import ServerClient, engine_facts
from .sync_check import SyncCheck


class LowBitVLLMGeneration(VLLMGeneration):
    """
    TRL's vLLM, started in a low-bit scheme and fed with packed tensors; in mode "server" `qarl-trl serve` started it.

    `quantization_config` is compressed-tensors' config for the engine; without it the engine runs in bfloat16. With `frozen` the
    first sync sends the base, later ones only the adapter. A server gets its weights through `sync_folder`, which both mount.

    `rollout_seconds` counts generation and `sync_seconds` syncs and their checks, since `reset_clock`; `synced_bytes` is the size of
    the last sync.
    """

    alone = False  # whether this process generates while others may not
    _adapter_folder: TemporaryDirectory[str] | None = None

    def __init__(
        self,
        *args: Any,
        quantization_config: dict[str, Any] | None,
        engine_kwargs: dict[str, Any] | None = None,
        frozen: bool = False,
        sync_folder: str | None = None,
        sync_check: SyncCheck | None = None,
        **kwargs: Any,
    ) -> None:
        self.quantization_config = quantization_config
        self.engine_kwargs = engine_kwargs or {}
        if frozen:
            self._adapter_folder = TemporaryDirectory(dir=_vllm_lora.adapter_place(args[0]))
        self.sync_folder = sync_folder
        self.sync_check = sync_check
        self.synced_bytes = self.num_syncs = self._checked = 0
        self._failed: str | None = None
        self.reset_clock()
        super().__init__(*args, **kwargs)
        # The trainer decodes token ids itself. Text takes a fifth of the engine's CPU time, and only stop strings need it.
        self.generation_kwargs = {"detokenize": bool(self.generation_kwargs.get("stop"))} | self.generation_kwargs

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._connect()
            return
        _vllm.keep_block_scales()
        _vllm.keep_cache_scales()
        if self.accelerator.num_processes == 1:
            from vllm.utils.network_utils import get_open_port

            os.environ.setdefault("MASTER_PORT", str(get_open_port()))  # two runs would race for TRL's four ports
        # TRL puts the engine to sleep right after it builds it, so the sync check must score the random weights before that.
        look = None if self.sync_check is None else self.sync_check.look_before
        settings = low_bit_settings(self.model, self.quantization_config, self.trust_remote_code)
        if self._adapter_folder:
            from ..quant.frozen import adapter_tensors  # imports peft

            settings |= _vllm_lora.lora_settings({name: t.shape for name, t in adapter_tensors(self.model)})
        with _vllm.llm_arguments(look, **self.engine_kwargs | settings):
            super()._init_vllm()
        _vllm_layer.use_settings_of(self.llm)

    def _connect(self) -> None:
        """Find the server, refuse one that does not match this run, and let the sync check score random weights."""
        self.enable_sleep_mode = False  # the server has GPUs of its own
        needed = engine_facts(self.model.config, self.quantization_config)

        def connect() -> bool:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = ServerClient(self.sync_folder, base_url=url, connection_timeout=self.server_timeout)
            return self.vllm_client.check(needed)

        if on_first(self.accelerator, connect) and self.sync_check is not None:
            self.sync_check.look_before(self)

    def prompt_logps(self, token_ids: Sequence[int]) -> Tensor:
        """The server's log-probs `(T - 1,)`, float32, of a prompt; all processes must call this."""
        return torch.tensor(on_first(self.accelerator, lambda: self.vllm_client.prompt_logps(token_ids)))

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        if self.quantization_config is None and is_peft_model(self.model):
            # TRL's merges the adapter into the base weights and back, which changes them.
            named_params = super()._iter_named_params()
        else:
            named_params = readable_parameters(self.model, self._dist)  # TRL's gathers whole master weights
        if not (self._adapter_folder and self.num_syncs) or self.enable_sleep_mode:  # sleep drops a frozen base
            yield from iter_low_bit_weights(self.model, named_params)
        if self._adapter_folder:
            from ..quant.frozen import adapter_tensors  # imports peft

            yield from adapter_tensors(self.model)

    def sync_weights(self) -> None:
        """Send the learner's current low-bit tensors to the engine, and clear its cached keys and values."""
        start = time.perf_counter()
        if self.enable_sleep_mode:
            clear_device_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        size = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal size
            for name, tensor in self._iter_named_params():
                size += tensor.nbytes
                yield name, tensor

        stream = counted()
        with self._all_or_none("sync"):
            try:
                self._send(stream)
            except Exception:
                for _ in stream:  # the other processes still gather sharded weights with this one
                    pass
                raise
        self.synced_bytes = size
        self.sync_seconds += time.perf_counter() - start
        self.num_syncs += 1

    def _send(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        if self.mode == "colocate":
            if self._adapter_folder:
                _vllm_lora.send(self.llm, stream, Path(self._adapter_folder.name))
            else:
                _vllm.reload_engine(self.llm, stream)
            _vllm.reset_prefix_cache(self.llm)
            return
        if self.accelerator.is_main_process:
            self.vllm_client.sync(stream)
        for _ in stream:  # the main process has read it; the others take part in the gathers
            pass

    @contextmanager
    def _all_or_none(self, what: str) -> Iterator[None]:
        """
        Like [`all_or_none`]; in addition, after a failure the engine is refused.

        A failed sync leaves old and new weights in it (vLLM's next reload continues with buffered tensors), a failed generation
        leaves requests whose completions the next one would return.
        """
        if self._failed:
            raise RuntimeError(
                f"A {self._failed} of this engine failed earlier, so nothing may be sampled from it. Start the process again, and "
                "resume from the last checkpoint."
            )
        try:
            with nullcontext() if self.alone else all_or_none(what, self.accelerator):
                yield
        except BaseException:  # Ctrl-C, too
            self._failed = what
            raise

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """TRL's `generate` after the sync check, timed without the syncs inside it."""
        with self._all_or_none("generation"):
            if self.sync_check is not None:
                self._check_sync(self.sync_check)
            start, synced = time.perf_counter(), self.sync_seconds
            several = self.mode == "colocate" and self.tensor_parallel_size > 1
            with _vllm.same_draws(self.tp_group) if several else nullcontext():
                result = super().generate(prompts, *args, **kwargs)
            if self.mode == "server":
                on_first(self.accelerator, lambda: self.vllm_client.raise_failure())
            lengths = [len(tokens) for tokens in result[1]]
            if len(lengths) != len(prompts) or 0 in lengths:
                found = f"{len(lengths)} completions for {len(prompts)} prompts, {lengths.count(0)} of them empty"
                raise RuntimeError(f"The engine returned {found}; its log above may say why.")
        self.rollout_seconds += time.perf_counter() - start - (self.sync_seconds - synced)
        return result

    def _check_sync(self, sync_check: SyncCheck) -> None:
        """Run the sync check if a new weight sync is due, and count its time as syncing."""
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()
        # Several, if nothing was sampled between them.
        new = range(self._checked + 1, self.num_syncs + 1)
        self._checked = self.num_syncs
        if not any(sync_check.due(number) for number in new):
            return
        start = time.perf_counter()
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        if self.mode == "server":  # a server never answers if a rank lacks weights
            on_first(self.accelerator, lambda: self.vllm_client.require_synced())
        sync_check.check(self.llm if self.mode == "colocate" else self, self.num_syncs)
        self.sync_seconds += time.perf_counter() - start

    def reset_clock(self) -> None:
        self.rollout_seconds = self.sync_seconds = 0.0


def low_bit_settings(model: nn.Module, quantization: dict[str, Any] | None, trust_remote_code: bool) -> dict[str, Any]:
    """
    The arguments of `vllm.LLM` for an engine that matches a `model` after `apply_quantization`.

    Random weights are safe, because TRL syncs before the first generation, also after a resume.
    """
    overrides = changed_positions(model.config, trust_remote_code)
    if quantization is not None:
        overrides["quantization_config"] = quantization
    return {"load_format": "dummy", "dtype": "bfloat16", "hf_overrides": overrides}


def changed_positions(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, Any]:
    """
    Position settings of the learner that differ from the config file that the engine reads.

    `model_init_kwargs` may extend the context; without these the engine would use another rotary embedding.
    """
    on_disk = AutoConfig.from_pretrained(config._name_or_path, trust_remote_code=trust_remote_code)
    names = ("max_position_embeddings", "rope_parameters")
    return {n: getattr(config, n) for n in names if hasattr(config, n) and getattr(config, n) != getattr(on_disk, n)}
