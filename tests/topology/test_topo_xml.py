"""NCCL topology XML, in and out, and what is refused as unsafe."""

from __future__ import annotations

import pytest
from rigs.tables import each_row

from topology.check import check
from topology.formats import TopologyFileError, xml
from topology.graph import Pairs, PathClass

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


def of(*parts: str, version: str = "1", cpu: str = 'numaid="0" arch="x86_64"') -> str:
    """A file with one CPU."""
    return f'<system version="{version}"><cpu {cpu}>{"".join(parts)}</cpu></system>'


def gpu(bus: str, inside: str = "", **words: str) -> str:
    written = " ".join(f'{name}="{value}"' for name, value in words.items())
    below = f"<gpu {written}>{inside}</gpu>" if words else ""
    return f'<pci busid="{bus}:00.0" class="0x030200">{below}</pci>'


def nvlink(bus: str, count: int, tclass: str = "0x030200") -> str:
    return f'<nvlink target="{bus}:00.0" count="{count}" tclass="{tclass}"/>'


def card(bus: str, said: str = "", inside: str = "", code: str = "0x020000") -> str:
    return f'<pci busid="{bus}:00.0" class="{code}"{said}>{inside}</pci>'


def net(name: str, speed: int = 400000) -> str:
    return f'<net name="{name}" dev="0" speed="{speed}" port="1"/>'


H100 = gpu("0000:01", dev="0", sm="90")
MLX = card("0000:02", inside=f"<nic>{net('mlx5_0')}</nic>", code="0x020700")
JOINED = of(H100, f"<nic>{net('mlx5_0+mlx5_1')}</nic>", f"<nic>{net('docker0')}</nic>")
STATIC = of(gpu("0003:00"), gpu("0001:00"), card("0101:00", code="0x020700"))
UNCLASSED = of('<pci busid="0000:45:00.0"/>')
LEADS_BACK = of(*(gpu(f"000{n}:00", nvlink(f"000{n}:00", 12, "0x068000"), dev=f"{n}", sm="80") for n in (1, 2)))
DIRECT = of(
    gpu("0000:01", nvlink("0000:02", 2), dev="0", sm="70"), gpu("0000:02", nvlink("0000:01", 1), dev="1", sm="70")
)
TWO_BELOW = of('<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="107"/><gpu dev="1" sm="107"/></pci>')
TWO_HOSTS = "".join(f'<cpu host_hash="0x{n}" numaid="0">{gpu("0000:01")}</cpu>' for n in (1, 2))
STRAY = of("\n" + card("0000:41", inside="\n" + net("mlx5_0", 100000)))
NARROW = SERVER.replace('link_speed="16.0 GT/s PCIe" link_width="16"', 'link_speed="8.0 GT/s PCIe" link_width="8"', 1)
C2C = of(gpu("0009:01", '<c2c bw="450000" count="1"/>', dev="0", sm="90"), MLX, cpu='numaid="0" arch="arm64"')


def pair(node, a, b):
    return Pairs(node.pairs).get(a, b)


def nics(node):
    return [(nic.name, nic.nets, nic.ports, nic.rate_bytes_per_second) for nic in node.nics]


def bus_ids(node):
    return [(gpu.name, gpu.bus_id) for gpu in node.gpus]


def planned(node):
    return next(e for e in node.expectations if (e.scope, e.op) == ("island", "all_gather")).busbw_bytes_per_second


