"""Each rule of the NCCL environment on the smallest host that decides it."""

from __future__ import annotations

from typing import Any

from nccl_env_hosts import cluster, host, interface, port, v2_gid
from rigs.tables import each_row

from collectives.nccl_log.transport import Evidence
from planner.forecast import machines
from planner.nccl_env.environment import EnvAdvice, settings
from planner.nccl_env.names import names
from probes.api import Failed, Snapshot
from probes.rdma.facts import Gid


def advise(*snapshots: Snapshot, nearest: tuple[str, ...] = (), virtual: str | None = None, **more: Any) -> EnvAdvice:
    """Advice for the hosts."""
    return settings(snapshots, cluster(*snapshots, nearest=nearest, virtual=virtual), **more)


def values(advice: EnvAdvice) -> dict[str, str]:
    """The settings by name."""
    return {setting.name: setting.value for setting in advice.settings}


def note(advice: EnvAdvice, topic: str) -> str:
    """All that the notes say of one topic."""
    return " ".join(note.text for note in advice.notes if note.topic == topic)


ETH0 = interface("eth0", "pod-default")
NET1 = interface("net1", "secondary", "192.168.2.5/24", rdma_device="mlx5_1", multus_network="default/rdma-net")
ROCE = {"layer": "Ethernet", "gbit": 200}
IB8 = tuple(port(f"mlx5_{i}") for i in range(8))


def test_pod_with_secondary_network_gets_the_interface_and_its_hca_by_name() -> None:
    """The pod of the two-node RoCE cluster: net1 and mlx5_1, and the needs that go with them."""
    pod = host(gpus=2, rdma=[port("mlx5_0", **ROCE), port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1])
    advice = advise(pod)
    assert values(advice)["NCCL_SOCKET_IFNAME"] == "net1"
    assert values(advice)["NCCL_IB_HCA"] == "mlx5_1"
    needs = {(need.name, need.value) for need in advice.needs}
    assert {("network", "default/rdma-net"), ("capability", "IPC_LOCK"), ("memlock", "unlimited")} <= needs


def test_hca_behind_a_macvlan_is_found_by_its_gid() -> None:
    """Inside a pod the parent of net1 is out of sight: the GID that holds its address tells the device."""
    net1 = interface("net1", "secondary", "192.168.2.5/24")
    devices = [port("mlx5_0", **ROCE), port("mlx5_1", gids=[v2_gid(3, "192.168.2.5")], **ROCE)]
    assert values(advise(host(rdma=devices, interfaces=[ETH0, net1])))["NCCL_IB_HCA"] == "mlx5_1"


def test_all_hcas_of_the_fabric_means_set_nothing() -> None:
    """Eight equal InfiniBand ports: no NCCL variable at all."""
    advice = advise(host(rdma=IB8, interfaces=[interface("eno1", "host")]))
    assert not [name for name in values(advice) if name.startswith("NCCL_")]
    assert note(advice, "NCCL_IB_HCA").startswith("Set nothing")


def test_storage_ports_far_from_every_gpu_need_no_setting() -> None:
    """NCCL's search ends at the nearest HCA of each GPU; the note tells how to pin them all the same."""
    storage = [port("mlx5_8", gbit=200, model="ConnectX-6"), port("mlx5_9", gbit=200, model="ConnectX-6")]
    near = tuple(device.name for device in IB8)
    advice = advise(host(rdma=[*IB8, *storage], interfaces=[interface("eno1", "host")]), nearest=near)
    assert "NCCL_IB_HCA" not in values(advice)
    assert f"NCCL_IB_HCA={','.join(near)}." in note(advice, "NCCL_IB_HCA")


def test_prefix_that_would_catch_another_device_is_made_exact() -> None:
    """mlx5_1 as a prefix also matches mlx5_10."""
    devices = [port("mlx5_1"), port("mlx5_10", layer="Ethernet", gbit=100), port("mlx5_11", layer="Ethernet", gbit=100)]
    assert values(advise(host(rdma=devices)))["NCCL_IB_HCA"] == "=mlx5_1"
    both = [port("mlx5_1"), port("mlx5_10"), port("mlx5_4", layer="Ethernet", gbit=100)]
    assert values(advise(host(rdma=both)))["NCCL_IB_HCA"] == "mlx5_1,mlx5_10"


