"""Proves the memlock limit by registering a growing memory region with the device.

Specification: ibv_reg_mr(3); Linux drivers/infiniband/core/umem.c: pages beyond RLIMIT_MEMLOCK are refused with ENOMEM
unless the process has CAP_IPC_LOCK.
"""

from __future__ import annotations

from probes.host.protocol import Host
from probes.rdma.probe import MemlockProof

START_BYTES = 16 << 10  # four pages: below it nothing but the page size would be tested
LIMIT_BYTES = 64 << 20  # enough to show that the usual limits of 64 KiB and 8 MiB do not bind; given back at once


def prove_memlock(host: Host, device: str, *, limit_bytes: int = LIMIT_BYTES) -> MemlockProof:
    """Register four times more each time, up to the limit, and say where it failed."""
    done, size = 0, START_BYTES
    while size <= limit_bytes:
        try:
            host.verbs("register", device, size)
        except OSError as error:
            return MemlockProof(
                device=device,
                registered_bytes=done,
                failed_bytes=size,
                error=f"errno {error.errno}: {error.strerror or error}",
            )
        done, size = size, size * 4
    return MemlockProof(device=device, registered_bytes=done)
