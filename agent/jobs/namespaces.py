"""Two hosts on this machine: network namespaces connected by several networks of known speed.

Surface: unshare(1), veth(4) and tc-tbf(8) through pyroute2's netlink. A process holds each namespace and ends with this
process in all cases. When the last process in a namespace ends, the kernel removes the namespace, its veth and their
qdiscs, so no cleanup is needed. Ranks are forks of this process, which has imported torch for them once, and end with
it. Linux, root.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing.connection
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path

from agent.base import raise_as
from collectives.bench import processes

HOSTS = 2
BURST_SECONDS = 0.01  # times the rate: tc-tbf(8) requires at least rate / HZ, and HZ is 100 or more
MIN_BURST_BYTES = 65536  # one segment in the size that veth delivers
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000  # linux/sched.h: CLONE_NEWUTS, CLONE_NEWNET
_GRACE_SECONDS = 5.0  # for the other ranks, after one has failed
MODULES = ("collectives.bench.rank", "finetune.train")  # of the ranks; they import torch


class NamespaceError(RuntimeError):
    """Namespaces cannot be created here; the message says why."""


def why_unavailable() -> str:
    """Return why namespaces cannot be created here; empty if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("unshare") is None:
        return "not installed: unshare (util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace: {tried.stderr.strip() or 'refused'}" if tried.returncode else ""


@dataclass(slots=True)
class NamespaceHosts:
    """The hosts; one process holds the namespace of each."""

    networks: tuple[str, ...]  # name of each one's interface in every host
    pids: tuple[int, ...]
    stop: threading.Event = field(default_factory=threading.Event)  # set to end the ranks

    def address(self, network: str, host: int) -> str:
        """Return the IPv4 address of a host on a network: private, in namespaces without outside connections."""
        return f"10.244.{self.networks.index(network)}.{host + 1}"

    def run(
        self, network: str, module: str, arguments: Sequence[Sequence[str]], folder: Path, *, seconds: float
    ) -> list[int]:
        """Run one rank per host, each with its own arguments; logs to rankN.log. Returns the exit codes."""
        ranks = []
        for host in range(HOSTS):
            environment = {
                "RANK": str(host), "WORLD_SIZE": str(HOSTS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_PORT": "29511", "MASTER_ADDR": self.address(network, 0), "GLOO_SOCKET_IFNAME": network,
            }  # fmt: skip
            log = folder / f"rank{host}.log"
            ranks.append(fork_rank(module, arguments[host], environment, self.pids[host], f"host-{host}", log))
        return wait_for_ranks(ranks, seconds, self.stop)


@contextlib.contextmanager
def create_hosts(rates: Mapping[str, float], stop: threading.Event) -> Iterator[NamespaceHosts]:
    """Create two hosts, connected by networks of these rates in bytes per second, and remove all at the end.

    Once `stop` is set, the ranks end. NamespaceError gives the reason.
    """
    with contextlib.ExitStack() as stack:
        hosts = NamespaceHosts(tuple(rates), tuple(_hold_namespace(stack) for _ in range(HOSTS)), stop)
        for network, rate in rates.items():
            _join(hosts, network, rate)
        if stop.is_set():
            raise NamespaceError("stopped by SIGTERM")
        _import_modules()
        yield hosts


def _hold_namespace(stack: contextlib.ExitStack) -> int:
    """Start a process in a new network namespace; it ends when our end of its stdin is closed."""
    process = subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    stack.enter_context(process)  # closes its pipes and waits for its end
    stack.callback(process.kill)
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 - pipes, above
    process.stdin.write("ready\n")
    process.stdin.flush()
    if process.stdout.readline() != "ready\n":
        raise NamespaceError("no network namespace: unshare --net was refused")
    return process.pid


def _join(hosts: NamespaceHosts, network: str, rate: float) -> None:
    """Create a veth pair between the hosts, shaped at both ends."""
    from pyroute2.iproute.linux import NetNS
    from pyroute2.netlink.exceptions import NetlinkError

    burst = max(MIN_BURST_BYTES, int(rate * BURST_SECONDS))
    with raise_as(NamespaceError, (NetlinkError, OSError), f"{network}: "):
        for host, pid in enumerate(hosts.pids):
            with NetNS(f"/proc/{pid}/ns/net", flags=0) as inside:
                if host == 0:
                    peer = {"ifname": network, "net_ns_pid": hosts.pids[1]}
                    inside.link("add", ifname=network, kind="veth", peer=peer)
                for name in ("lo", network):
                    (index,) = inside.link_lookup(ifname=name)
                    inside.link("set", index=index, state="up")
                inside.addr("add", index=index, address=hosts.address(network, host), prefixlen=24)
                inside.tc("add", "tbf", index, 0, rate=int(rate), burst=burst, latency="400ms")


# Ranks are forks of this process, so that none needs seconds to import torch.


def _import_modules() -> None:
    """Import MODULES, with one OpenMP thread and no GPU for all ranks. SIGTERM ends this process meanwhile."""
    os.environ |= {**processes.SAFE_PATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its CPU kernels are a further download
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the import takes seconds, and there is nothing to save yet
    try:
        for module in MODULES:
            importlib.import_module(module)
    finally:
        signal.signal(signal.SIGTERM, former)


def fork_rank(
    module: str, module_arguments: Sequence[str], environment: Mapping[str, str], pid: int, host: str, log: Path
) -> ForkProcess:
    """Start a rank, which runs `main(words)` of a module.

    It enters the network namespace of process `pid` (setns(2)), sets the host name `host` and writes to `log`.
    """
    parent = os.getpid()

    def run_rank() -> None:
        processes.die_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGINT):  # the handlers of the verb were forked too
            signal.signal(number, signal.SIG_DFL)
        with log.open("wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(environment)
        os.environ.pop(processes.RUN_VARIABLE, None)
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/proc/{pid}/ns/net").open("rb") as network:
            if libc.setns(network.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
                raise OSError(ctypes.get_errno(), f"network namespace of process {pid}")
        socket.sethostname(host)
        sys.exit(importlib.import_module(module).main(module_arguments))

    rank = multiprocessing.get_context("fork").Process(target=run_rank, daemon=True)
    rank.start()
    return rank


def wait_for_ranks(ranks: Sequence[ForkProcess], seconds: float, stop: threading.Event) -> list[int]:
    """Wait for all ranks, and kill the remaining ones after `seconds`; an exit code below 0 is a signal.

    If one fails, the others have a few seconds, as under torchrun. Raises NamespaceError once `stop` is set.
    """
    until = time.monotonic() + seconds
    while left := [rank for rank in ranks if rank.exitcode is None]:
        if any(rank.exitcode for rank in ranks):
            until = min(until, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > until or stop.is_set():
            for rank in left:
                rank.kill()
        multiprocessing.connection.wait([rank.sentinel for rank in left], timeout=processes.POLL_SECONDS)
    if stop.is_set():
        raise NamespaceError("stopped by SIGTERM")
    return [rank.exitcode or 0 for rank in ranks]
