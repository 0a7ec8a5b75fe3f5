"""The tables in data/: variables that NCCL reads, corrections of wrong names, and settings that platforms publish.

Specification: `data/nccl_env_names.tsv`, from NCCL's source up to 2.30.7 and from the published libraries
(bench/nccl_names.py); `data/plugin_env_names.tsv` for the variables of plugins; `data/platforms.toml` for environments
that cloud providers and vendors publish, with a source per row.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

from contracts.tables import read_table

_DATA = Path(__file__).with_name("data")

Version = tuple[int, int, int]
Status = Literal["current", "removed", "other"]


class NcclName(NamedTuple):
    """One variable: its reader, and the releases that read it."""

    name: str
    status: Status
    first: Version | None  # None: 2.3.5 or earlier
    last: Version | None  # None: the newest release still reads it
    doc_class: str  # "system", "debugging", "internal"; "" if other software reads it
    kind: str  # "integer" (strtoll, base 0), "text"; "" if unknown
    default: str
    reader: str  # source file in NCCL, or other software


# Set by the launcher; Kubeflow Trainer's webhook rejects a TrainJob that sets one (pkg/apply, reserved names).
RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def parse_version(text: str) -> Version:
    """Parse a release to a tuple: "2.21.5+cuda12.4" becomes (2, 21, 5); missing parts become 0."""
    release = re.split(r"[+-]|\.post", text.strip().lstrip("v"))[0]
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){0,3}", release):
        raise ValueError(f"NCCL version {text!r}: must look like 2.21.5")
    first, second, third, *_ = (*map(int, release.split(".")), 0, 0, 0)
    return first, second, third


def version_text(version: Version) -> str:
    """Format a release as NCCL prints it."""
    return ".".join(str(part) for part in version)


def _read_rows(file: str) -> list[str]:
    """Return the rows of a table in data/ without comments."""
    lines = (_DATA / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@cache
def torch_names() -> frozenset[str]:
    """Return the TORCH_NCCL_ variables that PyTorch reads."""
    return frozenset(_read_rows("torch_nccl_names.txt"))


@cache
def names() -> Mapping[str, NcclName]:
    """Return every known variable by name."""
    table: dict[str, NcclName] = {}
    for row in _read_rows("nccl_env_names.tsv"):
        name, status, *releases, doc_class, kind, default, reader = row.split("\t")
        first, last = (parse_version(each) if each else None for each in releases)
        table[name] = NcclName(name, cast("Status", status), first, last, doc_class, kind, default, reader)
    return MappingProxyType(table)


@cache
def newest_read() -> Version:
    """Return the newest release in the table. A newer NCCL may read variables that are not in it."""
    text = (_DATA / "nccl_env_names.tsv").read_text(encoding="utf-8")
    return parse_version(text.partition("\n# newest: ")[2].partition("\n")[0])


class PluginName(NamedTuple):
    """A variable that a plugin or other software reads; with `prefix`, a family of variables."""

    plugin: str
    name: str
    prefix: bool
    reader: str
    source: str


@cache
def plugin_names() -> tuple[PluginName, ...]:
    """Return the table by plugin; full names come before prefixes."""
    rows = [
        PluginName(plugin, name.rstrip("*"), name.endswith("*"), reader, source)
        for plugin, name, reader, source in (row.split("\t") for row in _read_rows("plugin_env_names.tsv"))
    ]
    return tuple(sorted(rows, key=lambda each: (each.prefix, -len(each.name))))


def find_plugin_of(name: str) -> PluginName | None:
    """Return the plugin that reads a variable; None if there is none."""
    return next(
        (each for each in plugin_names() if name == each.name or (each.prefix and name.startswith(each.name))), None
    )


def is_read(name: str) -> bool:
    """Whether NCCL, PyTorch or a plugin reads the variable, and not only scripts."""
    entry, plugin = names().get(name), find_plugin_of(name)
    of_build = re.search(r"_(?:VERSION|HOME|PREFIX|REPO|BRANCH|TAG|URL|COMMIT)\Z", name)
    by_plugin = plugin is not None and plugin.plugin not in ("build", "nccl-tests") and not (plugin.prefix and of_build)
    return entry.status == "current" if entry else by_plugin or name in torch_names()


@cache
def nearest(name: str) -> tuple[str, ...]:
    """Return known names that differ from `name` by a typing error, best first; empty if there are none.

    Nine of ten letters agree. A different word (TIMEOUT for IFNAME) means a different variable.
    """
    known = read_table(__file__, "data/right_names.toml")["known_wrong"].get(name)
    if known is not None:
        return tuple(known)
    if right := with_right_prefix(name):
        return (right,)
    if f"TORCH_{name}" in torch_names():
        return (f"TORCH_{name}",)
    of_nccl = (current for current, entry in names().items() if entry.status != "removed")
    live = sorted(torch_names() if name.startswith("TORCH_NCCL_") else of_nccl)
    return tuple(difflib.get_close_matches(name, live, n=2, cutoff=0.9))


def with_right_prefix(name: str) -> str:
    """Return the known name if `name` has a typing error in its prefix, as NCC_DEBUG and TOCH_NCCL_X; "" otherwise.

    Other libraries have the same names after their own prefix (RCCL_, HCCL_, CCL_), which never starts with N.
    """
    match = re.fullmatch(r"(?:(T\w{2,5})_)?(N[A-Z]{1,4})_(\w+)", name)
    if match is None:
        return ""
    pairs = ((match[1] or "TORCH", "TORCH"), (match[2], "NCCL"))
    if any(difflib.SequenceMatcher(None, *pair).ratio() < 0.75 for pair in pairs):  # more than one letter differs
        return ""
    right = f"{'TORCH_' if match[1] else ''}NCCL_{match[3]}"
    return right if right != name and (right in names() or right in torch_names()) else ""


def replacement(name: str) -> str | None:
    """Return the variable that replaces a removed one."""
    new: str | None = read_table(__file__, "data/right_names.toml")["replaced_by"].get(name)
    return new


# Settings that platforms publish.


class Recipe(NamedTuple):
    """Settings published by one source."""

    source: str  # its name, and the date of the revision that was used
    values: Mapping[str, str]
    set: frozenset[str]  # recommended without change on a recognised platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One row of the table: facts that identify the platform, and its recipes."""

    name: str
    cloud: str | None = None
    product: str | None = None
    gpu: str | None = None
    fabric: str | None = None
    nics: int = 0
    amd: bool = False
    recognised: bool = True
    recipes: tuple[Recipe, ...] = ()
    script: tuple[str, ...] = ()  # scripts of the vendor to source before the job; the first existing one is used
    library: tuple[str, ...] = ()  # libraries of the plugin
    plugin: str = ""
    machine: str | None = None
    catalogue: tuple[str, ...] = ()  # names for --machine

    def values(self) -> dict[str, tuple[str, Recipe]]:
        """Every published variable with its recipe."""
        return {name: (value, recipe) for recipe in self.recipes for name, value in recipe.values.items()}


