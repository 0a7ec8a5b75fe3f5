"""Run the ranks of one pod of a job on a cluster, and in an Indexed Job start again what was interrupted.

`python -m finetune.pod --index 1 --nodes 2 --ranks 8 --meet sft-0.sft:29400 -- torchrun -m finetune.train ...`

With `--once` the pod starts its ranks once and ends with the job's own exit code: JobSet's and Kubeflow's operators
restart pods by their own policies. Without it, in a bare Indexed Job, pod 0 listens at `--meet`; the other pods connect
whenever their image is there, and the ranks start when all have come. The connections stay open while the ranks run, so
that each pod knows of every other whether it lives and how it ended: all start again together (a rank saved and ended,
a pod was lost), or all end with the code of the one that failed. With `--measure` each start first measures what the
ranks will use; a result that fails ends the job. What the ranks print goes to the pod's log, and whole lines of NCCL's
logs too. Surface: TCP, one JSON object a line; SIGTERM; stdout. No torch in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from collectives.bench import processes
from contracts import run_record
from contracts.job_config import ConfigError, choose_plan
from finetune import post

RESUMABLE = run_record.RESUMABLE
UNAVAILABLE = 69  # EX_UNAVAILABLE: another pod did not come, or the restarts are used up
MEASURED_FAILURE = 3  # of `topoflight bench` (docs/reference/exit-codes.md); no rank ends with it
TERMINATED = 128 + signal.SIGTERM  # this pod was deleted or its node drained: its replacement resumes the job
ENDED_HERE = -1000  # in place of an exit code: ranks that this pod ended do not say why the job failed
SEND_SECONDS = 5.0
# A pod whose node is gone sends no FIN: the kernel closes a connection after 30 s without an answer (tcp(7)).
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 5, socket.TCP_USER_TIMEOUT: 30_000}
LINGER_SECONDS = 5.0  # the other pods wait so long before they fail: a controller keeps the log of the first failure
LOST_GRACE_SECONDS = 25.0  # for ranks whose peers are gone: most end by themselves and upload their record (20 s)
NEWS_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LINE_BYTES = 4096
_TAIL_BYTES = 65536  # of torchrun's output: its report of the failure is at the end
_MAX_NCCL_BYTES = 16 << 20  # of each rank's log in the pod's: channels are at the beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One pod's part of the job."""

    index: int
    nodes: int
    ranks: int
    meet: tuple[str, int]
    words: tuple[str, ...]  # for torchrun: "-m", "finetune.train", ...
    output: Path | None = None
    restarts: int = 3
    wait: float = 3600.0  # seconds for the other pods: as long as an image may take to be pulled
    save: float = 100.0  # seconds after SIGTERM; the pod's terminationGracePeriodSeconds must be more
    measure: bool = False
    once: bool = False

    def log(self, text: str) -> None:
        """Write a line into the pod's log."""
        print(f"pod {self.index}: {text}", flush=True)  # noqa: T201 - the pod's log


class Wire:
    """One connection between two pods: JSON objects, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.closed = False
        self._left = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, **message: Any) -> None:
        """Send one object. A peer that takes none closes the connection."""
        try:
            self.connection.settimeout(SEND_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come since the last call."""
        messages: list[dict[str, Any]] = []
        try:
            self.connection.setblocking(False)
            while raw := self.connection.recv(65536):
                *lines, self._left = (self._left + raw).split(b"\n")
                messages += [value for line in lines if isinstance(value := json.loads(line), dict)]
                if len(self._left) > _LINE_BYTES:
                    raise ValueError("a line that does not end")
            self.close()
        except BlockingIOError:
            pass
        except (OSError, ValueError, RecursionError):  # closed by one of the two, or no JSON
            self.close()
        return messages

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        self.connection.close()


