"""Expectations: what a node, or every node of a pool, must have, and the checks of a node against them.

`--expect gpus=8,hcas=8,nvlink=NV18,gdr=on`, or the same as a YAML mapping in a file. The gate alone can only report
problems of the devices it finds. Only the owner can state which devices the node should have. A missing device or a
lower value fails the check. A value that could not be read is unknown, and the check is required.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from agent.base import raise_as, units
from agent.checks.host_checks import (
    EXPECT_CODES,
    explain_unread_gpus,
    explain_unread_hcas,
    is_gdrdma_possible,
    make_finding,
)
from agent.checks.verdict import GateError
from contracts import bounded
from contracts.finding import Finding, Status
from contracts.tables import read_table
from contracts.yaml_text import load_all
from hardware.gpus import without_gdr
from probes.api import Absent, Snapshot
from probes.gpu.compare import count_visible_gpus
from probes.gpu.facts import Gpu, GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort
from topology.check import find_farthest_gdr, uses_gdr
from topology.graph import NodeTopology, nvlinks

MAX_BYTES = 1 << 16  # a file of a dozen lines
MAX_NAMES = 64
_FORMS = read_table(__file__, "expect.toml")
_SETTLES = {"gpus": "gpu.device.not_given", "hcas": "rdma.port.down"}  # check that the expected number decides

Judgement = tuple[bool | None, str]  # whether an expectation is met (None: unknown), and what the node has


class NodeExpectation(NamedTuple):
    """One value that a node must have."""

    key: str
    text: str  # as a user typed it after the key
    value: Any
    pattern: str = ""  # shell-style, of the RDMA devices for which the value applies; empty: of all

    def selects(self, device: str) -> bool:
        """Return whether the value applies to the device."""
        return not self.pattern or fnmatchcase(device, self.pattern)


class ExpectationKey(NamedTuple):
    """What can be expected: how a node is judged, which failed probes make it unknown, and the value of its text."""

    judge: Callable[[Snapshot, NodeTopology, NodeExpectation], Judgement]
    probes: tuple[str, ...]
    value: Callable[[str], Any] = int  # of the group `value` in expect.toml


def parse(arguments: Sequence[str]) -> tuple[NodeExpectation, ...]:
    """Parse repeated `--expect KEY=VALUE,...`; each repeated interface adds one. Raises GateError."""
    values: dict[str, list[str]] = {}
    for word in arguments:
        for part in filter(None, (piece.strip() for piece in word.split(","))):
            key, equals, value = part.partition("=")
            if not equals:
                raise GateError(f"--expect {part}: must be KEY=VALUE, KEY one of {', '.join(KEYS)}")
            values.setdefault(key.strip(), []).append(value.strip())
    return _read(values, "--expect")


def read_file(path: Path) -> tuple[NodeExpectation, ...]:
    """Read expectations from a YAML mapping; a file with only comments contains none. Raises GateError."""
    source = f"--expect-file {path}"
    with raise_as(GateError, (OSError, ValueError), f"{source}: "):
        documents = load_all(bounded.read(path, MAX_BYTES).decode("utf-8"), most_aliases=0, once=True)
    value = documents[0] if documents else None
    if len(documents) > 1 or not isinstance(value, dict | None):
        raise GateError(f"{source}: must be one mapping of {', '.join(KEYS)} to values")
    entries = {
        str(key): entry if isinstance(entry, list) and key in _LISTS else [entry]
        for key, entry in (value or {}).items()
    }
    return _read(entries, source)


def _read(entries: Mapping[str, Sequence[Any]], source: str) -> tuple[NodeExpectation, ...]:
    """Read the values of each key, in the order of KEYS."""
    if unknown := [key[:64] for key in entries if key not in KEYS]:
        close = {each: None for key in unknown[:8] for each in difflib.get_close_matches(key, KEYS, n=2)}
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise GateError(f"{source}: {units.some(unknown)}: unknown key; allowed are {', '.join(KEYS)}{hint}")
    for key, values in entries.items():
        if key not in _LISTS and len(values) != 1:
            raise GateError(f"{source}: {key} is given {len(values)} times; only {', '.join(_LISTS)} may be repeated")
        if len(values) > MAX_NAMES:
            raise GateError(f"{source}: {key}: more than {MAX_NAMES} values")
        allowed = str if key in _NAMES else str | int | float
        if not all(isinstance(value, allowed) for value in values):
            raise GateError(f"{source}: {key}: must be {'text, in quotes' if key in _NAMES else 'one value'}")
    return tuple(_read_one(key, value, source) for key in KEYS for value in entries.get(key, ()))


def _read_one(key: str, value: object, source: str) -> NodeExpectation:
    text = "on" if value is True else str(value)  # YAML reads `on` as true
    expression, allowed = _FORMS[key]
    if not (match := re.fullmatch(expression, text, re.IGNORECASE | re.ASCII)):
        raise GateError(f"{source}: {key}={text[:64]}: must be {allowed}")
    return NodeExpectation(key, text, KEYS[key].value(match["value"]), match.groupdict().get("device") or "")


def read_expectations(arguments: Sequence[str], path: Path | None) -> tuple[NodeExpectation, ...]:
    """Merge the expectations of the file and the command line, which wins. Raises GateError."""
    typed = parse(arguments)
    from_file = read_file(path) if path is not None else ()
    replaced = {expectation.key for expectation in typed}
    return (*(expectation for expectation in from_file if expectation.key not in replaced), *typed)


# The checks of a node: one for each expectation.


def check_expectations(
    expected: Iterable[NodeExpectation], checks: Iterable[Finding], node: str,
    host: tuple[Snapshot, NodeTopology] | None,
) -> tuple[Finding, ...]:  # fmt: skip
    """Add one check per expectation of a node, and decide checks that a scan alone cannot decide.

    If `host` is None, every expectation is unknown. If a node has exactly the expected number of GPUs or ACTIVE ports,
    none is missing: other devices on the bus are not assigned to it or not cabled. A larger number can include ports of
    another network, so an expected port may be down.
    """
    results, mild = [], set()
    for expectation in expected:
        without = None, f"the record of {node} has no topology of this release"
        met, have = KEYS[expectation.key].judge(*host, expectation) if host else without
        results.append(_check(node, expectation, met, have, host[0].outcomes if host else {}))
        if met and expectation.key in _SETTLES and have.startswith(f"{expectation.value} "):
            mild.add(_SETTLES[expectation.key])
    return tuple(
        replace(check, status=Status.INFO, required=False, message=f"{check.message} The expected number is present.")
        if check.code in mild and check.status in ("fail", "warn", "unknown") and check.evidence
        else check
        for check in (*checks, *results)
    )


def _check(node: str, one: NodeExpectation, met: bool | None, have: str, outcomes: Mapping[str, object]) -> Finding:
    of_any = " rate" if one.key == "rate" and not one.pattern else ""
    case = " pass" if met else " unknown" if met is None else of_any
    results = [outcomes.get(name) for name in KEYS[one.key].probes]
    reason = next(filter(None, (getattr(each, "error", "") or getattr(each, "why", "") for each in results)), have)
    subject = f"{one.key}={one.text}"
    check = make_finding(EXPECT_CODES[0] + case, node, subject=subject, have=have, why=reason, value=one.text)
    return replace(check, required=met is None)


def _is_absent(snapshot: Snapshot, name: str) -> bool:
    """Return whether the probe found no device and the PCI bus, which could be read, shows none either."""
    unread = explain_unread_gpus(snapshot) if name == "gpu" else explain_unread_hcas(snapshot)
    return isinstance(snapshot.outcomes.get(name), Absent) and not unread


# GPUs --------------------------------------------------------------------------------------------------------------


def _list_answering_gpus(snapshot: Snapshot) -> list[Gpu]:
    facts = snapshot.facts(GpuFacts)
    return [gpu for gpu in facts.gpus if gpu.error is None] if facts else []


def _count_gpus(snapshot: Snapshot) -> int | None:
    """Return the number of GPUs that answer and that CUDA_VISIBLE_DEVICES exposes to this process; None if unknown."""
    facts = snapshot.facts(GpuFacts)
    if facts is None or facts.driver_error:
        return 0 if _is_absent(snapshot, "gpu") else None
    count, (visible, _) = len(_list_answering_gpus(snapshot)), count_visible_gpus(facts)
    return count if visible is None else min(count, visible)


def _check_gpus(snapshot: Snapshot, _topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    count = _count_gpus(snapshot)
    met = None if count is None else count >= expected.value
    return met, f"{'an unknown number of' if count is None else count} GPUs answer"


def _check_gpu_model(snapshot: Snapshot, _topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    """Compare whole words of the model name: L40 does not match L40S."""
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(expected.value)}(?![a-z0-9])", re.IGNORECASE)
    models = [gpu.name for gpu in _list_answering_gpus(snapshot)]
    odd = [model for model in models if not pattern.search(model or "")]
    unknown = _count_gpus(snapshot) is None or (not all(models) and not any(odd))
    met = None if unknown else bool(models) and not odd
    return met, ", ".join(dict.fromkeys(model or "unknown model" for model in models)) or "no GPU"


def _check_nvlink(snapshot: Snapshot, topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    count = _count_gpus(snapshot)
    if count is None or (topology.gpus and not topology.nvlink_known):
        return None, "the NVLinks are unknown"
    usable = {gpu.name for gpu in topology.gpus if gpu.usable}
    links = [(f"{p.a}-{p.b}", p.label) for p in topology.pairs if p.a in usable and p.b in usable]
    if not links:
        return False, f"{count} GPUs: there is no pair to link"
    short = [(pair, label) for pair, label in links if nvlinks(label) < expected.value]
    unknown = [pair for pair, label in short if label == "N/A"]
    if unknown and len(unknown) == len(short):
        return None, f"the link of {', '.join(unknown[:4])} is unknown"
    if short:
        return False, units.some([f"{pair} {label}" for pair, label in short], limit=4)
    return True, f"{len(links)} pairs have NV{expected.value} or more"


def _check_driver(snapshot: Snapshot, _topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    facts = snapshot.facts(GpuFacts)
    if facts is None or facts.driver_version is None:
        return False if _count_gpus(snapshot) == 0 else None, "the driver is unknown"
    have, required = (tuple(map(int, re.findall(r"\d+", text)[:4])) for text in (facts.driver_version, expected.value))
    return have >= required, f"the driver is {facts.driver_version}"


# RDMA --------------------------------------------------------------------------------------------------------------


def _list_hca_ports(snapshot: Snapshot) -> dict[str, list[RdmaPort]] | None:
    """Return the ACTIVE ports of each RDMA device in reach; None if the devices or a port could not be read."""
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return {} if _is_absent(snapshot, "rdma") else None
    if any(port.state is None for device in facts.in_reach for port in device.ports):
        return None
    devices = [device for device in facts.in_reach if device.kind in ("hca", "efa")]
    return {device.name: [port for port in device.ports if port.state == "ACTIVE"] for device in devices}


def _check_hcas(snapshot: Snapshot, _topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    ports = _list_hca_ports(snapshot)
    if ports is None:
        return None, "the RDMA devices are unknown"
    have = [name for name, active in ports.items() if active and expected.selects(name)]
    of_pattern = f" of {expected.pattern}" if expected.pattern else ""
    return len(have) >= expected.value, f"{len(have)} RDMA devices{of_pattern} have an ACTIVE port"


def _check_rates(snapshot: Snapshot, _topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    """Check all ACTIVE devices, or the selected ones; a device selected by name that is not ACTIVE fails."""
    ports = _list_hca_ports(snapshot)
    if ports is None:
        return None, "the RDMA devices are unknown"
    rates = {name: sum(port.rate_bytes_per_second or 0.0 for port in active) or None
            for name, active in ports.items() if active and expected.selects(name)}  # fmt: skip
    slow = [f"{name} {units.bits(rate)}" for name, rate in rates.items() if rate is not None and rate < expected.value]
    slow += [f"{name} has no ACTIVE port" for name, active in ports.items()
             if not active and expected.pattern and expected.selects(name)]  # fmt: skip
    if slow or not rates:
        others = f" named {expected.pattern}" if expected.pattern else ""
        return False, ", ".join(slow) or f"no RDMA device{others} has an ACTIVE port"
    unknown = [name for name, rate in rates.items() if rate is None]
    return (None, f"the rate of {', '.join(unknown)} is unknown") if unknown else (True, "every device is as fast")


def judge_gdr(snapshot: Snapshot, topology: NodeTopology, _expected: NodeExpectation | None = None) -> Judgement:
    """Check that GPUDirect RDMA is installed and that NCCL's rules use it; None if either is unknown."""
    pci, rdma = snapshot.facts(PciFacts), snapshot.facts(RdmaFacts)
    if pci is None or (rdma is None and not _is_absent(snapshot, "rdma")):
        return None, "the PCI bus or the RDMA devices are unknown"
    if not is_gdrdma_possible((snapshot,)):
        if rdma is None:
            return False, "there is no RDMA device"
        if pci.peermem_loaded is False and pci.dmabuf_possible is False:
            return False, "nvidia_peermem is not loaded, and DMA-BUF is not possible"
        ports = [port.state for device in rdma.in_reach for port in device.ports]
        down = bool(ports) and not {"ACTIVE", None} & set(ports)
        return (False, "no RDMA device has an ACTIVE port") if down else (None, "GPUDirect RDMA is unknown")
    usable = {gpu.name: gpu.model or "" for gpu in topology.gpus if gpu.usable}
    if unable := sorted(filter(without_gdr, usable.values())):
        return False, f"{unable[0]} has no GPUDirect RDMA"
    near = [one for one in topology.nearest_nic if one.gpu in usable]
    if not near or not all(one.decidable for one in near):
        return (None, "the path to the nearest NIC is unknown") if near else (False, "no GPU answers")
    host = snapshot.facts(HostinfoFacts)
    level = find_farthest_gdr(host.nccl_variables.get("NCCL_NET_GDR_LEVEL") if host else None)
    far = [f"{one.gpu} ({one.label})" for one in near if not uses_gdr(one, level)]
    able = units.some(far, "not used by NCCL from ") or "possible from every GPU"
    return not far, f"GPUDirect RDMA is {able} to the nearest NIC"


