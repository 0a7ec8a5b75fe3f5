"""Interfaces from netlink's answers: roles, RDMA devices, neighbours, NCCL's choice, and what is wrong with it.

Netlink messages, byte by byte as the kernel lays them out; links, addresses and routes as this kernel has them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from dicthost import Content, DictHost
from hypothesis import given, strategies as st
from rigs.tables import ROOT, data_of, each_row, rows_of

from contracts.finding import Status
from probes.api import UnavailableError
from probes.host import netlink
from probes.host.live import LiveHost
from probes.host.recording import RecordedHost, RecordingHost
from probes.interfaces import probe as interfaces, read as lldp
from probes.interfaces.facts import Interface, choose_for_nccl
from probes.interfaces.read import read as read_interfaces
from probes.scanner import pack_archive

rows = rows_of(__file__)

UP = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
STATUS = data_of(__file__, "network_status.json")


class Network:
    """Collects links, then becomes a host."""

    def __init__(self) -> None:
        self.links: list[dict] = []
        self.addresses: list[dict] = []
        self.routes: list[dict] = []
        self.files: dict[str, Content] = {}
        self.symlinks: dict[str, str] = {}

    def add(self, name: str, address: str | None = None, **more) -> Network:
        """One link, as pyroute2 answers it, and its files."""
        index = len(self.links) + 1
        link: dict = {"index": index, "IFLA_IFNAME": name, "flags": more.get("flags", UP), "IFLA_MTU": 1500}
        if name == "lo":
            link["flags"] |= 0x8
        if "kind" in more:
            link["IFLA_LINKINFO"] = {"IFLA_INFO_KIND": more["kind"]}
        attributes = {"mtu": "IFLA_MTU", "master": "IFLA_MASTER", "link": "IFLA_LINK", "netnsid": "IFLA_LINK_NETNSID"}
        link |= {attribute: more[key] for key, attribute in attributes.items() if key in more}
        if address:
            self.addresses.append({"index": index, "IFA_LOCAL": address, "IFA_ADDRESS": address, "prefixlen": 24})
        if more.get("default"):
            self.routes.append(
                {"RTA_TABLE": 254, "RTA_OIF": index, "dst_len": 0, "family": 2, "RTA_GATEWAY": "10.0.0.1"}
            )
        folder = f"/sys/class/net/{name}"
        if "speed" in more:
            self.files[f"{folder}/speed"] = f"{more['speed']}\n"
        if "pci" in more:
            device = f"/sys/devices/pci0000:10/{more['pci']}"
            driver = f"/sys/bus/pci/drivers/{more.get('driver', 'mlx5_core')}"
            self.symlinks |= {f"{folder}/device": device, f"{device}/driver": driver}
            self.symlinks[f"/sys/bus/pci/devices/{more['pci']}"] = device
            self.files |= {f"{device}/numa_node": "1\n", f"{driver}/bind": ""}
        if "rdma" in more:
            device = f"/sys/devices/pci0000:10/{more['pci']}"
            self.symlinks[f"/sys/class/infiniband/{more['rdma']}"] = f"{device}/infiniband/{more['rdma']}"
            self.symlinks[f"{device}/infiniband/{more['rdma']}/device"] = "../.."
            self.files[f"{device}/infiniband/{more['rdma']}/ports/1/gids/0"] = more.get("gid", "fe80::1")
        self.links.append(link)
        return self

    def host(self, **more) -> DictHost:
        """The network so far."""
        answers = {"links": self.links, "addresses": self.addresses, "routes": self.routes}
        return DictHost(self.files | more.pop("files", {}), self.symlinks, netlink=answers, **more)


def pod() -> Network:
    """A pod's overlay and its macvlan on mlx5_3, whose netdev is the host's."""
    network = Network().add("lo", "127.0.0.1").add("eth0", "10.128.0.7", kind="veth", link=9, netnsid=0, default=True)
    network.add("net1", "192.168.77.1", kind="macvlan", link=4, netnsid=0, mtu=9000, speed=100000)
    gid = "0000:0000:0000:0000:0000:ffff:c0a8:4d01"
    network.symlinks["/sys/class/infiniband/mlx5_3"] = "/sys/devices/pci0000:10/0000:1a:00.0/infiniband/mlx5_3"
    network.files["/sys/devices/pci0000:10/0000:1a:00.0/infiniband/mlx5_3/ports/1/gids/3"] = gid
    return network


def annotated(entries) -> dict[str, Content]:
    return {"/etc/podinfo/network-status": entries if isinstance(entries, str) else json.dumps(entries)}


GONE = {"name": "ai/rail2", "interface": "net2", "device-info": {"pci": {"pci-address": "0000:3b:00.2"}}}


def described(row: dict) -> DictHost:
    """The host of a row of the table."""
    network, status = Network() if "links" in row else pod(), row.get("status")
    for link in row.get("links", ()):
        network.add(**link)
    changes = row.get("pod", {})
    if "mtu" in changes:
        network.links[2]["IFLA_MTU"] = changes["mtu"]
    if driver := changes.get("held_by"):
        network.symlinks["/sys/bus/pci/devices/0000:3b:00.2/driver"] = f"/sys/bus/pci/drivers/{driver}"
        network.files[f"/sys/bus/pci/drivers/{driver}/uevent"] = ""
    if status == "own":
        status = [*STATUS, GONE] if "gone" in changes else STATUS
    return network.host(files={} if status is None else annotated(status), environment=row.get("environment"))


@each_row("row", lambda: [*rows("wrong")(), {**rows("wrong")()[6], "status": "[" * 100_000}])
def test_what_is_wrong_with_the_interfaces(row: dict) -> None:
    expected = row.get("found", [])
    made = list(interfaces.check(read_interfaces(described(row))))
    got = [[f.code, f.status, f.subject] for f in made if expected or f.status is not Status.INFO]
    assert sorted(got) == sorted(expected)
    assert "words" not in row or [f for f in made if row["words"] in f.remedy], [f.remedy for f in made]


def listed(*names: str) -> list[Interface]:
    return [Interface(name=n, role="host", up=True, running=True, addresses=("10.0.0.1/24",)) for n in names]


UNLIKE = [replace(one, **change) for one, change in zip(
    listed("a", "b", "c", "d"), ({"running": False}, {"addresses": ()}, {"addresses": ("fe80::1/64",)}, {}),
    strict=True)]  # fmt: skip


@each_row(("names", "setting", "choice"), rows("choices"))
def test_the_order_and_the_setting_of_nccl(names: list[str], setting: str | None, choice: str | None) -> None:
    assert choose_for_nccl(listed(*names), setting) == choice
    assert choose_for_nccl(UNLIKE, None) == "d", "what does not run is skipped, and IPv4 goes before IPv6"


@each_row(("more", "role"), [({}, "pod-default"), ({"pci": "0000:3b:00.0"}, "virtual")])
def test_a_namespace_without_a_default_route_has_a_first_network(more: dict, role: str) -> None:
    """Its veth leads to other hosts; on a host with a card, a veth leads to a container."""
    network = Network().add("lo", "127.0.0.1").add("v0", "10.9.0.1", kind="veth", netnsid=0).add("v1", **more)
    assert read_interfaces(network.host()).interfaces[1].role == role


ANNOTATIONS = f'k8s.v1.cni.cncf.io/network-status={json.dumps(json.dumps(STATUS))}\nkubernetes.io/x="y"\n'


@each_row(
    ("files", "network"),
    [
        (annotated(STATUS), "ai/rdmashared-net"),
        ({"/etc/podnetinfo/annotations": ANNOTATIONS}, "ai/rdmashared-net"),  # a file of all annotations
        ({}, None),  # told by its links, and by the GID table, which holds the macvlan's own address
    ],
)
def test_a_pod_is_told_by_its_network_status_or_its_links(files: dict[str, Content], network: str | None) -> None:
    facts = read_interfaces(pod().host(files=files))
    eth0, net1 = (each for each in facts.interfaces if each.name != "lo")
    assert (eth0.role, eth0.speed_bytes_per_second) == ("pod-default", None)
    assert (net1.role, net1.multus_network, net1.rdma_device) == ("secondary", network, "mlx5_3")
    assert facts.network_status_source == next(iter(files), None)
    assert facts.nccl_choice == "eth0"
    wrong = next(f for f in interfaces.check(facts) if f.code == "interfaces.choice.wrong")
    assert "NCCL_SOCKET_IFNAME=net1 and GLOO_SOCKET_IFNAME=net1" in wrong.remedy


@each_row(("environment", "backend", "agent", "wrong"), rows("asked"))
def test_the_interface_of_gloo_and_that_of_the_agents_pod(environment, backend, agent, wrong):
    """Without a GPU gloo's own setting counts; in the agent's pod no job's setting is to be seen."""
    facts = replace(read_interfaces(pod().host(environment=environment)), backend=backend, of_agent=agent)
    assert ("interfaces.choice.wrong" in [each.code for each in interfaces.check(facts)]) is wrong
    assert ("interfaces.choice.wrong" in interfaces.unjudged(facts)) is agent


