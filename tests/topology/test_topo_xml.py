"""NCCL topology XML, in and out, and what is refused as unsafe."""

from __future__ import annotations

import pytest
from rigs.tables import each_row

from topology.check import check
from topology.formats import TopologyFileError, xml
from topology.graph import PathClass

HGX = """<system version="1">
  <cpu numaid="0" affinity="0000ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:08:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:0A:00.0" class="0x030200" vendor="0x10de" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="0"><nvlink target="0000:1a:00.0" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:0c:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1"/></nic>
      </pci>
    </pci>
    <nic><net name="docker0" dev="5" speed="10000" port="0"/></nic>
  </cpu>
  <cpu numaid="1" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:88:00.0" class="0x060400">
      <pci busid="0000:8a:00.0" class="0x060400">
        <pci busid="0000:8b:00.0" class="0x030200">
          <gpu dev="0" sm="90"><nvlink target="FFFFFFF:FFFF:FF" count="16"/></gpu>
        </pci>
      </pci>
      <pci busid="0000:8c:00.0" class="0x020000">
        <nic><net name="mlx5_1" dev="1" speed="200000"/><net name="mlx5_2" dev="2" speed="200000"/></nic>
      </pci>
    </pci>
  </cpu>
</system>
"""


def test_dump():
    node = xml.parse(HGX, "dump")
    assert [(gpu.name, gpu.bus_id, gpu.compute_capability) for gpu in node.gpus] == [
        ("GPU0", "0000:8b:00.0", (9, 0)),
        ("GPU1", "0000:0a:00.0", (9, 0)),
    ]
    assert node.pair("GPU0", "GPU1").label == "NV16"
    assert node.pair("GPU0", "GPU1").bytes_per_second == pytest.approx(16 * 20.6e9)
    assert {n.gpu: (n.label, n.nics) for n in node.nearest_nic} == {
        "GPU0": ("PXB", ("mlx5_1",)),
        "GPU1": ("PIX", ("mlx5_0",)),
    }
    assert any("1 <net> without a PCI device" in warning for warning in node.warnings)


def test_two_nets_of_one_function_are_one_nic_with_two_ports():
    nic = xml.parse(HGX).nics[1]
    assert (nic.name, nic.nets, nic.ports, nic.rate_bytes_per_second) == ("mlx5_1", ("mlx5_1", "mlx5_2"), 2, 50e9)


def test_planned_bandwidth_follows_nccl():
    node = xml.parse(HGX)
    assert node.pair("GPU1", "mlx5_0").bytes_per_second == 48e9  # PCIe 5.0 x16
    expected = next(e for e in node.expectations if e.scope == "island" and e.op == "all_gather")
    assert expected.busbw_bytes_per_second == pytest.approx(16 * 20.6e9)


def test_same_cpu_is_phb_or_node():
    text = HGX.replace('numaid="1"', 'numaid="0"')
    two = xml.parse(
        '<system version="1"><cpu numaid="-1"><pci busid="0:1:0.0" class="0x030000"/>'
        '<pci busid="0000:02:00.0" class="0x020000"/></cpu></system>'
    )
    assert (two.nearest_nic[0].label, two.nearest_nic[0].path) == ("PHB/NODE", PathClass.PHB)
    assert xml.parse(text).pair("GPU0", "mlx5_0").label == "SYS"  # another <cpu> element is another CPU


def test_static_file_numbers_gpus_by_bus_id():
    text = (
        '<system version="1"><cpu numaid="0"><pci busid="0003:00:00.0" class="0x030200"/>'
        '<pci busid="0001:00:00.0" class="0x030200"/><pci busid="0101:00:00.0" class="0x020700"/></cpu></system>'
    )
    node = xml.parse(text)
    assert [gpu.bus_id for gpu in node.gpus] == ["0001:00:00.0", "0003:00:00.0"]
    assert (node.nics[0].name, node.nics[0].link_layer) == ("0101:00:00.0", "InfiniBand")


def test_static_file_without_classes_names_no_gpu():
    node = xml.parse('<system version="1"><cpu numaid="0"><pci busid="0000:45:00.0"/></cpu></system>')
    assert node.gpus == node.nics == ()
    assert any("have no class" in warning for warning in node.warnings)


