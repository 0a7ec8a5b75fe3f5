"""What every test shares: the corpus, the recordings, goldens, and the rule that CI skips nothing installable."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings
from rigs.tables import PYPROJECT, corpus_folder, hold_file

ROOT = Path(__file__).parent.parent
MACHINES = Path(__file__).parent / "machines"
GOLDEN = Path(__file__).parent / "golden"
# hardware, data and 290 MB of packages that a CI machine need not have
MAY_SKIP_IN_CI = {"gpu", "corpus", "triton"}

# no test asks a hub on the network; those of the stand-in hub say so in their own environment
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples in every run, however slow the machine: what searches for new ones is bench/fuzz.py.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

PYTEST = PYPROJECT["tool"]["pytest"]["ini_options"]
TIERS = {line.partition(":")[0] for line in PYTEST["markers"]} - {"corpus", "triton"}  # those are in every tier
# Files that take half a minute or more start first, those that mostly wait before those that compute: one that started
# last would run while the other workers are idle.
SLOW = """
train real_prometheus images softroce slurm_cluster search_hosts why_runs bench_hosts bench_slow_networks finetune_pods
finetune_equivalence trl_trainer finetune_hub input_bounds finetune_loading page_in_browser lint_forms compare_networks
bench_ends slurm_texts hostile_clients costly_questions forecast_calibration paths_and_tokens run_post
finetune_traced finetune_memory wrap_verb drills bench_measures rendered_answers finetune_resume finetune_survival
evidence_scale model_weights
"""
LONGEST = [f"test_{name}.py" for name in SLOW.split()]


@cache
def tiers_of(path: Path) -> set[str]:
    """The tiers' marks that a file may give: those in its text."""
    text = path.read_text(encoding="utf-8")
    return {name for name in TIERS if f"mark.{name}" in text}


@cache
def tiers_of_all(path: Path) -> set[str]:
    """The tiers' marks that every test of a file has: those in its `pytestmark`."""
    found = re.search(r"^pytestmark = (\[.*?\]|[^\n]*)", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {name for name in TIERS if found and f"mark.{name}" in found[1]}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file none of whose tests `-m` can select: a tier of 80 tests need not collect nine thousand."""
    words = config.option.markexpr
    if not words or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    asked = {name for name in re.findall(r"\w+", words) if name not in ("and", "or", "not")}
    if not asked <= set(TIERS):
        return None
    chosen, has = Expression.compile(words), tiers_of_all(collection_path)
    may = sorted((tiers_of(collection_path) & asked) - has)
    sets = ({*has, *some} for count in range(len(may) + 1) for some in combinations(may, count))
    return None if any(chosen.evaluate(lambda name, some=some, **_: name in some) for some in sets) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mark that a file's text does not show would take its test out of its tier: that is an error. Orders files."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    for item in items:
        if hidden := {mark.name for mark in item.iter_markers()}.intersection(TIERS) - tiers_of(item.path):
            raise pytest.UsageError(f"{item.nodeid}: its marks {sorted(hidden)} are nowhere in its file's text")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests that import torch have a mark: without one each worker of `make test` would take seconds to import it."""
    marks = [TIERS.intersection(mark.name for mark in item.iter_markers()) for item in session.items]
    if "torch" in sys.modules and set() in marks and all("real" in each for each in marks if each):
        raise pytest.UsageError("a file with a test without a mark imports torch: import it in tests that are `long`")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI a skipped test is a failed one, unless what it needs cannot be installed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    excused = MAY_SKIP_IN_CI.intersection(mark.name for mark in item.iter_markers())
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true" and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {report.longrepr}"


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The folder of real data; the test is skipped where it is not there."""
    return corpus_folder()


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """The ranks of this file are forked from a server that has imported torch (tests/rigs/forking), not started."""
    from rigs.forking import forking_environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forking_environment())
        yield


@pytest.fixture
def golden() -> Callable[..., None]:
    """Compare a value with tests/golden/<name>; TOPOFLIGHT_UPDATE_GOLDEN=1 rewrites it.

    With `digest` the file holds the document's SHA-256 alone: long documents that follow from others which are stored
    whole. `make golden-documents OUT=DIR` writes them out, before a change and after it, for diff -r.
    """

    def compare(name: str, value, *, digest: bool = False) -> None:
        text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True) + "\n"
        path = GOLDEN / name
        if digest:
            if folder := os.environ.get("TOPOFLIGHT_GOLDEN_DOCUMENTS"):
                whole = Path(folder) / name
                whole.parent.mkdir(parents=True, exist_ok=True)
                whole.write_text(text, encoding="utf-8")
            path = path.with_name(f"{path.name}.sha256")
            text = hashlib.sha256(text.encode()).hexdigest() + "\n"
        hold_file(path, text, "compare make golden-documents before and after" if digest else "read the difference")

    return compare


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system of a given size; returns its folder. Skips where mounting is not allowed, as without root."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: str) -> Path:
        words = ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk)
        mounted = subprocess.run(words, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"mount is not allowed here: {mounted.stderr.strip()}")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "--lazy", disk], check=True)  # the test's job may have a file open
