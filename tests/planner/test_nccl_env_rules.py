"""Each rule of the NCCL environment on the smallest host that decides it. A wrong environment is worse than none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_env_hosts import GBIT, cluster, host, interface, pci, port, settings, v2_gid
from rigs.tables import each_row

from planner.advice import Recommendation
from planner.forecast import machines
from planner.nccl_env.names import names
from probes.api import Failed, Snapshot
from probes.interfaces.facts import Interface
from probes.rdma.facts import Gid, RdmaDevice


def advise(
    *snapshots: Snapshot, nearest: tuple[str, ...] = (), virtual: str | None = None, **more: Any
) -> Recommendation:
    """Advice for the hosts."""
    return settings(snapshots, cluster(*snapshots, nearest=nearest, virtual=virtual), **more)


def values(advice: Recommendation) -> dict[str, str]:
    """The settings by name."""
    return {setting.name: setting.value for setting in advice.settings}


def note(advice: Recommendation, topic: str) -> str:
    """All that the notes say of one topic."""
    return " ".join(note.text for note in advice.notes if note.topic == topic)


Case = tuple[Any, ...]


def case(
    *hosts: Snapshot, sets: Mapping[str, str | None] | None = None, only: Mapping[str, str] | None = None,
    why: Mapping[str, str] | None = None, says: Mapping[str, str] | None = None, never: tuple[str, ...] = (),
    **more: Any,
) -> Case:  # fmt: skip
    """One row of a table, as `test_what_is_advised` takes it."""
    return sets or {}, only, why or {}, says or {}, never, advise(*hosts, **more)


def needs(advice: Recommendation) -> set[tuple[str, str]]:
    """What a pod needs, by name and value."""
    return {(need.name, need.value) for need in advice.needs}


ETH0 = interface("eth0", "pod-default")
NET1 = interface("net1", "secondary", "192.168.2.5/24", rdma_device="mlx5_1", multus_network="default/rdma-net")
ROCE = {"layer": "Ethernet", "gbit": 200}
IB8 = tuple(port(f"mlx5_{i}") for i in range(8))
ROCE_POD = host(gpus=2, rdma=[port("mlx5_0", **ROCE), port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1])
LINK_LOCAL = Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="IB/RoCE v1")
LINK_LOCAL_V2 = Gid(index=1, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="RoCE v2")
GLOBAL_V6 = Gid(index=2, gid="fd00:0000:0000:0000:0000:0000:0000:0001", type="RoCE v2")
V1_IPV4 = Gid(index=1, gid=v2_gid(1).gid, type="IB/RoCE v1")
V1_IPV6 = Gid(index=1, gid=GLOBAL_V6.gid, type="IB/RoCE v1")
HCA, NETS = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"
FOUR, EIGHT = ",".join(f"mlx5_{i}" for i in range(4)), ",".join(f"mlx5_{i}" for i in range(8))


def in_subnet(name: str, subnet: int) -> RdmaDevice:
    """An InfiniBand port of another subnet manager."""
    return port(name, gids=[Gid(index=0, gid=f"fec0:0000:0000:000{subnet}:a088:c203:00aa:0001")])


def rails(count: int) -> list[RdmaDevice]:
    """RoCE ports, each on an interface of its own."""
    return [port(f"mlx5_{i}", netdev=f"rail{i}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i in range(count)]


def rail_nets(count: int) -> list[Interface]:
    """Their interfaces, each in a subnet of its own."""
    return [interface(f"rail{i}", "host", f"10.1.{i}.5/24") for i in range(count)]


def vf_pod(*others: RdmaDevice) -> Snapshot:
    """A pod with eight virtual functions, each behind a network of its own, and what else it sees."""
    functions = [port(f"mlx5_{10 + i}", vf=True, netdev=f"net{i + 1}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE)
                 for i in range(8)]  # fmt: skip
    nets = [interface(f"net{i + 1}", "secondary", f"10.1.{i}.5/24", is_vf=True) for i in range(8)]
    return host(rdma=[*functions, *others], interfaces=[ETH0, *nets])


def hcas() -> Iterator[Case]:
    """NCCL_IB_HCA: which ports are for training, and whether NCCL would take others."""
    # Eight equal InfiniBand ports: no NCCL variable at all.
    yield case(host(rdma=IB8, interfaces=[interface("eno1", "host")]), only={}, says={HCA: "^No setting needed"})
    # Inside a pod the parent of net1 is out of sight: the GID that holds its address tells the device.
    net1 = interface("net1", "secondary", "192.168.2.5/24")
    devices = [port("mlx5_0", **ROCE), port("mlx5_1", gids=[v2_gid(3, "192.168.2.5")], **ROCE)]
    yield case(host(rdma=devices, interfaces=[ETH0, net1]), sets={HCA: "mlx5_1"})
    # NCCL's search ends at the nearest HCA of each GPU; the note tells how to pin them all the same.
    storage = [port("mlx5_8", gbit=200, model="ConnectX-6"), port("mlx5_9", gbit=200, model="ConnectX-6")]
    near = host(rdma=[*IB8, *storage], interfaces=[interface("eno1", "host")])
    yield case(near, nearest=tuple(EIGHT.split(",")), sets={HCA: None}, says={HCA: f"NCCL_IB_HCA={EIGHT}."})
    # A prefix also matches mlx5_10.
    other = [port("mlx5_10", layer="Ethernet", gbit=100), port("mlx5_11", layer="Ethernet", gbit=100)]
    yield case(host(rdma=[port("mlx5_1"), *other]), sets={HCA: "=mlx5_1"})
    both = [port("mlx5_1"), port("mlx5_10"), port("mlx5_4", layer="Ethernet", gbit=100)]
    yield case(host(rdma=both), sets={HCA: "mlx5_1,mlx5_10"})
    # InfiniBand and Ethernet ports cannot talk to each other.
    bond = port("mlx5_bond_0", layer="Ethernet", gbit=100, model="ConnectX-6")
    yield case(host(rdma=[*IB8[:2], bond]), sets={HCA: "mlx5_0,mlx5_1"}, why={HCA: "mlx5_bond_0:1: Ethernet"})
    # A slower ConnectX-4 is management; a slower ConnectX-7 among ConnectX-7 is a fault to repair.
    management = [*IB8[:2], port("mlx5_2", gbit=25, model="ConnectX-4")]
    yield case(host(rdma=management), sets={HCA: "mlx5_0,mlx5_1"})
    yield case(host(rdma=[*IB8[:2], port("mlx5_2", gbit=200)]), sets={HCA: None})
    # NCCL passes over a port that is down in silence; the list must not hide it once it is repaired.
    down = [port("mlx5_0"), port("mlx5_1", state="DOWN"), port("mlx5_2", layer="Ethernet", gbit=25)]
    yield case(host(rdma=down), sets={HCA: "mlx5_0,mlx5_1"})
    # Soft-RoCE runs on the CPU; alone it is what there is, and NCCL uses it instead of TCP.
    rxe = port("rxe0", kind="rxe", layer="Ethernet", gbit=2.5)
    yield case(host(rdma=[port("mlx5_0", **ROCE), rxe]), sets={HCA: "mlx5_0"})
    yield case(host(rdma=[rxe]), sets={HCA: None}, says={HCA: "in software", "NCCL": ""})
    # A RoCE network of the pod decides for RoCE; an IPoIB network says nothing about the other HCAs.
    yield case(host(rdma=[port("mlx5_0"), port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1]), sets={HCA: "mlx5_1"})
    ipoib = interface("net1", "secondary", "192.168.2.5/24", rdma_device="mlx5_0")
    yield case(host(rdma=IB8, interfaces=[ETH0, ipoib]), sets={HCA: None})
    # All of the pod's devices are behind its own networks: nothing to leave out, nothing to set.
    cards = [port(f"mlx5_{i}", netdev=f"net{i + 1}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i in range(4)]
    nets = [interface(f"net{i + 1}", "secondary", f"10.1.{i}.5/24", kind="macvlan") for i in range(4)]
    yield case(host(rdma=cards, interfaces=[ETH0, *nets]), sets={HCA: None})
    seen = host(rdma=[*cards, port("mlx5_9", **ROCE)], interfaces=[ETH0, *nets])
    yield case(seen, sets={HCA: FOUR}, why={HCA: "the 4 devices behind its networks"})
    # A twin near the GPUs may carry storage: the question is asked, with the ports it is about.
    nine = host(rdma=[*IB8, port("mlx5_8")])
    yield case(nine, says={HCA: "One node does not show"}, never=("every one it finds belongs",))
    yield case(nine, says={HCA: "Find out which of them carry storage"})
    # Another subnet manager's ports reach none of these.
    compute = [port(f"mlx5_{i}", gids=[Gid(index=0, gid=f"fe80:0000:0000:0000:a088:c203:00aa:000{i}")])
               for i in range(4)]  # fmt: skip
    yield case(host(rdma=[*compute, in_subnet("mlx5_9", 1)]), sets={HCA: FOUR})
    # Of two fabrics of one size nothing on the host tells which is for training: no half is left out on a guess.
    layers = ("InfiniBand",) * 4 + ("Ethernet",) * 4
    for devices in ([in_subnet(f"mlx5_{i}", i % 2) for i in range(8)], [port(f"mlx5_{i}", layer=layers[i])
                    for i in range(8)], [port("mlx5_0"), port("mlx5_1", layer="Ethernet")]):  # fmt: skip
        yield case(host(rdma=devices), sets={HCA: None}, says={
            HCA: "^Unknown: these ports are on separate fabrics of equal size", "NCCL": ""})  # fmt: skip
    # NCCL takes every ACTIVE port, also one that has no address and reaches nothing.
    addressed = [port(f"mlx5_{i}", gids=[LINK_LOCAL, v2_gid(3, f"10.1.{i}.1")], **ROCE) for i in range(2)]
    bare = port("mlx5_2", gids=[LINK_LOCAL, LINK_LOCAL_V2], **ROCE)
    yield case(host(rdma=[*addressed, bare]), sets={HCA: "mlx5_0,mlx5_1", "NCCL_IB_ADDR_FAMILY": None})


def virtual_functions() -> Iterator[Case]:
    """Names of virtual functions differ from pod to pod: a list matches nothing on another node."""
    yield case(vf_pod(), sets={HCA: None}, says={HCA: "^No setting needed"}, never=("only the device behind",))
    # Beside them the host's own are left out, or a prefix tells them apart; where neither does, nothing is set.
    yield case(vf_pod(port("mlx5_bond_0", layer="Ethernet", gbit=100)), sets={HCA: "^=mlx5_bond_0"})
    yield case(vf_pod(port("mlx5_0", **ROCE), port("mlx5_1", **ROCE)), sets={HCA: "^=mlx5_0,mlx5_1"})
    yield case(vf_pod(port("bnxt_re0", layer="Ethernet", gbit=100)), sets={HCA: "mlx5_"})
    yield case(vf_pod(port("mlx5_30", vf=True, **ROCE)), sets={HCA: None}, says={HCA: "^Unknown"})
    # Azure's images call InfiniBand's functions mlx5_ib0 to mlx5_ib7 and the front-end's mlx5_an0.
    front = port("mlx5_an0", layer="Ethernet", gbit=40, model="ConnectX-4 VF")
    yield case(host(rdma=[*(port(f"mlx5_ib{i}", model="ConnectX-6 VF") for i in range(8)), front]),
               sets={HCA: "mlx5_ib"})  # fmt: skip


def wire(name: str, number: int, gbit: float, **more: Any) -> Interface:
    """An interface of the host with a speed."""
    return interface(name, "host", f"10.{number}.0.5/24", speed_bytes_per_second=gbit * GBIT, **more)


def interfaces() -> Iterator[Case]:
    """NCCL_SOCKET_IFNAME: where NCCL's own order of choice would miss the right interface."""
    eno1, net = interface("eno1", "host"), "192.168.2.5/24"
    # Other nodes cannot reach a bridge of this host, nor the network card of the management controller.
    yield case(host(interfaces=[interface("br-1a2b", "bridge", "172.18.0.1/16"), interface("ens3", "host")]),
               sets={NETS: "ens3"})  # fmt: skip
    yield case(host(rdma=IB8, interfaces=[interface("enx0a", "host", "169.254.3.1/24"), eno1]), sets={NETS: "eno1"})
    # Without RDMA NCCL spreads data over all interfaces; with RDMA the bootstrap alone needs no setting.
    slow, fast = wire("eno1", 0, 1), wire("ens3", 1, 100)
    yield case(host(interfaces=[slow, fast]), sets={NETS: "ens3"})
    yield case(host(rdma=IB8, interfaces=[slow, fast]), sets={NETS: None})
    yield case(host(interfaces=[fast]), sets={NETS: None})
    # Eight 200G beside a slower one: all eight, not one of them.
    eight = [wire(f"eth{i}", i, 200) for i in range(1, 9)]
    yield case(host(interfaces=[wire("eno1", 0, 25), *eight]), sets={NETS: ",".join(f"eth{i}" for i in range(1, 9))})
    yield case(host(interfaces=eight), sets={NETS: None})
    two = [wire("ens1", 1, 100), wire("ens2", 2, 100)]
    yield case(host(interfaces=two), sets={NETS: None})
    yield case(host(interfaces=[*two, interface("br-1a2b", "bridge", "172.18.0.1/16")]), sets={NETS: "ens1,ens2"},
               why={NETS: "br-1a2b (bridge"}, never=("sets the pace",))  # fmt: skip
    # A pod without RDMA: all of its own networks, not the first of them.
    nets = [interface(f"net{i}", "secondary", f"10.{i}.0.5/24", speed_bytes_per_second=100 * GBIT) for i in (1, 2)]
    yield case(host(interfaces=[ETH0, *nets]), sets={NETS: "net1,net2"})
    # net1 as a prefix also matches net10.
    more = interface("net10", "secondary", "192.168.3.5/24", speed_bytes_per_second=None)
    yield case(host(rdma=[port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1, more]), sets={NETS: "=net1"})
    # A list for all nodes is right only where no node has the other's name for something else.
    pods = [host(name, interfaces=[ETH0, interface(own, "secondary", net)])
            for name, own in (("a", "net1"), ("b", "rail0"))]  # fmt: skip
    yield case(*pods, sets={NETS: "net1,rail0"})
    clash = host("b", interfaces=[ETH0, interface("net1", "docker"), interface("net2", "secondary", "192.168.2.6/24")])
    yield case(pods[0], clash, sets={NETS: None}, says={NETS: "per node"})
    one = host("a", interfaces=[wire("eno1", 0, 1), *two])
    other = host("b", interfaces=[wire("eno1", 0, 1), wire("ens2", 1, 100), wire("ens1", 2, 1)])
    yield case(one, other, sets={NETS: None}, says={NETS: "per node"})
    # NCCL on each node takes its first interface; only the second one joins the nodes.
    nodes = [host(name, rdma=IB8, interfaces=[interface("usb0", "host", own), interface("eno1", "host", shared)])
             for name, own, shared in (("a", "10.9.1.1/24", "10.0.0.1/24"), ("b", "10.9.2.1/24", "10.0.0.2/24"))
             ]  # fmt: skip
    yield case(*nodes, sets={NETS: "eno1"})
    yield case(host(rdma=None, interfaces=None), says={NETS: "^Unknown"})  # a probe that did not answer


