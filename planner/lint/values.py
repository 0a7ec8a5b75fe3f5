"""Check the values of NCCL variables as NCCL parses them, and describe the effect of invalid values.

Specification: NCCL src/misc/param.cc (integers: strtoll, base 0), src/graph/paths.cc ncclGetLevel (levels),
src/graph/tuning.cc parseList (NCCL_ALGO, NCCL_PROTO), src/misc/socket.cc, src/debug.cc; docs/userguide/source/env.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from contracts.finding import Finding, Status
from contracts.tables import read_table
from planner.lint.findings import finding
from planner.lint.script import pattern, whole_number
from planner.nccl_env import NcclName, Version, names, version_text

_LARGEST = (1 << 63) - 1  # beyond it strtoll sets errno, and NCCL keeps the default
VALUES: Mapping[str, Any] = read_table(__file__, "data/values.toml")
"""Allowed values of the variables, and what an invalid one causes."""


def strtoll(text: str) -> tuple[int, bool]:
    """Return the result of strtoll(text, NULL, 0), and whether it consumed the whole text."""
    match = pattern("integer").match(text)
    if match is None:
        return 0, False
    sign, digits = match.groups()
    digits = digits[:99]  # Python raises ValueError for thousands
    number = int(digits, 16 if digits[1:2] in ("x", "X") else 8 if digits[0] == "0" else 10)
    return -number if sign == "-" else number, match.end() == len(text)


class NameList(NamedTuple):
    """A parsed value of NCCL_IB_HCA or NCCL_SOCKET_IFNAME."""

    negated: bool
    exact: bool
    entries: tuple[tuple[str, int | None], ...]  # (name, port)

    @classmethod
    def parse(cls, text: str) -> NameList:
        """Parse an optional `^`, an optional `=`, and names with optional ports."""
        negated = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        pairs = [entry.split(":") for entry in text.removeprefix("=").split(",")]
        entries = tuple((name, whole_number(port[0]) if port else None) for name, *port in pairs if name)
        return cls(negated=negated, exact=exact, entries=entries)

    def matches(self, present: Sequence[tuple[str, int | None]]) -> Iterator[tuple[str, list[str]]]:
        """Yield each entry with the present names (name, port) that it matches."""
        for entry, wanted_port in self.entries:
            yield entry, list(dict.fromkeys(
                name for name, port in present
                if (name == entry if self.exact else name.startswith(entry))
                and (port is None or wanted_port is None or wanted_port == port)
            ))  # fmt: skip

    def takes(self, name: str, port: int | None = None) -> bool:
        """Whether NCCL would use the name."""
        return (not self.entries or any(names for _, names in self.matches([(name, port)]))) != self.negated


def find_other_net(environment: Mapping[str, str]) -> str:
    """Return the setting that selects a network plugin instead of NCCL's own RDMA or sockets; "" if there is none."""
    net, plugin = environment.get("NCCL_NET", ""), environment.get("NCCL_NET_PLUGIN", "")
    if net:
        return "" if net.lower() in ("ib", "socket", "ibext") else f"NCCL_NET={net}"
    if re.search(r"ofi|fabric|efa|gib|fastrak|gpudirecttcpx|aws", plugin, re.IGNORECASE):
        return f"NCCL_NET_PLUGIN={plugin}"
    provider = re.split(r"[;,]", environment.get("FI_PROVIDER", ""))[0].strip().lower()
    is_plugin = bool(provider) and provider not in VALUES["words"]["tcp"] and provider[0] != "^"
    return f"FI_PROVIDER={environment['FI_PROVIDER']}" if is_plugin else ""


def is_quoted(value: str) -> bool:
    """Whether the value is enclosed in quotes."""
    return len(value) > 1 and value[0] in "\"'" and value[0] == value[-1]


def check_quotes(name: str, value: str) -> Iterator[Finding]:
    """Warn about quotes in an env file: some programs that read env files keep them."""
    if (entry := names().get(name)) is not None and is_quoted(value):
        effect = _describe_garbage(name, entry)
        yield finding("env.value.quotes/env_file", name, value, effect=effect, right=value.strip(value[0]))


