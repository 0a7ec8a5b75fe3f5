"""A recorded machine as the shipped agent sees it from inside its pod: the rendered manifest laid over the answers."""

import errno
import os
from pathlib import Path

from build import LOOPBACK
from kustomization import render
from machine_built import address_of, link_of, routes_of
from machine_tree import Netdev
from rigs.recorded import NAMES, path_of, raised, view
from rigs.tables import ROOT
from scanned import scan

from agent.base.units import parse_size
from agent.checks.view import View, build_view
from probes.host.live import ENVIRONMENT, SECRET
from probes.host.protocol import Json
from probes.host.recording import RecordedHost, load

OVERLAYS = ROOT / "deploy/daemonset/overlays"
Document = dict
GROUP = "/kubepods/burstable/pod0e4d2c1a-5f6b-4a3e-9d8c-7b6a5f4e3d2c/c0ffee00c0ffee00"
OPENSHIFT_UID = 1000650000  # where the manifest names none, of the range of the namespace
SHM_OF_A_POD = 64 << 20  # what containerd and CRI-O give where the manifest mounts nothing there


class PodHost(RecordedHost):
    """Answers as the machine would from inside the pod; `engine` gives the container runtime's default limits.

    Its driver is the host's, as the runtime class mounts the library. Pods of one network namespace see their own
    interfaces only, no /dev/infiniband without a device plugin, the first 64 bytes of configuration space (not root),
    and no kernel log.
    """

    def __init__(self, path: Path, manifest: Document, *, memlock: int | None = None, nofile: int = 1 << 20) -> None:
        super().__init__(load(path).content)
        pod = manifest["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        security = {**pod["securityContext"], **container["securityContext"]}
        assert security["capabilities"] == {"drop": ["ALL"]} and security["readOnlyRootFilesystem"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        self.uid = int(security.get("runAsUser", OPENSHIFT_UID))
        self.host_network = bool(pod.get("hostNetwork"))
        self.engine = {"MEMLOCK": memlock, "NOFILE": nofile}
        self.env = {e["name"]: e.get("value", "from-the-pod") for e in container["env"]}
        limits, period = container["resources"]["limits"], 100_000
        cpus = str(limits["cpu"])
        cores = float(cpus.removesuffix("m")) / 1000 if cpus.endswith("m") else float(cpus)
        self.files = {
            "/proc/self/status": "Name:\ttopoflight\nCapEff:\t0000000000000000\nSeccomp:\t2\n",
            "/proc/self/cgroup": f"0::{GROUP}\n",
            "/proc/1/cgroup": f"0::{GROUP}\n",
            f"/sys/fs/cgroup{GROUP}/memory.max": f"{parse_size(limits['memory'])}\n",
            f"/sys/fs/cgroup{GROUP}/cpu.max": f"{int(cores * period)} {period}\n",
            "/etc/hosts": "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n",
        }
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        self.shm = SHM_OF_A_POD
        if memory := volumes.get(mounted.get("/dev/shm", ""), {}).get("emptyDir"):
            assert memory["medium"] == "Memory"  # sized by the smaller of its own limit and the pod's
            self.shm = min(parse_size(size) or 0 for size in (memory["sizeLimit"], limits["memory"]))

    def read_text(self, path: str) -> str:
        """The pod's own files go before the machine's."""
        if path in self.files:
            return self.files[path]
        if path.startswith("/etc/podinfo/") and not self.host_network:
            raise FileNotFoundError(errno.ENOENT, "of the recorded pod", path)
        if path.startswith(("/proc/net/", "/proc/self/net/")) and not self.host_network:
            raise FileNotFoundError(errno.ENOENT, "of the host's network namespace", path)
        if "/gid_attrs/" in path and not self.host_network:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)  # the GID's netdev is in another namespace
        return super().read_text(path)

    def read_bytes(self, path: str, limit: int) -> bytes:
        """Who is not root reads the header of configuration space."""
        return super().read_bytes(path, limit)[:64]

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Device nodes and network devices of the host are out of sight."""
        if path.startswith(("/dev/", "/sys/class/net")) and not (self.host_network and path.startswith("/sys")):
            raise FileNotFoundError(errno.ENOENT, "not in the pod", path)
        if path.endswith("/net") and not self.host_network:
            raise FileNotFoundError(errno.ENOENT, "of another network namespace", path)
        return super().list_dir(path)

    def exists(self, path: str) -> bool:
        """Files of the pod, none below /dev but what every container has."""
        if path in self.files or path == "/var/run/secrets/kubernetes.io/serviceaccount":
            return True
        return not path.startswith(("/dev/infiniband", "/run/.containerenv", "/.dockerenv")) and super().exists(path)

    def usable(self, path: str) -> bool:
        """No device plugin gave the agent a device."""
        return not path.startswith("/dev/") and super().usable(path)

    def statvfs(self, path: str) -> tuple[int, int]:
        """What the manifest mounts at /dev/shm."""
        return self.shm, self.shm

    def limit(self, name: str) -> tuple[int | None, int | None]:
        """The engine's own."""
        if name in self.engine:
            return self.engine[name], self.engine[name]
        return super().limit(name)

    def environment(self) -> dict[str, str]:
        """The manifest's, filtered as a live host filters it."""
        return {k: v for k, v in self.env.items() if ENVIRONMENT.match(k) and not SECRET.search(k)}

    def identity(self) -> dict[str, Json]:
        """The pod's user and name."""
        return {**super().identity(), "uid": self.uid, "pid": 1, "hostname": "topoflight-x7k2p", "home": "/tmp"}

    def netlink(self, what: str) -> tuple[dict[str, Json], ...]:
        """Loopback and the cluster network's eth0, unless the pod is on the host's network."""
        if self.host_network:
            return super().netlink(what)
        return POD_NETLINK[what]

    def port_link(self, netdev: str) -> dict[str, Json]:
        """A veth has no port."""
        if self.host_network:
            return super().port_link(netdev)
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), netdev)

    def verbs(self, what: str, *arguments: int | str) -> Json:
        """The agent's image has no pyverbs."""
        raise ImportError("No module named 'pyverbs'")

    def kernel_log(self, word: str) -> tuple[str, ...]:
        """CAP_SYSLOG is dropped."""
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), "kernel log")


LO, ETH0 = LOOPBACK, Netdev(name="eth0", index=2, mtu=1450, kind="veth", link=12, addresses=("10.244.1.7/24",))
POD_NETLINK: dict[str, tuple[dict[str, Json], ...]] = {
    "links": (link_of(LO), {**link_of(ETH0), "IFLA_LINK_NETNSID": 0}),
    "addresses": (address_of(LO, LO.addresses[0]), address_of(ETH0, ETH0.addresses[0])),
    "routes": tuple(routes_of((ETH0,), ETH0.index)),
}


def agent_of(overlay: str) -> Document:
    """The DaemonSet that an overlay renders."""
    return next(d for d in render(OVERLAYS / overlay) if d["kind"] == "DaemonSet")


def in_pod(name: str, overlay: str = "kubernetes") -> View:
    """What the agent says of a recorded machine from inside its pod."""
    return build_view((scan(PodHost(path_of(name), agent_of(overlay))),))


def healthy() -> list[str]:
    """Built machines and recordings on which nothing is wrong."""
    return [name for name in NAMES if not raised(view(name))]
