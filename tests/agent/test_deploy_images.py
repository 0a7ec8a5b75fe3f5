"""What is shipped: the images as text and their build step on a host (tests/images builds them), and the wheel."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import man_page
import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from rigs.tables import ROOT, each_row

from agent.checks.findings import PAGES

IMAGES = ROOT / "deploy/images"


@each_row("name", ["Containerfile.agent", "Containerfile.finetune"])
def test_one_digest_pins_every_stage_and_the_user_is_a_number_that_is_not_root(name: str) -> None:
    """What --build-arg PYTHON_IMAGE names is all that comes from a registry; runAsNonRoot can check only a number.

    Group 0 is what OpenShift's arbitrary users have.
    """
    lines = (IMAGES / name).read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    copied = [line for line in lines if line.startswith("COPY --from=")]
    assert set(bases) == {"${PYTHON_IMAGE}", "packages"} and copied
    assert all(line.split()[1] in ("--from=packages", "--from=project") for line in copied)
    assert sum(line.startswith("ARG PYTHON_IMAGE=") for line in lines) == 1
    last = (IMAGES / name).read_text().split("\nFROM ")[-1]
    (user,) = [line.split()[1] for line in last.splitlines() if line.startswith("USER ")]
    uid, gid = user.split(":")
    assert int(uid) > 0 and gid == "0"


def test_the_build_context_is_what_the_images_copy() -> None:
    """The context holds the sources of the COPY lines alone: no history, environment, test or secret."""
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    let_in = {line.removeprefix("!") for line in rest if line.startswith("!")}
    copied = {source for path in IMAGES.glob("Containerfile.*") for line in path.read_text().splitlines()
              if line.startswith("COPY ") and "--from" not in line for source in shlex.split(line)[1:-1]}  # fmt: skip
    assert first == "*" and "**/__pycache__" in rest
    assert all(any(source == one or source.startswith(f"{one}/") for one in let_in) for source in copied), copied
    assert not [one for one in let_in if one.split("/")[0] in (".git", ".venv", ".cache", "tests", "reports")]


def test_both_images_are_built_from_every_package(tmp_path: Path) -> None:
    """A package, or a file next to the packages, that is added to the wheel is added to the images."""
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in ("agent", "finetune"):
        copied = (IMAGES / f"Containerfile.{name}").read_text()
        assert [p for p in packages["packages"] if f"COPY {p} /src/{p}\n" not in copied] == []
        words = {word for line in copied.splitlines() if line.startswith("COPY ") for word in line.split()}
        assert set(packages["force-include"]) - words == set()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is."""
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))))


def test_what_the_wheel_carries(wheel: Path) -> None:
    """Of each package the mark that it is typed; the definition; what a shell and man(1) look for below the prefix."""
    with zipfile.ZipFile(wheel) as inside:
        names = set(inside.namelist())
        definition = yaml.safe_load(inside.read("agent/data/nodetopology-crd.yaml"))
        values = json.loads(inside.read("agent/data/chart-values.schema.json"))
        pages = {name: inside.read(f"agent/checks/pages/{name}.md") for name in PAGES}
    assert definition["kind"] == "CustomResourceDefinition" and values["type"] == "object"
    assert pages == {name: (ROOT / f"docs/reference/{name}.md").read_bytes() for name in pages}, "what `explain` reads"
    for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"{package}/py.typed" in names
    shared = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    assert shared == {
        "share/man/man1/topoflight.1", "share/bash-completion/completions/topoflight",
        "share/zsh/site-functions/_topoflight", "share/fish/vendor_completions.d/topoflight.fish",
    }  # fmt: skip
    version = PROJECT["project"]["version"]
    assert wheel.name == f"topoflight-{version}-py3-none-any.whl"


@pytest.mark.long
def test_the_wheel_starts_by_name_from_a_file(wheel: Path, tmp_path: Path) -> None:
    """As `uvx --from FILE topoflight` has it: in a separate environment, which sees the packages of this one."""
    venv.create(tmp_path / "own", symlinks=True)
    python = tmp_path / "own/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=300)
    packages = "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    (next((tmp_path / "own/lib").glob("python*/site-packages")) / "these.pth").write_text(packages)
    command = str(tmp_path / "own/bin/topoflight")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for words, said in ((["--version"], f"version {PROJECT['project']['version']}"),
                        (["explain", "rdma.port.down"], "rdma.port.down")):  # fmt: skip
        done = subprocess.run([command, *words], capture_output=True, text=True, cwd=tmp_path, env=clean, check=True)
        assert said in done.stdout
    asked = {**clean, "_TOPOFLIGHT_COMPLETE": "bash_complete", "COMP_WORDS": "topoflight rec", "COMP_CWORD": "1"}
    done = subprocess.run([command], capture_output=True, text=True, cwd=tmp_path, env=asked, check=False)
    assert done.stdout.split() == ["plain,recommend"]
    assert (tmp_path / "own/share/man/man1/topoflight.1").exists()


def test_golden_man_page() -> None:
    """What `make golden` writes anew from the verbs."""
    place = ROOT / "agent/data/topoflight.1"
    if os.environ.get("TOPOFLIGHT_UPDATE_GOLDEN"):
        place.write_text(man_page.page(), encoding="utf-8")
    text = place.read_text(encoding="utf-8")
    assert text == man_page.page(), "make golden"
    known = (r"TH|SH|SS|TP|PP", r"\\&", r"\\fB")
    for line in text.splitlines():
        assert not line.startswith((".", "'")) or re.match(rf"\.({known[0]})\b", line), f"roff would take it: {line}"
