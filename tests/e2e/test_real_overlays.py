"""What only a real API server can tell of the manifests: it admits each, twice the same, and its controllers act."""

from __future__ import annotations

import pytest
import yaml
from real_cluster import (
    ROOT,
    RUN,
    Document,
    installed,
    kubectl,
    overlay,
    real,
    text,
)

OVERLAYS = sorted(path.name for path in (ROOT / "deploy/daemonset/overlays").iterdir())
pytestmark = real()


def generations(documents: list[Document]) -> dict[str, int]:
    """How often the server has seen another wish for each object; without the kinds that have no such number, by
    their version, which nobody else moves.
    """
    listed = yaml.safe_load(kubectl("get", "-o", "yaml", "-f", "-", stdin=text(documents)))["items"]
    return {
        f"{item['kind']}/{item['metadata']['name']}":
            int(item["metadata"].get("generation") or item["metadata"]["resourceVersion"])
        for item in listed
    }  # fmt: skip


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_admits_every_overlay(definition: None, name: str) -> None:
    """Strictly, for real; applied again nothing changes: no default and no controller argues with a manifest."""
    run = f"{RUN}-{name}"
    with installed(overlay(name, run)) as documents:
        assert {"DaemonSet", "ClusterRole", "NetworkPolicy", "Namespace"} <= {d["kind"] for d in documents}
        before = generations(documents)
        said = kubectl("apply", "--validate=strict", "-f", "-", stdin=text(documents))
        assert not [line for line in said.splitlines() if not line.endswith(" unchanged")]
        assert generations(documents) == before
        # server-side apply by another hand finds nothing to argue about either
        kubectl("apply", "--server-side", "--validate=strict", "--dry-run=server", "--force-conflicts",
                "--field-manager=e2e", "-f", "-", stdin=text(documents))  # fmt: skip
    left = kubectl("get", "clusterroles,clusterrolebindings,priorityclasses,runtimeclasses,namespaces", "-o", "name")
    assert run not in left, "something stayed behind"
