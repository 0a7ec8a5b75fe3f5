"""topoflight compare-networks on this host: what it makes, proves, draws and leaves behind."""

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from rigs.benchmarks import OWN_LOCK
from rigs.netns import hosts
from rigs.tables import ROOT, data_of, each_row
from rigs.waiting import eventually

from agent.cli.bench import compare_networks
from agent.jobs import namespaces
from agent.jobs.networks import NetworkBar, NetworkBars, _describe_exits, add_cost, add_run, draw_bars, prove_network
from contracts.finding import Interval
from contracts.run_record import record_of

ROWS = data_of(__file__, "jobs/rows.yaml")
# A step waits for bytes and not for a busy machine: what the ranks compute is a tenth of one on the second network.
NETWORKS = ["--over", "eth0,60M", "--over", "net1,150M"]
CARRIED = 1448 / 1514 / 8  # what an Ethernet frame of 1514 bytes carries for TCP, in bytes per bit
ROUNDS = 3  # at most: something else may have had the cores


def record(**members):
    """A run's record as a job writes it."""
    due = {"low": 0.8, "mid": 1.0, "high": 1.2}
    plan = {"forecast": {"step_seconds": due}}
    return record_of({"status": "complete", "plan": plan, "measured": {"step_seconds": 1.1}, **members})


@each_row(("members", "interface", "rdma", "proven"), ROWS["proofs"])
def test_a_run_stands_for_a_network_only_where_it_was_seen_to_take_it(members, interface, rdma, proven):
    """By the words of the sockets or of NCCL's log, never by what was set."""
    assert prove_network(record(**members), interface, rdma=rdma)[0] is proven


def test_only_a_proven_complete_run_is_a_bar():
    """What failed, was not proven or names no step time says why, and has no number."""
    over = {"transports": ["gloo: TCP over net1 (10.0.0.1)"]}
    bar = NetworkBar(network="net1")
    good = add_run(bar, record(**over), "net1")
    assert (good.status, good.step_seconds, good.within) == ("measured", 1.1, True)
    elsewhere = add_run(bar, record(**over), "eth0")
    assert (elsewhere.status, elsewhere.step_seconds) == ("unproven", None)
    assert add_run(bar, None, "net1").status == "failed"
    stopped = add_run(bar, replace(record(**over), status="mismatch", reason="another network"), "net1")
    assert (stopped.status, stopped.why, stopped.step_seconds) == ("failed", "another network", None)
    assert add_run(bar, record(**over, measured={}), "net1").status == "unknown"


def test_time_and_money_are_those_of_the_whole_run_and_the_picture_has_a_bar_a_network():
    """Two nodes at 3.60 an hour cost 0.002 a second; what was not had has words instead of a bar."""
    over = [add_run(NetworkBar(network=name), record(transports=[f"gloo: TCP over {name} (10.0.0.1)"]), name)
            for name in ("eth0", "net1")]  # fmt: skip
    found = add_cost(NetworkBars(
        title="<title> & more", where="here", nodes=2, steps=1000, node_hour_price=3.60,
        bars=(*over, NetworkBar(network="RDMA", status="not available", why="no RDMA device")),
    ))  # fmt: skip
    assert [bar.run_seconds for bar in found.bars] == [pytest.approx(1100.0)] * 2 + [None]
    assert [bar.cost for bar in found.bars] == [pytest.approx(2.2)] * 2 + [None]
    assert found.bars[0].run_forecast == Interval(low=800.0, mid=1000.0, high=1200.0)
    assert found.exit_code == 0
    drawn = ElementTree.fromstring(draw_bars(found))  # noqa: S314 - our own
    rectangles = [one for one in drawn.iter() if one.tag.endswith("}rect") and one.get("fill") == "#1f6feb"]
    assert len(rectangles) == 2
    assert "no RDMA device" in "".join(drawn.itertext())
    failed = replace(
        found, bars=(NetworkBar(network="eth0", status="failed"), NetworkBar(network="net1", status="unproven"))
    )
    assert (failed.exit_code, replace(failed, bars=failed.bars[1:]).exit_code) == (3, 5)


