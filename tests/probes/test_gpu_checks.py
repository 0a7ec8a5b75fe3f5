"""What the gpu probe concludes: of single facts (gpu_findings.yaml), of GPUs that differ, on the bus; facts of NVML.

Facts as NVML encodes them: the fabric's health, Xids, ECC, events, and what other probes see of a GPU.
"""

import dataclasses
from collections.abc import Sequence
from functools import reduce
from operator import getitem

from gpu_machines import GB200, H100, changed, facts_of, gpu_with, recorded
from hypothesis import given, strategies as st
from rigs.recorded import findings, snapshot, with_facts
from rigs.tables import each_row, golden_rows, rows_of
from scanned import scan

from agent.checks.view import build_view
from agent.metrics import _list_link_values as link_values
from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.gpu import facts as gpu_facts, health as xid
from probes.gpu.compare import check_bus
from probes.gpu.facts import BusGpu, Gpu, GpuBus, GpuFacts, GpuPair, NvLink
from probes.gpu.health import fail_full_gpus, list_xids
from probes.gpu.probe import PROBE, format_nvml_bus_id
from probes.gpu.read import _read_slurm_gpus, format_cpu_list, parse_xid_line
from probes.host.nvml import sysfs_bus_id
from probes.host.recording import RecordedHost
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort
from topology.build import build
from topology.check import describe_departures

rows = rows_of(__file__, "gpu_findings.yaml")