def test_nothing_to_list_is_absent_and_a_refusal_is_a_failure() -> None:
    """glibc lists interfaces through netlink: where it is refused NCCL and gloo find none either."""
    with pytest.raises(UnavailableError):
        read_interfaces(DictHost(netlink={}))
    with pytest.raises(OSError, match="not supported"):
        read_interfaces(DictHost({"/sys/class/net/eth0/flags": "0x1003\n"}))


def tlv(kind: int, value: bytes) -> bytes:
    return (kind << 9 | len(value)).to_bytes(2, "big") + value


def frame(system: str = "leaf1", port: bytes = b"\x05Ethernet1/5") -> bytes:
    """An LLDP frame as a switch sends it: chassis, port, time to live, name."""
    chassis = tlv(1, b"\x04\x00\x1c\x73\x00\x00\x01")
    body = chassis + tlv(2, port) + tlv(3, b"\x00\x78") + (tlv(5, system.encode()) if system else b"") + tlv(0, b"")
    return b"\x01\x80\xc2\x00\x00\x0e\x00\x1c\x73\x00\x00\x01\x88\xcc" + body


def saved(*found: bytes) -> bytes:
    return b"".join(len(each).to_bytes(8, "little") + each for each in found)


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
    network = Network().add("ens1", "10.0.0.5", pci="0000:1a:00.0", speed=100000)
    (interface,) = read_interfaces(network.host(files={f"{lldp.LLDP_FOLDER}/1": content})).interfaces
    assert interface.neighbour == neighbour


