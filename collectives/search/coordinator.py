"""Hands out the rounds of a search: `python -m collectives.search.coordinator SETTINGS`, beside the first node's ranks.

It holds the store that all ranks connect to, watches their signs of life, and writes a journal: one JSON line for the
nodes, one for each round with its outcomes, and one for the result. A coordinator that finds a journal goes on with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import cattrs

from collectives.search.plan import Outcome, Search, Test

POLL_SECONDS = 0.2
HANG_SILENCES = 4.0  # silences without any progress of a test, after which its ranks are started anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the coordinator is asked to do."""

    port: int
    nodes: int
    journal: str
    wait_seconds: float  # for nodes to join
    silence_seconds: float


class Fleet:
    """The ranks as the store shows them."""

    def __init__(self, store: Any, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._beats: dict[str, tuple[list[Any], float, float]] = {}  # the last, when it changed, when progress changed
        self.locals: dict[int, int] = {}

    def gather(self) -> dict[int, dict[str, Any]]:
        """Wait for the ranks of all nodes; returns what each node that came said of itself."""
        until, joined = time.monotonic() + self._settings.wait_seconds, dict[int, dict[str, Any]]()
        while len(joined) < self._settings.nodes and time.monotonic() < until:
            for node in range(self._settings.nodes):
                if node not in joined and self._store.check([f"join/{node}/0"]):
                    said = json.loads(self._store.get(f"join/{node}/0"))
                    if all(self._store.check([f"join/{node}/{local}"]) for local in range(said["locals"])):
                        joined[node], self.locals[node] = said, said["locals"]
            time.sleep(POLL_SECONDS)
        return joined

    def names(self, nodes: Sequence[int]) -> list[str]:
        """The ranks of these nodes."""
        return [f"{node}/{local}" for node in nodes for local in range(self.locals[node])]

    def look(self, name: str) -> tuple[float, float, str]:
        """Seconds since the last sign of life, and since the last progress of a rank; and where it was."""
        now = time.monotonic()
        beat = (
            json.loads(self._store.get(f"beat/{name}")) if self._store.check([f"beat/{name}"]) else [-1, -1, "joining"]
        )
        before, lived, moved = self._beats.get(name, ([None, None, ""], now, now))
        lived, moved = (lived if beat[0] == before[0] else now), (moved if beat[1:] == before[1:] else now)
        self._beats[name] = (beat, lived, moved)
        return now - lived, now - moved, str(beat[2])

    def run(self, number: int, tests: Sequence[Test], run: str) -> list[Outcome]:
        """Have the tests of a round run, and wait until each has ended or cannot end."""
        self._store.set(f"round/{number}", json.dumps({"run": run, "tests": [asdict(test) for test in tests]}))
        self._store.add("rounds", 1)
        waiting = {name: index for index, test in enumerate(tests) for name in self.names(test.nodes)}
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
                silent, still, where = self.look(name)
                last[index] = max(last[index], time.monotonic() - still)
                if silent > self._settings.silence_seconds:
                    lost[node] = f"no sign of life for {silent:.0f} s, last in {where}"
                elif time.monotonic() - last[index] > HANG_SILENCES * self._settings.silence_seconds:
                    done = sum(other in found for other in self.names(tests[index].nodes))
                    if 2 * done > len(self.names(tests[index].nodes)) or tests[index].kind == "alone":
                        lost[node] = f"its rank lives and does not move in {where}, which the others have left"
                    else:
                        hung.add(index)
                        self._store.set(f"anew/{name}", "")
                else:
                    continue
                self._store.set(f"test/{run}/{number}/{index}/stop", "")
                waiting.pop(name)
        return [
            _outcome({name: found[name] for name in self.names(test.nodes) if name in found},
                     {node: why for node, why in lost.items() if node in test.nodes}, index in hung)
            for index, test in enumerate(tests)
        ]  # fmt: skip


def _outcome(found: Mapping[str, Mapping[str, Any]], lost: Mapping[int, str], hung: bool) -> Outcome:
    """Join what the ranks of a test measured: of several rails at once the slowest counts."""
    rows: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    turns: dict[tuple[str, int, int], int] = defaultdict(int)
    slowest: dict[tuple[int, int, int], dict[int, float]] = defaultdict(dict)
    for name, posted in found.items():
        for source, target, rail, seconds in posted.get("transfers", ()):
            turn = turns[name, source, rail]
            turns[name, source, rail] += 1
            times = slowest[source, target, rail]
            times[turn] = max(times.get(turn, 0.0), seconds)
    for key, by_turn in slowest.items():
        rows[key] += by_turn.values()
    stuck = tuple(dict.fromkeys((s, t) for posted in found.values() for s, t in posted.get("stuck", ())))
    left = any(posted.get("left") for posted in found.values())
    return Outcome(
        transfers=tuple((*key, seconds) for key, times in rows.items() for seconds in times),
        alone=tuple((int(name.partition("/")[0]), part, seconds)
                    for name, posted in found.items() for part, seconds in posted.get("alone", ())),
        stuck=stuck, lost=dict(lost), ended=not hung and not (left and not stuck and not lost),
    )  # fmt: skip


class Journal:
    """What the search has done so far, as JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        self.rows = [json.loads(line) for line in lines if line.endswith("\n")]
        if lines and not lines[-1].endswith("\n"):  # the coordinator ended while it wrote
            path.write_text("".join(lines[:-1]), encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row, on the disk before this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def coordinate(settings: Settings, store: Any) -> None:
    """Search to the end; the journal has the result."""
    journal, fleet = Journal(Path(settings.journal)), Fleet(store, settings)
    began, run = time.time(), os.urandom(4).hex()
    came = fleet.gather()
    header = next((row for row in journal.rows if "hosts" in row), None)
    if header is None:
        rows = [came.get(node, {}) for node in range(settings.nodes)]
        header = {
            "hosts": [row.get("host", f"node {node}") for node, row in enumerate(rows)],
            "domains": [row.get("domain", "") for row in rows], "models": [row.get("model", "") for row in rows],
            "rails": min(fleet.locals.values(), default=1), "began": began,
        }  # fmt: skip
        journal.write(header)
    search = Search(header["domains"], header["models"], header["rails"])
    absent = f"did not join within {settings.wait_seconds:g} s"
    search.lost.update({node: absent for node in range(settings.nodes) if node not in came})
    minutes = 0.0
    for row in (row for row in journal.rows if "outcomes" in row):
        again = search.next_round()
        if json.dumps([asdict(test) for test in again]) != json.dumps(row["tests"]):
            break
        search.report(cattrs.structure(row["outcomes"], list[Outcome]))
        minutes += row["node_minutes"]
    while tests := search.next_round():
        started = time.monotonic()
        outcomes = fleet.run(int(store.add("rounds", 0)) + 1, tests, run)
        spent = sum(len(test.nodes) for test in tests) * (time.monotonic() - started) / 60
        minutes += spent
        journal.write({"tests": [asdict(test) for test in tests], "outcomes": [cattrs.unstructure(o) for o in outcomes],
                       "node_minutes": spent})  # fmt: skip
        search.report(outcomes)
    journal.write({"result": {
        "verdicts": [cattrs.unstructure(verdict) for verdict in search.verdicts()],
        "links": [cattrs.unstructure(link) for link in search.bad_links()],
        "lost": {str(node): why for node, why in search.lost.items()},
        "rounds": search.round, "tests": search.tests, "seconds": time.time() - header["began"],
        "node_minutes": minutes, "visible_loss": search.visible_loss(),
        "tested_pairs": len({tuple(sorted(link)) for link in search.tested}),
    }})  # fmt: skip
    store.set("end", "")
    time.sleep(3)  # for the ranks to see it


def main(text: str) -> None:
    """Hold the store and search."""
    from torch.distributed import TCPStore

    settings = Settings(**json.loads(text))
    store = TCPStore("::", settings.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    coordinate(settings, store)


if __name__ == "__main__":
    main(sys.argv[1])
