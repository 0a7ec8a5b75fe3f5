"""How NCCL reads the text of a value, and what becomes of one it does not understand.

Specification: NCCL src/misc/param.cc (integers: strtoll, base 0), src/graph/paths.cc ncclGetLevel (levels),
src/graph/tuning.cc parseList (NCCL_ALGO, NCCL_PROTO), src/misc/socket.cc, src/debug.cc; docs/userguide/source/env.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from planner.nccl_env.names import NcclName, Version, names, torch_names, version_text
from probes.api import Finding, Severity


def finding(
    code: str, severity: Severity, name: str, value: str, message: str, remedy: str, evidence: tuple[str, ...] = ()
) -> Finding:
    """The variable is the subject, what it was set to the first evidence; the message begins a sentence."""
    return Finding(
        code=code,
        severity=severity,
        subject=name,
        message=message[:1].upper() + message[1:],
        evidence=(f"{name}={value}", *evidence),
        remedy=remedy,
    )


VALUE_CODES = (
    "env.value.ignored",
    "env.value.kind",
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
_DEBUG = ("VERSION", "WARN", "ATTN", "INFO", "ABORT", "TRACE")  # ATTN: libnccl.so.2 of the wheel 2.32.3
_ATTN_SINCE = (2, 32, 3)  # 2.31.2 does not know it

_SUBSYSTEMS = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "ALLOC_HOST", "CALL", "PROXY", "NVLS",
    "BOOTSTRAP", "REG", "PROFILE", "RAS", "DESTROY", "ALL",
)  # fmt: skip

# Enumerations, with how NCCL compares and what it does with anything else. env.rst, "Values accepted".
_TOKENS: Mapping[str, tuple[tuple[str, ...], bool, str]] = MappingProxyType(
    {
        "NCCL_DEBUG": (_DEBUG, False, "NCCL ignores it and prints nothing"),
        "NCCL_SOCKET_FAMILY": (("AF_INET", "AF_INET6"), True, "NCCL ignores it and takes the first address it finds"),
        "NCCL_IB_ADDR_FAMILY": (("AF_INET", "AF_INET6"), True, "NCCL ignores it and looks for an IPv4 GID"),
        "NCCL_CHECK_MODE": (("DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL"), False, "NCCL ignores it and checks nothing"),
        "NCCL_NET_MERGE_POLICY": (("ALL", "RAIL"), False, "NCCL ignores it and merges all"),
        "NCCL_IB_RAIL_POLICY": (("CX9", "CX9:FLIP", "CX9:ALT", "CX9:BLOCK"), False, "NCCL warns and ignores it"),
    }
)
# Lists of such words, by their separator.
_WORD_LISTS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "NCCL_DEBUG_SUBSYS": (",", _SUBSYSTEMS),
        "NCCL_DEBUG_TIMESTAMP_LEVELS": (",", (*_DEBUG, "ALL")),
        "NCCL_DEBUG_LEVELS": (",", (*_DEBUG, "ALL")),
        "NCCL_CTA_POLICY": ("|", ("DEFAULT", "EFFICIENCY", "ZERO", "0", "1", "2")),
    }
)
_SHAPES: Mapping[str, tuple[re.Pattern[str], str]] = MappingProxyType(
    {
        "NCCL_NETDEVS_POLICY": (re.compile(r"AUTO|ALL|MAX:[1-9]\d*", re.IGNORECASE), "AUTO, ALL or MAX:N"),
        "NCCL_COMM_ID": (
            re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):\d{1,5}"),
            "ADDRESS:PORT, as 10.0.0.1:29400",
        ),
        "NCCL_RAS_ADDR": (
            re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):\d{1,5}"),
            "ADDRESS:PORT, as localhost:28028",
        ),
        "NCCL_IB_ADDR_RANGE": (re.compile(r"[0-9A-Fa-f.:]+/\d{1,3}"), "a range as 192.168.0.0/16"),
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
        "NCCL_IB_FIFO_TC": (0, 255),
        "NCCL_GIN_IB_TC": (0, 255),
        "NCCL_IB_SL": (0, 15),
        "NCCL_IB_ROCE_VERSION_NUM": (1, 2),
        "NCCL_IB_GID_INDEX": (0, 255),
        "NCCL_IB_PCI_RELAXED_ORDERING": (0, 2),
        "NCCL_IB_PKEY_VALUE": (1, 0xFFFF),
        "NCCL_SOCKET_NTHREADS": (1, 16),
        "NCCL_NSOCKS_PERTHREAD": (1, 64),
        "NCCL_SOCKET_RETRY_CNT": (1, 1 << 31),
        "NCCL_SOCKET_RETRY_SLEEP_MSEC": (1, 1 << 31),
        "NCCL_UID_STAGGER_THRESHOLD": (1, 1 << 31),
        "NCCL_UID_STAGGER_RATE": (1, 1 << 31),
        "NCCL_NVLS_ENABLE": (0, 2),
        "NCCL_MNNVL_ENABLE": (0, 2),
        "NCCL_P2P_PXN_LEVEL": (0, 2),
        "NCCL_CGA_CLUSTER_SIZE": (0, 8),
        "NCCL_MIN_CTAS": (1, 64),
        "NCCL_MAX_CTAS": (1, 64),
        "NCCL_MIN_NCHANNELS": (1, 1 << 31),  # NCCL caps it, RCCL takes 112
        "NCCL_MAX_NCHANNELS": (1, 1 << 31),
        "NCCL_BUFFSIZE": (1, 1 << 40),
        "NCCL_P2P_NET_CHUNKSIZE": (1, 1 << 40),
    }
)
_BYTES = frozenset(
    f"NCCL_{name}"
    for name in ("BUFFSIZE", "LL_BUFFSIZE", "LL128_BUFFSIZE", "P2P_NET_CHUNKSIZE", "P2P_PCI_CHUNKSIZE",
                 "P2P_NVL_CHUNKSIZE", "NVLS_CHUNKSIZE", "NVLSTREE_MAX_CHUNKSIZE")
)  # fmt: skip
_UNIT = re.compile(r"\s*([1-9]\d*)\s*([KMGT])i?B?", re.IGNORECASE)
_CHOICES: Mapping[str, tuple[int, ...]] = MappingProxyType({"NCCL_NTHREADS": (64, 128, 256, 512)})
# "0 or 1" in env.rst: any other number counts as 1.
_FLAGS = frozenset(
    f"NCCL_{name}"
    for name in (
        "IB_DISABLE", "SHM_DISABLE", "P2P_DIRECT_DISABLE", "CHECKS_DISABLE", "CHECK_POINTERS", "IGNORE_CPU_AFFINITY",
        "OOB_NET_ENABLE", "COLLNET_ENABLE", "MULTI_RANK_GPU_ENABLE", "IB_SPLIT_DATA_ON_QPS", "IB_ADAPTIVE_ROUTING",
        "IB_ECE_ENABLE", "IB_OOO_RQ", "IB_RETURN_ASYNC_EVENTS", "MEM_SYNC_DOMAIN", "CUMEM_ENABLE", "CUMEM_HOST_ENABLE",
        "NET_GDR_C2C", "NET_GDR_READ", "NET_SHARED_BUFFERS", "NET_SHARED_COMMS", "IGNORE_NET_MISMATCH",
        "IGNORE_COLLNET_MISMATCH", "NVB_DISABLE", "PXN_DISABLE", "PXN_C2C", "RUNTIME_CONNECT", "GRAPH_REGISTER",
        "LOCAL_REGISTER", "LEGACY_CUDA_REGISTER", "WIN_ENABLE", "SET_STACK_SIZE", "GRAPH_MIXING_SUPPORT",
        "DMABUF_ENABLE", "GRAPH_STREAM_ORDERING", "ALLOC_P2P_NET_LL_BUFFERS", "COMM_BLOCKING", "IB_MERGE_NICS",
        "RAS_ENABLE",
        "LAUNCH_ORDER_IMPLICIT", "LAUNCH_RACE_FATAL", "IPC_USE_ABSTRACT_SOCKET", "SYM_GIN_KERNELS_ENABLE",
        "GDRCOPY_ENABLE", "RMA_EAGER_INIT", "RUN_DIAGNOSTICS", "RUN_RAS_DIAGNOSTICS", "IB_EVENT_BASED_LB",
    )
)  # fmt: skip
# Switches of what carries data: off, they cost at least a tenth of a collective's bandwidth, or RDMA itself.
_OFF_COSTS = frozenset(
    f"NCCL_{name}"
    for name in ("NVLS_ENABLE", "MNNVL_ENABLE", "CUMEM_ENABLE", "DMABUF_ENABLE", "NET_GDR_READ", "NET_GDR_C2C",
                 "IB_PCI_RELAXED_ORDERING")
)  # fmt: skip
# What a word, which strtoll reads as 0, does to these. NCCL src/graph/connect.cc ncclMaxNchannels, src/init.cc
# computeBuffSizes, src/transport/net_ib (queue pairs of a connection), src/os/linux.cc
# (connections), and `_waits`.
_ZERO: Mapping[str, str] = MappingProxyType(
    {
        "NCCL_MAX_NCHANNELS": "NCCL raises it to 1, and one channel carries every collective",
        "NCCL_IB_QPS_PER_CONNECTION": "RDMA connections get no queue pair and carry nothing",
        "NCCL_IB_TIMEOUT": "RDMA waits for ever, and a job whose peer died hangs",
        "NCCL_IB_RETRY_CNT": "a single lost packet ends the job",
        "NCCL_SOCKET_RETRY_CNT": "a peer that listens a moment later ends the job",
    }
)
# 0 is as good as unset here: getNthreads, ncclMinNchannels, and traffic class 0, which -1 stands for.
_ZERO_IS_UNSET = frozenset(f"NCCL_{name}" for name in ("NTHREADS", "MIN_NCHANNELS", "IB_TC", "IB_SL"))
_YES, _NO = ("true", "yes", "on", "y", "t", "enable", "enabled"), ("false", "no", "off", "n", "f", "none", "disable")
_LARGEST = (1 << 63) - 1  # beyond it strtoll sets errno, and NCCL keeps the default
_OLDEST_TIMEOUT = 14  # the default up to 2.13, 67 ms a try (env.rst); no release waits less by itself
_MOST_PKEYS = 128  # entries of a port's P_Key table on mlx5; an index above is none
# Names as Linux and rdma-core give them to network interfaces and to RDMA devices.
_LIKE_INTERFACE = re.compile(
    r"(?:eth|ib|bond|net|hsn|docker|team|veth|virbr|cni|wlan|tun|vlan)\d*(?:\.\d+)?|lo|br-\w+|eno\d\w*|ens\d\w*|enp\d\w*"
    r"|enP\d\w*|em\d+|ib\d+\.\w+"
)
_LIKE_DEVICE = re.compile(
    r"(?:mlx[45]|bnxt_re|irdma|qedr|hns|erdma|efa|rxe|siw|cxgb4|hfi1|qib|mthca|ionic|cxi|mana|ocrdma|i40iw)_?\d*"
    r"|mlx5_bond_?\d*|roce[pso]\w*|rdmap\w*"
)
_ADDRESS = re.compile(
    r"\d{1,3}(?:\.\d{1,3}){3}(?:/\d+)?|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d|[0-9a-f]{2}:[0-9a-f]{2}\.\d", re.I
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


def is_quoted(value: str) -> bool:
    """Whether quotes stand around it."""
    return len(value) > 1 and value[0] in "\"'" and value[0] == value[-1]


def check_quotes(name: str, value: str) -> Iterator[Finding]:
    """Of an env file, whose reader is not known: some keep the quotes."""
    entry = names().get(name)
    if entry is not None and is_quoted(value):
        yield finding(
            "env.value.quotes", Severity.WARN, name, value,
            f"The quotes stay with `docker run --env-file` and in nccl.conf: {_effect_of_garbage(name, entry, None)}. "
            "Compose, systemd, dotenv and a shell strip them.",
            f"Write {name}={value.strip(value[0])} without quotes, which every reader takes alike.",
        )  # fmt: skip


def check_value(name: str, value: str, entry: NcclName, version: Version | None) -> Iterator[Finding]:
    """Findings about the text of one value."""
    if is_quoted(value):
        off = name in _OFF_COSTS and strtoll(value.strip(value[0]))[0] != 0
        ends = off or name in _ZERO or name in _BYTES or name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME")
        yield finding(
            "env.value.quotes",
            Severity.FAIL if ends else Severity.WARN,
            name,
            value,
            f"The quotes are part of the value: {_effect_of_garbage(name, entry, version)}.",
            f"Write {name}={value.strip(value[0])} without quotes.",
        )
        return
    if name in LEVELS:
        yield from _level(name, value, version)
    elif name in ("NCCL_ALGO", "NCCL_PROTO"):
        yield from _algorithms(name, value, version)
    elif name == "NCCL_LAUNCH_MODE":
        yield from _launch_mode(name, value, version)
    elif name in _TOKENS:
        yield from _token(name, value, version)
    elif name in _WORD_LISTS:
        yield from _words(name, value)
    elif name in _SHAPES:
        yield from _shape(name, value)
    elif name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"):
        yield from _list(name, value)
    elif entry.kind == "integer":
        yield from _integer(name, value, entry)
    elif name.endswith(("_FILE", "_PATH")):
        yield from _file(name, value)


def fits(name: str, value: str) -> bool:
    """Whether a value is of the kind that a name takes, so that the name may have been meant."""
    entry = names().get(name)
    if name in torch_names():
        return (not strtoll(value)[1] and bool(value)) == name.endswith(("_FILE", "_EXEC"))
    if entry is None:
        return False
    if any(finding.severity is not Severity.INFO for finding in check_value(name, value, entry, None)):
        return False
    if any(check_kind(name, value)):
        return False
    number = strtoll(value)[1]
    if entry.kind == "text":
        path = value.startswith(("/", "~", "./"))
        return (
            path == name.endswith(("_FILE", "_PATH")) or (path and name.endswith("_PLUGIN"))
            if not number
            else name in LEVELS
        )
    return True


def check_kind(name: str, value: str) -> Iterator[Finding]:
    """A value of another kind than the variable takes: an interface for a device, a key for an index."""
    entries = [each.strip() for each in value.strip("\"'").lstrip("^=").split(",") if each.strip()]
    bare = [each.split(":")[0] if not _ADDRESS.fullmatch(each) else each for each in entries]
    if name == "NCCL_IB_HCA":
        wrong = [each for each in bare if _LIKE_INTERFACE.fullmatch(each) or _ADDRESS.fullmatch(each)]
        wants, lists = "RDMA devices, as mlx5_0", "ls /sys/class/infiniband"
    elif name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        wrong = [each for each in bare if _LIKE_DEVICE.fullmatch(each) or _ADDRESS.fullmatch(each)]
        wants, lists = "network interfaces, as eth0", "ip -br addr"
        if name == "GLOO_SOCKET_IFNAME" and value[:1] in ("^", "="):
            wrong = [value]
    elif name == "NCCL_IB_PKEY":
        number, whole = strtoll(value)
        if whole and number >= _MOST_PKEYS:
            yield finding(
                "env.value.kind", Severity.WARN, name, value,
                f"An index into the port's table of keys is wanted, and {value} looks like a key: no port has so many "
                "entries, and connections fail (ibv_modify_qp: Invalid argument).",
                "Write the index (/sys/class/infiniband/DEVICE/ports/1/pkeys lists them), or from NCCL 2.31 on name "
                "the key itself in NCCL_IB_PKEY_VALUE.",
            )  # fmt: skip
        return
    else:
        return
    if wrong:
        yield finding(
            "env.value.kind", Severity.WARN, name, value,
            f"It takes names of {wants}; {', '.join(wrong)} does not look like one, and an entry without a match is "
            "left out in silence.",
            f"Name what `{lists}` lists, or unset {name}.",
        )  # fmt: skip


def _effect_of_garbage(name: str, entry: NcclName, version: Version | None) -> str:
    if name in LEVELS:
        return "NCCL does not know such a level and keeps its default"
    if name in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"):
        return "no device or interface has a name with quotes, so nothing matches"
    if name == "NCCL_LAUNCH_MODE":
        return f"NCCL knows no such mode and launches in {_default_mode(version)} mode"
    if entry.kind == "text":
        return "NCCL takes it with the quotes"
    return "NCCL reads the number 0"


def _default(name: str, entry: NcclName) -> str:
    """What holds where it is not set; a negative number stands for NCCL's own choice."""
    if name == "NCCL_BUFFSIZE":
        return "its default 4194304 (4 MiB)"  # src/init.cc DEFAULT_BUFFSIZE
    return "what NCCL chooses by itself" if entry.default.startswith("-") else f"its default {entry.default}"


