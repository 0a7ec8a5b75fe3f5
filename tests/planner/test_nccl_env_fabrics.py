"""A wrong environment is worse than none: what each fabric needs, and what must be left out."""

from __future__ import annotations

from typing import Any

from nccl_env_hosts import GBIT, cluster, host, interface, pci, port, v2_gid
from rigs.tables import each_row
from test_nccl_env_rules import ETH0, IB8, ROCE, advise, note, values

from collectives.nccl_log.transport import Evidence
from planner.forecast import machines
from planner.nccl_env.environment import EnvAdvice, settings
from probes.interfaces.facts import Interface
from probes.rdma.facts import Gid, RdmaDevice

LINK_LOCAL = Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="IB/RoCE v1")
LINK_LOCAL_V2 = Gid(index=1, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="RoCE v2")
GLOBAL_V6 = Gid(index=2, gid="fd00:0000:0000:0000:0000:0000:0000:0001", type="RoCE v2")


def nccl(advice: EnvAdvice) -> dict[str, str]:
    """The settings that NCCL or libfabric read."""
    return {name: value for name, value in values(advice).items() if name.startswith(("NCCL_", "FI_"))}


def vf_pod(*others: RdmaDevice, first: int = 10, **more: Any) -> EnvAdvice:
    """A pod with eight virtual functions, each behind a network of its own, and what else it sees."""
    functions = [
        port(f"mlx5_{first + i}", vf=True, netdev=f"net{i + 1}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE)
        for i in range(8)
    ]
    nets = [interface(f"net{i + 1}", "secondary", f"10.1.{i}.5/24", is_vf=True) for i in range(8)]
    return advise(host(rdma=[*functions, *others], interfaces=[ETH0, *nets], **more))


# -- SR-IOV ---------------------------------------------------------------------------------------------------------


def test_names_of_virtual_functions_are_never_a_list() -> None:
    """They differ from pod to pod; on another node the list matches nothing, and NCCL goes over TCP in silence."""
    advice = vf_pod()
    assert "NCCL_IB_HCA" not in values(advice)
    assert note(advice, "NCCL_IB_HCA").startswith("Set nothing")
    needs = {need.value for need in advice.needs if need.name == "resource"}
    assert "rdma/*: 8" in needs
    assert "only the one behind" not in str(advice)


@each_row(
    ("others", "expected"),
    [
        ((port("mlx5_bond_0", layer="Ethernet", gbit=100),), "^=mlx5_bond_0"),  # the host's own, seen in the pod
        ((port("mlx5_0", **ROCE), port("mlx5_1", **ROCE)), "^=mlx5_0,mlx5_1"),
        ((port("bnxt_re0", layer="Ethernet", gbit=100),), "mlx5_"),
        ((port("mlx5_30", vf=True, **ROCE),), None),  # another pod's function
    ],
)
def test_what_must_be_left_out_beside_virtual_functions(others: tuple[RdmaDevice, ...], expected: str | None) -> None:
    """A prefix, or the physical functions to leave out; where neither tells them apart, nothing and why."""
    advice = vf_pod(*others)
    assert values(advice).get("NCCL_IB_HCA") == expected
    if expected is None:
        assert note(advice, "NCCL_IB_HCA").startswith("Unknown")


def test_virtual_functions_of_a_vm_are_told_apart_by_their_prefix() -> None:
    """Azure's images call InfiniBand's functions mlx5_ib0 to mlx5_ib7 and the front-end's mlx5_an0."""
    infiniband = [port(f"mlx5_ib{i}", model="ConnectX-6 VF") for i in range(8)]
    front = port("mlx5_an0", layer="Ethernet", gbit=40, model="ConnectX-4 VF")
    assert values(advise(host(rdma=[*infiniband, front])))["NCCL_IB_HCA"] == "mlx5_ib"


def test_list_is_set_only_where_a_visible_device_must_be_left_out() -> None:
    """All of the pod's devices are behind its own networks: nothing to leave out, nothing to set."""
    cards = [port(f"mlx5_{i}", netdev=f"net{i + 1}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i in range(4)]
    nets = [interface(f"net{i + 1}", "secondary", f"10.1.{i}.5/24", kind="macvlan") for i in range(4)]
    assert "NCCL_IB_HCA" not in values(advise(host(rdma=cards, interfaces=[ETH0, *nets])))
    seen = advise(host(rdma=[*cards, port("mlx5_9", **ROCE)], interfaces=[ETH0, *nets]))
    assert values(seen)["NCCL_IB_HCA"] == "mlx5_0,mlx5_1,mlx5_2,mlx5_3"
    (setting,) = [each for each in seen.settings if each.name == "NCCL_IB_HCA"]
    assert "the 4 behind its networks" in setting.reason.rule


# -- TCP ------------------------------------------------------------------------------------------------------------


def wire(name: str, number: int, gbit: float, **more: Any) -> Interface:
    """An interface of the host with a speed."""
    return interface(name, "host", f"10.{number}.0.5/24", speed_bytes_per_second=gbit * GBIT, **more)


def test_every_interface_of_equal_speed_carries_data() -> None:
    """Eight 200G beside a slower one: all eight, not one of them."""
    eight = [wire(f"eth{i}", i, 200) for i in range(1, 9)]
    slow = wire("eno1", 0, 25)
    listed = values(advise(host(interfaces=[slow, *eight])))["NCCL_SOCKET_IFNAME"]
    assert listed == "eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8"
    assert "NCCL_SOCKET_IFNAME" not in values(advise(host(interfaces=eight)))
    two = [wire("ens1", 1, 100), wire("ens2", 2, 100)]
    assert "NCCL_SOCKET_IFNAME" not in values(advise(host(interfaces=two)))
    bridged = advise(host(interfaces=[*two, interface("br-1a2b", "bridge", "172.18.0.1/16")]))
    assert values(bridged)["NCCL_SOCKET_IFNAME"] == "ens1,ens2"
    (setting,) = [each for each in bridged.settings if each.name == "NCCL_SOCKET_IFNAME"]
    assert "sets the pace" not in setting.reason.rule
    assert "br-1a2b (bridge" in setting.reason.evidence


def test_every_secondary_network_of_equal_speed_carries_data() -> None:
    """A pod without RDMA: all of its own networks, not the first of them."""
    nets = [interface(f"net{i}", "secondary", f"10.{i}.0.5/24", speed_bytes_per_second=100 * GBIT) for i in (1, 2)]
    assert values(advise(host(interfaces=[ETH0, *nets])))["NCCL_SOCKET_IFNAME"] == "net1,net2"


def test_equal_interfaces_with_other_names_on_other_nodes_are_not_one_list() -> None:
    """A node must not open what only its neighbour should."""
    one = host("a", interfaces=[wire("eno1", 0, 1), wire("ens1", 1, 100), wire("ens2", 2, 100)])
    other = host("b", interfaces=[wire("eno1", 0, 1), wire("ens2", 1, 100), wire("ens1", 2, 1)])
    advice = advise(one, other)
    assert "NCCL_SOCKET_IFNAME" not in values(advice)
    assert "per node" in note(advice, "NCCL_SOCKET_IFNAME")


# -- Slingshot, AMD -------------------------------------------------------------------------------------------------

CASSINI = [pci(f"0000:{bus}:00.0", 0x020000, 0x17DB, driver="cxi_ss1") for bus in ("21", "a1", "41", "c1")]
HSN = [
    interface(f"hsn{i}", "host", f"10.253.0.{i + 1}/16", bus_id=CASSINI[i].bus_id, speed_bytes_per_second=200 * GBIT)
    for i in range(4)
]
NMN = interface("nmn0", "host", "10.100.0.5/22", speed_bytes_per_second=1 * GBIT)


def test_slingshot_gets_the_plugin_all_interfaces_and_what_the_sites_agree_on() -> None:
    """No verbs device is there, and TCP over one interface is not what this network is for."""
    advice = advise(host(interfaces=[NMN, *HSN], bus=CASSINI), multi_node=True)
    assert nccl(advice) == {
        "NCCL_NET": "AWS Libfabric",
        "NCCL_SOCKET_IFNAME": "hsn",
        "NCCL_CROSS_NIC": "1",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "FI_CXI_DISABLE_HOST_REGISTER": "1",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_RDZV_EAGER_SIZE": "0",
        "FI_CXI_RDZV_GET_MIN": "0",
        "FI_CXI_RDZV_THRESHOLD": "0",
    }
    assert "no RDMA" not in str(advice.settings)
    assert {"memlock", "capability"} <= {need.name for need in advice.needs}
    assert "differ" in note(advice, "FI_CXI")


def test_slingshot_by_driver_or_name_and_not_where_verbs_devices_are() -> None:
    """Slingshot 10 has the same interface names on ConnectX cards."""
    by_driver = [interface(f"hsn{i}", "host", f"10.253.0.{i + 1}/16", driver="cxi_core") for i in range(2)]
    assert values(advise(host(interfaces=[NMN, *by_driver])))["NCCL_NET"] == "AWS Libfabric"
    bare = [interface(f"hsn{i}", "host", f"10.253.0.{i + 1}/16") for i in range(2)]
    assert values(advise(host(interfaces=[NMN, *bare])))["NCCL_SOCKET_IFNAME"] == "hsn"
    ten = advise(host(interfaces=[NMN, *bare], rdma=[port(f"mlx5_{i}", **ROCE) for i in range(2)]))
    assert "NCCL_NET" not in values(ten)


def test_slingshot_on_one_node_and_with_grace_hopper() -> None:
    """HPE warns of NCCL_NET in jobs of one node; LL128 gives wrong data with GPUs joined to their CPU."""
    one = advise(host(interfaces=[NMN, *HSN], bus=CASSINI), multi_node=False)
    assert not nccl(one)
    grace = advise(host(gpus=4, interfaces=[NMN, *HSN], bus=CASSINI, c2c=10))
    assert values(grace)["NCCL_PROTO"] == "^LL128"
    older = advise(host(gpus=4, interfaces=[NMN, *HSN], bus=CASSINI, c2c=10), nccl_version=(2, 26, 2))
    assert "NCCL_PROTO" not in values(older)


@each_row("class_code", [0x120000, 0x038000])
def test_amd_gpus_are_seen_and_not_judged(class_code: int) -> None:
    """No gloo, no threads for ranks on the CPU: the GPUs are AMD's."""
    gpus = [pci(f"0000:{i + 1:02x}:00.0", class_code, 0x1002, driver="amdgpu") for i in range(8)]
    advice = advise(host(gpus=0, rdma=[port(f"mlx5_{i}", **ROCE) for i in range(8)], bus=gpus,
                         interfaces=[interface("eth0", "host")]))  # fmt: skip
    assert advice.backend == "rccl"
    assert not advice.settings
    assert "RCCL is not judged yet" in note(advice, "RCCL")
    assert "CPU" not in str(advice.notes)


def test_the_cpus_own_amd_display_beside_nvidia_gpus_is_none_to_judge() -> None:
    """A workstation's integrated graphics are class 03 00 of AMD's vendor id."""
    bus = [
        pci("0000:01:00.0", 0x030000, 0x10DE, driver="nvidia"),
        pci("0000:0a:00.0", 0x030000, 0x1002, driver="amdgpu"),
    ]
    assert advise(host(gpus=1, bus=bus)).backend == "nccl"
    server = [pci("0000:03:00.0", 0x030000, 0x1A03, driver="ast")]
    assert advise(host(gpus=0, bus=server, interfaces=[interface("eth0", "host")])).backend == "gloo"


# -- GIDs -----------------------------------------------------------------------------------------------------------


@each_row("version", [(2, 27, 7), None])
def test_ipv6_only_gets_the_family_also_where_the_version_is_unknown(version: tuple[int, ...] | None) -> None:
    """NCCL looks for AF_INET and stays on index 0, which is link-local RoCE v1."""
    gids = [LINK_LOCAL, LINK_LOCAL_V2, GLOBAL_V6]
    advice = advise(host(rdma=[port("mlx5_0", gids=gids, **ROCE)]), nccl_version=version)
    assert values(advice)["NCCL_IB_ADDR_FAMILY"] == "AF_INET6"
    assert "finds the GID itself" not in str(advice.notes)
    assert "finds the RoCE v2 GID itself" not in str(advice.notes)


def test_link_local_gids_alone_are_unusable_and_said_so() -> None:
    """No variable mends a port without an address."""
    advice = advise(host(rdma=[port("mlx5_0", gids=[LINK_LOCAL, LINK_LOCAL_V2], **ROCE)]))
    assert not nccl(advice)
    assert "link-local" in note(advice, "NCCL_IB_GID_INDEX")
    assert "finds the GID itself" not in str(advice.notes)


def test_port_without_an_address_beside_ports_with_one_is_left_out() -> None:
    """NCCL takes every ACTIVE port, also one that reaches nothing."""
    devices = [port(f"mlx5_{i}", gids=[LINK_LOCAL, v2_gid(3, f"10.1.{i}.1")], **ROCE) for i in range(2)]
    bare = port("mlx5_2", gids=[LINK_LOCAL, LINK_LOCAL_V2], **ROCE)
    advice = advise(host(rdma=[*devices, bare]))
    assert values(advice)["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    assert "NCCL_IB_ADDR_FAMILY" not in values(advice)


def test_ports_with_addresses_of_different_families_get_a_note() -> None:
    """No one family fits all."""
    devices = [port("mlx5_0", gids=[v2_gid(3)], **ROCE), port("mlx5_1", gids=[GLOBAL_V6], **ROCE)]
    advice = advise(host(rdma=devices))
    assert "NCCL_IB_ADDR_FAMILY" not in values(advice)
    assert "one family" in note(advice, "NCCL_IB_ADDR_FAMILY")
    assert not note(advice, "NCCL")  # nothing is found by itself there
    both = [port("mlx5_0", gids=[v2_gid(3), GLOBAL_V6], **ROCE), port("mlx5_1", gids=[GLOBAL_V6], **ROCE)]
    assert values(advise(host(rdma=both)))["NCCL_IB_ADDR_FAMILY"] == "AF_INET6"


def test_addresses_of_directly_joined_hosts_are_usable() -> None:
    """169.254.0.0/16 on RoCE: NCCL takes it, and two hosts on one cable reach each other by it."""
    advice = advise(host(rdma=[port("mlx5_0", gids=[LINK_LOCAL, v2_gid(3, "169.254.3.1")], **ROCE)]))
    assert "link-local" not in note(advice, "NCCL_IB_GID_INDEX")


V1_IPV4 = Gid(index=1, gid=v2_gid(1).gid, type="IB/RoCE v1")
V1_IPV6 = Gid(index=1, gid=GLOBAL_V6.gid, type="IB/RoCE v1")


@each_row(
    ("gids", "expected"),
    [
        ([LINK_LOCAL, V1_IPV4], {"NCCL_IB_ROCE_VERSION_NUM": "1"}),
        ([LINK_LOCAL, V1_IPV6], {"NCCL_IB_ROCE_VERSION_NUM": "1", "NCCL_IB_ADDR_FAMILY": "AF_INET6"}),
    ],
)
@each_row("version", [(2, 27, 7), None])
def test_ports_with_roce_v1_alone_name_it(
    version: tuple[int, ...] | None, gids: list[Gid], expected: dict[str, str]
) -> None:
    """NCCL looks for RoCE v2 and IPv4: what a port has in their place is named, also where the version is unknown."""
    assert nccl(advise(host(rdma=[port("mlx5_0", gids=gids, **ROCE)]), nccl_version=version)) == expected


@each_row("entry", [V1_IPV4, GLOBAL_V6])
def test_older_nccl_without_the_entry_that_it_needs_is_not_called_fine(entry: Gid) -> None:
    """It takes index 0, and no variable that it reads looks for another family or version."""
    advice = advise(host(rdma=[port("mlx5_0", gids=[LINK_LOCAL, entry], **ROCE)]), nccl_version=(2, 20, 5))
    assert note(advice, "NCCL_IB_GID_INDEX").startswith("Unknown: an NCCL older than 2.21 takes GID index 0")
    assert not note(advice, "NCCL")


@each_row("version", [(2, 20, 5), (2, 27, 7), None])
@each_row(("second", "says"), [("10.210.0.5", True), ("10.200.0.6", False)])
def test_port_with_addresses_in_several_subnets_is_not_called_found(
    version: tuple[int, ...] | None, second: str, says: bool
) -> None:
    """NCCL takes the first entry: whether that VLAN is the training fabric nothing on the host tells."""
    card = port("mlx5_0", netdev="ens1", gids=[v2_gid(3, "10.200.0.5"), v2_gid(5, second)], **ROCE)
    links = [interface(f"ens1.{i}", "host", f"10.{i}.0.5/24", kind="vlan", parent="ens1") for i in (200, 210)]
    advice = advise(host(rdma=[card], interfaces=links), nccl_version=version)
    assert note(advice, "NCCL_IB_GID_INDEX").startswith("Unknown: ports have RoCE v2 IPv4 GIDs in several") is says
    if says:
        assert "NCCL_IB_GID_INDEX" not in values(advice)
        assert not note(advice, "NCCL")


# -- Flow control ---------------------------------------------------------------------------------------------------


@each_row("priority", [0, 1, 2, 4, 5, 6, 7])
def test_no_class_is_made_up_for_another_priority_than_3(priority: int) -> None:
    """Which DSCP a switch puts in it is the site's own choice."""
    advice = advise(host(rdma=[port("mlx5_0", pfc_priorities=(priority,), **ROCE)]))
    assert not {"NCCL_IB_TC", "NCCL_IB_SL"} & set(values(advice))
    assert f"priority {priority}" in note(advice, "NCCL_IB_TC")
    assert "unknown platform, because" in note(advice, "NCCL_IB_TC")


def test_priority_3_of_another_makers_card_has_no_default_behind_it() -> None:
    """NVIDIA's RoCE configuration speaks for NVIDIA's cards."""
    card = port("bnxt_re0", model="BCM57608", driver="bnxt_en", pfc_priorities=(3,), **ROCE)
    assert "NCCL_IB_TC" not in values(advise(host(rdma=[card])))


def test_ports_map_is_named_as_evidence() -> None:
    """What the port itself maps to the priority helps the person who asks."""
    one = port("mlx5_0", pfc_priorities=(5,), trust="dscp", dscp_priorities=((26, 3), (46, 5)), **ROCE)
    (said,) = [each for each in advise(host(rdma=[one])).notes if each.topic == "NCCL_IB_TC"]
    assert "DSCP 46 to priority 5" in said.evidence


def test_under_pcp_trust_the_service_level_is_the_lever() -> None:
    """On a VLAN it is set; without a tag no packet is in a protected priority, and that is said."""
    gids = [Gid(index=3, gid=v2_gid(3, "10.9.0.5").gid, type="RoCE v2", netdev="ens1.100")]
    card = port("mlx5_0", netdev="ens1", gids=gids, pfc_priorities=(4,), trust="pcp", **ROCE)
    tagged = [interface("ens1", "host", ""), interface("ens1.100", "host", "10.9.0.5/24", kind="vlan", parent="ens1")]
    on_vlan = advise(host(rdma=[card], interfaces=tagged))
    assert values(on_vlan)["NCCL_IB_SL"] == "4"
    assert "NCCL_IB_TC" not in values(on_vlan)
    plain = port("mlx5_0", netdev="ens1", gids=[v2_gid(3)], pfc_priorities=(3,), trust="pcp", **ROCE)
    untagged = advise(host(rdma=[plain], interfaces=[interface("ens1", "host", "10.9.0.5/24")]))
    assert not {"NCCL_IB_TC", "NCCL_IB_SL"} & set(values(untagged))
    assert "NCCL_IB_SL=3 is the lever" in note(untagged, "NCCL_IB_SL")


# -- Which ports are for training -----------------------------------------------------------------------------------


def test_one_node_cannot_tell_that_every_port_belongs_to_the_fabric() -> None:
    """A twin near the GPUs may carry storage: the question is asked, with the ports it is about."""
    nine = [*(port(f"mlx5_{i}") for i in range(8)), port("mlx5_8")]
    said = note(advise(host(rdma=nine)), "NCCL_IB_HCA")
    assert "every one it finds belongs" not in said
    assert "cannot be told from one node" in said
    assert "ask which of them carry storage" in said


def test_neighbours_on_the_wire_stand_beside_the_question() -> None:
    """Who asks sees which switch each port leads to; a bond has its members' wires."""
    cards = [
        port(f"mlx5_{i}", netdev=net, gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i, net in enumerate(("a", "bond0"))
    ]
    links = [
        interface("a", "host", "10.1.0.5/24", neighbour="leaf1 swp1"),
        interface("bond0", "host", "10.1.1.5/24", kind="bond"),
        interface("b", "host", "", master="bond0", neighbour="stor1 swp7"),
        interface("c", "host", "", master="bond0", neighbour="stor2 swp7"),
    ]
    found = advise(host(rdma=cards, interfaces=links))
    (said,) = [each for each in found.notes if each.topic == "NCCL_IB_HCA"]
    assert "neighbours by LLDP: mlx5_0 leaf1 swp1, mlx5_1 stor1 swp7 and stor2 swp7" in said.evidence


def test_twin_that_a_file_system_is_mounted_through_is_left_out() -> None:
    """A server's address in its subnet, and every GPU keeps a port as near."""
    rails = [port(f"mlx5_{i}", netdev=f"rail{i}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i in range(4)]
    twin = port("mlx5_4", netdev="stor0", gids=[v2_gid(3, "10.200.0.5")], **ROCE)
    links = [interface(f"rail{i}", "host", f"10.1.{i}.5/24") for i in range(4)]
    links.append(interface("stor0", "host", "10.200.0.5/16"))
    near = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    mounted = host(gpus=4, rdma=[*rails, twin], interfaces=links, storage_servers=("10.200.7.9",))
    crowded = cluster(mounted, nearest=near, crowded={3: ("mlx5_3", "mlx5_4")})
    found = {each.name: each.value for each in settings([mounted], crowded).settings}
    assert found["NCCL_IB_HCA"] == "mlx5_0,mlx5_1,mlx5_2,mlx5_3"
    only = host(gpus=4, rdma=rails, interfaces=links, storage_servers=("10.1.2.200",))  # the rail carries storage too
    shared = settings([only], cluster(only, nearest=near))
    assert "NCCL_IB_HCA" not in {each.name for each in shared.settings}


def test_infiniband_port_of_another_subnet_is_left_out() -> None:
    """Another subnet manager's ports reach none of these."""
    prefix = "fec0:0000:0000:0001"
    compute = [
        port(f"mlx5_{i}", gids=[Gid(index=0, gid=f"fe80:0000:0000:0000:a088:c203:00aa:000{i}")]) for i in range(4)
    ]
    storage = port("mlx5_9", gids=[Gid(index=0, gid=f"{prefix}:a088:c203:00aa:0009")])
    assert values(advise(host(rdma=[*compute, storage])))["NCCL_IB_HCA"] == "mlx5_0,mlx5_1,mlx5_2,mlx5_3"


def test_rails_on_vlans_of_bonds_are_subnets_of_their_own() -> None:
    """The address is on the VLAN: the rail's subnet is the VLAN's."""
    devices, links = [], []
    for i in range(2):
        gid = Gid(index=3, gid=v2_gid(3, f"10.1.{i}.5").gid, type="RoCE v2", netdev=f"bond{i}.200")
        devices.append(port(f"mlx5_bond_{i}", netdev=f"bond{i}", gids=[gid], **ROCE))
        links += [
            interface(f"bond{i}", "host", "", kind="bond"),
            interface(f"bond{i}.200", "host", f"10.1.{i}.5/24", kind="vlan", parent=f"bond{i}"),
        ]
    assert values(advise(host(gpus=2, rdma=devices, interfaces=links)))["NCCL_CROSS_NIC"] == "0"


def test_reason_speaks_of_rails_for_every_gpu_only_where_they_are() -> None:
    """Four GPUs on two NICs have no rail each."""
    two = [port(f"mlx5_{i}", netdev=f"rail{i}", gids=[v2_gid(3, f"10.1.{i}.5")], **ROCE) for i in range(2)]
    links = [interface(f"rail{i}", "host", f"10.1.{i}.5/24") for i in range(2)]
    for gpus, says in ((4, False), (2, True)):
        advice = advise(host(gpus=gpus, rdma=two, interfaces=links))
        (setting,) = [each for each in advice.settings if each.name == "NCCL_CROSS_NIC"]
        assert ("every GPU has its rail" in setting.reason.rule) is says


def _in_subnet(name: str, subnet: int) -> RdmaDevice:
    return port(name, gids=[Gid(index=0, gid=f"fec0:0000:0000:000{subnet}:a088:c203:00aa:0001")])


@each_row(
    "devices",
    [
        [_in_subnet(f"mlx5_{i}", i % 2) for i in range(8)],
        [port(f"mlx5_{i}", layer="InfiniBand" if i < 4 else "Ethernet") for i in range(8)],
        [port("mlx5_0"), port("mlx5_1", layer="Ethernet")],
    ],
)
def test_two_fabrics_of_one_size_are_left_undecided(devices: list[RdmaDevice]) -> None:
    """Which of them is for training nothing on the host tells: half of the ports is not left out on a guess."""
    advice = advise(host(rdma=devices))
    assert "NCCL_IB_HCA" not in values(advice)
    assert note(advice, "NCCL_IB_HCA").startswith("Unknown: these ports are on fabrics of equal size")
    assert not note(advice, "NCCL")


def test_rails_that_are_infiniband_subnets_of_their_own_are_not_crossed() -> None:
    """No packet goes from one subnet manager's ports to another's."""
    assert values(advise(host(rdma=[_in_subnet(f"mlx5_{i}", i) for i in range(8)])))["NCCL_CROSS_NIC"] == "0"


def test_software_rdma_alone_is_not_called_what_nccl_finds_by_itself() -> None:
    """NCCL takes it in place of TCP, and the CPU moves the data."""
    advice = advise(host(rdma=[port("rxe0", kind="rxe", layer="Ethernet", gbit=2.5)]))
    assert "in software" in note(advice, "NCCL_IB_HCA")
    assert not note(advice, "NCCL")


# -- The rest -------------------------------------------------------------------------------------------------------


@each_row(
    ("switches", "says"),
    [
        ({"peermem_loaded": False, "dmabuf_possible": False}, "neither nvidia_peermem nor DMA-BUF"),
        ({"peermem_loaded": True, "iommu_mode": "translated"}, "the IOMMU translates"),
        ({"peermem_loaded": True, "iommu_mode": "translated", "hypervisor": "KVM"}, ""),
        ({"peermem_loaded": False, "dmabuf_possible": True}, ""),
    ],
)
def test_what_keeps_nics_from_gpu_memory_is_said_before_any_log(switches: dict[str, Any], says: str) -> None:
    """ACS and IOMMU count on bare metal alone."""
    advice = advise(host(rdma=IB8, bus=[pci("0000:01:00.0", 0x030200, 0x10DE)], switches=switches))
    said = [each.evidence for each in advice.notes if each.topic == "NCCL_NET_GDR_LEVEL"]
    assert bool(said) is bool(says)
    assert says in " ".join(said)
    proven = advise(host(rdma=IB8, switches=switches), evidence=Evidence(inter_node_transport="IB", gdrdma="on"))
    assert not [each for each in proven.notes if each.topic == "NCCL_NET_GDR_LEVEL"]


def test_acs_on_the_way_is_named() -> None:
    """Source validation redirects peer traffic to the CPU."""
    bridge = pci("0000:00:01.0", 0x060400, 0x8086, acs_source_validation=True)
    advice = advise(host(rdma=IB8, bus=[bridge], switches={"peermem_loaded": True}))
    assert "ACS" in note(advice, "NCCL_NET_GDR_LEVEL")


def test_sharp_is_set_only_where_a_log_shows_it() -> None:
    """The plugin on the disk does not tell whether the fabric runs an aggregation manager."""
    files = ("/opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so",)
    plain = advise(host(rdma=IB8, vendor_files=files))
    assert "NCCL_COLLNET_ENABLE" not in values(plain)
    assert "aggregation manager" in note(plain, "NCCL_COLLNET_ENABLE")
    seen = advise(host(rdma=IB8, vendor_files=files), evidence=Evidence(hcas=("mlx5_0:1/IB/SHARP",)))
    assert values(seen)["NCCL_COLLNET_ENABLE"] == "1"
    roce = advise(host(rdma=[port("mlx5_0", **ROCE)], vendor_files=files))
    assert not note(roce, "NCCL_COLLNET_ENABLE")


def test_rdma_machines_of_the_catalogue_need_locked_memory() -> None:
    """Nobody probed them; their NICs register memory all the same."""
    for name in ("dgx-h100", "gb200-nvl72", "BM.GPU.H100.8", "a3-ultragpu-8g", "p5.48xlarge"):
        needs = {(need.name, need.value) for need in settings([], machines.cluster(name, 2)).needs}
        assert {("memlock", "unlimited"), ("capability", "IPC_LOCK")} <= needs, name
    needs = {need.name for need in settings([], machines.cluster("g5.12xlarge", 2)).needs}
    assert "memlock" not in needs


def test_rack_of_the_catalogue_names_imex() -> None:
    """gb200-nvl72 was never probed and is an NVLink domain of several nodes all the same."""
    said = settings([], machines.cluster("gb200-nvl72", 2))
    assert "ComputeDomain" in note(said, "NCCL_MNNVL_ENABLE")
    assert [need.value for need in said.needs if need.name == "compute_domain"] == ["resource.nvidia.com/v1beta1"]
    for others in (machines.cluster("dgx-b200", 2), machines.cluster("gb200-nvl72", 1)):
        advice = settings([], others, multi_node=len(others.nodes) > 1)
        assert not note(advice, "NCCL_MNNVL_ENABLE")
        assert "compute_domain" not in {need.name for need in advice.needs}


def test_job_on_one_node_gets_no_note_on_several() -> None:
    """Nothing of the network is opened."""
    many = host(rdma=[*IB8, port("mlx5_8", state="DOWN")], interfaces=[ETH0], switches={"peermem_loaded": False})
    topics = {each.topic for each in advise(many, multi_node=False).notes}
    assert not topics & {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_CROSS_NIC", "NCCL_NET", "NCCL_NET_GDR_LEVEL"}
