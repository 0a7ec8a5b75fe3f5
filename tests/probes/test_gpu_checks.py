"""What the gpu probe concludes, on recorded machines and on single facts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rigs.tables import each_row
from scanned import scan

from contracts.finding import Finding, Status
from probes.gpu.facts import Gpu, GpuFacts, GpuPair, GpuProcess, NvLink
from probes.gpu.probe import PROBE, nvml_bus_id
from probes.gpu.read import cpu_list
from probes.host.nvml import sysfs_bus_id
from probes.host.recording import load

MACHINES = Path(__file__).parent.parent / "machines"
HEALTHY = Gpu(index=0, bus_id="0000:1b:00.0", name="NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30)


def _check(*gpus: Gpu, **facts: Any) -> list[Finding]:
    found = GpuFacts(**{"driver_version": "550", "cuda_version": "12.4", "gpus": gpus, **facts})
    return list(PROBE.check(found))


def _links(active: int, of: int) -> dict[str, Any]:
    return {"nvlinks_known": True, "nvlinks": tuple(NvLink(link=n, active=n < active) for n in range(of))}


@each_row(
    ("changes", "code", "severity"),
    [
        ({"pcie_width": 8, "pcie_width_max": 16}, "gpu.pcie.width", "fail"),
        ({"pcie_generation": 1, "pcie_generation_max": 4, "utilization_ratio": 0.9}, "gpu.pcie.generation", "fail"),
        ({"ecc_uncorrected": 1}, "gpu.ecc.uncorrected", "fail"),
        ({"remapping_failed": True}, "gpu.memory.remap_failed", "fail"),
        ({"remapped_rows_uncorrectable": 513}, "gpu.memory.remap_failed", "fail"),
        ({"remapping_pending": True}, "gpu.memory.remap_pending", "warn"),
        ({"retired_pages": 3}, "gpu.memory.retired", "info"),
        ({"temperature_celsius": 84.0}, "gpu.thermal.hot", "warn"),
        ({"temperature_celsius": 80.0, "temperature_slowdown_celsius": 79.0}, "gpu.thermal.hot", "warn"),
        ({"throttle_reasons": ("hw_slowdown",)}, "gpu.clocks.slowdown", "fail"),
        ({"throttle_reasons": ("sw_thermal",)}, "gpu.thermal.throttling", "warn"),
        ({"throttle_reasons": ("hw_power_brake", "hw_slowdown")}, "gpu.power.brake", "fail"),
        ({"throttle_reasons": ("hw_slowdown", "hw_thermal")}, "gpu.thermal.throttling", "fail"),
        (
            {
                "sm_clock_hertz": 1050e6,
                "sm_clock_max_hertz": 1980e6,
                "utilization_ratio": 1.0,
                "throttle_reasons": ("sw_thermal",),
            },
            "gpu.thermal.throttling",
            "fail",
        ),
        ({"throttle_reasons": ("sw_power_cap",)}, "gpu.power.capped", "info"),
        ({"power_limit_watts": 340.0, "power_limit_default_watts": 400.0}, "gpu.power.limit", "warn"),
        ({"power_limit_watts": 280.0, "power_limit_default_watts": 400.0}, "gpu.power.limit", "fail"),
        ({"mig_enabled": True}, "gpu.mig.enabled", "fail"),
        ({"compute_mode": "prohibited"}, "gpu.device.mode", "fail"),
        ({"compute_mode": "exclusive_process"}, "gpu.device.mode", "info"),
        ({"fabric_state": "in_progress"}, "gpu.fabric.incomplete", "fail"),
        ({"fabric_state": "completed", "fabric_degraded": True}, "gpu.fabric.degraded", "fail"),
        ({"bar1_bytes": 256 << 20}, "gpu.bar1.small", "info"),
        ({"persistence_mode": False}, "gpu.persistence.off", "info"),
        ({"processes": (GpuProcess(pid=7, memory_bytes=None),)}, "gpu.process.running", "info"),
        ({"error": "GPU_IS_LOST (nvmlDeviceGetHandleByIndex)"}, "gpu.device.lost", "fail"),
        ({"error": "RESET_REQUIRED (nvmlDeviceGetHandleByIndex)"}, "gpu.device.lost", "fail"),
        ({"error": "NO_PERMISSION (nvmlDeviceGetHandleByIndex)"}, "gpu.device.denied", "unknown"),
        ({"error": "TIMEOUT (nvmlDeviceGetHandleByIndex)"}, "gpu.device.unread", "unknown"),
        ({"recovery_action": "gpu_reset"}, "gpu.device.recovery", "fail"),
        ({"recovery_action": "action_9"}, "gpu.device.recovery", "fail"),
        ({"fabric_state": "completed", "fabric_faults": ("route_unhealthy",)}, "gpu.fabric.unhealthy", "fail"),
        ({"fabric_state": "completed", "fabric_summary": "limited_capacity"}, "gpu.fabric.unhealthy", "warn"),
        ({"fabric_state": "completed", "fabric_summary": "unhealthy"}, "gpu.fabric.unhealthy", "fail"),
        ({"fabric_state": "completed", "fabric_status": "UNKNOWN"}, "gpu.fabric.incomplete", "fail"),
        ({"ecc_enabled": False, "ecc_pending": False}, "gpu.ecc.off", "warn"),
        ({"ecc_enabled": False, "ecc_pending": False, "ecc_default": False}, "gpu.ecc.off", "info"),
        ({"ecc_enabled": True, "ecc_pending": False}, "gpu.ecc.off", "info"),
        ({"ecc_uncorrected_lifetime": 2}, "gpu.ecc.lifetime", "info"),
        ({"sram_threshold_exceeded": True}, "gpu.ecc.sram", "fail"),
        ({"sram_uncorrected": 1}, "gpu.ecc.sram", "fail"),
        ({"remap_banks_exhausted": 1}, "gpu.memory.remap_exhausted", "warn"),
        ({"name": "NVIDIA GB200", "c2c_enabled": False}, "gpu.c2c.off", "warn"),
        ({"memory_used_bytes": 39 << 30, "utilization_ratio": 0.0}, "gpu.memory.held", "fail"),
        ({"memory_used_bytes": 20 << 30, "utilization_ratio": 0.0}, "gpu.memory.held", "warn"),
        ({"memory_used_bytes": 39 << 30}, "gpu.memory.held", "fail"),
        ({"memory_used_bytes": 20 << 30}, "gpu.memory.held", "warn"),
        ({"mig_enabled": False, "mig_pending": True}, "gpu.mig.enabled", "warn"),
        ({"virtualization": "vgpu"}, "gpu.device.vgpu", "info"),
        ({"memory_used_bytes": 39 << 30, "utilization_ratio": 0.9}, "gpu.memory.held", "info"),
        (
            {"sm_clock_hertz": 345e6, "sm_clock_max_hertz": 1980e6, "utilization_ratio": 1.0, "throttle_reasons": ()},
            "gpu.clocks.low",
            "fail",
        ),
        ({"xids": (74, 74)}, "gpu.xid.hardware", "warn"),
        ({"xid_events": (79,)}, "gpu.xid.hardware", "warn"),
        ({"xids": (39,)}, "gpu.xid.driver", "info"),
        ({"xids": (13, 31)}, "gpu.xid.application", "info"),
        (
            {
                "name": "NVIDIA A30",
                "nvlinks_known": True,
                "nvlinks": (NvLink(link=2, active=True, errors={"replay": 5, "recovery": 0}),),
            },
            "gpu.nvlink.errors",
            "info",
        ),
    ],
)
def test_one_fault_is_one_finding(changes: dict[str, Any], code: str, severity: str) -> None:
    """Exactly the code that belongs to it, with evidence, and a remedy unless it is a note."""
    found = _check(dataclasses.replace(HEALTHY, **changes))
    assert [(f.code, f.status) for f in found] == [(code, severity)]
    assert found[0].evidence
    assert found[0].remedy or found[0].status is Status.INFO
    assert code in PROBE.codes


@each_row(
    "changes",
    [
        {"pcie_generation": 1, "pcie_generation_max": 5, "utilization_ratio": 0.0},
        {"pcie_generation": 1, "pcie_generation_max": 5},
        {"temperature_celsius": 83.0, "temperature_slowdown_celsius": 90.0},
        {"throttle_reasons": ("applications_clocks",)},
        {"power_limit_watts": 400.0, "power_limit_default_watts": 400.0},
        {"fabric_state": "not_supported"},
        {"remapped_rows_uncorrectable": 512},
        {"pcie_generation": 1, "pcie_generation_max": 5, "utilization_ratio": 0.1},
        {"fabric_state": "completed", "fabric_faults": (), "fabric_summary": "healthy"},
        {"recovery_action": "none"},
        {"ecc_enabled": True, "ecc_pending": True},
        {"memory_used_bytes": 1 << 30, "utilization_ratio": 0.0},
        {"name": "NVIDIA H100 80GB HBM3", "c2c_enabled": False},
        {"sm_clock_hertz": 345e6, "sm_clock_max_hertz": 1980e6, "utilization_ratio": 0.0, "throttle_reasons": ()},
        {"sm_clock_hertz": 1755e6, "sm_clock_max_hertz": 1980e6, "utilization_ratio": 1.0, "throttle_reasons": ()},
        {"sm_clock_hertz": 345e6, "sm_clock_max_hertz": 1980e6, "utilization_ratio": 1.0},
        {},
    ],
)
def test_what_is_usual_or_unknown_is_no_finding(changes: dict[str, Any]) -> None:
    """An idle GPU's slow PCIe link above all."""
    assert _check(dataclasses.replace(HEALTHY, **changes)) == []


