"""What a network device's driver says of its port: the fastest speed it supports, and priority flow control.

Specification: Linux Documentation/networking/ethtool-netlink.rst (ETHTOOL_MSG_LINKMODES_GET, bit sets with names) and
include/uapi/linux/dcbnl.h (DCB_CMD_IEEE_GET, struct ieee_pfc). Neither question needs a privilege. pyroute2 has no DCB,
and decodes a list of link modes for milliseconds a port.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct

from probes.host.nldev import messages, pieces

_ROUTE, _GENERIC = 0, 16
_REQUEST, _ERROR = 0x1, 2
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2
_LINKMODES_GET, _HEADER, _OURS, _DEVICE_NAME = 4, 1, 3, 2
_BITSET_BITS, _BITS_BIT, _BIT_NAME = 3, 1, 2
_RTM_GETDCB, _IEEE_GET, _IFNAME, _IEEE, _IEEE_PFC = 78, 21, 1, 13, 2
_IEEE_APP_TABLE, _IEEE_APP, _SELECTOR_DSCP = 3, 1, 5  # include/uapi/linux/dcbnl.h
_NESTED = 0x8000
_TIMEOUT_SECONDS = 3.0
_SPEED = re.compile(r"(\d{2,7})base[A-Z]")  # "400000baseCR8/Full" is 400000 Mb/s; "FEC_RS", "FIBRE" are no speeds


def ask(name: str) -> dict[str, int | list[int]]:
    """Keys "speed_max_megabits", "pfc_classes" (how many may have PFC), "pfc_mask" and "app_dscp" (the port's map of
    DSCP to priority, each entry 8 * DSCP + priority), as far as the driver answers.

    Raises OSError where it answers nothing at all.
    """
    answers: dict[str, int | list[int]] = {}
    refused: list[OSError] = []
    for question in (_speed_max, _pfc):
        try:
            answers |= question(name)
        except OSError as error:
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]
    return answers


def _speed_max(name: str) -> dict[str, int]:
    with _socket(_GENERIC) as link:
        family = dict(pieces(_exchange(link, _CONTROL, _generic(_GET_FAMILY, _text(_FAMILY_NAME, "ethtool")))[4:]))
        number = int.from_bytes(family.get(_FAMILY_ID, b""), "little" if struct.pack("=H", 1)[0] else "big")
        header = _attribute(_HEADER | _NESTED, _text(_DEVICE_NAME, name))
        return parse_modes(_exchange(link, number, _generic(_LINKMODES_GET, header)))


def parse_modes(body: bytes) -> dict[str, int]:
    """The fastest of the named link modes in an answer to ETHTOOL_MSG_LINKMODES_GET."""
    speeds = []
    for kind, bitset in pieces(body[4:]):
        bits = dict(pieces(bitset)).get(_BITSET_BITS, b"") if kind == _OURS else b""
        for number, bit in pieces(bits):
            mode = dict(pieces(bit)).get(_BIT_NAME, b"") if number == _BITS_BIT else b""
            if found := _SPEED.match(mode.rstrip(b"\0").decode(errors="replace")):
                speeds.append(int(found[1]))
    return {"speed_max_megabits": max(speeds)} if speeds else {}


def _pfc(name: str) -> dict[str, int | list[int]]:
    with _socket(_ROUTE) as link:
        body = struct.pack("=BBH", socket.AF_UNSPEC, _IEEE_GET, 0) + _text(_IFNAME, name)
        return parse_pfc(_exchange(link, _RTM_GETDCB, body))


def parse_pfc(body: bytes) -> dict[str, int | list[int]]:
    """The first two bytes of struct ieee_pfc, and the DSCP entries of the table of struct dcb_app (selector, priority,
    protocol), in an answer to DCB_CMD_IEEE_GET; nothing where the driver has none.
    """
    found = dict(pieces(dict(pieces(body[4:])).get(_IEEE, b"")))
    pfc, table = found.get(_IEEE_PFC, b""), found.get(_IEEE_APP_TABLE)
    answer: dict[str, int | list[int]] = {"pfc_classes": pfc[0], "pfc_mask": pfc[1]} if len(pfc) >= 2 else {}
    if table is not None:
        entries = (value for kind, value in pieces(table) if kind & ~_NESTED == _IEEE_APP and len(value) >= 4)
        apps = (struct.unpack_from("=BBH", value) for value in entries)
        answer["app_dscp"] = [8 * code + to for by, to, code in apps if by == _SELECTOR_DSCP and code < 64 and to < 8]
    return answer


def _socket(protocol: int) -> socket.socket:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    link.settimeout(_TIMEOUT_SECONDS)
    return link


def _exchange(link: socket.socket, kind: int, body: bytes) -> bytes:
    link.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST, 1, 0) + body)
    for answered, content in messages(link.recv(1 << 16)):
        if answered == _ERROR:
            number = -int(struct.unpack_from("=i", content)[0])
            raise OSError(number, os.strerror(number))
        return content
    raise OSError(errno.EBADMSG, "an answer of netlink that is no message")


def _generic(command: int, content: bytes) -> bytes:
    return struct.pack("=BBH", command, 1, 0) + content


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")
