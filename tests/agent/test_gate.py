"""The gate: exit codes, unknown is never a pass; --baseline, --nodes and --selector over what agents publish."""

import json
import time

import build
import pytest
from api_server import ApiServer, write_kubeconfig
from click.testing import Result
from rigs.command import topoflight
from rigs.fleet import record_of
from rigs.recorded import H100, path_of
from rigs.tables import each_row, rows_of

from agent.checks.findings import sort_worst_first
from agent.checks.measured import compare_with_baseline
from agent.checks.verdict import GateError, judge, select
from agent.cluster.nodes import Fleet, NodeRecord, check_nodes, to_resource
from contracts.finding import Finding, Status
from probes.scanner import dumps

rows = rows_of(__file__)


def check(status: str, name: str = "a.b.c", *, required: bool = False) -> Finding:
    return Finding(code=name, status=status, node="n", required=required)  # type: ignore[arg-type]


# statuses present, a required check unknown, --fail-on -> exit code: every row of docs/reference/exit-codes.md
TABLE = rows("exit_codes")()


@each_row(("statuses", "required", "fail_on", "code"), TABLE)
def test_exit_codes(statuses: tuple[str, ...], required: bool, fail_on: str, code: int) -> None:
    """Each combination ends in its documented code."""
    checks = [check(s, f"x.{i}", required=required and s == "unknown") for i, s in enumerate(statuses)]
    assert judge(checks, fail_on=fail_on).exit_code == code  # type: ignore[arg-type]


@each_row(("status", "stopped", "word", "code"), rows("stopped"))
def test_a_stopped_run_is_no_pass_and_what_had_failed_stays_a_failure(status, stopped, word, code):
    verdict = judge([check(status)], stopped=stopped)
    assert (verdict.word, verdict.exit_code) == (word, code)


def test_require_marks_what_it_matches_and_adds_what_was_never_judged() -> None:
    """A required check that no probe judged is unknown, not forgotten."""
    chosen = select(
        [check("pass", "rdma.port.down")], require=("rdma.*",), known=("rdma.port.down", "rdma.memlock.low")
    )
    assert {(c.code, c.status, c.required) for c in chosen} == {
        ("rdma.port.down", "pass", True),
        ("rdma.memlock.low", "unknown", True),
    }
    assert judge(chosen).exit_code == 5
    assert select([check("fail", "a.b")], require=("a.*",), skip=("a.b",)) == (), "--skip wins over --require"


@each_row("option", ["require", "skip"])
def test_a_pattern_that_names_no_check_is_an_error(option: str) -> None:
    """A typing error in a gate must not read as a pass."""
    with pytest.raises(GateError, match=r"rmda\.\*"):
        select([check("pass", "rdma.port.down")], **{option: ("rmda.*",)})


def test_failures_are_listed_first() -> None:
    """Worst first, then by name."""
    order = [c.status for c in sort_worst_first([check(s) for s in ("pass", "warn", "info", "fail", "unknown")])]
    assert order == ["fail", "warn", "unknown", "info", "pass"]


def on(status: str, code: str, subject: str = "", node: str = "n") -> Finding:
    return Finding(code=code, status=status, node=node, subject=subject)  # type: ignore[arg-type]


@each_row(("found", "why"), rows("verdicts"))
def test_a_verdict_counts_the_findings_that_the_list_prints(found: list[list[str]], why: str) -> None:
    """The same on several devices is one; nothing seen is not called healthy."""
    assert judge([on(*each) for each in found]).why == why


def test_a_check_counts_once_by_its_worst_result_and_results_are_counted_too() -> None:
    """The sum over checks is their number; `counts`, which scripts read, stays the number of results."""
    found = [on("fail", "a.b", "x"), on("fail", "a.b", "y"), on("pass", "a.b", node="m"), on("unknown", "a.c"),
             on("warn", "a.c", node="m"), on("pass", "a.d")]  # fmt: skip
    verdict = judge(found)
    assert verdict.listed == {"fail": 1, "warn": 1, "unknown": 0, "info": 0, "pass": 1}
    assert verdict.counts == {"fail": 2, "warn": 1, "unknown": 1, "info": 0, "pass": 2}
    assert judge(found[3:5], fail_on="unknown").exit_code == 5  # an unknown stays one, whatever another node says


GOOD, SICK = path_of(), path_of("sick-h100-dead-hca")
NODES = "/apis/topoflight.io/v1alpha1/nodetopologies"


@each_row(("before", "now", "judged"), rows("regressions"))
def test_the_table_of_regressions(before: Status | None, now: Status, judged: Status) -> None:
    """A value that got worse fails, and so does one that can no longer be measured; an old finding is reported."""
    baseline = {("a.b.c", "n", ""): before} if before else {}
    (made,) = compare_with_baseline([Finding(code="a.b.c", status=now, node="n")], baseline)
    assert made.status == judged


def preflight(*words: object) -> Result:
    return topoflight("preflight", "-q", *words)


def test_a_known_fault_does_not_fail_and_a_new_one_does(tmp_path):
    """The baseline is a report of the sick or of the good machine, or a file that --save wrote."""
    sick, good, saved = (tmp_path / name for name in ("sick", "good", "saved.json"))
    assert preflight("--host", SICK, "-o", f"json={sick}", "--save", saved).exit_code == 3
    table = tmp_path / "table"
    assert preflight("--host", GOOD, "-o", f"json={good}", "-o", f"table={table}").exit_code == 0
    assert "no problems found" in table.read_text()
    rows = [(SICK, sick, 0), (SICK, good, 3), (SICK, saved, 0), (GOOD, good, 0)]
    codes = [preflight("--host", now, "--baseline", before).exit_code for now, before, _ in rows]
    assert codes == [code for *_, code in rows]
    assert "rdma" in preflight("--host", SICK, "--baseline", good).output
    assert " of the baseline remain" in preflight("--host", SICK, "--baseline", sick).output, "not: no problems found"
    assert "no problems found" in preflight("--host", GOOD, "--baseline", good).output


