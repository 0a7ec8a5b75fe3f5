"""The recommendation: one answer on a CPU host, on catalogue machines, and honest about what it does not know."""

from __future__ import annotations

import pytest

from planner.forecast import machines
from planner.forecast.models import model_named
from planner.forecast.specs import TrainSpec
from planner.recommend import recommend
from topology.graph import ClusterTopology, NodeTopology


def cpu_cluster(cpus: int = 2) -> ClusterTopology:
    """A node without GPUs."""
    node = NodeTopology(hostname="cpu", gpus=(), nics=(), pairs=(), cpu_count=cpus)
    return ClusterTopology(nodes=(node,))


def test_cpu_host_gets_two_gloo_ranks_and_is_told_what_is_assumed() -> None:
    """Two ranks without a GPU: a layout that the fine-tune runs, with a wide interval."""
    train = TrainSpec(global_batch=8, sequence_length=128)
    answer = recommend(cpu_cluster(), (), model_named("tiny"), train, ranks_per_node=2)
    assert answer.backend == "gloo"
    assert answer.chosen is not None
    assert answer.chosen.layout.world_size == 2
    assert {answer.chosen.layout.family, answer.runners_up[0].layout.family} == {"DDP", "FSDP"}
    assert answer.chosen.layout.global_batch == 8
    seconds = answer.chosen.forecast.step_seconds
    assert seconds.low < seconds.mid < seconds.high
    assert seconds.high / seconds.low > 3  # nobody measured this CPU
    assert any("assumed" in line for line in answer.chosen.forecast.inputs)
    assert any("no GPU" in line for line in answer.unknowns)


@pytest.mark.parametrize(("machine", "nodes"), [("p5.48xlarge", 4), ("2xa40-roce", 2), ("4xl40s", 1)])
def test_catalogue_machines_get_a_layout_and_every_rejection_a_reason(machine: str, nodes: int) -> None:
    """What-if answers name rule and reason for all that was turned down."""
    answer = recommend(machines.cluster(machine, nodes), (), model_named("Llama-3.1-8B"), TrainSpec(global_batch=128))
    assert answer.chosen is not None
    assert answer.chosen.forecast.memory_bytes.mid < (answer.chosen.forecast.capacity_bytes or 0)
    assert answer.rejected
    assert all(row.rule and row.reason for row in answer.rejected)


def test_tensor_parallelism_stays_inside_the_island() -> None:
    """No answer runs TP over the network, and the reason names the link."""
    train = TrainSpec(method="full", sequence_length=8192, global_batch=256, engine="megatron")
    answer = recommend(machines.cluster("p5.48xlarge", 4), (), model_named("Llama-3.1-70B"), train)
    assert all(r.layout.tp <= 8 for r in (answer.chosen, *answer.runners_up) if r is not None)
    refused = next(row for row in answer.rejected if row.what == "TP=16")
    assert refused.rule == "tp-inside-island"
    assert "EFA" in refused.reason


def test_nothing_fits_is_said_with_the_nearest_miss() -> None:
    """A 405B full fine-tune on one 8-GPU node has no layout; each family says by how much it misses."""
    train = TrainSpec(method="full", global_batch=8, sequence_length=4096)
    answer = recommend(machines.cluster("dgx-h100"), (), model_named("Llama-3.1-405B"), train)
    assert answer.chosen is None  # 6.5 TB of states: not on the host either
    assert any(row.rule == "memory-fits" and "GiB over" in row.reason for row in answer.rejected)


def test_unknown_engine_and_precision_are_the_users_mistakes() -> None:
    """Errors name the setting, the value and what is allowed."""
    cluster = machines.cluster("dgx-h100")
    with pytest.raises(ValueError, match=r"engine=.keras.*topoflight"):
        recommend(cluster, (), model_named("GPT-2"), TrainSpec(engine="keras"))
    with pytest.raises(ValueError, match="precision='int3'"):
        recommend(cluster, (), model_named("GPT-2"), TrainSpec(precision="int3"))
    with pytest.raises(machines.MachineError, match="p5"):
        machines.cluster("p5.48xlrge")
