"""What advice needs of a node beside its graph: the facts that travel in a record, and the snapshot read back from it.

The planner asks the probes' facts (interfaces with roles and speeds, ports, limits, CPU). A record holds those that it
asks for, without what changes from scan to scan (counters, temperatures) and without what only names one machine:
addresses are numbered within their subnets and stand beside the text, so that like nodes carry equal text and a
cluster of thousands is a handful of texts. A test asks every recording twice, from the scan and from the record.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import zlib
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from contracts.plain import loads as plain
from probes.api import Failed, Ok, Snapshot
from probes.gpu.probe import Gpu, GpuFacts, NvLink
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.probe import Interface, InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci.probe import PciDevice, PciFacts, is_bridge
from probes.rdma.probe import Gid, RdmaDevice, RdmaFacts, RdmaPort
from probes.wire import SnapshotError, from_json, to_json

Json = dict[str, Any]
MOST_TEXT = 65536
MOST_FACTS_BYTES = 1 << 20  # unpacked
MOST_ADDRESSES = 256
MEMORY_STEP_BYTES = 256 << 20  # of GPU memory that others hold
_PAIR = 2  # addresses of a /31 or /127, which have no network address to leave out
PROBES = ("gpu", "pci", "rdma", "interfaces", "limits", "hostinfo")

# Fields that the planner reads, by type; of the others the default travels, that is nothing.
_KEPT: dict[type[Any], frozenset[str]] = {
    GpuFacts: frozenset(("driver_version", "cuda_version", "gpus", "driver_error", "pci_gpus")),
    Gpu: frozenset((
        "index", "bus_id", "name", "memory_bytes", "compute_capability", "numa_node", "gpu_numa_node", "cpu_affinity",
        "mig_enabled", "c2c_links", "fabric_clique", "error", "nvlinks", "nvlinks_known",
        "memory_used_bytes",
    )),
    PciFacts: frozenset((
        "iommu_mode", "peermem_version", "peermem_loaded", "nvidia_open_module", "dmabuf_possible", "virtual_tree",
        "hypervisor", "container", "topology_files", "devices",
    )),
    LimitsFacts: frozenset((
        "whose", "uid", "memlock_soft_bytes", "memlock_hard_bytes", "memlock_known", "nofile_soft", "nofile_hard",
        "ipc_lock", "sys_nice", "shm_size_bytes", "hugepages", "cgroup_memory_max_bytes", "cgroup_cpus", "container",
        "of_agent", "rdma_present",
    )),
    HostinfoFacts: frozenset((
        "hostname", "kernel", "os", "architecture", "cpu_vendor", "cpu_name", "cpu_family", "cpu_model", "sockets",
        "cores", "threads", "memory_bytes", "numa", "virtual_machine", "product", "vendor", "nccl_environment",
        "nccl_conf", "nccl_conf_files", "vendor_files", "storage_servers", "chassis_asset_tag", "cloud_id",
    )),
}  # fmt: skip
# Of these types all but a few fields: what counts, and what names one machine.
_DROPPED: dict[type[Any], frozenset[str]] = {
    NvLink: frozenset(("errors",)),
    InterfacesFacts: frozenset(("network_status_source", "network_status_error")),
    Interface: frozenset(("mac", "errors")),
    # an idle link is slower: its state changes from scan to scan
    PciDevice: frozenset(("link_transfers_per_second", "link_width", "sriov_vfs", "iommu_group", "lost")),
    RdmaFacts: frozenset(("pyverbs", "memlock_proof")),
    RdmaDevice: frozenset(("node_guid", "uverbs", "uverbs_usable")),
    RdmaPort: frozenset(("counters",)),
}
_PROCESS = re.compile(r"^this process, pid \d+")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def pack(snapshot: Snapshot) -> tuple[str | None, tuple[str, ...]]:
    """The facts as text that like nodes share, and the node's own addresses; None where that is too much."""
    outcomes = {
        name: replace(outcome, seconds=0.0, **({"facts": _bare(outcome.facts)} if isinstance(outcome, Ok) else {}))
        for name in PROBES
        if (outcome := snapshot.outcomes.get(name)) is not None
    }
    numbers = _Numbers()
    for name in ("interfaces", "rdma"):
        if isinstance(outcome := outcomes.get(name), Ok):
            outcomes[name] = replace(outcome, facts=_readdressed(outcome.facts, numbers))
    bare = replace(snapshot, hostname="", taken_at_seconds=0.0, topoflight_version="", outcomes=outcomes)
    text = json.dumps(to_json(bare), separators=(",", ":"), sort_keys=True)
    packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(packed) > MOST_TEXT or len(numbers.own) > MOST_ADDRESSES:
        return None, ()
    return packed, tuple(numbers.own)


def unpack(text: str) -> Snapshot:
    """The snapshot without host name, addresses numbered. Raises ValueError where it is none of this release."""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), MOST_FACTS_BYTES)
        if inflate.unconsumed_tail or not inflate.eof:
            raise ValueError(f"the facts are cut off, or larger than {MOST_FACTS_BYTES} bytes")
        return from_json(plain(raw))
    except (zlib.error, TypeError, SnapshotError) as error:
        raise ValueError(f"no facts: {error}") from None


