"""Write the table of NCCL's variables by release, from the libraries that NVIDIA publishes as wheels.

    python bench/nccl_names.py read     # download, read and delete each release; continues after an interruption
    python bench/nccl_names.py table    # write planner/nccl_env/data/nccl_env_names.tsv from the results of `read`

Requires pip with an index, and 1 GB of disk for one wheel at a time. A release reads a variable if the code of its
library loads the address of the name; names of enumerators and other texts are not loaded in this way. The function
that gets the name shows its type: `ncclLoadParam` reads numbers, and its second argument is the default. Rows of the
table keep their values from the source of NCCL (section of the documentation, default, reader).
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
CACHE = ROOT / ".cache/nccl_names"
PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")  # the newest CUDA has every name

_NAME = re.compile(rb"NCCL_[A-Z0-9_]+(?=\0)")
# lea of an address relative to the instruction: 48 or 4c, 8d, a ModRM byte of mode 00 and r/m 101 (Intel SDM 2.1.5)
_LEA = re.compile(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d]")
_LEA_BYTES = 7
_CALLS = (0xE8, 0xE9)  # call and jmp with a 32-bit distance
_NEAR_BYTES = 120  # largest distance from the load of the name to the call; arguments are set in between
_BEFORE_BYTES = 45  # largest distance before the load of the name at which the second argument is set
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
    """Return the sections of a 64-bit little-endian ELF file by name."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (headers,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, headers + index * size) for index in range(count)]
    result = {}
    for name, _kind, _flags, address, offset, length in rows:
        start = rows[names][4] + name
        title = data[start : data.index(b"\0", start)].decode()
        result[title] = Section(address=address, offset=offset, size_bytes=length)
    return result


def functions(data: bytes, parts: dict[str, Section]) -> dict[int, str]:
    """Return the mangled names of functions by address; empty for a stripped library."""
    if ".symtab" not in parts:
        return {}
    table, texts = parts[".symtab"], parts[".strtab"]
    names: dict[int, str] = {}
    for offset in range(table.offset, table.offset + table.size_bytes, 24):
        name, info, _other, _section, value, _size = struct.unpack_from("<IBBHQQ", data, offset)
        if info & 15 == _FUNCTION:
            start = texts.offset + name
            names.setdefault(value, data[start : data.index(b"\0", start)].decode("ascii", "replace"))
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How a library reads one name."""

    kind: str  # "integer", "text" or "" (unknown)
    default: str = ""  # of an integer, if the code shows it; "auto": the configuration of the communicator decides


def names_of_library(data: bytes) -> dict[str, Read]:
    """Return the names of variables that the code of the library loads."""
    parts = sections(data)
    text, constants = parts[".text"], parts[".rodata"]
    body = data[constants.offset : constants.offset + constants.size_bytes]
    constants_by_address = {constants.address + match.start(): match.group().decode() for match in _NAME.finditer(body)}
    called = functions(data, parts)
    code = data[text.offset : text.offset + text.size_bytes]
    sites: dict[str, list[Read]] = {}
    for match in _LEA.finditer(code):
        start = match.start()
        if start + _LEA_BYTES > len(code):
            break
        target = text.address + start + _LEA_BYTES + struct.unpack_from("<i", code, start + 3)[0]
        if target in constants_by_address:
            sites.setdefault(constants_by_address[target], []).append(_read_at(code, start, text.address, called))
    names = {}
    for name, reads in sites.items():
        kind = next((site.kind for site in reads if site.kind), "")
        defaults = Counter(site.default for site in reads if site.default)
        names[name] = Read(kind=kind, default=max(defaults, key=defaults.__getitem__, default=""))
    return names


def _read_at(code: bytes, start: int, address: int, names: Mapping[int, str]) -> Read:
    for at in range(start + _LEA_BYTES, min(start + _NEAR_BYTES, len(code) - 5)):
        if code[at] in _CALLS:
            called = names.get(address + at + 5 + struct.unpack_from("<i", code, at + 1)[0])
            if called is not None:
                number = "ncclLoadParam" in called
                return Read(kind="integer" if number else "text", default=_default(code, start, at) if number else "")
    return Read(kind="")


def _default(code: bytes, start: int, end: int) -> str:
    """Return the constant of the second argument that is set nearest to the name; "" if there is none."""
    first = max(0, start - _BEFORE_BYTES)
    values: list[tuple[int, int]] = []
    for match in _SECOND.finditer(code, first, end):
        low, wide, zero, number = match[1], match[2], match[3], match[4]
        if low is not None:
            value = int.from_bytes(low, "little")
        elif wide is not None or number is not None:
            value = int.from_bytes(number if wide is None else wide, "little", signed=True)
        else:
            value = 0 if zero is not None else -1
        values.append((abs(match.start() - start), value))
    if not values:
        return ""
    value = min(values)[1]
    return "auto" if value == _UNDEFINED else str(value)


def read_release(package: str, version: str) -> dict[str, Read]:
    """Return the names in the library of one release. pip downloads its wheel to a temporary folder."""
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
    """Read every release of the index that has not been read yet. Only one wheel is on the disk at a time."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for version, (package, exact) in sorted(published().items()):
        file = CACHE / f"{version_text(version)}.json"
        if file.exists():
            continue
        names = read_release(package, exact)
        rows = {name: [entry.kind, entry.default] for name, entry in names.items()}
        file.write_text(json.dumps(rows, indent=0, sort_keys=True), encoding="utf-8")
        print(f"{package} {exact}: {len(names)} names")


