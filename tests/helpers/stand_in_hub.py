"""A stand-in for the Hugging Face hub on the loopback.

It answers the requests of huggingface_hub from folders on this machine. It serves model info, trees, files by HEAD and
by range, and large files from a separate address like the hub. It can have gated and missing repositories, revisions,
interrupted connections and wrong sizes. The bytes of every answer are counted.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
"""The token whose requests may have what is gated."""
LARGE = (".safetensors", ".bin", ".gguf", "tokenizer.json")
HASHED = 1 << 28
"""Bytes: what is longer is sparse, and its name stands for its contents."""


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    bytes: int = 0
    """The bytes of the response's body, as they were sent."""


@dataclass
class StandInHub:
    """The contents of the stand-in and the requests that it received. ``repositories`` maps a name to revisions and
    their folders; the first revision is ``main``."""

    repositories: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    """File to how many bytes of it are sent before the connection is cut, once."""
    told_sizes: dict[str, int] = field(default_factory=dict)
    """Maps a file to the size that every response reports for it."""
    listed_sizes: dict[str, int] = field(default_factory=dict)
    """File to the size that lists of files tell."""
    down: bool = False
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""

    def add(self, name: str, folder: Path, revision: str = "main") -> str:
        """Serve a folder as a revision, and return its commit."""
        self.repositories.setdefault(name, {})[revision] = folder
        return commit_of(folder)

    @property
    def bytes(self) -> int:
        return sum(request.bytes for request in self.requests)

    def asked(self, file: str) -> list[Request]:
        """Return the requests for the contents of a file."""
        return [request for request in self.requests if request.method == "GET" and request.path.endswith(file)]


def commit_of(folder: Path) -> str:
    listing = [f"{file.relative_to(folder)} {oid_of(file)}" for file in files_of(folder)]
    return hashlib.sha1("\n".join(listing).encode()).hexdigest()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def oid_of(file: Path) -> str:
    """Return the sha256 of a file that the hub would keep in LFS, or git's sha1 of any other file."""
    size = file.stat().st_size
    if size > HASHED:
        return hashlib.sha256(f"{file.name} {size}".encode()).hexdigest()
    if file.name.endswith(LARGE):
        return hashlib.sha256(file.read_bytes()).hexdigest()
    return hashlib.sha1(f"blob {size}\0".encode() + file.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *args) -> None:
        pass

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.request_seen = Request(self.command, path, self.headers.get("range"))
        self.hub.requests.append(self.request_seen)
        if self.hub.down:
            return self._error(503, "", "down for maintenance")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(found[1], found[2] or "main")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/.*)?", path):
            return self._tree(found[1], found[2])
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], found[2], found[3], body)
        if found := re.fullmatch(r"/stored/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            return self._send_file(self._folder(found[1], found[2]) / found[3], body)
        return self._error(404, "", f"nothing at {path}")

    def _folder(self, repository: str, revision: str) -> Path | None:
        revisions = self.hub.repositories[repository]
        by_commit = {commit_of(folder): folder for folder in revisions.values()}
        return revisions.get(revision) or by_commit.get(revision)

    def _found(self, repository: str, revision: str) -> Path | None:
        """Return the folder, or None after sending an error."""
        if repository not in self.hub.repositories:
            self._error(401, "RepoNotFound", "Invalid username or password.")  # it may be a private repository
            return None
        folder = self._folder(repository, revision)
        if folder is None:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return folder

    def _info(self, repository: str, revision: str) -> None:
        folder = self._found(repository, revision)
        if folder is not None:
            siblings = []
            for entry in self._entries(folder):
                sibling = {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {"sha256": entry["oid"], "size": entry["size"], "pointerSize": 134}
                siblings.append(sibling)
            gated = "manual" if repository in self.hub.gated else False
            self._json({"id": repository, "sha": commit_of(folder), "siblings": siblings, "gated": gated, "tags": []})

    def _tree(self, repository: str, revision: str) -> None:
        folder = self._found(repository, revision)
        if folder is not None:
            self._json(self._entries(folder))

    def _entries(self, folder: Path) -> list[dict]:
        entries = []
        for file in files_of(folder):
            name, oid = str(file.relative_to(folder)), oid_of(file)
            size = (self.hub.told_sizes | self.hub.listed_sizes).get(name, file.stat().st_size)
            entry = {"type": "file", "path": name, "size": size, "oid": oid}
            if file.name.endswith(LARGE):
                entry["lfs"] = {"oid": oid, "size": size, "pointerSize": 134}
            entries.append(entry)
        return entries

    def _resolve(self, repository: str, revision: str, name: str, body: bool) -> None:
        folder = self._found(repository, revision)
        if folder is None:
            return
        if repository in self.hub.gated and self.headers.get("authorization") != f"Bearer {TOKEN}":
            known = "authorization" in self.headers
            self._error(403 if known else 401, "GatedRepo", f"Access to model {repository} is restricted.")
            return
        file = folder / name
        if not file.is_file():
            self._error(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit_of(folder), "ETag": f'"{oid_of(file)}"'}
        if not name.endswith(LARGE):
            self._send_file(file, body, headers)
            return
        size = self.hub.told_sizes.get(name, file.stat().st_size)
        headers |= {"X-Linked-Etag": f'"{oid_of(file)}"', "X-Linked-Size": str(size)}
        store = self.hub.endpoint.replace("127.0.0.1", "localhost")  # another host, as for the hub's large files
        headers["Location"] = f"{store}/stored/{repository}/{commit_of(folder)}/{name}"
        self._head(302, headers, 0)

    def _send_file(self, file: Path, body: bool, headers: dict[str, str] | None = None) -> None:
        size, wanted = file.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        start = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) + 1 if wanted and wanted[2] else size, size)
        headers = {"Accept-Ranges": "bytes"} | (headers or {})
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self._head(206 if wanted else 200, headers, end - start)
        if not body:
            return
        stop = self.hub.cut.pop(file.name, None)
        with file.open("rb") as opened:
            opened.seek(start)
            left = end - start if stop is None else min(stop, end - start)
            while left and (data := opened.read(min(left, 1 << 20))):
                self.wfile.write(data)
                left -= len(data)
                self.request_seen.bytes += len(data)
        if stop is not None:
            self.wfile.flush()
            self.close_connection = True

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self._head(200, {"Content-Type": "application/json"}, len(data))
        self.request_seen.bytes += len(data)
        self.wfile.write(data)

    def _error(self, code: int, kind: str, message: str) -> None:
        self._head(code, {"X-Error-Message": message} | ({"X-Error-Code": kind} if kind else {}), 0)

    def _head(self, code: int, headers: dict[str, str], length: int) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


@contextmanager
def serving(hub: StandInHub) -> Iterator[StandInHub]:
    """Answer on a free port within this context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
