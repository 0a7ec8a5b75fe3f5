"""The gate: exit codes, unknown is never a pass; --baseline, --nodes and --selector over what agents publish; --expect.

Of what a node must have absent is failed, unread is unknown, and a word that is not understood is named.
"""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import build
import pytest
import yaml
from api_server import ApiServer, configuration, write_kubeconfig
from click.testing import Result
from fastapi.testclient import TestClient
from kustomization import render
from rigs.command import topoflight
from rigs.fleet import fleet_of, record_of
from rigs.recorded import H100, changed, facts, of_code, path_of, snapshot, statuses, with_outcomes, with_ports
from rigs.tables import ROOT, data_of, each_row, rows_of

from agent.checks.baseline import compare_with_baseline
from agent.checks.expect import KEYS, parse, read_expectations, read_file
from agent.checks.findings import sort_worst_first
from agent.checks.host_checks import EXPECT_CODES
from agent.checks.verdict import GateError, judge, select
from agent.checks.view import build_view
from agent.cluster.client import Client, _make_error
from agent.cluster.gate import check_nodes, check_nodes as gate_of_nodes
from agent.cluster.nodes import Fleet, NodeRecord, make_record, to_resource
from agent.http.serve import _read_expected
from agent.http.server import create
from agent.http.state import State
from contracts.finding import Finding, Status
from probes.api import Failed, Snapshot
from probes.gpu.facts import GpuFacts
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
        [check("pass", "rdma.port.down")], require=("rdma.*",), codes=("rdma.port.down", "rdma.memlock.low")
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
    noted = preflight("--host", SICK, "-o", f"json={sick}", "--save", saved)
    assert noted.exit_code == 3 and f"--baseline {saved} will accept what failed now" in noted.stderr
    table = tmp_path / "table"
    sound = preflight("--host", GOOD, "-o", f"json={good}", "-o", f"table={table}", "--save", tmp_path / "other")
    assert sound.exit_code == 0 and "--baseline" not in sound.stderr
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
    other = preflight("--host", path_of("l40s-4x-pcie"), "--baseline", before)
    assert other.exit_code == 3 and "of another model" in other.stdout, "this baseline is not of this host"


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
    assert "of this name (there is a node good)" in preflight("--nodes", "good.example.com", "-o", "reason").stdout


def test_a_selector_picks_nodes_by_label(api: ApiServer) -> None:
    """The API server selects, also by a label that a node must not have; no agent runs on the node "plane"."""
    role = "node-role.kubernetes.io/control-plane"
    for name, label in (("good", "pool"), ("sick", "pool"), ("plane", role)):
        api.put("/api/v1/nodes", "", {"kind": "Node", "metadata": {"name": name, "labels": {label: "gpu"}}})
    api.put(NODES, "", to_resource(record_of("cpu-only-vm", "bare", scanned_at_seconds=time.time()))[1])
    assert "no GPU; RDMA none: bare" in preflight("--nodes", "bare").stdout
    assert not [path for _, path in api.requests if "/api/v1/nodes?" in path], "few Nodes are read by their names"
    for selector, named in (("pool=gpu", False), (f"!{role}", False), (f"{role}=gpu", True)):
        done = preflight("--selector", selector)
        assert (done.exit_code, "cluster.node.silent" in done.stdout) == (3, named), (selector, done.output)
    api.forbidden = {"/api/v1/nodes"}
    done = preflight("--nodes", "good", "-o", "json")
    assert done.exit_code == 0 and "the Node cannot be read: the API server says 403" in done.stdout, (
        "its record decides"
    )
    assert preflight("--selector", "pool=gpu").exit_code == 1


def test_a_server_that_is_busy_twice_is_asked_again_and_an_empty_variable_is_refused(api: ApiServer) -> None:
    """An empty --nodes or --selector never means the host on which the pipeline runs."""
    api.faults = [(429, {})] * 2
    assert preflight("--nodes", "good").exit_code == 0
    for words in (("--nodes", ""), ("--nodes", ","), ("--selector", "")):
        assert preflight(*words).exit_code == 2, words


@each_row(("state", "codes", "wanted"), rows("node_objects"))
def test_the_gate_reports_what_kubernetes_says_of_a_node(api: ApiServer, state: dict, codes: list, wanted: str):
    """A node without a Ready condition has just joined: nothing is claimed."""
    api.put("/api/v1/nodes", "", {"kind": "Node", "metadata": {"name": "good", "labels": {"a": "b"}}, **state})
    for words in (("--selector", "a=b"), ("--nodes", "good")):
        done = preflight(*words, "-o", "json")
        bad = {c["code"]: c["status"] for c in json.loads(done.stdout)["checks"] if c["status"] in ("warn", "fail")}
        assert [bad, done.exit_code] == codes and wanted in done.stdout, done.output


