"""Where a path of the host lies on this machine: every link is followed inside the host's root.

Specification: path_resolution(7). One scan asks a thousand files of a few hundred folders, most of them below the
same PCI bridges, so what a part of a path is (a link, or not one) is looked up once a scan.
"""

from __future__ import annotations

import errno
import os
import re
import time

LINKS_FOLLOWED = 40  # as the kernel's MAXSYMLINKS
KEPT_SECONDS = 5.0  # for callers that never `forget`: longer than the files of one scan take


_LEADING = re.compile(r"(?:\.\./)+(?!.*(?:^|/)\.\.(?:/|$))[^/].*[^/]")  # "../" in front and nowhere else


class Paths:
    """Resolves paths below a root; "" as prefix is this machine's own root."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._targets: dict[str, str | None] = {}  # a part of a path -> where the link leads; None is no link
        self._known: dict[str, str] = {}  # a path that was asked -> where it leads
        self._real: set[str] = set()  # parts of paths without a link in them
        self._since = time.monotonic()

    def forget(self) -> None:
        """Look everything up again: a device may have come, gone or moved."""
        self._targets.clear()
        self._known.clear()
        self._real.clear()
        self._since = time.monotonic()

    def _old(self) -> bool:
        """Whether it was time to forget."""
        if time.monotonic() - self._since <= KEPT_SECONDS:
            return False
        self.forget()
        return True

    def place(self, path: str) -> tuple[str, str]:
        """(resolved folder on this machine, name in it); the name may be a link."""
        folder, _, name = path.rpartition("/")
        if name in ("", ".", ".."):
            return self.prefix + self.resolve(path), "."
        return self.prefix + self.resolve(folder), name

    def resolve(self, path: str) -> str:
        """The path with every link followed, as seen from the root. Raises OSError where a part is missing."""
        if not self._old() and path in self._known:
            return self._known[path]
        pending, done, links = path.split("/")[::-1], "", 0
        folder, _, name = path.rpartition("/")
        if folder in self._known or folder in self._real:
            pending, done = [name], self._known.get(folder, folder).rstrip("/")
        while pending:
            part = pending.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            target = self._target(f"{done}/{part}")
            if target is None:
                done += f"/{part}"
                self._real.add(done)
                continue
            links += 1
            if links > LINKS_FOLLOWED:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if _LEADING.fullmatch(target):
                direct = os.path.normpath(f"{done}/{target}")
                if direct.rpartition("/")[0] in self._real and self._target(direct) is None:
                    self._real.add(direct)
                    done = direct  # as sysfs links: up, then down a way that has been gone before
                    continue
            if target.startswith("/"):
                done = ""
            pending += target.split("/")[::-1]
        self._known[path] = done or "/"
        return done or "/"

    def _target(self, part: str) -> str | None:
        """Where the link leads, None for anything else; what is missing is asked again each time."""
        try:
            return self._targets[part]
        except KeyError:
            pass
        try:
            target = os.readlink(self.prefix + part)  # noqa: PTH115 - no Path objects, this is the busiest place
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: there, and not a link
                raise
            target = None
        self._targets[part] = target
        return target
