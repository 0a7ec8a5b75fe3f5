"""Files of the same family that are not what the reader reads, and devices that stand where none is expected."""

from __future__ import annotations

import pytest
from rigs.tables import each_row

from topology.formats import TopologyFileError
from topology.formats.xml import parse

GPU = '<pci busid="0000:{bus}:00.0" class="0x030200"><gpu dev="{dev}" sm="90" rank="{dev}" gdr="1"/></pci>'
NET = '<nic><net name="{name}" dev="0" speed="400000" port="1"/></nic>'


def system(body, version="1"):
    return f'<system version="{version}"><cpu numaid="0" arch="x86_64">{body}</cpu></system>'


def test_ports_that_nccl_joined_are_no_bridge():
    body = GPU.format(bus="01", dev=0) + NET.format(name="mlx5_0+mlx5_1") + NET.format(name="docker0")
    node = parse(system(body))
    assert node.nics == ()
    assert any(warning.startswith("mlx5_0+mlx5_1: ports that NCCL joined") for warning in node.warnings)
    assert any(warning.startswith("1 <net> without a PCI device") for warning in node.warnings)


@each_row(
    ("text", "words"),
    [
        ('<graphs version="1"><graph id="0" pattern="4"/></graphs>', "NCCL_TOPO_DUMP_FILE"),
        (system(GPU.format(bus="01", dev=0), version="2"), "AMD's RCCL"),
    ],
)
def test_a_file_of_another_kind_is_named(text, words):
    with pytest.raises(TopologyFileError, match=words):
        parse(text)
    assert len(parse(system(GPU.format(bus="01", dev=0))).gpus) == 1


@each_row(("said", "kind"), [("", "unknown"), (' vendor="0x8086"', "ethernet"), (' vendor="0x15b3"', "hca")])
def test_the_class_alone_does_not_tell_an_rdma_card_from_others(said, kind):
    (nic,) = parse(system(GPU.format(bus="01", dev=0) + f'<pci busid="0000:02:00.0" class="0x020000"{said}/>')).nics
    assert nic.kind == kind
