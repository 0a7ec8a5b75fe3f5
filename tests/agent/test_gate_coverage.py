"""What the PCI bus shows must have been measured, and severity follows what a finding costs a job.

A driver that hangs or crashes is no pass, on any surface. From a tenth of a multi-node step on a finding is a failure.
"""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import resident
from fastapi.testclient import TestClient
from rigs import recorded
from rigs.fleet import fleet_of, record_of, through_the_api
from rigs.recorded import H100, NAMES, changed, each, facts, of_code, snapshot, statuses, view, with_outcomes
from rigs.tables import ROOT, data_of, each_row, rows_of
from scanned import scan

from agent.checks.findings import read_entries
from agent.checks.host_checks import ALL_CODES, PROBE_CODES
from agent.checks.verdict import judge
from agent.checks.view import View, build_view, with_environment
from agent.cluster.gate import check_nodes
from agent.cluster.nodes import make_record
from agent.http.server import create
from agent.http.state import State
from contracts.finding import Status, by_loss
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciDevice, PciFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL
from probes.scanner import Scanner

rows = rows_of(__file__)


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """An agent's state over a recorded machine's files and a driver whose start hangs."""
    root, environment = resident.restore(tmp_path)
    for name, value in {**environment, "FAKE_NVML_INJECT": "nvmlInit=hang"}.items():
        monkeypatch.setenv(name, value)
    hurried = tuple(replace(p, timeout_seconds=2.0) if p.name == "gpu" else p for p in ALL)
    with Scanner(root, probes=hurried) as scanner:
        state = State(lambda: (scanner.scan(),), interval_seconds=3600)
        state.refresh()
        yield state


def test_a_driver_that_hangs_is_unknown_on_every_surface(hung: State) -> None:
    """/preflight, /metrics, the page, the published record, the gate over nodes: one verdict."""
    view = hung.view
    assert isinstance(view.snapshots[0].outcomes["gpu"], Failed)
    assert view.verdict.word == "unknown"
    client = TestClient(create(hung))  # without its life: the state was scanned once
    said = client.get("/preflight").json()
    assert (said["verdict"]["word"], said["verdict"]["exit_code"]) == ("unknown", 5)
    assert {c["status"] for c in said["checks"] if c["code"] in GPU_CODES} == {"unknown"}
    text = client.get("/metrics").text
    assert 'topoflight_gate_status{status="unknown"} 1.0' in text
    assert 'topoflight_gate_status{status="pass"} 0.0' in text
    page = client.get("/").text
    assert "required but not measured" in page and "healthy" not in page.split("<main")[0]
    links = {c["status"] for c in said["checks"] if c["code"].startswith("topology.nvlink.")}
    assert links == {"unknown"}

    record = make_record(view, name="node-a")
    assert (record.verdict, record.gpus) == ("unknown", 8)  # the bus counts them
    assert [f["severity"] for f in record.findings if f["code"].startswith("gpu.")] != []
    fleet = fleet_of(through_the_api(replace(record, scanned_at_seconds=time.time())))
    assert judge(check_nodes(["node-a"], fleet)).exit_code == 5
    rows = client.get("/nodes").json()
    assert rows["counts"] == {"unknown": 1}
    assert 'class="unknown"' in client.get("/cluster").text


GPU_CODES = {code for code in PROBE_CODES if code.startswith("gpu.")}


# Who is to be measured, by what the bus shows ----------------------------------------------------------------------


ABSENT = Absent(why="no NVIDIA GPU on the PCI bus, and no driver")
BUSES = data_of(__file__, "buses.toml")["buses"]


def device(row: dict) -> PciDevice:
    """A row of buses.toml."""
    vendor, code = (int(number, 16) for number in row["id"].split(":"))
    more = {key: value for key, value in row.items() if key not in ("class", "id")}
    return PciDevice(class_code=int(row["class"], 16), vendor_id=vendor, device_id=code, **more)


