"""An environment against the machine it is for."""

from dataclasses import replace

from nccl_env_hosts import host, interface, port, v2_gid
from rigs.recorded import snapshot
from rigs.tables import each_row, rows_of

from contracts.finding import Finding, Status
from planner.lint.environment import lint
from planner.lint.findings import CODES
from planner.lint.machine import machine_of
from planner.lint.script import NamedEnvironment
from planner.lint.values import NameList
from probes.api import Snapshot
from probes.rdma.facts import Gid

rows = rows_of(__file__)

ETH0 = interface("eth0", "pod-default")
NET1 = interface("net1", "secondary", "192.168.2.5/24")
DOCKER0 = interface("docker0", "docker", "172.17.0.1/16")
TWELVE = [port(f"mlx5_{i}") for i in range(12)]


def found(environment: dict[str, str], machine: Snapshot, version: tuple[int, ...] = (2, 27, 7)) -> list[Finding]:
    """All findings; each code is announced."""
    findings = lint(NamedEnvironment(environment=environment), nccl_version=version, machine=machine_of(machine))
    assert {finding.code for finding in findings} <= set(CODES)
    return list(findings)


def codes(environment: dict[str, str], machine: Snapshot) -> list[str]:
    """The codes alone."""
    return [finding.code for finding in found(environment, machine)]


@each_row(("text", "takes", "leaves"), rows("name_lists"))
def test_name_list_matches_as_nccl_does(text: str, takes: list[str], leaves: list[str]) -> None:
    """Prefixes unless '=', all but them with '^'."""
    names = NameList.parse(text)
    assert all(names.takes(name) for name in takes)
    assert not any(names.takes(name) for name in leaves)


def test_name_list_ports() -> None:
    """A port number restricts an entry to that port."""
    names = NameList.parse("=mlx5_0:1,mlx5_1")
    assert names.takes("mlx5_0", 1) and not names.takes("mlx5_0", 2) and names.takes("mlx5_1", 2)


HOSTS = {
    "eth0": host(interfaces=[ETH0]),
    "pod": host(interfaces=[ETH0, NET1, DOCKER0]),
    "net1 down": host(interfaces=[ETH0, interface("net1", "secondary", running=False)]),
    "eth1 and eth10": host(interfaces=[interface("eth1", "host"), interface("eth10", "host")]),
    "no GPU": host(gpus=0, interfaces=[ETH0]),
    "unread": host(rdma=None, interfaces=None),
    "rails": host(rdma=TWELVE),
    "one port down": host(rdma=[port("mlx5_0"), port("mlx5_1", state="DOWN")]),
    "EFA": host(rdma=[port("rdmap0", kind="efa", layer="Unspecified")], interfaces=[ETH0]),
    "no RDMA": host(rdma=[]),
    "one GPU": host(gpus=1),
    "two GPUs": host(gpus=2),
    "two GPUs without NVLink": host(gpus=2, nvlink=False),
}


@each_row(("machine", "environment", "expected"), rows("codes"))
def test_codes_on_a_machine(machine: str, environment: dict[str, str], expected: list[str]) -> None:
    """The code of each finding, and its status where that is said."""
    got = [f"{finding.code} {finding.status}" for finding in found(environment, HOSTS[machine])]
    assert len(got) == len(expected) and all(one.startswith(f"{each}") for one, each in zip(got, expected, strict=True))


@each_row(("machine", "environment", "words"), rows("words"))
def test_words_on_a_machine(machine: str, environment: dict[str, str], words: str) -> None:
    (finding,) = found(environment, HOSTS[machine])
    assert words in finding.message or words in finding.evidence