def _integer(name: str, value: str, entry: NcclName) -> Iterator[Finding]:
    if not value:
        yield finding(
            "env.value.ignored", Severity.INFO, name, value, "An empty value is no value: NCCL keeps its default.",
            f"Unset {name}.",
        )  # fmt: skip
        return
    number, whole = strtoll(value)
    if not whole:
        if name in _BYTES and (unit := _UNIT.fullmatch(value)):
            meant = int(unit[1]) << 10 * (1 + "KMGT".index(unit[2].upper()))
            yield finding(
                "env.value.ignored", Severity.FAIL, name, value,
                f"NCCL reads bytes and no unit: {number} bytes, in place of {_default(name, entry)}.",
                f"Write {name}={meant}, or unset it.",
            )  # fmt: skip
            return
        yield from _not_a_number(name, value, number, entry)
        return
    if abs(number) > _LARGEST:
        yield finding(
            "env.value.ignored", Severity.WARN, name, value,
            f"Too large for 64 bits: NCCL prints 'Invalid value' and keeps {_default(name, entry)}.",
            f"Write {name} as a smaller number, or unset it.",
        )  # fmt: skip
        return
    if name == "NCCL_P2P_DISABLE" and number not in (0, 1):
        yield finding(
            "env.value.ignored", Severity.WARN, name, value, "Only exactly 1 disables peer access: it does nothing.",
            f"Unset {name}.",
        )  # fmt: skip
    if re.match(r"\s*[+-]?0[0-9]", value):
        yield finding(
            "env.value.ignored", Severity.WARN, name, value, f"A leading 0 means octal: NCCL reads {number}.",
            f"Write {name}={value.strip().lstrip('+-0') or '0'} without the zero.",
        )  # fmt: skip
    if name in _CHOICES and number not in _CHOICES[name]:
        yield finding(
            "env.value.range", Severity.WARN, name, value,
            f"Allowed is {', '.join(map(str, _CHOICES[name]))}: NCCL warns and takes another of these.",
            f"Unset {name}.",
        )  # fmt: skip
    if name in _FLAGS and number not in (0, 1) and str(number) != entry.default:
        yield finding(
            "env.value.range", Severity.INFO, name, value, "Documented is 0 or 1; any number but 0 counts as 1.",
            f"Write 0 or 1, or unset {name}.",
        )  # fmt: skip
    yield from _waits(name, value, number)
    low, high = _RANGES.get(name, (number, number))
    if not low <= number <= high and str(number) != entry.default and not (number == -1 and entry.default == "auto"):
        yield finding(
            "env.value.range",
            Severity.WARN,
            name,
            value,
            f"Allowed is {low} to {high}: {_out_of_range(name)}.",
            f"Set {name} within {low} to {high}, or unset it for {_default(name, entry)}.",
        )


