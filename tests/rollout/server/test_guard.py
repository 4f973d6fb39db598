"""`qarl_trl.rollout.server.guard`: who may ask a server, for what. The real server is in tests/slow/test_server.py."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from qarl_trl.rollout.server.guard import METHODS, PATHS, Guard
from qarl_trl.rollout.server.key import HOSTS, KEY


class Engine:
    """Answers with what it is asked. It dies when it is asked for its state."""

    errored = False

    async def collective_rpc(self, method, args):
        if "qarl_state" in args:
            self.errored = True
            # An engine that died never answers.
            await asyncio.Event().wait()
        return [method, *args]


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


class GuardedApp:
    """An application that answers with what it got, behind the guard."""

    def __init__(self):
        self.app = Starlette()
        self.app.add_route("/{path:path}", echo, methods=["GET", "POST", "OPTIONS"])
        self.app.state.engine_client = Engine()
        self.guard = Guard(self.app)

    async def __call__(self, scope, receive, send):
        # vLLM's server puts itself into the scope, too.
        await self.guard({**scope, "app": self.app}, receive, send)


@pytest.fixture
def ask(monkeypatch):
    """Sends a request with the right headers; `headers` replace these, and an empty one is left out."""
    monkeypatch.setenv(KEY, "sesame")
    # Without a socket: the application is called as a web server calls it.
    transport = httpx.ASGITransport(app=GuardedApp())

    async def send(method, path, headers, content):
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, headers=headers, content=content)

    def run(method, path, content="[]", **headers):
        right = {"authorization": "Bearer sesame", "content-type": "application/json"}
        sent = {name: value for name, value in (right | headers).items() if value}
        if method != "POST":
            content = None
        return asyncio.run(send(method, path, sent, content))

    return run


def test_a_trainer_is_let_in_with_all_that_it_asks(ask):
    for path in PATHS:
        answer = ask("POST", path, "{}")
        assert answer.status_code == 200
        assert answer.text == "{}"

    assert ask("POST", "/qarl_load", '["run-1", 2]').json() == ["qarl", "qarl_load", "run-1", 2]
    assert ask("GET", "/health", authorization="").status_code == 200


@pytest.mark.parametrize(
    ("status", "request_", "headers"),
    [
        # Without the key. In the third case a path stands in the Host.
        (401, ("POST", "/v1/completions"), {"authorization": ""}),
        *((401, ("POST", method), {"authorization": "Bearer open"}) for method in METHODS),
        (401, ("GET", "/v1/models"), {"authorization": "", "host": "127.0.0.1/health?"}),
        # From a web page. The last name points here.
        (403, ("POST", "/qarl_load"), {"origin": "https://example.org"}),
        (403, ("GET", "/health"), {"origin": "null"}),
        (403, ("POST", "/qarl_load"), {"host": "rebound.example.org:8000"}),
        # Not for a trainer.
        (404, ("POST", "/collective_rpc", '{"method": "save_sharded_state", "args": ["/tmp/x"]}'), {}),
        (404, ("POST", "/qarl_load/../collective_rpc"), {}),
        (404, ("POST", "/sleep"), {}),
        (404, ("GET", "/docs"), {}),
        # The only kind of content that a page may send without asking.
        (415, ("POST", "/qarl_load"), {"content-type": "text/plain"}),
        (500, ("POST", "/qarl_load", "no JSON"), {}),
    ],
)
def test_everybody_else_is_refused(ask, status, request_, headers):
    assert ask(*request_, **headers).status_code == status


def test_a_call_of_an_engine_that_dies_is_answered(ask):
    answer = ask("POST", "/qarl_state")

    assert answer.status_code == 500
    assert "The engine of this server died" in answer.text


@pytest.mark.parametrize("host", ["[::1]:8000", "localhost", "Node7.cluster:8000"])
def test_a_server_answers_by_its_addresses_and_its_names(ask, monkeypatch, host):
    # As `qarl-trl serve` sets it from its `--host`.
    monkeypatch.setenv(HOSTS, "127.0.0.1,node7.cluster")

    assert ask("GET", "/health", host=host).status_code == 200


def test_without_a_key_no_server_starts(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)

    with pytest.raises(RuntimeError, match=KEY):
        Guard(None)
