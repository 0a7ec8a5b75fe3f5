"""What a node has against what is expected of it: one check for each expectation (agent.checks.expect).

What is absent or less is a failed check; what could not be read is unknown, and required.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from agent.base import units
from agent.checks.host_checks import EXPECT_CODES, gdrdma_possible, no_gpu_read, no_hca_read
from contracts.finding import Finding, Status
from probes.api import Absent, Snapshot
from probes.gpu.compare import visible_gpus
from probes.gpu.facts import Gpu, GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort
from topology.check import by_gdr, farthest_gdr
from topology.graph import NodeTopology, nvlinks

if TYPE_CHECKING:  # pydantic, which a gate without expectations does not load
    from agent.checks.expect import Expectation, Selected

UNLIMITED = "unlimited"
Judgement = tuple[bool | None, str]  # whether it is met, None where that is unknown; what the node has


def checks_of(wanted: Expectation, snapshot: Snapshot, topology: NodeTopology, node: str) -> tuple[Finding, ...]:
    """One check for each thing that is expected: met, absent (failed), or unknown and then required."""
    checks = []
    for key, subject, value in _subjects(wanted):
        probes, judge = _RULES[key]  # an expectation without a rule ends in an error, not in a pass
        met, have = judge(snapshot, topology, value)
        checks.append(_check(node, subject, met, have, next(filter(None, (_why(snapshot, one) for one in probes)), "")))
    return tuple(checks)


def unread(wanted: Expectation, node: str, why: str) -> tuple[Finding, ...]:
    """The same checks of a node of which nothing is known."""
    return tuple(_check(node, subject, None, why, "") for _, subject, _ in _subjects(wanted))


def _subjects(wanted: Expectation) -> Iterator[tuple[str, str, Any]]:
    """(key, "key=value" as one types it, value) of each thing that is expected."""
    for key, value in wanted:
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                yield key, f"{key}={_TYPED.get(key, str)(one)}", one


def _check(node: str, subject: str, met: bool | None, have: str, why: str) -> Finding:
    check = Finding(code=EXPECT_CODES[0], status=Status.PASS, node=node, subject=subject, message=have)
    if met:
        return check
    if met is None:
        message = f"{subject} is expected and could not be read: {why or have}"
        return replace(check, status=Status.UNKNOWN, message=message, required=True)
    return replace(check, status=Status.FAIL, message=f"{subject} is expected: {have}", remedy=_remedy(subject))


def _remedy(subject: str) -> str:
    key, _, value = subject.partition("=")
    named = f" Where the slower devices are for storage, name the others: {key}=mlx5_[0-7]:{value}."
    more = named if key == "rate" and ":" not in value else ""
    return f"Find out what the node has lost, or correct the expectation; `topoflight explain expect.node.unmet`.{more}"


def _why(snapshot: Snapshot, name: str) -> str:
    outcome = snapshot.outcomes.get(name)
    return str(getattr(outcome, "error", "") or getattr(outcome, "why", ""))


def _absent(snapshot: Snapshot, name: str) -> bool:
    """Whether the probe looked and found nothing, with a bus that could be read and shows nothing either."""
    unread = no_gpu_read(snapshot) if name == "gpu" else no_hca_read(snapshot)
    return isinstance(snapshot.outcomes.get(name), Absent) and not unread


# GPUs --------------------------------------------------------------------------------------------------------------


def _answering(snapshot: Snapshot) -> list[Gpu]:
    facts = snapshot.facts(GpuFacts)
    return [gpu for gpu in facts.gpus if gpu.error is None] if facts else []


def _gpu_count(snapshot: Snapshot) -> int | None:
    """GPUs that answer and that CUDA_VISIBLE_DEVICES leaves to this process; None where that is unknown."""
    facts = snapshot.facts(GpuFacts)
    if facts is None or facts.driver_error:
        return 0 if _absent(snapshot, "gpu") else None
    count, (visible, _) = len(_answering(snapshot)), visible_gpus(facts)
    return count if visible is None else min(count, visible)


def _gpus(snapshot: Snapshot, _topology: NodeTopology, wanted: int) -> Judgement:
    count = _gpu_count(snapshot)
    return _least(count, wanted), f"{'an unknown number of' if count is None else count} GPUs answer"


def _model(snapshot: Snapshot, _topology: NodeTopology, wanted: str) -> Judgement:
    """Whole words of the model's name count: L40 is no L40S."""
    words = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", re.IGNORECASE)
    models = [gpu.name for gpu in _answering(snapshot)]
    odd = [model for model in models if not words.search(model or "")]
    unknown = _gpu_count(snapshot) is None or (not all(models) and not any(odd))
    met = None if unknown else bool(models) and not odd
    return met, ", ".join(dict.fromkeys(model or "unknown model" for model in models)) or "no GPU"


