"""docs/explanation/architecture.md shows the imports that the code really has."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent.parent
PACKAGES = tuple(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
)


def real_arrows() -> set[tuple[str, str]]:
    """(package, imported package) of every import statement, those inside functions too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found = ((name, other) for name in graph.modules for other in graph.find_modules_directly_imported_by(name))
    return {pair for a, b in found if (pair := (a.split(".")[0], b.split(".")[0])) and pair[0] != pair[1]}


def test_the_pictures_arrows_are_the_real_imports() -> None:
    """An import without an arrow, or an arrow without an import, is a page that lies."""
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    drawn = set(re.findall(r"^\s+(\w+) --> (\w+)$", page, re.MULTILINE))
    assert drawn == real_arrows()


def test_every_package_resolves_under_the_repository_and_shadows_nothing() -> None:
    """No package and no module of one has the name of a standard library module it could hide."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        assert Path(spec.origin).resolve() == (ROOT / package / "__init__.py").resolve()
        assert package not in sys.stdlib_module_names


def test_no_module_has_a_stem_that_says_nothing() -> None:
    """Names of the field, not of a drawer."""
    empty = {"utils", "common", "helper", "helpers", "manager", "base", "core", "misc"}
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.stem in empty]
    assert not found
