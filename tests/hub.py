"""A Hugging Face hub of one's own on this machine: the real client downloads from it over HTTP.

    with serve(Hub(models={"o/tiny": {COMMIT: folder}}), home=tmp_path / "home") as env: ...

Revisions are commits; `main` is the last one given. It answers what `huggingface_hub` and `datasets` ask: about a
repository, its tree, and its files with commit, size and ETag.
"""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

ONE, TWO = "1" * 40, "2" * 40
"""Names for commits."""

ABOUT = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")

Commits = dict[str, Path]
"""By commit, a folder with what it holds; the last one is the newest."""


@dataclass
class Hub:
    """What there is, and what was asked."""

    models: dict[str, Commits] = field(default_factory=dict)
    datasets: dict[str, Commits] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def find(self, kind: str, name: str, revision: str) -> tuple[str, Path] | str:
        """Commit and folder, or the hub's word for what is missing."""
        commits = getattr(self, kind).get(name)
        if commits is None:
            return "RepoNotFound"
        commit = list(commits)[-1] if revision == "main" else revision
        return (commit, commits[commit]) if commit in commits else "RevisionNotFound"


@contextlib.contextmanager
def serve(hub: Hub, *, home: Path) -> Iterator[dict[str, str]]:
    """Serve it; gives the environment in which the client finds it, with its cache in ``home``."""

    class OfHub(_Handler):
        found = hub

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OfHub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    found: ClassVar[Hub]

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def _answer(self, *, body: bool) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.found.asked.append(f"{self.command} {path}")
        if about := ABOUT.fullmatch(path):
            kind, name, what, revision, below = about.groups()
            self._about(kind, name, what or "revision", revision or "main", below or "", body=body)
        elif of := FILE.fullmatch(path):
            kind, name, revision, file = of.groups()
            self._file("datasets" if kind else "models", name, revision, file, body=body)
        else:
            self._send(404, b"", body=body)

    def _about(self, kind: str, name: str, what: str, revision: str, below: str, *, body: bool) -> None:
        found = self.found.find(kind, name, revision)
        if isinstance(found, str):
            self._send(404, b"", body=body, headers={"X-Error-Code": found})
            return
        commit, folder = found
        answer: Any
        if what == "revision":
            siblings = [
                {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "blobId": _digest(path),
                 "lfs": {"sha256": _digest(path), "size": path.stat().st_size, "pointerSize": 1}}
                for path in sorted(folder.rglob("*"))
                if path.is_file()
            ]  # fmt: skip
            answer = {"_id": name, "id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
        elif what == "tree":
            within = folder / below
            nested = "recursive=true" in self.path.lower()
            children = within.rglob("*") if nested else within.glob("*")
            answer = [_entry(path, folder) for path in sorted(children)]
        else:
            answer = [_entry(folder / path, folder) for path in self._posted()["paths"] if (folder / path).exists()]
        self._send(200, json.dumps(answer).encode(), body=body, headers={"Content-Type": "application/json"})

    def _file(self, kind: str, name: str, revision: str, file: str, *, body: bool) -> None:
        found = self.found.find(kind, name, revision)
        if isinstance(found, str):
            self._send(404, b"", body=body, headers={"X-Error-Code": found})
            return
        commit, folder = found
        path = folder / file
        if not path.is_file():
            self._send(404, b"", body=body, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_digest(path)}"', "Accept-Ranges": "bytes"}
        self._send(200, path.read_bytes(), body=body, headers=headers)

    def _posted(self) -> dict[str, Any]:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        try:
            return dict(json.loads(text))
        except ValueError:
            return urllib.parse.parse_qs(text)

    def _send(self, status: int, content: bytes, *, body: bool, headers: dict[str, str] | None = None) -> None:
        first, last = 0, len(content) - 1
        if status == 200 and (part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            first, last = int(part[1]), int(part[2] or last)
            headers = {**(headers or {}), "Content-Range": f"bytes {first}-{last}/{len(content)}"}
            status = 206
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if body:
            self.wfile.write(content[first : last + 1])


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    """A file or folder as the tree of a repository lists it."""
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
    return {"type": "file", "path": name, "oid": _digest(path), "size": path.stat().st_size}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
