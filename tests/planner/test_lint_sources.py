"""Environments are found wherever they are written; lines that cannot be understood are named; the verb's answer."""

import json
from pathlib import Path

import pytest
from nccl_env_hosts import host
from rigs.command import topoflight
from rigs.tables import corpus_folder, data_of, each_row, rows_of

from agent.checks.findings import group_findings
from agent.checks.host_checks import check_environment
from agent.cli.lint_env import lint_text
from planner.lint.environment import lint
from planner.lint.script import EnvironmentTextError, NamedEnvironment
from planner.lint.sources import guess_kind, read_text
from topology.build import build

rows = rows_of(__file__)


def read_environment(text: str, kind: str | None = None) -> tuple[NamedEnvironment, ...]:
    """Every environment of a text."""
    return read_text(text, kind).environments


def one(text: str, kind: str | None = None) -> NamedEnvironment:
    """The environment of a text; each other place, such as an alias, has the same."""
    found, *others = read_environment(text, kind)
    assert all(each.environment == found.environment for each in others)
    return found


@each_row(("text", "kind", "environment", "said"), rows("environments"))
def test_the_environment_of_a_text(text: str, kind: str | None, environment: dict[str, str], said: list[str]) -> None:
    """What is set, and what the linter says of it."""
    found = one(text, kind)
    assert found.environment == environment
    assert sorted(f.code for f in (*found.findings, *lint(found))) == sorted(said)


def test_where_an_environment_stands() -> None:
    """The way to a container, and mpirun -x and exports in a command line."""
    assert one(rows("environments")()[0][0]).source == "PyTorchJob/sft-roce Master pytorch"
    assert one("h:1:1 [0] NCCL INFO NCCL_NET set by environment to IB\n").source == "log"
    assert one(POD.replace("spec:", "metadata: {name: '{{ .a }}'}\nspec:", 1)).source == "Pod/... a"
    launcher, other = read_environment(rows("texts")()["mpijob"])
    assert launcher.environment == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": '"Ring"'}  # no shell strips the quotes
    assert other.environment == {"NCCL_IB_HCA": "mlx5_0", "NCCL_PROTO": "Simple"}


def test_what_a_scan_saw() -> None:
    """The process and nccl.conf of a recorded host, where it had any."""
    for more, wrong in rows("scanned")():
        machine = host("a", **more)
        found = check_environment(machine, build(machine))
        assert sorted(each.subject for each in found if each.status == "warn") == wrong


@each_row(("text", "kind"), rows("kinds"))
def test_kinds_are_recognised(text: str, kind: str) -> None:
    """By their looks."""
    assert guess_kind(text) == kind


def test_errors_name_what_is_wrong() -> None:
    """Unknown kind; TOML, JSON and YAML that end in the midst."""
    for text, kind, said in rows("broken")():
        with pytest.raises(EnvironmentTextError, match=said):
            read_environment(text, kind)


def test_yaml_bombs_end() -> None:
    """Anchors that multiply and nesting without end are refused."""
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert read_environment("\n".join(["kind: Pod", "a0: &a0 [x]", *levels[:4]]), "yaml") == ()
    with pytest.raises(EnvironmentTextError, match="more than 200000 nodes"):
        read_environment("\n".join(["kind: Pod", "a0: &a0 [x]", *levels]), "yaml")
    with pytest.raises(EnvironmentTextError):
        read_environment("[" * 3000 + "]" * 3000, "yaml")
    with pytest.raises(EnvironmentTextError, match="2001 variables are more than the 2000"):
        read_environment("".join(f"export NCCL_A{i}=$X\n" for i in range(2001)), "shell")


@pytest.mark.corpus
def test_environments_of_real_logs(corpus):
    """Every real log's environment can be judged, and what the EFA plugin set is not held against the user."""
    seen = 0
    for path in sorted((corpus / "nccl_logs").glob("*.log")):
        for found in read_environment(path.read_text(errors="replace"), "log"):
            seen += 1
            findings = lint(found)
            if "efa" in path.name:
                plugin = ("NCCL_BUFFSIZE", "NCCL_P2P_NET_CHUNKSIZE")
                assert not [f for f in findings if f.subject in plugin], path.name
    assert seen >= 5


def of_the_text(text: str) -> list[tuple[str, str, str]]:
    """What is said of the text itself: subject, code, severity."""
    found = dict.fromkeys(each for named in read_environment(text, "yaml") for each in named.findings)
    return [(each.subject, each.code, each.status) for each in found]


POD = "kind: Pod\nspec:\n  containers:\n  - name: a\n    env:\n    - {name: NCCL_NET, value: IB}\n"