class Ranks:
    """One start of this pod's ranks: with `--measure` the benchmark, then torchrun. Copies their output."""

    def __init__(self, settings: Settings, address: str, ports: Sequence[int], restarts: int | None = None) -> None:
        """Start them. They meet at the address of pod 0: to train at the first port, for the benchmark at the second.

        `restarts` is for the record; None where an operator counts, whose number is in the environment already.
        """
        self._settings, self._save_by, self._end_by, self._tail = settings, 0.0, 0.0, b""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if restarts is not None:
            environment["TOPOFLIGHT_RESTARTS"] = str(restarts)
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={settings.nodes}",
            f"--node-rank={settings.index}", f"--nproc-per-node={settings.ranks}", f"--master-addr={address}",
            f"--master-port={ports[0]}", f"--rdzv-conf=timeout={settings.wait:.0f}", *settings.words,
        ]  # fmt: skip
        if settings.measure:
            bench = [sys.executable, "-m", "agent.cli", "bench", "--quick", "--no-advice", f"--ranks={settings.ranks}"]
            if settings.nodes > 1:
                bench += [f"--nodes={settings.nodes}", f"--node-rank={settings.index}"]
                bench += [f"--rendezvous={address}:{ports[1]}"]
            command = ["sh", "-c", f"{shlex.join(bench)} && exec {shlex.join(command)}"]
            settings.log("measuring what the ranks will use, before they train")
        self._over = threading.Event()
        # a thread apart from the loop that answers the other pods: the folder's file server may not answer
        offsets = dict.fromkeys(self._nccl_logs(), _MAX_NCCL_BYTES + 1)  # of earlier starts: these are not copied
        self._nccl = threading.Thread(target=self._copy_nccl, args=(offsets,), name="NCCL's log", daemon=True)
        self._nccl.start()
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as stream:
            self._tree = processes.Tree(command, environment, stream)
        self._output = threading.Thread(target=self._copy, args=(reading,), name="the ranks' output", daemon=True)
        self._output.start()

    def _copy(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as stream:
            while raw := stream.read1(65536):
                self._tail = (self._tail + raw)[-_TAIL_BYTES:]
                _write(raw)

    def _copy_nccl(self, offsets: dict[Path, int]) -> None:
        """Copy whole lines of this pod's NCCL logs, one file a rank, which the pod's log would not hold otherwise."""
        over = False
        while not over:
            over = self._over.wait(1.0)
            for path in self._nccl_logs():
                offset = offsets.get(path, 0)
                if offset > _MAX_NCCL_BYTES:
                    continue
                with contextlib.suppress(OSError), path.open("rb") as stream:
                    stream.seek(offset)
                    lines = b"".join(stream.read(1 << 20).rpartition(b"\n")[:2])
                    offsets[path] = offset + len(lines)
                    _write(lines)

    def _nccl_logs(self) -> list[Path]:
        """Return the log files of NCCL that the ranks of this host have written into the output folder."""
        folder, host = self._settings.output, os.uname().nodename.partition(".")[0]
        try:
            return sorted((folder / "nccl").glob(f"nccl.{host}.*.log")) if folder else []
        except OSError:
            return []

    def poll(self, *, terminating: bool, troubled: bool) -> int | None:
        """Return the code of the rank that failed first, or torchrun's; None while they run.

        Ranks of a pod that is terminating are asked to save and have `--save` seconds for it; ranks whose peers are in
        trouble have LOST_GRACE_SECONDS. Then they are ended.
        """
        code, now = self._tree.process.poll(), time.monotonic()
        if code is not None:
            self._output.join(5.0)
            first = run_record.find_first_failed(self._tail.decode(errors="replace")) if code else None
            if first is None or first.exit_code is None:  # a benchmark that SIGTERM ended early has no result
                return RESUMABLE if code and terminating else code
            return first.exit_code
        if terminating and not self._save_by:
            self._save_by = now + self._settings.save
            self._tree.terminate()  # the ranks, not torchrun
        if troubled and not self._end_by:
            self._end_by = now + LOST_GRACE_SECONDS
        if any(by and now > by for by in (self._save_by, self._end_by)):
            self.close()
            return RESUMABLE if terminating else ENDED_HERE
        return None

    def last_error(self) -> str:
        """Return the error that a rank of this pod printed last; "" where none did."""
        return run_record.raised(self._tail.decode(errors="replace"))

    def close(self) -> None:
        """End every process of these ranks."""
        self._tree.end(1.0)
        self._over.set()
        self._output.join(5.0)
        self._nccl.join(5.0)


def _write(raw: bytes) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(raw)
        sys.stdout.buffer.flush()


@dataclass(slots=True, kw_only=True)
class Pod:
    """The pod's life: come together, run, agree on what follows."""

    settings: Settings
    terminating: bool = False  # SIGTERM came
    arrived: list[Wire] = field(default_factory=list)  # of pod 0: connections that have not sent the index of a pod
    peers: dict[int, Wire] = field(default_factory=dict)  # of pod 0: those that wait for the next start
    restarts: int = 0
    waiting_for: str = ""
    why: str = ""  # why the job ended, in pod 0; "" while it runs and where it is done
    before: float = 0.0  # when run.json of an earlier start was written, by the file system's own clock

    def run(self) -> int:
        """Run the job until it is done or cannot resume. Return the pod's exit code."""
        settings, start = self.settings, self._follow
        if settings.once:
            return self._run_once()
        if settings.index == 0:
            self._end_record(RESUMABLE, "its pod was lost", 0.0)  # of a start whose pods are all gone
            self.before = post.find_write_time(settings.output)
            start = partial(self._run_as_leader, _listen(settings.meet[1]))
        while (code := start()) == RESUMABLE:
            if self.terminating:
                return TERMINATED
        return code

    def _run_once(self) -> int:
        """Run the ranks once; an operator restarts what fails. Return the exit code."""
        settings, (host, port) = self.settings, self.settings.meet
        self.before = post.find_write_time(settings.output)
        with contextlib.closing(Ranks(settings, host if settings.index else "127.0.0.1", (port, port + 1))) as ranks:
            while (code := ranks.poll(terminating=self.terminating, troubled=False)) is None:
                time.sleep(_POLL_SECONDS)
        if self.terminating and code:
            code = TERMINATED  # for an operator to start the pod again; Slurm's script goes by the job's own code
            if settings.output is not None and "SLURM_JOB_ID" in os.environ:
                record = run_record.read_since(settings.output / "run.json", self.before)
                code = run_record.choose_exit_code(record, TERMINATED, cut_short=True)
        code = code if code >= 0 else run_record.KILLED - code
        if code and settings.index == 0:
            self.why = f"the ranks of pod 0 ended with exit code {code}. {ranks.last_error()}".strip()
            self._end_record(code, self.why, self.before)
        return code

    def _wait(self, grace: float = 0.0) -> Iterator[None]:
        """Yield until the time for the other pods is over. Raises SystemExit then, and after SIGTERM."""
        began, news, longest = time.monotonic(), 1.0, self.settings.wait
        while (waited := time.monotonic() - began) < longest + grace:
            if self.terminating:
                raise SystemExit(TERMINATED)
            if waited > news:
                self.settings.log(f"waiting for {self.waiting_for}, {longest - waited:.0f} s at most")
                news = waited + NEWS_SECONDS
            yield
            time.sleep(_POLL_SECONDS)
        self.why = f"{self.waiting_for} did not come within {longest:.0f} s"
        self.settings.log(self.why)
        for wire in self.peers.values():
            wire.send(code=UNAVAILABLE, why=self.why)
        self._end_record(UNAVAILABLE, self.why, 0.0)
        raise SystemExit(UNAVAILABLE)

    # pod 0

    def _run_as_leader(self, listener: socket.socket) -> int:
        """Make one start as pod 0: gather the pods, run the ranks, and send what follows. Return its code."""
        settings = self.settings
        for _ in self._wait():
            self._admit(listener)
            for wire in self.peers.values():
                wire.receive()
            self.peers = {index: wire for index, wire in self.peers.items() if not wire.closed}
            missing = [str(index) for index in range(1, settings.nodes) if index not in self.peers]
            self.waiting_for = f"pod{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {settings.nodes}"
            if not missing:
                break
        self.before = post.find_write_time(settings.output)
        with _listen(0) as first, _listen(0) as second:
            ports = [first.getsockname()[1], second.getsockname()[1]]
        wires, self.peers = self.peers, {}
        for wire in wires.values():
            wire.send(go=ports)
        with contextlib.closing(Ranks(settings, "127.0.0.1", ports, self.restarts)) as ranks:
            codes, lost = self._watch(listener, ranks, wires)
        code, reason = self.judge(codes, lost)
        if code not in (0, RESUMABLE):
            if settings.measure and code == MEASURED_FAILURE:
                reason = f"not started: measured before the job: {reason}"
            error = ranks.last_error()
            self.why = reason = f"{reason}. The last error in pod 0: {error}" if error else reason
        for wire in wires.values():
            wire.send(code=code, why=reason)
            wire.close()
        if reason:
            settings.log(reason if self.why else f"{reason}; restart {self.restarts} of {settings.restarts}")
        self._end_record(code, reason, self.before)
        return code

    def _admit(self, listener: socket.socket) -> None:
        """Accept a connection, and admit pods that have sent their index. A pod's new connection replaces its old."""
        with contextlib.suppress(OSError):
            self.arrived.append(Wire(listener.accept()[0]))
        for wire in self.arrived:
            index = next((message.get("index") for message in wire.receive()), None)
            if isinstance(index, int) and 0 < index < self.settings.nodes:
                if index in self.peers:
                    self.peers[index].close()
                self.peers[index] = wire
        waiting = [wire for wire in self.arrived if not wire.closed and wire not in self.peers.values()]
        for wire in waiting[: -self.settings.nodes]:  # a pod sends its index immediately: these are no pods
            wire.close()
        self.arrived = waiting[-self.settings.nodes :]

    def _watch(
        self, listener: socket.socket, ranks: Ranks, wires: Mapping[int, Wire]
    ) -> tuple[dict[int, int], set[int]]:
        """Return the exit code of each pod once all have ended, and the pods that were lost before."""
        codes: dict[int, int] = {}
        lost: set[int] = set()
        is_troubled, until = False, math.inf  # when a pod that has not ended counts as lost: it may be stopped
        while len(codes) + len(lost) < self.settings.nodes:
            time.sleep(_POLL_SECONDS)
            self._admit(listener)
            for index, wire in wires.items():
                for message in wire.receive():
                    if isinstance(message.get("ended"), int):
                        codes[index] = message["ended"]
                # a pod that has connected again has lost its ranks
                is_gone = wire.closed or index in self.peers or time.monotonic() > until
                if is_gone and index not in codes and index not in lost:
                    self.settings.log(f"pod {index} of {self.settings.nodes} was lost")
                    lost.add(index)
            if not is_troubled and (lost or any(codes.values())):
                is_troubled, until = True, time.monotonic() + 2 * self.settings.save
                for wire in wires.values():
                    wire.send(troubled=True)
            code = None if 0 in codes else ranks.poll(terminating=self.terminating, troubled=is_troubled)
            if code is not None:
                codes[0], until = code, min(until, time.monotonic() + self.settings.wait)
        return codes, lost

    def judge(self, codes: Mapping[int, int], lost: set[int]) -> tuple[int, str]:
        """Decide what follows: RESUMABLE to start again, or the job's exit code; and why.

        A lost pod, or ranks that saved and ended, make all others fail: these come first.
        """
        if not lost and not any(codes.values()):
            return 0, ""
        saved = [str(index) for index, code in codes.items() if code in (RESUMABLE, -signal.SIGTERM)]
        killed = [str(index) for index, code in codes.items() if code == -signal.SIGKILL]
        failed = {index: code for index, code in codes.items() if code not in (0, ENDED_HERE)}
        if lost:
            reason = f"pod {', '.join(map(str, sorted(lost)))} was lost"
        elif saved or self.terminating:
            reason = f"the ranks of pod {', '.join(saved)} ended after SIGTERM" if saved else "pod 0 received SIGTERM"
        elif killed or not failed:
            reason = f"a rank of pod {', '.join(killed)} was ended by SIGKILL"
        else:
            index, code = max(failed.items(), key=lambda item: (item[1] > 1, item[1] > 0, -item[0]))  # the job's own
            code = code if code > 0 else run_record.KILLED - code
            return code, f"the ranks of pod {index} ended with exit code {code}"
        if self.terminating or self.restarts < self.settings.restarts:
            self.restarts += 1
            return RESUMABLE, reason
        done = f"{reason}; restart {self.settings.restarts} of {self.settings.restarts} is used up"
        return UNAVAILABLE, f"{done}: a new launch resumes from the last checkpoint"

    # the others

    def _follow(self) -> int:
        """Make one start as another pod: connect to pod 0, run the ranks, and follow its verdict. Return its code."""
        wire, ports = self._connect()
        ended, troubled, until = False, False, math.inf
        ranks = Ranks(self.settings, self.settings.meet[0], ports)
        with contextlib.closing(wire), contextlib.closing(ranks):
            while not wire.closed and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                for message in wire.receive():
                    if isinstance(code := message.get("code"), int):
                        if code != RESUMABLE:
                            self.settings.log(str(message.get("why") or "done"))
                            time.sleep(LINGER_SECONDS if code else 0.0)
                        return code
                    troubled = troubled or bool(message.get("troubled"))
                if not ended and (exit_code := ranks.poll(terminating=self.terminating, troubled=troubled)) is not None:
                    wire.send(ended=exit_code)
                    ended = True
                    if exit_code:  # pod 0 decides within half of this time, unless it is stopped
                        until = time.monotonic() + 4 * self.settings.save
        self.settings.log("pod 0 was lost; waiting for the next")
        self._end_record(RESUMABLE, "pod 0 was lost", 0.0)
        return RESUMABLE

    def _connect(self) -> tuple[Wire, list[int]]:
        """Return the connection to pod 0, and the ports at which the ranks meet."""
        host, port = self.settings.meet
        wire = None
        for _ in self._wait(SEND_SECONDS):  # pod 0, which waits as long, says first who is missing
            if wire is not None and not wire.closed:
                for message in wire.receive():
                    if isinstance(ports := message.get("go"), list):
                        return wire, ports
                continue
            try:
                wire = Wire(socket.create_connection((host, port), timeout=SEND_SECONDS))
                wire.send(index=self.settings.index)
                self.waiting_for = f"pod 0 at {host}:{port} (others are not there yet)"
            except OSError as error:
                self.waiting_for = f"pod 0 at {host}:{port} ({error})"
                time.sleep(1.0)
        raise AssertionError  # `_wait` ends by an error

    def _end_record(self, code: int, reason: str, began: float) -> None:
        """End the record that its ranks could not end, and upload it."""
        if self.settings.output is None:
            return
        status = "interrupted" if code in (RESUMABLE, UNAVAILABLE, TERMINATED) else "failed"
        code = RESUMABLE if code == UNAVAILABLE else code  # a new launch resumes
        path = self.settings.output / "run.json"
        record, is_ended = run_record.end(path, run_record.read_since(path, began), status, code, reason)
        if record and is_ended and (text := post.send(run_record.dumps(record).encode(), post.ONE_SECONDS)):
            self.settings.log(f"the agent does not have this run's record: {text}")


def _listen(port: int) -> socket.socket:
    """Listen for all families that the pod has; accepting does not wait."""
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


def find_output(words: Sequence[str]) -> Path | None:
    """The job's output folder, as its command line, its plan or its YAML names it; None where these are refused."""
    plan, config = (
        Path(words[words.index(option) + 1]) if option in words[:-1] else None for option in ("--plan", "--config")
    )
    settings = [word for word in words if "=" in word and not word.startswith(("-", "/", "."))]
    try:
        return Path(choose_plan(plan, config, settings)[1].output_dir)
    except (ConfigError, OSError, ValueError):
        return None


def read_settings(argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read the command line, and the pod's index where the job's controller sets it."""
    parser = argparse.ArgumentParser(prog="finetune.pod", description="One pod of a fine-tune job on a cluster.")
    numbers = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_NODEID")  # Kubeflow's operators; an Indexed Job; srun
    index = next((environment[name] for name in numbers if environment.get(name)), "0")
    parser.add_argument("--index", type=int, default=int(index), help="of this pod; default: the controller's")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each pod")
    parser.add_argument("--meet", required=True, metavar="HOST:PORT", help="where pod 0 listens")
    parser.add_argument("--restarts", type=int, help="times that an interrupted job starts again")
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="to wait for the other pods")
    parser.add_argument("--save", type=float, metavar="SECONDS", help="to save after SIGTERM")
    parser.add_argument("--measure", action="store_true", help="measure before each start; a failure ends the job")
    parser.add_argument("--once", action="store_true", help="start the ranks once: an operator restarts the pods")
    parser.add_argument("words", nargs="+", metavar="torchrun ...")
    options = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    host, _, port = options["meet"].rpartition(":")
    command = tuple(options["words"][1:] if options["words"][0] == "torchrun" else options["words"])
    return Settings(**{**options, "meet": (host, int(port)), "words": command, "output": find_output(command)})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one pod. Return its exit code."""
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    pod = Pod(settings=settings)
    # process 1 of a container has no default for it
    signal.signal(signal.SIGTERM, lambda *_: setattr(pod, "terminating", True))
    try:
        return pod.run()
    finally:
        if settings.index == 0 and settings.output is not None and "KUBERNETES_SERVICE_HOST" in os.environ:
            post.write_termination_message(settings.output / "run.json", post.TERMINATION_LOG, pod.why, pod.before)


if __name__ == "__main__":
    sys.exit(main())
