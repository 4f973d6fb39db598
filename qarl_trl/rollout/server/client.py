"""The trainer's side of a vLLM server.

TRL's client (`trl/generation/vllm_client.py`) sends weights from GPU to GPU, repeats requests that failed, and does
not know which weights the server holds. This one sends packed weights through files, repeats nothing, and names each
sync by a version, which it asks for before and after a batch: the server may have been started again, or another run
may have synced to it.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from torch import Tensor
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection

from ..sync_check.engine_logps import REQUEST
from ..vllm.adapters import ADAPTER_NAME, is_factor, save_adapter
from .facts import RANDOM
from .files import remove_leftovers, save_parts
from .key import find_key


# Not accelerate's: the first process alone connects, and the others do not log.
logger = logging.getLogger(__name__)

TIMEOUT = 2 * 60 * 60  # seconds for one answer, which may be a batch of long completions


class ServerClient(VLLMClient):
    """
    TRL's client for a server of `qarl-trl serve`: with its key, without retries, and with versions of the weights.

    Args:
        sync_folder: The folder through which weights go. Trainer and server both mount it.
        kwargs: TRL's arguments, of which `base_url` and `connection_timeout` (seconds) matter here.

    Attributes:
        version: Names the last sync by an id of this run and a number; `None` before the first sync and after a failed
            one.
    """

    def __init__(self, sync_folder: Any, **kwargs: Any) -> None:
        self.sync_folder = Path(sync_folder)
        self.version: str | None = None
        # Two runs that sync to one server must not take each other's weights for theirs.
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._needed: dict[str, Any] = {}
        self._failure: Exception | None = None
        # Whether TRL has sent images for the next `generate`.
        self._has_images = False
        # Last, because TRL's constructor calls `check_server`, which reads the folder's key.
        super().__init__(**kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """
        Wait until the server is ready. TRL calls it; its own waits forever if another program answers.

        Args:
            total_timeout: Wait at most so many seconds.
            retry_interval: Seconds between two attempts.

        Raises:
            ConnectionError: if no server is ready by then.
            PermissionError: if the server does not know the name by which it is asked.
        """
        self.base_url = self.base_url.rstrip("/")
        self._set_up_session()

        deadline = time.monotonic() + total_timeout
        is_waiting = False
        while True:
            try:
                answer = self.session.get(f"{self.base_url}/health", timeout=10)
                # Of our server's guard; it does not pass with time.
                if answer.status_code == 403:
                    raise PermissionError(f"The server {self.base_url} refuses this trainer: {answer.text[:2000]}")
                answer.raise_for_status()
                # Not before: the server makes its key when it starts.
                self.session.headers["Authorization"] = f"Bearer {find_key(self.sync_folder)}"
                return
            except requests.RequestException as error:
                if time.monotonic() >= deadline:
                    raise ConnectionError(
                        f"No vLLM server answers at {self.base_url} after {total_timeout:g} s (vllm_server_timeout): "
                        f"{error}. "
                        "Start one with `qarl-trl serve --config RECIPE` and give its address as vllm_server_base_url."
                    ) from error

            if not is_waiting:
                is_waiting = True
                logger.warning(
                    "No vLLM server answers at %s yet: waiting for up to %g s (vllm_server_timeout). "
                    "Start one with `qarl-trl serve --config RECIPE`.",
                    self.base_url,
                    total_timeout,
                )
            time.sleep(retry_interval)

    def _set_up_session(self) -> None:
        """Replace TRL's connections, which try again."""
        # No retries: the server may have sampled an answer that was lost.
        adapter = HTTPAdapter()
        adapter.init_poolmanager(1, 1, socket_options=HTTPConnection.default_socket_options + _keepalive_options())
        self.session.mount("http://", adapter)
        self.session.mount("https://", adapter)

        # Else a connection that the server closes between requests would look like a dead server.
        self.session.headers["Connection"] = "close"

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._ask("GET", url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> Any:
        # The server accepts only JSON, also where there is nothing to say.
        return self._ask("POST", url, **{"json": {}} | kwargs)

    def _ask(self, method: str, url: str, **kwargs: Any) -> Any:
        """The JSON of one answer; `{}` if it is empty. Raises what a trainer should stop with."""
        path = url.removeprefix(self.base_url)
        try:
            response = self.session.request(method, url, timeout=TIMEOUT, **kwargs)
        except requests.RequestException as error:
            raise ConnectionError(
                f"The server at {self.base_url} died or hung up during {path}. "
                "Start it, and resume from the last checkpoint."
            ) from error

        if response.status_code != 200:
            text = response.text[:2000]
            refusal = f"The server {self.base_url} refused {path} ({response.status_code}): {text}"
            if response.status_code == 401:
                raise PermissionError(refusal)
            raise RuntimeError(refusal)

        if not response.content:
            return {}
        return response.json()

    def ask_workers(self, method: str, *args: Any) -> list[Any]:
        """
        Call a method of `WorkerExtension` in all workers of the server.

        Args:
            method: Its name.
            args: Its arguments, which JSON can hold.

        Returns:
            The answer of each rank.

        Raises:
            RuntimeError: if the method failed in any rank.
        """
        answers = self._post(f"{self.base_url}/{method}", json=args)

        # `WorkerExtension.qarl` says why errors come as answers.
        failed = []
        for rank, answer in enumerate(answers):
            if answer and "error" in answer:
                failed.append(f"rank {rank}: {answer['error']}")
        if failed:
            raise RuntimeError(f"{method} failed in {len(failed)} of {len(answers)} ranks of the server: {failed[0]}")
        return answers

    def check(self, needed: dict[str, Any]) -> bool:
        """
        Refuse a server that is not the engine of this run.

        Args:
            needed: The facts that it must share, from [`engine_facts`].

        Returns:
            Whether its weights are random; otherwise they are those of an earlier sync, which may have failed.

        Raises:
            ValueError: if a fact differs, or if `qarl-trl serve` did not start the server.
        """
        try:
            states = self.ask_workers("qarl_state")
        except RuntimeError as error:
            raise ValueError(f"{error} Start the server with `qarl-trl serve --config RECIPE`.") from error

        self._needed = needed
        # With data parallelism only the ranks of the first engine answer, and vLLM's number counts those of all.
        needed = needed | {"ranks": len(states)}
        facts = states[0]["facts"] | {"ranks": self.get_world_size()}

        differing = [name for name in sorted(needed.keys() | facts.keys()) if needed.get(name) != facts.get(name)]
        if differing:
            words = [f"{name} must be {needed.get(name)!r}, got {facts.get(name)!r}" for name in differing[:3]]
            raise ValueError(
                f"The server at {self.base_url} is not the engine of this run: {'; '.join(words)}. "
                "Start it with `qarl-trl serve` and the recipe of this run, without data parallelism; "
                "it reads the model's files, not model_init_kwargs."
            )
        return all(state["version"] == RANDOM for state in states)

    def holds_last_sync(self) -> bool:
        """Whether the server still has the last sync of this run. If not, it may have been started again."""
        versions = {state["version"] for state in self.ask_workers("qarl_state")}
        return self.version is not None and versions == {self.version}

    def check_again(self) -> None:
        """Refuse (`ValueError`) a server that is not the engine of this run any more, as [`check`] did at first."""
        self.check(self._needed)

    def sync(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """
        Send checkpoint tensors, and mark them with the next version.

        Args:
            stream: Names and tensors of a whole checkpoint; beside a frozen base those of the adapter's factors after
                the base, or alone.

        Raises:
            RuntimeError: if the files cannot be written, or if a parameter of the server got no values.
        """
        self._count += 1
        version = f"{self._run}-{self._count}"
        # Until the sync is complete the server holds nothing that may be sampled from.
        self.version = None

        if self._count == 1:
            # Before a folder as large as theirs is written. No request, so no sync, is still running after the time
            # limit.
            for leftover in remove_leftovers(self.sync_folder, TIMEOUT):
                logger.warning("Removed %s: its trainer was killed during the sync.", leftover)
        folder = self.sync_folder / version
        folder.mkdir(parents=True)
        try:
            files = 0
            factors: dict[str, Tensor] = {}
            # Base and factors follow each other in the stream, so there is at most one part of each.
            for are_factors, part in groupby(stream, key=is_factor):
                if are_factors:
                    factors.update(part)
                else:
                    files = save_parts(part, folder)

            if factors:
                save_adapter(factors, folder)
            # When it returns, all workers have read the files.
            self.ask_workers("qarl_load", version, files, bool(factors))
        finally:
            # Also after a failure: the folder has the size of the model.
            shutil.rmtree(folder)

        # Its keys and values come from the old weights.
        answer = self._post(f"{self.base_url}/reset_prefix_cache")
        if answer.get("success") is False:
            raise RuntimeError("The server could not reset its prefix cache: others use it during a weight sync.")
        self.version = version
        if factors:
            # Requests name the adapter as their model; the server's own name means the base alone.
            self.model = ADAPTER_NAME

    def require_synced(self) -> None:
        """Raise (`RuntimeError`) unless every worker holds the last sync of this run."""
        versions = {state["version"] for state in self.ask_workers("qarl_state")}
        if self.version is None or versions != {self.version}:
            got = ", ".join(map(repr, versions))
            raise RuntimeError(
                f"The server at {self.base_url} must hold version {self.version!r} of the weights, got {got}: "
                "it was started again, a sync to it failed, or another run synced to it. "
                "Start it again, and resume from the last checkpoint."
            )

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """
        TRL's method, on the synced weights.

        Errors are not raised here but by [`raise_failure`], because other processes wait for an answer.

        Args:
            args: TRL's arguments.
            kwargs: TRL's arguments.

        Returns:
            TRL's answer; one without completions after an error.
        """
        try:
            if self._has_images:
                raise ValueError("vllm_mode='server' takes text only, got images in a prompt. Use 'colocate'.")
            self.require_synced()
            answer = super().generate(*args, **kwargs)
            # Again: another run may have synced to the server meanwhile.
            self.require_synced()
            return answer
        except Exception as error:
            # The first one. A later answer does not make up for it: whoever asked may have taken no answer for one.
            self._failure = self._failure or error
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None, "logprob_token_ids": None}
        finally:
            self._has_images = False

    def image_features(self, images: list[list[Any] | None], *args: Any, **kwargs: Any) -> list[None]:
        """
        TRL's method, for images within messages and those that a tool returns. A low-bit server takes none, which
        [`raise_failure`] says after the next `generate`.

        Args:
            images: The images of each prompt.
            args: TRL's other arguments.
            kwargs: TRL's other arguments.
        """
        self._has_images = True
        return [None] * len(images)

    def raise_failure(self) -> None:
        """Raise the first error of `generate` since the last call, if there was one."""
        failure = self._failure
        self._failure = None
        self._has_images = False
        if failure is not None:
            raise failure

    def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        """
        The server's log-probs of a prompt's tokens after the first, at temperature 1, for the sync check.

        The same request as that of [`engine_logps`] to a colocated engine, and the same answer as plain numbers.

        Args:
            token_ids: The prompt, `T` tokens.

        Returns:
            `T - 1` log-probs in nats.
        """
        body = {"model": self.model, "prompt": list(token_ids), **REQUEST}
        (choice,) = self._post(f"{self.base_url}/v1/completions", json=body)["choices"]

        # Each step maps tokens to log-probs, and JSON has them as text. The first token has no prediction.
        steps = zip(choice["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return [step[str(token)]["logprob"] for step, token in steps]


def _keepalive_options() -> list[tuple[int, int, int]]:
    """Socket options by which a machine that vanishes during a request is noticed after two minutes."""
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),  # seconds
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),  # seconds
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),  # milliseconds
    ]
