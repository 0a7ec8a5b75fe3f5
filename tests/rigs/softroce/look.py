"""Runs the RDMA, limits and interfaces probes and prints facts and findings as JSON: inside a guest."""

from __future__ import annotations

import json
from typing import Any

import cattrs

from probes import interfaces, limits, rdma
from probes.api import UnavailableError
from probes.live import LiveHost


def active_mtu() -> int | None:
    """What libibverbs says of the first device's first port, in bytes."""
    try:
        from pyverbs.device import Context, get_device_list

        name = get_device_list()[0].name.decode()
        with Context(name=name) as context:
            return 128 << int(context.query_port(1).active_mtu)  # IBV_MTU_256 is 1
    except Exception:  # noqa: BLE001 - one question beside the probe's: no answer is None
        return None


def main() -> None:
    """Print what every probe says."""
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
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
