"""Starts what of a search runs on this node: its ranks, and on the first node the coordinator. No torch here."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collectives.bench import processes
from collectives.search.coordinator import Journal, Settings
from collectives.search.rank import Place

COORDINATORS = 4  # one, and those that take its place
END_SECONDS = 3.0


class SearchError(RuntimeError):
    """The search could not run, or this node lost the coordinator; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """What this node does in a search."""

    nodes: int
    node: int
    rendezvous: str  # "host:port" of the first node
    locals: tuple[int, ...]  # numbers of the ranks to start here
    ranks: int  # of this node, also those that another process starts
    host: str
    domain: str = ""
    model: str = ""
    backend: str = "gloo"
    bytes: int = 16 << 20
    iterations: int = 3
    silence_seconds: float = 20.0
    wait_seconds: float = 300.0
    limit_seconds: float = 7200.0
    journal: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # for the ranks, on top of this process's own
    lock_path: Path | None = None
    gpu_pids: tuple[int, ...] = ()  # other work on this node's GPUs
    force: bool = False


def search(
    spec: SearchSpec, note: Callable[[str], None] = lambda _line: None, stop: threading.Event | None = None
) -> dict[str, Any]:
    """Take part until the search ends; returns on the first node the journal's header and result, else nothing.

    Raises processes.BusyError where the node is in use, SearchError where the search did not come to its end.
    """
    processes.refuse_busy_gpus(spec.gpu_pids, spec.force)
    with ExitStack() as stack:
        if 0 in spec.locals:
            stack.enter_context(processes.lock_host(spec.lock_path))
        folder = stack.enter_context(processes.run_folder())
        output = stack.enter_context((folder / "output.log").open("wb"))
        settings = Settings(
            port=int(spec.rendezvous.rpartition(":")[2]), nodes=spec.nodes, wait_seconds=spec.wait_seconds,
            journal=str(spec.journal or folder / "journal.jsonl"), silence_seconds=spec.silence_seconds,
        )  # fmt: skip
        trees = [_start("rank", _place(spec, local), output, spec.environment) for local in spec.locals]
        try:
            if spec.node == 0 and 0 in spec.locals:
                return _lead(settings, output, spec.limit_seconds, note, stop or threading.Event())
            _follow(trees, spec, stop or threading.Event())
            return {}
        except SearchError as error:
            raise SearchError(f"{error}{_tail(folder / 'output.log')}") from None
        finally:
            for tree in trees:
                tree.end(END_SECONDS)


def _place(spec: SearchSpec, local: int) -> Place:
    return Place(
        store=spec.rendezvous, node=spec.node, local=local, locals=spec.ranks, host=spec.host, domain=spec.domain,
        model=spec.model, backend=spec.backend, bytes=spec.bytes, iterations=spec.iterations,
        silence_seconds=spec.silence_seconds, wait_seconds=spec.wait_seconds,
    )  # fmt: skip


def _start(
    module: str, settings: Settings | Place, output: Any, more: Mapping[str, str] | None = None
) -> processes.Tree:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # NCCL: an init that does not come to its end must not block the process (PyTorch, "ProcessGroupNCCL environment").
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        **os.environ,
        **(more or {}),
        "PYTHONPATH": path,
    }
    words = [sys.executable, "-m", f"collectives.search.{module}", json.dumps(asdict(settings))]
    return processes.Tree(words, environment, output)


def _lead(
    settings: Settings, output: Any, limit: float, note: Callable[[str], None], stop: threading.Event
) -> dict[str, Any]:
    """Run the coordinator, again where it dies; returns what its journal holds."""
    until, seen = time.monotonic() + limit, 0
    for _ in range(COORDINATORS):
        tree = _start("coordinator", settings, output)
        try:
            while tree.process.poll() is None:
                if stop.wait(0.2):
                    raise SearchError("stopped; the same command with the same --journal goes on from here")
                if time.monotonic() > until:
                    raise SearchError(f"not done after {limit:g} s")
                rows = Journal(Path(settings.journal)).rows if Path(settings.journal).exists() else []
                for row in rows[seen:]:
                    if "outcomes" in row:
                        note(f"round {sum('outcomes' in one for one in rows)}: {len(row['tests'])} tests")
                seen = len(rows)
        finally:
            tree.end(END_SECONDS)
        rows = Journal(Path(settings.journal)).rows
        result = next((row["result"] for row in rows if "result" in row), None)
        if result is not None:
            return {**next(row for row in rows if "hosts" in row), **result}
        note("the coordinator died; another one goes on with its journal")
    raise SearchError(f"the coordinator ended {COORDINATORS} times before the search was done")


def _follow(trees: Sequence[processes.Tree], spec: SearchSpec, stop: threading.Event) -> None:
    """Wait until the coordinator has sent the ranks home."""
    until = time.monotonic() + spec.limit_seconds
    for tree in trees:
        if why := tree.wait(until, stop):
            raise SearchError(f"{spec.host}: {why}")
    if all(tree.process.returncode for tree in trees):
        raise SearchError(f"{spec.host}: its ranks ended before the search did; the coordinator is {spec.rendezvous}")


def _tail(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace").strip()[-600:]
    return f": {text}" if text else ""


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a launcher's environment says of nodes, node, ranks and rendezvous: torchrun, Slurm, an Indexed Job."""
    if "LOCAL_RANK" in environment and "WORLD_SIZE" in environment:  # torchrun
        ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        port = int(environment.get("MASTER_PORT", "29500")) + 1  # its own store listens on MASTER_PORT
        return {
            "nodes": int(environment["WORLD_SIZE"]) // ranks, "node": int(environment["RANK"]) // ranks,
            "ranks": ranks, "locals": (int(environment["LOCAL_RANK"]),),
            "rendezvous": f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{port}",
        }  # fmt: skip
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:  # one task on each node
        found: dict[str, Any] = {"nodes": int(environment["SLURM_NTASKS"]), "node": int(environment["SLURM_PROCID"])}
        if address := environment.get("SLURM_LAUNCH_NODE_IPADDR"):
            found["rendezvous"] = f"{address}:{29400 + int(environment.get('SLURM_JOB_ID', '0')) % 1000}"
        return found
    return {"node": int(environment["JOB_COMPLETION_INDEX"])} if "JOB_COMPLETION_INDEX" in environment else {}
