"""What the agent takes, in the short form of bench/footprint.py: memory and counts; times only beside a yardstick."""

from __future__ import annotations

from pathlib import Path

import footprint
import pytest
import resident

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent.parent
NOISE_MIB = 3.0  # allocators keep freed pages; ten scans and a hundred requests that leak a page each show more


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The recorded machine as the live probes see it."""
    return resident.restore(tmp_path_factory.mktemp("machine"))


def test_memory_at_rest(restored: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """The agent and its child, 8 GPUs and 8 HCAs, no Kubernetes."""
    root, environment = restored
    quiet, _, paged = footprint.at_rest(tmp_path, "--root", root, environment=environment, scans=2, settle=1)
    assert quiet.pss <= footprint.AIMS["alone"]
    assert quiet.children > 5, "the probes' child is not there: this is no live scan"
    assert paged.resident <= footprint.AIMS["publishing"]


def test_memory_with_publishing(restored: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Into the stand-in for the API server, measured once it has published: its start is spread over some seconds."""
    root, environment = restored
    with footprint.published(tmp_path) as (words, more, begun):
        loud, _, _ = footprint.at_rest(tmp_path, "--root", root, *words, environment={**environment, **more}, scans=2,
                                       settle=1, begun=begun)  # fmt: skip
    assert loud.pss <= footprint.AIMS["publishing"]


@pytest.mark.timeout(900)
def test_nothing_grows(restored: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """From the first third of many scans and requests to the last."""
    root, environment = restored
    found = footprint.steady(tmp_path / "busy", root, environment, scans=40, requests=330)
    assert found.errors == 0
    assert found.scans >= 40
    assert found.requests >= 330
    mib, descriptors = found.grown()
    assert descriptors <= 3, "more than connections that are just being closed"
    assert mib < NOISE_MIB


def test_help_costs_a_few_bare_interpreters() -> None:
    """CPU time of the best of some, so that what else the machine does counts little."""
    (_, spent), (_, bare) = footprint.help_seconds(times=5)
    assert spent < 10 * bare
