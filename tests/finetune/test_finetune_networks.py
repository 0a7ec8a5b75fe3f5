"""The same fine-tune over the slow default network, over the fast second one, and on one host: three bars."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from rigs.netns import hosts, missing

from planner.layout import Layout
from planner.links import Links, Speed
from planner.models import model_named
from planner.recommend import forecast_layout, plan
from planner.specs import TrainSpec
from topology.graph import ClusterTopology, NodeTopology

pytestmark = [pytest.mark.ranks, pytest.mark.netns, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
RATE = "60mbit"  # of the default network, so slow that a busy machine does not hide it; the second one is not shaped
RATE_BYTES = 60e6 / 8
LOOPBACK_BYTES = 1e9  # of the second network and of loopback, by order of magnitude: neither is what a step waits for
STEPS = 8
LAYOUT = {"world_size": 2, "dp_shard": 2, "precision": "fp32", "micro_batch": 1}


def forecast(bytes_per_second):
    """The planner's forecast for two hosts of one rank each, joined by a network of this speed."""
    nodes = tuple(
        NodeTopology(hostname=f"host-{n}", gpus=(), nics=(), pairs=(), cpu_count=os.cpu_count()) for n in (0, 1)
    )
    inside = Speed(bytes_per_second=LOOPBACK_BYTES, how="assumed", link="host memory")
    links = Links(
        ranks_per_node=1, nodes=2, island_size=1, island=inside, node=inside,
        network=Speed(bytes_per_second=bytes_per_second, how="measured", link="TCP"),
    )  # fmt: skip
    train = TrainSpec(lora_rank=8, sequence_length=128, mean_tokens=51.0, global_batch=2, precision="fp32")
    planned = plan(ClusterTopology(nodes=nodes), (), model_named("tiny-llama"), train, links=links)
    return forecast_layout(planned, Layout(**LAYOUT)).forecast


def fly(rig, folder, places, device, said=None):
    """One rank per entry of `places`, each in that host, over the named device; returns the flight."""
    folder.mkdir()
    environment = {"GLOO_SOCKET_IFNAME": device}
    document = {"layout": LAYOUT, "environment": environment, "forecast": dataclasses.asdict(said) if said else {}}
    (folder / "plan.json").write_text(json.dumps(document))
    settings = [
        f"output_dir={folder}",
        f"max_steps={STEPS}",
        "save_strategy=no",
        "eval_strategy=no",
        "dataset_rows=256",
    ]
    argv = [sys.executable, "-m", "finetune.train", "--plan", str(folder / "plan.json"), *settings]
    address = {"eth0": rig.address(places[0]), "net1": rig.address(places[0], "net1"), "lo": "127.0.0.1"}[device]
    ranks = []
    for rank, host in enumerate(places):
        env = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": places[:rank].count(host), "MASTER_PORT": 29511,
               "MASTER_ADDR": address, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT, **environment}  # fmt: skip
        with (folder / f"rank{rank}.log").open("w") as log:
            env = {name: str(value) for name, value in env.items()}
            ranks.append(rig.popen(host, argv, env, stderr=log, stdout=log, cwd=ROOT))
    try:
        codes = [rank.wait(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * len(places), (folder / "rank0.log").read_text()[-2000:]
    return json.loads((folder / "flight.json").read_text())


def best(flight):
    """The quickest step: what the network allows, whatever else the machine does meanwhile."""
    return min(flight["step_seconds"][2:])


@pytest.fixture(scope="module")
def bars(tmp_path_factory):
    """Three flights: two hosts on each network, and both ranks on one host."""
    why = missing()
    if why:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("bars")
    with hosts(2, default_rate=RATE) as rig:
        return {
            "default": fly(rig, folder / "default", [0, 1], "eth0", forecast(RATE_BYTES)),
            "net1": fly(rig, folder / "net1", [0, 1], "net1", forecast(LOOPBACK_BYTES)),
            "one host": fly(rig, folder / "one", [0, 0], "lo"),
        }


def test_the_second_network_is_faster(bars):
    """Step time over net1 is below that over the default network by at least half of what the bytes take there.

    FSDP over two ranks gathers every weight forward and backward: each rank sends the other its half, twice.
    """
    seconds = {name: best(flight) for name, flight in bars.items()}
    weights = bars["net1"]["layout"]["effective"]["parameter_bytes"]
    on_the_wire = 2 * weights / 2 / RATE_BYTES
    assert seconds["default"] > on_the_wire
    assert seconds["default"] - seconds["net1"] > 0.5 * on_the_wire


def test_the_gain_is_what_the_planner_forecast(bars):
    """Over the default network the step lies in the forecast's interval; so does what the second network saves."""
    slow, fast = forecast(RATE_BYTES).step_seconds, forecast(LOOPBACK_BYTES).step_seconds
    assert slow.low < best(bars["default"]) < slow.high
    gain = best(bars["default"]) - best(bars["net1"])
    forecast_gain = slow.mid - fast.mid
    assert forecast_gain * slow.low / slow.mid < gain < forecast_gain * slow.high / slow.mid


def test_one_host_with_two_ranks_beats_two_hosts_with_one_each(bars):
    """Over the default network, two pods of one rank lose to one pod of two."""
    assert best(bars["one host"]) < best(bars["default"])


def test_the_network_changes_the_time_and_nothing_else(bars):
    """Losses are the same on all three."""
    assert {flight["status"] for flight in bars.values()} == {"complete"}
    first, *others = (flight["loss"] for flight in bars.values())
    for loss in others:
        assert loss == pytest.approx(first, rel=1e-5)


def test_communication_takes_a_larger_share_on_the_slow_network(bars):
    """The profiler sees why."""
    exposed = {name: flight["communication"]["exposed_share"] for name, flight in bars.items()}
    assert exposed["default"] > exposed["net1"]
