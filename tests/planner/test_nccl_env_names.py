"""The table of names, and how settings are written for other tools."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from planner.advice import Reason, Setting
from planner.env_render import RenderError, k8s_env, render_env, render_json, render_k8s, render_shell, render_yaml
from planner.nccl_names import FAMILIES, NEWEST_READ, names, nearest, parse_version, replacement

REASON = Reason(rule="because", evidence="seen", source="read")


def setting(name: str, value: str) -> Setting:
    """A setting with some reason."""
    return Setting(name=name, value=value, reason=REASON)


AWKWARD = [setting("NCCL_NET", "AWS Libfabric"), setting("NCCL_IB_TC", "106"), setting("NCCL_IB_HCA", "=mlx5_1,mlx5_2")]


def test_table_is_whole() -> None:
    """Every row is read, the well-known names are there, and release ranges make sense."""
    table = names()
    assert len(table) > 340
    assert {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_CROSS_NIC", "NCCL_ALGO"} <= set(table)
    for entry in table.values():
        assert entry.first is None or entry.last is None or entry.first <= entry.last, entry
        assert entry.first is None or entry.first <= NEWEST_READ, entry
        assert (entry.status == "removed") == (entry.last is not None), entry
        assert entry.kind in ("integer", "text", ""), entry
        assert (entry.status == "other") == (entry.doc_class == ""), entry


def test_replacements_exist_and_families_are_prefixes() -> None:
    """What is named instead of a removed name is a name NCCL reads."""
    for entry in names().values():
        new = replacement(entry.name)
        if new is not None:
            assert entry.status == "removed"
            assert names()[new].status == "current"
    assert all(prefix.startswith("NCCL_") for prefix in FAMILIES)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("NCCL_IB_HBA", "NCCL_IB_HCA"),
        ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
        ("NCCL_SOCKET_IF_NAME", "NCCL_SOCKET_IFNAME"),
        ("NCCL_MAX_CHANNELS", "NCCL_MAX_CTAS"),
        ("NCCL_NET_GDR_ENABLE", "NCCL_NET_GDR_LEVEL"),
        ("NCCL_IB_GIDINDEX", "NCCL_IB_GID_INDEX"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLNG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ],
)
def test_nearest_name(wrong: str, right: str) -> None:
    """The name that was meant comes first."""
    assert nearest(wrong)[0] == right


def test_nothing_is_guessed_for_a_name_like_no_other() -> None:
    """A far guess would mislead."""
    assert nearest("NCCL_MY_OWN_SWITCH") == ()


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.21.5+cuda12.4", (2, 21, 5)), ("2.27.7", (2, 27, 7)), ("v2.30.7-1", (2, 30, 7)), ("2.21", (2, 21, 0))],
)
def test_parse_version(text: str, version: tuple[int, int, int]) -> None:
    """As NCCL and its tags print it."""
    assert parse_version(text) == version


def test_parse_version_names_the_bad_text() -> None:
    """The message carries the text."""
    with pytest.raises(ValueError, match="banana"):
        parse_version("banana")


def test_env_file_is_what_docker_reads() -> None:
    """No quotes: docker hands on all that follows the first '='."""
    pairs = dict(line.split("=", 1) for line in render_env(AWKWARD).splitlines() if not line.startswith("#"))
    assert pairs == {"NCCL_NET": "AWS Libfabric", "NCCL_IB_TC": "106", "NCCL_IB_HCA": "=mlx5_1,mlx5_2"}


def test_shell_survives_a_shell() -> None:
    """sh itself reads back the same values, the space included."""
    script = render_shell(AWKWARD) + 'printf "%s|%s|%s" "$NCCL_NET" "$NCCL_IB_TC" "$NCCL_IB_HCA"\n'
    done = subprocess.run(["/bin/sh", "-eu", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "AWS Libfabric|106|=mlx5_1,mlx5_2"


def test_k8s_values_are_strings() -> None:
    """The API server refuses a number as the value of an EnvVar."""
    read = yaml.safe_load(render_k8s(AWKWARD))
    assert read == k8s_env(AWKWARD)
    assert all(isinstance(entry["value"], str) for entry in read)


def test_json_and_yaml_carry_the_reasons() -> None:
    """Both say the same."""
    as_json = json.loads(render_json(AWKWARD))
    assert as_json == yaml.safe_load(render_yaml(AWKWARD))
    assert as_json["settings"][0]["reason"] == {"rule": "because", "evidence": "seen", "source": "read"}


def test_nothing_to_set_is_valid_text() -> None:
    """Empty advice renders to something that each reader takes."""
    assert render_env([]).startswith("#") and render_shell([]).startswith("#")
    assert yaml.safe_load(render_k8s([])) == []


@pytest.mark.parametrize("bad", [setting("PET_NNODES", "2"), setting("A B", "1"), setting("NCCL_NET", "a\nB=c")])
def test_what_no_format_can_carry_is_refused(bad: Setting) -> None:
    """Reserved names, names that are none, and line breaks that would smuggle in a second setting."""
    for render in (render_env, render_shell, render_k8s):
        with pytest.raises(RenderError, match=bad.name.split()[0]):
            render([bad])
