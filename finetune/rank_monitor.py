"""A thread inside each rank that samples where the main thread is, and writes it into the run's folder.

Surface: this process's Python stack (sys._current_frames), /proc/self, this process's own sockets, and PyTorch's flight
recorder, which records the last 2,000 collectives by itself. A sample takes about 0.1 ms of CPU time, more with many
sockets. Ranks exchange nothing. A rank that is stuck in a collective still writes, because the wait releases Python's
lock. A small file is written every ten seconds. The recorder is dumped when nothing has moved for STALL_SECONDS, or
when `topoflight why --watch` requests it.

This file also runs in Python environments that have nothing of Topoflight (agent/jobs/autostart), so it needs the
standard library alone. What it writes, collectives/traces/rank_files.py reads.

    torch.distributed.init_process_group = rank_monitor.starting(torch.distributed.init_process_group, Path("run"))
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import inspect
import ipaddress
import itertools
import json
import linecache
import os
import random
import re
import signal
import socket
import struct
import sys
import termios
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

RANKS_FOLDER, STATE, TRACE, ASK = "ranks", "state_rank_{rank}.json", "trace_rank_{rank}.json", "dump"
NODE_STATE = "state_node_{rank}.json"  # of torchrun on a node, until its ranks start
FIRST = "first.json"  # by torchrun of one node: the rank that failed first, or the signal that ended the job
VERDICT = "why.json"  # of an earlier start
INTERVAL_SECONDS = 1.0
WRITE_EVERY = 10  # samples
STALL_SECONDS = 15.0  # until a dump; the verdict is that of `topoflight why`
MAX_MARKS = 64  # every second goes when there are more: 4 KB
MAX_ERROR = 4000  # characters
_USUAL_LOOKS, _USUAL_SHARE = 3, 0.1  # from which a line is one that ordinary steps run through
_ACTIVE_BYTES = 1 << 18  # read, written, sent or received between two writes, apart from what the monitor writes
_DEEPEST = 200
_LIBC = ctypes.CDLL(None)
_MAX_SOCKETS = 4096
# struct tcp_info (linux/tcp.h): the state, what is sent again in vain, bytes that a peer has confirmed, bytes received
_TCP_INFO = struct.Struct("@BxB117xQQ")
_ESTABLISHED = 1
_SHOWN = 6
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL: a host without them has no GPU for a rank
_UNNUMBERED = 500_000  # from which on the number of a node is none that torchrun was given

# Of "/FILE:FUNCTION". First match from the innermost frame outward wins: a data loader's queue inside an evaluation is
# data.
_LIBRARIES = tuple((phase, re.compile(text)) for phase, text in (
    ("prompt", r"/(?:cmd|pdb)\.py:_?cmdloop|/pdb\.py:interaction|/code\.py:interact|/debugpy/\S+:wait_for_client"
               r"|/IPython/terminal/\w+\.py:(?:interact|cmdloop)|/pydevd?[_\w]*\.py:_?(?:do_)?wait_\w+"),
    # what a compiled step runs through has frames of torch._dynamo too; these are there only while it is compiled, and
    # while it is imported
    ("compile", r"/torch/_dynamo/(?:convert_frame|symbolic_convert)\.py:(?!<module>)|/triton/compiler/"),
    ("save", r"/torch/(?:serialization\.py|distributed/checkpoint/)|/safetensors/|/finetune/checkpoint\.py"),
    ("workers", r"/torch/utils/data/dataloader\.py:_(?:try_)?get_data$"),
    ("data", r"/torch/utils/data/|/datasets/|/webdataset/|/finetune/(?:data|rows)\.py"),
    ("collective", r"/torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)\.py"),
))  # fmt: skip
# Names give a phase its word, and more patience; no rank is named because of one.
_FUNCTIONS = tuple((phase, re.compile(text)) for phase, text in (
    ("save", r"^_?(?:save|write)_(?:checkpoint|model|state|pretrained)|^(?:on_)?save$"),
    ("evaluate", r"^(?!_?maybe_).*?(?<![a-z])(?:eval|evaluate|evaluation|validate|validation)(?:_|$)"),
))  # fmt: skip
# Its batches are used up: it answers the collectives of the others.
_JOIN = re.compile(r"/torch/distributed/algorithms/join\.py:__exit__$")
_SERVER = re.compile(
    r"/(?:ssl|socket)\.py:|/http/client\.py:|/urllib/request\.py:|/(?:urllib3|requests|httpx|httpcore|botocore|s3transfer"
    r"|boto3|aiohttp|grpc|paramiko|google/(?:cloud|resumable_media|auth)|huggingface_hub|fsspec|s3fs|gcsfs)/"
)
_WAITS_FOR_THREAD = re.compile(r"/(?:threading|queue)\.py$")
_INPUT = re.compile(r"(?<![\w.])input\(")  # input() adds no Python frame
_STANDARD_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 - compared with names of files as Python has them


Frame = tuple[str, int, str]  # file, line, function
Connection = tuple[int, bool, int]  # descriptor, whether bytes are sent again, bytes sent and received so far


def find_phase(stack: list[Frame]) -> str:
    """What a stack does, innermost frame first. A library's frame shows more than a function's name."""
    places = [f"/{file}:{function}" for file, _, function in stack]
    if any(map(_JOIN.search, places)):
        return "join"
    named = next((phase for *_, name in stack for phase, pattern in _FUNCTIONS if pattern.search(name)), "compute")
    library = next((phase for place in places for phase, pattern in _LIBRARIES if pattern.search(place)), "")
    if library:
        return named if library in ("data", "workers") and named == "evaluate" else library
    libraries = itertools.takewhile(lambda frame: not _is_own(frame[0]), stack)
    if named == "compute" and any(_SERVER.search(place) for place, _ in zip(places, libraries, strict=False)):
        return "server"
    return named


class RankMonitor(threading.Thread):
    """The monitoring thread of one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int, *, rendezvous: str = "", file: str = STATE) -> None:
        super().__init__(name="topoflight-rank-monitor", daemon=True)
        self.asked, self.answer = rendezvous, "pending"  # the rendezvous, until this rank has met the others there
        self.file = file.format(rank=rank)
        self.folder, self.rank = folder / RANKS_FOLDER, rank
        main = threading.main_thread()
        self.main, self.native = main.ident or 0, main.native_id
        self.samples: Counter[str] = Counter()
        self.moving: Counter[str] = Counter()  # samples in a pause without a call add nothing
        self.unsent: Counter[str] = Counter()
        self.resent: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.phase, self.since = "rendezvous" if rendezvous else "compute", time.time()
        self.where: tuple[str, ...] = ()
        self.own: tuple[str, ...] = ()
        self.calls, self.moved, self.dumped = 0, time.monotonic(), 0.0
        self.last_request = self._get_request_time()
        self.marks: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.writing = threading.Lock()  # nothing replaces the final state
        self.fixed = {"rank": rank, "world_size": world_size, **_get_identity()}
        self.traffic: dict[int, int] = {}  # by descriptor of a connection: bytes so far
        self.uncounted = 0  # bytes that sockets moved, less those that this monitor wrote into files (a dump is 2 MB)
        self.effort = self._measure_effort()
        self.pid = os.getpid()
        self.random = random.Random()  # noqa: S311 - the job's own random numbers stay as they are

    def run(self) -> None:
        """Sample until the end; what cannot be read or written is left out, and the job continues."""
        written, has_met = 0.0, False
        self.write()  # from now on, a process of an earlier start that still runs writes no more
        # at uneven times: samples in step with the steps of the job would always see the same phase
        while not self.over.wait(INTERVAL_SECONDS * self.random.uniform(0.5, 1.5)):
            if self.file != STATE.format(rank=self.rank) and self._has_started_ranks():
                self.over.set()
                self.remove_own_files()
                return
            self.sample()
            now = time.monotonic()
            if not (self.asked or has_met):
                has_met, written, self.moved = True, 0.0, now
                self._remove_files_of_others()
            still = now - self.moved
            stalled = still >= STALL_SECONDS and now - self.dumped >= max(STALL_SECONDS, still) / 2
            before, self.last_request = self.last_request, max(self._get_request_time(), self.last_request)
            if requested := self.last_request > before:  # every rank has checked by then, and all dump at the same time
                remaining = self.last_request + 2 * INTERVAL_SECONDS - time.time()
                self.over.wait(min(max(0.0, remaining), INTERVAL_SECONDS))
            if stalled or requested:
                self.dump()
                written = 0.0
            if now - written >= WRITE_EVERY * INTERVAL_SECONDS:
                self.write()
                written = now

    def remove_own_files(self) -> None:
        """Remove the files of an earlier start of this rank and of its torchrun; this start may write none."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (self.file, TRACE.format(rank=self.rank), FIRST, f"../{VERDICT}"):
                (self.folder / old).unlink(missing_ok=True)

    def _remove_files_of_others(self) -> None:
        """Remove, by rank 0, the files of an earlier start that had more ranks; each rank removes its own old files."""
        for path in self.folder.glob("*_rank_*.json") if self.rank == 0 else ():
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and int(number) >= self.fixed["world_size"]:
                with contextlib.suppress(OSError):
                    path.unlink()

    def sample(self) -> None:
        """Record where the main thread is now."""
        stack = _walk_stack(sys._current_frames().get(self.main))
        self._set_place(stack)
        if self.asked:
            self.answer = _answer_of(self.asked, self.answer)
            return
        calls, in_call = _count_collectives()
        phase = find_phase(stack)
        if phase in ("compute", "evaluate") and stack and _INPUT.search(linecache.getline(*stack[0][:2])):
            phase = "prompt"
        if in_call is not None and phase in ("compute", "evaluate") and self._waits(stack, in_call):
            phase = "collective"
        elif phase == "compute" and stack and _WAITS_FOR_THREAD.search(stack[0][0]):
            phase = _find_thread_work() or phase
        if phase != self.phase:
            self.phase, self.since = phase, time.time()
        self.samples[phase] += 1
        if calls > self.calls:
            self.moving[phase] += 1
            self.places.update(set(self.own))
            self.calls, self.moved = calls, time.monotonic()
            self.held.clear()
        connections = list(_list_connections())
        self._count_traffic(connections)
        for address, waits, again in _list_sending(connections):
            self.unsent[address] += waits
            self.resent[address] += again
            self.held[address] += waits or again

    def _set_place(self, stack: list[Frame]) -> None:
        user_frames = [frame for frame in stack if _is_own(frame[0])]
        self.where, self.own = (
            tuple(f"{file.rpartition('/')[2]}:{line} {name}" for file, line, name in frames[:_SHOWN])
            for frames in (stack, user_frames)
        )

    def _waits(self, stack: list[Frame], in_call: str) -> bool:
        """Whether the rank waits in a collective: on the GPU, or in a library's wait while its thread does not run.

        A thread that waits for the GPU runs, as CUDA polls. So a thread that sleeps in the user's own code, or in
        Python's own library for it, does not wait for the call that runs on the GPU at the same time. Nor does it wait
        for one of gloo, whose counter of completed calls goes back where two calls end in the other order.
        """
        if not in_call:
            return False
        in_library, state = bool(stack) and _is_installed(stack[0][0]), "R"
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/self/task/{self.native}/stat").read_text().rpartition(")")[2].split()[0]
        if in_call == "started":
            return state == "R" or in_library
        return state != "R" and in_library

    def _get_request_time(self) -> float:
        """Return the time at which `topoflight why` last requested a dump; 0 if it never did."""
        try:
            return (self.folder / ASK).stat().st_mtime
        except OSError:
            return 0.0

    def dump(self) -> None:
        """Write the recorder's calls, as JSON."""
        self.dumped = time.monotonic()
        # no call yet, another torch, a full disk: the verdict does without it
        with self.writing, contextlib.suppress(Exception):
            if not self.asked:
                self._replace(TRACE.format(rank=self.rank), _find_recorder()[0]())

    def write(self, *, ended: bool = False) -> None:
        """Replace the rank's file."""
        with self.writing:
            if self.over.is_set() and not ended:
                return
            unsent, now = {address: count for address, count in self.unsent.items() if count}, time.time()
            so_far = {"calls": self.calls, "samples": dict(self.samples), "moving": dict(self.moving), "unsent": unsent}
            self.marks.append({"at": now, **so_far})
            if len(self.marks) > MAX_MARKS:
                del self.marks[1::2]
            error, stack = _get_error() if ended else (None, [])
            if stack:
                self._set_place(stack)
            before, self.effort = self.effort, self._measure_effort()
            seconds, cpu, moved, children = (new - old for new, old in zip(self.effort, before, strict=True))
            usual_from = max(_USUAL_LOOKS, _USUAL_SHARE * sum(self.moving.values()))
            state = {
                **self.fixed, "written": now, "phase": self.phase, "since": self.since, "where": self.where,
                "asked": self.asked, "answer": self.answer, "own": self.own,
                "usual": [place for place, count in self.places.items() if count >= usual_from],
                "cpu_share": min(1.0, cpu / seconds) if seconds > 0 else None,
                "is_active": moved > _ACTIVE_BYTES or children > 0.05 * seconds,
                **so_far, "marks": self.marks, "groups": _list_groups(), "resent": dict(self.resent),
                "held": dict(self.held), "ended": ended, "error": error, "ends": _list_ends(),
            }  # fmt: skip
            self._replace(self.file, json.dumps(state).encode())

    def _measure_effort(self) -> tuple[float, float, float, float]:
        """(now, CPU seconds of the main thread, bytes that the process moved, CPU seconds of its children)."""
        cpu = moved = children = 0.0
        with contextlib.suppress(OSError, AttributeError):
            cpu = time.clock_gettime(time.pthread_getcpuclockid(self.main))
        with contextlib.suppress(OSError, ValueError, IndexError):
            counts = [int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()[:2]]
            moved = float(sum(counts) + self.uncounted)
            pids = Path(f"/proc/self/task/{self.native}/children").read_text().split()[:64]
            ticks = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids)
            children = sum(int(user) + int(system) for user, system in ticks) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), cpu, moved, children

    def _count_traffic(self, connections: list[Connection]) -> None:
        """Add what the connections have moved since the last sample: /proc/self/io leaves out send() and recv()."""
        before, self.traffic = self.traffic, {fd: moved for fd, _, moved in connections}
        for fd, moved in self.traffic.items():  # a descriptor with fewer bytes is of a new connection
            old = before.get(fd, 0)
            self.uncounted += moved - old if moved >= old else moved

    def _has_started_ranks(self) -> bool:
        """Whether torchrun has a child with the variable that it gives its ranks; other children are not ranks."""
        with contextlib.suppress(OSError):
            pids = Path(f"/proc/self/task/{self.native}/children").read_text().split()
            return any(b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids)
        return False

    def end(self) -> None:
        """The process is done: the recorder's calls, the last state, and the error that ended it, if one did.

        A launcher ends the other ranks of a failure with SIGTERM. It acts once both are written.
        """
        if self.over.is_set() or os.getpid() != self.pid:
            return
        self.over.set()
        handler = signal.getsignal(signal.SIGTERM)  # None: not of Python, and stays
        is_ours = handler is not None and threading.current_thread() is threading.main_thread()
        signals: list[int] = []
        if is_ours:
            signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
        try:
            self.write(ended=True)
            self.dump()
        finally:
            if is_ours:
                signal.signal(signal.SIGTERM, handler)
            if signals:
                signal.raise_signal(signal.SIGTERM)
        self.join(timeout=2 * INTERVAL_SECONDS)

    def _replace(self, name: str, text: bytes) -> None:
        draft = self.folder / f".{name}.draft"
        with contextlib.suppress(OSError, ValueError, LookupError):
            if json.loads((self.folder / self.file).read_bytes())["marks"][0]["at"] > self.marks[0]["at"]:
                return  # this rank has been started again: a launcher that is killed may leave its ranks behind
        with contextlib.suppress(OSError):
            self.uncounted -= draft.write_bytes(text)
            draft.replace(self.folder / name)


