"""Real images and containers without a registry: a base of Debian packages, buildah, podman and runc.

All of it is Debian's and installed on demand; images, containers and configuration lie under .cache, so that nothing of
the machine's own is touched. Seen on hosts that are containers themselves: crun refuses their cgroups, limits may not
be raised, a build can only chroot.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from rigs.packages import CACHE, apt_installed, debian_root, one_installs
from rigs.tables import ROOT

HOME = CACHE / "containers"
BASE = "localhost/base:debian"
SECONDS = 900.0
_CONFIGURATION = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "k8s-file"
[network]
network_config_dir = "{networks}"
"""


def ready() -> None:
    """Install the engine, and make the base image once; skips where it cannot be had."""
    apt_installed("podman", "podman", "runc", "catatonit", "netavark")  # the last three are recommended by it alone
    for program in ("runc", "buildah", "iptables"):  # netavark calls the last
        apt_installed(program, program)
    HOME.mkdir(parents=True, exist_ok=True)
    (HOME / "containers.conf").write_text(_CONFIGURATION.format(networks=HOME / "networks"))
    with one_installs("base-image"):
        if podman("image", "exists", BASE, check=False).returncode:
            archive = HOME / "base.tar"
            words = ["tar", "--one-file-system", "-C", debian_root(), "-cf", archive, "."]
            subprocess.run(words, check=True, timeout=SECONDS)
            podman("import", "--quiet", str(archive), BASE)
            archive.unlink()


def _engine(program: str, *words: str, check: bool, timeout: float) -> subprocess.CompletedProcess[str]:
    place = ("--root", str(HOME / "storage"), "--runroot", str(HOME / "run"))
    environment = {**os.environ, "CONTAINERS_CONF": str(HOME / "containers.conf")}
    done = subprocess.run([program, *place, *words], env=environment, capture_output=True, text=True, timeout=timeout,
                          check=False, cwd=ROOT if program == "buildah" else HOME)  # fmt: skip
    assert not check or done.returncode == 0, f"{program} {' '.join(words)}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    return done


def podman(*words: str, check: bool = True, timeout: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """One command of podman, with this rig's storage."""
    return _engine("podman", *words, check=check, timeout=timeout)


def build(kind: str) -> str:
    """Build an image as the Kubernetes page does, each stage committed once. Returns its name."""
    tag = f"localhost/topoflight-{kind}:test"
    _engine(
        "buildah", "build", "--layers=false", "--isolation", "chroot", "--network", "host", *_pip_mounts(),
        "--build-arg", f"PYTHON_IMAGE={BASE}", "-f", f"deploy/images/Containerfile.{kind}", "-t", tag, ".",
        check=True, timeout=SECONDS,
    )  # fmt: skip
    return tag


def _pip_mounts() -> Iterator[str]:
    """This machine's pip settings (index, proxy, certificate) and the local folders they name, for the build to see."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    settings = {key.rpartition(".")[2]: value for key, value in re.findall(r"^(\S+)='(.*)'$", listed, re.MULTILINE)}
    path = HOME / "pip.conf"
    path.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    yield from ("--volume", f"{path}:/etc/pip.conf:ro")
    words = {word.removeprefix("file://") for value in settings.values() for word in value.split()}
    for place in sorted(
        {Path(word).parent if word.endswith("/simple") else Path(word) for word in words if word[0] == "/"}
    ):
        if place.exists():
            yield from ("--volume", f"{place}:{place}:ro")


def size_bytes(image: str) -> int:
    """What `podman images` calls its size: all layers, unpacked."""
    return int(podman("image", "inspect", "--format", "{{.Size}}", image).stdout)


def playable(pod: dict, image: str = "") -> dict:
    """The pod as this engine knows the fields; what it does not know is taken out here, by name, and nothing else.

    Podman 4.3's `kube play` has no downward API beyond a pod's name, no projected or secret volumes, maps each port of
    a container to the host, and ignores what a scheduler reads.
    """
    spec = pod["spec"]
    for volume in spec.get("volumes", ()):
        for unknown in ("downwardAPI", "projected", "secret"):
            if volume.pop(unknown, None):
                volume["emptyDir"] = {}
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        container["image"] = image or container["image"]
        container.pop("ports", None)
        for variable in container.get("env", ()):
            if variable.pop("valueFrom", None):
                variable["value"] = f"of-{variable['name'].lower().replace('_', '-')}"
        # the pod has the host's network here: it listens on loopback only
        container["args"] = ["127.0.0.1" if word == "0.0.0.0" else word for word in container.get("args", ())]
    return pod


def play(documents: Sequence[dict], place: Path) -> None:
    """Start pods and ConfigMaps from Kubernetes' own YAML."""
    place.write_text(yaml.safe_dump_all(documents))
    podman("kube", "play", "--network", "host", str(place))


def clear() -> None:
    """End every container of this rig, and no other."""
    podman("pod", "rm", "--force", "--all", "--time", "2", check=False)
    podman("rm", "--force", "--all", "--time", "2", check=False)


def memory(container: str) -> Path:
    """The folder of a container's memory cgroup, of version 1 or 2."""
    pid = podman("inspect", "--format", "{{.State.Pid}}", container).stdout.strip()
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / lines[0][2].lstrip("/")