def test_direct_links_name_the_peer():
    text = (
        '<system version="1"><cpu numaid="0">'
        '<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="70">'
        '<nvlink target="0000:02:00.0" count="2" tclass="0x030200"/></gpu></pci>'
        '<pci busid="0000:02:00.0" class="0x030200"><gpu dev="1" sm="70">'
        '<nvlink target="0000:01:00.0" count="1" tclass="0x030200"/></gpu></pci>'
        "</cpu></system>"
    )
    assert xml.parse(text).pair("GPU0", "GPU1").label == "NV1"


def test_several_gpus_below_one_function():
    text = (
        '<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200">'
        '<gpu dev="0" sm="107"/><gpu dev="1" sm="107"/></pci></cpu></system>'
    )
    node = xml.parse(text)
    assert [(gpu.name, gpu.compute_capability) for gpu in node.gpus] == [("GPU0", (10, 7)), ("GPU1", (10, 7))]


def test_c2c_reaches_the_nic_through_the_cpu():
    text = (
        '<system version="1"><cpu numaid="0" arch="arm64"><pci busid="0009:01:00.0" class="0x030200">'
        '<gpu dev="0" sm="90"><c2c bw="450000" count="1"/></gpu></pci>'
        '<pci busid="0000:01:00.0" class="0x020700"><nic><net name="mlx5_0" dev="0" speed="400000"/></nic></pci>'
        "</cpu></system>"
    )
    assert xml.parse(text).pair("GPU0", "mlx5_0").path is PathClass.P2C


def test_only_the_first_host_of_a_file_is_read():
    text = (
        '<system version="1"><cpu host_hash="0x1" numaid="0"><pci busid="0000:01:00.0" class="0x030200"/></cpu>'
        '<cpu host_hash="0x2" numaid="0"><pci busid="0000:01:00.0" class="0x030200"/></cpu></system>'
    )
    node = xml.parse(text)
    assert len(node.gpus) == 1
    assert any("2 hosts" in warning for warning in node.warnings)


@each_row(
    ("text", "line", "words"),
    [
        ("", 1, "no element"),
        ("<system>", 1, "well-formed"),
        ("<system/>", 1, "no <cpu>"),
        ("\n\n<graphs/>", 1, "expected <system>"),
        ('<system><cpu>\n<pci class="0x030200"/></cpu></system>', 2, "without busid"),
        ('<system><cpu>\n<pci busid="0:1:0.0"/><pci busid="0:1:0.0"/></cpu></system>', 2, "twice"),
        ('<!DOCTYPE system [<!ENTITY a "b">]><system><cpu/></system>', 1, "refused"),
        ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><system><cpu/></system>', 1, "refused"),
        ("<system>" + "<cpu>" * 100 + "</cpu>" * 100 + "</system>", 1, "levels"),
        ('<system><cpu><pci busid="0:1:0.0">\n<gpu dev="0" gcn="942"/></pci></cpu></system>', 2, "RCCL"),
        (
            '<system><cpu><pci busid="0:1:0.0"><gpu>\n<nvlink target="x" count="many"/></gpu></pci></cpu></system>',
            2,
            "not a number",
        ),
    ],
)
def test_refused_with_the_line(text, line, words):
    with pytest.raises(TopologyFileError, match=words) as caught:
        xml.parse(text, "file.xml")
    assert caught.value.line == line or words == "expected <system>"


def test_nvlinks_that_lead_back_join_nobody():
    """A provider's file for a VM with NVLink pairs gives each GPU as its own partner."""
    gpus = "".join(
        f'<pci busid="000{n}:00:00.0" class="0x030200"><gpu dev="{n}" sm="80">'
        f'<nvlink target="000{n}:00:00.0" count="12" tclass="0x030200"/></gpu></pci>'
        for n in (1, 2)
    )
    node = xml.parse(f'<system version="1"><cpu numaid="0">{gpus}</cpu></system>')
    assert node.islands == ()
    assert any("GPU1, GPU2 lead to the same GPU" in warning for warning in node.warnings)


def test_a_net_outside_a_nic_gives_its_name_and_a_warning():
    """Written by hand so; NCCL itself passes over it."""
    net = '<net name="mlx5_0" dev="0" speed="100000"/>'
    text = (
        f'<system version="1"><cpu numaid="0">\n<pci busid="0000:41:00.0" class="0x020000">\n{net}</pci></cpu></system>'
    )
    node = xml.parse(text)
    assert [(nic.name, nic.rate_bytes_per_second) for nic in node.nics] == [("mlx5_0", 100e9 / 8)]
    assert any(warning.startswith("line 3: <net>") for warning in node.warnings)


