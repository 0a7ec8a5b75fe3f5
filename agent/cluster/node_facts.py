"""The facts about a machine in a node's record: the inputs of the topology graph and of the planner.

The planner needs probe facts (interfaces with roles and speeds, ports, limits, CPU), and `topology.build` derives the
graph from them, so a record stores facts and nothing derived from them. It omits values that change between scans
(counters, temperatures) or identify one machine. Addresses are replaced by numbers within their subnets and stored
separately. So nodes with equal hardware have equal facts, and a cluster of thousands has few distinct machines. Names
are the fact names in camelCase; defaults are omitted. Specification: deploy/daemonset/base/nodetopology-crd.yaml.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter, eq
from typing import Any, get_args, get_type_hints

import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from contracts.plain import LARGEST_DECIMAL, strict
from contracts.redaction import redact
from contracts.tables import read_table
from probes.api import Absent, Failed, Ok, Outcome, Snapshot
from probes.gpu.facts import Gpu, GpuFacts, GpuPair, NvLink
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciDevice, PciFacts, is_bridge, is_network
from probes.rdma.facts import RdmaFacts, RdmaPort

Json = dict[str, Any]
MOST_ADDRESSES = 256
MOST_ITEMS = 512  # in every list and map
MOST_DEVICES = 256  # GPUs, and GPUs and NICs together: every pair is evaluated
MOST_LETTERS = 512  # of every text; longer texts are cut
MOST_ROW = 16384  # characters of a row, which is never cut: 64 GPUs have 2,016 pairs
ROWS = frozenset(("indices", "busIds", "links", "between"))
MEMORY_STEP_BYTES = 256 << 20  # rounding of GPU memory used by other processes
_PAIR = 2  # addresses in a /31 or /127, which have no network address to skip
_GIGATRANSFERS = 1e9
_FACTS: dict[str, type[Any]] = {
    "gpu": GpuFacts, "pci": PciFacts, "rdma": RdmaFacts, "interfaces": InterfacesFacts, "limits": LimitsFacts,
    "hostinfo": HostinfoFacts,
}  # fmt: skip
GRAPH_PARTS = ("gpu", "pci", "rdma", "interfaces", "hostinfo")
"""Parts of a machine that its graph is built from; limits and the memory that others hold are not among them."""

# Published fields, by type name: [kept] lists the fields of a type to publish, [dropped] those to omit.
_FIELDS = read_table(__file__, "node_facts.toml")
MEMORY_USED = "gpuMemoryUsedBytes"  # the part of a machine that changes with every job
_PROCESS = re.compile(r"^this process, pid \d+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def clean(text: str, most: int = MOST_LETTERS) -> str:
    """Remove secrets and control characters from a text of the host, and cut it to `most` characters."""
    return _CONTROL.sub("?", redact(text[: 2 * most])[:most])


def pack(snapshot: Snapshot) -> tuple[Json | None, tuple[str, ...]]:
    """Return the facts shared by equal nodes, and the node's own addresses; None if they exceed the record limits."""
    outcomes = {
        name: replace(outcome, facts=_bare(outcome.facts)) if isinstance(outcome, Ok) else outcome
        for name in _FACTS
        if (outcome := snapshot.outcomes.get(name)) is not None
    }
    numbers = _Addresses()
    for name in ("interfaces", "rdma"):
        if isinstance(outcome := outcomes.get(name), Ok):
            outcomes[name] = replace(outcome, facts=_readdressed(outcome.facts, numbers))
    machine = {name: _part(outcome) for name, outcome in outcomes.items()}
    gpus = outcome.facts.gpus if isinstance(outcome := outcomes.get("gpu"), Ok) else ()
    # stored apart from the GPUs, because it changes while the graph does not
    if used := {str(gpu.index): used for gpu in gpus if (used := gpu.memory_used_bytes) is not None}:
        machine[MEMORY_USED] = used
    bounded = _bounded(machine)
    if bounded is None or len(numbers.numbered) > MOST_ADDRESSES:
        return None, ()
    return bounded, tuple(numbers.numbered)


