"""The table of names, and how settings are written for other tools."""

import subprocess
from datetime import UTC, date, datetime
from pathlib import Path

import nccl_names
import pytest
import yaml
from rigs.tables import each_row, rows_of

from planner import nccl_env
from planner.nccl_env import names, nearest, newest_read, parse_version, plugin_names, plugin_of, replacement
from planner.nccl_env.environment import FORMATS, RenderError, render_settings
from planner.nccl_env.situation import Reason, Setting

rows = rows_of(__file__)

REASON = Reason(rule="because", evidence="seen", source="read")


def setting(name: str, value: str) -> Setting:
    """A setting with some reason."""
    return Setting(name=name, value=value, reason=REASON)


AWKWARD = [setting("NCCL_NET", "AWS Libfabric"), setting("NCCL_IB_TC", "106"), setting("NCCL_IB_HCA", "=mlx5_1,mlx5_2")]


def test_table_is_whole() -> None:
    """Every row is read, the well-known names are there, and release ranges make sense."""
    table = names()
    assert len(table) > 310
    assert {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_CROSS_NIC", "NCCL_ALGO"} <= set(table)
    for entry in table.values():
        assert entry.first is None or entry.last is None or entry.first <= entry.last, entry
        assert entry.first is None or entry.first <= newest_read(), entry
        assert (entry.status == "removed") == (entry.last is not None), entry
        assert entry.kind in ("integer", "text", ""), entry
        assert (entry.status == "other") == (entry.doc_class == ""), entry


def test_replacements_exist_and_each_plugin_says_who_reads_its_names() -> None:
    """What is named instead of a removed name NCCL reads; no name of libnccl itself is given to a plugin."""
    replaced = {entry.name: replacement(entry.name) for entry in names().values()}
    assert all(names()[old].status == "removed" and names()[new].status == "current"
               for old, new in replaced.items() if new is not None)  # fmt: skip
    plugins = {each.plugin for each in plugin_names()}
    assert plugins >= {"aws-ofi-nccl", "GPUDirect-TCPX", "GPUDirect-TCPXO", "gIB", "SHARP", "UCX", "RCCL", "Spectrum-X",
                       "Inspector", "profiler"}  # fmt: skip
    assert all(each.reader and each.source for each in plugin_names())
    assert [name for name, entry in names().items() if entry.status == "current" and plugin_of(name)] == []


@each_row(("name", "plugin"), rows("plugins"))
def test_plugin_of(name: str, plugin: str) -> None:
    """Names of plugins come first."""
    found = plugin_of(name)
    assert found is not None and found.plugin == plugin


def test_releases_are_as_their_libraries_read_them() -> None:
    """What 2.31 and 2.32 brought, and what they read no more (bench/nccl_names.py)."""
    table = names()
    assert newest_read() >= (2, 32, 3)
    assert table["NCCL_RUN_DIAGNOSTICS"].first == (2, 31, 2)
    assert table["NCCL_IB_PKEY_VALUE"].first == (2, 31, 2)
    assert (table["NCCL_IB_RAIL_POLICY"].first, table["NCCL_IB_RAIL_POLICY"].kind) == ((2, 32, 3), "text")
    assert (table["NCCL_DIAGNOSTICS_ECC_THRESHOLD"].kind, table["NCCL_RUN_DIAGNOSTICS"].default) == ("integer", "0")
    assert table["NCCL_MLOPART_RDMA_ENABLE"].last == (2, 31, 2)


@each_row(("wrong", "right"), rows("meant"))
def test_the_name_that_was_meant_comes_first(wrong: str, right: str | None) -> None:
    assert next(iter(nearest(wrong)), None) == right


def test_parse_version() -> None:
    """As NCCL, its tags and rebuilt wheels print it; the message carries a text that is none, and 2.99.1 is newer."""
    texts = {"2.21.5+cuda12.4": (2, 21, 5), "2.27.7": (2, 27, 7), "v2.30.7-1": (2, 30, 7), "2.21": (2, 21, 0),
             "2.26.2.post1": (2, 26, 2)}  # fmt: skip
    assert {text: parse_version(text) for text in texts} == texts
    with pytest.raises(ValueError, match="banana"):
        parse_version("banana")
    assert parse_version("2.99.1") > newest_read()


def test_each_format_is_what_its_reader_takes() -> None:
    """Docker hands on all that follows the first '='; the API server refuses a number as the value of an EnvVar."""
    lines = render_settings(AWKWARD, "env").splitlines()
    pairs = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert pairs == {"NCCL_NET": "AWS Libfabric", "NCCL_IB_TC": "106", "NCCL_IB_HCA": "=mlx5_1,mlx5_2"}
    read = yaml.safe_load(render_settings(AWKWARD, "k8s"))
    assert read == [{"name": each.name, "value": each.value} for each in AWKWARD]
    assert all(isinstance(entry["value"], str) for entry in read)
    assert all(render_settings([], form).startswith("#") for form in ("env", "shell"))
    assert yaml.safe_load(render_settings([], "k8s")) == []


def test_what_no_format_can_carry_is_refused() -> None:
    """A line break would smuggle in a second setting."""
    for form in FORMATS:
        with pytest.raises(RenderError, match="NCCL_NET"):
            render_settings([setting("NCCL_NET", "a\nB=c")], form)


# NCCL's minor releases came every 2 to 4 months from 2.18 (April 2023) to 2.32 (September 2026): a table of half a year
# lacks one or two.
OLDEST_DAYS = 183


@pytest.mark.long
def test_no_newer_release_is_out_than_the_table_knows() -> None:
    """Asked of pip's index where it answers, else the table's own date decides; `bench/nccl_names.py` fixes it."""
    try:
        found = [each for package in nccl_names.PACKAGES for each in nccl_names.releases_on_index(package)]
        published = [parse_version(each) for each in found]
    except (OSError, subprocess.SubprocessError):
        published = []
    if published:
        assert max(published) <= newest_read(), "python bench/nccl_names.py read, then table"
    else:
        table = Path(nccl_env.__file__).with_name("data") / "nccl_env_names.tsv"
        stamp = table.read_text(encoding="utf-8").partition("\n# read on: ")[2][:10]
        age = (datetime.now(UTC).date() - date.fromisoformat(stamp)).days
        assert age <= OLDEST_DAYS, f"the table is {age} days old, and no index tells whether a release is out"
