"""The gpu probe where the driver refuses, fails or is slow, question by question; and through a real NVML library."""

import dataclasses
import os
from functools import cache

import pytest
from gpu_machines import H100, TITAN, facts_of, recorded
from rigs.recorded import findings, with_outcomes
from rigs.tables import each_row, rows_of
from scanned import scan

from agent.checks.host_checks import check_snapshot
from contracts.finding import Status
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.probe import PROBE, list_codes_of_question as codes_of
from probes.gpu.read import LOST
from probes.host.nvml import ERROR_CODES, HANDLE, XIDS
from probes.host.protocol import GpuHandle, Json, NvmlError
from probes.host.recording import RecordedHost
from probes.registry import BY_NAME
from probes.scanner import Scanner
from topology.build import build
from topology.check import check as topology_check
from topology.graph import NodeTopology

rows = rows_of(__file__)

SICK = 2
"""The GPU that fails."""

SAYS_NOTHING = "UNKNOWN"
"""A code after which a fact is neither there nor missing; all others are tried on a smaller machine."""


class FailingHost(RecordedHost):
    """A recorded machine whose NVML answers one function with an error."""

    def __init__(
        self, content: dict[str, Json], symbol: str, name: str, gpu: int | None = SICK, link: int | None = None
    ) -> None:
        super().__init__(content)
        self.failing, self.name, self.gpu, self.link = symbol, name, gpu, link
        self.asked: set[str] = set()

    def nvml(self, symbol: str, *arguments: GpuHandle | int | str) -> Json:
        """One recorded NVML call, or the error."""
        self.asked.add(symbol)
        first = arguments[0] if arguments else None
        here = self.gpu is None or (isinstance(first, GpuHandle) and first.index == self.gpu)
        if symbol == self.failing and here and (self.link is None or arguments[1] == self.link):
            raise NvmlError(symbol, ERROR_CODES[self.name], self.name)
        if self.failing == HANDLE and here and isinstance(first, GpuHandle):
            raise NvmlError(HANDLE, ERROR_CODES[self.name], self.name)
        return super().nvml(symbol, *arguments)


@cache
def _symbols() -> list[str]:
    """Every function that is asked of one GPU, on a machine that answers each."""
    host = FailingHost(recorded(), "", "UNKNOWN")
    scan(host, (PROBE,))
    return sorted(name for name in host.asked - {"nvmlDeviceGetCount", XIDS} if not name.startswith("nvmlSystem"))


@cache
def _healthy() -> Snapshot:
    return scan(RecordedHost(recorded()))


def failing(symbol: str, name: str, link: int | None = None) -> Snapshot:
    """The machine whose NVML answers one function with an error: its GPUs are asked, all else is as it was found."""
    gpus = scan(FailingHost(recorded(), symbol, name, link=link), (PROBE,))
    return with_outcomes(_healthy(), gpu=gpus.outcomes["gpu"])


@each_row("symbol", _symbols)
def test_an_answer_that_says_nothing_costs_its_own_fact_and_is_said(symbol: str) -> None:
    """Nothing else of this GPU or the others is lost, nothing is claimed, and its check is no pass."""
    healthy = facts_of(_healthy())
    snapshot = failing(symbol, SAYS_NOTHING)
    facts = facts_of(snapshot)
    assert [gpu for gpu in facts.gpus if gpu.index != SICK] == [gpu for gpu in healthy.gpus if gpu.index != SICK]
    assert all(gpu.error is None for gpu in facts.gpus)
    checked = tuple(PROBE.check(facts))
    found = [f for f in checked if f.status is not Status.INFO]
    assert {f.status for f in found} <= {Status.UNKNOWN}, [f.message for f in found]
    lost, before = _fields(facts.gpus[SICK]), _fields(healthy.gpus[SICK])
    changed = {field for field in before if lost[field] != before[field]} - {"unread"}
    unread = [*facts.gpus[SICK].unread, *(q for pair in facts.pairs for q in pair.unread)]
    assert changed == set() or unread, f"{changed} went unsaid"
    assert all(question.startswith(symbol) and question.endswith(f"= {SAYS_NOTHING}") for question in unread)
    assert len(changed) <= rows("largest")().get(symbol, 2), f"it cost {changed}"
    status = {check.code: check.status for check in check_snapshot(snapshot)}
    for question in unread:
        codes = codes_of(question)
        said = {f.code: f for f in checked if f.code in codes}
        assert set(codes) <= said.keys(), question
        assert all(f"GPU{SICK}" in f.subject or f.code == "gpu.p2p.refused" for f in said.values())
        assert "pass" not in {status.get(code) for code in codes}, question
    _nothing_claimed(snapshot, symbol)


