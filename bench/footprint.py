"""Measure the memory and CPU use of the agent and of some verbs: `python bench/footprint.py [--long]`.

The agent runs on a recorded machine with 8 GPUs and 8 HCAs (bench/resident.py). Measured: CPU of some verbs; memory of
the agent when it only scans, after requests and while it publishes; CPU of a scan as a share of 30 s; start to /readyz;
memory and descriptors over many scans and requests (10,000 and 100,000 with `--long`, ten minutes); node_exporter.
"""

from __future__ import annotations

import argparse
import contextlib
import resource as limits
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import resident

SCAN_SECONDS = 30.0  # default interval between scans
BEGIN_SECONDS = 60.0  # limit for the start of what is measured; agents delay their first publishing by up to 5 s
ENDPOINTS = (
    "/metrics", "/recommendations", "/recommendations?model=Llama-3.1-8B", "/findings", "/topology", "/snapshot",
    "/preflight", "/nodes", "/healthz", "/nowhere", "/recommendations?model=nobody",
)  # fmt: skip
PER_ENDPOINT = 10
QUIET, PUBLISHING = 90, 110  # limits in MiB of the PSS of agent and probe process, without and with publishing
VERBS = (  # measured from the start to the end of the process
    "--help", "explain limits.memlock.low", "topo --host tests/machines/hgx-h100-8xH100-8hca.json", "scan", "preflight",
    "evidence tests/collectives/ib_on.log", "recommend --machine p5.48xlarge --nodes 2048 --model Llama-3.1-405B",
)  # fmt: skip
# The agent, which scans without a pause and writes the number of its scans into a file.
BUSY = """
import sys
from pathlib import Path
from agent.http import serve as cmd_serve
from agent.http.state import State
from probes.registry import ALL
from probes.scanner import Scanner
root, port, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
scanner, made = Scanner(root, probes=ALL), 0
def counted():
    global made
    found = (scanner.scan(),)
    made += 1
    part = count.with_suffix(".part")
    part.write_text(str(made))
    part.replace(count)  # atomic: a reader never sees a partial number
    return found
state = State(counted, interval_seconds=0.0, folder=folder)
options = cmd_serve.ServeOptions(**{**cmd_serve.serve.make_context("serve", []).params, "hosts": None})
cmd_serve.listen(cmd_serve.build_application(state, options), cmd_serve.bind("127.0.0.1", port))
scanner.close()
"""


@dataclass(frozen=True, kw_only=True)
class Steady:
    """Memory and file descriptors at ten times during a long run."""

    scans: int
    requests: int
    errors: int
    looks: tuple[resident.Memory, ...]

    def grown(self) -> tuple[float, int]:
        """Return the growth (MiB, descriptors) since the first third, in which caches fill."""
        third = len(self.looks) // 3
        first, last = self.looks[third], self.looks[-1]
        open_at_end = min(look.descriptors for look in self.looks[-third:])
        return last.both - first.both, open_at_end - first.descriptors


