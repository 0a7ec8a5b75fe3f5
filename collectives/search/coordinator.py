"""Runs the rounds of a search: `python -m collectives.search.coordinator SETTINGS`, on the first node.

It serves the store that all ranks connect to, watches their signs of life, and writes a journal: one JSON line for the
nodes, one for each round with its outcomes, and one for the result. A coordinator that finds a journal continues it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import cattrs

from collectives.search.plan import Outcome, Search, Test, sum_up
from collectives.search.rank import Place, note_path
from contracts.host_list import expand_host_list

POLL_SECONDS = 0.2
HANG_SILENCES = 4.0  # silences without any progress of a test, after which its ranks are started anew
NETWORK = {"NCCL_MNNVL_ENABLE": "0"}  # of a second pass: nodes of one NVLink domain exchange data over the network, too


class Fleet:
    """The ranks as the store shows them."""

    def __init__(self, store: Any, settings: Place) -> None:
        self._store, self._settings = store, settings
        self._beats: dict[str, tuple[list[Any], float, float]] = {}  # the last, when it changed, when progress changed
        self.ranks: dict[int, int] = {}  # of each node that joined
        self._restarted: set[int] = set()  # nodes with ranks that start anew

    def gather(self, nodes: Collection[int]) -> dict[int, dict[str, Any]]:
        """Wait for the ranks of these nodes; returns the description that each node which joined gave of itself."""
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
        """Start ranks anew with these variables; the next round waits for them."""
        for name in names:
            self._store.delete_key(f"join/{name}")
            self._store.set(f"anew/{name}", json.dumps(environment))
            self._restarted.add(int(name.partition("/")[0]))

    def rank_names(self, nodes: Sequence[int]) -> list[str]:
        """Name the ranks of these nodes: "3/0" is rank 0 of node 3."""
        return [f"{node}/{local}" for node in nodes for local in range(self.ranks[node])]

    def read_beat(self, name: str) -> tuple[float, float, str]:
        """Seconds since the last sign of life, and since the last progress of a rank; and where it was."""
        now = time.monotonic()
        has_beat = self._store.check([f"beat/{name}"])
        beat = json.loads(self._store.get(f"beat/{name}")) if has_beat else [-1, -1, "joining"]
        before, lived, moved = self._beats.get(name, ([None, None, ""], now, now))
        lived, moved = (lived if beat[0] == before[0] else now), (moved if beat[1:] == before[1:] else now)
        self._beats[name] = (beat, lived, moved)
        return now - lived, now - moved, str(beat[2])

    def run(self, number: int, tests: Sequence[Test], run: str) -> list[Outcome]:
        """Start the tests of a round, and wait until each has ended or cannot end."""
        self.gather(self._restarted)  # a rank that does not come back gives no sign of life below
        self._restarted.clear()
        self._store.set(f"round/{number}", json.dumps({"run": run, "tests": cattrs.unstructure(tests)}))
        self._store.add("rounds", 1)
        groups = [self.rank_names(test.nodes) for test in tests]
        waiting = {name: index for index, group in enumerate(groups) for name in group}
        for name in waiting:
            self._beats.pop(name, None)
        found: dict[str, dict[str, Any]] = {}
        lost: dict[int, str] = {}
        hung: set[int] = set()
        last: dict[int, float] = dict.fromkeys(range(len(tests)), time.monotonic())  # when a test last moved
        while waiting:
            time.sleep(POLL_SECONDS)
            for name, index in list(waiting.items()):
                node = int(name.partition("/")[0])
                if self._store.check([f"result/{number}/{name}"]):
                    found[name] = json.loads(self._store.get(f"result/{number}/{name}"))
                    waiting.pop(name)
                    last[index] = time.monotonic()
                    continue
                silent, still, where = self.read_beat(name)
                last[index] = max(last[index], time.monotonic() - still)
                if silent > self._settings.silence_seconds:
                    lost[node] = f"no sign of life for {silent:.0f} s, last in {where}"
                elif time.monotonic() - last[index] <= HANG_SILENCES * self._settings.silence_seconds:
                    continue
                elif tests[index].kind == "alone" or 2 * len(found.keys() & groups[index]) > len(groups[index]):
                    lost[node] = f"its rank lives and does not move in {where}, which the others have left"
                else:
                    hung.add(index)
                    self.restart([name], {})
                self._store.set(f"test/{run}/{number}/{index}/stop", "")
                waiting.pop(name)
        return [
            _outcome({name: found[name] for name in groups[index] if name in found},
                     {node: why for node, why in lost.items() if node in test.nodes}, index in hung)
            for index, test in enumerate(tests)
        ]  # fmt: skip


def _outcome(found: Mapping[str, Mapping[str, Any]], lost: Mapping[int, str], hung: bool) -> Outcome:
    """Join what the ranks of a test measured: of several rails at once the slowest counts."""
    slowest: dict[tuple[int, int, int, int], float] = defaultdict(float)  # source, target, rail, turn
    for posted in found.values():
        turns: Counter[tuple[int, int]] = Counter()
        for source, target, rail, seconds in posted.get("transfers", ()):
            key = (source, target, rail, turns[source, rail])
            slowest[key] = max(slowest[key], seconds)
            turns[source, rail] += 1
    stuck = tuple(dict.fromkeys((s, t) for posted in found.values() for s, t in posted.get("stuck", ())))
    left = any(posted.get("left") for posted in found.values())
    return Outcome(
        transfers=tuple((source, target, rail, s) for (source, target, rail, _), s in slowest.items()),
        alone=tuple((int(name.partition("/")[0]), part, seconds)
                    for name, posted in found.items() for part, seconds in posted.get("alone", ())),
        stuck=stuck, lost=dict(lost), ended=not hung and not (left and not stuck and not lost),
    )  # fmt: skip


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the complete rows: the last one may still be written, or its writer may have died."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row to the journal, on the disk before this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def resume(header: Mapping[str, Any], rounds: Iterable[Mapping[str, Any]]) -> Search | None:
    """Bring a search to where its journal ends; None where the planner now plans other rounds than the journal has."""
    search = Search(header["domains"], header["models"], header["rails"])
    for row in rounds:
        search.lost.update({int(node): why for node, why in row["lost"].items()})
        if search.next_round() != tuple(cattrs.structure(row["tests"], list[Test])):
            return None
        search.report(cattrs.structure(row["outcomes"], list[Outcome]))
    return search


def _names(nodes: int) -> Sequence[str]:
    """What nodes are called that never came: by the list of Slurm's job step, else by their number."""
    hosts = expand_host_list(os.environ.get("SLURM_STEP_NODELIST", ""))
    return hosts if len(hosts) == nodes else [f"node {node}" for node in range(nodes)]


