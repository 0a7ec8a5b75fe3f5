"""What the PCI bus shows must have been measured: a driver that hangs or crashes is no pass, on any surface."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from rigs.recorded import H100, of_code, snapshot, with_facts, with_outcomes
from rigs.tables import each_row

from agent.checks.codes import PROBE_CODES
from agent.checks.verdict import judge
from agent.checks.view import View, look
from agent.cluster.gate import checks_of
from agent.cluster.nodes import Fleet
from agent.cluster.publish import node_feature
from agent.cluster.records import records_of, to_resource
from agent.http.server import create
from agent.http.state import State
from contracts.finding import Finding
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.pci.facts import PciDevice, PciFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL
from probes.scan import scan
from probes.scanner import Scanner

TESTS = Path(__file__).parent.parent

import nvml_profile  # noqa: E402 - found through the line above


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake libnvidia-ml.so.1."""
    return nvml_profile.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A recorded machine's files below a root, its GPUs through the fake driver, with failures on demand."""

    def make(inject: str = "", name: str = H100) -> Path:
        answers = json.loads((TESTS / "machines" / f"{name}.json").read_text(encoding="utf-8"))["answers"]
        (tmp_path / "profile").write_text(nvml_profile.profile(answers["nvml"]), encoding="utf-8")
        nvml_profile.restore_files(answers, tmp_path / "root")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
        monkeypatch.setenv("FAKE_NVML_PROFILE", str(tmp_path / "profile"))
        monkeypatch.setenv("FAKE_NVML_INJECT", inject)
        return tmp_path / "root"

    return make


def preflight(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "agent.cli", "preflight", f"--root={root}", *options]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=300, env={**os.environ})


@pytest.mark.long
@pytest.mark.parametrize("inject", ["nvmlInit=crash", "nvmlDeviceGetCount=garbage"])
def test_preflight_of_a_driver_that_crashes_is_unknown_and_exits_5(inject: str, machine: Callable[..., Path]) -> None:
    """Without any option: the bus shows eight GPUs of which nothing could be read."""
    done = preflight(machine(inject))
    assert done.returncode == 5, done.stdout + done.stderr
    assert re.search(
        r"\? unknown \S+: required but not measured: gpu\.\* \(8 GPUs \(0000:1b:00\.0", " ".join(done.stdout.split())
    )


@pytest.mark.long
def test_preflight_of_the_same_machine_with_a_driver_that_answers_is_measured(machine: Callable[..., Path]) -> None:
    """The control: what differs is the driver alone, and unknown of gpu.* stay those of two scans and of the log."""
    done = preflight(machine(), "-o", "json")
    checks = json.loads(done.stdout)["checks"]
    unknown = {c["code"] for c in checks if c["status"] == "unknown" and c["code"].startswith("gpu.")}
    logged = {"gpu.xid.hardware", "gpu.xid.driver", "gpu.xid.application"}  # where this user may not read the log
    assert unknown - logged <= {"gpu.counters.rising", "gpu.xid.new"}
    assert not [c for c in checks if c["required"]]


@pytest.fixture
def hung(machine: Callable[..., Path]) -> Iterator[State]:
    """An agent's state over a driver whose start hangs."""
    hurried = tuple(replace(p, timeout_seconds=2.0) if p.name == "gpu" else p for p in ALL)
    with Scanner(str(machine("nvmlInit=hang")), probes=hurried) as scanner:
        state = State(lambda: (scanner.scan(),), interval_seconds=3600)
        state.refresh()
        yield state


def test_a_driver_that_hangs_is_unknown_on_every_surface(hung: State) -> None:
    """/preflight, /metrics, the page, the published record, NFD's label, the gate over nodes: one verdict."""
    view = hung.view
    assert view is not None
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

    (record,) = records_of(view, name="node-a")
    assert (record.verdict, record.gpus) == ("unknown", 8)  # the bus counts them
    assert [f["severity"] for f in record.findings if f["code"].startswith("gpu.")] != []
    assert node_feature(record, "ns")["spec"]["labels"]["topoflight.io/ready"] == "false"
    fleet = Fleet()
    fleet.replace([to_resource(replace(record, scanned_at_seconds=time.time()))[1]])
    assert judge(checks_of(["node-a"], fleet)).exit_code == 5
    rows = client.get("/nodes").json()
    assert rows["counts"] == {"unknown": 1}
    assert 'class="unknown"' in client.get("/cluster").text


