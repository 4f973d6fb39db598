"""Access control of a server of `qarl-trl serve`: middleware of its web server, named on its command line."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit


if TYPE_CHECKING:
    from starlette.requests import Request

KEY = "VLLM_API_KEY"
HOSTS = "QARL_SERVER_HOSTS"  # host names that requests may use, separated by commas
# Methods of [`~qarl_trl.rollout._vllm_server.WorkerExtension`], each with its own route.
METHODS = ("/qarl_load", "/qarl_state")
# vLLM's routes that a trainer uses or an operator reads.
PATHS = ["/v1/models", "/v1/completions", "/get_world_size", "/server_info", "/metrics", "/reset_prefix_cache"]


class Guard:
    """
    ASGI middleware: requires the key except on `/health`, allows only listed paths and no browsers, and routes to our workers.

    vLLM requires the key only on some paths, and its `/collective_rpc` calls any method of a worker: a web page open on the
    machine could replace the weights.
    """

    def __init__(self, app: Any) -> None:
        if not os.environ.get(KEY):
            raise RuntimeError(f"{KEY} must be set: start the server with `qarl-trl serve`.")
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.requests import Request  # comes with vLLM, which a trainer may lack
        from starlette.responses import JSONResponse, PlainTextResponse

        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # a websocket: refused
        request, path, answer = Request(scope, receive), scope["path"], self.app
        if refusal := self.refusal(request, path):
            answer = PlainTextResponse(*refusal)
        elif path in METHODS:
            try:
                answers = await _ask_workers(request.app.state.engine_client, path[1:], await request.json())
                answer = JSONResponse(answers)
            except Exception as error:
                answer = PlainTextResponse(f"{type(error).__name__}: {error}", 500)
        await answer(scope, receive, send)

    def refusal(self, request: Request, path: str) -> tuple[str, int] | None:
        """The text and status of a refusal; `None` if the request is allowed."""
        host, kind = (request.headers.get(name, "") for name in ("host", "content-type"))
        if "origin" in request.headers or not _known(host):  # the web page's own name may point here
            return f"Requests of web pages (with an Origin, or for another Host) are refused: {host!r}.", 403
        if path == "/health":
            return None
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self.expected):
            return f"The server wants another key: set {KEY} to the one that `qarl-trl serve` printed.", 401
        if path not in (*PATHS, *METHODS):
            return f"This server answers only a trainer, and has no {path}.", 404
        if request.method not in ("GET", "HEAD") and kind.partition(";")[0].strip() != "application/json":
            return f"The content must be application/json, got {kind!r}.", 415
        return None


def _known(host: str) -> bool:
    """Whether the host is an IP address (never a web page's name), this machine's name, or one of `HOSTS`."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        known = {"localhost", socket.gethostname().lower(), *os.environ.get(HOSTS, "").split(",")}
        return name in known - {""}


def key_file(sync_folder: str | Path) -> Path:
    """The file in which a server stores its new key, beside its sync folder, for a trainer that mounts the folder."""
    folder = Path(sync_folder).resolve()
    return folder.with_name(f"{folder.name}.key")


def find_key(sync_folder: str | Path) -> str:
    """The key from the environment, or the one that a server stored; empty if there is none."""
    stored = key_file(sync_folder)
    return os.environ.get(KEY) or (stored.read_text().strip() if stored.is_file() else "")


def make_key(sync_folder: str) -> str:
    """Make a new key, print it once, and store it beside the sync folder, readable only by this user."""
    key, path = secrets.token_hex(16), key_file(sync_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{key}\n")
    print(f"Made a key for this server (stored in {path}). On the trainer's machine: export {KEY}={key}", flush=True)
    return key


async def _ask_workers(engine: Any, method: str, args: list[Any]) -> list[Any]:
    """The answers of all workers; vLLM itself would wait forever if the engine's process is killed meanwhile."""
    task = asyncio.ensure_future(engine.collective_rpc("qarl", args=(method, *args)))
    try:
        while not (await asyncio.wait({task}, timeout=1))[0]:
            if engine.errored:
                raise RuntimeError("The engine of this server died: start it again.")
        return await task
    finally:
        task.cancel()
