"""Neighbours on the wire, from what systemd-networkd left of LLDP."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rigs.tables import each_row
from test_interfaces_probe import Network

from probes.interfaces import read as lldp
from probes.interfaces.read import read as read_interfaces


def tlv(kind: int, value: bytes) -> bytes:
    return (kind << 9 | len(value)).to_bytes(2, "big") + value


def frame(system: str = "leaf1", port: bytes = b"\x05Ethernet1/5") -> bytes:
    """An LLDP frame as a switch sends it: chassis, port, time to live, name."""
    chassis = tlv(1, b"\x04\x00\x1c\x73\x00\x00\x01")
    body = chassis + tlv(2, port) + tlv(3, b"\x00\x78") + (tlv(5, system.encode()) if system else b"") + tlv(0, b"")
    return b"\x01\x80\xc2\x00\x00\x0e\x00\x1c\x73\x00\x00\x01\x88\xcc" + body


def saved(*found: bytes) -> bytes:
    return b"".join(len(each).to_bytes(8, "little") + each for each in found)


def wired(content: bytes, **more: object) -> str | None:
    """What the interface of index 1 has for a neighbour."""
    network = Network().add("ens1", "10.0.0.5", pci="0000:1a:00.0", speed=100000)
    host = network.host(files={f"{lldp.LLDP_FOLDER}/1": content, **more})
    (interface,) = read_interfaces(host).interfaces
    return interface.neighbour


@each_row(
    ("content", "neighbour"),
    [
        (saved(frame()), "leaf1 Ethernet1/5"),
        (saved(frame(port=b"\x03\x00\x1c\x73\x00\x00\x02")), "leaf1"),  # a port's MAC address is no text
        (saved(frame(), frame()), "leaf1 Ethernet1/5"),
        (saved(frame("")), None),  # no system named
        (saved(frame(), frame("leaf2")), None),  # two on one wire
        (saved(frame())[:-20], None),
        (b"", None),
        (saved(frame().replace(b"\x88\xcc", b"\x08\x00", 1)), None),  # no LLDP
    ],
)
def test_switch_and_port_of_a_wire(content: bytes, neighbour: str | None) -> None:
    """What names no one switch is left out."""
    assert wired(content) == neighbour


def test_file_of_another_interface_is_not_taken() -> None:
    network = Network().add("lo", "127.0.0.1").add("ens1", "10.0.0.5", pci="0000:1a:00.0")
    found = read_interfaces(network.host(files={f"{lldp.LLDP_FOLDER}/1": saved(frame())})).interfaces
    assert {each.name: each.neighbour for each in found} == {"lo": None, "ens1": None}


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    """Bytes of a stranger end in a name or in nothing."""
    for each in (content, saved(frame()[:14] + content)):
        for found in map(lldp.neighbour, lldp.frames(each)):
            assert found is None or found.isprintable()
