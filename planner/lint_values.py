"""How NCCL reads the text of a value, and what becomes of one it does not understand.

Specification: NCCL src/misc/param.cc (integers: strtoll, base 0), src/graph/paths.cc ncclGetLevel (levels),
src/graph/tuning.cc parseList (NCCL_ALGO, NCCL_PROTO), src/misc/socket.cc, src/debug.cc; docs/userguide/source/env.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from planner.lint_finding import finding as _finding
from planner.nccl_names import NcclName, Version, version_text
from probes.api import Finding, Severity

VALUE_CODES = (
    "env.value.ignored",
    "env.value.level",
    "env.value.list",
    "env.value.quotes",
    "env.value.range",
    "env.value.token",
)

LEVEL_NAMES = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_LEVEL_SINCE: Mapping[str, Version] = MappingProxyType({"C2C": (2, 26, 2), "P2C": (2, 27, 3), "PXN": (2, 12, 7)})
LEVELS = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_NET_MERGE_LEVEL")
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")

_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
_DEBUG = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")

# Enumerations, with how NCCL compares and what it does with anything else.
_TOKENS: Mapping[str, tuple[tuple[str, ...], bool, str]] = MappingProxyType(
    {
        "NCCL_DEBUG": (_DEBUG, False, "NCCL ignores it and prints nothing"),
        "NCCL_SOCKET_FAMILY": (("AF_INET", "AF_INET6"), True, "NCCL ignores it and takes the first address it finds"),
        "NCCL_IB_ADDR_FAMILY": (("AF_INET", "AF_INET6"), True, "NCCL ignores it and looks for an IPv4 GID"),
        "NCCL_LAUNCH_MODE": (("PARALLEL", "GROUP"), True, "NCCL ignores it and launches in PARALLEL mode"),
        "NCCL_CHECK_MODE": (("DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"), False, "NCCL ignores it and checks nothing"),
    }
)
# env.rst, "Values accepted"; the InfiniBand specification gives five bits to the timeout.
_RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "NCCL_CROSS_NIC": (0, 2),
        "NCCL_IB_TIMEOUT": (0, 31),
        "NCCL_IB_RETRY_CNT": (0, 7),
        "NCCL_IB_QPS_PER_CONNECTION": (1, 128),
        "NCCL_IB_TC": (0, 255),
        "NCCL_IB_SL": (0, 15),
        "NCCL_SOCKET_NTHREADS": (1, 16),
    }
)
_INTEGER = re.compile(r"\s*[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)")


def strtoll(text: str) -> tuple[int, bool]:
    """What strtoll(text, NULL, 0) returns, and whether it used the whole text."""
    match = _INTEGER.match(text)
    if match is None:
        return 0, False
    digits = match.group().strip()
    sign = -1 if digits.startswith("-") else 1
    bare = digits.lstrip("+-")
    whole = match.end() == len(text)
    if bare.lower().startswith("0x"):
        return sign * int(bare, 16), whole
    if bare.startswith("0") and len(bare) > 1:
        octal = re.match(r"0[0-7]*", bare)
        used = octal.group() if octal else "0"
        return sign * int(used, 8), whole and used == bare
    return sign * int(bare), whole


def check_value(name: str, value: str, entry: NcclName, version: Version | None) -> Iterator[Finding]:
    """Findings about the text of one value."""
    if value[:1] in "\"'" and value[:1] and value[:1] == value[-1:]:
        yield _finding(
            "env.value.quotes",
            Severity.WARN,
            name,
            value,
            f"The quotes are part of the value: {_effect_of_garbage(name, entry)}.",
            f"Write {name}={value.strip(value[0])} without quotes: env files and nccl.conf do not strip them.",
        )
        return
    if name in LEVELS:
        yield from _level(name, value, version)
    elif name in ("NCCL_ALGO", "NCCL_PROTO"):
        yield from _algorithms(name, value, version)
    elif name in _TOKENS:
        yield from _token(name, value)
    elif name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"):
        yield from _list(name, value)
    elif entry.kind == "integer":
        yield from _integer(name, value, entry)


def _effect_of_garbage(name: str, entry: NcclName) -> str:
    if name in LEVELS:
        return "NCCL does not know such a level and keeps its default"
    if name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"):
        return "no device or interface has a name with quotes, so nothing matches"
    if entry.kind == "text":
        return "NCCL takes it with the quotes"
    return "NCCL reads the number 0"


def _integer(name: str, value: str, entry: NcclName) -> Iterator[Finding]:
    if not value:
        yield _finding(
            "env.value.ignored", Severity.INFO, name, value, "An empty value is no value: NCCL keeps its default.",
            f"Unset {name}.",
        )  # fmt: skip
        return
    number, whole = strtoll(value)
    if not whole:
        same = entry.default == str(number)
        effect = "which is the default: it does nothing" if same else f"instead of its default {entry.default}"
        if name == "NCCL_P2P_DISABLE":
            effect = (
                "and disables peer access"
                if number == 1
                else "and only exactly 1 disables peer access: it does nothing"
            )
        wish = " Write 1 if you mean yes." if value.strip().lower() in ("true", "yes", "on", "y", "t") else ""
        yield _finding(
            "env.value.ignored",
            Severity.WARN,
            name,
            value,
            f"Not a number: NCCL reads it as {number}, {effect}.{wish}",
            f"Write {name} as a number, or unset it.",
        )
        return
    if name == "NCCL_P2P_DISABLE" and number not in (0, 1):
        yield _finding(
            "env.value.ignored", Severity.WARN, name, value, "Only exactly 1 disables peer access: it does nothing.",
            f"Unset {name}.",
        )  # fmt: skip
    if re.match(r"\s*[+-]?0[0-9]", value):
        yield _finding(
            "env.value.ignored", Severity.WARN, name, value, f"A leading 0 means octal: NCCL reads {number}.",
            f"Write {name}={value.strip().lstrip('+-0') or '0'} without the zero.",
        )  # fmt: skip
    low, high = _RANGES.get(name, (number, number))
    if not low <= number <= high and not (number == -1 and entry.default == "-1"):
        yield _finding(
            "env.value.range",
            Severity.WARN,
            name,
            value,
            f"Allowed is {low} to {high}: {_out_of_range(name)}.",
            f"Set {name} within {low} to {high}, or unset it for the default {entry.default}.",
        )


def _out_of_range(name: str) -> str:
    if name.startswith("NCCL_IB_"):
        return "NCCL hands it on, and the HCA cuts it off or refuses the connection (ibv_modify_qp: Invalid argument)"
    return "NCCL warns and caps it, or takes it for another setting"


def _level(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    if value in LEVEL_NAMES:
        since = _LEVEL_SINCE.get(value)
        if since and version and version < since:
            message = f"The level {value} exists since {version_text(since)}: NCCL {version_text(version)} ignores it."
            yield _finding("env.value.level", Severity.WARN, name, value, message, f"Unset {name} or update NCCL.")
        return
    if value[:1].isdigit():
        number, _ = strtoll(value)
        meant = _OLD_LEVELS[min(number, len(_OLD_LEVELS) - 1)]
        message = f"An old-style number: NCCL reads it as {meant}."
        yield _finding("env.value.level", Severity.INFO, name, value, message, f"Write {name}={meant}, or unset it.")
        return
    right = value.strip().upper()
    hint = f"Write {name}={right}" if right in LEVEL_NAMES else f"Use one of {', '.join(LEVEL_NAMES)}"
    message = (
        "NCCL does not know this level (case counts) and ignores it without a message: the default stays in force."
    )
    yield _finding("env.value.level", Severity.WARN, name, value, message, f"{hint}, or unset it.")


def _algorithms(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    known = _ALGORITHMS if name == "NCCL_ALGO" else _PROTOCOLS
    strict = version is None or version >= (2, 24, 0)
    severity = Severity.FAIL if strict and version is not None else Severity.WARN
    unknown: list[str] = []
    for part in value.split(";"):
        head, colon, tail = part.partition(":")
        if colon and head.lower() not in {function.lower() for function in _FUNCTIONS}:
            unknown.append(head)
        tokens = (tail if colon else head).removeprefix("^").split(",")
        unknown += [token for token in tokens if token and token.lower() not in {each.lower() for each in known}]
    if unknown:
        what = "refuses to start (2.24 and later)" if strict else "leaves it out without a message"
        message = f"NCCL does not know {', '.join(repr(token) for token in unknown)} and {what}."
        yield _finding(
            "env.value.token", severity, name, value, message,
            f"Use {', '.join(known)}, or unset it.",
        )  # fmt: skip
        return
    if name == "NCCL_ALGO" and strict and not _gathers(value):
        message = (
            "Since 2.24 NCCL has no ring to fall back to: all-gather and reduce-scatter (FSDP, ZeRO) have no algorithm "
            "left and fail."
        )
        yield _finding("env.value.token", severity, name, value, message, "Unset NCCL_ALGO, or add Ring.")


def _gathers(value: str) -> bool:
    """Whether all-gather keeps an algorithm it can use: Ring, PAT, NVLS or CollNetDirect (src/graph/tuning.cc)."""
    able = {"ring", "pat", "nvls", "collnetdirect"}
    allowed: bool = True
    for part in value.lower().split(";"):
        head, colon, tail = part.partition(":")
        if colon and head not in ("allgather", "reducescatter"):
            continue
        tokens = tail if colon else head
        named = {token for token in tokens.removeprefix("^").split(",") if token}
        allowed = bool(able - named) if tokens.startswith("^") else bool(able & named)
    return allowed


def _token(name: str, value: str) -> Iterator[Finding]:
    allowed, exact, effect = _TOKENS[name]
    if value in allowed or (not exact and value.upper() in allowed) or not value:
        return
    case = "case counts, " if exact and value.upper() in allowed else ""
    yield _finding(
        "env.value.token", Severity.WARN, name, value, f"Not one of {', '.join(allowed)} ({case}so {effect}).",
        f"Use {' or '.join(allowed)}, or unset it.",
    )  # fmt: skip


def _list(name: str, value: str) -> Iterator[Finding]:
    if len(value) <= 1:
        message = "NCCL ignores a value of a single character or none, and chooses by itself."
        if name == "NCCL_IB_HCA":
            message = "An empty list matches every device, as if it were not set."
        if name != "NCCL_IB_HCA" or not value:
            yield _finding("env.value.list", Severity.INFO, name, value, message, f"Unset {name}.")
        return
    bare = value.removeprefix("^").removeprefix("=")
    problems: list[str] = []
    wrong = [entry for entry in bare.split(",") if entry[:1] in ("^", "=") and entry]
    if wrong:
        problems.append(
            f"'^' and '=' count only at the very start (as '^', '=' or '^='), for the whole list; {', '.join(wrong)} "
            "is taken as a name that nothing has"
        )
    if any(char.isspace() for char in value):
        problems.append("spaces are part of the names, and no name has one: those entries match nothing")
    if ";" in value:
        problems.append("the separator is a comma; the list is one long name that nothing has")
    if problems:
        yield _finding(
            "env.value.list", Severity.WARN, name, value, "; ".join(problems) + ".",
            f"Write {name}={_clean(value)}.",
        )  # fmt: skip


def _clean(value: str) -> str:
    sign = "^" if value.startswith("^") else ""
    exact = "=" if value.removeprefix("^").startswith("=") else ""
    names = [entry.strip().lstrip("^=") for entry in re.split(r"[,;]", value)]
    return sign + exact + ",".join(name for name in names if name)
