"""What a node's links and faults do to the forecast: PCIe as probed, transport, rails, and the slowest GPU's clock."""

import re
from dataclasses import replace
from functools import cache

import pytest
from rigs.recorded import H100, changed, snapshot as host
from rigs.tables import ROOT, each_row, rows_of

from agent.advice import advise
from agent.advice.request import Request
from agent.checks.view import build_view
from contracts.finding import Finding, Status
from contracts.layout import Layout
from hardware.gpus import find_gpu
from planner.advice import Recommendation
from planner.forecast import machines
from planner.forecast.compute import Job, gpu_rates
from planner.forecast.faults import ENDS, RULES, THROUGH_HOST_SHARE
from planner.forecast.links import GRACE, HOST, TCP_CEILING_BYTES_PER_SECOND, make_links
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.forecast.step_time import forecast_step
from planner.recommend import forecast_layout, plan, recommend
from planner.stacks import find_engine
from probes.api import Snapshot
from probes.gpu.facts import GpuFacts
from probes.interfaces.facts import InterfacesFacts
from topology.build import build
from topology.cluster import join
from topology.graph import ClusterTopology, GpuNode, NodeTopology

rows = rows_of(__file__)


def ask(snapshot: Snapshot, **options: object) -> Recommendation:
    question = {"nodes": 2, "model": "Llama-3.1-8B", "method": "full", **options}
    return advise.advise(Request.of(**question), (snapshot,))  # type: ignore[arg-type]


def seconds(advice: Recommendation) -> float:
    return advice.chosen.forecast.step_seconds.mid


@cache
def advise_healthy() -> Recommendation:
    """Return the advice for nodes without faults."""
    return ask(host(H100))


def test_healthy_nodes_need_no_second_forecast() -> None:
    assert advise_healthy().slowed == () and advise_healthy().healthy is None


@each_row(("machine", "words", "least"), rows("sick"))
def test_each_fault_slows_the_forecast(machine: str, words: str, least: float) -> None:
    """The best layout takes longer than on healthy nodes, at least by the factor `least`.

    A fault that the topology shows needs no second forecast. If RDMA is off, the rate of the cards is assumed.
    """
    advice = ask(host(machine))
    assert any(re.search(words, line) for line in advice.slowed), advice.slowed
    assert seconds(advice) >= max(0.999, least) * seconds(advise_healthy())
    assert bool(advice.healthy) == bool(least)
    if advice.healthy is not None:
        off = 0.08 if machine == "sick-h100-rdma-off" else 1e-6
        assert advice.healthy.forecast.step_seconds.mid == pytest.approx(seconds(advise_healthy()), rel=off)


def with_clock(snapshot: Snapshot, megahertz: float, *reasons: str) -> Snapshot:
    """GPU3 busy at this clock."""
    facts = snapshot.facts(GpuFacts)
    slow = replace(
        facts.gpus[3], sm_clock_hertz=megahertz * 1e6, sm_clock_max_hertz=1980e6, utilization_ratio=1.0,
        throttle_reasons=reasons,
    )  # fmt: skip
    return changed(snapshot, GpuFacts, gpus=(*facts.gpus[:3], slow, *facts.gpus[4:]))


def test_the_slowest_gpu_sets_the_pace() -> None:
    """A lower clock slows the step; a clock above the rate that a GPU sustains anyway costs nothing."""
    times = [seconds(ask(with_clock(host(H100), clock, "sw_thermal"))) for clock in (1980, 1050, 700, 350)]
    assert times == sorted(times) and times[1] > 1.25 * times[0]
    assert times[0] == pytest.approx(seconds(advise_healthy()), rel=0.001)
    halves = ask(with_clock(host(H100), 0, "hw_slowdown"))  # the driver reads no clock: half, by nvml.h
    assert any("gpu.clocks.slowdown on GPU3: 50%" in line for line in halves.slowed)


