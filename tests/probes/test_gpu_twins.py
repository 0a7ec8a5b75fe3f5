"""What the gpu probe says of GPUs beside each other, of what the process may use, and of impossible numbers."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

from scanned import scan

from agent.checks.view import for_next_job, look
from agent.metrics import _link_values as link_values
from contracts.finding import Status
from contracts.tables import read_table
from probes.api import Ok
from probes.gpu import facts as gpu_facts
from probes.gpu.facts import Gpu, GpuFacts, GpuPair, NvLink
from probes.gpu.probe import PROBE
from probes.host.recording import RecordedHost

MACHINES = Path(__file__).parent.parent / "machines"
H100 = "hgx-h100-8xH100-8hca"
CONTENT: dict[str, Any] = json.loads((MACHINES / f"{H100}.json").read_text(encoding="utf-8"))
ALIKE = Gpu(
    index=0, bus_id=None, name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, sm_clock_max_hertz=1.98e9,
    power_limit_default_watts=700.0, pcie_generation_max=5, pcie_width_max=16, bar1_bytes=128 << 30,
)  # fmt: skip


def facts_of(*gpus: Gpu, **more: Any) -> GpuFacts:
    numbered = tuple(dataclasses.replace(gpu, index=n) for n, gpu in enumerate(gpus))
    return GpuFacts(**{"driver_version": "580", "cuda_version": "13.0", "gpus": numbered, **more})


def told(facts: GpuFacts) -> list[tuple[str, str, str]]:
    return [(f.code, f.status, f.subject) for f in PROBE.check(facts)]


def test_one_gpu_unlike_its_twins_is_named_with_its_cost() -> None:
    rows: list[tuple[dict[str, Any], int, str, str, str]] = [
        # what GPU1 has, number of GPUs, code, severity, words
        ({"pcie_generation_max": 3}, 8, "gpu.pcie.generation", "fail", "25%"),
        ({"pcie_width_max": 8}, 8, "gpu.pcie.width", "fail", "50%"),
        ({"pcie_width_max": 8}, 2, "gpu.pcie.width", "warn", "50%"),  # which of two is right nobody knows
        ({"memory_bytes": 40 << 30}, 8, "gpu.device.mixed", "fail", "40.0 GiB"),
        ({"memory_bytes": 94 << 30}, 8, "gpu.device.mixed", "warn", "94.0 GiB"),
        ({"memory_bytes": 79 << 30}, 8, "", "", ""),  # what ECC and the driver keep
        ({"sm_clock_max_hertz": 1.41e9}, 4, "gpu.clocks.low", "fail", "1410 MHz"),
        ({"sm_clock_max_hertz": 1.83e9}, 4, "gpu.clocks.low", "warn", "1830 MHz"),
        ({"power_limit_default_watts": 500.0}, 8, "gpu.power.limit", "fail", "500 W"),
        ({"bar1_bytes": 96 << 30}, 8, "gpu.bar1.small", "warn", "98304 MiB"),
        ({"bar1_bytes": None, "memory_bytes": None}, 8, "", "", ""),
        ({"mig_enabled": True, "memory_bytes": 70 << 30, "mig_slices": ()}, 8, "gpu.mig.enabled", "fail", "MIG"),
        ({"name": "NVIDIA A30", "memory_bytes": 24 << 30}, 8, "gpu.device.mixed", "warn", "different models"),
    ]  # fmt: skip
    wrong = []
    for changes, count, code, severity, words in rows:
        twins = [ALIKE, dataclasses.replace(ALIKE, **changes), *[ALIKE] * (count - 2)]
        found = [f for f in PROBE.check(facts_of(*twins)) if f.status is not Status.INFO]
        got = [(f.code, f.status, f.subject) for f in found]
        wanted = [(code, severity, "" if "different" in words else "GPU1")] if code else []
        if got != wanted or not all(words in f.message and f.remedy for f in found):
            wrong.append((changes, count, got, [f.message for f in found]))
    assert not wrong, wrong


def links(active: int, of: int, kind: str | None) -> dict[str, Any]:
    every = (NvLink(link=n, active=n < active, remote_kind=kind if n < active else None) for n in range(of))
    return {"nvlinks_known": True, "nvlinks": tuple(every)}


def test_links_that_all_gpus_lack_count_by_their_share() -> None:
    sxm, unknown, card = "NVIDIA H100 80GB HBM3", "NVIDIA X900", "NVIDIA A40"
    rows: list[tuple[str, int, int, str | None, list[str]]] = [
        # model, active links, links that the driver lists, where they end, severities
        (sxm, 18, 18, "nvswitch", []),
        (sxm, 16, 18, "nvswitch", ["fail"] * 4),
        (sxm, 16, 16, "nvswitch", ["fail"] * 4),  # the driver no longer lists the two
        (sxm, 17, 18, "nvswitch", ["warn"] * 4),
        (unknown, 16, 18, "nvswitch", ["fail"] * 4),  # a board without a row counts its own
        (unknown, 16, 16, "nvswitch", []),
        ("Tesla V100-SXM2-16GB", 4, 6, "gpu", ["warn"] * 4),  # half of a mesh, as instances have it
        ("Tesla V100-SXM2-16GB", 4, 6, None, ["warn"] * 4),
        (card, 2, 4, "gpu", ["info"] * 4),
        (card, 0, 4, None, []),  # no bridge
    ]
    wrong = []
    for name, active, listed, kind, wanted in rows:
        gpu = Gpu(index=0, bus_id=None, name=name, **links(active, listed, kind))
        found = list(PROBE.check(facts_of(gpu, gpu, gpu, gpu)))
        if [f.status for f in found] != wanted or {f.code for f in found} - {"gpu.nvlink.missing"}:
            wrong.append((name, active, listed, kind, [(f.code, f.status) for f in found]))
    assert not wrong, wrong
    message = next(iter(PROBE.check(facts_of(Gpu(index=0, bus_id=None, name=sxm, **links(16, 18, "nvswitch"))))))
    assert message.message == (
        "GPU0 has 16 of 18 NVLinks active. Collectives on this node run at about 89 % of the normal NVLink bandwidth."
    )
    assert message.remedy.startswith("Reset the GPU (`nvidia-smi -r -i 0`); if the links stay down,")


def test_p2p_that_is_unknown_is_no_pass_and_a_product_without_it_is_no_fault() -> None:
    rows = [
        ("NVIDIA GeForce RTX 4090", "chipset_not_supported", "info", False),
        ("NVIDIA GeForce RTX 4090", "not_supported", "info", False),
        ("NVIDIA GeForce RTX 4090", "unknown", "unknown", False),
        ("NVIDIA GeForce RTX 4090", "disabled_by_regkey", "fail", False),
        ("NVIDIA A40", "chipset_not_supported", "fail", True),
        ("NVIDIA A40", "unknown", "unknown", False),
    ]
    wrong = []
    for name, status, severity, acs in rows:
        gpu = Gpu(index=0, bus_id=None, name=name)
        pair = GpuPair(a=0, b=1, ancestor="PIX", p2p_read=status)
        (found,) = PROBE.check(facts_of(gpu, gpu, pairs=(pair,)))
        if (found.code, found.status, "ACS" in found.remedy) != ("gpu.p2p.refused", severity, acs):
            wrong.append((name, status, found))
    assert not wrong, wrong


def test_cuda_visible_devices_is_read_as_cuda_reads_it() -> None:
    gpus = [dataclasses.replace(ALIKE, uuid=f"GPU-{n}aaa") for n in range(8)]
    every = ",".join(map(str, range(8)))
    rows = [
        (None, None), (every, None), ("7,6,5,4,3,2,1,0", None), ("MIG-1,MIG-2", None),
        ("-1", ("fail", "0 of 8")), ("", ("fail", "0 of 8")), ("0,9", ("fail", "1 of 8")), ("0,0", ("fail", "0 of 8")),
        ("NoDevFiles", ("fail", "0 of 8")), ("8,0", ("fail", "0 of 8")), (f"{every},9", ("fail", "8 of 8")),
        ("0,1,2,3", ("info", "4 of 8")), (" 3 ", ("info", "1 of 8")), ("GPU-2,GPU-3aaa", ("info", "2 of 8")),
        ("GPU-", ("fail", "0 of 8")), ("GPU-ffff", ("fail", "0 of 8")),
    ]  # fmt: skip
    wrong = []
    for value, wanted in rows:
        found = [f for f in PROBE.check(facts_of(*gpus, visible=value)) if f.code == "gpu.device.hidden"]
        got = [(f.status, wanted is not None and wanted[1] in f.message) for f in found]
        if got != ([(wanted[0], True)] if wanted else []):
            wrong.append((value, wanted, found))
    assert not wrong, wrong


def changed(symbol: str, gpu: str, answer: Any) -> RecordedHost:
    content = copy.deepcopy(CONTENT)
    key = next(key for key in content["answers"]["nvml"][symbol] if key.split(",")[0] == gpu)
    key = f"{gpu}{answer[0]}" if isinstance(answer, tuple) else key
    content["answers"]["nvml"][symbol][key] = answer[1] if isinstance(answer, tuple) else answer
    return RecordedHost(content)


def test_a_number_that_is_impossible_is_unknown_and_claims_nothing() -> None:
    ones, most = (1 << 32) - 1, (1 << 64) - 1
    rows: list[tuple[str, Any, str]] = [
        ("nvmlDeviceGetRemappedRows", [0, ones, 0, 0], "gpu.memory.remap_failed"),
        ("nvmlDeviceGetRemappedRows", [0, 0, ones, 0], "gpu.memory.remap_pending"),
        ("nvmlDeviceGetTemperature", ones, "gpu.thermal.hot"),
        ("nvmlDeviceGetTemperature", -5, "gpu.thermal.hot"),
        ("nvmlDeviceGetTemperature", "hot", "gpu.thermal.hot"),
        ("nvmlDeviceGetTotalEccErrors", (",1,0", most), "gpu.ecc.uncorrected"),
        ("nvmlDeviceGetTotalEccErrors", (",1,1", most), "gpu.ecc.lifetime"),
        ("nvmlDeviceGetMemoryInfo", {"total": 80 << 30, "free": 0, "used": 90 << 30}, "gpu.memory.held"),
        ("nvmlDeviceGetMemoryInfo", {"total": 0, "free": 0, "used": 0}, "gpu.memory.held"),
        ("nvmlDeviceGetMigMode", [ones, 0], "gpu.mig.enabled"),
        ("nvmlDeviceGetComputeMode", 77, "gpu.device.mode"),
        ("nvmlDeviceGetEccMode", [2, 2], "gpu.ecc.off"),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", most, "gpu.thermal.throttling"),
        ("nvmlDeviceGetUtilizationRates", {"gpu": ones, "memory": 0}, "gpu.clocks.low"),
        ("nvmlDeviceGetClockInfo", ones, "gpu.clocks.low"),
        ("nvmlDeviceGetEnforcedPowerLimit", ones, "gpu.power.limit"),
        ("nvmlDeviceGetCurrPcieLinkWidth", 255, "gpu.pcie.width"),
        ("nvmlDeviceGetMaxPcieLinkGeneration", ones, "gpu.pcie.generation"),
        ("nvmlDeviceGetNvLinkState", ones, "gpu.nvlink.missing"),
        ("nvmlDeviceGetP2PStatus", 99, "gpu.p2p.refused"),
        ("nvmlDeviceGetPersistenceMode", ones, "gpu.persistence.off"),
        ("nvmlDeviceGetBAR1MemoryInfo", {"bar1Total": most, "bar1Free": 0, "bar1Used": 0}, "gpu.bar1.small"),
        ("nvmlDeviceGetComputeRunningProcesses", [{"pid": ones, "usedGpuMemory": 1}], "gpu.process.running"),
        ("nvmlDeviceGetFieldValues", (",230,306,307,91", [ones, most, ones, 18]), "gpu.device.recovery"),
    ]  # fmt: skip
    wrong = []
    for symbol, answer, code in rows:
        facts = scan(changed(symbol, "gpu3", answer), (PROBE,)).facts(GpuFacts)
        assert facts is not None, symbol
        found = list(PROBE.check(facts))
        unknown = {f.code for f in found if f.status is Status.UNKNOWN}
        if code not in unknown or len(unknown) != len({f.code for f in found}):
            wrong.append((symbol, answer, [(f.code, f.status, f.message) for f in found]))
    assert not wrong, wrong
    questions = read_table(gpu_facts.__file__, "questions.toml")
    assert all(set(row) <= {"codes", "range", "items", "fields", "source"} for row in questions.values())
    assert {code for row in questions.values() for code in row.get("codes", ())} <= set(PROBE.codes)


def test_no_remapping_pending_is_known_by_either_word() -> None:
    for rows, field, wanted in (([0, 0, 0, 0], None, False), ([0, 1, 1, 0], None, True), ([0, 1, 0, 0], 1, True)):
        content = copy.deepcopy(CONTENT)
        content["answers"]["nvml"]["nvmlDeviceGetRemappedRows"]["gpu0"] = rows
        content["answers"]["nvml"]["nvmlDeviceGetFieldValues"]["gpu0,230,306,307,91"] = [0, None, field, 18]
        facts = scan(RecordedHost(content), (PROBE,)).facts(GpuFacts)
        assert facts is not None and facts.gpus[0].remapping_pending is wanted


def test_sentences_say_what_is_so_and_remedies_lift_what_they_name() -> None:
    busy = {"sm_clock_hertz": 0.7e9, "sm_clock_max_hertz": 1.98e9, "utilization_ratio": 0.99}
    idle = {"sm_clock_hertz": 1.98e9, "sm_clock_max_hertz": 1.98e9, "utilization_ratio": 0.0}
    rows: list[tuple[dict[str, Any], str, str, str]] = [
        # facts, words of message or remedy, words that neither may have, severity
        ({**idle, "throttle_reasons": ("sw_thermal",)}, "loses no speed now", "every rank waits", "warn"),
        ({**busy, "throttle_reasons": ("sw_thermal",)}, "Every rank waits", "no speed", "fail"),
        ({**busy, "throttle_reasons": ("sw_power_cap",)}, "-pl 700", "-rgc", "fail"),
        ({**busy, "throttle_reasons": ("applications_clocks",)}, "-rac", "-rgc", "fail"),
        ({**busy, "throttle_reasons": ()}, "-rgc", "-pl", "fail"),
        ({"fabric_state": "in_progress"}, "Wait until", "Start the fabric manager", "fail"),
        ({"fabric_state": "not_started"}, "Start the fabric manager", "Wait until", "fail"),
        ({"ecc_uncorrected_lifetime": 0, "sram_uncorrected_lifetime": 4},
         "0 by the counter of all memory and 4 by the counter of on-chip memory", "of these", "info"),
        ({"mig_enabled": True, "mig_pending": False}, "MIG is off after the next reset", "-mig 0", "fail"),
    ]  # fmt: skip
    wrong = []
    for changes, has, lacks, severity in rows:
        worst = next(iter(f for f in PROBE.check(facts_of(dataclasses.replace(ALIKE, **changes)))
                          if f.code != "gpu.power.capped"), None)  # fmt: skip
        text = f"{worst.message} {worst.remedy}" if worst else ""
        if worst is None or has not in text or lacks.lower() in text.lower() or worst.status != severity:
            wrong.append((changes, worst))
    assert not wrong, wrong
    (secret,) = PROBE.check(facts_of(ALIKE, confidential=True))
    assert (secret.code, secret.status) == ("gpu.device.confidential", Status.WARN)


def test_full_memory_fails_the_next_job_whoever_holds_it() -> None:
    """The node of a running job is well; a job that is to start there now does not fit."""
    snapshot = scan(RecordedHost(CONTENT))
    facts = snapshot.facts(GpuFacts)
    assert facts is not None
    for share, busy, scanned, gate in (
        (0.93, 0.9, "info", "fail"),
        (0.5, 0.9, "info", "info"),
        (0.93, 0, "fail", "fail"),
    ):
        size = facts.gpus[2].memory_bytes or 0
        gpu = dataclasses.replace(facts.gpus[2], memory_used_bytes=int(share * size), utilization_ratio=busy)
        full = dataclasses.replace(facts, gpus=(*facts.gpus[:2], gpu, *facts.gpus[3:]))
        now = dataclasses.replace(snapshot, outcomes={**snapshot.outcomes, "gpu": Ok(facts=full)})
        checks = look((now,)).checks
        of = {c.status for c in checks if c.code == "gpu.memory.held" and c.subject == "GPU2"}
        at_gate = {
            c.status for c in for_next_job(checks, (now,)) if c.code == "gpu.memory.held" and c.subject == "GPU2"
        }
        assert (of, at_gate) == ({scanned}, {gate}), (share, busy)


def test_a_gpu_or_a_driver_that_does_not_answer_has_no_links_and_no_sample_of_them() -> None:
    """Neither "SYS" nor 0 NVLinks nor a bandwidth: of a board that may have NVLink PCIe alone tells nothing."""
    whole = scan(RecordedHost(CONTENT))
    facts = whole.facts(GpuFacts)
    assert facts is not None
    lost = dataclasses.replace(facts.gpus[5], error="GPU_IS_LOST (nvmlDeviceGetName)", nvlinks=(), nvlinks_known=False)
    none = {"driver_version": None, "cuda_version": None, "gpus": (), "pairs": (), "pci_gpus": 8}
    rows = [
        ("one is lost", dataclasses.replace(facts, gpus=(*facts.gpus[:5], lost, *facts.gpus[6:])), 21, "GPU5"),
        ("no driver", dataclasses.replace(facts, driver_error="LIB_RM_VERSION_MISMATCH", **none), 0, ""),  # type: ignore[arg-type]
    ]
    for what, changed_facts, known, name in rows:
        view = look((dataclasses.replace(whole, outcomes={**whole.outcomes, "gpu": Ok(facts=changed_facts)}),))
        (node,) = view.topologies
        gpus = {gpu.name for gpu in node.gpus}
        unknown = [pair for pair in node.pairs if {pair.a, pair.b} <= gpus and pair.label == "N/A"]
        assert len(unknown) == 28 - known and all(name in (pair.a, pair.b) or not name for pair in unknown), what
        samples = {name: values for name, values in link_values(node) if name.startswith("gpu_link_")}
        assert {len(values) for values in samples.values()} == {2 * known}, (what, samples)
