"""Judges an environment that exists: what NCCL will really do with it, name by name.

Each finding says what NCCL does, not what was meant. Names and their releases: `nccl_names`; values: `lint_values`;
the machine: `lint_machine`; leftovers of debugging: `lint_leftovers`. docs/nccl-env.md explains the codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.env_render import RESERVED
from planner.lint_finding import finding as _finding
from planner.lint_leftovers import (
    LEFTOVER_CODES,
    PLUGIN_VALUES,
    check_allocator,
    check_efa,
    check_leftover,
    check_renamed,
    check_torch,
)
from planner.lint_machine import MACHINE_CODES, check_machine
from planner.lint_values import VALUE_CODES, check_value, strtoll
from planner.nccl_env_situation import NodeView
from planner.nccl_names import NEWEST_READ, Version, family, names, nearest, replacement, torch_names, version_text
from probes.api import Finding, Severity, Snapshot
from topology.build import build
from topology.graph import NodeTopology

NAME_CODES = (
    "env.name.removed",
    "env.name.reserved",
    "env.name.too_new",
    "env.name.unknown",
    "env.pair.shadowed",
    "env.pair.sockets",
)
CODES: tuple[str, ...] = tuple(sorted((*NAME_CODES, *VALUE_CODES, *MACHINE_CODES, *LEFTOVER_CODES)))
"""Every code `lint` may return."""

_OF_LINKS = {"NCCL_P2P_LEVEL", "NCCL_PXN_DISABLE"}  # what they do depends on the links between GPUs
_ORDER = (Severity.FAIL, Severity.WARN, Severity.UNKNOWN, Severity.INFO)


def lint(
    environment: Mapping[str, str],
    *,
    nccl_version: tuple[int, ...] | None = None,
    snapshot: Snapshot | None = None,
    source: str = "",
    topology: NodeTopology | None = None,
) -> tuple[Finding, ...]:
    """Findings about one environment, worst first.

    `nccl_version` None judges by every release known; `snapshot` is of the machine it is for, `topology` what was built
    from it.
    """
    version: Version | None = None
    if nccl_version is not None:
        padded = (*nccl_version, 0, 0, 0)
        version = (padded[0], padded[1], padded[2])
    if topology is None and snapshot is not None and not _OF_LINKS.isdisjoint(environment):
        topology = build(snapshot)
    node = NodeView(hostname=snapshot.hostname if snapshot else "", snapshot=snapshot, topology=topology)
    found: list[Finding] = []
    plugin = _plugin_in_use(environment, node, source)
    for name, value in environment.items():
        found += _judge_name(name, value, version, source, node, plugin=plugin)
    found += check_torch(environment)
    found += check_allocator(environment)
    found += _pairs(environment)
    if node.efa_count():
        found += check_efa(environment)
    if snapshot is not None:
        found += check_machine(environment, node, version)
    return tuple(sorted(_without_doubles(found), key=lambda finding: _ORDER.index(finding.severity)))


def _plugin_in_use(environment: Mapping[str, str], node: NodeView, source: str) -> bool:
    """Whether aws-ofi-nccl runs here, so that what it sets by itself is not the user's doing."""
    hints = any(name.startswith(("OFI_NCCL_", "FI_EFA_")) for name in environment)
    tuner = "ofi" in environment.get("NCCL_TUNER_PLUGIN", "").lower()
    logged = source.startswith("log") and any(environment.get(k) in v for k, v in PLUGIN_VALUES.items())
    return bool(node.efa_count()) or hints or tuner or logged or "fabric" in environment.get("NCCL_NET", "").lower()