GPU_CODES = {code for code in PROBE_CODES if code.startswith("gpu.")}


# Who is to be measured, by what the bus shows ----------------------------------------------------------------------


def device(address: str, vendor: int = 0x10DE, code: int = 0x030200, **more: Any) -> PciDevice:
    return PciDevice(bus_id=address, class_code=code, vendor_id=vendor, device_id=more.pop("device", 0x2330), **more)


def on_bus(*devices: PciDevice, gpu: Any = None, rdma: Any = None) -> View:
    """A CPU host with these devices put on its bus."""
    plain = snapshot("cpu-only-vm")
    pci = plain.facts(PciFacts)
    assert pci is not None
    changed = with_outcomes(plain, pci=Ok(facts=replace(pci, devices=(*pci.devices, *devices))))
    return look((with_outcomes(changed, **{k: v for k, v in (("gpu", gpu), ("rdma", rdma)) if v}),))


HCA = {"vendor": 0x15B3, "code": 0x020700, "device": 0x1021}
ETHERNET = {"vendor": 0x15B3, "code": 0x020000, "device": 0x101D}
ABSENT = Absent(why="no NVIDIA GPU on the PCI bus, and no driver")

BUSES = {
    # what is on the bus -> families that must be measured
    "nothing": ([], set()),
    "a GPU under its driver": ([device("0000:1b:00.0", driver="nvidia")], {"gpu"}),
    "a GPU that drives a screen too": ([device("0000:1b:00.0", code=0x030000, driver="nvidia")], {"gpu"}),
    "a GPU that a virtual machine holds": ([device("0000:1b:00.0", driver="vfio-pci")], set()),
    "Grace Hopper's GPU that a virtual machine holds": ([device("0009:01:00.0", driver="nvgrace-gpu-vfio-pci")], set()),
    "one GPU of two given to a virtual machine": (
        [device("0000:1b:00.0", driver="vfio-pci"), device("0000:43:00.0", driver="nvidia")], {"gpu"}),
    "virtual functions of a GPU": ([device("0000:1b:00.4", driver="nvidia", physical_function="0000:1b:00.0")], set()),
    "a management controller's screen": ([device("0000:02:00.0", vendor=0x1A03, code=0x030000, device=0x2000)], set()),
    "a processor's own graphics": ([device("0000:00:02.0", vendor=0x8086, code=0x030000, device=0x4680)], set()),
    "an AMD Instinct": ([device("0000:41:00.0", vendor=0x1002, code=0x120000, device=0x74A1)], {"gpu"}),
    "an older AMD Instinct": ([device("0000:41:00.0", vendor=0x1002, code=0x038000, device=0x740C)], {"gpu"}),
    "a Radeon on a desk": ([device("0000:41:00.0", vendor=0x1002, code=0x030000, device=0x744C)], set()),
    "another vendor's accelerator": ([device("0000:41:00.0", vendor=0x1DA3, code=0x120000, device=0x1020)], {"gpu"}),
    "an InfiniBand HCA": ([device("0000:18:00.0", driver="mlx5_core", rdma=False, **HCA)], {"rdma"}),
    "an HCA without a driver": ([device("0000:18:00.0", rdma=False, **HCA)], {"rdma"}),
    "an Ethernet ConnectX without a driver": ([device("0000:18:00.0", rdma=False, **ETHERNET)], {"rdma"}),
    "an HCA that a virtual machine holds": ([device("0000:18:00.0", driver="vfio-pci", rdma=False, **HCA)], set()),
    "an HCA's idle virtual function": (
        [device("0000:18:00.3", rdma=False, physical_function="0000:18:00.0", **ETHERNET)], set()),
    "a guest's virtual function that does Ethernet only": (
        [device("0001:00:02.0", vendor=0x15B3, code=0x020000, device=0x101A, driver="mlx5_core", rdma=False)], set()),
    "an EFA": ([device("0000:10:1b.0", vendor=0x1D0F, code=0x020000, device=0xEFA1, rdma=False)], {"rdma"}),
    "an Ethernet card": ([device("0000:6a:00.0", vendor=0x8086, code=0x020000, device=0x159B, rdma=False)], set()),
    "an Ethernet card that does RDMA": (
        [device("0000:6a:00.0", vendor=0x8086, code=0x020000, device=0x159B, driver="ice", rdma=True)], {"rdma"}),
}  # fmt: skip


