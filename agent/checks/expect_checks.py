"""What a node has against what is expected of it: one check for each expectation (agent.checks.expect).

What is absent or less is a failed check; what could not be read is unknown, and required.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from agent.base import units
from agent.checks.coverage import gdrdma_possible, no_gpu_read, no_hca_read
from contracts.finding import Finding, Status
from probes.api import Absent, Snapshot
from probes.gpu.compare import visible_gpus
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaDevice, RdmaFacts
from topology.check import by_gdr, farthest_gdr
from topology.graph import NodeTopology, nvlinks

if TYPE_CHECKING:  # pydantic, which a gate without expectations does not load
    from agent.checks.expect import Expectation, Selected

EXPECT_CODES = ("expect.node.unmet",)
UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one node has, as far as it is known; None is unknown, with the reason in `why` under the same name."""

    gpus: int | None = None
    models: tuple[str | None, ...] = ()
    links: tuple[tuple[str, str], ...] | None = None  # ("GPU0-GPU1", "NV18")
    hcas: int | None = None
    rates: tuple[tuple[str, float | None], ...] = ()  # of devices with an ACTIVE port
    inactive: tuple[str, ...] = ()  # RDMA devices without an ACTIVE port
    gdr: bool | None = None
    memlock: int | str | None = None
    shm: int | None = None
    interfaces: dict[str, str] | None = None  # name -> what it lacks; empty where it lacks nothing
    driver: str | None = None
    why: Mapping[str, str] | None = None


# What a node has ---------------------------------------------------------------------------------------------------


def seen(snapshot: Snapshot, node: NodeTopology) -> Seen:
    """From a scan of the node, or from what its record holds of one."""
    gpus, rdma = snapshot.facts(GpuFacts), snapshot.facts(RdmaFacts)
    limits, found = snapshot.facts(LimitsFacts), snapshot.facts(InterfacesFacts)
    answering = [gpu for gpu in gpus.gpus if gpu.error is None] if gpus else []
    why = {name: _why(snapshot, name) for name in ("gpu", "rdma", "limits", "interfaces", "pci")}
    active = _active(rdma)
    none = _absent(snapshot, "gpu")
    return Seen(
        gpus=_usable(gpus, len(answering)) if gpus and not gpus.driver_error else 0 if none else None,
        models=tuple(gpu.name for gpu in answering),
        links=_pairs(node) if node.nvlink_known or not node.gpus else None,
        hcas=len(active) if rdma and not _unread_ports(rdma) else 0 if _absent(snapshot, "rdma") else None,
        rates=tuple((d.name, _active_rate(d)) for d in active),
        inactive=tuple(d.name for d in _able(rdma) if d not in active),
        gdr=_gdr(snapshot, node),
        memlock=_memlock(limits),
        shm=limits.shm_size_bytes if limits and not limits.of_agent else None,
        interfaces=None if found is None else {
            i.name: _lacks(up=i.up, running=i.running, addresses=i.addresses) for i in found.interfaces},
        driver=gpus.driver_version if gpus else None,
        why={
            "gpus": why["gpu"], "gpu": why["gpu"], "nvlink": why["gpu"], "driver": why["gpu"], "hcas": why["rdma"],
            "rate": why["rdma"], "memlock": why["limits"], "interface": why["interfaces"],
            "shm": why["limits"] or "what the agent's own pod has is not what a job's gets",
            "gdr": why["pci"] or why["rdma"],
        },
    )  # fmt: skip


def _able(rdma: RdmaFacts | None) -> list[RdmaDevice]:
    return [device for device in rdma.devices if device.kind in ("hca", "efa")] if rdma else []


def _active(rdma: RdmaFacts | None) -> list[RdmaDevice]:
    return [device for device in _able(rdma) if any(port.state == "ACTIVE" for port in device.ports)]


def _active_rate(device: RdmaDevice) -> float | None:
    return sum(port.rate_bytes_per_second or 0.0 for port in device.ports if port.state == "ACTIVE") or None


def _memlock(limits: LimitsFacts | None) -> int | str | None:
    if limits is None or not limits.memlock_known:
        return None
    return UNLIMITED if limits.memlock_soft_bytes is None else limits.memlock_soft_bytes


def _unread_ports(rdma: RdmaFacts) -> bool:
    return any(port.state is None for device in rdma.devices for port in device.ports)


def _usable(gpus: GpuFacts, answering: int) -> int:
    """GPUs that answer and that CUDA_VISIBLE_DEVICES leaves to this process."""
    visible, _ = visible_gpus(gpus)
    return answering if visible is None else min(answering, visible)


def _absent(snapshot: Snapshot, name: str) -> bool:
    """Whether the probe looked and found nothing, with a bus that could be read and shows nothing either."""
    unread = no_gpu_read(snapshot) if name == "gpu" else no_hca_read(snapshot)
    return isinstance(snapshot.outcomes.get(name), Absent) and not unread


