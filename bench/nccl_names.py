"""The table of NCCL's variables by release, from the libraries that NVIDIA publishes as wheels.

    python bench/nccl_names.py read     # one release after another: fetch, read, delete; goes on where it was stopped
    python bench/nccl_names.py table    # writes planner/nccl_env/data/nccl_env_names.tsv anew from what was read

What is needed: pip with an index, and 1 GB of disk for the one wheel at hand. A name counts as read by a release where
its library's code loads the address of the name: enumerators and texts that merely look like names are never loaded.
Which function receives it tells numbers (`ncclLoadParam`, whose second argument is the default) from texts. Rows
already in the table keep what the source of NCCL said of them (section of the documentation, default, reader).
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from planner.nccl_env import NcclName, Version, names, parse_version, version_text

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "planner/nccl_env/data/nccl_env_names.tsv"
KEPT = ROOT / ".cache/nccl_names"
PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")  # the newest CUDA has every name

_NAME = re.compile(rb"NCCL_[A-Z0-9_]+(?=\0)")
# lea of an address relative to the instruction: 48 or 4c, 8d, a ModRM byte of mode 00 and r/m 101 (Intel SDM 2.1.5)
_LEA = re.compile(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d]")
_LEA_BYTES = 7
_CALLS = (0xE8, 0xE9)  # call and jmp with a 32-bit distance
_NEAR_BYTES = 120  # how far behind the name its call may stand: arguments are set in between
_BEFORE_BYTES = 45  # and how far before it
_FUNCTION = 2  # STT_FUNC
# mov esi, imm32; mov rsi, imm32 with its sign; xor esi, esi; mov rsi, imm64; or rsi, -1
_SECOND = re.compile(rb"\xbe(.{4})|\x48\xc7\xc6(.{4})|(\x31\xf6)|\x48\xbe(.{8})|\x48?\x83\xce\xff", re.DOTALL)
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT (nccl.h)


class Section(NamedTuple):
    """One section of an ELF file."""

    address: int
    offset: int
    size_bytes: int


def sections(data: bytes) -> dict[str, Section]:
    """The sections of a 64-bit little-endian ELF file by name."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (headers,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, headers + index * size) for index in range(count)]
    found = {}
    for name, _kind, _flags, address, offset, length in rows:
        start = rows[names][4] + name
        title = data[start : data.index(b"\0", start)].decode()
        found[title] = Section(address=address, offset=offset, size_bytes=length)
    return found


def functions(data: bytes, parts: dict[str, Section]) -> dict[int, str]:
    """Mangled names of functions by address; empty for a stripped library."""
    if ".symtab" not in parts:
        return {}
    table, texts = parts[".symtab"], parts[".strtab"]
    found: dict[int, str] = {}
    for offset in range(table.offset, table.offset + table.size_bytes, 24):
        name, info, _other, _section, value, _size = struct.unpack_from("<IBBHQQ", data, offset)
        if info & 15 == _FUNCTION:
            start = texts.offset + name
            found.setdefault(value, data[start : data.index(b"\0", start)].decode("ascii", "replace"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How a library reads one name."""

    kind: str  # "integer", "text" or "" (not told)
    default: str = ""  # of an integer, where the code shows it; "auto": a communicator's configuration decides


def names_of_library(data: bytes) -> dict[str, Read]:
    """Names of variables that the library's code loads."""
    parts = sections(data)
    text, constants = parts[".text"], parts[".rodata"]
    body = data[constants.offset : constants.offset + constants.size_bytes]
    wanted = {constants.address + match.start(): match.group().decode() for match in _NAME.finditer(body)}
    known = functions(data, parts)
    code = data[text.offset : text.offset + text.size_bytes]
    sites: dict[str, list[Read]] = {}
    for match in _LEA.finditer(code):
        start = match.start()
        if start + _LEA_BYTES > len(code):
            break
        target = text.address + start + _LEA_BYTES + struct.unpack_from("<i", code, start + 3)[0]
        if target in wanted:
            sites.setdefault(wanted[target], []).append(_read_at(code, start, text.address, known))
    found = {}
    for name, reads in sites.items():
        kind = next((read.kind for read in reads if read.kind), "")
        shown = Counter(read.default for read in reads if read.default)
        found[name] = Read(kind=kind, default=max(shown, key=shown.__getitem__, default=""))
    return found


def _read_at(code: bytes, start: int, address: int, known: Mapping[int, str]) -> Read:
    for at in range(start + _LEA_BYTES, min(start + _NEAR_BYTES, len(code) - 5)):
        if code[at] in _CALLS:
            called = known.get(address + at + 5 + struct.unpack_from("<i", code, at + 1)[0])
            if called is not None:
                number = "ncclLoadParam" in called
                return Read(kind="integer" if number else "text", default=_default(code, start, at) if number else "")
    return Read(kind="")


def _default(code: bytes, start: int, end: int) -> str:
    """What is put into the second argument's register nearest to the name; "" where it is no constant."""
    first = max(0, start - _BEFORE_BYTES)
    shown: list[tuple[int, int]] = []
    for match in _SECOND.finditer(code, first, end):
        low, wide, zero, whole = match[1], match[2], match[3], match[4]
        if low is not None:
            value = int.from_bytes(low, "little")
        elif wide is not None or whole is not None:
            value = int.from_bytes(whole if wide is None else wide, "little", signed=True)
        else:
            value = 0 if zero is not None else -1
        shown.append((abs(match.start() - start), value))
    if not shown:
        return ""
    value = min(shown)[1]
    return "auto" if value == _UNDEFINED else str(value)


def read_release(package: str, version: str) -> dict[str, Read]:
    """The names in the library of one release, whose wheel pip fetches for the length of this call."""
    with tempfile.TemporaryDirectory(prefix="nccl-wheel-") as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", folder,
             "--only-binary", ":all:", "--platform", "manylinux_2_27_x86_64", "--platform", "manylinux_2_18_x86_64",
             "--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64", f"{package}=={version}"],
            check=True,
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if Path(name).name.startswith("libnccl.so")]
            return names_of_library(archive.read(member))


