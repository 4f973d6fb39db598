"""The trainer's side of a vLLM server: what the server must run, weight syncs, and proof that its answers are of the last one."""

from __future__ import annotations

import json
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig
from trl.generation.vllm_client import VLLMClient
from urllib3.connection import HTTPConnection

from .._compat import installed_version
from .cpu import cpu_flags
from .server_guard import KEY, find_key


PART_BYTES = 2 << 30
# What a config says of how a model is read, trained or used, not of what it computes in an engine.
_NOT_THE_MODEL = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"),
    *("attention_dropout", "hidden_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}
_RESUME = "Nothing sampled since then is trained on: start the server, and resume from the last checkpoint."


class KeptAlive(HTTPAdapter):
    """
    Connections that ask whether the other machine is still there: an answer may take minutes, and one that left gives none.

    Idle ones by TCP's keepalive; what was sent and not acknowledged is sent again for a quarter of an hour by default.
    """

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        tcp = {
            socket.TCP_KEEPIDLE: 30,
            socket.TCP_KEEPINTVL: 15,
            socket.TCP_KEEPCNT: 8,
            socket.TCP_USER_TIMEOUT: 150_000,
        }
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *pair) for pair in tcp.items())]
        super().init_poolmanager(*args, socket_options=HTTPConnection.default_socket_options + options, **kwargs)