def test_a_narrow_link_halves_the_way_to_the_host_and_the_rails() -> None:
    """One GPU of eight at x8: every rail waits for its own, and what is offloaded takes half the way."""
    snapshot = host(H100)
    node = build(snapshot)
    slot = node.gpus[2].pcie_bytes_per_second
    gpus = tuple(
        replace(gpu, pcie_running_bytes_per_second=slot / 2, pcie_link="Gen5 x8 of x16") if gpu.index == 2 else gpu
        for gpu in node.gpus
    )
    from topology.derive import complete

    narrow = complete(replace(node, gpus=gpus))
    pairs = [join([replace(one, hostname=name) for name in ("a", "b")]) for one in (node, narrow)]
    whole, half = (make_links(pair) for pair in pairs)
    assert half.host.bytes_per_second == pytest.approx(whole.host.bytes_per_second / 2)
    assert half.network.bytes_per_second == pytest.approx(whole.network.bytes_per_second / 2)
    found = Finding(code="gpu.pcie.width", status=Status.FAIL, subject="GPU2", message="runs x8 of x16")
    train = TrainSpec(method="full", sequence_length=2048)
    findings = {"a": (found,), "b": (found,)}
    advice = recommend(pairs[1], (snapshot,), model_named("Llama-3.1-8B"), train, findings=findings)
    assert advice.slowed == ("gpu.pcie.width on GPU2: fewer lanes to the host and to the NICs",)


def test_what_was_measured_goes_before_a_rule() -> None:
    """A network that was measured as it is is not slowed again."""
    from collectives.bench.results import Measurement
    from planner.forecast.faults import apply_findings, pick_costly

    snapshot = host("sick-h100-no-peermem")
    node = build(snapshot)
    pair = join([replace(node, hostname=name) for name in ("a", "b")])
    measured = Measurement(
        op="all_gather", backend="nccl", ranks=tuple(range(16)), hosts=("a",) * 8 + ("b",) * 8, bytes=1 << 30,
        iteration_seconds=(0.02,), median_seconds=0.02, spread_ratio=None, algbw_bytes_per_second=50e9,
        busbw_bytes_per_second=47e9, verified=True,
    )  # fmt: skip
    links = make_links(pair, (measured,))
    bad = [check for check in build_view((snapshot,)).checks if check.status in ("fail", "warn")]
    found = {"a": pick_costly({"a": bad}, {})["a"]}
    now = apply_findings(links, found, (snapshot,))
    assert now.links.network == links.network and now.words == []
    slow = apply_findings(make_links(pair), found, (snapshot,)).links.network
    plain = make_links(pair).network
    assert slow.bytes_per_second == pytest.approx(THROUGH_HOST_SHARE * plain.bytes_per_second)


def with_interface_rate(snapshot: Snapshot, rate: float | None) -> Snapshot:
    facts = snapshot.facts(InterfacesFacts)
    told = tuple(replace(each, speed_bytes_per_second=rate) for each in facts.interfaces)
    return changed(snapshot, InterfacesFacts, interfaces=told)


def test_sockets_carry_what_the_interface_does_and_no_more_than_sockets_can() -> None:
    sick = host("sick-h100-memlock-64KiB")
    fast = ask(with_interface_rate(sick, 50e9))
    assert f"at {TCP_CEILING_BYTES_PER_SECOND / 1e9:.0f} GB/s per node" in fast.slowed[0]
    slow = ask(with_interface_rate(sick, 125e6))
    assert seconds(slow) > seconds(fast)


def test_an_unknown_network_gives_a_range_that_says_so() -> None:
    """60 Mb/s lies in it: a pod network of that speed was forecast at 0.43 s and measured at 3.37 s."""
    lost = with_interface_rate(host("sick-h100-memlock-64KiB"), None)
    advice = ask(lost, model="Qwen2.5-0.5B", method="full", global_batch=64)
    known = ask(with_interface_rate(lost, 60e6 / 8), model="Qwen2.5-0.5B", method="full", global_batch=64)
    around, at_60 = (each.chosen.forecast.step_seconds for each in (advice, known) if each.chosen)
    assert around.low < at_60.mid < around.high
    assert around.high > 5 * around.mid
    assert any("unknown network: the interval is for 0.006 to 12.5 GB/s" in line for line in advice.unknowns)


def test_every_failure_of_a_node_has_a_rule_or_ends_the_job_or_is_named_as_not_counted() -> None:
    """By the table of what each code costs; the last set is what no figure bounds, or what only its finding counts."""
    page = (ROOT / "docs" / "decisions" / "0020-severity-by-cost.md").read_text(encoding="utf-8")
    failing = {
        code for code, severity in re.findall(r"^\| `([a-z0-9_.]+)` \| ([^|]+) \|", page, re.M) if "fail" in severity
    }
    runs = {
        code for code in failing if code.split(".")[0] in ("bench", "run", "forecast", "expect", "cluster", "search")
    }
    unbounded = set(rows("unbounded")())
    probes = {code for code in failing if code.endswith(".probe.failed")}
    assert failing - runs - probes - unbounded == {*RULES, *ENDS} & failing
    assert not set(RULES) & (ENDS | unbounded)


