"""The switch port at the other end of a wire, as systemd-networkd heard it over LLDP and left it on the disk.

Specification: IEEE 802.1AB-2016 clause 8 (TLVs: type in 7 bits, length in 9); systemd src/network/networkd-lldp-rx.c
(/run/systemd/netif/lldp/<ifindex>: per neighbour the frame's length, 64 bits little-endian, and the Ethernet frame).
Nothing is sent or asked for: only what the machine has heard already is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.host import sysfs
from probes.host.protocol import Host

FOLDER = "/run/systemd/netif/lldp"
_BYTES_MAX = 1 << 14
_FRAME_HEADER, _ETHERTYPE = 14, b"\x88\xcc"
_CHASSIS, _PORT, _SYSTEM_NAME = 1, 2, 5
_TEXT = {
    _CHASSIS: (6, 7),
    _PORT: (1, 5, 7),
}  # subtypes that are text: an interface's name or alias, or locally assigned
_NAME_MAX = 64


def neighbours(host: Host, indices: dict[int, str]) -> dict[str, str]:
    """What each interface of these indices is wired to: "leaf1 Ethernet1/5". One that heard nothing is left out."""
    there = set(sysfs.names(host, FOLDER))
    found = {}
    for index, name in indices.items():
        if str(index) in there:
            try:
                content = host.read_bytes(f"{FOLDER}/{index}", _BYTES_MAX)
            except OSError:
                continue
            heard = list(dict.fromkeys(filter(None, map(neighbour, frames(content)))))
            if len(heard) == 1:  # several: a hub or a bridge in between, and which of them it is cannot be told
                found[name] = heard[0]
    return found


def frames(content: bytes) -> Iterator[bytes]:
    """The frames of one file; a last one that is cut short is left out."""
    at = 0
    while at + 8 <= len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        at += 8 + size
        if not size or at > len(content):
            return
        yield content[at - size : at]


def neighbour(frame: bytes) -> str | None:
    """The system's name and its port, as far as they are text; None where the frame names no system."""
    if frame[12:_FRAME_HEADER] != _ETHERTYPE:
        return None
    said: dict[int, str] = {}
    for kind, value in _tlvs(frame[_FRAME_HEADER:]):
        if kind == _SYSTEM_NAME:
            said.setdefault(kind, _plain(value))
        elif kind in _TEXT and value and value[0] in _TEXT[kind]:
            said.setdefault(kind, _plain(value[1:]))
    system = said.get(_SYSTEM_NAME) or said.get(_CHASSIS)
    return " ".join(filter(None, (system, said.get(_PORT)))) if system else None


def _tlvs(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 2 <= len(data):
        head = int.from_bytes(data[at : at + 2], "big")
        kind, size = head >> 9, head & 0x1FF
        if not kind or at + 2 + size > len(data):
            return
        yield kind, data[at + 2 : at + 2 + size]
        at += 2 + size


def _plain(value: bytes) -> str:
    return "".join(c for c in value.decode("ascii", "replace") if " " < c <= "~")[:_NAME_MAX]
