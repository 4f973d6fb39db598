"""The trainer's side of a vLLM server: check what it runs, sync weights, and verify that it answers with the last sync."""

from __future__ import annotations

import json
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import flatten_dict
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection

from .._compat import installed_version
from .server_guard import find_key


PART_BYTES = 2 << 30
TIMEOUT = 2 * 60 * 60  # seconds for one answer, which may be a batch of long completions
# Config fields that determine a text model; a learner and an engine with different files differ in one of these.
_OF_THE_MODEL = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "sliding_window",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


class ServerClient(VLLMClient):
    """
    TRL's client for a server of `qarl-trl serve`: with its key, without retries, and with versions of the weights.

    Weights go through `sync_folder`. `version` names the last sync: an id of this run and a number.
    """

    def __init__(self, sync_folder: Any, **kwargs: Any) -> None:
        self.sync_folder = Path(sync_folder)
        self._run, self._count = uuid.uuid4().hex[:8], 0
        self.version: str | None = None
        self._failure: Exception | None = None
        super().__init__(**kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is ready, at most `total_timeout` seconds; TRL's waits forever if another program answers."""
        self.base_url = self.base_url.rstrip("/")
        adapter = HTTPAdapter()  # no retries: the server may have sampled a lost answer
        # Keepalive packets: notice a machine that vanishes during a request after two minutes (the last value is in ms).
        probes = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_USER_TIMEOUT: 120_000}
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [(socket.IPPROTO_TCP, *p) for p in probes.items()]
        adapter.init_poolmanager(1, 1, socket_options=HTTPConnection.default_socket_options + options)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, adapter)
        # Else a connection that the server closes between requests would look like a dead server.
        self.session.headers["Connection"] = "close"
        self.session.headers["Authorization"] = f"Bearer {find_key(self.sync_folder)}"
        end = time.monotonic() + total_timeout
        while True:
            try:
                return self.session.get(f"{self.base_url}/health", timeout=10).raise_for_status()
            except requests.RequestException as error:
                if time.monotonic() >= end:
                    raise ConnectionError(
                        f"No vLLM server answers at {self.base_url} after {total_timeout:g} s (vllm_server_timeout): {error}. "
                        "Start one with `qarl-trl serve --config RECIPE` and give its address as vllm_server_base_url."
                    ) from error
            time.sleep(retry_interval)

    def _ask(self, method: str, url: str, **kwargs: Any) -> dict[str, Any]:
        path = url.removeprefix(self.base_url)
        try:
            body: dict[str, Any] = {"json": {}} if method == "POST" else {}  # the server accepts only JSON
            response = self.session.request(method, url, timeout=TIMEOUT, **body | kwargs)
        except requests.RequestException as error:
            raise ConnectionError(
                f"The server at {self.base_url} died or hung up during {path}. Start it, and resume from the last checkpoint."
            ) from error
        if response.status_code != 200:
            kind = PermissionError if response.status_code == 401 else RuntimeError
            raise kind(f"The server {self.base_url} refused {path} ({response.status_code}): {response.text[:2000]}")
        return response.json() if response.content else {}

    _get = partialmethod(_ask, "GET")
    _post = partialmethod(_ask, "POST")

    def ask_workers(self, method: str, *args: Any) -> list[Any]:
        """The answers of all workers to a method of `WorkerExtension`; `RuntimeError` when it failed in any."""
        answers = self._post(f"{self.base_url}/{method}", json=args)
        failed = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if a and "error" in a]
        if failed:
            raise RuntimeError(f"{method} failed in {len(failed)} of {len(answers)} ranks of the server: {failed[0]}")
        return answers

    def check(self, needed: dict[str, Any]) -> bool:
        """
        Refuse (`ValueError`) a server whose facts differ from `needed` ([`engine_facts`]).

        Returns whether its weights are random; otherwise they are those of an earlier run.
        """
        try:
            states = self.ask_workers("qarl_state")
        except RuntimeError as error:
            raise ValueError(f"{error} Start the server with `qarl-trl serve --config RECIPE`.") from error
        needed, found = needed | {"ranks": len(states)}, states[0]["facts"] | {"ranks": self.get_world_size()}
        differing = [name for name in sorted({*needed, *found}) if needed.get(name) != found.get(name)]
        if differing:
            words = [f"{name} must be {needed.get(name)!r}, got {found.get(name)!r}" for name in differing[:3]]
            raise ValueError(
                f"The server at {self.base_url} is not the engine of this run: {'; '.join(words)}. Start it with `qarl-trl serve` "
                "and the recipe of this run, without data parallelism; it reads the model's files, not model_init_kwargs."
            )
        return all(state["version"] is None for state in states)

    def sync(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """
        Send checkpoint tensors, and mark them with the next version.

        `RuntimeError` if a parameter of the server got no values.
        """
        self._count += 1
        version, self.version = f"{self._run}-{self._count}", None
        folder = self.sync_folder / version
        folder.mkdir(parents=True)
        try:
            self.ask_workers("qarl_load", version, save_parts(stream, folder))
        finally:
            shutil.rmtree(folder)
        if self._post(f"{self.base_url}/reset_prefix_cache").get("success") is False:
            raise RuntimeError("The server could not reset its prefix cache: others use it during a weight sync.")
        self.version = version

    def require_synced(self) -> None:
        """Raise (`RuntimeError`) unless every worker holds the last sync of this run."""
        found = {state["version"] for state in self.ask_workers("qarl_state")}
        if self.version is None or found != {self.version}:
            raise RuntimeError(
                f"The server at {self.base_url} must hold version {self.version!r} of the weights, got "
                f"{', '.join(map(repr, found))}: it was started again, a sync to it failed, or another run synced to it. Start "
                "it again, and resume from the last checkpoint."
            )

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """TRL's method, on the synced weights. `raise_failure` raises its errors later, because other processes wait for an answer."""
        try:
            self.require_synced()
            answer = super().generate(*args, **kwargs)
            self.require_synced()
            return answer
        except Exception as error:
            self._failure = error
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None, "logprob_token_ids": None}

    def raise_failure(self) -> None:
        """Raise the error of the last `generate`, if there was one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a prompt's tokens after the first, at temperature 1."""
        asked = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        body = {"model": self.model, "prompt": list(token_ids), **asked}
        (choice,) = self._post(f"{self.base_url}/v1/completions", json=body)["choices"]
        steps = zip(choice["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return [step[str(token)]["logprob"] for step, token in steps]


def engine_facts(config: PretrainedConfig, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """Facts that learner and server must share, by dotted name."""
    text = config.get_text_config()
    facts = {
        "config": {name: getattr(text, name, None) for name in _OF_THE_MODEL},
        "quantization_config": quantization,
        "vllm": installed_version("vllm"),
    }
    return {name: value for name, value in flatten_dict(json.loads(json.dumps(facts))).items() if value != {}}


def save_parts(stream: Iterable[tuple[str, Tensor]], folder: Path, limit: int = PART_BYTES) -> int:
    """
    Write the tensors of a stream into `0.safetensors`, `1.safetensors`...; a file ends when it has `limit` bytes.

    Returns the number of files. `RuntimeError` if they cannot be written.
    """
    number, size, part = 0, 0, dict[str, Tensor]()

    def save() -> None:
        path = folder / f"{number}.safetensors"
        try:
            path.touch()
            mode = path.stat().st_mode
            save_file(part, path)
            path.chmod(mode)  # safetensors 0.8 makes it private, but the server may run as another user
        except (OSError, SafetensorError) as error:
            raise RuntimeError(
                f"The sync could not be written below sync_folder {str(folder.parent)!r}: {error}. The server was not touched. "
                "Make room, and resume from the last checkpoint."
            ) from error

    for name, tensor in stream:
        # A copy, because safetensors refuses tensors that share storage, and the experts of a layer do.
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        if size >= limit:
            save()
            number, size, part = number + 1, 0, {}
    if part:
        save()
        number += 1
    return number