CASSINI = [pci(f"0000:{bus}:00.0", 0x020000, 0x17DB, driver="cxi_ss1") for bus in ("21", "a1", "41", "c1")]
HSN = [interface(f"hsn{i}", "host", f"10.253.0.{i + 1}/16", bus_id=CASSINI[i].bus_id, speed_bytes_per_second=200 * GBIT)
       for i in range(4)]  # fmt: skip
NMN = interface("nmn0", "host", "10.100.0.5/22", speed_bytes_per_second=1 * GBIT)


def other_fabrics() -> Iterator[Case]:
    """EFA, Slingshot, and NCCL_NET where NCCL would go over TCP in silence."""
    # EFA is the plugin's business; naming it makes a missing plugin an error instead of TCP.
    efa = host(rdma=[port(f"rdmap{i}", kind="efa", layer="Unspecified") for i in range(4)],
               interfaces=[interface("ens5", "host")])  # fmt: skip
    yield case(efa, only={"NCCL_NET": "AWS Libfabric"}, why={"NCCL_NET": "number of nodes is unknown"})
    yield case(efa, multi_node=True, sets={"NCCL_NET": "AWS Libfabric"})
    yield case(efa, multi_node=False, sets={"NCCL_NET": None})
    yield case(host(rdma=IB8), sets={"NCCL_NET": None})
    # No verbs device is there, and TCP over one interface is not what Slingshot is for.
    slingshot = {"interfaces": [NMN, *HSN], "bus": CASSINI}
    yield case(host(**slingshot), multi_node=True, says={"FI_CXI": "differ"}, never=("There is no RDMA",), only={
        "NCCL_NET": "AWS Libfabric", NETS: "hsn", "NCCL_CROSS_NIC": "1", "NCCL_NET_GDR_LEVEL": "PHB",
        "FI_CXI_DISABLE_HOST_REGISTER": "1", "FI_MR_CACHE_MONITOR": "userfaultfd", "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_RDZV_EAGER_SIZE": "0", "FI_CXI_RDZV_GET_MIN": "0", "FI_CXI_RDZV_THRESHOLD": "0",
    })  # fmt: skip
    # By driver or by name, and not where verbs devices are: Slingshot 10 has the same names on ConnectX cards.
    named = [[interface(f"hsn{i}", "host", f"10.253.0.{i + 1}/16", driver=driver) for i in range(2)]
             for driver in ("cxi_core", None)]  # fmt: skip
    yield case(host(interfaces=[NMN, *named[0]]), sets={"NCCL_NET": "AWS Libfabric"})
    yield case(host(interfaces=[NMN, *named[1]]), sets={NETS: "hsn"})
    verbs = [port(f"mlx5_{i}", **ROCE) for i in range(2)]
    yield case(host(interfaces=[NMN, *named[1]], rdma=verbs), sets={"NCCL_NET": None})
    # HPE warns of NCCL_NET in jobs of one node; LL128 gives wrong data with GPUs joined to their CPU.
    yield case(host(**slingshot), multi_node=False, only={})
    yield case(host(gpus=4, c2c=10, **slingshot), sets={"NCCL_PROTO": "^LL128"})
    yield case(host(gpus=4, c2c=10, **slingshot), nccl_version=(2, 26, 2), sets={"NCCL_PROTO": None})


