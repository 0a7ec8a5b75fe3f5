"""Any bytes in any file, and any error in its place, never crash a probe: they become unknown."""

import errno
from pathlib import Path

import pytest
import yaml
from dicthost import Content, DictHost
from hypothesis import given, settings, strategies as st

from probes.api import UnavailableError
from probes.hostinfo import probe as hostinfo
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.pci import probe as pci
from probes.rdma import probe as rdma
from probes.worker import reader

HOST = yaml.safe_load(Path(__file__).with_name("any_bytes.yaml").read_text(encoding="utf-8"))
FILES, LINKS = HOST["files"], HOST["links"]
SOUND: dict[str, Content] = {**dict.fromkeys(FILES, "1\n"), **HOST["sound"]}
NETLINK = {"links": [{"index": 2, "IFLA_IFNAME": "eth0", "flags": 0x1043}]}
PLAUSIBLE = st.sampled_from(HOST["plausible"])
CONTENT = st.binary(max_size=600) | PLAUSIBLE | st.sampled_from([errno.EINVAL, errno.EACCES, errno.EIO, errno.ENODEV])
PROBES = (hostinfo.PROBE, limits.PROBE, pci.PROBE, rdma.PROBE, interfaces.PROBE)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
@given(
    damage=st.dictionaries(st.sampled_from(FILES), CONTENT, min_size=1, max_size=12),
    gone=st.sets(st.sampled_from(sorted(LINKS)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_any_bytes(probe, damage, gone):
    links = {path: target for path, target in LINKS.items() if path not in gone}
    host = DictHost(
        {**SOUND, **damage}, links, netlink=NETLINK, register_limit_bytes=1, shm=(1, 1), limits={"MEMLOCK": (1, 1)}
    )
    try:
        facts = reader(probe.name)(host)
    except UnavailableError:
        return
    assert {finding.code for finding in probe.check(facts)} <= set(probe.codes)
    families = {metric.name: metric for metric in probe.metrics}
    for sample in probe.samples(facts):
        assert len(sample.labels) == len(families[sample.metric].labels)


def test_the_sound_host_is_read_by_every_probe() -> None:
    host = DictHost(SOUND, LINKS, netlink=NETLINK)
    assert [type(reader(probe.name)(host)) for probe in PROBES] == [probe.facts for probe in PROBES]
