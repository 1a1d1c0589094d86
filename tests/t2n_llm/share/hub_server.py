"""A small hub: as much of its API as huggingface-hub needs to make a repository, send files to it and fetch them again."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

WRITER, READER = "hf_writer", "hf_reader"
_LARGE = 10_000  # bytes from which a file is stored by its hash


@dataclass
class Repository:
    """What lies in a repository at `main`."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 1

    @property
    def commit(self) -> str:
        """Another one for other content: the client keeps trees by it."""
        return _sha256(repr((self.commits, sorted(self.files.items()))).encode())[:40]


class HubServer(ThreadingHTTPServer):
    """Repositories in memory.

    Attributes:
        repositories: by owner/name.
        objects: large files, by SHA-256.
        uploaded: the SHA-256 of each large file in the order in which they came, and of each that came again.
        asked: path of each file that was fetched.
        uploads_left: how many large files come through before the line goes dead; None for all.
        bytes_left: how many bytes of a file are sent before the line goes dead; None for all.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploaded: list[str] = []
        self.asked: list[str] = []
        self.uploads_left: int | None = None
        self.bytes_left: int | None = None
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hang up."""


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """Yield a hub that answers, and stop it after the block."""
    with HubServer() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    # --- asking ---------------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+.*)?", path)
        if found:
            repository = self._readable(found[1])
            if repository is None:
                return
            if (found[2] or "").startswith("/tree"):
                self._answer([_entry(name, data) for name, data in repository.files.items()])
            else:
                siblings = [{"rfilename": name} for name in repository.files]
                about = {"id": found[1], "sha": repository.commit, "private": repository.private, "siblings": siblings}
                self._answer(about)
            return
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        repository = self._readable(found[1]) if found else None
        if found and repository is not None:
            self._send_file(repository, found[2])
        elif not found:
            self._refuse(404, "EntryNotFound")

    def _send_file(self, repository: Repository, name: str) -> None:
        if name not in repository.files:
            self._refuse(404, "EntryNotFound")
            return
        data = repository.files[name]
        headers = {"ETag": f'"{_sha256(data)}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        status = 206 if start else 200
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.server.lock:
            self.server.asked.append(name)
        rest, left = data[start:], self.server.bytes_left
        if left is not None and len(rest) > left:
            self.wfile.write(rest[:left])
            self._hang_up()
        else:
            self.wfile.write(rest)

    # --- sending --------------------------------------------------------------------------------

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif self._token() != WRITER:
            self._refuse(403 if self._token() == READER else 401, None)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {**file, "uploadMode": "lfs" if file["size"] > _LARGE else "regular", "shouldIgnore": False}
                for file in files
            ]
            self._answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer({"transfer": "basic", "objects": list(map(self._wanted, json.loads(body)["objects"]))})
        elif "/commit/" in path:
            name = re.match(r"/api/models/([^/]+/[^/]+)/commit/", path)
            assert name is not None
            self._commit(name[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._refuse(404, None)

    def do_PUT(self) -> None:
        with self.server.lock:
            left = self.server.uploads_left
            if left is not None:
                self.server.uploads_left = max(left - 1, 0)
        if left == 0:
            self._hang_up()
            return
        data = self.rfile.read(int(self.headers["Content-Length"]))
        digest = self.path.rpartition("/")[2]
        assert _sha256(data) == digest
        with self.server.lock:
            self.server.objects[digest] = data
            self.server.uploaded.append(digest)
        self._answer({})

    def _create(self, asked: Mapping[str, str]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != "owner":
            self._refuse(403, None, "You don't have the rights to create a model under this namespace")
            return
        if name in self.server.repositories:
            self._answer({"error": "You already created this model repo", "url": f"{self.server.endpoint}/{name}"}, 409)
            return
        self.server.repositories[name] = Repository(private=asked.get("visibility") == "private")
        self._answer({"url": f"{self.server.endpoint}/{name}", "id": name})

    def _validate(self, text: str) -> None:
        bad = "license: nobody's" in text
        errors = [{"message": '"license" must be one of a list'}] if bad else []
        self._answer({"errors": errors, "warnings": []}, 400 if bad else 200)

    def _wanted(self, asked: Mapping[str, object]) -> dict[str, object]:
        digest = str(asked["oid"])
        if digest in self.server.objects:
            return dict(asked)
        return {**asked, "actions": {"upload": {"href": f"{self.server.endpoint}/objects/{digest}"}}}

    def _commit(self, name: str, lines: list[dict[str, dict[str, str]]]) -> None:
        repository = self.server.repositories[name]
        for line in lines:
            value, key = line["value"], str(line["key"])
            if key == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                repository.files[value["path"]] = self.server.objects[value["oid"]]
            elif key == "deletedFile":
                del repository.files[value["path"]]
        repository.commits += 1
        url = f"{self.server.endpoint}/{name}/commit/{repository.commit}"
        self._answer({"commitUrl": url, "commitOid": repository.commit, "success": True})

    # --- answers --------------------------------------------------------------------------------

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _readable(self, name: str) -> Repository | None:
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and self._token() not in (WRITER, READER)):
            self._refuse(404, "RepoNotFound")
            return None
        return repository

    def _refuse(self, status: int, code: str | None, message: str = "refused") -> None:
        self._answer({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message} if code else {})

    def _answer(self, content: object, status: int = 200, headers: Mapping[str, str | None] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()

    def log_message(self, *_: object) -> None:
        """Keep stderr clean."""


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)}
    return entry | (
        {"lfs": {"oid": _sha256(data), "size": len(data), "pointerSize": 134}} if len(data) > _LARGE else {}
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