def coordinate(settings: Place, store: Any) -> None:
    """Search to the end; the journal has the result. Exits where the journal is of another search."""
    journal, fleet = Path(settings.journal), Fleet(store, settings)
    rows, began, run = read_journal(journal), time.time(), os.urandom(4).hex()
    if journal.exists():  # the last row is incomplete where a coordinator died while it wrote
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
    for node in () if rows else range(settings.nodes):
        note_path(settings.journal, node).unlink(missing_ok=True)  # of an earlier search
    joined = fleet.gather(range(settings.nodes))
    described = [joined.get(node, {}) for node in range(settings.nodes)]
    unnamed = _names(settings.nodes)
    names = [row.get("host", unnamed[node]) for node, row in enumerate(described)]
    absent = {node: f"it did not join at {settings.store} within {settings.wait_seconds:g} s. If the command ran "
              "there, its output on that node says why. If no node joined, give an address of node 0 that all nodes "
              "reach: --rendezvous HOST:PORT" for node in range(settings.nodes) if node not in joined}  # fmt: skip
    header = next((row for row in rows if "hosts" in row), None)
    if header is None:
        shared = Counter(row["nvlink"] for row in joined.values() if row["nvlink"])
        header = {
            "hosts": names, "domains": [row.get("domain", "") for row in described],
            "models": [row.get("model", "") for row in described], "rails": min(fleet.ranks.values(), default=1),
            "began": began, "passes": [{}, NETWORK] if max(shared.values(), default=0) > 1 else [{}],
        }  # fmt: skip
        _write_row(journal, header)
    is_same = len(header["hosts"]) == len(names) and all(
        header["hosts"][node] in (names[node], unnamed[node]) for node in joined
    )
    is_reached = any(joined)  # by a node other than the first, whose ranks connect over the loopback
    unreached = {node: why for node, why in absent.items() if not (node and is_reached)}
    notes = {node: note_path(settings.journal, node) for node in absent}
    unreached.update({node: note.read_text(encoding="utf-8") for node, note in notes.items() if note.exists()})
    passes, minutes = list[Search](), 0.0
    for environment in header["passes"]:
        rounds = [row for row in rows if row.get("environment") == environment]
        search = resume(header, rounds) if is_same else None
        if search is None:
            sys.exit(f"{journal} is of other nodes or of another version: give another --journal file")
        search.lost, search.unreached = {**absent, **(passes[-1].lost if passes else {}), **search.lost}, unreached
        if environment:
            fleet.restart(fleet.rank_names([node for node in joined if node not in search.lost]), environment)
        minutes += sum(row["node_minutes"] for row in rounds)
        while tests := search.next_round():
            lost, started = dict(search.lost), time.monotonic()
            outcomes = fleet.run(int(store.add("rounds", 0)) + 1, tests, run)
            spent = sum(len(test.nodes) for test in tests) * (time.monotonic() - started) / 60
            minutes += spent
            row = {"tests": tests, "outcomes": outcomes, "node_minutes": spent, "lost": lost,
                   "environment": environment}  # fmt: skip
            _write_row(journal, cattrs.unstructure(row))
            search.report(outcomes)
        passes.append(search)
    found = sum_up(passes, header["hosts"], header["began"], time.time() - header["began"], minutes)
    _write_row(journal, {"result": cattrs.unstructure(found)})
    store.set("end", "")
    time.sleep(3)  # for the ranks to see it


def main(text: str) -> None:
    """Hold the store and search."""
    from torch.distributed import TCPStore

    settings = Place(**json.loads(text))
    port = int(settings.store.rpartition(":")[2])
    store = TCPStore("::", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    coordinate(settings, store)


if __name__ == "__main__":
    main(sys.argv[1])
