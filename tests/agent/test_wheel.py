"""The wheel: started by name from a file, with completion, man page, schemas and the typing marks inside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from agent.checks.explain import PAGES

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

import man_page  # noqa: E402 - found through the line above


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
    """As `uvx --from FILE topoflight` has it: in an environment of its own, which sees the packages of this one."""
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
