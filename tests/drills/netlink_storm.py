"""Run in a network namespace: overruns the probe's own rtnetlink socket, and looks whether its answers stay right.

Specification: netlink(7), ENOBUFS. The probe subscribes to no events, so its socket is found by its inode, given the
smallest receive buffer and joined to the group of links: only then can a storm overrun it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from probes.host.live import LiveHost

SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, RTNLGRP_LINK = 270, 1, 1
LINKS = 40


def netlink_sockets() -> list[int]:
    """Descriptors of this process that are rtnetlink sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, no paths
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family == socket.AF_NETLINK and one.proto in (0, -1):
                    found.append(int(name))
        except OSError:
            continue
    return found


def storm() -> None:
    """Enough events that any buffer of the smallest size is too small."""
    lines = "".join(f"link set d{n} up\nlink set d{n} down\n" for n in range(LINKS)) * 5
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)


def answers(host: LiveHost) -> str:
    """What one question gives: all links, fewer, or an error that names itself."""
    try:
        found = len(host.netlink("links"))
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
    return "all links" if found == LINKS + 1 else f"{found} links"


def main() -> int:
    """0 where no answer was wrong and the second one after the storm is whole."""
    batch = "".join(f"link add d{n} type ifb\n" for n in range(LINKS))
    subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)
    host = LiveHost()
    first = answers(host)
    found = netlink_sockets()
    for descriptor in found:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            one.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, RTNLGRP_LINK)
    storm()
    after = [answers(host) for _ in range(2)]
    print(f"first {first}, after the storm {after[0]}, then {after[1]}")
    wrong = [a for a in after if a.endswith(" links") and a != "all links"]
    return 1 if not found or first != "all links" or wrong or after[1] != "all links" else 0


if __name__ == "__main__":
    sys.exit(main())
