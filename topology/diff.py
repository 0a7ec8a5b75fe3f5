"""Differences between two snapshots, or within a fleet, that matter for training; the worst come first.

Traits are compared: the properties of a snapshot that should be equal over time and between nodes. Other identifiers of
one machine (addresses, GUIDs, serial numbers) than IDENTIFIERS, and volatile values (temperature, load, memory in use,
link generation of an idle GPU) are left out on purpose.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_interface
from pathlib import Path
from typing import Any, NamedTuple

from contracts.finding import Status
from contracts.tables import read_table, read_texts
from hardware.units import GIGA, gigabits, some
from probes.api import Ok, Snapshot
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import RULES
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts, format_size
from probes.pci.facts import PciFacts
from probes.rdma.facts import ROCE_V2, RdmaFacts, RdmaPort
from topology.build import build
from topology.graph import NodeTopology

_text = read_texts(__file__, "texts.toml")
FAIL, WARN, INFO = Status.FAIL, Status.WARN, Status.INFO
WORST_FIRST = tuple(Status)
DOMAIN = "NVLink domain"  # the property of that name in traits.toml
IDENTIFIERS = ("board (UUID)", "network")  # compared only if most are equal: one host, or rails of one fabric
THROTTLING = ("gpu.thermal.throttling", "gpu.clocks.", "gpu.power.")  # findings about reduced GPU clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """One comparable property of one part of a host."""

    subject: str  # "GPU5", "mlx5_3:1", "memlock"
    what: str  # "PCIe width"; empty if the subject is sufficient
    value: str  # formatted: "x16", "64 KiB"
    status: Status  # severity of a difference
    size: float | None = None  # if set, more is better: an increase on the same host is an improvement


def list_traits(
    snapshot: Snapshot, like: Snapshot | None = None, node: NodeTopology | None = None
) -> dict[tuple[str, str], Trait]:
    """Return every trait of a snapshot by its subject and `what`.

    GPUs and NICs get the names of those at the same PCI addresses in `like`: NVML numbers only the GPUs it finds, so if
    one is missing, later GPUs have other numbers; and systemd or rdma-core may rename a NIC. `node` is the topology, if
    it is already built.
    """
    result: dict[tuple[str, str], Trait] = {}
    names = {} if like is None else {kind: _map_names(snapshot, like, kind) for kind in _PLACES}
    devices = names.get(GpuFacts, {}) | names.get(RdmaFacts, {})
    rdma = [facts for host in (snapshot, like) if host and (facts := host.facts(RdmaFacts))]
    by_place = {device.bus_id: f"{device.name} ({device.bus_id})" for facts in rdma for device in facts.devices}
    of_facts = ((kind, traits_of(facts)) for kind, traits_of in _OF_FACTS if (facts := snapshot.facts(kind)))
    links = _list_link_traits(build(snapshot) if node is None else node)
    for kind, parts in ((Snapshot, _list_probe_traits(snapshot)), *of_facts, (NodeTopology, links)):
        renamed = names.get(kind, {}) if kind is InterfacesFacts else devices  # IPoIB may be named as its RDMA device
        for trait in parts:
            name = "".join(renamed.get(part, part) for part in _NAME.split(trait.subject))
            subject = by_place.get(trait.subject, name)
            if kind is NodeTopology:  # a pair is the same in both directions, also if its GPUs are numbered otherwise
                subject = " to ".join(sorted(subject.split(" to ")))
            result.setdefault((subject, trait.what), replace(trait, subject=subject))
    return result


_NAME = re.compile(r"([\s:])")
_PLACES: dict[type, Callable[[Any], list[tuple[str | None, str]]]] = {  # (PCI address, name) of each device
    GpuFacts: lambda facts: [(gpu.bus_id, f"GPU{gpu.index}") for gpu in facts.gpus],
    RdmaFacts: lambda facts: [(device.bus_id, device.name) for device in facts.devices],
    InterfacesFacts: lambda facts: [(one.bus_id, one.name) for one in facts.interfaces if one.bus_id],
}


def _map_names(own: Snapshot, theirs: Snapshot, kind: type) -> dict[str, str]:
    """Map our device names to theirs by PCI address; empty if the addresses of the machines differ."""
    rows = [_PLACES[kind](facts) for host in (own, theirs) if (facts := host.facts(kind)) is not None]
    here, there = (dict(each) for each in rows) if len(rows) == 2 else ({}, {})
    several = sum(map(len, rows)) > len(here) + len(there)  # devices of one function
    if several or None in here | there or not (here.keys() <= there.keys() or there.keys() <= here.keys()):
        return {}
    used = there.values()
    return {name: there.get(place) or f"{name} at {place}" * (name in used) or name for place, name in here.items()}


_FORMS: dict[str, Callable[[Any], object]] = {
    "any": bool,
    "bytes": format_size,
    "count": len,
    "generation": lambda number: f"gen {number}" if number else None,
    "lanes": lambda number: f"x{number}" if number else None,
    "plain": lambda value: value,
    "rate": lambda value: gigabits(value) if value else None,
    "some": lambda items: len(items) or None,
    "transfers": lambda value: f"{value / GIGA:g} GT/s",
    "up": lambda is_up: "up" if is_up else "down",
    "watts": lambda value: f"{value:g} W",
    # Firmware reserves a little memory per DIMM, so whole GiB are compared.
    "whole GiB": lambda value: f"{round(value / 2**30)} GiB" if value else None,
}


def _trait(subject: str, fact: str, value: object, status: Status, size: float | None = None) -> Iterator[Trait]:
    """Yield one trait; none if the value is unknown, because unknown is not a difference."""
    if value is not None:
        text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
        yield Trait(subject=subject, what=fact, value=text, status=status, size=size)


def _read_rows(section: str, facts: object, name: str = "") -> Iterator[Trait]:
    """Yield the traits of a section of `traits.toml`; `name` is the device of the facts."""
    for row in read_table(__file__, "traits.toml")[section]["rows"]:
        fact = getattr(facts, row["fact"])
        if fact is not None:
            size = (len(fact) if row.get("form") == "count" else fact) if row.get("size") else None
            value = _FORMS[row.get("form", "plain")](fact)
            yield from _trait(row.get("subject", name), row.get("what", ""), value, Status(row["status"]), size)


def _list_probe_traits(snapshot: Snapshot) -> Iterator[Trait]:
    for name, outcome in snapshot.outcomes.items():
        answered = isinstance(outcome, Ok)
        state = "answers" if answered else f"{type(outcome).__name__.lower()}"
        yield from _trait(f"probe {name}", "", state, FAIL if name in ("gpu", "rdma") else WARN, float(answered))


def _list_all_gpu_traits(facts: GpuFacts) -> Iterator[Trait]:
    yield from _read_rows("driver", facts)
    yield from _trait("driver", "error", facts.driver_error or "none", FAIL, float(facts.driver_error is None))
    for gpu in facts.gpus:
        yield from _list_gpu_traits(gpu)


def _list_gpu_traits(gpu: Gpu) -> Iterator[Trait]:
    name = f"GPU{gpu.index}"
    yield from _read_rows("gpu", gpu, name)
    if gpu.error is None or gpu.broken:  # a refused query is not a state
        yield from _trait(name, "state", f"lost ({gpu.error})" if gpu.error else "ok", FAIL, 0.0 if gpu.error else 1.0)
    if gpu.nvlinks_known:
        up = sum(1 for link in gpu.nvlinks if link.active)
        yield from _trait(name, "NVLinks", up, FAIL, up)
    if gpu.throttle_reasons is not None:
        # An idle GPU reports "gpu_idle", which does not throttle it.
        reasons = ", ".join(sorted(reason for reason in gpu.throttle_reasons if "idle" not in reason)) or "nothing"
        # severity as in the scan: a power cap at full load is no problem; heat that halves the clocks fails
        findings = (f for rule in RULES for f in rule(gpu) if f.code.startswith(THROTTLING))
        worst = min((f.status for f in findings), key=WORST_FIRST.index, default=INFO)
        yield from _trait(name, "throttled by", reasons, worst, float(WORST_FIRST.index(worst)))


def _list_pci_traits(facts: PciFacts) -> Iterator[Trait]:
    yield from _read_rows("pci", facts)
    acs = [device.acs_redirects for device in facts.devices if device.acs_redirects is not None]
    if acs:
        yield from _trait("bridges where ACS redirects", "", sum(acs), WARN)
    for device in facts.devices:
        if device.class_code >> 16 == 0x02 and device.physical_function is None:
            yield from _read_rows("pci_device", device, device.bus_id)


def _list_rdma_traits(facts: RdmaFacts) -> Iterator[Trait]:
    yield from _read_rows("rdma", facts)
    for device in facts.devices:
        yield from _read_rows("rdma_device", device, device.name)
        for port in device.ports:
            yield from _list_port_traits(device.name if len(device.ports) == 1 else f"{device.name}:{port.port}", port)
    if facts.memlock_proof:
        yield from _read_rows("memlock_proof", facts.memlock_proof)


def _list_port_traits(name: str, port: RdmaPort) -> Iterator[Trait]:
    yield from _trait(name, "port", port.state, FAIL, 1.0 if port.state == "ACTIVE" else 0.0)
    yield from _trait(name, "link layer", port.link_layer, FAIL)
    if port.state == "ACTIVE":  # a port that is down reports a meaningless rate
        yield from _read_rows("active_port", port, name)
    if port.gids_known and port.link_layer == "Ethernet":
        yield from _trait(name, "RoCE v2 GID", any(gid.type == ROCE_V2 for gid in port.gids), FAIL)
    if port.pfc_priorities is not None:
        yield from _trait(name, "trust mode", port.trust, WARN)
        yield from _trait(name, "PFC priorities", ", ".join(map(str, port.pfc_priorities)) or "none", WARN)


def _list_interface_traits(facts: InterfacesFacts) -> Iterator[Trait]:
    yield from _read_rows("interfaces", facts)
    for interface in facts.interfaces:
        if interface.role not in ("loopback", "docker", "bridge", "virtual") and interface.kind not in ("veth", "tun"):
            yield from _read_rows("interface", interface, interface.name)
            if interface.rdma_device and interface.name != facts.default_route:  # a rail in another subnet is cut off
                with suppress(ValueError):  # a damaged recording has texts that are no addresses
                    networks = sorted({str(ip_interface(address).network) for address in interface.addresses})
                    yield from _trait(interface.name, "network", ", ".join(networks) or "none", WARN)


def _list_limit_traits(facts: LimitsFacts) -> Iterator[Trait]:
    if facts.memlock_known:
        soft, hard = facts.memlock_soft_bytes, facts.memlock_hard_bytes
        yield from _trait("memlock", "", format_size(soft), FAIL, float("inf") if soft is None else soft)
        yield from _trait("memlock (hard)", "", format_size(hard), WARN, float("inf") if hard is None else hard)
    yield from _read_rows("limits", facts)
    if not facts.of_agent:  # the agent's own pod has other limits than a job
        yield from _read_rows("job_limits", facts)


def _list_host_traits(facts: HostinfoFacts) -> Iterator[Trait]:
    yield from _read_rows("host", facts)
    for name, value in sorted(facts.nccl_variables.items()):
        yield from _trait(name, "set to", value, WARN)


_OF_FACTS: tuple[tuple[type, Callable[[Any], Iterator[Trait]]], ...] = (
    (GpuFacts, _list_all_gpu_traits), (PciFacts, _list_pci_traits), (RdmaFacts, _list_rdma_traits),
    (InterfacesFacts, _list_interface_traits), (LimitsFacts, _list_limit_traits), (HostinfoFacts, _list_host_traits),
)  # fmt: skip


def _list_link_traits(node: NodeTopology) -> Iterator[Trait]:
    """Yield path labels; NVLink counts are traits of the GPUs."""
    gpus = {gpu.name for gpu in node.gpus}
    lost = {gpu.name for gpu in node.gpus if not gpu.usable}
    for pair in node.pairs:
        if {pair.a, pair.b} & gpus and not {pair.a, pair.b} & lost:  # a lost GPU is reported with its state
            label = "NVLink" if pair.nvlinks else pair.label
            yield from _trait(f"{pair.a} to {pair.b}", "path", label, FAIL if label == "NVLink" else WARN)


# Comparison

Traits = dict[tuple[str, str], Trait]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One property that differs."""

    status: Status
    subject: str  # "GPU5", "memlock", "mlx5_3"
    what: str  # "PCIe width"; empty if the subject is sufficient
    message: str  # "GPU5 PCIe width x16 -> x8"
    a: str | None  # value in the first snapshot, None if missing
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGroup:
    """Nodes with identical traits, and their differences from the most common values of the fleet."""

    nodes: tuple[str, ...]
    differences: tuple[Difference, ...]  # a is the fleet's common value, b the group's


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFamily:
    """Nodes with the same GPU model: the common configuration first, then deviating groups, worst first."""

    kind: str  # GPU model; "no GPU" if no node has one
    total: int
    common: FleetGroup
    odd: tuple[FleetGroup, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetComparison:
    """All nodes, in families of comparable nodes; the largest family comes first."""

    total: int
    families: tuple[FleetFamily, ...]


def diff(a: Snapshot, b: Snapshot, names: tuple[str, str] | None = None) -> tuple[Difference, ...]:
    """Return the differences from `a` to `b`. If both are from the same host, `b` is the later one.

    `names` describe the two places in messages about two hosts, such as "in a.json". Default: "on" and the host name.
    """
    names = names or (f"on {a.hostname}", f"on {b.hostname}")
    return compare(list_traits(a), list_traits(b, like=a), same_host=a.hostname == b.hostname, names=names)


def compare(a: Traits, b: Traits, *, same_host: bool, names: tuple[str, str] = ("", "")) -> tuple[Difference, ...]:
    """Compare two sets of traits, worst difference first; `names` are required if the hosts differ."""
    # Subjects without any trait on the other side: missing devices.
    gone = {subject for subject, _ in a} ^ {subject for subject, _ in b}
    alike = Counter((key[1], a[key].value == b[key].value) for key in a.keys() & b.keys())
    differences = []
    for key in dict.fromkeys((*a, *b)):
        first, second = a.get(key), b.get(key)
        is_other = key[1] in IDENTIFIERS and alike[key[1], True] <= alike[key[1], False]
        if is_other or (first and second and first.value == second.value):
            continue
        if (first is None or second is None) and not _is_relevant(key, gone):
            continue
        differences.append(_make_difference(first, second, same_host=same_host, names=names))
    return tuple(_fold(sorted(differences, key=lambda each: (WORST_FIRST.index(each.status), each.subject, each.what))))


def _is_relevant(key: tuple[str, str], gone: set[str]) -> bool:
    """Whether to report that one side lacks a trait: a missing device is reported once; an unreadable value is not."""
    subject, fact = key
    return fact == "set to" or (subject in gone and fact in ("device", "state", "interface"))


def _make_difference(
    first: Trait | None, second: Trait | None, *, same_host: bool, names: tuple[str, str]
) -> Difference:  # fmt: skip
    present = [entry for entry in (first, second) if entry]
    trait, status = present[0], min((entry.status for entry in present), key=WORST_FIRST.index)
    if same_host and first and second and first.size is not None and second.size is not None:
        status = status if second.size < first.size else Status.INFO
    if same_host and first is None:
        status = Status.INFO if trait.what in ("device", "state", "interface") else status
    a, b = (side.value if side else None for side in (first, second))
    message = _describe_change(trait, a, b, None if same_host else names)
    return Difference(status=status, subject=trait.subject, what=trait.what, message=message, a=a, b=b)


def _describe_change(trait: Trait, a: str | None, b: str | None, names: tuple[str, str] | None) -> str:
    """Describe a difference: from a to b on one host, or at two places identified by `names`."""
    subject, fact = trait.subject, trait.what
    here, there = names or ("", "")
    if fact in ("port", "interface") and a is not None and b is not None:
        if names:
            return f"{subject} {b.lower()} {there} ({a.lower()} {here})"
        return f"{subject} {'up again' if b in ('ACTIVE', 'up') else b.lower()} (was {a.lower()})"
    name = f"{subject} {fact}".strip()
    if fact in ("device", "state", "interface") and (a is None or b is None):
        if names is None:
            return f"{subject} {'missing' if b is None else 'new'}"
        return f"{subject} missing {there if b is None else here}"
    before, after = a if a is not None else "unset", b if b is not None else "unset"
    return f"{name} {before} -> {after}" if names is None else f"{name} {before} {here}, {after} {there}"


def _fold(differences: list[Difference]) -> list[Difference]:
    """Merge equal differences of many devices into one line: eight GPUs, one driver."""
    folded: dict[tuple[object, ...], list[Difference]] = defaultdict(list)
    for difference in differences:
        stem = re.sub(r"\(.*\)|\d", "", difference.subject)  # without the PCI address
        folded[(difference.status, difference.what, difference.a, difference.b, stem)].append(difference)
    result = []
    for first, *others in folded.values():
        if len(others) < 3 or not first.what:
            result += [first, *others]
            continue
        subject = some([difference.subject for difference in (first, *others)], limit=3)
        message = first.message.replace(first.subject, f"{subject}:", 1)
        result.append(replace(first, subject=subject, message=message))
    return sorted(result, key=lambda difference: WORST_FIRST.index(difference.status))


class _EqualNodes(NamedTuple):
    """Nodes of a fleet with the same traits."""

    names: Sequence[str]
    traits: Traits  # without NVLink domains, in which the racks of a fleet differ
    domains: tuple[str, ...]
    model: str | None  # the most common GPU model; None if no GPU is visible


def compare_fleet(hosts: Sequence[tuple[Sequence[str], Snapshot]]) -> FleetComparison:
    """Group nodes by their traits, and describe how each group differs from the common values.

    Each snapshot has the names of the nodes that it represents. Nodes with different GPU models form separate families.
    A node without visible GPUs is compared with the largest family, because in a GPU fleet this is a fault, not another
    type of machine.
    """
    if not hosts:
        raise ValueError("a fleet needs at least one snapshot, got none")
    fullest = max((host for _, host in hosts), key=lambda host: len(f.gpus) if (f := host.facts(GpuFacts)) else 0)
    nodes = [_read_traits(names, snapshot, fullest) for names, snapshot in hosts]
    sizes = Counter(node.model for node in nodes if node.model for _ in node.names)
    largest = sizes.most_common(1)[0][0] if sizes else "no GPU"
    families: dict[str, list[_EqualNodes]] = defaultdict(list)
    for node in nodes:
        families[node.model or largest].append(node)
    built = [_make_family(kind, members) for kind, members in families.items()]
    built.sort(key=lambda family: -family.total)
    return FleetComparison(total=sum(family.total for family in built), families=tuple(built))


def _read_traits(names: Sequence[str], snapshot: Snapshot, fullest: Snapshot) -> _EqualNodes:
    traits = list_traits(snapshot, like=fullest)
    models = Counter(trait.value for trait in traits.values() if trait.what == "model")
    return _EqualNodes(
        names=names,
        traits={key: trait for key, trait in traits.items() if trait.what != DOMAIN},
        domains=tuple(trait.value for trait in traits.values() if trait.what == DOMAIN),
        model=models.most_common(1)[0][0] if models else None,
    )


def _make_family(kind: str, nodes: Sequence[_EqualNodes]) -> FleetFamily:
    total, usual = sum(len(node.names) for node in nodes), _find_usual(nodes)
    groups: dict[tuple[Difference, ...], list[str]] = defaultdict(list)
    for node in nodes:
        groups[compare(usual, node.traits, same_host=True)] += node.names
    ordered = [FleetGroup(nodes=tuple(names), differences=differences) for differences, names in groups.items()]
    # Among groups of equal size, the one with the fewest differences is the common configuration.
    ordered.sort(key=lambda group: (-len(group.nodes), len(group.differences)))
    common, *odd = ordered
    odd.sort(key=lambda group: (-len(group.differences), len(group.nodes)))
    odd.sort(key=lambda group: WORST_FIRST.index(next((one.status for one in group.differences), INFO)))
    warnings = _describe_domains(nodes, total)
    if len(common.nodes) * 2 <= total and odd:
        warnings = (_text("no_common", nodes=len(common.nodes), total=total), *warnings)
    return FleetFamily(kind=kind, total=total, common=common, odd=tuple(odd), warnings=warnings)


def _describe_domains(nodes: Sequence[_EqualNodes], total: int) -> tuple[str, ...]:
    """Return which nodes are in which NVLink domain, if the domains are those of racks."""
    domains: dict[str, dict[str, None]] = defaultdict(dict)
    for node in nodes:
        for domain in node.domains:
            domains[domain].update(dict.fromkeys(node.names))
    if not 1 < len(domains) < total:  # a domain of a single node may be that of its board
        return ()
    listed = "; ".join(f"{some(list(names), limit=3)} in {domain}" for domain, names in domains.items())
    return (_text("domains", count=len(domains), listed=listed),)


def _find_usual(nodes: Sequence[_EqualNodes]) -> Traits:
    """Return the most common trait of each key that most nodes have."""
    by_key: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    example: dict[tuple[tuple[str, str], str], Trait] = {}
    for node in nodes:
        for key, trait in node.traits.items():
            by_key[key][trait.value] += len(node.names)
            example[key, trait.value] = trait
    total = sum(len(node.names) for node in nodes)
    return {
        key: example[key, counts.most_common(1)[0][0]] for key, counts in by_key.items() if counts.total() * 2 > total
    }


def format_diff(differences: Sequence[Difference]) -> str:
    """Format one line per difference."""
    if not differences:
        return "✓ no differences that affect training → if one node is slower, measure it: topoflight bench"
    return "\n".join(f"{difference.status:<7} {difference.message}" for difference in differences)


def format_fleet(view: FleetComparison) -> str:
    """Format each family: the common group, then the other groups with their differences."""
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=folder, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - plain text, not HTML
    return templates.get_template("fleet.j2").render(families=view.families)
