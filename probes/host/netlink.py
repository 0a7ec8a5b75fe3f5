"""Netlink queries: links, addresses and routes; link modes and flow control of a port.

pyroute2 reads rtnetlink(7). Priority flow control (DCB), which pyroute2 does not support, is read here. So are
ethtool's link modes, because pyroute2 needs milliseconds per port to decode them. No query needs privileges, and each
has a timeout of a few seconds.

Specification: netlink(7), rtnetlink(7); Linux include/uapi/linux/dcbnl.h
(DCB_CMD_IEEE_GET, struct ieee_pfc); Documentation/networking/ethtool-netlink.rst (ETHTOOL_MSG_LINKMODES_GET, bit sets
with names).
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec, module_from_spec
from typing import Any

from contracts.tables import read_table
from probes.host.protocol import Json

_TABLE = read_table(__file__, "netlink.toml")
_TIMEOUT_SECONDS = 3.0
_REQUEST, _ERROR = 0x1, 2
_ATTRIBUTE = struct.Struct("=HH")
_TYPE, _NESTED = 0x3FFF, 0x8000  # mask that removes NLA_F_NESTED and NLA_F_NET_BYTEORDER from a type; NLA_F_NESTED

# rtnetlink ------------------------------------------------------------------------------------------------------

_TRIES = 4  # if the list changes during the dump


def ask_route(kind: str) -> tuple[dict[str, Json], ...]:
    """Return the "links", "addresses" or "routes" of this network namespace: one flat dict each, with pyroute2's names.

    Each list is read on its own socket, so that an overrun or a timeout does not affect later queries. Raises OSError
    if netlink refuses or breaks, or does not answer in time.
    """
    if "pyroute2" not in sys.modules and (package := find_spec("pyroute2")):
        sys.modules["pyroute2"] = module_from_spec(package)  # without its __init__, which imports every socket (0.3 s)
    from pyroute2.netlink.exceptions import NetlinkDecodeError, NetlinkError

    try:
        return asyncio.run(_list(kind))
    except NetlinkError as error:
        raise OSError(error.code, f"rtnetlink: {os.strerror(error.code)}") from None
    except NetlinkDecodeError as error:
        raise OSError(errno.EBADMSG, f"rtnetlink: {error.exception}") from None
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"rtnetlink: no list of {kind} in {_TIMEOUT_SECONDS:.0f} s") from None


async def _list(kind: str) -> tuple[dict[str, Json], ...]:
    from pyroute2.iproute.linux import AsyncIPRoute
    from pyroute2.netlink.exceptions import NetlinkDumpInterrupted

    about = _TABLE["lists"][kind]
    async with asyncio.timeout(_TIMEOUT_SECONDS):
        for _ in range(_TRIES):
            try:
                async with AsyncIPRoute() as route:
                    listed = await getattr(route, about["method"])()
                    return tuple([_decode(message, about["fields"], about["attributes"]) async for message in listed])
            except NetlinkDumpInterrupted:
                continue  # the list changed during the dump
    raise OSError(errno.EINTR, f"rtnetlink: {kind} changed during each of {_TRIES} lists")


def _decode(message: Any, fields: Sequence[str], attributes: Sequence[str]) -> dict[str, Json]:
    """Return the known fields and attributes of one message; others are not decoded."""
    entry: dict[str, Json] = {name: message[name] for name in fields}
    for slot in message["attrs"]:
        if (name := slot[0]) in attributes:
            entry[name] = _INNER[name](slot[1]) if name in _INNER else slot[1]
    return entry


def _decode_link_info(info: Any) -> dict[str, Json]:
    """Return the kind of a link; for a vxlan also its lower device, which is nested one level deeper."""
    kind = info.get_attr("IFLA_INFO_KIND")
    decoded: dict[str, Json] = {"IFLA_INFO_KIND": kind} if kind else {}
    if kind == "vxlan":
        lower = info.get_nested("IFLA_INFO_DATA", "IFLA_VXLAN_LINK")
        decoded["IFLA_INFO_DATA"] = {} if lower is None else {"IFLA_VXLAN_LINK": lower}
    return decoded


_INNER: dict[str, Callable[[Any], Json]] = {
    "IFLA_LINKINFO": _decode_link_info,
    "RTA_MULTIPATH": lambda hops: [_decode(hop, ("oif",), ()) for hop in hops],
}


# A port ---------------------------------------------------------------------------------------------------------

_ROUTE, _GENERIC = 0, 16
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2
_LINKMODES_GET, _HEADER, _OURS, _DEVICE_NAME = 4, 1, 3, 2
_BITSET_BITS, _BITS_BIT, _BIT_NAME = 3, 1, 2
_RTM_GETDCB, _IEEE_GET, _IFNAME, _IEEE, _IEEE_PFC = 78, 21, 1, 13, 2
_IEEE_APP_TABLE, _IEEE_APP, _SELECTOR_DSCP = 3, 1, 5  # include/uapi/linux/dcbnl.h
_SPEED = re.compile(r"(\d{2,7})base[A-Z]")  # "400000baseCR8/Full" is 400000 Mb/s; "FEC_RS" and "FIBRE" have no speed


def ask_port(name: str) -> dict[str, int | list[int]]:
    """Return "speed_max_megabits", "pfc_classes" (how many classes may have PFC), "pfc_mask" and "app_dscp" (the port's
    DSCP to priority map, each entry 8 * DSCP + priority). Keys that the driver does not report are missing.

    Raises OSError if it reports none of them.
    """
    answers: dict[str, int | list[int]] = {}
    refused: list[OSError] = []
    for question in (_ask_speed, _ask_pfc):
        try:
            answers |= question(name)
        except OSError as error:
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]
    return answers


def _ask_speed(name: str) -> dict[str, int]:
    with _open_socket(_GENERIC) as link:
        about = _exchange(link, _CONTROL, _encode_generic(_GET_FAMILY, _text(_FAMILY_NAME, "ethtool")))
        family = dict(split_attributes(about[4:]))
        number = int.from_bytes(family.get(_FAMILY_ID, b""), sys.byteorder)
        header = _encode_attribute(_HEADER | _NESTED, _text(_DEVICE_NAME, name))
        return parse_modes(_exchange(link, number, _encode_generic(_LINKMODES_GET, header)))


def parse_modes(body: bytes) -> dict[str, int]:
    """Return the fastest link mode in an answer to ETHTOOL_MSG_LINKMODES_GET."""
    speeds = []
    for kind, bitset in split_attributes(body[4:]):
        bits = dict(split_attributes(bitset)).get(_BITSET_BITS, b"") if kind == _OURS else b""
        for number, bit in split_attributes(bits):
            mode = dict(split_attributes(bit)).get(_BIT_NAME, b"") if number == _BITS_BIT else b""
            if match := _SPEED.match(mode.rstrip(b"\0").decode(errors="replace")):
                speeds.append(int(match[1]))
    return {"speed_max_megabits": max(speeds)} if speeds else {}


def _ask_pfc(name: str) -> dict[str, int | list[int]]:
    with _open_socket(_ROUTE) as link:
        body = struct.pack("=BBH", socket.AF_UNSPEC, _IEEE_GET, 0) + _text(_IFNAME, name)
        return parse_pfc(_exchange(link, _RTM_GETDCB, body))


def parse_pfc(body: bytes) -> dict[str, int | list[int]]:
    """Parse an answer to DCB_CMD_IEEE_GET: the first two bytes of struct ieee_pfc, and the DSCP entries in the table of
    struct dcb_app (selector, priority, protocol). The result is empty if the driver reports neither.
    """
    attributes = dict(split_attributes(dict(split_attributes(body[4:])).get(_IEEE, b"")))
    pfc, table = attributes.get(_IEEE_PFC, b""), attributes.get(_IEEE_APP_TABLE)
    answer: dict[str, int | list[int]] = {"pfc_classes": pfc[0], "pfc_mask": pfc[1]} if len(pfc) >= 2 else {}
    if table is not None:
        entries = (value for kind, value in split_attributes(table) if kind & ~_NESTED == _IEEE_APP and len(value) >= 4)
        apps = (struct.unpack_from("=BBH", value) for value in entries)
        answer["app_dscp"] = [8 * code + to for by, to, code in apps if by == _SELECTOR_DSCP and code < 64 and to < 8]
    return answer


def _open_socket(protocol: int) -> socket.socket:
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    link.bind((0, 0))
    link.settimeout(_TIMEOUT_SECONDS)
    return link


def _exchange(link: socket.socket, kind: int, body: bytes) -> bytes:
    """Send a request and return the body of the answer. Raises OSError."""
    link.send(struct.pack("=IHHII", 16 + len(body), kind, _REQUEST, 1, 0) + body)
    for answered, content in split_messages(link.recv(1 << 16)):
        if answered != _ERROR:
            return content
        number = -int(struct.unpack_from("=i", content)[0])
        raise OSError(number, os.strerror(number))
    raise OSError(errno.EBADMSG, "an answer of netlink that is no message")


def _encode_generic(command: int, content: bytes) -> bytes:
    return struct.pack("=BBH", command, 1, 0) + content


def _encode_attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _text(kind: int, value: str) -> bytes:
    return _encode_attribute(kind, value.encode() + b"\0")


def split_messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, body) of every netlink message in a datagram; stops at a truncated one."""
    while len(datagram) >= 16:
        length, kind = struct.unpack_from("=IH", datagram)
        if not 16 <= length <= len(datagram):
            return
        yield kind, datagram[16:length]
        datagram = datagram[(length + 3) & ~3 :]


def split_attributes(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type without flags, value) of every attribute of a message; stops at a truncated one."""
    while len(body) >= 4:
        length, kind = _ATTRIBUTE.unpack_from(body)
        if not 4 <= length <= len(body):
            return
        yield kind & _TYPE, body[4:length]
        body = body[(length + 3) & ~3 :]
