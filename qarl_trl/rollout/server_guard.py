"""Who may ask a server of `qarl-trl serve`, and for what: middleware of its web server, which its command line names."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit


if TYPE_CHECKING:
    from starlette.requests import Request

KEY = "VLLM_API_KEY"
HOSTS = "QARL_SERVER_HOSTS"  # names, separated by commas, that requests may come by
OPEN = ("/health",)
# What a trainer asks, and what an engine's owner reads. vLLM's own routes for weights are open to NCCL alone, which needs them.
PATHS = ("/v1/models", "/v1/completions", "/get_world_size", "/server_info", "/metrics", "/collective_rpc")
PATHS += ("/reset_prefix_cache", "/reset_encoder_cache")
NCCL_PATHS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")
NCCL = "QARL_SERVER_NCCL"
# Of [`~qarl_trl.rollout._vllm_server.WorkerExtension`]; `/collective_rpc` would call any method of a worker.
METHODS = ("qarl_load", "qarl_name", "qarl_state")


class Guard:
    """
    ASGI middleware: the key on every path, a list of paths and methods, no browsers, and an answer when the engine dies.

    vLLM's own asks for the key on `/v1` alone, so that any web page open on the machine could replace the weights. Who asks its
    workers for something, as a sync does, waits for ever when the engine's process is killed meanwhile.
    """

    def __init__(self, app: Any) -> None:
        if not os.environ.get(KEY):
            raise RuntimeError(f"{KEY} must be set: start the server with `qarl-trl serve`.")
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.requests import Request  # comes with vLLM, which a trainer may lack
        from starlette.responses import PlainTextResponse

        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # a websocket, which is closed
        request = Request(scope, receive)
        status, text = self.refusal(request)
        if not status and scope["path"] == "/collective_rpc":
            body = await request.body()
            unread = [{"type": "http.request", "body": body}]

            async def receive_again() -> Any:
                return unread.pop() if unread else await receive()

            receive, method = receive_again, _method(body)
            if method not in METHODS:
                status, text = 403, f"The method must be one of {', '.join(METHODS)}, got {method!r}."
        if not status and not await _finished(self.app(scope, receive, send), request.app.state.engine_client):
            status, text = 500, "The engine of this server died: start it again."
        if status:
            await PlainTextResponse(text, status)(scope, receive, send)

    def refusal(self, request: Request) -> tuple[int, str]:
        """The status and text with which a request is refused; 0 for none."""
        headers, path = request.headers, request.scope["path"]  # `request.url` has what the Host header says
        if not _known(headers.get("host", "")):  # a web page's own name that points here
            return 403, f"The Host must be an address or a name of this server, got {headers.get('host')!r}."
        if "origin" in headers:
            return 403, "Requests of web pages (with an Origin) are refused."
        if path in OPEN:
            return 0, ""
        if not hmac.compare_digest(headers.get("authorization", "").encode(), self.expected):
            return 401, f"The server wants another key: set {KEY} to the one that `qarl-trl serve` printed."
        if path not in PATHS + (NCCL_PATHS if os.environ.get(NCCL) else ()):
            return 404, f"This server answers a trainer alone, and has no {path}."
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if request.method not in ("GET", "HEAD") and kind != "application/json":
            return 415, f"The content must be application/json, got {kind!r}."
        return 0, ""


def is_local(host: str) -> bool:
    """Whether a name is this machine's own and no other machine's."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def key_file(sync_folder: str) -> Path:
    """Where a server keeps the key that it made, beside its sync folder, for a trainer that sees the same folder."""
    folder = Path(sync_folder).resolve()
    return folder.with_name(f"{folder.name}.key")


def find_key(sync_folder: str | None) -> str | None:
    """The key of the environment, or the one that a server stored; `None` where there is none."""
    if os.environ.get(KEY):
        return os.environ[KEY]
    path = None if sync_folder is None else key_file(sync_folder)
    return path.read_text().strip() if path is not None and path.is_file() else None


def make_key(sync_folder: str | None) -> str:
    """A new key, stored so that only this user can read it, where there is a sync folder to store it beside."""
    key = secrets.token_hex(16)
    if sync_folder is not None:
        path = key_file(sync_folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{key}\n")
    return key


def _known(host: str) -> bool:
    """An address, which no web page's name is, this machine's name, or one of `HOSTS`."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        named = os.environ.get(HOSTS, "").lower().split(",")
        return bool(name) and name in ("localhost", socket.gethostname().lower(), *named)


def _method(body: bytes) -> Any:
    try:
        return json.loads(body)["method"]
    except (ValueError, KeyError, TypeError):
        return None


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
