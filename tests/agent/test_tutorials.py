"""The tour and the tutorials, followed from first line to last; TOPOFLIGHT_UPDATE_GOLDEN=1 writes what one sees.

A `yaml` or `text` block that begins with `# NAME` is a file that the reader saves. In a `console` block `topoflight` is
run, over the stand-in API server where it asks a cluster; a manifest that `kubectl` or `oc` applies is validated. What
is left is in tutorials.yaml, with the reason. A block's output is what was printed, less what `…` replaces.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from api_server import write_kubeconfig
from click.testing import CliRunner
from kustomization import helm, render
from networks_cluster import Networks
from rigs import crds
from rigs.tables import ROOT, data_of, each_row

from agent.cli.hosts import DEMO
from agent.cli.main import cli

DOCS, MACHINES = ROOT / "docs", ROOT / "tests" / "machines"
TABLES = data_of(__file__, "tutorials.yaml")
PAGES = tuple(TABLES["pages"])
BOTH = ("openshift.md", "eks.md")  # in Korean too
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.M | re.S)
# 5 h, 2 h 30 and 1 h 40 (published) over 590 steps, in seconds of a step: 10 epochs of 59 (7,473 rows by 128).
PUBLISHED = {"eth0": 18000 / 590, "net1": 9000 / 590, "rdma": 6000 / 590}
NO_SCHEMA = ("eksctl.io/", "security.openshift.io/")  # no definition of these is held
CORE = re.compile(r"v1$|apps/|batch/|rbac\.|networking\.k8s|apiextensions|scheduling\.|policy/|admissionregistration")


@dataclass
class Reader:
    """A reader who follows a page, in a folder of the test."""

    page: str
    folder: Path
    captured: Iterator[str]
    applied: list[dict] = field(default_factory=list)
    printed: list[tuple[list[str], list[str], str]] = field(default_factory=list)  # shown, printed, command

    def follow(self) -> None:
        """Every block in order."""
        for indent, kind, text in BLOCK.findall((DOCS / self.page).read_text(encoding="utf-8")):
            lines = [line.removeprefix(indent) for line in text.splitlines()]
            if kind == "console":
                seen = []
                for command, shown in commands("\n".join(lines)):
                    output = self.run(command)
                    seen += [f"$ {command}", *(shown if matches(shown, output) else output)]
                    self.printed.append((shown, output, command))
                self.renewed(indent, text, seen)
            elif kind in ("yaml", "text") and lines[0].startswith("# "):
                (self.folder / lines[0].removeprefix("# ")).write_text("\n".join(lines[1:]) + "\n")

    def renewed(self, indent: str, text: str, seen: list[str]) -> None:
        """The page with what was seen, where it is asked to be written."""
        if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
            path = DOCS / self.page
            new = "".join(f"{indent}{line}".rstrip() + "\n" for line in seen)
            path.write_text(path.read_text(encoding="utf-8").replace(text, new, 1), encoding="utf-8")

    def run(self, command: str) -> list[str]:
        """What the command prints here; nothing for those of a cluster."""
        words = shlex.split(command)
        inside = words.index("--") + 1 if "--" in words else len(words)
        if words[0] == "topoflight":
            return self.ours(words[1:])
        if words[inside:] == ["topoflight", "capture", ">", words[-1]]:
            node = (MACHINES / f"{next(self.captured)}.json").read_text()
            role = '"environment": {\n   "": {"TOPOFLIGHT_ROLE": "agent"}'  # the agent's pod: its manifest says so
            (self.folder / words[-1]).write_text(node.replace('"environment": {\n   "": {}', role))
        elif command.endswith("| topoflight evidence -"):
            return self.ours(["evidence", "-"], TABLES["logs"][words[words.index("|") - 1]])
        elif words[1:3] == ["apply", "-k"]:
            self.applied += render(ROOT / words[3])
        elif words[1:3] == ["apply", "-f"]:
            self.applied += [d for d in yaml.safe_load_all((self.folder / words[3]).read_text()) if d]
        elif words[:2] == ["helm", "upgrade"]:
            values = ROOT / words[words.index("-f") + 1]
            made = helm("template", words[3], str(ROOT / words[4]), "-n", "topoflight", "-f", str(values)).stdout
            self.applied += [d for d in yaml.safe_load_all(made) if d]
        else:
            assert any(command.startswith(known) for known in TABLES["elsewhere"]), (
                f"{self.page}: nobody follows {command!r}"
            )
            for name in re.findall(r"--from-file=\S+?=(\S+)|-f (\S+)", command):
                assert yaml.safe_load((self.folder / "".join(name)).read_text())
            for patch in re.findall(r"-p '(.*)'", command):
                assert yaml.safe_load(patch)
        return []

    def ours(self, words: list[str], given: str = "") -> list[str]:
        """A command of ours, run; nothing it prints is an error that the page does not show."""
        into = words[words.index(">") + 1] if ">" in words else None
        words = [str(DEMO) if word == "$DEMO" else word for word in words[: words.index(">") if into else None]]
        if words[0] == "capture":
            shutil.copy(MACHINES / f"{next(self.captured)}.json", self.folder / words[-1])
            return []
        done = CliRunner().invoke(cli, words, input=given, catch_exceptions=False)
        assert done.exit_code in (0, 3, 4), f"{self.page}: {words}: {done.exit_code}: {done.output}"
        if into:
            (self.folder / into).write_text(done.stdout)
        return [line.rstrip() for line in (done.stderr if into else done.output).strip("\n").splitlines()]


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines are what was printed; a line `…` matches any lines, `…` in a line for any text."""
    parts = [".*" if line.strip() == "…" else ".*".join(re.escape(p) for p in line.split("…")) for line in shown]
    parts = [re.sub(r"(?<=\.\*\\ )m?s\b", "m?s", part) for part in parts]  # a busy machine takes seconds
    pattern = "\n".join(
        f"(?s:{part})" if line.strip() == "…" else f"(?-s:{part})" for part, line in zip(parts, shown, strict=True)
    )
    return re.fullmatch(pattern.replace("(?s:.*)\n", "(?s:(?:.*\n)?)"), "\n".join(printed)) is not None