@cache
def platforms() -> tuple[Platform, ...]:
    """Read the table of platforms."""
    data = read_table(__file__, "data/platforms.toml")
    sources = {name: f"{row['name']}, {row['date']}" for name, row in data["source"].items()}
    recipes = {
        name: Recipe(sources[row["source"]], row["values"], frozenset(row.get("set", ())))
        for name, row in data["recipe"].items()
    }
    rows = []
    for row in data["platform"]:
        lists = {key: tuple(row.get(key, ())) for key in ("script", "library", "catalogue")}
        rows.append(Platform(**{**row, **lists, "recipes": tuple(recipes[name] for name in row["recipes"])}))
    return tuple(rows)


def find_platform(environment: Mapping[str, str]) -> Platform | None:
    """Return the platform whose network plugin an environment configures, from variable families that only it reads.

    Of several platforms with this plugin, the one with whose published values most of the environment agrees.
    """

    def families(names: Iterable[str]) -> set[str]:
        return {each.plugin for name in names if (each := find_plugin_of(name)) is not None and each.prefix}

    configured, net = families(environment), environment.get("NCCL_NET")
    rows = [row for row in platforms() if (row.fabric == "cxi" and "Slingshot" in configured) or (row.plugin and (
        configured & families(row.values()) or (net and net == row.values().get("NCCL_NET", ("",))[0])))]  # fmt: skip
    return max(
        rows, key=lambda row: sum(environment.get(n) == value[0] for n, value in row.values().items()), default=None
    )