def gids() -> Iterator[Case]:
    """NCCL_IB_GID_INDEX, NCCL_IB_ADDR_FAMILY and NCCL_IB_ROCE_VERSION_NUM."""

    def of(*entries: Gid, version: tuple[int, ...] | None = None, **more: Any) -> Case:
        return case(host(rdma=[port("mlx5_0", gids=entries, **ROCE)]), nccl_version=version, **more)

    index, family = "NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_FAMILY"
    # Later NCCL finds the RoCE v2 GID by itself.
    for version, expected in (((2, 20, 5), "3"), ((2, 18), "3"), ((2, 21, 5), None), (None, None)):
        yield of(LINK_LOCAL, v2_gid(3), version=version, sets={index: expected})
    # One index for all ports must be right on every port.
    hosts = [host(name, rdma=[port("mlx5_0", gids=[v2_gid(at)], **ROCE)]) for name, at in (("a", 3), ("b", 5))]
    yield case(*hosts, nccl_version=(2, 20, 5), sets={index: None}, says={index: "per node"})
    for version in ((2, 27, 7), None):  # NCCL looks for AF_INET and RoCE v2, else it stays on index 0
        yield of(LINK_LOCAL, LINK_LOCAL_V2, GLOBAL_V6, version=version, sets={family: "AF_INET6"},
                 never=("finds the GID by itself", "finds the RoCE v2 GID by itself"))  # fmt: skip
        yield of(LINK_LOCAL, V1_IPV4, version=version, only={"NCCL_IB_ROCE_VERSION_NUM": "1"})
        yield of(LINK_LOCAL, V1_IPV6, version=version, only={"NCCL_IB_ROCE_VERSION_NUM": "1", family: "AF_INET6"})
    # No variable repairs a port without an address; 169.254.0.0/16 NCCL takes, as directly joined hosts have it.
    yield of(LINK_LOCAL, LINK_LOCAL_V2, only={}, says={index: "link-local"}, never=("finds the GID by itself",))
    yield of(LINK_LOCAL, v2_gid(3, "169.254.3.1"), never=("link-local",))
    # No one family fits ports with addresses of different families.
    mixed = [port("mlx5_0", gids=[v2_gid(3)], **ROCE), port("mlx5_1", gids=[GLOBAL_V6], **ROCE)]
    yield case(host(rdma=mixed), sets={family: None}, says={family: "the same family", "NCCL": ""})
    both = [port("mlx5_0", gids=[v2_gid(3), GLOBAL_V6], **ROCE), mixed[1]]
    yield case(host(rdma=both), sets={family: "AF_INET6"})
    for entry in (V1_IPV4, GLOBAL_V6):  # an older NCCL takes index 0, and reads no variable that looks for another
        yield of(LINK_LOCAL, entry, version=(2, 20, 5), says={
            index: "^Unknown: an NCCL older than 2.21 uses GID index 0", "NCCL": ""})  # fmt: skip
    # NCCL takes the first entry: whether that VLAN is the training fabric nothing on the host tells.
    links = [interface(f"ens1.{i}", "host", f"10.{i}.0.5/24", kind="vlan", parent="ens1") for i in (200, 210)]
    several = "^Unknown: ports have RoCE v2 IPv4 GIDs in several"
    for version in ((2, 20, 5), (2, 27, 7), None):
        for second, says in (("10.210.0.5", True), ("10.200.0.6", False)):
            card = port("mlx5_0", netdev="ens1", gids=[v2_gid(3, "10.200.0.5"), v2_gid(5, second)], **ROCE)
            found = host(rdma=[card], interfaces=links)
            yield (
                case(found, nccl_version=version, sets={index: None}, says={index: several, "NCCL": ""})
                if says
                else case(found, nccl_version=version, never=(several[1:],))
            )


