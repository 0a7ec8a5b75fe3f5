"""Expectations: what a node, or every node of a pool, must have, and the checks of a node against them.

`--expect gpus=8,hcas=8,nvlink=NV18,gdr=on`, or the same as a YAML mapping in a file. The gate alone can only report
problems of the devices it finds. Only the owner can state which devices the node should have. A missing device or a
lower value fails the check. A value that could not be read is unknown, and the check is required.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from agent.base import units
from agent.checks.host_checks import EXPECT_CODES, gdrdma_possible, no_gpu_read, no_hca_read
from agent.checks.verdict import GateError
from contracts import bounded
from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Absent, Snapshot, finding
from probes.gpu.compare import visible_gpus
from probes.gpu.facts import Gpu, GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.limits.probe import size as limit_words
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort
from topology.check import by_gdr, farthest_gdr
from topology.graph import NodeTopology, nvlinks

MOST_BYTES = 1 << 16  # a file of a dozen lines
MOST_NAMES = 64
UNLIMITED = "unlimited"
_FORMS = read_table(__file__, "expect.toml")
_TEXTS = read_table(__file__, "findings.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A value for every RDMA device, or for those whose name matches a shell-style pattern."""

    pattern: str = ""
    value: float

    @property
    def prefix(self) -> str:
        """Return the pattern as a user types it before the value."""
        return f"{self.pattern}:" if self.pattern else ""

    def selects(self, device: str) -> bool:
        """Return whether the value applies to the device."""
        return not self.pattern or fnmatchcase(device, self.pattern)