@each_row(("codes", "logs", "why"), ROWS["failed_ranks"])
def test_a_run_that_failed_names_the_rank_that_failed_first_and_its_error(tmp_path, codes, logs, why):
    """The other ranks lose their connections; the picture has the reason where the bar would be."""
    for rank, log in enumerate(logs):
        (tmp_path / f"rank{rank}.log").write_text(log)
    told = _describe_exits(codes, tmp_path)
    assert told == why
    bars = NetworkBars(title="", where="", nodes=2, steps=1, node_hour_price=None,
                       bars=(NetworkBar(network="eth0", status="failed", why=told),))  # fmt: skip
    drawn = ElementTree.fromstring(draw_bars(bars))  # noqa: S314 - our own
    assert told in " ".join(text.strip() for text in drawn.itertext())


@each_row("word", ["eth0", "eth0,fast", "eth0,0M", "lo,10M", "e th,1G", "a" * 16 + ",1G", "eth0=a/b,1G"])
def test_a_network_that_cannot_be_made_is_named_with_what_can(word):
    """As any user's mistake: exit code 2."""
    done = CliRunner().invoke(compare_networks, ["--over", word])
    assert done.exit_code == 2
    assert f"--over {word!r}: must be INTERFACE,RATE" in done.stderr


def compare(*words, **options):
    """Run the verb."""
    argv = [sys.executable, "-m", "agent.cli", "compare-networks", *words]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False, timeout=600, **options)


def test_where_no_namespace_can_be_made_it_is_refused_with_the_reason_or_left_out_where_that_was_asked():
    """Nothing is made or measured."""
    why = "not installed: unshare (util-linux)" if os.geteuid() == 0 else "network namespaces need root"
    elsewhere = {"env": {**os.environ, "PATH": "/nowhere"}}
    refused = compare(**elsewhere)
    assert (refused.returncode, refused.stderr) == (1, f"Error: not compared: {why}\n")
    left = compare("--if-possible", **elsewhere)
    assert (left.returncode, left.stderr) == (0, f"networks: not compared: {why}\n")


needs_namespaces = pytest.mark.skipif(bool(namespaces.why_unavailable()), reason=namespaces.why_unavailable() or "can")