def flow_control() -> Iterator[Case]:
    """NCCL_IB_TC and NCCL_IB_SL: DSCP 26 (class field 106) for priority 3 alone, as NVIDIA's configuration has it."""
    tc, sl = "NCCL_IB_TC", "NCCL_IB_SL"
    for facts, expected in (({"traffic_class": 106}, "106"), ({"pfc_priorities": (3,)}, "106"), ({}, None),
                            ({"pfc_priorities": (3, 4)}, None), ({"pfc_priorities": ()}, None)):  # fmt: skip
        yield case(host(rdma=[port("mlx5_0", **ROCE, **facts)]), sets={tc: expected})
    for priority in (0, 1, 2, 4, 5, 6, 7):  # which DSCP a switch puts in it is the site's own choice
        one = host(rdma=[port("mlx5_0", pfc_priorities=(priority,), **ROCE)])
        yield case(one, sets={tc: None, sl: None}, says={tc: f"priority {priority}"})
        yield case(one, says={tc: "unknown platform, because"})
    # The ports' own class is taken, with what does not fit it.
    bare = host(rdma=[port("mlx5_0", **ROCE, traffic_class=106, pfc_priorities=(5,))])
    yield case(bare, sets={tc: "106"}, why={tc: "priority 3, but flow control protects 5"})
    yield case(bare, why={tc: "mlx5_0:1 flow control on priority 5"})
    # Ports that protect different priorities get no class; one that does not tell decides nothing.
    for other, expected in (((), None), ((5,), None), (None, "106"), ((3,), "106")):
        ports = [port(f"mlx5_{n}", netdev=f"rail{n}", **ROCE, pfc_priorities=p) for n, p in enumerate(((3,), other))]
        yield case(host(rdma=ports), sets={tc: expected}, says={} if expected else {tc: "everywhere, then set"})
    # NVIDIA's RoCE configuration speaks for NVIDIA's cards.
    maker = port("bnxt_re0", model="BCM57608", driver="bnxt_en", pfc_priorities=(3,), **ROCE)
    yield case(host(rdma=[maker]), sets={tc: None})
    # What the port itself maps to the priority helps the person who asks.
    mapped = port("mlx5_0", pfc_priorities=(5,), trust="dscp", dscp_priorities=((26, 3), (46, 5)), **ROCE)
    yield case(host(rdma=[mapped]), says={tc: "DSCP 46 to priority 5"})
    # Under trust pcp the service level is the lever; without a tag no packet is in a protected priority.
    entry = Gid(index=3, gid=v2_gid(3, "10.9.0.5").gid, type="RoCE v2", netdev="ens1.100")
    card = port("mlx5_0", netdev="ens1", gids=[entry], pfc_priorities=(4,), trust="pcp", **ROCE)
    tagged = [interface("ens1", "host", ""), interface("ens1.100", "host", "10.9.0.5/24", kind="vlan", parent="ens1")]
    yield case(host(rdma=[card], interfaces=tagged), sets={sl: "4", tc: None})
    plain = port("mlx5_0", netdev="ens1", gids=[v2_gid(3)], pfc_priorities=(3,), trust="pcp", **ROCE)
    yield case(host(rdma=[plain], interfaces=[interface("ens1", "host", "10.9.0.5/24")]), sets={sl: None, tc: None},
               says={sl: "NCCL_IB_SL=3 would select it"})  # fmt: skip