def prepare() -> None:
    """Before the process group: NCCL's recorder dumps on a timeout, and records how long each call takes on the GPU.

    The times show how long a rank waited for others. The number of calls is set unless the user has set it under either
    of its names; the second is that of PyTorch before 2.9.
    """
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def starting(function: Any, folder: Path) -> Any:
    """init_process_group with the monitor, once, in a run of more than one rank.

    The rendezvous is part of the job, so the monitor starts before it where the rank is known by then.
    """
    prepare()
    monitor: RankMonitor | None = None

    @functools.wraps(function)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        nonlocal monitor
        with contextlib.suppress(Exception):  # after any error the job continues
            bound = inspect.signature(function).bind(*arguments, **options).arguments
            rank, world = (int(os.environ[name.upper()] if bound.get(name, -1) < 0 else bound[name])
                           for name in ("rank", "world_size"))  # fmt: skip
            if monitor is None and world > 1:
                monitor = _watch(RankMonitor(folder, rank, world, rendezvous=_find_rendezvous(bound)))
        result = function(*arguments, **options)
        with contextlib.suppress(Exception):
            import torch.distributed as dist

            if monitor is not None:
                monitor.asked = ""
            elif dist.get_world_size() > 1:
                monitor = _watch(RankMonitor(folder, dist.get_rank(), dist.get_world_size()))
        return result

    return init_process_group