def published() -> dict[Version, tuple[str, str]]:
    """Return the releases on the index, each with a package that has it and the exact version of this package."""
    releases: dict[Version, tuple[str, str]] = {}
    for package in PACKAGES:
        for exact in releases_on_index(package):
            releases.setdefault(parse_version(exact), (package, exact))
    return releases


def releases_on_index(package: str, timeout_seconds: float = 120.0) -> tuple[str, ...]:
    """Return the versions of a package on pip's index; empty if the index cannot be read.

    Raises OSError or subprocess.SubprocessError if pip cannot be run or does not answer in time.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", package],
        capture_output=True, text=True, timeout=timeout_seconds, check=False,
    )  # fmt: skip
    line = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return tuple(version.strip() for version in line[1].split(",")) if line else ()


def merged(rows_before: Mapping[str, NcclName], releases: Mapping[Version, Mapping[str, Read]]) -> dict[str, NcclName]:
    """Merge the names that the libraries read, by release (`releases`), into the rows of the table.

    First and last releases that came from the tags of the source stay, because there are more tags than wheels.
    """
    newest = max(releases)
    by_name: dict[str, list[Version]] = {}
    for version in sorted(releases):
        for name in releases[version]:
            by_name.setdefault(name, []).append(version)
    rows = dict(rows_before)
    for name, versions in by_name.items():
        old = rows.get(name)
        kind = next((releases[each][name].kind for each in reversed(versions) if releases[each][name].kind), "")
        default = "unset" if kind == "text" else releases[versions[-1]][name].default
        if old is not None and old.reader == "libnccl":  # the source of NCCL has no entry for it
            old = old._replace(kind=kind, default=default)
        elif old is None or old.status == "other":
            first = None if versions[0] == min(releases) else versions[0]
            old = NcclName(
                name=name, status="current", first=first, last=None, doc_class="internal", kind=kind,
                default=default, reader="libnccl",
            )  # fmt: skip
        if versions[-1] == newest:
            rows[name] = old._replace(status="current", last=None, kind=old.kind or kind)
        else:
            rows[name] = old._replace(status="removed", last=max(versions[-1], old.last or versions[-1]), kind="")
    for name, row in rows_before.items():
        if row.status == "current" and name not in by_name:
            print(f"{name}: not found in any library; reader {row.reader}", file=sys.stderr)
    return rows


def write_table() -> None:
    """Write the table again. Rows of other software and the comments at the top stay."""
    releases = {
        parse_version(file.stem): {
            name: Read(kind=kind, default=default)
            for name, (kind, default) in json.loads(file.read_text(encoding="utf-8")).items()
        }
        for file in CACHE.glob("*.json")
    }
    if not releases:
        raise SystemExit(f"{CACHE} is empty: run `python bench/nccl_names.py read` first")
    head = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    head = [line for line in head if not line.startswith(("# newest:", "# read on:", "# libraries:"))]
    stamps = [
        f"# newest: {version_text(max(releases))}",
        f"# read on: {datetime.now(UTC).date().isoformat()}",
        f"# libraries: {' '.join(version_text(version) for version in sorted(releases))}",
    ]
    rows = merged(names(), releases)
    body = []
    for _, row in sorted(rows.items()):
        first, last = (version_text(each) if each else "" for each in (row.first, row.last))
        columns = (row.name, row.status, first, last, row.doc_class, row.kind, row.default, row.reader)
        body.append("\t".join(columns))
    TABLE.write_text("\n".join((*head[:-1], *stamps, head[-1], *body)) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("read", "table"))
    if parser.parse_args().do == "read":
        read_all()
    else:
        write_table()


if __name__ == "__main__":
    main()
