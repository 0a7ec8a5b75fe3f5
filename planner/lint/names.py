"""Names of devices and interfaces as NCCL_IB_HCA and NCCL_SOCKET_IFNAME give them.

Specification: NCCL src/misc/utils.cc (parseStringList, matchIfList).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NameList:
    """NCCL_IB_HCA or NCCL_SOCKET_IFNAME as NCCL parses it."""

    negated: bool
    exact: bool
    entries: tuple[tuple[str, int | None], ...]  # (name, port)

    @classmethod
    def parse(cls, text: str) -> NameList:
        """`^` first, then `=`, then names with an optional port."""
        negated = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        entries = []
        for entry in text.removeprefix("=").split(","):
            name, _, rest = entry.partition(":")
            port = rest.split(":")[0]
            if name:
                entries.append((name, int(port) if port.isdecimal() else None))
        return cls(negated=negated, exact=exact, entries=tuple(entries))

    def hits(self, entry: tuple[str, int | None], name: str, port: int | None = None) -> bool:
        """Whether one entry matches a name."""
        wanted, wanted_port = entry
        same = name == wanted if self.exact else name.startswith(wanted)
        return same and (port is None or wanted_port is None or wanted_port == port)

    def takes(self, name: str, port: int | None = None) -> bool:
        """Whether NCCL would use the name."""
        if not self.entries:
            return not self.negated
        return any(self.hits(entry, name, port) for entry in self.entries) != self.negated
