"""Netlink messages of ethtool, DCB and RDMA, byte by byte as the kernel lays them out."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.host import netlink
from probes.host.live import LiveHost
from probes.host.recording import RecordedHost, RecordingHost
from probes.scanner import archive


def attribute(kind: int, value: bytes) -> bytes:
    """One netlink attribute, padded to four bytes."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def link_modes(names: tuple[str, ...]) -> bytes:
    """An answer to ETHTOOL_MSG_LINKMODES_GET; the first mode is advertised, the others supported."""
    bits = b""
    for i, name in enumerate(names):
        value = attribute(1, struct.pack("=I", i)) + attribute(2, name.encode() + b"\0")
        bits += attribute(0x8001, value + (b"" if i else attribute(3, b"")))
    header = attribute(0x8001, attribute(1, struct.pack("=I", 4)) + attribute(2, b"eth0\0"))
    ours = attribute(0x8003, attribute(2, struct.pack("=I", 121)) + attribute(0x8003, bits))
    return b"\x04\x01\0\0" + header + attribute(2, b"\x01") + ours + attribute(5, struct.pack("=I", 100_000))


def test_the_fastest_of_the_named_modes_counts() -> None:
    """Names that are no speed, and the speed of the moment, do not."""
    names = ("Autoneg", "FIBRE", "25000baseCR/Full", "400000baseCR8/Full", "100000baseSR4/Full", "RS")
    assert netlink.parse_modes(link_modes(names)) == {"speed_max_megabits": 400_000}
    assert netlink.parse_modes(link_modes(("Autoneg", "Pause"))) == {}
    assert netlink.parse_modes(b"") == {}


def test_the_mask_of_priorities_is_the_second_byte() -> None:
    """struct ieee_pfc: capability, mask, then counters."""
    pfc = struct.pack("=BBBxH2x8Q8Q", 8, 0b1000, 0, 0, *range(16))
    ieee = attribute(13, attribute(1, bytes(40)) + attribute(2, pfc))
    body = struct.pack("=BBH", 0, 21, 0) + attribute(1, b"eth0\0")
    assert netlink.parse_pfc(body + ieee) == {"pfc_classes": 8, "pfc_mask": 8}
    assert netlink.parse_pfc(body) == {}


def test_the_ports_map_of_dscp_is_in_the_table_of_applications() -> None:
    """struct dcb_app: selector 5 is DSCP; others are Ethernet types and ports."""
    apps = b"".join(attribute(1, struct.pack("=BBH", *each)) for each in ((5, 3, 26), (1, 0, 0x8914), (5, 6, 48)))
    body = struct.pack("=BBH", 0, 21, 0) + attribute(1, b"eth0\0")
    assert netlink.parse_pfc(body + attribute(13, attribute(0x8003, apps))) == {"app_dscp": [8 * 26 + 3, 8 * 48 + 6]}
    assert netlink.parse_pfc(body + attribute(13, attribute(3, b""))) == {"app_dscp": []}


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(body: bytes) -> None:
    """A driver's answer is taken as it comes."""
    assert isinstance(netlink.parse_modes(body), dict)
    assert isinstance(netlink.parse_pfc(body), dict)


def test_the_kernel_answers_or_refuses_by_an_errno_that_a_recording_keeps() -> None:
    """The loopback device has neither link modes nor priorities, a device that is not there is an error too."""
    recorder = RecordingHost(LiveHost())
    for name in ("lo", "topoflight-none"):
        with pytest.raises(OSError) as live:
            recorder.port_link(name)
        content = archive({"hostname": "h", "time": 1.0}, recorder.answers, "")
        with pytest.raises(OSError) as recorded:
            RecordedHost(content).port_link(name)
        assert recorded.value.errno == live.value.errno
    assert {name for _, name in socket.if_nameindex()} >= {"lo"}


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body


NAMES = attribute(2, b"mlx5_0\0") + attribute(5, b"28.39.3560\0") + attribute(999, b"of next year")
MODE = attribute(0x4000 | 66, b"\x01")  # NLA_F_NET_BYTEORDER is not part of the type


def test_several_messages_share_a_datagram() -> None:
    """And a cut one ends it without harm."""
    datagram = message(0x1401, NAMES) + message(0x1401, MODE) + message(3, bytes(4))
    assert [kind for kind, _ in netlink.messages(datagram)] == [0x1401, 0x1401, 3]
    assert [body for _, body in netlink.messages(datagram)][1] == MODE
    assert [kind for kind, _ in netlink.messages(datagram[:-4])] == [0x1401, 0x1401]


@given(st.binary(max_size=512))
def test_any_bytes_end(data: bytes) -> None:
    """A kernel of next year must not hang or crash the scan."""
    for _, body in netlink.messages(data):
        list(netlink.pieces(body))
    assert dict(netlink.pieces(MODE)) == {66: b"\x01"} and list(netlink.pieces(data)) is not None
