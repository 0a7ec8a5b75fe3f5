"""Driving ib_write_bw: the lines of both sides, how its words are read, and how it ends. A stand-in meets over TCP as
perftest does; real traffic runs on the Soft-RoCE guests."""

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from collectives.bench import perftest
from collectives.bench.perftest import Port, build_command, listen, write
from collectives.bench.results import RdmaResult, read_as
from contracts import plain

PORTS = (Port(device="mlx5_0", gid_index=3), Port(device="mlx5_1", port=2))
STAND_IN = """#!{python}
# As perftest 4.5: both sides meet at -p, the one without a peer waits for it.
import os, socket, sys, time
words = sys.argv[1:]
value = lambda name: words[words.index(name) + 1]
device, port, peer = value("-d"), int(value("-p")), None if words[-2].startswith("-") else words[-1]
peer = peer if peer and "." in peer else None
print(" Dual-port       : OFF\\t\\tDevice         : " + device)
if device == os.environ.get("HANGS"):
    time.sleep(600)
if peer is None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.accept()[0].recv(1)
else:
    try:
        meeting = socket.create_connection((peer, port), timeout=5)
    except OSError:
        print(" Couldn't connect to " + peer + ":" + str(port), file=sys.stderr)
        sys.exit(1)
    meeting.sendall(b".")
    print(" Mtu             : 4096[B]\\n #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]")
    print(" 65536      {writes}           0.00               0.00                    0.000000")
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / perftest.PROGRAM
    program.parent.mkdir()
    program.write_text(STAND_IN.replace("{python}", sys.executable).replace("{writes}", "12000"))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(perftest, "TCP_PORT", _free_ports(len(PORTS)))


def _free_ports(many: int) -> int:
    """The first of so many ports in a row that no process holds, below those that the kernel hands out in between."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for first in range(lowest - 4 * (1 + os.getpid() % 1000), 1024, -4):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + many):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no port is free")


Answers = list[tuple[tuple[str, ...], tuple[str, ...]]]


def listening(wait_seconds: float, **more) -> tuple[threading.Thread, Answers]:
    """The listening side in a thread, and what it returns."""
    answer: Answers = []
    words = {"ports": PORTS, "wait_seconds": wait_seconds, "stop": threading.Event(), **more}
    thread = threading.Thread(target=lambda: answer.append(listen(words.pop("ports"), **words)))
    thread.start()
    return thread, answer


def written(ports: Sequence[Port]) -> RdmaResult:
    """What the writing side measures, with usual limits."""
    return write(ports, "127.0.0.1", wait_seconds=perftest.WAIT_SECONDS, stop=threading.Event())


def test_each_port_meets_the_one_at_its_place() -> None:
    """The side that writes names its peer last; an InfiniBand port has no GID index."""
    assert build_command(PORTS[0], 18515)[:7] == ["ib_write_bw", "-d", "mlx5_0", "-i", "1", "-p", "18515"]
    assert build_command(PORTS[0], 18515)[-2:] == ["-x", "3"]
    assert build_command(PORTS[1], 18516, "node0")[-1] == "node0" and "-x" not in build_command(PORTS[1], 18516)


@pytest.mark.usefixtures("stand_in")
def test_both_sides_in_any_order_and_the_count_over_the_known_time() -> None:
    sides: list[tuple[threading.Thread, Answers]] = []
    timer = threading.Timer(1.5, lambda: sides.append(listening(120.0)))
    timer.start()
    result = written(PORTS)
    timer.join()
    ((thread, answer),) = sides
    thread.join(150.0)
    assert result.complete and [each.port for each in result.writes] == ["mlx5_0:1", "mlx5_1:2"]
    assert result.writes[0].bytes_per_second == 12000 * 65536 / 4.0
    assert result.writes[0].mtu_bytes == 4096
    assert answer == [(("mlx5_0:1", "mlx5_1:2"), ())]
    assert read_as(plain.write(result), RdmaResult) == result


@pytest.mark.usefixtures("stand_in")
def test_a_port_that_the_other_side_has_not_is_a_problem_and_the_rest_is_measured() -> None:
    thread, _answer = listening(120.0, ports=PORTS[:1])
    result = written(PORTS)
    thread.join(150.0)
    assert [each.port for each in result.writes] == ["mlx5_0:1"] and not result.complete
    assert f"mlx5_1:2 to 127.0.0.1:{perftest.TCP_PORT + 1}: Couldn't connect to" in result.problems[0]


@pytest.mark.usefixtures("stand_in")
def test_nobody_comes_and_nothing_is_left_running() -> None:
    served, problems = listen(PORTS, wait_seconds=0.5, stop=threading.Event())
    assert served == () and problems[0] == "mlx5_0:1: no host wrote to it within 0.5 s"
    children = [each.as_dict(["cmdline"]) for each in psutil.Process().children(recursive=True)]  # None of a zombie
    assert not [child for child in children if perftest.PROGRAM in (child["cmdline"] or ())]


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_hangs_is_ended_and_so_is_one_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANGS", "mlx5_0")
    monkeypatch.setattr(perftest, "OVERRUN_SECONDS", 0.0)
    assert "did not end within" in written(PORTS[:1]).problems[0]
    stop = threading.Event()
    thread, answer = listening(600.0, stop=stop)
    time.sleep(0.5)
    stop.set()
    thread.join(60.0)
    assert answer == [((), ("mlx5_0:1: stopped", "mlx5_1:2: stopped"))]
