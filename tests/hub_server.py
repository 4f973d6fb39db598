"""A Hub for tests, in this process: the endpoints of the real client that create, fill and download a model repository.

Errors of one's own: `refuse(status, times)` makes the next commits fail, and with `uploads` the next uploads of a large file.
Everything is in memory.
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
DATE = "2026-01-01T00:00:00.000Z"


class Hub:
    """State: per repository its branches, and per commit its files and its parent."""

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, str]] = {}
        self.private: dict[str, bool] = {}
        self.commits: dict[str, tuple[dict[str, bytes], str | None, str]] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.refusals: list[int] = []
        self.upload_refusals: list[int] = []
        self.url = ""

    def refuse(self, status: int, times: int = 1, uploads: bool = False) -> None:
        """Answer the next commits, or uploads, with `status`."""
        (self.upload_refusals if uploads else self.refusals).extend([status] * times)

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The content of a branch."""
        return self.commits[self.branches[repo][branch]][0]

    def messages(self, repo: str, branch: str = "main") -> list[str]:
        """Commit messages, newest first."""
        return [self.commits[oid][2] for oid in self._history(self.branches[repo][branch])]

    def _history(self, oid: str | None) -> list[str]:
        found = []
        while oid is not None:
            found.append(oid)
            oid = self.commits[oid][1]
        return found

    def _store(self, files: dict[str, bytes], parent: str | None, message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {parent} {message}".encode()).hexdigest()
        self.commits[oid] = files, parent, message
        return oid

    def create(self, body: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{body.get('organization') or 'me'}/{body['name']}"
        status = 409 if repo in self.branches else 200
        if status == 200:
            self.branches[repo] = {"main": self._store({".gitattributes": b""}, None, "initial commit")}
            self.private[repo] = body.get("visibility") == "private"
        return status, {"url": f"{self.url}/{repo}", "name": repo}

    def api(self, repo: str, action: str, argument: str, body: Any) -> tuple[int, Any]:
        """`/api/models/<repo>/<action>/<argument>`; the argument is a revision, or a new branch."""
        branches = self.branches[repo]
        if action == "branch":
            if argument in branches:
                return 409, {"error": "exists"}
            branches[argument] = body.get("startingPoint") or branches["main"]
            return 200, {}
        revision, _, folder = argument.partition("/")
        oid = branches.get(revision, revision)
        if oid not in self.commits or folder:
            return 404, {"error": "no such revision or folder"}
        files = self.commits[oid][0]
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            return 200, {"id": repo, "sha": oid, "siblings": siblings, "private": self.private[repo], "tags": []}
        if action == "tree":
            return 200, [{"type": "file", "path": n, "size": len(f), "oid": _git_oid(f)} for n, f in files.items()]
        if action == "commits":
            return 200, [
                {"id": i, "authors": [], "date": DATE, "title": self.commits[i][2], "message": ""}
                for i in self._history(oid)
            ]
        if action == "preupload":
            large = lambda path: "lfs" if path.endswith((".safetensors", ".pt", ".bin", ".pth")) else "regular"  # noqa: E731
            rows = body["files"]
            return 200, {
                "files": [{"path": r["path"], "uploadMode": large(r["path"]), "shouldIgnore": False} for r in rows]
            }
        if self.refusals:
            return self.refusals.pop(0), {"error": "refused"}
        return 200, {"commitOid": self._commit(repo, argument, body), "commitUrl": f"{self.url}/{repo}/commit/{oid}"}

    def _commit(self, repo: str, branch: str, lines: list[dict]) -> str:
        parent = self.branches[repo][branch]
        files, message = dict(self.commits[parent][0]), ""
        for value, kind in ((line["value"], line["key"]) for line in lines):
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                del files[value["path"]]
        self.branches[repo][branch] = self._store(files, parent, message)
        return self.branches[repo][branch]


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, content: Any = b"", headers: dict[str, str] | None = None) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _may(self, write: bool) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            self._answer(401, {"error": "Invalid username or password."})
        elif write and token == READER:
            self._answer(403, {"error": "Forbidden"})
        else:
            return True
        return False

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(auth-check(?:/write)?)", path):
            if self._may(write=found[2].endswith("write")):
                self._answer(200 if found[1] in self.hub.branches else 404, {})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/(.+))?", path):
            if not self._may(write=False):
                return
            if found[1] not in self.hub.branches:
                self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                return
            status, content = self.hub.api(found[1], found[2] or "revision", found[3] or "main", None)
            self._answer(status, content, {"X-Error-Code": "EntryNotFound"} if status == 404 else None)
        elif (found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) and self._may(write=False):
            oid = self.hub.branches[found[1]].get(found[2], found[2])
            content = self.hub.commits[oid][0].get(found[3])
            if content is None:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": oid})
            else:
                self._answer(200, content, {"X-Repo-Commit": oid, "ETag": f'"{_git_oid(content)}"'})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.requests.append((self.command, self.path))
        if self.hub.upload_refusals:
            self._answer(self.hub.upload_refusals.pop(0))
            return
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.hub.large[self.path.rpartition("/")[2]] = content
        self._answer(200)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if not self._may(write=True):
            return
        if path == "/api/repos/create":
            self._answer(*self.hub.create(json.loads(raw)))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path.endswith(".git/info/lfs/objects/batch"):
            action = lambda oid: {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}  # noqa: E731
            rows = json.loads(raw)["objects"]
            self._answer(200, {"transfer": "basic", "objects": [r | {"actions": action(r["oid"])} for r in rows]})
        else:
            found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)/(.+)", path)
            lines = found[2] == "commit"
            body = [json.loads(line) for line in raw.splitlines()] if lines else json.loads(raw or b"{}")
            self._answer(*self.hub.api(found[1], found[2], found[3], body))


@contextmanager
def running_hub():
    """A [`Hub`] that listens on this machine; its address is `hub.url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
