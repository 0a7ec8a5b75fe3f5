"""What a drill is, one fault that happens for real, and where: a folder and a mount namespace with its own lock.

Commands run as a user would run them, `python -m agent.cli VERB`, with TMPDIR, state folder and lock below the folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import resident
from rigs.netns import missing
from rigs.recorded import snapshot
from rigs.results import RUN
from rigs.tables import ROOT
from rigs.waiting import eventually

from agent.base.result_store import BENCH_FILE, RUNS_FOLDER
from agent.http.state import State
from collectives.bench import processes
from collectives.bench.results import BenchResult
from contracts import plain
from contracts.run_record import record_of

MARK = "TOPOFLIGHT_DRILL"
SMALL_BENCH = ("bench", "--ranks=2", "--size=1024", "--op=all_gather", "--budget=1", "--output=json")
# Mounts the lock of this ground over the machine's, and runs the other mount commands of the drill.
_ENTER = 'mount --bind "$DRILL_LOCK" /run/lock && eval "$DRILL_MOUNTS" && exec "$@"'
_TOPOFLIGHT = ("unshare", "-m", "sh", "-c", _ENTER, "sh", sys.executable, "-m", "agent.cli")


def drill(run: Callable[[Ground], None]) -> Callable[[Path], None]:
    """Make a test of a function. It ends what the drill has left running."""

    @pytest.mark.timeout(1200)
    @functools.wraps(run)
    def test(tmp_path: Path) -> None:
        if (why := missing("mount", "cc")) is not None:
            pytest.skip(why)
        ground = Ground(tmp_path)
        try:
            run(ground)
            eventually(lambda: not ground.living(), "every process that the drill has started has ended")
        finally:
            for process, words in ground.living():
                print(f"orphan: {process.pid} {words[-200:]}")
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    del test.__wrapped__  # pytest would read its arguments there
    return test


@dataclass(slots=True)
class Ground:
    """One run of one drill."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("lock", "tmp", "state", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> Path:
        """The agent's state folder."""
        return self.folder / "state"

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment, marked and turned to this ground."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG", "CI")}
        return {
            **inherited, MARK: self.mark, "TMPDIR": str(self.folder / "tmp"), "TOPOFLIGHT_STATE": str(self.state),
            "HOME": str(self.folder / "home"), "DRILL_LOCK": str(self.folder / "lock"), "DRILL_MOUNTS": ":",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(more or {}),
        }  # fmt: skip

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `topoflight WORDS`. DRILL_MOUNTS are commands run before it."""
        return subprocess.Popen(
            [*_TOPOFLIGHT, *words], env=self.environment(environment), cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, seconds: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `topoflight WORDS` to its end."""
        process = self.start(*words, **environment)
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    @contextlib.contextmanager
    def agent(self, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """A `topoflight serve` that answers, and its port; it is ended at the end of the block."""
        port = resident.free_port()
        command = [*_TOPOFLIGHT, "serve", f"--port={port}", f"--state={self.state}", *words]
        with resident.process(command, self.environment(environment), self.folder / "serve.log") as one:
            resident.wait(port, "/healthz", one)
            yield one, port

    def living(self) -> list[tuple[psutil.Process, str]]:
        """Every living process that this ground's commands started, with its command line."""
        alive = []
        for process in processes.find_marked(MARK, self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append((process, " ".join(process.cmdline())))
        return alive

    def runs(self, module: str) -> bool:
        """Whether one of these processes runs this module."""
        return any(module in words for _, words in self.living())

    def assert_nothing_is_left(self, *folders: Path) -> None:
        """No process, no lock that stops the next benchmark, no half-written or temporary file that it would not sweep.

        Files whose names begin with a dot are renamed when they are whole.
        """
        eventually(lambda: not self.living(), "every process that the drill has started has ended")
        with processes.lock_host(self.folder / "lock" / processes.LOCK_NAME):
            pass
        for folder in (self.state, *folders):
            for path in folder.rglob("*.json"):
                if not any(part.startswith(".") for part in path.relative_to(folder).parts):
                    json.loads(path.read_text())
        processes.remove_stale_folders(self.folder / "tmp")
        assert list((self.folder / "tmp").iterdir()) == []

    def store_earlier_results(self) -> None:
        """What earlier runs left in the state folder."""
        (self.state / RUNS_FOLDER).mkdir(exist_ok=True)
        (self.state / BENCH_FILE).write_text(json.dumps(plain.write(EARLIER)))
        (self.state / RUNS_FOLDER / "20260101T000000-1.json").write_text(json.dumps(RUN))

    def assert_earlier_results_are_there(self) -> None:
        """What was stored before can be read back, or something newer in its place."""
        view = State(lambda: (snapshot(),), interval_seconds=3600, folder=self.state).refresh()
        assert view.bench is not None and record_of(RUN) in view.runs


EARLIER = BenchResult(
    measurements=(), world_size=2, backend="gloo", hosts=("earlier",), environment={}, versions={},
    started_at_seconds=1.0, seconds=1.0,
)  # fmt: skip