@each_row("case", BUSES)
@each_row("how", ["absent", "failed"])
def test_the_bus_says_what_must_be_measured(case: str, how: str) -> None:
    """Both ends of the rule: what is there and unread is required, what is not there may be absent, hang or fail."""
    devices, families = BUSES[case]
    gone: Any = Failed(error="no answer after 30.0 s") if how == "failed" else ABSENT
    view = on_bus(*devices, gpu=gone, rdma=gone)
    required = {check.code.split(".")[0] for check in view.checks if check.required}
    assert required == families
    for family in families:
        mine = [c for c in view.checks if c.code.split(".")[0] == family]
        assert all(c.status == "unknown" and c.required for c in mine if not c.code.endswith(".probe.failed"))
        assert all(c.message for c in mine if c.required)
    failing = any(check.status == "fail" for check in view.checks)  # an HCA without its RDMA half fails by itself
    assert view.verdict.exit_code == (3 if failing else 5 if families else 0)


@each_row("probe", ["hostinfo", "limits", "pci", "interfaces"])
def test_a_probe_of_what_every_host_has_must_end(probe: str) -> None:
    """The bus itself included: where it could not be read, that it shows nothing is not known."""
    view = look((with_outcomes(snapshot("cpu-only-vm"), **{probe: Failed(error="no answer after 10.0 s")}),))
    assert view.verdict.exit_code == 5
    assert f"{probe}." in view.verdict.why


def test_sysfs_that_is_not_mounted_is_no_machine_without_a_bus(tmp_path: Path) -> None:
    """A virtual machine without PCI has /sys/bus and no pci in it; a sandbox without /sys has neither."""
    from probes.host.live import LiveHost

    assert isinstance(scan(LiveHost(str(tmp_path))).outcomes["pci"], Failed)
    (tmp_path / "sys/bus/virtio/devices").mkdir(parents=True)
    assert isinstance(scan(LiveHost(str(tmp_path))).outcomes["pci"], Absent)


@each_row("events", [None, ()])
def test_xids_that_were_not_looked_for_do_not_pass_and_do_not_block(events: tuple[int, ...] | None) -> None:
    """Without the right to read the kernel's log nothing is known of Xids before the first scan: unknown, and no 5."""
    gpu = snapshot().outcomes["gpu"]
    assert isinstance(gpu, Ok)
    unlogged = replace(gpu.facts, gpus=tuple(replace(g, xids=None, xid_events=events) for g in gpu.facts.gpus))
    view = look((with_outcomes(snapshot(), gpu=replace(gpu, facts=unlogged)),))
    mine = [c for c in view.checks if c.code in ("gpu.xid.hardware", "gpu.xid.driver", "gpu.xid.application")]
    assert len(mine) == 3
    assert all(c.status == "unknown" and not c.required and "kernel's log" in c.message for c in mine)
    assert view.verdict.exit_code == 0
    told = replace(unlogged, gpus=(replace(unlogged.gpus[0], xid_events=(79,)), *unlogged.gpus[1:]))
    view = look((with_outcomes(snapshot(), gpu=replace(gpu, facts=told)),))
    assert {c.code: c.status for c in view.checks if c.code.startswith("gpu.xid.")} == {
        "gpu.xid.hardware": "warn", "gpu.xid.driver": "unknown", "gpu.xid.application": "unknown",
        "gpu.xid.new": "unknown",
    }  # fmt: skip


def test_software_rdma_measures_no_hca() -> None:
    """Soft-RoCE over some interface is not the card on the bus."""
    rdma = snapshot("l40s-4x-pcie").outcomes["rdma"]
    assert isinstance(rdma, Ok)
    soft = replace(rdma, facts=replace(rdma.facts, devices=tuple(replace(d, kind="rxe") for d in rdma.facts.devices)))
    view = on_bus(device("0000:18:00.0", driver="mlx5_core", rdma=False, **ETHERNET), rdma=soft)
    assert view.verdict.exit_code == 5
    assert "the only RDMA devices are software" in view.verdict.why


