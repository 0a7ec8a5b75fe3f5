"""RDMA devices and ports through NETLINK_RDMA, which answers without sysfs and without privileges.

Specification: Linux include/uapi/rdma/rdma_netlink.h (RDMA_NL_NLDEV), netlink(7).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

NETLINK_RDMA = 20
_NLDEV = 5 << 10  # RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, op)
_GET, _PORT_GET, _SYS_GET = 1, 5, 6
_REQUEST, _DUMP = 0x1, 0x300
_DONE, _ERROR = 3, 2
_TIMEOUT_SECONDS = 3.0
_ATTRIBUTE = struct.Struct("=HH")
_TYPE = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER

_NUMBERS = {
    1: "device_index",
    3: "port",
    4: "capability_flags",
    6: "node_guid",
    7: "sys_image_guid",
    9: "lid",
    10: "sm_lid",
    12: "state",  # enum ib_port_state: 1 DOWN, 2 INIT, 3 ARMED, 4 ACTIVE
    13: "physical_state",  # 3 Disabled, 2 Polling, 5 LinkUp
    14: "node_type",  # 1 CA, 4 RNIC, 5 USNIC, 7 unspecified (EFA)
    50: "netdev_index",
    66: "netns_mode",  # 1 shared, 0 exclusive
}
_TEXTS = {2: "name", 5: "firmware", 51: "netdev", 67: "protocol"}

Message = dict[str, int | str]


def ask(what: str) -> tuple[dict[str, int | str], ...]:
    """ "devices", "ports" (each with its device's name) or "system"."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as link:
        link.bind((0, 0))
        link.settimeout(_TIMEOUT_SECONDS)
        if what == "system":
            return tuple(_exchange(link, _SYS_GET, None, _REQUEST))
        devices = tuple(_exchange(link, _GET, None, _REQUEST | _DUMP))
        if what == "devices":
            return devices
        if what != "ports":
            raise ValueError(f'rdma_netlink answers "devices", "ports" and "system", not {what!r}')
        return tuple(
            {"name": device["name"], **port}
            for device in devices
            for port in _exchange(link, _PORT_GET, int(device["device_index"]), _REQUEST | _DUMP)
        )


def _exchange(link: socket.socket, operation: int, device: int | None, flags: int) -> list[Message]:
    payload = b"" if device is None else struct.pack("=HHI", 8, 1, device)
    link.send(struct.pack("=IHHII", 16 + len(payload), _NLDEV | operation, flags, 1, 0) + payload)
    answers: list[Message] = []
    while True:
        for kind, body in messages(link.recv(1 << 16)):
            if kind == _DONE:
                return answers
            if kind == _ERROR:
                number = -int(struct.unpack_from("=i", body)[0])
                raise OSError(number, f"NETLINK_RDMA: {os.strerror(number)}")
            answers.append(attributes(body))
            if not flags & _DUMP:
                return answers


def messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, body) of every netlink message in a datagram; a cut one ends it."""
    while len(datagram) >= 16:
        length, kind = struct.unpack_from("=IH", datagram)
        if not 16 <= length <= len(datagram):
            return
        yield kind, datagram[16:length]
        datagram = datagram[(length + 3) & ~3 :]


def pieces(body: bytes) -> Iterator[tuple[int, bytes]]:
    """(type without its flags, value) of every attribute of a message; a cut one ends it."""
    while len(body) >= 4:
        length, kind = _ATTRIBUTE.unpack_from(body)
        if not 4 <= length <= len(body):
            return
        yield kind & _TYPE, body[4:length]
        body = body[(length + 3) & ~3 :]


def attributes(body: bytes) -> Message:
    """The attributes of one message that are known here, by name."""
    found: Message = {}
    for kind, value in pieces(body):
        if kind in _TEXTS:
            found[_TEXTS[kind]] = value.rstrip(b"\0").decode(errors="replace")
        elif kind in _NUMBERS:
            found[_NUMBERS[kind]] = int.from_bytes(value, "little" if struct.pack("=H", 1)[0] else "big")
    return found