def test_what_gives_up_pxn_gives_up_nothing_where_no_nvlink_joins_two_gpus() -> None:
    """PXN sends through another GPU, over NVLink; of a machine that nobody probed the cost is told as it may be."""
    (joined,) = found({"NCCL_PXN_DISABLE": "1"}, snapshot("polaris-4xA100-nv4"))
    (apart,) = found({"NCCL_PXN_DISABLE": "1"}, snapshot("l40s-4x-pcie"))
    (unknown,) = lint(NamedEnvironment(environment={"NCCL_PXN_DISABLE": "1"}), nccl_version=(2, 27, 7))
    assert {f.code for f in (joined, apart, unknown)} == {"env.debug.leftover"}
    assert [f.status for f in (joined, apart, unknown)] == [Status.WARN, Status.INFO, Status.WARN]
    assert "no two GPUs of this host are" in apart.message
    assert "gives up NVLink to the GPU next to the NIC" in joined.message == unknown.message


@each_row(("environment", "gpus"), rows("left_out"))
def test_hcas_that_leave_out_the_nics_of_a_gpu(environment: dict[str, str], gpus: str) -> None:
    """One of eight rails leaves an eighth of the bandwidth. Storage HCAs and rails of hidden GPUs may be missing."""
    partial = [each for each in found(environment, snapshot()) if each.code == "env.hca.partial"]
    assert [each.status for each in partial] == [Status.WARN] * bool(gpus)
    assert all(f"nearest to {gpus}." in each.message for each in partial)


def test_gid_index_against_the_table() -> None:
    """Empty entries fail, and so do RoCE v1 and link-local ones, which do not route, where another one does."""
    v1 = Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001", type="IB/RoCE v1")
    local = replace(v1, index=1, type="RoCE v2")
    machine = host(rdma=[port("mlx5_0", layer="Ethernet", gids=[v1, local, v2_gid(3)])])
    bare = host(rdma=[port("mlx5_0", layer="Ethernet", gids=[v1, local])])
    assert "env.gid.absent" not in codes({"NCCL_IB_GID_INDEX": "3"}, machine)
    by_index = {
        index: next(f for f in found({"NCCL_IB_GID_INDEX": index}, machine) if f.code == "env.gid.absent")
        for index in ("0", "1", "7")
    }
    assert {each.status for each in by_index.values()} == {Status.FAIL}
    assert "link-local" in by_index["1"].message and "RoCE v1" in by_index["0"].message
    assert [f.status for f in found({"NCCL_IB_GID_INDEX": "1"}, bare) if f.code == "env.gid.absent"] == [Status.WARN]


@each_row(("environment", "facts", "reported"), rows("classes"))
def test_a_class_that_flow_control_does_not_protect(environment, facts, reported):
    """Only where the ports say what they protect, and neither way of marking lands there."""
    machine = host(rdma=[port("mlx5_0", layer="Ethernet", gids=[v2_gid(3)], **facts)])
    hits = [finding for finding in found(environment, machine) if finding.code == "env.class.unprotected"]
    assert [finding.status for finding in hits] == [Status.WARN] * reported
    if hits:
        assert any("mlx5_0" in line and "PFC on" in line for line in hits[0].evidence)


def test_slingshot_is_rdma_that_only_libfabric_reaches() -> None:
    """Sockets forced, or another provider of libfabric, leave its NICs unused; no verbs device is missed there."""
    nics = [interface(f"hsn{i}", "host", f"10.253.0.{i + 1}/16", driver="cxi_core") for i in range(4)]
    machine = host(interfaces=[interface("nmn0", "host", "10.100.0.5/22"), *nics])
    for name, value in (("NCCL_NET", "Socket"), ("FI_PROVIDER", "tcp")):
        (each,) = found({name: value}, machine)
        assert (each.code, each.status) == ("env.rdma.tcp", Status.FAIL) and "4 Slingshot NICs" in each.evidence
    assert codes({"NCCL_IB_HCA": "mlx5_0"}, machine) == ["env.hca.efa"]
    assert codes({"NCCL_NET": "IB"}, machine) == ["env.net.absent"]
    assert codes({"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "cxi"}, machine) == []
