"""Regressions: a run's checks against those of a recorded good state.

A baseline is the report.json of an earlier preflight, or a recording (`topoflight capture`), which is judged by this
release. What stood in the baseline already is told and does not fail; what passed there must be measured again,
and a GPU or HCA that the PCI bus showed there must be on it still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from agent.checks.expect import EXPECT_CODES
from agent.checks.verdict import ORDER, Check, GateError, Status
from collectives.bench.results import ResultError, result_from_json
from contracts import bounded
from contracts.plain import PlainError
from contracts.plain import loads as plain
from probes.api import Snapshot
from probes.host.recording import RecordingError, load
from probes.pci import facts as pci_facts
from probes.pci.facts import PciDevice, PciFacts
from probes.scan import scan

REPORT_VERSION = 1  # of report.json: raised when an older reader would misread it
LIMIT_BYTES = 32 << 20  # as much as a recording may have
Key = tuple[str, str, str]  # code, node, subject
_BETTER: tuple[Status, ...] = tuple(reversed(ORDER))  # pass, info, unknown, warn, fail


def read(path: Path) -> dict[Key, Status]:
    """The statuses of a report or of a recording. Raises GateError."""
    try:
        raw = bounded.read(path, LIMIT_BYTES)
    except OSError as error:
        raise GateError(f"--baseline {path}: {error.strerror}") from None
    except bounded.TooLargeError as error:
        raise GateError(f"--baseline {path}: {error}") from None
    try:
        value = plain(raw)
    except PlainError:
        value = None
    if isinstance(value, dict) and isinstance(value.get("checks"), list):
        version = value.get("schema_version")
        if not isinstance(version, int) or not 1 <= version <= REPORT_VERSION:
            raise GateError(
                f"--baseline {path}: schema_version is {version!r}; this release reads 1 to {REPORT_VERSION}"
            )
        return _of_report(path, value["checks"])
    from agent.checks.view import look

    try:
        view = look((scan(load(path)),))
    except RecordingError as error:
        raise GateError(f"--baseline {path}: neither a report.json nor a recording: {error}") from None
    return _worst((check.id, check.node, check.subject, check.status) for check in view.checks)


def gone(path: Path, snapshots: Sequence[Snapshot]) -> tuple[Check, ...]:
    """A failure for each kind of device of which a host's PCI bus shows fewer than the baseline's did.

    A GPU or HCA that left the bus leaves no check behind that could fail. Nodes are matched as in `regressions`; a
    baseline without a scan (a report of nodes) says nothing of devices.
    """
    then, now = _buses(path), {s.hostname: facts for s in snapshots if (facts := s.facts(PciFacts)) is not None}
    alias = {next(iter(now)): next(iter(then))} if len(then) == len(now) == 1 else {}
    found = []
    for node, facts in now.items():
        before = then.get(alias.get(node, node))
        for key, words, listed in (("gpus", "GPU", pci_facts.gpus), ("hcas", "HCA", pci_facts.hcas)):
            had = {device.bus_id for device in listed(before)} if before else set()
            have = {device.bus_id for device in listed(facts)}
            if len(have) < len(had):
                lost = ", ".join(sorted(had - have))
                found.append(
                    Check(
                        id=EXPECT_CODES[0], status="fail", node=node, subject=f"{key}={len(had)}",
                        message=f"the PCI bus shows {len(have)} {words}{'' if len(have) == 1 else 's'} of this host, "
                        f"{len(had)} in the baseline: {lost} no longer",
                        evidence=(f"/sys/bus/pci/devices: no {words} at {lost}",),
                        remedy="Find out what the node has lost (kernel log, power cycle, reseat), or take a new "
                        "baseline where it was taken out on purpose.",
                    )
                )  # fmt: skip
    return tuple(found)


def _buses(path: Path) -> dict[str, PciFacts]:
    """What the PCI bus showed, by node: of a recording, or of the scans that a report holds."""
    value = plain(bounded.read(path, LIMIT_BYTES))
    if not isinstance(value, dict) or not isinstance(value.get("checks"), list):
        snapshot = scan(load(path))
        facts = snapshot.facts(PciFacts)
        return {snapshot.hostname: facts} if facts else {}
    names = {field.name for field in fields(PciDevice)}
    try:
        return {
            str(snapshot["hostname"]): PciFacts(
                devices=tuple(
                    PciDevice(**{key: value for key, value in device.items() if key in names})
                    for device in snapshot["outcomes"]["pci"]["facts"]["devices"]
                )
            )
            for snapshot in value.get("snapshots") or ()
            if "facts" in snapshot["outcomes"].get("pci", {})
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise GateError(f"--baseline {path}: a scan that is none: {error!r}") from None


def read_bench(path: Path) -> dict[tuple[str, int, int, str], float]:
    """Bus bandwidths of a benchmark, by op, S, ranks and backend: of `bench --save`, or of a report.json.

    Empty where the report holds none, or the file is a recording. Raises GateError for a benchmark that is none.
    """
    try:
        value = plain(bounded.read(path, LIMIT_BYTES))
    except (OSError, bounded.TooLargeError, PlainError) as error:
        raise GateError(f"--baseline {path}: {error}") from None
    bench = value if isinstance(value, dict) and "measurements" in value else None
    if isinstance(value, dict) and isinstance(value.get("bench"), dict):
        bench = value["bench"]
    if bench is None:
        return {}
    try:
        result = result_from_json(bench)
    except ResultError as error:
        raise GateError(f"--baseline {path}: its benchmark: {error}") from None
    return {
        (m.op, m.bytes, len(m.ranks), m.backend): m.busbw_bytes_per_second for m in result.measurements if m.verified
    }


def _of_report(path: Path, checks: list[Any]) -> dict[Key, Status]:
    try:
        return _worst((str(c["id"]), str(c["node"]), str(c["subject"]), c["status"]) for c in checks)
    except (KeyError, TypeError, ValueError) as error:
        raise GateError(f"--baseline {path}: a check that is none: {error!r}") from None


def _worst(found: Iterable[tuple[str, str, str, Any]]) -> dict[Key, Status]:
    held: dict[Key, Status] = {}
    for code, node, subject, status in found:
        key = code, node, subject
        if status not in ORDER:
            raise ValueError(f"status {status!r}: must be one of {', '.join(ORDER)}")
        if key not in held or ORDER.index(status) < ORDER.index(held[key]):
            held[key] = status
    return held


def regressions(checks: Iterable[Check], baseline: Mapping[Key, Status]) -> tuple[Check, ...]:
    """The checks with what stood in the baseline made "info", and what can no longer be measured made "fail".

    Nodes are matched by name; a run and a baseline of one node each are taken for the same node.
    """
    checks = tuple(checks)
    then, now = {node for _, node, _ in baseline if node}, {check.node for check in checks if check.node}
    alias = {next(iter(now)): next(iter(then))} if len(then) == len(now) == 1 else {}
    passed = {(code, node) for (code, node, _), status in baseline.items() if status == "pass"}
    return tuple(_judged(check, alias.get(check.node, check.node), baseline, passed) for check in checks)


def _judged(check: Check, node: str, baseline: Mapping[Key, Status], passed: set[tuple[str, str]]) -> Check:
    if check.status == "unknown" and (check.id, node) in passed:
        return replace(check, status="fail", message=f"passed in the baseline, not measured now: {check.message}")
    before = baseline.get((check.id, node, check.subject))
    if check.status in ("fail", "warn") and before is not None and _BETTER.index(before) >= _BETTER.index(check.status):
        return replace(check, status="info", message=f"stands in the baseline too: {check.message}")
    return check
