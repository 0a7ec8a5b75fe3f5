"""Run the ranks of one pod of a job on a cluster, and in an Indexed Job start again what was interrupted.

`python -m finetune.pod --index 1 --nodes 2 --ranks 8 --meet sft-0.sft:29400 -- torchrun -m finetune.train ...`

With `--once` the pod starts torchrun once and ends with the job's own exit code: JobSet's and Kubeflow's operators
restart pods by their own policies. Without it, in a bare Indexed Job, pod 0 listens at `--meet`; the other pods connect
whenever their image is there, and torchrun starts when all have come. The connections stay open while the ranks run, so
that each pod knows of every other whether it lives and how it ended: all start again together (a rank saved and ended,
a pod was lost), or all end with the code of the one that failed. With `--measure` the pods are first measured together;
a result that fails is such a failure. Surface: TCP, one JSON object a line; SIGTERM; stdout. No torch in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from contracts import job_plan, run_record
from contracts.job_config import ConfigError
from finetune import post
from finetune.pod_ranks import ENDED_HERE, RESTARTS, SAVE_SECONDS, WAIT_SECONDS, Ranks, Settings

RESUMABLE = run_record.RESUMABLE
UNAVAILABLE = 69  # EX_UNAVAILABLE: another pod did not come, or the restarts are used up
TERMINATED = 128 + signal.SIGTERM  # this pod was deleted or its node drained: its replacement goes on
BEAT_SECONDS, SILENCE_SECONDS = 5.0, 30.0  # a pod whose node is gone sends no FIN
LINGER_SECONDS = 5.0  # the others end after pod 0, whose log the job's controller then keeps
NEWS_SECONDS = 30.0
_POLL_SECONDS = 0.05
_LINE_BYTES = 4096
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=")


class RendezvousTimeout(Exception):  # noqa: N818 - as TimeoutError's kin in torch
    """The pods did not come together; the message says who is missing."""


class Terminated(Exception):  # noqa: N818 - no error: the pod was told to end
    """SIGTERM came while no rank ran."""


class Verdict(NamedTuple):
    """What follows from how all pods ended."""

    again: bool
    code: int
    why: str


class Wire:
    """One connection between two pods: JSON objects, one a line. Silence ends it as a closed connection does."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.closed = False
        self._left = b""
        self._received_at = self._sent_at = time.monotonic()

    def send(self, **message: Any) -> None:
        """Send one object. A peer that takes none closes the connection."""
        try:
            self.connection.settimeout(BEAT_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            self._sent_at = time.monotonic()
        except OSError:
            self.close()

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come since the last call, and send a beat where it is time for one."""
        found: list[dict[str, Any]] = []
        now = time.monotonic()
        if not self.closed and now - self._sent_at > BEAT_SECONDS:
            self.send()
        try:
            self.connection.setblocking(False)
            while raw := self.connection.recv(65536):
                self._received_at = now
                *lines, self._left = (self._left + raw).split(b"\n")
                found += [value for line in lines if isinstance(value := json.loads(line), dict)]
                if len(self._left) > _LINE_BYTES:
                    raise ValueError("a line that does not end")
            self.close()
        except BlockingIOError:
            if now - self._received_at > SILENCE_SECONDS:
                self.close()
        except (OSError, ValueError):  # closed by one of the two, or no JSON
            self.close()
        return found

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        self.connection.close()


@dataclass(slots=True, kw_only=True)
class Pod:
    """The pod's life: come together, run, agree on what follows."""

    settings: Settings
    terminating: bool = False  # SIGTERM came
    listener: socket.socket | None = None
    peers: dict[int, Wire] = field(default_factory=dict)  # of pod 0: those that wait for the next start
    restarts: int = 0
    is_measured: bool = False  # by pod 0: the ranks train next
    waiting_for: str = ""
    why: str = ""  # why the job ended, in pod 0; "" while it runs and where it is done
    before: float = 0.0  # when run.json of an earlier start was written, by the file system's own clock

    def run(self) -> int:
        """Run the job until it is done or cannot go on. Return the pod's exit code."""
        if self.settings.once:
            return self._run_once()
        try:
            while True:
                verdict = self._lead() if self.settings.index == 0 else self._follow()
                if self.terminating and verdict.again:
                    return TERMINATED
                if not verdict.again:
                    return verdict.code
        except Terminated:
            return TERMINATED
        except RendezvousTimeout as error:
            self._log(str(error))
            for wire in self.peers.values():
                wire.send(again=False, code=UNAVAILABLE, why=str(error))
            self._end_record("failed", UNAVAILABLE, str(error), 0.0)
            return UNAVAILABLE

    def _run_once(self) -> int:
        """Measure where asked, then train, each once; an operator restarts what fails. Return the exit code."""
        host, port = self.settings.meet
        address = host if self.settings.index else "127.0.0.1"
        self.before = post.written_at(self.settings.output)
        for measuring in (True, False) if self.settings.measure else (False,):
            ranks = Ranks(self.settings, address, port + measuring, measuring=measuring)
            try:
                while (ended := ranks.poll(terminating=self.terminating, troubled=False)) is None:
                    time.sleep(_POLL_SECONDS)
            finally:
                ranks.end()
            code = self._code_after_sigterm() if self.terminating and ended else ended  # done is done
            if code:
                break
        code = code if code >= 0 else run_record.KILLED - code
        if code and self.settings.index == 0:
            self.why = f"the ranks of pod 0 ended with exit code {code}. {ranks.last_error()}".strip()
            interrupted = code in (RESUMABLE, TERMINATED)
            self._end_record("interrupted" if interrupted else "failed", code, self.why, self.before)
        return code

    def _code_after_sigterm(self) -> int:
        """Return TERMINATED, for operators to start the pod again; for Slurm's script the job's own code."""
        if self.settings.output is None or "SLURM_JOB_ID" not in os.environ:
            return TERMINATED
        path = self.settings.output / "run.json"
        return run_record.own_exit_code(path, TERMINATED, self.before, cut_short=True)

    def _wait(self, grace: float = 0.0) -> Iterator[None]:
        """Yield until the time for the other pods is over. Raises RendezvousTimeout and Terminated."""
        began, news = time.monotonic(), 1.0
        while (waited := time.monotonic() - began) < self.settings.wait_seconds + grace:
            if self.terminating:
                raise Terminated
            if waited > news:
                self._log(f"waiting for {self.waiting_for}, {self.settings.wait_seconds - waited:.0f} s at most")
                news = waited + NEWS_SECONDS
            yield
            time.sleep(_POLL_SECONDS)
        raise RendezvousTimeout(f"{self.waiting_for} did not come within {self.settings.wait_seconds:.0f} s")

    # pod 0

    def _lead(self) -> Verdict:
        """Make one start as pod 0: gather the pods, run the ranks, and send what follows."""
        settings = self.settings
        if self.listener is None:
            self._end_record("interrupted", RESUMABLE, "its pod was lost", 0.0)  # of a start whose pods are all gone
            self.listener = _listen(settings.meet[1])
        for _ in self._wait():
            self._accept()
            for wire in self.peers.values():
                wire.receive()
            self.peers = {index: wire for index, wire in self.peers.items() if not wire.closed}
            missing = [str(index) for index in range(1, settings.nodes) if index not in self.peers]
            self.waiting_for = f"pod{'s' if len(missing) > 1 else ''} {', '.join(missing)} of {settings.nodes}"
            if not missing:
                break
        self.before = post.written_at(settings.output)
        port, wires = _free_port(), dict(self.peers)
        self.peers = {}
        measuring, self.is_measured = settings.measure and not self.is_measured, False
        for wire in wires.values():
            wire.send(go=port, measure=measuring)
        if measuring:
            self._log("measuring what the ranks will use, before they train")
        ranks = Ranks(settings, "127.0.0.1", port, restarts=self.restarts, measuring=measuring)
        try:
            codes, lost = self._watch(ranks, wires)
        finally:
            ranks.end()
        verdict = self.judge(codes, lost)
        if not verdict.again and verdict.code and (error := ranks.last_error()):
            verdict = verdict._replace(why=f"{verdict.why}. The last error in pod 0: {error}")
        if measuring and not verdict.again:
            verdict = verdict._replace(why=f"not started: measured before the job: {verdict.why}")
            if not verdict.code:  # passed: all pods start again, to train
                self.is_measured = True
                verdict = Verdict(again=True, code=0, why="measured: no result fails; the ranks train")
        return self._close(verdict, wires.values())

    def _accept(self) -> None:
        """Accept one pod that connects; it sends first which one it is."""
        assert self.listener is not None  # noqa: S101 - `_lead` has made it
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            wire = Wire(connection)
            until = time.monotonic() + 1.0
            while not wire.closed and time.monotonic() < until:
                for message in wire.receive():
                    index = message.get("index")
                    if isinstance(index, int) and 0 < index < self.settings.nodes:
                        if index in self.peers:
                            self.peers[index].close()
                        self.peers[index] = wire
                        return
                time.sleep(_POLL_SECONDS)
            wire.close()

    def _watch(self, ranks: Ranks, wires: Mapping[int, Wire]) -> tuple[dict[int, int], set[int]]:
        """Return the exit code of each pod once all have ended, and the pods that were lost before."""
        codes: dict[int, int] = {}
        lost: set[int] = set()
        troubled_at = 0.0
        while len(codes) + len(lost) < self.settings.nodes:
            time.sleep(_POLL_SECONDS)
            self._accept()
            for index, wire in wires.items():
                for message in wire.receive():
                    if isinstance(message.get("ended"), int):
                        codes[index] = message["ended"]
                gone = wire.closed or index in self.peers  # it has come anew: the one that ran is gone
                gone = gone or bool(troubled_at and time.monotonic() - troubled_at > 2 * self.settings.save_seconds)
                if gone and index not in codes and index not in lost:
                    self._log(f"pod {index} of {self.settings.nodes} was lost")
                    lost.add(index)
            if not troubled_at and (lost or any(codes.values())):
                troubled_at = time.monotonic()
                for wire in wires.values():
                    wire.send(troubled=True)
            code = None if 0 in codes else ranks.poll(terminating=self.terminating, troubled=bool(troubled_at))
            if code is not None:
                codes[0] = code
        return codes, lost

    def judge(self, codes: Mapping[int, int], lost: set[int]) -> Verdict:
        """Decide what follows. A lost pod, or ranks that saved and ended, make all others fail: these come first."""
        saved = [index for index, code in codes.items() if code in (RESUMABLE, -signal.SIGTERM)]
        killed = [index for index, code in codes.items() if code == -signal.SIGKILL]
        failed = {
            index: code
            for index, code in codes.items()
            if code not in (0, ENDED_HERE) and index not in (*saved, *killed)
        }
        if not lost and not any(codes.values()):
            return Verdict(again=False, code=0, why="")
        if lost:
            why = f"pod {', '.join(map(str, sorted(lost)))} was lost"
        elif saved or self.terminating:
            why = f"the ranks were told to end on pod {', '.join(map(str, saved))}: saved" if saved else "told to end"
        elif killed or not failed:
            why = f"a rank of pod {', '.join(map(str, killed))} was ended by SIGKILL"
        else:
            index, code = max(failed.items(), key=lambda item: (item[1] > 1, item[1] > 0, -item[0]))  # the job's own
            code = code if code > 0 else run_record.KILLED - code
            return Verdict(again=False, code=code, why=f"the ranks of pod {index} ended with exit code {code}")
        if self.terminating or self.restarts < self.settings.restarts:
            self.restarts += 1
            return Verdict(again=True, code=RESUMABLE, why=why)
        done = f"{why}; restart {self.settings.restarts} of {self.settings.restarts} is used up"
        return Verdict(again=False, code=UNAVAILABLE, why=f"{done}: a new launch resumes from the last checkpoint")

    def _close(self, verdict: Verdict, wires: Iterable[Wire]) -> Verdict:
        """Send the verdict to all pods, and end the record where the ranks could not."""
        for wire in wires:
            wire.send(again=verdict.again, code=verdict.code, why=verdict.why)
            wire.close()
        count = f"; restart {self.restarts} of {self.settings.restarts}" if verdict.again and verdict.code else ""
        if verdict.why:
            self._log(f"{verdict.why}{count}")
        self.why = "" if verdict.again else verdict.why
        interrupted = verdict.again or verdict.code == UNAVAILABLE
        code = RESUMABLE if interrupted and verdict.code else verdict.code
        self._end_record("interrupted" if interrupted else "failed", code, verdict.why, self.before)
        return verdict

    # the others

    def _follow(self) -> Verdict:
        """Make one start as another pod: connect to pod 0, run the ranks, and follow its verdict."""
        wire, port, measuring = self._connect()
        ranks = Ranks(self.settings, self.settings.meet[0], port, measuring=measuring)
        ended, troubled = False, False
        try:
            while True:
                time.sleep(_POLL_SECONDS)
                for message in wire.receive():
                    if isinstance(message.get("code"), int):
                        return self._take_verdict(message)
                    troubled = troubled or bool(message.get("troubled"))
                if wire.closed:
                    why = "pod 0 was lost"
                    self._log(f"{why}; waiting for the next")
                    ranks.end()  # the next pod 0 starts others
                    self._end_record("interrupted", RESUMABLE, why, 0.0)
                    return Verdict(again=True, code=RESUMABLE, why=why)
                if not ended and (code := ranks.poll(terminating=self.terminating, troubled=troubled)) is not None:
                    wire.send(ended=code)
                    ended = True
        finally:
            ranks.end()
            wire.close()

    def _connect(self) -> tuple[Wire, int, bool]:
        """Return the connection to pod 0, torchrun's port, and whether this start is the measurement."""
        host, port = self.settings.meet
        wire = None
        for _ in self._wait(BEAT_SECONDS):  # pod 0, which waits as long, says first who is missing
            if wire is not None and not wire.closed:
                for message in wire.receive():
                    if isinstance(message.get("go"), int):
                        return wire, message["go"], bool(message.get("measure"))
                continue
            try:
                wire = Wire(socket.create_connection((host, port), timeout=BEAT_SECONDS))
                wire.send(index=self.settings.index)
                self.waiting_for = f"pod 0 at {host}:{port} (others are not there yet)"
            except OSError as error:
                self.waiting_for = f"pod 0 at {host}:{port} ({error})"
                time.sleep(1.0)
        raise AssertionError  # `_wait` ends by an error

    def _take_verdict(self, message: Mapping[str, Any]) -> Verdict:
        """Return pod 0's verdict; where the job failed, after pod 0 has had time to end first."""
        verdict = Verdict(again=bool(message.get("again")), code=message["code"], why=str(message.get("why", "")))
        if not verdict.again:
            self._log(verdict.why or "done")
            time.sleep(LINGER_SECONDS if verdict.code else 0.0)
        return verdict

    def _end_record(self, status: str, code: int, why: str, began: float) -> None:
        """End the record that its ranks could not end, and upload it."""
        if self.settings.output is None or not code:
            return
        path = self.settings.output / "run.json"
        before = run_record.of_start(path, began)
        record = run_record.ended(path, status=status, exit_code=code, reason=why, began=began)
        if record is None or before is None or before.status != "running":
            return
        if text := post.send(run_record.dumps(record).encode(), post.ONE_SECONDS):
            self._log(f"the agent does not have this run's record: {text}")

    def _log(self, text: str) -> None:
        print(f"pod {self.settings.index}: {text}", flush=True)  # noqa: T201 - the pod's log


def _listen(port: int) -> socket.socket:
    """For all families that the pod has; accepting does not wait."""
    if socket.has_dualstack_ipv6():
        made = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        made = socket.create_server(("", port))
    made.setblocking(False)
    return made


def _free_port() -> int:
    with _listen(0) as free:
        port: int = free.getsockname()[1]
        return port


def output_of(words: Sequence[str]) -> Path | None:
    """The job's output folder, as its command line, its plan or its YAML names it; None where these are refused."""
    plan, config = (
        Path(words[words.index(option) + 1]) if option in words[:-1] else None for option in ("--plan", "--config")
    )
    try:
        return Path(job_plan.choose(plan, config, [word for word in words if _SETTING.match(word)])[1].output_dir)
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
    parser.add_argument("--restarts", type=int, default=RESTARTS, help="times that an interrupted job starts again")
    parser.add_argument("--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS", help="for the other pods")
    parser.add_argument("--save", type=float, default=SAVE_SECONDS, metavar="SECONDS", help="for it after SIGTERM")
    parser.add_argument(
        "--measure", action="store_true", help="first measure, all pods together; a failure is the job's"
    )
    parser.add_argument("--once", action="store_true", help="start torchrun once: an operator restarts the pods")
    parser.add_argument("words", nargs="+", metavar="torchrun ...")
    arguments = parser.parse_args(argv)
    host, _, port = arguments.meet.rpartition(":")
    words = tuple(arguments.words[1:] if arguments.words[0] == "torchrun" else arguments.words)
    return Settings(
        index=arguments.index, nodes=arguments.nodes, ranks=arguments.ranks, meet=(host, int(port)), words=words,
        output=output_of(words), restarts=arguments.restarts, wait_seconds=arguments.wait,
        measure=arguments.measure, once=arguments.once, save_seconds=arguments.save,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one pod. Return its exit code."""
    settings = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    pod = Pod(settings=settings)

    def stop(_signal: int, _frame: Any) -> None:
        pod.terminating = True

    signal.signal(signal.SIGTERM, stop)  # process 1 of a container has no default for it
    code = pod.run()
    if settings.index == 0 and settings.output is not None and "KUBERNETES_SERVICE_HOST" in os.environ:
        post.write_termination_message(settings.output / "run.json", post.TERMINATION_LOG, pod.why, pod.before)
    return code


if __name__ == "__main__":
    sys.exit(main())
