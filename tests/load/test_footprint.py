"""What the agent takes, in the short form of bench/footprint.py: memory and counts."""

import footprint
import pytest
import resident

pytestmark = pytest.mark.long

NOISE_MIB = 3.0  # allocators keep freed pages; ten scans and a hundred requests that leak a page each show more


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The recorded machine as the live probes see it."""
    return resident.restore(tmp_path_factory.mktemp("machine"))


def test_memory_with_publishing(restored, tmp_path):
    """Into the stand-in for the API server, measured once it has published: its start is spread over some seconds."""
    root, environment = restored
    with footprint.published(tmp_path) as (words, more, begun):
        loud, _, _ = footprint.at_rest(tmp_path, "--root", root, *words, environment={**environment, **more}, scans=2,
                                       settle=1, begun=begun)  # fmt: skip
    assert loud.pss <= footprint.PUBLISHING


@pytest.mark.timeout(900)
def test_nothing_grows(restored, tmp_path):
    """From the first third of many scans and requests to the last."""
    root, environment = restored
    found = footprint.steady(tmp_path / "busy", root, environment, scans=40, requests=330)
    assert found.errors == 0
    assert found.scans >= 40
    assert found.requests >= 330
    mib, descriptors = found.grown()
    assert descriptors <= 3, "more than connections that are just being closed"
    assert mib < NOISE_MIB