@pytest.fixture(scope="module", params=PAGES)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Who has followed a page to its end."""
    folder = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patch, Networks(folder, "bars", PUBLISHED) as server:
        server.condition = {"type": "Succeeded"}
        patch.setenv("KUBECONFIG", str(write_kubeconfig(folder / "kubeconfig", server.url)))
        patch.setenv("COLUMNS", "100")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.chdir(folder)
        made = Reader(request.param, folder, iter(TABLES["pages"][request.param]))
        made.follow()
        yield made


def test_what_one_sees_is_what_is_printed(reader: Reader) -> None:
    """Each block of output, against its command."""
    for shown, printed, command in reader.printed:
        assert matches(shown, printed), f"{reader.page}: $ {command}\n" + "\n".join(printed)


def test_every_core_manifest_is_strictly_valid(reader: Reader) -> None:
    """As the API server with strict field validation; a custom kind is of a definition that is held, or named."""
    for document in reader.applied:
        if CORE.match(document["apiVersion"]):
            kubernetes_validate.validate(document, "1.35", strict=True)
    assert reader.applied or not reader.page.startswith("tutorials/")


@pytest.mark.corpus
def test_every_custom_manifest_holds_no_field_its_api_would_drop(reader: Reader, corpus: Path) -> None:
    """The definitions' own schemas, unknown fields refused."""
    custom = [
        d for d in reader.applied if not CORE.match(d["apiVersion"]) and not d["apiVersion"].startswith(NO_SCHEMA)
    ]
    for document in custom:
        crds.validate(corpus, document)


@each_row("page", BOTH)
def test_the_korean_page_has_the_same_blocks(page: str) -> None:
    """In the same order, and as many steps and rows of remedies."""
    english, korean = ((DOCS / place / page) for place in ("tutorials", "ko"))
    text = korean.read_text(encoding="utf-8")
    ours, theirs = BLOCK.findall(english.read_text(encoding="utf-8")), BLOCK.findall(text)
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN") == "1":
        blocks = iter(ours)
        text = BLOCK.sub(lambda _: "```{1}\n{2}```".format(*next(blocks)), text)
        korean.write_text(text, encoding="utf-8")
        theirs = BLOCK.findall(text)
    assert theirs == ours
    for mark in ("\n## ", "\n|"):
        assert text.count(mark) == english.read_text(encoding="utf-8").count(mark), mark


def test_what_is_not_run_is_on_a_page() -> None:
    """The list has no entry that no page needs."""
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    assert [known for known in TABLES["elsewhere"] if f"$ {known}" not in text] == []
