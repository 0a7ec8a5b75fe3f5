"""Xid numbers: what each speaks of, and whose error it is.

Specification: NVIDIA, "Xid Errors", the Xid catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html),
by its columns of immediate and investigatory action, and the older listing for boards before Ampere. A number that it
answers with a reset, a restart of the host, a look at links or a repair is of the GPU; one that it answers with a look
at the program is of the program; the others name neither. What the catalogue does not use has no cause that is known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

Cause = Literal["gpu", "program", "driver"]
"""The GPU, its memory or its links; the program that ran; or an engine, firmware or driver, the cause being open."""

_GPU = {
    46: "GPU stopped processing", 48: "uncorrectable memory error", 54: "auxiliary power not connected",
    57: "memory interface training failed", 58: "memory interface unstable", 59: "microcontroller error",
    61: "microcontroller breakpoint", 62: "microcontroller halted", 63: "memory row or page retired",
    64: "memory row or page could not be retired", 74: "NVLink error", 79: "GPU has fallen off the bus",
    81: "VGA subsystem error", 90: "L2 cache error", 92: "many corrected memory errors", 94: "memory error, contained",
    95: "memory error, not contained", 109: "context switch timed out", 110: "security fault",
    119: "GPU firmware (GSP) does not answer", 120: "GPU firmware (GSP) error", 121: "C2C link error",
    122: "board flash cannot be read", 123: "board flash cannot be written", 124: "board flash cannot be erased",
    125: "InfoROM file system error", 136: "NVLink training failed", 140: "unrecovered ECC error",
    143: "GPU initialisation failed", 144: "NVLink SAW error", 145: "NVLink RLW error", 146: "NVLink TLW error",
    147: "NVLink TREX error", 148: "NVLink NVLPW_CTRL error", 149: "NVLink NETIR error", 150: "NVLink MSE error",
    154: "the driver wants another recovery action", 155: "NVLink error defined by software",
    156: "memory resource retired", 157: "memory resource could not be retired", 158: "fatal timeout of the GPU",
    164: "power smoothing near its end of life", 165: "power smoothing at its end of life",
    166: "NVLink traffic before encryption was set up", 167: "fatal PCIe timeout", 168: "GPU memory capacity reduced",
    169: "security processor halted", 170: "NVLink interrupt in confidential mode", 171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}  # fmt: skip
_PROGRAM = {
    11: "invalid push buffer", 13: "graphics engine exception", 25: "illegal push buffer",
    31: "GPU memory page fault", 32: "corrupted push buffer", 37: "unimplemented method",
    43: "GPU stopped processing", 45: "channel torn down",
    69: "graphics engine class error", 80: "corrupted data sent to the GPU",
}  # fmt: skip
_DRIVER = {
    8: "GPU stopped processing", 38: "firmware watchdog", 39: "copy engine", 40: "copy engine", 41: "copy engine",
    44: "fault during a context switch", 60: "video processor", 66: "illegal access by the driver",
    67: "illegal access by the driver", 68: "video decoder", 70: "copy engine", 71: "copy engine", 72: "copy engine",
    75: "copy engine", 76: "copy engine", 77: "copy engine", 78: "vGPU did not start", 82: "JPEG engine",
    83: "video decoder", 84: "video decoder", 85: "copy engine", 86: "optical flow engine", 88: "video decoder",
    89: "video decoder", 93: "InfoROM wear limit", 96: "video decoder", 97: "video decoder", 98: "video decoder",
    99: "JPEG engine", 100: "JPEG engine", 101: "JPEG engine", 102: "JPEG engine", 103: "JPEG engine",
    104: "JPEG engine", 105: "JPEG engine", 106: "test message", 107: "test message",
    108: "NVLink remote translation error", **dict.fromkeys(range(126, 136), "copy engine"),
    137: "NVLink privilege error", 139: "optical flow engine", 141: "CUDA fast path error", 142: "video encoder",
    151: "key rotation failed", 152: "DLA memory error", 153: "DLA timeout", 159: "CHI error without data",
    160: "channel retired", 161: "channel could not be retired", 162: "power smoothing engaged again",
    163: "power smoothing disengaged",
}  # fmt: skip

CAUSES: tuple[Cause, ...] = ("gpu", "driver", "program")  # gravest first


def cause(xid: int) -> Cause:
    """Whose error it is; a number of no catalogue is not the program's."""
    return "gpu" if xid in _GPU else "program" if xid in _PROGRAM else "driver"


def named(xids: Iterable[int], of: Cause) -> str:
    """Those of one cause in words: "Xid 74 (NVLink error, 2 times), Xid 79 (GPU has fallen off the bus, once)"."""
    counts = Counter(xid for xid in xids if cause(xid) == of)
    return ", ".join(
        f"Xid {xid} ({_words(xid)}, {'once' if count == 1 else f'{count} times'})" for xid, count in counts.items()
    )


def _words(xid: int) -> str:
    return _GPU.get(xid) or _PROGRAM.get(xid) or _DRIVER.get(xid) or "no cause named"


# "NVRM: Xid (PCI:0000:1b:00): 79, ...", "NVRM: Xid (0000:03:00): 14, ..." of older drivers, "(PCI:0000:3b:00 GPU-I:05)"
# of a MIG slice.
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-f:]{7,16})[^)]{0,40}\): (\d{1,4})\b", re.ASCII | re.IGNORECASE)
_RECOVERED = re.compile(r"changed from .* to (?:0x0\b|.*\(None\))", re.IGNORECASE)


def of_line(line: str) -> tuple[str, int] | None:
    """(bus id without the function, Xid) of a line of the kernel's log; None where it tells of no error.

    Xid 154 names the recovery action that the driver wants from now on: one that becomes "None" is no error.
    """
    found = _LINE.search(line)
    if found is None or (found[2] == "154" and _RECOVERED.search(line)):
        return None
    domain, _, place = found[1].lower().partition(":")
    if place.count(":") != 1:
        return None
    return f"{int(domain, 16):04x}:{place}", int(found[2])