def _fields(gpu: Gpu) -> dict:
    return {field.name: getattr(gpu, field.name) for field in dataclasses.fields(gpu)}


@cache
def _healthy_node() -> NodeTopology:
    return build(_healthy())


def _nothing_claimed(snapshot: Snapshot, what: str) -> None:
    """The topology calls no link missing and no pair slow for what was not read."""
    node, whole = build(snapshot), _healthy_node()
    known = {(pair.a, pair.b): pair for pair in whole.pairs}
    names = {gpu.name for gpu in node.gpus}
    for pair in node.pairs:
        before = known.get((pair.a, pair.b))
        if before is None or not {pair.a, pair.b} <= names:
            continue
        assert pair.label in (before.label, "N/A") or pair.nvlinks + pair.nvlinks_unread >= before.nvlinks, (what, pair)
    codes = {f.code for f in topology_check(node)} - {f.code for f in topology_check(whole)}
    assert not any(code.startswith("topology.nvlink") for code in codes), what
    assert not [f.message for f in topology_check(node) if "NVLink" in f.message], what


OTHERS = sorted(ERROR_CODES.keys() - set(rows("answers")()) - LOST)


def with_codes(codes: list[str], *each: str) -> list[tuple[str, str]]:
    """Every function with one of the codes in turn and with `each`, two of them with all; nightly all with all."""
    return [(symbol, code) for number, symbol in enumerate(_symbols())
            for code in (codes if os.environ.get("TOPOFLIGHT_PAIRS") == "all" or symbol.endswith("PciInfo")
                         else (codes[number % len(codes)], *each))]  # fmt: skip


@each_row(("symbol", "name"), lambda: with_codes(OTHERS, "TIMEOUT", "NO_PERMISSION"))
def test_every_other_return_code_of_any_function_is_said_and_claims_nothing(symbol: str, name: str) -> None:
    """All of nvmlReturn_t for one function of one of two GPUs, and some for each; nightly all for each."""
    content = recorded(TITAN)
    healthy = {f.code for f in PROBE.check(facts_of(scan(RecordedHost(content), (PROBE,))))}
    facts = facts_of(scan(FailingHost(content, symbol, name, gpu=1), (PROBE,)))
    found = {f.code: f for f in PROBE.check(facts) if f.code not in healthy}
    assert {f.status for f in found.values()} <= {Status.UNKNOWN, Status.INFO}, found
    assert facts.gpus[0].unread == () and facts.gpus[1].error is None
    said = {f.code for f in PROBE.check(facts)}
    for question in facts.gpus[1].unread:
        assert set(codes_of(question)) <= said, f"{question} went unsaid"


@each_row("symbol", lambda: sorted(set(_symbols()) - {"nvmlDeviceGetPciInfo"}))  # every GPU has an address
def test_what_a_board_or_a_driver_does_not_support_is_no_finding(symbol: str) -> None:
    """NOT_SUPPORTED is an answer, and so is a function that an older driver (R470) lacks."""
    for name in ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND"):
        facts = facts_of(failing(symbol, name))
        if (symbol, name) == ("nvmlDeviceGetNvLinkState", "FUNCTION_NOT_FOUND"):
            continue  # every driver has it
        assert not facts.gpus[SICK].unread, name
        found = [f for f in PROBE.check(facts) if f.code not in ("gpu.nvlink.missing",)]
        assert not found, [f.message for f in found]


@each_row(("symbol", "name"), lambda: with_codes(sorted(LOST)))
def test_a_gpu_that_is_lost_says_so_by_any_of_its_own_functions(symbol: str, name: str) -> None:
    """But one link, or one pair, that answers so is no proof: the other functions would say so too."""
    facts = facts_of(failing(symbol, name))
    of_links = "NvLink" in symbol or symbol in ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor")
    assert (facts.gpus[SICK].error is not None) == (not of_links)
    found = [f.code for f in PROBE.check(facts) if f.status is Status.FAIL]
    assert found == ([] if of_links else ["gpu.device.lost"])
    assert [gpu.error for gpu in facts.gpus if gpu.index != SICK] == [None] * 7


