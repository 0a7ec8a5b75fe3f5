"""The readers of what jobs leave: PyTorch's flight recorder and watchdog, NCCL's RAS."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from rigs.tables import each_row

from collectives.traces import calls, ras, watchdog

HERE = Path(__file__).parent


def entry(number: int, **members: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": number * 10**9,
        "input_sizes": [[8, 2]], "input_dtypes": ["Float"], "output_sizes": [[8, 2]], "output_dtypes": ["Float"],
        "state": "completed", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "retired": True, "timeout_ms": 600000, "is_p2p": False,
        "frames": [{"name": "step", "filename": "/job/train.py", "line": 31}], **members,
    }  # fmt: skip


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": list(entries)}


FORMS = {
    "pickle 2": lambda data: pickle.dumps(data, protocol=2),
    "pickle 4": lambda data: pickle.dumps(data, protocol=4),
    "json": lambda data: json.dumps(data).encode(),
}


@each_row("form", FORMS)
def test_a_dump_reads_alike_in_each_form(form: str) -> None:
    raw = FORMS[form](dump(entry(1), entry(2, state="started", retired=False, profiling_name="nccl:broadcast")))
    found = calls.read(raw, rank=1)
    assert [(c.op, c.number, c.done) for c in found.calls] == [("all_reduce", 1, True), ("broadcast", 2, False)]
    assert found.groups == {"0": (0, 1, 2)}
    assert found.enqueued == {"0": 2}
    assert found.calls[0].words == "all_reduce of [8, 2] Float"
    assert found.calls[0].frames == ("train.py:31 step",)
    assert found.calls[1].created == 2.0


def only(*entries: dict[str, Any], **members: Any) -> calls.RankTrace:
    """What is read of a dump of rank 0."""
    return calls.read(json.dumps({**dump(*entries), **members}).encode(), rank=0)


def test_what_an_entry_says_of_its_call() -> None:
    """gloo retires what is over, NCCL what has timed out; a send names its peer; the ring's lost calls were made."""
    assert only(entry(1, state="scheduled", profiling_name="gloo:barrier")).calls[0].done
    assert not only(entry(1, state="started")).calls[0].done
    assert only(entry(1, is_p2p=True, p2p_seq_id=4, profiling_name="nccl:send 0->2")).calls[0].peer == 2
    assert only(entry(1), pg_status={"0": {"last_enqueued_collective": 90}}).enqueued == {"0": 90}