@needs_namespaces
@pytest.mark.ranks
@pytest.mark.netns
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_each_bar_is_proven_and_lies_within_its_own_forecast(tmp_path):
    """Two networks measured, forecast, run and proven; RDMA, which no device offers, is no bar."""
    before = {process.pid for process in psutil.process_iter()}
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        done = compare(*NETWORKS, "--price", "36", "--report", str(folder), "-o", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        eth0, net1, rdma = found["bars"]
        gain = eth0["step_seconds"] - net1["step_seconds"]
        # as uncertain as the slow step
        least, most = (eth0["forecast"][end] - net1["forecast"]["mid"] for end in ("low", "high"))
        if eth0["within"] and net1["within"] and least < gain < most:
            break
    assert [eth0["proof"], net1["proof"]] == [
        ["gloo: TCP over eth0 (10.244.0.1)"],
        ["gloo: TCP over net1 (10.244.1.1)"],
    ]
    assert [eth0["within"], net1["within"]] == [True, True], done.stdout
    assert least < gain < most, done.stdout
    slow, fast = (json.loads(Path(bar["record"]).read_text()) for bar in (eth0, net1))
    assert slow["loss"] == pytest.approx(fast["loss"], rel=1e-5), "the network changes the time and nothing else"
    # FSDP over two ranks gathers every weight forward and backward: each rank sends the other its half, twice
    on_the_wire = {rate: slow["layout"]["effective"]["parameter_bytes"] / (rate * CARRIED) for rate in (60e6, 150e6)}
    assert gain > 0.5 * (on_the_wire[60e6] - on_the_wire[150e6])
    assert eth0["busbw_bytes_per_second"] < 60e6 / 8 < net1["busbw_bytes_per_second"] < 150e6 / 8
    assert eth0["step_seconds"] > 1.5 * net1["step_seconds"]
    assert eth0["cost"] == pytest.approx(eth0["step_seconds"] * found["steps"] * 2 * 36 / 3600)
    assert (rdma["status"], rdma["step_seconds"]) == ("not available", None)
    assert (folder / "networks.svg").read_text().count("a step") >= 2
    running = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    left = [p for p in running if str(ROOT) in " ".join(p.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=30)[1]
    assert {"eth0", "net1"}.isdisjoint(set(psutil.net_if_addrs()) - INTERFACES)


def run_in_hosts(rig, folder, places, device, address):
    """Run one rank of the built-in job per entry of `places`, each in that host: their exit codes, and the record."""
    folder.mkdir()
    over = {"GLOO_SOCKET_IFNAME": device}
    layout = {"world_size": 2, "dp_shard": 2, "precision": "fp32", "micro_batch": 1}
    (folder / "plan.json").write_text(json.dumps({"layout": layout, "environment": over}))
    words = ["--plan", str(folder / "plan.json"), f"output_dir={folder}", "max_steps=5", "save_strategy=no",
             "eval_strategy=no", "dataset_rows=256"]  # fmt: skip
    ranks = []
    for rank, host in enumerate(places):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(places[:rank].count(host)),
                       "MASTER_PORT": "29511", "MASTER_ADDR": address, **over}  # fmt: skip
        ranks.append(rig.popen(host, [sys.executable, "-m", "finetune.train", *words], env=environment))
    return [rank.wait(600) for rank in ranks], json.loads((folder / "run.json").read_text())


@needs_namespaces
@pytest.mark.ranks
@pytest.mark.netns
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_ranks")
def test_one_host_beats_two_and_a_route_around_the_named_network_is_told(tmp_path):
    """Two ranks of one host wait less than those of two; the record has the network that the kernel tells.

    A route sends what goes to net1's addresses over eth0, though GLOO_SOCKET_IFNAME names net1.
    """
    with hosts(2, default_rate="60mbit") as rig:
        two, apart = run_in_hosts(rig, tmp_path / "two", [0, 1], "eth0", rig.address(0))
        one, together = run_in_hosts(rig, tmp_path / "one", [0, 0], "lo", "127.0.0.1")
        for host in (0, 1):
            other = rig.address(1 - host, "net1")
            rig.run(host, ["ip", "route", "add", f"{other}/32", "dev", "eth0", "src", rig.address(host)])
        around, routed = run_in_hosts(rig, tmp_path / "around", [0, 1], "net1", rig.address(0, "net1"))
    assert (two, one, around) == ([0, 0], [0, 0], [0, 0])
    assert (apart["transports"], together["transports"]) == (
        ["gloo: TCP over eth0 (10.244.0.1)"], ["gloo: TCP over lo (127.0.0.1)"],
    )  # fmt: skip
    assert any(one.startswith("gloo: TCP over eth0 (10.244.0.") for one in routed["transports"])
    assert not prove_network(record_of(routed), "net1")[0]
    assert min(together["step_seconds"][2:]) < min(apart["step_seconds"][2:])
    assert together["communication"]["exposed_share"] < apart["communication"]["exposed_share"]
    assert together["loss"] == pytest.approx(apart["loss"], rel=1e-5)


INTERFACES = set(psutil.net_if_addrs())  # of this host itself


def count_hosts(verb):
    """The children of a verb that hold the namespaces of a host; a child may end meanwhile."""
    children = verb.children(recursive=True)
    return sum((one.info["cmdline"] or [""])[0] == "cat" for one in psutil.process_iter(["cmdline"]) if one in children)


@needs_namespaces
@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_however_it_ends(tmp_path, number):
    """The namespaces go with the processes that hold them, and these with the verb."""
    argv = [*OWN_LOCK, sys.executable, "-m", "agent.cli", "compare-networks", "--report", str(tmp_path)]
    verb = psutil.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: count_hosts(verb) == 2, "both hosts are there")
        children = verb.children(recursive=True)
        verb.send_signal(number)
        verb.wait(20)  # also while it imports torch
        assert not psutil.wait_procs(children, timeout=120)[1]
    finally:
        if verb.is_running():
            verb.kill()
