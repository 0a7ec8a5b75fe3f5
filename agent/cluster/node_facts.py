"""The facts about a machine in a node's record: the inputs of the topology graph and of the planner.

They are the facts of the probes as JSON, compressed with gzip and encoded in base64. Values that change between scans
(counters, temperatures) or identify one machine are omitted, and addresses are replaced by their networks. So nodes
with equal hardware have equal facts, and a cluster of thousands has few distinct machines.
Specification: deploy/daemonset/base/nodetopology-crd.yaml.
"""

from __future__ import annotations

import base64
import gzip
import io
import ipaddress
import json
import re
import zlib
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from contracts import bounded, plain
from contracts.redaction import redact
from contracts.tables import read_table
from probes import wire
from probes.api import Failed, Ok, Snapshot
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface
from probes.limits.probe import LimitsFacts
from probes.pci.facts import PciDevice, is_network
from probes.rdma.facts import Gid
from probes.registry import ALL

MOST_DEVICES = 256  # GPUs and NICs together: every pair is evaluated
MOST_LETTERS = 512  # of every text; longer texts are cut
MOST_FACTS_LETTERS = 65536  # of the compressed facts; an HGX H100 needs 5,000
MOST_FACTS_BYTES = 1 << 20  # of the JSON
_PROBES = [probe for probe in ALL if probe.name in ("gpu", "pci", "rdma", "interfaces", "limits", "hostinfo")]

# Published fields, by type name: [kept] lists the fields of a type to publish, [dropped] those to omit.
_FIELDS = read_table(__file__, "node_facts.toml")
_PROCESS = re.compile(r"^this process, pid \d+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def clean(text: str, most: int = MOST_LETTERS) -> str:
    """Remove secrets and control characters from a text of the host, and cut it to `most` characters."""
    return _CONTROL.sub("?", redact(text[: 2 * most])[:most])


def pack(snapshot: Snapshot) -> str | None:
    """Return the facts, which equal nodes share; None if they exceed the record limits."""
    outcomes = {
        probe.name: replace(outcome, facts=_bare(outcome.facts)) if isinstance(outcome, Ok) else outcome
        for probe in _PROBES
        if (outcome := snapshot.outcomes.get(probe.name)) is not None
    }
    parts = {name: wire.outcome_to_json(replace(outcome, seconds=0.0)) for name, outcome in outcomes.items()}
    text = json.dumps(_cleaned(parts), sort_keys=True)
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return None if len(text) > MOST_FACTS_BYTES or len(packed) > MOST_FACTS_LETTERS else packed


def unpack(packed: str) -> Snapshot:
    """Return the snapshot without host name, ValueError for another release's format."""
    try:
        with gzip.open(io.BytesIO(base64.b64decode(packed[:MOST_FACTS_LETTERS]))) as stream:
            parts = plain.loads(bounded.rest(stream, MOST_FACTS_BYTES))
        outcomes = {each.name: wire.outcome_from_json(each, parts[each.name]) for each in _PROBES if each.name in parts}
    except (*plain.MISFITS, EOFError, OSError, zlib.error) as error:  # gzip raises the last three
        raise ValueError(f"no facts: {type(error).__name__}: {str(error)[:200]}") from None
    return Snapshot(hostname="", taken_at_seconds=0.0, outcomes=outcomes)


def _cleaned(value: Any) -> Any:
    """Return plain values with every text cleaned."""
    if isinstance(value, dict):
        return {clean(name): _cleaned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    return clean(value) if isinstance(value, str) else value


def unpublished(name: str, why: str) -> Snapshot:
    """Return a snapshot for a record without facts: everything except the graph is unknown, with the reason."""
    outcomes: dict[str, Any] = {each.name: Failed(error=why) for each in _PROBES if each.name != "gpu"}  # in the graph
    return Snapshot(hostname=name, taken_at_seconds=0.0, outcomes=outcomes)


def _bare(value: Any) -> Any:
    """Return facts without the fields that records omit."""
    if isinstance(value, tuple):
        return tuple(_bare(each) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kind, changes = type(value), {}
    kept, dropped = _FIELDS["kept"].get(kind.__name__), _FIELDS["dropped"].get(kind.__name__, ())
    for field in fields(value):
        if field.name not in dropped and (kept is None or field.name in kept):
            changes[field.name] = _bare(getattr(value, field.name))
        elif field.default_factory is not MISSING:
            changes[field.name] = field.default_factory()
        else:
            changes[field.name] = () if field.default is MISSING else field.default
    if isinstance(value, PciDevice) and value.link_transfers_per_second_max and not is_network(value.class_code):
        changes["link_transfers_per_second"] = None  # a GPU's link is slower while it is idle
    if isinstance(value, Interface):
        changes["addresses"] = tuple(map(_network, value.addresses))
    if isinstance(value, Gid):
        changes["gid"] = _network(value.gid)
    if kind is LimitsFacts:
        changes["whose"] = _PROCESS.sub("the agent's process", changes["whose"])
    if kind is HostinfoFacts:
        changes["hostname"] = ""
    return replace(value, **changes)


def _network(text: str) -> str:
    """Return the network of an address ("10.1.2.3/24" becomes "10.1.2.0/24"), or of a GID, whose prefix is unknown."""
    try:
        if "/" in text:
            return str(ipaddress.ip_interface(text).network)
        gid = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    host_bits = 16 if gid.ipv4_mapped else 64
    return str(ipaddress.IPv6Address(int(gid) >> host_bits << host_bits))
