"""Ranks of a benchmark that die, stall or lie: the variable TOPOFLIGHT_FAULT, which a forked rank reads as it begins.

TOPOFLIGHT_FAULT="rank=1:stall@iteration=3"      several are parted by ";"

die      SIGKILL to itself          stop     SIGSTOP to itself, every thread
stall    waits for ever             fail     raises an error
slow=S   comes S seconds late to every iteration from there on
lie      gives wrong data           print    prints without end
"""

import os
import re
import signal
import time

VARIABLE = "TOPOFLIGHT_FAULT"
_FAULT = re.compile(r"rank=(\d+):(die|stop|stall|fail|slow|lie|print)(?:=([0-9.]+))?(?:@iteration=(\d+))?$")


def parse(text):
    """(rank, kind, value, iteration) of each; a fault that is not understood is an error, not a silent pass."""
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        match = _FAULT.match(part)
        if match is None:
            raise ValueError(f"{VARIABLE}: {part!r} is not rank=R:KIND[=VALUE][@iteration=I]")
        found.append((int(match[1]), match[2], float(match[3] or 0), int(match[4] or 0)))
    return found


def install():
    """Let this rank's faults happen: it comes to its meetings, and fills its buffers, through here."""
    from collectives.bench import ops
    from collectives.bench.pulse import Journal

    arrive, fill = Journal.arrive, ops.fill
    faults = [fault[1:] for fault in parse(os.environ[VARIABLE]) if fault[0] == int(os.environ["RANK"])]
    kinds = {kind for kind, _, _ in faults}

    def arrive_with_faults(journal, where):
        for kind, value, iteration in faults:
            if kind == "slow" and journal.arrived >= iteration:
                time.sleep(value)
            elif journal.arrived == iteration:
                happen(kind)
        arrive(journal, where)

    def fill_wrongly(side, turn):
        fill(side, turn)
        side.send_buffer[side.send_buffer.numel() // 2] += 1

    Journal.arrive = arrive_with_faults
    if "lie" in kinds:
        ops.fill = fill_wrongly


def happen(kind):
    """Die, stop, fail, stall or print."""
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "fail":
        raise RuntimeError("fault asked for by TOPOFLIGHT_FAULT")
    while kind == "stall":
        time.sleep(1)
    while kind == "print":
        os.write(2, b"NET/IB : complaint of a library\n" * 32768)