class Runs:
    """Touches a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/was-run"),))


@each_row("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_calls_something_is_refused_and_runs_nothing(protocol: int) -> None:
    with pytest.raises(calls.TraceError, match=r"names a class|no dump|plain values"):
        calls.read(pickle.dumps({"version": "2.4", "entries": [Runs()]}, protocol=protocol), rank=0)
    assert not Path("/tmp/was-run").exists()


@each_row(
    "raw",
    [b"", b"\x80\x02", b"\x80\x02}", b"]r\xff\xff\xff\xff", b"X\xff\xff\xff\xffx", b"(" * 1000, b"\x8b\xff\xff\xff\x7f",
     b"}]a.", b"\x80\x02]q\x00h\x00a.", b"e.", b"u."],
)  # fmt: skip
def test_torn_and_hostile_pickles_end_in_the_readers_own_error(raw: bytes) -> None:
    with pytest.raises(calls.TraceError):
        calls.read(raw, rank=0)


def test_plain_values_are_what_python_reads() -> None:
    value = {"a": [1, -1, 70000, 2**40, 1.5, None, True, False, "ü", (), (1,), (1, 2, 3, 4)], "b": {"c": []}}
    for protocol in (2, 3, 4, 5):
        assert calls.unpickle(pickle.dumps(value, protocol=protocol)) == value


# NCCL ----------------------------------------------------------------------------------------------------------------

TEXT = (HERE / "ras_status.txt").read_text()


def test_ras_lists_who_is_ahead_and_who_is_behind_is_the_rest() -> None:
    comm = ras.read(TEXT.encode()).comms[0]
    late, words = ras.behind(comm)
    assert sorted(late) == [0, 1, 3, 4, 6, 7]
    assert words == "6 of 8 ranks have launched 40 AllReduce, the others up to 41"


def test_ras_names_the_one_rank_that_is_behind() -> None:
    text = TEXT.replace("  6 ranks have launched up to operation 40\n", "").replace(
        "  2 ranks have launched up to operation 41\n", "  7 ranks have launched up to operation 41\n"
    )
    lines = [line for line in text.splitlines() if "Rank " not in line]
    one = "  Rank 5 has launched up to operation 40 -- GPU 5 managed by process 4705 on node 10.0.0.4"
    comm = ras.read("\n".join([*lines, one]).encode()).comms[0]
    assert list(ras.behind(comm)[0]) == [5]
    assert (comm.ranks[5].host, comm.ranks[5].pid, comm.ranks[5].gpu) == ("10.0.0.4", 4705, 5)


def test_ras_in_json_has_dead_and_late_ranks() -> None:
    def rank(number: int, reduced: int) -> dict[str, Any]:
        status = {"init_state": 0, "async_error": 0}
        return {"rank": number, "host": "10.0.0.4", "pid": 1, "nvml_dev": number, "status": status,
                "collective_counts": {"AllReduce": reduced, "Broadcast": 1}}  # fmt: skip

    gone = {
        "rank": 3,
        "host": "10.0.0.5",
        "pid": 9,
        "nvml_dev": 0,
        "status": {"unresponsive": True, "considered_dead": True},
    }
    comm = {"hash": "0x1", "secondary_hash": "0x2:0x3", "size": 4, "ranks": [rank(0, 9), rank(1, 8), rank(2, 9)],
            "missing_ranks": [gone]}  # fmt: skip
    raw = json.dumps({"nccl_version": "2.28.7", "communicators": [comm], "ras": {"timeouts_count": 2}}).encode()
    report = ras.read(raw)
    assert report.timeouts == 2
    late, _ = ras.behind(report.comms[0])
    assert late == {1: "has launched 8 AllReduce where others have 9", 3: "is dead for RAS"}


def test_ras_gives_a_dead_rank_its_process_and_counts_what_it_lists_in_a_table_only() -> None:
    head, _, _ = TEXT.partition("Errors\n======\n")
    process = "  Process 3487 on node 10.1.1.2 managing GPU 5\n"
    dead = "\nDEAD\n  1 job process is considered dead\n" + process + "\nINCOMPLETE\n  Missing\n" + process
    missing = "\n#0-0 (27a079b828ff1a75) INCOMPLETE\n  Missing communicator data from 1 rank\n  The missing rank: 7\n"
    rank = ras.read((head + "Errors\n======\n" + dead + missing).encode()).comms[0].ranks[7]
    assert (rank.host, rank.pid, rank.gpu, rank.missing) == ("10.1.1.2", 3487, 5, "dead")
    alone = ras.read(head.encode())
    assert (alone.comms, alone.total, alone.most) == ((), 1, 8)


@each_row("raw", [b"", b"hello", b'{"communicators": 3}', b'{"communicators": ['])
def test_ras_refuses_what_is_none(raw: bytes) -> None:
    with pytest.raises(ras.RasError):
        ras.read(raw)


LOG = (HERE / "watchdog.log").read_text()


def test_the_watchdogs_words_of_three_releases() -> None:
    found = watchdog.read(LOG.splitlines()).traces
    assert {rank: (t.calls[0].op, t.calls[0].number) for rank, t in found.items()} == {
        7: ("broadcast", 78), 3: ("allreduce", 78), 1: ("allreduce", 469)}  # fmt: skip
    assert (found[7].enqueued, found[3].enqueued, found[1].enqueued) == ({"0": 79}, {"0": 80}, {})
    assert found[1].calls[0].group == ""  # before 2.3 a line names no group


def test_parts_of_a_coalesced_call_end_with_it() -> None:
    def part(record: int, name: str, state: str = "scheduled", *, p2p: bool = True) -> dict[str, Any]:
        return entry(record, collective_seq_id=1, p2p_seq_id=record, profiling_name=f"nccl:{name}", state=state,
                     retired=False, is_p2p=p2p)  # fmt: skip

    found = only(part(1, "send 0->1"), part(2, "recv 0<-1"), part(3, "coalesced", "completed", p2p=False),
                 part(4, "send 0->1"), part(5, "coalesced", p2p=False))  # fmt: skip
    assert [call.done for call in found.calls] == [True, True, True, False, False]


@each_row(
    ("ranks", "members"), [("[0, 1]", (0, 1)), ([1, 0], (0, 1)), (["1", "a", -1, True, None], (1,)), ({"a": 1}, ())]
)
def test_members_of_a_group_in_any_form(ranks: object, members: tuple[int, ...]) -> None:
    assert only(pg_config={"7": {"ranks": ranks}}).groups.get("7", ()) == members


def caught(rank: int, own: int, number: int, op: str = "ALLREDUCE", sizes: str = "8, NumelOut=8") -> str:
    return (f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:632] [Rank {own}] Watchdog caught collective operation timeout: "
            f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={sizes}, Timeout(ms)=600000) ran for 600001")  # fmt: skip


def status(rank: int, group: str, own: int, number: int, newest: int) -> str:
    where = f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:2268] [PG ID 1 PG GUID {group} Rank {own}]"
    told = f"last enqueued work: {newest}, last completed work: 7"
    return f"{where}  failure detected by watchdog at work sequence id: {number} PG status: {told}"


def test_the_brackets_hold_the_groups_own_number_and_the_prefix_the_jobs() -> None:
    """And the words of the exception, which follow, are no second rank."""
    lines = [caught(4, 0, 900), status(4, "11(mesh_tp)", 0, 900, 902)]
    found = watchdog.read(lines).traces
    assert list(found) == [4]
    assert (found[4].calls[0].group, found[4].enqueued) == ("11", {"11": 902})
    assert not found[4].names
    again = "[PG ID 2 PG GUID 11(mesh_tp) Rank 0] Process group watchdog thread terminated with exception: "
    assert list(watchdog.read([*lines, again + lines[0].partition("] ")[2]]).traces) == [4]


def test_a_gather_tells_how_many_its_group_has() -> None:
    gather = [caught(0, 0, 5, "ALLGATHER", "1024, NumelOut=8192"), status(0, "5(mesh_fsdp)", 0, 5, 5)]
    scatter = [caught(0, 0, 5, "_REDUCE_SCATTER_BASE", "64, NumelOut=16"), status(0, "5(mesh_fsdp)", 0, 5, 5)]
    assert [watchdog.read(lines).traces[0].sizes for lines in (gather, scatter)] == [{"5": 8}, {"5": 4}]


def test_groups_that_share_a_name_are_not_compared() -> None:
    lines = [caught(0, 0, 5), status(0, "2(tp)", 0, 5, 5), caught(2, 0, 6), status(2, "2(tp)", 0, 6, 6)]
    found = watchdog.read(lines).traces
    assert [one.calls[0].group for one in found.values()] == ["", ""]


def test_a_rank_that_only_dumped_tells_how_far_it_came() -> None:
    signal = "Received a dump signal due to a collective timeout from rank 0."
    told = f"{signal} Last enqueued NCCL work: 4999, last completed NCCL work: 4999."
    line = f"[rank5]:[E1 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank 5] {told}"
    found = watchdog.read([line]).traces[5]
    assert (found.calls, found.enqueued, found.names) == ((), {"0": 4999}, {"0": "default_pg"})


def test_a_line_torn_in_two_keeps_its_group() -> None:
    whole = ("[rank2]:[E1 x.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminat\n"
             "ed with exception: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, "
             "OpType=BROADCAST, NumelIn=112, NumelOut=112,\n Timeout(ms)=1800000) ran for 1800010")  # fmt: skip
    found = watchdog.read(whole.splitlines()).traces[2]
    assert (found.calls[0].group, found.calls[0].number) == ("0", 4)


def test_a_terminal_wraps_a_line_and_a_cut_line_is_no_call_of_other_sizes() -> None:
    """The words of huggingface/open-r1#620: the last line is cut, and what follows is of another rank."""
    wrapped = caught(1, 1, 4, "BROADCAST", "112, NumelOut=112").replace("NumelOut", "Numel\nOut")
    cut = caught(2, 2, 4, "BROADCAST", "112, NumelOut=112").partition(", NumelOut")[0]
    found = watchdog.read([*wrapped.splitlines(), cut, caught(3, 3, 4, "BROADCAST", "112, NumelOut=112")]).traces
    assert {rank: one.calls[0].sizes for rank, one in found.items()} == {1: ((112,),), 2: (), 3: ((112,),)}


