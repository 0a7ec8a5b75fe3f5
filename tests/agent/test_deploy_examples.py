"""The examples of docs/examples: they parse, and every command in them is one that this release understands."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from rigs.command import topoflight
from rigs.tables import each_row

from agent.checks.codes import ALL_CODES
from agent.checks.expect import parse
from agent.cli.main import cli

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = {path.stem: path for path in sorted((ROOT / "docs/examples").glob("*.yaml"))}
COMMAND = re.compile(r"(?:^ *|run: |- |-- |\$ )topoflight ((?:[a-z-]+)(?: [^|#\n`]+)?)", re.M)


def understood(words: list[str]) -> None:
    verb, *rest = words
    command = cli.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None, f"no verb {verb}"
    command.make_parser(command.make_context(verb, [], resilient_parsing=True)).parse_args(rest)
    for option, value in pairwise(rest):
        if option in ("--require", "--skip") and "*" not in value:
            assert value in ALL_CODES, value


@each_row("name", ["github-actions", "gitlab-ci", "init-container", "tekton-task"])
def test_an_example_is_yaml_whose_commands_and_expectations_are_understood(name: str) -> None:
    """Verbs, options and check names that exist, and what a node must have."""
    text = EXAMPLES[name].read_text(encoding="utf-8")
    assert isinstance(yaml.safe_load(text), dict)
    found = [m.group(1).split(" || ")[0].split("; ")[0] for m in COMMAND.finditer(text.replace("\\\n", " "))]
    assert found or name == "init-container"
    for line in found:
        understood(shlex.split(line))
    wanted = [word for word in text.replace('"', " ").replace(",\n", " ").split() if word.startswith("gpus=")]
    assert "--expect" in text and wanted
    assert {parse([words.rstrip("],")]).gpus for words in wanted} == {8}
    assert set(EXAMPLES) == {"github-actions", "gitlab-ci", "init-container", "tekton-task"}


def test_the_init_container_is_a_valid_job() -> None:
    """Strictly, and its arguments are understood."""
    job: dict[str, Any] = yaml.safe_load(EXAMPLES["init-container"].read_text())
    kubernetes_validate.validate(job, "1.35", strict=True)
    (gate,) = job["spec"]["template"]["spec"]["initContainers"]
    understood(gate["args"])


def test_the_pipelines_keep_the_report_and_the_gates_word() -> None:
    """What each system's own schema cannot know: files that are written are the files that are kept."""
    read = {name: yaml.safe_load(path.read_text()) for name, path in EXAMPLES.items()}
    (job,) = read["github-actions"]["jobs"].values()
    gate, keep = job["steps"]
    assert "junit=preflight.xml" in gate["run"] and keep["with"]["path"] == "preflight.*" and keep["if"] == "always()"
    assert True in read["github-actions"] or "on" in read["github-actions"], "YAML 1.1 reads the word `on` as true"
    gitlab = read["gitlab-ci"]["preflight"]
    assert f"junit={gitlab['artifacts']['reports']['junit']}" in gitlab["script"][0]
    assert f"json={gitlab['artifacts']['paths'][0]}" in gitlab["script"][0] and gitlab["artifacts"]["when"] == "always"
    assert gitlab["image"]["entrypoint"] == [""], "the runner starts a shell by the image's entrypoint"
    task = read["tekton-task"]["spec"]
    (step,) = task["steps"]
    used = set(re.findall(r"\$\((params|results|workspaces)\.([a-z]+)", yaml.safe_dump(step)))
    assert used == {(kind, one["name"]) for kind in ("params", "results", "workspaces") for one in task[kind]}
    assert 'export REPORT="${REPORTS:-/tmp}/' in step["script"] and '-o json="$REPORT"' in step["script"]
    assert "$(" not in step["script"], "a parameter in a script would be code"
    assert step["script"].rstrip().endswith("exit $code"), "the gate's exit code is the step's"


def test_the_example_without_a_gpu_is_two_pods_of_the_built_in_model() -> None:
    """The command of docs/tutorials/two-pods.md, with a node that has none; nothing asks for one, or for a download."""
    readme = (ROOT / "docs/tutorials/two-pods.md").read_text()
    (line,) = re.findall(r"\$ topoflight (launch .*)", readme)
    words = ["tests/machines/cpu-only-vm.json" if word == "node.json" else word for word in line.split()]
    done = topoflight(*words, "--dry-run")
    assert done.exit_code == 0, done.output
    documents = list(yaml.safe_load_all(done.stdout))
    documents += yaml.safe_load_all((ROOT / "deploy/example/claim.yaml").read_text())
    for document in documents:
        kubernetes_validate.validate(document, "1.35", strict=True)
    job = next(d for d in documents if d["kind"] == "Job")["spec"]
    pod = job["template"]["spec"]
    assert job["completions"] == 2 and [one["name"] for one in pod["initContainers"]] == ["preflight"]
    assert "nvidia.com" not in str(documents) and "random:tiny-llama" in str(documents)
    claims = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if "persistentVolumeClaim" in each}
    assert claims == {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    for name in ("kind.yaml", "second-network.yaml"):
        assert list(yaml.safe_load_all((ROOT / "deploy/example" / name).read_text()))
