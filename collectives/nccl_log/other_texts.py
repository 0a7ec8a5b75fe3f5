"""Texts that users give in place of a log: NCCL's RAS, ibstat, rdma link and the kernel's log.

Formats: NCCL's RAS (collectives/traces/ras.py); ``ibstat`` of infiniband-diags (src/ibstat.c); ``rdma link`` of
iproute2 (rdma/link.c), as text; ``dmesg`` and ``journalctl -k``. A text is only recognised here. Messages of the kernel
that name a fault are rows of messages.toml.
"""

from __future__ import annotations

from contracts.tables import read_patterns

KINDS = {
    "RAS": "a report of NCCL's RAS, which `topoflight why FILE` reads",
    "ibstat": "the output of ibstat; `topoflight scan` reads the ports of a node",
    "rdma_link": "the output of rdma link; `topoflight scan` reads the ports of a node",
    "kernel": "the kernel's log, and none of its lines is a known fault",
}
_TEXTS = read_patterns(__file__, "facts.toml", "kinds", str.encode)


def kind_of(start: bytes) -> str | None:
    """Recognise a text by its beginning: a key of KINDS; None if it may be a log."""
    for kind in ("RAS", "ibstat", "rdma_link"):
        if _TEXTS[kind].search(start):
            return kind
    lines = start[:65_536].count(b"\n") or 1
    return "kernel" if b"NCCL" not in start and len(_TEXTS["kernel"].findall(start[:65_536])) * 2 > lines else None
