"""Documentation: commands, snippets and examples are run or parsed; a full entry for each code; the site is whole."""

import ast
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import kubernetes_validate
import pytest
import yaml
from alerts import ALERTS, DOCS
from click.testing import CliRunner
from rigs.command import interpreter, parse as parse_command, topoflight
from rigs.recorded import path_of
from rigs.tables import PYPROJECT, ROOT, each_row
from test_tutorials import PAGES as TUTORIALS

from agent.checks.expect import parse
from agent.checks.findings import PAGES as REFERENCES, read_entries
from agent.checks.history import AT_ONCE
from agent.checks.host_checks import ALL_CODES
from agent.cli.main import VERBS, cli, explain
from collectives.nccl_log.codes import CODES as LOG_CODES
from planner.lint.findings import CODES as ENV_CODES, TEXTS

FOLLOWED = {ROOT / "docs" / page for page in (*TUTORIALS, "ko/openshift.md", "ko/eks.md")}
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "locks").glob("*.md")]
)
CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`|^\$ ((?:.*\\\n)*.*)$", re.M)
BLOCK = re.compile(r"^```(python|yaml|json|toml)\n(.*?)^```", re.M | re.S)
LOG = """\
n1:10:20 [0] NCCL INFO NCCL_DEBUG set by environment to INFO
n1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
"""
MATRIX = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n"
# What a reader puts instead of a word in capitals, and the files that are in a reader's folder.
WORDS = {
    "CODE": "rdma.port.down", "VERSION": "2.27.7", "NODE": "gpu-01", "DIR": "fleet", "LOG": "nccl.log",
    "A": "A.json", "B": "B.json", "PID": "1", "CLASS": "efs",
}  # fmt: skip
FILE_OF = {"topo": "matrix.txt", "lint-env": "job.env", "evidence": "nccl.log"}
# run; others make load or ask a cluster
READS = {"scan", "topo", "diff", "recommend", "lint-env", "evidence", "explain"}
# recordings by the names of the pages
COPIES = ("node", "node01", "node02", "good", "A", "B", "HEALTHY", "THIS", "fleet/a", "fleet/b")


def commands() -> Iterator[tuple[str, str]]:
    """Page and command, for whatever a reader may type."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page in FOLLOWED:
            text = re.sub(r"^ *```console\n.*?^ *```$", "", text, flags=re.M | re.S)  # test_tutorials runs these
        for found in CODE.finditer(text):
            text = re.sub(r"\s*\\?\n\s*", " ", (found[1] or found[2]).replace("\\|", "|")).strip()
            yield page.relative_to(ROOT).as_posix(), text


def ours() -> list[tuple[str, str, bool]]:
    """The part of each command that is Topoflight's, once, and whether it reads standard input."""
    found: dict[str, tuple[str, bool]] = {}
    for page, text in commands():
        for part in re.split(r"\s\|\s|\s&&\s|;\s", text.replace(" -- topoflight ", " | topoflight ")):
            line = re.sub(r"\s#.*|\s>\s*\S+$", "", part).replace("[", "").replace("]", "").strip()
            words = line.split()
            if words[:1] == ["topoflight"] and len(words) > 1 and re.fullmatch(r"[a-z][a-z-]*", words[1]):
                found.setdefault(line, (page, "| topoflight evidence" in text))
    return [(page, line, piped) for line, (page, piped) in sorted(found.items())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name: recordings, a log, an environment, a matrix, manifests."""
    made = tmp_path_factory.mktemp("reader")
    (made / "fleet").mkdir()
    for name in COPIES:
        shutil.copy(path_of(), made / f"{name}.json")
    (made / "nccl.log").write_text(LOG)
    (made / "job.env").write_text("NCCL_DEBUG=INFO\n")
    (made / "matrix.txt").write_text(MATRIX)
    (made / "nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    (made / "calibration.json").write_text("{}")
    pod = {"spec": {"containers": [{"name": "a", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}]}}
    (made / "trainjob.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", **pod}))
    return made


def filled(line: str, folder: Path) -> list[str]:
    """The words with what a reader would put instead of those in capitals."""
    words = shlex.split(line)[1:]
    given = {**WORDS, "FILE": FILE_OF.get(words[0], "job.env")}
    places = {"/etc/nccl.conf": folder / "nccl.conf", "eth0": "eno1", "eth1": "eno1"}
    return [str(places[word]) if word in places else given.get(word, word) for word in words]


@pytest.mark.long
@each_row(("page", "line", "piped"), ours)
def test_a_command_of_the_pages_can_be_typed(page, line, piped, folder, monkeypatch):
    """Its verb and options exist; where it only reads, it is run and neither refused nor broken."""
    words = filled(line, folder)
    assert words[0] in VERBS, page
    known = options(words[0])
    used = {word.partition("=")[0] for word in words[1:] if word.startswith("-") and word not in ("-", "--")}
    assert used <= known.keys(), page
    if words[-1] in known and not getattr(known[words[-1]], "is_flag", False):  # the page names the option alone
        return
    parse_command(words)
    cut_short = (
        words[0] in FILE_OF and not set(words) & {*FILE_OF.values(), "-", "trainjob.yaml"} and words[0] != "topo"
    )
    if words[0] == "launch" and "--api" in words:
        words += ["--dry-run"]
    elif (
        words[0] not in READS or (words[0] == "diff" and len(words) < 3) or (cut_short and not piped) or "PATH" in line
    ):
        return
    if words[0] == "recommend" and "--calibration" in words:  # what `calibrate` writes takes load to make
        return
    monkeypatch.chdir(folder)
    done = topoflight(*words, given=LOG, KUBECONFIG="/nonexistent")
    assert done.exit_code not in (1, 2), f"{page}: {done.stderr}"


def options(verb: str) -> dict[str, click.Parameter]:
    """The options of a verb by each of their names; none of a verb that does not exist."""
    command = cli.get_command(click.Context(cli), verb) if verb in VERBS else None
    return {name: one for one in (command.params if command else ()) for name in (*one.opts, *one.secondary_opts)
            if isinstance(one, click.Option)}  # fmt: skip


def texts_of_the_product() -> Iterator[tuple[str, str]]:
    """(Place, text) of each string in code that names a command, and each line of tables; what is filled in is 7."""
    for folder in ("agent", "planner", "probes", "collectives", "finetune", "topology", "contracts"):
        for source in sorted((ROOT / folder).rglob("*.py")):
            if "topoflight " not in (code := source.read_text()):
                continue
            for node in ast.walk(ast.parse(code)):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                yield f"{source.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", "".join(
                    str(one.value) if isinstance(one, ast.Constant) else "7" for one in parts
                    if isinstance(one, ast.Constant | ast.FormattedValue))  # fmt: skip
        for source in sorted((ROOT / folder).rglob("*.toml")):
            for number, line in enumerate(source.read_text().splitlines(), 1):
                yield f"{source.relative_to(ROOT)}:{number}", re.sub(r"\{\w+\}", "7", line.rstrip("'\""))


def test_a_command_that_the_product_names_can_be_typed() -> None:
    """In the texts of the code: remedies, notes, errors."""
    wrong, seen = [], 0
    command = re.compile(r"\btopoflight ([a-z][a-z-]*)((?: [^\s`;()|]+)*)")
    named = ((place, *found) for place, text in texts_of_the_product() for found in command.findall(text))
    for place, verb, more in named:
        known, words = options(verb), re.split(r"[,:]? ", re.split(r"[,:] ", more)[0])[1:]
        for word, value in zip(words, [*words[1:], ""], strict=False):
            if not re.fullmatch(r"--[a-z-]+", word):
                continue
            number = word in known and isinstance(known[word].type, click.types.IntParamType)
            if word not in known or (number and not re.fullmatch(r"\d+|[A-Z]*\W?", value)):
                wrong.append((place, verb, word, value))
            seen += 1
    assert not wrong
    assert seen > 20


