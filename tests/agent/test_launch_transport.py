"""plan.json says which network NCCL is to take between hosts, as far as the hosts were seen to have one."""

import json
from pathlib import Path

import pytest

from agent.advise import Request, answer
from agent.hosts import snapshots
from agent.launch import plan_document
from finetune import channels
from finetune.plan import read_plan

MACHINES = Path(__file__).parents[1] / "machines"


@pytest.mark.parametrize(
    ("machine", "network", "evidence"),
    [
        ("hgx-h100-8xH100-8hca", "IB", "mlx5_"),
        ("r760xa-2xA40-bf3", "IB", "mlx5_1"),
        ("aws-p4d-8xA100-4efa", "AWS Libfabric", "4 EFA devices"),
        ("sick-h100-rdma-off", None, ""),
        ("cpu-only-vm", None, ""),
    ],
)
def test_the_job_reads_from_the_plan_what_the_hosts_have(tmp_path, machine, network, evidence):
    """With the evidence beside it; a host without RDMA, or without a GPU, promises nothing."""
    path = MACHINES / f"{machine}.json"
    advice = answer(Request(hosts=(path,), model="Llama-3.1-8B", nodes=2), snapshots([path]))
    document = plan_document(advice)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    plan = read_plan(tmp_path / "plan.json")
    assert plan.transport.get("network") == network
    assert evidence in plan.transport.get("evidence", "")
    assert bool(plan.transport) is (network is not None)
    refused = channels.asked(plan.environment, plan.transport).refuses("Socket")
    assert refused is (network is not None)
