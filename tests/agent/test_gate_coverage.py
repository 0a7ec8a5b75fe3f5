"""What the PCI bus shows must have been measured: a driver that hangs or crashes is no pass, on any surface."""

import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import resident
from fastapi.testclient import TestClient
from rigs.fleet import fleet_of, record_of, through_the_api
from rigs.recorded import H100, changed, each, facts, of_code, snapshot, with_outcomes
from rigs.tables import each_row, rows_of
from scanned import scan

from agent.checks.measured import PROBE_CODES
from agent.checks.verdict import View, build_view, judge
from agent.cluster.nodes import check_nodes, make_record
from agent.http.server import create
from agent.http.state import State
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
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
BUSES = tomllib.loads(Path(__file__).with_name("buses.toml").read_text(encoding="utf-8"))["buses"]


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
    """Both ends of the rule: what is there and unread is required, what is not there may be absent, hang or fail."""
    view = on_bus(case["name"], gpu=gone, rdma=gone)
    families = {case["measures"]} - {""}
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


def test_sysfs_that_is_not_mounted_is_no_machine_without_a_bus(tmp_path: Path) -> None:
    """A virtual machine without PCI has /sys/bus and no pci in it; a sandbox without /sys has neither."""
    from probes.host.live import LiveHost

    assert isinstance(scan(LiveHost(str(tmp_path))).outcomes["pci"], Failed)
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
