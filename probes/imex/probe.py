"""IMEX channels: without one a process reaches no GPU of another host over NVLink, and NCCL takes the network instead.

Specification: NVIDIA IMEX guide, "IMEX Channels" (the character device nvidia-caps-imex-channels, its nodes
/dev/nvidia-caps-imex-channels/channelN) and "Getting Started" (the list of a domain's nodes).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.finding import Finding
from contracts.tables import read_table
from probes.api import UnavailableError
from probes.host import sysfs
from probes.host.protocol import Host
from probes.hostinfo.container import of_agent
from probes.texts import finding, probe_of

TEXTS = read_table(__file__, "findings.toml")
DEVICE = "nvidia-caps-imex-channels"
CHANNELS = f"/dev/{DEVICE}"
NODES = "/etc/nvidia-imex/nodes_config.cfg"  # an address a line


@dataclass(frozen=True, slots=True, kw_only=True)
class ImexFacts:
    """What this process sees of IMEX."""

    channels: tuple[str, ...]  # "channel0"
    usable: tuple[str, ...]  # of these, what the process may open
    nodes: int | None  # hosts of the domain; None where no list is to be seen, as in a container
    of_agent: bool = False  # the resident agent's own pod, which is given no channel


def read(host: Host) -> ImexFacts:
    """Channels and the domain's size. Raises UnavailableError where the driver has no IMEX."""
    if not re.search(rf"^\s*\d+ {DEVICE}$", sysfs.text(host, "/proc/devices") or "", re.MULTILINE):
        raise UnavailableError(f"no driver registers {DEVICE} (/proc/devices)")
    channels = tuple(name for name in sysfs.names(host, CHANNELS) if re.fullmatch(r"channel\d+", name))
    listed = sysfs.text(host, NODES)
    rows = [row.strip() for row in (listed or "").splitlines()]
    return ImexFacts(
        channels=channels,
        usable=tuple(name for name in channels if host.usable(f"{CHANNELS}/{name}")),
        nodes=None if listed is None else sum(bool(row) and not row.startswith("#") for row in rows),
        of_agent=of_agent(host),
    )


def check(facts: ImexFacts) -> Iterator[Finding]:
    """A host that shares NVLink with others, and a process that has no channel to them."""
    if (facts.nodes or 0) > 1 and not facts.usable and not facts.of_agent:
        lack = f"cannot open {', '.join(facts.channels[:4])}" if facts.channels else "has no IMEX channel"
        # 191 of 721 GB/s reach another tray over its NICs (docs/decisions/0020)
        listed = ", ".join(facts.channels) or "empty or not there"
        yield finding(TEXTS, "imex.channel.missing", facts=facts, file=NODES, lack=lack, folder=CHANNELS, listed=listed)


def unjudged(facts: ImexFacts) -> dict[str, str]:
    """Without the list it is not known whether the host shares NVLink with others: most that have the device do not."""
    if facts.usable or (facts.nodes is not None and not facts.of_agent):
        return {}
    why = "this is the agent's own pod" if facts.of_agent else f"{NODES} is not to be seen"
    return {"imex.channel.missing": f"not known of a job's pod: {why}"}


PROBE = probe_of(__file__, ImexFacts, read, check, unjudged=unjudged)
