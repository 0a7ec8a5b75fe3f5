"""Hosts as namespaces: each has a slow default network and a fast second one, as pods with a secondary network do.

    with hosts(2, default_rate="200mbit") as rig:
        process = rig.popen(0, ["python", "-m", "..."], env={...})

Every host has its own network, host name, /etc/hosts, /sys and /run/lock; files and processes are shared. `eth0` is
a vxlan over a bridge (the pod network), shaped by `tc tbf`; `net1` is a macvlan on a second, fast bridge. The
namespaces live in processes that end with this one, so nothing is left behind, whatever happens. Needs root.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NETWORKS = {"eth0": "10.244.0", "net1": "192.168.77"}
UNDERLAY = "10.99.0"
_PORTS = {"eth0": "u", "net1": "f"}  # bridge ports, by host number
BURST = "256kb"  # well above rate / HZ for any rate up to 500 Mbit/s at 250 Hz, as tc-tbf(8) asks

# A host's first process: private mounts, but for the control groups, which slurmd needs; then it waits on its standard
# input, which closes when the rig's process dies.
_INIT = """
mount --make-rprivate / && mkdir "$2.cgroup" && mount --rbind /sys/fs/cgroup "$2.cgroup" || exit 1
mount -t sysfs sysfs /sys && mount --rbind "$2.cgroup" /sys/fs/cgroup && mount --bind "$2" /etc/hosts || exit 1
mount --bind /dev/null /etc/resolv.conf || exit 1
mkdir -p /run/lock && mount -t tmpfs tmpfs /run/lock || exit 1
hostname "$1" && echo ready && exec cat
"""


def missing(*more: str) -> str | None:
    """Say why namespaces, and `more` tools, cannot be had here; None when they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    absent = [tool for tool in ("unshare", "nsenter", "ip", *more) if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


# What every test of ranks on several hosts needs, in addition to the marks of its tier, which are in its own file.
RANKS_ON_HOSTS = (
    pytest.mark.usefixtures("forked_ranks"),
    pytest.mark.skipif(missing("tc") is not None, reason=str(missing("tc"))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The hosts, numbered from 0."""

    pids: tuple[int, ...]  # a process inside each host
    fabric: int  # a process where the bridges are

    def address(self, host: int, device: str = "eth0") -> str:
        """Give the IPv4 address of a host's device."""
        return f"{NETWORKS[device]}.{host + 1}"

    def name(self, host: int) -> str:
        """Give the host name."""
        return f"host-{host}"

    def inside(self, host: int, argv: Sequence[str]) -> list[str]:
        """Give the command line that runs argv in a host."""
        return ["nsenter", "-t", str(self.pids[host]), "-n", "-u", "-m", f"--wd={Path.cwd()}", *argv]

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process in a host; env comes on top of this process's own."""
        return subprocess.Popen(self.inside(host, argv), env={**os.environ, **(env or {})}, **options)

    def run(self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Run a short command in a host; returns its standard output."""
        return _run(self.inside(host, argv), {**os.environ, **(env or {})})

    def shape(self, host: int, device: str, rate: str) -> None:
        """Limit what a host sends on a device, as "200mbit"."""
        tbf = ["root", "tbf", "rate", rate, "burst", BURST, "latency", "400ms"]
        self.run(host, ["tc", "qdisc", "replace", "dev", device, *tbf])

    def cut(self, host: int, device: str) -> None:
        """Unplug a host from the network behind a device, somewhere in the fabric: its own link stays up."""
        _ip(self.fabric, f"link set {_PORTS[device]}{host} nomaster")


@contextmanager
def hosts(count: int, default_rate: str = "200mbit", fast_rate: str | None = None) -> Iterator[Rig]:
    """Set up hosts on both networks; all is gone at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="topoflight-rig-")))
        fabric = _start(stack, ["unshare", "-n", "sh", "-c", "echo ready && exec cat"])
        nodes = [_start(stack, ["unshare", "-n", "sh", "-c", "echo ready && exec cat"]) for _ in range(count)]
        pids = [_start(stack, _host_argv(host, count, folder)) for host in range(count)]
        _ip(fabric, "link add under type bridge", "link add fast type bridge", "link set under up", "link set fast up")
        for host in range(count):
            _join_underlay(fabric, nodes[host], host)
        for host in range(count):
            _add_default(nodes[host], pids[host], host, count)
            _add_fast(fabric, pids[host], host)
        rig = Rig(pids=tuple(pids), fabric=fabric)
        for host in range(count):
            rig.shape(host, "eth0", default_rate)
            if fast_rate:
                rig.shape(host, "net1", fast_rate)
        yield rig


def _host_argv(host: int, count: int, folder: Path) -> list[str]:
    """Every host knows all names by the default network, as pods with a headless service do."""
    names = folder / f"hosts-{host}"
    lines = ["127.0.0.1 localhost", *(f"{NETWORKS['eth0']}.{other + 1} host-{other}" for other in range(count))]
    names.write_text("\n".join(lines) + "\n", encoding="utf-8")
    # No name server can be reached from here; without one to ask, a name that /etc/hosts lacks fails at once.
    return ["unshare", "-n", "-u", "-m", "sh", "-c", _INIT, "sh", f"host-{host}", str(names)]


def _start(stack: ExitStack, argv: list[str]) -> int:
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"no namespace: {argv}")
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ip(pid: int, *commands: str) -> None:
    for command in commands:
        _run(["nsenter", "-t", str(pid), "-n", "ip", *command.split()], dict(os.environ))


def _join_underlay(fabric: int, node: int, host: int) -> None:
    _ip(fabric, f"link add u{host} type veth peer name under0 netns {node}", f"link set u{host} master under up")
    _ip(node, f"addr add {UNDERLAY}.{host + 1}/24 dev under0", "link set under0 up")


def _add_default(node: int, pid: int, host: int, count: int) -> None:
    local = f"{UNDERLAY}.{host + 1}"
    _ip(node, f"link add vx type vxlan id 42 dev under0 local {local} dstport 4789 nolearning")
    for other in range(count):
        if other != host:
            mac = _mac(other)
            command = f"fdb append %s dev vx dst {UNDERLAY}.{other + 1}"
            for address in ("00:00:00:00:00:00", mac):
                _run(["nsenter", "-t", str(node), "-n", "bridge", *(command % address).split()], dict(os.environ))
    _ip(node, f"link set vx address {_mac(host)}", f"link set vx netns {pid} name eth0")
    _ip(pid, "link set lo up", f"addr add {NETWORKS['eth0']}.{host + 1}/24 dev eth0", "link set eth0 up")
    _ip(pid, f"route add default via {NETWORKS['eth0']}.254 dev eth0")


def _add_fast(fabric: int, pid: int, host: int) -> None:
    _ip(fabric, f"link add f{host} type veth peer name p{host}", f"link set f{host} master fast up")
    _ip(fabric, f"link set p{host} up", f"link add m{host} link p{host} type macvlan mode bridge")
    _ip(fabric, f"link set m{host} netns {pid} name net1")
    _ip(pid, f"addr add {NETWORKS['net1']}.{host + 1}/24 dev net1", "link set net1 up")


def _mac(host: int) -> str:
    return f"02:42:00:00:00:{host + 1:02x}"


def _run(argv: list[str], env: Mapping[str, str]) -> str:
    done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
