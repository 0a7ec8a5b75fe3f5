"""Which run of a job wrote what: a log that was appended to, or a folder, may hold several.

A run is told from the next by its GPUs: a process that takes a GPU which another process of the same host had, after
that one's channels were made, belongs to a later run. Communicators with one id (``commId``, 2.18 on) are of one run,
wherever they stand, and so are pieces in which one process makes channels.
"""

from __future__ import annotations

from typing import Final

from collectives.nccl_log.ledger import Ledger

MAX_RUNS: Final = 32
MAX_GPUS: Final = 8_192


class Identity:
    """By what a piece of a log is known again: its communicators and processes, and who held which GPU."""

    def __init__(self) -> None:
        self.marks: set[bytes] = set()  # ids of communicators, and processes that make channels
        self.gpus: dict[tuple[bytes, bytes], bytes] = {}  # (host, bus id or device): process

    def hold(self, host: bytes, gpu: bytes, process: bytes) -> None:
        """The process holds this GPU."""
        if len(self.gpus) < MAX_GPUS:
            self.gpus.setdefault((host, gpu), process)

    def contradicts(self, other: Identity) -> bool:
        """Whether a GPU has another process here than there."""
        if len(self.gpus) > len(other.gpus):
            return other.contradicts(self)
        return any(other.gpus.get(gpu, process) != process for gpu, process in self.gpus.items())

    def take(self, other: Identity) -> None:
        """Add what is known of a further piece of the same run."""
        for (host, gpu), process in other.gpus.items():
            self.hold(host, gpu, process)
        if len(self.marks) < MAX_GPUS:
            self.marks |= other.marks


class Runs:
    """Runs in the order in which they were met."""

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []
        self._identities: list[Identity] = []
        self.lines = 0

    def add(self, ledger: Ledger, identity: Identity) -> None:
        """Add a piece of a log to the run that it belongs to, the latest that fits, or as a run of its own."""
        at = self._of(identity)
        if at is None and len(self.ledgers) < MAX_RUNS:
            self.ledgers.append(ledger)
            self._identities.append(identity)
            return
        at = len(self.ledgers) - 1 if at is None else at
        self.ledgers[at].merge(ledger)
        self._identities[at].take(identity)

    def _of(self, identity: Identity) -> int | None:
        latest_first = range(len(self.ledgers) - 1, -1, -1)
        for at in latest_first:
            if self._identities[at].marks & identity.marks:
                return at
        return next((at for at in latest_first if not self._identities[at].contradicts(identity)), None)
