"""Publishing and the cluster's answer with a real API server: by default 5,000 records, and one whole agent.

    KUBECONFIG=... .venv/bin/python bench/cluster_real.py [NODES]

Needs an administrator and the NodeTopology definition; writes records named node-..., and deletes them. Prints how fast
they were written, one at a time by eight writers, and per question to the agent its wall seconds and memory.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import urllib3
from cluster_view import KINDS, ROOT, records

from agent.cluster.client import connect, path_of
from agent.cluster.nodes import API_VERSION, PLURAL, NodeRecord
from agent.cluster.publish import Publisher

WRITERS = 8
QUESTIONS = (
    "/healthz", "/findings", "/nodes", "/nodes", "/topology?scope=cluster", "/recommendations?scope=cluster",
    "/recommendations?scope=cluster&model=Llama-3.1-8B", "/metrics",
)  # fmt: skip


def in_parts(work: Callable[[list[NodeRecord]], None], made: list[NodeRecord]) -> float:
    """`work` on all records by several threads; seconds."""
    began = time.perf_counter()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(work, [made[i::WRITERS] for i in range(WRITERS)]))
    return time.perf_counter() - began


def write(mine: list[NodeRecord]) -> None:
    """As each node's agent does, with what it keeps between writes made anew for each node."""
    client = connect()
    for record in mine:
        Publisher(client, lambda: None, namespace="default", labels=False).write(record)


def delete(mine: list[NodeRecord]) -> None:
    """One by one."""
    client = connect()
    for record in mine:
        client.request("DELETE", path_of(API_VERSION, PLURAL, record.name))


def memory_mib(pid: int, what: str) -> float:
    """A line of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) / 1024
    return 0.0


def ask(nodes: int) -> None:
    """Start an agent that publishes, and ask it."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port = it.getsockname()[1]
    words = [sys.executable, "-m", "agent.cli", "serve", "--host", str(ROOT / f"tests/machines/{KINDS[0]}.json"),
             "--port", str(port), "--publish", "--no-nfd", "--token-review"]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(words, env={**os.environ, "NODE_NAME": "node-00002"}, cwd=ROOT, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 60
            while True:
                try:
                    if urllib3.request("GET", url + "/readyz", retries=False).status == 200:
                        break
                except urllib3.exceptions.HTTPError:
                    time.sleep(0.1)
                if time.monotonic() > until or child.poll() is not None:
                    raise SystemExit("the agent did not become ready")
            for question in QUESTIONS:
                began = time.perf_counter()
                answer = urllib3.request("GET", url + question, retries=False, timeout=120)
                wall = time.perf_counter() - began
                now = memory_mib(child.pid, "VmRSS")
                print(f"{question:52s} {answer.status} {wall:7.3f} s  {now:6.1f} MiB resident"
                      f"  {len(answer.data) / 2**20:6.2f} MiB sent")  # fmt: skip
            print(f"{'highest':52s} {'':13s} {memory_mib(child.pid, 'VmHWM'):6.1f} MiB resident, {nodes} nodes")
        finally:
            child.terminate()
            child.wait(30)


def main(nodes: int) -> None:
    """Write, ask, delete."""
    made = list(records(nodes))
    seconds = in_parts(write, made)
    print(f"{nodes} records written by {WRITERS} writers in {seconds:.1f} s: {nodes / seconds:.0f} a second")
    try:
        ask(nodes)
    finally:
        print(f"deleted in {in_parts(delete, made):.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