SERVER = """<system version="1"><cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="1">
<pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
<pci busid="0000:02:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="80" rank="0" gdr="1"/></pci>
<pci busid="0000:03:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width="16">
<gpu dev="1" sm="80" rank="1" gdr="1"/></pci>
<pci busid="0000:04:00.0" class="0x020700" vendor="0x15b3" link_speed="16.0 GT/s PCIe" link_width="16">
<nic><net name="mlx5_0" dev="0" speed="200000" gdr="1"/></nic></pci>
</pci></cpu></system>
"""


def of_links(text: str) -> list[tuple[str, str, str]]:
    codes = ("topology.gdr.refused", "topology.gpu.pcie_bound", "topology.nic.pcie_bound")
    return [(f.code, f.status, f.subject) for f in check(xml.parse(text)) if f.code in codes]


def test_a_gpu_with_fewer_lanes_than_the_bridge_above():
    assert of_links(SERVER) == []
    gpu = 'busid="0000:03:00.0" class="0x030200" vendor="0x10de" link_speed="16.0 GT/s PCIe" link_width='
    assert of_links(SERVER.replace(gpu + '"16"', gpu + '"8"')) == [("topology.gpu.pcie_bound", "fail", "GPU1")]
    linked = SERVER.replace(gpu + '"16"', gpu + '"8"').replace(
        'rank="1" gdr="1"/>', 'rank="1" gdr="1"><nvlink target="0000:02:00.0" count="4" tclass="0x030200"/></gpu>'
    )
    assert of_links(linked) == [("topology.gpu.pcie_bound", "fail", "GPU1")], "15.75 GB/s of a NIC's 25"
    fits = linked.replace('speed="200000"', 'speed="100000"')
    assert of_links(fits) == [("topology.gpu.pcie_bound", "warn", "GPU1")], "the NIC's rate still fits"


def test_a_gpu_of_an_older_generation_than_its_bridge_is_no_fault():
    gen3 = SERVER.replace("16.0 GT/s", "8.0 GT/s").replace("8.0 GT/s", "16.0 GT/s", 1)
    assert of_links(gen3) == [("topology.nic.pcie_bound", "fail", "mlx5_0")]


def test_a_device_without_gpudirect_rdma_is_told_with_its_line():
    assert of_links(SERVER.replace('speed="200000" gdr="1"', 'speed="200000" gdr="0"')) == [
        ("topology.gdr.refused", "fail", "mlx5_0")
    ]
    refused = SERVER.replace('rank="1" gdr="1"', 'rank="1" gdr="0"')
    (found,) = [f for f in check(xml.parse(refused)) if f.code == "topology.gdr.refused"]
    assert (found.subject, found.evidence) == ("GPU1", ('line 6: <gpu dev="1" gdr="0">',))


def test_the_link_of_a_device_is_its_own_not_that_of_the_switch_above():
    """NCCL's XML leaves out the ports of a switch: two devices below one do not share its way up."""
    narrow = SERVER.replace(
        'link_speed="16.0 GT/s PCIe" link_width="16"', 'link_speed="8.0 GT/s PCIe" link_width="8"', 1
    )
    assert xml.parse(narrow).pair("GPU0", "GPU1").bytes_per_second == 24e9


# Files of the same family that are not what the reader reads, and devices that stand where none is expected.

GPU = '<pci busid="0000:{bus}:00.0" class="0x030200"><gpu dev="{dev}" sm="90" rank="{dev}" gdr="1"/></pci>'
NET = '<nic><net name="{name}" dev="0" speed="400000" port="1"/></nic>'


def system(body, version="1"):
    return f'<system version="{version}"><cpu numaid="0" arch="x86_64">{body}</cpu></system>'


def test_ports_that_nccl_joined_are_no_bridge():
    body = GPU.format(bus="01", dev=0) + NET.format(name="mlx5_0+mlx5_1") + NET.format(name="docker0")
    node = xml.parse(system(body))
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
        xml.parse(text)
    assert len(xml.parse(system(GPU.format(bus="01", dev=0))).gpus) == 1


@each_row(("said", "kind"), [("", "unknown"), (' vendor="0x8086"', "ethernet"), (' vendor="0x15b3"', "hca")])
def test_the_class_alone_does_not_tell_an_rdma_card_from_others(said, kind):
    (nic,) = xml.parse(system(GPU.format(bus="01", dev=0) + f'<pci busid="0000:02:00.0" class="0x020000"{said}/>')).nics
    assert nic.kind == kind
