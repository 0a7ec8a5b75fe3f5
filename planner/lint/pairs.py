"""Settings against each other, and what an environment says of a job whose machine is not known.

Specification: NCCL docs/userguide/source/env.rst, 2.32; src/misc/socket.cc (which interfaces are taken); libfabric
fi_getinfo(3) (FI_PROVIDER).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from contracts.finding import Finding, Status
from planner.lint.script import NODES
from planner.lint.tables import finding, settings
from planner.lint.values import TCP_PROVIDERS, NameList, other_net, strtoll


def check_pairs(environment: Mapping[str, str], named: frozenset[str]) -> Iterator[Finding]:
    """Settings that cancel each other, or that do nothing alone; `named` are all names set, values known or not."""
    yield from _shadowed(environment)
    yield from _bounds(environment)
    yield from _through_the_network(environment)
    yield from _sockets(environment)
    yield from _missing(environment, named)


def _bounds(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A least above its most."""
    for low, high, effect in settings().bounds:
        (least, known), (most, whole) = (strtoll(environment.get(name, "")) for name in (low, high))
        if known and whole and least > most > 0:
            yield finding("env.pair.shadowed/bounds", low, environment[low], other=high, most=most, effect=effect)


def _holds(value: str | None, wanted: str) -> bool:
    """Whether a cause is set so that it shadows others."""
    number, whole = strtoll(value or "")
    holds = {
        "one": number == 1, "nonzero": number != 0, "positive": number > 0, "index": whole and number >= 0,
        "socket": (value or "").lower() == "socket",
    }  # fmt: skip
    return holds[wanted]


def _shadowed(environment: Mapping[str, str]) -> Iterator[Finding]:
    for cause, wanted, others in settings().shadows:
        for name in others if _holds(environment.get(cause), wanted) else ():
            if name in environment:
                first = f"{cause}={environment[cause]}"
                yield finding("env.pair.shadowed", name, environment[name], cause=first, other=cause)


def _through_the_network(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Without peer access and shared memory only the network is left between GPUs of one node (src/transport.cc)."""
    off = {name: environment.get(name, "") for name in ("NCCL_SHM_DISABLE", "NCCL_P2P_DISABLE")}
    if all(strtoll(value)[0] == 1 for value in off.values()):
        tcp = strtoll(environment.get("NCCL_IB_DISABLE", ""))[0] == 1 and not other_net(environment)
        network = "TCP sockets" if tcp else "the NIC, or through TCP sockets where there is no RDMA"
        (name, value), (other, its_value) = off.items()
        yield finding("env.pair.network", name, value, f"{other}={its_value}", network=network)


def _sockets(environment: Mapping[str, str]) -> Iterator[Finding]:
    threads = strtoll(environment.get("NCCL_SOCKET_NTHREADS", ""))[0]
    sockets = strtoll(environment.get("NCCL_NSOCKS_PERTHREAD", ""))[0]
    if threads * sockets > 64:  # env.rst: the product cannot exceed 64
        product = threads * sockets
        yield finding("env.pair.sockets", "NCCL_SOCKET_NTHREADS", str(threads), sockets=sockets, product=product)


def _missing(environment: Mapping[str, str], named: frozenset[str]) -> Iterator[Finding]:
    for name, (other, why) in settings().needs.items():
        if environment.get(name) and other not in named:
            yield finding("env.pair.missing", name, environment[name], why=why, other=other)
    value = environment.get("NCCL_COLLNET_ENABLE", "")
    helpers = any(each.startswith(("NCCL_SHARP_", "SHARP_", "NCCL_UCX_", "NCCL_IBEXT_")) for each in named)
    if strtoll(value)[0] > 0 and not helpers and "NCCL_NET_PLUGIN" not in named:
        yield finding("env.pair.missing/collnet", "NCCL_COLLNET_ENABLE", value)


def nodes_of(environment: Mapping[str, str]) -> int | None:
    """How many nodes the job says it has; None where it does not say."""
    for name in NODES:
        match = re.fullmatch(r"(?:\d+:)?(\d+)", environment.get(name, ""))
        if match:
            return int(match[1])
    for world, local in (
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):  # fmt: skip
        ranks, here = environment.get(world, ""), environment.get(local, "")
        if ranks.isdecimal() and here.isdecimal() and int(here):
            return -(-int(ranks) // int(here))
    return None


def check_job(environment: Mapping[str, str], nodes: int | None) -> Iterator[Finding]:
    """What harms any job of several nodes, whatever its machines are; asked where no machine is given."""
    yield from _unreachable(environment, nodes)
    net = environment.get("NCCL_NET", "")
    if net.lower() == "socket":
        yield finding("env.rdma.tcp/any", "NCCL_NET", net)
    provider = environment.get("FI_PROVIDER", "")
    first = re.split(r"[;,]", provider)[0].strip().lower()
    if first in TCP_PROVIDERS:
        yield finding("env.rdma.tcp/provider_any", "FI_PROVIDER", provider, provider=first)


def _unreachable(environment: Mapping[str, str], nodes: int | None) -> Iterator[Finding]:
    """An interface of which every node has its own, that no other node reaches."""
    size = environment.get("WORLD_SIZE", environment.get("OMPI_COMM_WORLD_SIZE", ""))
    many = size.isdecimal() and int(size) > 1
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(name, "")
        wanted = NameList.parse(value)
        local = [
            entry for entry, _port in wanted.entries if re.fullmatch(r"lo|docker\d*|virbr\d*|cni\d*|br-\w*", entry)
        ]
        if wanted.negated or not local or len(local) < len(wanted.entries) or nodes == 1:
            continue
        status = Status.FAIL if nodes else Status.WARN if many else Status.INFO
        known = (
            f"the job has {nodes} nodes"
            if nodes
            else f"the job has {size} ranks"
            if many
            else "the job's size is not known"
        )
        yield finding("env.interface.unfit/local", name, value, status=status, names=", ".join(local), size=known)
