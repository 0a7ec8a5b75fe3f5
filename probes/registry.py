"""The probes a scan runs, in order. One line here is all that a new probe needs."""

from __future__ import annotations

from typing import Any

from probes.api import Probe
from probes.gpu import probe as gpu
from probes.hostinfo import probe as hostinfo
from probes.imex import probe as imex
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.pci import probe as pci
from probes.rdma import probe as rdma

ALL: tuple[Probe[Any], ...] = (
    hostinfo.PROBE,
    limits.PROBE,
    pci.PROBE,
    gpu.PROBE,
    rdma.PROBE,
    interfaces.PROBE,
    imex.PROBE,
)
BY_NAME = {probe.name: probe for probe in ALL}