@each_row(("name", "code", "severity"), rows("handles"))
def test_a_handle_that_is_refused_is_lost_only_where_the_driver_says_so(name: str, code: str, severity: str) -> None:
    """A job that device cgroups limit to some GPUs may not use the others: they are well, as far as anyone knows."""
    snapshot = failing(HANDLE, name)
    facts = facts_of(snapshot)
    found = [f for f in PROBE.check(facts) if f.status is not Status.INFO]
    assert [(f.code, f.status, f.subject) for f in found] == [(code, severity, f"GPU{SICK}")]
    assert HANDLE in found[0].evidence[0]
    assert facts.gpus[SICK].bus_id == "0000:52:00.0"
    assert ("power-cycle" in found[0].remedy) == (name == "GPU_IS_LOST")
    up = {s.labels[0]: s.value for s in PROBE.samples(facts) if s.metric == "gpu_up"}
    assert up.get(str(SICK)) == (0.0 if severity == "fail" else None)
    if severity == "unknown":
        _nothing_claimed(snapshot, name)


@each_row("name", ["UNKNOWN", "GPU_IS_LOST", "TIMEOUT", "NO_PERMISSION", "INVALID_ARGUMENT"])
@each_row("link", [0, 7, 17])
def test_one_unread_link_stays_unknown_and_the_others_known(name: str, link: int) -> None:
    """17 of 18 are up, of the last nothing is known: neither a failure nor a pass."""
    snapshot = failing("nvmlDeviceGetNvLinkState", name, link)
    facts = facts_of(snapshot)
    states = {one.link: one.active for one in facts.gpus[SICK].nvlinks}
    assert states == {n: None if n == link else True for n in range(18)}
    assert [f.code for f in PROBE.check(facts) if f.status is Status.FAIL] == []
    node = build(snapshot)
    labels = {pair.label for pair in node.pairs if f"GPU{SICK}" in (pair.a, pair.b) and pair.nvlinks}
    assert labels == {"NV17"}, "the links that are known"
    assert all(pair.nvlinks_unread == 1 for pair in node.pairs if f"GPU{SICK}" in (pair.a, pair.b) and pair.nvlinks)
    _nothing_claimed(snapshot, name)


@each_row("symbol", ["nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType"])
@each_row("machine", [H100, "polaris-4xA100-nv4", TITAN])
def test_links_that_one_end_tells_are_links_though_the_other_end_is_silent(machine: str, symbol: str) -> None:
    """Direct links are counted at the end that is known; through a switch the far end is not needed."""
    healthy = build(scan(RecordedHost(recorded(machine))))
    node = build(scan(FailingHost(recorded(machine), symbol, "UNKNOWN", gpu=1)))
    known = {(pair.a, pair.b): pair.label for pair in healthy.pairs}
    lost = {pair.label for pair in node.pairs if "GPU1" in (pair.a, pair.b) and pair.label != known[pair.a, pair.b]}
    assert lost == ({"N/A"} if machine == H100 and symbol.endswith("DeviceType") else set()), "behind a switch or not"


def test_a_count_that_fails_is_taken_from_the_bus() -> None:
    """The GPUs answer all the same."""
    host = FailingHost(recorded(), "nvmlDeviceGetCount", "TIMEOUT", gpu=None)
    facts = facts_of(scan(host, (PROBE,)))
    assert [gpu.uuid for gpu in facts.gpus] == [gpu.uuid for gpu in facts_of(_healthy()).gpus]
    found = [f for f in PROBE.check(facts) if f.status is not Status.INFO]
    assert [(f.code, f.status) for f in found] == [("gpu.driver.unusable", "unknown")]
    assert found[0].evidence == ("nvmlDeviceGetCount = TIMEOUT",)


@pytest.mark.parametrize(("function", "kind", "severity"), rows("named")())
def test_the_evidence_names_the_function_that_failed(function, kind, severity, scanner_of):
    """Through the driver library: nvmlInit, or the look-up of a handle, on the way to another function."""
    with scanner_of(H100, inject=f"{function}={kind}") as scanner:
        found = findings(scanner.scan())
    first = [f for f in found if f.code.startswith(("gpu.driver", "gpu.device"))]
    assert {f.status for f in first} == {severity}
    assert all(function in f.evidence[0] for f in first)


def test_a_recording_names_the_function_that_failed(scanner_of):
    """The replay says the same."""
    with scanner_of(H100, inject=f"{HANDLE}@gpu2=no_permission") as scanner:
        live, content = scanner.capture()
    again = scan(RecordedHost(content), (PROBE,))
    assert facts_of(again).gpus[2].error == facts_of(live).gpus[2].error == f"NO_PERMISSION ({HANDLE})"


