"""The machine: its hypervisor and the container around us; the rest is rows of tests/golden/probes.jsonl."""

from __future__ import annotations

from pathlib import Path

import yaml
from dicthost import DictHost
from rigs.tables import each_row

from probes.hostinfo import probe as hostinfo
from probes.hostinfo.read import container, of_agent
from probes.hostinfo.read import read as read_hostinfo

XEON = Path(__file__).with_name("cpuinfo_xeon.txt").read_text(encoding="utf-8")
GRACE = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
DMI = "/sys/class/dmi/id/"
ID = "5de52e359e15c1016d1777924320aef87fc439d8be297303af47b7d2f1e82164"
POD = "0e4d2c1a-5f6b-4a3e-9d8c-7b6a5f4e3d2c"
TEXT = Path(__file__).with_name("container_kinds.yaml").read_text(encoding="utf-8")
ROWS = yaml.safe_load(TEXT.replace("{ID}", ID).replace("{POD}", POD))


@each_row(("grace", "flag", "vendor", "product", "name"), ROWS["hypervisors"])
def test_hypervisor(grace: bool, flag: str, vendor: str, product: str, name: str | None) -> None:
    cpuinfo = GRACE if grace else XEON.format(flag=flag)
    files = {"/proc/cpuinfo": cpuinfo, DMI + "sys_vendor": vendor + "\n", DMI + "product_name": product + "\n"}
    assert read_hostinfo(DictHost(files)).virtual_machine == name


@each_row(("kind", "files", "environment"), ROWS["kinds"])
def test_container_is_known_by_its_engines_traces(
    kind: str | None, files: dict[str, str], environment: dict[str, str]
) -> None:
    """One trace is enough; a pod's stands above its engine's."""
    assert container(DictHost(dict(files), environment=environment)) == kind


def test_the_agents_container_is_one_that_says_so() -> None:
    """On a host without container `serve` shares what jobs get: its limits are judged."""
    role = {hostinfo.ROLE: "agent"}
    assert of_agent(DictHost({"/.dockerenv": ""}, environment=role))
    assert not of_agent(DictHost({"/.dockerenv": ""}))
    assert not of_agent(DictHost({}, environment=role))
