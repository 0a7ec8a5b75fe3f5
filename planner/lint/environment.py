"""Check an existing environment: what NCCL does with each variable, and with their combinations.

Names and releases come from `nccl_env`, checks of values from `values`, and checks against a machine from
`machine`. docs/reference/settings.md explains the codes. Sources:
Leftovers of debugging, and settings that do nothing here: NCCL docs/userguide/source/env.rst, section Debugging;
aws-ofi-nccl (what the plugin sets by itself); AWS EFA cheat sheet (awsome-distributed-training); PyTorch docs.
Settings against each other: env.rst, 2.32; NCCL src/misc/socket.cc (which interfaces are taken); libfabric
fi_getinfo(3) (FI_PROVIDER).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from contracts.finding import Finding, Status
from contracts.tables import read_table
from planner import nccl_env
from planner.lint.findings import finding
from planner.lint.script import JOB_SIZE, NODES, NamedEnvironment, pattern, whole_number
from planner.lint.values import (
    check_kind,
    check_quotes,
    check_value,
    default_of,
    find_other_net,
    is_quoted,
    strtoll,
)

if TYPE_CHECKING:
    from planner.lint.machine import ProbedMachine


SETTINGS: Mapping[str, Any] = read_table(__file__, "data/settings.toml")
"""Settings that are useless or harmful, alone or together."""
# Codes of findings that are dropped if their variable has a more specific one.
_GENERAL = ("env.debug.leftover", "env.gid.needless")


class _Case(NamedTuple):
    """Context in which the variables of an environment are checked."""

    version: nccl_env.Version | None
    machine: ProbedMachine | None
    named: NamedEnvironment
    plugin: bool  # aws-ofi-nccl is in use and may have set variables
    vendor: nccl_env.Platform | None  # platform whose network plugin the environment configures
    carrier: str  # setting of the network plugin that replaces NCCL's RDMA; or ""
    places: tuple[str, ...]  # sections and `where` of settings.toml that apply


def lint(
    read: NamedEnvironment,
    *,
    nccl_version: nccl_env.Version | None = None,
    machine: ProbedMachine | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
) -> tuple[Finding, ...]:
    """Return findings about one environment, worst first.

    If `nccl_version` is None, all known releases count; `machine` is the machine on which the environment is used.
    `nodes` is the number of nodes of the job, and `gpus` that of the GPUs of each.
    """
    findings, quoted = list[Finding](), list[Finding]()
    environment, source = read.environment, read.source
    if source == "env file" or source.endswith(".env"):  # most programs that read env files remove quotes
        quoted = [each for name, value in environment.items() for each in check_quotes(name, value)]
        environment = {name: value[1:-1] if is_quoted(value) else value for name, value in environment.items()}
    plugin = _uses_plugin(environment, machine, source)
    nodes = nodes if nodes is not None else count_nodes(environment)
    conditions = {
        "one_gpu": gpus == 1 or (machine is not None and machine.has_one_gpu()),
        "one_node": nodes == 1,
        "no_nvlink": machine is not None and machine.lacks_nvlink(),
        "efa": machine is not None and machine.efa_count() > 0,
        "unknown": machine is None and nodes != 1,
        "several_nodes": machine is None and (nodes or 0) > 1,
        "unknown_size": machine is None and nodes is None,
        "own_net": machine is None and nodes != 1 and not find_other_net(environment),
    }
    case = _Case(
        version=nccl_version, machine=machine, named=read,
        plugin=plugin, vendor=nccl_env.find_platform(environment),
        carrier=find_other_net(environment) or ("aws-ofi-nccl" if plugin and not environment.get("NCCL_NET") else ""),
        places=tuple(name for name, holds in conditions.items() if holds),
    )  # fmt: skip
    for name, value in environment.items():
        findings += _judge_name(name, value, case)
    for name, raw in read.unresolved.items():
        findings += _judge_name(name, raw, case, resolved=False)
    loose = {name: raw for name, raw in read.unexported.items() if nccl_env.is_read(name)}
    findings += [finding("env.name.unexported", name, raw) for name, raw in loose.items()]
    if "one_gpu" in case.places:
        environment = {name: environment[name] for name in environment if name not in SETTINGS["no_effect"]["one_gpu"]}
    findings += _apply_rules(environment, {*environment, *read.unresolved, *read.also_set}, case.places)
    findings += machine.check(environment, case.version) if machine is not None else ()
    specific = [each for each in findings if each.code not in _GENERAL]
    judged = {e.subject for e in specific if e.status != Status.INFO or e.code.startswith("env.p2p")}
    findings = [each for each in findings if each.code not in _GENERAL or each.subject not in judged]
    return tuple(sorted([*quoted, *findings], key=lambda finding: list(Status).index(finding.status)))


def _uses_plugin(environment: Mapping[str, str], machine: ProbedMachine | None, source: str) -> bool:
    """Whether aws-ofi-nccl is in use, which sets some variables itself."""
    hints = any(name.startswith(("OFI_NCCL_", "FI_EFA_")) for name in environment)
    tuner = "ofi" in environment.get("NCCL_TUNER_PLUGIN", "").lower()
    logged = source.startswith("log") and any(environment.get(k) in v for k, v in SETTINGS["plugin_values"].items())
    efa = machine is not None and machine.efa_count() > 0
    return efa or hints or tuner or logged or "fabric" in environment.get("NCCL_NET", "").lower()


def _judge_name(name: str, value: str, case: _Case, *, resolved: bool = True) -> Iterator[Finding]:
    """Check a name and, if `resolved`, its value; otherwise `value` is the source text of an unknown value."""
    entry, version = nccl_env.names().get(name), case.version
    if name in nccl_env.RESERVED and ("TrainJob" in case.named.source or "TrainingRuntime" in case.named.source):
        yield finding("env.name.reserved", name, value)
    elif name.startswith("TORCH_NCCL_"):
        if name not in nccl_env.torch_names():
            yield _report_unknown(name, value, "PyTorch", case)
    elif resolved and name == "NCCL_IB_DISABLE" and case.carrier and strtoll(value) == (1, True):
        yield finding("env.debug.leftover/rdma", name, value, carrier=case.carrier)
    else:
        if resolved and case.machine is None:
            yield from check_kind(name, value)
        if nccl_env.find_plugin_of(name):
            return
        if entry is None:
            yield from _check_unknown_nccl(name, value, case)
        elif entry.status == "other":  # a deprecated name that PyTorch reads, not libnccl
            _, alias, right = entry.reader.partition("deprecated alias of ")
            if alias:
                yield finding("env.torch.renamed", name, value, right=right.rstrip(")"))
        elif entry.last is not None and (version is None or version > entry.last):
            reader = f"NCCL {nccl_env.version_text(version)}" if version is not None else "every later release"
            status = Status.WARN if version is not None else Status.INFO
            new, last = nccl_env.replacement(name), nccl_env.version_text(entry.last)
            use = f"Use {new} if you still need it, or unset it." if new else f"Unset {name}."
            yield finding("env.name.removed", name, value, status=status, last=last, reader=reader, use=use)
        elif entry.first is not None and version is not None and version < entry.first:
            first, used = nccl_env.version_text(entry.first), nccl_env.version_text(version)
            yield finding("env.name.too_new", name, value, first=first, version=used)
        elif resolved:
            yield from check_value(name, value, entry, version, only_all_reduce=case.named.only_all_reduce)
            yield from _check_leftover(name, value, entry, case)


def _check_leftover(name: str, value: str, entry: nccl_env.NcclName, case: _Case) -> Iterator[Finding]:
    """Report a variable of the documentation's section Debugging that is still set."""
    by_plugin = value in SETTINGS["plugin_values"].get(name, ()) or name in ("NCCL_TUNER_PLUGIN", "NCCL_TOPO_FILE")
    if case.plugin and by_plugin:
        return
    if name == "NCCL_IB_GID_INDEX" and case.version is not None and case.version >= (2, 21, 0):
        if strtoll(value)[0] >= 0:
            yield finding("env.gid.needless", name, value, version=nccl_env.version_text(case.version))
    elif entry.doc_class != "debugging" or not _has_effect(name, value, entry):
        return
    elif places := [place for place in case.places if name in SETTINGS["no_effect"].get(place, ())]:
        yield finding(f"env.debug.leftover/{places[0]}", name, value)
    elif case.vendor is not None:
        yield from _compare_with_vendor(name, value, case.vendor)
    else:
        off = re.fullmatch(SETTINGS["costly"].get(name, "(?!)"), value) is not None
        effect = SETTINGS["effect"].get(name, "it overrides what NCCL works out by itself")
        yield finding("env.debug.leftover", name, value, status=Status.WARN if off else Status.INFO, effect=effect)