def test_file_of_another_interface_is_not_taken() -> None:
    network = Network().add("lo", "127.0.0.1").add("ens1", "10.0.0.5", pci="0000:1a:00.0")
    found = read_interfaces(network.host(files={f"{lldp.LLDP_FOLDER}/1": saved(frame())})).interfaces
    assert {each.name: each.neighbour for each in found} == {"lo": None, "ens1": None}


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    """Bytes of a stranger end in a name or in nothing."""
    for each in (content, saved(frame()[:14] + content)):
        for found in map(lldp.parse_neighbour, lldp.split_frames(each)):
            assert found is None or found.isprintable()


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


def test_the_mask_of_priorities_and_the_ports_map_of_dscp_are_read() -> None:
    """struct ieee_pfc: capability, mask, then counters. struct dcb_app: selector 5 is DSCP, 1 an Ethernet type."""
    pfc = struct.pack("=BBBxH2x8Q8Q", 8, 0b11000, 0, 0, *range(16))
    ieee = attribute(13, attribute(1, bytes(40)) + attribute(2, pfc))
    body = struct.pack("=BBH", 0, 21, 0) + attribute(1, b"eth0\0")
    assert netlink.parse_pfc(body + ieee) == {"pfc_classes": 8, "pfc_mask": 0b11000}
    assert netlink.parse_pfc(body) == {}
    rows = (5, 3, 26), (1, 0, 0x8914), (4, 2, 20), (5, 6, 48)
    apps = b"".join(attribute(1, struct.pack("=BBH", *each)) for each in rows)
    assert netlink.parse_pfc(body + attribute(13, attribute(0x8003, apps))) == {"app_dscp": [8 * 26 + 3, 8 * 48 + 6]}
    assert netlink.parse_pfc(body + attribute(13, attribute(3, b""))) == {"app_dscp": []}


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
    """A kernel of next year, or a driver's answer, must not hang or crash the scan."""
    assert isinstance(netlink.parse_modes(data), dict) and isinstance(netlink.parse_pfc(data), dict)
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
