"""Starts the processes of a search on this node: its ranks and, on node 0, the coordinator. Does not import torch."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import cattrs

from collectives.bench import processes
from collectives.search.coordinator import read_journal
from collectives.search.plan import SearchResult
from collectives.search.rank import RankSettings
from contracts.host_list import expand_host_list

COORDINATORS = 4  # one, and its replacements if it dies


class SearchError(RuntimeError):
    """The search could not run, or this node lost the coordinator. The text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """The part of this node in a search."""

    rank: RankSettings  # the first one that this process starts
    locals: tuple[int, ...]  # local ranks to start; another process may start the others of this node
    limit_seconds: float
    environment: Mapping[str, str]  # for the ranks, in addition to that of this process
    gpu_pids: tuple[int, ...]  # other work on this node's GPUs
    force: bool


def search(spec: SearchSpec, note: Callable[[str], None], stop: threading.Event) -> SearchResult | None:
    """Run the part of this node until the search ends. Return the result on node 0, and None on all others.

    Raises processes.BusyError if the node is in use, SearchError if the search did not finish.
    """
    processes.refuse_busy_gpus(spec.gpu_pids, spec.force)
    rank, has_local_0 = spec.rank, 0 in spec.locals
    with ExitStack() as stack:
        if has_local_0:
            stack.enter_context(processes.lock_host())
        folder = stack.enter_context(processes.run_folder())
        output = stack.enter_context((folder / "output.log").open("wb"))
        settings = replace(rank, journal=rank.journal or str(folder / "journal.jsonl"))
        if rank.node == 0:  # the store runs on this host
            rank = replace(rank, store=f"localhost:{rank.store.rpartition(':')[2]}")
        trees = [_start("rank", replace(rank, local=local), output, spec.environment) for local in spec.locals]
        try:
            if rank.node == 0 and has_local_0:
                output = stack.enter_context((folder / "coordinator.log").open("wb"))
                return _run_coordinator(settings, output, spec.limit_seconds, note, stop)
            until = time.monotonic() + spec.limit_seconds
            for tree in trees:  # until the coordinator has ended them
                if reason := tree.wait(until, stop):
                    raise SearchError(f"{rank.host}: {reason}")
            if all(tree.process.returncode for tree in trees):
                raise SearchError(f"{rank.host}: all ranks ended before the coordinator ({spec.rank.store})")
            return None
        except SearchError as error:
            text = Path(output.name).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
            raise SearchError(": ".join(filter(None, (str(error), text[-600:])))) from None
        finally:
            for tree in trees:
                tree.end()


def _start(module: str, settings: RankSettings, output: Any, variables: Mapping[str, str]) -> processes.Tree:
    # NCCL: an init that does not finish must not block the process (PyTorch, "ProcessGroupNCCL environment").
    environment = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_USE_COMM_NONBLOCKING": "1", **os.environ, **variables}
    command = [sys.executable, "-m", f"collectives.search.{module}", json.dumps(asdict(settings))]
    return processes.Tree(command, environment, output)


def _run_coordinator(
    settings: RankSettings, output: Any, limit: float, note: Callable[[str], None], stop: threading.Event
) -> SearchResult:
    """Run the coordinator, restart it if it dies, and return the result from its journal."""
    until, size, journal = time.monotonic() + limit, 0, Path(settings.journal)
    for _ in range(COORDINATORS):
        tree = _start("coordinator", settings, output, {})
        try:
            while tree.process.poll() is None:
                if stop.wait(0.2):
                    raise SearchError("stopped. Run the command again with the same --journal to continue")
                if time.monotonic() > until:
                    raise SearchError(f"the search did not finish within {limit:g} s")
                if journal.exists() and journal.stat().st_size != size:
                    size = journal.stat().st_size
                    note(f"completed rounds: {sum('outcomes' in row for row in read_journal(journal))}")
        finally:
            tree.end()
        if (last := (read_journal(journal) or [{}])[-1].get("result")) is not None:
            return cattrs.structure(last, SearchResult)
        note("The coordinator died. A new one continues from its journal.")
    raise SearchError(f"the coordinator died {COORDINATORS} times before the search finished")


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read nodes, node, ranks and rendezvous from the environment of torchrun or srun. Raises HostListError."""
    if "LOCAL_RANK" in environment and "WORLD_SIZE" in environment:  # torchrun
        ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        port = int(environment.get("MASTER_PORT", "29500")) + 1  # torchrun's own store listens on MASTER_PORT
        return {
            "nodes": int(environment["WORLD_SIZE"]) // ranks, "node": int(environment["RANK"]) // ranks,
            "ranks": ranks, "locals": (int(environment["LOCAL_RANK"]),),
            "rendezvous": f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{port}",
        }  # fmt: skip
    if "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:  # one task on each node
        options: dict[str, Any] = {"nodes": int(environment["SLURM_NTASKS"]), "node": int(environment["SLURM_PROCID"])}
        # SLURM_LAUNCH_NODE_IPADDR is where srun was called, which may be a login node.
        if hosts := expand_host_list(environment.get("SLURM_STEP_NODELIST", "")):
            options["rendezvous"] = f"{hosts[0]}:{29400 + int(environment.get('SLURM_JOB_ID', '0')) % 1000}"
        return options
    return {}