SAYS = {  # what is shown -> file, what of the node, expected
    "GPUs by dev, with their capability": (
        HGX, lambda node: [(*each, gpu.compute_capability) for each, gpu in zip(bus_ids(node), node.gpus, strict=True)],
        [("GPU0", "0000:8b:00.0", (9, 0)), ("GPU1", "0000:0a:00.0", (9, 0))]),
    "the fewer links through a switch": (HGX, lambda node: pair(node, "GPU0", "GPU1").label, "NV16"),
    "and their plan": (HGX, lambda node: pair(node, "GPU0", "GPU1").bytes_per_second, pytest.approx(16 * 20.6e9)),
    "which is the island's": (HGX, planned, pytest.approx(16 * 20.6e9)),
    "the nearest NICs": (
        HGX, lambda node: [(n.gpu, n.label, n.nics) for n in node.nearest_nic],
        [("GPU0", "PXB", ("mlx5_1",)), ("GPU1", "PIX", ("mlx5_0",))]),
    "two nets of one function are one NIC with two ports": (
        HGX, lambda node: nics(node)[1], ("mlx5_1", ("mlx5_1", "mlx5_2"), 2, 50e9)),
    "PCIe 5.0 x16": (HGX, lambda node: pair(node, "GPU1", "mlx5_0").bytes_per_second, 48e9),
    "another <cpu> element is another CPU": (
        HGX.replace('numaid="1"', 'numaid="0"'), lambda node: pair(node, "GPU0", "mlx5_0").label, "SYS"),
    "the same CPU is PHB or NODE": (
        of('<pci busid="0:1:0.0" class="0x030000"/>', card("0000:02"), cpu='numaid="-1"'),
        lambda node: (node.nearest_nic[0].label, node.nearest_nic[0].path), ("PHB/NODE", PathClass.PHB)),
    "a static file numbers GPUs by bus id": (
        STATIC, bus_ids, [("GPU0", "0001:00:00.0"), ("GPU1", "0003:00:00.0")]),
    "and NICs by theirs": (
        STATIC, lambda node: (node.nics[0].name, node.nics[0].link_layer), ("0101:00:00.0", "InfiniBand")),
    "without classes there is no GPU": (UNCLASSED, lambda node: (node.gpus, node.nics), ((), ())),
    "direct links name the peer": (DIRECT, lambda node: pair(node, "GPU0", "GPU1").label, "NV1"),
    "several GPUs below one function": (
        TWO_BELOW, lambda node: [(g.name, g.compute_capability) for g in node.gpus],
        [("GPU0", (10, 7)), ("GPU1", (10, 7))]),
    "C2C reaches the NIC through the CPU": (C2C, lambda node: pair(node, "GPU0", "mlx5_0").path, PathClass.P2C),
    "the first host of a file": (
        f'<system version="1">{TWO_HOSTS}</system>', lambda node: len(node.gpus), 1),
    "NVLinks that lead back join nobody": (LEADS_BACK, lambda node: node.islands, ()),
    "a net outside a NIC gives its name": (STRAY, nics, [("mlx5_0", ("mlx5_0",), 1, 100e9 / 8)]),
    # NCCL's XML leaves out the ports of a switch: two devices below one do not share its way up
    "a device's link is its own": (NARROW, lambda node: pair(node, "GPU0", "GPU1").bytes_per_second, 24e9),
    "ports that NCCL joined are no NIC": (JOINED, lambda node: node.nics, ()),
    **{f"a class alone is no RDMA card{said}": (of(H100, card("0000:02", said)), lambda node: node.nics[0].kind, kind)
       for said, kind in (("", "unknown"), (' vendor="0x8086"', "ethernet"), (' vendor="0x15b3"', "hca"))},
}  # fmt: skip
WARNS = [  # file, words of a warning
    (HGX, "1 <net> without a PCI device"), (UNCLASSED, "have no class"),
    (f'<system version="1">{TWO_HOSTS}</system>', "2 hosts"), (LEADS_BACK, "GPU1, GPU2 lead to the same GPU"),
    (STRAY, "line 3: <net>"), (JOINED, "mlx5_0+mlx5_1: ports that NCCL joined"),
    (JOINED, "1 <net> without a PCI device"),
]  # fmt: skip


def test_what_a_file_says():
    wrong = {}
    for what, (text, tell, expected) in SAYS.items():
        if (found := tell(xml.parse(text, "dump"))) != expected:
            wrong[what] = found
    assert not wrong
    for text, words in WARNS:
        assert any(words in warning for warning in xml.parse(text).warnings), words


@each_row(
    ("text", "line", "words"),
    [
        ("", 1, "no element"),
        ("<system>", 1, "well-formed"),
        ("<system/>", 1, "no <cpu>"),
        ("\n\n<graphs/>", 1, "expected <system>"),
        ('<graphs version="1"><graph id="0" pattern="4"/></graphs>', 1, "NCCL_TOPO_DUMP_FILE"),
        (of(H100, version="2"), 1, "AMD's RCCL"),
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
