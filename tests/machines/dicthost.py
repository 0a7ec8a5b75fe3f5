"""A host at the edge of the world: files, links and answers from dictionaries, errors included."""

import ast
import errno
import os
import re
from pathlib import Path

import yaml

from probes.host.recording import RecordedHost

Content = str | bytes | int
"""Text, bytes, or the errno that reading answers."""

DIRECTORY: Content = -1


class DictHost(RecordedHost):
    """Answers as a kernel would: links are followed, folders exist because something is in them.

    Lists that `netlink` lacks are empty. Without `netlink`, every netlink request is refused.
    """

    def __init__(
        self, files: dict[str, Content] | None = None, links: dict[str, str] | None = None, *,
        netlink: dict[str, list[dict]] | None = None, port_links: dict[str, dict] | None = None,
        limits: dict[str, tuple[int | None, int | None]] | None = None, environment: dict[str, str] | None = None,
        identity: dict | None = None, cpu: dict | None = None, register_limit_bytes: int | None = None,
        shm: tuple[int, int] | None = None, unusable: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        who = {"hostname": "h", "pid": 7, "uid": 1000, "kernel": "6.1.0", "architecture": "x86_64", "home": "/root"}
        refused = {"$errno": "EPROTONOSUPPORT"}
        answers = {
            "identity": {"": {**who, **(identity or {})}}, "cpu": {"": cpu or {}},
            "environment": {"": environment or {}}, "statvfs": {"/dev/shm": list(shm)} if shm else {},
            "limit": {name: list(pair) for name, pair in (limits or {}).items()}, "port_link": port_links or {},
            "netlink": {what: refused if netlink is None else netlink.get(what, [])
                        for what in ("links", "addresses", "routes")},
        }  # fmt: skip
        super().__init__({"hostname": "h", "captured_at": 0.0, "answers": answers})
        self.files = dict(files or {})
        self.links = dict(links or {})
        self.register_limit_bytes = register_limit_bytes
        self.unusable = unusable
        self.folders: dict[str, set[str]] = {"": set()}  # the names in each, the root without its "/"
        for path in (*self.files, *self.links):
            self._list(path)
            if self.files.get(path) == DIRECTORY:
                self.folders.setdefault(path, set())

    def _list(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder not in self.folders:
            self.folders[folder] = set()
            self._list(folder)
        self.folders[folder].add(name)

    def resolve(self, path: str) -> str:
        """Follow links component by component, as the kernel does."""
        pending, done, followed = path.split("/")[::-1], "", 0
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            done = done.rpartition("/")[0] if part == ".." else f"{done}/{part}"
            if done in self.links:
                followed += 1
                if followed > 40:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                target = self.links[done]
                done = "" if target.startswith("/") else done.rpartition("/")[0]
                pending += target.split("/")[::-1]
        if done not in self.files and done not in self.folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return done or "/"

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Content, or the error that replaces it."""
        if "\0" in path:
            raise ValueError("embedded null byte")  # as open(2)'s wrapper does
        found = self.resolve(path)
        content = self.files.get(found, DIRECTORY)
        if content == DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if isinstance(content, int):
            raise OSError(content, os.strerror(content), path)
        return (content.encode() if isinstance(content, str) else content)[:limit]

    def read_text(self, path: str) -> str:
        """Content as text."""
        return self.read_bytes(path, 1 << 20).decode(errors="replace")

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Names of files, links and folders inside."""
        folder = self.resolve(path).rstrip("/")
        if folder not in self.folders:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return tuple(sorted(self.folders[folder]))

    def exists(self, path: str) -> bool:
        """Whether it resolves."""
        try:
            self.resolve(path)
        except OSError:
            return False
        return True

    def usable(self, path: str) -> bool:
        """Whether it exists and is not in `unusable`."""
        return self.exists(path) and path not in self.unusable

    def verbs(self, what: str, *arguments):
        """A library that registers up to a limit, or none."""
        if self.register_limit_bytes is None:
            raise ImportError("No module named 'pyverbs'")
        if what == "register" and arguments[1] > self.register_limit_bytes:
            raise OSError(errno.ENOMEM, "Failed to register a MR. Errno: 12, Cannot allocate memory")
        return "44.0" if what == "version" else {}


TEMPLATES: dict = yaml.safe_load(Path(__file__).with_name("sysfs.yaml").read_text(encoding="utf-8"))


def tree_of(device: str, **words) -> tuple[dict[str, Content], dict[str, str]]:
    """Files and links of a device of sysfs.yaml."""
    files, links = (
        {path.format(**words): text.format(**words) if isinstance(text, str) else text for path, text in rows.items()}
        for rows in (TEMPLATES[device].get("files", {}), TEMPLATES[device].get("links", {}))
    )
    return files, links


def corpus_tree(path: Path) -> tuple[dict[str, Content], dict[str, str]]:
    """Files and links of a recorded /sys walk: "PATH [mode] = 'text'", "PATH -> target", "PATH !! ERRNO"."""
    files: dict[str, Content] = {}
    links: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if found := re.match(r"(/\S+) \[\d+\] = (.*)", line):
            files[found[1]] = str(ast.literal_eval(found[2]))
        elif found := re.match(r"(/\S+) -> (\S+)", line):
            links[found[1]] = found[2]
        elif found := re.match(r"(/\S+) !! (\w+)", line):
            files[found[1]] = getattr(errno, found[2])
    return files, links