def on_bus(case: str, **outcomes) -> View:
    """A CPU host with these devices put on its bus, of whose probes some ended so."""
    plain = snapshot("cpu-only-vm")
    (bus,) = [row for row in BUSES if row["name"] == case]
    devices = (*facts(PciFacts, plain).devices, *map(device, bus["devices"]))
    return build_view((with_outcomes(changed(plain, PciFacts, devices=devices), **outcomes),))


@each_row("case", BUSES)
@each_row("gone", [Failed(error="no answer after 30.0 s"), ABSENT])
def test_the_bus_says_what_must_be_measured(case: dict, gone) -> None:
    """Both ends of the rule: what is there and unread is required, what is not there may be absent.

    A driver of GPUs that hangs is required on every bus: without a driver the probe is absent.
    """
    view = on_bus(case["name"], gpu=gone, rdma=gone)
    families = {case["measures"], "gpu" if gone != ABSENT else ""} - {""}
    assert {check.code.split(".")[0] for check in view.checks if check.required} == families
    for family in families:
        mine = [c for c in view.checks if c.code.split(".")[0] == family]
        assert all(c.status == "unknown" and c.required for c in mine if not c.code.endswith(".probe.failed"))
        assert all(c.message for c in mine if c.required)
    failing = any(check.status == "fail" for check in view.checks)  # an HCA without its RDMA half fails by itself
    assert view.verdict.exit_code == (3 if failing else 5 if families else 0)


@each_row("probe", ["hostinfo", "limits", "pci", "interfaces"])
def test_a_probe_of_what_every_host_has_must_end(probe: str) -> None:
    """The bus itself included: where it could not be read, that it shows nothing is not known."""
    view = build_view((with_outcomes(snapshot("cpu-only-vm"), **{probe: Failed(error="no answer after 10.0 s")}),))
    assert view.verdict.exit_code == 5
    assert f"{probe}." in view.verdict.why
    (failed,) = of_code(view, f"{probe}.probe.failed")
    assert (failed.status, failed.subject) == ("unknown", probe) and "no answer after 10.0 s" in failed.message


def test_sysfs_that_is_not_mounted_is_no_machine_without_a_bus(tmp_path: Path) -> None:
    """A virtual machine without PCI has /sys/bus and no pci in it; a sandbox without /sys has neither."""
    from probes.host.live import LiveHost

    failed = scan(LiveHost(str(tmp_path))).outcomes["pci"]
    assert isinstance(failed, Failed) and failed.error == f"{tmp_path}/sys: No such file or directory"
    (tmp_path / "sys/bus/virtio/devices").mkdir(parents=True)
    assert isinstance(scan(LiveHost(str(tmp_path))).outcomes["pci"], Absent)


def test_a_gpu_with_an_address_is_on_a_bus_that_a_sandbox_hides() -> None:
    """gVisor passes the GPUs through and shows /sys/bus without pci: ACS, IOMMU and NICs were not seen."""
    hidden = with_outcomes(snapshot(), pci=Absent(why="no PCI bus is visible here"))
    assert build_view((hidden,)).verdict.exit_code == 5
    unplaced = changed(hidden, GpuFacts, gpus=each(facts(GpuFacts).gpus, bus_id=None))
    assert {c.code for c in build_view((unplaced,)).checks if c.required} <= GPU_CODES


@each_row("events", [None, ()])
def test_xids_that_were_not_looked_for_do_not_pass_and_do_not_block(events: tuple[int, ...] | None) -> None:
    """Without the right to read the kernel's log nothing is known of Xids before the first scan: unknown, and no 5."""
    unlogged = each(facts(GpuFacts).gpus, xids=None, xid_events=events)
    view = build_view((changed(snapshot(), GpuFacts, gpus=unlogged),))
    mine = [c for c in view.checks if c.code in ("gpu.xid.hardware", "gpu.xid.driver", "gpu.xid.application")]
    assert len(mine) == 3
    assert all(c.status == "unknown" and not c.required and "kernel log" in c.message for c in mine)
    assert view.verdict.exit_code == 0
    view = build_view((changed(snapshot(), GpuFacts, gpus=(replace(unlogged[0], xid_events=(79,)), *unlogged[1:])),))
    assert {c.code: c.status for c in view.checks if c.code.startswith("gpu.xid.")} == {
        "gpu.xid.hardware": "warn", "gpu.xid.driver": "unknown", "gpu.xid.application": "unknown",
        "gpu.xid.new": "unknown",
    }  # fmt: skip


