"""Bandwidths of PCIe: the table's figure, and the link of this machine as it was probed."""

from __future__ import annotations

from dataclasses import replace

from contracts.layout import Layout
from planner.forecast.links import HOST, links_of
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import forecast_layout, plan
from topology.graph import ClusterTopology, GpuNode, NodeTopology


def slot(index: int, slot: float, running: float | None = None, link: str = "Gen4 x16") -> GpuNode:
    """A GPU of a PCIe server and its link."""
    return GpuNode(
        name=f"GPU{index}", index=index, model="NVIDIA L40S", pcie_bytes_per_second=slot,
        pcie_running_bytes_per_second=running, pcie_link=link,
    )  # fmt: skip


def server(hostname: str, *gpus: GpuNode) -> NodeTopology:
    """Without NVLink."""
    return NodeTopology(hostname=hostname, gpus=gpus, nics=(), pairs=())


def test_a_link_that_runs_below_its_slot_bounds_what_crosses_pcie() -> None:
    """Where it is slower than the table's figure it is taken; where it is not it is named; offloading takes it too."""
    whole = server("a", slot(0, 24e9), slot(1, 24e9))
    fast = links_of(ClusterTopology(nodes=(whole,)))
    assert (fast.node.bytes_per_second, fast.node.how) == (19.6e9, "assumed")  # two L40S, measured elsewhere
    assert fast.host.bytes_per_second == HOST.bytes_per_second
    narrow = server("b", slot(0, 24e9), slot(1, 24e9, 6e9, "Gen4 x4 of x16"))
    links = links_of(ClusterTopology(nodes=(narrow,)))
    for speed, carried in ((links.node, 6e9), (links.host, 3e9)):  # to the host: half of what the link carries
        assert (speed.bytes_per_second, speed.how, speed.why) == (carried, "derived", "GPU1 runs at Gen4 x4 of x16")
    four = server("c", *(slot(i, 24e9) for i in range(3)), slot(3, 24e9, 6e9, "Gen4 x4 of x16"))
    links = links_of(ClusterTopology(nodes=(four,)))
    assert (links.node.bytes_per_second, links.node.how) == (4.7e9, "assumed")  # slower through the CPUs than the link
    assert links.node.why == "measured on other L40S; GPU3 runs at Gen4 x4 of x16, which carries 6 GB/s"
    unknown = server("d", *(replace(gpu, model="NVIDIA X1") for gpu in narrow.gpus))
    assert links_of(ClusterTopology(nodes=(unknown,))).node.bytes_per_second == 6e9  # not the 10 GB/s assumed


def test_the_narrowest_link_of_any_node_counts() -> None:
    """Ranks wait for the slowest: the second node's GPU is named with its host."""
    first = server("a", slot(0, 24e9), slot(1, 24e9))
    second = server("b", slot(0, 24e9), slot(1, 24e9, 3e9, "Gen4 x2 of x16"))
    links = links_of(ClusterTopology(nodes=(first, second)))
    assert (links.node.bytes_per_second, links.node.why) == (3e9, "GPU1 of b runs at Gen4 x2 of x16")


def test_offloading_is_forecast_over_the_probed_link() -> None:
    """The part says which link; a quarter of the lanes takes longer than the figure assumed elsewhere."""
    train = TrainSpec(method="full", sequence_length=512, global_batch=8)
    at = Layout(world_size=2, dp_shard=2, offload="all", gradient_accumulation=4)
    gpus = slot(0, 24e9), slot(1, 24e9), slot(1, 24e9, 3e9, "Gen4 x2 of x16")
    seconds = []
    for pair in (gpus[:2], (gpus[0], gpus[2])):
        cluster = ClusterTopology(nodes=(server("a", *pair),))
        planned = plan(cluster, (), model_named("Llama-3.2-1B"), train)
        forecast = forecast_layout(planned, at).forecast
        part = next(part for part in forecast.time_parts if part.name == "offload")
        seconds.append(part.value)
    assert "PCIe to host memory 1.5 GB/s: derived (GPU1 runs at Gen4 x2 of x16)" in part.detail
    assert any("Gen4 x2 of x16" in text and "host memory" in text for text in forecast.inputs)
    assert seconds[1] > seconds[0]