def crossed_rails() -> Iterator[Case]:
    """NCCL_CROSS_NIC=0 where crossing rails would need routing between their subnets."""
    cross = "NCCL_CROSS_NIC"
    same = [interface(f"rail{i}", "host", f"10.1.0.{i + 1}/24") for i in range(2)]
    apart = [port(f"mlx5_{i}", netdev=f"rail{i}", **ROCE) for i in range(2)]
    yield case(host(rdma=apart, interfaces=rail_nets(2)), sets={cross: "0"})
    yield case(host(rdma=apart, interfaces=same), sets={cross: None})
    yield case(host(rdma=[in_subnet(f"mlx5_{i}", i) for i in range(8)]), sets={cross: "0"})
    # Four GPUs on two NICs have no rail each.
    yield case(host(gpus=4, rdma=rails(2), interfaces=rail_nets(2)), sets={cross: "0"},
               never=("every GPU has its own rail",))  # fmt: skip
    yield case(host(gpus=2, rdma=rails(2), interfaces=rail_nets(2)), why={cross: "every GPU has its own rail"})
    # The address is on the VLAN of a bond: the rail's subnet is the VLAN's.
    devices, links = [], []
    for i in range(2):
        gid = Gid(index=3, gid=v2_gid(3, f"10.1.{i}.5").gid, type="RoCE v2", netdev=f"bond{i}.200")
        devices.append(port(f"mlx5_bond_{i}", netdev=f"bond{i}", gids=[gid], **ROCE))
        links += [interface(f"bond{i}", "host", "", kind="bond"),
                  interface(f"bond{i}.200", "host", f"10.1.{i}.5/24", kind="vlan", parent=f"bond{i}")]  # fmt: skip
    yield case(host(gpus=2, rdma=devices, interfaces=links), sets={cross: "0"})


