"""Start the rank monitor in any training script: Python runs this file at startup if its folder is on sys.path.

`topoflight run` and `launch --script` put the folder first in PYTHONPATH and set TOPOFLIGHT_RUN to the run's folder. A
sitecustomize of the user, which this one hides, is also run. This code needs only the standard library. It must not
raise an error or print, because that would disturb the script. The monitor is loaded by path, so that no module of the
script can shadow it. `python -m agent.jobs.autostart.sitecustomize FOLDER` copies the two files for another container.

`launch --script` also sets TOPOFLIGHT_SCRIPT to the script. Each of its ranks records its steps, memory and uncaught
error, writes its report into the run's folder, and ends when gloo's threads are idle: in torch 2.13 a gloo worker
thread takes the GIL to release the tensors of a finished collective (torch/csrc/PyInterpreter.cpp, decref). If the
thread first runs while the interpreter is being finalized, Python up to 3.13 ends the thread at that point, and the
process aborts with "terminate called without an active exception" after all its work.
"""

from __future__ import annotations  # in an older Python of the user an annotation would be an error

import atexit
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = ("agent/jobs/autostart/sitecustomize.py", "finetune/rank_monitor.py")
REPORT = "left."  # name of the report, followed by the rank
MAX_STEPS = 4096  # number of step times stored
_TOP = Path(__file__).resolve().parents[3]
_MAX_ERROR = 32768  # characters; torch's CheckpointException has the stack of each rank that failed
_MAX_SECONDS = 10.0  # longest wait for idle threads
_LOOK_SECONDS = 0.02
_IDLE_LOOKS = 3  # consecutive checks: a thread that waits for the GIL has it by then


class _AfterImport:
    """A meta path finder that calls the action of a module right after its import. Errors of an action are ignored."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self.actions = actions

    def find_spec(self, name: str, path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Find only these modules, as Python's own finders do, with a loader that calls the action after execution."""
        action = self.actions.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if action else None
        if action and spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                with contextlib.suppress(Exception):
                    action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_hidden(here: str) -> None:
    """Run the sitecustomize that Python would have run without this one."""
    other_paths = [path for path in sys.path if os.path.realpath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", other_paths)
    if spec is not None:
        _load(spec)


def _load(spec: Any) -> Any:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module


def _wrap(module: Any) -> None:
    """Load the monitor, and let init_process_group, or torchrun's launch_agent, start it.

    Only that call shows whether a process is a rank: some launchers set RANK in the environment, others do not.
    """
    monitor = _load(importlib.util.spec_from_file_location("_topoflight_rank_monitor", _TOP / FILES[1]))
    for name, wrapped in (("init_process_group", monitor.starting), ("launch_agent", monitor.launching)):
        if hasattr(module, name):
            setattr(module, name, wrapped(getattr(module, name), Path(os.environ["TOPOFLIGHT_RUN"])))


def _gloo_works() -> bool:
    """Return whether a thread of gloo runs or waits for a CPU, by /proc/self/task/TID/stat (proc(5))."""
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, _, fields = (thread / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # the thread has ended
            continue
        if "gloo" in name and fields.split()[0] == "R":
            return True
    return False


def wait_for_gloo() -> None:
    """Wait until gloo's threads are idle, in a process that has loaded torch."""
    idle, until = 0, time.monotonic() + _MAX_SECONDS
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
            if len(self.ends) <= MAX_STEPS:
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
            "error": None if error is None else f"{type(error).__name__}: {str(error)[:_MAX_ERROR]}",
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


def _start() -> None:
    """Let the imports of torch start the monitor and, in a rank of `launch --script`, the record of its steps."""
    wrapped = ("torch.distributed.distributed_c10d", "torch.distributed.launcher.api")
    actions: dict[str, Callable[[Any], None]] = dict.fromkeys(wrapped, _wrap)
    # Python 3.9 has no orig_argv
    if "RANK" in os.environ and getattr(sys, "orig_argv", [])[1:2] == [os.environ.get("TOPOFLIGHT_SCRIPT")]:
        watch = StepRecorder()
        atexit.register(watch.end)  # registered before any other, so it runs last
        sys.exit = watch.record_exit  # type: ignore[assignment]
        actions["torch.optim.optimizer"] = watch.begin
    sys.meta_path.insert(0, _AfterImport(actions))


if __name__ == "sitecustomize":
    if "TOPOFLIGHT_RUN" in os.environ:
        with contextlib.suppress(Exception):
            _start()
    _run_hidden(str(Path(__file__).resolve().parent))
elif __name__ == "__main__":
    for file in (Path(sys.argv[1], name) for name in FILES):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((_TOP / file.relative_to(sys.argv[1])).read_bytes())
