"""One pod of a job on a cluster: waits for the others, runs its ranks, and starts again what was interrupted.

`python -m finetune.pod --index 1 --nodes 2 --ranks 8 --meet sft-0.sft:29400 -- torchrun -m finetune.train ...`

Pod 0 listens at `--meet`; the others come to it whenever their image is there, and torchrun starts when all have come.
The connections stay open while the ranks run, so that each pod knows of every other whether it lives and how it ended:
all start again together (a rank was told to save and end, a pod was lost), or all end with the code of the one that
failed. With `--measure` pods that have not been measured together are so before their ranks train; a result that fails
is such a failure. Surface: TCP, one JSON object a line; SIGTERM; stdout, which is copied to `<output_dir>/pods/`;
restarts.json in the output folder, which counts starts of one launch. No torch in this process.
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
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from collectives.bench import processes
from contracts import bounded, job_plan, run_record
from contracts.job_config import ConfigError
from finetune import post

RESUMABLE = run_record.RESUMABLE
UNAVAILABLE = 69  # EX_UNAVAILABLE: another pod did not come, or the restarts are used up
TOLD_TO_GO = 128 + signal.SIGTERM  # this pod was deleted or its node drained: its replacement goes on
WAIT_SECONDS = 3600.0  # for the others: as long as an image may take
RESTARTS = 3
BEAT_SECONDS, UNHEARD_SECONDS = 5.0, 30.0  # a pod whose node is gone sends no FIN
LOST_GRACE_SECONDS = 25.0  # for ranks whose peers are gone: most end by themselves, and tell the agent (20 s)
SAVE_SECONDS = 100.0  # for a checkpoint after SIGTERM; the pod's terminationGracePeriodSeconds must be more
LINGER_SECONDS = 5.0  # the others end after pod 0, whose log is then kept by the job's controller
NEWS_SECONDS = 30.0
_ENDED_HERE = -1000  # in place of an exit code: ranks that this pod had to end say nothing of why
_POLL_SECONDS = 0.05
_LINE_BYTES = 4096
_TAIL_BYTES = 65536  # of torchrun's output: its report of the failure is at the end
_MOST_NCCL_BYTES = 16 << 20  # of each rank's log in the pod's: channels are at the beginning
_MOST_FILE_BYTES = 1 << 20
_SETTING = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*=")


class GivenUpError(Exception):
    """The pods do not come together; the message says who is missing."""


class ToldToGoError(Exception):
    """SIGTERM came while no rank ran."""


class Verdict(NamedTuple):
    """What follows from how all pods ended."""

    again: bool
    code: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One pod's part of the job."""

    index: int
    nodes: int
    ranks: int
    meet: tuple[str, int]
    words: tuple[str, ...]  # for torchrun: "-m", "finetune.train", ...
    output: Path | None = None
    restarts: int = RESTARTS
    wait_seconds: float = WAIT_SECONDS
    save_seconds: float = SAVE_SECONDS
    measure: bool = False  # pods that have not been measured together are so before the ranks train
    launched: str = ""  # of the launch that made the job's objects: another one counts its restarts anew


