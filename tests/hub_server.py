"""A Hub for tests, in this process: the endpoints by which the real client creates, fills and downloads a repository.

Everything is in memory, and every file goes into the commit itself: the server asks for none to be uploaded before.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


WRITER = "hf_writer_secret"
READER = "hf_reader_secret"
# Status and content of an answer: JSON, or a file's bytes, or `None` for a file that is not there.
Answer = tuple[int, Any]
MISSING_REPOSITORY = {"error": "Repository not found"}


@dataclass(frozen=True)
class Commit:
    """A message, and all files of the branch after it."""

    message: str
    files: dict[str, bytes]


class Hub:
    """
    The state of the Hub, and its answers.

    Attributes:
        branches: Of each repository its branches, and of a branch its commits, newest last.
        private: Whether each repository is private.
        refusals: Statuses with which the next commits are refused.
        url: Where it listens.
    """

    def __init__(self) -> None:
        self.branches: dict[str, dict[str, list[Commit]]] = {}
        self.private: dict[str, bool] = {}
        self.refusals: list[int] = []
        self.url = ""

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The content of a branch, or of the id under which the main one is downloaded."""
        # The client asks for the branch once, and then for files of the commit that it was at.
        if branch == commit_of(repo):
            branch = "main"
        return self.branches[repo][branch][-1].files

    def head_of(self, repo: str, branch: str = "main") -> str:
        """The id of the last commit of a branch: that of the main one, as long as the two are equal."""
        is_new = self.branches[repo][branch] == self.branches[repo]["main"]
        return commit_of(repo) if is_new else commit_of(repo, branch)

    def messages(self, repo: str, branch: str = "main") -> list[str]:
        """Commit messages, newest first."""
        return [commit.message for commit in reversed(self.branches[repo][branch])]

    def answer(self, path: str, body: bytes, may_write: bool) -> Answer:
        """The answer to a request with a known token."""
        if path == "/api/repos/create":
            return self._create(json.loads(body), may_write)
        # Of a model card: the client has it checked before it pushes.
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}

        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file:
            repo, branch, name = file.groups()
            if repo not in self.branches:
                return 404, MISSING_REPOSITORY
            return 200, self.files(repo, branch).get(name)

        repo, action, argument = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([\w-]+)/(.+))?", path).groups()
        if repo not in self.branches:
            return 404, MISSING_REPOSITORY
        return self._answer_for(repo, action, argument, body, may_write)

    def _create(self, wanted: dict[str, Any], may_write: bool) -> Answer:
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        described = {"url": f"{self.url}/{repo}", "name": repo}
        # With `exist_ok` the client takes this for success.
        if repo in self.branches:
            return 409, described
        if not may_write:
            return 403, described

        self.branches[repo] = {"main": [Commit("initial commit", {".gitattributes": b""})]}
        self.private[repo] = wanted.get("visibility") == "private"
        return 200, described

    def _answer_for(self, repo: str, action: str | None, argument: str, body: bytes, may_write: bool) -> Answer:
        """The answer to `/api/models/<repo>/<action>/<argument>` for a repository that exists."""
        if action == "auth-check":
            return (200 if may_write else 403), {}
        if action == "branch":
            of_main = list(self.branches[repo]["main"])
            self.branches[repo].setdefault(argument, of_main)
            return 200, {}
        if action == "preupload":
            # "lfs" would make the client upload large files to another server first.
            into_the_commit = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [row | into_the_commit for row in json.loads(body)["files"]]}
        if action == "tree":
            return self._tree(repo, argument)
        if action == "commit":
            return self._commit(repo, argument, body, may_write)

        # No action, or a revision: what is there to download.
        siblings = [{"rfilename": name} for name in self.files(repo)]
        return 200, {
            "id": repo,
            "sha": self.head_of(repo, argument if argument in self.branches[repo] else "main"),
            "siblings": siblings,
            "private": self.private[repo],
            "tags": [],
        }

    def _tree(self, repo: str, argument: str) -> Answer:
        # A folder, such as one of chat templates; no model here has any.
        if "/" in argument:
            return 404, {"error": "no such folder"}

        rows = []
        for name, content in self.files(repo, argument).items():
            rows.append({"type": "file", "path": name, "size": len(content), "oid": name})
        return 200, rows

    def _commit(self, repo: str, branch: str, body: bytes, may_write: bool) -> Answer:
        if self.refusals:
            return self.refusals.pop(0), {"error": "refused"}
        if not may_write:
            return 403, {"error": "refused"}

        message = ""
        files = dict(self.files(repo, branch))
        # A header, and then a line for each file.
        for line in body.splitlines():
            part = json.loads(line)
            value = part["value"]
            if part["key"] == "header":
                message = value["summary"]
            elif part["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                # A deletion.
                del files[value["path"]]

        self.branches[repo][branch].append(Commit(message, files))
        return 200, {"commitOid": commit_of(repo), "commitUrl": f"{self.url}/{repo}/commit/{commit_of(repo)}"}


def commit_of(repo: str, branch: str = "main") -> str:
    """Stands for the id of each commit of a branch."""
    name = repo if branch == "main" else f"{repo}@{branch}"
    return hashlib.sha1(name.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        status, content = self._answer()
        if content is None:
            status = 404
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()

        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        # By these the client knows what is missing.
        if content is None:
            self.send_header("X-Error-Code", "EntryNotFound")
        elif content == MISSING_REPOSITORY:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha1(raw).hexdigest()}"')
        # The client refuses a file that does not say of which commit it is.
        if "/resolve/" in self.path:
            _, owner, name, *_ = self.path.split("/")
            self.send_header("X-Repo-Commit", commit_of(f"{owner}/{name}"))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    do_HEAD = do_POST = do_GET

    def _answer(self) -> Answer:
        # Read in any case: what is left of a request would be taken for the next one.
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        authorization = self.headers.get("Authorization") or ""
        token = authorization.removeprefix("Bearer ")
        if token not in (WRITER, READER):
            return 401, {"error": "Invalid username or password."}

        path = unquote(urlsplit(self.path).path)
        return self.hub.answer(path, body, may_write=token == WRITER)


@contextmanager
def running_hub():
    """A [`Hub`] that listens on this machine; its address is `hub.url`."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"

    # Asked for the shutdown every 20 ms, instead of 500.
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
