"""Interfaces from netlink's answers: roles, RDMA devices, NCCL's choice, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from dicthost import Content, DictHost
from hypothesis import given
from hypothesis import strategies as st
from rigs.tables import each_row

from contracts.finding import Status
from probes.api import UnavailableError
from probes.interfaces import probe as interfaces
from probes.interfaces.facts import Interface, nccl_choice

UP = 0x1 | 0x40  # IFF_UP, IFF_RUNNING
STATUS = [
    {"name": "ovn-kubernetes", "interface": "eth0", "ips": ["10.128.0.7"], "default": True, "dns": {}},
    {
        "name": "ai/rdmashared-net",
        "interface": "net1",
        "ips": ["192.168.77.1"],
        "mtu": 9000,
        "device-info": {
            "type": "pci",
            "version": "1.1.0",
            "pci": {"pci-address": "0000:1a:00.2", "rdma-device": "mlx5_3"},
        },
    },
]


class Network:
    """Collects links, then becomes a host."""

    def __init__(self) -> None:
        self.links: list[dict[str, Any]] = []
        self.addresses: list[dict[str, Any]] = []
        self.routes: list[dict[str, Any]] = []
        self.files: dict[str, Content] = {}
        self.symlinks: dict[str, str] = {}

    def add(self, name: str, address: str | None = None, **more: Any) -> Network:
        """One link, as pyroute2 answers it, and its files."""
        index = len(self.links) + 1
        link: dict[str, Any] = {"index": index, "IFLA_IFNAME": name, "flags": more.get("flags", UP), "IFLA_MTU": 1500}
        if name == "lo":
            link["flags"] |= 0x8
        if "kind" in more:
            link["IFLA_LINKINFO"] = {"IFLA_INFO_KIND": more["kind"]}
        for key, attribute in (
            ("mtu", "IFLA_MTU"),
            ("master", "IFLA_MASTER"),
            ("link", "IFLA_LINK"),
            ("netnsid", "IFLA_LINK_NETNSID"),
        ):
            if key in more:
                link[attribute] = more[key]
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
            self.symlinks |= {f"{folder}/device": device, f"{device}/driver": "/sys/bus/pci/drivers/mlx5_core"}
            self.symlinks[f"/sys/bus/pci/devices/{more['pci']}"] = device
            self.files |= {f"{device}/numa_node": "1\n", "/sys/bus/pci/drivers/mlx5_core/bind": ""}
        if "rdma" in more:
            device = f"/sys/devices/pci0000:10/{more['pci']}"
            self.symlinks[f"/sys/class/infiniband/{more['rdma']}"] = f"{device}/infiniband/{more['rdma']}"
            self.symlinks[f"{device}/infiniband/{more['rdma']}/device"] = "../.."
            self.files[f"{device}/infiniband/{more['rdma']}/ports/1/gids/0"] = more.get("gid", "fe80::1")
        self.links.append(link)
        return self

    def host(self, **more: Any) -> DictHost:
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


def look(host: DictHost) -> dict[str, Interface]:
    return {interface.name: interface for interface in interfaces.read(host).interfaces}


def found(host: DictHost) -> list[tuple[str, Status, str]]:
    return [(f.code, f.status, f.subject) for f in interfaces.check(interfaces.read(host))]


def test_a_host_with_a_fast_card_behind_docker() -> None:
    host = (
        Network()
        .add("lo", "127.0.0.1")
        .add("eno1", "10.0.0.5", pci="0000:01:00.0", speed=1000, default=True)
        .add("ens1", "192.168.1.5", pci="0000:1a:00.0", rdma="mlx5_0", speed=400000)
        .add("docker0", "172.17.0.1", kind="bridge")
        .add("br-0123456789ab", "172.18.0.1", kind="bridge")
        .add("virbr0", "192.168.122.1", kind="bridge")
        .add("vethabc", kind="veth", link=99, netnsid=1)
        .host()
    )
    names = look(host)
    assert {name: i.role for name, i in names.items()} == {
        "lo": "loopback",
        "eno1": "host",
        "ens1": "host",
        "docker0": "docker",
        "br-0123456789ab": "docker",
        "virbr0": "docker",
        "vethabc": "virtual",
    }
    ens1 = names["ens1"]
    assert (ens1.rdma_device, ens1.speed_bytes_per_second, ens1.bus_id, ens1.numa_node, ens1.driver) == (
        "mlx5_0",
        50e9,
        "0000:1a:00.0",
        1,
        "mlx5_core",
    )
    assert found(host) == [("interfaces.choice.wrong", Status.INFO, "eno1")]


def test_docker0_first_is_a_failure() -> None:
    network = Network().add("br-0123456789ab", "172.18.0.1", kind="bridge").add("ens1", "10.0.0.1", pci="0000:1a:00.0")
    assert found(network.host()) == [("interfaces.choice.wrong", Status.FAIL, "br-0123456789ab")]


@each_row(
    ("network", "expected"),
    [
        (Network().add("lo", "127.0.0.1").add("ens1", pci="0000:1a:00.0"), Status.FAIL),
        (Network().add("lo", "127.0.0.1").add("ens1", "10.0.0.5", pci="0000:1a:00.0", flags=0), Status.FAIL),
        (Network().add("lo", "127.0.0.1").add("ens1", "10.0.0.5", pci="0000:1a:00.0"), None),
        (Network().add("lo", "127.0.0.1"), None),
        (Network().add("lo", "127.0.0.1").add("tunl0", kind="ipip"), None),
    ],
    ids=["no address", "down", "healthy", "no card", "a tunnel and no card"],
)
def test_only_loopback_on_a_host_with_a_card_is_no_choice(network: Network, expected: Status | None) -> None:
    chosen = [(code, severity) for code, severity, _ in found(network.host()) if code.startswith("interfaces.choice")]
    assert chosen == ([("interfaces.choice.none", expected)] if expected else [])


def test_a_pod_is_told_by_its_network_status() -> None:
    host = pod().host(files={"/etc/podinfo/network-status": json.dumps(STATUS)})
    facts = interfaces.read(host)
    names = look(host)
    assert facts.network_status_source == "/etc/podinfo/network-status"
    assert (names["eth0"].role, names["net1"].role) == ("pod-default", "secondary")
    assert (names["net1"].multus_network, names["net1"].rdma_device) == ("ai/rdmashared-net", "mlx5_3")
    assert names["eth0"].speed_bytes_per_second is None
    assert facts.nccl_choice == "eth0"
    wrong = next(f for f in interfaces.check(facts) if f.code == "interfaces.choice.wrong")
    assert "NCCL_SOCKET_IFNAME=net1 and GLOO_SOCKET_IFNAME=net1" in wrong.remedy


def test_a_pod_without_network_status_is_told_by_its_links_and_its_gid() -> None:
    names = look(pod().host())
    assert (names["eth0"].role, names["net1"].role) == ("pod-default", "secondary")
    assert names["net1"].rdma_device == "mlx5_3", "the GID table holds the macvlan's own address"


def test_network_status_in_a_file_of_all_annotations() -> None:
    line = f'k8s.v1.cni.cncf.io/network-status={json.dumps(json.dumps(STATUS))}\nkubernetes.io/x="y"\n'
    assert look(pod().host(files={"/etc/podnetinfo/annotations": line}))["net1"].multus_network == "ai/rdmashared-net"


@each_row("text", ["{", '{"name": 1}', "[" * 100_000, "null"])
def test_a_broken_network_status_is_said(text: str) -> None:
    found_ = found(pod().host(files={"/etc/podinfo/network-status": text}))
    assert ("interfaces.network_status.invalid", Status.UNKNOWN, "") in found_


def test_an_mtu_other_than_the_attachment_asked_for() -> None:
    network = pod()
    network.links[2]["IFLA_MTU"] = 1500
    host = network.host(files={"/etc/podinfo/network-status": json.dumps(STATUS)})
    assert ("interfaces.mtu.mismatch", Status.WARN, "net1") in found(host)


def test_networks_of_a_pod_that_differ() -> None:
    """Speeds by driver, MTUs by kind and speed: one of three fails, two against two warn. RDMA ports are the rdma
    probe's to compare, which knows their cards."""
    for rdma, rates, expected in (
        (True, [(400000, 9000), (400000, 9000), (100000, 1500)], []),
        (False, [(400000, 9000), (400000, 9000), (100000, 9000)], [("interfaces.speed.low", Status.FAIL, "net2")]),
        (False, [(400000, 9000)] * 2 + [(400000, 1500)], [("interfaces.mtu.mismatch", Status.FAIL, "net2")]),
        (False, [(400000, 9000), (400000, 1500)], [("interfaces.mtu.mismatch", Status.WARN, "")]),
        (False, [(400000, 9000), (25000, 1500)], [("interfaces.speed.low", Status.FAIL, "net1")]),
    ):
        network = Network().add("lo", "127.0.0.1")
        for number, (speed, mtu) in enumerate(rates):
            name = f"{'rail' if rdma else 'net'}{number}"
            device = {"rdma": f"mlx5_{number}"} if rdma else {}
            network.add(name, f"10.0.{number}.1", pci=f"0000:1{number}:00.0", speed=speed, mtu=mtu, **device)
        entries = [{"name": f"ai/rail{n}", "interface": f"net{n}"} for n in range(len(rates))]
        files = {} if rdma else {"/etc/podinfo/network-status": json.dumps(entries)}
        codes = [each for each in found(network.host(files=files)) if not each[0].startswith("interfaces.choice")]
        assert codes == expected, (rates, codes)


