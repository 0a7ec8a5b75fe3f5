"""plan.json says which network NCCL is to take between hosts, as far as the hosts were seen to have one."""

from rigs.recorded import path_of, snapshot
from rigs.tables import each_row

from agent.advice.advise import answer
from agent.advice.job_settings import gdrdma, job_plan
from agent.advice.request import Request
from contracts.job_plan import dumps, read
from finetune import channels
from topology.build import build

DATA = ["dataset_name=openai/gsm8k"]


@each_row(
    ("machine", "network", "evidence", "gdrdma"),
    [
        ("hgx-h100-8xH100-8hca", "IB", "mlx5_", "each GPU is PIX from its NIC"),
        ("r760xa-2xA40-bf3", "IB", "mlx5_1", None),  # one GPU reaches the NIC through the other socket
        ("sick-h100-no-peermem", "IB", "mlx5_", None),
        ("azure-nd-a100-flat-vm", "IB", "", None),  # a VM without a PCIe tree: how near they are is not known
        ("aws-p4d-8xA100-4efa", "AWS Libfabric", "4 EFA devices", None),
        ("sick-h100-rdma-off", None, "", None),
        ("cpu-only-vm", None, "", None),
    ],
)
def test_the_job_reads_from_the_plan_what_the_hosts_have(tmp_path, machine, network, evidence, gdrdma):
    """With the evidence beside it; a host without RDMA, or without a GPU, promises nothing."""
    found = [snapshot(machine)]
    advice = answer(Request.of(hosts=(path_of(machine),), model="Llama-3.1-8B", nodes=2), found)
    written = job_plan(advice, overrides=DATA, found=found)
    (tmp_path / "plan.json").write_text(dumps(written))
    plan = read(tmp_path / "plan.json")
    assert plan == written
    assert plan.transport.get("network") == network
    assert evidence in plan.transport.get("evidence", "")
    assert bool(plan.transport) is (network is not None)
    refused = channels.planned_channels(plan.environment, plan.transport).refuses("Socket")
    assert refused is (network is not None)
    assert (gdrdma is None) is (plan.transport.get("gdrdma") is None)
    assert gdrdma is None or gdrdma in plan.transport["gdrdma"]
    assert bool(channels.planned_channels(plan.environment, plan.transport).gdrdma) is bool(
        plan.transport.get("gdrdma")
    )


def test_a_machine_that_nobody_looked_at_promises_no_gpudirect():
    """A catalogue's machine: whether its modules are loaded is not known."""
    advice = answer(Request.of(machine="p5.48xlarge", model="Llama-3.1-8B", nodes=2), ())
    assert "gdrdma" not in job_plan(advice, overrides=DATA).transport


def test_a_nearest_nic_that_is_left_out_promises_no_gpudirect():
    """By NCCL_IB_HCA, for storage say: the next one may be too far."""
    found = [snapshot()]
    all_of_them = gdrdma(found)
    names = [nic for near in build(found[0]).nearest_nic for nic in near.nics]
    assert all_of_them
    assert gdrdma(found, "=" + ",".join(f"{name}:1" for name in names)) == all_of_them
    assert gdrdma(found, "=" + ",".join(names[1:])) == ""
    assert gdrdma(found, f"^{names[0]}") == ""
