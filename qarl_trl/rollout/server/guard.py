"""Access control of a server of `qarl-trl serve`: middleware of its web server, named on its command line."""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .key import HOSTS, KEY
from .worker_calls import call_workers, offer_adapter


if TYPE_CHECKING:
    from starlette.requests import Request

# Methods of [`~qarl_trl.rollout.server.worker.WorkerExtension`], each with its own route.
METHODS = ("/qarl_load", "/qarl_state")
# vLLM's routes that a trainer uses or an operator reads.
PATHS = ["/v1/models", "/v1/completions", "/get_world_size", "/server_info", "/metrics", "/reset_prefix_cache"]


class Guard:
    """
    ASGI middleware: requires the key except on `/health`, allows only listed paths and no browsers, and routes to our
    workers.

    vLLM requires the key only on some paths, and its `/collective_rpc` calls any method of a worker: a web page that
    is open on the machine could replace the weights.

    Args:
        app: vLLM's web server.

    Raises:
        RuntimeError: if the environment holds no key.
    """

    def __init__(self, app: Any) -> None:
        key = os.environ.get(KEY)
        if not key:
            raise RuntimeError(f"{KEY} must be set: start the server with `qarl-trl serve`.")

        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.requests import Request  # comes with vLLM, which a trainer may lack
        from starlette.responses import PlainTextResponse

        # The server's own start and end.
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None  # a websocket: refused

        request = Request(scope, receive)
        path = scope["path"]

        # Before anything else of the request is read, such as its body.
        refusal = self.refusal(request, path)
        if refusal is not None:
            text, status = refusal
            answer = PlainTextResponse(text, status)
        elif path in METHODS:
            answer = await _answer_of_workers(request, path.removeprefix("/"))
        else:
            answer = self.app
        await answer(scope, receive, send)

    def refusal(self, request: Request, path: str) -> tuple[str, int] | None:
        """
        Decide on a request.

        Args:
            request: The request.
            path: Its path, by which the server routes it. Not that of `request.url`, which is made from the Host, too,
                and anybody can choose that.

        Returns:
            The text and status of a refusal; `None` if the request is allowed.
        """
        host = request.headers.get("host", "")
        # A browser sends the Origin of a page. Without one, the name of a page may still point to this machine.
        if "origin" in request.headers or not _known(host):
            return (
                f"Requests of web pages (with an Origin, or for another Host) are refused: {host!r}. If a trainer "
                "asks by this name, give `qarl-trl serve` the trainer's vllm_server_base_url or vllm_server_host."
            ), 403

        if path == "/health":
            return None

        # Compared in constant time, so that the time of a refusal says nothing about the key.
        authorization = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(authorization, self.expected):
            return f"The server wants another key: set {KEY} to the one that `qarl-trl serve` printed.", 401

        if path not in PATHS and path not in METHODS:
            return f"This server answers only a trainer, and has no {path}.", 404

        # A browser lets pages send other kinds of content without asking the server first, but no JSON.
        content_type = request.headers.get("content-type", "")
        is_json = content_type.partition(";")[0].strip() == "application/json"
        if request.method not in ("GET", "HEAD") and not is_json:
            return f"The content must be application/json, got {content_type!r}.", 415
        return None


def _known(host: str) -> bool:
    """Whether the host is an IP address (never a web page's name), this machine's name, or one of `HOSTS`."""
    name = urlsplit(f"//{host}").hostname or ""
    if _is_address(name):
        return True

    # A page's name may be made to point to this machine, but the browser still sends that name as the Host.
    listed = os.environ.get(HOSTS, "").split(",")
    known = {"localhost", socket.gethostname().lower(), *listed}
    return name != "" and name in known


def _is_address(name: str) -> bool:
    """Whether a host's name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer_of_workers(request: Request, method: str) -> Any:
    """The response to a call of one of `METHODS`: the answers of all workers as JSON, or status 500 with the error."""
    from starlette.responses import JSONResponse, PlainTextResponse

    try:
        args = await request.json()
        answers = await call_workers(request.app, method, args)
        # The last argument says whether the sync had an adapter. Workers answer nothing but errors.
        has_adapter = method == "qarl_load" and args[2:] == [True]
        if has_adapter and not any(answers):
            offer_adapter(request.app)
        return JSONResponse(answers)
    except Exception as error:
        return PlainTextResponse(f"{type(error).__name__}: {error}", 500)
