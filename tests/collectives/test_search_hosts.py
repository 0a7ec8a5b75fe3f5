"""Real ranks on six hosts: a host that is slow, stuck, dead or missing is named, and no other."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.netns import RANKS_ON_HOSTS, hosts
from rigs.tables import ROOT, each_row
from rigs.waiting import eventually

pytestmark = [pytest.mark.ranks, pytest.mark.netns, pytest.mark.timeout(1800), *RANKS_ON_HOSTS]

HOSTS, RATE, SLOW = 6, "100mbit", "15mbit"


def search(tmp_path, rate, prepare, disturb, absent, count=HOSTS, more=(), after=("outcomes", 2)):
    """Search the hosts; `prepare` gets the rig first, `disturb` once the journal has these words so many times.

    Gives result, code and stderr.
    """
    journal, processes = tmp_path / "journal.jsonl", {}
    with hosts(count, default_rate=rate) as rig:
        if prepare:
            prepare(rig)
        for host in set(range(count)) - set(absent):
            argv = [sys.executable, "-m", "agent.cli", "search", f"--nodes={count}", f"--node-rank={host}", "--ranks=1",
                    f"--rendezvous={rig.address(0)}:29571", f"--host-name=host-{host}", "--size=2M", "--silence=10",
                    f"--wait={30 if absent else 150}", "-o", "json", "--no-advice", f"--journal={journal}",
                    *more]  # fmt: skip
            own = {"TOPOFLIGHT_STATE": str(tmp_path / f"state-{host}"), "GLOO_SOCKET_IFNAME": "eth0"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
            processes[host] = rig.popen(host, argv, own, **pipes)
        try:
            if disturb:
                word, times = after
                eventually(lambda: count_in(journal, word) >= times, f"{after} in the journal", 300)
                disturb(rig)
            out, said = processes[0].communicate(timeout=600)
        finally:
            for process in processes.values():
                process.kill()
    assert out, said
    return json.loads(out), processes[0].returncode, said


def count_in(journal, word):
    """How often the journal has a word; 0 while there is no journal."""
    return journal.read_text().count(word) if journal.exists() else 0


def processes_of(rig, host, module="search.rank"):
    """Give the folders in /proc of the processes of a module of the search in the network of this host."""
    network = os.stat(f"/proc/{rig.pids[host]}/ns/net").st_ino  # noqa: PTH116
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here = os.stat(path / "ns/net").st_ino == network  # noqa: PTH116
            words = path.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if here and f"collectives.{module}" in words:
            yield path


def has_variable(rig, host, setting):
    """Whether a process of the search on this host has this variable; a process may end meanwhile."""
    for path in processes_of(rig, host):
        with contextlib.suppress(OSError):
            if setting in path.joinpath("environ").read_bytes().split(b"\0"):
                return True
    return False


def signal_processes(number, rig, host, module="search.rank"):
    """Send a signal to these processes."""
    for path in processes_of(rig, host, module):
        os.kill(int(path.name), number)


def shape_link(rig, slow_host, source, target):
    """Shape all hosts alike, `slow_host` less fast, and slow what `source` sends to `target` and nothing else."""
    for host in range(len(rig.pids)):
        rig.run(host, ["tc", "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1"])
        for number, rate in (("1:1", SLOW if host == slow_host else RATE), ("1:3", SLOW)):
            shaped = ["htb", "rate", rate, "burst", "256kb"]
            rig.run(host, ["tc", "class", "add", "dev", "eth0", "parent", "1:", "classid", number, *shaped])
    match = ["u32", "match", "ip", "dst", f"{rig.address(target)}/32", "flowid", "1:3"]
    rig.run(source, ["tc", "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *match])


ROWS = {
    # Rate, before, after round 2, absent hosts, bad nodes, bad links, exit codes.
    "healthy": (RATE, None, None, (), {}, [], (0, 5)),
    "uniformly slow": ("30mbit", None, None, (), {}, [], (0, 5)),
    "slow host": (RATE, lambda rig: rig.shape(2, "eth0", SLOW), None, (), {"host-2": "slow"}, [], (3,)),
    "slow link": (RATE, lambda rig: shape_link(rig, None, 4, 5), None, (), {}, [(4, 5)], (3,)),
    "slow host and slow link": (RATE, lambda rig: shape_link(rig, 2, 4, 5), None, (), {"host-2": "slow"}, [(4, 5)],
                                (3,)),
    "stopped": (RATE, None, lambda rig: signal_processes(signal.SIGSTOP, rig, 3), (), {"host-3": "lost"}, [], (3,)),
    "killed": (RATE, None, lambda rig: signal_processes(signal.SIGKILL, rig, 3), (), {"host-3": "lost"}, [], (3,)),
    "cut off": (RATE, None, lambda rig: rig.cut(3, "eth0"), (), {"host-3": "lost"}, [], (3,)),
    "never starts": (RATE, None, None, (3,), {"node 3": "lost"}, [], (3,)),
}  # fmt: skip


# a host that never starts: slurm/test_slurm_cluster.py; the others nightly, below
QUICK = ("healthy", "slow host", "killed", "cut off")


@each_row("name", QUICK)
def test_who_is_at_fault_is_named_and_nobody_else(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@each_row("name", ROWS)
def test_each_kind_of_fault_is_named_among_eight_hosts(name, tmp_path):
    """Ten times over these are the counts of docs/measurements/search.md."""
    check(name, tmp_path, 8)


@pytest.mark.nightly
def test_torchrun_starts_two_ranks_on_each_of_three_hosts(tmp_path):
    python, processes = str(Path(sys.prefix) / "bin/python"), []  # not the interpreter of `forked_ranks`
    with hosts(3, default_rate=RATE) as rig:
        for host in range(3):
            launch = ["-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={host}", "--nproc-per-node=2",
                      f"--master-addr={rig.address(0)}", "--master-port=29573", "-m", "agent.cli"]  # fmt: skip
            argv = ["search", f"--host-name=host-{host}", "--size=1M", "--silence=20", "-o", "json", "--no-advice"]
            own = {"TOPOFLIGHT_STATE": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth0"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
            processes.append(rig.popen(host, [python, *launch, *argv], own, **pipes))
        try:
            out, said = processes[0].communicate(timeout=600)
        finally:
            for process in processes:
                process.kill()
    assert out, said
    result = json.loads(out)
    assert result["hosts"] == ["host-0", "host-1", "host-2"]
    assert result["tests"] and all(verdict["state"] != "bad" for verdict in result["verdicts"]), (result, said)


def check(name, tmp_path, count=HOSTS):
    """Search with the faults of a row, and compare."""
    rate, prepare, disturb, absent, bad, links, codes = ROWS[name]
    result, code, said = search(tmp_path, rate, prepare, disturb, absent, count)
    found = {host: verdict["reason"] for host, verdict in zip(result["hosts"], result["verdicts"], strict=True)
             if verdict["state"] == "bad"}  # fmt: skip
    assert (found, [(link["source"], link["target"]) for link in result["links"]]) == (bad, links), (result, said)
    assert code in codes, said
    assert result["summary"][0].startswith("Bad nodes: " + ", ".join(bad) if bad else "No bad node was found")


def test_another_coordinator_goes_on_where_one_was_killed(tmp_path):
    def kill(rig):
        signal_processes(signal.SIGKILL, rig, 0, "search.coordinator")

    result, code, said = search(tmp_path, RATE, lambda rig: rig.shape(2, "eth0", SLOW), kill, ())
    assert "A new one continues from its journal" in said
    assert [v["node"] for v in result["verdicts"] if v["state"] == "bad"] == [2] and code == 3, (result, said)
    alone = [row for row in map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
             if "outcomes" in row and len(row["tests"]) == HOSTS]  # fmt: skip
    assert len(alone) == 1, "what the journal holds is not measured again"


def test_a_second_pass_judges_the_network_of_nodes_that_share_nvlink(tmp_path):
    """Gloo uses no NVLink: this shows the pass, its variable and its finding, and not what NCCL makes of it."""
    nodes = [{"metadata": {"name": f"host-{n}", "labels": {"nvidia.com/gpu.clique": "rack-1"}}} for n in range(4)]
    (tmp_path / "nodes.json").write_text(json.dumps({"items": nodes}))

    def slow(rig):
        seen = set()  # one host may have ended its second pass before another begins it

        def have_begun(count):
            seen.update(host for host in range(4) if has_variable(rig, host, b"NCCL_MNNVL_ENABLE=0"))
            return len(seen) >= count

        eventually(lambda: have_begun(1), "a host starts its second pass", 300)
        rig.shape(2, "eth0", SLOW)  # before the first round: the ranks still import torch
        eventually(lambda: have_begun(4), "all hosts start their second pass")

    result, code, said = search(tmp_path, RATE, None, slow, (), 4, [f"--topology={tmp_path / 'nodes.json'}"])
    assert [(v["node"], v["turn"]) for v in result["verdicts"] if v["state"] == "bad"] == [(2, 1)], (result, said)
    assert (code, result["passes"]) == (3, 2) and "second of 2 passes" in result["summary"][1]
    # on a busy machine, the findings may have nodes that could not be judged
    found = next(one for one in result["findings"] if one["node"] == "host-2")
    assert found["evidence"][0].startswith("pass 2 of 2: all nodes exchanged data over the network")