def test_software_rdma_measures_no_hca() -> None:
    """Soft-RoCE over some interface is not the card on the bus."""
    rdma = facts(RdmaFacts, "l40s-4x-pcie")
    soft = Ok(facts=replace(rdma, devices=each(rdma.devices, kind="rxe")))
    view = on_bus("an InfiniBand HCA", rdma=soft)
    assert view.verdict.exit_code == 5
    assert "the only RDMA devices are software" in view.verdict.why


def test_nvml_that_cannot_be_used_passes_nothing() -> None:
    """Without the driver's library no temperature, link or error counter of a GPU was seen: none of them passes."""
    unread = GpuFacts(driver_version=None, cuda_version=None, gpus=(), driver_error="LIBRARY_NOT_FOUND", pci_gpus=1)
    view = on_bus("a GPU under its driver", gpu=Ok(facts=unread))
    assert {c.status for c in view.checks if c.code in GPU_CODES} == {"unknown"}
    assert view.verdict.exit_code == 5


def test_skip_takes_a_requirement_back_and_require_does_not_lose_it() -> None:
    """Someone who knows that a node's GPUs are not meant says so; another --require does not undo the bus's."""
    from agent.checks.verdict import select

    view = build_view((with_outcomes(snapshot(), gpu=Failed(error="crashed")),))
    assert judge(select(view.checks, require=("limits.*",))).exit_code == 5
    assert judge(select(view.checks, skip=("gpu.*",))).exit_code == 0


def test_a_published_verdict_is_never_better_for_want_of_a_finding() -> None:
    """An agent that says unknown or fail and names no finding: the gate over nodes says the same."""
    for word, code in (("unknown", 5), ("fail", 3), ("pass", 0), ("warn", 0)):
        record = record_of(verdict=word, findings=())
        assert judge(check_nodes([record.name], fleet_of(record))).exit_code == code, word


def test_a_host_without_rdma_devices_has_none_and_an_unread_one_is_unknown() -> None:
    """In the published record: 0 where the probe looked and the bus shows none."""
    bare, missing, failed = snapshot("cpu-only-vm"), Absent(why="no RDMA device"), Failed(error="timeout")
    rows = [(bare, 0), (with_outcomes(bare, rdma=failed), None), (with_outcomes(snapshot(), rdma=missing), None)]
    devices = facts(RdmaFacts).devices  # a pod can open the first one alone
    pod = changed(snapshot(), RdmaFacts, devices=(*devices[:1], *each(devices[1:], uverbs=None)), in_container=True)
    rows += [(snapshot(), len(devices)), (pod, 1)]
    assert [make_record(build_view((found,)), name="a").hcas for found, _ in rows] == [hcas for _, hcas in rows]


def off_the_bus(name: str, gone: int, **pci: object) -> Snapshot:
    """The machine with one GPU less on the bus, and so less for NVML."""
    gpu, tree = facts(GpuFacts, name), facts(PciFacts, name)
    lost = gpu.gpus[gone].bus_id
    gpus = tuple(one for one in gpu.gpus if one.index != gone)
    pairs = tuple(pair for pair in gpu.pairs if gone not in (pair.a, pair.b))
    devices = tuple(device for device in tree.devices if device.bus_id != lost)
    bus = replace(gpu.bus, gpus=tuple(g for g in gpu.bus.gpus if g.bus_id != lost)) if gpu.bus else None
    found = changed(snapshot(name), GpuFacts, gpus=gpus, pairs=pairs, bus=bus, pci_gpus=len(gpus))
    return changed(found, PciFacts, devices=devices, **pci)


def departures(found: Snapshot) -> list[str]:
    return [check.status for check in of_code(build_view((found,)), "topology.reference.mismatch")]


