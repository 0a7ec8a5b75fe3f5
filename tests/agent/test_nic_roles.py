"""Healthy NICs of many platforms pass, one real fault of a rail fails; the agent's own pod adds no finding."""

import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import platform_machines
import pytest
from agent_pod import OVERLAYS, PodHost, agent_of, healthy, in_pod
from build import BESIDE_RAILS, MACHINES
from rigs import recorded
from rigs.command import MODULE
from rigs.recorded import H100, NAMES, of_code, path_of, raised, statuses, view
from rigs.tables import each_row, rows_of
from scanned import scan

from agent.checks.expect import check_expectations, read_expectations
from agent.checks.view import build_view
from contracts.finding import Finding
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.host.recording import load
from probes.interfaces.facts import InterfacesFacts, choose_for_nccl
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort

tables = rows_of(__file__)
PLATFORMS, WITHOUT_RDMA, RECORDED = (tables(name)() for name in ("platforms", "without_rdma", "recorded"))
HELD_TRUE = tables("held_true")()


@cache
def snapshot(name: str) -> Snapshot:
    if name in BESIDE_RAILS:
        return platform_machines.snapshot_of(MACHINES[name])
    if name in RECORDED:
        return recorded.snapshot(name)
    return platform_machines.snapshot(name)


def bad(node: Snapshot) -> list[Finding]:
    families = ("rdma", "interfaces", "topology", "pci", "limits", "env")
    return [
        check
        for check in build_view((node,)).checks
        if check.status in ("fail", "warn") and check.code.partition(".")[0] in families and check.code not in HELD_TRUE
    ]


@each_row("name", [*BESIDE_RAILS, *PLATFORMS, *WITHOUT_RDMA, *RECORDED])
def test_a_healthy_node_passes(name: str) -> None:
    assert not [(check.status, check.code, check.subject, check.message) for check in bad(snapshot(name))]


@each_row("name", [*BESIDE_RAILS, *PLATFORMS, *RECORDED])
def test_one_fault_of_one_rail_fails(name: str) -> None:
    """Down, slower, with another MTU, or gone: each is a failure that the healthy node does not have."""
    node = snapshot(name)
    near = build_view((node,)).topologies[0].nearest_nic
    device = near[min(2, len(near) - 1)].nics[0]
    passed = []
    for fault in FAULTS:
        ports = [p for d in recorded.facts(RdmaFacts, node).devices if d.name == device for p in d.ports]
        roce = any(port.link_layer == "Ethernet" for port in ports)
        if (fault == "mtu" and not roce) or (name, fault) == ("spark", "mtu"):  # one of two is no majority
            continue
        found = bad(with_fault(node, device, fault))
        if not any(check.status == "fail" for check in found):
            passed.append((fault, [(check.status, check.code) for check in found]))
    assert not passed


def test_a_missing_hca_is_said_to_be_missing() -> None:
    """Not "put NIC and GPU behind one PCIe switch": seven of eight are there."""
    for name, device, subject in (("lom", "mlx5_3", "GPU3"), ("one-cable", "mlx5_0", "GPU0")):
        checks = [check for check in bad(with_fault(snapshot(name), device, "gone")) if check.status == "fail"]
        assert [(check.code, check.subject) for check in checks] == [("topology.nic.missing", subject)], name
        assert "7 other GPUs" in checks[0].message and "PCIe switch; where" not in checks[0].remedy
    (check,) = [c for c in bad(with_fault(snapshot("oci-h100"), "mlx5_5", "gone")) if c.status == "fail"]
    assert check.code == "topology.rail.uneven" and "an HCA is missing" in check.message


def test_one_hca_for_a_part_of_the_gpus_is_no_rail_of_another() -> None:
    """A server with three cards, two of them next to the only HCA: nothing is missing next to the third."""
    node = recorded.snapshot("l40s-4x-pcie")
    three = node.with_facts(GpuFacts, lambda facts: replace(facts, gpus=facts.gpus[:3], pairs=(), bus=None))
    assert [(check.status, check.code) for check in bad(three)] == [("warn", "topology.gpu_nic.far")]


def test_functions_of_the_host_that_a_pod_cannot_open_are_not_its_own() -> None:
    """Virtual functions of a pod, in addition to the physical ones that sysfs shows: only the first are near a GPU."""
    pod = snapshot("sriov-pod")
    own = recorded.facts(RdmaFacts, pod).devices
    hosts = tuple(replace(
        each, name=f"mlx5_{n}", bus_id=(each.bus_id or "")[:-1] + "0", uverbs=None, uverbs_usable=None, is_vf=False,
        ports=tuple(replace(port, netdev_mtu_bytes=1500) for port in each.ports))
        for n, each in enumerate(own))  # fmt: skip
    both = pod.with_facts(RdmaFacts, lambda facts: replace(facts, devices=(*hosts, *own)))
    assert bad(both) == bad(pod)
    node = build_view((both,)).topologies[0]
    assert node.nearest_nic == build_view((pod,)).topologies[0].nearest_nic
    (expected,) = check_expectations(read_expectations(("hcas=9",), None), (), "n", (both, node))
    assert "8 RDMA devices" in expected.message, "nor do they count"
    two = pod.with_facts(RdmaFacts, lambda facts: replace(facts, devices=(
        *own[:2], *(replace(each, uverbs=None, uverbs_usable=None) for each in own[2:]))))  # fmt: skip
    far = {check.subject for check in bad(two) if check.code in ("topology.gpu_nic.far", "topology.gdr.path")}
    assert far == {f"GPU{n}" for n in range(2, 8)}, "rails that the pod did not get"


