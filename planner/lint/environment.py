"""Judges an environment that exists: what NCCL will really do with it, name by name.

Each finding says what NCCL does, not what was meant. Names and their releases: `nccl_env.names`; values: `values`; the
machine: `machine`; settings against each other: `pairs`. docs/nccl-env.md explains the codes.
Leftovers of debugging, and settings that do nothing here: NCCL docs/userguide/source/env.rst, section Debugging;
aws-ofi-nccl (what the plugin sets by itself); AWS EFA cheat sheet (awsome-distributed-training); PyTorch docs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from contracts.finding import Finding, Status
from planner.lint.pairs import check_job, check_pairs, nodes_of
from planner.lint.tables import settings
from planner.lint.values import (
    LEVEL_NAMES,
    LEVELS,
    check_kind,
    check_quotes,
    check_value,
    finding,
    fits,
    is_quoted,
    other_net,
    strtoll,
)
from planner.nccl_env.names import (
    RESERVED,
    NcclName,
    Version,
    names,
    nearest,
    newest_read,
    plugin_of,
    replacement,
    torch_names,
    version_text,
)
from planner.nccl_env.recipes import Platform, platform_of_plugin


class Machine(Protocol):
    """The machine that an environment is for; `planner.lint.machine` reads one from a scan."""

    @property
    def has_efa(self) -> bool:
        """Whether EFA carries the traffic between nodes."""

    @property
    def lacks_nvlink(self) -> bool:
        """Whether it is known that no NVLink joins two GPUs."""

    def check(self, environment: Mapping[str, str], version: Version | None) -> Iterator[Finding]:
        """Every contradiction between the environment and the machine."""


_DEFAULT_EFFECT = "it overrides what NCCL works out by itself"


def check_leftover(
    name: str,
    value: str,
    entry: NcclName,
    version: Version | None,
    machine: Machine | None,
    *,
    plugin: bool,
    vendor: Platform | None,
) -> Iterator[Finding]:
    """A setting of the Debugging section that stayed. `plugin`: aws-ofi-nccl is in use and may have set it itself."""
    if plugin and (value in settings().plugin_values.get(name, ()) or name in ("NCCL_TUNER_PLUGIN", "NCCL_TOPO_FILE")):
        return
    if name == "NCCL_IB_GID_INDEX" and version is not None and version >= (2, 21, 0):
        if strtoll(value)[0] < 0:
            return
        yield finding(
            "env.gid.needless", Status.INFO, name, value,
            (
                f"NCCL {version_text(version)} takes this index on every port without looking; left "
                "unset it finds the RoCE v2 GID itself, also where the tables of two hosts differ."
            ),
            f"Unset {name}.",
        )  # fmt: skip
        return
    if entry.doc_class != "debugging" or not _acts(name, value, entry):
        return
    if vendor is not None:
        yield from _beside_a_vendors_plugin(name, value, vendor)
        return
    if name == "NCCL_PXN_DISABLE" and machine is not None and machine.lacks_nvlink:
        yield finding(
            "env.debug.leftover", Status.INFO, name, value,
            "A debugging setting that stayed and does nothing here: PXN sends through a GPU that NVLink joins to the "
            "sender, and no two GPUs of this host are joined so.",
            f"Unset {name}: on a host with NVLink it costs bandwidth.",
            ("NCCL src/graph/paths.cc: PXN is PCIe and NVLink",),
        )  # fmt: skip
        return
    status = Status.WARN if name in _COSTLY and _turns_off(name, value) else Status.INFO
    yield finding(
        "env.debug.leftover", status, name, value,
        f"A debugging setting that stayed: {settings().effects.get(name, _DEFAULT_EFFECT)}.",
        f"Unset {name}, unless a measurement on this machine speaks for it.",
        ("NCCL docs/userguide/source/env.rst: section Debugging",),
    )  # fmt: skip


def _beside_a_vendors_plugin(name: str, value: str, vendor: Platform) -> Iterator[Finding]:
    """A debugging setting where the plugin's vendor publishes an environment, which may hold it."""
    published, _ = vendor.values().get(name, ("", None))
    if published.lower() == value.lower():
        return
    script = vendor.script[0] if vendor.script else "the vendor's script"
    recipe = f"publishes {name}={published}" if published else f"does not publish {name}"
    yield finding(
        "env.debug.leftover", Status.INFO, name, value,
        f"The recipe of the plugin's vendor for {vendor.name} {recipe}. The plugin is tested with that recipe only.",
        f"Write {name}={published}." if published else f"Compare it with {script} before you change it.",
    )  # fmt: skip