def test_a_driver_that_was_unloaded_is_initialised_again(scanner_of, tmp_path):
    """UNINITIALIZED in one scan is no state for ever."""
    failures = tmp_path / "failures"
    failures.write_text("nvmlDeviceGetTemperature=code:1")
    with scanner_of(H100, inject=f"@{failures}") as scanner:
        first = facts_of(scanner.scan())
        failures.write_text("")
        second = facts_of(scanner.scan())
    assert any("UNINITIALIZED" in question for gpu in first.gpus for question in gpu.unread)
    assert not any(gpu.unread for gpu in second.gpus)


def _facts(scanner: Scanner) -> GpuFacts:
    with scanner:
        return facts_of(scanner.scan())


def _without_xids(facts: GpuFacts) -> GpuFacts:
    """They come from this machine's kernel log, not from NVML."""
    return dataclasses.replace(facts, gpus=tuple(dataclasses.replace(gpu, xids=None) for gpu in facts.gpus))


def _others(facts: GpuFacts, sick: int) -> list[object]:
    return [gpu for gpu in _without_xids(facts).gpus if gpu.index != sick]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [H100, "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "l40s-4x-pcie", "titan-rtx-2x-nv2", "polaris-4xA100-nv4",
     "sick-h100-thermal", "sick-h100-nvlink-missing"],
)  # fmt: skip
def test_the_same_facts_through_the_driver_library_as_from_the_recording(name, scanner_of):
    """Every symbol, structure and error code passes through ctypes unharmed."""
    replayed = facts_of(recorded(name))
    assert replayed.gpus
    assert _without_xids(_facts(scanner_of(name))) == _without_xids(replayed)


def test_an_h100_host_reads_as_its_data_sheet_says(scanner_of):
    """Stated by hand, not taken from the recording."""
    facts = _facts(scanner_of(H100))
    gpu = facts.gpus[3]
    assert (facts.driver_version, facts.cuda_version, len(facts.gpus), len(facts.pairs)) == ("550.90.07", "12.4", 8, 28)
    assert (gpu.bus_id, gpu.name, gpu.compute_capability) == ("0000:61:00.0", "NVIDIA H100 80GB HBM3", (9, 0))
    assert gpu.memory_bytes == 81559 << 20
    assert (gpu.numa_node, gpu.cpu_affinity) == (0, "0-55,112-167")
    assert len(gpu.nvlinks) == 18
    assert {link.version for link in gpu.nvlinks} == {4}, "H100 answers 7 (NVLink 5.0) for its fourth generation"
    assert {link.remote_kind for link in gpu.nvlinks} == {"nvswitch"}
    assert {link.remote_bus_id for link in gpu.nvlinks} == {f"0000:{n}:00.0" for n in ("07", "08", "09", "0a")}
    assert (gpu.fabric_state, gpu.fabric_clique) == ("completed", None)
    assert (gpu.pcie_generation, gpu.pcie_width, gpu.mig_enabled, gpu.throttle_reasons) == (5, 16, False, ())
    assert facts.pairs[0].ancestor == "NODE"
    assert facts.pairs[-1].p2p_read == "ok"


def test_nonsense_in_one_answer_leaves_the_other_gpus_alone(scanner_of, tmp_path):
    """A driver that fills a structure with rubbish must not spread it."""
    replayed = facts_of(recorded())
    failures, spread = tmp_path / "failures", []
    failures.write_text("")
    with scanner_of(H100, inject=f"@{failures}") as scanner:
        for symbol in ("Name", "UUID", "PciInfo", "FieldValues", "NvLinkState", "GpuFabricInfoV", "P2PStatus",
                       "MigMode", "TopologyCommonAncestor", "ComputeRunningProcesses", "UtilizationRates"):  # fmt: skip
            failures.write_text(f"nvmlDeviceGet{symbol}@gpu4=garbage")
            facts = scanner.scan().facts(GpuFacts)
            if facts is None or facts == replayed or _others(facts, 4) != _others(replayed, 4):
                spread.append((symbol, facts))
    assert not spread


def test_text_that_the_library_prints_does_not_reach_the_answer(scanner_of):
    """Standard output of the child is the pipe; a chatty driver must not write into it."""
    assert len(_facts(scanner_of(H100, inject="nvmlDeviceGetName=noise")).gpus) == 8