def test_a_board_of_eight_that_shows_seven_gpus_on_the_bus_has_lost_one() -> None:
    """On the host itself; a container or a guest may have been given seven, and a server may be built with seven."""
    assert departures(off_the_bus(H100, 7)) == ["fail"]
    assert departures(off_the_bus(H100, 7, container="kubernetes")) == ["warn"]
    assert departures(off_the_bus(H100, 7, hypervisor="KVM")) == ["warn"]
    seen = changed(snapshot(), GpuFacts, gpus=facts(GpuFacts).gpus[:7], pairs=())
    assert departures(seen) == ["warn"], "the bus shows eight: a GPU that NVML leaves out has its own finding"


@each_row(("container", "agent", "given", "required"), rows("uverbs"))
def test_a_device_node_that_no_job_here_gets_is_required(
    container: str | None, agent: bool, given: int, required: bool
) -> None:
    """A container with some device nodes has those of its job; the agent's container requests none."""
    devices = facts(RdmaFacts).devices
    bare = (*devices[:given], *each(devices[given:], uverbs=None, uverbs_usable=None))
    found = changed(changed(snapshot(), RdmaFacts, devices=bare), PciFacts, container=container)
    found = changed(found, LimitsFacts, of_agent=agent)
    checks = of_code(build_view((found,)), "rdma.uverbs.missing")
    assert {(check.status, check.required) for check in checks} == {("unknown", required)}


README_CASE = "r760xa-2xA40-bf3"


def test_a_loss_of_a_tenth_is_a_failure_and_a_smaller_one_a_warning() -> None:
    """The rule that the severity of all findings about lost bandwidth follows."""
    assert [by_loss(share) for share in (0.0, 0.099, 0.1, 0.5)] == [Status.WARN] * 2 + [Status.FAIL] * 2


def test_what_the_job_sets_is_not_held_against_the_host() -> None:
    """The same host as the recommended job meets it: its interface and its GDR level cost nothing any more."""
    settings = {"NCCL_SOCKET_IFNAME": "net1", "NCCL_NET_GDR_LEVEL": "SYS"}
    seen = build_view((with_environment(snapshot(README_CASE), settings),))
    assert statuses(seen, "interfaces.choice.wrong") == {"pass"}
    assert statuses(seen, "topology.gdr.path") == {"pass"}
    assert statuses(seen, "topology.gpu_nic.far") == {"warn"}, "GPU1 is the ring's way in and out now"


@each_row(("level", "path"), rows_of(__file__)("gdr_levels"))
def test_a_gdr_level_of_the_environment_counts(level: str, path: str) -> None:
    """Polaris by its operator's own advice: NCCL_NET_GDR_LEVEL=PHB, two to three times as fast.

    The machine is built this way, so that its own nodes are healthy without; one like it of no known make fails.
    """
    polaris = with_environment(snapshot("polaris-4xA100-nv4"), {"NCCL_NET_GDR_LEVEL": level} if level else {})
    unknown = changed(polaris, HostinfoFacts, product="Server")
    assert statuses(unknown, "topology.gdr.path") == {path}
    assert statuses(polaris, "topology.gdr.path") == {path.replace("fail", "info")}


def test_a_host_interface_a_little_slower_warns_and_a_slow_one_fails_where_no_rdma_carries_the_data() -> None:
    """By the rates: 100 against 105 is a warning, 25 against 100 a failure; with an ACTIVE HCA neither costs a step."""
    plain = snapshot("cpu-only-vm")
    found = facts(InterfacesFacts, plain)
    eth0 = next(i for i in found.interfaces if i.name == found.nccl_choice)
    for slow, fast, wanted in ((12.5e9, 13.1e9, "warn"), (3.1e9, 12.5e9, "fail")):
        both = (
            replace(eth0, role="host", speed_bytes_per_second=slow),
            replace(eth0, name="eth1", role="host", speed_bytes_per_second=fast),
        )
        for host, status in ((plain, wanted), (snapshot(), "info")):
            seen = recorded.with_facts(host, interfaces=replace(found, interfaces=both))
            assert statuses(seen, "interfaces.choice.wrong") == {status}


