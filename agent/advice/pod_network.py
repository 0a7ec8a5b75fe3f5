"""A recommendation as pods need it, whose network namespace is not the node's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from planner.advice import Recommendation
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts

POD_ROLES = {"pod-default", "secondary", "loopback"}  # of interfaces in a pod's network


def in_pods(advice: Recommendation, found: Sequence[Snapshot], *, here: bool) -> tuple[Recommendation, list[str]]:
    """Settings as pods see their network: interfaces and GIDs are those of a pod's network namespace, or left out.

    An interface is named only where a pod was seen to call it so, in a record of an agent in the pods' network; an
    index counts in the GID table that the pod sees. `here`: `found` is the machine that this process runs on.
    """
    roles: dict[str, set[str]] = {}
    if not here or os.environ.get("KUBERNETES_SERVICE_HOST"):
        for snapshot in found:
            facts = snapshot.facts(InterfacesFacts)
            for link in facts.interfaces if facts else ():
                roles.setdefault(link.name, set()).add(link.role)
    inside = {name for name, seen in roles.items() if seen <= POD_ROLES}
    secondary = any("secondary" in roles[name] for name in inside)
    where = "this machine" if here else ", ".join(snapshot.hostname for snapshot in found[:2])
    kept, notes = [], []
    for setting in advice.settings:
        wrong = ""
        if setting.name.endswith("_SOCKET_IFNAME"):
            names = [name for name in setting.value.lstrip("^=").split(",") if name not in inside]
            wrong = f"{', '.join(names)} is an interface of {where}, and pods have their own" if names else ""
        elif setting.name == "NCCL_IB_GID_INDEX" and not secondary:
            wrong = f"it counts in the GID table of {where}, and a pod sees another"
        elif setting.name.endswith("_FILE") and setting.value.startswith("/"):
            notes.append(
                f"{setting.name}={setting.value} is a file of the node's image; the pod's image must have it too"
            )
        if wrong:
            more = "a capture from a pod on the job's networks tells"
            notes.append(f"{setting.name}={setting.value} is left out: {wrong}; {more}")
        else:
            kept.append(setting)
    return replace(advice, settings=tuple(kept)), notes