def launching(function: Any, folder: Path) -> Any:
    """torchrun's launch_agent: until its ranks start, the file of this node names the rendezvous that it waits at.

    At the end torchrun of a job on one node writes which rank failed first, or the signal that it received itself, as
    its log may be lost.
    """

    @functools.wraps(function)
    def launch_agent(config: Any, *arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(Exception):
            node = config.rdzv_configs.get("rank", _UNNUMBERED + os.getpid() % _UNNUMBERED)
            rendezvous = config.rdzv_endpoint or "the rendezvous"
            _watch(RankMonitor(folder, node, config.max_nodes, rendezvous=rendezvous, file=NODE_STATE))
        try:
            return function(config, *arguments, **options)
        except Exception as error:
            with contextlib.suppress(Exception):  # not every error is of a rank
                if (received := getattr(error, "sigval", None)) is not None:
                    end = {"signal": int(received), "at": time.time()}
                else:
                    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
                    end = {"rank": rank, "exit_code": failure.exitcode}
                if config.max_nodes == 1:
                    (folder / RANKS_FOLDER / FIRST).write_text(json.dumps(end))
            raise

    return launch_agent


def _watch(monitor: RankMonitor) -> RankMonitor:
    monitor.remove_own_files()  # before the thread runs, which may be after the rank has failed
    monitor.start()
    atexit.register(monitor.end)
    return monitor


def _find_rendezvous(bound: dict[str, Any]) -> str:
    """The address of the rendezvous that init_process_group asks: "10.0.0.1:29500"."""
    method = str(bound.get("init_method") or "env://")
    if bound.get("store") is not None or method.startswith("file:"):
        return "the rendezvous"
    return urlsplit(method).netloc or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _answer_of(place: str, before: str) -> str:
    """ "connected" to the port, or where none is known; "closed" where it was; "unresolved" by name; else empty."""
    host, _, port = place.rpartition(":")
    peers = (_get_address(fd, _LIBC.getpeername) for fd, *_ in _list_connections())
    if not port.isdecimal() or any(peer and str(peer[1]) == port for peer in peers):
        return "connected"
    if before in ("connected", "closed"):
        return "closed"
    try:
        return "" if socket.getaddrinfo(host.strip("[]"), None) else before
    except OSError:
        return "unresolved"


def _walk_stack(frame: FrameType | None) -> list[Frame]:
    rows = itertools.islice(traceback.walk_stack(frame), _DEEPEST) if frame is not None else ()
    return [(one.f_code.co_filename, line or 0, one.f_code.co_name) for one, line in rows]  # None between two lines


def _find_thread_work() -> str:
    """The long work of another thread, for which the main thread may wait: "server" or "save"; else empty.

    Daemon threads serve something in the background, such as a logger or a metrics page. No thread waits for them.
    """
    work = {thread.ident for thread in threading.enumerate() if not thread.daemon}
    stacks = [_walk_stack(frame) for ident, frame in sys._current_frames().items() if ident in work]
    phases = set(map(find_phase, stacks))
    return next((phase for phase in ("server", "save") if phase in phases), "")


def _is_own(file: str) -> bool:
    """Whether a file is the user's own code: neither an installed package nor Python itself."""
    return not _is_installed(file) and not file.startswith((_STANDARD_LIBRARY, "<"))


def _is_installed(file: str) -> bool:
    return "/site-packages/" in file or "/dist-packages/" in file


def _find_recorder() -> tuple[Callable[[], bytes], dict[str, Any]]:
    """What dumps the recorder that has calls, and the state of its groups.

    A build of PyTorch for CUDA keeps NCCL's calls apart from those of gloo. Raises Exception: any release of torch.
    """
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) and (groups := json.loads(dump(includeCollectives=False))["pg_status"]):
            return dump, groups
    return c10d._dump_fr_trace_json, {}


