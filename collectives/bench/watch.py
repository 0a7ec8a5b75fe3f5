"""Starts the ranks of this host with torchrun, follows their events, and names the ranks that failed or hang."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectives.bench import plan, processes
from collectives.bench.plan import BenchSpec

Event = dict[str, Any]
OnEvent = Callable[[Event], None]
GRACE_SECONDS = 9.0  # from the first dead rank to the end of all ranks, so that the others can report their errors
MAX_EVENT_BYTES = 64 * 1024 * 1024
_EXIT_CODE = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")  # torchrun's report of a failed rank
OVERRUN_SECONDS = 15.0  # allowed beyond the budget, for a transfer that takes longer than predicted
STILL_SECONDS = 4.0  # eight heartbeats
FAILED = "a rank failed"


@dataclass(slots=True, kw_only=True)
class RankState:
    """The state of one local rank, according to its events."""

    rank: int
    host: str = ""
    pid: int | None = None
    arrived: int = 0
    moved_bytes: int = 0  # over its TCP connections
    where: str = "starting"
    joined: bool = False
    beat_at_seconds: float = 0.0  # of its last heartbeat, by this host's clock
    last: str | None = None  # "end", "error"
    why: str = ""
    last_at_seconds: float = 0.0  # this host's clock

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host or socket.gethostname()}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The events of the local ranks, and the problems of the run."""

    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stopped_by: str | None = None  # "its caller"


