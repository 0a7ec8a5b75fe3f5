"""In each rank of `launch --script`: record its steps, memory and uncaught error, and end when gloo's threads are idle.

finetune/autostart/sitecustomize.py loads this file by path into the user's Python, so it needs only the standard
library. At its end the rank writes its report into the run's folder.

In torch 2.13 a gloo worker thread takes the GIL to release the tensors of a finished collective
(torch/csrc/PyInterpreter.cpp, decref). If the thread first runs while the interpreter is being finalized, Python up to
3.13 ends the thread at that point, and the process aborts with "terminate called without an active exception" after all
its work. Therefore the rank waits for the threads.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORT = "left."  # name of the report, followed by the rank
MOST_STEPS = 4096  # number of step times stored
_MOST_ERROR = 2000  # characters
_MOST_SECONDS = 10.0  # longest wait for idle threads
_LOOK_SECONDS = 0.02
_IDLE_LOOKS = 3  # consecutive checks: a thread that waits for the GIL has it by then


def _gloo_works() -> bool:
    """Return whether a thread of gloo runs or waits for a CPU, by /proc/self/task/TID/stat (proc(5))."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if "gloo" in name and rest.split()[0] == "R":
            return True
    return False


def wait_for_gloo() -> None:
    """Wait until gloo's threads are idle, in a process that has loaded torch."""
    idle, until = 0, time.monotonic() + _MOST_SECONDS
    while "torch" in sys.modules and idle < _IDLE_LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        idle = 0 if _gloo_works() else idle + 1


class StepRecorder:
    """Counts the steps of the first optimizer that runs a step, after torch.optim is imported.

    Surface: torch.optim.optimizer.register_optimizer_step_post_hook, VmHWM and VmRSS (proc(5)).
    """

    def __init__(self) -> None:
        self.path = Path(os.environ["TOPOFLIGHT_RUN"], REPORT + os.environ["RANK"])
        self.first: int | None = None
        self.ends: list[float] = []
        self.steps = 0
        self.resident_before = 0
        self.status: object = None  # of the last sys.exit()
        self.exit = sys.exit

    def begin(self, optimizers: Any) -> None:
        """Watch torch.optim.optimizer, which has been imported. If torch differs, the record contains less."""
        optimizers.register_optimizer_step_post_hook(self.count)
        self.resident_before = _resident("VmRSS")

    def count(self, optimizer: object, *_: object) -> None:
        """Count a finished step of an optimizer."""
        self.first = self.first or id(optimizer)
        if id(optimizer) == self.first:
            self.steps += 1
            if len(self.ends) <= MOST_STEPS:
                self.ends.append(time.perf_counter())

    def record_exit(self, status: object = None, /) -> None:
        """Replace sys.exit(): Python prints the status, and no exception hook receives it."""
        self.status = status
        self.exit(status)  # type: ignore[arg-type]

    def end(self) -> None:
        """Write step times, memory and the error that ended the script, then wait for gloo."""
        # Python sets last_value before it calls sys.excepthook, but not for SystemExit
        error = getattr(sys, "last_value", None) or (SystemExit(self.status) if self.status else None)
        memory = max(0, _resident("VmHWM") - self.resident_before)
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            memory = cuda.max_memory_reserved()
        report = {
            "steps": self.steps, "seconds": [self.ends[i] - self.ends[i - 1] for i in range(1, len(self.ends))],
            "memory_bytes": memory, "rss_peak_bytes": _resident("VmHWM"),
            "error": None if error is None else f"{type(error).__name__}: {str(error)[:_MOST_ERROR]}",
        }  # fmt: skip
        with contextlib.suppress(OSError):  # without it the record contains less
            self.path.write_text(json.dumps(report), encoding="utf-8")
        wait_for_gloo()


def _resident(name: str) -> int:
    """VmHWM or VmRSS in bytes; 0 if /proc does not show it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
    return 0


def start() -> Callable[[Any], None]:
    """Watch this process, a rank, until its end. Return what to call after the import of torch.optim.optimizer."""
    watch = StepRecorder()
    atexit.register(watch.end)  # registered before any other, so it runs last
    sys.exit = watch.record_exit  # type: ignore[assignment]
    return watch.begin