HEALTHY = Gpu(index=0, bus_id="0000:1b:00.0", name="NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30)
ALIKE = Gpu(
    index=0, bus_id=None, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, sm_clock_max_hertz=1.98e9,
    power_limit_default_watts=700.0, pcie_generation_max=5, pcie_width_max=16, bar1_bytes=128 << 30,
)  # fmt: skip


def check(*gpus: Gpu, **facts) -> list[Finding]:
    """What is found of the GPUs, numbered in their order."""
    numbered = tuple(dataclasses.replace(gpu, index=n) for n, gpu in enumerate(gpus))
    found = GpuFacts(**{"driver_version": "550", "cuda_version": "12.4", "gpus": numbered, **facts})
    return list(PROBE.check(found))


def links(active: int, of: int, kind: str | None = None) -> dict:
    every = (NvLink(link=n, active=n < active, remote_kind=kind if n < active else None) for n in range(of))
    return {"nvlinks_known": True, "nvlinks": tuple(every)}


@each_row(("changes", "code", "severity"), rows("one_fault"))
def test_one_fault_is_one_finding(changes: dict, code: str, severity: str) -> None:
    """Exactly the code that belongs to it, with evidence, and a remedy unless it is a note."""
    found = check(gpu_with(HEALTHY, changes))
    assert [(f.code, f.status) for f in found] == [(code, severity)]
    assert found[0].evidence
    assert found[0].remedy or found[0].status is Status.INFO
    assert code in PROBE.codes


@each_row("changes", rows("usual"))
def test_what_is_usual_or_unknown_is_no_finding(changes: dict) -> None:
    """An idle GPU's slow PCIe link above all."""
    assert check(gpu_with(HEALTHY, changes)) == []


@each_row(("changes", "has", "lacks", "severity"), rows("sentences"))
def test_sentences_say_what_is_so_and_remedies_lift_what_they_name(changes, has, lacks, severity):
    worst = next(f for f in check(gpu_with(ALIKE, changes)) if f.code != "gpu.power.capped")
    text = f"{worst.message} {worst.remedy}"
    assert has in text and lacks.lower() not in text.lower() and worst.status == severity, text


def test_confidential_computing_is_told() -> None:
    (secret,) = check(ALIKE, confidential=True)
    assert (secret.code, secret.status) == ("gpu.device.confidential", Status.WARN)


@each_row(("changes", "count", "code", "severity", "words"), rows("twins"))
def test_one_gpu_unlike_its_twins_is_named_with_its_cost(changes, count, code, severity, words):
    found = check(ALIKE, gpu_with(ALIKE, changes), *[ALIKE] * (count - 2))
    found = [f for f in found if f.status is not Status.INFO]
    subject = "" if "different" in words else "GPU1"
    assert [(f.code, f.status, f.subject) for f in found] == ([(code, severity, subject)] if code else [])
    assert all(words in f.message and f.remedy for f in found), found


@each_row(("second", "state", "expected"), rows("cliques"))
def test_gpus_of_one_host_belong_into_one_clique(second: str | None, state: str, expected: list[str]) -> None:
    """A GPU whose fabric is not there is in no clique, and another finding's business."""
    first = dataclasses.replace(HEALTHY, fabric_state="completed", fabric_clique="aa/1")
    other = dataclasses.replace(HEALTHY, fabric_state=state, fabric_clique=second)
    assert [finding.code for finding in check(first, other)] == expected


def test_links_are_compared_with_those_of_twins_only() -> None:
    """Boards with different numbers of links may share a host; the same board may not differ."""
    full = dataclasses.replace(HEALTHY, **links(12, 12))
    short = dataclasses.replace(HEALTHY, **links(8, 12))
    found = check(full, short)
    assert [(f.code, f.subject) for f in found] == [("gpu.nvlink.missing", "GPU1")]
    assert "8, 9, 10, 11" in found[0].evidence[0]
    for kind, manager in (("gpu", False), ("nvswitch", True), (None, True)):  # a switch needs its fabric manager
        wired = tuple(dataclasses.replace(link, remote_kind=kind) for link in short.nvlinks)
        told = check(full, dataclasses.replace(short, nvlinks=wired))[0]
        assert ("fabric manager" in told.remedy) is manager, told
    other = dataclasses.replace(short, name="NVIDIA A30")
    assert [f.code for f in check(full, other)] == ["gpu.device.mixed", "gpu.nvlink.missing"]


@each_row(("name", "is_fault"), rows("soldered"))
def test_no_link_at_all_is_a_fault_only_where_links_are_soldered_on(name: str, is_fault: bool) -> None:
    gpu = dataclasses.replace(HEALTHY, name=name, **links(0, 4))
    assert [f.code for f in check(gpu, gpu)] == ["gpu.nvlink.none"] * is_fault
    unknown = dataclasses.replace(gpu, nvlinks=(), nvlinks_known=False)
    assert check(unknown, unknown) == []


@each_row(("name", "active", "listed", "kind", "severities"), rows("links"))
def test_missing_links_count_by_their_share(name, active, listed, kind, severities):
    counts = [active] * 4 if isinstance(active, int) else active
    found = check(*(Gpu(index=0, bus_id=None, name=name, **links(count, listed, kind)) for count in counts))
    assert [f.status for f in found] == severities
    assert not {f.code for f in found} - {"gpu.nvlink.missing"}


@each_row(("name", "status", "severity", "acs", "kind"), rows("p2p"))
def test_p2p_that_is_unknown_is_no_pass_and_a_product_without_it_is_no_fault(name, status, severity, acs, kind):
    gpu = Gpu(index=0, bus_id=None, name=name, virtualization=kind)
    (found, *notes) = check(gpu, gpu, pairs=(GpuPair(a=0, b=1, ancestor="PIX", p2p_read=status),))
    assert (found.code, found.status, "ACS" in found.remedy) == ("gpu.p2p.refused", severity, acs)
    assert {note.code for note in notes} <= {"gpu.device.vgpu"}


def test_refused_p2p_is_one_finding_a_reason() -> None:
    """Not one for each of 28 pairs."""
    ends = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    for ancestor, severity in (("PIX", "fail"), ("SYS", "warn")):  # across the CPU NCCL goes by itself
        pairs = tuple(GpuPair(a=a, b=b, p2p_read="chipset_not_supported", ancestor=ancestor) for a, b in ends)
        found = check(pairs=pairs)
        assert [(f.code, f.status) for f in found] == [("gpu.p2p.refused", severity)]
    assert "and 24 more pairs" in found[0].message
    by_design = check(pairs=(GpuPair(a=0, b=1, p2p_read="gpu_not_supported"), GpuPair(a=0, b=2, p2p_read=None)))
    assert [f.status for f in by_design] == ["info"]


@each_row(("value", "wanted"), rows("visible"))
def test_cuda_visible_devices_is_read_as_cuda_reads_it(value: str | None, wanted: list[str] | None) -> None:
    gpus = [dataclasses.replace(ALIKE, uuid=f"GPU-{n}aaa") for n in range(8)]
    found = [f for f in check(*gpus, visible=value) if f.code == "gpu.device.hidden"]
    assert [f.status for f in found] == (wanted[:1] if wanted else [])
    assert all(wanted and wanted[1] in f.message for f in found), found


@each_row(("environment", "visible", "total", "wanted"), rows("granted"))
def test_gpus_that_slurm_gave_are_compared_with_those_that_are_there(environment, visible, total, wanted):
    """Fewer than granted is a lost GPU, more is another job's; what a prolog sees is not the job's."""
    gpus = [dataclasses.replace(ALIKE, uuid=f"GPU-{n}aaa") for n in range(total)]
    granted = _read_slurm_gpus(environment)
    found = [f for f in check(*gpus, visible=visible, granted=granted) if f.status == "fail"]
    assert [f.code for f in found] == (["gpu.device.hidden"] if wanted else [])
    assert all(word in f"{f.message} {f.evidence}" for f in found for word in wanted or ()), found


def test_the_table_of_questions_is_whole() -> None:
    questions = read_table(gpu_facts.__file__, "questions.toml")
    assert all(set(row) <= {"codes", "range", "items", "fields", "source"} for row in questions.values())
    assert {code for row in questions.values() for code in row.get("codes", ())} <= set(PROBE.codes)


@each_row(("share", "busy", "scanned", "gate"), rows("full_memory"))
def test_full_memory_fails_the_next_job_whoever_holds_it(share: float, busy: float, scanned: str, gate: str) -> None:
    snapshot = scan(RecordedHost(recorded(H100)))
    facts = facts_of(snapshot)
    held = {"memory_used_bytes": int(share * (facts.gpus[2].memory_bytes or 0)), "utilization_ratio": busy}
    gpus = (*facts.gpus[:2], gpu_with(facts.gpus[2], held), *facts.gpus[3:])
    now = with_facts(snapshot, gpu=dataclasses.replace(facts, gpus=gpus))
    checks = build_view((now,)).checks
    found = [{c.status for c in each if c.code == "gpu.memory.in_use" and c.subject == "GPU2"}
             for each in (checks, fail_full_gpus(checks, (now,)))]  # fmt: skip
    assert found == [{scanned}, {gate}]


def test_a_gpu_or_a_driver_that_does_not_answer_has_no_links_and_no_sample_of_them() -> None:
    """Neither "SYS" nor 0 NVLinks nor a bandwidth: of a board that may have NVLink PCIe alone tells nothing."""
    whole = scan(RecordedHost(recorded(H100)))
    facts = facts_of(whole)
    lost = dataclasses.replace(facts.gpus[5], error="GPU_IS_LOST (nvmlDeviceGetName)", nvlinks=(), nvlinks_known=False)
    none: dict = {"driver_version": None, "cuda_version": None, "gpus": (), "pairs": (), "pci_gpus": 8}
    for what, other, known, name in (
        ("one is lost", dataclasses.replace(facts, gpus=(*facts.gpus[:5], lost, *facts.gpus[6:])), 21, "GPU5"),
        ("no driver", dataclasses.replace(facts, driver_error="LIB_RM_VERSION_MISMATCH", **none), 0, ""),
    ):
        (node,) = build_view((with_facts(whole, gpu=other),)).topologies
        gpus = {gpu.name for gpu in node.gpus}
        unknown = [pair for pair in node.pairs if {pair.a, pair.b} <= gpus and pair.label == "N/A"]
        assert len(unknown) == 28 - known and all(name in (pair.a, pair.b) or not name for pair in unknown), what
        samples = {name: values for name, values in link_values(node) if name.startswith("gpu_link_")}
        assert {len(values) for values in samples.values()} == {2 * known}, (what, samples)


def test_samples_carry_the_labels_of_dcgm_exporter_and_leave_out_the_unknown() -> None:
    """No value where there is none."""
    unknown = GpuFacts(driver_version=None, cuda_version=None, gpus=(Gpu(index=0, bus_id="0000:1b:00.0"),))
    samples = {s.metric: s for s in PROBE.samples(unknown)}
    assert set(samples) == {"gpu_up", "gpu_info"}
    assert samples["gpu_up"].labels == ("0", "", "00000000:1B:00.0")


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_bus_ids_pass_between_nvml_and_sysfs(domain: int, bus: int, device: int, function: int) -> None:
    """Eight digits there, four and lower case here."""
    nvml = f"{domain:08X}:{bus:02X}:{device:02X}.{function}"
    sysfs = sysfs_bus_id(nvml)
    assert sysfs == f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    assert format_nvml_bus_id(sysfs) == nvml


@given(st.text())
def test_any_text_is_a_bus_id_or_none(text: str) -> None:
    """Drivers print "FFFFFFFF:FF:FF.0" and empty text for hidden ends."""
    assert sysfs_bus_id(text) is None or ":" in text
    assert sysfs_bus_id("FFFFFFFF:FF:FF.0") is None
    assert sysfs_bus_id("") is None


@given(st.sets(st.integers(0, 511)))
def test_a_cpu_mask_becomes_the_list_of_its_cpus(cpus: set[int]) -> None:
    """As Linux prints lists."""
    words = [sum(1 << cpu % 64 for cpu in cpus if cpu // 64 == word) for word in range(8)]
    text = format_cpu_list(words)
    if not cpus:
        assert text is None
        return
    back: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        back.update(range(int(first), int(last or first) + 1))
    assert back == cpus


EIGHT = tuple(f"0000:{n}:00.0" for n in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))


def bus(*, nodes: int = 8, usable: int = 8, proc: Sequence[int] = range(8), driver: str = "nvidia", **more) -> GpuBus:
    """Eight GPUs; so many /dev/nvidiaN are there, so many may be opened; `proc`: the minors that the driver tells."""
    gpus = []
    for n, address in enumerate(EIGHT):
        told = {"minor": n, "node_exists": n < nodes, "node_usable": n < usable if n < nodes else None}
        unknown = dict.fromkeys(told)
        gpus.append(BusGpu(bus_id=address, driver=driver, **(told if n in proc else unknown)))
    return GpuBus(gpus=tuple(gpus), nodes=min(nodes, usable), **more)


@each_row(("where", "found", "count", "code", "severity"), rows("bus"))
def test_a_gpu_that_nvml_leaves_out(where, found, count, code, severity):
    """A missing one fails and is named; one that was given to others is told; none read is never fine."""
    findings = list(check_bus(bus(**found), set(EIGHT[:count]), count))
    worst = [(f.code, f.status) for f in findings if f.code == code]
    assert worst == ([(code, severity)] if code else []), (where, findings)
    if severity == "fail":
        told = next(f for f in findings if f.code == code)
        assert EIGHT[count] in told.message and EIGHT[count] in told.subject
        assert "gpu.device.not_given" not in {f.code for f in findings} or "given two" in where or "variable" in where


def test_lost_gpus_without_an_address_are_not_told_twice() -> None:
    """NVML still counts a lost GPU but may not say where it is: then it is taken for one that is not listed."""
    assert not list(check_bus(bus(), set(EIGHT[:7]), 8))
    two = list(check_bus(bus(), set(EIGHT[:6]), 7))
    assert [f.code for f in two] == ["gpu.device.missing"]
    assert "1 of 0000:d1:00.0, 0000:df:00.0" in two[0].message
    assert not list(check_bus(None, set(), 0)), "nothing is said of a bus that could not be read"


def said(row: dict):
    """What is found of a recording that is changed so, and of each GPU the facts that are not the recording's own."""
    content = changed(row["machine"], **row.get("answers", {}))
    for (*way, last), value in row.get("set", ()):
        reduce(getitem, way, content["answers"])[last] = value
    for name in row.get("drop", ()):
        del content["answers"][name]
    own, facts = facts_of(recorded(row["machine"])), facts_of(content)
    known = {(f.code, f.subject) for f in PROBE.check(own)}
    differ = {
        f"GPU{gpu.index}": {
            name: value for name in gpu.__slots__ if (value := getattr(gpu, name)) != getattr(old, name)
        }
        for gpu, old in zip(facts.gpus, own.gpus, strict=True)
    }
    found = [[f.code, f.status, f.subject, f.message] for f in PROBE.check(facts) if (f.code, f.subject) not in known]
    return {"facts": {name: each for name, each in differ.items() if each}, "findings": found}


def test_golden_changes() -> None:
    """tests/golden/gpu.jsonl: answers of the driver, of which a row says what they show."""
    golden_rows("gpu.jsonl", "says", said)


# Xids -------------------------------------------------------------------------------------------------------------


@each_row(("cause", "numbers"), rows("xids"))
def test_an_xid_is_the_programs_only_where_nvidias_catalogue_says_so(cause: str, numbers: tuple[int, ...]) -> None:
    """A number that the catalogue answers with a reset or names a link is the GPU's; an unknown one is nobody's."""
    assert {number: xid.explain_xid(number) for number in numbers} == dict.fromkeys(numbers, cause)
    gpu = Gpu(index=0, bus_id="0000:1b:00.0", xids=tuple(numbers))
    codes = {f.code for f in PROBE.check(GpuFacts(driver_version="1", cuda_version=None, gpus=(gpu,)))}
    assert codes == {{"gpu": "gpu.xid.hardware", "program": "gpu.xid.application", "driver": "gpu.xid.driver"}[cause]}


@each_row(("line", "told"), rows("driver_lines"))
def test_every_form_of_the_drivers_line_is_read(line: str, told: list | None) -> None:
    """A recovery that is over is no error."""
    assert parse_xid_line(line) == (tuple(told) if told else None)


@each_row(("place", "number", "told"), rows("log_only"))
def test_a_gpu_that_only_the_log_still_tells_of_is_missing(place: str, number: int, told: list[str]) -> None:
    """After Xid 79 the kernel may take the device off the bus: then neither NVML nor sysfs names it."""
    content = changed(H100)
    content["answers"]["kernel_log"]["NVRM: Xid"] = [f"[8.1] NVRM: Xid (PCI:{place}): {number}, words of the driver"]
    content["answers"]["kernel_log"]["SXid"] = [
        "nvidia-nvswitch2: SXid (PCI:0000:09:00.0): 20034, Fatal, Link 38 LTSSM Fault Up",
        "nvidia-nvswitch1: SXid (PCI:0000:08:00.0): 12028, Non-fatal, Link 61 egress non-posted PRIV error (First)",
    ]
    facts = facts_of(content)
    assert [f.subject for f in PROBE.check(facts) if "SXid 20034" in f.message] == ["0000:09:00.0"], "a fatal error"
    found = [f for f in PROBE.check(facts) if f.code == "gpu.device.missing"]
    assert [(f.subject, f.status) for f in found] == [(subject, Status.FAIL) for subject in told]
    assert all(f"Xid {number}" in f.message and place in f.evidence[0] for f in found)
    facts_of_seven = dataclasses.replace(facts, gpus=facts.gpus[:7])
    (unlisted,) = [f for f in PROBE.check(facts_of_seven) if f.subject == "0000:df:00.0"]
    assert (f"Xid {number};" in unlisted.evidence[1]) == (place == "0000:df:00"), "on the bus, and not in NVML's list"
    lost = dataclasses.replace(facts.gpus[7], bus_id=None, error="GPU_IS_LOST (nvmlDeviceGetHandleByIndex)")
    gone = PROBE.check(dataclasses.replace(facts, gpus=(*facts.gpus[:7], lost), bus=None))
    assert "gpu.device.missing" not in {f.code for f in gone}


def test_events_pass_through_the_driver_library_and_stay(scanner_of):
    """Taken out of the driver's queue once, told in every scan after; a GPU that cannot be watched is unknown."""
    queue = {"nvmlEventSetWait": {"8": {"watched": [*range(8)], "xids": [[3, 79], [5, 31]]}}}
    with scanner_of(H100, inject="nvmlDeviceRegisterEvents@gpu6=not_supported", nvml=queue) as scanner:
        first, second = scanner.scan().facts(GpuFacts), scanner.scan().facts(GpuFacts)
    expected = [(), (), (), (79,), (), (31,), None, ()]
    assert [gpu.xid_events for gpu in first.gpus] == expected
    assert [gpu.xid_events for gpu in second.gpus] == expected


def test_an_xid_that_stands_in_the_log_and_came_as_an_event_counts_once() -> None:
    """The driver writes both."""
    gpu = Gpu(index=0, bus_id="0000:1b:00.0", xids=(79, 31), xid_events=(79, 79))
    assert sorted(list_xids(gpu) or ()) == [31, 79, 79]
    assert list_xids(dataclasses.replace(gpu, xids=None, xid_events=None)) is None


@each_row(("links", "enabled", "c2c"), rows("c2c"))
def test_c2c_is_known_by_its_links_or_by_its_mode(links: int | None, enabled: int | None, c2c: bool | None) -> None:
    """Field 170 is not of every driver."""
    content = changed(GB200)
    nvml = content["answers"]["nvml"]
    nvml["nvmlDeviceGetFieldValues"]["gpu0,170"] = [links]
    mode = {"$nvml": "NOT_SUPPORTED"} if enabled is None else {"isC2cEnabled": enabled}
    nvml["nvmlDeviceGetC2cModeInfoV"]["gpu0"] = mode
    snapshot = scan(RecordedHost(content))
    assert build(snapshot).gpus[0].c2c is c2c
    off = [f.code for f in findings(snapshot) if f.code == "gpu.c2c.off"]
    assert off == ["gpu.c2c.off"] * (enabled == 0)


# Sentences --------------------------------------------------------------------------------------------------------


def _mesh(*, apart: str, joined: str = "ok") -> list[Finding]:
    """DGX-1 (V100): a hybrid cube mesh, 16 of 28 pairs with NVLinks; what P2P answers of those and of the others."""
    near = {0: (1, 2, 3, 4), 1: (0, 2, 3, 5), 2: (0, 1, 3, 6), 3: (0, 1, 2, 7)}
    near |= {gpu + 4: (*(4 + peer for peer in near[gpu][:3]), gpu) for gpu in range(4)}
    bus = [f"0000:{6 + n:02x}:00.0" for n in range(8)]
    gpus = tuple(
        Gpu(index=n, bus_id=bus[n], name="Tesla V100-SXM2-16GB", nvlinks_known=True, nvlinks=tuple(
            NvLink(link=at, active=True, remote_kind="gpu", remote_bus_id=bus[peer])
            for at, peer in enumerate(near[n])))
        for n in range(8)
    )  # fmt: skip
    pairs = tuple(
        GpuPair(a=a, b=b, ancestor="SYS", p2p_read=joined if b in near[a] else apart,
                p2p_nvlink="ok" if b in near[a] else "not_supported")
        for a in range(8) for b in range(a + 1, 8)
    )  # fmt: skip
    return list(PROBE.check(GpuFacts(driver_version="535", cuda_version="12.2", gpus=gpus, pairs=pairs)))


@each_row("reason", ["topology_not_supported", "chipset_not_supported", "not_supported"])
def test_pairs_that_a_mesh_does_not_join_are_a_note_without_advice(reason: str) -> None:
    """12 of 28 on a DGX-1: no IOMMU would change that."""
    found = _mesh(apart=reason)
    assert [(f.code, f.status, f.remedy) for f in found] == [("gpu.p2p.refused", Status.INFO, "")]
    assert "mesh" in found[0].message and "host memory" not in found[0].message


def test_p2p_that_is_switched_off_is_a_fault_on_a_mesh_too() -> None:
    """A setting of the driver, and not of IOMMU or ACS."""
    found = _mesh(apart="disabled_by_regkey", joined="disabled_by_regkey")
    assert {f.code for f in found} == {"gpu.p2p.refused"}
    assert {f.status for f in found} == {Status.FAIL, Status.WARN}, "joined by NVLink, and through the CPU"
    assert not any("IOMMU" in f.remedy for f in found)


def test_a_gpu_that_nvml_lists_has_its_driver() -> None:
    """Whatever a part of sysfs shows; one that NVML does not list may have none."""
    content = changed(H100)
    bus = [gpu.bus_id for gpu in facts_of(content).gpus]
    for bus_id in bus:
        content["answers"]["resolve"].pop(f"/sys/bus/pci/devices/{bus_id}/driver")
    assert [f for f in findings(scan(RecordedHost(content))) if f.code == "pci.device.no_driver"] == []
    content["answers"]["nvml"] = {"nvmlDeviceGetCount": {"": 7}} | {
        symbol: {q: a for q, a in answers.items() if q.split(",")[0] != "gpu7"}
        for symbol, answers in content["answers"]["nvml"].items() if symbol != "nvmlDeviceGetCount"
    }  # fmt: skip
    found = [f for f in findings(scan(RecordedHost(content))) if f.code == "pci.device.no_driver"]
    assert [f.subject for f in found] == [bus[7]]
    assert "missing" not in found[0].message and "nouveau" not in found[0].remedy
    content["answers"]["resolve"][f"/sys/bus/pci/devices/{bus[7]}/driver"] = "/sys/bus/pci/drivers/nouveau"
    (held,) = (f for f in findings(scan(RecordedHost(content))) if f.code == "pci.device.no_driver")
    assert "nouveau bound to it" in held.message and held.remedy.startswith("Blacklist nouveau")


def test_no_rdma_device_is_never_said_where_there_is_one() -> None:
    """Eight ACTIVE mlx5 ports that sysfs does not place on the bus, as a mounted part of /sys shows them."""
    snapshot = scan(RecordedHost(recorded(H100)))
    rdma = snapshot.facts(RdmaFacts)
    pci = snapshot.facts(PciFacts)
    devices = tuple(
        dataclasses.replace(d, bus_id=None, numa_node=None, driver=None, kind="other") for d in rdma.devices
    )
    blind = tuple(dataclasses.replace(d, rdma=False) if d.rdma else d for d in pci.devices)
    seen = with_facts(
        snapshot, rdma=dataclasses.replace(rdma, devices=devices), pci=dataclasses.replace(pci, devices=blind)
    )
    node = build(seen)
    assert not [words for words in describe_departures(node) if "RDMA" in words], describe_departures(node)
    said = [f for f in findings(seen) if "no RDMA device" in f.message]
    assert said == []
    unknown = [f for f in findings(seen) if f.code == "pci.nic.no_rdma"]
    assert {f.status for f in unknown} == {Status.UNKNOWN}


@each_row(("bond", "codes"), [("bond0", []), (None, ["pci.nic.no_rdma"])])
def test_one_rdma_device_serves_both_functions_of_a_bonded_card(bond: str | None, codes: list[str]) -> None:
    """RoCE LAG: mlx5_bond_0 on the first function replaces the RDMA device of the second."""
    whole = snapshot()
    rdma, pci = whole.facts(RdmaFacts), whole.facts(PciFacts)
    (first,) = (device for device in pci.devices if device.bus_id == rdma.devices[0].bus_id)
    second = dataclasses.replace(first, bus_id=f"{first.bus_id[:-1]}1", rdma=False, class_code=0x020000)
    bonded = dataclasses.replace(rdma.devices[0], bond=bond)
    seen = with_facts(
        whole, rdma=dataclasses.replace(rdma, devices=(bonded, *rdma.devices[1:])),
        pci=dataclasses.replace(pci, devices=(*pci.devices, second)),
    )  # fmt: skip
    assert [f.code for f in findings(seen) if f.code == "pci.nic.no_rdma"] == codes


def test_an_hca_is_one_by_its_type_where_its_place_is_hidden() -> None:
    """hca_type MT4129 is a ConnectX-7 on any bus."""
    content = changed(H100)
    for question in [q for q in content["answers"]["resolve"] if q.startswith("/sys/class/infiniband/")]:
        del content["answers"]["resolve"][question]
    rdma = scan(RecordedHost(content)).facts(RdmaFacts)
    assert {device.kind for device in rdma.devices if device.model and "ConnectX" in device.model} == {"hca"}
    assert RdmaDevice(name="x", kind="hca", ports=(RdmaPort(port=1),)).bus_id is None