def files_and_levels() -> Iterator[Case]:
    """Topology files and NCCL_P2P_LEVEL."""
    topo = "NCCL_TOPO_FILE"
    # Of topology files only that of this series, only where it is on the disk, and not where nccl.conf names one.
    there = {"topology_files": ("/opt/microsoft/ndv2-topo.xml", "/opt/microsoft/ndv4-topo.xml")}
    azure, flat = {"rdma": IB8, "vendor": "Microsoft Corporation"}, "every device sits on its own root"
    for gpus in (8, 4):  # the board, and half of it in a pod
        vm = host(gpus=gpus, gpu_name="NVIDIA A100-SXM4-40GB", switches=there, **azure)
        yield case(vm, virtual=flat, sets={topo: "/opt/microsoft/ndv4-topo.xml"})
    named = host(gpu_name="A100", nccl_conf={topo: "/x.xml"}, switches=there, **azure)
    yield case(named, virtual=flat, sets={topo: None})
    for other in (
        host(gpu_name="NVIDIA A100-SXM4-40GB", **azure),  # a pod that the file is not mounted in
        host(gpu_name="NVIDIA H100 80GB HBM3", switches=there, **azure),  # of another series
        host(gpu_name="NVIDIA H100 NVL", gpus=2, switches=there, **azure), host(rdma=IB8, vendor="QEMU"),
    ):  # fmt: skip
        yield case(other, virtual=flat, sets={topo: None}, says={topo: "hides its PCIe tree"})
        yield case(other, virtual=flat, says={topo: "at INFO level only"})
    for gpus, says in ((1, "one GPU"), (4, "limits direct access")):  # explained, never advised
        pod = host(gpus=gpus, nccl_environment={"NCCL_P2P_LEVEL": "NVL"})
        yield case(pod, sets={"NCCL_P2P_LEVEL": None}, says={"NCCL_P2P_LEVEL": says})


def one_node() -> Iterator[Case]:
    """Nothing of the network is opened, and nothing is said of it."""
    yield case(ROCE_POD, multi_node=False, only={})
    many = host(rdma=[*IB8, port("mlx5_8", state="DOWN")], interfaces=[ETH0], switches={"peermem_loaded": False})
    topics = (NETS, HCA, "NCCL_CROSS_NIC", "NCCL_NET", "NCCL_NET_GDR_LEVEL")
    yield case(many, multi_node=False, says=dict.fromkeys(topics, ""))


TABLES = (hcas, virtual_functions, interfaces, other_fabrics, gids, flow_control, crossed_rails, files_and_levels,
          one_node)  # fmt: skip


