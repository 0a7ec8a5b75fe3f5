"""The gpu probe through pynvml and a libnvidia-ml.so.1 of our own, in a child process as on a live machine."""

import dataclasses

import pytest
from gpu_machines import H100, facts_of, recorded
from rigs.recorded import findings
from rigs.tables import rows_of
from scanned import scan

from contracts.finding import Status
from probes.api import Absent, Failed, Ok
from probes.gpu.facts import GpuFacts
from probes.host.recording import RecordedHost
from probes.registry import BY_NAME
from probes.scanner import Scanner

rows = rows_of(__file__)


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
