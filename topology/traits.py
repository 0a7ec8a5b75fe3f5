"""What of a snapshot matters for training and should be the same yesterday and today, here and on the neighbour.

Left out on purpose: what names one machine (addresses, GUIDs, serial numbers) and what moves by itself (temperature,
load, memory in use, an idle GPU's link generation).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from contracts.finding import Status
from hardware.units import GIGA
from probes.api import Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import RULES
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort
from topology.build import build
from topology.graph import NodeTopology

FAIL, WARN, INFO = Status.FAIL, Status.WARN, Status.INFO
_MILDEST_FIRST = (INFO, Status.UNKNOWN, WARN, FAIL)
HOLDING = ("gpu.thermal.throttling", "gpu.clocks.", "gpu.power.")  # findings on what holds a GPU's clocks down
UNLIMITED = "unlimited"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """One comparable property of one part of a host."""

    subject: str  # "GPU5", "mlx5_3:1", "memlock"
    what: str  # "PCIe width"; may be empty where the subject says it all
    value: str  # for people: "x16", "64 KiB"
    severity: Status  # how bad it is when it differs
    size: float | None = None  # where more is better: then growth on the same host is good news

    @property
    def key(self) -> tuple[str, str]:
        """What makes two traits comparable."""
        return self.subject, self.what


def traits(
    snapshot: Snapshot, like: Snapshot | None = None, node: NodeTopology | None = None
) -> dict[tuple[str, str], Trait]:
    """Every trait of a snapshot by its key; a GPU has the name of the one in its place in `like`, by PCI address.

    `node` is its topology where that is built already.

    NVML numbers the GPUs that it finds: where one is gone, those behind it have the numbers of others.
    """
    found: dict[tuple[str, str], Trait] = {}
    names = {} if like is None else _names_by_place(snapshot.facts(GpuFacts), like.facts(GpuFacts))
    links = partial(_links, node=node)
    for source in (_probes, _gpus, _pci, _rdma, _interfaces, _limits, _host, links):
        for trait in source(snapshot):
            named = replace(trait, subject=_GPU_NAME.sub(lambda name: names.get(name[0], name[0]), trait.subject))
            found.setdefault(named.key, named)
    return found


_GPU_NAME = re.compile(r"\bGPU\d+\b")


def _names_by_place(mine: GpuFacts | None, theirs: GpuFacts | None) -> dict[str, str]:
    """Names of our GPUs -> their names; none where the machines differ in where their GPUs are."""
    if mine is None or theirs is None:
        return {}
    places = {gpu.bus_id: f"GPU{gpu.index}" for gpu in theirs.gpus}
    here = {gpu.bus_id for gpu in mine.gpus}
    if None in here | places.keys() or not (here <= places.keys() or places.keys() <= here):
        return {}
    return {f"GPU{gpu.index}": places.get(gpu.bus_id, f"GPU at {gpu.bus_id}") for gpu in mine.gpus}


def _trait(subject: str, what: str, value: object, severity: Status, size: float | None = None) -> Iterator[Trait]:
    """One trait; none where the value is unknown, since unknown differs from nothing."""
    if value is not None:
        text = {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
        yield Trait(subject=subject, what=what, value=text, severity=severity, size=size)


def size_text(value: float | None) -> str:
    """Bytes for people, None is no limit."""
    if value is None:
        return UNLIMITED
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:g} B"


def _rate(value: float | None) -> str | None:
    return f"{value * 8 / GIGA:g} Gb/s" if value else None


def _probes(snapshot: Snapshot) -> Iterator[Trait]:
    for name, outcome in snapshot.outcomes.items():
        answered = isinstance(outcome, Ok)
        state = "answers" if answered else f"{type(outcome).__name__.lower()}"
        yield from _trait(f"probe {name}", "", state, FAIL if name in ("gpu", "rdma") else WARN, float(answered))


def _gpus(snapshot: Snapshot) -> Iterator[Trait]:
    facts = snapshot.facts(GpuFacts)
    if facts is None:
        return
    yield from _trait("driver", "", facts.driver_version, WARN)
    yield from _trait("driver", "error", facts.driver_error or "none", FAIL, float(facts.driver_error is None))
    yield from _trait("CUDA", "", facts.cuda_version, INFO)
    yield from _trait("GPUs", "", len(facts.gpus), FAIL, len(facts.gpus))
    for gpu in facts.gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Gpu) -> Iterator[Trait]:
    name = f"GPU{gpu.index}"
    if gpu.error is None or gpu.broken:  # what the driver refuses to say is no state
        yield from _trait(name, "state", f"lost ({gpu.error})" if gpu.error else "ok", FAIL, 0.0 if gpu.error else 1.0)
    yield from _trait(name, "model", gpu.name, FAIL)
    if gpu.memory_bytes is not None:
        yield from _trait(name, "memory", size_text(gpu.memory_bytes), WARN)
    if gpu.nvlinks_known:
        up = sum(1 for link in gpu.nvlinks if link.active)
        yield from _trait(name, "NVLinks", up, FAIL, up)
    width = f"x{gpu.pcie_width}" if gpu.pcie_width else None
    yield from _trait(name, "PCIe width", width, FAIL, gpu.pcie_width)
    generation = f"gen {gpu.pcie_generation_max}" if gpu.pcie_generation_max else None
    yield from _trait(name, "PCIe at most", generation, WARN, gpu.pcie_generation_max)
    yield from _trait(name, "fabric", gpu.fabric_state, FAIL)
    yield from _trait(name, "NVSwitch bandwidth degraded", gpu.fabric_degraded, FAIL)
    yield from _trait(name, "MIG", gpu.mig_enabled, FAIL)
    yield from _trait(name, "compute mode", gpu.compute_mode, WARN)
    yield from _trait(name, "persistence mode", gpu.persistence_mode, INFO)
    yield from _trait(name, "ECC", gpu.ecc_enabled, WARN)
    yield from _trait(name, "C2C", gpu.c2c_enabled, FAIL)
    bad = bool(gpu.ecc_uncorrected) if gpu.ecc_uncorrected is not None else None
    yield from _trait(name, "uncorrected ECC errors", bad, FAIL)
    yield from _trait(name, "row remapping failed", gpu.remapping_failed, FAIL)
    yield from _trait(name, "row remapping pending", gpu.remapping_pending, WARN)
    if gpu.power_limit_watts is not None:
        yield from _trait(name, "power limit", f"{gpu.power_limit_watts:g} W", WARN, gpu.power_limit_watts)
    if gpu.throttle_reasons is not None:
        # An idle GPU reports "gpu_idle": that is no brake.
        held = ", ".join(sorted(reason for reason in gpu.throttle_reasons if "idle" not in reason)) or "nothing"
        # as bad as the scan calls it: a power cap at full load is none, heat that halves the clocks fails
        found = (f for rule in RULES for f in rule(gpu) if f.code.startswith(HOLDING))
        worst = max((f.status for f in found), key=_MILDEST_FIRST.index, default=INFO)
        yield from _trait(name, "held back by", held, worst, -float(_MILDEST_FIRST.index(worst)))


def _pci(snapshot: Snapshot) -> Iterator[Trait]:
    facts = snapshot.facts(PciFacts)
    if facts is None:
        return
    yield from _trait("IOMMU", "", facts.iommu_mode, WARN)
    yield from _trait("nvidia_peermem", "loaded", facts.peermem_loaded, WARN)
    yield from _trait("open GPU kernel module", "", facts.nvidia_open_module, INFO)
    acs = [device.acs_source_validation for device in facts.devices if device.acs_source_validation is not None]
    if acs:
        yield from _trait("bridges with ACS on", "", sum(acs), WARN)
    for device in facts.devices:
        if device.class_code >> 16 == 0x02 and device.link_width and device.physical_function is None:
            yield from _trait(device.bus_id, "PCIe width", f"x{device.link_width}", FAIL, device.link_width)


def _rdma(snapshot: Snapshot) -> Iterator[Trait]:
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return
    yield from _trait("RDMA devices", "", len(facts.devices), FAIL, len(facts.devices))
    yield from _trait("RDMA network namespaces", "", facts.netns_mode, WARN)
    for device in facts.devices:
        yield from _trait(device.name, "device", device.kind, FAIL)
        yield from _trait(device.name, "firmware", device.firmware, WARN)
        yield from _trait(device.name, "uverbs may be opened", device.uverbs_usable, FAIL)
        for port in device.ports:
            yield from _port(device.name if len(device.ports) == 1 else f"{device.name}:{port.port}", port)
    if facts.memlock_proof:
        proof = facts.memlock_proof
        text = size_text(proof.registered_bytes)
        yield from _trait("memory really registered", "", text, FAIL, proof.registered_bytes)


def _port(name: str, port: RdmaPort) -> Iterator[Trait]:
    yield from _trait(name, "port", port.state, FAIL, 1.0 if port.state == "ACTIVE" else 0.0)
    yield from _trait(name, "link layer", port.link_layer, FAIL)
    # A port that is down prints the rate of a link it does not have.
    if port.state == "ACTIVE":
        yield from _trait(name, "rate", _rate(port.rate_bytes_per_second), FAIL, port.rate_bytes_per_second)
        yield from _trait(name, "MTU", port.active_mtu_bytes, WARN, port.active_mtu_bytes)
    if port.gids_known and port.link_layer == "Ethernet":
        kinds = any(gid.type == "RoCE v2" for gid in port.gids)
        yield from _trait(name, "RoCE v2 GID", kinds, FAIL)
    if port.pfc_priorities is not None:
        yield from _trait(name, "classifies by", port.trust, WARN)
        yield from _trait(name, "PFC on", ", ".join(map(str, port.pfc_priorities)) or "no priority", WARN)


def _interfaces(snapshot: Snapshot) -> Iterator[Trait]:
    facts = snapshot.facts(InterfacesFacts)
    if facts is None:
        return
    yield from _trait("interface NCCL picks by itself", "", facts.nccl_choice, WARN)
    yield from _trait("default route", "", facts.default_route, INFO)
    for interface in facts.interfaces:
        if interface.role in ("loopback", "docker", "bridge", "virtual") or interface.kind in ("veth", "tun"):
            continue
        name = interface.name
        if interface.up is not None:
            yield from _trait(name, "interface", "up" if interface.up else "down", WARN, float(interface.up))
        yield from _trait(name, "interface MTU", interface.mtu_bytes, WARN, interface.mtu_bytes)
        yield from _trait(
            name, "speed", _rate(interface.speed_bytes_per_second), WARN, interface.speed_bytes_per_second
        )
        yield from _trait(name, "driver", interface.driver, INFO)


def _limits(snapshot: Snapshot) -> Iterator[Trait]:
    facts = snapshot.facts(LimitsFacts)
    if facts is None:
        return
    if facts.memlock_known:
        soft, hard = facts.memlock_soft_bytes, facts.memlock_hard_bytes
        yield from _trait("memlock", "", size_text(soft), FAIL, float("inf") if soft is None else soft)
        yield from _trait("memlock (hard)", "", size_text(hard), WARN, float("inf") if hard is None else hard)
    yield from _trait("open files", "", facts.nofile_soft, WARN, facts.nofile_soft)
    yield from _trait("CAP_IPC_LOCK", "", facts.ipc_lock, WARN)
    yield from _trait("container", "", facts.container, INFO)
    if facts.of_agent:  # its own pod's, not a job's
        return
    if facts.shm_size_bytes is not None:
        yield from _trait(
            "shared memory", "size of /dev/shm", size_text(facts.shm_size_bytes), WARN, facts.shm_size_bytes
        )
    if facts.cgroup_memory_max_bytes is not None:
        limit = facts.cgroup_memory_max_bytes
        yield from _trait("cgroup memory limit", "", size_text(limit), WARN, limit)


def _host(snapshot: Snapshot) -> Iterator[Trait]:
    facts = snapshot.facts(HostinfoFacts)
    if facts is None:
        return
    yield from _trait("kernel", "", facts.kernel, WARN)
    yield from _trait("OS", "", facts.os, INFO)
    yield from _trait("CPU", "", facts.cpu_name, WARN)
    yield from _trait("CPU threads", "", facts.threads, WARN, facts.threads)
    yield from _trait("NUMA nodes", "", len(facts.numa) or None, WARN)
    yield from _trait("product", "", facts.product, WARN)
    yield from _trait("virtual machine", "", facts.virtual_machine, WARN)
    if facts.memory_bytes:
        # Firmware takes a little of each DIMM: whole GiB are compared.
        yield from _trait("memory", "", f"{round(facts.memory_bytes / 2**30)} GiB", WARN, facts.memory_bytes)
    for name, value in sorted(facts.nccl_variables.items()):
        yield from _trait(name, "set to", value, WARN)


def _links(snapshot: Snapshot, node: NodeTopology | None) -> Iterator[Trait]:
    """Path labels that the topology shows; NVLink counts stand with the GPUs already."""
    node = build(snapshot) if node is None else node
    gpus = {gpu.name for gpu in node.gpus}
    lost = {gpu.name for gpu in node.gpus if not gpu.usable}
    for pair in node.pairs:
        if {pair.a, pair.b} & lost:
            continue  # told once, with the GPU's state
        if {pair.a, pair.b} & gpus:
            label = "NVLink" if pair.nvlinks else pair.label
            yield from _trait(f"{pair.a} to {pair.b}", "path", label, FAIL if label == "NVLink" else WARN)
