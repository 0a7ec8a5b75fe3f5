"""A few faults made for real on four ranks; bench/why.py makes them all."""

from __future__ import annotations

import pytest
import why

pytestmark = pytest.mark.ranks
STARTED = ["trainer-raises", pytest.param("ddp-pickles", marks=pytest.mark.nightly)]
FORKED = ["stopped", "other-collective", "exits", "ddp-killed", "ddp-straggler"]
# What "exits", "trainer-raises" and "stopped" show of ranks with another loop around them, and two that take a minute.
MORE = ("ddp-exits", "ddp-raises", "ddp-stopped", "ddp-loader-fails", "ddp-generates")


@pytest.mark.parametrize("name", STARTED)  # first: the fixture of the others replaces sys.executable until the end
def test_a_fault_made_for_real(name: str) -> None:
    """Each rank is a Python that was started, whose sitecustomize starts the monitor."""
    check(name)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("name", [*FORKED, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_a_fault_of_forked_ranks(name: str) -> None:
    check(name)


def check(name: str) -> None:
    """Make a fault once, and compare the verdict with its row in bench/why_faults.toml."""
    fault = next(one for one in why.FAULTS if one.name == name)
    result = why.run_fault(fault)
    assert result.right, result.verdict
