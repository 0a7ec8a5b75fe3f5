"""IMEX channels: found, refused, missing in a domain of several hosts, and unknown where no list of hosts is there."""

from __future__ import annotations

from typing import Any

import pytest
from dicthost import DictHost
from rigs.tables import each_row

from probes.api import UnavailableError
from probes.imex import probe as imex
from probes.imex.read import read as read_imex

DRIVER = {"/proc/devices": "Character devices:\n  1 mem\n511 nvidia-caps-imex-channels\n\nBlock devices:\n"}
RACK = {imex.NODES: "# rack 1\n10.0.0.1\n10.0.0.2\n\n"}
CHANNEL = {f"{imex.CHANNELS}/channel0": ""}


def facts(files: dict[str, Any], **more: Any) -> imex.ImexFacts:
    return read_imex(DictHost({**DRIVER, **files}, **more))


def test_without_the_device_there_is_no_imex() -> None:
    """No driver, or one before IMEX; a name that only contains the word is another device."""
    for text in ("", "511 nvidia-caps\n", "511 nvidia-caps-imex-channels-old\n"):
        with pytest.raises(UnavailableError):
            read_imex(DictHost({"/proc/devices": text}))


def test_a_channel_in_a_domain_of_several_hosts_passes() -> None:
    found = facts({**RACK, **CHANNEL, f"{imex.CHANNELS}/other": ""})
    assert found == imex.ImexFacts(channels=("channel0",), usable=("channel0",), nodes=2)
    assert not list(imex.check(found)) and not imex.unjudged(found)


@each_row(
    ("files", "refused", "says"),
    [(RACK, (), "has no IMEX channel"), ({**RACK, **CHANNEL}, (f"{imex.CHANNELS}/channel0",), "cannot open channel0")],
)
def test_a_rack_without_a_channel_fails(files: dict[str, Any], refused: tuple[str, ...], says: str) -> None:
    (finding,) = imex.check(facts(files, unusable=refused))
    assert finding.status == "fail" and says in finding.message and "names 2 hosts" in finding.message


def test_what_shares_nvlink_with_nobody_needs_none() -> None:
    """One host in the list passes; without a list nothing is known, and a channel settles it."""
    alone = facts({imex.NODES: "10.0.0.1\n"})
    assert not list(imex.check(alone)) and not imex.unjudged(alone)
    unknown = facts({})
    assert not list(imex.check(unknown)) and set(imex.unjudged(unknown)) == {"imex.channel.missing"}
    assert not imex.unjudged(facts(CHANNEL))


def test_the_agents_own_pod_says_nothing_of_a_jobs() -> None:
    """It is given no channel on purpose."""
    pod = facts(RACK, environment={"TOPOFLIGHT_ROLE": "agent", "container": "podman"})
    assert not list(imex.check(pod)) and set(imex.unjudged(pod)) == {"imex.channel.missing"}
