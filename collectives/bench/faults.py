"""Ranks that die, stall or lie, for the tests: the variable TOPOFLIGHT_FAULT, read by the ranks alone.

TOPOFLIGHT_FAULT="rank=1:stall@iteration=3"      several are parted by ";"

die      SIGKILL to itself          stop     SIGSTOP to itself, every thread
stall    waits for ever             fail     raises an error
slow=S   comes S seconds late to every iteration from there on
lie      gives wrong data           version  claims another torch version
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

KINDS = ("die", "stop", "stall", "fail", "slow", "lie", "version")
_FAULT = re.compile(r"rank=(\d+):([a-z]+)(?:=([0-9.]+))?(?:@iteration=(\d+))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one rank."""

    rank: int
    kind: str
    value: float = 0.0
    iteration: int = 0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse the variable; a fault that is not understood is an error, not a silent pass."""
    return tuple(_parse_fault(part.strip()) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> Fault:
    match = _FAULT.match(text)
    if match is None or match[2] not in KINDS:
        raise ValueError(
            f"TOPOFLIGHT_FAULT: {text!r} is not rank=R:KIND[=VALUE][@iteration=I] with KIND one of {KINDS}"
        )
    return Fault(rank=int(match[1]), kind=match[2], value=float(match[3] or 0), iteration=int(match[4] or 0))


def strike(faults: tuple[Fault, ...], iteration: int) -> None:
    """Let the faults of this iteration happen."""
    for fault in faults:
        if fault.kind == "slow" and iteration >= fault.iteration:
            time.sleep(fault.value)
        elif iteration == fault.iteration:
            _happen(fault)


def _happen(fault: Fault) -> None:
    if fault.kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "fail":
        raise RuntimeError("fault asked for by TOPOFLIGHT_FAULT")
    while fault.kind == "stall":
        time.sleep(1)


def lies(faults: tuple[Fault, ...]) -> bool:
    """Tell whether this rank gives wrong data."""
    return any(fault.kind == "lie" for fault in faults)