def test_what_the_advised_environment_repairs_or_leaves_out_costs_nothing() -> None:
    """The interface that a setting names, the path that a level allows, a port that is not in the list."""
    from planner.forecast.faults import pick_costly

    pairs = rows("repaired")()
    found = {"a": tuple(Finding(code=code, status=Status.FAIL, subject=subject, message="") for code, subject in pairs)}

    def left(**settings: str) -> list[str]:
        return [one.subject for one in pick_costly(found, settings)["a"]]

    assert left() == ["eth0", "GPU0", "mlx5_0:1", "mlx5_1:1"]
    assert left(NCCL_SOCKET_IFNAME="net1", NCCL_NET_GDR_LEVEL="PHB") == ["mlx5_0:1", "mlx5_1:1"]
    ports = {"=mlx5_1:1": [1], "mlx5_1": [1], "=mlx5_1:2": [], "^=mlx5_1": [0], "mlx5_": [0, 1], "^mlx5_": []}
    for value, counts in ports.items():
        advised = {"NCCL_SOCKET_IFNAME": "net1", "NCCL_NET_GDR_LEVEL": "PHB", "NCCL_IB_HCA": value}
        assert left(**advised) == [f"mlx5_{each}:1" for each in counts], value


def test_without_an_imex_channel_the_network_stands_in_place_of_nvlink_between_nodes() -> None:
    snapshot = host("gb200-nvl72-tray")
    pair = join([replace(build(snapshot), hostname=name) for name in ("a", "b")])
    found = (Finding(code="imex.channel.missing", status=Status.FAIL, subject="", message=""),)
    train = TrainSpec(method="full", sequence_length=2048, global_batch=64)
    advice = recommend(pair, (snapshot,), model_named("Llama-3.1-8B"), train, findings={"a": found, "b": found})
    assert advice.slowed == ("imex.channel.missing: the network instead of NVLink between nodes",)


def test_a_board_of_fewer_watts_multiplies_less_and_is_no_fault() -> None:
    """500 of the data sheet's 700 W by default: the root, 85 %, in the forecast; nothing else to repair."""
    facts = host(H100).facts(GpuFacts)

    def board(watts: float) -> Recommendation:
        gpus = tuple(replace(gpu, power_limit_watts=watts, power_limit_default_watts=watts) for gpu in facts.gpus)
        return ask(changed(host(H100), GpuFacts, gpus=gpus), global_batch=256)

    usual, fewer = board(700.0), board(500.0)
    assert fewer.healthy is None and fewer.slowed == ()
    assert 1.1 < seconds(fewer) / seconds(usual) < (700 / 500) ** 0.5 + 1e-6
    assert "a board of 500 W, the data sheet's has 700: 85% of its rate" in " ".join(fewer.chosen.forecast.inputs)


GB300 = find_gpu("NVIDIA GB300")
RATES = gpu_rates(GB300, TrainSpec(), find_engine("trl"), "bf16")


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
    fast = make_links(ClusterTopology(nodes=(whole,)))
    assert (fast.node.bytes_per_second, fast.node.how) == (19.6e9, "assumed")  # two L40S, measured elsewhere
    assert fast.host.bytes_per_second == HOST.bytes_per_second
    grace = server("g", replace(slot(0, 24e9, 6e9, "Gen4 x4 of x16"), model="NVIDIA GH200 480GB"))
    assert make_links(ClusterTopology(nodes=(grace,))).host == GRACE  # not over PCIe
    narrow = server("b", slot(0, 24e9), slot(1, 24e9, 6e9, "Gen4 x4 of x16"))
    links = make_links(ClusterTopology(nodes=(narrow,)))
    for speed, carried in ((links.node, 6e9), (links.host, 3e9)):  # to the host: half of what the link carries
        assert (speed.bytes_per_second, speed.how, speed.why) == (carried, "derived", "GPU1 runs at Gen4 x4 of x16")
    four = server("c", *(slot(i, 24e9) for i in range(3)), slot(3, 24e9, 6e9, "Gen4 x4 of x16"))
    links = make_links(ClusterTopology(nodes=(four,)))
    assert (links.node.bytes_per_second, links.node.how) == (4.7e9, "assumed")  # slower through the CPUs than the link
    assert links.node.why == "measured on other L40S; GPU3 runs at Gen4 x4 of x16, which carries 6 GB/s"
    unknown = server("d", *(replace(gpu, model="NVIDIA X1") for gpu in narrow.gpus))
    assert make_links(ClusterTopology(nodes=(unknown,))).node.bytes_per_second == 6e9  # not the 10 GB/s assumed