@each_row(
    ("second", "state", "expected"),
    [
        ("aa/1", "completed", []),
        ("aa/2", "completed", ["gpu.fabric.split"]),
        ("bb/1", "completed", ["gpu.fabric.split"]),
        (None, "completed", ["gpu.fabric.split"]),
        (None, "not_supported", []),
    ],
)
def test_gpus_of_one_host_belong_into_one_clique(second: str | None, state: str, expected: list[str]) -> None:
    """A GPU whose fabric is not there is in no clique, and another finding's business."""
    first = dataclasses.replace(HEALTHY, fabric_state="completed", fabric_clique="aa/1")
    other = dataclasses.replace(HEALTHY, index=1, fabric_state=state, fabric_clique=second)
    assert [finding.code for finding in _check(first, other)] == expected


def test_a_gpu_is_compared_with_its_twins_only() -> None:
    """Boards with different numbers of links may share a host; the same board may not differ."""
    full = dataclasses.replace(HEALTHY, **_links(12, 12))
    short = dataclasses.replace(HEALTHY, index=1, **_links(8, 12))
    found = _check(full, short)
    assert [(f.code, f.subject) for f in found] == [("gpu.nvlink.missing", "GPU1")]
    assert "8, 9, 10, 11" in found[0].evidence[0]
    for kind, manager in (("gpu", False), ("nvswitch", True), (None, True)):  # a switch needs its fabric manager
        wired = tuple(dataclasses.replace(link, remote_kind=kind) for link in short.nvlinks)
        told = _check(full, dataclasses.replace(short, nvlinks=wired))[0]
        assert ("fabric manager" in told.remedy) is manager, told
    other = dataclasses.replace(short, name="NVIDIA A30")
    assert [f.code for f in _check(full, other)] == ["gpu.device.mixed", "gpu.nvlink.missing"]