def _not_a_number(name: str, value: str, number: int, entry: NcclName) -> Iterator[Finding]:
    """Text that is no number, or not only one: strtoll takes its beginning, or 0, and NCCL uses that.

    The severity is that of the number that NCCL then uses.
    """
    word = value.strip().lower()
    wish = " Write 1 if you mean yes." if word in _YES else ""
    severity = Severity.WARN
    if name == "NCCL_P2P_DISABLE":
        only = "and only exactly 1 disables peer access: it does nothing"
        effect = "and disables peer access" if number == 1 else only
    elif entry.default == str(number) or (number == 0 and name in _ZERO_IS_UNSET):
        severity = Severity.INFO if word in _NO else severity
        effect = "which is the default: it does nothing" if entry.default == str(number) else "as if it were not set"
    elif _INTEGER.match(value):
        severity = Severity.INFO if _INTEGER.fullmatch(value.rstrip()) else severity
        effect = f"instead of {_default(name, entry)}"
    elif word in _NO:
        severity, effect = Severity.INFO, "as the word says"
    elif name in _ZERO or name in _BYTES:
        severity = Severity.FAIL
        effect = f"instead of {_default(name, entry)}: {_ZERO.get(name, 'buffers of no size carry nothing')}"
    elif name in _FLAGS or name in _OFF_COSTS:
        severity = Severity.FAIL if name in _OFF_COSTS else severity  # whoever writes a word did not mean 0
        effect = "which turns off what it names" + (", the opposite of the word" if word in _YES else "")
    else:
        effect = f"instead of {_default(name, entry)}"
    yield finding(
        "env.value.ignored", severity, name, value,
        f"Not a number: NCCL reads it as {number}, {effect}.{wish}",
        f"Write {name} as a number, or unset it.",
    )  # fmt: skip