def test_what_serves_storage_costs_no_step() -> None:
    """A fault of a port that is no GPU's nearest is a warning, where something needs the port, else a note."""
    for name, device, fault, worst in tables("of_storage")():
        statuses = {check.status for check in bad(with_fault(snapshot(name), device, fault))}
        assert statuses == ({worst} if worst else set()), (name, device, fault)


@pytest.mark.corpus
def test_shared_recordings_of_healthy_nodes_pass(corpus):
    for name in ("lom_real", "dualport_onecable", "oci_h100"):
        assert not bad(scan(load(corpus / "defects" / "machines" / f"{name}.json.gz"))), name


FAULTS = ("down", "slow", "mtu", "gone")


def with_fault(snapshot: Snapshot, name: str, fault: str) -> Snapshot:
    """The node with this fault of the RDMA device `name`."""
    rdma, links, pci = (recorded.facts(kind, snapshot) for kind in (RdmaFacts, InterfacesFacts, PciFacts))
    (device,) = (each for each in rdma.devices if each.name == name)
    netdevs = {port.netdev for port in device.ports}
    changed = {"down": {"running": False, "speed_bytes_per_second": None}, "slow": {}, "mtu": {"mtu_bytes": 1500}}
    if fault == "gone":
        devices = tuple(each for each in rdma.devices if each is not device)
        interfaces = tuple(each for each in links.interfaces if each.name not in netdevs)
        pci = replace(pci, devices=tuple(each for each in pci.devices if each.bus_id != device.bus_id))
    else:
        ports = tuple(_port(port, fault) for port in device.ports)
        devices = tuple(replace(each, ports=ports) if each is device else each for each in rdma.devices)
        interfaces = tuple(
            replace(each, **changed[fault]) if each.name in netdevs else each for each in links.interfaces
        )
    choice = replace(links, interfaces=interfaces, nccl_choice=choose_for_nccl(interfaces))
    return recorded.with_facts(snapshot, rdma=replace(rdma, devices=devices), interfaces=choice, pci=pci)


def _port(port: RdmaPort, fault: str) -> RdmaPort:
    if fault == "down":
        return replace(port, state="DOWN", physical_state="Polling", rate_text="40 Gb/sec (4X QDR)",
                       rate_bytes_per_second=5e9)  # fmt: skip
    if fault == "slow":
        return replace(port, rate_bytes_per_second=(port.rate_bytes_per_second or 0.0) / 2)
    return replace(port, netdev_mtu_bytes=1500, active_mtu_bytes=1024)


@each_row("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_a_healthy_node_stays_silent_in_the_agents_pod(overlay: str) -> None:
    """/dev/shm, CPU, memory, user, capabilities and network of the pod are its own: nothing of them is judged."""
    for name in (H100, "cpu-only-vm"):
        found = in_pod(name, overlay)
        assert not raised(found) and found.verdict.word == view(name).verdict.word, name


@each_row("name", NAMES)
def test_the_pod_adds_no_finding_to_any_node(name: str) -> None:
    """What the machine lacks is found from inside the pod or is unknown there; nothing is found that it does not."""
    assert raised(in_pod(name)) <= raised(view(name))
    assert all(any(word in each for each in healthy()) for word in ("hgx-h100", "p4d", "gb200", "cpu-only"))


def test_shared_memory_is_judged_in_a_jobs_pod_and_unknown_in_the_agents() -> None:
    """The agent's 64 MiB are neither a warning nor a proof; the same pod as a job holds no segment for 8 ranks."""
    for code in ("limits.shm.small", "limits.shm.full", "limits.cpu.quota", "limits.numa_policy.denied"):
        (check,) = of_code(in_pod(H100), code)
        assert check.status == "unknown" and "the agent's own" in check.message
    host = PodHost(path_of(), agent_of("kubernetes"))
    del host.env["TOPOFLIGHT_ROLE"]
    (check,) = of_code(build_view((scan(host),)), "limits.shm.small")
    assert check.status == "fail" and "64 MiB" in check.message and "73.53 MiB" in check.message


@each_row(("memlock", "status"), [(None, "pass"), (8 << 20, "fail"), (65536, "fail")])
def test_what_the_engine_gives_every_pod_is_judged_in_the_agents(memlock: int | None, status: str) -> None:
    """RLIMIT_MEMLOCK comes from the container engine, not from the manifest: a job's pod gets the same."""
    found = build_view((scan(PodHost(path_of(), agent_of("kubernetes"), memlock=memlock)),))
    assert statuses(found, "limits.memlock.low") == {status}


def test_one_verb_at_a_time_runs_in_the_agents_container(tmp_path):
    """A second verb waits until the first has ended; the agent itself does not wait. Each uses 60 of 256 MiB."""
    environment = {**os.environ, "TOPOFLIGHT_ROLE": "agent", "TOPOFLIGHT_STATE": str(tmp_path)}
    command = (sys.executable, *MODULE)
    with (tmp_path / "verb.lock").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert subprocess.run([*command, "serve", "--help"], env=environment, capture_output=True).returncode == 0
        second = subprocess.Popen([*command, "--version"], env=environment, stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1.0)
    assert second.wait(30.0) == 0
