"""The environments that clouds and vendors publish for their platforms, as data/platforms.toml holds them.

Sources: data/platforms.toml, row by row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from planner.nccl_env.names import plugin_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a recipe is written, and the date of the revision that was read."""

    name: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one source publishes."""

    source: Source
    values: Mapping[str, str]
    set: frozenset[str] = frozenset()  # advised as they stand where the platform is recognised
    by: str = ""  # who sets them, where that is not the user


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One row: the facts that recognise it, and its recipes."""

    name: str
    cloud: str | None = None
    product: str | None = None
    gpu: str | None = None
    fabric: str | None = None
    nics: int = 0
    amd: bool = False
    recognised: bool = True
    recipes: tuple[Recipe, ...] = ()
    script: tuple[str, ...] = ()  # of the vendor, sourced before the job: the first that is there
    plugin: str = ""
    machine: str | None = None
    catalogue: tuple[str, ...] = ()  # names that --machine knows it by
    more: tuple[Source, ...] = field(default=())

    def values(self) -> dict[str, tuple[str, Recipe]]:
        """Every published variable with its recipe."""
        return {name: (value, recipe) for recipe in self.recipes for name, value in recipe.values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Platforms:
    """The whole table."""

    rows: tuple[Platform, ...]
    why: Mapping[str, str]  # variable -> why ours may differ from what is published


@cache
def platforms() -> Platforms:
    """The table as written."""
    data = tomllib.loads((Path(__file__).with_name("data") / "platforms.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**row) for name, row in data["source"].items()}
    recipes, more = {}, {}
    for name, row in data["recipe"].items():
        recipes[name] = Recipe(
            source=sources[row["source"]], values=row["values"], set=frozenset(row.get("set", ())), by=row.get("by", "")
        )
        more[name] = tuple(sources[each] for each in row.get("more", ()))
    rows = []
    for row in data["platform"]:
        named = row.pop("recipes")
        rows.append(
            Platform(
                **{**row, "script": tuple(row.get("script", ())), "catalogue": tuple(row.get("catalogue", ()))},
                recipes=tuple(recipes[name] for name in named),
                more=tuple(source for name in named for source in more[name]),
            )
        )
    return Platforms(rows=tuple(rows), why=data["why"])


def platform_of_plugin(environment: Mapping[str, str]) -> Platform | None:
    """The platform whose vendor's network plugin an environment configures: by a family of names that only it reads."""

    def families(names: Iterable[str]) -> set[str]:
        return {each.plugin for name in names if (each := plugin_of(name)) is not None and each.prefix}

    configured, net = families(environment), environment.get("NCCL_NET")
    for row in platforms().rows:
        published = row.values()
        if row.plugin and (configured & families(published) or (net and net == published.get("NCCL_NET", ("",))[0])):
            return row
    return None
