"""NETLINK_RDMA messages, made by hand as the kernel makes them."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from probes.host.netlink import attributes, messages


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _message(kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body


DEVICE = (
    _attribute(1, struct.pack("=I", 3))
    + _attribute(2, b"mlx5_0\0")
    + _attribute(5, b"28.39.3560\0")
    + _attribute(6, struct.pack("=Q", 0xA088C20300AA0001))
    + _attribute(0x4000 | 14, b"\x01")  # NLA_F_NET_BYTEORDER is not part of the type
    + _attribute(999, b"of next year")
)
PORT = (
    _attribute(3, struct.pack("=I", 1)) + _attribute(12, b"\x04") + _attribute(13, b"\x05") + _attribute(51, b"net1\0")
)


def test_a_device_and_a_port_are_read() -> None:
    """Numbers in the machine's byte order, texts without their end, unknown attributes left out."""
    assert attributes(DEVICE) == {
        "device_index": 3, "name": "mlx5_0", "firmware": "28.39.3560", "node_type": 1,
    }  # fmt: skip
    assert attributes(PORT) == {"port": 1, "state": 4, "physical_state": 5, "netdev": "net1"}


def test_several_messages_share_a_datagram() -> None:
    """And a cut one ends it without harm."""
    datagram = _message(0x1401, DEVICE) + _message(0x1401, PORT) + _message(3, bytes(4))
    assert [kind for kind, _ in messages(datagram)] == [0x1401, 0x1401, 3]
    assert [body for _, body in messages(datagram)][1] == PORT
    assert [kind for kind, _ in messages(datagram[:-4])] == [0x1401, 0x1401]


@given(st.binary(max_size=512))
def test_any_bytes_end(data: bytes) -> None:
    """A kernel of next year must not hang or crash the scan."""
    for _, body in messages(data):
        attributes(body)
    attributes(data)