def test_the_narrowest_link_of_any_node_counts() -> None:
    """Ranks wait for the slowest: the second node's GPU is named with its host."""
    first = server("a", slot(0, 24e9), slot(1, 24e9))
    second = server("b", slot(0, 24e9), slot(1, 24e9, 3e9, "Gen4 x2 of x16"))
    links = make_links(ClusterTopology(nodes=(first, second)))
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
    links = make_links(machines.cluster(machine, nodes))
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
        assert make_links(ClusterTopology(nodes=nodes, inter_node_transport="rdma")).island_size == ranks


def test_nodes_of_different_networks_are_forecast_over_sockets() -> None:
    """As the environment sets them: NCCL takes one network for all ranks. The advice names both kinds, and the GPUs."""
    cluster = join([machines.get("p4d.24xlarge", "a"), machines.get("dgx-h100", "b")])
    network = make_links(cluster).network
    assert network is not None and (network.link, network.how) == ("TCP", "assumed")
    answer = recommend(cluster, (), model_named("Llama-3.1-8B"), TrainSpec())
    words = " ".join(answer.unknowns)
    for part in ("some nodes have EFA and others RDMA", "different GPUs", "topoflight bench"):
        assert part in words, part


def test_ethernet_with_a_plugin_of_the_cloud_is_not_limited_as_sockets_are() -> None:
    """189 GB/s were measured on A3 Mega (published_busbw.csv); a2 has no plugin, and a user's --tcp counts."""
    mega, plain = (make_links(machines.cluster(name, 2)).network for name in ("a3-megagpu-8g", "a2-highgpu-8g"))
    assert mega is not None and (mega.link, mega.bytes_per_second) == ("GPUDirect-TCPXO", 170e9)
    assert plain is not None and (plain.link, plain.bytes_per_second) == ("TCP", 4e9)
    narrow = machines.over_network(machines.cluster("a3-megagpu-8g", 2), "8x100G")
    sockets = machines.over_network(narrow, "8x100G", "tcp")
    assert [str(make_links(one).network).split(" GB/s")[0] for one in (narrow, sockets)] == [
        "GPUDirect-TCPXO 85",
        "TCP 4",
    ]


def test_a_small_gradient_is_reduced_at_once() -> None:
    """Adapters over 512 ranks are one bucket: no ring of 512 steps for each layer."""
    links = make_links(machines.cluster("gb300", 128))
    train = TrainSpec(method="lora", sequence_length=4096)
    engine = find_engine("topoflight")
    job = Job(model=model_named("Llama-3.1-8B"), train=train, links=links, engine=engine, rates=RATES)
    at = Layout(world_size=512, dp_replicate=512, sharding="ddp")
    ring = links.ring_seconds(2.0 * 4.0 * 42e6, 512, 1, 2.0 * 7)  # 42 M weights in buckets of 25 MiB, both ways
    assert forecast_step(job, at).reduce <= ring


def test_offloaded_weights_cross_pcie_as_they_lie() -> None:
    """QLoRA's in four bits, and no gradient of what is frozen: 70B on two ranks, 35 GB for both passes."""
    links = make_links(machines.cluster("4xl40s"))
    train = TrainSpec(method="qlora", sequence_length=512, global_batch=2)
    job = Job(model=model_named("Llama-2-70B"), train=train, links=links, engine=find_engine("trl"), rates=RATES)
    at = Layout(world_size=2, dp_shard=2, checkpointing="full", offload="all")
    waits = replace(job, engine=replace(job.engine, hides_offload=False))
    assert forecast_step(waits, at).offload * links.host.bytes_per_second < 1.2 * 35e9
    assert forecast_step(job, at).offload < 0.9 * forecast_step(waits, at).offload  # compute hides a part