def test_a_network_that_was_given_and_is_gone() -> None:
    """Multus lists net1 and net2, the pod has net1; a function that a VFIO driver holds has no interface by design."""
    gone = {"name": "ai/rail2", "interface": "net2", "device-info": {"pci": {"pci-address": "0000:3b:00.2"}}}
    status = {"/etc/podinfo/network-status": json.dumps([*STATUS, gone])}
    assert ("interfaces.network.missing", Status.FAIL, "net2") in found(pod().host(files=status))
    network = pod()
    network.symlinks["/sys/bus/pci/devices/0000:3b:00.2/driver"] = "/sys/bus/pci/drivers/vfio-pci"
    network.files["/sys/bus/pci/drivers/vfio-pci/uevent"] = ""
    codes = [code for code, *_ in found(network.host(files=status))]
    assert "interfaces.network.missing" not in codes


def test_which_interface_is_asked_of_gloo_and_of_the_agents_pod() -> None:
    """Without a GPU gloo's own setting counts; in the agent's pod no job's setting is to be seen."""
    for environment, backend, agent, wrong in (
        ({}, None, False, True),
        ({"GLOO_SOCKET_IFNAME": "net1"}, None, False, True),  # NCCL does not read it
        ({"GLOO_SOCKET_IFNAME": "net1"}, "gloo", False, False),
        ({"NCCL_SOCKET_IFNAME": "net1"}, "gloo", False, True),  # gloo does not read it
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "gloo", False, True),
        ({}, None, True, False),
    ):
        facts = interfaces.read(pod().host(environment=environment))
        facts = replace(facts, backend=backend, of_agent=agent)
        codes = [each.code for each in interfaces.check(facts)]
        assert ("interfaces.choice.wrong" in codes) is wrong, (environment, backend, agent, codes)
        assert ("interfaces.choice.wrong" in interfaces.unjudged(facts)) is agent