def _form(name: str, made: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a parser for texts of a form in expect.toml. The parser raises ValueError that says what is allowed."""
    pattern, allowed = _FORMS[name]

    def read(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.IGNORECASE | re.ASCII):
            raise ValueError(allowed)
        return made(text)

    return read


def _size(text: str, allowed: str = units.SIZE_WORDS) -> int:
    value = units.parse_size(text)
    if value is None:
        raise ValueError(allowed)
    return value


def _limit(text: str) -> int | str:
    close = "; did you mean unlimited?" if difflib.get_close_matches(text.lower(), [UNLIMITED]) else ""
    return UNLIMITED if text.lower() == UNLIMITED else _size(text, f"unlimited, or {units.SIZE_WORDS}{close}")


def _model(text: str) -> str:
    if text.isdigit():
        raise ValueError(f"{_FORMS['model'][1]}; for a number of GPUs write gpus={text}")
    return str(_form("model")(text))


_device, _driver_form, _count, _on = _form("device"), _form("driver"), _form("count", int), _form("on", bool)
_gigabits = _form("rate", lambda text: int(re.findall(r"\d+", text)[0]) * 1e9 / 8)
_links = _form("links", lambda text: int(text.upper().removeprefix("NV")))


def _selected(read: Callable[[str], float]) -> Callable[[str], Selected]:
    """Return a parser for [PATTERN:]VALUE."""

    def selected(text: str) -> Selected:
        pattern, colon, value = text.rpartition(":")
        return Selected(pattern=_device(pattern) if colon else "", value=read(value))

    return selected


def _each(read: Callable[[str], Any]) -> BeforeValidator:
    return BeforeValidator(lambda texts: tuple(read(text) for text in texts))


class Expectation(BaseModel):
    """What a node must have; None and empty require nothing. Every value is read from text, as a person types it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Annotated[int | None, BeforeValidator(_count)] = None  # minimum number of GPUs that answer
    gpu: Annotated[str | None, BeforeValidator(_model)] = None  # words that every GPU's model must contain: "H100"
    nvlink: Annotated[int | None, BeforeValidator(_links)] = None  # minimum between every two GPUs: NV18
    hcas: Annotated[tuple[Selected, ...], _each(_selected(_count))] = ()  # minimum number with an ACTIVE port
    rate: Annotated[tuple[Selected, ...], _each(_selected(_gigabits))] = ()  # minimum rate of each of these, bytes/s
    gdr: Annotated[bool | None, BeforeValidator(_on)] = None  # GPUDirect RDMA from every GPU to its nearest NIC
    memlock: Annotated[int | str | None, BeforeValidator(_limit)] = None  # minimum in bytes, or "unlimited"
    shm: Annotated[int | None, BeforeValidator(_size)] = None  # minimum size of /dev/shm in bytes
    interface: Annotated[tuple[str, ...], _each(_form("interface"))] = ()  # patterns: up, running, with an address
    driver: Annotated[str | None, BeforeValidator(_driver_form)] = None  # minimum NVIDIA driver release: "570.86"

    def settle(self, checks: Iterable[Finding], snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
        """Add the checks of this expectation to those of one host, and decide checks that a scan alone cannot."""
        return settled((*checks, *checks_of(self, snapshot, node, snapshot.hostname)))


KEYS = tuple(Expectation.model_fields)
_LISTS = tuple(name for name, field in Expectation.model_fields.items() if field.default == ())
_NAMES = ("gpu", "interface")  # for these, a number or unquoted `on` in YAML is a mistake


def parse(words: Sequence[str]) -> Expectation:
    """Parse repeated `--expect KEY=VALUE,...`; each repeated interface adds one. Raises GateError."""
    found: dict[str, list[str]] = {}
    for word in words:
        for part in filter(None, (piece.strip() for piece in word.split(","))):
            key, equals, value = part.partition("=")
            if not equals:
                raise GateError(f"--expect {part}: must be KEY=VALUE, KEY one of {', '.join(KEYS)}")
            found.setdefault(key.strip(), []).append(value.strip())
    return _made(found, "--expect")


def read_file(path: Path) -> Expectation:
    """Read expectations from a YAML mapping; a file with only comments contains none. Raises GateError."""
    from contracts.yaml_text import YamlTextError, load_all

    where = f"--expect-file {path}"
    try:
        documents = load_all(bounded.read(path, MOST_BYTES).decode("utf-8"), most_aliases=0, once=True)
    except OSError as error:
        raise GateError(f"{where}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise GateError(f"{where}: not UTF-8 text") from None
    except (bounded.TooLargeError, YamlTextError) as error:
        raise GateError(f"{where}: {error}") from None
    value = documents[0] if documents else None
    if len(documents) > 1 or not isinstance(value, dict | None):
        raise GateError(f"{where}: must be one mapping of {', '.join(KEYS)} to values")
    found: dict[str, list[str]] = {}
    for key, entry in (value or {}).items():
        values = entry if isinstance(entry, list) else [entry]
        misplaced = isinstance(entry, list) and key in KEYS and key not in _LISTS
        if misplaced or any(isinstance(one, list | dict) or one is None for one in values):
            raise GateError(f"{where}: {key}: must be one value; only {', '.join(_LISTS)} may be lists")
        if key in _NAMES and not all(isinstance(one, str) for one in values):
            raise GateError(f"{where}: {key}: must be text; put the name in quotes")
        # convert the scalar back to the text a user would type, because YAML reads `on` as true
        found[str(key)] = [("on" if one else "off") if isinstance(one, bool) else str(one) for one in values]
    return _made(found, where)


def _made(found: Mapping[str, Sequence[str]], where: str) -> Expectation:
    for key, values in found.items():
        if key in KEYS and key not in _LISTS and len(values) != 1:
            raise GateError(f"{where}: {key} is given {len(values)} times; only {', '.join(_LISTS)} may be repeated")
        if len(values) > MOST_NAMES:
            raise GateError(f"{where}: {key[:64]}: more than {MOST_NAMES} values")
    try:
        return Expectation.model_validate(
            {key: list(values) if key in _LISTS else values[0] for key, values in found.items()}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, KEYS, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise GateError(f"{where}: {key[:64]}: unknown key; allowed are {', '.join(KEYS)}{hint}")
    shown = ",".join(found[key])[:64]
    raise GateError(f"{where}: {key}={shown}: must be {first['ctx']['error']}")


def expectation(words: Sequence[str], path: Path | None) -> Expectation | None:
    """Merge the expectations of the file and the command line, which wins; None without both. Raises GateError."""
    from_words = parse(words) if words else None
    file = read_file(path) if path is not None else None
    if from_words is None or file is None:
        return from_words or file
    return file.model_copy(update={key: getattr(from_words, key) for key in from_words.model_fields_set})


# The checks of a node: one for each expectation.

Judgement = tuple[bool | None, str]  # whether it is met (None: unknown), and what the node has


def checks_of(expected: Expectation, snapshot: Snapshot, topology: NodeTopology, node: str) -> tuple[Finding, ...]:
    """Return one check per expectation: pass, fail, or unknown, which is then required."""
    checks = []
    for key, subject, value in _subjects(expected):
        probes, judge = _RULES[key]  # an expectation without a rule raises an error and cannot pass
        met, have = judge(snapshot, topology, value)
        checks.append(_check(node, subject, met, have, next(filter(None, (_why(snapshot, one) for one in probes)), "")))
    return tuple(checks)


def unread(expected: Expectation, node: str, why: str) -> tuple[Finding, ...]:
    """Return the same checks for a node of which nothing is known."""
    return tuple(_check(node, subject, None, why, "") for _, subject, _ in _subjects(expected))


def _subjects(expected: Expectation) -> Iterator[tuple[str, str, Any]]:
    """Return (key, "key=value" as a user types it, value) of each expectation."""
    for key, value in expected:
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None:
                yield key, f"{key}={_TYPED.get(key, str)(one)}", one


def _check(node: str, subject: str, met: bool | None, have: str, why: str) -> Finding:
    key, _, value = subject.partition("=")
    of_any = " rate" if key == "rate" and ":" not in value else ""
    case = " pass" if met else " unknown" if met is None else of_any
    check = finding(_TEXTS, EXPECT_CODES[0] + case, subject=subject, have=have, why=why or have, value=value)
    return replace(check, node=node, required=met is None)


def _why(snapshot: Snapshot, name: str) -> str:
    outcome = snapshot.outcomes.get(name)
    return str(getattr(outcome, "error", "") or getattr(outcome, "why", ""))


def _absent(snapshot: Snapshot, name: str) -> bool:
    """Return whether the probe found no device and the PCI bus, which could be read, shows none either."""
    unread = no_gpu_read(snapshot) if name == "gpu" else no_hca_read(snapshot)
    return isinstance(snapshot.outcomes.get(name), Absent) and not unread


# GPUs --------------------------------------------------------------------------------------------------------------


def _answering(snapshot: Snapshot) -> list[Gpu]:
    facts = snapshot.facts(GpuFacts)
    return [gpu for gpu in facts.gpus if gpu.error is None] if facts else []


def _gpu_count(snapshot: Snapshot) -> int | None:
    """Return the number of GPUs that answer and that CUDA_VISIBLE_DEVICES exposes to this process; None if unknown."""
    facts = snapshot.facts(GpuFacts)
    if facts is None or facts.driver_error:
        return 0 if _absent(snapshot, "gpu") else None
    count, (visible, _) = len(_answering(snapshot)), visible_gpus(facts)
    return count if visible is None else min(count, visible)


def _gpus(snapshot: Snapshot, _topology: NodeTopology, expected: int) -> Judgement:
    count = _gpu_count(snapshot)
    return _least(count, expected), f"{'an unknown number of' if count is None else count} GPUs answer"


def _gpu_model(snapshot: Snapshot, _topology: NodeTopology, expected: str) -> Judgement:
    """Compare whole words of the model name: L40 does not match L40S."""
    words = re.compile(rf"(?<![a-z0-9]){re.escape(expected)}(?![a-z0-9])", re.IGNORECASE)
    models = [gpu.name for gpu in _answering(snapshot)]
    odd = [model for model in models if not words.search(model or "")]
    unknown = _gpu_count(snapshot) is None or (not all(models) and not any(odd))
    met = None if unknown else bool(models) and not odd
    return met, ", ".join(dict.fromkeys(model or "unknown model" for model in models)) or "no GPU"


def _nvlink(snapshot: Snapshot, topology: NodeTopology, expected: int) -> Judgement:
    count = _gpu_count(snapshot)
    if count is None or (topology.gpus and not topology.nvlink_known):
        return None, "the NVLinks are unknown"
    usable = {gpu.name for gpu in topology.gpus if gpu.usable}
    links = [(f"{p.a}-{p.b}", p.label) for p in topology.pairs if p.a in usable and p.b in usable]
    if not links:
        return False, f"{count} GPUs: there is no pair to link"
    short = [(pair, label) for pair, label in links if nvlinks(label) < expected]
    unknown = [pair for pair, label in short if label == "N/A"]
    if unknown and len(unknown) == len(short):
        return None, f"the link of {', '.join(unknown[:4])} is unknown"
    if short:
        return False, units.some([f"{pair} {label}" for pair, label in short], most=4)
    return True, f"{len(links)} pairs have NV{expected} or more"


def _driver(snapshot: Snapshot, _topology: NodeTopology, expected: str) -> Judgement:
    facts = snapshot.facts(GpuFacts)
    if facts is None or facts.driver_version is None:
        return False if _gpu_count(snapshot) == 0 else None, "the driver is unknown"
    have, least = (tuple(map(int, re.findall(r"\d+", text)[:4])) for text in (facts.driver_version, expected))
    return have >= least, f"the driver is {facts.driver_version}"


# RDMA --------------------------------------------------------------------------------------------------------------


def _hca_ports(snapshot: Snapshot) -> dict[str, list[RdmaPort]] | None:
    """Return the ACTIVE ports of each RDMA device; None if the devices or a port could not be read."""
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return {} if _absent(snapshot, "rdma") else None
    if any(port.state is None for device in facts.devices for port in device.ports):
        return None
    return {
        device.name: [port for port in device.ports if port.state == "ACTIVE"]
        for device in facts.devices
        if device.kind in ("hca", "efa")
    }


def _hcas(snapshot: Snapshot, _topology: NodeTopology, expected: Selected) -> Judgement:
    ports = _hca_ports(snapshot)
    if ports is None:
        return None, "the RDMA devices are unknown"
    have = [name for name, active in ports.items() if active and expected.selects(name)]
    named = f" of {expected.pattern}" if expected.pattern else ""
    return len(have) >= expected.value, f"{len(have)} RDMA devices{named} have an ACTIVE port"


def _rates(snapshot: Snapshot, _topology: NodeTopology, expected: Selected) -> Judgement:
    """Check all ACTIVE devices, or the selected ones; a device selected by name that is not ACTIVE fails."""
    ports = _hca_ports(snapshot)
    if ports is None:
        return None, "the RDMA devices are unknown"
    mine = {name: sum(port.rate_bytes_per_second or 0.0 for port in active) or None
            for name, active in ports.items() if active and expected.selects(name)}  # fmt: skip
    slow = [f"{name} {units.bits(rate)}" for name, rate in mine.items() if rate is not None and rate < expected.value]
    slow += [f"{name} has no ACTIVE port" for name, active in ports.items()
             if not active and expected.pattern and expected.selects(name)]  # fmt: skip
    if slow or not mine:
        others = f" named {expected.pattern}" if expected.pattern else ""
        return False, ", ".join(slow) or f"no RDMA device{others} has an ACTIVE port"
    unknown = [name for name, rate in mine.items() if rate is None]
    return (None, f"the rate of {', '.join(unknown)} is unknown") if unknown else (True, "every device is as fast")


def _gdr(snapshot: Snapshot, topology: NodeTopology, _wanted: bool) -> Judgement:
    """Check that GPUDirect RDMA is installed and that NCCL's rules use it; None if either is unknown."""
    pci, rdma = snapshot.facts(PciFacts), snapshot.facts(RdmaFacts)
    if pci is None or (rdma is None and not _absent(snapshot, "rdma")):
        return None, "the PCI bus or the RDMA devices are unknown"
    if not gdrdma_possible((snapshot,)):
        if rdma is None:
            return False, "there is no RDMA device"
        if pci.peermem_loaded is False and pci.dmabuf_possible is False:
            return False, "nvidia_peermem is not loaded, and DMA-BUF is not possible"
        ports = [port.state for device in rdma.devices for port in device.ports]
        down = bool(ports) and not {"ACTIVE", None} & set(ports)
        return (False, "no RDMA device has an ACTIVE port") if down else (None, "GPUDirect RDMA is unknown")
    usable = {gpu.name for gpu in topology.gpus if gpu.usable}
    near = [one for one in topology.nearest_nic if one.gpu in usable]
    if not near or not all(one.decidable for one in near):
        return (None, "the path to the nearest NIC is unknown") if near else (False, "no GPU answers")
    host = snapshot.facts(HostinfoFacts)
    level = farthest_gdr(host.nccl_variables.get("NCCL_NET_GDR_LEVEL") if host else None)
    far = [f"{one.gpu} ({one.label})" for one in near if not by_gdr(one, level)]
    able = units.some(far, "not possible from ") or "possible from every GPU"
    return not far, f"GPUDirect RDMA is {able} to the nearest NIC"


# Limits, interfaces ------------------------------------------------------------------------------------------------


def _memlock(snapshot: Snapshot, _topology: NodeTopology, expected: int | str) -> Judgement:
    limits = snapshot.facts(LimitsFacts)
    if limits is None or not limits.memlock_known:
        return None, "memlock is unknown"
    have = limits.memlock_soft_bytes
    met = have is None or (isinstance(expected, int) and have >= expected)
    return met, f"memlock is {limit_words(have)}"


def _shm(snapshot: Snapshot, _topology: NodeTopology, expected: int) -> Judgement:
    limits = snapshot.facts(LimitsFacts)
    if limits is not None and limits.of_agent:
        return None, "the agent's own pod does not have the limits of a job's pod"
    have = limits.shm_size_bytes if limits else None
    return _least(have, expected), f"shared memory is {units.size(have)}"


def _interface(snapshot: Snapshot, _topology: NodeTopology, expected: str) -> Judgement:
    facts = snapshot.facts(InterfacesFacts)
    if facts is None:
        return None, "the interfaces are unknown"
    mine = [link for link in facts.interfaces if fnmatchcase(link.name, expected)]
    if not mine:
        return False, f"there are {', '.join(sorted(link.name for link in facts.interfaces)) or 'none'}"
    bad = [f"{link.name} {problem}" for link in mine if (problem := _lacks(link))]
    return not bad, ", ".join(bad) or f"{', '.join(link.name for link in mine)} up, with an address"


def _lacks(link: Interface) -> str:
    if link.up is False:
        return "is down"
    if link.running is False:
        return "has no carrier"
    return "" if link.addresses else "has no address"


def _least(have: int | None, expected: int) -> bool | None:
    return None if have is None else have >= expected


def _typed(value: int | str) -> str:
    """Format an amount as a user types it: "64GiB"."""
    if isinstance(value, str):
        return value
    scales = sorted(((scale, unit) for unit, scale in units.SIZES.items() if unit.endswith("B")), reverse=True)
    scale, unit = next(((scale, unit) for scale, unit in scales if value and value % scale == 0), (1, ""))
    return f"{value // scale}{unit if scale > 1 else ''}"


_RULES: dict[str, tuple[tuple[str, ...], Callable[[Snapshot, NodeTopology, Any], Judgement]]] = {
    "gpus": (("gpu",), _gpus), "gpu": (("gpu",), _gpu_model), "nvlink": (("gpu",), _nvlink),
    "hcas": (("rdma",), _hcas), "rate": (("rdma",), _rates), "gdr": (("pci", "rdma"), _gdr),
    "memlock": (("limits",), _memlock), "shm": (("limits",), _shm), "driver": (("gpu",), _driver),
    "interface": (("interfaces",), _interface),
}  # fmt: skip
"""Each key of an expectation: the probes whose failure says why it is unknown, and who judges it."""
_TYPED: dict[str, Callable[[Any], str]] = {
    "nvlink": lambda count: f"NV{count}", "hcas": lambda one: f"{one.prefix}{one.value:g}",
    "rate": lambda one: f"{one.prefix}{one.value * 8 / 1e9:g}", "gdr": lambda _: "on", "memlock": _typed, "shm": _typed,
}  # fmt: skip


def settled(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """Use the expectations of a node to decide checks that a scan alone cannot decide.

    If a node has exactly the expected number of GPUs or ACTIVE ports, none is missing: other devices on the bus are not
    assigned to it or not cabled. A larger number can include ports of another network, so an expected port may be down.
    """
    checks, met = tuple(checks), set()
    for check in checks:
        key, _, value = check.subject.partition("=")
        # the message of a met expectation begins with the actual number
        is_exact = check.message.startswith(f"{value.rpartition(':')[2]} ")
        if check.code == EXPECT_CODES[0] and check.status == "pass" and is_exact:
            met.add(key)
    mild = {code for key, code in (("gpus", "gpu.device.not_given"), ("hcas", "rdma.port.down")) if key in met}
    return tuple(
        replace(check, status=Status.INFO, required=False, message=f"{check.message} The expected number is present.")
        if check.code in mild and check.status in ("fail", "warn", "unknown") and check.evidence
        else check
        for check in checks
    )