def _waits(name: str, value: str, number: int) -> Iterator[Finding]:
    """How long RDMA waits for an answer: 4.096 µs times 2 to this number, so many times (env.rst)."""
    if name == "NCCL_IB_TIMEOUT" and number == 0:
        yield finding(
            "env.value.range", Severity.WARN, name, value,
            "0 waits for ever: a peer that died is never noticed, and the job hangs.",
            f"Unset {name}, or take 20 to 23.",
        )  # fmt: skip
    elif name == "NCCL_IB_TIMEOUT" and 0 < number < _OLDEST_TIMEOUT:
        milliseconds = 4.096e-3 * 2**number
        yield finding(
            "env.value.range", Severity.WARN, name, value,
            f"It is an exponent, no time: {milliseconds:.3g} ms a try, shorter than any release's own choice; a short "
            "stall of the fabric ends the job (ibv_poll_cq: error 12).",
            f"Unset {name}, or take 20 to 23.",
        )  # fmt: skip
    elif name == "NCCL_IB_RETRY_CNT" and number == 0:
        yield finding(
            "env.value.range", Severity.WARN, name, value, "0 tries once: a single lost packet ends the job.",
            f"Unset {name}: the default is 7.",
        )  # fmt: skip


def _words(name: str, value: str) -> Iterator[Finding]:
    """A list of words; a blank belongs to the word beside it."""
    separator, allowed = _WORD_LISTS[name]
    entries = value.removeprefix("^").split(separator)
    wrong = [each for each in entries if each and each.removeprefix("^").upper() not in allowed]
    if wrong:
        blank = " (a blank belongs to the word)" if any(char.isspace() for char in "".join(wrong)) else ""
        yield finding(
            "env.value.token", Severity.WARN, name, value,
            f"NCCL does not know {', '.join(repr(each) for each in wrong)} and leaves it out{blank}.",
            f"Use {', '.join(allowed)}, with '{separator}' between them.",
        )  # fmt: skip


