"""NCCL's channels and gloo's connections against the plan: what stops the job, what is only told, and the evidence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.command import TORCHRUN, interpreter, python
from rigs.tables import ROOT, data_of, each_row

from finetune import channels
from finetune.channels import gloo_transports, planned_channels, read_log, record

ROWS = data_of(__file__, "jobs/rows.yaml")
INFO = "node-a:4711:4720 [0] NCCL INFO "


def log(*messages, prefix=INFO):
    """A log as one process writes it: a WARN begins with an empty line."""
    return "".join(f"{prefix}{message}\n" for message in messages)


def start(version):
    """What each release prints before the channels."""
    ranks = "comm 0x55 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0"
    return f"NCCL version {version}", "Bootstrap : Using eth0:10.0.0.1<0>", ranks


# version, what it says of its network, a channel that is sent and one that is received: {net} and {tag} are filled in
FORMS = ROWS["forms"]
LOCAL = ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", "Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM")


def written(folder, version, net, gdr=True, selected=None):
    """The log of one rank on one of two hosts."""
    tag = "/GDRDMA" if gdr else ""
    lines = [line.format(net=net, tag=tag, pci="(PCI)" if gdr else "") for line in FORMS[version]]
    path = folder / "nccl.node-a.4711.log"
    path.write_text(log(*start(f"{version}.5+cuda12.4"), f"Using network {selected or net}", *LOCAL, *lines))
    return path


@each_row("version", FORMS)
@each_row(("network", "gdr", "transport", "wrong"), ROWS["channels"])
def test_channels_are_held_against_the_plan(tmp_path, version, network, gdr, transport, wrong):
    """A difference names what asked for it, and file and line as an editor takes them; that line says so."""
    path = written(tmp_path, version, network, gdr=gdr)
    plan = planned_channels(transport)
    seen = read_log(path, plan, hosts=2)
    if wrong is None:
        assert seen.wrong == ()
        expected = "as planned" if plan.rdma or plan.gdrdma else "nothing planned"
        assert record([seen, seen], plan, hosts=2).verdict == expected
        return
    (text,) = seen.wrong
    assert text.startswith(f"{wrong} ({path}:")
    line = path.read_text().splitlines()[int(text.partition(f"{path}:")[2].partition(":")[0]) - 1]
    assert f"via NET/{network}/0" in line and line in text
    assert "receiving" not in wrong or text.endswith("[receive] via NET/IB/0)")


def test_sending_without_gpudirect_is_what_older_gpus_do(tmp_path):
    """Before Ampere NCCL does not let the NIC read GPU memory by default."""
    path = tmp_path / "log"
    send, receive = (form.format(net="IB", tag=tag) for form, tag in zip(FORMS["2.14"], ("", "/GDRDMA"), strict=True))
    path.write_text(log(send, receive))
    assert read_log(path, planned_channels({"network": "IB", "gdrdma": "nvidia-peermem"}), hosts=2).wrong == ()


@each_row("text", [None, "", "epoch 1\n", log(*start("2.21.5"), "Using network Socket"), log(*LOCAL)])
def test_what_the_log_does_not_show_is_unknown_and_stops_nothing(tmp_path, text):
    """No file, no line, no channel, or none between the hosts; a network that was selected has carried nothing yet."""
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    plan = planned_channels({"network": "IB", "gdrdma": "nvidia-peermem"})
    seen = read_log(path, plan, hosts=2)
    assert seen.wrong == ()
    assert record([seen, seen], plan, hosts=2).verdict == "unknown"
    assert bool(seen.unknown) is (text != log(*LOCAL))


def test_a_plugin_that_nobody_knows_and_a_rank_without_a_log_are_unknown(tmp_path):
    """Neither is a pass."""
    plan = planned_channels({"network": "IB"})
    strange = read_log(written(tmp_path, "2.21", "Strange"), plan, hosts=2)
    assert strange.wrong == ()
    assert record([strange], plan, hosts=2).verdict == "unknown"
    well = read_log(written(tmp_path, "2.21", "IB"), plan, hosts=2)
    told = record([well, read_log(None, plan, hosts=2)], plan, hosts=2)
    assert told.verdict == "unknown"
    assert told.unknown == ["rank 1: NCCL_DEBUG_FILE is not set"]


def test_nothing_between_hosts_is_compared_on_one_host(tmp_path):
    """Where all ranks share a host there is no channel that the plan speaks of."""
    plan = planned_channels({"network": "IB"})
    seen = read_log(written(tmp_path, "2.21", "Socket", gdr=False), plan, hosts=1)
    assert seen.wrong == ()
    assert record([seen], plan, hosts=1).verdict == "one host"
    assert record([seen], planned_channels({}), hosts=2).verdict == "nothing planned"


def test_channels_are_counted_by_transport_over_all_ranks(tmp_path):
    """The names are those of ever; the numbers are the ranks' together."""
    plan = planned_channels({})
    path = tmp_path / "log"
    between = (line.format(net="IB", tag="/GDRDMA") for line in FORMS["2.21"])
    path.write_text(log(*between, *LOCAL, *ROWS["more_channels"]))
    seen = read_log(path, plan, hosts=2)
    told = record([seen, seen], plan, hosts=2)
    assert told.channels == {
        "COLLNET/SHARP/0/GDRDMA": 2, "NET/IB/0/GDRDMA": 4, "NET/IB/1": 2, "P2P/CUMEM": 4, "SHM": 2,
    }  # fmt: skip
    assert told.log == str(path)


