"""Inside a guest: keeps what the RDMA, limits and interfaces probes say in every state asked for, and runs verbs."""

import importlib
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

import cattrs

from agent.cli import main
from probes.api import UnavailableError
from probes.host.live import LiveHost
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.rdma import probe as rdma
from probes.worker import reader

OUT = Path("/out")
OF_THE_VERB = ("agent.base.options", "agent.checks.measured", "agent.checks.view",
               "agent.cli.bench", "agent.jobs.benchmark", "agent.terminal.measured",
               "collectives.bench.perftest")  # fmt: skip


def active_mtu() -> int | None:
    """What libibverbs says of the first device's first port, in bytes."""
    try:
        from pyverbs.device import Context, get_device_list

        name = get_device_list()[0].name.decode()
        with Context(name=name) as context:
            return 128 << int(context.query_port(1).active_mtu)  # IBV_MTU_256 is 1
    except Exception:  # noqa: BLE001 - one question in addition to those of the probe: no answer is None
        return None


def scan_host() -> dict[str, Any]:
    """What every probe says."""
    host = LiveHost()
    answer: dict[str, Any] = {"findings": {}, "active_mtu": active_mtu()}
    for probe in (rdma.PROBE, limits.PROBE, interfaces.PROBE):
        try:
            facts = reader(probe.name)(host)
        except UnavailableError as error:
            answer[probe.name] = {"absent": str(error)}
            continue
        answer[probe.name] = cattrs.unstructure(facts)
        answer["findings"][probe.name] = [cattrs.unstructure(finding) for finding in probe.check(facts)]
    return answer


def limit(uid: int, memlock_kib: int | None) -> None:
    """Become that user under that limit, for good."""
    if memlock_kib is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_kib << 10,) * 2)
    if uid:
        os.setgroups(())
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def child(name: str, uid: int, memlock_kib: int | None, verb: list[str]) -> int:
    """Look, or run the verb, as that user; files are opened before rights are given up. Gives the exit code."""
    if not verb:
        with (OUT / f"{name}.json").open("w") as output:
            limit(uid, memlock_kib)
            json.dump(scan_host(), output)
        return 0
    for number, path in enumerate(("/dev/null", OUT / f"{name}.out", OUT / f"{name}.err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
    limit(uid, memlock_kib)
    code = main._run(verb)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve() -> None:
    """A line of standard input each: name, uid, memlock in KiB or "-", and a verb's words; a fresh process does it.

    Imports take most of the time of a look or a verb in an emulated guest: they happen once.
    """
    for module in OF_THE_VERB:
        importlib.import_module(module)
    for line in sys.stdin:
        name, uid, memlock, *verb = line.split()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(name, int(uid), None if memlock == "-" else int(memlock), verb)
            except BaseException:  # noqa: BLE001 - a child of fork never returns
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