@each_row("value", ["3", "-1", "0x10", "1.5", "1e3", "true", "yes", "off", "n"])
def test_kubernetes_refuses_a_variable_that_is_no_string(value: str) -> None:
    """As sigs.k8s.io/yaml reads it; in a template, too."""
    for more in ("", "    - {name: NCCL_DEBUG, value: '{{ .Values.debug }}'}\n"):
        for name in ("NCCL_IB_TIMEOUT", "OF_THE_PROGRAM"):
            found = of_the_text(f"{POD}{more}    - {{name: {name}, value: {value}}}\n")
            assert found == [(name, "env.value.kind", "fail")]
    config = f"kind: ConfigMap\nmetadata: {{name: a}}\ndata: {{NCCL_IB_TIMEOUT: {value}}}\n"
    assert of_the_text(config) == [("NCCL_IB_TIMEOUT", "env.value.kind", "fail")]


@each_row("value", ['"3"', "'true'", "!!str 3", "eth0", "1:30", "~", "2.21.5", "", '"0,1"'])
def test_kubernetes_takes_what_is_a_string(value: str) -> None:
    assert of_the_text(f"{POD}    - {{name: NCCL_IB_TIMEOUT, value: {value}}}\n") == []


def test_a_value_of_another_program_is_not_shown() -> None:
    (named,) = read_environment(f"{POD}    - {{name: PASSWORD, value: 987654}}\n", "yaml")
    assert named.findings and "987654" not in str(named.findings)


@each_row(("value", "count"), [("true", 1), ("False", 1), ("yes", 0), ("1", 0), ('"true"', 0)])
def test_compose_refuses_a_boolean(value: str, count: int) -> None:
    assert len(of_the_text(f"services:\n  a:\n    environment:\n      NCCL_DEBUG: {value}\n")) == count


def test_a_variable_set_twice_and_one_that_precedes_the_one_it_refers_to() -> None:
    variables = rows("in_order")()
    text = POD + "".join(f"    - {{name: {name}, value: '{value}'}}\n" for name, value in variables)
    wanted = [("NCCL_DEBUG", "env.pair.shadowed", "warn"), ("NCCL_IB_HCA", "env.value.kind", "warn"),
              ("NCCL_ALGO", "env.value.kind", "warn")]  # fmt: skip
    assert of_the_text(text) == wanted
    elsewhere = text + "    envFrom: [{configMapRef: {name: other}}]\n"
    assert of_the_text(elsewhere) == wanted[:1]


@each_row(("text", "old", "new", "gpus"), rows("gpus"))
def test_one_gpu_per_pod_or_node_has_no_peer_access(text: str, old: str, new: str, gpus: int | None) -> None:
    """NCCL_P2P_DISABLE and NCCL_SHM_DISABLE are no problem where no second GPU is reached, and say so."""
    found = read_text(rows("texts")()[text].replace(old, new))
    assert found.gpus == gpus
    (each,) = found.environments
    judged = lint(each, gpus=found.gpus)
    if gpus == 1:
        assert [(f.code, f.status, "no effect here" in f.message) for f in judged] == [
            ("env.debug.leftover", "info", True)
        ] * 2
    else:
        assert {"env.pair.network", "env.debug.leftover"} >= {f.code for f in judged}
        assert {f.status.value for f in judged} == {"warn"}


@each_row(("text", "nodes"), rows("nodes"))
def test_one_node_has_no_traffic_between_nodes(text: str, nodes: int | None) -> None:
    """NCCL_IB_DISABLE costs nothing in a job of one node, and says so."""
    found = read_text(text)
    assert found.nodes == nodes
    (judged,) = lint(found.environments[0], nodes=found.nodes)
    assert (judged.status == "info", "the job has one node" in judged.message) == (nodes == 1,) * 2


@each_row(("change", "differs"), rows("replicas"))
def test_pods_of_a_job_share_what_every_rank_must(change: tuple[str, str], differs: list[str]) -> None:
    """Ranks that choose another algorithm or network hang; a container without env counts too."""
    found = read_text(rows("texts")()["replicas"].replace(*change))
    noted = [note for each in found.environments for note in each.findings]
    assert [(note.code, note.subject, note.status) for note in noted] == [
        ("env.pair.differs", name, "fail") for name in differs
    ]


INNER = "kind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n" + "".join(
    f"  - {{name: {name}, env: [{{name: NCCL_NET, value: IB}}]}}\n" for name in ("one", "two")
)