def test_what_is_not_ours_names_what_is_there() -> None:
    """Targets of make, scripts, modules and manifests that a command names exist."""
    targets = re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M)
    wrong = []
    for page, text in commands():
        words = text.split()
        if words[0] == "make" and len(words) > 1 and words[1] not in targets:
            wrong.append((page, text))
        for script in re.findall(r"(?:^|python )((?:bench|locks|tests)/[a-z_/]+\.(?:py|sh))", text):
            source = ROOT / script
            if not source.exists():
                wrong.append((page, text))
            elif text.startswith("python "):
                options = [word for word in words if word.startswith("--")]
                wrong += [(page, text) for option in options if f'"{option}"' not in source.read_text()]
        for module in re.findall(r"-m ((?:finetune|collectives|agent|probes)[a-z._]*)", text):
            if not (ROOT / f"{module.replace('.', '/')}.py").exists():
                wrong.append((page, text))
        for manifest in re.findall(r"-[kf] (deploy/[\w./-]+)", text):
            if not (ROOT / manifest).exists():
                wrong.append((page, text))
    assert not wrong


@each_row("page", PAGES)
def test_snippets_run_or_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python from the top of the repository; data by its own reader."""
    monkeypatch.chdir(ROOT)
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": lambda text: list(yaml.safe_load_all(text))}
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(text, str(page), "exec"), {"__name__": "snippet"})  # noqa: S102 - our own documentation
        else:
            readers[kind](text)


def test_what_a_page_installs_has_an_image_that_can_be_pulled() -> None:
    """Manifests and chart name registry.example, which nobody has; a page for kind loads its images into the nodes."""
    wrong, seen = [], 0
    for page in [*PAGES, ROOT / "deploy/chart/values.yaml"]:
        text = page.read_text(encoding="utf-8")
        for line in re.findall(r"helm upgrade --install .*|apply -k deploy/daemonset/overlays/[a-z-]+$", text, re.M):
            named = (
                "--set image.repository=" in line
                if line.startswith("helm")
                else re.search("set image daemonset/|kind load", text)
            )
            seen, wrong = seen + 1, wrong if named else [*wrong, (page.name, line)]
    assert not wrong
    assert seen > 5


def test_links_between_pages_lead_somewhere() -> None:
    """The file exists, and the heading in it that a fragment names."""

    def anchors(page: Path) -> set[str]:
        lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
        return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}

    dead = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            there = page.parent / name if name else page
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                dead.append((page.relative_to(ROOT).as_posix(), target))
    assert not dead


EXAMPLES = {path.stem: path for path in sorted((ROOT / "docs/examples").glob("*.yaml"))}
COMMAND = re.compile(r"(?:^ *|run: |- |-- |\$ )topoflight ((?:[a-z-]+)(?: [^|#\n`]+)?)", re.M)


@each_row("name", ["github-actions", "gitlab-ci", "init-container", "tekton-task"])
def test_an_example_is_yaml_whose_commands_and_expectations_are_understood(name: str) -> None:
    """Verbs, options and check names that exist, and what a node must have."""
    text = EXAMPLES[name].read_text(encoding="utf-8")
    document: dict = yaml.safe_load(text)
    if name == "init-container":
        kubernetes_validate.validate(document, "1.35", strict=True)
        (gate,) = document["spec"]["template"]["spec"]["initContainers"]
        parse_command(gate["args"])
    found = [m.group(1).split(" || ")[0].split("; ")[0] for m in COMMAND.finditer(text.replace("\\\n", " "))]
    assert found or name == "init-container"
    for line in found:
        words = shlex.split(line)
        parse_command(words)
        named = [value for option, value in pairwise(words) if option in ("--require", "--skip") and "*" not in value]
        assert set(named) <= set(ALL_CODES), named
    wanted = [word for word in text.replace('"', " ").replace(",\n", " ").split() if word.startswith("gpus=")]
    assert "--expect" in text and wanted
    assert all("gpus" in {one.key for one in parse([words.rstrip("],")]) if one.value == 8} for words in wanted)
    assert set(EXAMPLES) == {"github-actions", "gitlab-ci", "init-container", "tekton-task"}


def test_the_pipelines_keep_the_report_and_the_gates_word() -> None:
    """What each system's own schema cannot know: files that are written are the files that are used."""
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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` builds it."""
    made = tmp_path_factory.mktemp("site")
    (recipe,) = re.findall(r"^docs: \$\(READY\)\n\t\$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.M)
    done = interpreter("-m", "mkdocs", *recipe.split(), "--site-dir", made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_every_page_shows_the_version_and_loads_nothing_from_elsewhere(site):
    version = PYPROJECT["project"]["version"]
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(\w+:[^\"]*)\"", text)
        links = re.findall(r"<link [^>]*>", text)
        loaded += [tag for tag in links if "://" in tag and not re.search(r'rel="(canonical|prev|next)"', tag)]
        assert not loaded and "```" not in text[text.index("<article") : text.index("</article>")], page
        header = text[text.index("<header") : text.index("</header>")]
        assert f"Topoflight {version}" in header and "data-md-toggle" in text, page
    assert (site / "search" / "search_index.json").stat().st_size > 100_000
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:", sheet.read_text(encoding="utf-8")), sheet


