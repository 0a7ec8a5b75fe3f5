"""Small files of /sys and /proc, where every attribute is optional: one that cannot be read is None.

Specification: Linux Documentation/filesystems/sysfs.rst (one value per file). A driver that lacks an attribute leaves
the file out, or answers EINVAL, EOPNOTSUPP or EIO when it is read; all of these mean "unknown", never zero.
"""

from __future__ import annotations

import re

from probes.host.protocol import Host

NAME = re.compile(r"(?!\.{1,2}$)[\w.:@+-]{1,128}", re.ASCII)
"""What may become part of a path: text from the machine never leads out of the folder it was found for."""

BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI function as sysfs spells it: "0000:1b:00.0"."""

_DECIMAL = re.compile(r"-?\d{1,20}", re.ASCII)  # as many digits as the largest 64-bit number
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,16}")


def text(host: Host, path: str) -> str | None:
    """The file's content without surrounding white space; None where it cannot be read or is empty."""
    try:
        return host.read_text(path).strip(" \t\r\n\0") or None
    except OSError:
        return None


def number(host: Host, path: str) -> int | None:
    """The file's whole number, decimal or 0x."""
    return parse_number(text(host, path))


def parse_number(value: str | None) -> int | None:
    """A whole number as the kernel prints one; None for anything else."""
    if value and _DECIMAL.fullmatch(value):
        return int(value)
    if value and _HEXADECIMAL.fullmatch(value):
        return int(value, 16)
    return None


def names(host: Host, path: str) -> tuple[str, ...]:
    """Names in a folder that may be used in a path; none where it cannot be listed."""
    try:
        return tuple(name for name in host.list_dir(path) if NAME.fullmatch(name))
    except OSError:
        return ()


def target(host: Host, path: str) -> str | None:
    """Where a link leads, None where there is none."""
    try:
        return host.resolve(path)
    except OSError:
        return None


def target_name(host: Host, path: str) -> str | None:
    """The last part of where a link leads: the driver of .../driver, the group of .../iommu_group."""
    found = target(host, path)
    return found.rpartition("/")[2] if found else None


def usable(host: Host, path: str) -> bool | None:
    """Whether this process may open a device node; None where that cannot be asked."""
    try:
        return host.usable(path)
    except OSError:
        return None


def bus_id(path: str | None) -> str | None:
    """The PCI function nearest to the end of a /sys/devices path."""
    found = [part for part in (path or "").split("/") if BUS_ID.fullmatch(part)]
    return found[-1] if found else None


def fields(content: str | None, separator: str = ":") -> dict[str, str]:
    """Lines of "key: value" as a dict; the first of equal keys counts."""
    found: dict[str, str] = {}
    for line in (content or "").splitlines():
        key, colon, value = line.partition(separator)
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found
