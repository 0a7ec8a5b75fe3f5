"""Run in a network namespace: overruns the sockets that links are asked on, and looks whether the answers stay right.

Specification: netlink(7), ENOBUFS. The probe subscribes to no events, so every rtnetlink socket of this process is
found while it is open, given the smallest receive buffer and joined to the group of links: only then can a storm of
events overrun it. The same storm changes the list while it is made (NLM_F_DUMP_INTR).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from probes.host.live import LiveHost

SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, RTNLGRP_LINK = 270, 1, 1
LINKS, QUESTIONS = 40, 40


def bend_sockets() -> int:
    """Make every rtnetlink socket of this process small and a listener; how many there were."""
    found = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, no paths
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                continue
            descriptor = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as one:
            if one.family == socket.AF_NETLINK and one.proto in (0, -1):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                one.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, RTNLGRP_LINK)
                found += 1
    return found


def dropped() -> int:
    """Messages that did not fit into a socket that is open now: proc(5), /proc/net/netlink, column Drops."""
    lines = Path("/proc/self/net/netlink").read_text().splitlines()[1:]
    return sum(int(line.split()[8]) for line in lines)


def answer(host: LiveHost) -> str:
    """What one question gives: all links, fewer, or an error that names itself."""
    try:
        found = len(host.netlink("links"))
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
    return "all links" if found == LINKS + 1 else f"{found} links"


def main() -> int:
    """0 where sockets were overrun, no answer was wrong, and the one after the storm is whole."""
    batch = "".join(f"link add d{n} type ifb\n" for n in range(LINKS))
    subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)
    host, over, bent, lost = LiveHost(), threading.Event(), [0], [0]
    first = answer(host)
    lines = "".join(f"link set d{n} up\nlink set d{n} down\n" for n in range(LINKS)) * 5

    def storm() -> None:
        while not over.is_set():
            subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)

    def bend() -> None:
        while not over.is_set():
            bent[0] += bend_sockets()
            lost[0] = max(lost[0], dropped())

    threads = [threading.Thread(target=storm), threading.Thread(target=bend)]
    for thread in threads:
        thread.start()
    during = Counter(answer(host) for _ in range(QUESTIONS))
    over.set()
    for thread in threads:
        thread.join()
    last = answer(host)
    print(f"first {first}, during the storm {dict(during)} with {lost[0]} messages lost, then {last}")
    wrong = [each for each in during if each.endswith(" links") and each != "all links"]
    return 1 if not bent[0] or not lost[0] or (first, last) != ("all links", "all links") or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
