"""Links, addresses and routes through rtnetlink: the fields that the interfaces probe reads, as pyroute2 spells them.

A whole binding costs a resident process 16 MiB and each question several milliseconds; this asks three dumps.
Specification: rtnetlink(7), netlink(7); Linux include/uapi/linux/{rtnetlink,if_link,if_addr}.h.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
from collections.abc import Callable

from probes.host.nldev import pieces
from probes.host.protocol import Json

_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR: something changed while it was listed
_ERROR, _DONE = 2, 3
_TIMEOUT_SECONDS = 3.0
_TRIES = 4
_BYTES = 1 << 16  # the kernel fills at most 32 KiB of a dump at a time
_HEADER = struct.Struct("=IHHII")

Read = Callable[[bytes, int], Json]
Known = dict[int, tuple[str, Read]]


def _text(value: bytes, _family: int) -> Json:
    return value.split(b"\0", 1)[0].decode(errors="replace")


def _number(value: bytes, _family: int) -> Json:
    return int.from_bytes(value[:8], "little" if struct.pack("=H", 1)[0] else "big")


def _hardware(value: bytes, _family: int) -> Json:
    return ":".join(f"{byte:02x}" for byte in value)


def _address(value: bytes, family: int) -> Json:
    known = (family, len(value)) in ((socket.AF_INET, 4), (socket.AF_INET6, 16))
    return socket.inet_ntop(family, value) if known else value.hex()


def _about_link(value: bytes, family: int) -> Json:
    """IFLA_LINKINFO; what a vxlan stands on is one level deeper."""
    kind, data = _attributes(value, {1: ("kind", _text)}, family), b""
    for number, inner in pieces(value):
        data = inner if number == 2 else data
    name = kind.get("kind")
    found: dict[str, Json] = {"IFLA_INFO_KIND": name} if name else {}
    if name == "vxlan":
        found["IFLA_INFO_DATA"] = _attributes(data, {3: ("IFLA_VXLAN_LINK", _number)}, family)
    return found


def _hops(value: bytes, family: int) -> Json:
    """RTA_MULTIPATH: struct rtnexthop (length, flags, hops, interface) with attributes behind each."""
    found: list[Json] = []
    while len(value) >= 8:
        length, flags, weight, index = struct.unpack_from("=HBBi", value)
        if not 8 <= length <= len(value):
            break
        hop: dict[str, Json] = {"flags": flags, "hops": weight, "oif": index}
        found.append(hop | _attributes(value[8:length], {5: ("RTA_GATEWAY", _address)}, family))
        value = value[(length + 3) & ~3 :]
    return found


_LINKS: Known = {
    1: ("IFLA_ADDRESS", _hardware), 3: ("IFLA_IFNAME", _text), 4: ("IFLA_MTU", _number), 5: ("IFLA_LINK", _number),
    10: ("IFLA_MASTER", _number), 18: ("IFLA_LINKINFO", _about_link), 33: ("IFLA_CARRIER", _number),
    37: ("IFLA_LINK_NETNSID", _number),
}  # fmt: skip
_ADDRESSES: Known = {1: ("IFA_ADDRESS", _address), 2: ("IFA_LOCAL", _address), 3: ("IFA_LABEL", _text),
                     8: ("IFA_FLAGS", _number)}  # fmt: skip
_ROUTES: Known = {
    1: ("RTA_DST", _address), 4: ("RTA_OIF", _number), 5: ("RTA_GATEWAY", _address), 6: ("RTA_PRIORITY", _number),
    7: ("RTA_PREFSRC", _address), 9: ("RTA_MULTIPATH", _hops), 15: ("RTA_TABLE", _number),
}  # fmt: skip

# what -> request, answer, struct behind the header, its fields, attributes
_ASKED: dict[str, tuple[int, int, struct.Struct, tuple[str, ...], Known]] = {
    "links": (18, 16, struct.Struct("=BxHiII"), ("family", "ifi_type", "index", "flags", "change"), _LINKS),
    "addresses": (22, 20, struct.Struct("=BBBBI"), ("family", "prefixlen", "flags", "scope", "index"), _ADDRESSES),
    "routes": (26, 24, struct.Struct("=BBBBBBBBI"),
               ("family", "dst_len", "src_len", "tos", "table", "proto", "scope", "type", "flags"), _ROUTES),
}  # fmt: skip


class Route:
    """One socket to the kernel, kept between questions."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)

    def ask(self, what: str) -> tuple[dict[str, Json], ...]:
        """ "links", "addresses" or "routes". Raises OSError."""
        if what not in _ASKED:
            raise ValueError(f"netlink answers {sorted(_ASKED)}, not {what!r}")
        for _ in range(_TRIES):
            try:
                found = self._dump(what)
            except OSError as error:
                self.close()
                if error.errno != errno.ENOBUFS:
                    raise
                continue  # the socket overran: what is left in it is worth nothing
            if found is not None:
                return found
        raise OSError(errno.EINTR, f"rtnetlink: {what} changed during each of {_TRIES} lists")

    def close(self) -> None:
        """Let the socket go."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _dump(self, what: str) -> tuple[dict[str, Json], ...] | None:
        """One list; None where it changed meanwhile."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
            self._socket.bind((0, 0))
            self._socket.settimeout(_TIMEOUT_SECONDS)
        request, answer, fixed, names, known = _ASKED[what]
        number, body = next(self._numbers), bytes(fixed.size)
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), request, _REQUEST_DUMP, number, 0) + body)
        found: list[dict[str, Json]] = []
        whole = True
        while True:
            datagram = self._socket.recv(_BYTES)
            while len(datagram) >= _HEADER.size:
                length, kind, flags, of, _ = _HEADER.unpack_from(datagram)
                if not _HEADER.size <= length <= len(datagram):
                    break
                body, datagram = datagram[_HEADER.size : length], datagram[(length + 3) & ~3 :]
                if of != number:
                    continue  # an event, or the rest of an answer that was given up
                whole = whole and not flags & _INTERRUPTED
                if kind == _DONE:
                    return tuple(found) if whole else None
                if kind == _ERROR:
                    code = -int(struct.unpack_from("=i", body)[0])
                    raise OSError(code, f"rtnetlink: {os.strerror(code)}")
                if kind == answer and len(body) >= fixed.size:
                    entry: dict[str, Json] = dict(zip(names, fixed.unpack_from(body), strict=True))
                    found.append(entry | _attributes(body[fixed.size :], known, body[0]))


def _attributes(body: bytes, known: Known, family: int) -> dict[str, Json]:
    """The attributes that are known here, by name."""
    return {known[n][0]: known[n][1](value, family) for n, value in pieces(body) if n in known}
