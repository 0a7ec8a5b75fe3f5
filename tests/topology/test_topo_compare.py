"""Clusters, differences between snapshots, and the odd node of a fleet."""

from dataclasses import replace

import pytest
from rigs.recorded import changed, snapshot, with_facts, with_outcomes
from topo_samples import topology

from contracts.finding import Status
from probes.api import Absent
from probes.gpu.facts import GpuFacts
from probes.gpu.probe import PROBE as GPU_PROBE
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts
from probes.registry import check_facts
from topology.cluster import join
from topology.diff import compare_fleet, diff, format_diff, format_fleet
from topology.formats.text import parse

HGX, P4D, GB200, A40 = "hgx-h100-8xH100-8hca", "aws-p4d-8xA100-4efa", "gb200-nvl72-tray", "r760xa-2xA40-bf3"


def fleet(hosts):
    return compare_fleet([((host.hostname,), host) for host in hosts])


def two(name, **changes):
    node = topology(name)
    return join([node, replace(node, hostname="other", **changes)])


def messages(differences):
    return [difference.message for difference in differences]


def tray(clique, **changes):
    gpus = (replace(gpu, fabric_clique=f"rack/{clique}") for gpu in snapshot(GB200).facts(GpuFacts).gpus)
    return replace(changed(snapshot(GB200), GpuFacts, gpus=tuple(gpus)), **changes)


def test_differences_in_words():
    sound, sick, lost = snapshot(HGX), snapshot("sick-h100-dead-hca"), snapshot("sick-h100-gpu-lost")
    version, here, there = sound.facts(GpuFacts).driver_version, sound.hostname, sick.hostname
    small = snapshot("sick-h100-memlock-64KiB")
    pci = [replace(one, link_transfers_per_second=8e9) if one.bus_id == "0000:5e:00.0" else one
           for one in sound.outcomes["pci"].facts.devices]  # fmt: skip
    slow = changed(snapshot(HGX), PciFacts, devices=tuple(pci))
    rows = [
        (diff(sound, sound), None),
        (diff(sound, changed(snapshot(HGX), GpuFacts, driver_version="999.1")), f"driver {version} -> 999.1"),
        (diff(sound, sick), f"mlx5_3 down on {there} (active on {here})"),
        (diff(sound, sick, ("in a.json", "in b.json")), "mlx5_3 down in b.json (active in a.json)"),
        (diff(sound, replace(sick, hostname=here)), "mlx5_3 down (was active)"),
        (diff(small, sound, ("in a", "in b")), "memlock 64 KiB in a, unlimited in b"),
        (diff(sound, slow), "mlx5_3 (0000:5e:00.0) PCIe speed 32 GT/s -> 8 GT/s"),
        (diff(tray(1), tray(2)), "GPU0, GPU1, GPU2 and 1 more: NVLink domain rack/1 -> rack/2"),
    ]
    wrong = [(expected, found[:1]) for found, expected in rows if next(iter(messages(found)), None) != expected]
    assert not wrong
    assert format_diff(()).startswith("✓ no differences that affect training → ")
    of_gpu = [message for message in messages(diff(sound, lost)) if "GPU5" in message]
    assert of_gpu[0].startswith(f"GPU5 state ok on {here}, lost"), "told once, not by its paths"
    assert not any("path" in message for message in of_gpu)


def rails(last, first=100):
    """The machine with four RoCE interfaces; the last one is in another subnet."""
    subnets = [*range(first, first + 3), last]
    links = [Interface(name=f"ens{n}", role="host", rdma_device=f"mlx5_{n}", addresses=(f"10.{subnet}.0.9/24",))
             for n, subnet in enumerate(subnets)]  # fmt: skip
    return changed(snapshot(HGX), InterfacesFacts, interfaces=tuple(links))


def test_identifiers_count_if_most_are_equal():
    """One of eight boards was replaced, one of four rails is in another subnet; other hosts and racks share none."""
    gpus = snapshot(HGX).facts(GpuFacts).gpus
    others = [replace(gpu, uuid=f"other {gpu.index}") for gpu in gpus]
    replaced, elsewhere = (
        changed(snapshot(HGX), GpuFacts, gpus=(others[0], *gpus[1:])),
        changed(snapshot(HGX), GpuFacts, gpus=tuple(others)),
    )
    assert messages(diff(snapshot(HGX), replaced)) == [f"GPU0 board (UUID) {gpus[0].uuid} -> other 0"]
    assert messages(diff(rails(103), rails(7))) == ["ens3 network 10.103.0.0/24 -> 10.7.0.0/24"]
    assert not (*diff(snapshot(HGX), elsewhere), *diff(rails(103), rails(203, first=200)))
    assert not diff(rails(103), rails("damaged"))
    odd = fleet([*(replace(rails(103), hostname=f"n{n}") for n in range(3)), replace(rails(7), hostname="n3")])
    assert [group.nodes for group in odd.families[0].odd] == [("n3",)]