def _count_collectives() -> tuple[int, str | None]:
    """(collectives enqueued by this rank, over all groups; "started" or "called" where one is not over).

    NCCL reports which have begun on the GPU, gloo (-1) only which have been called. None: no recorder.
    """
    try:
        groups = _find_recorder()[1].values()
        rows = [tuple(int(group[f"last_{state}_collective"]) for state in ("enqueued", "started", "completed"))
                for group in groups]  # fmt: skip
    except Exception:  # noqa: BLE001 - any release of torch, with or without a recorder
        return 0, None
    started = any(started > completed for _, started, completed in rows)
    called = any(started < 0 and enqueued > completed for enqueued, started, completed in rows)
    return sum(row[0] for row in rows), "started" if started else "called" if called else ""


def _list_groups() -> dict[str, tuple[int, ...]]:
    """Members of each group: gloo's recorder does not name them."""
    try:
        from torch.distributed import distributed_c10d as c10d

        world: Any = c10d._world
        return {name: tuple(sorted(world.pg_group_ranks[group])) for group, name in world.pg_names.items()}
    except Exception:  # noqa: BLE001 - no public name has it
        return {}


def _get_identity() -> dict[str, Any]:
    """What does not change: host, process, addresses."""
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename  # NodeName of slurm.conf may differ from it
    identity: dict[str, Any] = {"host": host, "pid": os.getpid()}
    with contextlib.suppress(KeyError, ValueError):
        variables = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
        most_restarts, count = (int(os.environ[name]) for name in variables)
        identity["restarts_left"] = max(0, most_restarts - count)
    gpu = os.environ.get("LOCAL_RANK", "")
    if gpu.isdecimal() and any(map(os.path.exists, _DRIVERS)):
        identity["gpu"] = int(gpu)
    with contextlib.suppress(OSError, ValueError, IndexError):
        identity["started"] = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        identity["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        identity["pid_namespace"] = str(Path("/proc/self/ns/pid").readlink())
    with contextlib.suppress(OSError, ValueError):  # proc(5): lines with "/32 host LOCAL" follow the address
        lines = Path("/proc/self/net/fib_trie").read_text().splitlines()
        local = {old.split()[-1] for old, new in itertools.pairwise(lines) if "/32 host LOCAL" in new}
        identity["addresses"] = sorted(address for address in local if not address.startswith("127."))
    return identity


def _list_ends() -> tuple[str, ...]:
    """Own ends of this process's connections: a peer that loses one names it in its error."""
    ends = (_get_address(fd, _LIBC.getsockname) for fd, *_ in _list_connections())
    return tuple(sorted(f"{end[0]}:{end[1]}" for end in ends if end is not None))


def _list_connections() -> Iterator[Connection]:
    """This process's established TCP connections: descriptor, whether bytes are sent again, bytes moved (tcp(7)).

    By libc: for /proc/net/tcp the kernel walks the whole host's table (5 ms), and a socket object of Python's may
    change how the job's own one blocks.
    """
    fds: list[int] = []
    with contextlib.suppress(OSError):
        fds = sorted(int(one) for one in os.listdir("/proc/self/fd"))[:_MAX_SOCKETS]  # noqa: PTH208 - names alone
    info = (ctypes.c_ubyte * _TCP_INFO.size)()
    for fd in fds:
        size = ctypes.byref(ctypes.c_uint32(len(info)))
        if not _LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, size) and info[0] == _ESTABLISHED:
            _, again, sent, received = _TCP_INFO.unpack(info)
            yield fd, again > 0, sent + received