def unpack(machine: Json) -> Snapshot:
    """Return the snapshot without host name, with numbered addresses. ValueError for another release's format."""
    try:
        outcomes = {name: _outcome(name, machine[name]) for name in _FACTS if name in machine}
        gpus, used = outcomes.get("gpu"), machine.get(MEMORY_USED) or {}
        if isinstance(gpus, Ok) and used:
            each = (replace(gpu, memory_used_bytes=used.get(str(gpu.index))) for gpu in gpus.facts.gpus)
            outcomes["gpu"] = Ok(facts=replace(gpus.facts, gpus=tuple(each)))
    except (cattrs.BaseValidationError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no facts: {type(error).__name__}: {str(error)[:200]}") from None
    return Snapshot(hostname="", taken_at_seconds=0.0, outcomes=outcomes)


def _part(outcome: Outcome) -> Json:
    if isinstance(outcome, Ok):
        made: Json = _converter.unstructure(outcome.facts)
        return made
    return {"absent": outcome.why} if isinstance(outcome, Absent) else {"failed": outcome.error}


def _outcome(name: str, part: Json) -> Outcome:
    if "absent" in part:
        return Absent(why=str(part["absent"]))
    return Failed(error=str(part["failed"])) if "failed" in part else Ok(facts=_converter.structure(part, _FACTS[name]))


def _bounded(value: Any) -> Any:
    """Return the value with cleaned texts; None if a list or map is too long or a number is negative."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if 0 <= value < 2**63 else None
    if len(value) > MOST_ITEMS:
        return None
    if isinstance(value, dict):
        made = {clean(key): _row_bounded(value[key]) if key in ROWS else _bounded(value[key]) for key in sorted(value)}
        return None if None in made.values() else made
    items = [_bounded(each) for each in value]
    return None if any(item is None for item in items) else items


def of_node(snapshot: Snapshot, *, name: str, addresses: tuple[str, ...]) -> Snapshot:
    """Convert an unpacked snapshot to that of a node: add its name and addresses."""
    own = _Addresses(addresses)
    for kind in (InterfacesFacts, RdmaFacts):
        snapshot = snapshot.with_facts(kind, lambda facts: _readdressed(facts, own))
    return replace(snapshot, hostname=name)


def unpublished(name: str, why: str) -> Snapshot:
    """Return a snapshot for a record without facts: everything except the graph is unknown, with the reason."""
    outcomes: dict[str, Any] = {probe: Failed(error=why) for probe in _FACTS if probe != "gpu"}  # in the graph
    return Snapshot(hostname=name, taken_at_seconds=0.0, outcomes=outcomes)


def travelling(kind: type[Any]) -> frozenset[str]:
    """Return the fields of a fact type that records contain."""
    every = [field.name for field in fields(kind)]
    return frozenset(_FIELDS["kept"].get(kind.__name__, every)) - frozenset(_FIELDS["dropped"].get(kind.__name__, ()))


def _bare(value: Any) -> Any:
    """Return facts without the fields that records omit."""
    if isinstance(value, tuple):
        return tuple(_bare(each) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kind, changes = type(value), {}
    travel_names = travelling(kind)
    for field in fields(value):
        if field.name in travel_names:
            changes[field.name] = _bare(getattr(value, field.name))
        elif field.default_factory is not MISSING:
            changes[field.name] = field.default_factory()
        else:
            changes[field.name] = () if field.default is MISSING else field.default
    if isinstance(value, Gpu) and value.memory_used_bytes is not None:  # it varies with every job
        changes["memory_used_bytes"] = value.memory_used_bytes // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
    if isinstance(value, PciFacts):
        changes["devices"] = tuple(_bare(each) for each in _on_the_way(value.devices))
    if isinstance(value, PciDevice):
        changes |= _stable(value)
    if kind is LimitsFacts:
        changes["whose"] = _PROCESS.sub("the agent's process", changes["whose"])
    if kind is HostinfoFacts:
        changes["hostname"] = ""
    return replace(value, **changes)


def _on_the_way(devices: Sequence[PciDevice]) -> tuple[PciDevice, ...]:
    """Return the devices, and the bridges above them or those that redirect traffic (ACS)."""
    known, wanted = {device.bus_id: device for device in devices}, set[str]()
    for device in devices:
        above = None if is_bridge(device.class_code) and not device.acs_source_validation else device
        while above is not None and above.bus_id not in wanted:
            wanted.add(above.bus_id)
            above = known.get(above.parent or "")
    return tuple(device for device in devices if device.bus_id in wanted)


def _stable(device: PciDevice) -> Json:
    """Return the current link if it is below its maximum; a GPU's speed is omitted, because it is lower when idle."""
    speed, width = device.link_transfers_per_second, device.link_width
    idle = device.link_transfers_per_second_max is not None and not is_network(device.class_code)
    return {
        "link_transfers_per_second": None if idle or speed == device.link_transfers_per_second_max else speed,
        "link_width": None if width == device.link_width_max else width,
        "acs_source_validation": device.acs_source_validation or None,
        "driver": None if is_bridge(device.class_code) else device.driver,
    }


def camel(name: str) -> str:
    """Return the name of a field in a record."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _names(kind: type[Any]) -> dict[str, Any]:
    return {field.name: override(rename=camel(field.name)) for field in fields(kind)}


def _writer(kind: type[Any]) -> Callable[[Any], Json]:
    write = make_dict_unstructure_fn(kind, _converter, _cattrs_omit_if_default=True, **_names(kind))

    def without_unknown(value: Any) -> Json:
        made = {name: one for name, one in write(value).items() if one is not None}
        made.pop("hostname", None)
        return _device_out(made) if kind is PciDevice else made

    return without_unknown


def _reader(kind: type[Any]) -> Callable[[Any, Any], Any]:
    read = make_dict_structure_fn(kind, _converter, _cattrs_detailed_validation=False, **_names(kind))
    hints = get_type_hints(kind)
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    unknown: Json = {camel(name): None for name in needed if type(None) in get_args(hints[name])}
    if kind is HostinfoFacts:
        unknown["hostname"] = ""

    def with_unknown(value: Any, _: Any) -> Any:
        return read(unknown | (_device_in(value) if kind is PciDevice else value), kind)

    return with_unknown


def _device_out(made: Json) -> Json:
    """Format like lspci: class and ids in hexadecimal, a link as one text."""
    ids = f"{made.pop('vendorId'):04x}:{made.pop('deviceId'):04x}"
    made |= {"class": f"{made.pop('classCode'):06x}", "id": ids}
    for name, end in (("link", "Max"), ("running", "")):
        speed, width = made.pop(f"linkTransfersPerSecond{end}", None), made.pop(f"linkWidth{end}", None)
        if speed is not None or width is not None:
            shown = "?" if speed is None else f"{speed / _GIGATRANSFERS:g}"
            made[name] = f"{shown} GT/s x{'?' if width is None else width}"
    return made


def _device_in(value: Json) -> Json:
    vendor, _, device = value["id"].partition(":")
    made = {**value, "vendorId": int(vendor, 16), "deviceId": int(device, 16), "classCode": int(value["class"], 16)}
    for name, end in (("link", "Max"), ("running", "")):
        speed, _, width = str(value.get(name) or "? GT/s x?").partition(" GT/s x")
        made[f"linkTransfersPerSecond{end}"] = None if speed == "?" else _finite(float(speed)) * _GIGATRANSFERS
        made[f"linkWidth{end}"] = None if width == "?" else int(width)
    return made


def _finite(value: float) -> float:
    if not 0 <= value < LARGEST_DECIMAL:
        raise ValueError(f"{value} is out of bounds")
    return value


def _tree_out(devices: Iterable[PciDevice]) -> list[Json]:
    """Group devices by host bridge and NUMA node."""
    write = _converter.get_unstructure_hook(PciDevice)
    roots: dict[tuple[str | None, int | None], list[Json]] = {}
    for device in devices:
        bare = replace(device, root=None, numa_node=None)
        roots.setdefault((device.root, device.numa_node), []).append(write(bare))
    return [
        {name: one for name, one in (("root", root), ("numaNode", numa)) if one is not None} | {"below": below}
        for (root, numa), below in roots.items()
    ]


def _tree_in(value: Any, _: Any) -> tuple[PciDevice, ...]:
    read = _converter.get_structure_hook(PciDevice)
    made = [
        read({**device, **{name: host[name] for name in ("root", "numaNode") if name in host}}, PciDevice)
        for host in value
        for device in host["below"]
    ]
    return tuple(sorted(made, key=lambda device: device.bus_id))


def _alike(items: Iterable[Any], **own: Any) -> list[tuple[Json, list[Any]]]:
    """Group items that differ only in `own`: return the shared fields as JSON and the items, in order of appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(replace(item, **own), []).append(item)
    return [(_converter.unstructure(bare), members) for bare, members in groups.items()]


def _gpus_out(gpus: Iterable[Gpu]) -> list[Json]:
    """Combine equal GPUs into one entry, with a row of indices and bus ids; a GPU without a bus id is separate."""
    made = []
    for shared, same in _alike(gpus, index=0, bus_id=None, memory_used_bytes=None):
        for known in (True, False):
            mine = [gpu for gpu in same if (gpu.bus_id is not None) is known]
            rows = {"busIds": " ".join(str(gpu.bus_id) for gpu in mine)} if known else {}
            if mine:
                about = {name: value for name, value in shared.items() if name != "index"}
                made.append({**about, "indices": " ".join(str(gpu.index) for gpu in mine), **rows})
    return made


def _gpus_in(value: Any, _: Any) -> tuple[Gpu, ...]:
    read = _converter.get_structure_hook(Gpu)
    made: list[Gpu] = []
    for one in value:
        indices = _row(one["indices"])
        _few([*made, *indices], MOST_DEVICES)
        places = _row(one["busIds"]) if "busIds" in one else [None] * len(indices)
        made += [read({**one, "index": int(i), "busId": at}, Gpu) for i, at in zip(indices, places, strict=True)]
    return tuple(sorted(_few(made, MOST_DEVICES), key=lambda gpu: gpu.index))


def _rows_out(items: Iterable[Any], row: str, words: str, **own: Any) -> list[Json]:
    """Combine items that differ only in `own` into one entry; `words` formats the values of each item in a row."""
    return [
        {name: value for name, value in shared.items() if name not in own}
        | {row: " ".join(words.format(one) for one in same)}
        for shared, same in _alike(items, **own)
    ]


def _rows_in(value: Any, _: Any, *, kind: type[Any], row: str, own: Sequence[str], most: int) -> tuple[Any, ...]:
    """Create items from entries with a row; the parts of each word of the row are the members `own`."""
    read = _converter.get_structure_hook(kind)
    made: list[Any] = []
    for one in value:
        about = {name: each for name, each in one.items() if name != row}
        words = _row(one[row])
        _few([*made, *words], most)
        for word in words:
            parts = map(int, word.split("-"))
            made.append(read({**about, **dict(zip(own, parts, strict=True))}, kind))
    return tuple(sorted(made, key=attrgetter(*own)))


def _row_bounded(row: str) -> str | None:
    return clean(row, MOST_ROW) if len(row) <= MOST_ROW else None


def _few(made: list[Any], most: int) -> list[Any]:
    """Return the list. Raises ValueError if it is too long: a short row can name many items, and each costs time."""
    if len(made) > most:
        raise ValueError(f"{len(made)} are more than the {most} that are read")
    return made


def _row(text: Any) -> list[str]:
    return str(text)[:MOST_ROW].split(" ")


def _made_converter() -> cattrs.Converter:
    made = cattrs.Converter(detailed_validation=False)
    strict(made)
    made.register_unstructure_hook(float, lambda value: int(value) if value.is_integer() else value)
    made.register_unstructure_hook_factory(is_dataclass, _writer)
    made.register_structure_hook_factory(is_dataclass, _reader)
    grouped = (
        (tuple[Gpu, ...], _gpus_out, _gpus_in),
        (tuple[NvLink, ...], partial(_rows_out, row="links", words="{0.link}", link=0),
         partial(_rows_in, kind=NvLink, row="links", own=("link",), most=MOST_ITEMS)),
        (tuple[GpuPair, ...], partial(_rows_out, row="between", words="{0.a}-{0.b}", a=0, b=0),
         partial(_rows_in, kind=GpuPair, row="between", own=("a", "b"), most=MOST_DEVICES**2 // 2)),
        (tuple[PciDevice, ...], _tree_out, _tree_in),
    )  # fmt: skip
    for row, write, read in grouped:
        made.register_unstructure_hook_func(partial(eq, row), write)
        made.register_structure_hook_func(partial(eq, row), read)
    return made


_converter = _made_converter()


class _Addresses:
    """Replace the addresses of a node by numbers within their subnets, or the numbers by the addresses of another node.

    Numbers are assigned in order of first appearance, so equal nodes have equal numbers. `own` are the node's addresses
    that replace the numbers, in the order of `numbered`; the interfaces come first.
    """

    def __init__(self, own: Sequence[str] | None = None) -> None:
        self._known: dict[Address, Address] = {}
        self._left = None if own is None else list(reversed(own))
        self.numbered: list[str] = []  # addresses of interfaces, in order

    def interface(self, text: str) -> str:
        """Replace an address with a prefix length. Raises ValueError if the node's own address is not in the subnet."""
        try:
            parsed = ipaddress.ip_interface(text)
        except ValueError:
            return text
        if parsed.ip not in self._known:
            self._known[parsed.ip] = self._replacement(parsed.ip, parsed.network, of_interface=True)
        return f"{self._known[parsed.ip]}/{parsed.network.prefixlen}"

    def gid(self, text: str) -> str:
        """Replace a GID: an address of an interface, or of a device whose interface is in another namespace."""
        try:
            parsed = ipaddress.IPv6Address(text)
        except ValueError:
            return text
        address = parsed.ipv4_mapped or parsed
        if address not in self._known:
            wide = ipaddress.ip_network((address, 16 if address.version == 4 else 64), strict=False)
            self._known[address] = self._replacement(address, wide, of_interface=False)
        found = self._known[address]
        return str(ipaddress.IPv6Address(f"::ffff:{found}") if found.version == 4 else found)

    def _replacement(self, address: Address, network: Network, *, of_interface: bool) -> Address:
        """Return the replacement of an address that appears for the first time; the address itself if there is none."""
        if self._left is not None:
            own = ipaddress.ip_address(self._left.pop()) if of_interface and self._left else address
            if own is not address and own not in network:  # the record was manipulated
                raise ValueError(f"{own} is not in {network}")
            return own
        if of_interface:
            self.numbered.append(str(address))
        taken = set(self._known.values())
        first = 0 if network.num_addresses <= _PAIR else 1
        numbers = range(first, min(network.num_addresses, first + 2 * MOST_ADDRESSES))
        free = (each for number in numbers if (each := network.network_address + number) not in taken)
        return next(free, address)


def _readdressed(facts: Any, numbers: _Addresses) -> Any:
    if isinstance(facts, InterfacesFacts):
        interfaces = tuple(
            replace(each, addresses=tuple(numbers.interface(text) for text in each.addresses))
            for each in facts.interfaces
        )
        return replace(facts, interfaces=interfaces)

    def port_of(port: RdmaPort) -> RdmaPort:
        return replace(port, gids=tuple(replace(gid, gid=numbers.gid(gid.gid)) for gid in port.gids))

    devices = (replace(device, ports=tuple(map(port_of, device.ports))) for device in facts.devices)
    return replace(facts, devices=tuple(devices))
