"""What PCI configuration space says: ACS, relaxed ordering, resizable BAR.

Specification: PCI Express Base Specification, chapter 7 (capability structures); linux/pci_regs.h names the offsets.
A process without CAP_SYS_ADMIN gets the first 64 bytes only, and then everything here is unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

CONFIG_BYTES = 4096

_EXTENDED_START = 0x100
_EXTENDED_MAX = (CONFIG_BYTES - _EXTENDED_START) // 8  # no chain can be longer; a broken one may loop
_STANDARD_MAX = (0x100 - 0x40) // 4
_STATUS, _STATUS_HAS_LIST, _LIST_POINTER = 0x06, 0x10, 0x34
_EXPRESS, _EXPRESS_DEVICE_CONTROL, _RELAXED_ORDERING = 0x10, 8, 1 << 4
_ACS, _ACS_CONTROL, _SOURCE_VALIDATION = 0x000D, 6, 1 << 0
_REBAR, _REBAR_MAX = 0x0015, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What was read; None is unknown."""

    lost: bool = False  # every byte reads as ones: the device no longer answers
    acs_source_validation: bool | None = None
    relaxed_ordering: bool | None = None
    resizable_bar: bool | None = None  # the BAR is as large as the device could make it
    bar_sizes_offered: bool | None = None  # the device offers sizes to choose from


def parse_config(config: bytes) -> Config:
    """Decode as much of the space as was readable."""
    if len(config) >= 64 and not config[:64].strip(b"\xff"):
        return Config(lost=True)
    extended = dict(_extended(config))
    readable = len(config) > _EXTENDED_START + 4
    # A port without the capability cannot redirect: off, not unknown.
    acs: bool | None = False if readable else None
    if _ACS in extended:
        control = _word(config, extended[_ACS] + _ACS_CONTROL)
        acs = None if control is None else bool(control & _SOURCE_VALIDATION)
    return Config(
        acs_source_validation=acs,
        relaxed_ordering=_relaxed_ordering(config),
        resizable_bar=_rebar(config, extended[_REBAR]) if _REBAR in extended else (False if readable else None),
        bar_sizes_offered=True if _REBAR in extended else (False if readable else None),
    )


def _relaxed_ordering(config: bytes) -> bool | None:
    if len(config) <= 64:
        return None
    for kind, offset in _standard(config):
        if kind == _EXPRESS:
            control = _word(config, offset + _EXPRESS_DEVICE_CONTROL)
            return None if control is None else bool(control & _RELAXED_ORDERING)
    return None


def _rebar(config: bytes, offset: int) -> bool | None:
    """Whether every resizable BAR has the largest of its supported sizes."""
    first = _double(config, offset + 8)
    if first is None:
        return None
    bars = min(first >> 5 & 7, _REBAR_MAX)
    answers = []
    for bar in range(bars):
        supported, control = _double(config, offset + 4 + 8 * bar), _double(config, offset + 8 + 8 * bar)
        if supported is None or control is None:
            return None
        sizes = supported >> 4 | (control >> 16) << 28  # bit n: 2**(n+20) bytes
        answers.append((control >> 8 & 0x3F) >= sizes.bit_length() - 1)
    return all(answers) if answers else None


def _standard(config: bytes) -> Iterator[tuple[int, int]]:
    status = _word(config, _STATUS)
    if status is None or not status & _STATUS_HAS_LIST or len(config) <= _LIST_POINTER:
        return
    offset = config[_LIST_POINTER] & ~3
    for _ in range(_STANDARD_MAX):
        if offset < 0x40 or offset + 2 > min(len(config), 0x100):
            return
        yield config[offset], offset
        offset = config[offset + 1] & ~3


def _extended(config: bytes) -> Iterator[tuple[int, int]]:
    offset = _EXTENDED_START
    for _ in range(_EXTENDED_MAX):
        header = _double(config, offset)
        if not header or header == 0xFFFFFFFF:
            return
        yield header & 0xFFFF, offset
        offset = header >> 20 & ~3
        if offset < _EXTENDED_START:
            return


def _word(config: bytes, offset: int) -> int | None:
    return int(struct.unpack_from("<H", config, offset)[0]) if offset + 2 <= len(config) else None


def _double(config: bytes, offset: int) -> int | None:
    return int(struct.unpack_from("<I", config, offset)[0]) if offset + 4 <= len(config) else None
