"""IMEX channels: without one a process reaches no GPU of another host over NVLink, and NCCL takes the network instead.

Specification: NVIDIA IMEX guide, "IMEX Channels" (the character device nvidia-caps-imex-channels, its nodes
/dev/nvidia-caps-imex-channels/channelN) and "Getting Started" (the list of a domain's nodes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.finding import Finding
from contracts.tables import read_table
from probes.api import Source, finding, probe_of

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


SOURCE = Source(name="imex", facts=ImexFacts)
PROBE = probe_of(__file__, SOURCE, check, unjudged=unjudged)