def _judge_name(
    name: str, value: str, version: Version | None, source: str, node: NodeView, *, plugin: bool
) -> Iterator[Finding]:
    if name in RESERVED and ("TrainJob" in source or "TrainingRuntime" in source):
        yield _finding(
            "env.name.reserved", Severity.FAIL, name, value,
            "reserved: Kubeflow Trainer sets it for torchrun, and its webhook rejects a job that sets it too.",
            f"Drop {name}; set numNodes and numProcPerNode instead.",
        )  # fmt: skip
        return
    if name.startswith("TORCH_NCCL_"):
        if name not in torch_names():
            yield _unknown(name, value, "PyTorch")
        return
    if "NCCL" not in name.upper() or name.startswith(("OFI_NCCL_", "RCCL_", "MSCCL_")) or family(name):
        return
    entry = names().get(name)
    if entry is None:
        if name.upper().lstrip().startswith("NCCL") or "NCCL_" in name.upper():
            yield from _unknown_nccl(name, value, version)
        return
    if entry.status == "other":
        yield from check_renamed(name, value, entry)
        return
    last, first = entry.last, entry.first
    if last is not None and (version is None or version > last):
        new = replacement(name)
        use = f"Use {new} if you still need it, or unset it." if new else f"Unset {name}."
        reads = f"NCCL {version_text(version)}" if version else "every later release"
        message = f"last read by NCCL {version_text(last)}: {reads} ignores it without a message."
        severity = Severity.WARN if version else Severity.INFO  # the release in use may still read it
        yield _finding("env.name.removed", severity, name, value, message, use)
        return
    if first is not None and version is not None and version < first:
        message = f"read since NCCL {version_text(first)}: NCCL {version_text(version)} ignores it without a message."
        remedy = f"Update NCCL, or unset {name}."
        yield _finding("env.name.too_new", Severity.WARN, name, value, message, remedy)
        return
    yield from check_value(name, value, entry, version)
    yield from check_leftover(name, value, entry, version, node, plugin=plugin)


def _unknown_nccl(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    stripped = name.strip().removeprefix("export ").strip().upper()
    if stripped != name and stripped in names():
        why = (
            "the name carries more than its letters (nccl.conf takes all before '=')" if " " in name else "case counts"
        )
        yield _finding(
            "env.name.unknown", Severity.WARN, name, value,
            f"NCCL does not read this name, {why}: it has no effect.", f"Write {stripped}={value.strip()}.",
        )  # fmt: skip
        return
    if version is not None and version > NEWEST_READ:
        yield _finding(
            "env.name.unknown", Severity.INFO, name, value,
            f"no NCCL up to {version_text(NEWEST_READ)} reads it; whether {version_text(version)} does is unknown.",
            f"Check the documentation of NCCL {version_text(version)}.",
        )  # fmt: skip
        return
    yield _unknown(name, value, "NCCL")


def _unknown(name: str, value: str, reader: str) -> Finding:
    close = nearest(name)
    meant = f" Probably meant: {' or '.join(close)}" if close else ""
    if close and (right := names().get(close[0])) and right.default:
        meant += f", which stays at its default: {right.default}"
    remedy = f"Write {close[0]}={value}." if close else f"Drop {name}."
    message = f"no {reader} reads this name: it has no effect, and no message says so.{meant}{'.' if meant else ''}"
    return _finding("env.name.unknown", Severity.WARN, name, value, message, remedy)


def _pairs(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that cancel each other."""
    off = strtoll(environment.get("NCCL_IB_DISABLE", ""))[0] != 0
    for name, cause, acts in (
        ("NCCL_IB_HCA", "NCCL_IB_DISABLE", off),
        ("NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE", off),
        ("NCCL_IB_TC", "NCCL_IB_DISABLE", off),
        ("NCCL_IB_HCA", "NCCL_NET", environment.get("NCCL_NET", "").lower() == "socket"),
        ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", strtoll(environment.get("NCCL_P2P_DISABLE", ""))[0] == 1),
    ):
        if acts and name in environment:
            value = environment[name]
            message = f"{cause}={environment[cause]} comes first: {name} has no effect."
            yield _finding("env.pair.shadowed", Severity.WARN, name, value, message, f"Unset {cause} or {name}.")
    threads = strtoll(environment.get("NCCL_SOCKET_NTHREADS", ""))[0]
    sockets = strtoll(environment.get("NCCL_NSOCKS_PERTHREAD", ""))[0]
    if threads * sockets > 64:  # env.rst: the product cannot exceed 64
        yield _finding(
            "env.pair.sockets", Severity.WARN, "NCCL_SOCKET_NTHREADS", str(threads),
            f"times NCCL_NSOCKS_PERTHREAD={sockets} is {threads * sockets} sockets a connection; NCCL caps it at 64.",
            "Keep the product of both at 64 or less.",
        )  # fmt: skip


def _without_doubles(found: list[Finding]) -> Iterator[Finding]:
    """A verdict on the value or by the machine replaces the general one about leftovers."""
    general = "env.debug.leftover"
    judged = {
        f.subject for f in found if f.code != general and (f.severity != Severity.INFO or f.code.startswith("env.p2p"))
    }
    for finding in found:
        if finding.code != general or finding.subject not in judged:
            yield finding
