"""--baseline: only what got worse fails; --nodes and --selector: the gate over what agents publish; the exit codes."""

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

from agent.checks.measured import compare_with_baseline
from agent.cluster.nodes import Fleet, NodeRecord, check_nodes, to_resource
from contracts.finding import Finding, Status
from probes.scanner import dumps

rows = rows_of(__file__)

GOOD, SICK = path_of(), path_of("sick-h100-dead-hca")
NODES = "/apis/topoflight.io/v1alpha1/nodetopologies"


@each_row(("before", "now", "judged"), rows("regressions"))
def test_the_table_of_regressions(before: Status | None, now: Status, judged: Status) -> None:
    """What got worse fails, what stood there already is told, what cannot be measured any more fails."""
    baseline = {("a.b.c", "n", ""): before} if before else {}
    (made,) = compare_with_baseline([Finding(code="a.b.c", status=now, node="n")], baseline)
    assert made.status == judged


def preflight(*words: object) -> Result:
    return topoflight("preflight", "-q", *words)


def test_a_known_fault_does_not_fail_and_a_new_one_does(tmp_path):
    """By a report of the sick machine and of the good one, and by what --save wrote."""
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
    """Nothing of it is left that a check could fail on; both ways round."""

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
    """What agents published decides; a node nobody hears of is a failure."""
    done = preflight(*words)
    assert done.exit_code == code, done.output


def test_nodes_are_read_and_printed_as_host_lists_of_slurm(api: ApiServer) -> None:
    """Printed are the nodes that do not pass."""
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
    """The object is there, its status is not yet."""
    held = Fleet()
    held.replace([{"metadata": {"name": "n"}, "spec": {"nodeName": "n"}}])
    (check,) = check_nodes(["n"], held)
    assert isinstance(held.records()[0], NodeRecord) and check.status == "fail"


def test_a_report_of_nodes_is_written_whole(api, tmp_path):
    """--report with --nodes: every file, each node with what it published, also one that nobody heard of."""
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
    assert again.exit_code == 0, "what stood there already is no regression"
