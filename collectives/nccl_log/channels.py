"""Channel lines, which name the transport that joins two ranks.

Surface: NCCL src/transport/net.cc, p2p.cc, shm.cc, coll_net.cc from 2.4 to 2.32, and RCCL:
``Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0(6)/GDRDMA``. The tags have the order ``/GDRDMA``, ``(PCI)``,
``/Shared``, ``/flush=``. A line that is cut before its tag proves the transport, but says nothing about GPUDirect RDMA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from contracts.tables import read_patterns

MAX_HEAD_BYTES: Final = 72  # between "Channel" and "via"
TAG: Final = b"/GDRDMA"
_TEXTS = read_patterns(__file__, "facts.toml", "channels", str.encode)


class Channel(NamedTuple):
    """One end of one channel."""

    transport: str  # "NET/IB", "COLLNET/SHARP", "P2P/CUMEM/read", "SHM"
    direction: str | None = None  # "send", "receive"; None if the line does not say
    gdrdma: bool | None = None  # None: not a network channel, or cut before the tag
    device: int | None = None  # of the network
    proxied: bool = False  # sent through the GPU of another rank (PXN)
    torn: bool = False

    @property
    def network(self) -> str | None:
        """Return the name of the network; None for a channel within a node."""
        family, _, name = self.transport.partition("/")
        return name if family in ("NET", "COLLNET") else None

    @property
    def is_cut(self) -> bool:
        """Return whether the line ends before it proves what the channel is."""
        return self.gdrdma is None if self.network else self.torn


def parse_channels(line: bytes, *, cut: bool = False) -> Iterator[Channel]:
    """Parse every channel in a line, because several writers may share it; `cut`: the line has no end."""
    start = line.find(b"via ")
    while start >= 0:
        match = _TEXTS["tail"].match(line, start)
        if match is not None:
            head = line[max(0, start - MAX_HEAD_BYTES) : start]
            direction = direction_of(head)
            if direction is not None or _TEXTS["peer"].search(head) or not head.strip(b"> \t*-`"):
                yield _make_channel(match, direction, cut=cut and match.end() == len(line))
        start = line.find(b"via ", start + 4)


def direction_of(head: bytes) -> str | None:
    """Return the direction of the channel that follows this part of a line."""
    head = head.rstrip()
    if head.endswith(b"[send]"):
        return "send"
    return "receive" if head.endswith(b"[receive]") else None


def _make_channel(match: re.Match[bytes], direction: str | None, *, cut: bool) -> Channel:
    if match["net"]:
        gdrdma, torn = _gdrdma_of(match["run"])
        if cut and not gdrdma:
            gdrdma, torn = None, True
        network, device = f"{match['net'].decode()}/{match['name'].decode()}", int(match["dev"][:6])
        return Channel(network, direction, gdrdma, device, proxied=match["proxy"] is not None, torn=torn)
    if match["shm"]:
        return Channel(transport="SHM")
    kind, tags = match["p2p"].decode(), match["p2prun"].decode()
    if match.string[match.start("p2pglue") :] in (b"/r", b"/re", b"/rea"):
        return Channel(transport=f"P2P/{kind}{tags}/read")
    # If another writer's text follows where "/read" may stand, only the family of the transport is proven.
    torn = bool(match["p2pglue"]) and match["p2pglue"] not in b".)*`" and not tags
    return Channel(transport=f"P2P/{kind}{tags}", torn=torn)


def _gdrdma_of(tags: bytes) -> tuple[bool | None, bool]:
    """Return whether GPUDirect RDMA is on, and whether the line is torn in its tags."""
    if not tags or tags in (b".", b")", b"`", b"*", b"**"):
        return False, False
    if TAG in tags:
        return (True, False) if tags.startswith(b"/") else (None, True)
    if tags.startswith(b"/GD"):  # no other tag starts like this, so a part of "/GDRDMA" is proof
        return True, True
    # "/Shared", "/flush=None" or a tag of a later version; anything else is the text of another writer.
    return (False, False) if _TEXTS["other_tag"].match(tags) else (None, True)