class Wire:
    """One connection between two pods: JSON objects, one a line, and silence is an end too."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.closed = False
        self.mark = ""  # of the pod at the other end
        self._left = b""
        self._heard = self._last_sent = time.monotonic()

    def say(self, **message: Any) -> None:
        """Send one object; a connection that takes none is closed."""
        try:
            self.connection.settimeout(BEAT_SECONDS)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
            self._last_sent = time.monotonic()
        except OSError:
            self.close()

    def hear(self) -> list[dict[str, Any]]:
        """What has come since; a beat of our own goes out where it is time for it."""
        if self.closed:
            return []
        now = time.monotonic()
        if now - self._last_sent > BEAT_SECONDS:
            self.say()
        found: list[dict[str, Any]] = []
        try:
            self.connection.setblocking(False)
            while raw := self.connection.recv(65536):
                self._heard = now
                *lines, self._left = (self._left + raw).split(b"\n")
                found += [value for line in lines if isinstance(value := json.loads(line), dict)]
                if len(self._left) > _LINE_BYTES:
                    raise ValueError("a line that does not end")
            self.close()
        except BlockingIOError:
            if now - self._heard > UNHEARD_SECONDS:
                self.close()
        except (OSError, ValueError):
            self.close()
        return found

    def close(self) -> None:
        """No more of it."""
        self.closed = True
        self.connection.close()


class Ranks:
    """This pod's ranks under torchrun, or the benchmark with ranks of its own, and what they print."""

    def __init__(
        self, settings: Settings, address: str, port: int, restarts: int, *, measuring: bool = False
    ) -> None:  # fmt: skip
        self.measuring = measuring
        self._tail = b""
        self._log = _open_log(settings)
        nccl = _NcclLogs(settings.output)
        words = measurement(settings, address, port) if measuring else [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={settings.nodes}",
            f"--node-rank={settings.index}", f"--nproc-per-node={settings.ranks}", f"--master-addr={address}",
            f"--master-port={port}", f"--rdzv-conf=timeout={settings.wait_seconds:.0f}", *settings.words,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOPOFLIGHT_RESTARTS": str(restarts)}
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as stream:
            self._tree = processes.Tree(words, environment, stream)
        self.process = self._tree.process
        self._over = threading.Event()
        # beside the loop that answers the other pods: the folder may be on a file server that does not answer
        self._telling = threading.Thread(target=self._tell_nccl, args=(nccl,), name="NCCL's lines", daemon=True)
        self._telling.start()
        self._copying = threading.Thread(target=self._copy, args=(reading,), name="the ranks' output", daemon=True)
        self._copying.start()

    def _tell_nccl(self, nccl: _NcclLogs) -> None:
        over = False
        while not over:
            over = self._over.wait(1.0)
            for raw in nccl.fresh():
                self._write(raw)

    def _copy(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as stream:
            while raw := stream.read1(65536):
                self._tail = (self._tail + raw)[-_TAIL_BYTES:]
                self._write(raw)

    def _write(self, raw: bytes) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
        if self._log is not None:
            try:
                self._log.write(raw)
                self._log.flush()
            except OSError:  # the disk is full: the pod's own log goes on
                self._log = None

    def look(self) -> int | None:
        """The code these ranks ended with; None while they run."""
        code = self.process.poll()
        if code is None:
            return None
        self._copying.join(5.0)
        if self.measuring:
            return code
        first = run_record.first_ended(self._tail.decode(errors="replace")) if code else 0
        return code if first is None else first

    def raised(self) -> str:
        """Return the error that a rank of this pod printed last; "" where none did."""
        return run_record.raised(self._tail.decode(errors="replace"))

    def ask_to_save(self) -> None:
        """SIGTERM to the ranks and not to torchrun, which would kill them 30 s later."""
        import psutil

        with contextlib.suppress(psutil.Error):
            for rank in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    rank.terminate()

    def end(self) -> None:
        """Nothing of them is left after this."""
        self._tree.end(1.0)
        self._over.set()
        self._copying.join(5.0)
        self._telling.join(5.0)
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()


class _NcclLogs:
    """What NCCL writes into this pod's files of the output folder, for the pod's log.

    The job has NCCL log into files, one a rank, which it holds against its plan (docs/finetune.md); without this the
    log of a pod would hold no line of NCCL's.
    """

    def __init__(self, output: Path | None) -> None:
        self._folder = output / "nccl" if output else None
        self._pattern = f"nccl.{os.uname().nodename.partition('.')[0]}.*.log"
        self._read = frozenset(self._paths())  # of earlier starts
        self._at: dict[Path, int] = {}

    def _paths(self) -> list[Path]:
        try:
            return sorted(self._folder.glob(self._pattern)) if self._folder else []
        except OSError:
            return []

    def fresh(self) -> list[bytes]:
        """Whole lines that came since."""
        found = []
        for path in self._paths():
            at = self._at.get(path, 0)
            if path in self._read or at > _MOST_NCCL_BYTES:
                continue
            with contextlib.suppress(OSError), path.open("rb") as stream:
                stream.seek(at)
                raw = stream.read(1 << 20)
                whole = raw[: raw.rfind(b"\n") + 1]
                self._at[path] = at + len(whole)
                if whole:
                    found.append(whole)
        return found


@dataclass(slots=True, kw_only=True)
class Pod:
    """The pod's life: come together, run, agree on what follows."""

    settings: Settings
    terminating: bool = False  # SIGTERM came
    listener: socket.socket | None = None
    peers: dict[int, Wire] = field(default_factory=dict)  # of pod 0: those that wait for the next start
    restarts: int = 0
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)  # tells a pod from the one that was made in its place
    measured: frozenset[tuple[int, str]] = frozenset()  # by pod 0: those that have been measured together
    why: str = ""  # why the job ended, in pod 0; "" while it runs and where it is done
    before: float = 0.0  # when flight.json of an earlier start was written, by the file system's own clock

    def live(self) -> int:
        """Until the job is done or cannot go on; returns the pod's exit code."""
        try:
            while True:
                verdict = self._lead() if self.settings.index == 0 else self._follow()
                if self.terminating and verdict.again:
                    return TOLD_TO_GO
                if not verdict.again:
                    return verdict.code
        except ToldToGoError:
            return TOLD_TO_GO
        except GivenUpError as error:
            self._tell(str(error))
            for wire in self.peers.values():
                wire.say(again=False, code=UNAVAILABLE, why=str(error))
            self._end_record("failed", UNAVAILABLE, str(error), 0.0)
            return UNAVAILABLE

    # pod 0

    def _lead(self) -> Verdict:
        """One start, of pod 0: gather, run, and tell the others what follows."""
        settings = self.settings
        if self.listener is None:
            self.restarts = _restarts_before(settings)
            self._end_record("interrupted", RESUMABLE, "its pod was lost", 0.0)  # of a start whose pods are all gone
            self.listener = _listen(settings.meet[1])
            if self.restarts > settings.restarts:
                with contextlib.suppress(GivenUpError):
                    self._gather(min(UNHEARD_SECONDS, settings.wait_seconds))
                return self._close(self._used_up("the last start was interrupted"), self.peers.values())
        self._gather(settings.wait_seconds)
        _count(settings, self.restarts)
        self.before = _written_at(settings.output)
        port, wires = _free_port(), dict(self.peers)
        self.peers = {}
        here = frozenset({(0, self.mark), *((index, wire.mark) for index, wire in wires.items())})
        measuring = settings.measure and here != self.measured
        for wire in wires.values():
            wire.say(go=port, measure=measuring)
        if measuring:
            self._tell("measuring what the ranks will use, before they train")
        ranks = Ranks(settings, "127.0.0.1", port, self.restarts, measuring=measuring)
        try:
            codes, lost = self._watch(ranks, wires)
        finally:
            ranks.end()
        verdict = self.judge(codes, lost)
        if not verdict.again and verdict.code and (error := ranks.raised()):
            verdict = verdict._replace(why=f"{verdict.why}. The last error in pod 0: {error}")
        if measuring and not verdict.again:
            self.measured = here
            return self._close_measured(verdict, wires.values())
        return self._close(verdict, wires.values())

    def _gather(self, seconds: float) -> None:
        """Until all other pods are here."""
        until, news = time.monotonic() + seconds, time.monotonic() + 1.0
        while missing := [index for index in range(1, self.settings.nodes) if index not in self.peers]:
            if self.terminating:
                raise ToldToGoError
            now = time.monotonic()
            words = f"pod{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.settings.nodes}"
            if now > until:
                raise GivenUpError(f"{words} did not come within {seconds:.0f} s")
            if now > news:
                self._tell(f"waiting for {words}, {until - now:.0f} s at most")
                news = now + NEWS_SECONDS
            time.sleep(_POLL_SECONDS)
            self._accept()
            for index, wire in list(self.peers.items()):
                wire.hear()
                if wire.closed:
                    del self.peers[index]

    def _accept(self) -> None:
        """Those that came; each says first which pod it is."""
        assert self.listener is not None  # noqa: S101 - `_lead` has made it
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            wire = Wire(connection)
            until = time.monotonic() + 1.0
            while not wire.closed and time.monotonic() < until:
                for message in wire.hear():
                    index = message.get("index")
                    if isinstance(index, int) and 0 < index < self.settings.nodes:
                        if index in self.peers:
                            self.peers[index].close()
                        wire.mark = str(message.get("mark", ""))
                        self.peers[index] = wire
                        return
                time.sleep(_POLL_SECONDS)
            wire.close()

    def _watch(self, ranks: Ranks, wires: Mapping[int, Wire]) -> tuple[dict[int, int], set[int]]:
        """The code of each pod once all have ended, and the pods that were lost before they did."""
        codes: dict[int, int] = {}
        lost: set[int] = set()
        patience, troubled_at = _Patience(self.settings.save_seconds), 0.0
        while len(codes) + len(lost) < self.settings.nodes:
            time.sleep(_POLL_SECONDS)
            self._accept()
            for index, wire in wires.items():
                for message in wire.hear():
                    if isinstance(message.get("ended"), int):
                        codes[index] = message["ended"]
                gone = wire.closed or index in self.peers  # it has come anew: the one that ran is gone
                gone = gone or bool(troubled_at and time.monotonic() - troubled_at > 2 * self.settings.save_seconds)
                if gone and index not in codes and index not in lost:
                    self._tell(f"pod {index} of {self.settings.nodes} was lost")
                    lost.add(index)
            if not troubled_at and (lost or any(codes.values())):
                troubled_at = time.monotonic()
                for wire in wires.values():
                    wire.say(troubled=True)
            self._run(ranks, codes, patience, troubled=bool(troubled_at))
        return codes, lost

    def _run(self, ranks: Ranks, codes: dict[int, int], patience: _Patience, *, troubled: bool) -> None:
        """Note how this pod's ranks ended; ask them to save, or end them, where they must."""
        index = self.settings.index
        if index in codes:
            return
        if (code := ranks.look()) is not None:  # a measurement that was told to end has measured nothing
            codes[index] = RESUMABLE if ranks.measuring and self.terminating else code
        elif patience.over(terminating=self.terminating, troubled=troubled, ask=ranks.ask_to_save):
            ranks.end()
            codes[index] = RESUMABLE if self.terminating else _ENDED_HERE

    def judge(self, codes: Mapping[int, int], lost: set[int]) -> Verdict:
        """What follows. A lost pod, or ranks that were told to end, make all others fail: these come first."""
        saved = [index for index, code in codes.items() if code in (RESUMABLE, -signal.SIGTERM)]
        killed = [index for index, code in codes.items() if code == -signal.SIGKILL]
        failed = {
            index: code
            for index, code in codes.items()
            if code not in (0, _ENDED_HERE) and index not in (*saved, *killed)
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
        return self._used_up(why)

    def _used_up(self, why: str) -> Verdict:
        done = f"{why}; restart {self.settings.restarts} of {self.settings.restarts} is used up"
        return Verdict(again=False, code=UNAVAILABLE, why=f"{done}: launched again it goes on from the last checkpoint")

    def _close_measured(self, verdict: Verdict, wires: Any) -> Verdict:
        """The measurement was passed, and all start again to train; or it was not, and none trains."""
        if verdict.code:
            return self._close(verdict._replace(why=f"not started: measured before the job: {verdict.why}"), wires)
        verdict = Verdict(again=True, code=0, why="measured: no result fails; the ranks train")
        for wire in wires:
            wire.say(again=True, code=0, why=verdict.why)
            wire.close()
        self._tell(verdict.why)
        return verdict

    def _close(self, verdict: Verdict, wires: Any) -> Verdict:
        """Tell everyone, and the record."""
        for wire in wires:
            wire.say(again=verdict.again, code=verdict.code, why=verdict.why)
            wire.close()
        if verdict.again:
            self._tell(f"{verdict.why}; restart {self.restarts} of {self.settings.restarts}")
        elif verdict.why:
            self.why = verdict.why
            self._tell(verdict.why)
        interrupted = verdict.again or verdict.code == UNAVAILABLE
        code = RESUMABLE if interrupted else verdict.code
        self._end_record("interrupted" if interrupted else "failed", code, verdict.why, self.before)
        if not verdict.again:
            _forget(self.settings)
        return verdict

    # the others

    def _follow(self) -> Verdict:
        """One start, of another pod: come to pod 0, run, and do as it says."""
        wire, port, measuring = self._come()
        ranks = Ranks(self.settings, self.settings.meet[0], port, 0, measuring=measuring)
        codes: dict[int, int] = {}
        patience, reported, troubled = _Patience(self.settings.save_seconds), False, False
        try:
            while True:
                time.sleep(_POLL_SECONDS)
                for message in wire.hear():
                    if isinstance(message.get("code"), int):
                        return self._obey(message)
                    troubled = troubled or bool(message.get("troubled"))
                if wire.closed:
                    why = "pod 0 was lost"
                    self._tell(f"{why}; waiting for the next")
                    ranks.end()  # the next pod 0 starts others
                    self._end_record("interrupted", RESUMABLE, why, 0.0)
                    return Verdict(again=True, code=RESUMABLE, why=why)
                self._run(ranks, codes, patience, troubled=troubled)
                if codes and not reported:
                    wire.say(ended=codes[self.settings.index])
                    reported = True
        finally:
            ranks.end()
            wire.close()

    def _come(self) -> tuple[Wire, int, bool]:
        """The connection to pod 0, the port at which torchrun meets, and whether this start is the measurement."""
        host, port = self.settings.meet
        until, news, why = time.monotonic() + self.settings.wait_seconds, time.monotonic() + 1.0, ""
        while True:
            if self.terminating:
                raise ToldToGoError
            now = time.monotonic()
            if now > until:
                raise GivenUpError(
                    f"pod 0 at {host}:{port} did not come within {self.settings.wait_seconds:.0f} s: {why}"
                )
            if now > news:
                self._tell(f"waiting for pod 0 at {host}:{port} ({why or 'others are not there yet'})")
                news = now + NEWS_SECONDS
            try:
                wire = Wire(socket.create_connection((host, port), timeout=BEAT_SECONDS))
            except OSError as error:
                why = str(error)
                time.sleep(1.0)
                continue
            wire.say(index=self.settings.index, mark=self.mark)
            why = ""
            while not wire.closed and not self.terminating:
                for message in wire.hear():
                    if isinstance(message.get("go"), int):
                        return wire, message["go"], bool(message.get("measure"))
                if time.monotonic() > until + BEAT_SECONDS:
                    break  # pod 0, which waits as long, says who is missing
                time.sleep(_POLL_SECONDS)
            wire.close()

    def _obey(self, message: Mapping[str, Any]) -> Verdict:
        """Pod 0 has ended the start; where it ended the job, it goes first."""
        verdict = Verdict(again=bool(message.get("again")), code=message["code"], why=str(message.get("why", "")))
        if not verdict.again:
            self._tell(verdict.why or "done")
            time.sleep(LINGER_SECONDS if verdict.code else 0.0)
        return verdict

    def _end_record(self, status: str, code: int, why: str, began: float) -> None:
        """End the record that its ranks could not end, and tell the agent of it."""
        if self.settings.output is None or not code:
            return
        path = self.settings.output / "flight.json"
        before = run_record.of_start(path, began)
        record = run_record.ended(path, status=status, exit_code=code, reason=why, began=began)
        if record is None or before is None or before.status != "running":
            return
        if text := post.send(run_record.dumps(record).encode(), post.ONE_SECONDS):
            self._tell(f"the agent does not have this run's record: {text}")

    def _tell(self, text: str) -> None:
        print(f"pod {self.settings.index}: {text}", flush=True)  # noqa: T201 - the pod's log


class _Patience:
    """How long ranks that must end are waited for."""

    def __init__(self, save_seconds: float) -> None:
        self.save_seconds = save_seconds
        self.save_requested_at = self.troubled = 0.0  # when

    def over(self, *, terminating: bool, troubled: bool, ask: Any) -> bool:
        """Whether they are to be ended; asks them to save once, where this pod was told to go."""
        now = time.monotonic()
        if terminating and not self.save_requested_at:
            self.save_requested_at = now
            ask()
        if troubled and not self.troubled:
            self.troubled = now
        save_expired = self.save_requested_at and now - self.save_requested_at > self.save_seconds
        return bool(save_expired or (self.troubled and now - self.troubled > LOST_GRACE_SECONDS))


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


def _written_at(output: Path | None) -> float:
    """A moment after the record that lies there was written, by the clock that wrote it; 0.0: there is none."""
    try:
        return (output / "flight.json").stat().st_mtime + 1e-6 if output else 0.0
    except OSError:
        return 0.0


def measurement(settings: Settings, address: str, port: int) -> list[str]:
    """The benchmark that all pods run together, by the verb of the same image (docs/busbw.md): 3 for a failed result.

    With the environment as the job has it, and on the ranks that it will have.
    """
    words = [sys.executable, "-m", "agent.cli", "bench", "--quick", "--no-advice", f"--ranks={settings.ranks}"]
    if settings.nodes == 1:
        return words
    return [*words, f"--nodes={settings.nodes}", f"--node-rank={settings.index}", f"--rendezvous={address}:{port}"]


def _restarts_before(settings: Settings) -> int:
    """How many starts of this launch were interrupted before this pod came: one more than the last one counted."""
    if settings.output is None:
        return 0
    try:
        found = json.loads(bounded.read_text(settings.output / "restarts.json", _MOST_FILE_BYTES))
        same = found["launched"] == settings.launched
        return int(found["restarts"]) + 1 if same else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _count(settings: Settings, restarts: int) -> None:
    if settings.output is not None:
        with contextlib.suppress(OSError):
            settings.output.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"launched": settings.launched, "restarts": restarts})
            (settings.output / "restarts.json").write_text(text)