def _why(snapshot: Snapshot, name: str) -> str:
    outcome = snapshot.outcomes.get(name)
    return str(getattr(outcome, "error", "") or getattr(outcome, "why", ""))


def _pairs(node: NodeTopology) -> tuple[tuple[str, str], ...]:
    names = {gpu.name for gpu in node.gpus if gpu.usable}
    return tuple((f"{p.a}-{p.b}", p.label) for p in node.pairs if p.a in names and p.b in names)


def _lacks(*, up: bool | None, running: bool | None, addresses: Sequence[str]) -> str:
    if up is False:
        return "is down"
    if running is False:
        return "has no carrier"
    return "" if addresses else "has no address"


def _gdr(snapshot: Snapshot, node: NodeTopology) -> bool | None:
    """Whether NICs can reach GPU memory by what is installed, and do by NCCL's rules; None where either is unknown."""
    pci, rdma = snapshot.facts(PciFacts), snapshot.facts(RdmaFacts)
    if pci is None or (rdma is None and not _absent(snapshot, "rdma")):
        return None
    if not gdrdma_possible((snapshot,)):
        known = rdma is None or (pci.peermem_loaded is False and pci.dmabuf_possible is False)
        ports = [port.state for device in rdma.devices for port in device.ports] if rdma else []
        return False if known or (ports and "ACTIVE" not in ports and None not in ports) else None
    host = snapshot.facts(HostinfoFacts)
    environment = {**(host.nccl_conf or {}), **(host.nccl_environment or {})} if host else {}
    return _direct(node, environment.get("NCCL_NET_GDR_LEVEL"))


def _direct(node: NodeTopology, level: str | None = None) -> bool | None:
    """Whether every GPU reaches its nearest NIC over a path that NCCL, or the job's level, allows."""
    near = [one for one in node.nearest_nic if one.gpu in {gpu.name for gpu in node.gpus if gpu.usable}]
    if not near:
        return False
    return None if not all(one.decidable for one in near) else all(by_gdr(one, farthest_gdr(level)) for one in near)


# The checks --------------------------------------------------------------------------------------------------------


def checks_of(wanted: Expectation, found: Seen, node: str) -> tuple[Finding, ...]:
    """One check for each thing that is expected: met, absent (failed), or unknown and then required."""
    judged: list[tuple[str, bool | None, str]] = []
    if wanted.gpus is not None:
        judged.append((f"gpus={wanted.gpus}", _least(found.gpus, wanted.gpus), f"{_number(found.gpus)} GPUs answer"))
    if wanted.gpu is not None:
        judged.append((f"gpu={wanted.gpu}", *_model(wanted.gpu, found)))
    if wanted.nvlink is not None:
        judged.append((f"nvlink=NV{wanted.nvlink}", *_nvlink(wanted.nvlink, found)))
    judged += [(f"hcas={each.prefix}{each.value:g}", *_hcas(each, found)) for each in wanted.hcas]
    judged += [(f"rate={each.prefix}{each.value * 8 / 1e9:g}", *_rates(each, found)) for each in wanted.rate]
    if wanted.gdr:
        able = "possible from every GPU to its nearest NIC"
        words = {None: "unknown", True: able, False: f"not {able}"}
        judged.append(("gdr=on", found.gdr, f"GPUDirect RDMA is {words[found.gdr]}"))
    if wanted.memlock is not None:
        judged.append((f"memlock={_typed(wanted.memlock)}", _limit_met(wanted.memlock, found.memlock),
                       f"memlock is {_amount(found.memlock)}"))  # fmt: skip
    if wanted.shm is not None:
        have = f"shared memory is {_amount(found.shm)}"
        judged.append((f"shm={_typed(wanted.shm)}", _least(found.shm, wanted.shm), have))
    if wanted.driver is not None:
        judged.append((f"driver={wanted.driver}", *_driver(wanted.driver, found)))
    judged += [(f"interface={name}", *_interface(name, found)) for name in wanted.interface]
    why = found.why or {}
    return tuple(_check(node, subject, met, have, why.get(subject.partition("=")[0], ""))
                 for subject, met, have in judged)  # fmt: skip