def test_a_text_inside_a_text_is_named_once_with_its_own_places() -> None:
    """A ConfigMap's key names the file; a manifest inside it has its own objects and containers."""
    held = {"job.yaml": INNER, "env.yaml": "NCCL_NET: IB\n", "run.sh": "cat > a.conf <<E\nNCCL_NET=IB\nE\n"}
    config = json.dumps({"kind": "ConfigMap", "metadata": {"name": "c"}, "data": held})
    script = f"#!/bin/bash\ncat > job.yaml <<E\n{INNER}E\nkubectl apply -f job.yaml\n"
    assert [[each.place for each in read_environment(text)] for text in (config, script)] == [
        ["ConfigMap/c job.yaml > Pod/p one", "ConfigMap/c job.yaml > Pod/p two", "ConfigMap/c env.yaml",
         "ConfigMap/c run.sh > a.conf"],
        ["shell script > job.yaml > Pod/p one", "shell script > job.yaml > Pod/p two"],
    ]  # fmt: skip


BARE = "kind: Pod\nspec:\n  containers:\n  - name: t\n    env:\n"
ROWS = data_of(__file__, "lint_unread.yaml")


@each_row("row", [row for rows in ROWS.values() for row in rows])
def test_what_is_set_and_what_is_not_understood(row):
    """The settings of a text, the lines that are named as not understood, and settings that no program gets."""
    found = read_text(row["text"], None, row.get("file", ""))
    settings = {
        name: value  # None where only the name is known
        for each in found.environments
        for name, value in ({**each.unresolved, **each.environment} | dict.fromkeys(each.unresolved)).items()
    }
    assert settings == row["sets"]
    assert [each.line for each in found.unread] == row.get("unread", [])
    if "unreached" in row:
        assert {each.name: each.line for each in found.unreached} == row["unreached"]
    if "because" in row:
        assert [each.why for each in found.unreached] == row["because"]
    lines = {name: line for each in found.environments for name, line in each.lines.items()}
    assert lines == row.get("lines", lines)
    assert list(found.files) == row.get("files", list(found.files))
    assert len(found.environments) == row.get("environments", len(found.environments))
    if not any(row["sets"].values()):  # of an unknown value only the name is judged
        assert not [each for named in found.environments for each in lint(named)]


def test_each_way_has_the_line_of_its_own_assignment() -> None:
    text = "if [ $A ]; then\nexport NCCL_IB_TC=106\nelse\nexport NCCL_IB_TC=300\nfi\n./a\n"
    found = read_text(text, None, "a.sh").environments
    assert [(each.environment, each.lines) for each in found] == [
        ({"NCCL_IB_TC": "300"}, {"NCCL_IB_TC": 4}), ({"NCCL_IB_TC": "106"}, {"NCCL_IB_TC": 2})
    ]  # fmt: skip


def test_branches_of_a_template_do_not_shadow_each_other() -> None:
    for begin, other, end in rows("branches")():
        text = f"{BARE}    {begin}\n    - name: NCCL_IB_TC\n      value: '106'\n    {other}\n    - name: NCCL_IB_TC\n"
        found = read_text(f"{text}      value: '300'\n    {end}\n", None, "a.yaml")
        assert not [finding for each in found.environments for finding in each.findings]
        assert [each.environment for each in found.environments] == [{"NCCL_IB_TC": "106"}, {"NCCL_IB_TC": "300"}]


def test_secrets_are_not_repeated() -> None:
    text = 'export NCCL_DEBUG=INFO NCCL_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345 NCCL_X="password=hunter2secret"\n'
    answer = lint_text(text, "auto", nccl_version=None, machine=None)
    assert len(answer.checks) >= 2
    for secret in ("hf_abcdefghijklmnopqrstuvwxyz012345", "hunter2secret"):
        assert secret not in str(answer)


@each_row(("text", "first", "code"), rows("first_line"))
def test_the_first_line_and_the_exit_code(text: str, first: str, code: int) -> None:
    done = topoflight("lint-env", "-", given=text)
    assert (done.exit_code, (done.stdout or done.stderr).startswith(first)) == (code, True), done.output


@pytest.mark.corpus
@each_row("path", lambda: sorted((corpus_folder() / "defects" / "lint").iterdir()))
def test_defects_of_the_corpus(path: Path) -> None:
    """Every shared input is read whole."""
    found = read_text(path.read_text(), None, str(path))
    assert found.names() and not found.unread


def test_documents_of_a_file_are_places_and_not_nodes() -> None:
    pods = [BARE.replace("spec:", f"metadata: {{name: {name}}}\nspec:", 1) for name in ("a", "b", "c")]
    text = "---\n".join(f"{pod}    - {{name: NCCL_P2P_DISABLE, value: '1'}}\n" for pod in pods)
    found = lint_text(text, "auto", nccl_version=None, machine=None)
    (place,) = {group.places for group in group_findings(found.checks) if "env.debug.leftover" in group.codes}
    assert place == "in 3 places"
