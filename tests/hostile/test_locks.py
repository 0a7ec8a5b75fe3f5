"""What is installed is what is locked, with hashes, and what pyproject.toml asks for."""

import re
import tomllib
from importlib import metadata

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rigs.tables import ROOT, each_row, rows_of

rows = rows_of(__file__)

LOCKS = ("agent", "finetune", "image", "dev", "build")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, Requirement]:
    """Every entry of a lock; each has at least one hash."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / f"locks/{name}.txt").read_text()):
        if entry.startswith("#"):
            continue
        head, *hashes = entry.replace("\\\n", "").split("--hash=")
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes), head
        requirement = Requirement(head.strip())
        found[canonicalize_name(requirement.name)] = requirement
    return found


def version(requirement: Requirement) -> str:
    (pin,) = requirement.specifier
    assert pin.operator == "=="
    return pin.version


def wanted_of(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [made for made in map(Requirement, lines) if canonicalize_name(made.name) not in ("topoflight", "torch")]


@each_row(("name", "extras"), rows("locks"))
def test_a_lock_holds_what_pyproject_asks_for(name: str, extras: tuple[str, ...]) -> None:
    """Every dependency is there, in a version that is allowed."""
    found = locked(name)
    for wanted in wanted_of(*extras):
        entry = found.get(canonicalize_name(wanted.name))
        assert entry is not None, f"{wanted.name}: make lock"
        assert wanted.specifier.contains(version(entry), prereleases=True), f"{wanted}: locked is {entry}: make lock"


def test_the_smaller_locks_are_parts_of_the_larger() -> None:
    """One package has one version."""
    agent, finetune, image, dev, build = (locked(name) for name in LOCKS)
    for part, whole in ((agent, finetune), (finetune, image), (image, dev), (build, dev)):
        assert {name: version(entry) for name, entry in part.items()}.items() <= {
            name: version(entry) for name, entry in whole.items()
        }.items()


def test_torch_is_pinned_by_version_and_not_by_hash() -> None:
    """Its file differs by machine: pyproject.toml names the version, the Makefile takes the same."""
    (pin,) = [line for line in PROJECT["optional-dependencies"]["bench"] if line.startswith("torch==")]
    older = "torch==2.11.0"  # of gpu-older, in a separate environment
    assert set(re.findall(r"torch==\S+", (ROOT / "Makefile").read_text())) == {pin, older}
    assert not any("torch" in locked(name) for name in LOCKS)
    needs = {
        canonicalize_name(Requirement(line).name) for line in metadata.requires("torch") or () if "extra ==" not in line
    }
    pure = {name for name in needs if not name.startswith(("nvidia-", "triton"))}
    assert pure <= set(locked("finetune")), "what torch needs: locks/torch-needs.in, then make lock"


def test_what_runs_here_is_what_is_locked() -> None:
    """The environment of these tests was installed from the lock."""
    wrong = {}
    for name, entry in locked("dev").items():
        if entry.marker is not None and not entry.marker.evaluate(dict(default_environment())):
            continue
        try:
            found = metadata.version(name).removeprefix("v")  # one package writes it so
        except metadata.PackageNotFoundError:
            found = "missing"
        if found != version(entry):
            wrong[name] = (found, version(entry))
    assert wrong == {}


def test_the_licences_and_the_sbom_are_of_the_agents_lock() -> None:
    """The page of licences is what `make sbom` would write now; the SBOM names every package with a purl and a hash."""
    import sys

    sys.path.insert(0, str(ROOT / "locks"))
    import inventory

    assert inventory.table() == (ROOT / "docs/reference/licences.md").read_text(encoding="utf-8"), "make sbom"
    bom = inventory.sbom()
    made = bom["components"]
    assert len(made) > 20
    named = [one["bom-ref"] for one in made]
    assert len({*named, bom["metadata"]["component"]["bom-ref"]}) == len(named) + 1  # what its specification asks for
    assert [one["dependsOn"] for one in bom["dependencies"]] == [named]
    assert all(one["purl"].startswith("pkg:pypi/") and one["properties"] for one in made)