@each_row(("sets", "only", "why", "says", "never", "advice"), lambda: [row for table in TABLES for row in table()])
def test_what_is_advised(
    sets: Mapping[str, str | None], only: Mapping[str, str] | None, why: Mapping[str, str], says: Mapping[str, str],
    never: tuple[str, ...], advice: Recommendation,
) -> None:  # fmt: skip
    """What is set, None for what is not; `only`: all that NCCL or libfabric read; `why`: words of a setting's reason;
    `says`: words of the notes on a topic, "^" for how they begin, "" where there is none; `never`: words of nothing.
    """
    found = values(advice)
    assert {name: found.get(name) for name in sets} == sets
    transport = {name: value for name, value in found.items() if name.startswith(("NCCL_", "FI_"))}
    assert only is None or transport == only
    for name, words in why.items():
        (reason,) = [each.reason for each in advice.settings if each.name == name]
        assert words in f"{reason.rule}\n{reason.evidence}"
    for topic, words in says.items():
        said = "\n".join(f"{each.text}\n{each.evidence}" for each in advice.notes if each.topic == topic)
        assert said.startswith(words[1:]) if words[:1] == "^" else words in said if words else not said, said
    assert not [words for words in never if words in str(advice)]
    for each in (*advice.settings, *advice.needs):
        assert each.reason.rule and each.reason.evidence and each.reason.source, each


def test_needs_of_a_pod() -> None:
    """A secondary network with its device, virtual functions, EFA, RDMA of machines that nobody probed, a rack."""
    advice = advise(ROCE_POD)
    assert (values(advice)[NETS], values(advice)[HCA]) == ("net1", "mlx5_1")
    locked = {("capability", "IPC_LOCK"), ("memlock", "unlimited")}
    assert {("network", "default/rdma-net"), *locked} <= needs(advice)
    assert {name for name, _ in needs(advise(ROCE_POD, multi_node=False))} == {"shm_bytes", "resource"}
    assert ("resource", "rdma/*: 8") in needs(advise(vf_pod()))
    assert {name for name, _ in locked} <= {
        name for name, _ in needs(advise(host(interfaces=[NMN, *HSN], bus=CASSINI), multi_node=True))
    }
    efa = host(rdma=[port(f"rdmap{i}", kind="efa", layer="Unspecified") for i in range(4)])
    assert ("resource", "vpc.amazonaws.com/efa: 4") in needs(advise(efa))
    # of three of eight GPUs: the others' pods want their devices too
    assert ("resource", "vpc.amazonaws.com/efa: 2") in needs(advise(efa, ranks_per_node=3))
    for name, gpus, devices in (("p4d.24xlarge", 2, 1), ("p4d.24xlarge", 8, 4), ("p5.48xlarge", 2, 8)):
        advice = settings([], machines.cluster(name, 2, gpus_per_node=gpus))
        assert ("resource", f"vpc.amazonaws.com/efa: {devices}") in needs(advice), (name, gpus)
    for name in ("dgx-h100", "gb200-nvl72", "BM.GPU.H100.8", "a3-ultragpu-8g", "p5.48xlarge"):
        assert locked <= needs(settings([], machines.cluster(name, 2))), name
    assert not locked & needs(settings([], machines.cluster("g5.12xlarge", 2)))
    domain = ("compute_domain", "resource.nvidia.com/v1beta1")
    for name, nodes, joined in (("gb200-nvl72", 2, True), ("dgx-b200", 2, False), ("gb200-nvl72", 1, False)):
        advice = settings([], machines.cluster(name, nodes), multi_node=nodes > 1)
        assert (domain in needs(advice)) is joined, name
        assert ("ComputeDomain" in note(advice, "NCCL_MNNVL_ENABLE")) is joined, name


def test_host_without_gpus_gets_gloo() -> None:
    """gloo takes the address of the host name otherwise; NCCL is not mentioned."""
    loopback = interface("lo", "loopback", "127.0.0.1/8")
    advice = advise(host(gpus=0, rdma=None, interfaces=[loopback, interface("eth0", "host")]))
    assert advice.backend == "gloo"
    assert values(advice) == {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "32"}
    assert not [each for each in advice.notes if each.topic.startswith("NCCL")]
    assert "GLOO_SOCKET_IFNAME" not in values(advise(host(gpus=0, rdma=None, interfaces=[loopback])))


@each_row("class_code", [0x120000, 0x038000])
def test_amd_gpus_are_seen_and_not_judged(class_code: int) -> None:
    """No gloo, no threads for ranks on the CPU: the GPUs are AMD's."""
    gpus = [pci(f"0000:{i + 1:02x}:00.0", class_code, 0x1002, driver="amdgpu") for i in range(8)]
    advice = advise(host(gpus=0, rdma=[port(f"mlx5_{i}", **ROCE) for i in range(8)], bus=gpus,
                         interfaces=[interface("eth0", "host")]))  # fmt: skip
    assert (advice.backend, advice.settings) == ("rccl", ())
    assert "RCCL is not supported yet" in note(advice, "RCCL")
    assert "CPU" not in str(advice.notes)


