"""Runs the RDMA, limits and interfaces probes in every state asked for and keeps facts and findings: inside a guest."""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import cattrs

from probes.api import UnavailableError
from probes.host.live import LiveHost
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.rdma import probe as rdma


def active_mtu() -> int | None:
    """What libibverbs says of the first device's first port, in bytes."""
    try:
        from pyverbs.device import Context, get_device_list

        name = get_device_list()[0].name.decode()
        with Context(name=name) as context:
            return 128 << int(context.query_port(1).active_mtu)  # IBV_MTU_256 is 1
    except Exception:  # noqa: BLE001 - one question beside the probe's: no answer is None
        return None


def look() -> dict[str, Any]:
    """What every probe says."""
    host = LiveHost()
    answer: dict[str, Any] = {"findings": {}, "active_mtu": active_mtu()}
    for probe in (rdma.PROBE, limits.PROBE, interfaces.PROBE):
        try:
            facts = probe.read(host)
        except UnavailableError as error:
            answer[probe.name] = {"absent": str(error)}
            continue
        answer[probe.name] = cattrs.unstructure(facts)
        answer["findings"][probe.name] = [cattrs.unstructure(finding) for finding in probe.check(facts)]
    return answer


def child(path: Path, uid: int, memlock_kib: int | None) -> None:
    """Look as that user under that limit; the file is opened before rights are given up."""
    with path.open("w") as output:
        if memlock_kib is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_kib << 10,) * 2)
        if uid:
            os.setgroups(())
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        json.dump(look(), output)


def main() -> None:
    """A line of standard input each: name of the state, uid, memlock in KiB or "-"; a fresh process looks.

    Imports take most of a look's time in an emulated guest: they happen once.
    """
    for line in sys.stdin:
        name, uid, memlock = line.split()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(Path("/out") / f"{name}.json", int(uid), None if memlock == "-" else int(memlock))
                code = 0
            except BaseException:  # noqa: BLE001 - a child of fork never returns
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
