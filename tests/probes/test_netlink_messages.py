"""Netlink messages, byte by byte as the kernel lays them out; links, addresses and routes as this kernel has them."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from rigs.tables import ROOT

from probes.host import netlink
from probes.host.live import LiveHost
from probes.host.recording import RecordedHost, RecordingHost
from probes.scanner import pack_archive


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
        content = pack_archive({"hostname": "h", "time": 1.0}, recorder.answers, "")
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
    assert [kind for kind, _ in netlink.split_messages(datagram)] == [0x1401, 0x1401, 3]
    assert [body for _, body in netlink.split_messages(datagram)][1] == MODE
    assert [kind for kind, _ in netlink.split_messages(datagram[:-4])] == [0x1401, 0x1401]


@given(st.binary(max_size=512))
def test_any_bytes_end(data: bytes) -> None:
    """A kernel of next year must not hang or crash the scan."""
    for body in (data, *(body for _, body in netlink.split_messages(data))):
        list(netlink.split_attributes(body))
    assert dict(netlink.split_attributes(MODE)) == {66: b"\x01"}


LINKS = Path(__file__).with_name("netlink_links.batch")
ASK = """
import json
from probes.host.live import LiveHost
host = LiveHost()
print(json.dumps({what: host.netlink(what) for what in ("links", "addresses", "routes")}))
"""


@pytest.mark.netns
def test_links_of_every_kind_as_recordings_hold_them(tmp_path: Path) -> None:
    """What a probe reads, under pyroute2's names, and nothing else: a recording must not grow by statistics."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs root, unshare and ip")
    (tmp_path / "ask.py").write_text(ASK)
    command = ["unshare", "-n", "sh", "-c", f"ip -force -batch {LINKS}; {sys.executable} {tmp_path}/ask.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    links = {link["IFLA_IFNAME"]: link for link in found["links"]}
    index = {name: link["index"] for name, link in links.items()}
    assert links["v0"].keys() == {"index", "flags", "IFLA_IFNAME", "IFLA_MTU", "IFLA_LINKINFO", "IFLA_LINK"}
    assert links["v0"]["IFLA_MTU"] == 9000
    assert links["v0"]["flags"] & 0x41 == 0x41, "up and running"
    kinds = {name: link["IFLA_LINKINFO"] for name, link in links.items() if name in ("br0", "v0", "v0.7", "mv0", "vx0")}
    standing = {"v0.7": "vlan", "mv0": "macvlan", "br0": "bridge", "v0": "veth"}
    found_kinds = {name: kinds[name] for name in kinds if name != "vx0"}
    assert found_kinds == {name: {"IFLA_INFO_KIND": kind} for name, kind in standing.items() if name in kinds}
    assert "v0" in kinds
    if "vx0" in kinds:
        assert kinds["vx0"] == {"IFLA_INFO_KIND": "vxlan", "IFLA_INFO_DATA": {"IFLA_VXLAN_LINK": index["v0"]}}
    for name in {"v0.7", "mv0"} & links.keys():
        assert links[name]["IFLA_LINK"] == index["v0"]
    if "br0" in links:
        assert links["v1"]["IFLA_MASTER"] == index["br0"]
    mine = {a["IFA_ADDRESS"]: a for a in found["addresses"] if a["index"] == index["v0"]}
    assert {"10.1.2.3", "fd00::3"} <= mine.keys()
    address = {"IFA_ADDRESS": "10.1.2.3", "IFA_LOCAL": "10.1.2.3"}
    assert mine["10.1.2.3"] == {"prefixlen": 24, "index": index["v0"], **address}
    routes = {(r.get("RTA_DST"), r["dst_len"]): r for r in found["routes"] if r["family"] == 2}
    default = routes[None, 0]
    assert (default["RTA_PRIORITY"], default["RTA_OIF"]) == (50, index["v0"])
    assert routes["10.8.0.0", 16]["RTA_TABLE"] == 1234
    if ("10.9.0.0", 16) in routes:  # not every kernel is built with routes of several ways
        assert routes["10.9.0.0", 16]["RTA_MULTIPATH"] == [{"oif": index["v0"]}, {"oif": index["v0"]}]