def _model(wanted: str, found: Seen) -> tuple[bool | None, str]:
    """Whole words of the model's name count: L40 is no L40S."""
    words = re.compile(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", re.IGNORECASE)
    odd = [model for model in found.models if not words.search(model or "")]
    met = None if found.gpus is None or (not all(found.models) and not any(odd)) else bool(found.models) and not odd
    return met, ", ".join(dict.fromkeys(model or "unknown model" for model in found.models)) or "no GPU"


def _driver(wanted: str, found: Seen) -> tuple[bool | None, str]:
    if found.driver is None:
        return False if found.gpus == 0 else None, "the driver is unknown"
    return _parts(found.driver) >= _parts(wanted), f"the driver is {found.driver}"


def _check(node: str, subject: str, met: bool | None, have: str, why: str) -> Finding:
    code = EXPECT_CODES[0]
    if met:
        return Finding(code=code, status=Status.PASS, node=node, subject=subject, message=have)
    if met is None:
        message = f"{subject} is expected and could not be read: {why or have}"
        return Finding(code=code, status=Status.UNKNOWN, node=node, subject=subject, message=message, required=True)
    return Finding(
        code=code, status=Status.FAIL, node=node, subject=subject, message=f"{subject} is expected: {have}",
        remedy=_remedy(subject),
    )  # fmt: skip


def _remedy(subject: str) -> str:
    key, _, value = subject.partition("=")
    named = f" Where the slower devices are for storage, name the others: {key}=mlx5_[0-7]:{value}."
    more = named if key == "rate" and ":" not in value else ""
    return f"Find out what the node has lost, or correct the expectation; `topoflight explain expect.node.unmet`.{more}"


def _least(have: int | None, wanted: int) -> bool | None:
    return None if have is None else have >= wanted


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else str(value)


def _typed(value: int | str) -> str:
    """An amount as one types it: "64GiB"."""
    if isinstance(value, str):
        return value
    scales = sorted(((scale, unit) for unit, scale in units.SIZES.items() if unit.endswith("B")), reverse=True)
    scale, unit = next(((scale, unit) for scale, unit in scales if value and value % scale == 0), (1, ""))
    return f"{value // scale}{unit if scale > 1 else ''}"


def _amount(value: int | str | None) -> str:
    return units.size(value) if isinstance(value, int) or value is None else value


def _limit_met(wanted: int | str, have: int | str | None) -> bool | None:
    if have is None or have == UNLIMITED:
        return None if have is None else True
    return isinstance(wanted, int) and isinstance(have, int) and have >= wanted


def _nvlink(wanted: int, found: Seen) -> tuple[bool | None, str]:
    if found.links is None or found.gpus is None:
        return None, "the NVLinks are unknown"
    if not found.links:
        return False, f"{found.gpus} GPUs: there is no pair to link"
    short = [(pair, label) for pair, label in found.links if nvlinks(label) < wanted]
    unknown = [pair for pair, label in short if label == "N/A"]
    if unknown and len(unknown) == len(short):
        return None, f"the link of {', '.join(unknown[:4])} is unknown"
    if short:
        more = f" and {len(short) - 4} more" if len(short) > 4 else ""
        return False, ", ".join(f"{pair} {label}" for pair, label in short[:4]) + more
    return True, f"{len(found.links)} pairs have NV{wanted} or more"


def _hcas(wanted: Selected, found: Seen) -> tuple[bool | None, str]:
    if found.hcas is None:
        return None, "the RDMA devices are unknown"
    have = [name for name, _ in found.rates if wanted.selects(name)] if wanted.pattern else found.rates
    named = f" of {wanted.pattern}" if wanted.pattern else ""
    return len(have) >= wanted.value, f"{len(have)} RDMA devices{named} have an ACTIVE port"


def _rates(wanted: Selected, found: Seen) -> tuple[bool | None, str]:
    """Every ACTIVE device counts, or those selected; a device that is selected by name and is not ACTIVE is less."""
    if found.hcas is None:
        return None, "the RDMA devices are unknown"
    mine = [(name, rate) for name, rate in found.rates if wanted.selects(name)]
    slow = [f"{name} {units.bits(rate)}" for name, rate in mine if rate is not None and rate < wanted.value]
    slow += [f"{name} has no ACTIVE port" for name in found.inactive if wanted.pattern and wanted.selects(name)]
    if slow or not mine:
        others = f" named {wanted.pattern}" if wanted.pattern else ""
        return False, ", ".join(slow) or f"no RDMA device{others} has an ACTIVE port"
    unknown = [name for name, rate in mine if rate is None]
    return (None, f"the rate of {', '.join(unknown)} is unknown") if unknown else (True, "every device is as fast")


def _interface(name: str, found: Seen) -> tuple[bool | None, str]:
    if found.interfaces is None:
        return None, "the interfaces are unknown"
    mine = {one: lacks for one, lacks in found.interfaces.items() if fnmatchcase(one, name)}
    if not mine:
        return False, f"there are {', '.join(sorted(found.interfaces)) or 'none'}"
    bad = [f"{one} {lacks}" for one, lacks in mine.items() if lacks]
    return not bad, ", ".join(bad) or f"{', '.join(mine)} up, with an address"


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


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
