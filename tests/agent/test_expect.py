"""`--expect`: what a node must have. Absent is failed, unread is unknown, a word not understood is named."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from fastapi.testclient import TestClient
from kustomization import render
from rigs.command import topoflight
from rigs.fleet import fleet_of, record_of
from rigs.recorded import H100, changed, facts, of_code, path_of, snapshot, statuses, with_outcomes, with_ports
from rigs.tables import ROOT, each_row

from agent.checks.expect import KEYS, parse, read_expectations, read_file
from agent.checks.host_checks import EXPECT_CODES
from agent.checks.verdict import GateError, build_view, judge
from agent.cluster.nodes import NodeRecord, check_nodes as gate_of_nodes, make_record
from agent.http.serve import _expected
from agent.http.server import create
from agent.http.state import State
from contracts.finding import Finding
from probes.api import Failed, Snapshot
from probes.gpu.facts import GpuFacts

ROWS = yaml.safe_load(Path(__file__).with_name("expectations.yaml").read_text(encoding="utf-8"))


def preflight(name: str, *options: str) -> Result:
    return topoflight("preflight", "-q", "--host", path_of(name), *options)


def judged(found: Snapshot, words: str) -> dict[str, str]:
    """Status of each expectation, by its subject."""
    checks = of_code(build_view((found,), expected=parse([words])), EXPECT_CODES[0])
    return {check.subject: check.status for check in checks}


def test_a_node_that_has_it_all_passes_and_says_each() -> None:
    """One check for each key."""
    found = judged(snapshot(), ROWS["all"])
    assert len(found) == len(KEYS)
    assert set(found.values()) == {"pass"}
    assert preflight(H100, "--expect", ROWS["all"]).exit_code == 0


@each_row(("machine", "words", "told"), ROWS["less"])
def test_absent_or_less_is_failed(machine: str, words: str, told: str) -> None:
    """Exit code 3 with what is there."""
    view = build_view((snapshot(machine),), expected=parse([words]))
    (check,) = of_code(view, EXPECT_CODES[0])
    assert check.status == "fail", check
    assert told in check.message and words in check.subject and check.remedy
    assert view.verdict.exit_code == 3


def test_what_could_not_be_read_is_unknown_and_required() -> None:
    """A hung driver is no lost GPU: exit code 5 and not 3, whatever is expected. Nor is an HCA without its driver."""
    gone = {name: Failed(error="no answer after 30.0 s") for name in ("gpu", "rdma", "limits", "interfaces", "pci")}
    for words in ROWS["unread"]:
        view = build_view((with_outcomes(snapshot(), **gone),), expected=parse([words]))
        (check,) = of_code(view, EXPECT_CODES[0])
        assert (check.status, check.required) == ("unknown", True), words
        assert "no answer after 30.0 s" in check.message and view.verdict.exit_code == 5, words
    # the bus has ten HCAs, none was read
    off = build_view((snapshot("sick-h100-rdma-off"),), expected=parse(["hcas=8"]))
    assert [(check.status, check.required) for check in of_code(off, EXPECT_CODES[0])] == [("unknown", True)]


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
    empty = preflight(H100, "--expect-file", str(path))
    assert (empty.exit_code, "contains no expectation" in empty.stderr) == (2, True), "a gate without teeth"
    path.write_text("gpus: 9\n")
    assert preflight(H100, "--expect-file", str(path)).exit_code == 3


def test_an_agent_judges_it_at_every_scan_and_reads_the_file_anew(tmp_path: Path) -> None:
    """What the DaemonSet's ConfigMap says: absent, there, changed, broken, fixed and withdrawn."""
    path = tmp_path / "expect.yaml"
    options = {"expect": (), "expect_file": path}
    state = State(lambda: (snapshot(),), interval_seconds=3600, expected=lambda: _expected(options))
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


def test_ports_whose_state_is_unknown_are_not_counted_as_down() -> None:
    """hcas with a port that could not be read: unknown."""
    assert judged(with_ports(snapshot(), state=None), "hcas=8") == {"hcas=8": "unknown"}


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
    result = preflight("cpu-only-vm", "-o", form)
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.strip() and not line.startswith("<?xml")]
    assert "no GPU was checked" in lines[0]
    assert "no GPU was checked" not in preflight(H100, "-o", form).stdout
    both = build_view((snapshot(), snapshot("cpu-only-vm")))
    assert both.verdict.why.startswith("no GPU was checked on vm; ")
