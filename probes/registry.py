"""The probes a scan runs, in order. One line here is all that a new probe needs."""

from __future__ import annotations

from typing import Any

from probes import gpu, hostinfo, interfaces, limits, pci, rdma
from probes.api import Probe

ALL: tuple[Probe[Any], ...] = (
    hostinfo.PROBE,
    limits.PROBE,
    pci.PROBE,
    gpu.PROBE,
    rdma.PROBE,
    interfaces.PROBE,
)
BY_NAME = {probe.name: probe for probe in ALL}
