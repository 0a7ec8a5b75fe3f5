"""Interfaces from netlink's answers: roles, RDMA devices, neighbours, NCCL's choice, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dicthost import Content, DictHost
from hypothesis import given, strategies as st
from rigs.tables import each_row, rows_of

from contracts.finding import Status
from probes.api import UnavailableError
from probes.interfaces import probe as interfaces, read as lldp
from probes.interfaces.facts import Interface, choose_for_nccl
from probes.interfaces.read import read as read_interfaces

rows = rows_of(__file__)

UP = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
STATUS = json.loads(Path(__file__).with_name("network_status.json").read_text(encoding="utf-8"))


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