def _compare_with_vendor(name: str, value: str, vendor: nccl_env.Platform) -> Iterator[Finding]:
    """Compare a debugging setting with the environment that the vendor of the network plugin publishes."""
    published, _ = vendor.values().get(name, ("", None))
    if published.lower() == value.lower():
        return
    script = vendor.script[0] if vendor.script else "the vendor's script"
    recipe = f"publishes {name}={published}" if published else f"does not publish {name}"
    advice = f"Write {name}={published}." if published else f"Compare it with {script} before you change it."
    yield finding("env.debug.leftover/vendor", name, value, platform=vendor.name, recipe=recipe, advice=advice)


def _has_effect(name: str, value: str, entry: nccl_env.NcclName) -> bool:
    """Whether a setting has an effect: its value is neither the default nor ignored."""
    number, is_integer = strtoll(value)
    if name == "NCCL_P2P_DISABLE" or not value:
        return number == 1
    same = value.upper() == entry.default.upper() or (is_integer and entry.default == str(number))
    is_guard = value in SETTINGS["guards"].get(name, ())
    return not same and not is_guard and (is_integer or not entry.default.lstrip("-").isdigit())


def _check_unknown_nccl(name: str, value: str, case: _Case) -> Iterator[Finding]:
    """Check an unknown name that starts with NCCL_, or that differs from an NCCL name in case or blanks."""
    right = name.strip().removeprefix("export ").strip().upper()
    if right != name and right in nccl_env.names():
        yield finding("env.name.unknown/letters", name, value, right=f"{right}={value.strip()}")
    elif name.startswith("NCCL_") and case.version is not None and case.version > nccl_env.newest_read():
        newest = nccl_env.version_text(nccl_env.newest_read())
        yield finding("env.name.unknown/newer", name, value, newest=newest, version=nccl_env.version_text(case.version))
    elif name.startswith("NCCL_") or nccl_env.with_right_prefix(name):
        yield _report_unknown(name, value, "NCCL", case)