def read_all() -> None:
    """Reads every release on the index that was not read yet; one wheel lies on the disk at a time."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for version, (package, exact) in sorted(published().items()):
        kept = KEPT / f"{version_text(version)}.json"
        if kept.exists():
            continue
        found = read_release(package, exact)
        rows = {name: [read.kind, read.default] for name, read in found.items()}
        kept.write_text(json.dumps(rows, indent=0, sort_keys=True), encoding="utf-8")
        print(f"{package} {exact}: {len(found)} names")


def published() -> dict[Version, tuple[str, str]]:
    """The releases on the index, each with a package that carries it and that package's exact version."""
    found: dict[Version, tuple[str, str]] = {}
    for package in PACKAGES:
        for exact in releases_on_index(package):
            found.setdefault(parse_version(exact), (package, exact))
    return found


def releases_on_index(package: str, timeout_seconds: float = 120.0) -> tuple[str, ...]:
    """A package's versions, as pip's index has them; empty where there is no such index.

    Raises OSError and subprocess.SubprocessError where pip cannot be run or does not answer.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package],
        capture_output=True, text=True, timeout=timeout_seconds, check=False,
    )  # fmt: skip
    line = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return tuple(version.strip() for version in line[1].split(",")) if line else ()


def merged(known: Mapping[str, NcclName], seen: Mapping[Version, Mapping[str, Read]]) -> dict[str, NcclName]:
    """The table's rows with what the libraries say: `seen` holds the names by release.

    A row's own first and last release stand where the source's tags gave them (there are more tags than wheels).
    """
    newest = max(seen)
    by_name: dict[str, list[Version]] = {}
    for version in sorted(seen):
        for name in seen[version]:
            by_name.setdefault(name, []).append(version)
    rows = dict(known)
    for name, versions in by_name.items():
        old = rows.get(name)
        kind = next((seen[each][name].kind for each in reversed(versions) if seen[each][name].kind), "")
        default = "unset" if kind == "text" else seen[versions[-1]][name].default
        if old is not None and old.reader == "libnccl":  # no source says more of it
            old = old._replace(kind=kind, default=default)
        elif old is None or old.status == "other":
            first = None if versions[0] == min(seen) else versions[0]
            old = NcclName(
                name=name, status="current", first=first, last=None, doc_class="internal", kind=kind,
                default=default, reader="libnccl",
            )  # fmt: skip
        if versions[-1] == newest:
            rows[name] = old._replace(status="current", last=None, kind=old.kind or kind)
        else:
            rows[name] = old._replace(status="removed", last=max(versions[-1], old.last or versions[-1]), kind="")
    for name, row in known.items():
        if row.status == "current" and name not in by_name:
            print(f"{name}: in no library read, {row.reader}", file=sys.stderr)
    return rows


def write_table() -> None:
    """Writes the table anew; the rows of other software and the comments above them stay."""
    seen = {
        parse_version(kept.stem): {
            name: Read(kind=kind, default=default)
            for name, (kind, default) in json.loads(kept.read_text(encoding="utf-8")).items()
        }
        for kept in KEPT.glob("*.json")
    }
    if not seen:
        raise SystemExit(f"nothing in {KEPT}: run `python bench/nccl_names.py read` first")
    head = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    head = [line for line in head if not line.startswith(("# newest:", "# read on:", "# libraries:"))]
    stamps = [
        f"# newest: {version_text(max(seen))}",
        f"# read on: {datetime.now(UTC).date().isoformat()}",
        f"# libraries: {' '.join(version_text(version) for version in sorted(seen))}",
    ]
    rows = merged(names(), seen)
    body = []
    for _, row in sorted(rows.items()):
        first, last = (version_text(each) if each else "" for each in (row.first, row.last))
        columns = (row.name, row.status, first, last, row.doc_class, row.kind, row.default, row.reader)
        body.append("\t".join(columns))
    TABLE.write_text("\n".join((*head[:-1], *stamps, head[-1], *body)) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("read", "table"))
    if parser.parse_args().do == "read":
        read_all()
    else:
        write_table()


if __name__ == "__main__":
    main()
