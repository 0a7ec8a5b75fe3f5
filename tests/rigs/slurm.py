"""A Slurm cluster on this machine: munged, slurmctld and one slurmd for each node.

All listen on free loopback ports; or each node is a host of rigs.netns, with slurmctld on the first of them.
"""

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rigs import netns
from rigs.packages import apt_installed
from rigs.waiting import eventually

COMMAND_SECONDS = 240.0
PATH = f"{os.environ['PATH']}:/usr/sbin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """A cluster that runs, and what its commands need."""

    folder: Path
    environment: Mapping[str, str]
    hosts: netns.Rig | None = None

    def inside(self, words: Sequence[str], number: int = 0) -> list[str]:
        """The words of a command on a node, or on the first one, which is the login node."""
        return self.hosts.inside(number, words) if self.hosts else list(words)

    def run(self, *words: str, check: bool = True, seconds: float = COMMAND_SECONDS) -> str:
        """What one command of Slurm prints."""
        done = subprocess.run(
            self.inside(words), env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def node(self, name: str) -> str:
        """State and reason of a node: "idle|none", whether or not it has answered since its state changed."""
        return self.run("sinfo", "-h", "-n", name, "-N", "-o", "%T|%E").strip().replace("*|", "|")

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job that the controller still knows."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.partition("=")[::2] for word in words)


@contextmanager
def slurm_cluster(folder: Path, nodes: int = 2, more: str = "", hosts: netns.Rig | None = None) -> Iterator[Slurm]:
    """Start a cluster in `folder`, and end it with all its jobs; skips where Debian's packages cannot be installed."""
    if os.geteuid() != 0:
        pytest.skip("slurmd needs root")
    apt_installed("slurmctld", "slurm-wlm", "munge")
    for name in ("munge", "state"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = _free_ports(nodes + 1)
    names = [hosts.name(number) if hosts else f"node{number + 1:02d}" for number in range(nodes)]
    at = [(hosts.name(n), hosts.address(n)) if hosts else (socket.gethostname(), "127.0.0.1") for n in range(nodes)]
    rows = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=2"
        for name, (host, address), port in zip(names, at, ports[1:], strict=True)
    )
    config = folder / "slurm.conf"
    controller = f"{at[0][0]}({at[0][1]})" if hosts else "localhost"
    template = Path(__file__).with_name("slurm.conf").read_text()
    config.write_text(template.format(folder=folder, controller=controller, port=ports[0], rows=rows, more=more))
    environment = {**os.environ, "SLURM_CONF": str(config), "PATH": PATH}
    cluster = Slurm(folder=folder, environment=environment, hosts=hosts)
    munge = folder / "munge"
    with ExitStack() as stack:
        stack.enter_context(_process(
            cluster, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/s",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        ))  # fmt: skip
        eventually(lambda: (munge / "s").exists(), "munged opens its socket")
        stack.enter_context(_process(cluster, "slurmctld", "-D", "-c"))
        for number, name in enumerate(names):
            stack.enter_context(_process(cluster, "slurmd", "-D", "-N", name, number=number))
        eventually(lambda: cluster.run("sinfo", "-h", "-o", "%T %D", check=False) == f"idle {nodes}\n", "nodes idle")
        stack.callback(_end_jobs, cluster)
        yield cluster


def _end_jobs(cluster: Slurm) -> None:
    cluster.run("scancel", "--user", "root", check=False)
    eventually(lambda: not cluster.run("squeue", "-h", check=False), "no job is left")


@contextmanager
def _process(cluster: Slurm, *words: str, number: int = 0) -> Iterator[None]:
    with (cluster.folder / f"{words[0]}-{words[-1].strip('-')[:8].replace('/', '')}.log").open("wb") as log:
        words = tuple(cluster.inside(words, number))
        process = subprocess.Popen(words, env=cluster.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]
