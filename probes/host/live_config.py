"""PCI configuration space of this machine, read whole once and then only where it may change.

A read goes to the device, word by word, about a microsecond each: 4096 bytes of fifty devices would cost every scan
longer than all its other questions. Where capabilities lie is fixed in the device; what they say is read each time.
"""

from __future__ import annotations

import os

from probes.pci.config import CONFIG_BYTES, changing

Identity = tuple[int, int]


class ConfigSpaces:
    """The spaces read so far, by path; a device with another identity is another device."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Identity, bytearray, tuple[tuple[int, int], ...]]] = {}

    def read(self, path: str, identity: Identity, descriptor: int) -> bytes:
        """The space as it is now. `descriptor` is the open file. Raises OSError."""
        known, space, ranges = self._kept.get(path, (None, bytearray(), ()))
        if known == identity and _refresh(descriptor, space, ranges):
            return bytes(space)
        whole = os.pread(descriptor, CONFIG_BYTES, 0)
        self._kept.pop(path, None)
        if whole.strip(b"\xff"):  # a device that is gone reads as ones, and may come back
            self._kept[path] = identity, bytearray(whole), changing(whole)
        return whole


def _refresh(descriptor: int, space: bytearray, ranges: tuple[tuple[int, int], ...]) -> bool:
    """Read the ranges again; False where the device does not answer as before."""
    for offset, length in ranges:
        part = os.pread(descriptor, length, offset)
        if len(part) != length or not part.strip(b"\xff"):
            return False
        space[offset : offset + length] = part
    return True