def test_a_rank_says_how_it_ended_and_which_call_did_not_match() -> None:
    told = watchdog.read([
        '[rank3]:     raise ValueError("no")', "[rank3]: ValueError: Expected 4 (got 0)", "[rank1]: ZeroDivisionError",
        "ValueError: of nobody",
        "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=21, OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long), but Rank 0 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=21, OpType=ALLREDUCE, TensorShape=[5, 2]).",
        "[rank6]:[E1 x] [PG 0 (default_pg) Rank 6] Heartbeat monitor timed out! workMetaList_.size()=0",
        "[rank6]:[F1 x] [PG 0 (default_pg) Rank 6] ProcessGroupNCCL's watchdog got stuck for 480 seconds without",
        "[rank0]: socketProgress: Connection closed by remote peer node2.cluster.local<53472>",
    ])  # fmt: skip
    assert told.errors == {3: "ValueError: Expected 4 (got 0)", 1: "ZeroDivisionError"}
    assert {rank: (call.op, call.sizes, call.number) for rank, call in told.clash.items()} == {
        1: ("broadcast", ((1,),), 21), 0: ("allreduce", ((5, 2),), 21)}  # fmt: skip
    assert (told.hung, told.idle, told.lost) == ({6: "480"}, {6: ""}, {0: "node2.cluster.local"})


