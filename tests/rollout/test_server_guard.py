"""`qarl_trl.rollout.server_guard`: who may ask a server, for what. The real server is in tests/slow/test_server.py."""

import json
import stat

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from qarl_trl.rollout.server_guard import (
    HOSTS,
    KEY,
    NCCL,
    NCCL_PATHS,
    PATHS,
    Guard,
    find_key,
    is_local,
    key_file,
    make_key,
)


@pytest.fixture
def ask(monkeypatch):
    """The status of a request to a guarded application, which answers with what it got."""
    monkeypatch.setenv(KEY, "sesame")
    app = Starlette()

    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await request.body())

    app.add_route("/{path:path}", echo, methods=["GET", "POST", "OPTIONS"])
    app.state.engine_client = type("Engine", (), {"errored": False})()

    async def send(method: str, path: str, content: str = "{}", **headers: str) -> httpx.Response:
        app.middleware_stack = None
        defaults = {"host": "127.0.0.1:8000", "authorization": "Bearer sesame", "content-type": "application/json"}
        given = {name: value for name, value in (defaults | headers).items() if value}
        guarded = httpx.ASGITransport(app=_WithApp(app))
        async with httpx.AsyncClient(transport=guarded, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, headers=given, content=content if method == "POST" else None)

    def run(*args: str, **headers: str) -> httpx.Response:
        import asyncio

        return asyncio.run(send(*args, **{name.replace("_", "-"): value for name, value in headers.items()}))

    return run


class _WithApp:
    """Gives the guard what Starlette puts into a scope."""

    def __init__(self, app: Starlette) -> None:
        self.app, self.guard = app, Guard(app)

    async def __call__(self, scope, receive, send) -> None:
        await self.guard({**scope, "app": self.app}, receive, send)


RPC = json.dumps({"method": "qarl_state", "args": []})


def test_a_trainer_is_let_in_with_all_that_it_asks(ask):
    for path in PATHS:
        assert ask("POST", path, RPC).status_code == 200
    assert ask("POST", "/collective_rpc", RPC).text == RPC  # the body that was looked at is passed on whole
    assert ask("GET", "/health", authorization="", content_type="").status_code == 200


@pytest.mark.parametrize(
    ("status", "request_", "headers"),
    [
        (401, ("POST", "/v1/completions"), {"authorization": ""}),
        (401, ("POST", "/collective_rpc", RPC), {"authorization": "Bearer open"}),
        (403, ("POST", "/collective_rpc", RPC), {"origin": "https://example.org"}),
        (403, ("GET", "/health"), {"origin": "null"}),
        (403, ("POST", "/collective_rpc", RPC), {"host": "rebound.example.org:8000"}),  # a name that points here
        (415, ("POST", "/collective_rpc", RPC), {"content_type": "text/plain"}),  # all that a page may send unasked
        (401, ("GET", "/v1/models"), {"authorization": "", "host": "127.0.0.1/health?"}),  # a path in the Host
        (403, ("POST", "/collective_rpc", json.dumps({"method": "save_sharded_state", "args": ["/tmp/x"]})), {}),
        (403, ("POST", "/collective_rpc", "[]"), {}),
        (403, ("POST", "/collective_rpc", "no JSON"), {}),
        (404, ("POST", "/update_weights"), {}),
        (404, ("POST", "/sleep"), {}),
        (404, ("GET", "/docs"), {}),
    ],
)
def test_everybody_else_is_refused(ask, status, request_, headers):
    assert ask(*request_, **headers).status_code == status


def test_routes_of_nccl_are_open_where_it_is_the_transport(ask, monkeypatch):
    assert {ask("POST", path).status_code for path in NCCL_PATHS} == {404}
    monkeypatch.setenv(NCCL, "1")
    assert {ask("POST", path).status_code for path in NCCL_PATHS} == {200}


@pytest.mark.parametrize("host", ["[::1]:8000", "localhost", "Node7.cluster:8000"])
def test_a_server_answers_by_its_addresses_and_its_names(ask, monkeypatch, host):
    monkeypatch.setenv(HOSTS, "127.0.0.1,node7.cluster")
    assert ask("GET", "/health", host=host).status_code == 200


def test_without_a_key_no_server_starts(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(RuntimeError, match=KEY):
        Guard(None)


def test_a_made_key_is_its_owners_alone_and_found_by_a_trainer_of_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    folder = str(tmp_path / "syncs")
    assert find_key(folder) is None and find_key(None) is None
    key = make_key(folder)
    assert find_key(folder) == key and len(key) == 32
    assert stat.S_IMODE(key_file(folder).stat().st_mode) == 0o600
    assert make_key(None) != key
    monkeypatch.setenv(KEY, "chosen")
    assert find_key(folder) == "chosen"


def test_what_is_this_machine_alone():
    assert all(map(is_local, ("127.8.9.1", "localhost", "::1")))
    assert not any(map(is_local, ("0.0.0.0", "example.org")))
