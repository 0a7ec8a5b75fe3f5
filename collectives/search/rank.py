"""One rank of a search: `python -m collectives.search.rank SETTINGS`, where SETTINGS are RankSettings as JSON.

The rank waits for the next round in the store of the coordinator, runs the test that contains its node, and stores its
result. Each test has its own process groups, one for each rail (ranks with the same local number). No collective spans
all ranks, so a dead or stuck rank ends only its own test. Transfers run in threads that the main thread watches: bytes
that move are progress, however slow they are.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ITERATIONS = 3  # of each transfer; the median counts
CHUNKS = 16  # of a transfer; each chunk that arrives is progress
BEAT_SECONDS = 1.0
MATMUL_SIZE, MATMUL_SECONDS = {"cpu": 512, "cuda": 8192}, 1.0
ALL_REDUCE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings of one rank of a search: those of the search, and the position of the rank."""

    store: str  # "host:port" on node 0, to which all nodes connect
    nodes: int
    node: int
    local: int  # number of the rank on its node
    ranks: int  # of this node
    host: str
    domain: str
    model: str
    nvlink: str  # NVLink domain that may span hosts; "" if unknown
    backend: str
    bytes: int  # of one transfer
    silence_seconds: float  # time without a byte after which a transfer is stuck
    wait_seconds: float  # to wait for the coordinator, and for nodes to join
    journal: str = ""


class StuckError(RuntimeError):
    """A transfer in which no byte moved; `source` and `target` are positions of nodes in the test."""

    def __init__(self, source: int, target: int) -> None:
        super().__init__(f"no byte moved from {source} to {target}")
        self.link = (source, target)


def note_path(journal: str, node: int) -> Path:
    """Return the file, next to the journal, for the reason why a node cannot join. Node 0 reads it if it is shared."""
    return Path(f"{journal}.node-{node}")


def connect(settings: RankSettings) -> Any:
    """Connect to the coordinator's store, which may not listen yet. Raises torch's DistStoreError, or OSError."""
    from torch.distributed import TCPStore

    host, _, port = settings.store.rpartition(":")
    until = time.monotonic() + settings.wait_seconds
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), None)
            return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False,
                            timeout=timedelta(seconds=10))  # fmt: skip
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) and settings.journal:
                reason = f"it cannot resolve {host}, the name of node 0 ({error.strerror})"
                with suppress(OSError):  # the folder may not exist on this node
                    note_path(settings.journal, settings.node).write_text(reason, encoding="utf-8")
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


