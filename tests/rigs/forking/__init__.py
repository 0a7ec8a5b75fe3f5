"""Ranks without the seconds that each takes to import torch: an environment whose torchrun is forked from one server.

`forking_environment()` returns the interpreter of the stand-in environment. Its `-m torch.distributed.run`,
`-m finetune.train` and `-m agent.cli search` are forked, as are scripts of tests/finetune that fork ranks of the job,
and torchrun forks its ranks; everything else runs in the real interpreter. A test starts its ranks for real where it
looks for children in /proc, at memory or threads, at warnings, or where it sets a variable that a library reads while
it is imported. The first test that asks starts the server; all processes of the session share it.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

READY = "ready"  # what the server says
ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
CLIENT = """#!{real} -IS
import sys
sys.path.insert(0, {here!r})
from client import main
main({real!r}, {place!r}, {name!r}, sys.argv[1:])
"""


@cache
def forking_environment() -> str:
    """The path of the interpreter; the server runs."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"topoflight-forking-{owner}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        place, python = folder / "socket", folder / "bin" / "python"
        if not place.exists():
            _write_environment(folder, place, python)
            _start(folder, place, owner)
    return str(python)


def _write_environment(folder: Path, place: Path, python: Path) -> None:
    """A virtual environment with the packages of this one, whose interpreter is the client."""
    here = Path(sys.prefix)
    python.parent.mkdir(exist_ok=True)
    (folder / "lib").symlink_to(here / "lib")
    (folder / "pyvenv.cfg").write_text((here / "pyvenv.cfg").read_text())
    real = str(Path(sys.executable).resolve())
    python.write_text(CLIENT.format(real=real, here=str(HERE), place=str(place), name=str(python)))
    python.chmod(0o755)
    torchrun = python.with_name("torchrun")
    torchrun.write_text(f'#!/bin/sh\nexec "{python}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)


def _start(folder: Path, place: Path, owner: int) -> None:
    """Start the server, and wait until it has imported everything. Raises RuntimeError with its last words."""
    log = folder / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(place), str(owner)], cwd="/", env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream, start_new_session=True,
        )  # fmt: skip
    if process.stdout.readline().decode().strip() != READY:
        raise RuntimeError(f"the forking server did not start: {log.read_text()[-2000:]}")
