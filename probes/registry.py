"""The probes a scan runs, in order. One line here is all that a new probe needs."""

from __future__ import annotations

from typing import Any

from probes import gpu
from probes.api import Probe

ALL: tuple[Probe[Any], ...] = (gpu.PROBE,)
BY_NAME = {probe.name: probe for probe in ALL}
