"""Slurm without Slurm: host lists, batch scripts that are written, and a user's own that is wrapped."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rigs.command import topoflight
from rigs.recorded import path_of, snapshot
from rigs.results import search_result
from rigs.tables import each_row, rows_of

from agent.jobs.search import slurm_hosts
from agent.jobs.slurm import job_files
from contracts.host_list import HostListError, compress_host_list, expand_host_list, slurm_name
from planner.slurm import wrap_script
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts
from topology.slurm_conf import (
    Placement,
    SlurmConfError,
    compare_gres,
    compare_topology,
    placement_of,
    topology_conf,
)

rows = rows_of(__file__)


def test_host_lists_are_written_and_read_as_slurm_does() -> None:
    """Each list reads back as its hosts; what is none is refused with the part that is wrong."""
    for text, hosts in rows("lists")().items():
        assert (compress_host_list(reversed(hosts)), list(expand_host_list(text))) == (text, hosts), text
    for text, found in rows("read")().items():
        assert expand_host_list(text) == tuple(found), text
    for text in rows("wrong")():
        with pytest.raises(HostListError, match=r"must be a number|is no host name|more than"):
            expand_host_list(text)
    names = ("gpu1.example.com", "gpu1", "10.0.0.1", "fd00::1")
    assert [slurm_name(name) for name in names] == ["gpu1", "gpu1", "10.0.0.1", "fd00::1"]


LAUNCH = ("launch", "--api", "slurm", "--machine", "p5.48xlarge", "--nodes", "2", "--dry-run", "-o", "yaml")


def test_a_batch_script_has_the_options_of_the_command(tmp_path: Path) -> None:
    """bash reads it; it contains the options, and each setting with its reason."""
    done = topoflight(
        *LAUNCH, "--output", tmp_path, "--exclude", "node[05-07],node9", "--time-limit", "2:00:00",
        "--partition", "gpu", "--sbatch", "account=physics", "--sbatch", "contiguous", "--require", "gpu.*",
        "--restarts", "5",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    wanted = (
        "#SBATCH --nodes=2", "#SBATCH --gres=gpu:8", "#SBATCH --exclude=node[9,05-07]", "#SBATCH --time=2:00:00",
        "#SBATCH --partition=gpu", "#SBATCH --account=physics", "#SBATCH --contiguous", "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120", "export NCCL_NET='AWS Libfabric'",
    )  # fmt: skip
    assert [line for line in wanted if line not in lines] == []
    assert lines[lines.index("export NCCL_NET='AWS Libfabric'") - 1].startswith("# EFA works only")
    assert "--require 'gpu.*'" in done.stdout and '"$restarts" -lt 5' in done.stdout and "ulimit -l" in done.stdout
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    hosts = tmp_path / "hosts"
    hosts.write_bytes(b"n1\xff\n")
    for word, line in (
        (",".join(f"a{number}-ib" for number in range(100)), "exclude=a[0-9,10-99]-ib"),
        (hosts, "is no host"),
    ):
        assert line in topoflight(*LAUNCH, "--exclude", word).output, line
    large = ("--model", "Llama-3.1-70B", "--method", "full", "--set", "dataset_name=synthetic:arithmetic")
    noted = topoflight(*LAUNCH, *large, "--set", "max_seq_length=128").stderr
    assert "note: max_seq_length is now max_length" in noted and "note: a checkpoint is 788.5 GiB" in noted, noted


@each_row(("words", "message"), rows("refused"))
def test_a_wrong_option_is_refused_by_name(words: list[str], message: str) -> None:
    done = topoflight(*LAUNCH, *words)
    assert done.exit_code == 2 and message in done.output, done.output


def test_wrap_adds_to_a_batch_script_and_moves_nothing(tmp_path: Path) -> None:
    """Settings that the script has stay; the added lines are together, before the statement that starts ranks."""
    path, script = tmp_path / "job.sbatch", rows("script")()
    path.write_text(script)
    done = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
    assert done.exit_code == 0, done.output
    made, old = path.read_text().splitlines(), script.splitlines()
    added = made[6 : len(made) - 3]
    assert made[:6] + made[-3:] == old and added[0].startswith("# Added by topoflight wrap")
    text = "\n".join(added)
    assert "export NCCL_DEBUG=" not in text and "export NCCL_NET='AWS Libfabric'" in text and "NCCL_DEBUG_FILE=" in text
    assert "preflight -q -o reason || exit" in text
    again = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
    assert again.exit_code == 0 and path.read_text().splitlines() == made and "wrapped before" in again.output
    path.write_text(script.replace("export", "#SBATCH --time=1\nexport"))
    late = topoflight("wrap", path, "--machine", "p5.48xlarge")
    assert "line 6: sbatch ignores this option" in late.output, late.output
    for shell in ("zsh", "ksh"):
        path.write_text(f"#!/usr/bin/env {shell}\nfiles=(*(.))\nsrun train\n")
        done = topoflight("wrap", path, "--machine", "p5.48xlarge")
        assert done.exit_code == 0 and f"for {shell}, whose syntax is not checked" in done.stderr, done.output
    long = {"longer than 65536 characters": f"#!/bin/bash\n#SBATCH --comment={'x' * 70_000}\nsrun x\n"}
    for message, wrong in (rows("bad")() | long).items():
        path.write_bytes(wrong.encode())
        done = topoflight("wrap", path, "--machine", "p5.48xlarge", "--apply")
        assert done.exit_code == 2 and message in done.output, (message, done.output)
        assert path.read_bytes() == wrong.encode()


SPLIT = "#!/bin/bash\nif true; then\n  echo one\nfi; srun train\n"
SHOWN = (
    "JobId=1239 ArrayJobId=1234 ArrayTaskId=5 JobName=a\n   WorkDir={folder}\n   StdOut={folder}/a.out\n"  # scontrol
)


def test_a_statement_is_not_split_and_the_logs_of_an_array_s_task_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines go before the whole `if`; NCCL's logs are in the folder of the task's own id."""
    made, _ = wrap_script(SPLIT, (), python="python", has_log=True)
    assert made.startswith("#!/bin/bash\n# Added by") and made.endswith(SPLIT.partition("\n")[2])
    scontrol, logs = tmp_path / "scontrol", (tmp_path / "a.out", tmp_path / "topoflight-1239" / "node01-7.log")
    scontrol.write_text(f"#!/bin/sh\ncat <<'END'\n{SHOWN.format(folder=tmp_path)}END\n")
    scontrol.chmod(0o755)
    logs[1].parent.mkdir()
    for log in logs:
        log.write_text("x\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert job_files("1234_5") == (None, logs)


def test_the_bad_nodes_of_a_search_are_named_as_slurm_does() -> None:
    hosts = [f"gpu-{number:02d}.example.com" for number in range(4)]
    assert slurm_hosts(search_result(hosts, bad=(1, 2))) == "gpu-[01-02]\n"
    assert slurm_hosts(search_result(hosts)) == ""


def rack(first: int, last: int, *leaves: str, clique: str = "", gpus: int = 8) -> list[Placement]:
    """Nodes that are wired alike."""
    numbers = range(first, last + 1)
    return [Placement(node=f"n{n:02d}", leaves=frozenset(leaves), clique=clique, gpus=gpus) for n in numbers]


RAILS = [*rack(1, 3, "leaf1", "leaf2"), *rack(4, 4, "leaf2"), *rack(5, 6, "leaf3", "leaf4"), *rack(7, 7)]
NVL = [*rack(1, 2, clique="a/1"), *rack(3, 4, clique="b/1")]
TREE = ["SwitchName=leaf1 Nodes=n[01-04]", "SwitchName=leaf3 Nodes=n[05-06]", "SwitchName=top Switches=leaf[1,3]"]
TOPOLOGIES = [  # topology.conf; words of each difference from RAILS and NVL
    ("\n".join(TREE) + "\nSwitchName=x Nodes=n07", [], []),
    ("SwitchName=s1 Nodes=n[01-05]\nSwitchName=s2 Nodes=n[06-07]", ["line 1: s1 holds", "switch leaf3: n05"], []),
    (
        "SwitchName=s1 Nodes=n[01-02] \\\n Level=1\nSwitchName=s2 Nodes=n[05-07]",
        ["n[03-04] in no line"],
        ["n[03-04] in no line"],
    ),
    ("BlockName=b1 Nodes=n[01-03]\nBlockName=b2 Nodes=n[04-07]", [], ["NVLink domain b/1: n03"]),
]


def test_topology_conf_is_written_and_compared() -> None:
    """Rails are one line; a node without LLDP is named; what is written has no difference from what was probed."""
    tree, blocks = topology_conf(RAILS), topology_conf(NVL, has_blocks=True)
    assert [line for line in tree.splitlines() if not line.startswith("#")] == TREE
    assert "Unknown place, add them yourself: n07" in tree
    assert [line.partition(" #")[0] for line in blocks.splitlines() if not line.startswith("#")] == [
        "BlockName=block1 Nodes=n[01-02]", "BlockName=block2 Nodes=n[03-04]", "BlockSizes=2",
    ]  # fmt: skip
    assert compare_topology(blocks, NVL) == [] and compare_topology(tree, RAILS[:-1]) == []
    for text, of_rails, of_domains in TOPOLOGIES:
        for placements, words in ((RAILS, of_rails), (NVL, of_domains)):
            found = " ".join(compare_topology(text, placements))
            assert all(word in found for word in words) and bool(found) == bool(words), (text, found)
    with pytest.raises(SlurmConfError, match=r"topology.conf, line 2: 'Nodes n1' must consist"):
        compare_topology("# x\nNodes n1", RAILS)
    with pytest.raises(SlurmConfError, match=r"topology.conf, line 4: 'Nodes n1' must consist"):
        compare_topology("SwitchName=a \\\n Level=0 \\\n Nodes=n01\nNodes n1", RAILS)
    with pytest.raises(SlurmConfError, match=r"topology.conf, line 1: 'n\[' is no host name"):
        compare_topology("SwitchName=a Nodes=n[", RAILS)


def test_gres_conf_is_compared_with_the_gpus_that_were_found() -> None:
    for text, differences in rows("gres")().items():
        assert len(compare_gres(text, RAILS)) == differences, text
    assert compare_gres("NodeName=n01 Name=gpu Count=7", RAILS) == [
        "gres.conf, line 1: 7 GPUs on n01, and 8 were found"
    ]


def test_a_node_is_placed_by_the_switches_of_its_rdma_ports(tmp_path: Path) -> None:
    """Not by that of its management port; the command writes and compares the same."""
    recorded = snapshot()
    facts, rdma = recorded.facts(InterfacesFacts), recorded.facts(RdmaFacts)
    assert facts is not None and rdma is not None
    ports = {port.netdev for device in rdma.devices for port in device.ports}
    links = tuple(replace(link, neighbour="leaf7 Ethernet1/5" if link.name in ports else "mgmt 3")
                  for link in facts.interfaces)  # fmt: skip
    placed = placement_of(recorded.with_facts(InterfacesFacts, lambda facts: replace(facts, interfaces=links)))
    assert placed.leaves == ({"leaf7"} if ports & {link.name for link in links} else {"mgmt"}) and placed.gpus == 8
    done = topoflight("topo", "--host", path_of(), "-o", "slurm")
    assert done.exit_code == 0 and placed.node in done.stdout
    (tmp_path / "gres.conf").write_text("Name=gpu Count=7\n")
    differs = topoflight("topo", "--host", path_of(), "--slurm-conf", tmp_path)
    assert differs.exit_code == 3 and "7 GPUs on" in differs.stdout
    (tmp_path / "gres.conf").write_bytes("# für alle\nName=gpu Count=8\n".encode("latin-1"))
    assert topoflight("topo", "--host", path_of(), "--slurm-conf", tmp_path).exit_code == 0
