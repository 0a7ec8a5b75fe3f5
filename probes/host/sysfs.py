"""Small files in /sys and /proc. Every attribute is optional: if it cannot be read, the result is None.

Specification: Linux Documentation/filesystems/sysfs.rst (one value per file). If a driver lacks an attribute, the file
is missing, or reading it returns EINVAL, EOPNOTSUPP or EIO. All of these mean "unknown", never zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from probes.host.protocol import Host

T = TypeVar("T")

NAME = re.compile(r"(?!\.{1,2}$)[\w.:@+-]{1,128}", re.ASCII)
"""Names from the machine that may become part of a path; they cannot lead out of the folder."""

BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A PCI function in sysfs form: "0000:1b:00.0"."""

_DECIMAL = re.compile(r"-?\d{1,20}", re.ASCII)  # digits of the largest 64-bit number
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,16}")


def attempt(query: Callable[..., T], *arguments: str | int) -> T | None:
    """Return the host's answer to a query; None if it refuses or has none."""
    try:
        return query(*arguments)
    except OSError:
        return None


def text(host: Host, path: str) -> str | None:
    """Return the file's content, stripped; None if it cannot be read or is empty."""
    return (attempt(host.read_text, path) or "").strip(" \t\r\n\0") or None


def number(host: Host, path: str) -> int | None:
    """Return the integer in a file, decimal or hexadecimal (0x)."""
    return parse_number(text(host, path))


def parse_number(value: str | None) -> int | None:
    """Parse an integer as the kernel prints it; None for any other text."""
    if value and _DECIMAL.fullmatch(value):
        return int(value)
    if value and _HEXADECIMAL.fullmatch(value):
        return int(value, 16)
    return None


def names(host: Host, path: str) -> tuple[str, ...]:
    """Return the names in a folder that are safe in a path; empty if the folder cannot be listed."""
    return tuple(name for name in attempt(host.list_dir, path) or () if NAME.fullmatch(name))


def target_name(host: Host, path: str) -> str | None:
    """Return the last path component of a link's target: the driver of .../driver, the group of .../iommu_group."""
    target = attempt(host.resolve, path)
    return target.rpartition("/")[2] if target else None


def bus_id(host: Host, path: str) -> str | None:
    """Return the last PCI function in the target of a link, which is in /sys/devices; None if there is none."""
    parts = [part for part in (attempt(host.resolve, path) or "").split("/") if BUS_ID.fullmatch(part)]
    return parts[-1] if parts else None


def fields(content: str | None, separator: str = ":") -> dict[str, str]:
    """Parse lines of "key: value"; if a key is repeated, its first value is used."""
    result: dict[str, str] = {}
    for line in (content or "").splitlines():
        key, colon, value = line.partition(separator)
        if colon:
            result.setdefault(key.strip(), value.strip())
    return result
