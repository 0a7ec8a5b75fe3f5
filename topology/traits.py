"""Traits: properties of a snapshot that matter for training and should be equal over time and between nodes.

Identifiers of one machine (addresses, GUIDs, serial numbers) and volatile values (temperature, load, memory in use,
link generation of an idle GPU) are left out on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from contracts.finding import Status
from contracts.tables import read_table
from hardware.units import gigabits
from probes.api import Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import RULES
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts, size
from probes.pci.facts import PciFacts
from probes.rdma.facts import ROCE_V2, RdmaFacts, RdmaPort
from topology.build import build
from topology.graph import NodeTopology

FAIL, WARN, INFO = Status.FAIL, Status.WARN, Status.INFO
WORST_FIRST = tuple(Status)
HOLDING = ("gpu.thermal.throttling", "gpu.clocks.", "gpu.power.")  # findings about reduced GPU clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """One comparable property of one part of a host."""

    subject: str  # "GPU5", "mlx5_3:1", "memlock"
    what: str  # "PCIe width"; empty if the subject is sufficient
    value: str  # formatted: "x16", "64 KiB"
    status: Status  # severity of a difference
    size: float | None = None  # if set, more is better: an increase on the same host is an improvement

    @property
    def key(self) -> tuple[str, str]:
        """Key that identifies comparable traits."""
        return self.subject, self.what


def traits(
    snapshot: Snapshot, like: Snapshot | None = None, node: NodeTopology | None = None
) -> dict[tuple[str, str], Trait]:
    """Return every trait of a snapshot by key. GPUs get the names of the GPUs at the same PCI addresses in `like`.

    `node` is the topology, if it is already built. NVML numbers only the GPUs it finds, so if one is missing, later
    GPUs have other numbers.
    """
    found: dict[tuple[str, str], Trait] = {}
    names = {} if like is None else _map_names(snapshot.facts(GpuFacts), like.facts(GpuFacts))
    of_facts = (traits_of(facts) for kind, traits_of in _OF_FACTS if (facts := snapshot.facts(kind)) is not None)
    for trait in chain(_probes(snapshot), *of_facts, _links(build(snapshot) if node is None else node)):
        named = replace(trait, subject=_GPU_NAME.sub(lambda name: names.get(name[0], name[0]), trait.subject))
        found.setdefault(named.key, named)
    return found


_GPU_NAME = re.compile(r"\bGPU\d+\b")


def _map_names(mine: GpuFacts | None, theirs: GpuFacts | None) -> dict[str, str]:
    """Map our GPU names to theirs by PCI address; empty if the GPU addresses of the machines differ."""
    if mine is None or theirs is None:
        return {}
    places = {gpu.bus_id: f"GPU{gpu.index}" for gpu in theirs.gpus}
    here = {gpu.bus_id for gpu in mine.gpus}
    if None in here | places.keys() or not (here <= places.keys() or places.keys() <= here):
        return {}
    return {f"GPU{gpu.index}": places.get(gpu.bus_id, f"GPU at {gpu.bus_id}") for gpu in mine.gpus}


_FORMS: dict[str, Callable[[Any], object]] = {
    "any": bool,
    "bytes": size,
    "count": len,
    "generation": lambda number: f"gen {number}" if number else None,
    "lanes": lambda number: f"x{number}" if number else None,
    "plain": lambda value: value,
    "rate": lambda value: gigabits(value) if value else None,
    "some": lambda items: len(items) or None,
    "up": lambda is_up: "up" if is_up else "down",
    "watts": lambda value: f"{value:g} W",
    # Firmware reserves a little memory per DIMM, so whole GiB are compared.
    "whole GiB": lambda value: f"{round(value / 2**30)} GiB" if value else None,
}


def _trait(subject: str, what: str, value: object, status: Status, more: float | None = None) -> Iterator[Trait]:
    """Yield one trait; none if the value is unknown, because unknown is not a difference."""
    if value is not None:
        text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        yield Trait(subject=subject, what=what, value=text, status=status, size=more)


def _read_rows(section: str, facts: object, name: str = "") -> Iterator[Trait]:
    """Yield the traits of a section of `traits.toml`; `name` is the device of the facts."""
    for row in read_table(__file__, "traits.toml")[section]["rows"]:
        fact = getattr(facts, row["fact"])
        if fact is not None:
            more = (len(fact) if row.get("form") == "count" else fact) if row.get("size") else None
            value = _FORMS[row.get("form", "plain")](fact)
            yield from _trait(row.get("subject", name), row.get("what", ""), value, Status(row["status"]), more)


def _probes(snapshot: Snapshot) -> Iterator[Trait]:
    for name, outcome in snapshot.outcomes.items():
        answered = isinstance(outcome, Ok)
        state = "answers" if answered else f"{type(outcome).__name__.lower()}"
        yield from _trait(f"probe {name}", "", state, FAIL if name in ("gpu", "rdma") else WARN, float(answered))


def _gpus(facts: GpuFacts) -> Iterator[Trait]:
    yield from _read_rows("driver", facts)
    yield from _trait("driver", "error", facts.driver_error or "none", FAIL, float(facts.driver_error is None))
    for gpu in facts.gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Gpu) -> Iterator[Trait]:
    name = f"GPU{gpu.index}"
    yield from _read_rows("gpu", gpu, name)
    if gpu.error is None or gpu.broken:  # a refused query is not a state
        yield from _trait(name, "state", f"lost ({gpu.error})" if gpu.error else "ok", FAIL, 0.0 if gpu.error else 1.0)
    if gpu.nvlinks_known:
        up = sum(1 for link in gpu.nvlinks if link.active)
        yield from _trait(name, "NVLinks", up, FAIL, up)
    if gpu.throttle_reasons is not None:
        # An idle GPU reports "gpu_idle", which does not throttle it.
        held = ", ".join(sorted(reason for reason in gpu.throttle_reasons if "idle" not in reason)) or "nothing"
        # severity as in the scan: a power cap at full load is no problem; heat that halves the clocks fails
        found = (f for rule in RULES for f in rule(gpu) if f.code.startswith(HOLDING))
        worst = min((f.status for f in found), key=WORST_FIRST.index, default=INFO)
        yield from _trait(name, "held back by", held, worst, float(WORST_FIRST.index(worst)))


def _pci(facts: PciFacts) -> Iterator[Trait]:
    yield from _read_rows("pci", facts)
    acs = [device.acs_source_validation for device in facts.devices if device.acs_source_validation is not None]
    if acs:
        yield from _trait("bridges with ACS on", "", sum(acs), WARN)
    for device in facts.devices:
        if device.class_code >> 16 == 0x02 and device.physical_function is None:
            yield from _read_rows("pci_device", device, device.bus_id)


def _rdma(facts: RdmaFacts) -> Iterator[Trait]:
    yield from _read_rows("rdma", facts)
    for device in facts.devices:
        yield from _read_rows("rdma_device", device, device.name)
        for port in device.ports:
            yield from _port(device.name if len(device.ports) == 1 else f"{device.name}:{port.port}", port)
    if facts.memlock_proof:
        yield from _read_rows("memlock_proof", facts.memlock_proof)


def _port(name: str, port: RdmaPort) -> Iterator[Trait]:
    yield from _trait(name, "port", port.state, FAIL, 1.0 if port.state == "ACTIVE" else 0.0)
    yield from _trait(name, "link layer", port.link_layer, FAIL)
    if port.state == "ACTIVE":  # a port that is down reports a meaningless rate
        yield from _read_rows("active_port", port, name)
    if port.gids_known and port.link_layer == "Ethernet":
        yield from _trait(name, "RoCE v2 GID", any(gid.type == ROCE_V2 for gid in port.gids), FAIL)
    if port.pfc_priorities is not None:
        yield from _trait(name, "classifies by", port.trust, WARN)
        yield from _trait(name, "PFC on", ", ".join(map(str, port.pfc_priorities)) or "no priority", WARN)


def _interfaces(facts: InterfacesFacts) -> Iterator[Trait]:
    yield from _read_rows("interfaces", facts)
    for interface in facts.interfaces:
        if interface.role not in ("loopback", "docker", "bridge", "virtual") and interface.kind not in ("veth", "tun"):
            yield from _read_rows("interface", interface, interface.name)


def _limits(facts: LimitsFacts) -> Iterator[Trait]:
    if facts.memlock_known:
        soft, hard = facts.memlock_soft_bytes, facts.memlock_hard_bytes
        yield from _trait("memlock", "", size(soft), FAIL, float("inf") if soft is None else soft)
        yield from _trait("memlock (hard)", "", size(hard), WARN, float("inf") if hard is None else hard)
    yield from _read_rows("limits", facts)
    if not facts.of_agent:  # the agent's own pod has other limits than a job
        yield from _read_rows("job_limits", facts)


def _host(facts: HostinfoFacts) -> Iterator[Trait]:
    yield from _read_rows("host", facts)
    for name, value in sorted(facts.nccl_variables.items()):
        yield from _trait(name, "set to", value, WARN)


_OF_FACTS: tuple[tuple[type, Callable[[Any], Iterator[Trait]]], ...] = (
    (GpuFacts, _gpus), (PciFacts, _pci), (RdmaFacts, _rdma), (InterfacesFacts, _interfaces), (LimitsFacts, _limits),
    (HostinfoFacts, _host),
)  # fmt: skip


def _links(node: NodeTopology) -> Iterator[Trait]:
    """Yield path labels; NVLink counts are traits of the GPUs."""
    gpus = {gpu.name for gpu in node.gpus}
    lost = {gpu.name for gpu in node.gpus if not gpu.usable}
    for pair in node.pairs:
        if {pair.a, pair.b} & lost:
            continue  # already reported with the state of the GPU
        if {pair.a, pair.b} & gpus:
            label = "NVLink" if pair.nvlinks else pair.label
            yield from _trait(f"{pair.a} to {pair.b}", "path", label, FAIL if label == "NVLink" else WARN)
