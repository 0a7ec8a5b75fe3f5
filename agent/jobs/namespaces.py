"""Two hosts on this machine, as network namespaces that several networks of known speed join.

Surface: unshare(1), veth(4) and tc-tbf(8) through pyroute2's netlink. Each namespace is held by a process that ends
with this one, however that ends; with the last process in it the kernel takes down the namespace, its veth and their
qdiscs, so that nothing is ever left to be swept. What runs in them is forked by one process (agent.jobs.forked). Needs
root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.bench import processes

HOSTS = 2
MOST_NETWORKS = 8
BURST_SECONDS = 0.01  # of the rate: tc-tbf(8) asks for rate / HZ at least, and HZ is 100 or more
LEAST_BURST_BYTES = 65536  # one segment as veth hands it over
_RATE = re.compile(r"([A-Za-z][A-Za-z0-9]{0,14})=([1-9][0-9]{0,5})(mbit|gbit)")
MODULES = ("collectives.bench.rank", "collectives.bench.calibrate", "finetune.train")


class NamespaceError(Exception):
    """Namespaces cannot be made here; says why."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """One network: the name of its interface in every host, and what it carries."""

    name: str
    bits_per_second: float

    @property
    def rate(self) -> str:
        """ "200 Mbit/s"."""
        return f"{self.bits_per_second / 1e6:g} Mbit/s"


def parse(words: Sequence[str]) -> tuple[Shaped, ...]:
    """ "eth0=200mbit" as a network. ValueError names the word and what is allowed."""
    made = []
    for word in words:
        found = _RATE.fullmatch(word)
        if not found or found[1] == "lo":
            raise ValueError(
                f"--over {word!r}: must be INTERFACE=RATE, as eth0=200mbit or net1=1gbit (mbit and gbit, whole "
                "numbers), an interface of at most 15 letters and digits"
            )
        made.append(Shaped(found[1], float(found[2]) * (1e9 if found[3] == "gbit" else 1e6)))
    if len({one.name for one in made}) < len(made):
        raise ValueError("--over: each interface once")
    if len(made) > MOST_NETWORKS:
        raise ValueError(f"--over: at most {MOST_NETWORKS}")
    return tuple(made)


def missing() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("unshare") is None:
        return "not installed: unshare (util-linux)"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"no network namespace: {tried.stderr.strip() or 'refused'}" if tried.returncode else ""


@dataclass(slots=True)
class Rig:
    """The hosts, and the process that forks ranks in them."""

    networks: tuple[Shaped, ...]
    server: subprocess.Popen[str]
    pids: tuple[int, ...] = ()

    def address(self, network: Shaped, host: int) -> str:
        """IPv4 of a host on a network: private addresses, in namespaces that nothing else reaches."""
        return f"10.244.{self.networks.index(network)}.{host + 1}"

    def run(
        self, network: Shaped, module: str, words: Sequence[Sequence[str]], folder: Path, *, seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> list[int]:  # fmt: skip
        """One rank a host, each with its own words, over the network; logs to rankN.log in the folder. Exit codes."""
        ranks: list[dict[str, Any]] = []
        for host in range(HOSTS):
            env = {
                "RANK": host, "WORLD_SIZE": HOSTS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 29511,
                "MASTER_ADDR": self.address(network, 0), "GLOO_SOCKET_IFNAME": network.name, **(environment or {}),
            }  # fmt: skip
            ranks.append({
                "module": module, "words": words[host], "env": {name: str(value) for name, value in env.items()},
                "pid": self.pids[host], "host": f"host-{host}", "log": str(folder / f"rank{host}.log"),
            })  # fmt: skip
        assert self.server.stdin is not None and self.server.stdout is not None  # noqa: S101 - pipes, below
        try:
            self.server.stdin.write(json.dumps({"ranks": ranks, "seconds": seconds}) + "\n")
            self.server.stdin.flush()
            answer = self.server.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise NamespaceError(f"the process that forks ranks has ended with code {self.server.wait()}")
        codes: list[int] = json.loads(answer)
        return codes


@contextmanager
def hosts(networks: Sequence[Shaped], log: Path, stop: threading.Event) -> Iterator[Rig]:
    """Two hosts that the networks join; all is gone at the end. NamespaceError says why not.

    `log` takes what the forking process says; once `stop` is set all of it ends.
    """
    if why := missing():
        raise NamespaceError(why)
    with ExitStack() as stack:
        rig = Rig(tuple(networks), _serve(stack, log))
        rig.pids = tuple(_hold(stack) for _ in range(HOSTS))
        for network in rig.networks:
            _join(rig, network)
        threading.Thread(target=_end_on, args=(stop, rig.server), name="stop the ranks", daemon=True).start()
        yield rig


def _serve(stack: ExitStack, log: Path) -> subprocess.Popen[str]:
    """The forking process; it imports torch while the hosts are made."""
    environment = {
        **os.environ, **processes.SAFE_PATH,
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]),
                                                    os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    environment.pop(processes.RUN_VARIABLE, None)
    words = processes.tethered([sys.executable, "-m", "agent.jobs.forked", *MODULES])
    with log.open("wb") as stream:
        server = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
            start_new_session=True,
        )  # fmt: skip
    stack.callback(_end, server)
    return server


def _hold(stack: ExitStack) -> int:
    """A process in a network namespace of its own, which ends when our end of its standard input does."""
    held = subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    stack.callback(_end, held)
    assert held.stdin is not None and held.stdout is not None  # noqa: S101 - pipes, above
    held.stdin.write("ready\n")
    held.stdin.flush()
    if held.stdout.readline() != "ready\n":
        raise NamespaceError("no network namespace: unshare --net was refused")
    return held.pid


def _end_on(stop: threading.Event, server: subprocess.Popen[str]) -> None:
    stop.wait()
    server.kill()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _join(rig: Rig, network: Shaped) -> None:
    """A veth from host to host, shaped at both ends."""
    from pyroute2 import NetNS
    from pyroute2.netlink.exceptions import NetlinkError

    burst = max(LEAST_BURST_BYTES, int(network.bits_per_second / 8 * BURST_SECONDS))
    try:
        for host, pid in enumerate(rig.pids):
            with NetNS(f"/proc/{pid}/ns/net", flags=0) as inside:
                if host == 0:
                    peer = {"ifname": network.name, "net_ns_pid": rig.pids[1]}
                    inside.link("add", ifname=network.name, kind="veth", peer=peer)
                for name in ("lo", network.name):
                    (index,) = inside.link_lookup(ifname=name)
                    inside.link("set", index=index, state="up")
                inside.addr("add", index=index, address=rig.address(network, host), prefixlen=24)
                inside.tc("add", "tbf", index, 0, rate=int(network.bits_per_second / 8), burst=burst, latency="400ms")
    except (NetlinkError, OSError) as error:
        raise NamespaceError(f"{network.name}: {error}") from None
