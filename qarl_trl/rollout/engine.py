"""The low-bit vLLM engine of a run (paper Sec. 3.1, steps 1 and 3), here or in a server.

TRL's `VLLMGeneration` (TRL 1.16, `trl/generation/vllm_generation.py`) starts vLLM from the model's checkpoint, sends
high-precision parameters to it, and samples. [`LowBitVLLMGeneration`] is the same in a low-bit scheme:

1. build: the engine starts in the scheme of the run with random weights. It never reads the weights of the model's
   checkpoint, and never quantizes.
2. sync: whatever it samples with comes from a weight sync of the learner's low-bit tensors. A colocated engine gets
   them in memory, except the adapter of a frozen base, which vLLM loads only from a file. A server gets all of them
   through files.
3. check: after a sync that is due, engine and learner must agree on a prompt (`sync_check/`).
4. generate: TRL samples. If the engine sleeps between rollouts, which throws its weights away (level 2), TRL wakes it
   and syncs again.

What reaches into vLLM is in `vllm/`, what talks to a server in `server/`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from trl.generation.vllm_generation import VLLMGeneration

from .._compat.rollout_batch import extracted_by
from ..guards import all_or_none, on_first
from ..quant.layers.late_adapters import check_late_adapters
from ..quant.names import is_peft_model
from ..quant.store import iter_low_bit_weights
from ..quant.stream import renamed_stream
from ..quant.weight_stream import WeightStream
from .adapter_folder import AdapterFolder, adapter_place
from .engine_settings import low_bit_settings
from .images import check_engine_prompts, with_single_tokens
from .sampling_parameters import sampling_parameters
from .server.client import ServerClient
from .server.facts import engine_facts
from .sync_check.check import SyncCheck
from .sync_check.engine_logps import engine_logps
from .vllm import adapters, linear_layer, reloading, sampling, start
from .vllm.flat_logprobs import extract_logprobs
from .vllm.random_start import keep_constants


class LowBitVLLMGeneration(VLLMGeneration):
    """
    TRL's vLLM, started in a low-bit scheme and fed with packed tensors; in mode "server" `qarl-trl serve` started it.

    After a failure it refuses to sync, to check and to generate.

    Args:
        model: The learner's model; in a low-bit run after `apply_quantization`.
        args: TRL's other arguments.
        quantization_config: compressed-tensors' config for the engine; without it the engine runs in bfloat16.
        engine_kwargs: More arguments of `vllm.LLM`.
        frozen: The first sync sends the base, later ones only the adapter.
        sync_folder: A server gets its weights through this folder, which both mount.
        sync_check: Compares engine and learner after syncs; `None`: never.
        seed: The run's seed, for colocated engines: TRL starts those of every run alike. A server has its own.
        stop_token_ids: Tokens that end an answer for the trainer, and no others do. `None`: the trainer has no such
            list, and those of the model's files end it.
        kwargs: TRL's other arguments.

    Attributes:
        rollout_seconds: Seconds of generation since `reset_clock`.
        sync_seconds: Seconds of syncs and their checks since `reset_clock`.
        synced_bytes: Size of the last sync.
        num_syncs: Number of syncs so far.
        frozen: Whether syncs send the base once and then only the adapter.
        alone: Whether this process generates while others may not, so that it must not wait for them.
    """

    alone = False
    frozen = False
    _adapter_folder: AdapterFolder  # of a colocated engine beside a frozen base, which loads the adapter from a file

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        quantization_config: dict[str, Any] | None,
        engine_kwargs: dict[str, Any] | None = None,
        frozen: bool = False,
        sync_folder: str | None = None,
        sync_check: SyncCheck | None = None,
        seed: int = 0,
        stop_token_ids: Sequence[int | None] | None = None,
        **kwargs: Any,
    ) -> None:
        self.quantization_config = quantization_config
        self.engine_kwargs = engine_kwargs or {}
        self.sync_folder = sync_folder
        self.sync_check = sync_check
        self.seed = seed
        self.frozen = frozen

        self.synced_bytes = 0
        self.num_syncs = 0
        self._failed: str | None = None  # what failed first
        self.reset_clock()

        # Last, because TRL's constructor calls `_init_vllm`.
        super().__init__(model, *args, **kwargs)
        # After TRL's constructor, which puts the user's there.
        self.generation_kwargs = sampling_parameters(
            self.generation_kwargs, stop_token_ids, is_colocated=self.mode == "colocate"
        )

    # Build -----------------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        """TRL's method: start the engine in this process, or find the server."""
        if self.mode == "server":
            self._connect()
        else:
            self._start_engine()

    def _start_engine(self) -> None:
        """Let TRL build a `vllm.LLM`, by our arguments and in vLLM's settings that keep synced tensors as they are."""
        start.keep_block_scales()
        start.keep_learner_eager()
        keep_constants()
        if self.accelerator.num_processes == 1:
            start.choose_master_port()

        # What the run decides wins over what the user sets.
        with start.llm_arguments(self._look_before, **self.engine_kwargs | self._llm_arguments()):
            super()._init_vllm()
        linear_layer.use_settings_of(self.llm)

        if self.frozen:
            self._adapter_folder = AdapterFolder(adapter_place(self.model))
            adapters.sample_with(self.llm, self._adapter_folder.path)

    def _look_before(self, llm: Any) -> None:
        """Let the sync check score the random weights: TRL puts the engine to sleep right after it built it."""
        if self.sync_check is not None:
            self.sync_check.look_before(partial(engine_logps, llm))

    def _llm_arguments(self) -> dict[str, Any]:
        """The arguments of `vllm.LLM` that TRL does not give, or gives differently."""
        arguments = low_bit_settings(self.model, self.quantization_config, self.trust_remote_code)
        if self.frozen:
            arguments |= adapters.settings_of(self.model)

        # The ranks of one engine share a seed, and no two engines of a run do.
        engines = self.accelerator.num_processes // self.tensor_parallel_size
        number_of_engine = self.accelerator.process_index // self.tensor_parallel_size
        # numpy, which the engine seeds, takes 32 bits.
        arguments["seed"] = (self.seed * engines + number_of_engine) % 2**32
        return arguments

    def _connect(self) -> None:
        """Find the server, refuse one that does not match this run, and let the sync check score random weights."""
        self.enable_sleep_mode = False  # the server has GPUs of its own
        cache_dtype = self.engine_kwargs.get("kv_cache_dtype", "auto")
        adapter = adapters.settings_of(self.model) if self.frozen else None
        needed = engine_facts(self.model.config, self.quantization_config, cache_dtype, adapter)

        def connect() -> bool:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = ServerClient(self.sync_folder, base_url=url, connection_timeout=self.server_timeout)
            return self.vllm_client.check(needed)

        holds_random_weights = on_first(self.accelerator, connect)
        if holds_random_weights and self.sync_check is not None:
            self.sync_check.look_before(self.prompt_logps)

    def _compare_if_restarted(self) -> None:
        """Compare a server with this run as at the start, if it was started again since the last sync."""

        def is_another_engine() -> bool:
            if self.vllm_client.holds_last_sync():
                return False
            self.vllm_client.check_again()
            return True

        if on_first(self.accelerator, is_another_engine) and self.sync_check is not None:
            # The next sync is the first of that engine.
            self.sync_check.asked = True

    # Sync ------------------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """
        Send the learner's current low-bit tensors to the engine, clear its cached keys and values, and run the sync
        check if it is due: here, because a `rollout_func` samples without `generate`.
        """
        began = time.perf_counter()
        # As TRL's method does. The engine takes its memory from the device, so torch first gives back what its cache
        # holds.
        if self.enable_sleep_mode:
            clear_device_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False

        if self.mode == "server" and self.num_syncs > 0:
            self._compare_if_restarted()

        weights = WeightStream(self._iter_named_params())
        # In this order: a process that failed reads the stream to its end before the others hear of it.
        with self._all_or_none("sync"), weights.read_to_the_end():
            self._send(iter(weights))

        self.synced_bytes = weights.bytes_read
        self.num_syncs += 1
        if self.sync_check is not None and self.sync_check.due(self.num_syncs):
            with self._all_or_none("sync check"):
                self._check_sync(self.sync_check)
        self.sync_seconds += time.perf_counter() - began

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """
        The tensors that the next sync sends, by their names in a checkpoint. All processes must read them together.
        """
        if self._sends_base:
            if self.quantization_config is None and is_peft_model(self.model):
                # TRL's own merges the adapter into the base weights and back, which changes them: low-bit layers must
                # not be sent that way, and a baseline is.
                yield from renamed_stream(self.model, super()._iter_named_params())
            else:
                yield from iter_low_bit_weights(self.model, self._dist.gather_params, stacked=True)

        if self.frozen:
            from ..quant.layers.frozen import adapter_tensors  # imports peft

            check_late_adapters(self.model)
            yield from adapter_tensors(self.model)

    @property
    def _sends_base(self) -> bool:
        """Whether the next sync sends more than the adapter of a frozen base."""
        engine_has_base = self.num_syncs > 0 and not self.enable_sleep_mode  # sleep drops it
        return not (self.frozen and engine_has_base)

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """
        Send all weights, and clear cached keys and values. If this raises, `weights` may be only partly consumed.
        """
        if self.mode == "server":
            # The other processes send nothing, and only take part in reading.
            if self.accelerator.is_main_process:
                self.vllm_client.sync(weights)
            return

        if self.frozen:
            adapters.send(self.llm, weights, self._adapter_folder.path)
        else:
            reloading.reload_engine(self.llm, weights)
        reloading.reset_prefix_cache(self.llm)

    # Check -----------------------------------------------------------------------------------------------------------

    def _check_sync(self, sync_check: SyncCheck) -> None:
        """Compare the engine with the learner."""
        if self.mode != "server":
            if self.enable_sleep_mode:
                self.llm.wake_up(tags=["kv_cache"])
            sync_check.check(self.prompt_logps, self.num_syncs)
            return

        # First, because a server never answers if a rank lacks weights.
        on_first(self.accelerator, lambda: self.vllm_client.require_synced())
        try:
            sync_check.check(self.prompt_logps, self.num_syncs)
        except Exception:
            # If another run has synced to the server meanwhile, that is the reason, and not what the check says.
            on_first(self.accelerator, lambda: self.vllm_client.require_synced())
            raise

    def prompt_logps(self, token_ids: Sequence[int]) -> Tensor:
        """
        The engine's log-probs of a prompt. With a server all processes must call this together.

        Args:
            token_ids: The prompt, `T` tokens.

        Returns:
            `(T - 1,)` float32, of the tokens after the first. The main process asks a server; all get its answer.
        """
        if self.mode == "server":
            return torch.tensor(on_first(self.accelerator, lambda: self.vllm_client.prompt_logps(token_ids)))
        return engine_logps(self.llm, token_ids)

    # Generate --------------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """
        TRL's `generate`, after the first sync and timed without the syncs inside it: it syncs an engine whose sleep
        discarded the weights.

        Args:
            prompts: Token ids of each prompt.
            args: TRL's other arguments.
            kwargs: TRL's other arguments.

        Returns:
            TRL's answer: token ids of prompts and completions, and the engine's log-probs of the completions.

        Raises:
            RuntimeError: if a completion is missing or empty, for images that the engine puts in differently, or after
                an earlier failure.
        """
        # Until then a colocated engine has random weights. TRL's has the start's, and so a callback may ask it before
        # training, and a resumed trainer samples before its next sync is due (`vllm_sync_frequency`). A server says so
        # itself: it may have a policy of another run.
        if self.mode == "colocate" and self.num_syncs == 0:
            self.sync_weights()

        with self._all_or_none("generation"):
            began = time.perf_counter()
            synced_before = self.sync_seconds
            call = inspect.signature(super().generate).bind(prompts, *args, **kwargs)
            if self.mode == "server":
                call.arguments["num_generations"] = self._answers_a_prompt(prompts, call.arguments["num_generations"])
            # A server takes none (`validate/rollouts.py`).
            has_images = self.mode == "colocate" and call.arguments.get("images") is not None
            if has_images:
                image_token = getattr(self.processing_class, "image_token_id", None)
                call.arguments["prompts"] = with_single_tokens(prompts, image_token)

            with self._same_draws(), extracted_by(extract_logprobs):
                result = super().generate(*call.args, **call.kwargs)
            if has_images:
                check_engine_prompts(prompts, result[0])
            if self.mode == "server":
                on_first(self.accelerator, lambda: self.vllm_client.raise_failure())
            _check_completions(result[1], len(prompts))

        synced = self.sync_seconds - synced_before
        self.rollout_seconds += time.perf_counter() - began - synced
        return result

    def _answers_a_prompt(self, prompts: list[list[int]], num_generations: int) -> int:
        """
        How many answers to ask the server for at a time, which gets each prompt once: 1 if the prompts of a group
        differ.

        TRL sends the first prompt of each group. An environment (`environment_factory`) writes its observation into
        the prompt, another one in each rollout, and the others would get answers to the first one's.
        """
        of_all = gather_object(prompts)  # as TRL does
        for first in range(0, len(of_all), num_generations):
            if any(prompt != of_all[first] for prompt in of_all[first : first + num_generations]):
                return 1
        return num_generations

    def _same_draws(self) -> Any:
        """The context in which the ranks of an engine draw the same seeds."""
        has_several_ranks = self.mode == "colocate" and self.tensor_parallel_size > 1
        return sampling.same_draws(self.tp_group) if has_several_ranks else nullcontext()

    def reset_clock(self) -> None:
        """Count the seconds of rollouts and syncs from now on."""
        self.rollout_seconds = 0.0
        self.sync_seconds = 0.0

    # Failures --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _all_or_none(self, what: str) -> Iterator[None]:
        """
        Like [`all_or_none`]; in addition, after a failure the engine is refused.

        A failed sync leaves old and new weights in it (vLLM's next reload continues with buffered tensors), a failed
        generation leaves requests whose completions the next one would return.
        """
        if self._failed:
            raise RuntimeError(
                f"A {self._failed} of this engine failed earlier, so nothing may be sampled from it. "
                "Start the process again, and resume from the last checkpoint."
            )
        try:
            with nullcontext() if self.alone else all_or_none(what, self.accelerator):
                yield
        except BaseException:  # Ctrl-C, too
            self._failed = what
            raise


def _check_completions(completions: Sequence[Sequence[int]], prompts: int) -> None:
    """Refuse (`RuntimeError`) missing and empty completions, which TRL would train on."""
    empty = sum(len(tokens) == 0 for tokens in completions)
    if len(completions) != prompts or empty:
        raise RuntimeError(
            f"The engine returned {len(completions)} completions for {prompts} prompts, {empty} of them empty; "
            "its log above may say why."
        )
