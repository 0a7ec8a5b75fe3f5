"""Containers are recognised by what their engine leaves, also with a read-only root and a private cgroup namespace."""

from __future__ import annotations

from dicthost import DictHost
from rigs.tables import each_row

from probes.hostinfo.probe import ROLE
from probes.hostinfo.read import container, of_agent

ID = "5de52e359e15c1016d1777924320aef87fc439d8be297303af47b7d2f1e82164"
POD = "0e4d2c1a-5f6b-4a3e-9d8c-7b6a5f4e3d2c"


def mounts(*lines: str) -> str:
    return "".join(f"{number} 48 0:40 {line}\n" for number, line in enumerate(lines, 73))


PODMAN_ROOT = "/ / ro,relatime - overlay overlay rw,lowerdir=/var/lib/containers/storage/overlay/l/FSR,workdir=/w"
DOCKER_ROOT = (
    "/ / ro,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/ABC:/var/lib/docker/overlay2/l/D"
)
NERDCTL_ROOT = (
    "/ / rw - overlay overlay rw,lowerdir=/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs"
)
OF_ANOTHER = (
    f"/ /var/lib/docker/overlay2/{ID}/merged rw,relatime - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A"
)
HOST_ROOT = "/ / rw,relatime - ext4 /dev/sda2 rw"


@each_row(
    ("kind", "files", "environment"),
    [
        # podman run --read-only: the tmpfs on /run hides /run/.containerenv (seen with podman 4.3, cgroup v1)
        ("podman", {"/proc/self/cgroup": f"9:name=systemd:/libpod_parent/libpod-{ID}\n0::/libpod_parent/libpod-{ID}\n"},
         {"container": "podman"}),
        ("podman", {"/proc/self/cgroup": f"4:memory:/machine.slice/libpod-{ID}.scope\n"}, {}),
        ("podman", {"/proc/self/cgroup": "0::/\n"}, {"container": "podman"}),  # cgroup v2, a namespace of its own
        ("podman", {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mounts(PODMAN_ROOT)}, {}),
        ("podman", {"/run/.containerenv": ""}, {"container": "oci"}),  # Red Hat's base images set "oci"
        ("podman", {"/proc/self/mountinfo": mounts(PODMAN_ROOT)}, {"container": "oci"}),
        ("docker", {"/.dockerenv": ""}, {}),
        ("docker", {"/proc/self/cgroup": f"5:memory:/docker/{ID}\n"}, {}),
        ("docker", {"/proc/self/cgroup": f"0::/system.slice/docker-{ID}.scope\n"}, {}),
        ("docker", {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mounts(DOCKER_ROOT)}, {}),
        ("containerd", {"/proc/self/cgroup": f"0::/system.slice/nerdctl-{ID}.scope\n"}, {}),
        ("containerd", {"/proc/self/cgroup": f"4:memory:/default/{ID}\n"}, {}),
        ("containerd", {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mounts(NERDCTL_ROOT)}, {}),
        ("kubernetes", {"/proc/self/cgroup": f"0::/kubepods.slice/kubepods-pod{POD}.slice/crio-{ID}.scope\n"}, {}),
        ("kubernetes", {"/proc/1/cgroup": f"11:memory:/kubepods/besteffort/pod{POD}/{ID}\n"}, {}),
        ("kubernetes", {"/proc/self/cgroup": f"0::/system.slice/cri-containerd-{ID}.scope\n"}, {}),
        ("kubernetes", {"/etc/hosts": "# Kubernetes-managed hosts file (host network).\n"}, {"container": "oci"}),
        ("kubernetes", {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": mounts(
            NERDCTL_ROOT, f"/var/lib/kubelet/pods/{POD}/etc-hosts /etc/hosts rw - ext4 /dev/sda2 rw")}, {}),
        ("kubernetes", {"/run/.containerenv": "", "/proc/self/cgroup": f"0::/kubepods.slice/crio-{ID}.scope\n"}, {}),
        ("lxc", {"/proc/self/cgroup": "0::/lxc.payload.web/init.scope\n"}, {}),
        ("lxc", {"/proc/self/cgroup": "4:memory:/lxc/web\n"}, {}),
        ("lxc", {"/run/systemd/container": "lxc\n", "/proc/self/cgroup": "0::/system.slice/ssh.service\n"}, {}),
        ("systemd-nspawn", {"/run/host/container-manager": "systemd-nspawn\n"}, {}),
        ("systemd-nspawn", {"/proc/self/cgroup": "0::/machine.slice/systemd-nspawn@a.service/payload\n"}, {}),
        ("oci", {"/proc/self/mountinfo": mounts(HOST_ROOT)}, {"container": "oci"}),
        # no container: hosts that run them, and a job script's variable of that name
        (None, {"/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
                "/proc/self/mountinfo": mounts(HOST_ROOT, OF_ANOTHER)}, {}),
        (None, {"/proc/self/cgroup": f"0::/machine.slice/libpod-conmon-{ID}.scope\n"}, {}),
        (None, {"/proc/self/cgroup": "0::/machine.slice/machine-qemu-1-vm.scope\n"}, {}),
        (None, {"/proc/self/cgroup": "0::/system.slice/docker.service\n"}, {"container": "nemo.sqsh"}),
        (None, {}, {}),
    ],
)  # fmt: skip
def test_container_is_known_by_its_engines_traces(
    kind: str | None, files: dict[str, str], environment: dict[str, str]
) -> None:
    """One trace is enough; a pod's stands above its engine's."""
    assert container(DictHost(dict(files), environment=environment)) == kind


def test_the_agents_container_is_one_that_says_so() -> None:
    """On a host without container `serve` shares what jobs get: its limits are judged."""
    role = {ROLE: "agent"}
    assert of_agent(DictHost({"/.dockerenv": ""}, environment=role))
    assert not of_agent(DictHost({"/.dockerenv": ""}))
    assert not of_agent(DictHost({}, environment=role))