def test_a_log_without_end_is_read_to_a_bound(tmp_path):
    """What is after the bound is not read."""
    path = tmp_path / "log"
    filler = log("AllReduce: 1024 Bytes") * 1000
    with path.open("w") as file:
        file.write(log(FORMS["2.21"][0].format(net="IB", tag="/GDRDMA", pci="")))
        while file.tell() < channels.MAX_LOG_BYTES:
            file.write(filler)
        file.write(log(FORMS["2.21"][1].format(net="Socket", tag="", pci="")))
    seen = read_log(path, planned_channels({"network": "IB"}), hosts=2)
    assert seen.channels == {"NET/IB/0/GDRDMA": 1}
    assert seen.wrong == ()


@each_row(("own", "added"), ROWS["own_logs"])
def test_the_log_is_set_up_where_the_user_has_not(tmp_path, monkeypatch, own, added):
    """One file per process; a user's file and a quieter level stay as they are."""
    monkeypatch.setattr(os, "environ", dict(own))
    channels.start_log(tmp_path / "nccl")
    made = {name: value for name, value in os.environ.items() if name not in own}
    assert sorted(made) == added and own.items() <= os.environ.items()
    if not own:
        assert made["NCCL_DEBUG"] == "INFO" and {"INIT", "NET", "GRAPH"} <= set(made["NCCL_DEBUG_SUBSYS"].split(","))
        assert made["NCCL_DEBUG_FILE"] == f"{tmp_path}/nccl/nccl.%h.%p.log" and (tmp_path / "nccl").is_dir()


@each_row(("named", "path"), ROWS["log_names"])
def test_the_log_s_name_is_spelled_as_nccl_does(named, path):
    """NCCL src/debug.cc: the host up to its first dot, %% for a percent sign, what it does not know unchanged."""
    found = channels.log_path(named, "gpu-1.example.org", 42)
    assert found == (Path(path) if path else None)


def test_the_reader_of_the_log_brings_no_torch():
    """docs/decisions/0007."""
    python("import sys; import finetune.channels; sys.exit('torch' in sys.modules)")


