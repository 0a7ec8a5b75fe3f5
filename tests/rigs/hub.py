"""A hub on loopback that speaks huggingface_hub's HTTP: information, trees in pages, files by commit, refusals.

Surface: https://huggingface.co/docs/hub/api and the headers that huggingface_hub reads: X-Repo-Commit, ETag,
X-Linked-Etag, X-Linked-Size, X-Error-Code, Link. What it serves is what a test puts into a folder.
"""

import hashlib
import threading
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from rigs.serving import Handler

PAGE = 3  # entries of a tree per answer: every listing has several pages
LARGE = 4096  # from here on files are "LFS": their place answers with a redirect to another host


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of these rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@dataclass(slots=True, kw_only=True)
class Repository:
    """One repository at one commit; `folder` holds its files."""

    folder: Path
    sha: str
    branches: dict[str, Path] = field(default_factory=dict)  # other branches, with their own folders
    tokens: tuple[str, ...] | None = None  # who may read the files of a gated one; None: everybody
    listed: tuple[str, ...] = ()  # further paths that its trees name

    def at(self, revision: str) -> tuple[str, Path] | None:
        """Commit and folder of a branch or commit; `main` is at the commit of the branch that has its folder."""
        commits = {folder: _sha1(name.encode()) for name, folder in self.branches.items()}
        main = commits.get(self.folder, self.sha), self.folder
        known = {"main": main, self.sha: main}
        for name, folder in self.branches.items():
            known[name] = known[commits[folder]] = commits[folder], folder
        return known.get(revision)


class Hub:
    """The server; `failing` is a status that everything gets."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.moved: dict[tuple[str, str], str] = {}  # old name -> today's
        self.asked: list[str] = []  # method and path of each request
        self.failing: int | None = None
        self.refused: dict[str, int] = {}  # token -> the status that everything asked with it gets
        outer = self

        class OfHub(Handler):
            def respond(self) -> None:
                outer.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), OfHub)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.files = f"http://localhost:{self.server.server_address[1]}/cdn"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add(self, kind: str, name: str, folder: Path, **more: Any) -> Repository:
        """A repository from a folder."""
        made = Repository(folder=folder, sha=_sha1(f"{kind} {name}".encode()), **more)
        self.repositories[kind, name] = made
        return made

    def close(self) -> None:
        """Gone: connections are refused from now on."""
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: Handler) -> None:
        """One request."""
        url = urlsplit(request.path)
        path = unquote(url.path)
        self.asked.append(f"{request.command} {path}")
        if self.failing is not None:
            return request.send(self.failing, {"error": "failing"})
        token = request.token
        if token in self.refused:
            return request.send(self.refused[token], {"error": "Invalid credentials in Authorization header"})
        if path.startswith("/cdn/"):
            return _send_file(request, Path(path.removeprefix("/cdn")), {})
        for kind, name in (*self.moved, *self.repositories):
            prefix = "" if kind == "models" else f"/{kind}"
            for start, respond in ((f"/api/{kind}/{name}", self._api), (f"{prefix}/{name}/resolve", self._file)):
                if path != start and not path.startswith(f"{start}/"):
                    continue
                if new := self.moved.get((kind, name)):
                    return request.send(307, {}, {"Location": request.path.replace(f"/{name}", f"/{new}", 1)})
                rest, repository = path.removeprefix(start).strip("/"), self.repositories[kind, name]
                return respond(request, name, repository, rest, parse_qs(url.query))
        # without a token the real one does not tell the absent from the private
        return _refuse(request, 404 if token else 401, "RepoNotFound")

    def _api(self, request: Handler, name: str, repository: Repository, rest: str, query: dict[str, list[str]]) -> None:
        what, _, where = rest.partition("/")
        revision, _, inside = where.partition("/")
        found = repository.at(revision or "main")
        if found is None:
            return _refuse(request, 404, "RevisionNotFound")
        sha, folder = found
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        if what in ("", "revision"):
            siblings = [{"rfilename": p.relative_to(folder).as_posix(), "size": p.stat().st_size} for p in files]
            return request.send(200, {
                "id": name, "sha": sha, "private": False, "gated": "manual" if repository.tokens else False,
                "siblings": siblings, "tags": [], "downloads": 0,
            })  # fmt: skip
        if what != "tree" or not (folder / inside).is_dir():
            return _refuse(request, 404, "EntryNotFound")
        entries = [_entry(p, folder) for p in files if p.relative_to(folder).as_posix().startswith(inside)]
        entries += [{"type": "file", "path": path, "size": 1, "oid": "0" * 40} for path in repository.listed]
        first = int(query.get("cursor", ["0"])[0])
        more = {}
        if first + PAGE < len(entries):
            more["Link"] = f'<{self.url}{urlsplit(request.path).path}?recursive=True&cursor={first + PAGE}>; rel="next"'
        return request.send(200, entries[first : first + PAGE], more)

    def _file(self, request: Handler, _name: str, repository: Repository, rest: str, _query: Any) -> None:
        revision, _, inside = rest.partition("/")
        found = repository.at(revision)
        if found is None:
            return _refuse(request, 404, "RevisionNotFound")
        sha, folder = found
        token = request.token
        if repository.tokens is not None and token not in repository.tokens:
            return _refuse(request, 403 if token else 401, "GatedRepo")
        path = folder / inside
        if not path.is_file():
            return _refuse(request, 404, "EntryNotFound", {"X-Repo-Commit": sha})
        oid = _entry(path, folder)["oid"]
        if path.stat().st_size < LARGE:
            return _send_file(request, path, {"ETag": f'"{oid}"', "X-Repo-Commit": sha})
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return request.send(302, {}, {
            "Location": f"{self.files}{path}", "X-Repo-Commit": sha, "X-Linked-Etag": f'"{sha256}"',
            "X-Linked-Size": str(path.stat().st_size), "ETag": f'"{oid}"',
        })  # fmt: skip


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    content = path.read_bytes()
    oid = _sha1(b"blob %d\0" % len(content) + content)
    entry = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": oid}
    if len(content) >= LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _sha1(content: bytes) -> str:
    """As git names commits and files."""
    return hashlib.sha1(content).hexdigest()  # noqa: S324


def _refuse(request: Handler, status: int, code: str, headers: dict[str, str] | None = None) -> None:
    request.send(status, {"error": code}, {"X-Error-Code": code, **(headers or {})})


def _send_file(request: Handler, path: Path, headers: dict[str, str]) -> None:
    content, status = path.read_bytes(), 200
    wanted = request.headers.get("Range", "")
    if wanted.startswith("bytes="):
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        total, stop = len(content), int(last) + 1 if last else len(content)
        content, status = content[int(first) : stop], 206
        headers = {**headers, "Content-Range": f"bytes {first}-{stop - 1}/{total}"}
    request.send(status, content, {"Content-Type": "application/octet-stream", **headers})