def check_value(
    name: str, value: str, entry: NcclName, version: Version | None, *, only_all_reduce: bool = False
) -> Iterator[Finding]:
    """Yield findings about one value. `only_all_reduce`: no other collective runs with it."""
    bare = re.sub(r"(?<!\S)#.*", "", value).strip()
    if bare != value and value.strip():  # docker's env files, nccl.conf and quotes keep blanks and comments
        harmless = entry.kind == "integer" and strtoll(bare)[1]
        effect = "but NCCL reads the number correctly" if harmless else "so NCCL gets it as part of the value"
        part = "ends with a comment" if "#" in value[len(bare) :] else "ends with a blank"
        part = part if value.startswith(bare) else "begins with a blank"
        status = Status.INFO if harmless else Status.WARN
        yield finding("env.value.blank", name, value, status=status, part=part, effect=effect, right=bare)
        value = bare or value
    if is_quoted(value):
        effect, right = _describe_garbage(name, entry), value.strip(value[0])
        harms = name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME") or (name in VALUES["zero"] and strtoll(right)[0] != 0)
        status = Status.FAIL if harms else Status.WARN
        yield finding("env.value.quotes", name, value, status=status, effect=effect, right=right)
        return
    if name.endswith(("_FILE", "_PATH")) and value.startswith("~"):
        yield finding("env.value.kind/tilde", name, value)
    elif name in ("NCCL_ALGO", "NCCL_PROTO"):
        yield from _check_algorithms(name, value, version, only_all_reduce)
    elif name in VALUES["text"]:
        yield from _check_text(name, value, version)
    elif name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"):
        yield from _list(name, value)
    elif entry.kind == "integer":
        yield from _check_integer(name, value, entry)


def check_kind(name: str, value: str) -> Iterator[Finding]:
    """Warn about a value of the wrong kind, such as an interface instead of a device."""
    row, like = VALUES["kind"].get(name), VALUES["like"]
    if row is None:
        return
    entries = [each.strip() for each in value.strip("\"'").lstrip("^=").split(",") if each.strip()]
    bare = [each.split(":")[0] if not re.fullmatch(like["address"], each) else each for each in entries]
    wrong = [each for each in bare if any(re.fullmatch(like[kind], each) for kind in ("address", row["wrong"]))]
    wrong = [value] if name == "GLOO_SOCKET_IFNAME" and value[:1] in ("^", "=") else wrong
    if wrong:
        expected, command = VALUES[row["names"]]["wanted"], VALUES[row["names"]]["command"]
        yield finding("env.value.kind/names", name, value, wanted=expected, wrong=", ".join(wrong), command=command)


def _describe_garbage(name: str, entry: NcclName) -> str:
    """Describe what NCCL does with a value in quotes."""
    effects = VALUES["quoted"]
    of_text = VALUES["text"].get(name, {}).get("effect", effects["text"])
    return str(effects.get(name, of_text if entry.kind == "text" else effects["number"]))


def default_of(name: str, entry: NcclName) -> str:
    """Describe the default of a variable. A negative number means that NCCL chooses."""
    default = entry.default.removeprefix("unset ")
    default = "the value NCCL would choose" if default[:1] == "-" or default == "unset" else f"its default {default}"
    return "its default 4194304 (4 MiB)" if name == "NCCL_BUFFSIZE" else default  # src/init.cc DEFAULT_BUFFSIZE


def _check_integer(name: str, value: str, entry: NcclName) -> Iterator[Finding]:
    number, is_integer = strtoll(value)
    default = default_of(name, entry)
    if not value:
        yield finding("env.value.ignored/empty", name, value)
    elif name in VALUES["names"]["bytes"] and (unit := pattern("unit").fullmatch(value)):
        number_meant = int(unit[1]) << 10 * (1 + "KMGT".index(unit[2].upper()))
        yield finding("env.value.ignored/unit", name, value, number=number, default=default, meant=number_meant)
    elif not is_integer:
        yield from _report_no_number(name, value, number, entry)
    elif abs(number) > _LARGEST:
        yield finding("env.value.ignored/large", name, value, default=default)
    else:
        if re.match(r"\s*[+-]?0[0-9]", value):
            right = value.strip().lstrip("+-0") or "0"
            yield finding("env.value.ignored/octal", name, value, number=number, right=right)
        is_default = str(number) == entry.default or (number == -1 and entry.default == "auto")
        if name in VALUES["names"]["flags"] and number not in (0, 1) and not is_default:
            yield finding("env.value.range/flag", name, value)
        low, high = VALUES["range"].get(name, (number, number))
        if not low <= number <= high and not is_default:
            effect = VALUES["out_of_range"]["NCCL_IB_" if name.startswith("NCCL_IB_") else "other"]
            yield finding("env.value.range", name, value, low=low, high=high, effect=effect, default=default)


