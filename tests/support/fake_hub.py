"""A model hub on 127.0.0.1 that speaks as much of the Hugging Face HTTP API as downloads need, and counts what was fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    files: dict[str, bytes]
    gated: bool = False
    revisions: tuple[str, ...] = ("main", "v1")
    listed: tuple[str, ...] = ()  # names in the listing that do not exist

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class FakeHub:
    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)  # "repo/file" of every GET of a file
    broken: bool = False  # answer 500 to everything


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = server.hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path).strip("/")
        if hub.broken:
            return self._send(500, b"broken", body)
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        name = "/".join(parts[:2])
        repo = hub.repos.get(name)
        if repo is None:
            return self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
        rest = parts[2:]
        if api and not rest:
            rest = ["revision", "main"]
        revision = rest[1]
        if revision not in (*repo.revisions, repo.sha):
            return self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        names = [*repo.files, *repo.listed]
        if rest[0] == "revision":
            info = {"id": name, "modelId": name, "sha": repo.sha, "siblings": [{"rfilename": file} for file in names], "gated": repo.gated}
            return self._json(info, body)
        if rest[0] == "tree":
            sizes = {file: len(repo.files.get(file, b"")) for file in names}
            return self._json([{"type": "file", "path": f, "size": n, "oid": _oid(repo.files.get(f, b""))} for f, n in sizes.items()], body)
        if repo.gated:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted."})
        file = "/".join(rest[2:])
        if file not in repo.files:
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        if body:
            hub.fetched.append(f"{name}/{file}")
        data = repo.files[file]
        self._send(200, data, body, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": repo.sha, "Content-Type": "application/octet-stream"})

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
