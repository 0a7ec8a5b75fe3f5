"""What a drill is, one fault that happens for real, and where: a folder and a mount namespace with a lock of its own.

Commands run as a user would run them, `python -m agent.cli VERB`, with TMPDIR, state folder and lock below the folder.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from rigs.netns import missing
from scanned import scan

from agent.base.result_store import BENCH_FILE, RUNS_FOLDER
from agent.http.state import State
from collectives.bench import processes
from collectives.bench.results import BenchResult
from contracts import plain
from contracts.run_record import record_of
from probes.host.recording import load

ROOT = Path(__file__).parents[2]
MACHINES = ROOT / "tests" / "machines"
MARK = "TOPOFLIGHT_DRILL"
PATIENCE_SECONDS = 120.0  # for what takes seconds: a busy machine takes its time, and nothing waits longer than it must
LONG = os.environ.get("TOPOFLIGHT_DRILLS") == "long"  # what `make drills` sets
# A kubelet waits 30 s. Of a machine of CI, which may be several times slower, only an end is asked.
TERM_SECONDS = 25.0 if LONG else 60.0
SMALL_BENCH = ("bench", "--ranks=2", "--size=1024", "--op=all_gather", "--budget=1", "--output=json")
# The lock of this ground in the place of the machine's, and whatever else a drill wants mounted.
_ENTER = 'mount --bind "$DRILL_LOCK" /run/lock && eval "$DRILL_MOUNTS" && exec "$@"'


def drill(run: Callable[[Ground], list[str]] | None = None, *, long: int = 5) -> Any:
    """Make a test of a function that returns what was lost, in words: once in CI, `long` times by `make drills`.

    Once is the same every time; what has not been seen yet is for the long form to find.
    """

    def enter(run: Callable[[Ground], list[str]]) -> Callable[[int, Path], None]:
        @pytest.mark.timeout(1200)
        @pytest.mark.parametrize("number", range(long if LONG else 1))
        @functools.wraps(run)
        def test(number: int, tmp_path: Path) -> None:
            if (why := missing("mount", "cc")) is not None:
                pytest.skip(why)
            seed = random.randrange(1 << 32) if LONG else zlib.crc32(run.__name__.encode())
            lost = run(Ground(tmp_path, random.Random(seed), long=LONG))
            assert not lost, "\n".join([*lost, f"seed {seed}"])

        del test.__wrapped__  # pytest would read its arguments there
        return test

    return enter if run is None else enter(run)


@dataclass(slots=True)
class Ground:
    """One run of one drill."""

    folder: Path
    random: random.Random
    long: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("lock", "tmp", "state", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> Path:
        """The agent's state folder."""
        return self.folder / "state"

    @property
    def tmp(self) -> Path:
        """Where its processes put temporary files."""
        return self.folder / "tmp"

    def moment(self, seconds: float) -> float:
        """One of that life: any in the long form, one in its midst in the short form, which draws it but once."""
        return self.random.uniform(0.0, 1.0) * seconds if self.long else self.random.uniform(0.25, 0.75) * seconds

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's environment, marked and turned to this ground."""
        kept = {k: v for k, v in os.environ.items() if k not in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG", "CI")}
        return {
            **kept, MARK: self.mark, "TMPDIR": str(self.tmp), "TOPOFLIGHT_STATE": str(self.state),
            "HOME": str(self.folder / "home"), "DRILL_LOCK": str(self.folder / "lock"), "DRILL_MOUNTS": ":",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(more or {}),
        }  # fmt: skip

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `topoflight WORDS`; its pid is that of the agent. DRILL_MOUNTS are commands run before it."""
        space = ["unshare", "-m", "sh", "-c", _ENTER, "sh"]
        return subprocess.Popen(
            [*space, sys.executable, "-m", "agent.cli", *words], env=self.environment(environment), cwd=self.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str, seconds: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `topoflight WORDS` to its end."""
        process = self.start(*words, **environment)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err += f"\nkilled after {seconds} s by the drill"
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    @contextlib.contextmanager
    def agent(self, *words: str, **environment: str) -> Iterator[Agent]:
        """A `topoflight serve` that is ended at the end of the block."""
        log = (self.folder / f"serve-{uuid.uuid4().hex[:6]}.log").open("w+b")
        space = ["unshare", "-m", "sh", "-c", _ENTER, "sh", sys.executable, "-m", "agent.cli"]
        process = subprocess.Popen(
            [*space, "serve", "--port=0", f"--state={self.state}", *words], env=self.environment(environment),
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield Agent(process, Path(log.name))
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
                process.wait()
            log.close()

    def ours(self) -> list[psutil.Process]:
        """Every living process that this ground's commands started."""
        alive = []
        for process in processes.marked(MARK, self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def commands(self) -> list[str]:
        """The command lines of those that still live when they are asked for it."""
        lines = []
        for process in self.ours():
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(" ".join(process.cmdline()))
        return lines

    def orphans(self) -> list[str]:
        """What still lives after a moment of grace; it is killed here, so that one drill does not spoil the next."""
        left = eventually(lambda: self.ours() or None, wanted=None) or ()
        told = [f"orphan: {_words(process)}" for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return told

    def lock_stuck(self) -> list[str]:
        """Whether the next benchmark would be refused."""
        try:
            with processes.lock_host(self.folder / "lock" / processes.LOCK_NAME):
                return []
        except processes.BusyError as error:
            return [f"the lock is stuck: {error}"]

    def litter(self) -> list[str]:
        """Temporary files that even the next benchmark would not sweep."""
        processes.remove_stale_folders(self.tmp)
        return [f"litter: {path.name}" for path in self.tmp.iterdir()]

    def halves(self, *folders: Path) -> list[str]:
        """Files that a reader would trust and that are not whole."""
        broken = []
        for folder in (self.state, *folders):
            for path in folder.rglob("*.json"):
                if any(part.startswith(".") for part in path.relative_to(folder).parts):
                    continue  # written beside its name, to be renamed when it is whole
                try:
                    json.loads(path.read_text())
                except ValueError as error:
                    broken.append(f"half-written: {path.relative_to(self.folder)}: {error}")
        return broken

    def after(self, *folders: Path) -> list[str]:
        """All that a fault must not leave behind."""
        return [*self.orphans(), *self.lock_stuck(), *self.halves(*folders), *self.litter()]


@dataclass(slots=True)
class Agent:
    """A serving agent."""

    process: subprocess.Popen[bytes]
    log: Path

    def words(self) -> str:
        """All that it has logged."""
        return self.log.read_text(errors="replace")

    @property
    def port(self) -> int:
        """Where it listens, once it does: uvicorn's log does not say it at this level, the kernel does."""

        def listening() -> int | None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the agent ended with {self.process.returncode}: {self.words()[-2000:]}")
            found = psutil.Process(self.process.pid).net_connections(kind="inet")
            return next((c.laddr.port for c in found if c.status == psutil.CONN_LISTEN), None)

        port = eventually(listening)
        if port is None:
            raise RuntimeError(f"the agent does not listen: {self.words()[-2000:]}")
        return port

    def ask(
        self, path: str, method: str = "GET", body: Any = None, seconds: float = 60.0, **headers: str
    ) -> tuple[int, Any]:
        """(status, JSON or text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            raw = answer.read()
        finally:
            connection.close()
        with contextlib.suppress(ValueError):
            return answer.status, json.loads(raw)
        return answer.status, raw.decode(errors="replace")

    def ready(self) -> bool:
        """Whether /readyz says so within a moment."""
        return bool(eventually(lambda: self.ask("/readyz")[0] == 200 or None))

    def term(self, seconds: float = TERM_SECONDS) -> float | None:
        """SIGTERM; how long it took to end, None where it did not within `seconds`."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - started


def eventually(look: Callable[[], Any], *, wanted: Any = ..., seconds: float = PATIENCE_SECONDS) -> Any:
    """Look until the answer is `wanted` (by default anything but None); the last answer."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if (found is not None) if wanted is ... else found == wanted:
            return found
        if time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def machine(name: str) -> dict[str, Any]:
    """A recorded machine's content."""
    content: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[-200:]}"
    except psutil.NoSuchProcess:
        return str(process.pid)


KEPT = BenchResult(
    measurements=(), world_size=2, backend="gloo", hosts=("kept",), environment={}, versions={},
    started_at_seconds=1.0, seconds=1.0,
)  # fmt: skip
RUN = {"schema_version": 1, "status": "complete", "reason": "kept"}


def keep_something(ground: Ground) -> None:
    """What earlier runs left in the state folder."""
    runs = ground.state / RUNS_FOLDER
    runs.mkdir(exist_ok=True)
    (ground.state / BENCH_FILE).write_text(json.dumps(plain.write(KEPT)))
    (runs / "20260101T000000-1.json").write_text(json.dumps(RUN))


def state_lost(folder: Path) -> list[str]:
    """Whether what was kept before can be read back, or something newer in its place."""
    snapshot = scan(load(MACHINES / "hgx-h100-8xH100-8hca.json"))
    view = State(lambda: (snapshot,), interval_seconds=3600, folder=folder).refresh()
    lost = [] if view.bench is not None else ["the last benchmark's result is gone"]
    return lost if record_of(RUN) in view.runs else [*lost, "the record of an earlier run is gone"]
