"""Runs the rounds of a search: `python -m collectives.search.coordinator SETTINGS`, on the first node.

It serves the store that all ranks connect to, watches their heartbeats, and writes a journal: one JSON line for the
nodes, one for each round with its outcomes, and one for the result. A coordinator that finds a journal continues it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import cattrs

from collectives.search.plan import Outcome, Search, Test, combine_passes
from collectives.search.rank import RankSettings, note_path
from contracts.host_list import expand_host_list

POLL_SECONDS = 0.2
HANG_SILENCES = 4.0  # a test without progress for this many silence_seconds hangs, and its ranks are restarted
NETWORK = {"NCCL_MNNVL_ENABLE": "0"}  # second pass: nodes of one NVLink domain use the network, too


@dataclass(slots=True, kw_only=True)
class _RunningTest:
    """A test that is running, and the results of its ranks so far."""

    test: Test
    waiting: list[str]  # ranks without a result
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # by rank
    lost: dict[int, str] = field(default_factory=dict)  # by node: the evidence
    is_hung: bool = False
    progress_at: float = field(default_factory=time.monotonic)


class Fleet:
    """The state of all ranks, read from the store."""

    def __init__(self, store: Any, settings: RankSettings) -> None:
        self._store, self._settings, self._run_id = store, settings, os.urandom(4).hex()
        self._beats: dict[str, tuple[list[Any], float, float]] = {}  # heartbeat, time of its change, time of progress
        self.ranks: dict[int, int] = {}  # ranks of each node that joined
        self._restarted: set[int] = set()  # nodes with ranks that are restarting

    def gather(self, nodes: Collection[int]) -> dict[int, dict[str, Any]]:
        """Wait until the ranks of these nodes join. Return the description of each node that joined."""
        until, joined = time.monotonic() + self._settings.wait_seconds, dict[int, dict[str, Any]]()
        while len(joined) < len(nodes) and time.monotonic() < until:
            for node in nodes:
                if node not in joined and self._store.check([f"join/{node}/0"]):
                    row = json.loads(self._store.get(f"join/{node}/0"))
                    if all(self._store.check([f"join/{node}/{local}"]) for local in range(row["ranks"])):
                        joined[node], self.ranks[node] = row, row["ranks"]
            time.sleep(POLL_SECONDS)
        return joined

    def restart(self, names: Iterable[str], environment: Mapping[str, str]) -> None:
        """Restart ranks with these environment variables; the next round waits for them."""
        for name in names:
            self._store.delete_key(f"join/{name}")
            self._store.set(f"restart/{name}", json.dumps(environment))
            self._restarted.add(int(name.partition("/")[0]))

    def name_ranks(self, nodes: Sequence[int]) -> list[str]:
        """Name the ranks of these nodes: "3/0" is rank 0 of node 3."""
        return [f"{node}/{local}" for node in nodes for local in range(self.ranks[node])]

    def read_beat(self, name: str) -> tuple[float, float, str]:
        """Return the seconds since the last heartbeat and since the last progress of a rank, and its position."""
        now = time.monotonic()
        beat = json.loads(self._store.get(key)) if self._store.check([key := f"beat/{name}"]) else [-1, -1, "joining"]
        before, lived, moved = self._beats.get(name, ([None, None, ""], now, now))
        lived, moved = (lived if beat[0] == before[0] else now), (moved if beat[1:] == before[1:] else now)
        self._beats[name] = (beat, lived, moved)
        return now - lived, now - moved, str(beat[2])

    def run(self, tests: Sequence[Test]) -> list[Outcome]:
        """Start the tests of a round, and wait until each has ended or is known to hang."""
        number = int(self._store.add("rounds", 0)) + 1
        self.gather(self._restarted)  # a rank that does not return has no heartbeat below
        self._restarted.clear()
        self._store.set(f"round/{number}", json.dumps({"run": self._run_id, "tests": cattrs.unstructure(tests)}))
        self._store.add("rounds", 1)
        self._beats.clear()
        running = [_RunningTest(test=test, waiting=self.name_ranks(test.nodes)) for test in tests]
        while any(each.waiting for each in running):
            time.sleep(POLL_SECONDS)
            for index, each in enumerate(running):
                for name in [*each.waiting]:
                    if self._store.check([f"result/{number}/{name}"]):
                        each.results[name] = json.loads(self._store.get(f"result/{number}/{name}"))
                        each.progress_at = time.monotonic()
                    elif self._record_if_stopped(each, name):
                        self._store.set(f"test/{self._run_id}/{number}/{index}/stop", "")
                    else:
                        continue
                    each.waiting.remove(name)
        return [_combine_results(each, self.name_ranks(each.test.nodes)) for each in running]

    def _record_if_stopped(self, running: _RunningTest, name: str) -> bool:
        """Record a rank that is lost, and restart one that hangs like most of its test. Return whether it is either."""
        silent, still, where = self.read_beat(name)
        running.progress_at = max(running.progress_at, time.monotonic() - still)
        node = int(name.partition("/")[0])
        if silent > self._settings.silence_seconds:
            running.lost[node] = f"no heartbeat for {silent:.0f} s; the last was in {where}"
        elif time.monotonic() - running.progress_at <= HANG_SILENCES * self._settings.silence_seconds:
            return False
        elif running.test.kind == "alone" or 2 * len(running.results) > len(self.name_ranks(running.test.nodes)):
            running.lost[node] = f"its rank is alive but makes no progress in {where}, which other ranks have finished"
        else:
            running.is_hung = True
            self.restart([name], {})
        return True


def _combine_results(ended: _RunningTest, ranks: Iterable[str]) -> Outcome:
    """Combine the results of the ranks of a test: of rails that ran together, the slowest counts."""
    results = {name: ended.results[name] for name in ranks if name in ended.results}
    slowest: dict[tuple[int, int, int, int], float] = defaultdict(float)  # source, target, rail, turn
    for posted in results.values():
        turns: Counter[tuple[int, int]] = Counter()
        for source, target, rail, seconds in posted.get("transfers", ()):
            key = (source, target, rail, turns[source, rail])
            slowest[key] = max(slowest[key], seconds)
            turns[source, rail] += 1
    stuck = tuple(dict.fromkeys((s, t) for posted in results.values() for s, t in posted.get("stuck", ())))
    left = any(posted.get("left") for posted in results.values())
    return Outcome(
        transfers=tuple((source, target, rail, s) for (source, target, rail, _), s in slowest.items()),
        alone=tuple((int(name.partition("/")[0]), part, seconds)
                    for name, posted in results.items() for part, seconds in posted.get("alone", ())),
        stuck=stuck, lost=ended.lost, ended=not ended.is_hung and not (left and not stuck and not ended.lost),
    )  # fmt: skip


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the complete rows; the last row may be incomplete."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row to the journal, and flush it to the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def resume(header: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> Search | None:
    """Replay the rounds of a journal; None if the planner no longer plans the same rounds."""
    search = Search(header["domains"], header["models"], header["rails"])
    for row in rounds:
        search.lost.update({int(node): reason for node, reason in row["lost"].items()})
        if search.plan_round() != tuple(cattrs.structure(row["tests"], list[Test])):
            return None
        search.report(cattrs.structure(row["outcomes"], list[Outcome]))
    return search


def coordinate(settings: RankSettings, store: Any) -> None:
    """Run the search and write its result to the journal. Exit if the journal belongs to another search."""
    journal, fleet = Path(settings.journal), Fleet(store, settings)
    rows, began, clock = read_journal(journal), time.time(), time.monotonic()
    if journal.exists():  # a coordinator may have died while it wrote the last row
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
    for node in () if rows else range(settings.nodes):
        note_path(settings.journal, node).unlink(missing_ok=True)  # of an earlier search
    joined = fleet.gather(range(settings.nodes))
    described = [joined.get(node, {}) for node in range(settings.nodes)]
    listed = expand_host_list(os.environ.get("SLURM_STEP_NODELIST", ""))
    unnamed = listed if len(listed) == settings.nodes else [f"node {node}" for node in range(settings.nodes)]
    names = [row.get("host", unnamed[node]) for node, row in enumerate(described)]
    header = next((row for row in rows if "hosts" in row), None)
    if header is None:
        shared = Counter(row["nvlink"] for row in joined.values() if row["nvlink"])
        header = {
            "hosts": names, "domains": [row.get("domain", "") for row in described],
            "models": [row.get("model", "") for row in described], "rails": min(fleet.ranks.values(), default=1),
            "began": began, "passes": [{}, NETWORK] if max(shared.values(), default=0) > 1 else [{}],
        }  # fmt: skip
        _write_row(journal, header)
    hosts = header["hosts"]
    is_same = len(hosts) == len(names) and all(hosts[node] in (names[node], unnamed[node]) for node in joined)
    reason = (f"it did not join at {settings.store} within {settings.wait_seconds:g} s. If the command ran there, its "
              "output contains the reason. If no node joined, set --rendezvous HOST:PORT to an address of node 0 that "
              "all nodes can reach")  # fmt: skip
    absent = {node: reason for node in range(settings.nodes) if node not in joined}
    # Node 0 connects over loopback. If another node joined too, the address works, and an absent node may be broken.
    unreached = {node: reason for node in absent if node == 0 or not any(joined)}
    for node in absent:
        if (note := note_path(settings.journal, node)).exists():
            unreached[node] = note.read_text(encoding="utf-8")
    passes, minutes = list[Search](), 0.0
    for environment in header["passes"]:
        rounds = [row for row in rows if row.get("environment") == environment]
        search = resume(header, rounds) if is_same else None
        if search is None:
            sys.exit(f"{journal} was written for other nodes or by another version. Set --journal to another file.")
        search.lost, search.unreached = {**absent, **(passes[-1].lost if passes else {}), **search.lost}, unreached
        if environment:
            fleet.restart(fleet.name_ranks([node for node in joined if node not in search.lost]), environment)
        minutes += sum(row["node_minutes"] for row in rounds) + _run_rounds(search, fleet, journal, environment)
        passes.append(search)
    seconds = max(0.0, began - header["began"]) + time.monotonic() - clock  # the wall clock may jump
    result = combine_passes(passes, hosts, header["began"], seconds, minutes)
    _write_row(journal, {"result": cattrs.unstructure(result)})
    store.set("end", "")
    time.sleep(3)  # until the ranks have read it


def _run_rounds(search: Search, fleet: Fleet, journal: Path, environment: Mapping[str, str]) -> float:
    """Run the rounds of a pass that are not in the journal yet. Return the sum of the minutes of their nodes."""
    minutes = 0.0
    while tests := search.plan_round():
        lost, started = dict(search.lost), time.monotonic()
        outcomes = fleet.run(tests)
        spent = sum(len(test.nodes) for test in tests) * (time.monotonic() - started) / 60
        row = {"tests": tests, "outcomes": outcomes, "node_minutes": spent, "lost": lost, "environment": environment}
        _write_row(journal, cattrs.unstructure(row))
        search.report(outcomes)
        minutes += spent
    return minutes


def main(text: str) -> None:
    """Serve the store and run the search."""
    from torch.distributed import TCPStore

    settings = RankSettings(**json.loads(text))
    port = int(settings.store.rpartition(":")[2])
    coordinate(settings, TCPStore("::", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)))


if __name__ == "__main__":
    main(sys.argv[1])