def test_a_list_that_expires_is_read_once_more(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second expiry of the same list is an error."""
    monkeypatch.setattr("agent.cluster.client.PAGE", 1)
    client = Client(configuration(api.url))
    for api.expiries in (0, 1):
        assert list({item["metadata"]["name"]: None for item in client.items(NODES)}) == ["good", "old", "sick"]
    api.expiries = 2
    done = preflight("--nodes", "good")
    assert done.exit_code == 1 and "says 410: The provided continue parameter is too old" in done.output


@each_row(("status", "message", "hint"), rows("refusals"))
def test_a_refusal_says_what_to_do(status: int, message: str, hint: str) -> None:
    """A quota or an admission webhook also refuses with 403, and no role helps."""
    error = _make_error("/api/v1/nodes", status, json.dumps({"message": message}).encode(), {})
    assert str(error) == f"the API server says {status}: {message}{hint}"


def test_a_record_from_the_future_names_the_difference_of_the_clocks() -> None:
    (check,) = check_nodes(["n"], fleet_of(record_of(name="n", scanned_at_seconds=600.0)), now=0.0)
    assert check.status == "fail" and "10 min ahead" in check.message


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


ROWS = data_of(__file__, "expectations.yaml")


def judged(found: Snapshot, words: str) -> dict[str, str]:
    """Status of each expectation, by its subject."""
    checks = of_code(build_view((found,), expected=parse([words])), EXPECT_CODES[0])
    return {check.subject: check.status for check in checks}


def test_a_node_that_has_it_all_passes_and_says_each() -> None:
    """One check for each key."""
    found = judged(snapshot(), ROWS["all"])
    assert len(found) == len(KEYS)
    assert set(found.values()) == {"pass"}
    assert preflight("--host", GOOD, "--expect", ROWS["all"]).exit_code == 0


@each_row(("machine", "words", "told"), ROWS["less"])
def test_absent_or_less_is_failed(machine: str, words: str, told: str) -> None:
    """Exit code 3 with what is there."""
    view = build_view((snapshot(machine),), expected=parse([words]))
    (check,) = of_code(view, EXPECT_CODES[0])
    assert check.status == "fail", check
    assert told in check.message and words in check.subject and check.remedy
    assert view.verdict.exit_code == 3


def test_gdr_is_absent_from_gpus_that_do_not_support_it() -> None:
    """Whatever the kernel modules and the paths allow."""
    games = tuple(replace(gpu, name="NVIDIA GeForce RTX 4090") for gpu in facts(GpuFacts).gpus)
    view = build_view((changed(snapshot(), GpuFacts, gpus=games),), expected=parse(["gdr=on"]))
    assert "NVIDIA GeForce RTX 4090 has no GPUDirect RDMA" in of_code(view, EXPECT_CODES[0])[0].message


def test_what_could_not_be_read_is_unknown_and_required() -> None:
    """A hung driver is no lost GPU: exit code 5 and not 3, whatever is expected. Nor is an HCA without its driver.

    A port whose state could not be read is not counted as down.
    """
    gone = {name: Failed(error="no answer after 30.0 s") for name in ("gpu", "rdma", "limits", "interfaces", "pci")}
    for words in ROWS["unread"]:
        view = build_view((with_outcomes(snapshot(), **gone),), expected=parse([words]))
        (check,) = of_code(view, EXPECT_CODES[0])
        assert (check.status, check.required) == ("unknown", True), words
        assert "no answer after 30.0 s" in check.message and view.verdict.exit_code == 5, words
    # the bus has ten HCAs, none was read
    off = build_view((snapshot("sick-h100-rdma-off"),), expected=parse(["hcas=8"]))
    assert [(check.status, check.required) for check in of_code(off, EXPECT_CODES[0])] == [("unknown", True)]
    assert judged(with_ports(snapshot(), state=None), "hcas=8") == {"hcas=8": "unknown"}


LARGE = [("gpus: 8\n" + "#" * 70000, "larger than 65536"), (f"interface: [{', '.join(['a'] * 65)}]", "more than 64")]


@each_row(
    ("text", "told", "of_file"),
    [*((*row, False) for row in ROWS["wrong"]), *((*row, True) for row in (*ROWS["files"], *LARGE))],
)
def test_what_is_not_understood_is_an_error_that_names_what_is_allowed(text, told, of_file, tmp_path):
    """Of a file with its name, never a silent half."""
    path = tmp_path / "expect.yaml"
    path.write_text(text)
    with pytest.raises(GateError, match="--expect-file" if of_file else None) as caught:
        read_file(path) if of_file else parse([text])
    assert told in " ".join(str(caught.value).split())


def test_every_spelling_of_a_value_that_holds_is_met() -> None:
    """Devices by a pattern, whole words of a model."""
    words = [f"{key}={value}" for key, values in ROWS["met"].items() for value in values]
    assert not [each for each in words if {*judged(snapshot(), each).values()} != {"pass"}]


def test_a_file_says_the_same_as_the_words(tmp_path: Path) -> None:
    """YAML's own spellings count: `on` is true, lists are several interfaces, numbers need no quotes."""
    path = tmp_path / "expect.yaml"
    path.write_text("gpus: 8\nnvlink: NV18\ngdr: on\ninterface: [net1, net2]\ndriver: 550.9\n")
    words = "gpus=8,nvlink=NV18,gdr=on,interface=net1,interface=net2,driver=550.9"
    assert read_file(path) == parse([words])
    both = read_expectations(["gpus=4"], path)
    assert {*both} == {*parse([words.replace("gpus=8", "gpus=4")])}, "the command line goes before the file"
    path.write_text("# gpus: 8\n")
    assert read_file(path) == ()
    assert judged(snapshot(), "") == {}
    empty = preflight("--host", GOOD, "--expect-file", str(path))
    assert (empty.exit_code, "contains no expectation" in empty.stderr) == (2, True), "a gate without teeth"
    path.write_text("gpus: 9\n")
    assert preflight("--host", GOOD, "--expect-file", str(path)).exit_code == 3


def test_an_agent_judges_it_at_every_scan_and_reads_the_file_anew(tmp_path: Path) -> None:
    """What the DaemonSet's ConfigMap says: absent, there, changed, broken, fixed and withdrawn."""
    path = tmp_path / "expect.yaml"
    state = State(lambda: (snapshot(),), interval_seconds=3600, expected=lambda: _read_expected((), path))
    client = TestClient(create(state))
    for text, word, code in ROWS["scans"]:
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
        state.refresh()
        verdict = client.get("/preflight").json()["verdict"]
        assert (verdict["word"], verdict["exit_code"]) == (word, code), text
        assert state.view is not None and make_record(state.view).verdict == word, text


def of_records(record: NodeRecord, words: str) -> tuple[Finding, ...]:
    """The gate over one published record."""
    return gate_of_nodes([record.name], fleet_of(record), expected=parse([words]))


@each_row(("machine", "words", "code"), ROWS["records"])
def test_records_of_nodes_are_held_to_it_too(machine: str, words: str, code: int) -> None:
    """`--nodes` and `--selector`: a record carries what a scan read of the node."""
    checks = of_records(record_of(machine), words)
    assert judge(checks).exit_code == code, [c for c in checks if c.code == EXPECT_CODES[0]]


def test_a_record_of_another_release_meets_nothing() -> None:
    """Without facts or graph that this release reads everything expected is unknown, and required."""
    for facts_of_later in (None, "later"):
        checks = of_records(record_of(facts=facts_of_later), "gpus=8,interface=eno1")
        assert {c.status for c in checks if c.code == EXPECT_CODES[0]} == {"unknown"}
        assert judge(checks).exit_code == 5


def test_as_many_as_expected_settle_what_a_scan_cannot_tell() -> None:
    """An uncabled port looks like a dead one, a GPU given to others like a lost one: the owner's number tells."""
    dead = snapshot("sick-h100-dead-hca")
    for words, status in (("hcas=8", "fail"), ("hcas=9", "info"), ("hcas=10", "fail")):
        assert statuses(build_view((dead,), expected=parse([words])), "rdma.port.down") == {status}
    gpus = facts(GpuFacts, dead)
    bus = replace(gpus.bus, container="kubernetes", all_requested=True)
    pod = changed(dead, GpuFacts, gpus=gpus.gpus[:2], pairs=(), bus=bus)
    for words, status, required in (("gpus=2", "info", False), ("gpus=3", "unknown", True)):
        (check,) = of_code(build_view((pod,), expected=parse([words])), "gpu.device.not_given")
        assert (check.status, check.required) == (status, required)


def test_the_daemonset_reads_the_administrators_config_map(tmp_path: Path) -> None:
    """No manifest holds it, so that applying them again changes nothing of it; the documented file is understood."""
    documents = render(ROOT / "deploy/daemonset/base")
    assert not [d for d in documents if d["kind"] == "ConfigMap"]
    (daemonset,) = [d for d in documents if d["kind"] == "DaemonSet"]
    pod: dict = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    page = (ROOT / "docs/how-to/deploy-kubernetes.md").read_text(encoding="utf-8")
    (name, file), *more = re.findall(r"create configmap (\S+) --from-file=(\S+)", page)
    assert not more
    (volume,) = [v for v in pod["volumes"] if v.get("configMap", {}).get("name") == name]
    assert volume["configMap"]["optional"] is True
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
    assert f"{mount['mountPath']}/{file}" == container["args"][container["args"].index("--expect-file") + 1]
    (text,) = re.findall(rf"```yaml\n# {re.escape(file)}\n(.*?)```", page, re.S)
    (tmp_path / file).write_text(text)
    assert set(yaml.safe_load(text)) == set(KEYS)
    read_file(tmp_path / file)


# A host without a GPU ----------------------------------------------------------------------------------------------


@each_row("form", ["table", "github", "junit"])
def test_a_pass_without_a_gpu_says_so_in_its_first_line(form: str) -> None:
    """Whatever a pipeline reads first; of several hosts which."""
    result = preflight("--host", path_of("cpu-only-vm"), "-o", form)
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.strip() and not line.startswith("<?xml")]
    assert "no GPU was checked" in lines[0]
    assert "no GPU was checked" not in preflight("--host", GOOD, "-o", form).stdout
    both = build_view((snapshot(), snapshot("cpu-only-vm")))
    assert both.verdict.why.startswith("no GPU was checked on vm; ")