def test_what_others_link_to_is_there(site):
    """Each alert's runbook_url, a heading for each code that `explain` knows, and a section for each command."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted((site / "reference").rglob("*.html"))}
    for alert in ALERTS:
        path, _, anchor = alert.rule["annotations"]["runbook_url"].removeprefix(f"{DOCS}/").partition("#")
        assert f'id="{anchor}"' in texts[site / path / "index.html"], alert.name
    headings = re.findall(r"<h[23] id=\"([^\"]+)\"", "".join(texts.values()))
    assert [name for name in read_entries() if name.startswith("Topoflight") and name.lower() not in headings] == []
    assert set(VERBS) <= set(re.findall(r"<h2 id=\"([^\"]+)\"", texts[site / "reference/cli/index.html"]))


@each_row("page", sorted((ROOT / "docs" / "how-to").glob("*.md")))
def test_a_how_to_guide_has_goal_prerequisites_commands_verify_and_undo(page):
    text = page.read_text(encoding="utf-8")
    parts = (r"\*\*Goal:\*\* ", r"\*\*Prerequisites:\*\* ", r"^ *```(console|sh)$", r"\b[Vv]erify",
             r"\b([Uu]ndo|Uninstall)\b")  # fmt: skip
    assert [part for part in parts if not re.search(part, text, re.M)] == []


PARTS = ["Meaning", "Cause", "Confirm", "Remedy", "Severity"]
GATE = {code for code in ALL_CODES if not code.startswith("env.")}


def headings(name: str) -> list[str]:
    return re.findall(
        r"^### `([^`]+)`$", (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def diagnoses() -> set[str]:
    """Codes that `why` gives its causes: literals of the sources, and of the tests where the code builds them."""
    places = [*(ROOT / "planner/why").glob("*.py"), *(ROOT / "agent/why").glob("*.py"), ROOT / "tests/why/test_why.py"]
    text = "".join(place.read_text(encoding="utf-8") for place in places)
    found = set(re.findall(r"\"((?:rank|ranks|call|link|all|timeout|step|model|rendezvous)\.[a-z]+)\"", text))
    words = tomllib.loads((ROOT / "planner/why/why.toml").read_text(encoding="utf-8"))
    found |= {
        *(row["code"] for row in words["kind"].values() if "code" in row),
        *(row["code"] for row in words["cause"].values() if "_" not in row["code"]),
    }
    return found | set(re.findall(r"code=\"([a-z]+)\"", text))


def test_every_code_has_one_entry_on_its_page() -> None:
    """No code without an entry, no entry without a code, none twice. The message names the page to edit."""
    pages = {name: headings(name) for name in REFERENCES}
    codes = {"findings": GATE, "settings": {*ENV_CODES}, "log-problems": {*LOG_CODES},
             "diagnoses": diagnoses() | {*pages["diagnoses"]}}  # fmt: skip
    wrong = [f"docs/reference/{page}.md: {'add' if code in wanted else 'remove'} the entry ### `{code}`"
             for page, wanted in codes.items() for code in sorted(wanted ^ {*pages[page]})]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    assert pages["alerts"] == [alert.name for alert in ALERTS] and set(AT_ONCE) <= GATE
    assert len(read_entries()) == sum(map(len, pages.values()))


@each_row("name", sorted(read_entries()))
def test_an_entry_is_whole(name: str) -> None:
    """Each point once, in order, in sentences; the severities are those of the code."""
    points = re.findall(r"^- \*\*(\w+):\*\* (\S.*)$", read_entries()[name], flags=re.MULTILINE)
    assert [point for point, _ in points] == PARTS + (["Once"] if name in AT_ONCE else [])
    assert all(text.endswith(".") for _, text in points), points
    told = re.findall(r"[a-z]+", dict(points)["Severity"].partition(".")[0])
    if name in LOG_CODES:
        assert told == [LOG_CODES[name].severity]
    elif name in ENV_CODES:
        assert {text["status"] for key, text in TEXTS.items() if key.partition("/")[0] == name} - {None} <= set(told)


def test_files_that_the_guides_of_contributors_name_exist() -> None:
    """Of the repository, or below tests/ as in the table of files that take long; and the tests that any page names."""
    text = "".join((ROOT / page).read_text("utf-8") for page in ("CONTRIBUTING.md", "docs/explanation/architecture.md"))
    named = set(re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|toml|yaml|md|j2|tsv))`", text)) - {"agent/base/verbs/VERB.toml"}
    assert [name for name in sorted(named) if not ((ROOT / name).exists() or (ROOT / "tests" / name).exists())] == []
    tests = set(re.findall(r"\b([a-z0-9]+/test_\w+)", "".join(page.read_text("utf-8") for page in PAGES)))
    assert [name for name in sorted(tests) if not any((ROOT / "tests").rglob(f"{name}.*"))] == []


def test_named_codes_exist() -> None:
    """An entry that sends the reader to another code sends it to one that is there."""
    firsts = "|".join(sorted({code.split(".")[0] for code in GATE}))
    text = re.sub(r"`[^`]*`", "", "".join(read_entries().values()))  # file names such as run.json are in code
    named = set(re.findall(rf"(?<![\w.])(?:{firsts})(?:\.[a-z_0-9]+)+\b", text))
    assert named - read_entries().keys() == set()
    assert "limits.memlock.low" in named


def test_explain_prints_the_entry() -> None:
    """`topoflight explain CODE` answers for every code and lists all of them."""
    for code in read_entries():
        result = CliRunner().invoke(explain, [code])
        assert result.exit_code == 0 and result.output.startswith(f"{code}\n"), code
        assert all(f"{part}:" in result.output for part in PARTS), code
        assert max(map(len, result.output.splitlines())) <= 80, code
    listed = CliRunner().invoke(explain, ["--list"])
    assert [line.split()[0] for line in listed.output.splitlines()] == list(read_entries())
