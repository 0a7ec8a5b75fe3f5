"""What the agent takes, in the short form of bench/footprint.py: memory and counts; times only beside a yardstick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import footprint
import pytest
import resident

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


@pytest.mark.long
def test_memory_with_publishing(restored: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Into the stand-in for the API server, measured once it has published: its start is spread over some seconds."""
    root, environment = restored
    with footprint.published(tmp_path) as (words, more, begun):
        loud, _, _ = footprint.at_rest(tmp_path, "--root", root, *words, environment={**environment, **more}, scans=2,
                                       settle=1, begun=begun)  # fmt: skip
    assert loud.pss <= footprint.AIMS["publishing"]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_benches_on_one_page(tmp_path: Path) -> None:
    """`make bench` in its short form, without the parts that the tests above have run."""
    page = tmp_path / "bench.md"
    command = [sys.executable, str(ROOT / "bench" / "figures.py"), "--short", "--page", str(page)]
    done = subprocess.run([*command, "--only", "evidence", "--only", "cluster"], capture_output=True, text=True,
                          check=False, timeout=800, env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert re.search(r"- Date: \d{4}-\d\d-\d\d", text)
    assert "- Machine: " in text
    assert "Python 3." in text
    assert "MB per CPU second" in text
    assert "planned for" in text
    assert text in done.stdout or text.strip() in done.stdout.strip()