def _get_address(fd: int, function: Any) -> tuple[Any, int] | None:
    """(IP address, port) of a socket, by getsockname or getpeername."""
    name, length = (ctypes.c_ubyte * 128)(), ctypes.c_uint32(128)
    if function(fd, name, ctypes.byref(length)):
        return None
    six = int.from_bytes(bytes(name[:2]), sys.byteorder) == socket.AF_INET6
    address = ipaddress.ip_address(bytes(name[8:24] if six else name[4:8]))
    return getattr(address, "ipv4_mapped", None) or address, int.from_bytes(bytes(name[2:4]), "big")


def _get_error() -> tuple[str | None, list[Frame]]:
    """The exception that nobody caught, with its whole message, and its stack."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        return None, []
    stack = [(one.f_code.co_filename, line, one.f_code.co_name) for one, line in traceback.walk_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR]}", stack[::-1]


def _list_sending(connections: list[Connection]) -> list[tuple[str, bool, bool]]:
    """Other hosts' addresses: whether bytes to them wait to be sent, and whether some are sent again."""
    peers: dict[str, tuple[bool, bool]] = {}
    for fd, is_resent, _ in connections:
        if (peer := _get_address(fd, _LIBC.getpeername)) is None or peer[0].is_loopback:
            continue
        with contextlib.suppress(OSError):  # closed meanwhile
            queued = int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
            waits, again = peers.get(str(peer[0]), (False, False))
            peers[str(peer[0])] = (waits or queued > 0, again or is_resent)
    return [(address, *flags) for address, flags in peers.items()]
