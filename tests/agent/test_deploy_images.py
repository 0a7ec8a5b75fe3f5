"""The images' files as text, and their build step on a host; tests/images builds and runs them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.tables import each_row

ROOT = Path(__file__).parent.parent.parent
IMAGES = ROOT / "deploy/images"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_install_gives_a_host_without_containers_an_agent_without_torch(tmp_path: Path) -> None:
    """The images' step on a host: the verbs answer from the new prefix, torch and what installs are not in it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    prefix = tmp_path / "opt"
    done = subprocess.run(
        ["sh", IMAGES / "install.sh", prefix, "agent"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**clean, "PYTHON": sys.executable, "PYTHONNOUSERSITE": "1"}, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    code = (
        "import importlib.util as u, agent.http.server, agent.http.serve, agent.jobs.preflight, pathlib, sys\n"
        "assert str(pathlib.Path(agent.http.server.__file__)).startswith(sys.prefix), agent.http.server.__file__\n"
        "unwanted = 'torch', 'transformers', 'setuptools', 'pkg_resources', 'wheel', 'pip'\n"
        "assert not [n for n in unwanted if u.find_spec(n)], [n for n in unwanted if u.find_spec(n)]\n"
    )
    subprocess.run([prefix / "bin/python", "-c", code], cwd=tmp_path, env=clean, check=True, timeout=250)
    for words in (["--help"], ["preflight", "--list-checks"], ["explain", "rdma.port.down"]):
        subprocess.run([prefix / "bin/topoflight", *words], cwd=tmp_path, env=clean, check=True, timeout=250,
                       stdout=subprocess.DEVNULL)  # fmt: skip


@each_row("name", ["Containerfile.agent", "Containerfile.finetune"])
def test_one_digest_pins_every_stage(name: str) -> None:
    """No stage has a base of its own: what --build-arg PYTHON_IMAGE names is all that comes from a registry."""
    lines = (IMAGES / name).read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    copied = [line for line in lines if line.startswith("COPY --from=")]
    assert set(bases) == {"${PYTHON_IMAGE}", "packages"} and copied
    assert all(line.split()[1] in ("--from=packages", "--from=project") for line in copied)
    assert sum(line.startswith("ARG PYTHON_IMAGE=") for line in lines) == 1


@each_row("name", ["Containerfile.agent", "Containerfile.finetune"])
def test_images_run_as_a_number_that_is_not_root(name: str) -> None:
    """runAsNonRoot can check only a number; group 0 is what OpenShift's arbitrary users have."""
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
    """A package, or a file beside them, that is added to the wheel is added to the images."""
    import tomllib

    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in ("agent", "finetune"):
        copied = (IMAGES / f"Containerfile.{name}").read_text()
        assert [p for p in packages["packages"] if f"COPY {p} /src/{p}\n" not in copied] == []
        words = {word for line in copied.splitlines() if line.startswith("COPY ") for word in line.split()}
        assert set(packages["force-include"]) - words == set()
