"""A Hub for tests, in this process: the endpoints of the real client that create, fill and download a model repository.

Everything is in memory, and every file goes into the commit itself: the server asks for none to be uploaded before.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


WRITER, READER = "hf_writer_secret", "hf_reader_secret"


class Hub:
    """State: of each repository its branches, of a branch its commits, newest last; a commit is (message, files)."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, list[tuple[str, dict[str, bytes]]]]] = {}
        self.private: dict[str, bool] = {}
        self.refusals: list[int] = []  # answers to the next commits
        self.url = ""

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The content of a branch, or of the id under which the main one is downloaded."""
        return self.branches[repo]["main" if branch == _sha(repo) else branch][-1][1]

    def messages(self, repo: str, branch: str = "main") -> list[str]:
        """Commit messages, newest first."""
        return [message for message, _ in reversed(self.branches[repo][branch])]

    def answer(self, path: str, body: bytes, may_write: bool) -> tuple[int, Any]:
        """Status and content of the answer to a request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if repo in self.branches else 200 if may_write else 403
            if status == 200:
                self.branches[repo] = {"main": [("initial commit", {".gitattributes": b""})]}
                self.private[repo] = asked.get("visibility") == "private"
            return status, {"url": f"{self.url}/{repo}", "name": repo}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return 200, self.files(found[1], found[2]).get(found[3])
        repo, action, argument = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([\w-]+)/(.+))?", path).groups()
        if repo not in self.branches:
            return 404, {"error": "Repository not found"}
        if action == "auth-check":
            return (200 if may_write else 403), {}
        if action == "branch":
            self.branches[repo].setdefault(argument, [*self.branches[repo]["main"]])
            return 200, {}
        if action == "preupload":
            return 200, {
                "files": [row | {"uploadMode": "regular", "shouldIgnore": False} for row in json.loads(body)["files"]]
            }
        if action == "tree":
            if "/" in argument:  # a folder, such as one of chat templates; no model here has any
                return 404, {"error": "no such folder"}
            files = self.files(repo, argument)
            return 200, [{"type": "file", "path": name, "size": len(f), "oid": name} for name, f in files.items()]
        if action == "commit":
            if self.refusals or not may_write:
                return (self.refusals.pop(0) if self.refusals else 403), {"error": "refused"}
            self._commit(repo, argument, [json.loads(line) for line in body.splitlines()])
            return 200, {"commitOid": _sha(repo), "commitUrl": f"{self.url}/{repo}/commit/{_sha(repo)}"}
        siblings = [
            {"rfilename": name} for name in self.files(repo)
        ]  # no action, or a revision: what is there to download
        return 200, {"id": repo, "sha": _sha(repo), "siblings": siblings, "private": self.private[repo], "tags": []}

    def _commit(self, repo: str, branch: str, lines: list[dict]) -> None:
        files, message = dict(self.files(repo, branch)), ""
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                del files[value["path"]]
        self.branches[repo][branch].append((message, files))


def _sha(repo: str) -> str:
    return hashlib.sha1(repo.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status, content = 401, {"error": "Invalid username or password."}
        if token in (WRITER, READER):
            status, content = self.hub.answer(unquote(urlsplit(self.path).path), body, token == WRITER)
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(404 if content is None else status)
        headers = {"Content-Length": str(len(raw)), "ETag": f'"{hashlib.sha1(raw).hexdigest()}"'}
        if "/resolve/" in self.path:
            headers["X-Repo-Commit"] = _sha("/".join(self.path.split("/")[1:3]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    do_HEAD = do_POST = do_GET


@contextmanager
def running_hub():
    """A [`Hub`] that listens on this machine; its address is `hub.url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
