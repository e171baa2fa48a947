"""A hub on this machine: an HTTP server that speaks as much of the hub's protocol as a download of a repository takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by name: their commits, oldest first, each a folder; and the names of those that need an account."""

    url: str = ""
    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""

    def push(self, repository: str, folder: Path, branch: str = "main") -> str:
        """A commit with the files of `folder`, which `branch` points to from then on."""
        known = self.commits.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {branch} {len(known)}".encode()).hexdigest()
        known[commit] = folder
        self.branches.setdefault(repository, {})[branch] = commit
        return commit

    def find(self, repository: str, revision: str) -> tuple[str, Path] | None:
        commit = self.branches[repository].get(revision, revision)
        folder = self.commits[repository].get(commit)
        return None if folder is None else (commit, folder)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        shared = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    shared: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.shared.asked.append(path)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            parts = parts[2:]
        if len(parts) < 4 or parts[2] not in ("revision", "tree", "resolve"):
            self._send(404, b"")
            return
        repository, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        if repository not in self.shared.commits:
            self._send(401, b"", **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return
        if repository in self.shared.gated and kind != "revision":
            self._send(403, b"", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        found = self.shared.find(repository, revision)
        if found is None:
            self._send(404, b"", **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        commit, folder = found
        if kind == "revision":
            self._send_json({"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in _names(folder)]})
        elif kind == "tree":
            self._send_json([_entry(folder, name) for name in _names(folder)])
        else:
            self._send_file(folder / "/".join(parts[4:]), commit)

    def _send_file(self, file: Path, commit: str) -> None:
        if not file.is_file():
            self._send(404, b"", **{"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        content = file.read_bytes()
        self._send(200, content, **{"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"', "Accept-Ranges": "none"})

    def _send_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, name: str) -> dict[str, Any]:
    content = (folder / name).read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
