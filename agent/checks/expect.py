"""Expectations: what a node, or every node of a pool, must have. agent.checks.expect_checks judges nodes by them.

`--expect gpus=8,hcas=8,nvlink=NV18,gdr=on`, or the same as a YAML mapping in a file. The gate by itself can only say
what is wrong with what it finds; whether a node has all that it was bought with, its owner has to say.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from agent.base import units
from agent.checks.expect_checks import UNLIMITED, checks_of, settled
from agent.checks.verdict import GateError
from contracts import bounded
from contracts.finding import Finding
from probes.api import Snapshot
from topology.graph import NodeTopology

MOST_BYTES = 1 << 16  # a file of a dozen lines
MOST_NAMES = 64
RATE = "gigabits a second of one device: 400, 200Gb/s, or of those of a name: mlx5_[0-7]:400"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A value for every RDMA device, or for those whose name matches a shell-style pattern."""

    pattern: str = ""
    value: float

    @property
    def prefix(self) -> str:
        """The pattern as one types it before the value."""
        return f"{self.pattern}:" if self.pattern else ""

    def selects(self, device: str) -> bool:
        """Whether the value holds for the device."""
        return not self.pattern or fnmatchcase(device, self.pattern)


def _form(pattern: str, allowed: str, made: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """A reader of texts of this form in any case; `allowed` says which. It raises ValueError.

    The schema of the Helm chart (deploy/chart/values.schema.json) has the same forms.
    """

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
    count = f"; for a number of GPUs write gpus={text}" if text.isdigit() else ""
    allowed = f"part of a GPU's model as nvidia-smi prints it, letters in it: H100{count}"
    return str(_form(r"(?=.*[A-Z])[ -~]{1,64}", allowed)(text))


_count = _form(r"\d{1,3}|10[01]\d|102[0-4]", "a number from 0 to 1024", int)
_gigabits = _form(
    r"0*[1-9]\d{0,4}\s*(?:Gb/s|Gbps|Gbit/s|Gb|G)?", RATE, lambda t: int(re.findall(r"\d+", t)[0]) * 1e9 / 8
)
_name = _form(r"(?!\d+$)[A-Z0-9_.:@*?-]{1,64}",
              "a network interface's name, letters in it, * and ? stand for others: net1, rail*")  # fmt: skip
_device = _form(r"[A-Z0-9_.*?\[\]!-]{1,64}",
                "[DEVICE:]VALUE; * ? and [0-7] stand for parts of a device's name: mlx5_[0-7]:400")  # fmt: skip


def _selected(read: Callable[[str], float]) -> Callable[[str], Selected]:
    """A reader of [PATTERN:]VALUE."""

    def selected(text: str) -> Selected:
        pattern, colon, value = text.rpartition(":")
        return Selected(pattern=_device(pattern) if colon else "", value=read(value))

    return selected


def _each(read: Callable[[str], Any]) -> BeforeValidator:
    return BeforeValidator(lambda texts: tuple(read(text) for text in texts))


_LINKS = _form(r"(?:NV)?0?[1-9]\d?", "NVLinks between two GPUs as nvidia-smi prints them: NV1 to NV99",
               lambda text: int(text.upper().removeprefix("NV")))  # fmt: skip
_ON = _form("on", "on; leave it out where it is not needed", bool)
_DRIVER = _form(r"\d{1,6}(?:\.\d{1,6}){0,3}", "a release of NVIDIA's driver, at least: 570.86")


class Expectation(BaseModel):
    """What must be there; None and empty ask nothing. Every value is read from text, as a person types it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Annotated[int | None, BeforeValidator(_count)] = None  # that answer, at least
    gpu: Annotated[str | None, BeforeValidator(_model)] = None  # words of every GPU's model: "H100"
    nvlink: Annotated[int | None, BeforeValidator(_LINKS)] = None  # between every two GPUs, at least: NV18
    hcas: Annotated[tuple[Selected, ...], _each(_selected(_count))] = ()  # with an ACTIVE port, at least
    rate: Annotated[tuple[Selected, ...], _each(_selected(_gigabits))] = ()  # bytes/s of each of these, at least
    gdr: Annotated[bool | None, BeforeValidator(_ON)] = None  # GPUDirect RDMA from every GPU to its nearest NIC
    memlock: Annotated[int | str | None, BeforeValidator(_limit)] = None  # bytes at least, or "unlimited"
    shm: Annotated[int | None, BeforeValidator(_size)] = None  # bytes of /dev/shm, at least
    interface: Annotated[tuple[str, ...], _each(_name)] = ()  # up, running and with an address; patterns
    driver: Annotated[str | None, BeforeValidator(_DRIVER)] = None  # release of NVIDIA's driver, at least: "570.86"

    def settle(self, checks: Iterable[Finding], snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
        """The checks of one host with those of this expectation, and what it answers that a scan alone cannot."""
        return settled((*checks, *checks_of(self, snapshot, node, snapshot.hostname)))


KEYS = tuple(Expectation.model_fields)
_LISTS = tuple(name for name, field in Expectation.model_fields.items() if field.default == ())
_NAMES = ("gpu", "interface")  # of these, a number or `on` without quotes in YAML is a mistake


def parse(words: Sequence[str]) -> Expectation:
    """`--expect KEY=VALUE,...`, as often as wanted; a repeated interface is one more. Raises GateError."""
    found: dict[str, list[str]] = {}
    for word in words:
        for part in filter(None, (piece.strip() for piece in word.split(","))):
            key, equals, value = part.partition("=")
            if not equals:
                raise GateError(f"--expect {part}: must be KEY=VALUE, KEY one of {', '.join(KEYS)}")
            found.setdefault(key.strip(), []).append(value.strip())
    return _made(found, "--expect")


def read_file(path: Path) -> Expectation:
    """The same as a YAML mapping; a file with nothing but comments asks nothing. Raises GateError."""
    from contracts.yaml_text import YamlTextError, load_all

    where = f"--expect-file {path}"
    try:
        documents = load_all(bounded.read(path, MOST_BYTES).decode("utf-8"), most_aliases=0)
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
        found[str(key)] = [_plain(one) for one in values]
    return _made(found, where)


def _plain(value: object) -> str:
    """A scalar as one would have typed it: YAML reads `on` as true."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _made(found: Mapping[str, Sequence[str]], where: str) -> Expectation:
    for key, values in found.items():
        if key in KEYS and key not in _LISTS and len(values) != 1:
            raise GateError(f"{where}: {key} stands {len(values)} times; only {', '.join(_LISTS)} may be repeated")
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
        close = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise GateError(f"{where}: {key[:64]}: no such expectation; one of {', '.join(KEYS)}{hint}")
    shown = ",".join(found[key])[:64]
    raise GateError(f"{where}: {key}={shown}: must be {first['ctx']['error']}")


def expectation(words: Sequence[str], path: Path | None) -> Expectation | None:
    """What the file says, with what the words say in its place; None where there is neither. Raises GateError."""
    from_words = parse(words) if words else None
    file = read_file(path) if path is not None else None
    if from_words is None or file is None:
        return from_words or file
    return file.model_copy(update={key: getattr(from_words, key) for key in from_words.model_fields_set})