def test_a_bond_carries_the_rdma_device_of_its_members() -> None:
    network = Network().add("bond0", "10.0.0.1", kind="bond", speed=200000, default=True)
    network.add("ens1", pci="0000:1a:00.0", rdma="mlx5_bond_0", speed=100000, master=1)
    names = look(network.add("vlan7", "10.7.0.1", kind="vlan", link=1).host())
    assert (names["bond0"].rdma_device, names["vlan7"].rdma_device) == ("mlx5_bond_0", "mlx5_bond_0")
    assert (names["ens1"].master, names["vlan7"].parent, names["vlan7"].role) == ("bond0", "bond0", "host")


@each_row(
    ("names", "choice"),
    [
        (["eth0", "ib0"], "ib0"),  # ib* first, wherever it stands
        (["docker0", "eth0"], "eth0"),
        (["virbr0", "docker0", "lo"], "docker0"),
        (["virbr0", "lo"], "lo"),
        (["lo", "br-0123456789ab", "eth0"], "br-0123456789ab"),  # only the three prefixes are last
        ([], None),
    ],
)
def test_the_order_of_nccl(names: list[str], choice: str | None) -> None:
    listed = [Interface(name=n, role="host", up=True, running=True, addresses=("10.0.0.1/24",)) for n in names]
    assert nccl_choice(listed) == choice


@each_row(
    ("setting", "choice"),
    [
        ("net", "net1"),
        ("=net", None),  # exact
        ("=net10,eth0", "eth0"),
        ("^net", "eth0"),
        ("^=eth0", "net1"),
        ("net10", "net10"),
        ("mlx", None),
        ("n", "eth0"),  # one character is ignored
    ],
)
def test_the_setting_as_nccl_reads_it(setting: str, choice: str | None) -> None:
    listed = [
        Interface(name=n, role="host", up=True, running=True, addresses=("10.0.0.1/24",))
        for n in ("eth0", "net1", "net10")
    ]
    assert nccl_choice(listed, setting) == choice


