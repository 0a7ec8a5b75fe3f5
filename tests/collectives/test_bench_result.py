"""What ranks wrote down becomes a result: who differs, who is short of what, and nothing that was not said."""

from collectives.bench.plan import BenchSpec
from collectives.bench.run import assemble
from collectives.bench.watch import Outcome

GIB = 1 << 30


def hello(**changes):
    rows = []
    for rank in range(4):
        row = {"rank": rank, "host": f"node-{rank // 2}", "versions": {"torch": "2.13.0", "nccl": "2.27.5"}}
        row |= {
            "environment": {"NCCL_IB_HCA": "mlx5_0"},
            "shm_free_bytes": GIB,
            "memlock_bytes": None,
            "rdma": ["mlx5_0"],
        }
        rows.append(row | {key: values[rank] for key, values in changes.items()})
    return {"event": "joined", "ranks": rows}


def measured(**changes):
    event = {"event": "measured", "op": "all_gather", "bytes": 4096, "ranks": [0, 1, 2, 3], "rounds": 2, "wrong": []}
    event |= {"iteration_seconds": [1e-3] * 10, "rank_median_seconds": [1e-3] * 4, "wait_seconds": [[1e-4] * 10] * 4}
    return event | changes


def result(*events, problems=(), backend="nccl"):
    outcome = Outcome(events=list(events), problems=list(problems))
    return assemble(BenchSpec(ranks_per_host=4), backend, outcome, 0.0, 1.0, None)


def test_ranks_that_are_alike_leave_no_problem():
    found = result(hello(), measured())
    assert found.complete and found.problems == ()
    assert found.hosts == ("node-0", "node-0", "node-1", "node-1")
    assert found.environment == {"NCCL_IB_HCA": "mlx5_0"}
    assert found.measurements[0].busbw_bytes_per_second == 4096 / 1e-3 * 3 / 4


def test_different_nccl_versions_are_named_by_rank_and_host():
    versions = [{"torch": "2.13.0", "nccl": v} for v in ("2.27.5", "2.27.5", "2.26.2", "2.26.2")]
    (problem,) = result(hello(versions=versions), measured()).problems
    assert problem.startswith(
        "different versions of nccl: 2.27.5 on rank 0 (node-0), rank 1 (node-0); 2.26.2 on rank 2"
    )


def test_a_small_shared_memory_is_told_of_its_host_alone():
    (problem,) = result(hello(shm_free_bytes=[GIB, GIB, 1000, 1000]), measured()).problems
    assert problem.startswith("node-1: /dev/shm has 1000 bytes free")


def test_a_memlock_limit_is_told_where_there_is_rdma():
    (problem,) = result(hello(memlock_bytes=[None, None, 65536, 65536]), measured()).problems
    assert problem.startswith("node-1: memlock is limited to 65536 bytes, and mlx5_0 cannot register more")
    assert result(hello(memlock_bytes=[65536] * 4, rdma=[[]] * 4), measured()).problems == ()
    assert result(hello(memlock_bytes=[65536] * 4), measured(), backend="gloo").problems == ()


def test_a_wrong_sum_that_nobody_owns_up_to_is_told_so():
    found = result(hello(), measured(wrong=[[0, -1], [1, -1]]))
    assert not found.complete and not found.measurements[0].verified
    assert found.problems == (
        "all_gather of 4096 bytes is not verified: the sum is wrong on rank 0, rank 1; each rank's own part is right",
    )


def test_data_that_was_never_compared_is_not_verified():
    assert not result(hello(), measured(rounds=0)).measurements[0].verified


def test_ranks_that_never_joined_leave_an_empty_partial_result():
    found = result(problems=["the ranks did not join within 5 s"])
    assert not found.complete and found.measurements == () and found.hosts == ()
