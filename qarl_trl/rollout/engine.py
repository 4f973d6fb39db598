"""The low-bit vLLM engine: started from a scheme, fed with synced tensors.

Invariant: the engine never reads weights from disk and never quantizes. All its weights come from weight syncs of the
learner's low-bit tensors (paper Sec. 3.1, steps 1 and 3).
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
from ..quant.store import iter_low_bit_weights
from ..quant.stream import renamed_stream
from . import _vllm, _vllm_layer, _vllm_lora
from .server import ServerClient
from .server_facts import engine_facts
from .sync_check import SyncCheck


class LowBitVLLMGeneration(VLLMGeneration):
    """
    TRL's vLLM, started in a low-bit scheme and fed with packed tensors; in mode "server" `qarl-trl serve` started it.

    Args:
        args, kwargs: Those of TRL's class; the model is the first of `args`.
        quantization_config: compressed-tensors' config for the engine; without it the engine runs in bfloat16.
        engine_kwargs: More arguments of `vllm.LLM`.
        frozen: The first sync sends the base, later ones only the adapter.
        sync_folder: A server gets its weights through this folder, which both mount.
        sync_check: Compares engine and learner after syncs; `None`: never.
        seed: The run's seed. TRL starts every run's engine with the same seeds.
        stop_token_ids: Tokens that end an answer for the trainer. The engine knows only those of the model's files.

    Attributes:
        rollout_seconds: Seconds of generation since `reset_clock`.
        sync_seconds: Seconds of syncs and their checks since `reset_clock`.
        synced_bytes: Size of the last sync.
        num_syncs: Number of syncs so far.
        alone: Whether this process generates while others may not, so that it must not wait for them.
    """

    alone = False
    _adapter_folder: TemporaryDirectory[str] | None = None  # vLLM loads the adapter of a frozen base from a file

    def __init__(
        self,
        *args: Any,
        quantization_config: dict[str, Any] | None,
        engine_kwargs: dict[str, Any] | None = None,
        frozen: bool = False,
        sync_folder: str | None = None,
        sync_check: SyncCheck | None = None,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        self.quantization_config = quantization_config
        self.engine_kwargs = engine_kwargs or {}
        self.sync_folder = sync_folder
        self.sync_check = sync_check
        self.seed = seed

        if frozen:
            model = kwargs.get("model", args[0] if args else None)
            self._adapter_folder = TemporaryDirectory(dir=_vllm_lora.adapter_place(model))

        self.synced_bytes = 0
        self.num_syncs = 0
        self._checked_syncs = 0
        self._failed: str | None = None
        self.reset_clock()
        super().__init__(*args, **kwargs)

        # The trainer decodes token ids itself. Text takes a fifth of the engine's CPU time, and only stop strings need
        # it.
        needs_text = bool(self.generation_kwargs.get("stop"))
        stops = {"detokenize": needs_text, "stop_token_ids": list(stop_token_ids)}
        self.generation_kwargs = stops | self.generation_kwargs

    # Start -----------------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._connect()
            return

        _vllm.keep_block_scales()
        _vllm.keep_cache_scales()
        if self.accelerator.num_processes == 1:
            from vllm.utils.network_utils import get_open_port

            os.environ.setdefault("MASTER_PORT", str(get_open_port()))  # two runs would race for TRL's four ports

        settings = low_bit_settings(self.model, self.quantization_config, self.trust_remote_code)
        if self._adapter_folder:
            from ..quant.frozen import adapter_tensors  # imports peft

            shapes = {name: tensor.shape for name, tensor in adapter_tensors(self.model)}
            settings |= _vllm_lora.lora_settings(shapes)

        # The ranks of one engine share a seed, and no two engines of a run do.
        engines = self.accelerator.num_processes // self.tensor_parallel_size
        settings["seed"] = self.seed * engines + self.accelerator.process_index // self.tensor_parallel_size

        # TRL puts the engine to sleep right after it builds it, so the sync check must score the random weights before
        # that.
        look = None if self.sync_check is None else self.sync_check.look_before
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

        holds_random_weights = on_first(self.accelerator, connect)
        if holds_random_weights and self.sync_check is not None:
            self.sync_check.look_before(self)

    def prompt_logps(self, token_ids: Sequence[int]) -> Tensor:
        """
        The server's log-probs of a prompt; all processes must call this.

        Args:
            token_ids: The prompt, `T` tokens.

        Returns:
            float32 `(T - 1,)`, of the tokens after the first.
        """
        return torch.tensor(on_first(self.accelerator, lambda: self.vllm_client.prompt_logps(token_ids)))

    # Weight sync -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Send the learner's current low-bit tensors to the engine, and clear its cached keys and values."""
        start = time.perf_counter()
        if self.enable_sleep_mode:
            clear_device_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

        self.synced_bytes = 0
        weights = self._counted(self._iter_named_params())
        with self._all_or_none("sync"):
            try:
                self._send(weights)
            except Exception:
                for _ in weights:  # the other processes still gather sharded weights with this one
                    pass
                raise

        self.num_syncs += 1
        self.sync_seconds += time.perf_counter() - start

    @property
    def _sends_base(self) -> bool:
        """Whether the next sync sends more than the adapter of a frozen base."""
        is_frozen = self._adapter_folder is not None
        engine_has_base = self.num_syncs > 0 and not self.enable_sleep_mode  # sleep drops it
        return not (is_frozen and engine_has_base)

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """
        The tensors that the next sync sends, by their names in a checkpoint. Collective: every process must iterate.
        """
        if self._sends_base:
            if self.quantization_config is None and is_peft_model(self.model):
                # TRL's own merges the adapter into the base weights and back, which changes them: low-bit layers must
                # not be sent that way, and a baseline is.
                yield from renamed_stream(self.model, super()._iter_named_params())
            else:
                yield from iter_low_bit_weights(self.model, self._dist.gather_params)

        if self._adapter_folder:
            from ..quant.frozen import adapter_tensors  # imports peft

            yield from adapter_tensors(self.model)

    def _counted(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.synced_bytes += tensor.nbytes
            yield name, tensor

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all `weights`. `weights` may be read to the end only in part if this raises."""
        if self.mode == "server":
            if self.accelerator.is_main_process:
                self.vllm_client.sync(weights)
            for _ in weights:  # the main process has read all of them; the others take part in its gathers
                pass
            return

        if self._adapter_folder:
            _vllm_lora.send(self.llm, weights, Path(self._adapter_folder.name))
        else:
            _vllm.reload_engine(self.llm, weights)
        _vllm.reset_prefix_cache(self.llm)

    # Generation ------------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """TRL's `generate` after the sync check, timed without the syncs inside it."""
        with self._all_or_none("generation"):
            if self.sync_check is not None:
                self._check_sync(self.sync_check)

            start = time.perf_counter()
            synced_before = self.sync_seconds
            has_several_ranks = self.mode == "colocate" and self.tensor_parallel_size > 1
            with _vllm.same_draws(self.tp_group) if has_several_ranks else nullcontext():
                result = super().generate(prompts, *args, **kwargs)
            if self.mode == "server":
                on_first(self.accelerator, lambda: self.vllm_client.raise_failure())
            _check_completions(result[1], len(prompts))

        synced = self.sync_seconds - synced_before
        self.rollout_seconds += time.perf_counter() - start - synced
        return result

    def _check_sync(self, sync_check: SyncCheck) -> None:
        """Run the sync check if a new weight sync is due, and count its time as syncing."""
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()

        # Several syncs are new if nothing was sampled between them.
        new_syncs = range(self._checked_syncs + 1, self.num_syncs + 1)
        self._checked_syncs = self.num_syncs
        if not any(sync_check.due(number) for number in new_syncs):
            return

        start = time.perf_counter()
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        if self.mode == "server":  # a server never answers if a rank lacks weights
            on_first(self.accelerator, lambda: self.vllm_client.require_synced())
        sync_check.check(self.llm if self.mode == "colocate" else self, self.num_syncs)
        self.sync_seconds += time.perf_counter() - start

    @contextmanager
    def _all_or_none(self, what: str) -> Iterator[None]:
        """
        Like [`all_or_none`]; in addition, after a failure the engine is refused.

        A failed sync leaves old and new weights in it (vLLM's next reload continues with buffered tensors), a failed
        generation leaves requests whose completions the next one would return.
        """
        if self._failed:
            raise RuntimeError(
                f"A {self._failed} of this engine failed earlier, so nothing may be sampled from it. Start the "
                "process again, and "
                "resume from the last checkpoint."
            )
        try:
            with nullcontext() if self.alone else all_or_none(what, self.accelerator):
                yield
        except BaseException:  # Ctrl-C, too
            self._failed = what
            raise

    def reset_clock(self) -> None:
        """Count the seconds of rollouts and syncs from now on."""
        self.rollout_seconds = 0.0
        self.sync_seconds = 0.0


def low_bit_settings(model: nn.Module, quantization: dict[str, Any] | None, trust_remote_code: bool) -> dict[str, Any]:
    """
    The arguments of `vllm.LLM` for an engine that matches a `model` after `apply_quantization`.

    Random weights are safe, because TRL syncs before the first generation, also after a resume.

    Args:
        model: The learner's model.
        quantization: compressed-tensors' config; `None` for an engine in bfloat16.
        trust_remote_code: As for `from_pretrained`.
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
    changed = {}
    for name in ("max_position_embeddings", "rope_parameters"):
        if hasattr(config, name) and getattr(config, name) != getattr(on_disk, name):
            changed[name] = getattr(config, name)
    return changed


def _check_completions(completions: Sequence[Sequence[int]], prompts: int) -> None:
    """Refuse (`RuntimeError`) missing and empty completions, which TRL would train on."""
    empty = sum(len(tokens) == 0 for tokens in completions)
    if len(completions) != prompts or empty:
        raise RuntimeError(
            f"The engine returned {len(completions)} completions for {prompts} prompts, {empty} of them empty; its "
            "log above may "
            "say why."
        )