class Watch:
    """Reads the events of the local ranks, and decides when to stop waiting for them."""

    def __init__(self, spec: BenchSpec, directory: Path, on_event: OnEvent) -> None:
        self.states: dict[int, RankState] = {}
        self.outcome = Outcome()
        self._spec, self._directory, self._on_event = spec, directory, on_event
        self._offsets: dict[Path, int] = {}
        self._started = self._progress_at = self._arrived_at = time.monotonic()
        self._arrived, self._moved_bytes = -1, 0  # of all ranks together
        self._joined_at: float | None = None
        self._failed_at: float | None = None

    def poll(self, stop: threading.Event) -> str | None:
        """Read new events; return the reason to stop waiting, or None to continue."""
        self.read_events()
        now = time.monotonic()
        joined = bool(self.states) and all(state.joined for state in self.states.values())
        if joined and self._joined_at is None:
            self._joined_at = now
        # A rank in a large transfer reaches no synchronization point, but its moving bytes are progress, too.
        arrived = joined + sum(state.arrived for state in self.states.values())
        moved_bytes = sum(state.moved_bytes for state in self.states.values())
        if arrived != self._arrived:
            self._arrived_at = now
        if (arrived, moved_bytes) != (self._arrived, self._moved_bytes):
            self._arrived, self._moved_bytes, self._progress_at = arrived, moved_bytes, now
        failed = any(state.last == "error" or _is_dead(state) for state in self.states.values())
        self._failed_at = (self._failed_at or now) if failed else None
        if stop.is_set():
            self.outcome.stopped_by = "its caller"
            return "stopped by its caller"
        if self._failed_at is not None and now - self._failed_at > GRACE_SECONDS:
            return FAILED
        if not joined and now - self._started > self._spec.startup_seconds:
            return f"the ranks did not join within {self._spec.startup_seconds:g} s"
        if joined and now - self._progress_at > self._spec.silence_seconds:
            return f"no rank made progress for {self._spec.silence_seconds:g} s, and no byte moved between them"
        if self._joined_at is not None and now - self._joined_at > self._spec.budget_seconds + OVERRUN_SECONDS:
            return f"the time budget of {self._spec.budget_seconds:g} s was spent in one transfer"
        if now - self._started > self._spec.limit_seconds:
            return f"not done after {self._spec.limit_seconds:g} s"
        return None

    def read_events(self) -> None:
        """Read the complete lines that the ranks have written since the last call."""
        for path in sorted(self._directory.glob("rank-*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                chunk = file.read(MAX_EVENT_BYTES)
            lines = chunk[: chunk.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(lines)
            rank = int(path.stem.removeprefix("rank-"))
            for line in lines.splitlines():
                self._process_event(self.states.setdefault(rank, RankState(rank=rank)), json.loads(line))

    def _process_event(self, state: RankState, event: Event) -> None:
        kind = event["event"]
        state.arrived, state.where = event["arrived"], event["where"]
        if kind == "start":
            state.host, state.pid = event["host"], event["pid"]
        elif kind == "joined":
            state.joined = True
        elif kind in ("end", "error"):
            state.last, state.why, state.last_at_seconds = kind, event.get("why", ""), event["at_seconds"]
        elif kind == "beat":
            state.moved_bytes, state.beat_at_seconds = event["moved_bytes"], event["at_seconds"]
        if kind != "beat":
            self.outcome.events.append(event)
            self._on_event({"rank": state.rank, "host": state.host, **event})

    def explain(self, verdict: str | None, code: int, stuck: list[str], log_tail: str) -> list[str]:
        """Describe what went wrong, in the order in which the ranks failed; empty if all ranks finished."""
        if verdict is None and code == 0 and self.states and all(s.last == "end" for s in self.states.values()):
            return []
        problems = self._describe_dead_ranks(log_tail) if verdict in (None, FAILED) else stuck
        failed = sorted((s for s in self.states.values() if s.last == "error"), key=lambda s: s.last_at_seconds)
        problems += [f"{s}: {s.why} (in {s.where})" for s in failed]  # the first one is the likelier cause
        if self._spec.hosts > 1 and any(state.joined for state in self.states.values()):
            problems.append("each host names its own ranks; `topoflight search` finds the node or link between them")
        if verdict is not None:
            problems.insert(0, f"{verdict}: all processes of the run were ended")
        if not any(state.joined for state in self.states.values()):
            problems += self._describe_rendezvous(log_tail)
        return problems or [f"torchrun ended with exit code {code} before the ranks were done: {log_tail[-400:]}"]

    def _describe_dead_ranks(self, log_tail: str) -> list[str]:
        """Name the ranks that died. The report of torchrun does not list the ranks that torchrun ended."""
        codes = {int(pid): int(code) for code, pid in _EXIT_CODE.findall(log_tail)}
        dead = [s for s in self.states.values() if s.last is None and s.pid is not None]
        listed = [s for s in dead if s.pid in codes] or dead
        return [f"{s}: died silently in {s.where} ({_describe_exit(codes.get(s.pid or -1))})" for s in listed]

    def describe_stuck_ranks(self) -> list[str]:
        """Name ranks without a heartbeat, then ranks behind the others; empty while ranks still make progress."""
        if time.monotonic() - self._arrived_at < STILL_SECONDS:
            return []
        running = [state for state in self.states.values() if state.last is None]
        far = max((state.arrived for state in running), default=0)
        silent, behind, waiting = [], [], []
        for state in running:
            seconds = time.time() - state.beat_at_seconds
            if seconds > max(STILL_SECONDS, self._spec.silence_seconds / 3):
                silent.append(f"{state}: no heartbeat for {seconds:.0f} s; the last was in {state.where} (killed)")
            elif state.arrived < far:
                behind.append(f"{state}: has not reached the point where the others wait; last in {state.where} "
                              f"({state.arrived} of {far} points)")  # fmt: skip
            else:
                waiting.append(f"{state}: waits in {state.where} (ended)")
        return silent + behind + waiting[:8]

    def _describe_rendezvous(self, log_tail: str) -> list[str]:
        host = socket.gethostname() if self._spec.host_name is None else self._spec.host_name
        problems = [f"{host}: output of torchrun: {log_tail[-400:]}"] if log_tail and not self.states else []
        if self._spec.hosts == 1 or self._spec.rendezvous is None:
            return problems
        if self._spec.node_rank == 0:  # this host runs the rendezvous, so that it answers proves nothing
            missing = f"not all of {self._spec.hosts} hosts connected to {self._spec.rendezvous} within"
            cause = "the others have not started, or cannot reach it"
            return [f"{host}: {missing} {self._spec.startup_seconds:g} s: {cause}", *problems]
        address, _, port = self._spec.rendezvous.rpartition(":")
        try:
            socket.create_connection((address.strip("[]"), int(port)), timeout=3).close()
        except OSError as error:
            return [f"{host}: rendezvous {self._spec.rendezvous}: {error.strerror or error}", *problems]
        return problems


def _is_dead(state: RankState) -> bool:
    """Return whether the process of a rank is gone, or a zombie, although no event reports its end."""
    if state.pid is None or state.last is not None:
        return False
    try:
        stat = Path(f"/proc/{state.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# Start the ranks, and end all of their processes.
#
# One host: `torchrun --standalone`. Several hosts: torchrun with a rendezvous, started on each host, for example by a
# Kubernetes Indexed Job. This process never imports torch.

POLL_SECONDS = 0.05
TAIL_BYTES = 16_384
LOG_LIMIT_BYTES = 64 << 20  # torch with every debug variable prints some 100 KiB a rank before it works


def build_command(spec: BenchSpec, plan_path: Path) -> list[str]:
    """Build the torchrun command line."""
    argv = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={spec.ranks_per_host}"]
    if spec.hosts == 1:
        argv += ["--standalone"]
    else:
        assert spec.rendezvous is not None  # noqa: S101 - BenchSpec has checked it
        argv += [f"--nnodes={spec.hosts}"]
        if spec.node_rank is None:
            argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint={spec.rendezvous}", "--rdzv-id=topoflight"]
            argv += [f"--rdzv-conf=join_timeout={math.ceil(spec.startup_seconds)}"]
        else:
            address, _, port = spec.rendezvous.rpartition(":")
            # torchrun's time limit for hosts that connect later; its default may be shorter than ours
            argv += [f"--rdzv-conf=timeout={math.ceil(spec.startup_seconds)}"]
            argv += [f"--node-rank={spec.node_rank}", f"--master-addr={address.strip('[]')}", f"--master-port={port}"]
    return [*argv, "-m", "collectives.bench.rank", str(plan_path)]


def run_ranks(
    spec: BenchSpec, directory: Path, environment: Mapping[str, str], on_event: OnEvent, stop: threading.Event
) -> Outcome:
    """Run the benchmark until it ends or fails. Afterwards no process of the run is left."""
    plan.write(spec, directory / "plan.json")
    # A killed torchrun leaves its temporary files behind, so they are in the run's folder, which is removed. torchrun
    # would set OMP_NUM_THREADS to 1 as well, and print a banner about it.
    inherited = {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": str(directory), **environment}
    watch = Watch(spec, directory, on_event)
    with (directory / "launcher.log").open("w+b") as log:
        tree = processes.Tree(build_command(spec, directory / "plan.json"), inherited, log)
        try:
            verdict = None
            while tree.process.poll() is None and verdict is None:
                verdict = watch.poll(stop)
                if verdict is None and os.fstat(log.fileno()).st_size > LOG_LIMIT_BYTES:
                    # a library that fails in a loop would fill the host's disk with its messages
                    verdict = f"the ranks printed more than {LOG_LIMIT_BYTES >> 20} MiB"
                time.sleep(POLL_SECONDS)
        finally:
            watch.read_events()
            stuck = watch.describe_stuck_ranks()
            tree.end()
            hanging = [process.pid for process in tree.members()]
            watch.outcome.problems += [f"could not be killed, it hangs in the kernel: pid {pid}" for pid in hanging]
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = log.read().decode(errors="replace").strip()
    watch.read_events()
    watch.outcome.problems += watch.explain(verdict, tree.process.returncode, stuck, tail)
    return watch.outcome