def _report_no_number(name: str, value: str, number: int, entry: NcclName) -> Iterator[Finding]:
    """Report a text that is not only a number. NCCL uses the number at its start, or 0."""
    word, is_number = value.strip().lower(), pattern("integer").match(value) is not None
    means_no, wish = word in VALUES["words"]["no"], " Write 1 if you mean yes." * (word in VALUES["words"]["yes"])
    is_unset = entry.default == str(number) or (number == 0 and name in VALUES["names"]["zero_is_unset"])
    if is_unset or (name == "NCCL_P2P_DISABLE" and number != 1):  # only exactly 1 disables peer access
        harm, effect = "", "which does nothing"
    else:
        harm = "" if is_number or means_no else VALUES["zero"].get(name, "")
        effect = f"instead of {default_of(name, entry)}" + (f": {harm}" if harm else "")
    status = Status.FAIL if harm else Status.INFO if means_no else Status.WARN
    yield finding("env.value.ignored/word", name, value, status=status, number=number, effect=effect, wish=wish)


def _check_text(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    """Check a keyword, a list of keywords, or a text with a pattern. NCCL takes a blank as part of a keyword."""
    row = VALUES["text"][name]
    releases = row.get("since", {})
    keywords = [each for each in row.get("words", ()) if not version or version >= tuple(releases.get(each, ()))]
    flags, separator, effect = 0 if row.get("exact") else re.IGNORECASE, row.get("separator"), row.get("effect")
    allowed = row.get("pattern") or "|".join([*map(re.escape, keywords), row.get("numbers", "(?!)")])
    pattern = re.compile(allowed, flags)
    parts = value.removeprefix("^").split(separator) if separator else [value]
    wrong = [each for each in parts if each and not pattern.fullmatch(each.removeprefix("^") if separator else each)]
    if not wrong:
        return
    listed = ", ".join(keywords)
    if separator:
        blank = " (a blank belongs to the word)" if re.search(r"\s", "".join(wrong)) else ""
        bad = ", ".join(map(repr, wrong))
        yield finding("env.value.token/list", name, value, wrong=bad, blank=blank, words=listed, separator=separator)
    elif "numbers" in row:
        release = f"NCCL {version_text(version)}" if version else "NCCL"
        yield finding("env.value.level", name, value, release=release, words=listed)
    elif "wanted" in row:
        yield finding("env.value.kind", name, value, wanted=row["wanted"], effect=effect)
    else:
        case = "case counts, " if value.upper() in keywords else ""
        choices = " or ".join(keywords)
        yield finding("env.value.token", name, value, words=listed, case=case, effect=effect, choices=choices)


def _check_algorithms(name: str, value: str, version: Version | None, only_all_reduce: bool) -> Iterator[Finding]:
    """Check NCCL_ALGO and NCCL_PROTO, which apply to all collectives or to the named ones.

    All-gather and reduce-scatter work only with Ring, PAT, NVLS or CollNetDirect (src/graph/tuning.cc).
    """
    words = VALUES["words"][name]
    names, functions = ({each.lower() for each in table} for table in (words, VALUES["words"]["functions"]))
    strict = version is None or version >= (2, 24, 0)
    status = Status.FAIL if strict and version is not None else Status.WARN
    unknown, gathers = list[str](), True
    for part in value.split(";"):
        function, colon, tokens = part.rpartition(":")
        listed = [token for token in tokens.removeprefix("^").split(",") if token]
        unknown += [function] if colon and function.lower() not in functions else []
        unknown += [token for token in listed if token.lower() not in names]
        if not colon or function.lower() in ("allgather", "reducescatter"):
            able = {"ring", "pat", "nvls", "collnetdirect"}
            able_listed = able & {token.lower() for token in listed}
            gathers = bool(able - able_listed if tokens.startswith("^") else able_listed)
    if unknown:
        effect = "refuses to start (2.24 and later)" if strict else "leaves it out without a message"
        wrong = ", ".join(map(repr, unknown))
        yield finding(
            "env.value.token/algorithm", name, value, status=status, wrong=wrong, effect=effect, words=", ".join(words)
        )
    elif name == "NCCL_ALGO" and strict and not (gathers or only_all_reduce):
        yield finding("env.value.token/no_ring", name, value, status=status)


def _list(name: str, value: str) -> Iterator[Finding]:
    if len(value) <= 1:
        if name != "NCCL_IB_HCA":
            yield finding("env.value.list/short", name, value)
        elif not value:
            yield finding("env.value.list/every", name, value)
        return
    sign = value[: len(value) - len(re.sub(r"^\^?=?", "", value))]
    entries = re.split(r"[,;\s]+", value.removeprefix(sign))
    texts = VALUES["list"]
    wrong = [entry for entry in entries if entry[:1] in ("^", "=") and entry]
    problems = [texts["sign"].format(wrong=", ".join(wrong))] if wrong else []
    problems += [texts["blank"]] if re.search(r"\s", value) else []
    problems += [texts["semicolon"]] if ";" in value else []
    if problems:
        names = ",".join(filter(None, (entry.lstrip("^=") for entry in entries)))
        yield finding("env.value.list", name, value, problems="; ".join(problems), right=sign + names)