def test_a_setting_is_judged_by_what_it_takes() -> None:
    assert not found(pod().host(environment={"NCCL_SOCKET_IFNAME": "net1"}))
    assert ("interfaces.choice.wrong", Status.FAIL, "eth0") in found(
        pod().host(environment={"NCCL_SOCKET_IFNAME": "eth0"})
    )
    assert found(pod().host(environment={"NCCL_SOCKET_IFNAME": "ens5"})) == [
        ("interfaces.choice.setting", Status.FAIL, "")
    ]


def test_nccl_skips_what_is_not_running_and_prefers_ipv4() -> None:
    listed = [
        Interface(name="a", role="host", up=True, running=False, addresses=("10.0.0.1/24",)),
        Interface(name="b", role="host", up=True, running=True, addresses=()),
        Interface(name="c", role="host", up=True, running=True, addresses=("fe80::1/64",)),
        Interface(name="d", role="host", up=True, running=True, addresses=("10.0.0.2/24",)),
    ]
    assert nccl_choice(listed) == "d"


def test_sysfs_where_netlink_is_refused() -> None:
    files: dict[str, Content] = {
        "/sys/class/net/eth0/flags": "0x1003\n",
        "/sys/class/net/eth0/operstate": "up\n",
        "/sys/class/net/eth0/ifindex": "2\n",
        "/sys/class/net/eth0/iflink": "2\n",
        "/sys/class/net/eth0/mtu": "9000\n",
        "/proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n"
        "eth0\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\t0\n",
    }
    facts = interfaces.read(DictHost(files))
    assert (facts.source, facts.default_route, facts.nccl_choice) == ("sysfs", "eth0", None)
    assert (facts.interfaces[0].running, facts.interfaces[0].mtu_bytes) == (True, 9000)
    assert not list(interfaces.check(facts)), "addresses are unknown without netlink, and that is no fault"


def test_nothing_to_list_is_absent() -> None:
    with pytest.raises(UnavailableError):
        interfaces.read(DictHost())


def test_samples_fit_their_families() -> None:
    families = {metric.name: metric for metric in interfaces.PROBE.metrics}
    for sample in interfaces.samples(interfaces.read(pod().host())):
        assert len(sample.labels) == len(families[sample.metric].labels)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda j: (
        st.lists(j, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "interface", "mtu", "default", "device-info", "pci"]), j, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_as_network_status(value: Any) -> None:
    host = pod().host(files={"/etc/podinfo/network-status": json.dumps(value)})
    list(interfaces.check(interfaces.read(host)))


def test_remedy_names_every_equally_fast_interface() -> None:
    """Where sockets carry the data, one of four equal cards is a quarter of the host's rate."""
    network = Network().add("aa0", "10.0.0.5", speed=25000, pci="0000:01:00.0", default=True)
    for index in range(4):
        network.add(f"ens{index}", f"192.168.{index}.5", speed=200000, pci=f"0000:1{index}:00.0")
    (finding,) = interfaces.check(interfaces.read(network.host()))
    assert finding.status is Status.FAIL
    assert finding.remedy == "Set NCCL_SOCKET_IFNAME=ens0,ens1,ens2,ens3 and GLOO_SOCKET_IFNAME=ens0."


def test_remedy_is_exact_where_a_name_begins_another() -> None:
    network = Network().add("eth10", "10.0.0.5", speed=1000, pci="0000:01:00.0", default=True)
    network.add("eth1", "192.168.1.5", speed=100000, pci="0000:1a:00.0")
    (finding,) = interfaces.check(interfaces.read(network.host()))
    assert "NCCL_SOCKET_IFNAME==eth1 " in str(finding.remedy)


@each_row(("driver", "severity"), [("cxi_core", Status.INFO), ("mlx5_core", Status.FAIL)])
def test_sockets_beside_slingshot_are_for_the_start_only(driver: str, severity: Status) -> None:
    """libfabric carries the data there, by whatever name the interface has."""
    network = Network().add("ens1", "10.0.0.5", speed=1000, pci="0000:01:00.0", default=True)
    network.add("fast0", "172.28.0.5", speed=200000, pci="0000:1a:00.0")
    device = "/sys/devices/pci0000:10/0000:1a:00.0"
    network.symlinks[f"{device}/driver"] = f"/sys/bus/pci/drivers/{driver}"
    network.files[f"/sys/bus/pci/drivers/{driver}/bind"] = ""
    ((_, found_severity, _),) = found(network.host())
    assert found_severity is severity
