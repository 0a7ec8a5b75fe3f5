"""Two hosts on this machine, as network namespaces that several networks of known speed join.

Surface: unshare(1), veth(4) and tc-tbf(8) through pyroute2's netlink. Each namespace is held by a process that ends
with this one, however that ends; with the last process in it the kernel takes down the namespace, its veth and their
qdiscs, so that nothing is ever left to be swept. What runs in them is forked by one process (`main`). Linux,
root.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.base.inputs import InputError
from collectives.bench import processes

HOSTS = 2
MOST_NETWORKS = 8
BURST_SECONDS = 0.01  # of the rate: tc-tbf(8) asks for rate / HZ at least, and HZ is 100 or more
LEAST_BURST_BYTES = 65536  # one segment as veth hands it over
_RATE = re.compile(r"([A-Za-z][A-Za-z0-9]{0,14})=([1-9][0-9]{0,5})(mbit|gbit)")
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000  # linux/sched.h: CLONE_NEWUTS, CLONE_NEWNET
_GRACE_SECONDS = 5.0  # for the others, once one rank has failed
MODULES = ("collectives.bench.rank", "collectives.bench.calibrate", "finetune.train")


class NamespaceError(RuntimeError):
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
    """Read each "eth0=200mbit" as a network. InputError names the word and what is allowed."""
    allowed = (
        "INTERFACE=RATE, as eth0=200mbit or net1=1gbit (mbit and gbit, whole numbers), an interface of at most 15 "
        "letters and digits"
    )
    found = match_each(words, _RATE, allowed)
    return tuple(Shaped(one[1], float(one[2]) * (1e9 if one[3] == "gbit" else 1e6)) for one in found)


def match_each(words: Sequence[str], pattern: re.Pattern[str], allowed: str) -> list[re.Match[str]]:
    """Match the words of --over; group 1 is the interface. InputError where one is malformed or not named once."""
    found = []
    for word in words:
        one = pattern.fullmatch(word)
        if not one or one[1] == "lo":
            raise InputError(f"--over {word!r}: must be {allowed}")
        found.append(one)
    if not found or len({one[1] for one in found}) < len(found) or len(found) > MOST_NETWORKS:
        raise InputError(f"--over: name 1 to {MOST_NETWORKS} networks, each once")
    return found


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


@contextlib.contextmanager
def hosts(networks: Sequence[Shaped], log: Path, stop: threading.Event) -> Iterator[Rig]:
    """Two hosts that the networks join; all is gone at the end. NamespaceError says why not.

    `log` takes what the forking process says; once `stop` is set all of it ends.
    """
    if why := missing():
        raise NamespaceError(why)
    with contextlib.ExitStack() as stack:
        rig = Rig(tuple(networks), _serve(stack, log))
        rig.pids = tuple(_hold(stack) for _ in range(HOSTS))
        for network in rig.networks:
            _join(rig, network)
        threading.Thread(target=_end_on, args=(stop, rig.server), name="stop the ranks", daemon=True).start()
        yield rig


def _serve(stack: contextlib.ExitStack, log: Path) -> subprocess.Popen[str]:
    """The forking process; it imports torch while the hosts are made."""
    environment = {
        **os.environ, **processes.SAFE_PATH,
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]),
                                                    os.environ.get("PYTHONPATH")))),
    }  # fmt: skip
    environment.pop(processes.RUN_VARIABLE, None)
    words = processes.tethered([sys.executable, "-m", "agent.jobs.namespaces", *MODULES])
    with log.open("wb") as stream:
        server = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
            start_new_session=True,
        )  # fmt: skip
    stack.callback(_end, server)
    return server


def _hold(stack: contextlib.ExitStack) -> int:
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


# The process that forks ranks -----------------------------------------------------------------------------------------


def run_ranks(request: Mapping[str, Any]) -> list[int]:
    """Fork the ranks and wait for all; a code below 0 is the signal that ended it.

    Where one fails, the others have a few seconds, as torchrun gives them.
    """
    started = [_fork(rank) for rank in request["ranks"]]
    codes: dict[int, int] = {}
    until = time.monotonic() + request["seconds"]
    while len(codes) < len(started):
        for pid in started:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
                if codes[pid]:
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > until:
            for pid in started:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(processes.POLL_SECONDS)
    return [codes[pid] for pid in started]


def _fork(rank: Mapping[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        processes.die_with_parent(parent)
        os.environ.update(rank["env"])
        _enter(rank["pid"], rank["host"])
        ended = importlib.import_module(rank["module"]).main(rank["words"])
        code = int(ended or 0)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the rank's last words; it must not go on as a second server
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _enter(pid: int, host: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open("rb") as network:
        if libc.setns(network.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
            raise OSError(ctypes.get_errno(), f"network namespace of process {pid}")
    socket.sethostname(host)


def main(modules: Sequence[str]) -> int:
    """Serve until standard input ends; the ranks die with this process, and it with the one that started it.

    `python -m agent.jobs.namespaces MODULE ...` imports the modules and waits: no rank needs seconds to import torch. A
    line of JSON starts one group of ranks: {"ranks": [{"module", "words", "env", "pid", "host", "log"}], "seconds"}.
    Each enters the network namespace of process `pid` (setns(2)), calls itself `host`, writes to `log` and is the
    module's `main(words)`. The line that comes back holds their exit codes.
    """
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_ranks(json.loads(line))) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