@pytest.mark.long
@pytest.mark.parametrize(("inject", "words", "call"), rows("calls")())
def test_a_call_that_hangs_or_crashes_fails_the_probe_by_its_name_and_is_repeated_after_a_pause(
    inject, words, call, scanner_of, monkeypatch, tmp_path
):
    """The scans in between cost nothing, and the other probes answer all the while, with what is so now."""
    probes = (dataclasses.replace(BY_NAME["gpu"], timeout_seconds=3.0), BY_NAME["hostinfo"])
    with scanner_of(H100, inject=inject, probes=probes) as scanner:
        first = scanner.scan()
        monkeypatch.setenv("FAKE_NVML_INJECT", "")
        product = tmp_path / "root/sys/class/dmi/id/product_name"
        product.parent.mkdir(parents=True, exist_ok=True)
        product.write_text("another product\n", encoding="utf-8")
        second = scanner.scan()
    assert second.outcomes["hostinfo"].facts.product == "another product"
    for snapshot in (first, second):
        outcome = snapshot.outcomes["gpu"]
        assert isinstance(outcome, Failed)
        assert words in outcome.error and f"in {call};" in outcome.error and "10 minutes" in outcome.error
        assert isinstance(snapshot.outcomes["hostinfo"], Ok)
        assert next(f.code for f in findings(snapshot)) == "gpu.probe.failed"


def test_a_count_that_is_nonsense_costs_only_the_gpu_probe(scanner_of):
    with scanner_of(H100, inject="nvmlDeviceGetCount=garbage", probes=(BY_NAME["gpu"], BY_NAME["hostinfo"])) as scanner:
        snapshot = scanner.scan()
    outcome = snapshot.outcomes["gpu"]
    assert isinstance(outcome, Failed) and "not a number of GPUs" in outcome.error
    assert isinstance(snapshot.outcomes["hostinfo"], Ok)


def test_without_driver_a_host_without_gpus_is_absent(recording):
    """DRIVER_NOT_LOADED is a fault only where there is something to drive."""
    bare = recording("cpu-only-vm")
    bare["answers"]["nvml"] = {"nvmlDeviceGetCount": {"": {"$nvml": "DRIVER_NOT_LOADED"}}}
    assert isinstance(scan(RecordedHost(bare)).outcomes["gpu"], Absent)


def test_a_gpu_that_fails_between_two_scans_is_seen_and_so_is_its_return(scanner_of, tmp_path):
    """What the child stores between scans hides neither."""
    failures = tmp_path / "failures"
    failures.write_text("")
    with scanner_of(H100, inject=f"@{failures}") as scanner:
        first = scanner.scan().facts(GpuFacts)
        failures.write_text("*@gpu5=gpu_lost")
        lost = scanner.scan()
        failures.write_text("nvmlDeviceGetNvLinkState@gpu2=timeout")
        third = scanner.scan().facts(GpuFacts)
        failures.write_text("")
        fourth = scanner.scan().facts(GpuFacts)
    assert [(f.code, f.subject) for f in findings(lost)] == [("gpu.device.lost", "GPU5")]
    assert len(lost.facts(GpuFacts).pairs) == 21, "pairs of the seven that answer"
    assert [gpu.index for gpu in third.gpus if not gpu.nvlinks_known] == [2]
    assert fourth == first


def test_the_library_is_found_where_the_node_has_it(scanner_of, fake_nvml, monkeypatch):
    """Outside the loader's folders; what is there and is no library of this machine is passed over."""
    made = scanner_of(H100)
    monkeypatch.delenv("LD_LIBRARY_PATH")
    foreign = fake_nvml / "foreign"
    foreign.mkdir(exist_ok=True)
    (foreign / "libnvidia-ml.so.1").write_bytes(b"\x7fELF of another machine")
    monkeypatch.setenv("TOPOFLIGHT_DRIVER_PATHS", f"/nowhere:{foreign}:{fake_nvml}")
    assert len(_facts(made).gpus) == 8


@pytest.mark.parametrize(("loaded", "error", "severity"), [(True, "NO_DEVICE_FILES", Status.UNKNOWN),
                                                           (False, "DRIVER_NOT_LOADED", Status.FAIL)])  # fmt: skip
def test_a_container_without_device_files_is_no_broken_driver(loaded, error, severity, scanner_of, tmp_path):
    """NVML says "not loaded" of both; the kernel says which."""
    made = scanner_of(H100, inject="nvmlInit=driver_not_loaded")
    if loaded:
        (tmp_path / "root/sys/module/nvidia").mkdir(parents=True)
        (tmp_path / "root/sys/module/nvidia/version").write_text("580.126.09\n")
    with made:
        found = made.scan()
    (one,) = findings(found)
    assert one.code == "gpu.driver.unusable"
    assert loaded or "8 NVIDIA GPU(s)" in one.message
    assert one.status is severity and one.evidence == (f"nvmlInit = {error}",)