# Those that switch a transport or an algorithm off as a whole.
_COSTLY = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_PXN_DISABLE")


def _turns_off(name: str, value: str) -> bool:
    return name in ("NCCL_ALGO", "NCCL_PROTO") or strtoll(value)[0] != 0


def _acts(name: str, value: str, entry: NcclName) -> bool:
    """False where the value is the default or is ignored: there is nothing left over."""
    if not value:
        return False
    if name == "NCCL_P2P_DISABLE":
        return strtoll(value)[0] == 1
    if name in LEVELS:
        return value in LEVEL_NAMES or value[0].isdigit()
    if value.upper() == entry.default.upper():
        return False
    number, whole = strtoll(value)
    return not (whole and entry.default == str(number)) and (whole or not entry.default.lstrip("-").isdigit())


def check_efa(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that do nothing, or harm, where EFA carries the traffic."""
    for name, (why, only) in settings().efa_needless.items():
        value = environment.get(name)
        if value is not None and value.lower() == (only or value.lower()):
            yield finding("env.efa.needless", Status.INFO, name, value, f"{why}.", f"Unset {name}.")


def check_torch(environment: Mapping[str, str]) -> Iterator[Finding]:
    """PyTorch's and CUDA's own debugging switches."""
    for name, switch in settings().torch.items():
        value = environment.get(name, "")
        if value.strip().lower() in switch.when:
            remedy = switch.remedy.format(name=name)
            yield finding(switch.code, switch.severity, name, value, f"{switch.effect}.", remedy)


def check_allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """PyTorch's allocator takes exactly True or False (c10 ConfigTokenizer) and ends the job at anything else."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment.get(name, "")
        options = dict(option.partition(":")[::2] for option in value.split(","))
        segments = options.get("expandable_segments")
        if segments is not None and segments.strip() not in ("True", "False"):
            yield finding(
                "env.torch.allocator", Status.FAIL, name, value,
                "PyTorch expects exactly True or False and ends with an error.",
                f"Write {name}=expandable_segments:True.",
            )  # fmt: skip


def check_renamed(name: str, value: str, entry: NcclName) -> Iterator[Finding]:
    """Names PyTorch reads under an old spelling; libnccl never reads them."""
    if "deprecated alias of " not in entry.reader:
        return
    right = entry.reader.split("deprecated alias of ")[1].rstrip(")")
    yield finding(
        "env.torch.renamed", Status.INFO, name, value,
        f"PyTorch reads it, not NCCL, and only as the old name of {right}.",
        f"Write {right}={value}.",
    )  # fmt: skip


CODES = settings().codes
"""Every code `lint` may return."""

_ORDER = (Status.FAIL, Status.WARN, Status.UNKNOWN, Status.INFO)


def lint(
    environment: Mapping[str, str],
    *,
    nccl_version: tuple[int, ...] | None = None,
    machine: Machine | None = None,
    source: str = "",
    unresolved: Mapping[str, str] | None = None,
    unexported: Mapping[str, str] | None = None,
    own: frozenset[str] = frozenset(),
    nodes: int | None = None,
) -> tuple[Finding, ...]:
    """Findings about one environment, worst first.

    `nccl_version` None judges by every release known; `machine` is the one that the environment is for. Of names in
    `unresolved`, set from elsewhere, only the name is judged; those in `unexported` are variables of a shell that no
    program sees, those in `own` the script itself reads. `nodes`: of the job, where its script says.
    """
    version: Version | None = None
    if nccl_version is not None:
        padded = (*nccl_version, 0, 0, 0)
        version = (padded[0], padded[1], padded[2])
    found: list[Finding] = []
    quoted: list[Finding] = []
    if source == "env file" or source.endswith(".env"):  # who reads it is not known: judged as most read it
        for name, value in environment.items():
            quoted += check_quotes(name, value)
        environment = {name: value[1:-1] if is_quoted(value) else value for name, value in environment.items()}
    plugin = _plugin_in_use(environment, machine, source)
    vendor = platform_of_plugin(environment)
    carried = other_net(environment) or ("aws-ofi-nccl" if plugin and not environment.get("NCCL_NET") else "")
    for name, value in environment.items():
        if name == "NCCL_IB_DISABLE" and carried and strtoll(value) == (1, True):
            found.append(finding(
                "env.debug.leftover", Status.INFO, name, value,
                f"it turns off only NCCL's own RDMA transport, and {carried} carries the traffic.",
                f"Unset {name}: it hides RDMA where the plugin is missing.",
            ))  # fmt: skip
            continue
        found += _judge_name(name, value, version, source, machine, plugin=plugin, own=own, vendor=vendor)
    for name, raw in (unresolved or {}).items():
        found += _judge_name(name, raw, version, source, machine, plugin=plugin, known=False, own=own)
    found += _unexported(unexported or {})
    found += check_torch(environment)
    found += check_allocator(environment)
    found += check_pairs(environment, frozenset((*environment, *(unresolved or {}))))
    if machine is None:
        found += check_job(environment, nodes if nodes is not None else nodes_of(environment))
    else:
        found += check_efa(environment) if machine.has_efa else ()
        found += machine.check(environment, version)
    return tuple(sorted([*quoted, *_without_doubles(found)], key=lambda finding: _ORDER.index(finding.status)))


def _plugin_in_use(environment: Mapping[str, str], machine: Machine | None, source: str) -> bool:
    """Whether aws-ofi-nccl runs here, so that what it sets by itself is not the user's doing."""
    hints = any(name.startswith(("OFI_NCCL_", "FI_EFA_")) for name in environment)
    tuner = "ofi" in environment.get("NCCL_TUNER_PLUGIN", "").lower()
    logged = source.startswith("log") and any(environment.get(k) in v for k, v in settings().plugin_values.items())
    efa = machine is not None and machine.has_efa
    return efa or hints or tuner or logged or "fabric" in environment.get("NCCL_NET", "").lower()


def _judge_name(
    name: str,
    value: str,
    version: Version | None,
    source: str,
    machine: Machine | None,
    *,
    plugin: bool,
    known: bool = True,
    own: frozenset[str] = frozenset(),
    vendor: Platform | None = None,
) -> Iterator[Finding]:
    """The name, and with `known` its value; else `value` is how the text writes where it comes from."""
    if name in RESERVED and ("TrainJob" in source or "TrainingRuntime" in source):
        yield finding(
            "env.name.reserved", Status.FAIL, name, value,
            "reserved: Kubeflow Trainer sets it for torchrun, and its webhook rejects a job that sets it too.",
            f"Drop {name}; set numNodes and numProcPerNode instead.",
        )  # fmt: skip
        return
    if name.startswith("TORCH_NCCL_"):
        if name not in torch_names():
            yield _unknown(name, value, "PyTorch", known=known)
        return
    if known and machine is None:
        yield from check_kind(name, value)
    if plugin_of(name):
        return
    entry = names().get(name)
    if entry is None:
        yield from _unknown_nccl(name, value, version, known=known, own=own)
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
        status = Status.WARN if version else Status.INFO  # the release in use may still read it
        yield finding("env.name.removed", status, name, value, message, use)
        return
    if first is not None and version is not None and version < first:
        message = f"read since NCCL {version_text(first)}: NCCL {version_text(version)} ignores it without a message."
        remedy = f"Update NCCL, or unset {name}."
        yield finding("env.name.too_new", Status.WARN, name, value, message, remedy)
        return
    if known:
        yield from check_value(name, value, entry, version)
        yield from check_leftover(name, value, entry, version, machine, plugin=plugin, vendor=vendor)


def _unexported(values: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of the shell that carries them: a program started from it has them only where they are exported."""
    for name, raw in values.items():
        entry = names().get(name)
        if name in torch_names() or (entry is not None and entry.status == "current"):
            yield finding(
                "env.name.unexported", Status.WARN, name, raw,
                "set in the shell and never exported: no program that the script starts sees it.",
                f"Write export {name} after it.",
            )  # fmt: skip


def _unknown_nccl(
    name: str, value: str, version: Version | None, *, known: bool, own: frozenset[str]
) -> Iterator[Finding]:
    """A name that NCCL would read if it were spelt so; others, `my_NCCL_DIR` or `nccl_path`, are somebody's own."""
    stripped = name.strip().removeprefix("export ").strip().upper()
    if stripped != name and stripped in names():
        why = (
            "the name carries more than its letters (nccl.conf takes all before '=')" if " " in name else "case counts"
        )
        yield finding(
            "env.name.unknown", Status.WARN, name, value,
            f"NCCL does not read this name, {why}: it has no effect.", f"Write {stripped}={value.strip()}.",
        )  # fmt: skip
        return
    if not name.startswith("NCCL_"):
        return
    if version is not None and version > newest_read():
        yield finding(
            "env.name.unknown", Status.INFO, name, value,
            f"no NCCL up to {version_text(newest_read())} reads it; whether {version_text(version)} does is unknown.",
            f"Check the documentation of NCCL {version_text(version)}.",
        )  # fmt: skip
        return
    yield _unknown(name, value, "NCCL", known=known, own=own)


# A path, a release, an address of the web or an image: what scripts and builds keep for themselves under such names.
_OWN_VALUE = re.compile(
    r"[~.]?/\S*(?: .*)?|[\w.-]+:[\w.-]+|\$\S*|v?\d+(?:\.\d+)+(?:[-+]\S*)?|\w+://\S*|[\w.-]+(?:/[\w.-]+)+(?::[\w.-]+)?|\S+@\S+|\S+\.(?:so|git|tar\.gz|deb|sh)\S*|[0-9a-f]{12,}"
)


def _unknown(name: str, value: str, reader: str, *, known: bool, own: frozenset[str] = frozenset()) -> Finding:
    close = tuple(each for each in nearest(name) if not known or fits(each, value))
    message = f"no {reader} reads this name: it has no effect, and no message says so."
    if close:
        right = names().get(close[0])
        stays = f" {close[0]} stays at its default: {right.default}." if right is not None and right.default else ""
        remedy = f"Did you mean {' or '.join(close)}? Correct the name, or unset it."
        return finding("env.name.unknown", Status.WARN, name, value, message + stays, remedy)
    if name in own:
        message = f"no {reader} reads this name; the script does."
        return finding("env.name.unknown", Status.INFO, name, value, message, "Nothing, if that is all it is for.")
    if _OWN_VALUE.fullmatch(value.strip()):
        message = f"no {reader} reads this name; by its value a script or a build may."
        return finding(
            "env.name.unknown", Status.INFO, name, value, message, "Nothing, where your own script reads it."
        )
    return finding(
        "env.name.unknown", Status.WARN, name, value, message, f"Unset {name}, if nothing of yours reads it."
    )


def _without_doubles(found: list[Finding]) -> Iterator[Finding]:
    """A verdict on the value or by the machine replaces the general one about leftovers."""
    general = "env.debug.leftover"
    judged = {
        f.subject for f in found if f.code != general and (f.status != Status.INFO or f.code.startswith("env.p2p"))
    }
    for each in found:
        if each.code != general or each.subject not in judged:
            yield each