def test_mixed_link_layers_keep_the_faster_fabric() -> None:
    """InfiniBand and Ethernet ports cannot talk to each other."""
    devices = [*IB8[:2], port("mlx5_bond_0", layer="Ethernet", gbit=100, model="ConnectX-6")]
    advice = advise(host(rdma=devices))
    assert values(advice)["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    (setting,) = [each for each in advice.settings if each.name == "NCCL_IB_HCA"]
    assert "mlx5_bond_0:1: Ethernet" in setting.reason.evidence


def test_slower_port_of_another_model_is_left_out_and_a_trained_down_one_is_not() -> None:
    """A slower ConnectX-4 is management; a slower ConnectX-7 among ConnectX-7 is a fault to mend."""
    management = [port("mlx5_0"), port("mlx5_1"), port("mlx5_2", gbit=25, model="ConnectX-4")]
    assert values(advise(host(rdma=management)))["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    trained_down = [port("mlx5_0"), port("mlx5_1"), port("mlx5_2", gbit=200)]
    assert "NCCL_IB_HCA" not in values(advise(host(rdma=trained_down)))


def test_port_that_is_down_is_named_for_its_return_and_noted() -> None:
    """NCCL passes over a port that is down in silence; the list must not hide it once it is mended."""
    devices = [port("mlx5_0"), port("mlx5_1", state="DOWN"), port("mlx5_2", layer="Ethernet", gbit=25)]
    advice = advise(host(rdma=devices))
    assert values(advice)["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"
    assert "mlx5_1:1 DOWN" in " ".join(each.evidence for each in advice.notes)


def test_efa_gets_no_hca_and_the_plugin_is_named_only_between_nodes() -> None:
    """EFA is the plugin's business; naming it makes a missing plugin an error instead of TCP."""
    efa = [port(f"rdmap{i}", kind="efa", layer="Unspecified") for i in range(4)]
    one = host(rdma=efa, interfaces=[interface("ens5", "host")])
    advice = advise(one)
    assert not [name for name in values(advice) if name.startswith("NCCL_")]
    assert ("resource", "vpc.amazonaws.com/efa: 4") in {(need.name, need.value) for need in advice.needs}
    assert values(advise(one, multi_node=True))["NCCL_NET"] == "AWS Libfabric"
    part = advise(one, ranks_per_node=3)  # of eight GPUs: the others' pods want their devices too
    assert "vpc.amazonaws.com/efa: 2" in {need.value for need in part.needs}
    assert values(advise(one, evidence=Evidence(inter_node_transport="Socket")))["NCCL_NET"] == "AWS Libfabric"
    assert "NCCL_NET" not in values(advise(one, multi_node=False))


@each_row(
    ("version", "expected"),
    [((2, 20, 5), "3"), ((2, 18), "3"), ((2, 21, 5), None), (None, None)],
)
def test_gid_index_is_set_only_before_2_21(version: tuple[int, ...] | None, expected: str | None) -> None:
    """Later NCCL finds the RoCE v2 GID itself."""
    v1 = Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="IB/RoCE v1")
    roce = host(rdma=[port("mlx5_0", gids=[v1, v2_gid(3)], **ROCE)])
    assert values(advise(roce, nccl_version=version)).get("NCCL_IB_GID_INDEX") == expected


def test_gid_index_that_differs_between_hosts_is_not_set() -> None:
    """One index for all ports must be right on every port."""
    hosts = [host(name, rdma=[port("mlx5_0", gids=[v2_gid(index)], **ROCE)]) for name, index in (("a", 3), ("b", 5))]
    advice = advise(*hosts, nccl_version=(2, 20, 5))
    assert "NCCL_IB_GID_INDEX" not in values(advice)
    assert "per node" in note(advice, "NCCL_IB_GID_INDEX")


def test_ipv6_only_fabric_gets_the_address_family() -> None:
    """NCCL looks for an IPv4 GID unless told otherwise."""
    v6 = Gid(index=3, gid="fd00:0000:0000:0000:0000:0000:0000:0001", type="RoCE v2")
    roce = host(rdma=[port("mlx5_0", gids=[v6], **ROCE)])
    assert values(advise(roce, nccl_version=(2, 27, 7)))["NCCL_IB_ADDR_FAMILY"] == "AF_INET6"


@each_row(
    ("facts", "expected"),
    [
        ({"traffic_class": 106}, "106"),
        ({"pfc_priorities": (3,)}, "106"),
        ({"pfc_priorities": (5,)}, None),
        ({"pfc_priorities": (3, 4)}, None),
        ({"pfc_priorities": ()}, None),
        ({}, None),
    ],
)
def test_traffic_class_follows_the_lossless_priority(facts: dict[str, Any], expected: str | None) -> None:
    """DSCP 26 (class field 106) for priority 3, as NVIDIA's RoCE configuration has it; no other has a default."""
    roce = host(rdma=[port("mlx5_0", **ROCE, **facts)])
    assert values(advise(roce)).get("NCCL_IB_TC") == expected


def test_a_class_without_protection_is_named_as_one() -> None:
    """The ports' own class is taken, with what does not fit it."""
    one = next(s for s in advise(host(rdma=[port("mlx5_0", **ROCE, traffic_class=106, pfc_priorities=(5,))])).settings
               if s.name == "NCCL_IB_TC")  # fmt: skip
    assert one.value == "106"
    assert "priority 3, and flow control protects 5" in one.reason.rule
    assert "mlx5_0:1 flow control on priority 5" in one.reason.evidence


def test_ports_that_protect_different_priorities_get_no_class() -> None:
    """Also where one of them protects none; one that does not tell decides nothing."""
    for other, expected in (((), None), ((5,), None), (None, "106"), ((3,), "106")):
        ports = [port(f"mlx5_{n}", netdev=f"rail{n}", **ROCE, pfc_priorities=p) for n, p in enumerate(((3,), other))]
        advice = advise(host(rdma=ports))
        assert values(advice).get("NCCL_IB_TC") == expected, other
        if expected is None:
            assert "agree on one" in note(advice, "NCCL_IB_TC")


def test_rails_in_subnets_of_their_own_are_not_crossed() -> None:
    """Crossing rails would need routing between the subnets."""
    apart = [port(f"mlx5_{i}", netdev=f"rail{i}", **ROCE) for i in range(2)]
    rails = [interface(f"rail{i}", "host", f"10.1.{i}.1/24") for i in range(2)]
    assert values(advise(host(rdma=apart, interfaces=rails)))["NCCL_CROSS_NIC"] == "0"
    same = [interface(f"rail{i}", "host", f"10.1.0.{i + 1}/24") for i in range(2)]
    assert "NCCL_CROSS_NIC" not in values(advise(host(rdma=apart, interfaces=same)))


def test_docker_bridge_is_never_left_as_the_choice() -> None:
    """Other nodes cannot reach a bridge of this host."""
    taken = [interface("br-1a2b", "bridge", "172.18.0.1/16"), interface("ens3", "host")]
    assert values(advise(host(interfaces=taken)))["NCCL_SOCKET_IFNAME"] == "ens3"


def test_tcp_only_host_names_its_fastest_interface() -> None:
    """Without RDMA NCCL spreads data over all interfaces; with RDMA the bootstrap alone needs no setting."""
    slow = interface("eno1", "host", "10.0.0.1/24", speed_bytes_per_second=1 * GBIT_)
    fast = interface("ens3", "host", "10.1.0.1/24", speed_bytes_per_second=100 * GBIT_)
    assert values(advise(host(interfaces=[slow, fast])))["NCCL_SOCKET_IFNAME"] == "ens3"
    assert "NCCL_SOCKET_IFNAME" not in values(advise(host(rdma=IB8, interfaces=[slow, fast])))
    assert "NCCL_SOCKET_IFNAME" not in values(advise(host(interfaces=[fast])))


GBIT_ = 1e9 / 8


def test_interface_prefix_is_made_exact() -> None:
    """net1 as a prefix also matches net10."""
    more = interface("net10", "secondary", "192.168.3.5/24", speed_bytes_per_second=None)
    pod = host(rdma=[port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1, more])
    assert values(advise(pod))["NCCL_SOCKET_IFNAME"] == "=net1"


def test_other_interface_names_on_other_nodes_make_one_list_or_a_note() -> None:
    """A list for all nodes is right only where no node has the other's name for something else."""
    pods = [
        host(name, interfaces=[ETH0, interface(net, "secondary", "192.168.2.5/24")])
        for name, net in (("a", "net1"), ("b", "rail0"))
    ]
    assert values(advise(*pods))["NCCL_SOCKET_IFNAME"] == "net1,rail0"
    clash = [
        host("a", interfaces=[ETH0, interface("net1", "secondary", "192.168.2.5/24")]),
        host("b", interfaces=[ETH0, interface("net1", "docker"), interface("net2", "secondary", "192.168.2.6/24")]),
    ]
    assert "NCCL_SOCKET_IFNAME" not in values(advise(*clash))
    assert "per node" in note(advise(*clash), "NCCL_SOCKET_IFNAME")


def test_job_on_one_node_gets_no_network_setting() -> None:
    """Nothing of the network is opened; the pod's memory need stays."""
    pod = host(gpus=2, rdma=[port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1])
    advice = advise(pod, multi_node=False)
    assert not [name for name in values(advice) if name.startswith("NCCL_")]
    assert {need.name for need in advice.needs} == {"shm_bytes", "resource"}


def test_host_without_gpus_gets_gloo() -> None:
    """gloo takes the address of the host name otherwise; NCCL is not mentioned."""
    cpu = host(gpus=0, rdma=None, interfaces=[interface("lo", "loopback", "127.0.0.1/8"), interface("eth0", "host")])
    advice = advise(cpu)
    assert advice.backend == "gloo"
    assert values(advice) == {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "32"}
    assert not [each for each in advice.notes if each.topic.startswith("NCCL")]
    alone = host(gpus=0, rdma=None, interfaces=[interface("lo", "loopback", "127.0.0.1/8")])
    assert "GLOO_SOCKET_IFNAME" not in values(advise(alone))


def test_vm_without_a_pcie_tree_gets_the_providers_topology_file_that_is_there() -> None:
    """Only the file of this series, only where it is on the disk, and not where nccl.conf names one."""
    flat = "every device sits on its own root"
    there = {"topology_files": ("/opt/microsoft/ndv2-topo.xml", "/opt/microsoft/ndv4-topo.xml")}
    azure = {"rdma": IB8, "vendor": "Microsoft Corporation"}
    vm = host(gpu_name="NVIDIA A100-SXM4-40GB", switches=there, **azure)
    assert values(advise(vm, virtual=flat))["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv4-topo.xml"
    named = host(gpu_name="A100", nccl_conf={"NCCL_TOPO_FILE": "/x.xml"}, switches=there, **azure)
    assert "NCCL_TOPO_FILE" not in values(advise(named, virtual=flat))
    for other in (
        host(gpu_name="NVIDIA A100-SXM4-40GB", **azure),  # a pod that the file is not mounted in
        host(gpu_name="NVIDIA H100 80GB HBM3", switches=there, **azure),  # of another series
        host(gpu_name="NVIDIA H100 NVL", gpus=2, switches=there, **azure),
        host(rdma=IB8, vendor="QEMU"),
    ):
        advice = advise(other, virtual=flat)
        assert "NCCL_TOPO_FILE" not in values(advice)
        assert "hides its PCIe tree" in note(advice, "NCCL_TOPO_FILE")
        assert "silent at NCCL_DEBUG=WARN" in note(advice, "NCCL_TOPO_FILE")
    part = host(gpus=4, gpu_name="NVIDIA A100-SXM4-40GB", switches=there, **azure)  # half of the board in a pod
    assert values(advise(part, virtual=flat))["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv4-topo.xml"


@each_row(("gpus", "says"), [(1, "one GPU"), (4, "limits direct access")])
def test_p2p_level_of_the_machine_is_explained_never_advised(gpus: int, says: str) -> None:
    """NCCL_P2P_LEVEL=NVL in an EFA pod: what it does there."""
    pod = host(gpus=gpus, nccl_environment={"NCCL_P2P_LEVEL": "NVL"})
    advice = advise(pod)
    assert says in note(advice, "NCCL_P2P_LEVEL")
    assert "NCCL_P2P_LEVEL" not in values(advice)


def test_unread_interfaces_and_ports_are_unknown_not_fine() -> None:
    """A probe that did not answer leads to no setting and says so."""
    advice = advise(host(rdma=None, interfaces=None))
    assert note(advice, "NCCL_SOCKET_IFNAME").startswith("Unknown")


def test_only_system_configuration_names_are_advised() -> None:
    """Over every host of this file: no variable of NCCL's Debugging section."""
    v1 = Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="IB/RoCE v1")
    everything = host(
        rdma=[port(f"mlx5_{i}", gids=[v1], netdev=f"rail{i}", traffic_class=106, **ROCE) for i in range(2)]
        + [port("rdmap0", kind="efa")],
        interfaces=[ETH0, *(interface(f"rail{i}", "secondary", f"10.1.{i}.1/24") for i in range(2))],
    )
    advised: set[str] = set()
    for version in ((2, 18, 3), (2, 27, 7)):
        advised |= set(values(advise(everything, multi_node=True, nccl_version=version)))
    nccl = {name for name in advised if name.startswith("NCCL_")}
    assert len(nccl) >= 5
    assert {names()[name].doc_class for name in nccl} == {"system"}


def test_every_setting_has_its_reason() -> None:
    """Rule, evidence and source are never empty."""
    pod = host(gpus=2, rdma=[port("mlx5_0", **ROCE), port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1])
    advice = advise(pod)
    for each in (*advice.settings, *advice.needs):
        assert each.reason.rule and each.reason.evidence and each.reason.source, each


def test_link_local_interface_is_no_choice() -> None:
    """The network card of the server's management controller comes first and leads nowhere."""
    bmc = interface("enx0a", "host", "169.254.3.1/24")
    machine = host(rdma=IB8, interfaces=[bmc, interface("eno1", "host")])
    assert values(advise(machine))["NCCL_SOCKET_IFNAME"] == "eno1"


def test_nodes_whose_own_choices_do_not_meet_get_the_subnet_they_share() -> None:
    """NCCL on each node takes its first interface; only the second one joins the nodes."""
    nodes = [
        host(name, rdma=IB8, interfaces=[interface("usb0", "host", own), interface("eno1", "host", shared)])
        for name, own, shared in (("a", "10.9.1.1/24", "10.0.0.1/24"), ("b", "10.9.2.1/24", "10.0.0.2/24"))
    ]
    assert values(advise(*nodes))["NCCL_SOCKET_IFNAME"] == "eno1"


def test_software_rdma_beside_a_real_hca_is_left_out() -> None:
    """Soft-RoCE runs on the CPU; alone it is what there is."""
    rxe = port("rxe0", kind="rxe", layer="Ethernet", gbit=2.5)
    real = port("mlx5_0", **ROCE)
    assert values(advise(host(rdma=[real, rxe])))["NCCL_IB_HCA"] == "mlx5_0"
    assert "NCCL_IB_HCA" not in values(advise(host(rdma=[rxe])))


def test_run_that_fell_back_to_tcp_gets_the_network_named() -> None:
    """A second run then fails with the cause instead of being slow."""
    machine = host(rdma=IB8)
    tcp = advise(machine, evidence=Evidence(inter_node_transport="Socket"))
    assert values(tcp)["NCCL_NET"] == "IB"
    assert "NCCL_NET" not in values(advise(machine, evidence=Evidence(inter_node_transport="IB")))
    off = advise(machine, evidence=Evidence(inter_node_transport="IB", gdrdma="off"))
    assert "nvidia_peermem" in note(off, "NCCL_NET_GDR_LEVEL")


def test_version_of_the_log_is_used() -> None:
    """The evidence of an earlier run says which NCCL is in use."""
    roce = host(rdma=[port("mlx5_0", gids=[v2_gid(3)], **ROCE)])
    assert values(advise(roce, evidence=Evidence(nccl_version="2.20.5+cuda12.4")))["NCCL_IB_GID_INDEX"] == "3"


def test_one_host_planned_several_times_over() -> None:
    """What-if: the same snapshot under made-up names counts as several nodes."""
    pod = host("a", rdma=[port("rdmap0", kind="efa")], interfaces=[interface("ens5", "host")])
    what_if = cluster(host("a-0"), host("a-1"))
    assert {each.name: each.value for each in settings([pod], what_if).settings}["NCCL_NET"] == "AWS Libfabric"


def test_infiniband_beside_a_secondary_network() -> None:
    """A RoCE network of the pod decides for RoCE; an IPoIB network says nothing about the other HCAs."""
    roce_and_ib = host(rdma=[port("mlx5_0"), port("mlx5_1", **ROCE)], interfaces=[ETH0, NET1])
    assert values(advise(roce_and_ib))["NCCL_IB_HCA"] == "mlx5_1"
    ipoib = interface("net1", "secondary", "192.168.2.5/24", rdma_device="mlx5_0")
    assert "NCCL_IB_HCA" not in values(advise(host(rdma=IB8, interfaces=[ETH0, ipoib])))


def test_probe_that_failed_is_unknown_not_absent() -> None:
    """A hung driver does not make a GPU host a CPU host, nor a broken sysfs a host without RDMA."""
    broken = host(rdma=None)
    broken.outcomes.update(gpu=Failed(error="no answer for 10 s"), rdma=Failed(error="no answer for 10 s"))
    advice = advise(broken)
    assert advice.backend == "nccl"
    assert not advice.settings
    assert note(advice, "GPU").startswith("Unknown")
    assert note(advice, "NCCL_IB_HCA").startswith("Unknown")


def test_cores_of_a_container_are_its_quota() -> None:
    """A pod with 4 of 64 CPUs shares 4 among its ranks."""
    pod = host(gpus=0, rdma=None, interfaces=[interface("eth0", "pod-default")], cgroup_cpus=4.0)
    assert values(advise(pod))["OMP_NUM_THREADS"] == "2"


@each_row(
    ("gpus", "quota", "ranks", "threads"),
    [(0, None, 1, "64"), (0, 2.0, 1, "2"), (0, 1.0, 1, "1"), (0, None, 4, "16"), (1, 8.0, 1, "8"), (1, None, 1, None),
     (8, 8.0, 8, None), (8, 8.0, 1, "8")],
)  # fmt: skip
def test_a_rank_alone_on_its_node_is_told_its_threads(
    gpus: int, quota: float | None, ranks: int, threads: str | None
) -> None:
    """torchrun sets OMP_NUM_THREADS for several ranks of a node only: alone, one takes every core that it sees."""
    found = host(gpus=gpus, cgroup_cpus=quota, interfaces=None)
    advice = settings((found,), cluster(found), ranks_per_node=ranks)
    assert {s.name: s.value for s in advice.settings}.get("OMP_NUM_THREADS") == threads
    said = " ".join(note.text for note in advice.notes if note.topic == "OMP_NUM_THREADS")
    assert ranks > 1 or "torchrun gives each rank 1 thread" not in said


def test_the_environment_is_of_the_network_that_the_forecast_is_of() -> None:
    """TCP on machines with RDMA keeps NCCL on sockets; RDMA on machines without a known device is no TCP."""
    for name in ("p5.48xlarge", "dgx-h100"):
        own = settings((), machines.cluster(name, 2), multi_node=True)
        tcp = settings((), machines.over_network(machines.cluster(name, 2), "10G", "tcp"), multi_node=True)
        assert {s.name: s.value for s in tcp.settings}["NCCL_NET"] == "Socket"
        assert not [need for need in tcp.needs if "efa" in need.value or need.name in ("memlock", "capability")]
        assert [need for need in own.needs if need.name == "memlock"]
    found = settings((), machines.over_network(machines.cluster("p3.16xlarge", 2), "100G", "rdma"), multi_node=True)
    assert "NCCL_NET" not in {s.name for s in found.settings}
    assert next(note for note in found.notes if note.topic == "NCCL_NET").text.startswith("Unknown")
