"""KUBECONFIG with several files, merged as kubectl merges them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.cluster.access import AccessError, find


def config(path: Path, *, current: str | None = None, **entries: dict[str, dict[str, Any]]) -> Path:
    """A kubeconfig with these contexts, clusters and users by name."""
    kinds = {"contexts": "context", "clusters": "cluster", "users": "user"}
    whole: dict[str, Any] = {
        kind: [{"name": name, kinds[kind]: value} for name, value in entries[kind].items()] for kind in entries
    }
    if current is not None:
        whole["current-context"] = current
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(whole))
    return path


def several(*paths: Path) -> dict[str, str]:
    return {"KUBECONFIG": os.pathsep.join(map(str, paths)), "HOME": "/nonexistent"}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """The clusters and a user in one file; contexts, the user's namesake and a token file in another folder."""
    first = config(
        tmp_path / "one/config", current="",
        clusters={"lab": {"server": "http://lab:1"}}, users={"ann": {"token": "of the first"}},
    )  # fmt: skip
    second = config(
        tmp_path / "two/config", current="work",
        contexts={"work": {"cluster": "lab", "user": "ann", "namespace": "team"},
                  "home": {"cluster": "lab", "user": "bob"}},
        clusters={"lab": {"server": "http://other:2"}},
        users={"ann": {"token": "of the second"}, "bob": {"tokenFile": "secret"}},
    )  # fmt: skip
    (tmp_path / "two/secret").write_text("from a file beside it\n")
    return first, second


def test_the_first_file_that_has_a_name_wins(two: tuple[Path, Path]) -> None:
    """Cluster and user of the first, context and current context of the only one that sets them."""
    found = find(environment=several(*two))
    assert (found.server, found.token(), found.namespace) == ("http://lab:1", "of the first", "team")
    turned = find(environment=several(*reversed(two)))
    assert (turned.server, turned.token()) == ("http://other:2", "of the second")


def test_an_entry_is_taken_whole(tmp_path: Path, two: tuple[Path, Path]) -> None:
    """What the second file's entry of the same name has beside is not mixed in."""
    bare = config(tmp_path / "bare", users={"ann": {}})
    assert find(environment=several(bare, *two)).token() is None


def test_paths_are_relative_to_the_file_of_their_entry(two: tuple[Path, Path]) -> None:
    """The token file lies beside the second file."""
    assert find("home", several(*two)).token() == "from a file beside it"


def test_a_missing_file_is_left_out_and_a_broken_one_is_named(tmp_path: Path, two: tuple[Path, Path]) -> None:
    """As kubectl does; where none is there the first is named."""
    away = tmp_path / "away"
    assert find(environment=several(away, *two)).server == "http://lab:1"
    with pytest.raises(AccessError, match=f"{away}: .*No such file"):
        find(environment=several(away, tmp_path / "gone"))
    away.write_text("[1, 2]")
    with pytest.raises(AccessError, match=f"{away}: is no kubeconfig"):
        find(environment=several(*two, away))


def test_an_unknown_context_names_every_file(two: tuple[Path, Path]) -> None:
    """Whichever of them should have had it."""
    with pytest.raises(AccessError, match=f"{two[0]}{os.pathsep}{two[1]}: no context named 'x'"):
        find("x", several(*two))