def _report_unknown(name: str, value: str, reader: str, case: _Case) -> Finding:
    if close := nccl_env.nearest(name):
        right = nccl_env.names().get(close[0])
        stays = f" {close[0]} stays at {default_of(close[0], right)}." if right is not None and right.default else ""
        return finding("env.name.unknown/misspelt", name, value, reader=reader, default=stays, close=" or ".join(close))
    if name in case.named.used:
        return finding("env.name.unknown/own", name, value, reader=reader)
    if pattern("own_value").fullmatch(value.strip()):
        return finding("env.name.unknown/own_value", name, value, reader=reader)
    return finding("env.name.unknown", name, value, reader=reader)


# -- combinations of settings, and checks without a known machine


def _apply_rules(environment: Mapping[str, str], names: Set[str], places: Sequence[str]) -> Iterator[Finding]:
    """Apply the rules of data/settings.toml.

    `names` are all names that are set, with any value; `places` are the conditions of `where` that hold.
    """
    for row in SETTINGS["rule"]:
        is_elsewhere = "where" in row and row["where"] not in places
        if is_elsewhere or ("without" in row and any(re.fullmatch(row["without"], each) for each in names)):
            continue
        for name in filter(environment.__contains__, row["names"]):
            value, fields = environment[name], dict(row.get("fields", {}))
            number, is_integer = strtoll(value.strip())
            applies = re.fullmatch(row.get("value", "(?s).*"), value) is not None
            if "number" in row:
                applies = is_integer and re.fullmatch(row["number"], str(number)) is not None
            if "above" in row:
                limit, is_limit = strtoll(environment.get(row["above"], ""))
                applies = is_integer and is_limit and number > limit > 0
                fields |= {"other": row["above"], "most": limit}
            if "product" in row:
                factor, _ = strtoll(environment.get(row["times"], ""))
                applies = number * factor > row["product"]
                fields |= {"factor": factor, "product": number * factor}
            for other, condition in row.get("with", {}).items():
                other_value = environment.get(other, "")
                applies = applies and re.fullmatch(condition, other_value) is not None
                fields |= {"other": other, "cause": f"{other}={other_value}"}
            if applies:
                yield finding(row["finding"], name, value, status=row.get("status") and Status(row["status"]), **fields)


def count_nodes(environment: Mapping[str, str]) -> int | None:
    """Return the number of nodes in the job's variables; None if they do not contain it."""
    for name in NODES:
        if match := re.fullmatch(r"(?:\d+:)?(\d{1,9})", environment.get(name, "")):
            return int(match[1])
    for sizes in (JOB_SIZE[-4:-2], JOB_SIZE[-2:]):  # all ranks, and those of one node
        ranks, here = (whole_number(environment.get(name, "")) for name in sizes)
        if ranks is not None and here:
            return -(-ranks // here)
    return None