def _shape(name: str, value: str) -> Iterator[Finding]:
    pattern, wanted = _SHAPES[name]
    if value and not pattern.fullmatch(value):
        effects = {
            "NCCL_COMM_ID": "NCCL ends with 'Invalid NCCL_COMM_ID'",
            "NCCL_RAS_ADDR": "NCCL warns, and its RAS port does not open",
            "NCCL_IB_ADDR_RANGE": "NCCL warns and ignores it",
        }
        effect = effects.get(name, "NCCL ignores it")
        yield finding(
            "env.value.kind", Severity.WARN, name, value, f"It takes {wanted}; {effect}.", f"Write {name} as {wanted}.",
        )  # fmt: skip


def _file(name: str, value: str) -> Iterator[Finding]:
    """A file's name; a shell expands `~`, NCCL does not."""
    if value.startswith("~"):
        yield finding(
            "env.value.kind", Severity.WARN, name, value,
            "NCCL takes ~ as a letter: there is no such file.", "Write the whole path.",
        )  # fmt: skip


def _out_of_range(name: str) -> str:
    if name.startswith("NCCL_IB_"):
        return "NCCL hands it on, and the HCA cuts it off or refuses the connection (ibv_modify_qp: Invalid argument)"
    return "NCCL warns and caps it, or takes it for another setting"