def test_the_cpus_own_amd_display_beside_nvidia_gpus_is_none_to_judge() -> None:
    """A workstation's integrated graphics are class 03 00 of AMD's vendor id."""
    bus = [pci("0000:01:00.0", 0x030000, 0x10DE, driver="nvidia"),
           pci("0000:0a:00.0", 0x030000, 0x1002, driver="amdgpu")]  # fmt: skip
    assert advise(host(gpus=1, bus=bus)).backend == "nccl"
    server = [pci("0000:03:00.0", 0x030000, 0x1A03, driver="ast")]
    assert advise(host(gpus=0, bus=server, interfaces=[interface("eth0", "host")])).backend == "gloo"


def test_only_system_configuration_names_are_advised() -> None:
    """Of a host that has everything: no variable of NCCL's Debugging section."""
    everything = host(
        rdma=[port(f"mlx5_{i}", gids=[LINK_LOCAL], netdev=f"rail{i}", traffic_class=106, **ROCE) for i in range(2)]
        + [port("rdmap0", kind="efa")],
        interfaces=[ETH0, *(interface(f"rail{i}", "secondary", f"10.1.{i}.1/24") for i in range(2))],
    )
    advised: set[str] = set()
    for version in ((2, 18, 3), (2, 27, 7)):
        advised |= set(values(advise(everything, multi_node=True, nccl_version=version)))
    nccl = {name for name in advised if name.startswith("NCCL_")}
    assert len(nccl) >= 5
    assert {names()[name].doc_class for name in nccl} == {"system"}


def test_twin_that_a_file_system_is_mounted_through_is_left_out() -> None:
    """A server's address in its subnet, and every GPU keeps a port as near."""
    twin, near = port("mlx5_4", netdev="stor0", gids=[v2_gid(3, "10.200.0.5")], **ROCE), tuple(FOUR.split(","))
    links = [*rail_nets(4), interface("stor0", "host", "10.200.0.5/16")]
    mounted = host(gpus=4, rdma=[*rails(4), twin], interfaces=links, storage_servers=("10.200.7.9",))
    crowded = cluster(mounted, nearest=near, crowded={3: ("mlx5_3", "mlx5_4")})
    assert values(settings([mounted], crowded))[HCA] == FOUR
    only = host(
        gpus=4, rdma=rails(4), interfaces=links, storage_servers=("10.1.2.200",)
    )  # the rail carries storage too
    assert HCA not in values(settings([only], cluster(only, nearest=near)))


def test_one_host_planned_several_times_over() -> None:
    """What-if: the same snapshot under made-up names counts as several nodes."""
    pod = host("a", rdma=[port("rdmap0", kind="efa")], interfaces=[interface("ens5", "host")])
    assert values(settings([pod], cluster(host("a-0"), host("a-1"))))["NCCL_NET"] == "AWS Libfabric"


def test_probe_that_failed_is_unknown_not_absent() -> None:
    """A hung driver does not make a GPU host a CPU host, nor a broken sysfs a host without RDMA."""
    broken = host(rdma=None)
    broken.outcomes.update(gpu=Failed(error="no answer for 10 s"), rdma=Failed(error="no answer for 10 s"))
    advice = advise(broken)
    assert (advice.backend, advice.settings) == ("nccl", ())
    assert note(advice, "GPU").startswith("Unknown")
    assert note(advice, HCA).startswith("Unknown")


@each_row(
    ("gpus", "quota", "ranks", "threads"),
    [(0, None, 1, "64"), (0, 2.0, 1, "2"), (0, 1.0, 1, "1"), (0, None, 4, "16"), (0, 4.0, None, "2"), (1, 8.0, 1, "8"),
     (1, None, 1, None), (8, 8.0, 8, None), (8, 8.0, 1, "8")],
)  # fmt: skip
def test_threads_of_a_rank(gpus: int, quota: float | None, ranks: int | None, threads: str | None) -> None:
    """torchrun sets OMP_NUM_THREADS for several ranks of a node only: alone, one takes every core that it sees."""
    advice = advise(host(gpus=gpus, cgroup_cpus=quota, interfaces=None), ranks_per_node=ranks)
    assert values(advice).get("OMP_NUM_THREADS") == threads
    assert ranks != 1 or "torchrun gives each rank 1 thread" not in note(advice, "OMP_NUM_THREADS")


def test_the_environment_is_of_the_network_that_the_forecast_is_of() -> None:
    """TCP on machines with RDMA keeps NCCL on sockets; RDMA on machines without a known device is no TCP."""
    for name in ("p5.48xlarge", "dgx-h100"):
        own = settings((), machines.cluster(name, 2), multi_node=True)
        tcp = settings((), machines.over_network(machines.cluster(name, 2), "10G", "tcp"), multi_node=True)
        assert values(tcp)["NCCL_NET"] == "Socket"
        assert not [need for need in tcp.needs if "efa" in need.value or need.name in ("memlock", "capability")]
        assert [need for need in own.needs if need.name == "memlock"]
    found = settings((), machines.over_network(machines.cluster("p3.16xlarge", 2), "100G", "rdma"), multi_node=True)
    assert "NCCL_NET" not in values(found)
    assert note(found, "NCCL_NET").startswith("Unknown")
