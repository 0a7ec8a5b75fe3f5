"""Channel lines: which transport joins two ranks, and whether the NIC reads GPU memory directly.

Surface: NCCL src/transport/net.cc, p2p.cc, shm.cc, coll_net.cc from 2.4 to 2.31, and RCCL:
``Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0(6)/GDRDMA``; tags stand in the order ``/GDRDMA``, ``(PCI)``,
``/Shared``, ``/flush=``. A line cut before its tag proves the transport and says nothing about GPUDirect RDMA.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Everything up to a blank, a quote or a table edge belongs to the tags; a glued neighbour shows as an odd start.
_RUN = rb"(?P<run>[^\s\"'`<>|,;\\]*)"
_NAME = rb"[A-Za-z][\w.+-]*(?: [A-Za-z][\w.+-]*){0,2}"
_TAIL = re.compile(
    rb"via (?:"
    rb"(?P<net>NET|COLLNET)/(?P<name>" + _NAME + rb")/(?P<dev>\d+)(?P<proxy>\(\d+\))?" + _RUN + rb"|"
    rb"P2P/(?P<p2p>direct pointer|IPC|CUMEM|MNNVL|indirect)(?:/\d+\[[^\]\s]*\])?(?P<p2prun>(?:/(?:read|CE))*)"
    rb"(?P<p2pglue>[^\s\"'`<>|,;\\]?)|"
    rb"(?P<shm>SHM|direct shared memory)"
    rb")"
)
_FRAGMENT = re.compile(rb"NET/(?:" + _NAME + rb")/\d+(?:\(\d+\))?(?:/\S*)?\s*$")
_PEER = re.compile(rb"-> \d+|\d+\[[0-9a-f]+\] +$")  # also where "0[0] -" was torn away
_TAG = b"/GDRDMA"
_OTHER_TAG = re.compile(rb"/(?:Shared|flush=\w|[A-Za-z]{2,20}(?:=\w*)?(?:/|$))")


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of one channel."""

    transport: str  # "NET/IB", "COLLNET/SHARP", "P2P/CUMEM/read", "SHM"
    direction: str | None = None  # "send", "receive"; None where the line does not say
    gdrdma: bool | None = None  # None: not a network channel, or cut before the tag
    device: int | None = None  # of the network
    proxied: bool = False  # sent through the GPU of another rank (PXN)
    torn: bool = False
    bare_end: bool = False  # nothing follows on the line: a continuation may

    @property
    def network(self) -> str | None:
        """Name of the network, None for a channel within a node."""
        family, _, name = self.transport.partition("/")
        return name if family in ("NET", "COLLNET") else None


def _tagged(run: bytes) -> tuple[bool | None, bool]:
    """Whether GDRDMA is on, and whether the line was torn here."""
    if not run or run in (b".", b")", b"`", b"*", b"**"):
        return False, False
    if run.startswith(b"/"):
        if _TAG in run:
            return True, False
        # No other tag begins so: what is left of "/GDRDMA" still proves it.
        if run.startswith(b"/GD"):
            return True, True
        # "/Shared", "/flush=None" or a tag of a later version; with anything else in it a neighbour is glued on.
        return (False, False) if _OTHER_TAG.match(run) else (None, True)
    return None, True


def _direction(head: bytes) -> str | None:
    head = head.rstrip()
    if head.endswith(b"[send]"):
        return "send"
    return "receive" if head.endswith(b"[receive]") else None


def parse_channels(line: bytes) -> Iterator[Channel]:
    """Every channel named in the line: interleaved writers leave several."""
    start = line.find(b"via ")
    while start >= 0:
        match = _TAIL.match(line, start)
        if match is not None:
            head = line[max(0, start - 72) : start]
            direction = _direction(head)
            if direction is not None or _PEER.search(head) or not head.strip(b"> \t*-`"):
                yield _channel(match, direction, end=len(line))
        start = line.find(b"via ", start + 4)


def _channel(match: re.Match[bytes], direction: str | None, *, end: int) -> Channel:
    if match["net"]:
        gdrdma, torn = _tagged(match["run"])
        return Channel(
            transport=f"{match['net'].decode()}/{match['name'].decode()}",
            direction=direction,
            gdrdma=gdrdma,
            device=int(match["dev"][:6]),
            proxied=match["proxy"] is not None,
            torn=torn,
            bare_end=gdrdma is not True and match.end() == end,
        )
    if match["shm"]:
        return Channel(transport="SHM")
    kind = match["p2p"].decode()
    tags, rest = match["p2prun"].decode(), match.string[match.start("p2pglue") :]
    if rest in (b"/r", b"/re", b"/rea"):
        return Channel(transport=f"P2P/{kind}{tags}/read")
    # Glued to the next writer before a possible "/read": the family is proven, its tags are not.
    torn = bool(match["p2pglue"]) and match["p2pglue"] not in b".)*`" and not tags
    return Channel(transport=f"P2P/{kind}{tags}", torn=torn)


def is_fragment(line: bytes) -> bool:
    """Whether the line is the lost end of a channel line."""
    return _FRAGMENT.match(line) is not None