# Interfaces ---------------------------------------------------------------------------------------------------------


def _check_interface(snapshot: Snapshot, _topology: NodeTopology, expected: NodeExpectation) -> Judgement:
    facts = snapshot.facts(InterfacesFacts)
    if facts is None:
        return None, "the interfaces are unknown"
    matching = [link for link in facts.interfaces if fnmatchcase(link.name, expected.value)]
    if not matching:
        return False, f"there are {', '.join(sorted(link.name for link in facts.interfaces)) or 'none'}"
    bad = [f"{link.name} {problem}" for link in matching if (problem := _find_interface_problem(link))]
    return not bad, ", ".join(bad) or f"{', '.join(link.name for link in matching)} up, with an address"


def _find_interface_problem(link: Interface) -> str:
    if link.up is False:
        return "is down"
    if link.running is False:
        return "has no carrier"
    return "" if link.addresses else "has no address"


KEYS: dict[str, ExpectationKey] = {
    "gpus": ExpectationKey(_check_gpus, ("gpu",)),  # minimum number of GPUs that answer
    "gpu": ExpectationKey(_check_gpu_model, ("gpu",), str),  # words that every GPU's model must contain: "H100"
    "nvlink": ExpectationKey(_check_nvlink, ("gpu",)),  # minimum of each pair of GPUs
    "hcas": ExpectationKey(_check_hcas, ("rdma",)),  # minimum with an ACTIVE port
    "rate": ExpectationKey(_check_rates, ("rdma",), lambda text: int(text) * 1e9 / 8),  # bytes/s
    "gdr": ExpectationKey(judge_gdr, ("pci", "rdma"), str),  # GPUDirect RDMA from every GPU to its nearest NIC
    "interface": ExpectationKey(_check_interface, ("interfaces",), str),  # patterns: up, with an address
    "driver": ExpectationKey(_check_driver, ("gpu",), str),  # minimum NVIDIA driver release: "570.86"
}
_NAMES = ("gpu", "interface")  # for these, a number or unquoted `on` in YAML is a mistake
_LISTS = ("hcas", "rate", "interface")  # may be repeated
