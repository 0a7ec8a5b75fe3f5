"""Facts of a GPU as NVML encodes them: the fabric's health, Xids, ECC, events, and what other probes see of it."""

import dataclasses
from functools import reduce
from operator import getitem

from gpu_machines import GB200, H100, changed, facts_of, recorded
from rigs.recorded import findings, snapshot, with_facts
from rigs.tables import each_row, golden_rows, rows_of
from scanned import scan

from contracts.finding import Finding, Status
from probes.gpu import health as xid
from probes.gpu.facts import Gpu, GpuFacts, GpuPair, NvLink
from probes.gpu.health import list_xids
from probes.gpu.probe import PROBE
from probes.gpu.read import parse_xid_line
from probes.host.recording import RecordedHost
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaDevice, RdmaFacts, RdmaPort
from topology.build import build
from topology.check import departures
from topology.derive import reference_of

rows = rows_of(__file__)


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
    facts = facts_of(content)
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
    assert not [words for words in departures(node) if "RDMA" in words], departures(node)
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


@each_row(("model", "gpus", "sku"), rows("boards"))
def test_a_board_is_recognised_by_its_whole_name(model: str, gpus: int, sku: str | None) -> None:
    """GB200 is no B200, and GH200 no H200."""
    node = build(snapshot())
    renamed = dataclasses.replace(
        node, product=None, gpus=tuple(dataclasses.replace(gpu, model=model) for gpu in node.gpus[:gpus])
    )
    row = reference_of(renamed)
    assert (row.called if row else None) == sku