def _level(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    if value in LEVEL_NAMES:
        since = _LEVEL_SINCE.get(value)
        if since and version and version < since:
            message = f"The level {value} exists since {version_text(since)}: NCCL {version_text(version)} ignores it."
            yield finding("env.value.level", Severity.WARN, name, value, message, f"Unset {name} or update NCCL.")
        return
    if value[:1].isdigit():
        number, _ = strtoll(value)
        meant = _OLD_LEVELS[min(number, len(_OLD_LEVELS) - 1)]
        message = f"An old-style number: NCCL reads it as {meant}."
        yield finding("env.value.level", Severity.INFO, name, value, message, f"Write {name}={meant}, or unset it.")
        return
    right = value.strip().upper()
    hint = f"Write {name}={right}" if right in LEVEL_NAMES else f"Use one of {', '.join(LEVEL_NAMES)}"
    message = (
        "NCCL does not know this level (case counts) and ignores it without a message: the default stays in force."
    )
    yield finding("env.value.level", Severity.WARN, name, value, message, f"{hint}, or unset it.")


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
        yield finding(
            "env.value.token", severity, name, value, message,
            f"Use {', '.join(known)}, or unset it.",
        )  # fmt: skip
        return
    if name == "NCCL_ALGO" and strict and not _gathers(value):
        message = (
            "Since 2.24 NCCL has no ring to fall back to: all-gather and reduce-scatter (FSDP, ZeRO) have no algorithm "
            "left and fail."
        )
        yield finding("env.value.token", severity, name, value, message, "Unset NCCL_ALGO, or add Ring.")


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


def _token(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    allowed, exact, effect = _TOKENS[name]
    if name == "NCCL_DEBUG" and version and version < _ATTN_SINCE:
        allowed = tuple(each for each in allowed if each != "ATTN")
    if value in allowed or (not exact and value.upper() in allowed) or not value:
        return
    case = "case counts, " if exact and value.upper() in allowed else ""
    yield finding(
        "env.value.token", Severity.WARN, name, value, f"Not one of {', '.join(allowed)} ({case}so {effect}).",
        f"Use {' or '.join(allowed)}, or unset it.",
    )  # fmt: skip


def _default_mode(version: Version | None) -> str:
    return "GROUP" if version and version < (2, 9, 0) else "PARALLEL"


def _launch_mode(name: str, value: str, version: Version | None) -> Iterator[Finding]:
    """Compared by strcmp up to 2.12, in any case since 2.13; what else it is launches in the default mode.

    That mode was GROUP up to 2.8, and is PARALLEL since (NCCL src/init.cc).
    """
    default = _default_mode(version)
    exact = version is not None and version < (2, 13, 0)
    mode = value.upper()
    if not value or mode == default or (mode in ("PARALLEL", "GROUP") and (not exact or value == mode)):
        return
    case = "case counts, " if mode in ("PARALLEL", "GROUP") else ""
    yield finding(
        "env.value.token", Severity.WARN, name, value,
        f"Not one of PARALLEL, GROUP ({case}so NCCL ignores it and launches in {default} mode).",
        "Use PARALLEL or GROUP, or unset it.",
    )  # fmt: skip


def _list(name: str, value: str) -> Iterator[Finding]:
    if len(value) <= 1:
        message = "NCCL ignores a value of a single character or none, and chooses by itself."
        if name == "NCCL_IB_HCA":
            message = "An empty list matches every device, as if it were not set."
        if name != "NCCL_IB_HCA" or not value:
            yield finding("env.value.list", Severity.INFO, name, value, message, f"Unset {name}.")
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
        yield finding(
            "env.value.list", Severity.WARN, name, value, "; ".join(problems) + ".",
            f"Write {name}={_clean(value)}.",
        )  # fmt: skip


def _clean(value: str) -> str:
    sign = "^" if value.startswith("^") else ""
    exact = "=" if value.removeprefix("^").startswith("=") else ""
    names = [entry.strip().lstrip("^=") for entry in re.split(r"[,;]", value)]
    return sign + exact + ",".join(name for name in names if name)