class Ring:
    """The process group of one rail in one test. Exchanges data with one source and one target at a time."""

    def __init__(self, settings: RankSettings, store: Any, me: int, size: int, device: str) -> None:
        """Create the group. It connects at the first exchange."""
        import torch
        import torch.distributed as dist

        self._settings, self._me, self._size, self._device = settings, me, size, device
        self._moved = 0
        self._errors: list[RuntimeError] = []
        count = max(1, settings.bytes // CHUNKS)
        self._out = torch.zeros(count, dtype=torch.uint8, device=device)
        self._in = torch.zeros(count, dtype=torch.uint8, device=device)
        limit = timedelta(seconds=max(1.0, settings.silence_seconds / 5))  # gloo tries five times to connect
        if settings.backend == "gloo":
            gloo, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()
            name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
            network = gloo.create_device(interface=name, lazy_init=True) if name else gloo.create_default_device(True)
            options._devices, options._timeout = [network], limit
            self._group: Any = gloo(store, me, size, options)
        else:
            self._group = dist.ProcessGroupNCCL(store, me, size, timeout=timedelta(hours=1))

    def exchange(self, stride: int) -> float:
        """Send to the node `stride` ranks after this one, and receive from the one as far before it.

        Returns the seconds from the first to the last chunk. Raises StuckError, or RuntimeError if the peer has left.
        """
        source, target = (self._me - stride) % self._size, (self._me + stride) % self._size
        arrived: list[float] = []
        self._errors.clear()
        if self._settings.backend == "gloo":
            jobs: list[Callable[[], None]] = [
                lambda: self._transfer(self._group.recv, self._in, source, arrived),
                lambda: self._transfer(self._group.send, self._out, target, []),
            ]
        else:
            jobs = [lambda: self._exchange_with_nccl(source, target, arrived)]
        threads = [threading.Thread(target=self._run_job, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        moved, since = self._moved, time.monotonic()
        while any(thread.is_alive() for thread in threads) and not self._errors:
            next(thread for thread in threads if thread.is_alive() or thread is threads[-1]).join(0.05)
            if self._moved != moved:
                moved, since = self._moved, time.monotonic()
            elif time.monotonic() - since > self._settings.silence_seconds:
                raise StuckError(*((source, self._me) if threads[0].is_alive() else (self._me, target)))
        if self._errors:
            text = str(self._errors[0])
            timed_out = "imed out" in text or "imeout" in text
            raise StuckError(source, self._me) if timed_out and len(arrived) < CHUNKS else RuntimeError(text)
        return (arrived[-1] - arrived[0]) * CHUNKS / (CHUNKS - 1)

    def _run_job(self, job: Callable[[], None]) -> None:
        try:
            job()
        except RuntimeError as error:
            self._errors.append(error)

    def _transfer(self, start: Callable[..., Any], buffer: Any, other: int, arrived: list[float]) -> None:
        for work in [start([buffer], other, chunk) for chunk in range(CHUNKS)]:
            work.wait(timedelta(seconds=self._settings.silence_seconds))
            self._moved += 1
            arrived.append(time.perf_counter())

    def _exchange_with_nccl(self, source: int, target: int, arrived: list[float]) -> None:
        """Send and receive each chunk in one NCCL group operation, because separate ones can deadlock."""
        import torch

        torch.cuda.set_device(self._device)
        for _ in range(CHUNKS):
            self._group._start_coalescing()
            self._group.send([self._out], target, 0)
            self._group.recv([self._in], source, 0)
            work = self._group._end_coalescing()
            while not work.is_completed():
                time.sleep(0)
            self._moved += 1
            arrived.append(time.perf_counter())

    def all_reduce(self) -> float:
        """Return the seconds of the fastest of three all-reduces over the group."""
        import torch

        count = ALL_REDUCE_BYTES if "cuda" in self._device else ALL_REDUCE_BYTES // 16
        data = torch.zeros(count, dtype=torch.uint8, device=self._device)
        return min(_time_call(lambda: self._group.allreduce([data]).wait(), self._device) for _ in range(3))

    def close(self) -> None:
        """Abort the group without waiting for the other ranks."""
        self._group.abort()


class Rank:
    """One rank of the search."""

    def __init__(self, settings: RankSettings) -> None:
        self.settings = settings
        self.device = f"cuda:{settings.local}" if settings.backend == "nccl" else "cpu"
        self.progress = 0
        self.where = "joined"
        self.store = connect(settings)
        self._name = f"{settings.node}/{settings.local}"

    def start(self) -> None:
        """Join the search and start the heartbeat."""
        import torch

        if self.settings.backend == "nccl":
            torch.cuda.set_device(self.device)
        described = {name: getattr(self.settings, name) for name in ("host", "domain", "model", "nvlink", "ranks")}
        self._next_round = int(self.store.add("rounds", 0)) + 1  # no round starts before this rank has joined
        row = json.loads(self.store.compare_set(f"join/{self._name}", "", json.dumps(described)))
        if row["host"] != self.settings.host:
            sys.exit(f"{row['host']} has joined with --node-rank {self.settings.node}, which must differ for each node")
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Send heartbeats with the progress of this rank until the search ends.

        Restart this process on request and when the coordinator is gone. A request contains environment variables,
        because some libraries read them only once.
        """
        store, count, request = self.store.clone(), 0, f"restart/{self._name}"
        while True:
            try:
                store.set(f"beat/{self._name}", json.dumps([count, self.progress, self.where]))
                if store.check(["end"]):
                    time.sleep(2 * BEAT_SECONDS)
                    os._exit(0)
                variables = json.loads(store.get(request)) if store.check([request]) else None
                if variables is not None:
                    store.delete_key(request)
            except RuntimeError:  # the coordinator is gone; a new one continues
                variables = {}
            if variables is not None:
                command = [sys.executable, "-m", "collectives.search.rank", *sys.argv[1:]]
                os.execve(sys.executable, command, {**os.environ, **variables})  # noqa: S606
            count += 1
            time.sleep(BEAT_SECONDS)

    def run(self) -> None:
        """Run the tests of every round until the search ends."""
        for number in itertools.count(self._next_round):
            while not _wait_for(self.store, f"round/{number}"):
                pass
            posted = json.loads(self.store.get(f"round/{number}"))
            for index, test in enumerate(posted["tests"]):
                if self.settings.node in test["nodes"]:
                    self.where = f"round {number}, test {index}"
                    key = f"test/{posted['run']}/{number}/{index}"
                    result = self._test_node(key) if test["kind"] == "alone" else self._test_transfers(key, test)
                    self.store.set(f"result/{number}/{self._name}", json.dumps(result))

    def _test_node(self, key: str) -> dict[str, Any]:
        """Time a matrix product on this rank's device, and an all-reduce over the ranks of this node."""
        import torch
        from torch.distributed import PrefixStore

        settings, kind = self.settings, self.device.partition(":")[0]
        size = MATMUL_SIZE[kind]
        left = torch.ones(size, size, device=self.device, dtype=torch.float32 if kind == "cpu" else torch.bfloat16)
        best, until = float("inf"), time.monotonic() + MATMUL_SECONDS
        # CPU time: wall time would include other programs on this CPU
        clock = time.process_time if kind == "cpu" else time.perf_counter
        while time.monotonic() < until:
            best = min(best, _time_call(lambda: left @ left, self.device, clock))
        parts = [(f"{'GPU' if kind == 'cuda' else 'rank '}{settings.local} matmul", best)]
        if settings.ranks > 1:
            ring = Ring(settings, PrefixStore(key, self.store), settings.local, settings.ranks, self.device)
            seconds = ring.all_reduce()
            parts += [("node all_reduce", seconds)] if settings.local == 0 else []
            ring.close()
        return {"alone": parts}

    def _test_transfers(self, key: str, test: Mapping[str, Any]) -> dict[str, Any]:
        """Send to every other node of the test in turn. All nodes do so at the same time, step by step."""
        from torch.distributed import PrefixStore

        settings, nodes = self.settings, list[int](test["nodes"])
        position = nodes.index(settings.node)
        result: dict[str, Any] = {"transfers": [], "stuck": [], "left": ""}
        ring = Ring(settings, PrefixStore(f"{key}/{settings.local}", self.store), position, len(nodes), self.device)
        rails = range(settings.ranks) if test["rails"] else [-1]
        steps = itertools.product(rails, range(1, len(nodes)), range(test["repeats"]), range(ITERATIONS))
        times: list[float] = []
        try:
            for number, (rail, stride, _, turn) in enumerate(steps):
                if rail in (-1, settings.local):
                    times = [*(times if turn else []), ring.exchange(stride)]
                    if turn == ITERATIONS - 1:
                        source = nodes[(position - stride) % len(nodes)]
                        result["transfers"].append((source, settings.node, rail, sorted(times)[len(times) // 2]))
                if not self._wait_for_step(f"{key}/{number}", len(nodes) * settings.ranks):
                    break
                self.progress += 1
        except StuckError as error:
            result["stuck"] = [[nodes[end] for end in error.link]]
        except RuntimeError as error:  # the peer has left
            result["left"] = str(error)[:300]
        if result["stuck"] or result["left"]:
            self.store.set(f"{key}/{number}/go", "stop")
        ring.close()
        return result

    def _wait_for_step(self, key: str, ranks: int) -> bool:
        """Wait for all ranks of the test. Return False if one is stuck or has left, or if the test was stopped."""
        if self.store.add(key, 1) == ranks:
            self.store.set(f"{key}/go", "go")
        stop = f"{key.rpartition('/')[0]}/stop"
        while not _wait_for(self.store, f"{key}/go"):
            if self.store.check([stop]):
                return False
        return bool(self.store.get(f"{key}/go") == b"go")


def _wait_for(store: Any, key: str) -> bool:
    """Wait for a key for one heartbeat. Raises RuntimeError if the store is gone."""
    from torch.distributed import DistStoreError

    try:
        store.wait([key], timedelta(seconds=BEAT_SECONDS))
    except DistStoreError:
        return False
    return True


def _time_call(work: Callable[[], Any], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    import torch

    began = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began


def main(text: str) -> None:
    """Run the rank that `text` describes until the search ends."""
    rank = Rank(RankSettings(**json.loads(text)))
    rank.start()
    try:
        rank.run()
    except RuntimeError as error:  # the store is gone: the heartbeat thread restarts this process
        sys.stderr.write(f"node {rank.settings.node}: {error}\n")
        time.sleep(10 * BEAT_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