def of_node(snapshot: Snapshot, *, name: str, addresses: tuple[str, ...]) -> Snapshot:
    """An unpacked snapshot as that node's: under its name, with its own addresses."""
    outcomes = dict(snapshot.outcomes)
    own = _Own(addresses)
    for probe in ("interfaces", "rdma"):
        if isinstance(outcome := outcomes.get(probe), Ok):
            outcomes[probe] = replace(outcome, facts=_readdressed(outcome.facts, own))
    return replace(snapshot, hostname=name, outcomes=outcomes)


def unpublished(name: str, why: str) -> Snapshot:
    """The snapshot of a node whose record holds no facts: everything but its graph is unknown, and says why."""
    outcomes: dict[str, Any] = {probe: Failed(error=why) for probe in PROBES if probe != "gpu"}  # the graph has those
    return Snapshot(hostname=name, taken_at_seconds=0.0, topoflight_version="", outcomes=outcomes)


def _bare(value: Any) -> Any:
    """Facts without the fields that do not travel."""
    if isinstance(value, tuple):
        return tuple(_bare(each) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kind = type(value)
    kept, dropped = _KEPT.get(kind), _DROPPED.get(kind, frozenset())
    changes: Json = {}
    for field in fields(value):
        if field.name in dropped or (kept is not None and field.name not in kept):
            changes[field.name] = () if field.default is MISSING else field.default
        else:
            changes[field.name] = _bare(getattr(value, field.name))
    if isinstance(value, Gpu) and value.memory_used_bytes is not None:  # a job's varies all the time
        changes["memory_used_bytes"] = value.memory_used_bytes // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
    if isinstance(value, PciFacts):
        changes["devices"] = tuple(_bare(each) for each in value.devices if not is_bridge(each.class_code))
    if kind is LimitsFacts:
        changes["whose"] = _PROCESS.sub("the agent's process", changes["whose"])
    if kind is HostinfoFacts:
        changes["hostname"] = ""
    return replace(value, **changes)


class _Numbers:
    """Numbers addresses within their subnets, in the order in which they come: the same for like nodes."""

    def __init__(self) -> None:
        self.own: list[str] = []  # of interfaces, in order
        self._known: dict[Address, Address] = {}

    def interface(self, text: str) -> str:
        """An address with its prefix length."""
        try:
            parsed = ipaddress.ip_interface(text)
        except ValueError:
            return text
        if parsed.ip not in self._known:
            self.own.append(str(parsed.ip))
        return f"{self._number(parsed.ip, parsed.network)}/{parsed.network.prefixlen}"

    def gid(self, text: str) -> str:
        """A GID: the address of an interface, or one of a device whose interface is elsewhere."""
        try:
            parsed = ipaddress.IPv6Address(text)
        except ValueError:
            return text
        address = parsed.ipv4_mapped or parsed
        wide = ipaddress.ip_network((address, 16 if address.version == 4 else 64), strict=False)
        number = self._number(address, wide)
        return str(ipaddress.IPv6Address(f"::ffff:{number}") if number.version == 4 else number)

    def _number(self, address: Address, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> Address:
        if address not in self._known:
            taken = set(self._known.values())
            first = 0 if network.num_addresses <= _PAIR else 1
            numbers = range(first, min(network.num_addresses, first + 2 * MOST_ADDRESSES))
            free = (each for number in numbers if (each := network.network_address + number) not in taken)
            self._known[address] = next(free, address)
        return self._known[address]


class _Own:
    """Puts a node's own addresses where the numbers stand; the interfaces come first, in the order of `_Numbers`."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._left = list(reversed(addresses))
        self._known: dict[Address, Address] = {}

    def interface(self, text: str) -> str:
        """An address with its prefix length."""
        try:
            parsed = ipaddress.ip_interface(text)
        except ValueError:
            return text
        if parsed.ip not in self._known and self._left:
            own = ipaddress.ip_address(self._left.pop())
            if own not in parsed.network:  # a record that was tampered with
                raise ValueError(f"{own} is not in {parsed.network}")
            self._known[parsed.ip] = own
        return f"{self._known.get(parsed.ip, parsed.ip)}/{parsed.network.prefixlen}"

    def gid(self, text: str) -> str:
        """A GID; one that is no interface's stays a number."""
        try:
            parsed = ipaddress.IPv6Address(text)
        except ValueError:
            return text
        number = parsed.ipv4_mapped or parsed
        own = self._known.get(number, number)
        return str(ipaddress.IPv6Address(f"::ffff:{own}") if own.version == 4 else own)


def _readdressed(facts: Any, numbers: _Numbers | _Own) -> Any:
    if isinstance(facts, InterfacesFacts):
        interfaces = tuple(
            replace(each, addresses=tuple(numbers.interface(text) for text in each.addresses))
            for each in facts.interfaces
        )
        return replace(facts, interfaces=interfaces)
    return replace(facts, devices=tuple(_device(device, numbers) for device in facts.devices))


def _device(device: RdmaDevice, numbers: _Numbers | _Own) -> RdmaDevice:
    ports = tuple(replace(port, gids=tuple(_gid(gid, numbers) for gid in port.gids)) for port in device.ports)
    return replace(device, ports=ports)


def _gid(gid: Gid, numbers: _Numbers | _Own) -> Gid:
    return replace(gid, gid=numbers.gid(gid.gid))
