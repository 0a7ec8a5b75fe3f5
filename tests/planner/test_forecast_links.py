"""Bandwidths of PCIe: the table's figure, and the link of this machine as it was probed."""

from dataclasses import replace

from rigs.tables import each_row, rows_of

from contracts.layout import Layout
from hardware.gpus import gpu_named
from planner.forecast import machines
from planner.forecast.compute import Job, gpu_rates
from planner.forecast.links import GRACE, HOST, links_of
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.forecast.step_time import step_parts
from planner.recommend import forecast_layout, plan, recommend
from planner.stacks import engine_named
from topology.cluster import join
from topology.graph import ClusterTopology, GpuNode, NodeTopology

rows = rows_of(__file__)

GB300 = gpu_named("NVIDIA GB300")
RATES = gpu_rates(GB300, TrainSpec(), engine_named("trl"), "bf16")


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
    grace = server("g", replace(slot(0, 24e9, 6e9, "Gen4 x4 of x16"), model="NVIDIA GH200 480GB"))
    assert links_of(ClusterTopology(nodes=(grace,))).host == GRACE  # not over PCIe
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


@each_row(("machine", "nodes", "ranks"), rows("domains"))
def test_an_nvlink_domain_stays_one_where_a_job_spans_several(machine: str, nodes: int, ranks: int) -> None:
    """Nodes are spread evenly over the domains; groups of ranks that start at a multiple of their size stay in one."""
    links = links_of(machines.cluster(machine, nodes))
    assert links.island_size == ranks
    assert links.crosses(8, 1).link == "NVLink"


def test_scanned_nodes_are_an_island_where_they_follow_each_other() -> None:
    """Two domains of two nodes, in the order of the ranks or not; a node without a domain, NVLink or GPUs."""
    one, other = (machines.cluster("gb300", 36).nodes[i] for i in (0, -1))
    alone = replace(one, gpus=tuple(replace(gpu, nvlink_domain=None) for gpu in one.gpus))
    board, cards = machines.get("dgx-h100", "board"), machines.get("l40s", "cards")  # TP would cross PCIe on the cards
    lost = replace(board, gpus=tuple(replace(gpu, usable=False) for gpu in board.gpus))
    mixed = ((board, cards), 1), ((lost, board), 1)
    for nodes, ranks in (((one, one, other, other), 8), ((one, other, one, other), 4), ((one, one, alone), 4), *mixed):
        assert links_of(ClusterTopology(nodes=nodes, inter_node_transport="rdma")).island_size == ranks


def test_nodes_of_different_networks_are_forecast_over_sockets() -> None:
    """As the environment sets them: NCCL takes one network for all ranks. The advice names both kinds, and the GPUs."""
    cluster = join([machines.get("p4d.24xlarge", "a"), machines.get("dgx-h100", "b")])
    network = links_of(cluster).network
    assert network is not None and (network.link, network.how) == ("TCP", "assumed")
    answer = recommend(cluster, (), model_named("Llama-3.1-8B"), TrainSpec())
    words = " ".join(answer.unknowns)
    for part in ("some nodes have EFA and others RDMA", "different GPUs", "topoflight bench"):
        assert part in words, part


def test_ethernet_with_a_plugin_of_the_cloud_is_not_limited_as_sockets_are() -> None:
    """189 GB/s were measured on A3 Mega (published_busbw.csv); a2 has no plugin, and a user's --tcp counts."""
    mega, plain = (links_of(machines.cluster(name, 2)).network for name in ("a3-megagpu-8g", "a2-highgpu-8g"))
    assert mega is not None and (mega.link, mega.bytes_per_second) == ("GPUDirect-TCPXO", 170e9)
    assert plain is not None and (plain.link, plain.bytes_per_second) == ("TCP", 4e9)
    narrow = machines.over_network(machines.cluster("a3-megagpu-8g", 2), "8x100G")
    sockets = machines.over_network(narrow, "8x100G", "tcp")
    assert [str(links_of(one).network).split(" GB/s")[0] for one in (narrow, sockets)] == [
        "GPUDirect-TCPXO 85",
        "TCP 4",
    ]


def test_a_small_gradient_is_reduced_at_once() -> None:
    """Adapters over 512 ranks are one bucket: no ring of 512 steps for each layer."""
    links = links_of(machines.cluster("gb300", 128))
    train = TrainSpec(method="lora", sequence_length=4096)
    engine = engine_named("topoflight")
    job = Job(model=model_named("Llama-3.1-8B"), train=train, links=links, engine=engine, rates=RATES)
    at = Layout(world_size=512, dp_replicate=512, sharding="ddp")
    ring = links.ring_seconds(2.0 * 4.0 * 42e6, 512, 1, 2.0 * 7)  # 42 M weights in buckets of 25 MiB, both ways
    assert step_parts(job, at).reduce <= ring


def test_offloaded_weights_cross_pcie_as_they_lie() -> None:
    """QLoRA's in four bits, and no gradient of what is frozen: 70B on two ranks, 35 GB for both passes."""
    links = links_of(machines.cluster("4xl40s"))
    train = TrainSpec(method="qlora", sequence_length=512, global_batch=2)
    job = Job(model=model_named("Llama-2-70B"), train=train, links=links, engine=engine_named("trl"), rates=RATES)
    at = Layout(world_size=2, dp_shard=2, checkpointing="full", offload="all")
    waits = replace(job, engine=replace(job.engine, hides_offload=False))
    assert step_parts(waits, at).offload * links.host.bytes_per_second < 1.2 * 35e9
    assert step_parts(job, at).offload < 0.9 * step_parts(waits, at).offload  # compute hides a part