def _forget(settings: Settings) -> None:
    if settings.output is not None:
        with contextlib.suppress(OSError):
            (settings.output / "restarts.json").unlink()


def _open_log(settings: Settings) -> IO[bytes] | None:
    """The pod's output beside the run: it outlives the pod."""
    if settings.output is None:
        return None
    try:
        folder = settings.output / "pods"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{settings.index}.log").open("ab")
    except OSError:
        return None


def output_of(words: Sequence[str]) -> Path | None:
    """The job's output folder, as its command line, its plan or its YAML names it; None where these are refused."""
    plan, config = (
        Path(words[words.index(option) + 1]) if option in words[:-1] else None for option in ("--plan", "--config")
    )
    try:
        return Path(job_plan.choose(plan, config, [word for word in words if _SETTING.match(word)])[1].output_dir)
    except (ConfigError, OSError, ValueError):
        return None


def gate_code(path: Path | None) -> int:
    """What the gate of an init container ended with, as it left that in a file; 0 where no gate was asked for."""
    if path is None:
        return 0
    try:
        return int(bounded.read_text(path, _MOST_FILE_BYTES))
    except (OSError, ValueError):
        return UNAVAILABLE  # not known is no pass


def read_settings(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[Settings, Path | None]:
    """The command line, with what the job's controller says; the second is the gate's file."""
    parser = argparse.ArgumentParser(prog="finetune.pod", description="One pod of a fine-tune job on a cluster.")
    numbers = ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")  # Kubeflow's operators; an Indexed Job
    index = next((environment[name] for name in numbers if environment.get(name)), "0")
    parser.add_argument("--index", type=int, default=int(index), help="of this pod; default: the controller's")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="of each pod")
    parser.add_argument("--meet", required=True, metavar="HOST:PORT", help="where pod 0 listens")
    parser.add_argument("--restarts", type=int, default=RESTARTS, help="times that an interrupted job starts again")
    parser.add_argument("--wait", type=float, default=WAIT_SECONDS, metavar="SECONDS", help="for the other pods")
    parser.add_argument("--save", type=float, default=SAVE_SECONDS, metavar="SECONDS", help="for it after SIGTERM")
    parser.add_argument("--launched", type=Path, help="a file that differs from launch to launch")
    parser.add_argument(
        "--measure", action="store_true", help="first measure, all pods together; a failure is the job's"
    )
    parser.add_argument("--gate", type=Path, help="file with the exit code of the gate that ran before")
    parser.add_argument("words", nargs="+", metavar="torchrun ...")
    arguments = parser.parse_args(argv)
    host, _, port = arguments.meet.rpartition(":")
    words = tuple(arguments.words[1:] if arguments.words[0] == "torchrun" else arguments.words)
    launched = ""
    with contextlib.suppress(OSError, ValueError):
        launched = bounded.read_text(arguments.launched, _MOST_FILE_BYTES).strip() if arguments.launched else ""
    settings = Settings(
        index=arguments.index, nodes=arguments.nodes, ranks=arguments.ranks, meet=(host, int(port)), words=words,
        output=output_of(words), restarts=arguments.restarts, wait_seconds=arguments.wait, launched=launched,
        measure=arguments.measure, save_seconds=arguments.save,
    )  # fmt: skip
    return settings, arguments.gate