class ServerClient(VLLMClient):
    """
    TRL's client, for a server of `qarl-trl serve`: with its key, without retries, and with versions of the weights.

    Args:
        sync_folder (`str`, *optional*): Folder that the server sees too; without one weights go over NCCL.
        kwargs: Everything [`~trl.generation.vllm_client.VLLMClient`] takes.

    Attributes:
        version (`str`, *optional*): Of the last sync: unique to this run, and counted.
    """

    def __init__(self, sync_folder: str | None, **kwargs: Any) -> None:
        self.sync_folder = None if sync_folder is None else Path(sync_folder)
        self._run, self._count = uuid.uuid4().hex[:8], 0
        self.version: str | None = None
        self._failure: Exception | None = None
        super().__init__(**kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """
        Wait until the server is well, `total_timeout` seconds at most; TRL's waits for ever where something else answers.

        From then on a request that failed is not repeated: its answer may have been sampled.
        """
        self.base_url = self.base_url.rstrip("/")
        self.session.mount("http://", KeptAlive())
        self.session.mount("https://", KeptAlive())
        # Else a connection that the server closes in the meantime would look like a server that died.
        self.session.headers["Connection"] = "close"
        self.session.headers["Authorization"] = f"Bearer {find_key(self.sync_folder) or ''}"
        end = time.monotonic() + total_timeout
        while (found := self._health()) != "status 200":
            if time.monotonic() >= end:
                raise ConnectionError(
                    f"No vLLM server answers at {self.base_url}/health after {total_timeout:g} s (vllm_server_timeout), got "
                    f"{found}. Start one with `qarl-trl serve --config RECIPE` and give its address as vllm_server_base_url."
                )
            time.sleep(retry_interval)

    def _health(self) -> str:
        try:
            return f"status {self.session.get(f'{self.base_url}/health', timeout=10).status_code}"
        except requests.RequestException as error:
            return type(error).__name__

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """TRL's group of GPUs, where no folder takes its place."""
        if self.sync_folder is None:
            super().init_communicator(device)

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._ask(self.session.get, url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._ask(self.session.post, url, **{"json": {}, **kwargs})  # the server takes JSON alone

    def _ask(self, method: Callable[..., requests.Response], url: str, **kwargs: Any) -> dict[str, Any]:
        path = url.removeprefix(self.base_url)
        try:
            response = method(url, **kwargs)
        except requests.RequestException as error:
            raise ConnectionError(f"The server at {self.base_url} died or hung up during {path}. {_RESUME}") from error
        if response.status_code == 401:
            raise PermissionError(
                f"The server at {self.base_url} wants another key: set {KEY} to the one that `qarl-trl serve` printed."
            )
        if response.status_code != 200:
            raise RuntimeError(
                f"The server at {self.base_url} refused {path} ({response.status_code}): {response.text[:2000]}"
            )
        return response.json() if response.content else {}

    def _call(self, method: str, *args: str) -> list[Any]:
        """A method of [`~qarl_trl.rollout._vllm_server.WorkerExtension`] in all workers."""
        body = {"method": method, "args": args}
        answers = self._post(f"{self.base_url}/collective_rpc", json=body)["results"]
        failed = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if a and "error" in a]
        if failed:
            raise RuntimeError(
                f"{method} failed in {len(failed)} of {len(answers)} ranks of the server at {self.base_url}: "
                + "; ".join(failed[:2])
            )
        return answers

    def states(self) -> list[dict[str, Any]]:
        """What each worker runs (`WorkerExtension.qarl_state`)."""
        return self._call("qarl_state")

    def check(self, needed: dict[str, Any]) -> bool:
        """
        Refuse (`ValueError`) a server that does not run what `needed` says ([`needed_of_server`]).

        Returns:
            `bool`: Whether its weights are random; an earlier run may have left others.
        """
        try:
            states, ranks = self.states(), self.get_world_size()
        except RuntimeError as error:
            raise ValueError(f"{error} Start the server with `qarl-trl serve --config RECIPE`.") from error
        if ranks != len(states):
            raise ValueError(
                f"The server at {self.base_url} is data parallel: a weight sync needs --data_parallel_size 1."
            )
        found, wanted = states[0], json.loads(json.dumps(needed))
        # Of another version, or in a class of vLLM's own: it knows other fields, and writes their defaults.
        versions = {side["config"].get("transformers_version") for side in (found, wanted)}
        same_library = len(versions) == 1 and found["config_class"].startswith("transformers.")
        differing = differences(wanted, {name: found[name] for name in needed}, same_library=same_library)
        if differing:
            raise ValueError(
                f"The server at {self.base_url} is not the engine of this run: "
                + "; ".join(f"{name} must be {a!r}, got {b!r}" for name, (a, b) in list(differing.items())[:3])
                + ". Start it with `qarl-trl serve` and the recipe of this run; it reads the config of the model's files, not what "
                "model_init_kwargs changes in it."
            )
        return all(state["random"] for state in states)

    def sync(self, stream: Iterable[tuple[str, Tensor]], metadata: list[tuple] | None, device: Any) -> None:
        """
        Send checkpoint tensors, and mark them with the next version. `metadata` of NCCL's: name, dtype, shape.

        Raises:
            RuntimeError: when the server did not take all it has a place for.
        """
        self._count += 1
        version, self.version = f"{self._run}-{self._count}", None
        if self.sync_folder is None:
            self._call("qarl_mark", "")  # until all of it is there
            # vLLM broadcasts on streams of its own, which do not wait for the optimizer, nor the optimizer for them.
            _wait_for_device()
            self.update_named_params(metadata, ((name, tensor.to(device)) for name, tensor in stream))
            _wait_for_device()
            self._call("qarl_mark", version)
        else:
            self._sync_files(stream, version)
        self.reset_prefix_cache()
        self.version = version

    def _sync_files(self, stream: Iterable[tuple[str, Tensor]], version: str) -> None:
        folder = self.sync_folder / version
        folder.mkdir(parents=True)
        try:
            self._call("qarl_load", version, json.dumps(save_parts(stream, folder)))
        finally:
            shutil.rmtree(folder)

    def reset_prefix_cache(self) -> None:
        """TRL's; an engine that refuses raises. Of images too nothing of the old weights stays."""
        self._post(f"{self.base_url}/reset_encoder_cache")
        if self._post(f"{self.base_url}/reset_prefix_cache").get("success") is False:
            raise RuntimeError("The server could not reset its prefix cache: others use it during a weight sync.")

    def require_synced(self) -> None:
        """Raise (`RuntimeError`) unless every worker holds the last sync of this run."""
        found = {state["version"] for state in self.states()}
        if self.version is None or found != {self.version}:
            raise RuntimeError(
                f"The server at {self.base_url} must hold version {self.version!r} of the weights, got "
                f"{', '.join(map(repr, found))}: it was started again, or other weights were sent to it (None: not by a "
                f"sync). {_RESUME}"
            )

    def generate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """TRL's, of the synced weights. What fails is raised by `raise_failure`: other processes wait for an answer."""
        try:
            self.require_synced()
            answer = super().generate(*args, **kwargs)
            self.require_synced()
            return answer
        except Exception as error:
            self._failure = error
            return {"prompt_ids": [], "completion_ids": [], "logprobs": None, "logprob_token_ids": None}

    def raise_failure(self) -> None:
        """Raise what the last `generate` ran into."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def prompt_logps(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a prompt's tokens after the first, at temperature 1."""
        body = {
            "model": self.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        (choice,) = self._post(f"{self.base_url}/v1/completions", json=body)["choices"]
        steps = zip(choice["prompt_logprobs"][1:], token_ids[1:], strict=True)
        return [step[str(token)]["logprob"] for step, token in steps]


def engine_facts(device_type: str) -> dict[str, Any]:
    """What decides how an engine rounds, beside its settings."""
    facts = {"device": device_type, "vllm": installed_version("vllm")}
    return facts | ({"avx512_bf16": "avx512_bf16" in cpu_flags()} if device_type == "cpu" else {})


def needed_of_server(
    config: PretrainedConfig,
    quantization_config: dict[str, Any] | None,
    device_type: str,
    transport: str,
    eos_token_id: int | None,
) -> dict[str, Any]:
    """The part of a worker's state that a learner with this `config` needs."""
    model = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    # The engine stops at the end-of-text token of its own tokenizer.
    engine = {"dtype": "bfloat16", "logprobs_mode": "processed_logprobs", "transport": transport}
    return {
        "quantization_config": quantization_config,
        "config": model,
        "engine": engine_facts(device_type) | engine | {"eos_token_id": eos_token_id},
    }


def differences(wanted: Any, found: Any, name: str = "", same_library: bool = True) -> dict[str, tuple[Any, Any]]:
    """
    By dotted name, what is and what should be where two states ([`needed_of_server`], as JSON has them) differ; `None` for nothing.

    Without `same_library` a field counts that both model configs have, with it also one that either has.
    """
    if not (isinstance(wanted, dict) or isinstance(found, dict)):
        return {} if wanted == found else {name: (wanted, found)}
    both = isinstance(wanted, dict) and isinstance(found, dict)
    wanted, found = (side if isinstance(side, dict) else {} for side in (wanted, found))
    names = wanted.keys() | found.keys()
    if name.partition(".")[0] == "config":
        names = {n for n in names if not (n.startswith("_") or n.endswith("token_id") or n in _NOT_THE_MODEL)}
        if both and not same_library and (name == "config" or name.endswith("_config")):
            names &= wanted.keys() & found.keys()
    differing: dict[str, tuple[Any, Any]] = {}
    for n in sorted(names):
        differing |= differences(wanted.get(n), found.get(n), f"{name}.{n}".lstrip("."), same_library)
    return differing


def save_parts(stream: Iterable[tuple[str, Tensor]], folder: Path, limit: int = PART_BYTES) -> list[list[str]]:
    """
    Write the tensors of a stream into `0.safetensors`, `1.safetensors`..., each ended when it has `limit` bytes.

    Returns the names in each file in order, which the file does not keep. `RuntimeError` when the folder is full.
    """
    parts: list[list[str]] = []

    def save() -> None:
        path = folder / f"{len(parts)}.safetensors"
        try:
            path.touch()
            mode = path.stat().st_mode
            save_file(part, path)
            path.chmod(mode)  # safetensors 0.8 lets nobody else read it, and the server may be another user's
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(folder).free / 2**30
            raise RuntimeError(
                f"The sync could not be written below sync_folder {str(folder.parent)!r}, which has {free:.2f} GiB free: {error}. "
                "The server was not touched. Make room, and resume from the last checkpoint."
            ) from error
        parts.append(list(part))

    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in stream:
        # A copy: safetensors refuses tensors that share a storage, as the experts of a layer do.
        part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        if size >= limit:
            save()
            part, size = {}, 0
    if part:
        save()
    return parts


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