@each_row(("raw", "words"), [(b"n1:7 NCCL DIAG === RAS Diagnostics ===\n", "--diag"), (
    b'RAS Monitor Mode\n{"event": "PEER_DEAD", "peer": {}}', "as text")])  # fmt: skip
def test_what_ras_also_writes_is_no_answer_of_it(raw: bytes, words: str) -> None:
    with pytest.raises(ras.RasError, match=words):
        ras.read(raw)


def test_the_watchdogs_two_lines_name_the_call_and_the_newest_one() -> None:
    whole = (
        "[rank12]:[E909 09:55:29.308 ProcessGroupNCCL.cpp:607] [Rank 12] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=2070, OpType=REDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600036 milliseconds "
        "before timing out.\n"
        "[rank12]:[E909 09:55:29.313 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 12] Exception (either an error "
        "or timeout) detected by watchdog at work: 2070, last enqueued NCCL work: 2071, last completed NCCL work: 2069."
    )
    told = watchdog.read(whole.splitlines()).traces
    assert (told[12].calls[0].number, told[12].enqueued) == (2070, {"0": 2071})
    loose = "[rank1]:[E909 ProcessGroupNCCL.cpp:1] [PG 0 (default_pg) Rank 1] cut\n[rank2]: ValueError: no rows"
    assert watchdog.read(loose.splitlines()).errors == {2: "ValueError: no rows"}