RANK = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from contracts import plain
from contracts.job_config import JobPlan
from contracts.run_record import EffectiveLayout, RunLayout, RunRecord
from finetune import verify
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_DEBUG_FILE": f"{sys.argv[1]}/rank{rank}.log"}
layout = RunLayout(effective=EffectiveLayout(backend="nccl"))
record = RunRecord(plan=JobPlan(transport={"network": "IB"}), layout=layout)
wrong = verify.record_transports(record)
Path(f"{sys.argv[1]}/told{rank}").write_text(json.dumps([plain.write(record.nccl), wrong]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_one_rank_over_sockets_stops_all_ranks_alike(tmp_path):
    """Each reads its own log, and all come to the same answer; the gathering is gloo's, as under CUDA."""
    for rank, network in enumerate(("IB", "Socket")):
        written(tmp_path, "2.27", network, gdr=False).rename(tmp_path / f"rank{rank}.log")
    (tmp_path / "rank.py").write_text(RANK)
    done = interpreter(*TORCHRUN, "--nproc_per_node=2", tmp_path / "rank.py", tmp_path, seconds=500)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(2))
    assert first[1] == second[1]
    (text,) = first[1]
    assert text.startswith(f"rank 1: the plan's network IB: 2 channels over NET/Socket ({tmp_path}/rank1.log:")
    assert first[0]["verdict"] == "mismatch"
    assert first[0]["hosts"] == 2
    assert first[0]["channels"] == {"NET/IB/0": 2, "NET/Socket/0": 2, "P2P/CUMEM": 4}


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.skipif(not any(Path("/dev").glob("nvidia[0-9]*")), reason="no NVIDIA GPU on this host")
@pytest.mark.parametrize(("network", "code"), [("", 0), ("IB", 76)])
def test_two_ranks_that_nccl_takes_for_two_hosts_are_held_to_the_plan(tmp_path, network, code):
    """NCCL_IB_DISABLE outside the plan sends them over sockets: stopped after one step where the plan says IB."""
    layout = {"world_size": 2, "dp_replicate": 2, "sharding": "ddp", "micro_batch": 4, "precision": "bf16"}
    plan = {"layout": layout, "transport": {"network": network} if network else {}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "rank.sh").write_text(
        "exec env CUDA_VISIBLE_DEVICES=0 NCCL_HOSTID=host$LOCAL_RANK LOCAL_RANK=0 "  # one GPU serves both
        f'{sys.executable} -m finetune.train --plan "{tmp_path}/plan.json" '
        f'"output_dir={tmp_path}/out" model_name_or_path=random:micro-llama max_steps=3 profile_steps=0\n'
    )
    interpreter(*TORCHRUN, "--nproc_per_node=2", "--no-python", "sh", tmp_path / "rank.sh", seconds=280,
                without=("NCCL_",), NCCL_IB_DISABLE="1")  # fmt: skip
    record = json.loads((tmp_path / "out/run.json").read_text())
    assert record["exit_code"] == code, record["reason"]
    assert record["nccl"]["hosts"] == 2
    assert any(name.startswith("NET/Socket/") for name in record["transports"])
    assert Path(record["nccl"]["log"]).is_file()
    if code:
        assert record["steps_done"] == 1
        assert "the plan's network IB: " in record["reason"] and "via NET/Socket/" in record["reason"]


@each_row(("first", "second", "interfaces", "told"), ROWS["connections"])
def test_connections_between_ranks_are_told_with_their_interface(first, second, interfaces, told):
    """Those of which two ranks hold the two ends."""
    ranks = [{tuple(map(tuple, ends)): interfaces[ends[0][0]] for ends in seen}
             for seen in (first, second) if seen is not None]  # fmt: skip
    assert gloo_transports(ranks) == told


GLOO_RANK = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from finetune import channels, verify
rank, number = int(os.environ["RANK"]), Path(sys.argv[1])
while rank and not number.exists():  # rank 0 holds the store, at a port that is free as it is taken
    time.sleep(0.05)
port = int(number.read_text()) if rank else 0
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(minutes=5), wait_for_workers=False)
if rank == 0:
    number.with_suffix(".draft").write_text(str(store.port))
    number.with_suffix(".draft").replace(number)
os.environ["MASTER_PORT"] = str(store.port)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
seen = verify._gather(0) and verify._gather(channels.read_gloo_connections())
if dist.get_rank() == 0:
    print(json.dumps(channels.gloo_transports(seen)))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.ranks
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
def test_the_connections_of_real_ranks_are_found(tmp_path):
    """Two ranks over lo without torchrun, where rank 0 holds the store itself."""
    (tmp_path / "rank.py").write_text(GLOO_RANK)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env.pop("MASTER_PORT", None)
    argv = [sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "port")]
    started = [subprocess.Popen(argv, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE) for r in range(2)]
    said = [one.communicate(timeout=500)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0]
    assert json.loads(said[0]) == ["gloo: TCP over lo (127.0.0.1)"]
