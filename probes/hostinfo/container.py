"""Whether this process is in a container, in which kind, and whether that container is the agent's own.

Specification: systemd's container interface (the variable `container`, /run/systemd/container,
/run/host/container-manager); podman-run(1) (/run/.containerenv, hidden by the tmpfs that --read-only puts on /run);
cgroups(7), proc(5) mountinfo; the kubelet's /etc/hosts and termination log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from contracts.tables import read_table
from probes.host import sysfs
from probes.host.protocol import Host

ROLE = "TOPOFLIGHT_ROLE"
"""Set to "agent" where the container is the resident agent's: what it was given says nothing of what a job gets."""

NAMES: dict[str, Any] = read_table(__file__, "names.toml")
_GROUPS = {kind: re.compile(pattern) for kind, pattern in NAMES["cgroups"].items()}
_POD_MOUNT = re.compile(r" (?:\S*/pods/[0-9a-f-]{36}/etc-hosts /etc/hosts|\S+ /dev/termination-log) ")


def container(host: Host) -> str | None:
    """What kind of container this process is in ("kubernetes", "podman", ...); None where nothing shows one.

    The surest signs come first: a pod's, for it holds an engine's too; files of engines, which say what made the
    container; the variable `container`, which an image may set too ("oci"); cgroup; where the root lies.
    """
    groups = "\n".join(sysfs.text(host, path) or "" for path in ("/proc/self/cgroup", "/proc/1/cgroup"))
    named = next((kind for kind, sign in _GROUPS.items() if sign.search(groups)), None)
    hosts = sysfs.text(host, "/etc/hosts") or ""
    if (
        named == "kubernetes"
        or host.exists("/var/run/secrets/kubernetes.io/serviceaccount")
        or hosts.startswith("# Kubernetes-managed hosts file")  # kubelet writes it into every pod, token or not
    ):
        return "kubernetes"
    if host.exists("/run/.containerenv"):
        return "podman"
    if host.exists("/.dockerenv"):
        return "docker"
    return named or next(_candidates(host), None)


def _candidates(host: Host) -> Iterator[str]:
    """What the mounts of a pod, the container manager and the root's place say, in this order."""
    mounts = (sysfs.text(host, "/proc/self/mountinfo") or "").splitlines()
    if any(_POD_MOUNT.search(line) for line in mounts):
        yield "kubernetes"
    words = (
        host.environment().get("container"),
        sysfs.text(host, "/run/systemd/container"),
        sysfs.text(host, "/run/host/container-manager"),
    )
    roots = [line for line in mounts if line.split(" ", 5)[4:5] == ["/"]]
    stores = [kind for line in roots for mark, kind in NAMES["stores"].items() if mark in line]
    kinds = [word for word in words if word is not None and word in NAMES["container_kinds"]]
    yield from (kind for kind in kinds if kind != "oci")
    yield from stores
    yield from kinds


def of_agent(host: Host) -> bool:
    """Whether this is the resident agent's own container: its pod's settings are not those of a job's pod."""
    return host.environment().get(ROLE) == "agent" and container(host) is not None