def command_seconds(*arguments: str, times: int = 5) -> float:
    """Return the median CPU seconds of a Python process with these arguments."""
    spent = []
    for _ in range(times):
        before = limits.getrusage(limits.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=False, cwd=resident.ROOT)
        after = limits.getrusage(limits.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(spent)


def start_seconds(folder: Path, root: str, environment: Mapping[str, str], times: int = 5) -> list[tuple[float, float]]:
    """Return (seconds, CPU seconds) from the start of the process to status 200 of /readyz, after the first scan."""
    results = []
    for _ in range(times):
        with resident.agent(folder, "--root", root, environment=environment) as (pid, _, seconds):
            results.append((seconds, resident.cpu_seconds(pid)))
    return results


def at_rest(
    folder: Path, *options: str, environment: Mapping[str, str], scans: int = 20, settle: float = 3.0,
    begun: Callable[[], bool] = lambda: True,
) -> tuple[resident.Memory, float, resident.Memory]:  # fmt: skip
    """Return (memory while only scanning, CPU seconds of one scan and one second, memory after some requests).

    The measurement starts when `begun` returns true. Raises TimeoutError if it does not.
    """
    with resident.agent(folder, *options, "--interval", "1", environment=environment) as (pid, port, _):
        until = time.monotonic() + BEGIN_SECONDS
        while not begun():
            if time.monotonic() > until:
                raise TimeoutError(f"not begun in {BEGIN_SECONDS:.0f} s: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)
        time.sleep(settle)
        before = resident.cpu_seconds(pid)
        time.sleep(scans)
        spent = (resident.cpu_seconds(pid) - before) / scans
        quiet = resident.memory(pid)
        for path in ("/", "/what-if?model=Llama-3.1-8B", "/metrics", "/recommendations?model=Llama-3.1-8B"):
            resident.get(port, path)
        time.sleep(1)
        return quiet, spent, resident.memory(pid)


def steady(folder: Path, root: str, environment: Mapping[str, str], *, scans: int, requests: int) -> Steady:
    """Send requests to every endpoint while the agent scans without a pause."""
    folder.mkdir(parents=True, exist_ok=True)
    port, count = resident.free_port(), folder / "count"
    command = [sys.executable, "-c", BUSY, root, str(port), str(count), str(folder / "state")]
    looks, sent, errors = [], 0, 0
    with resident.process(command, environment, folder / "log") as server:
        resident.wait(port, "/readyz", server)
        warm = max(20, scans // 10)  # caches fill and the heap grows in the first tenth
        for tenth in range(1, 11):
            goal = warm + (scans - warm) * tenth // 10
            while sent < requests * tenth // 10 or int(count.read_text()) < goal:
                if sent < requests * tenth // 10:
                    errors += request_all(port)
                    sent += len(ENDPOINTS) * PER_ENDPOINT
                else:
                    time.sleep(0.05)
                if server.poll() is not None:
                    raise RuntimeError(f"the agent ended: {(folder / 'log').read_text()[-500:]}")
            looks.append(resident.memory(server.pid))
        return Steady(scans=int(count.read_text()), requests=sent, errors=errors, looks=tuple(looks))


def request_all(port: int) -> int:
    """Request every endpoint several times, each on its own connection. Return the number of wrong answers."""
    wrong = 0
    for path in ENDPOINTS:
        expected = 404 if path == "/nowhere" else 400 if path.endswith("nobody") else 200
        client = resident.Client(port, path)
        wrong += sum(client.fetch() != expected for _ in range(PER_ENDPOINT))
        client.socket.close()
    return wrong


@contextlib.contextmanager
def published(folder: Path) -> Iterator[tuple[tuple[str, ...], dict[str, str], Callable[[], bool]]]:
    """Yield (arguments, environment, whether a record was published) for publishing to the stand-in API server."""
    sys.path[:0] = [str(resident.ROOT / "tests" / "e2e"), str(resident.ROOT / "tests")]
    from api_server import ApiServer, write_kubeconfig

    with ApiServer() as api:
        config = write_kubeconfig(folder / "kubeconfig", api.url)
        yield (
            ("--publish", "--token-review", "--node-name", "here"), {"KUBECONFIG": str(config)},
            lambda: any(method == "PATCH" for method, _ in api.requests),
        )  # fmt: skip


def row(name: str, value: str, aim: str = "", is_met: bool | None = None) -> None:
    """Print one line of the table. `is_met` is None for a figure without an aim."""
    met = {True: "yes", False: "NO", None: ""}[is_met]
    print(f"| {name} | {value} | {aim} | {met} |", flush=True)


def table(folder: Path, root: str, environment: Mapping[str, str]) -> None:
    """Print the table, each line as soon as it is measured."""
    print("| what | measured | aim | met |\n|---|---|---|---|")
    for verb in VERBS:
        row(f"`topoflight {verb}`", f"{command_seconds('-m', 'agent.cli', *verb.split()):.3f} s of CPU")
    starts = start_seconds(folder, root, environment)
    best, middle = min(starts), statistics.median(wall for wall, _ in starts)
    row("start to /readyz, best of 5", f"{best[0]:.2f} s, of CPU {min(cpu for _, cpu in starts):.2f} s in two "
        f"processes (median {middle:.2f} s)", "1.5 s", best[0] < 1.5)  # fmt: skip
    quiet, spent, paged = at_rest(folder, "--root", root, environment=environment)
    row("PSS of agent and probe process", f"{quiet.pss:.1f} MiB", f"{QUIET} MiB", quiet.pss <= QUIET)
    row("RSS of the agent process; RSS of both", f"{quiet.resident:.1f}; {quiet.both:.1f} MiB")
    row("after a page, a what-if question and a scrape",
        f"{paged.resident:.1f} MiB, RSS of both {paged.both:.1f}, PSS {paged.pss:.1f}")  # fmt: skip
    row(f"CPU of a scan every {SCAN_SECONDS:.0f} s", f"{spent / SCAN_SECONDS:.3%} of a core ({spent * 1e3:.0f} ms)",
        "0.2 %", spent / SCAN_SECONDS < 0.002)  # fmt: skip
    with published(folder) as (options, variables, begun):
        loud, _, _ = at_rest(folder, "--root", root, *options, environment={**environment, **variables}, begun=begun)
    row("publishing: PSS of both", f"{loud.pss:.1f} MiB", f"{PUBLISHING} MiB", loud.pss <= PUBLISHING)
    row("publishing: RSS of the agent process; RSS of both", f"{loud.resident:.1f}; {loud.both:.1f} MiB")
    with contextlib.suppress(FileNotFoundError), resident.exporter() as (pid, port):
        resident.latencies(port, "/metrics", 20)
        other, before = resident.memory(pid), resident.cpu_seconds(pid)
        resident.latencies(port, "/metrics", 20)
        scrape = (resident.cpu_seconds(pid) - before) / 20
        row("node_exporter on this machine", f"{other.resident:.1f} MiB, {scrape * 1e3:.1f} ms of CPU for each scrape")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", action="store_true", help="10,000 scans and 100,000 requests")
    scans, requests = (10_000, 100_000) if parser.parse_args().long else (300, 5000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root, environment = resident.restore(folder)
        table(folder, root, environment)
        growth = steady(folder, root, environment, scans=scans, requests=requests)
    mib, descriptors = growth.grown()
    print(f"\n{growth.scans} scans; {growth.requests} requests, {growth.errors} with a wrong answer. Growth since the "
          f"first third: {mib:+.1f} MiB, {descriptors:+d} descriptors. RSS of both processes in MiB: "
          + " ".join(f"{look.both:.1f}" for look in growth.looks)
          + "; descriptors: " + " ".join(str(look.descriptors) for look in growth.looks))  # fmt: skip
    return int(growth.errors > 0)


if __name__ == "__main__":
    sys.exit(main())
