"""Settings that are easily lost, lines that cannot be understood, and what the verb answers then."""

from pathlib import Path

import pytest
import yaml
from rigs.command import topoflight
from rigs.tables import corpus_folder, each_row, rows_of

from agent.checks.findings import group_findings
from agent.cli.lint_env import lint_text
from planner.lint.environment import lint
from planner.lint.sources import read_text

rows = rows_of(__file__)
POD = "kind: Pod\nspec:\n  containers:\n  - name: t\n    env:\n"
ROWS = yaml.safe_load(Path(__file__).with_name("lint_unread.yaml").read_text(encoding="utf-8"))


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
        text = f"{POD}    {begin}\n    - name: NCCL_IB_TC\n      value: '106'\n    {other}\n    - name: NCCL_IB_TC\n"
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
    pods = [POD.replace("spec:", f"metadata: {{name: {name}}}\nspec:", 1) for name in ("a", "b", "c")]
    text = "---\n".join(f"{pod}    - {{name: NCCL_P2P_DISABLE, value: '1'}}\n" for pod in pods)
    found = lint_text(text, "auto", nccl_version=None, machine=None)
    (place,) = {group.places for group in group_findings(found.checks) if "env.debug.leftover" in group.codes}
    assert place == "in 3 places"