def _nvlink(snapshot: Snapshot, topology: NodeTopology, wanted: int) -> Judgement:
    count = _gpu_count(snapshot)
    if count is None or (topology.gpus and not topology.nvlink_known):
        return None, "the NVLinks are unknown"
    usable = {gpu.name for gpu in topology.gpus if gpu.usable}
    links = [(f"{p.a}-{p.b}", p.label) for p in topology.pairs if p.a in usable and p.b in usable]
    if not links:
        return False, f"{count} GPUs: there is no pair to link"
    short = [(pair, label) for pair, label in links if nvlinks(label) < wanted]
    unknown = [pair for pair, label in short if label == "N/A"]
    if unknown and len(unknown) == len(short):
        return None, f"the link of {', '.join(unknown[:4])} is unknown"
    if short:
        more = f" and {len(short) - 4} more" if len(short) > 4 else ""
        return False, ", ".join(f"{pair} {label}" for pair, label in short[:4]) + more
    return True, f"{len(links)} pairs have NV{wanted} or more"


def _driver(snapshot: Snapshot, _topology: NodeTopology, wanted: str) -> Judgement:
    facts = snapshot.facts(GpuFacts)
    if facts is None or facts.driver_version is None:
        return False if _gpu_count(snapshot) == 0 else None, "the driver is unknown"
    return _parts(facts.driver_version) >= _parts(wanted), f"the driver is {facts.driver_version}"


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


# RDMA --------------------------------------------------------------------------------------------------------------


def _hca_ports(snapshot: Snapshot) -> dict[str, list[RdmaPort]] | None:
    """The ACTIVE ports of each device that carries RDMA; None where the devices or a port could not be read."""
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return {} if _absent(snapshot, "rdma") else None
    if any(port.state is None for device in facts.devices for port in device.ports):
        return None
    return {
        device.name: [port for port in device.ports if port.state == "ACTIVE"]
        for device in facts.devices
        if device.kind in ("hca", "efa")
    }


def _hcas(snapshot: Snapshot, _topology: NodeTopology, wanted: Selected) -> Judgement:
    ports = _hca_ports(snapshot)
    if ports is None:
        return None, "the RDMA devices are unknown"
    have = [name for name, active in ports.items() if active and wanted.selects(name)]
    named = f" of {wanted.pattern}" if wanted.pattern else ""
    return len(have) >= wanted.value, f"{len(have)} RDMA devices{named} have an ACTIVE port"


def _rates(snapshot: Snapshot, _topology: NodeTopology, wanted: Selected) -> Judgement:
    """Every ACTIVE device counts, or those selected; a device that is selected by name and is not ACTIVE is less."""
    ports = _hca_ports(snapshot)
    if ports is None:
        return None, "the RDMA devices are unknown"
    mine = {name: sum(port.rate_bytes_per_second or 0.0 for port in active) or None
            for name, active in ports.items() if active and wanted.selects(name)}  # fmt: skip
    slow = [f"{name} {units.bits(rate)}" for name, rate in mine.items() if rate is not None and rate < wanted.value]
    slow += [f"{name} has no ACTIVE port" for name, active in ports.items()
             if not active and wanted.pattern and wanted.selects(name)]  # fmt: skip
    if slow or not mine:
        others = f" named {wanted.pattern}" if wanted.pattern else ""
        return False, ", ".join(slow) or f"no RDMA device{others} has an ACTIVE port"
    unknown = [name for name, rate in mine.items() if rate is None]
    return (None, f"the rate of {', '.join(unknown)} is unknown") if unknown else (True, "every device is as fast")


def _gdr(snapshot: Snapshot, topology: NodeTopology, _wanted: bool) -> Judgement:
    able = "possible from every GPU to its nearest NIC"
    met = _has_gdr(snapshot, topology)
    return met, f"GPUDirect RDMA is {'unknown' if met is None else able if met else f'not {able}'}"