def test_nvml_that_cannot_be_used_passes_nothing() -> None:
    """Without the driver's library no temperature, link or error counter of a GPU was seen: none of them passes."""
    facts = GpuFacts(driver_version=None, cuda_version=None, gpus=(), driver_error="LIBRARY_NOT_FOUND", pci_gpus=1)
    view = on_bus(device("0000:1b:00.0", driver="nvidia"), gpu=Ok(facts=facts))
    assert {c.status for c in view.checks if c.code in GPU_CODES} == {"unknown"}
    assert view.verdict.exit_code == 5


def test_skip_takes_a_requirement_back_and_require_does_not_lose_it() -> None:
    """Someone who knows that a node's GPUs are not meant says so; another --require does not undo the bus's."""
    from agent.checks.verdict import select

    view = look((with_outcomes(snapshot(), gpu=Failed(error="crashed")),))
    assert judge(select(view.checks, require=("limits.*",))).exit_code == 5
    assert judge(select(view.checks, skip=("gpu.*",))).exit_code == 0


def test_a_published_verdict_is_never_better_for_want_of_a_finding() -> None:
    """An agent that says unknown or fail and names no finding: the gate over nodes says the same."""
    for word, code in (("unknown", 5), ("fail", 3), ("pass", 0), ("warn", 0)):
        record = replace(records_of(look((snapshot(),)))[0], verdict=word, findings=(), scanned_at_seconds=time.time())
        fleet = Fleet()
        fleet.set([record])
        checks: tuple[Finding, ...] = checks_of([record.name], fleet)
        assert judge(checks).exit_code == code, word


def off_the_bus(name: str, gone: int, **pci: object) -> Snapshot:
    """The machine with one GPU less on the bus, and so less for NVML."""
    whole = snapshot(name)
    facts, tree = whole.facts(GpuFacts), whole.facts(PciFacts)
    assert facts is not None and tree is not None
    lost = facts.gpus[gone].bus_id
    gpus = tuple(gpu for gpu in facts.gpus if gpu.index != gone)
    pairs = tuple(pair for pair in facts.pairs if gone not in (pair.a, pair.b))
    devices = tuple(device for device in tree.devices if device.bus_id != lost)
    bus = replace(facts.bus, gpus=tuple(g for g in facts.bus.gpus if g.bus_id != lost)) if facts.bus else None
    gpu = replace(facts, gpus=gpus, pairs=pairs, bus=bus, pci_gpus=len(gpus))
    return with_facts(whole, gpu=gpu, pci=replace(tree, devices=devices, **pci))


def departures(found: Snapshot) -> list[str]:
    return [check.status for check in of_code(look((found,)), "topology.reference.departs")]


def test_a_board_of_eight_that_shows_seven_gpus_on_the_bus_has_lost_one() -> None:
    """On the host itself; a container or a guest may have been given seven, and a server may be built with seven."""
    assert departures(off_the_bus(H100, 7)) == ["fail"]
    assert departures(off_the_bus(H100, 7, container="kubernetes")) == ["warn"]
    assert departures(off_the_bus(H100, 7, hypervisor="KVM")) == ["warn"]
    whole = snapshot()
    facts = whole.facts(GpuFacts)
    assert facts is not None
    seen = with_outcomes(whole, gpu=Ok(facts=replace(facts, gpus=facts.gpus[:7], pairs=())))
    assert departures(seen) == ["warn"], "the bus shows eight: a GPU that NVML leaves out has a finding of its own"


@each_row(("container", "required"), [(None, True), ("kubernetes", False)])
def test_a_device_node_that_is_missing_on_the_host_itself_is_required(container: str | None, required: bool) -> None:
    """In a container it belongs to the pod that scans."""
    whole = snapshot()
    rdma, tree = whole.facts(RdmaFacts), whole.facts(PciFacts)
    assert rdma is not None and tree is not None
    bare = replace(rdma, devices=tuple(replace(d, uverbs=None, uverbs_usable=None) for d in rdma.devices))
    found = with_facts(whole, rdma=bare, pci=replace(tree, container=container))
    told = {(c.status, c.required) for c in of_code(look((found,)), "rdma.uverbs.missing")}
    assert told == {("unknown", required)}