def test_what_joins_the_nodes():
    alone, weak = join([topology(HGX)]), join([topology(HGX), topology("sick-h100-dead-hca")])
    assert (alone.inter_node_transport, alone.inter_node_bytes_per_second, alone.world_size) == (None, None, 8)
    machines = {P4D: "efa", GB200: "nvlink", HGX: "rdma", "sick-h100-rdma-off": "tcp"}
    assert {name: two(name).inter_node_transport for name in machines} == machines
    # Eight 400 Gb/s NICs on rails in PCIe 5.0 x16 slots: 48 GB/s each to NCCL; the storage ones do not count.
    assert two(HGX).inter_node_bytes_per_second == pytest.approx(8 * 48e9)
    assert weak.inter_node_bytes_per_second == pytest.approx(7 * 48e9)
    assert join([topology(HGX), topology(P4D)]).inter_node_transport == "tcp", "no network of RDMA is common"


def test_the_copies_of_a_node_are_planned_once():
    """As `--nodes 1000` makes them of one host: all share the expectations of the first."""
    node = topology(HGX)
    copies = join([replace(node, hostname=f"n{n}") for n in range(3)]).nodes
    assert len({id(copy.expectations) for copy in copies}) == 1 <= len(copies[0].expectations)


def test_text_matrices_join_without_a_bandwidth():
    text = "\tGPU0\tGPU1\tmlx5_0\nGPU0\tX\tNV4\tPIX\nGPU1\tNV4\tX\tPIX\nmlx5_0\tPIX\tPIX\tX\n"
    assert join([parse(text, "a"), parse(text, "b")]).inter_node_bytes_per_second is None


def test_throttling_is_as_bad_as_the_scan_calls_it():
    """Heat at half the clock fails; the power cap of full load is no fault; that it ended is good news."""
    hot, cool = snapshot("sick-h100-thermal"), snapshot(HGX)
    judged = {f.status for f in check_facts(hot, GPU_PROBE, hot.facts(GpuFacts)) if f.code.startswith("gpu.thermal.t")}
    assert {d.status for d in diff(cool, hot) if d.what == "throttled by"} == judged
    ended = diff(hot, replace(cool, hostname=hot.hostname))
    assert {d.status for d in ended if d.what == "throttled by"} == {Status.INFO}
    gpus = tuple(replace(gpu, throttle_reasons=("sw_power_cap",)) for gpu in cool.facts(GpuFacts).gpus)
    assert {d.status for d in diff(cool, changed(snapshot(HGX), GpuFacts, gpus=gpus))} == {Status.INFO}


def test_worst_first_and_a_vanished_device_once():
    found = diff(snapshot(HGX), snapshot("sick-h100-rdma-off"))
    ranks = [["fail", "warn", "unknown", "info"].index(difference.status) for difference in found]
    assert ranks == sorted(ranks)
    assert sum("mlx5_0" in difference.message for difference in found) == 1


def test_fleet_finds_the_odd_nodes_among_hundreds():
    healthy = [replace(snapshot(HGX), hostname=f"node-{i:03}") for i in range(120)]
    odd = [snapshot("sick-h100-nvlink-missing"), snapshot("sick-h100-memlock-64KiB")]
    view = fleet([*healthy[:100], odd[0], *healthy[100:], odd[1]])
    (family,) = view.families
    assert (view.total, len(family.common.nodes)) == (122, 120)
    assert {group.nodes[0] for group in family.odd} == {snapshot.hostname for snapshot in odd}
    assert all(group.differences[0].status is Status.FAIL for group in family.odd)
    lines = {line.partition("    ")[2] for line in format_fleet(view).splitlines()}
    assert {"GPU3 NVLinks 18 -> 16", "memlock unlimited -> 64 KiB"} <= lines


