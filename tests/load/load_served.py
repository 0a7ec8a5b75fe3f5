"""What the tests of load share apart from fixtures: a running agent, and whether honest clients are served."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import resident

ROOT = Path(__file__).parent.parent.parent
H100 = ROOT / "tests" / "machines" / f"{resident.MACHINE}.json"


class Served:
    """A running agent."""

    def __init__(self, pid: int, port: int, log: Path | None = None) -> None:
        self.pid, self.port, self.log = pid, port, log

    def honest(self) -> None:
        """What a scraper and the kubelet ask is answered."""
        for path in ("/healthz", "/readyz", "/metrics"):
            assert resident.get(self.port, path)[0] == 200, path

    def descriptors(self) -> int:
        """How many it has open."""
        return psutil.Process(self.pid).num_fds()

    def lowest_free_descriptor(self) -> int:
        """The number its next descriptor may get: the lowest that was free at some moment of a scan's length."""
        seen = []
        for _ in range(24):
            taken = {int(one.name) for one in Path(f"/proc/{self.pid}/fd").iterdir()}
            seen.append(min(set(range(len(taken) + 1)) - taken))
            time.sleep(0.05)
        return min(seen)