def _has_gdr(snapshot: Snapshot, topology: NodeTopology) -> bool | None:
    """Whether NICs can reach GPU memory by what is installed, and do by NCCL's rules; None where either is unknown."""
    pci, rdma = snapshot.facts(PciFacts), snapshot.facts(RdmaFacts)
    if pci is None or (rdma is None and not _absent(snapshot, "rdma")):
        return None
    if not gdrdma_possible((snapshot,)):
        known = rdma is None or (pci.peermem_loaded is False and pci.dmabuf_possible is False)
        ports = [port.state for device in rdma.devices for port in device.ports] if rdma else []
        return False if known or (ports and "ACTIVE" not in ports and None not in ports) else None
    usable = {gpu.name for gpu in topology.gpus if gpu.usable}
    near = [one for one in topology.nearest_nic if one.gpu in usable]
    if not near or not all(one.decidable for one in near):
        return None if near else False
    host = snapshot.facts(HostinfoFacts)
    level = host.nccl_variables.get("NCCL_NET_GDR_LEVEL") if host else None
    return all(by_gdr(one, farthest_gdr(level)) for one in near)


# Limits, interfaces ------------------------------------------------------------------------------------------------


def _memlock(snapshot: Snapshot, _topology: NodeTopology, wanted: int | str) -> Judgement:
    limits = snapshot.facts(LimitsFacts)
    if limits is None or not limits.memlock_known:
        return None, f"memlock is {units.size(None)}"
    have = limits.memlock_soft_bytes
    if have is None:
        return True, f"memlock is {UNLIMITED}"
    return isinstance(wanted, int) and have >= wanted, f"memlock is {units.size(have)}"


def _shm(snapshot: Snapshot, _topology: NodeTopology, wanted: int) -> Judgement:
    limits = snapshot.facts(LimitsFacts)
    if limits is not None and limits.of_agent:
        return None, "what the agent's own pod has is not what a job's gets"
    have = limits.shm_size_bytes if limits else None
    return _least(have, wanted), f"shared memory is {units.size(have)}"


def _interface(snapshot: Snapshot, _topology: NodeTopology, wanted: str) -> Judgement:
    facts = snapshot.facts(InterfacesFacts)
    if facts is None:
        return None, "the interfaces are unknown"
    mine = [link for link in facts.interfaces if fnmatchcase(link.name, wanted)]
    if not mine:
        return False, f"there are {', '.join(sorted(link.name for link in facts.interfaces)) or 'none'}"
    bad = [f"{link.name} {lacks}" for link in mine if (lacks := _lacks(link))]
    return not bad, ", ".join(bad) or f"{', '.join(link.name for link in mine)} up, with an address"


def _lacks(link: Interface) -> str:
    if link.up is False:
        return "is down"
    if link.running is False:
        return "has no carrier"
    return "" if link.addresses else "has no address"


def _least(have: int | None, wanted: int) -> bool | None:
    return None if have is None else have >= wanted


def _typed(value: int | str) -> str:
    """An amount as one types it: "64GiB"."""
    if isinstance(value, str):
        return value
    scales = sorted(((scale, unit) for unit, scale in units.SIZES.items() if unit.endswith("B")), reverse=True)
    scale, unit = next(((scale, unit) for scale, unit in scales if value and value % scale == 0), (1, ""))
    return f"{value // scale}{unit if scale > 1 else ''}"


_RULES: dict[str, tuple[tuple[str, ...], Callable[[Snapshot, NodeTopology, Any], Judgement]]] = {
    "gpus": (("gpu",), _gpus), "gpu": (("gpu",), _model), "nvlink": (("gpu",), _nvlink),
    "hcas": (("rdma",), _hcas), "rate": (("rdma",), _rates), "gdr": (("pci", "rdma"), _gdr),
    "memlock": (("limits",), _memlock), "shm": (("limits",), _shm), "driver": (("gpu",), _driver),
    "interface": (("interfaces",), _interface),
}  # fmt: skip
"""Each key of an expectation: the probes whose failure says why it is unknown, and who judges it."""
_TYPED: dict[str, Callable[[Any], str]] = {
    "nvlink": lambda count: f"NV{count}", "hcas": lambda one: f"{one.prefix}{one.value:g}",
    "rate": lambda one: f"{one.prefix}{one.value * 8 / 1e9:g}", "gdr": lambda _: "on", "memlock": _typed, "shm": _typed,
}  # fmt: skip


def settled(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """The checks of one node, with what an expectation answers that a scan alone cannot.

    A node with as many GPUs or ACTIVE ports as its owner expects lacks none: others on the bus are not given to it, or
    are not cabled.
    """
    checks = tuple(checks)
    met = {
        check.subject.partition("=")[0] for check in checks if check.code == EXPECT_CODES[0] and check.status == "pass"
    }
    mild = {code for key, code in (("gpus", "gpu.device.not_given"), ("hcas", "rdma.port.down")) if key in met}
    return tuple(
        replace(check, status=Status.INFO, required=False, message=f"{check.message} As many as expected are there.")
        if check.code in mild and check.status in ("fail", "warn", "unknown") and check.evidence
        else check
        for check in checks
    )