@each_row(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", ["gpu.nvlink.none"]),
        ("NVIDIA H200", ["gpu.nvlink.none"]),
        ("NVIDIA GB200", ["gpu.nvlink.none"]),
        ("NVIDIA A100-SXM4-80GB", ["gpu.nvlink.none"]),
        ("NVIDIA H100 PCIe", []),
        ("NVIDIA H200 NVL", []),
        ("NVIDIA A40", []),
        ("NVIDIA L40S", []),
    ],
)
def test_no_link_at_all_is_a_fault_only_where_links_are_soldered_on(name: str, expected: list[str]) -> None:
    """A PCIe card may go without a bridge."""
    pair = [dataclasses.replace(HEALTHY, index=i, name=name, **_links(0, 4)) for i in range(2)]
    assert [f.code for f in _check(*pair)] == expected
    unknown = [dataclasses.replace(gpu, nvlinks=(), nvlinks_known=False) for gpu in pair]
    assert _check(*unknown) == []


def test_refused_p2p_is_one_finding_a_reason() -> None:
    """Not one for each of 28 pairs."""
    ends = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    for ancestor, severity in (("PIX", "fail"), ("SYS", "warn")):  # across the CPU NCCL goes by itself
        pairs = tuple(GpuPair(a=a, b=b, p2p_read="chipset_not_supported", ancestor=ancestor) for a, b in ends)
        found = _check(pairs=pairs)
        assert [(f.code, f.status) for f in found] == [("gpu.p2p.refused", severity)]
    assert "and 24 more pairs" in found[0].message
    by_design = _check(pairs=(GpuPair(a=0, b=1, p2p_read="gpu_not_supported"), GpuPair(a=0, b=2, p2p_read=None)))
    assert [f.status for f in by_design] == ["info"]


def test_a_lost_gpu_is_placed_by_what_is_left_on_the_bus() -> None:
    """It does not tell its address itself; the kernel's log does, in the driver's words."""
    facts = scan(load(MACHINES / "sick-h100-gpu-lost.json")).facts(GpuFacts)
    assert facts is not None
    lost = facts.gpus[5]
    assert (lost.bus_id, lost.xids) == ("0000:c3:00.0", (79,))
    finding = next(iter(PROBE.check(facts)))
    assert "0000:c3:00.0" in finding.message
    assert "Xid 79" in finding.evidence[0]
    assert [gpu.xids for gpu in facts.gpus if gpu is not lost] == [()] * 7


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
    assert nvml_bus_id(sysfs) == nvml


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
    text = cpu_list(words)
    if not cpus:
        assert text is None
        return
    assert text is not None
    back: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        back.update(range(int(first), int(last or first) + 1))
    assert back == cpus