def main(argv: Sequence[str] | None = None) -> int:
    """Live as one pod; returns its exit code."""
    settings, gate = read_settings(sys.argv[1:] if argv is None else argv, os.environ)
    if code := gate_code(gate):
        print(f"pod {settings.index}: the gate before this job ended with {code}", flush=True)  # noqa: T201
        return code
    pod = Pod(settings=settings)

    def stop(_signal: int, _frame: Any) -> None:
        pod.terminating = True

    signal.signal(signal.SIGTERM, stop)  # process 1 of a container has no default for it
    code = pod.live()
    if settings.index == 0 and settings.output is not None and "KUBERNETES_SERVICE_HOST" in os.environ:
        leave_word(settings.output / "flight.json", TERMINATION_LOG, pod.why, pod.before)
    return code


TERMINATION_LOG = Path("/dev/termination-log")  # the kubelet takes 4096 bytes of it into the pod's status


def leave_word(record: Path, place: Path, why: str = "", began: float = 0.0) -> None:
    """Write the record in short as this container's termination message: kubectl shows it, compare-networks reads it.

    `why` is the reason where the ranks failed before they could write a record; one from before `began` is not theirs.
    """
    found = run_record.of_start(record, began) or (run_record.RunRecord(status="failed", reason=why) if why else None)
    if found is None:
        return
    with contextlib.suppress(OSError):  # the record itself is in the output folder
        due = found.forecast.step_seconds
        short = {
            "status": found.status, "reason": (found.reason or "")[:500] or None, "started_at": found.started_at,
            "host": found.host, "steps_done": found.steps_done, "transports": found.transports[:12],
            "measured": {"step_seconds": found.measured.step_seconds, "counted_steps": found.measured.counted_steps},
            "nccl": {"interfaces": found.nccl.interfaces[:12]} if found.nccl else None,
            "plan": {"forecast": {"step_seconds": {"low": due.low, "mid": due.mid, "high": due.high} if due else None}},
        }  # fmt: skip
        place.write_text(json.dumps(short)[:4096])


if __name__ == "__main__":
    sys.exit(main())