@each_row(
    ("machine", "lost", "subject"),
    [("lost-gpus", ("0000:61:00.0", "0000:c3:00.0"), "gpus=8"), ("lost-hca", ("0000:4f:00.0",), "hcas=10")],
)
def test_a_device_that_left_the_bus_is_worse_than_the_baseline(machine, lost, subject, tmp_path):
    """No other check fails for a device that is missing. Devices that the baseline lacks are no failure."""
    now, before, after = (tmp_path / name for name in ("now.json", "before.json", "after.json"))
    now.write_text(dumps(build.record(build.MACHINES[machine])), encoding="utf-8")
    preflight("--host", GOOD, "--save", before)
    words = ("--host", now, "--baseline", before, "--save", after, "-o", "json")
    worse = preflight(*words)
    (unmet,) = [c for c in json.loads(worse.stdout)["checks"] if c["code"] == "expect.node.unmet"]
    assert (worse.exit_code, unmet["status"], unmet["subject"]) == (3, "fail", subject)
    assert all(place in unmet["message"] for place in lost)
    assert "expect.node.unmet" not in preflight(*words, "--skip", "expect.*").stdout
    more = preflight("--host", GOOD, "--baseline", after, "-o", "json")
    assert more.exit_code == 0 and "expect.node.unmet" not in more.stdout, "more than the baseline is not worse"


@pytest.fixture
def api(tmp_path, monkeypatch):
    """Three nodes: one good, one sick, one silent; a fourth that publishes nothing."""
    with ApiServer() as server:
        for name, machine, age in (("good", H100, 0), ("sick", "sick-h100-dead-hca", 0), ("old", H100, 7200)):
            record = record_of(machine, name, scanned_at_seconds=time.time() - age)
            server.put(NODES, "", to_resource(record)[1])
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", server.url)))
        yield server


@each_row(("words", "code"), rows("over_nodes"))
def test_the_gate_over_nodes(api: ApiServer, words: list[str], code: int) -> None:
    """The published records decide. A node without a recent record fails."""
    done = preflight(*words)
    assert done.exit_code == code, done.output


def test_nodes_are_read_and_printed_as_host_lists_of_slurm(api: ApiServer) -> None:
    """Only the nodes that do not pass are printed."""
    assert preflight("--nodes", "good,n[01-03],old", "-o", "slurm").stdout == "n[01-03],old\n"
    assert preflight("--nodes", "good", "-o", "slurm").stdout == ""
    reasons = preflight("--nodes", "n[1-2]", "-o", "reason").stdout.splitlines()
    assert [line.partition(": cluster.node.silent: ")[0] for line in reasons] == ["n1", "n2"]
    assert "'n[1-' is no host name" in preflight("--nodes", "n[1-").output


def test_a_selector_picks_nodes_by_label(api: ApiServer) -> None:
    """The API server selects, also by a label that a node must not have; no agent runs on the node "plane"."""
    role = "node-role.kubernetes.io/control-plane"
    for name, label in (("good", "pool"), ("sick", "pool"), ("plane", role)):
        api.put("/api/v1/nodes", "", {"kind": "Node", "metadata": {"name": name, "labels": {label: "gpu"}}})
    api.put(NODES, "", to_resource(record_of("cpu-only-vm", "bare", scanned_at_seconds=time.time()))[1])
    assert "no GPU; RDMA none: bare" in preflight("--nodes", "bare").stdout
    for selector, named in (("pool=gpu", False), (f"!{role}", False), (f"{role}=gpu", True)):
        done = preflight("--selector", selector)
        assert (done.exit_code, "cluster.node.silent" in done.stdout) == (3, named), (selector, done.output)


def test_a_record_of_an_agent_that_never_wrote_is_silent() -> None:
    """The object exists, but has no status yet."""
    held = Fleet()
    held.replace([{"metadata": {"name": "n"}, "spec": {"nodeName": "n"}}])
    (check,) = check_nodes(["n"], held)
    assert isinstance(held.records()[0], NodeRecord) and check.status == "fail"


def test_a_report_of_nodes_is_written_whole(api, tmp_path):
    """--report with --nodes: every file, each node with its published record, and one node that has no record."""
    folder = tmp_path / "report"
    done = preflight("--nodes", "good,sick,never", "--report", folder)
    assert done.exit_code == 3, done.output
    assert {path.name for path in folder.iterdir()} == {"report.json", "report.html", "junit.xml"}
    whole = json.loads((folder / "report.json").read_text())
    assert [(node["name"], node["verdict"], node["gpus"]) for node in whole["nodes"]] == [
        ("good", "pass", 8), ("sick", "fail", 8), ("never", "unknown", None),
    ]  # fmt: skip
    assert not any(node["facts"] for node in whole["nodes"]), "facts would make it megabytes"
    page = (folder / "report.html").read_text()
    assert "<h1>good, sick, never</h1>" in page and "NV18" in page and "cluster.node.silent" in page
    again = preflight("--nodes", "good,sick", "--baseline", folder / "report.json")
    assert again.exit_code == 0, "a failure of the baseline is not a regression"
