"""Run a user's script as `python SCRIPT ARGS...` does, and end the interpreter only when torch's gloo threads are idle.

torch 2.13 takes Python's lock in a worker thread of gloo to release the tensors of a finished collective
(torch/csrc/PyInterpreter.cpp, decref). Where the thread gets no CPU until the interpreter is being finalized, Python up
to 3.13 ends the thread at that point, and the process aborts with "terminate called without an active exception" after
all of its work. Plain `python` aborts in the same way; here the threads are waited for.

This file runs in the user's Python, so it needs the standard library alone. The variable ENDED holds the path, without
the rank at its end, of a file that is written once the script has run to its end.
"""

import atexit
import builtins
import contextlib
import os
import sys
import time
import types
from pathlib import Path

ENDED = "TOPOFLIGHT_SCRIPT_ENDED"
_MOST_SECONDS = 10.0  # for the threads to become idle
_LOOK_SECONDS = 0.02
_IDLE_LOOKS = 3  # in a row: a thread that waits for Python's lock has it by then


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


def note_end() -> None:
    """Write the file that tells the launcher that this rank's script has run to its end."""
    with contextlib.suppress(KeyError, OSError):  # the record then says less
        Path(os.environ[ENDED] + os.environ.get("RANK", "0")).touch()


def run(script: str) -> None:
    """Run the script as __main__, with its own folder on the path where Python would put it there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)
    code = compile(Path(script).read_bytes(), script, "exec")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    exec(code, main.__dict__)  # noqa: S102 - the user's own script


if __name__ == "__main__":
    del sys.argv[0]
    atexit.register(wait_for_gloo)  # the first to be registered is the last to run
    try:
        run(sys.argv[0])
    except SystemExit as end:
        if not end.code:
            note_end()
        raise
    note_end()
