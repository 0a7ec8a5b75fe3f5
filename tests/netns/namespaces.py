"""A host's or a pod's network namespace made with ip(8), and the real probe run inside it.

Nothing is left behind: the namespaces live and end with one process each. Needs root, unshare, nsenter and ip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cattrs

from probes.interfaces.facts import InterfacesFacts

ROOT = Path(__file__).parents[2]

_LOOK = """
import json, cattrs
from probes.interfaces import probe as interfaces
from probes.host.live import LiveHost
print("FACTS " + json.dumps(cattrs.unstructure(interfaces.read(LiveHost()))))
"""

# The pod is a process in a namespace of its own, made before the host's script runs so that devices can be moved
# there: ip link set net1 netns $POD.
_SCRIPT = """
set -e
mount --make-rprivate / && mount -t sysfs sysfs /sys
ip link set lo up
unshare -n -m sleep 120 & POD=$!
trap 'kill $POD' EXIT
until [ "$(readlink /proc/$POD/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
eval "$HOST_SCRIPT"
if [ -n "$POD_SCRIPT" ]; then
  nsenter -t $POD -n -m bash -e -c '
    mount -t sysfs sysfs /sys; ip link set lo up; eval "$POD_SCRIPT"; "$PYTHON" -c "$LOOK"'
else
  "$PYTHON" -c "$LOOK"
fi
"""


def obstacle() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def look(host: str, pod: str = "") -> InterfacesFacts:
    """What the probe sees in the host's namespace after its script, or in the pod's after both."""
    done = subprocess.run(
        ["unshare", "-n", "-m", "bash", "-c", _SCRIPT],
        env={
            **{k: v for k, v in os.environ.items() if k != "KUBERNETES_SERVICE_HOST"},
            "HOST_SCRIPT": host,
            "POD_SCRIPT": pod,
            "PYTHON": sys.executable,
            "LOOK": _LOOK,
            "PYTHONPATH": str(ROOT),
        },
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    if done.returncode or not lines:
        raise RuntimeError(f"the namespace's script ended with {done.returncode}: {done.stderr[-2000:]}")
    return cattrs.structure(json.loads(lines[0].removeprefix("FACTS ")), InterfacesFacts)