@each_row(("ports", "wanted"), [(2, "fail"), (8, "fail"), (10, "fail"), (11, "warn"), (1, "fail")])
def test_a_port_that_is_down_costs_its_share(ports: int, wanted: str) -> None:
    """One of ten is a tenth; the only one of its kind is all that its GPU has near it."""
    rdma = facts(RdmaFacts)
    first = rdma.devices[0]
    down = replace(first, name="mlx5_99", ports=each(first.ports, state="DOWN"))
    others = [replace(first, name=f"mlx5_{n}", bus_id=None) for n in range(ports - 1)]
    another = replace(rdma.devices[4], name="mlx5_88")  # of another model, so that some port is ACTIVE
    found = changed(snapshot(), RdmaFacts, devices=(down, *others, another))
    (check,) = of_code(build_view((found,)), "rdma.port.down")
    assert check.status == wanted


@each_row(("mtu", "wanted"), [(2048, "warn"), (1024, "warn"), (512, "fail"), (256, "fail")])
def test_small_packets_cost_their_headers(mtu: int, wanted: str) -> None:
    """1024 of 4096 bytes costs 6 % of the wire, 512 12 %."""
    assert statuses(recorded.with_ports(snapshot("l40s-4x-pcie"), active_mtu_bytes=mtu), "rdma.mtu.small") == {wanted}


def test_an_iommu_that_translates_fails_where_peers_share_a_switch() -> None:
    """HGX: GPU and NIC behind one switch. On a server without switches the way led through the root complex before."""
    for name, wanted in (("hgx-h100-8xH100-8hca", {"fail"}), ("r760xa-2xA40-bf3", {"warn"})):
        translated = changed(snapshot(name), PciFacts, iommu_mode="translated")
        assert statuses(translated, "pci.iommu.translated") == wanted, name


def test_settings_that_no_environment_was_read_for_change_nothing() -> None:
    """A host whose environment is unknown keeps its checks; the job's settings still count for it."""
    unread = changed(snapshot(README_CASE), HostinfoFacts, nccl_environment=None)
    assert statuses(unread, "topology.gdr.path") == {"fail"}


@each_row(("changes", "code", "wanted"), rows_of(__file__)("slow_gpu"))
def test_what_slows_one_gpu_costs_every_rank(changes, code, wanted):
    """By its clock where that is known, by NVML's factor of two where hardware slows it."""
    first, *others = facts(GpuFacts).gpus
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    slow = changed(snapshot(), GpuFacts, gpus=(replace(first, **changes), *others))
    assert statuses(slow, code) == {wanted}


# The page ----------------------------------------------------------------------------------------------------------


def table() -> dict[str, tuple[str, str]]:
    """Code -> severity and cost, as the decision on severity states them."""
    page = (ROOT / "docs" / "decisions" / "0020-severity-by-cost.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| ([^|]+) \| (.+) \|$", page, flags=re.MULTILINE)
    return {code: (severity.strip(), cost) for code, severity, cost in rows}


def test_every_code_of_the_gate_has_its_cost_and_its_severity_on_the_page() -> None:
    """What it takes of a multi-node step, with a source or a reason; none is left out and none is invented."""
    # settings: docs/reference/nccl-environment.md
    codes = {code for code in ALL_CODES if not code.startswith("env.")}
    wrong = [f"{'add' if code in codes else 'remove'} the row of `{code}`" for code in sorted(codes ^ set(table()))]
    assert not wrong, "docs/decisions/0020-severity-by-cost.md: " + ", ".join(wrong)
    for code, (severity, cost) in table().items():
        assert set(re.findall(r"[a-z]+", severity)) <= {"fail", "warn", "info", "unknown", "or"}, code
        assert len(cost) > 15, code
        begin = f"\n- **Severity:** {severity}. "  # and a sentence with the reason
        assert begin in read_entries()[code], f"docs/reference/findings.md: begin a line of `{code}` with {begin!r}"


@each_row("name", NAMES)
def test_the_page_states_each_severity_that_a_machine_shows(name: str) -> None:
    """On every recorded machine."""
    stated = table()
    judged = [check for check in view(name).checks if check.status in ("fail", "warn", "info") and check.code in stated]
    assert judged or view(name).verdict.word == "pass"
    assert not [check for check in judged if check.status not in stated[check.code][0]]
