"""Reads the IMEX channels that this process can use; see `probes.imex.probe`."""

from __future__ import annotations

import re

from probes.api import UnavailableError
from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.read import is_of_agent
from probes.imex.probe import CHANNELS, DEVICE, NODES, ImexFacts


def read(host: Host) -> ImexFacts:
    """Read the channels and the size of the domain. Raises UnavailableError if the driver has no IMEX support."""
    if not re.search(rf"^\s*\d+ {DEVICE}$", sysfs.text(host, "/proc/devices") or "", re.MULTILINE):
        raise UnavailableError(f"no driver registers {DEVICE} (/proc/devices)")
    channels = tuple(name for name in sysfs.names(host, CHANNELS) if re.fullmatch(r"channel\d+", name))
    listed = sysfs.text(host, NODES)
    rows = [row.strip() for row in (listed or "").splitlines()]
    return ImexFacts(
        channels=channels,
        usable=tuple(name for name in channels if host.usable(f"{CHANNELS}/{name}")),
        nodes=None if listed is None else sum(bool(row) and not row.startswith("#") for row in rows),
        of_agent=is_of_agent(host),
    )
