"""IMEX channels. Without one, a process cannot use NVLink to GPUs of other hosts, and NCCL uses the network instead.

Specification: NVIDIA IMEX guide, "IMEX Channels" (the character device nvidia-caps-imex-channels, with nodes
/dev/nvidia-caps-imex-channels/channelN) and "Getting Started" (the list of nodes in a domain).
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
NODES = "/etc/nvidia-imex/nodes_config.cfg"  # one address per line


@dataclass(frozen=True, slots=True, kw_only=True)
class ImexFacts:
    """IMEX as visible to this process."""

    channels: tuple[str, ...]  # "channel0"
    usable: tuple[str, ...]  # the channels that this process may open
    nodes: int | None  # hosts in the domain; None if the list is not visible, as in a container
    of_agent: bool = False  # in the pod of the resident agent, which gets no channel


def check(facts: ImexFacts) -> Iterator[Finding]:
    """Report a process without channel on a host that shares NVLink with other hosts."""
    if (facts.nodes or 0) > 1 and not facts.usable and not facts.of_agent:
        lack = f"cannot open {', '.join(facts.channels[:4])}" if facts.channels else "has no IMEX channel"
        # NICs reach another tray at 191 of 721 GB/s (docs/decisions/0020)
        listed = ", ".join(facts.channels) or "empty or not there"
        yield finding(TEXTS, "imex.channel.missing", facts=facts, file=NODES, lack=lack, folder=CHANNELS, listed=listed)


def unjudged(facts: ImexFacts) -> dict[str, str]:
    """Without the node list it is unknown whether the host shares NVLink; most hosts with the device do not."""
    if facts.usable or (facts.nodes is not None and not facts.of_agent):
        return {}
    reason = "this is the agent's own pod" if facts.of_agent else f"{NODES} cannot be read"
    return {"imex.channel.missing": f"not judged: {reason}"}


SOURCE = Source(name="imex", facts=ImexFacts)
PROBE = probe_of(__file__, SOURCE, check, unjudged=unjudged)