def test_what_is_common_in_a_fleet_and_what_is_not():
    """Unlike machines are separate families, a node that shows no GPU is odd."""
    sick = fleet([snapshot(f"sick-h100-{name}") for name in ("nvlink-missing", "memlock-64KiB", "thermal")])
    assert any("no common configuration" in warning for warning in sick.families[0].warnings)
    unlike = fleet([snapshot(name) for name in (HGX, HGX, P4D, A40)])
    assert [(family.total, family.odd) for family in unlike.families] == [(2, ()), (1, ()), (1, ())]
    blind = replace(with_outcomes(snapshot(HGX), gpu=Absent(why="driver not loaded")), hostname="blind")
    (family,) = fleet([snapshot(HGX), snapshot(HGX), snapshot(HGX), blind]).families
    assert family.odd[0].nodes == ("blind",)
    assert any("probe gpu" in difference.message for difference in family.odd[0].differences)
    (family,) = fleet([tray(1), tray(1), tray(2, hostname="lone")]).families
    assert (family.odd, len(family.common.nodes)) == ((), 3), "two racks of equal nodes are no fault"
    assert [warning.partition("; ")[2].partition(".")[0] for warning in family.warnings] == ["lone in rack/2"]
    assert fleet([tray(1), tray(2)]).families[0].warnings == (), "each domain may be that of a single board"
    with pytest.raises(ValueError, match="at least one"):
        fleet([])


def without_gpu(name, gone):
    """The machine after one GPU has left the bus: NVML numbers those behind it anew."""
    whole = snapshot(name)
    facts = whole.outcomes["gpu"].facts
    number = {gpu.index: at for at, gpu in enumerate(gpu for gpu in facts.gpus if gpu.index != gone)}
    gpus = tuple(replace(gpu, index=number[gpu.index]) for gpu in facts.gpus if gpu.index in number)
    pairs = tuple(
        replace(pair, a=number[pair.a], b=number[pair.b]) for pair in facts.pairs if {pair.a, pair.b} <= number.keys()
    )
    return with_facts(whole, gpu=replace(facts, gpus=gpus, pairs=pairs))


def test_gpus_are_compared_by_their_place_on_the_bus():
    """The third GPU is gone, and the fifth has fewer lanes: the numbers behind the gap are those of others."""
    later = without_gpu(HGX, 2)
    facts = later.outcomes["gpu"].facts
    gpus = tuple(replace(gpu, pcie_width=8) if gpu.index == 3 else gpu for gpu in facts.gpus)
    later = with_facts(later, gpu=replace(facts, gpus=gpus))
    of_gpus = [message for message in messages(diff(snapshot(HGX), later)) if message.startswith("GPU")]
    assert of_gpus == ["GPU2 missing", "GPU4 PCIe width x16 -> x8", "GPUs 8 -> 7"]
    better = {found.message: found.status for found in diff(later, snapshot(HGX))}
    assert better["GPU3 PCIe width x8 -> x16"] is Status.INFO
    new = snapshot(HGX).outcomes["gpu"].facts.gpus[2].bus_id
    assert f"GPU2 at {new} new" in better
    assert not any("GPU7" in message for message in better)
    facts = snapshot(HGX).facts(GpuFacts)
    turned = {gpu.index: 7 - gpu.index for gpu in facts.gpus}
    pairs = tuple(replace(pair, a=turned[pair.a], b=turned[pair.b]) for pair in facts.pairs)
    gpus = tuple(replace(gpu, index=turned[gpu.index]) for gpu in facts.gpus)
    renumbered = replace(changed(snapshot(HGX), GpuFacts, gpus=gpus, pairs=pairs), hostname="renumbered")
    assert not fleet([snapshot(HGX), snapshot(HGX), renumbered]).families[0].odd
    facts = snapshot(HGX).outcomes["rdma"].facts
    renamed = replace(facts, devices=(replace(facts.devices[0], name="ibp24s0"), *facts.devices[1:]))
    assert messages(diff(snapshot(HGX), with_facts(snapshot(HGX), rdma=renamed))) == ["mlx5_0 name mlx5_0 -> ibp24s0"]


def test_a_slot_is_compared_by_its_address_whatever_its_nic_is_called():
    """Each host lacks another NIC, so the kernel gives the same slot two names; one of the slots is narrow."""
    whole = snapshot(HGX)
    nics, slots = whole.facts(RdmaFacts), whole.outcomes["pci"].facts
    place = nics.devices[4].bus_id
    narrow = tuple(replace(one, link_width=8) if one.bus_id == place else one for one in slots.devices)
    hosts = []
    for gone, facts in ((2, slots), (5, replace(slots, devices=narrow))):
        rest = [one for number, one in enumerate(nics.devices) if number != gone]
        numbered = tuple(replace(one, name=f"mlx5_{number}") for number, one in enumerate(rest))
        hosts.append(with_facts(whole, rdma=replace(nics, devices=numbered), pci=facts))
    (found,) = [one for one in diff(*hosts) if one.what == "PCIe width"]
    assert (found.status, found.message) == (Status.FAIL, f"mlx5_3 ({place}) PCIe width x16 -> x8")
